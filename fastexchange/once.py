"""What a process has one of, made when it is first asked for, by whichever thread."""

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Decorator: `make` runs once, and every caller gets its result. Others wait; should it raise, the next caller tries."""
    lock = threading.RLock()
    made: list[T] = []

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get
