"""``kernel.bind``: a launch whose arguments are read once, when it is made."""

import ctypes
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.bound_launch import let_go, let_kept_escape, pin_arguments, replace_frame
from ..dispatch.runtime import runtime
from ..dispatch.signature import numba_types
from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.native import address_of
from ..ground.numba_internals import can_compile
from ..ground.parameters import flatten
from ..ground.safe_repr import type_name
from ..producers import torch_offsets
from ..producers.torch import is_tensor
from .compile_errors import not_declared, raise_named
from .fallback import as_numba_takes_it
from .resolve import Resolver, as_declared, declared_signature_for

__all__ = ["BoundLaunch", "BoundLaunchBase", "OrdinaryLaunch", "bind"]


def bind(kernel, bound: tuple) -> "BoundLaunch":
    """Return a launch with these arguments, which are complete and in parameter order."""
    if not kernel._native.runtime.is_native:
        return OrdinaryLaunch(kernel, bound)
    try:
        return BoundLaunch(kernel, bound)
    except TypeError:
        if _is_verified(bound):
            raise
        return OrdinaryLaunch(kernel, bound)  # elsewhere they may be bound; what is wrong with them is raised by each call


def _is_verified(bound: tuple) -> bool:
    """Whether all is verified with which native code reads these arguments."""
    if runtime().unverified:
        return False
    has_tensor = any(is_tensor(value) for i, item in enumerate(bound) for _, value in flatten(i, item))
    return not has_tensor or torch_offsets.guard().can_ask


class BoundLaunchBase(NativeCallable):
    """Base of bound launches for the CPU and for CUDA. A subclass has ``_pinned``, ``_caller``, ``_pin`` and ``_replace``."""

    __slots__ = ("__dict__", "__weakref__")
    kernel: Any

    @property
    def arguments(self) -> tuple:
        return self._pinned.bound

    @property
    def _what(self) -> str:
        return f"{self.kernel.__qualname__}()"

    def __repr__(self):
        return f"<{self._caller!r} bound to {', '.join(type_name(type(value)) for value in self.arguments) or 'nothing'}>"

    def __reduce__(self):
        raise TypeError("a bound launch holds memory of this process: it cannot be pickled or copied; pickle the kernel")

    def rebind(self, /, **arguments):
        """Replace arguments, by name, with others of the same Numba types. Returns the launch itself.

        Raises TypeError for a name that is no parameter, and for an argument of another type, layout or readonly state; and all
        errors that binding the arguments raises. On the CPU also RuntimeError while a call of this launch is running, and
        ValueError for inputs that no longer fit the declared outputs (replace those too; None allocates them). After an error
        the launch has the arguments that it had.

        On CUDA other threads may be launching it: a launch that has begun keeps the arguments with which it began.
        """
        names = self.kernel._parameters.names
        unknown = [name for name in arguments if name not in names]
        if unknown:
            raise TypeError(f"{self._what}: rebind() got {unknown[0]!r}, which is no parameter; it has {', '.join(names)}")
        while True:
            before = self._pinned
            new = tuple(arguments.get(name, value) for name, value in zip(names, before.bound, strict=False))
            pinned = self._pin(new + before.bound[len(names) :])
            if pinned.overload != before.overload:
                given = ", ".join(f"{name}={type_name(type(value))}" for name, value in arguments.items())
                why = f"would be another signature, {pinned.types} instead of {before.types}"
                if pinned.types == before.types:
                    why = "is not possible: the kernel's machine code has been replaced since (for example by recompile())"
                raise TypeError(f"{self._what}: rebind({given}) {why}; bind anew")
            if self._replace(before, pinned):
                return self
            if before is self._pinned:  # otherwise another thread has rebound it meanwhile: try again
                raise RuntimeError(f"{self._what}: rebind() while a call of this launch is running")

    def _check(self, args: tuple, kwargs: dict) -> None:
        """Raise TypeError for a call with arguments."""
        if args or kwargs:
            raise TypeError(
                f"{self._what}: a bound launch takes no arguments, {len(args) + len(kwargs)} given; rebind(name=…) replaces one"
            )


