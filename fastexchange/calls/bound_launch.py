"""``kernel.bind``: a launch whose arguments are fixed, and cost nothing any more."""

import ctypes
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.bound_launch import let_go, let_kept_escape, pin_arguments, take
from ..dispatch.runtime import runtime
from ..dispatch.signature import numba_types
from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.native import address_of
from ..ground.parameters import flatten
from ..ground.safe_repr import type_name
from .compile_errors import raise_named
from .fallback import as_numba_takes_it
from .resolve import Resolver

__all__ = ["BoundLaunch", "BoundLaunchBase", "OrdinaryLaunch", "bind"]


def bind(kernel, bound: tuple) -> "BoundLaunch":
    """A launch with these arguments, in parameter order and complete."""
    return (BoundLaunch if kernel._native.runtime.is_native else OrdinaryLaunch)(kernel, bound)


class BoundLaunchBase(NativeCallable):
    """What bound launches for the CPU and for CUDA share. A subclass has ``_held``, ``_caller``, ``_hold`` and ``_take``."""

    __slots__ = ("__dict__", "__weakref__")
    kernel: Any

    @property
    def arguments(self) -> tuple:
        return self._held.bound

    @property
    def _what(self) -> str:
        return f"{self.kernel.__qualname__}()"

    def __repr__(self):
        return f"<{self._caller!r} bound to {', '.join(type_name(type(value)) for value in self.arguments) or 'nothing'}>"

    def __reduce__(self):
        raise TypeError("a bound launch holds memory of this process: it cannot be pickled or copied; pickle the kernel")

    def rebind(self, /, **arguments):
        """Replace arguments, by name, with others of the same Numba types. Returns the launch itself.

        Raises TypeError for a name that is no parameter, and for an argument of another type, layout or readonly state, and
        what binding it raises; then the launch is as before. On the CPU, RuntimeError while a call of it is running, and
        ValueError for inputs that do not fit the declared outputs any more: replace those too, None allocates. On CUDA other
        threads may be launching it: what has begun, and what has been launched, keeps the arguments that it had.
        """
        names = self.kernel._parameters.names
        unknown = [name for name in arguments if name not in names]
        if unknown:
            raise TypeError(f"{self._what}: rebind() got {unknown[0]!r}, which is no parameter; it has {', '.join(names)}")
        while True:
            before = self._held
            new = tuple(arguments.get(name, value) for name, value in zip(names, before.bound, strict=False))
            held = self._hold(new + before.bound[len(names) :])
            if held.overload != before.overload:
                given = ", ".join(f"{name}={type_name(type(value))}" for name, value in arguments.items())
                now, then = (self.kernel._native.types_of(overload) for overload in (held.overload, before.overload))
                raise TypeError(f"{self._what}: rebind({given}) would be another signature, {now} instead of {then}; bind anew")
            if self._take(before, held):
                return self
            if before is self._held:  # else another thread has rebound it meanwhile
                raise RuntimeError(f"{self._what}: rebind() while a call of this launch is running")

    def _check(self, args: tuple, kwargs: dict) -> None:
        """Raise TypeError for a call with arguments."""
        if args or kwargs:
            raise TypeError(
                f"{self._what}: a bound launch takes no arguments, {len(args) + len(kwargs)} given; rebind(name=…) replaces one"
            )


