"""``python perf/crosscheck.py``: five rows timed by pyperf, too, and the ratio of its times to ours. Some minutes; needs pyperf.

pyperf times the same statements in its own way: several processes one after the other, its own calibration, the median of all
values. Its loop is counted, so it is added to our times.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

import floor
import numpy as np
import report
from groups import DISPATCHER, EMPTY, OURS, C, arrays, kernel_of, tensors, torch

from fastexchange.measuring.timing import Samples, Statement, time_statements

HERE = Path(__file__).resolve().parent
CODE = "f(x0, x1, x2)"


def rows() -> dict[str, tuple[str, dict]]:
    """By name: the label, and the names of the statement :data:`CODE`."""
    limit, values = floor.load(), arrays(3)
    plain, kernel = kernel_of(", ".join(values))
    kernel(*values.values())
    found = {
        "empty": (EMPTY, {"f": limit.empty, **values}),
        "c": (f"3 NumPy arrays: {C}", {"f": limit.numpy, **values}),
        "fast": (f"3 NumPy arrays: {OURS}", {"f": kernel, **values}),
        "njit": (f"3 NumPy arrays: {DISPATCHER}", {"f": plain, **values}),
    }
    if torch is not None:
        found["torch"] = (f"3 PyTorch tensors: {OURS}", {"f": kernel_of(", ".join(values))[1], **tensors(3)})
    return found


@functools.cache  # pyperf runs its set-up before each value
def warm(name: str) -> list:
    """The function and the arguments of a row, after calls enough that nothing more is compiled."""
    function, *values = (rows()[name][1][key] for key in ("f", "x0", "x1", "x2"))
    for _ in range(100):
        function(*values)
    return [function, *values]


def by_pyperf(name: str, processes: int) -> np.ndarray:
    """Nanoseconds per call, all values of all processes."""
    import pyperf

    setup = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]; import crosscheck"
    setup += f"; f, x0, x1, x2 = crosscheck.warm({name!r})"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "bench.json"
        command = [sys.executable, "-m", "pyperf", "timeit", "--quiet", "-p", str(processes), "-o", str(file), "-s", setup, CODE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return 1e9 * np.array(pyperf.Benchmark.load(str(file)).get_values())


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=6, help="of pyperf, for each row; six, if not given")
    options = parser.parse_args()
    try:
        import pyperf
    except ImportError:
        raise SystemExit("perf/crosscheck.py needs pyperf: pip install '.[perf]'") from None
    found = rows()
    ours, loop = time_statements({name: Statement(CODE, names) for name, (_, names) in found.items()}, rounds=41)
    lines = []
    for name, (label, _) in found.items():
        theirs, counted = Samples(by_pyperf(name, options.processes)), ours[name] + loop
        are_measurable = theirs.is_measurable() and counted.is_measurable()
        ratio = f"{theirs.median / counted.median:.3f}" if are_measurable else "-"  # not of the same rounds
        lines.append((label, report.cells(counted)[0], report.cells(theirs)[0], ratio))
    how = f"pyperf {pyperf.__version__}, {options.processes} processes"
    print(f"Nanoseconds per call, the loop counted ({loop.median:.1f} ns); {how}")
    print(report.table(("call", "ours", "pyperf", "ratio"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
