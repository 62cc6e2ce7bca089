"""``python perf/kernels.py [TOPIC ...]``: the kernels of ``kernels/`` against the operators of PyTorch, SciPy and NumPy.

A topic is a module ``perf/kernels_<topic>.py`` with a function ``rows()``. The rows of one topic are measured together,
in interleaved rounds as ``fastexchange/measuring/timing.py`` has them; the ratio is taken round by round. It says how many
times as long the operator takes: below 1 the operator is faster.
"""

import argparse
import contextlib
import importlib
import itertools
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # before this folder: `kernels` is the root's, not this file

import numba
import report
from kernel_row import Row

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, Statement, time_statements

TOPICS = sorted(path.stem.removeprefix("kernels_") for path in Path(__file__).parent.glob("kernels_*.py"))


def measure(rows: list[Row], rounds: int, batch_ns: int) -> list[tuple[Samples, Samples]]:
    """Nanoseconds per call of each row's two sides."""
    calls = {(i, side): getattr(row, side) for i, row in enumerate(rows) for side in ("ours", "theirs")}
    statements = {key: Statement("f()", {"f": call}) for key, call in calls.items()}
    times = time_statements(statements, rounds=rounds, batch_ns=batch_ns).calls
    return [(times[i, "ours"], times[i, "theirs"]) for i in range(len(rows))]


def table(rows: list[Row], times: list[tuple[Samples, Samples]]) -> str:
    lines, is_promised = [], any(row.must_be for row in rows)
    for row, (ours, theirs) in zip(rows, times, strict=True):
        microseconds = [report.cells(samples / 1000, 2)[0] for samples in (ours, theirs)]
        line = (row.kernel, row.data, row.operator, *microseconds, *report.cells(theirs / ours, 2))
        lines.append((*line, *_verdict(row, ours, theirs)) if is_promised else line)
    heads = ("kernel", "data", "compared with", "us", "theirs, us", "ratio", "IQR", *(("must be", "met?") if is_promised else ()))
    return report.table(heads, lines, left=(0, 1, 2))


def _verdict(row: Row, ours: Samples, theirs: Samples) -> tuple[str, str]:
    """What is promised, and whether it is kept; that is not known where the ratio means nothing."""
    if row.must_be is None:
        return "", ""
    ratio = theirs / ours
    return f"≥ {row.must_be}", ("met" if ratio.median >= row.must_be else "MISSED") if ratio.is_measurable() else "-"


def _entry(topic: str, threads: int, row: Row, ours: Samples, theirs: Samples) -> dict:
    ratio = theirs / ours
    promise = {} if row.must_be is None else {"must_be": row.must_be}
    return promise | {
        "topic": topic,
        "threads": threads,
        "kernel": row.kernel,
        "data": row.data,
        "operator": row.operator,
        "ours_ns": ours.median,
        "theirs_ns": theirs.median,
        "ratio": ratio.median,
        "ratio_iqr": ratio.spread,
        "measurable": ratio.is_measurable(),
    }


def _set_threads(count: int) -> None:
    """Let Numba's parallel loops, and PyTorch where it is, run in so many threads."""
    numba.set_num_threads(count)
    with contextlib.suppress(ImportError):
        importlib.import_module("torch").set_num_threads(count)


def main() -> int:
    """Measure the topics asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}; all, if none is named")
    parser.add_argument("--kernel", action="append", help="only this kernel's rows; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, noisier")
    parser.add_argument("--threads", type=int, action="append", metavar="N", help="of both sides; may be repeated: for each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if unknown := set(options.topics) - set(TOPICS):
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    rounds, batch_ns = (5, 500_000) if options.quick else (15, 2_000_000)

    counts = options.threads or [numba.get_num_threads()]
    described = files.machine() | {"threads": max(counts)}
    print(f"{files.headline(described)}; {' and '.join(map(str, counts))} threads")
    print(f"Medians of {rounds} rounds, microseconds per call; ratio: theirs / ours, below 1 the operator is faster.\n")
    entries = []
    for topic, threads in itertools.product(options.topics or TOPICS, counts):
        if options.threads:
            _set_threads(threads)
        try:
            rows = importlib.import_module(f"kernels_{topic}").rows()
        except ImportError as error:
            print(f"{topic}: left out, {error}\n")
            continue
        rows = [row for row in rows if not options.kernel or row.kernel in options.kernel]
        if not rows:
            continue
        times = measure(rows, rounds, batch_ns)
        print(f"{topic}{f', threads: {threads}' if options.threads else ''}\n{table(rows, times)}\n", flush=True)
        entries += [_entry(topic, threads, row, *pair) for row, pair in zip(rows, times, strict=True)]
    if options.json:
        files.write(options.json, described, rounds, entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
