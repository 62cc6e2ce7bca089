"""An ``OverheadReport`` in notebooks: HTML with bars, and a plot.

A bar is divided by who takes the time; the legend names only those in the bars. A part that is not measurable
(``timing.is_measurable``) has no bar.
"""

import html as escaping
from typing import TYPE_CHECKING, Any

from ..arguments.kind import OTHER
from . import figures
from .timing import Samples

if TYPE_CHECKING:
    from .report import OverheadReport, Part

__all__ = ["bars", "draw", "html"]

PRODUCER, OWN, NUMBA, UNDIVIDED = "the producer's export", "fastexchange", "Numba's dispatcher", "producer and fastexchange"
COLOURS = {PRODUCER: "#8aa4bf", OWN: "#d1632a", NUMBA: "#6b6b6b", UNDIVIDED: "#c79a77"}
OTHER_COLOUR = "#b8b8b8"
"""The colour of alternatives."""


def bars(report: "OverheadReport") -> list[list[tuple[str, float]]]:
    """For each part of the call, in order: who takes how many nanoseconds. Empty for a part that is not measurable."""
    is_numba = any(argument.path == OTHER.path for argument in report.arguments)
    return [_divided(part, is_numba) for part in report.parts]


def _divided(part: "Part", is_numba: bool) -> list[tuple[str, float]]:
    if not part.time.is_measurable():
        return []
    whole = part.time.median
    if is_numba:
        return [(NUMBA, whole)]
    if part.producer is None:
        return [(OWN, whole)]
    if not (part.producer.is_measurable() and part.own.is_measurable()):
        return [(UNDIVIDED, whole)]
    return [(PRODUCER, min(part.producer.median, whole)), (OWN, max(0.0, whole - part.producer.median))]


def _legend(divided: list[list[tuple[str, float]]]) -> list[str]:
    """The names in the bars, in the order of the colours. The interpreter has a part in the call itself."""
    found = {who for bar in divided for who, _ in bar}
    return [who for who in COLOURS if who in found]


# ---- plot ------------------------------------------------------------------------------------------------------------


def draw(report: "OverheadReport", ax: Any) -> Any:
    """See :meth:`OverheadReport.plot`."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("OverheadReport.plot() needs matplotlib: pip install matplotlib") from error
    rows, divided = report.parts, bars(report)
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 0.5 + 0.35 * (len(rows) + 1)), layout="constrained")
    legend = _legend(divided)
    for who in legend:
        lefts, widths = [], []
        for bar in divided:
            names = [name for name, _ in bar]
            at = names.index(who) if who in names else len(bar)
            lefts.append(sum(ns for _, ns in bar[:at]))
            widths.append(bar[at][1] if at < len(bar) else 0.0)
        ax.barh(range(len(rows)), widths, left=lefts, color=COLOURS[who], label=who)
    for place, (row, bar) in enumerate(zip(rows, divided, strict=True)):
        text = figures.figure(row.time, "{:.1f}".format)
        ax.annotate(f" {text}", (sum(ns for _, ns in bar), place), va="center", fontsize="small")
    labels = [f"{row.label}  ({row.path})" if row.path else row.label for row in rows]
    ax.set_yticks(range(len(rows)), [label.replace("$", r"\$") for label in labels])
    ax.set_ylim(len(rows) - 0.5, -0.5)  # first part on top, with room for parts without a bar
    ax.margins(x=0.12)
    ax.set_xlim(left=0)
    ax.set_xlabel("ns per call")
    ax.set_title(report.headline.replace("$", r"\$"), fontsize="small", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    if len(legend) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


# ---- HTML ------------------------------------------------------------------------------------------------------------

_CELL = 'style="text-align:left"'
_BAR_CELL = 'style="text-align:left;min-width:220px"'
_HEADS = (
    f"<tr><th {_CELL}>argument</th><th {_CELL}>type</th><th {_CELL}>path</th><th>ns</th><th></th>"
    "<th>producer + here</th></tr>"
)
_ROW = (
    f"<tr><td {_CELL}>{{label}}</td><td {_CELL}>{{what}}</td><td {_CELL}>{{path}}</td><td>{{note}}</td>"
    f"<td {_BAR_CELL}>{{bar}}</td><td>{{split}}</td></tr>"
)
_WAY_HEADS = f"<tr><th {_CELL}>overhead of</th><th>ns</th><th></th><th></th></tr>"
_WAY = f"<tr><td {_CELL}>{{label}}</td><td>{{note}}</td><td {_BAR_CELL}>{{bar}}</td><td>{{ratio}}</td></tr>"


def html(report: "OverheadReport") -> str:
    """Make tables with bars."""
    divided = bars(report)
    most = max([sum(ns for _, ns in bar) for bar in divided] + [1e-9])
    found = [f"<p><b>{_escaped(report.headline)}</b></p>", "<table>", _HEADS]
    for part, bar in zip(report.parts, divided, strict=True):
        split = ""
        if part.producer is not None:
            split = f"{_number(part.producer)} + {_number(part.own)}"
        found.append(_ROW.format(
            label=_escaped(part.label), what=_escaped(part.what), path=_escaped(part.path), note=_with_spread(part.time),
            bar="".join(_bar(ns / most, COLOURS[who]) for who, ns in bar), split=split,
        ))  # fmt: skip
    found.append("</table>")
    if report.alternatives:
        found += ["<table>", _WAY_HEADS, *_ways(report), "</table>"]
    legend = " ".join(f'<span style="color:{COLOURS[who]}">&#9632;</span> {_escaped(who)}' for who in _legend(divided))
    found.append(f"<p><small>{_escaped(report.footing)} {legend}</small></p>")
    found += [f"<p>{_escaped(sentence)}</p>" for sentence in report.notes]
    found += [f"<p><b>warning:</b> {_escaped(sentence)}</p>" for sentence in report.warnings]
    return f"<div>{''.join(found)}</div>"


def _ways(report: "OverheadReport"):
    """The lines of the alternatives."""
    ways = [(report.this_call, report.passing, ""), *report.alternatives]
    most = max([way.median for _, way, _ in ways if way is not None and way.is_measurable()] + [1e-9])
    for label, samples, why in ways:
        if samples is None:
            yield _WAY.format(label=_escaped(label), note="-", bar=_escaped(why), ratio="")
            continue
        colour = COLOURS[OWN] if samples is report.passing else OTHER_COLOUR
        bar = _bar(samples.median / most, colour) if samples.is_measurable() else ""
        ratio = figures.figure(samples / report.passing, "{:.2f} x".format)
        yield _WAY.format(label=_escaped(label), note=_number(samples), ratio=ratio, bar=bar)


def _number(samples: Samples) -> str:
    return figures.figure(samples, "{:.1f}".format)


def _with_spread(samples: Samples) -> str:
    return f"{samples.median:.1f} ± {figures.spread(samples)}" if samples.is_measurable() else _number(samples)


def _bar(share: float, colour: str) -> str:
    width = max(0, round(200 * share))
    return f'<span style="display:inline-block;height:0.8em;width:{width}px;background:{colour}"></span>' if width else ""


def _escaped(text: str) -> str:
    return escaping.escape(text)
