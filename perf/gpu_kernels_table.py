"""``python perf/gpu_kernels_table.py FILE.json``: the table of ``kernels/gpu``, from a run's file.

``--write`` puts it into this README. Ratios are taken round by round, as the run's own are.
"""

import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import report
from cuda_places import PACKAGES
from table import times_as_much

from fastexchange.measuring.figures import figure

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "perf" / "README.md"
BEGIN, END = "<!-- gpu kernels: begin -->\n", "<!-- gpu kernels: end -->\n"


def table(path: Path) -> str:
    """What stands between the README's markers, of the run in the file at `path`."""
    machine, times = report.read_json(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    of_cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in found["results"]:
        of_cases.setdefault((row["kernel"], row["data"]), {})[row["who"]] = row
    packages = [each for each in PACKAGES if any(each in rows for rows in of_cases.values())]
    versions = ", ".join(f"{each} {machine['packages'].get(each)}" for each in ("torch", *packages))
    lines = [
        f"[{path.name}](results/{path.name}), `python perf/gpu_kernels.py`; {machine['device']['name']}, driver "
        f"{machine['device']['driver']}; {versions}; {machine['date'][:10]}; medians of {found['rounds']} rounds, in TB/s.",
        "",
        f"| kernel | data, float32 | compared with | its speed | {' | '.join(packages)} |",
        "|---" * (4 + len(packages)) + "|",
    ]
    for (kernel, data), rows in of_cases.items():
        theirs = times[rows["theirs"]["key"]]
        cells = [_speed(rows["theirs"], theirs)]
        for package in packages:
            ours = times[rows[package]["key"]]
            cells.append(f"{_speed(rows[package], ours)} ({figure(theirs / ours, times_as_much)})")
        lines.append(f"| {kernel} | {data} | {rows['theirs']['label']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _speed(row: dict, times) -> str:
    """Terabytes per second."""
    return figure(times, lambda ns: f"{row['bytes'] / ns / 1000:.2f}")


def file_in(text: str) -> Path:
    """The run that the README's table is of."""
    return README.parent / text.split(BEGIN)[1].split("](")[1].split(")")[0]


if __name__ == "__main__":
    sys.exit(report.write_table(__doc__.splitlines()[0], table, README, BEGIN, END))
