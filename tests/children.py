"""What tests do to this process for a while: fork it, let threads take turns, accelerate Numba's decorators."""

import contextlib
import os
import signal
import sys

import pytest

from fastexchange import accelerate, decelerate

SECONDS = 60
"""After which a child counts as stuck. Only a failure takes that long."""


def in_fork(work) -> int:
    """The exit code of a forked child: what `work` returns, or 0; 1 if it raises, minus the number of a signal that ends it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(SECONDS)
        code = work() or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture
def switching():
    """Threads take turns after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def accelerating(*packages):
    """What Numba's decorators make in the block is accelerated."""
    accelerate(*packages)
    try:
        yield
    finally:
        decelerate()