class BoundLaunch(BoundLaunchBase):
    """A call of a kernel with fixed arguments. Made by ``kernel.bind(...)``; calling it, without arguments, makes the call.

    Ownership: it holds an owning export of every tensor, and the arguments themselves, so their memory lives as long as it
    does, or as an array that the kernel has kept. What later becomes of a tensor does not concern it: after ``set_()``,
    ``x.data = …`` or ``t_()`` it goes on with the memory and the shape that it was bound to, and ``rebind()`` reads the tensor
    anew. The storage of a PyTorch tensor can no longer be resized, as after ``tensor.numpy()``: a RuntimeError of ``resize_()``
    says so; NumPy refuses ``resize``, also with ``refcheck=False``. What is refused for its state (a tensor that requires grad …)
    is refused when it is bound, and not looked at again. Scalars have the values that they had.

    Memory that moves all the same is noticed: that of a PyTorch storage by ``share_memory_()`` (and with it by a queue of
    ``torch.multiprocessing``, or ``model.share_memory()``) or by copy-on-write (``torch._lazy_clone()``), that of an ndarray by
    ``__setstate__()``, that of an object of ctypes by ``ctypes.resize()``; so is an ndarray's new shape, dtype or strides.
    Then the next call is an ordinary one, which reads the arguments anew and may refuse one. The launch is then bound to them
    as they are, or, where that is another signature, all its further calls are ordinary ones. Where PyTorch's layout is not as
    expected all calls with its tensors are.

    What is not noticed is memory that moves under a tensor which itself goes on showing the old: under a view of an ndarray
    that is given other memory, a tensor that PyTorch has made of one (also by ``resize(refcheck=False)``), a ``memoryview`` of an
    object of ctypes; and under ``tensor.numpy()``, or what ``from_dlpack`` has made of a PyTorch tensor, when that gets other
    memory by ``share_memory_()``. No call with such a tensor is right: make it, and the launch, anew.

    A list is what it was when it was bound: what Python does to it later is not seen before it is bound anew.

    Where native code makes no calls, and of kernels under ``NUMBA_DISABLE_JIT``, each call is an ordinary one, with the tensors
    as they are then, and ``rebind`` takes arguments of any type.

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

    __slots__ = ()

    def __init__(self, kernel, bound: tuple):
        held = _Held(kernel, bound)
        self.kernel = kernel
        self._holder: list[Any] = [held]  # with _context, which `take` changes in the same step, all that rebinding changes
        self._context = address_of(held.native)
        self._vectorcall = kernel._native.bound_entry(held.overload)

    @property
    def _held(self) -> "_Held":
        return self._holder[0]

    _caller = property(lambda self: self.kernel)

    def _hold(self, bound: tuple):
        return type(self._held)(self.kernel, self.kernel._complete(bound))

    def _take(self, before: "_Held", held: "_Held") -> bool:
        """Hold these arguments in place of those, in one step: Ctrl-C may come between any two. False if that cannot be done."""
        return bool(_TAKE(take.address)(self, self._holder, before, held, address_of(held.native)))

    def _call_slowly(self, /, *args, **kwargs):
        self._check(args, kwargs)
        held = self._held
        is_running = held.native.state == structs.BOUND_RUNNING
        result = self.kernel._call_bound(held.bound)
        if not is_running:
            self._follow(held)
        return result

    def _follow(self, before: "_Held") -> None:
        """Hold the arguments as they are now: memory has moved, or the kernel has changed a list."""
        watched = before.native.watched
        if before.is_other or (watched and ffi.cast("int64_t *", watched)[1] == watched):  # that always differs
            return
        try:
            held = _Held(self.kernel, before.bound)
        except Exception:  # the next ordinary call says it, or finds the argument as it was
            return
        if held.overload == before.overload:
            self._take(before, held)
        else:
            before.is_other = True


enable_vectorcall(BoundLaunch)

# With the GIL, which ctypes' PYFUNCTYPE keeps.
_TAKE = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, *[ctypes.py_object] * 4, ctypes.c_void_p)


class _Held:
    """A frame and all that it holds, until this object dies: the launch has it, and every array that the kernel has kept."""

    is_other = False
    """Whether the arguments have become those of another signature: further calls are ordinary ones."""

    def __init__(self, kernel, bound: tuple):
        self.pointers = ffi.new("intptr_t[]", [id(value) for value in bound] or [0])
        # NumPy does not resize an array that is weakly referenced, not even with refcheck=False.
        self.references = [weakref.ref(array) for array in _owners(bound)]
        runtime().add(let_go, let_kept_escape)
        report = Resolver(kernel, bound, pin_arguments).run()
        if report.status != structs.STATUS_OK:
            if kernel._is_for_device_kernel(bound, report.status == structs.STATUS_DEVICE):
                raise TypeError(
                    f"{kernel.__qualname__}(): tensors on a GPU are bound with a launch configuration: "
                    f"{kernel.__qualname__}.cuda[grid, block].bind(...)"
                )
            raise_named(kernel, bound, as_numba_takes_it)
            if report.unmade is not None:  # Numba says why it cannot compile it, if so
                serials = kernel._native.runtime.serials
                given = numba_types(report.unmade[0], kernel._parameters.defaults, serials, kernel._element_of)
                kernel.compile(tuple(given))
            raise TypeError(
                f"{kernel.__qualname__}(): these arguments cannot be bound, because Numba's own dispatcher makes such "
                "calls; explain() says which argument is the reason"
            )
        self.capsule, (address, self.overload) = report.result, report.held
        frame = ffi.cast("fx_frame *", address)
        frame.holder = id(self)
        self.bound, self.kernel = bound, kernel
        self.outputs = kernel._outputs.of(bound) if kernel._outputs is not None else None
        self.name = sys.intern("_call_slowly")
        native = self.native = ffi.new("fx_bound *")
        native.context, native.frame, native.overload = kernel._native.address, address, self.overload
        native.args, native.words, native.watched = address_of(self.pointers), frame.words, frame.watched
        native.outputs = id(self.outputs) if self.outputs is not None else 0
        native.slow_name = id(self.name)


class OrdinaryLaunch(BoundLaunch):
    """A launch where native code makes no calls. It makes ordinary ones, which see tensors as they are then."""

    __slots__ = ()

    def __init__(self, kernel, bound: tuple):
        self.kernel = kernel
        self._holder = [_Unheld(kernel, bound)]

    def __call__(self, /, *args, **kwargs):
        self._check(args, kwargs)
        return self.kernel._call_bound(self.arguments)

    def _take(self, before, held) -> bool:
        self._holder[0] = held
        return True


class _Unheld:
    """The arguments of such a launch."""

    overload = 0

    def __init__(self, kernel, bound: tuple):
        self.bound = bound


def _owners(bound: tuple) -> Iterator[np.ndarray]:
    """The ndarrays among arguments, in tuples and lists, and those whose memory they show. Runs no code of their classes."""
    for argument in bound:
        for _, value in flatten(0, argument):
            while issubclass(type(value), np.ndarray):
                yield value
                value = np.ndarray.base.__get__(value)
