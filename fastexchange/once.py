"""What a process has one of, made when it is first asked for, by whichever thread, and never freed.

Native code holds pointers into it, and may run until the very end: a deleter is called when all modules have been cleared.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def for_ever(thing: T) -> T:
    """`thing`, which from now on outlives the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Decorator: `make` runs once, and every caller gets its result. Others wait; should it raise, the next caller tries."""
    lock = threading.RLock()
    made: list[T] = []

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(for_ever(make()))
        return made[0]

    return get
