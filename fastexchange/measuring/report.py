"""The result of ``measure``: tables for the shell, and plain data. ``pictures`` draws it for notebooks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..ground.once import cached_property
from . import figures, pictures, tables
from .timing import Samples

__all__ = ["Alternative", "ArgumentCost", "OverheadReport", "Part"]


class ArgumentCost(NamedTuple):
    """The cost of one argument in a call, in nanoseconds."""

    name: str
    position: int
    type: str
    numba_type: str
    path: str
    """``c-exchange``, ``ndarray``, ``buffer``, ``dunder``, ``scalar``, ``tuple``, ``list``; ``numba`` if that makes the call."""
    reasons: tuple[str, ...]
    """Why it takes no faster path."""
    total: Samples
    producer: Samples | None
    """The producer's part, its export. None if memory or values are read in place."""

    @property
    def own(self) -> Samples:
        """This package's part (Numba's, if that makes the call)."""
        return self.total if self.producer is None else self.total - self.producer


class Alternative(NamedTuple):
    """Another way to pass the same arguments to a kernel that does nothing."""

    label: str
    overhead: Samples | None
    why_not: str
    """Why there is no measurement."""


class Part(NamedTuple):
    """A part of the overhead: a line of the tables, a bar of the plot."""

    label: str
    what: str
    path: str
    time: Samples
    producer: Samples | None

    @property
    def own(self) -> Samples:
        """The part without the producer's."""
        return self.time if self.producer is None else self.time - self.producer


