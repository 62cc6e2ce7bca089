"""What the notebooks share: optional packages, tables, and the look of the plots."""

import importlib
import math
import warnings

import matplotlib.pyplot as plt
from IPython.display import display

from fastexchange.measuring.figures import figure
from fastexchange.measuring.timing import Samples

__all__ = ["BLUE", "GREY", "LIMIT", "OURS", "label_lines", "median", "optional", "ratio", "stacked", "table", "time_text"]

OURS, LIMIT, BLUE, GREY = "#d1632a", "#1a1a1a", "#6f8fae", "#a3a3a3"
"""Of this package, of the limit, of what others' work takes part in, of others."""

_NAMES = {"torch": "PyTorch", "jax": "JAX", "tvm_ffi": "apache-tvm-ffi", "pyarrow": "PyArrow"}

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e8e8e8",
        "axes.axisbelow": True,
        "lines.linewidth": 2,
        "lines.markersize": 4,
    }
)
# A report shows its warnings itself.
warnings.filterwarnings("ignore", message=r"measure\(\): ", category=RuntimeWarning)


def optional(name: str):
    """The module `name`; None, with a sentence that says so, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{_NAMES.get(name, name)} is not installed: what needs it is left out.")
        return None


def table(heads, lines, left: int = 1) -> None:
    """Show a table; its first `left` columns are aligned left."""
    rule = ["---" if i < left else "---:" for i in range(len(heads))]
    rows = [heads, rule, *lines]
    text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
    display({"text/markdown": text, "text/plain": text}, raw=True)


def median(samples: Samples) -> float:
    """The median to draw; NaN, which plots leave out, where it means nothing."""
    return samples.median if samples.is_measurable() else math.nan


def ratio(value: "float | Samples") -> str:
    """A ratio with as many digits as say something: ``0.97 x``, ``2.5 x``, ``13 x``; or that it is not measurable."""
    if isinstance(value, Samples):
        return figure(value, ratio)
    return f"{value:.{2 if value < 2 else 1 if value < 10 else 0}f} x"


def time_text(ns: "float | Samples") -> str:
    """Nanoseconds with a unit that fits; or that they are not measurable."""
    if isinstance(ns, Samples):
        return figure(ns, time_text)
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def stacked(ax, rows: dict[str, dict[str, Samples]], colours: dict[str, str]) -> list[str]:
    """A bar of parts for each row, the whole at its end. Returns which parts are drawn: a legend names those."""
    drawn = []
    for place, parts in enumerate(rows.values()):
        left, is_whole = 0.0, all(samples.is_measurable() for samples in parts.values())
        for part, samples in parts.items() if is_whole else ():
            ax.barh(place, samples.median, left=left, color=colours[part], height=0.6, label=None if part in drawn else part)
            drawn += [part] if part not in drawn else []
            left += samples.median
        ax.annotate(f" {time_text(sum(list(parts.values())[1:], next(iter(parts.values()))))}", (left, place), va="center")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    return drawn


def label_lines(ax, gap: float = 0.06) -> None:
    """Write each line's label at its right end instead of a legend, apart from each other by `gap` of the axes' height."""
    lines = [line for line in ax.get_lines() if not line.get_label().startswith("_")]
    bottom, top = ax.get_ylim()
    scale = math.log if ax.get_yscale() == "log" else float

    def height(line) -> float:
        last = next((y for y in reversed(line.get_ydata()) if math.isfinite(y)), bottom)
        return (scale(last) - scale(bottom)) / (scale(top) - scale(bottom))

    place = -gap
    for line in sorted(lines, key=height):
        place = max(height(line), place + gap)
        ax.annotate(
            line.get_label(), (1.02, place), xycoords="axes fraction", va="center", color=line.get_color(), fontsize=9,
            fontweight="bold" if line.get_color() == OURS else "normal",
        )  # fmt: skip
