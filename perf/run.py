"""``python perf/run.py``: every row of the benchmark, then the project's targets beside what was measured.

The README in this folder says what each row is and why.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import processes
import report
import rows
from targets import per_scalar, slope, targets

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, time_statements


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _slopes(times: dict[str, Samples]) -> str:
    """What one more argument costs."""
    lines = []
    calls = {"numpy": ("empty", "c", "fast", "njit"), "torch": ("c", "managed", "fast")}
    calls |= {f"unpacked/{framework}": ("empty", "c", "fast") for framework in ("numpy", "torch")}
    for framework, kinds in calls.items():
        if f"{framework}/1/fast" in times:
            for who in kinds:
                samples = slope(times, f"{framework}/{{}}/{who}")
                lines.append((f"{framework}, {who}", f"{samples.median:.1f}", f"{samples.spread:.1f}"))
    for kind in ("float", "int", "bool"):
        for who in ("c", "fast", "njit"):
            samples = per_scalar(times, kind, who)
            lines.append((f"{kind}, {who}", f"{samples.median:.1f}", f"{samples.spread:.1f}"))
    return f"Each further argument\n{report.table(('argument', 'ns', 'IQR'), lines)}\n"


def _starts(times: dict[str, Samples]) -> str:
    """The rows that were measured in new processes, in milliseconds."""
    lines = [
        (key, f"{samples.median / 1e6:.1f}", f"{samples.spread / 1e6:.1f}")
        for key, samples in times.items()
        if key.startswith(("import/", "start/"))
    ]
    return f"New processes, warm disk cache\n{report.table(('what', 'ms', 'IQR'), lines)}\n"


def _asked(times: dict[str, Samples]) -> str:
    """The rows of the process in which the layout of PyTorch's tensors is declared unknown."""
    labels = {"asked/c": rows.C, "asked/fast": rows.OURS, "asked/complex": f"{rows.OURS}, complex64"}
    lines = [(label, f"{times[key].median:.1f}", f"{times[key].spread:.1f}") for key, label in labels.items() if key in times]
    return f"3 PyTorch CPU tensors, PyTorch asked about each\n{report.table(('what', 'ns', 'IQR'), lines)}\n" if lines else ""


def _warnings(times: dict[str, Samples]) -> list[str]:
    """A sentence per control whose two rows, which are the same call, differ by more than 5 %."""
    found = []
    for framework in ("numpy", "torch"):
        if f"control/{framework}/a" in times:
            ratio = (times[f"control/{framework}/b"] / times[f"control/{framework}/a"]).median
            if abs(ratio - 1) > 0.05:
                found.append(
                    f"The same call twice ({framework}) gave a ratio of {ratio:.2f}: this run is unfit to judge by."
                )
    return found


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: half a minute, noisier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    options = parser.parse_args()
    rounds, starts = (9, 2) if options.quick else (41, 9)

    described = files.machine()
    print(files.headline(described))
    for sentence in rows.left_out():
        print(sentence)
    _progress("compiling …")
    groups = rows.groups()
    statements = {row.key: row.statement for group in groups for row in group.rows}
    times, loop = time_statements(statements, rounds=rounds, progress=lambda n, of: _progress(f"round {n} of {of}"))
    times["loop"] = loop
    _progress("new processes …")
    times |= processes.imports(starts)
    times |= processes.first_calls(starts)
    times |= processes.asked(rounds)
    _progress("")

    print(f"Nanoseconds per call, median and interquartile range of {rounds} rounds.")
    print(f"The loop around the call, {loop.median:.1f} ns, is subtracted.\n")
    for group in groups:
        print(report.group_table(group, times))
    print(_slopes(times))
    print(_starts(times))
    print(_asked(times))
    found = list(targets(times))
    verdict = {True: "met", False: "MISSED", None: "-"}
    lines = [(target.call, target.must_be, target.measured, verdict[target.met]) for target in found]
    print(report.table(("target", "must be", "measured", "met?"), lines, left=(0, 1, 2, 3)))
    for sentence in _warnings(times):
        print(sentence)
    if options.json:
        report.write_json(options.json, described, rounds, groups, times, found)
    return 1 if options.strict and any(target.met is False for target in found) else 0


if __name__ == "__main__":
    sys.exit(main())
