"""The pickle of a kernel: read once in a process.

Engines pickle a function with each task. A process that has the kernel finds it by the identity that Numba gives it.
"""

import copyreg
from collections.abc import Callable
from typing import Any

from ..ground.numba_internals import dispatcher_of, dumps, global_compiler_lock, loads, pickled_inside

__all__ = ["reduced_kernel", "unpickled", "when_whole"]


class _States:
    """What a pickle holds beside the kernel's identity: a class, and the arguments of its ``_rebuild``."""

    def __init__(self, cls: Any, arguments: tuple[tuple[str, Any], ...]):
        # A tuple, as a pickler refers to a dictionary before it is filled, and a function may name its own kernel.
        self._cls, self._arguments = cls, arguments

    def rebuilt(self) -> Any:
        return self._cls._rebuild(**dict(self._arguments))

    def reduced(self) -> tuple:
        return _States, (self._cls, self._arguments)

    def as_bytes(self) -> tuple:
        return _Unread, (self._cls, dumps(self._arguments))


class _Unread:
    """The same, with the arguments as bytes."""

    def __init__(self, cls: Any, data: bytes):
        self._cls, self._data = cls, data

    def rebuilt(self) -> Any:
        return _States(self._cls, loads(self._data)).rebuilt()


# Numba's pickler takes functions by value, and inside it all that a kernel names is one pickle: kernels may name each other.
pickled_inside(_States, _States.reduced)
copyreg.pickle(_States, _States.as_bytes)


def reduced_kernel(kernel, entries: dict[str, bytes]) -> tuple:
    """Return what ``__reduce__`` returns. `entries`: of machine code, by their names."""
    arguments = kernel._reduce_states() | {"carried": entries}
    return unpickled, (kernel._uuid, tuple(entries), _States(kernel._reduce_class(), tuple(arguments.items())))


def unpickled(identity: str, names: tuple[str, ...], states: Any) -> Any:
    """Return the kernel of a pickle."""
    if (known := _known(identity, names)) is not None:
        return known
    with global_compiler_lock:  # one thread makes it; and declared signatures are compiled
        if (known := _known(identity, names)) is not None:
            return known
        is_outermost = not _half_made
        _half_made.add(identity)
        try:
            made = states.rebuilt()
            while is_outermost and _to_do:  # now all that the kernels name is there: they may name each other
                _to_do.pop(0)()
            return made
        finally:
            if is_outermost:
                _half_made.clear()
                _to_do.clear()


_half_made: set[str] = set()
"""The identities of the kernels that a thread is making, which other threads must not find."""
_to_do: list[Callable[[], None]] = []


def when_whole(action: Callable[[], None]) -> None:
    """Do something with a kernel of a pickle when all that its function names has been read."""
    if _half_made:
        _to_do.append(action)
    else:
        action()


def _known(identity: str, names: tuple[str, ...]) -> Any:
    """The kernel of this identity, if it is there, whole, and has these entries; else None."""
    known: Any = None if identity in _half_made else dispatcher_of(identity)
    return known if not names or (hasattr(known, "_carried") and known._carried.has(names)) else None
