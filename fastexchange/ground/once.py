"""What a process has one of, and the locks under which it changes.

What is made once is made when it is first asked for, by whichever thread, and never freed: native code holds pointers into
it, and may run until the very end: a deleter is called when all modules have been cleared.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from .numba_internals import compiler_locks
from .pythonapi import Py_IncRef

T = TypeVar("T")


def for_ever(thing: T) -> T:
    """`thing`, which from now on outlives the interpreter."""
    Py_IncRef(thing)
    return thing


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Decorator: `make` runs once, and every caller gets its result. Others wait; should it raise, the next caller tries."""
    lock = forkable_lock()
    made: list[T] = []

    @functools.wraps(make)
    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(for_ever(make()))
        return made[0]

    return get


# ---- locks and forks -------------------------------------------------------------------------------------------------

FORK_WAITS = 30.0
"""Seconds for which a fork waits for other threads to finish what they are changing or compiling."""

_locks: dict[int, weakref.ref] = {}
_forking = threading.local()  # `held`: the locks that a thread has taken in order to fork


def forkable_lock():
    """A new reentrant lock that a forked child finds free, and what it guards complete.

    A child has one thread, the one that forked. A lock that another thread held in that moment would be held in the child
    for ever, in the middle of a change. So a fork takes all of these locks before, and lets go of them on both sides; and
    the locks of the compiler with them, else no child of a fork could compile again if another thread was compiling. (So forking
    may take as long as a compilation.)

    Threads take these locks in different orders: one of ours and, to compile, Numba's; or the other way round. So a fork does
    not wait for a lock while it holds others: it takes what is free, and where one is not, lets go of all and waits for that.
    Nor does it wait for ever, for who holds a lock may be waiting for the thread that forks: after :data:`FORK_WAITS` it does
    without. The child then makes our lock anew; each change is made such that it can break off between any two steps. The
    compiler's are left as they are after a fork without us.
    """
    lock = threading.RLock()
    address = id(lock)
    _locks[address] = weakref.ref(lock, lambda _reference, locks=_locks: locks.pop(address, None))
    return lock


def _our_locks() -> list[Any]:
    return [lock for lock in [reference() for reference in list(_locks.values())] if lock is not None]


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_WAITS
    held: list[Any] = []
    _forking.held = held  # now, and filled in place: Ctrl-C may end this at any moment
    given_up: set[int] = set()
    locks = compiler_locks() + _our_locks()
    while True:
        for late in locks:
            if id(late) in given_up:
                continue
            if not late.acquire(blocking=False):
                break
            held.append(late)
        else:
            return
        while held:
            held.pop().release()
        seconds = deadline - time.monotonic()
        if seconds > 0 and late.acquire(timeout=seconds):
            held.append(late)
        else:
            given_up.add(id(late))


def _after_fork() -> None:
    held = _forking.__dict__.pop("held", [])
    while held:
        held.pop().release()


def _after_fork_in_child() -> None:
    held = set(map(id, _forking.__dict__.get("held", ())))
    for lock in _our_locks():
        if id(lock) not in held:
            lock._at_fork_reinit()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
