"""Failures that may pass: they tell nothing of the next try, so nothing is decided by them for good.

What catches any exception, and remembers what follows from it, calls :func:`reraise_passing` first. What is tried again counts
its failures in :class:`Retries`, so that a try that always fails does not cost every call.
"""

import errno
from collections.abc import Hashable

__all__ = ["Retries", "may_pass", "reraise_passing"]

_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""No more files, memory or threads, for now."""
_MOST_SKIPPED = 12  # 4,095 occasions, as a power of two
_NONE = 0, 0, ""


def may_pass(error: BaseException) -> bool:
    """Whether the same try may succeed later: stack, memory, files or threads were used up."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return isinstance(error, (RecursionError, MemoryError))


def reraise_passing(error: BaseException) -> None:
    """Raise `error`, which is being handled, if it may pass. It reaches the user, and the next call tries again."""
    if may_pass(error):
        raise error


class Retries:
    """When to try again what has failed, by key: at the next occasion, then after 1, 3, 7 … further ones, at most 4,095."""

    def __init__(self) -> None:
        self._failed: dict[Hashable, tuple[int, int, str]] = {}  # failures, occasions to skip, the last error

    def is_due(self, key: Hashable) -> bool:
        """Whether to try on this occasion."""
        failures, skipped, why = self._failed.get(key, _NONE)
        if skipped:
            self._failed[key] = failures, skipped - 1, why
        return not skipped

    def failed(self, key: Hashable, error: BaseException) -> int:
        """Note a failure. Returns how many there have been."""
        failures = self._failed.get(key, _NONE)[0] + 1
        self._failed[key] = failures, (1 << min(failures - 1, _MOST_SKIPPED)) - 1, f"{type(error).__name__}: {error}"
        return failures

    def why(self, key: Hashable) -> str:
        """The last error; "" if none is noted, or the try has succeeded since."""
        return self._failed.get(key, _NONE)[2]

    def succeeded(self, key: Hashable) -> None:
        self._failed.pop(key, None)
