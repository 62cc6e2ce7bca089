"""``measure``: the cost and the path of each argument of a call, and the cost of the alternatives."""

import functools
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

from ..calls.explanation import explain, is_launched
from ..calls.kernel import FastKernel, Kernel
from ..ground.safe_repr import shown, type_name
from . import files
from .alternatives import alternatives as other_ways
from .argument_costs import argument_costs, argument_statements
from .exported_calls import statements_of
from .frames import without_own_frames
from .judgement import Notes, explained, judge, name_what_is_lost, say_how_many
from .null_kernels import empty_kernel, null_kernel, returning_null_kernel
from .progress import progress_bar
from .report import Alternative, OverheadReport
from .restoring import Snapshot
from .timing import Samples, Statement, Timings, time_statements
from .trial import Call, Trial, timed, try_out

__all__ = ["ROUNDS", "is_measured", "measure", "measured"]

ROUNDS = 25
"""The default number of rounds."""
_BUDGET_NS = 5_000_000_000
"""The time for the calls of a slow kernel. Everything else gets twice as much."""
_COPIED_IN_EACH_ROUND = 1 << 24  # bytes


def measure(kernel: FastKernel, /, *args, alternatives: bool = True, rounds: int = ROUNDS, **kwargs) -> OverheadReport:
    """Measure the cost of each argument of ``kernel(*args, **kwargs)``, and the cost of the alternatives.

    Parameters
    ----------
    kernel : made by :func:`~fastexchange.fast_args`; a kernel for CUDA with its configuration, ``kernel[grid, block]``.
    *args, **kwargs : the arguments of the call. Give those for parameters named `alternatives` or `rounds` by position.
    alternatives : whether to time other ways to pass the same arguments: plain ``@njit`` with NumPy views, ``x.numpy()``,
        ``np.from_dlpack(x)``, ``x.__dlpack__()``, apache-tvm-ffi if it is installed.
    rounds : how often everything is timed; more rounds give less noise.

    Returns
    -------
    An :class:`OverheadReport`; print it, or let a notebook show it. All times are nanoseconds per call.

    The method
    ----------
    Everything is timed in one process, in interleaved rounds, without the garbage collector. The time of the loop around a call
    is subtracted (``fastexchange.measuring.timing``). The report has medians over the rounds, and interquartile ranges.

    - The *overhead* is the time of the same call of an empty kernel: one with the same parameters that does nothing. The time
      for the result is part of it.
    - An *argument*'s cost is the time that one more argument like it adds. An empty kernel gets it four more times; a quarter of
      the difference is the cost. That kernel gets all arguments of the call. If the call has more than six, the kernel gets this
      one four times, and one argument that needs the slower general path, if there is any. A list's cost is the difference to
      the call without it. The *producer*'s part is the time of its export alone, called natively (``__dlpack__``: from Python);
      the rest is this package's part. The rest may be slightly negative, because in a call the processor overlaps other work
      with the exports.
    - *The call itself* is the rest of the overhead: CPython's part, and work that is shared by arguments. *Keywords* are the
      difference to the call by position.
    - The *result*'s cost is the difference to an empty kernel that returns a similar value: numbers, new uninitialised arrays,
      arguments, or tuples of these. The cost of any other result is counted as the kernel's own. For declared outputs it is
      the time to allocate them, if they are not given, and to check their shapes.
    - The *kernel*'s own time is the rest of the call. For kernels of a few nanoseconds it is within the noise.
    - The *alternatives* call an empty kernel, too. They are compared with this call without its result.

    A trial call comes first, and raises what the kernel raises. The kernel is then called many thousand times. So its arguments
    (tensors, lists and sets) are restored at the end, from a copy in memory. If each call changes them again, they are also
    restored before each run of some hundred microseconds. A warning names arguments that cannot be restored (typed containers,
    objects). Other side effects of the kernel are repeated with each call.

    A kernel that takes more than 20 ms is timed call by call, for at most five seconds; everything else for at most ten. Ctrl-C
    after the first round ends the measurement with the rounds made so far. Numba never frees compiled code: each new combination
    of types and parameters takes some megabytes. The alternatives make the storages of PyTorch's tensors unresizable, as
    ``tensor.numpy()`` does.

    Launches
    --------
    Of ``measure(kernel[grid, block], x, y)`` all times are the host's. The kernel itself is neither launched nor compiled, and
    nothing is written to its arguments: what is launched are kernels that do nothing, with the same parameters, stream, block,
    shared memory and declared signatures, in a grid of one block. After 400 launches the device is waited for, with whatever
    other work it has, so that its queue is never full. The report's `alone` is the time of ``cuLaunchKernel``, called by native
    code with as many and as large parameters, and `overhead` is the rest of the launch. The alternatives, launches by the
    kernel's own package, are without it, too. No producer's part is told apart. Raises TypeError for a launch that only the
    kernel's package makes.

    Warns (RuntimeWarning, also in the report's ``warnings``) if the numbers are unfit: noise, a coarse clock, a machine whose
    speed changes, a kernel that changes its arguments with every call, or is slow.

    Raises TypeError if `kernel` is not a kernel of this package, and for arguments that do not fit; ValueError for `rounds`; and
    all exceptions of the call.

    >>> import torch
    >>> from fastexchange import fast_args
    >>> report = measure(fast_args(lambda x: None), torch.ones(1), alternatives=False, rounds=3)
    >>> [argument.path for argument in report.arguments]
    ['c-exchange']
    """
    if not is_measured(kernel):
        hint = "; decorate it with @fast_args" if callable(kernel) else ""
        if isinstance(kernel, Kernel):
            name = "kernel.cuda_kernel" if hasattr(kernel, "cuda_kernel") else "kernel"
            hint = f"; say how to launch this one for CUDA: measure({name}[grid, block], ...)"
        if cast(Any, numba.config).DISABLE_JIT:
            hint = "; with NUMBA_DISABLE_JIT there are none"
        raise TypeError(f"measure() takes a kernel made by fast_args as its first argument, not {shown(kernel)}{hint}")
    if not isinstance(alternatives, bool):
        raise TypeError(f"measure(): alternatives is True or False, not {shown(alternatives)}")
    if isinstance(rounds, bool) or not isinstance(rounds, (int, np.integer)):
        raise TypeError(f"measure(): rounds is an int, not {shown(rounds)}")
    if rounds < 1:
        raise ValueError(f"measure(): rounds is at least 1, not {rounds}")
    try:
        return measured(kernel, args, kwargs, int(rounds), alternatives)
    except Exception as error:
        raise without_own_frames(error)  # noqa: B904 - it is the same exception


