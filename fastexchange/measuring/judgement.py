"""A report's warnings, which say that a measurement is unfit, and notes, which explain it."""

import sys
import warnings

import numpy as np

from . import figures
from .timing import Samples, Timings, clock_tick
from .trial import Call

__all__ = ["Notes", "explained", "judge", "name_what_is_lost", "say_how_many"]


class Notes:
    """A report's warnings. Each is also issued at once."""

    def __init__(self):
        self.said: list[str] = []

    def add(self, sentence: str) -> None:
        self.said.append(sentence)
        warnings.warn(f"measure(): {sentence}", RuntimeWarning, stacklevel=_depth())


def _depth() -> int:
    """The stack level of the caller of this package's measuring, for a warning that the caller's caller issues."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame, depth = frame.f_back, depth + 1
    return depth


def say_how_many(timings: Timings, rounds: int, more: str, is_interrupted: bool, budget_ns: int, notes: Notes) -> None:
    """Warn if there are fewer than `rounds` rounds. `more`: what there is besides."""
    done = f"{timings.loop.rounds} of {rounds} rounds{more}"
    if is_interrupted:
        notes.add(f"interrupted: there are {done}")
    elif timings.loop.rounds < rounds:
        notes.add(f"there are {done}, as many as {budget_ns // 10**9} seconds have room for")


def judge(timings: Timings, notes: Notes) -> None:
    """Warn if the numbers are unfit: noise, drift, a coarse clock."""
    empty, control = timings.calls["empty"], timings.calls["control"]
    noise = abs((control / empty).median - 1)
    if not (control / empty).is_measurable():
        notes.add(f"noise: the overhead is {figures.time(empty)}; close what else is running and measure again")
    elif noise > 0.05:
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


def name_what_is_lost(parts: dict[str, Samples | None], overhead: Samples, notes: Notes) -> None:
    """Warn of parts that are not measurable and whose spread is large beside the overhead."""
    lost = [
        name
        for name, samples in parts.items()
        if samples is not None and not samples.is_measurable() and not samples.spread <= 0.15 * overhead.median
    ]
    if lost and overhead.is_measurable():
        notes.add(f"noise: what {', '.join(lost)} cost is not measurable here; close what else is running and measure again")


def explained(call: Call) -> tuple[str, ...]:
    """Sentences that explain why this kernel's arguments cost more than usual."""
    if call.is_for_numba or not call.kernel._native.native.needs_owning_exports:
        return ()
    return (
        "This kernel gives up the GIL or runs Python, so each call holds owning exports of its tensors, and of PyTorch's the "
        "storage: that costs more per argument than borrowing, which other kernels do.",
    )
