"""What tests do to this process for a while: fork it, let threads run at once or take turns, accelerate Numba's decorators."""

import contextlib
import os
import signal
import sys
import threading
import traceback

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


def at_once(*works, repeated=()) -> None:
    """Each of `works` in a thread, and each of `repeated` in others until those have ended. Turns are short; none raises."""
    start, stop, errors = threading.Barrier(len(works) + len(repeated)), threading.Event(), []

    def run(work, again: bool):
        try:
            start.wait(SECONDS)
            work()
            while again and not stop.wait(0.001):
                work()
        except BaseException as error:
            errors.append("".join(traceback.format_exception(error)))

    rows = [(work, False) for work in works] + [(work, True) for work in repeated]
    threads = [threading.Thread(target=run, args=row, daemon=True) for row in rows]
    with switch_interval(min(1e-5, sys.getswitchinterval())):
        for thread in threads:
            thread.start()
        for thread in threads[: len(works)]:
            thread.join(SECONDS)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    assert not errors, "\n".join(errors)


@contextlib.contextmanager
def switch_interval(seconds: float):
    """A thread that runs Python code keeps the GIL for so long in the block, if others want it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def accelerating(*packages):
    """What Numba's decorators make in the block is accelerated."""
    accelerate(*packages)
    try:
        yield
    finally:
        decelerate()