def is_measured(kernel) -> bool:
    """Whether it is a kernel for the CPU, or a launcher of one for CUDA."""
    if isinstance(kernel, FastKernel):
        return True
    from ..cuda.launcher import CudaLauncher

    return isinstance(kernel, CudaLauncher)


# ---- what is timed -------------------------------------------------------------------------------------------------


def _statements(call: Call, trial: Trial, empty: FastKernel, prepare) -> dict[Any, Statement]:
    """Return all statements except the alternatives."""
    kernel = call.kernel
    statements = {"empty": call.of(empty), "control": call.of(empty)}
    statements |= argument_statements(call, functools.partial(empty_kernel, kernel)) | _exports(call)
    passing = empty  # an empty kernel without results
    if call.allocates:
        statements["passing"] = call.by_position(empty_kernel(kernel, call.types))
    elif kernel.out is not None:
        passing = null_kernel(kernel, declares_outputs=False)
        statements["passing"] = call.of(passing)
    elif trial.result is not None:
        returning = returning_null_kernel(kernel, call.by_parameter, trial.result)
        if returning is not None and _can_be_called(call, returning):
            statements["returning"] = call.of(returning)
    if call.has_keywords and not call.allocates:
        is_positional = len(call.bound) == len(call.read) == kernel._parameters.positional
        statements["by position"] = call.by_position(passing if is_positional else empty_kernel(kernel, call.types))
    if not trial.is_slow:
        statements["call"] = call.of(kernel, prepare)
    return statements


def _exports(call: Call) -> dict[Any, Statement]:
    """The exports of the producers alone."""
    return {
        ("export", i, part): export
        for i, value in call.read
        for part, export in enumerate(statements_of(value, bool(call.kernel._native.native.needs_owning_exports)))
    }


def _can_be_called(call: Call, function: FastKernel) -> bool:
    try:
        call.make(function)
    except Exception:  # Numba cannot compile it
        return False
    return True


def _slow_calls(call: Call, samples: list[float], prepare, rounds: int) -> bool:
    """Time single calls for some seconds, and add their nanoseconds to `samples`. Returns whether Ctrl-C came."""
    try:
        while len(samples) < rounds and sum(samples) + max(samples) < _BUDGET_NS:
            if prepare:
                prepare()
            samples.append(float(timed(call)[1]))
    except KeyboardInterrupt:
        return True
    return False


