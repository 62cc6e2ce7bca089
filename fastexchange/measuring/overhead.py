"""``measure``: what each argument of a call costs, by which path, and what the alternatives would cost."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import event

from ..discovery import PATH_NUMBA
from ..explanation import explain
from ..kernel import FastKernel
from ..naming import shown, type_name
from ..producers.omitted import OMITTED
from . import files
from .alternatives import alternatives as other_ways
from .exports import statements_of
from .progress import progress_bar
from .report import Alternative, ArgumentCost, OverheadReport
from .restoring import Snapshot
from .timing import Samples, Statement, Timings, clock_tick, time_statements
from .twins import constant_twin, empty_kernel, twin, without_result

__all__ = ["measure"]

_COPIES = 4
"""Of an argument, added to a call to see what one costs."""
_SLOW_NS = 20_000_000
_SURELY_SLOW_NS = 1_000_000_000
"""A first call that takes so long is slow, whatever it has learned and loaded; of a shorter one the second tells."""
_SLOW_BUDGET_NS = 5_000_000_000
_COPIED_IN_EACH_ROUND = 1 << 24  # bytes


def measure(kernel: FastKernel, /, *args, alternatives: bool = True, rounds: int = 25, **kwargs) -> OverheadReport:
    """What each argument of ``kernel(*args, **kwargs)`` costs, by which path, and what the alternatives would cost.

    Parameters
    ----------
    kernel : made by :func:`~fastexchange.fast_args`.
    *args, **kwargs : of the call. Arguments for parameters named like this function's own are given by position.
    alternatives : whether to time other ways to pass the same arguments: plain ``@njit`` with NumPy views, ``x.numpy()``,
        ``np.from_dlpack(x)``, ``x.__dlpack__()``, apache-tvm-ffi if it is installed, a bound launch.
    rounds : how often everything is timed; more give less noise.

    Returns
    -------
    An :class:`OverheadReport`; print it, or let a notebook show it. All times are nanoseconds per call.

    The method
    ----------
    Everything is timed in one process, in interleaved rounds, the garbage collector off, the loop around a call subtracted: see
    ``fastexchange.measuring.timing``. Reported are medians over the rounds, and interquartile ranges.

    - The *overhead* is the time of the same call of a kernel with the same parameters that does nothing (and returns a number
      if this one does).
    - An *argument*'s cost is that of one more like it: of an empty kernel that gets the argument four times more, in addition
      to all arguments of the call, a quarter of what that adds. The *producer*'s part of it are the calls of its export alone,
      made natively (of ``__dlpack__``: from Python); the rest is this package's.
    - What the arguments do not account for is *the call itself*: CPython's part, and what arguments share. Beside it, where the
      call has them, *keywords*: what it takes longer than by position.
    - The *result*: what handing it over adds: of arrays, against the same kernel called natively by one that drops them; of
      outputs that the call allocates, against an empty kernel without outputs; outputs that it is given are arguments.
    - The *kernel*'s own time is what is left of the call.

    A trial call comes first: what the kernel raises, it raises there. The kernel is then called many times, so its arguments
    are restored to what they were, at the end and, where each call changes them anew, before each run of some hundred
    microseconds. A kernel that takes more than 20 ms is timed call by call, for five seconds at most. Ctrl-C ends the
    measurement with the rounds made so far. Python's passing of tensors as NumPy arrays makes the storages of PyTorch's tensors
    fixed, as ``tensor.numpy()`` does; with ``alternatives=False`` only kernels that do that anyway do it.

    Warns (RuntimeWarning, also in the report's ``warnings``) where the numbers are unfit: noise, a clock that is too coarse, a
    machine whose speed changes, a kernel that changes its arguments with every call, or is slow.

    Raises TypeError for what is no kernel of this package, and for arguments that do not fit it; ValueError for `rounds`; and
    what the call raises.

    >>> import numpy as np
    >>> from fastexchange import fast_args
    >>> report = measure(fast_args(lambda x: None), np.ones(1), alternatives=False, rounds=3)
    >>> [argument.path for argument in report.arguments]
    ['ndarray']
    """
    if not isinstance(kernel, FastKernel):
        hint = "; decorate it with @fast_args" if callable(kernel) else ""
        raise TypeError(f"measure() takes a kernel made by fast_args as its first argument, not {shown(kernel)}{hint}")
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f"measure(): rounds is an int, not {shown(rounds)}")
    if rounds < 1:
        raise ValueError(f"measure(): rounds is at least 1, not {rounds}")
    call = _Call(kernel, args, kwargs)
    with Snapshot(call.by_parameter) as before:
        return _measure(call, before, rounds, alternatives)


class _Call:
    """A call of a kernel, as an expression over names."""

    def __init__(self, kernel: FastKernel, args: tuple, kwargs: dict):
        self.kernel = kernel
        self.bound = kernel._parameters.bind(*args, **kwargs)
        self.explanation = kernel.explain(*args, **kwargs)
        self.given = [(i, value) for i, value in enumerate(self.bound) if value is not OMITTED]
        """The arguments that are there, in the order of the parameters, with their positions."""
        self.by_parameter = {kernel._parameters.name_of(i): value for i, value in self.given}
        self.names = {f"a{i}": value for i, value in enumerate(args)} | {f"k_{name}": value for name, value in kwargs.items()}
        self.has_keywords = bool(kwargs)
        self.arguments = ", ".join([f"a{i}" for i in range(len(args))] + [f"{name}=k_{name}" for name in kwargs])
        outputs = kernel._outputs.pattern.outputs if kernel._outputs is not None else ()
        made = {o.position for o in outputs if self.bound[o.position] is OMITTED or self.bound[o.position] is None}
        self.allocates = bool(made)
        """Whether it has outputs made for it."""
        self.read = [(i, value) for i, value in self.given if i not in made]
        """The arguments that something reads."""
        numba_types = {name: numba_type for name, _, numba_type in self.explanation.arguments}
        self.types = tuple(
            f"{type_name(type(value))} as {numba_types[kernel._parameters.name_of(i)]}" for i, value in self.read
        )
        """What they are."""
        self.is_for_numba = self.explanation.outcome.startswith("Numba's own dispatcher")
        """Whether an argument makes it a call for Numba's own dispatcher."""

    def of(self, function: Callable, prepare: Callable[[], object] | None = None) -> Statement:
        """The same call of `function`."""
        return Statement(f"f({self.arguments})", {"f": function, **self.names}, prepare=prepare)

    def make(self, function: Callable):
        """The same call of `function`, made."""
        return eval(f"f({self.arguments})", {"f": function, **self.names})


# ---- the trial -----------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """What the first calls show."""

    result: object
    ns: int
    """Of one call, without compiling."""
    is_slow: bool
    changes: list[str]
    """The arguments that a call changes."""
    drifts: list[str]
    """Those that the next call changes again."""
    is_numba: bool | None
    """Whether Numba's own dispatcher makes the call; None if there was one call only."""


def _timed(call: _Call) -> tuple[object, int]:
    """A call's result, and its nanoseconds without those of compiling."""
    compiling: list[float] = []
    with event.install_timer("numba:compile", compiling.append):
        start = time.perf_counter_ns()
        result = call.make(call.kernel)
        took = time.perf_counter_ns() - start
    return result, max(1, took - int(1e9 * sum(compiling)))


def _try(call: _Call, before: Snapshot) -> _Trial:
    result, ns = _timed(call)
    changes = before.changed()
    if ns > _SURELY_SLOW_NS:
        return _Trial(result, ns, True, changes, [], None)
    after = Snapshot(call.by_parameter)
    slow_calls = call.kernel.stats().slow
    result, ns = _timed(call)
    is_numba = call.kernel.stats().slow > slow_calls
    return _Trial(result, ns, ns > _SLOW_NS, changes, after.changed(), is_numba)


# ---- what is timed -------------------------------------------------------------------------------------------------


def _argument_statements(call: _Call) -> dict[Any, Statement]:
    """An empty kernel with all arguments, and with each of them some times more; and the producers' exports."""
    kernel = call.kernel
    values = tuple(value for _, value in call.read)
    statements: dict[Any, Statement] = {"base": Statement("f(*a)", {"f": empty_kernel(kernel, call.types), "a": values})}
    for type_, (i, value) in zip(call.types, call.read, strict=True):
        names = {"f": empty_kernel(kernel, call.types + (type_,) * _COPIES), "a": values + (value,) * _COPIES}
        statements["more", i] = Statement("f(*a)", names)
        for part, statement in enumerate(statements_of(value, bool(kernel._native.native.owns))):
            statements["export", i, part] = statement
    return statements


def _statements(call: _Call, trial: _Trial, empty: FastKernel, prepare) -> dict[Any, Statement]:
    """All but the alternatives."""
    statements = {"empty": call.of(empty), "control": call.of(empty), **_argument_statements(call)}
    if call.allocates or call.has_keywords:
        values = tuple(value for _, value in call.read)
        spelled = ", ".join(f"a{i}" for i in range(len(values)))
        names = {f"a{i}": value for i, value in enumerate(values)}
        is_positional = len(call.bound) == len(values) == call.kernel._parameters.positional
        function = empty if is_positional else empty_kernel(call.kernel, call.types)
        statements["spelled"] = Statement(f"f({spelled})", {"f": function, **names})
    if call.kernel.out is not None:  # what the call returns are its arguments
        pass
    elif (constant := constant_twin(call.kernel, trial.result)) is not None:
        statements["constant"] = call.of(constant)
    elif trial.result is not None and not trial.is_slow and not trial.is_numba:
        dropping = without_result(call.kernel)
        try:
            call.make(dropping)
        except Exception:  # Numba cannot call it from another kernel
            pass
        else:
            statements["dropping"] = call.of(dropping, prepare)
    if not trial.is_slow:
        statements["call"] = call.of(call.kernel, prepare)
    return statements


def _slow_calls(call: _Call, samples: list[float], prepare, rounds: int) -> bool:
    """Add the nanoseconds of single calls to `samples`, for some seconds. Whether Ctrl-C came."""
    try:
        while len(samples) < rounds and sum(samples) + max(samples) < _SLOW_BUDGET_NS:
            if prepare:
                prepare()
            samples.append(float(_timed(call)[1]))
    except KeyboardInterrupt:
        return True
    return False


# ---- putting it together -------------------------------------------------------------------------------------------


def _measure(call: _Call, before: Snapshot, rounds: int, with_alternatives: bool) -> OverheadReport:
    notes = _Notes()
    with progress_bar(f"measuring {call.kernel.__name__}()") as progress:
        progress.say("trial call")
        trial = _try(call, before)
        prepare = _look_at(call, trial, before, notes)
        progress.say("compiling")
        empty = twin(call.kernel)
        statements = _statements(call, trial, empty, prepare)
        ways = list(other_ways(empty, call.names, call.arguments, not call.allocates)) if with_alternatives else []
        statements |= {("way", label): statement for label, statement, _ in ways if statement is not None}
        progress.say("measuring")
        timings = time_statements(statements, rounds=rounds, progress=progress.step, keep_interrupted=True)
        slow = [float(trial.ns)]
        was_interrupted = timings.loop.rounds < rounds
        if trial.is_slow and not was_interrupted:
            progress.say("measuring the kernel")
            was_interrupted = _slow_calls(call, slow, prepare, rounds)
    if was_interrupted:
        calls = f", and {len(slow)} calls of the kernel" if trial.is_slow else ""
        notes.add(f"interrupted: there are {timings.loop.rounds} of {rounds} rounds{calls}")
    _judge(timings, notes)
    return _report(call, trial, timings, slow, ways, notes)


def _look_at(call: _Call, trial: _Trial, before: Snapshot, notes: "_Notes") -> Callable[[], None] | None:
    """What has to be done before each run of the kernel, if anything; says what the trial has shown."""
    if trial.is_slow:
        calls = max(1, _SLOW_BUDGET_NS // trial.ns)
        often = "not called again" if calls == 1 else f"timed call by call, {calls} times at most"
        notes.add(f"one call takes {trial.ns / 1e9:.3g} s: it is {often}; what the arguments cost is beneath its noise")
    if trial.is_numba and not call.is_for_numba:
        notes.add(
            "Numba's own dispatcher makes this call, because of the kernel and not of its arguments: what that takes longer is "
            "counted as the kernel's own"
        )
    if before.unseen:
        notes.add(f"the memory of {_listed(before.unseen)} cannot be viewed: what the kernel writes there is not undone")
    if trial.drifts:
        notes.add(
            f"each call changes {_listed(trial.drifts)} anew, so calls are not alike: the values are restored before each run of "
            "calls, and at the end"
        )
    elif not (trial.is_slow and trial.changes):
        return None
    if before.nbytes > _COPIED_IN_EACH_ROUND and not trial.is_slow:
        notes.add(f"{_listed(trial.drifts)} are too large to be restored in each round: they are restored at the end only")
        return None
    return before.restore


def _judge(timings: Timings, notes: "_Notes") -> None:
    """Warns of what makes the numbers unfit."""
    empty, control = timings.calls["empty"], timings.calls["control"]
    noise = abs((control / empty).median - 1)
    if noise > 0.05:
        notes.add(f"noise: the same call twice differs by {noise:.0%}; close what else is running and measure again")
    elif empty.spread > 0.15 * empty.median:
        notes.add(f"noise: the overhead's interquartile range is {empty.spread / empty.median:.0%} of it; measure again")
    speed = timings.loop.values
    if len(speed) >= 9:
        third = len(speed) // 3
        first, last = np.median(speed[:third]), np.median(speed[-third:])
        if abs(last / first - 1) > 0.1:
            notes.add(f"the machine's speed changed while it was measured, by {abs(last / first - 1):.0%} (an empty loop's time)")
    tick = clock_tick()
    if tick > 5_000:
        notes.add(f"this machine's clock moves in steps of {tick / 1000:.1f} us, too coarse for runs of 500 us")


def _report(call: _Call, trial: _Trial, timings: Timings, slow: list[float], ways: list, notes: "_Notes") -> OverheadReport:
    times = timings.calls
    kernel, nothing = call.kernel, times["base"] * 0
    is_numba = call.is_for_numba
    types = {name: numba_type for name, _, numba_type in call.explanation.arguments}
    costs = []
    for i, value in call.read:
        name, explanation = kernel._parameters.name_of(i), explain(value)
        total = (times["more", i] - times["base"]) * (1 / _COPIES)
        exports = [samples for key, samples in times.items() if key[:2] == ("export", i)]
        export = sum(exports[1:], exports[0]) if exports and not is_numba else None
        path = PATH_NUMBA if is_numba else explanation.path
        costs.append(ArgumentCost(name, i, type_name(type(value)), types[name], path, explanation.reasons, total, export))
    keywords = times["empty"] - times["spelled"] if call.has_keywords and not call.allocates else None
    if call.allocates:
        overhead, result = times["empty"], times["empty"] - times["spelled"]
    elif "constant" in times:
        overhead, result = times["constant"], times["constant"] - times["empty"]
    elif "dropping" in times:
        result = times["call"] - times["dropping"]
        overhead = times["empty"] + result
    else:
        overhead, result = times["empty"], None
    total = times["call"] if "call" in times else Samples(np.array(slow))
    alone = total - (overhead if "call" in times else overhead.median)
    itself = overhead - (result or nothing) - (keywords or nothing) - sum((cost.total for cost in costs), nothing)
    others = tuple(Alternative(label, times.get(("way", label)), why) for label, _, why in ways)
    return OverheadReport(
        kernel=kernel.__qualname__, arguments=tuple(costs), call=itself, keywords=keywords, result=result,
        result_type=None if trial.result is None else type_name(type(trial.result)), overhead=overhead, alone=alone, total=total,
        noise=times["control"] / times["empty"], alternatives=others, warnings=tuple(notes.said), machine=files.machine(),
    )  # fmt: skip


class _Notes:
    """What a report warns of; said at once, too."""

    def __init__(self):
        self.said: list[str] = []

    def add(self, sentence: str) -> None:
        self.said.append(sentence)
        warnings.warn(f"measure(): {sentence}", RuntimeWarning, stacklevel=5)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