class BoundLaunch(BoundLaunchBase):
    """A call of a kernel with fixed arguments. Made by ``kernel.bind(...)``; calling it, without arguments, makes the call.

    Ownership: the launch holds its arguments and an owning export of every tensor. Their memory lives as long as the launch, or
    as an array that the kernel has kept.

    **Changes that have no effect.** After ``set_()``, ``x.data = …`` or ``t_()`` the launch still uses the memory and the shape
    to which it was bound; ``rebind()`` reads the tensor again. A tensor's state (for example requiring grad) is checked only when
    it is bound. Scalars keep their values. A list keeps the items that it had.

    **Changes that are refused.** ``resize_()`` of a bound PyTorch tensor raises RuntimeError, as after ``tensor.numpy()``. NumPy
    refuses ``resize`` of a bound array, also with ``refcheck=False``.

    **Changes that are noticed.** Memory can move: that of a PyTorch storage by ``share_memory_()`` (which
    ``torch.multiprocessing`` and ``model.share_memory()`` call) or by copy-on-write (``torch._lazy_clone()``), that of an
    ndarray by ``__setstate__()``, that of a ctypes object by ``ctypes.resize()``. An ndarray can also get another shape, dtype
    or strides. The next call is then an ordinary one, which reads the arguments again and may refuse one. Afterwards the launch
    is bound to the arguments as they are; if they have another signature, all later calls are ordinary ones. Where PyTorch's
    layout is not as expected, all calls with its tensors are ordinary ones.

    **Changes that cannot be noticed.** A tensor dangles if it views memory that its owner has exchanged: a view of an ndarray
    after ``__setstate__()`` or ``resize(refcheck=False)``, also one that PyTorch has made; a ``memoryview`` of a ctypes object
    after ``ctypes.resize()``; the result of ``tensor.numpy()`` or ``from_dlpack(tensor)`` after ``tensor.share_memory_()``. No
    call with such a tensor is valid: make the tensor again, and bind it.

    One call at a time uses the bound memory. A call during another one, by another thread or by Python code that the kernel runs,
    is an ordinary call with the same arguments. If the kernel changes a list itself, the next call gets the changed list; if that
    has another signature, all later calls are ordinary ones.

    If the kernel declares outputs (``fast_args(out=…)``), omitted outputs are allocated when it is bound, and each call returns
    them. They are NumPy arrays if the framework cannot allocate.

    Without native calls, and under ``NUMBA_DISABLE_JIT``, each call is an ordinary one, which reads the tensors as they are then,
    and ``rebind`` takes arguments of any type.

    Attributes
    ----------
    kernel : the kernel.
    arguments : the arguments, in the order of its parameters, as they were bound.
    """

    __slots__ = ()

    def __init__(self, kernel, bound: tuple):
        pinned = _PinnedArguments(kernel, bound)
        self.kernel = kernel
        self._holder: list[Any] = [pinned]  # `replace_frame` changes it and _context in one step
        self._context = address_of(pinned.native)
        self._vectorcall = kernel._native.bound_entry(pinned.overload)

    @property
    def _pinned(self) -> "_PinnedArguments":
        return self._holder[0]

    _caller = property(lambda self: self.kernel)

    def _pin(self, bound: tuple):
        return type(self._pinned)(self.kernel, self.kernel._complete(bound))

    def _replace(self, before: "_PinnedArguments", pinned: "_PinnedArguments") -> bool:
        """Replace the arguments in one step, because Ctrl-C may come between two. Returns False if that cannot be done."""
        return bool(_REPLACE(replace_frame.address)(self, self._holder, before, pinned, address_of(pinned.native)))

    def _call_slowly(self, /, *args, **kwargs):
        self._check(args, kwargs)
        pinned = self._pinned
        is_running = pinned.native.state == structs.BOUND_RUNNING
        result = self.kernel._call_bound(pinned.bound)
        if not is_running:
            self._follow(pinned)
        return result

    def _follow(self, before: "_PinnedArguments") -> None:
        """Bind the launch to its arguments as they are now: memory has moved, or the kernel has changed a list."""
        watched = before.native.watched
        if before.is_of_another_signature or (watched and ffi.cast("int64_t *", watched)[1] == watched):  # that always differs
            return
        try:
            pinned = _PinnedArguments(self.kernel, before.bound)
        except Exception:  # the next ordinary call raises it, or finds the argument as it was
            return
        if pinned.overload == before.overload:
            self._replace(before, pinned)
        else:
            before.is_of_another_signature = True


enable_vectorcall(BoundLaunch)

# With the GIL, which ctypes' PYFUNCTYPE keeps.
_REPLACE = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, *[ctypes.py_object] * 4, ctypes.c_void_p)


class _PinnedArguments:
    """Owns a frame with the arguments of a bound launch. The launch and all arrays that the kernel has kept refer to it."""

    is_of_another_signature = False
    """Whether the arguments now have another signature, so that later calls are ordinary ones."""

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
            if report.unmade is not None:  # raise the call's error, if it is no call that Numba could make
                serials = kernel._native.runtime.serials
                given = numba_types(report.unmade[0], kernel._parameters.defaults, serials, kernel._element_of)
                if can_compile(kernel):
                    kernel.compile(tuple(given))
                elif declared_signature_for(kernel, tuple(map(as_declared, given))) is None:
                    raise not_declared(kernel, given, f"{kernel.__qualname__}()")
            raise TypeError(
                f"{kernel.__qualname__}(): these arguments cannot be bound, because Numba's own dispatcher makes such "
                "calls; explain() tells why"
            )
        self.capsule, (address, self.overload) = report.result, report.pinned
        self.types = kernel._native.types_of(self.overload)
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
    """A launch without native code, or of what is not verified: ordinary calls, which read the tensors as they are then."""

    __slots__ = ()

    def __init__(self, kernel, bound: tuple):
        self.kernel = kernel
        self._holder = [_PlainArguments(kernel, bound)]

    def __call__(self, /, *args, **kwargs):
        self._check(args, kwargs)
        return self.kernel._call_bound(self.arguments)

    def _replace(self, before, pinned) -> bool:
        self._holder[0] = pinned
        return True


class _PlainArguments:
    """The arguments of an :class:`OrdinaryLaunch`."""

    overload = 0

    def __init__(self, kernel, bound: tuple):
        self.bound = bound


def _owners(bound: tuple) -> Iterator[np.ndarray]:
    """Yield the ndarrays among arguments, also in tuples and lists, and those that they view. Runs no code of their classes."""
    for argument in bound:
        for _, value in flatten(0, argument):
            while issubclass(type(value), np.ndarray):
                yield value
                value = np.ndarray.base.__get__(value)
