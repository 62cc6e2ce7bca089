"""What ``measure`` returns: tables for the shell and for notebooks, a plot, and plain data."""

import html
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from . import tables
from .timing import Samples

__all__ = ["Alternative", "ArgumentCost", "OverheadReport"]


class ArgumentCost(NamedTuple):
    """What one argument adds to a call, in nanoseconds."""

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
    """Of it: the producer's export. None if the producer has no part: memory and values that are read in place."""

    @property
    def own(self) -> Samples:
        """Of it: what this package adds (Numba, where that makes the call)."""
        return self.total if self.producer is None else self.total - self.producer


class Alternative(NamedTuple):
    """Another way to pass the same arguments to a kernel that does nothing."""

    label: str
    overhead: Samples | None
    why_not: str
    """Why there is no measurement."""


class _Row(NamedTuple):
    """A line of the tables."""

    label: str
    what: str
    path: str
    time: Samples
    producer: Samples | None


@dataclass(frozen=True, eq=False)
class OverheadReport:
    """What a call costs, in nanoseconds: medians and interquartile ranges over rounds. Made by :func:`~fastexchange.measure`.

    ``overhead = passing + result`` and ``passing = call + arguments + keywords`` in every round, and ``total = overhead + alone``
    but for slow kernels, which are not timed in rounds: there it is the overhead's median.
    """

    kernel: str
    arguments: tuple[ArgumentCost, ...]
    call: Samples
    """The call itself: CPython's part, and what the arguments share."""
    keywords: Samples | None
    """What the call takes longer than one by position; None if it is one."""
    result: Samples | None
    """Handing over the result; None if the kernel returns nothing, or this cannot be told from its own time."""
    result_type: str | None
    passing: Samples
    """The overhead without the result, which is what alternatives are compared with."""
    overhead: Samples
    """Of the call without the kernel's own time."""
    alone: Samples
    """The kernel's own time."""
    total: Samples
    noise: Samples
    """The ratio of two measurements of the same call, ideally 1."""
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    """What makes the numbers unfit, if anything."""
    machine: dict

    @property
    def rounds(self) -> int:
        """How many rounds were made."""
        return self.overhead.rounds

    # ---- text --------------------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> list[_Row]:
        """What the overhead consists of."""
        rows = [_Row(a.name, a.type, a.path, a.total, a.producer) for a in self.arguments]
        rows.append(_Row("the call itself", "", "", self.call, None))
        if self.keywords is not None:
            rows.append(_Row("keywords", "", "", self.keywords, None))
        if self.result is not None:
            rows.append(_Row("the result", self.result_type or "", "", self.result, None))
        return rows

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """IPython's terminal shows the table."""
        printer.text(str(self))

    @property
    def _this_call(self) -> str:
        return "this call" if self.result is None else "this call, without its result"

    @property
    def _headline(self) -> str:
        share = min(1.0, max(0.0, self.overhead.median / (self.total.median or 1.0)))
        return (
            f"{self.kernel}(): {_time(self.total.median)} a call, of which overhead {_time(self.overhead.median)} "
            f"({share:.0%}), kernel {_time(max(0.0, self.alone.median))}"
        )

    @property
    def _footing(self) -> str:
        differ = abs(self.noise.median - 1)
        return f"Medians of {self.rounds} rounds, ±: interquartile range; the same call measured twice differs by {differ:.1%}."

    def __str__(self):
        heads = ("argument", "type", "path", "ns", "±", "producer", "here")
        lines: list[tuple[str, ...]] = [
            (
                row.label, row.what, row.path, f"{row.time.median:.1f}", f"{row.time.spread:.1f}",
                "" if row.producer is None else f"{row.producer.median:.1f}",
                f"{(row.time if row.producer is None else row.time - row.producer).median:.1f}",
            )
            for row in self._rows
        ]  # fmt: skip
        lines.append(("overhead", "", "", f"{self.overhead.median:.1f}", f"{self.overhead.spread:.1f}", "", ""))
        blocks = [self._headline, _table(heads, lines, left=3)]
        if self.alternatives:
            others = [(self._this_call, f"{self.passing.median:.1f}", f"{self.passing.spread:.1f}", "1")]
            for way in self.alternatives:
                if way.overhead is None:
                    others.append((way.label, "-", "", ""))
                else:
                    ratio = (way.overhead / self.passing).median
                    others.append((way.label, f"{way.overhead.median:.1f}", f"{way.overhead.spread:.1f}", f"{ratio:.2f}"))
            missing = [f"- {way.label}: {way.why_not}" for way in self.alternatives if way.overhead is None]
            blocks.append("\n".join([_table(("overhead of", "ns", "±", "x"), others, left=1), *missing]))
        blocks.append("\n".join([self._footing, *(f"warning: {sentence}" for sentence in self.warnings)]))
        return "\n\n".join(blocks)

    # ---- notebooks ---------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        most = max([row.time.median for row in self._rows] + [1e-9])
        lines = []
        for row in self._rows:
            producer = 0.0 if row.producer is None else min(max(0.0, row.producer.median), row.time.median)
            here = max(0.0, row.time.median - producer)
            note = f"{row.time.median:.1f} ± {row.time.spread:.1f}"
            lines.append(_HTML_ROW.format(
                label=_escaped(row.label), what=_escaped(row.what), path=_escaped(row.path), note=note,
                bar=_bar(producer / most, _PRODUCER_COLOUR) + _bar(here / most, _OWN_COLOUR),
                split="" if row.producer is None else f"{row.producer.median:.1f} + {(row.time - row.producer).median:.1f}",
            ))  # fmt: skip
        others = []
        known = [way.overhead.median for way in self.alternatives if way.overhead is not None]
        most = max([self.passing.median, *known])
        for label, samples, why in [(self._this_call, self.passing, ""), *self.alternatives] if self.alternatives else []:
            if samples is None:
                others.append(_HTML_WAY.format(label=_escaped(label), note="-", bar=_escaped(why), ratio=""))
                continue
            colour = _OWN_COLOUR if samples is self.passing else _OTHER_COLOUR
            others.append(_HTML_WAY.format(
                label=_escaped(label), note=f"{samples.median:.1f}", ratio=f"{(samples / self.passing).median:.2f} x",
                bar=_bar(samples.median / most, colour),
            ))  # fmt: skip
        found = [_HTML_HEAD.format(headline=_escaped(self._headline)), "<table>", _HTML_HEADS, *lines, "</table>"]
        if others:
            found += ["<table>", _HTML_WAY_HEADS, *others, "</table>"]
        found.append(f"<p><small>{_escaped(self._footing)} {_HTML_LEGEND}</small></p>")
        found += [f"<p><b>warning:</b> {_escaped(sentence)}</p>" for sentence in self.warnings]
        return f"<div>{''.join(found)}</div>"

    def plot(self, ax=None):
        """Stacked bars: per argument the producer's part and this package's, the call itself, the result.

        `ax`: the matplotlib axes to draw on; a new figure's if None. Returns the axes. Raises ImportError without matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("OverheadReport.plot() needs matplotlib: pip install matplotlib") from error
        rows = self._rows
        if ax is None:
            _, ax = plt.subplots(figsize=(7, 0.5 + 0.35 * (len(rows) + 1)), layout="constrained")
        labels = [(f"{row.label}  ({row.path})" if row.path else row.label).replace("$", r"\$") for row in rows]
        producer = [0.0 if row.producer is None else max(0.0, min(row.producer.median, row.time.median)) for row in rows]
        here = [max(0.0, row.time.median - part) for row, part in zip(rows, producer, strict=True)]
        places = range(len(rows))
        if any(producer):
            ax.barh(places, producer, color=_PRODUCER_COLOUR, label="the producer's export")
        ax.barh(places, here, left=producer, color=_OWN_COLOUR, label="fastexchange")
        for place, row in zip(places, rows, strict=True):
            ax.annotate(f" {row.time.median:.1f}", (max(0.0, row.time.median), place), va="center", fontsize="small")
        ax.set_yticks(list(places), labels)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlabel("ns per call")
        ax.set_title(self._headline.replace("$", r"\$"), fontsize="small", loc="left")
        ax.spines[["top", "right"]].set_visible(False)
        if any(producer):
            ax.legend(frameon=False, fontsize="small")
        return ax

    # ---- data --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict:
        """All of it in dicts, lists, strings and numbers. Times in nanoseconds: ``median_ns``, ``iqr_ns``, ``samples_ns``."""
        return {
            "kernel": self.kernel,
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
            "noise": {"median": self.noise.median, "iqr": self.noise.spread},
            "warnings": list(self.warnings),
            "machine": self.machine,
        }  # fmt: skip

    def to_json(self, path: "str | Path | None" = None) -> str:
        """:meth:`to_dict` as JSON, also written to the file `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_pandas(self):
        """A ``pandas.DataFrame``: a row for each part of the call. Raises ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("OverheadReport.to_pandas() needs pandas: pip install pandas") from error
        rows = [*self._rows, _Row("the kernel", "", "", self.alone, None)]
        return pandas.DataFrame(
            {
                "part": [row.label for row in rows],
                "type": [row.what for row in rows],
                "path": [row.path for row in rows],
                "median_ns": [row.time.median for row in rows],
                "iqr_ns": [row.time.spread for row in rows],
                "producer_ns": [None if row.producer is None else row.producer.median for row in rows],
                "rounds": [row.time.rounds for row in rows],
            }
        )


def _data(samples: Samples | None) -> dict | None:
    if samples is None:
        return None
    return {"median_ns": samples.median, "iqr_ns": samples.spread, "samples_ns": samples.values.round(3).tolist()}


def _time(ns: float) -> str:
    """A time with a unit that fits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def _table(heads: tuple[str, ...], lines: list[tuple[str, ...]], left: int) -> str:
    """Columns, the first `left` of them aligned left."""
    return tables.plain(heads, [tables.Row(line) for line in lines], range(left))


# ---- HTML ----------------------------------------------------------------------------------------------------------

_OWN_COLOUR, _PRODUCER_COLOUR, _OTHER_COLOUR = "#d1632a", "#8aa4bf", "#b8b8b8"
_CELL = 'style="text-align:left"'
_HTML_HEAD = "<p><b>{headline}</b></p>"
_HTML_HEADS = (
    f"<tr><th {_CELL}>argument</th><th {_CELL}>type</th><th {_CELL}>path</th><th>ns</th><th></th>"
    "<th>producer + here</th></tr>"
)
_HTML_ROW = (
    f"<tr><td {_CELL}>{{label}}</td><td {_CELL}>{{what}}</td><td {_CELL}>{{path}}</td><td>{{note}}</td>"
    f'<td style="text-align:left;min-width:220px">{{bar}}</td><td>{{split}}</td></tr>'
)
_HTML_WAY_HEADS = f"<tr><th {_CELL}>overhead of</th><th>ns</th><th></th><th></th></tr>"
_HTML_WAY = (
    f"<tr><td {_CELL}>{{label}}</td><td>{{note}}</td>"
    f'<td style="text-align:left;min-width:220px">{{bar}}</td><td>{{ratio}}</td></tr>'
)
_HTML_LEGEND = (
    f'<span style="color:{_PRODUCER_COLOUR}">&#9632;</span> the producer\'s export '
    f'<span style="color:{_OWN_COLOUR}">&#9632;</span> fastexchange'
)


def _bar(share: float, colour: str) -> str:
    width = max(0, round(200 * share))
    return f'<span style="display:inline-block;height:0.8em;width:{width}px;background:{colour}"></span>' if width else ""


def _escaped(text: str) -> str:
    return html.escape(text)