# ---- putting it together -------------------------------------------------------------------------------------------


def measured(kernel: FastKernel, args: tuple, kwargs: dict, rounds: int, with_alternatives: bool) -> OverheadReport:
    """Do the work of :func:`measure`. The call's keywords may have any names."""
    if not isinstance(kernel, FastKernel):
        from .launches import measured_launch  # which needs CUDA's driver

        return measured_launch(kernel, args, kwargs, rounds, with_alternatives)
    call = Call(kernel, args, kwargs)
    if kernel.cuda is not None and is_launched(kernel, call.bound):
        raise TypeError(
            f"measure(): {kernel.__qualname__}.cuda makes this call, whose tensors are on a GPU: measure its launch, "
            f"measure({kernel.__qualname__}.cuda[grid, block], ...)"
        )
    notes = Notes()
    with Snapshot(call.by_parameter) as before, progress_bar(f"measuring {kernel.__name__}()") as progress:
        trial = try_out(call, before)
        prepare = _look_at(call, trial, before, notes)
        empty = null_kernel(kernel)
        statements = _statements(call, trial, empty, prepare)
        ways = list(other_ways(empty, call.names, call.arguments, not call.allocates)) if with_alternatives else []
        statements |= {("way", label): statement for label, statement, _ in ways if statement is not None}
        interrupts: list[bool] = []
        ends: dict[str, Any] = {"most_ns": 2 * _BUDGET_NS, "on_interrupt": lambda: interrupts.append(True)}
        timings = time_statements(statements, rounds=rounds, progress=progress.step, **ends)
        slow = [float(trial.ns)]
        if trial.is_slow and not interrupts and _slow_calls(call, slow, prepare, rounds):
            interrupts.append(True)
    more = f", and {len(slow)} calls of the kernel" if trial.is_slow else ""
    say_how_many(timings, rounds, more, bool(interrupts), 2 * _BUDGET_NS, notes)
    judge(timings, notes)
    return _report(call, trial, timings, slow, ways, notes)


def _look_at(call: Call, trial: Trial, before: Snapshot, notes: Notes) -> Callable[[], None] | None:
    """Add warnings about the trial. Returns a function to call before each run of the kernel, or None."""
    if trial.is_slow:
        calls = max(1, _BUDGET_NS // trial.ns)
        often = "not called again" if calls == 1 else f"timed call by call, {calls} times at most"
        notes.add(f"one call takes {trial.ns / 1e9:.3g} s: it is {often}")
    if trial.is_numba and not call.is_for_numba:
        notes.add(
            "Numba's own dispatcher makes this call, because of the kernel and not of its arguments: the additional time is "
            "counted as the kernel's own"
        )
    if before.unseen:
        notes.add(f"what the kernel changes in {_listed(before.unseen)} is not seen and not undone, and it is called many times")
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


def _report(call: Call, trial: Trial, timings: Timings, slow: list[float], ways: list, notes: Notes) -> OverheadReport:
    times = timings.calls
    kernel, nothing = call.kernel, times["empty"] * 0
    costs = argument_costs(call, times, {i: explain(value) for i, value in call.read})
    passing = times.get("passing", times["empty"])
    keywords = passing - times["by position"] if "by position" in times else None
    result = None
    if "passing" in times:  # declared outputs
        result = times["empty"] - passing
    elif "returning" in times:
        result = times["returning"] - passing
    elif trial.result is not None:
        notes.add(f"the time to return its {type_name(type(trial.result))} is counted as the kernel's own")
    overhead = passing + (result or nothing)
    total = times["call"] if "call" in times else Samples(np.array(slow))
    alone = total - (overhead if "call" in times else overhead.median)
    itself = passing - (keywords or nothing) - sum((cost.total for cost in costs), nothing)
    others = tuple(Alternative(label, times.get(("way", label)), why) for label, _, why in ways)
    parts = {repr(cost.name): cost.total for cost in costs}
    name_what_is_lost(parts | {"the call itself": itself, "keywords": keywords, "the result": result}, times["empty"], notes)
    return OverheadReport(
        kernel=kernel.__qualname__, arguments=tuple(costs), call=itself, keywords=keywords, result=result,
        result_type=None if trial.result is None else type_name(type(trial.result)), passing=passing, overhead=overhead,
        alone=alone, total=total, noise=times["control"] / times["empty"], alternatives=others, warnings=tuple(notes.said),
        machine=files.machine(), notes=explained(call),
    )  # fmt: skip


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
