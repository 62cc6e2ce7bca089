"""``python perf/bars.py FILE.json [-o FILE.svg]``: three PyTorch tensors, one bar a way to pass them, of a run's file.

The README shows it. The bars' lengths are logarithmic, and a text beside each says how many times as long as fastexchange it
takes. It is readable on light and dark pages.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import report
from table import times_as_much

from fastexchange.measuring.figures import figure

CHART = Path(__file__).parent / "results" / "three-tensors.svg"
WAYS = {
    "fast": "fastexchange", "c": "C by the exchange table", "tvm": "tvm-ffi", "views": "njit(x.numpy(), …)",
    "nanobind": "nanobind",
}  # fmt: skip
"""By the rows' names."""
_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1f2328}rect{fill:#8c959f}.own{fill:#d1632a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#6e7681}.own{fill:#e8834f}}"
)
_LEFT, _WIDTH, _HEIGHT = 190, 420, 30
_LEAST = 0.5
"""The ratio at which a bar has no length."""


def chart(path: Path) -> str:
    """The SVG of the run in the file at `path`."""
    _, times = report.read_json(path)
    ratios = {who: times[f"torch/3/{who}"] / times["torch/3/fast"] for who in WAYS if f"torch/3/{who}" in times}
    longest = max(math.log(ratio.median / _LEAST) for ratio in ratios.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 70} {_HEIGHT * len(ratios) + 10}">',
        f"<title>Three PyTorch tensors: {path.name}</title>", f"<style>{_STYLE}</style>",
    ]  # fmt: skip
    for i, (who, ratio) in enumerate(ratios.items()):
        top, length = 5 + _HEIGHT * i, _WIDTH * math.log(ratio.median / _LEAST) / longest
        said = figure(times[f"torch/3/{who}"], "{:.0f} ns".format) if who == "fast" else figure(ratio, times_as_much)
        own = ' class="own"' if who == "fast" else ""
        lines += [
            f'<text x="{_LEFT - 10}" y="{top + 19}" text-anchor="end">{WAYS[who]}</text>',
            f'<rect{own} x="{_LEFT}" y="{top + 4}" width="{length:.0f}" height="{_HEIGHT - 8}"/>',
            f'<text x="{_LEFT + length + 8:.0f}" y="{top + 19}">{said}</text>',
        ]  # fmt: skip
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Write the chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="what `run.py --json` wrote, in perf/results/")
    parser.add_argument("-o", type=Path, default=CHART, metavar="FILE.svg", help="where to (perf/results/three-tensors.svg)")
    options = parser.parse_args()
    options.o.write_text(chart(options.file), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
