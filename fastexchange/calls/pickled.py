"""The pickle of a kernel: read once in a process.

Engines pickle a function with each task. A process that has the kernel finds it by the identity that Numba gives it.
"""

import copyreg
import threading
from collections.abc import Callable
from typing import Any

from ..ground.numba_internals import (
    dispatcher_of,
    dumps,
    global_compiler_lock,
    identify,
    loads,
    make_known,
    pickled_inside,
)

__all__ = ["made_of", "reduced_kernel", "unpickled"]

_PACKAGE = __name__.partition(".")[0]


class _States:
    """What a pickle holds besides the kernel's identity: a class, and the arguments of its ``_rebuild``."""

    def __init__(self, cls: Any, arguments: tuple[tuple[str, Any], ...]):
        # A tuple, as a pickler refers to a dictionary before it is filled, and a function may name its own kernel.
        self._cls, self._arguments = cls, arguments

    def rebuilt(self) -> Any:
        return self._cls._rebuild(**dict(self._arguments))

    def reduced(self) -> tuple:
        return _States, (self._cls, self._arguments)

    def as_bytes(self) -> tuple:
        if self._cls.__module__.partition(".")[0] == _PACKAGE:  # every pickler finds it by its name, in less time
            return _Unread, (self._cls, dumps(self._arguments))
        return _Unread, (None, dumps(self))


class _Unread:
    """The same as bytes: of the arguments, or of all if `cls` is None."""

    def __init__(self, cls: Any, data: bytes):
        self._cls, self._data = cls, data

    def rebuilt(self) -> Any:
        read = loads(self._data)
        return (read if self._cls is None else _States(self._cls, read)).rebuilt()


# Numba's pickler takes functions by value, and inside it all that a kernel names is one pickle: kernels may name each other.
pickled_inside(_States, _States.reduced)
copyreg.pickle(_States, _States.as_bytes)


def reduced_kernel(kernel, entries: dict[str, bytes]) -> tuple:
    """Return what ``__reduce__`` returns. `entries`: of machine code, by their names."""
    arguments = kernel._reduce_states() | {"carried": entries}
    return unpickled, (kernel._uuid, tuple(entries), _States(kernel._reduce_class(), tuple(arguments.items())))


class _Reading(threading.local):
    """The kernels that this thread is unpickling. They are not complete yet, and no other thread finds them."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] | None = None  # by identity; None: it reads no pickle
        self.to_do: list[Callable[[], None]] = []
        """What completes kernels, when all that the outermost one names has been read: they may name each other."""


_reading = _Reading()


def unpickled(identity: str, names: tuple[str, ...], states: Any) -> Any:
    """Return the kernel of a pickle."""
    known = _found(identity)
    return known if known is not None and _has(known, names) else _read(states.rebuilt, identity, names)


def made_of(identity: str, make: Callable[[], Any], complete: Callable[[Any, bool], None]) -> Any:
    """Return the kernel of this identity, or ``make()`` it. ``complete(kernel, is_new)`` is called when all has been read."""
    if _reading.kernels is None:
        return _read(lambda: made_of(identity, make, complete), identity, ())
    made = _found(identity)
    is_new = made is None
    if is_new:
        made = _reading.kernels[identity] = make()
        identify(made, identity)
    _reading.to_do.append(lambda: complete(made, is_new))
    return made


def _read(rebuilt: Callable[[], Any], identity: str, names: tuple[str, ...]) -> Any:
    """Make a kernel, and all that it names. Threads that read it at the same time get the one that is whole first.

    No lock is held before all has been read: reading imports modules, and what a module compiles when another thread imports it
    needs Numba's lock.
    """
    if _reading.kernels is not None:
        return rebuilt()
    try:
        _reading.kernels, _reading.to_do = {}, []
        made = rebuilt()
        with global_compiler_lock:
            known = dispatcher_of(identity)
            if known is not None and known is not made and _has(known, names):
                return known
            while _reading.to_do:
                _reading.to_do.pop(0)()
            for each, kernel in _reading.kernels.items():
                if dispatcher_of(each) is None:
                    make_known(kernel)
        return made
    finally:
        _reading.kernels, _reading.to_do = None, []


def _found(identity: str) -> Any:
    """The kernel of this identity, if this thread finds it; else None."""
    made = None if _reading.kernels is None else _reading.kernels.get(identity)
    return made if made is not None else dispatcher_of(identity)


def _has(kernel: Any, names: tuple[str, ...]) -> bool:
    """Whether a kernel has these entries. A dispatcher of Numba's own has none."""
    return not names or (hasattr(kernel, "_carried") and kernel._carried.has(names))
