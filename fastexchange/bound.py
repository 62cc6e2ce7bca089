"""``kernel.bind``: a launch whose arguments are fixed, and cost nothing any more."""

import contextlib
import ctypes
import functools
import sys
import weakref
from collections.abc import Iterator

import numpy as np

from ._abi import ffi
from .compile_errors import raise_named
from .cpython import NativeCallable, enable_vectorcall
from .dispatch import layout
from .dispatch.launch import claim, hold, let_go
from .dispatch.signature import numba_types
from .naming import type_name
from .native import address_of
from .numba_call import as_numba_takes_it
from .slow_path import call, settle

__all__ = ["BoundLaunch"]


class BoundLaunch(NativeCallable):
    """A call of a kernel with fixed arguments. Made by ``kernel.bind(...)``; calling it, without arguments, makes the call.

    Ownership: it holds an owning export of every tensor, and the arguments themselves, so their memory lives as long as it
    does, or as an array that the kernel has kept. What later becomes of a tensor does not concern it: after a ``set_()`` it
    goes on with the old memory. The storage of a PyTorch tensor can no longer be resized, as after ``tensor.numpy()``: a
    RuntimeError of ``resize_()`` says so; NumPy refuses ``resize``, also with ``refcheck=False``. What is refused for its state
    (a tensor that requires grad …) is refused when it is bound, and not looked at again. Scalars have the values that they had.

    Memory that moves all the same is noticed: that of a PyTorch storage by ``share_memory_()`` (and with it by a queue of
    ``torch.multiprocessing``, or ``model.share_memory()``) or by copy-on-write (``torch._lazy_clone()``), that of an ndarray by
    ``__setstate__()``; so is an ndarray's new shape. Then the next call reads the arguments anew, as a call of the kernel does,
    and may refuse one; the launch is bound to them as they are then, or, where that is another signature, all its further calls
    are ordinary ones. Where PyTorch's layout is not as expected all calls with its tensors are.

    One call at a time goes this way. One that is made during another, by another thread or by Python code that the kernel runs,
    is an ordinary call of the kernel with these arguments: it sees tensors as they are then. A kernel that changes a list itself
    gets in the next call what it has made of it, as the list in Python does; where that is no call of the same signature any
    more, all further calls are ordinary ones.

    Of a kernel that declares outputs (``fast_args(out=…)``) those that are not given are allocated when it is bound, and a call
    returns them; a framework that cannot allocate has NumPy's arrays here.

    Attributes
    ----------
    kernel : the kernel.
    arguments : the arguments, in the order of its parameters, as they were bound.
    """

    __slots__ = ("__dict__", "__weakref__")

    _held: "_Held | None" = None
    _outputs: object = None
    _kept: tuple = ()

    def __init__(self, kernel, bound: tuple):
        self.kernel = kernel
        self._what = f"{kernel.__qualname__}()"
        self._names = sys.intern("_call_slowly"), sys.intern("_renew")
        self._native = ffi.new("fx_bound *")
        self._native.context = kernel._native.address
        self._native.slow_name, self._native.renew_name = map(id, self._names)
        self._take(bound)
        self._context = address_of(self._native)
        self._vectorcall = kernel._native.bound_entry(self._native.overload)

    def __repr__(self):
        return f"<{self.kernel!r} bound to {', '.join(type_name(type(value)) for value in self.arguments) or 'nothing'}>"

    def __reduce__(self):
        raise TypeError("a bound launch holds memory of this process: it cannot be pickled or copied; pickle the kernel")

    def rebind(self, /, **arguments) -> "BoundLaunch":
        """Replace arguments, by name, with others of the same Numba types. Returns the launch itself.

        Raises TypeError for a name that is no parameter, and for an argument of another type, layout or readonly state, and
        what binding it raises; then the launch is as before. RuntimeError while a call of it is running. ValueError for inputs
        that do not fit the declared outputs any more: replace those too, None allocates.
        """
        names = self.kernel._parameters.names
        unknown = [name for name in arguments if name not in names]
        if unknown:
            raise TypeError(f"{self._what}: rebind() got {unknown[0]!r}, which is no parameter; it has {', '.join(names)}")
        new = tuple(arguments.get(name, value) for name, value in zip(names, self.arguments, strict=False))
        self._take(self.kernel._complete(new + self.arguments[len(names) :]), arguments)
        return self

    def _take(self, bound: tuple, replaced=()) -> None:
        """Hold these arguments instead of those held so far."""
        held = _Held(self.kernel, bound)
        if replaced and held.overload != self._native.overload:
            given = ", ".join(f"{name}={type_name(type(value))}" for name, value in replaced.items())
            now, before = (self.kernel._native.types_of(overload) for overload in (held.overload, self._native.overload))
            raise TypeError(f"{self._what}: rebind({given}) would be another signature, {now} instead of {before}; bind anew")
        if not self._native.is_stale and not _CLAIM(claim.address)(address_of(self._native)):
            raise RuntimeError(f"{self._what}: rebind() while a call of this launch is running")
        try:
            self._use(bound, held)
        finally:
            self._native.is_running = 0

    def _use(self, bound: tuple, held: "_Held") -> None:
        outputs = self.kernel._outputs.of(bound) if self.kernel._outputs is not None else None
        # Ctrl-C may come between any two steps: whichever is used then has to live
        self._kept = self._held, held, self._outputs, outputs
        frame = ffi.cast("fx_frame *", held.frame)
        self._native.watched = address_of(_NEVER)  # other threads may call it meanwhile
        self._native.frame, self._native.overload, self._native.args = held.frame, held.overload, address_of(held.pointers)
        self._native.words = frame.words
        self._native.outputs = id(outputs) if outputs is not None else 0
        self.arguments, self._held, self._outputs = bound, held, outputs
        self._kept = ()
        self._native.is_stale = 0
        self._native.watched = frame.watched

    def _renew(self) -> None:
        """Called by native code in a call whose kernel has changed a list: from now on it has those items, if it can."""
        with contextlib.suppress(Exception):
            held = _Held(self.kernel, self.arguments)
            if held.overload == self._native.overload:
                self._use(self.arguments, held)

    def _call_slowly(self, /, *args, **kwargs):
        if args or kwargs:
            raise TypeError(
                f"{self._what}: a bound launch takes no arguments, {len(args) + len(kwargs)} given; rebind(name=…) replaces one"
            )
        if not self._native.is_stale and _CLAIM(claim.address)(address_of(self._native)):  # none is running: memory has moved
            try:
                self._follow()
            finally:
                if not self._native.is_stale:
                    self._native.is_running = 0
        return self._call(self.arguments)

    def _follow(self) -> None:
        """Hold the arguments as they are now. If they fit another signature, further calls are ordinary ones."""
        if self._native.watched and ffi.cast("int64_t *", self._native.watched)[1] == self._native.watched:
            return  # it always differs
        try:
            held = _Held(self.kernel, self.arguments)
        except Exception:  # the ordinary call says it; the next one may find the argument as it was
            return
        if held.overload == self._native.overload:
            self._use(self.arguments, held)
        else:
            self._native.is_stale = 1

    def _call(self, bound: tuple):
        """An ordinary call."""
        outputs = self.kernel._outputs
        if outputs is None:
            return call(self.kernel, bound)
        return outputs.call(bound, self.kernel.returns, functools.partial(call, self.kernel))


