"""Ctrl-C while a kernel runs, is bound, is compiled, at each line of a call; handlers that call kernels.

``tests/exchange/test_ownership.py`` has Ctrl-C while a producer exports.
"""

import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time

import numba
import numpy as np
import pytest
from counting import forget_notes
from frameworks import torch
from line_events import at_each_instruction, at_each_line
from made_producers import Dunder, Ledger, Legacy, Tabled, _strays, tabled_type
from numba import types
from numba.core import event
from oracle import new_kernel, references_kept, seen_type

from fastexchange import fast_args

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them"),
    pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals are the main thread's"),
]

Exported = tabled_type("Exported", dltensor_from_py_object_no_sync=None)
# Tabled's table is of cffi callbacks, which swallow an exception that a signal's handler raises in them.
IN_KERNELS = [np.asarray, Dunder, Legacy, Exported, *([torch.from_numpy] if torch is not None else [])]
libc_raise = types.ExternalFunction("raise", types.int32(types.int32))
SIGINT = int(signal.SIGINT)
compiled = functools.cache(lambda function, **options: numba.njit(**options)(function))
"""The dispatcher of a function, compiled once for all tests."""


@pytest.fixture(autouse=True)
def _default_handler():
    """Ctrl-C raises KeyboardInterrupt, whatever the test run's own handler is; nothing is pending afterwards."""
    with handled(SIGINT, signal.default_int_handler):
        yield
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(3):
                pass


def type_raised(function, *arguments):
    """The type of what a call raises, nothing of which is kept; None if it returns."""
    try:
        try:
            function(*arguments)
        finally:
            for _ in range(2):  # a pending signal's handler runs at the latest here
                pass
    except BaseException as error:
        error.__traceback__ = error.__context__ = None
        return seen_type(error)
    return None


@contextlib.contextmanager
def handled(number: int, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def check_given_back(tensor) -> None:
    gc.collect()
    if hasattr(tensor, "ledger"):
        tensor.ledger.check(tensor.ledger.made)


# ---- while a kernel runs ---------------------------------------------------------------------------------------------
def signals_itself(done, x):
    """A signal arrives while it runs; it does the rest of its work all the same."""
    done[0] += 1
    libc_raise(SIGINT)
    done[1] = x.sum()
    return x[1:]


def signals_and_raises(done, x):
    done[0] += 1
    libc_raise(SIGINT)
    done[1] = x[1]
    if done[0] > 0:
        raise ValueError("from the kernel", done[0])
    return x


@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=["with the GIL", "nogil"])
@pytest.mark.parametrize("function", [signals_itself, signals_and_raises], ids=lambda function: function.__name__)
def test_ctrl_c_in_a_kernel(function, options):
    """The kernel returns; then the exception comes, as from ``@njit``; its result goes, what it took is given back."""
    oracle, array, done = compiled(function), np.arange(4.0), np.zeros(2)
    ignored = functools.partial(handled, SIGINT, signal.SIG_IGN)
    with ignored():
        assert type_raised(oracle, done, array) in (None, ValueError)
    done[:] = 0
    assert type_raised(oracle, done, array) is KeyboardInterrupt and done[0] == 1.0 and done[1] != 0.0
    left = done.tolist()
    for kind, calls_before in itertools.product(IN_KERNELS, (0, 1)):
        kernel, tensor = new_kernel(compiled(function, **options)), kind(array)
        with ignored():
            for _ in range(calls_before):
                type_raised(kernel, done, kind(array))
        with references_kept(array, tensor, done):
            for _ in range(3 if calls_before else 1):
                done[:] = 0
                assert type_raised(kernel, done, tensor) is KeyboardInterrupt, (kind, calls_before)
                assert done.tolist() == left
            forget_notes(tensor)
        check_given_back(tensor)
        with ignored():
            for _ in range(3):
                assert type_raised(kernel, done, tensor) is (None if function is signals_itself else ValueError)


def test_ctrl_c_while_another_threads_kernel_runs():
    """It is the main thread's: the kernel, which has let go of the GIL, goes on."""
    usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
    kill = types.ExternalFunction("kill", types.int32(types.int32, types.int32))  # raise() would not wake the main thread
    process = os.getpid()

    @fast_args(nogil=True)
    def signals_and_waits(flags, x):
        kill(process, SIGINT)
        turns = 0
        while flags[0] == 0 and turns < 20_000:
            usleep(1000)
            turns += 1
        return x[0] + turns // 20_000

    tensor, flags, results = Dunder(np.ones(3)), np.ones(1, np.int64), []
    with handled(SIGINT, signal.SIG_IGN):
        assert signals_and_waits(flags, tensor) == 1.0
    flags[0], begun = 0, []

    def work():
        while not begun:  # no lock: Ctrl-C may leave one of threading's half released
            time.sleep(0.001)
        results.append(signals_and_waits(flags, tensor))

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        begun.append(True)
        time.sleep(60)
    assert not results
    flags[0] = 1
    thread.join(60)
    assert results == [1.0]
    check_given_back(tensor)


