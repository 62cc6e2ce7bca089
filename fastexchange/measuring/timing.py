"""Time statements: nanoseconds per call, in one process, in interleaved rounds.

1. Each statement is compiled into its own loop, ``for _ in repeat(None, n): statement``, with its names as local variables.
2. A round times every statement once, in a new random order, so that drift of the machine's speed affects all alike. An empty
   loop is timed in every round, too, and subtracted. The garbage collector is off.
3. A time is the least of three short runs, because another process may interrupt a run. Of a long call it is one run.
4. The result is the median over the rounds, with the interquartile range as the spread. Ratios and differences of two
   statements are computed for each round, before the median. :func:`is_measurable` tells whether a result is meaningful.
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

_RUNS = 3  # per statement and round; the least time counts
_LONG_NS = 50_000_000  # a run that takes longer, because of one long call, is not repeated


@dataclass(frozen=True)
class Statement:
    """A statement to time, for example ``Statement("kernel(x, y)", {"kernel": saxpy, "x": x, "y": y})``."""

    code: str
    names: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    """The number of calls that the code makes. Times are per call."""
    prepare: Callable[[], object] | None = None
    """Called before every run of the statement; its time does not count."""
    most_calls: int | None = None
    """The largest number of calls in a run, for calls that fill a queue which `prepare` empties: a full queue makes them wait."""


def is_measurable(median: float, spread: float, signed: bool = False) -> bool:
    """Whether a median is meaningful: finite, not less than its spread, and not negative.

    `signed`: the median is a difference of two calls, and may be negative.
    """
    return spread <= abs(median) < math.inf and (signed or median >= 0)


@dataclass(frozen=True)
class Samples:
    """A quantity measured once per round: nanoseconds of a call, or the ratio or difference of two calls."""

    values: np.ndarray
    has_measurable_parts: bool = True
    """False for a ratio of samples that are not measurable. The ratio's own spread does not show this."""

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def rounds(self) -> int:
        """The number of samples."""
        return len(self.values)

    @property
    def spread(self) -> float:
        """The interquartile range."""
        with np.errstate(invalid="ignore"):
            low, high = np.percentile(self.values, (25, 75))
        return float(high) - float(low)

    def is_measurable(self, signed: bool = False) -> bool:
        """Whether the median is meaningful, see :func:`is_measurable`."""
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
    """The result of :func:`time_statements`, in nanoseconds."""

    calls: dict[Any, Samples]
    """By statement: one call, without the loop around it."""
    loop: Samples
    """One iteration of the empty loop."""


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
    """Make a function that runs a number of iterations and returns the nanoseconds they took."""
    # As parameters with default values, the names are local variables: their look-up takes the least time.
    parameters = ", ".join(f"{name}={name}" for name in (*names, "repeat_", "clock_"))
    namespace = {"__package__": __package__, **names}
    exec(_IMPORTS + _LOOP.format(parameters=parameters, code=code), namespace)
    return namespace.pop("loop")  # else the function and its globals are a cycle, which keeps the names alive


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
    """Warm up the loop. Returns the number of iterations that take about `batch_ns`, at most `most`."""
    count = 1
    while (elapsed := loop(count)) < batch_ns // 2:
        if count == most:
            return count
        count = max(2 * count, min(1000 * count, count * batch_ns // max(elapsed, 1)))
        count = count if most is None else min(count, most)
    count = max(1, count * batch_ns // elapsed)
    return count if most is None else min(count, most)


def _least(loop: Callable[[int], int], count: int) -> float:
    """Return nanoseconds per iteration, with the loop's own part."""
    first = loop(count)
    if first > _LONG_NS:  # an interruption by another process is short beside it
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
    """Return the clock's least observed step in nanoseconds, with the time to read it."""
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
    """Time statements: one sample per statement and round. The module's docstring has the method.

    Parameters
    ----------
    statements : by name. Each runs once before anything is timed, so that its functions are compiled.
    rounds : how often each is timed.
    batch_ns : the approximate nanoseconds of one run of a statement. A run has at least one iteration.
    progress : called after every round with the number of finished rounds and `rounds`.
    most_ns : after so many nanoseconds no further round begins.
    on_interrupt : called if Ctrl-C comes after the first round; then the measurement ends with the finished rounds. None:
        KeyboardInterrupt is raised.

    Raises the exceptions of the statements, and KeyboardInterrupt.
    """
    loops = {name: _Loop(statement) for name, statement in statements.items()}
    for loop in loops.values():
        loop(1)
    complete: list[tuple[float, dict[Any, float]]] = []
    with _no_garbage_collection():
        for loop in loops.values():  # code may optimise itself while it runs: do that before counting
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
