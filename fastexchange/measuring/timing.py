"""What a call costs: nanoseconds per call of statements, measured in one process, in interleaved rounds.

The method. Every statement is compiled into a loop of its own, ``for _ in repeat(None, n): statement``, with its names
as local variables. A round times every statement, in an order shuffled anew, so that drift of the machine's speed falls
on all of them alike; the same loop with nothing in it is timed in every round and subtracted. A time is the least of
three short runs one after the other, which drops those that another process interrupted; of one run, where a call is long.
The garbage collector is off. What is reported is the median over the rounds, and the interquartile range as the spread.
Ratios and differences of two statements are taken round by round, before the median. :func:`is_measurable` says which of them
mean anything.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Samples", "Statement", "Timings", "clock_tick", "is_measurable", "time_statements"]

_RUNS = 3  # per statement and round, of which the least counts
_LONG_NS = 50_000_000  # a run that takes longer, because one call does, counts alone


@dataclass(frozen=True)
class Statement:
    """A statement to time, for example ``Statement("kernel(x, y)", {"kernel": saxpy, "x": x, "y": y})``."""

    code: str
    names: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    """How many calls the code makes; times are per call."""
    prepare: Callable[[], object] | None = None
    """Called before every run of the statement, outside of what is timed."""
    most_calls: int | None = None
    """How many calls a run makes at most: one that fills a queue, which `prepare` empties, would measure the wait for it."""


def is_measurable(median: float, spread: float, signed: bool = False) -> bool:
    """Whether a figure means anything: its spread does not exceed it, and it is not negative, as nothing costs less than nothing.

    `signed`: it is a difference of two calls, of which either may be the slower one. An infinity or a NaN means nothing.
    """
    return spread <= abs(median) < math.inf and (signed or median >= 0)


@dataclass(frozen=True)
class Samples:
    """A quantity measured once per round: nanoseconds of a call, or the ratio or difference of two calls."""

    values: np.ndarray
    has_measurable_parts: bool = True
    """False for a ratio of what is not measurable: its own spread does not show that."""

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def rounds(self) -> int:
        """How many samples there are."""
        return len(self.values)

    @property
    def spread(self) -> float:
        """The interquartile range."""
        with np.errstate(invalid="ignore"):
            low, high = np.percentile(self.values, (25, 75))
        return float(high) - float(low)

    def is_measurable(self, signed: bool = False) -> bool:
        """Whether the median means anything, see :func:`is_measurable`."""
        return self.has_measurable_parts and is_measurable(self.median, self.spread, signed)

    def __add__(self, other):
        return Samples(self.values + _values(other))

    def __sub__(self, other):
        return Samples(self.values - _values(other))

    def __mul__(self, factor: float):
        return Samples(self.values * factor, self.has_measurable_parts)

    def __truediv__(self, other):
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = self.values / _values(other)
        if not isinstance(other, Samples):
            return Samples(quotient, self.has_measurable_parts)
        return Samples(quotient, self.is_measurable() and other.is_measurable())


class Timings(NamedTuple):
    """What :func:`time_statements` measured, in nanoseconds."""

    calls: dict[Any, Samples]
    """Per statement: one call, without the loop around it."""
    loop: Samples
    """One iteration of the loop with nothing in it."""


def _values(quantity):
    return quantity.values if isinstance(quantity, Samples) else quantity


_LOOP = """
def loop(n_, {parameters}):
    iterations_ = repeat_(None, n_)
    start_ = clock_()
    for _ in iterations_:
        {code}
    return clock_() - start_
