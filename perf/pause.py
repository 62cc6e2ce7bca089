"""Whether a call after the first with its types takes longer than the others: ``pause.py [numpy torch]``.

Each row is a kernel with two tensors of these ranks, in a new process. The times are CPU times, which other work does not change.
Nothing is compiled for a combination of kinds and ranks but the kernel. Without PyTorch give ``numpy``.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time_ns

RANKS = ((1, 1), (1, 2), (4, 3))


def times_of_calls(framework: str, ranks: tuple[int, ...]) -> list[float]:
    """CPU microseconds of each of a thousand calls."""
    import fastexchange

    module = __import__(framework)
    tensors = [module.ones((2,) * rank, dtype=module.float32) for rank in ranks]
    kernel = fastexchange.fast_args(lambda x, y: x.size + y.size)
    times = []
    for _ in range(1000):
        start = process_time_ns()
        kernel(*tensors)
        times.append((process_time_ns() - start) / 1e3)
    return times


def main(frameworks: list[str]) -> None:
    for framework in frameworks:
        for ranks in RANKS:
            process = (sys.executable, str(Path(__file__).resolve()), "--of", framework, *map(str, ranks))
            first, median, longest = subprocess.check_output(process, env=os.environ, text=True).split()
            title = f"{framework}, ranks {' and '.join(map(str, ranks))}"
            print(f"{title:24} the first call {first:>9} µs; later ones {median}, the longest {longest}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout
    if sys.argv[1:2] == ["--of"]:
        first, *later = times_of_calls(sys.argv[2], tuple(map(int, sys.argv[3:])))
        print(f"{first:.0f} {statistics.median(later):.2f} {max(later):.2f}")
    else:
        main(sys.argv[1:] or ["numpy", "torch"])
