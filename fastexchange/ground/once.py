"""Objects that exist once per process, and the locks for their changes.

They are made on first access, by any thread, and never freed: native code has pointers to them, and may run until the very end,
for example in a deleter that is called after all modules have been cleared.
"""

import functools
import importlib._bootstrap
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .numba_internals import compiler_locks
from .pythonapi import Py_IncRef

T = TypeVar("T")


def for_ever(thing: T) -> T:
    """Return `thing`, and let it outlive the interpreter."""
    Py_IncRef(thing)
    return thing


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Decorator: `make` runs once, and all callers get its result; others wait. After an exception the next caller tries."""
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


class cached_property(Generic[T]):
    """Decorator: ``functools.cached_property`` without its lock, which before Python 3.12 a fork may leave held in the child.

    Threads may compute a value at the same time; all get the one that was stored first.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        return instance.__dict__.setdefault(self._name, self._function(instance))


# ---- locks and forks -------------------------------------------------------------------------------------------------

FORK_WAITS = 30.0
"""Seconds for which a fork waits until other threads have finished a change or a compilation."""

_locks: dict[int, weakref.ref] = {}
_forking = threading.local()  # `held`: the locks that a thread has taken for a fork


def forkable_lock():
    """Make a reentrant lock that is free in a forked child, with no change half done.

    A child has only the thread that forked. A lock that another thread held at the fork would be held in the child for ever, in
    the middle of a change. So a fork first takes all of these locks, and releases them in parent and child. It also takes the
    compiler's locks; otherwise the child could not compile if another thread was compiling. (So a fork may take as long as a
    compilation.)

    Threads take these locks in different orders: one of these and then Numba's to compile, or the reverse. So a fork does not
    wait for a lock while it holds others: if one is not free, it releases all and waits for that one. It does not wait for ever,
    because the lock's owner may wait for the forking thread: after :data:`FORK_WAITS` it forks without the lock. The child then
    makes the lock anew, and each change is safe to break off between any two steps. The compiler's locks stay as after any other
    fork.

    A fork also waits until no other thread is importing a module of this package, as first calls do: in the child the module's
    lock would be held for ever.
    """
    lock = threading.RLock()
    address = id(lock)
    _locks[address] = weakref.ref(lock, lambda _reference, locks=_locks: locks.pop(address, None))
    return lock


def _our_locks() -> list[Any]:
    return [lock for lock in [reference() for reference in list(_locks.values())] if lock is not None]


_PACKAGE = __name__.partition(".")[0]


def _is_imported_by_another() -> bool:
    """Whether another thread is importing a module of this package: it holds the module's lock (CPython 3.10 to 3.15)."""
    for name, reference in list(getattr(importlib._bootstrap, "_module_locks", {}).items()):
        if name.partition(".")[0] == _PACKAGE:
            owner = getattr(reference(), "owner", None)
            if owner is not None and owner != threading.get_ident():
                return True
    return False


def _before_fork() -> None:
    deadline = time.monotonic() + FORK_WAITS
    held: list[Any] = []
    _forking.held = held  # set first and filled in place: Ctrl-C may come at any moment
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
            if not _is_imported_by_another() or time.monotonic() >= deadline:
                return
            late = None
        while held:
            held.pop().release()
        if late is None:
            time.sleep(0.001)
            continue
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
