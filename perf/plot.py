"""``python perf/plot.py FILE.json -o perf/results/overhead.svg``: what a call costs against its number of arguments.

One panel for each kind of argument, one line for each who; hand-written C is the limit. Both axes are logarithmic: what costs the
same for each argument is a straight line, and a distance is a ratio. Needs matplotlib. The same run and the
same matplotlib make the same file, byte by byte. Text stays text, in the viewer's own font.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import report

from fastexchange.measuring.timing import Samples

PANELS = {
    "numpy": "NumPy arrays",
    "torch": "PyTorch tensors",
    "buffer": "array.array",
    "dunder": "objects with only __dlpack__",
}
LINES = {
    "nanobind": ("nanobind", "#8c6bb1", "-", 1.4),
    "tvm": ("tvm-ffi, no kernel", "#2b8cbe", "-", 1.4),
    "from_dlpack": ("njit, np.from_dlpack", "#969696", "-", 1.4),
    "njit": ("njit", "#41ab5d", "-", 1.4),
    "c": ("hand-written C", "#252525", "--", 1.4),
    "fast": ("fastexchange", "#d94801", "-", 2.6),
}
"""By the last part of a row's key: label, colour, style and width of its line; the last is drawn on top."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fastexchange",
    "font.family": "sans-serif",
    "font.size": 9,
    "path.simplify": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_GAP = 0.075  # between two labels, of the panel's height
_ROOM = 11  # for the labels, to the right of the lines: how many times as far the axis goes


def lines_of(times: dict[str, Samples], kind: str) -> dict[str, tuple[list[int], list[float]]]:
    """By who: numbers of arguments, ascending, and nanoseconds, where they are measurable. Less than three points are no line."""
    found = {}
    for who in LINES:
        points = {}
        for key, samples in times.items():
            if (match := re.fullmatch(rf"{kind}/(\d+)/{who}", key)) and samples.is_measurable():
                points[int(match[1])] = samples.median
        if len(points) >= 3:
            found[who] = (sorted(points), [points[count] for count in sorted(points)])
    return found


def spread(heights: list[float], gap: float) -> list[float]:
    """The same heights, in the same order, moved up so that neighbours are at least `gap` apart."""
    placed = dict.fromkeys(range(len(heights)), 0.0)
    least = float("-inf")
    for index in sorted(placed, key=lambda i: heights[i]):
        placed[index] = max(heights[index], least)
        least = placed[index] + gap
    return [placed[index] for index in range(len(heights))]


def draw(source: Path, target: Path) -> None:
    """Draw the run in the file `source` into the SVG `target`."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("perf/plot.py needs matplotlib: pip install '.[perf]'") from None
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    machine, times = report.read_json(source)
    panels = {kind: lines for kind in PANELS if (lines := lines_of(times, kind))}
    if not panels:
        raise SystemExit(f"{source} has no rows of calls with several numbers of arguments")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user has set
        matplotlib.rcParams.update(_STYLE)
        columns = min(2, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4.6 * columns, 3.1 * rows + 0.5), facecolor="white", layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        most = max(max(counts) for lines in panels.values() for counts, _ in lines.values())
        low = min(min(ns) for lines in panels.values() for _, ns in lines.values())
        high = max(max(ns) for lines in panels.values() for _, ns in lines.values())
        ticks = sorted({count for lines in panels.values() for counts, _ in lines.values() for count in counts})
        for axes, (kind, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(PANELS[kind], loc="left", fontweight="bold")
            axes.set_yscale("log")
            axes.set_ylim(low / 1.5, high * 1.5)
            axes.set_xscale("log")
            axes.set_xlim(0.9, most * _ROOM)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda ns, _: f"{ns:.0f} ns" if ns < 1000 else f"{ns / 1000:.0f} µs"))
            ends = []
            for who, (counts, ns) in lines.items():
                label, colour, style, width = LINES[who]
                axes.plot(counts, ns, style, color=colour, linewidth=width, marker="o", markersize=3)
                height = axes.transAxes.inverted().transform(axes.transData.transform((1, ns[-1])))[1]  # 1: the panel's
                ends.append((label, colour, counts[-1], height))
            for (label, colour, count, _), height in zip(ends, spread([end[3] for end in ends], _GAP), strict=True):
                weight = "bold" if label == LINES["fast"][0] else "normal"
                at = {"transform": axes.get_xaxis_transform(), "verticalalignment": "center"}
                axes.text(count * 1.12, height, label, color=colour, fontweight=weight, **at)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[-1]:
            axes.set_xlabel("arguments")
        figure.suptitle(f"Nanoseconds per call; Python {machine['python']}, {machine['cpu']}, {machine['date'][:10]}", fontsize=9)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None, "Title": f"Overhead by number of arguments: {source.name}"})
    # matplotlib leaves blanks at the ends of lines
    text = target.read_text(encoding="utf-8")
    target.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def main() -> int:
    """Draw a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what `run.py --json` wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args()
    if options.output.suffix != ".svg":
        parser.error(f"{options.output}: the plot is an .svg")
    try:
        draw(options.file, options.output)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{options.file}: no file of `run.py --json` ({error})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
