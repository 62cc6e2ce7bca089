"""``python perf/run.py``: every row of the benchmark, then the project's targets beside what was measured.

The README in this folder says what each row is and why.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import processes
import report
import rows
import two_threads
from groups import Group
from targets import per_scalar, slope, slope_beyond, targets

from fastexchange.measuring import figures, files
from fastexchange.measuring.timing import Samples, time_statements

SECTIONS = {
    "calls": "what calls cost, in this process",
    "import": "importing the package",
    "first": "a kernel's first call, with a warm disk cache",
    "cold": "a kernel's first call, with nothing cached; not with --quick",
    "new": "a first result of a new installation from a wheel; not with --quick",
    "memory": "of a kernel and of a signature; not with --quick",
    "asked": "calls with PyTorch's tensors where their layout is unknown",
    "tableless": "calls with tensors of a PyTorch without an exchange table",
    "threads": "two threads that call at once",
}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _slopes(times: dict[str, Samples]) -> str:
    """What one more argument costs."""
    lines = []
    calls = {"numpy": ("empty", "c", "fast", "njit"), "torch": ("c", "managed", "fast")}
    calls |= {f"unpacked/{framework}": ("empty", "c", "fast") for framework in ("numpy", "torch")}
    calls |= {"buffer": ("c", "fast", "njit"), "dunder": ("c", "fast")}
    for framework, kinds in calls.items():
        if f"{framework}/1/fast" in times:
            for who in kinds:
                lines += [
                    (f"{framework}, {who}{beyond}", *report.cells(samples))
                    for beyond, take in (("", slope), (", beyond 32", slope_beyond))
                    for samples in [take(times, f"{framework}/{{}}/{who}")]
                ]
    for kind in ("float", "int", "bool"):
        for who in ("c", "fast", "njit"):
            lines.append((f"{kind}, {who}", *report.cells(per_scalar(times, kind, who))))
    return f"Each further argument\n{report.table(('argument', 'ns', 'IQR'), lines)}\n"


def _threads(times: dict[str, Samples]) -> str:
    """Calls of two threads in the time of one thread's."""
    lines = []
    for size in two_threads.SIZES:
        for kind, label in two_threads.KINDS.items():
            alone, two = (times[f"threads/{size}/{kind}/{count}"] for count in (1, 2))
            each = [report.cells(samples, 0)[0] for samples in (alone, two)]
            lines.append((f"{size}: {label}", *each, *report.cells(alone / two, 2)))
    heads = ("kernel", "1 thread, ns", "2 threads, ns", "throughput x", "IQR")
    return f"2 threads, each with a tensor of its own: nanoseconds over all calls\n{report.table(heads, lines)}\n"


def _warnings(times: dict[str, Samples]) -> list[str]:
    """A sentence per control whose two rows, which are the same call, differ by more than 5 %."""
    found = []
    for framework in ("numpy", "torch"):
        if f"control/{framework}/a" in times:
            ratio = times[f"control/{framework}/b"] / times[f"control/{framework}/a"]
            if not (ratio.is_measurable() and abs(ratio.median - 1) <= 0.05):
                found.append(f"The same call twice ({framework}), ratio: {figures.ratio(ratio)}. This run is unfit to judge by.")
    return found


def _extra(times: dict[str, Samples]) -> list[str]:
    """The tables of the rows that are no calls in this process."""
    parts = {
        ("import/", "start/", "cold/", "new/"): ("New processes", "ms", 1e6),
        ("memory/",): ("Private memory", "kB", 1e3),
        ("asked/",): ("3 PyTorch CPU tensors, PyTorch asked about each", "ns", 1),
        ("tableless/",): ("3 PyTorch CPU tensors, PyTorch without an exchange table", "ns", 1),
    }
    tables = []
    for prefixes, (title, unit, of) in parts.items():
        labels = {key: label for key, label in processes.LABELS.items() if key.startswith(prefixes)}
        tables.append(report.rows_table(title, labels, times, unit, of))
    return [table for table in tables if table]


def _options() -> argparse.Namespace:
    sections = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"Sections: {sections}.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and not all sections: a minute, noisier")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    options = parser.parse_args()
    if options.json:  # before anything is measured
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
        except OSError as error:
            parser.error(f"--json: {error}")
    return options


def main() -> int:
    """Run the benchmark."""
    options = _options()
    sections = options.only or [name for name in SECTIONS if not options.quick or name not in ("cold", "new", "memory")]
    rounds, starts = (9, 2) if options.quick else (41, 5)

    described = files.machine()
    print(files.headline(described))
    times: dict[str, Samples] = {}
    groups: list[Group] = []
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def ends(section: str) -> None:
        seconds[section] = round(time.perf_counter() - start - sum(seconds.values()), 1)

    if "calls" in sections:
        _progress("compiling …")
        for sentence in rows.left_out():
            print(sentence)
        groups = rows.groups()
        statements = {row.key: row.statement for group in groups for row in group.rows}
        times, loop = time_statements(statements, rounds=rounds, progress=lambda n, of: _progress(f"round {n} of {of}"))
        times["loop"] = loop
        ends("calls")
    for name, measure, turns in (
        ("import", processes.imports, starts),
        ("first", processes.first_calls, starts),
        ("cold", processes.cold_calls, 2),
        ("new", processes.new_installations, 3),
        ("memory", processes.memory, 2),
        ("asked", processes.asked, rounds),
        ("tableless", processes.without_table, rounds),
        ("threads", two_threads.measure, 3 if options.quick else 7),
    ):
        if name in sections:
            _progress(f"{SECTIONS[name]} …")
            times |= measure(turns)
            ends(name)
    _progress("")

    if groups:
        print(f"Nanoseconds per call, median and interquartile range of {rounds} rounds.")
        print(f"The loop around the call, {loop.median:.1f} ns, is subtracted.\n")
        for group in groups:
            print(report.group_table(group, times))
        print(_slopes(times))
    for table in _extra(times):
        print(table)
    if "threads" in sections:
        print(_threads(times))
    found = list(targets(times))
    verdict = {True: "met", False: "MISSED", None: "-"}
    lines = [(target.call, target.must_be, target.measured, verdict[target.met]) for target in found]
    print(report.table(("target", "must be", "measured", "met?"), lines, left=(0, 1, 2, 3)))
    for sentence in _warnings(times):
        print(sentence)
    print(f"Seconds: {', '.join(f'{name} {took:.0f}' for name, took in seconds.items())}; in all {sum(seconds.values()):.0f}.")
    if options.json:
        labels = processes.LABELS | two_threads.LABELS
        report.write_json(options.json, described, rounds, groups, labels, times, found, seconds)
    return 1 if options.strict and any(target.met is False for target in found) else 0


if __name__ == "__main__":
    sys.exit(main())
