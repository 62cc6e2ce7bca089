"""Promises, each with what was measured: the measure of a run."""

from collections.abc import Callable
from dataclasses import dataclass

from fastexchange.measuring import figures
from fastexchange.measuring.timing import Samples


@dataclass(frozen=True)
class Target:
    """One promise. `met` is None when the run has no rows for it, or what it has is not measurable."""

    call: str
    must_be: str
    measured: str
    met: bool | None


_NOT_MEASURED = "not measured"


class Book:
    """Targets over the samples of a run; a target whose rows are missing is entered as not measured."""

    def __init__(self, times: dict[str, Samples]):
        self.times = times
        self.targets: list[Target] = []

    def add(self, call: str, must_be: str, quantity: Callable[[dict[str, Samples]], Samples], bound: float, unit: str):
        """`bound` is a lower bound for the unit "x faster", else an upper one."""
        try:
            samples = quantity(self.times)
        except KeyError:
            self.targets.append(Target(call, must_be, _NOT_MEASURED, None))
            return
        digits = 1 if unit in ("ns", "ms") else 2
        if not samples.is_measurable(signed=True):  # a difference that is small beside the bound is below it all the same
            surely = unit != "x faster" and samples.has_measurable_parts and samples.median + samples.spread <= bound
            measured = figures.figure(samples, f"{{:.{digits}f}} {unit}".format, signed=True)
            self.targets.append(Target(call, must_be, measured, True if surely else None))
            return
        met = samples.median >= bound if unit == "x faster" else samples.median <= bound
        measured = f"{samples.median:.{digits}f} {unit} ± {samples.spread:.{digits}f}"
        self.targets.append(Target(call, must_be, measured, met))
