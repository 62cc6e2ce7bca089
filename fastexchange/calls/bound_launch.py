"""``kernel.bind`` and ``kernel[grid, block].bind``: calls that keep their arguments."""

import sys
from types import GenericAlias
from typing import Any

from .._abi import ffi
from ..dispatch.runtime import runtime
from ..dispatch.vectorcall_bound import vectorcall_bound
from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.native import address_of
from ..ground.omitted import Omitted
from ..ground.once import forkable_lock
from ..ground.safe_repr import type_name

__all__ = ["BoundCudaLaunch", "BoundLaunch"]

_rebinding = forkable_lock()


class BoundLaunch(NativeCallable):
    """A call of a kernel with fixed arguments. Made by ``kernel.bind(...)``; calling it, without arguments, makes the call.

    Ownership: the launch holds a reference to each argument, and nothing else. Each call is an ordinary one: it reads the tensors
    as they are then, checks them, and raises what the kernel called with them raises.

    If the kernel declares outputs (``fast_args(out=…)``), omitted outputs are allocated when it is bound, and each call returns
    them. They are NumPy arrays if the framework cannot allocate.

    Attributes
    ----------
    kernel : the kernel.
    arguments : the arguments, in the order of its parameters.
    """

    __slots__ = ("__dict__", "__weakref__")
    __class_getitem__: Any = classmethod(GenericAlias)  # for annotations: the kernel's result

    def __init__(self, kernel, args: tuple, kwargs: dict, launcher=None):
        self.kernel = kernel
        self._callable = kernel if launcher is None else launcher
        self._alive: list[_Arguments] = []
        self._keep(kernel._complete(kernel._parameters.bind(*args, **kwargs)))
        if runtime().is_native:
            self._vectorcall = vectorcall_bound.address

    def _keep(self, arguments: tuple) -> None:
        kept = _Arguments(self._callable, self.kernel._parameters, arguments)
        with _rebinding:
            self._alive = [*self._alive, kept]  # Ctrl-C may come at any step: both live until it is done
            self._context = kept.address  # in one step: other threads may call
            self._alive = [kept]

    @property
    def _arguments(self) -> "_Arguments":
        while True:  # another thread may rebind at the same time
            address = self._context
            for each in self._alive:
                if each.address == address:
                    return each

    @property
    def arguments(self) -> tuple:
        return self._arguments.in_order

    def __call__(self, /, *args, **kwargs):
        """Make the call where native code does not."""
        if args or kwargs:
            return self._refuse(*args, **kwargs)
        arguments = self._arguments
        return self._callable(*arguments.positional, **arguments.named)

    def _refuse(self, /, *args, **kwargs):
        raise TypeError(
            f"{self.kernel.__qualname__}(): a bound launch takes no arguments, {len(args) + len(kwargs)} given; "
            "rebind(name=…) replaces one"
        )

    def __repr__(self):
        return f"<{self._callable!r} bound to {', '.join(type_name(type(value)) for value in self.arguments) or 'nothing'}>"

    def __reduce__(self):
        raise TypeError("a bound launch is not pickled or copied: pickle the kernel and the arguments, and bind it again")

    def rebind(self, /, **arguments):
        """Replace arguments, by name. Returns the launch itself. None for an output allocates it.

        Raises TypeError for a name that is no parameter, and ValueError for inputs that do not fit the declared outputs that the
        launch has (replace those too). After an error the launch has the arguments that it had. A call that has begun keeps those
        with which it began.
        """
        names = self.kernel._parameters.names
        unknown = [name for name in arguments if name not in names]
        if unknown:
            raise TypeError(
                f"{self.kernel.__qualname__}(): rebind() got {unknown[0]!r}, which is no parameter; it has {', '.join(names)}"
            )
        before = self.arguments
        new = tuple(arguments.get(name, value) for name, value in zip(names, before, strict=False))
        self._keep(self.kernel._complete(new + before[len(names) :]))
        return self


class BoundCudaLaunch(BoundLaunch):
    """A launch with fixed arguments, made by ``kernel[grid, block].bind(...)``. Calling it without any launches the kernel.

    As :class:`BoundLaunch`: each launch reads its tensors, and asks for their stream, as any other.

    Attributes
    ----------
    launcher : the :class:`~fastexchange.cuda.launcher.CudaLauncher`.
    """

    __slots__ = ()

    @property
    def launcher(self):
        return self._callable


class _Arguments:
    """The arguments of a bound launch, as a vectorcall gets them: defaults that were omitted still are."""

    def __init__(self, callable_: Any, parameters, bound: tuple):
        given = [(name, value) for name, value in zip(parameters.names, bound, strict=False) if not isinstance(value, Omitted)]
        count = 0  # of those in front, which go by position
        while count < min(len(given), parameters.positional) and given[count][0] == parameters.names[count]:
            count += 1
        self.in_order = bound
        self.positional = (*(value for _, value in given[:count]), *bound[len(parameters.names) :])
        self.named = dict(given[count:])
        self._pointers = ffi.new("intptr_t[]", [*map(id, self.positional), 0])
        self._refuse_name = sys.intern("_refuse")
        self._native = native = ffi.new("fx_bound *")
        native.arguments, native.callable, native.refuse_name = id(self), id(callable_), id(self._refuse_name)
        native.args, native.nargs = address_of(self._pointers), len(self.positional)
        native.kwargs = id(self.named) if self.named else 0
        self.address = address_of(native)


enable_vectorcall(BoundLaunch, BoundLaunch.__call__)
enable_vectorcall(BoundCudaLaunch, BoundLaunch.__call__)