@dataclass(frozen=True, eq=False)
class OverheadReport:
    """The cost of a call, in nanoseconds: medians and interquartile ranges over rounds. Made by :func:`~fastexchange.measure`.

    ``overhead = passing + result`` and ``passing = call + arguments + keywords`` in every round, and ``total = overhead + alone``
    but for slow kernels, which are not timed in rounds: there it is the overhead's median.

    A figure whose spread exceeds it, or that is negative, is not shown but as "not measurable here (spread …)"; as data it is
    what was measured, and marked: ``Samples.is_measurable()``, in dicts and data frames ``measurable``.
    """

    kernel: str
    arguments: tuple[ArgumentCost, ...]
    call: Samples
    """The call itself: CPython's part, and what the arguments share."""
    keywords: Samples | None
    """The additional time of keywords; None without keywords."""
    result: Samples | None
    """The time for the result; None if the kernel returns None, or it cannot be separated from the kernel's own time."""
    result_type: str | None
    passing: Samples
    """The overhead without the result: alternatives are compared with this."""
    overhead: Samples
    """The time of the call without the kernel's own."""
    alone: Samples
    """The kernel's own time; of a launch the time of the driver's function."""
    total: Samples
    noise: Samples
    """The ratio of two measurements of the same call, ideally 1."""
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    """Why the numbers are unfit, if they are."""
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Explanations: why this kernel's arguments cost more than usual."""
    callee: str = "the kernel"
    """Whose own time `alone` is; of a launch the driver's function."""

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.overhead.rounds

    # ---- text --------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the overhead."""
        parts = [Part(a.name, a.type, a.path, a.total, a.producer) for a in self.arguments]
        parts.append(Part("the call itself", "", "", self.call, None))
        if self.keywords is not None:
            parts.append(Part("keywords", "", "", self.keywords, None))
        if self.result is not None:
            parts.append(Part("the result", self.result_type or "", "", self.result, None))
        return parts

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """IPython's terminal shows the table."""
        printer.text(str(self))

    @property
    def this_call(self) -> str:
        """The label of the call with which alternatives are compared."""
        return "this call" if self.result is None else "this call, without its result"

    @property
    def headline(self) -> str:
        """The report in one line."""
        share = ""
        if self.overhead.is_measurable() and self.total.is_measurable():
            share = f" ({min(1.0, self.overhead.median / (self.total.median or 1.0)):.0%})"
        return (
            f"{self.kernel}(): {figures.time(self.total)} a call, of which overhead {figures.time(self.overhead)}{share}, "
            f"{self.callee.removeprefix('the ')} {figures.time(self.alone)}"
        )

    @property
    def footing(self) -> str:
        """The meaning of the figures, and how far to trust them."""
        twice = f"the ratio of the same call measured twice is {figures.ratio(self.noise)}"
        if self.noise.is_measurable():
            twice = f"the same call measured twice differs by {abs(self.noise.median - 1):.1%}"
        if self.rounds == 1:
            return f"One round, so no spread (±) is measurable: measure with more rounds; {twice}."
        return f"Medians of {self.rounds} rounds, ±: interquartile range; {twice}."

    def __str__(self):
        heads = ("argument", "type", "path", "ns", "±", "producer", "here")
        lines: list[tuple[str, ...]] = []
        for part in self.parts:
            producer = "" if part.producer is None else _number(part.producer)
            lines.append((part.label, part.what, part.path, *_with_spread(part.time), producer, _number(part.own)))
        lines.append(("overhead", "", "", *_with_spread(self.overhead), "", ""))
        blocks = [self.headline, _table(heads, lines, left=3)]
        if self.alternatives:
            others = [(self.this_call, *_with_spread(self.passing), "1")]
            for way in self.alternatives:
                if way.overhead is None:
                    others.append((way.label, "-", "", ""))
                else:
                    others.append((way.label, *_with_spread(way.overhead), figures.ratio(way.overhead / self.passing)))
            missing = [f"- {way.label}: {way.why_not}" for way in self.alternatives if way.overhead is None]
            blocks.append("\n".join([_table(("overhead of", "ns", "±", "x"), others, left=1), *missing]))
        blocks.append("\n".join([self.footing, *self.notes, *(f"warning: {sentence}" for sentence in self.warnings)]))
        return "\n\n".join(blocks)

    # ---- notebooks ---------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        return pictures.html(self)

    def plot(self, ax: Any = None) -> Any:
        """Stacked bars: per argument the producer's part and this package's, the call itself, the result.

        `ax`: the matplotlib axes to draw on; a new figure's if None. Returns the axes. Raises ImportError without matplotlib.
        """
        return pictures.draw(self, ax)

    # ---- data --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, strings and numbers. Times in nanoseconds: ``median_ns``, ``iqr_ns``, ``samples_ns``.

        ``measurable`` beside them: whether the median means anything.
        """
        return {
            "kernel": self.kernel,
            "callee": self.callee,
            "rounds": self.rounds,
            "total": _data(self.total),
            "passing": _data(self.passing),
            "overhead": _data(self.overhead),
            "alone": _data(self.alone),
            "call": _data(self.call),
            "keywords": _data(self.keywords),
            "result": _data(self.result),
            "result_type": self.result_type,
            "arguments": [
                {
                    "name": a.name, "position": a.position, "type": a.type, "numba_type": a.numba_type, "path": a.path,
                    "reasons": list(a.reasons), "total": _data(a.total), "producer": _data(a.producer), "own": _data(a.own),
                }
                for a in self.arguments
            ],
            "alternatives": [
                {"label": way.label, "overhead": _data(way.overhead), "why_not": way.why_not} for way in self.alternatives
            ],
            "noise": {
                "median": self.noise.median, "iqr": self.noise.spread, "measurable": self.noise.is_measurable(),
            },
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "machine": self.machine,
        }  # fmt: skip

    def to_json(self, path: "str | Path | None" = None) -> str:
        """:meth:`to_dict` as JSON, also written to the file `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``: a row for each part of the call, and whether that is measurable.

        Raises ImportError without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("OverheadReport.to_pandas() needs pandas: pip install pandas") from error
        rows = [*self.parts, Part(self.callee, "", "", self.alone, None)]
        return pandas.DataFrame(
            {
                "part": [row.label for row in rows],
                "type": [row.what for row in rows],
                "path": [row.path for row in rows],
                "median_ns": [row.time.median for row in rows],
                "iqr_ns": [row.time.spread for row in rows],
                "measurable": [row.time.is_measurable() for row in rows],
                "producer_ns": [None if row.producer is None else row.producer.median for row in rows],
                "producer_measurable": [None if row.producer is None else row.producer.is_measurable() for row in rows],
                "rounds": [row.time.rounds for row in rows],
            }
        )


def _data(samples: Samples | None) -> dict | None:
    if samples is None:
        return None
    return {
        "median_ns": samples.median, "iqr_ns": samples.spread, "measurable": samples.is_measurable(),
        "samples_ns": samples.values.round(3).tolist(),
    }  # fmt: skip


def _number(samples: Samples) -> str:
    return figures.figure(samples, "{:.1f}".format)


def _with_spread(samples: Samples) -> tuple[str, str]:
    return _number(samples), figures.spread(samples)


def _table(heads: tuple[str, ...], lines: list[tuple[str, ...]], left: int) -> str:
    """Columns, the first `left` of them aligned left."""
    return tables.plain(heads, [tables.Row(line) for line in lines], range(left))