# ---- while a call is learnt ------------------------------------------------------------------------------------------
weighed = numba.njit(lambda a, x: a + x.sum())


def a_first_call(base):
    """``(work, problem, kernel, tensor)``: a call that brings a kernel its first shape and the process a new type."""
    gc.collect(0)
    # Not fast_args(weighed): that gives the dispatcher's one kernel while somebody has it.
    kernel, tensor = new_kernel(weighed), type("Met", (base,), {})(np.arange(4.0))
    return (lambda: kernel(1.0, tensor)), (lambda: problem_of(kernel, tensor)), kernel, tensor


def a_refused_call(base):
    work, problem, kernel, tensor = a_first_call(base)
    work()
    tensor.lies["lanes"] = 2

    def refused():
        with pytest.raises(BufferError):
            work()

    return refused, problem, kernel, tensor


SCENES = {
    f"{scene.__name__} of {base.__name__}": functools.partial(scene, base)
    for scene in (a_first_call, a_refused_call) for base in (Dunder, Tabled)
}  # fmt: skip
STEPS = {"a_first_call of Tabled": 2}
"""Of scenes whose lines are mostly those of another one: which share of them is met."""


def problem_of(kernel, tensor) -> str:
    """What is wrong with the calls after something has happened to one; nothing if they are right, and native in the end."""
    tensor.lies.clear()
    try:
        results = {kernel(1.0, tensor) for _ in range(4)} | {kernel(1.0, tensor.array)}
    except BaseException as error:
        return repr(error)
    before = kernel.counts().slow
    results.add(kernel(1.0, tensor))
    gc.collect()
    if results != {7.0}:
        return f"gives {results}"
    if kernel.counts().slow != before:
        return "takes the slow path for ever"
    if tensor.ledger.out or _strays:
        return f"{tensor.ledger.out} exports are still out, {len(_strays)} deleters were called twice"
    return ""


@functools.cache
def warm(scenes: tuple) -> None:
    """What is compiled once a process has been, so that the lines that are tested are those of a call."""
    for scene in scenes:
        work, problem, *_ = scene()
        work()
        assert not problem()
    gc.collect()
    gc.freeze()  # garbage is collected at each line, and Numba has made a lot that is none


def interrupt_at_each(places) -> None:
    """Ctrl-C between any two instructions; afterwards the scene has no problem, whatever was half done."""
    wrong, came, acted = [], 0, []

    def act():
        acted.append(came)
        signal.default_int_handler(SIGINT, None)

    for came, (place, work_with, (_, problem, *_others)) in enumerate(places, 1):
        end = type_raised(work_with, act)
        if end is not (KeyboardInterrupt if came in acted else None):
            wrong.append(f"{place}: {end} was raised")
        if found := problem():
            wrong.append(f"{place}: {found}")
    assert not wrong, "\n".join(wrong)
    assert len(acted) > 0.9 * came, "places were not come to again"