"""


def _loop(code: str, names: Mapping[str, Any]) -> Callable[[int], int]:
    """A function of the number of iterations that returns how many nanoseconds they took."""
    # Default values, so that the names are the fastest kind of variable: what is timed is the call, not the look-up.
    parameters = ", ".join(f"{name}={name}" for name in (*names, "repeat_", "clock_"))
    namespace = {"__package__": __package__, **names}
    exec(_IMPORTS + _LOOP.format(parameters=parameters, code=code), namespace)
    return namespace.pop("loop")  # no cycle of a function and its globals, which would keep the names alive


_IMPORTS = "from itertools import repeat as repeat_\nfrom time import perf_counter_ns as clock_\n"


class _Loop:
    """A statement's loop."""

    def __init__(self, statement: Statement):
        self._run = _loop(statement.code, statement.names)
        self._prepare = statement.prepare
        self.calls = statement.calls
        self.most = None if statement.most_calls is None else max(1, statement.most_calls // statement.calls)

    def __call__(self, count: int) -> int:
        if self._prepare is not None:
            self._prepare()
        return self._run(count)


def _iterations(loop: Callable[[int], int], batch_ns: int, most: int | None = None) -> int:
    """How many iterations take about `batch_ns`, at most `most`. Warms the loop up."""
    count = 1
    while (elapsed := loop(count)) < batch_ns // 2:
        if count == most:
            return count
        count = max(2 * count, min(1000 * count, count * batch_ns // max(elapsed, 1)))
        count = count if most is None else min(count, most)
    count = max(1, count * batch_ns // elapsed)
    return count if most is None else min(count, most)


def _least(loop: Callable[[int], int], count: int) -> float:
    """Nanoseconds per iteration, the loop's own part included."""
    first = loop(count)
    if first > _LONG_NS:  # no other process's time slice is so long as to matter
        return first / count
    return min(first, *(loop(count) for _ in range(_RUNS - 1))) / count


@contextmanager
def _no_garbage_collection():
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def clock_tick() -> int:
    """The least step, in nanoseconds, by which the clock is seen to move, the reading of it included."""
    steps: list[int] = []
    last = time.perf_counter_ns()
    while len(steps) < 100:
        now = time.perf_counter_ns()
        if now > last:
            steps.append(now - last)
        last = now
    return min(steps)


def time_statements(
    statements: Mapping[Any, Statement],
    *,
    rounds: int = 25,
    batch_ns: int = 500_000,
    progress: Callable[[int, int], None] | None = None,
    most_ns: float = math.inf,
    on_interrupt: Callable[[], object] | None = None,
) -> Timings:
    """Nanoseconds per call of each statement, one sample per round. The method is in the module's docstring.

    Parameters
    ----------
    statements : by name. Each runs once before anything is timed: what compiles at its first call does so then.
    rounds : how often each is timed.
    batch_ns : how long one run of a statement takes, in nanoseconds, about; it holds one iteration at least.
    progress : called after every round with the number of rounds done and `rounds`.
    most_ns : after so many nanoseconds no further round begins.
    on_interrupt : called when Ctrl-C comes once a round is complete; then the measurement ends with the rounds that are. Without
        it, KeyboardInterrupt is raised.

    Raises what a statement raises, and KeyboardInterrupt.
    """
    loops = {name: _Loop(statement) for name, statement in statements.items()}
    for loop in loops.values():
        loop(1)
    complete: list[tuple[float, dict[Any, float]]] = []
    with _no_garbage_collection():
        for loop in loops.values():  # what optimises itself while it runs, has done so when the iterations are counted
            _iterations(loop, batch_ns, loop.most)
        iterations = {name: _iterations(loop, batch_ns, loop.most) for name, loop in loops.items()}
        empty = _loop("pass", {})
        empty_iterations = _iterations(empty, batch_ns)
        order = list(loops)
        shuffle = random.Random(0).shuffle
        end = time.perf_counter_ns() + most_ns
        try:
            for done in range(1, rounds + 1):
                nothing = _least(empty, empty_iterations)
                shuffle(order)
                times = {name: (_least(loops[name], iterations[name]) - nothing) / loops[name].calls for name in order}
                complete.append((nothing, times))
                if progress:
                    progress(done, rounds)
                if time.perf_counter_ns() > end:
                    break
        except KeyboardInterrupt:
            if on_interrupt is None or not complete:
                raise
            on_interrupt()
    samples = {name: Samples(np.array([times[name] for _, times in complete])) for name in loops}
    return Timings(samples, Samples(np.array([nothing for nothing, _ in complete])))