enable_vectorcall(BoundLaunch)

_NEVER = ffi.new("int64_t[5]")
"""A watch list that never holds: in its own first word would have to be -1."""
_NEVER[0], _NEVER[1], _NEVER[2], _NEVER[3], _NEVER[4] = 2, address_of(_NEVER), -1, address_of(_NEVER), -1


# With the GIL, which ctypes' PYFUNCTYPE keeps.
_CLAIM = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p)
_LET_GO = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class _Held:
    """A frame and all that it holds, until this object dies: the launch has it, and every array that the kernel has kept."""

    def __init__(self, kernel, bound: tuple):
        self.frame = 0
        self.bound = bound
        self.kernel = kernel
        if not kernel._native.runtime.is_native:
            raise TypeError(
                f"{kernel.__qualname__}(): nothing can be bound here, Numba's own dispatcher makes all calls; call the kernel "
                "itself (`python -m fastexchange doctor` says why)"
            )
        self.pointers = ffi.new("intptr_t[]", [id(value) for value in bound] or [0])
        # NumPy does not resize an array that is weakly referenced, not even with refcheck=False.
        self.references = [weakref.ref(array) for array in _owners(bound)]
        report = settle(kernel, bound, hold)
        if report.status != layout.STATUS_OK:
            if kernel._is_elsewhere(bound, report.status == layout.STATUS_DEVICE):
                raise TypeError(
                    f"{kernel.__qualname__}(): tensors on a GPU are bound with a launch configuration: "
                    f"{kernel.__qualname__}.cuda[grid, block].bind(...)"
                )
            raise_named(kernel, bound, as_numba_takes_it)
            if report.unmade is not None:  # Numba says why it cannot compile it, if so
                serials = kernel._native.runtime.serials
                given = numba_types(report.unmade[0], kernel._parameters.defaults, serials, kernel._element_of)
                kernel.dispatcher.compile(tuple(given))
            raise TypeError(
                f"{kernel.__qualname__}(): these arguments cannot be bound, Numba's own dispatcher makes such calls; explain() "
                "says because of which"
            )
        self.frame, self.overload = report.held
        ffi.cast("fx_frame *", self.frame).holder = id(self)

    def __del__(self, is_finalizing=sys.is_finalizing):
        if self.frame and not is_finalizing():
            _LET_GO(let_go.address)(self.kernel._native.runtime.address, self.frame)


def _owners(value) -> Iterator[np.ndarray]:
    """The ndarrays among arguments, in tuples and lists, and those whose memory they show. Runs no code of their classes."""
    if issubclass(type(value), tuple) or type(value) is list:
        for item in (tuple if type(value) is not list else list).__iter__(value):
            yield from _owners(item)
    while issubclass(type(value), np.ndarray):
        yield value
        value = np.ndarray.base.__get__(value)