@pytest.mark.parametrize("name", SCENES)
def test_ctrl_c_at_each_line(name):
    warm(tuple(SCENES.values()))
    interrupt_at_each(at_each_line(SCENES[name], STEPS.get(name, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENES if "refused" not in name])
def test_a_handler_that_calls_the_kernel_at_each_line(name):
    warm(tuple(SCENES.values()))
    wrong, missed = [], []
    for line, work_with, (_, problem, kernel, tensor) in at_each_line(SCENES[name], STEPS.get(name, 1)):
        results: list[float] = []

        def handler(*_, kernel=kernel, tensor=tensor, results=results):
            results.append(kernel(1.0, tensor) + kernel(1.0, tensor.array))

        with handled(signal.SIGUSR1, handler):
            end = type_raised(work_with, lambda: signal.raise_signal(signal.SIGUSR1))
        if not results and end is None:
            missed.append(line)  # where the table of types has just grown, in a dozen lines
        if end is not None or set(results) - {14.0}:
            wrong.append(f"{line}: raised {end}, the handler's calls gave {results}")
        if found := problem():
            wrong.append(f"{line}: {found}")
    assert not wrong, "\n".join(wrong)
    assert len(missed) < 20, f"{missed} were not executed again"


# ---- while a launch is bound -----------------------------------------------------------------------------------------
weigh_two = numba.njit(lambda a, x, y: a * x.sum() + y.sum())


class Launch:
    """A bound launch, what is about to be done with it, and whether all is right after that has been interrupted."""

    def __init__(self):
        self.ledger = Ledger()
        self.tensors = [Dunder(np.full(3, float(i)), self.ledger) for i in (1, 2)]
        self.arrays = [np.full(3, float(i)) for i in (1, 2)]
        self.owned = [*self.tensors, *self.arrays]
        self.counts = [sys.getrefcount(thing) for thing in self.owned]
        self.kernel = new_kernel(weigh_two)
        self.bind()
        gc.collect(0)

    def bind(self):
        self.launch = self.kernel.bind(1.0, self.tensors[0], self.arrays[0])

    def rebind(self):
        self.launch.rebind(a=10.0, x=self.tensors[1], y=self.arrays[1])

    def scene(self, name: str) -> tuple:
        return getattr(self, name), self.problem

    def wrong(self) -> str:
        """What is wrong with the launch; nothing if it is as before, or as it was to become, and is called natively."""
        a, x, y = self.launch.arguments
        is_new = {a == 10.0, x is self.tensors[1], y is self.arrays[1]}
        results, before = {self.launch(), self.launch()}, self.kernel.counts()
        results, after, want = {*results, self.launch()}, self.kernel.counts(), a * x.array.sum() + y.sum()
        if len(is_new) == 1 and results == {want} and (after.fast, after.slow) == (before.fast + 1, before.slow):
            return ""
        return f"is bound to new {is_new}, gives {results}, not {want}, is called by {before}, {after}"

    def problem(self) -> str:
        try:
            wrong = self.wrong() or (self.launch.rebind(), self.wrong())[1]
        except BaseException as error:
            wrong = repr(error)
        del self.launch
        gc.collect()
        self.ledger.check(self.ledger.made)
        counts = [sys.getrefcount(thing) for thing in self.owned]
        return wrong or ("" if counts == self.counts else f"references leak: {counts}, not {self.counts}")


@fast_args(out="x[n] -> y[n]")
def doubled(x, y):
    y[:] = 2 * x


def a_launch_with_outputs():
    launch, arrays = doubled.bind(np.ones(3)), [np.ones(3), np.full(4, 5.0)]

    def problem() -> str:
        x, y = launch.arguments
        if not (launch() is launch() is y) or y.tolist() != (2 * x).tolist():
            return f"gives {launch()} for {x}"
        launch.rebind(x=arrays[0], y=None)
        return "" if launch().tolist() == [2.0] * 3 else "cannot be rebound"

    return (lambda: launch.rebind(x=arrays[1], y=None)), problem


BOUND = {"binding": lambda: Launch().scene("bind"), "rebinding": lambda: Launch().scene("rebind"),
         "rebinding with outputs": a_launch_with_outputs}  # fmt: skip
AT_EACH = {"line": at_each_line, "instruction": functools.partial(at_each_instruction, "calls/bound_launch.py")}


@pytest.mark.parametrize("what", AT_EACH)
@pytest.mark.parametrize("scene", BOUND)
def test_ctrl_c_while_a_launch_is_bound(scene, what):
    """The launch has the old arguments or the new ones, all of them; it is called natively; what it held is given back."""
    warm(tuple(BOUND.values()))
    interrupt_at_each(AT_EACH[what](BOUND[scene]))


# ---- while Numba compiles --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [np.asarray, Dunder, Legacy, Tabled, Exported], ids=lambda kind: kind.__name__)
def test_ctrl_c_while_a_kernel_is_typed(kind):
    at_typing: list = []

    def scaled_sum(x, y):
        """For kernels."""

    @numba.extending.overload(scaled_sum)
    def _scaled_sum(x, y):  # of this test alone: Numba remembers what it has typed
        if at_typing:
            signal.raise_signal(at_typing.pop())
        return lambda x, y: x.sum() * y

    kernel = fast_args(lambda x, y=1.0: scaled_sum(x, y))
    tensor, results = kind(np.arange(4.0)), []
    for arguments in ((tensor,), (tensor,), (tensor, 2)):
        at_typing.append(SIGINT)
        assert type_raised(kernel, *arguments) is KeyboardInterrupt and not at_typing
    other = threading.Thread(target=lambda: results.append(kernel(tensor)))  # no lock is held
    other.start()
    other.join(60)
    assert results == [6.0] and [kernel(tensor) for _ in range(4)] == [6.0] * 4
    assert [kernel(tensor, 2), kernel(tensor, 2), kernel(tensor)] == [12.0, 12.0, 6.0]
    check_given_back(tensor)


class Interrupts(event.Listener):
    """Ctrl-C at the beginning of one of the passes of Numba's compiler; `at`: which of them."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def on_end(self, happened): ...

    def on_start(self, happened):
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_while_a_kernel_is_compiled():
    """The next call compiles it, and later ones are right. (In LLVM it ends the process now and then, under ``@njit``, too.)"""
    tensor = Dunder(np.arange(4.0))

    def passes(at: int) -> int:
        kernel = fast_args(numba.njit(lambda a, x: a + (x * 2).sum()))
        with event.install_listener("numba:run_pass", Interrupts(at)) as interrupts:
            assert type_raised(kernel, 1.0, tensor) is (KeyboardInterrupt if at else None), at
        assert [kernel(1.0, tensor) for _ in range(4)] == [13.0] * 4 and kernel.counts().fast >= 3, at
        return interrupts.count

    _, count = passes(0), passes(0)  # once, Numba compiles its own functions, too
    assert count > 20 and [passes(at) for at in range(1, count, 4)]
    check_given_back(tensor)
