"""The pickle of a kernel: read once in a process, and written once while nothing of it changes.

Engines pickle a function with each task. A process that has the kernel finds it by the identity that Numba gives it.
"""

import copyreg
from typing import Any

from ..ground.numba_internals import dispatcher_of, dumps, loads, pickled_inside
from .dependencies import values_named

__all__ = ["Pickle", "unpickled"]


class _States:
    """What a pickle holds beside the kernel's identity: a class, and the arguments of its ``_rebuild``."""

    def __init__(self, cls: Any, arguments: tuple[tuple[str, Any], ...]):
        # A tuple, as a pickler refers to a dictionary before it is filled, and a function may name its own kernel.
        self._cls, self._arguments = cls, arguments
        self._data: bytes | None = None

    def rebuilt(self) -> Any:
        return self._cls._rebuild(**dict(self._arguments))

    def reduced(self) -> tuple:
        return _States, (self._cls, self._arguments)

    def as_bytes(self) -> tuple:
        if self._data is None:
            self._data = dumps(self)
        return _Unread, (self._data,)


class _Unread:
    """The same, as bytes."""

    def __init__(self, data: bytes):
        self._data = data

    def rebuilt(self) -> Any:
        return loads(self._data).rebuilt()


# Numba's pickler takes functions by value, and inside it all that a kernel names is one pickle: kernels may name each other.
pickled_inside(_States, _States.reduced)
copyreg.pickle(_States, _States.as_bytes)


class Pickle:
    """The last pickle of a kernel.

    It is used again if the same code goes with it, and each name that its function's code has leads to the same object. A pickle
    without code is made anew each time: the objects may have changed, and nothing is compiled with what they were.
    """

    def __init__(self) -> None:
        self._made_for: list = []
        self._states: Any = None

    def of(self, kernel, entries: dict[str, bytes]) -> tuple:
        """Return what ``__reduce__`` returns. `entries`: of code, by their names."""
        names = tuple(entries)
        made_for = [kernel._kernel_options, kernel._can_compile, kernel._is_cached, *names, *values_named(kernel.py_func)]
        is_same = len(made_for) == len(self._made_for) and all(
            one is other or (type(one) is str and one == other) for one, other in zip(made_for, self._made_for, strict=True)
        )
        if not (names and is_same):
            arguments = kernel._reduce_states() | {"carried": entries}
            self._states = _States(kernel._reduce_class(), tuple(arguments.items()))
            self._made_for = made_for
        return unpickled, (kernel._uuid, names, self._states)


def unpickled(identity: str, names: tuple[str, ...], states: Any) -> Any:
    """Return the kernel of a pickle."""
    known = dispatcher_of(identity)
    if known is not None and (not names or (hasattr(known, "_carried") and known._carried.has(names))):
        return known
    return states.rebuilt()
