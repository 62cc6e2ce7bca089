"""The pause in the seventeenth call with the same types, in which their fast entry is compiled: ``pause.py [numpy torch]``.

Each row is a new process and a kernel with two tensors. The first has to make the helpers of entries, too, unless the package was
installed from a wheel, the second another combination of ranks, the third finds that one's entry on disk. Without PyTorch give
``numpy``. The code cache is a copy of this user's, without entries and their helpers.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time_ns

ROWS = (("helpers and entry", (1, 1)), ("entry", (1, 2)), ("entry from disk", (1, 2)))


def longest_call(framework: str, ranks: tuple[int, ...]) -> float:
    """CPU milliseconds, which other work on the machine does not stretch, of the longest of forty calls after the first."""
    import fastexchange

    module = __import__(framework)
    tensors = [module.ones((2,) * rank, dtype=module.float32) for rank in ranks]
    kernel = fastexchange.fast_args(lambda x, y: x.size + y.size)
    assert kernel(*tensors) == sum(2**rank for rank in ranks)
    times = []
    for _ in range(40):
        start = process_time_ns()
        kernel(*tensors)
        times.append(process_time_ns() - start)
    return max(times) / 1e6


def main(frameworks: list[str]) -> None:
    from fastexchange.ground.cfunction import code_cache

    with tempfile.TemporaryDirectory() as folder:
        if code_cache.directory is not None and os.path.isdir(code_cache.directory):
            kept = Path(code_cache.directory)
            shutil.copytree(kept, Path(folder) / kept.name, ignore=shutil.ignore_patterns("fast*"))
        for framework in frameworks:
            for name, ranks in ROWS:
                command = [sys.executable, __file__, "--one", framework, *map(str, ranks)]
                done = subprocess.run(
                    command, env={**os.environ, "NUMBA_CACHE_DIR": folder}, stdout=subprocess.PIPE, text=True, check=True
                )
                print(f"{framework:6} {name:18} {float(done.stdout):8.1f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(longest_call(sys.argv[2], tuple(map(int, sys.argv[3:]))))
    else:
        main(sys.argv[1:] or ["numpy", "torch"])
