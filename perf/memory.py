"""One process of the rows of memory: ``memory.py njit|fast kernels|signatures BATCHES``. Prints JSON, bytes each, per batch.

Private memory of the process (``/proc/self/smaps_rollup``: clean and dirty pages that no other process shares), before and
after a batch of new kernels with one signature each, or of new signatures of one kernel. Each is called until nothing
more is learnt or compiled for it. What came before the first batch (the compiler, the parts of a call that all kernels
share) is not counted.
"""

import gc
import json
import sys
from pathlib import Path

import numba
import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

BATCH = 16
_CALLS = 4  # the first makes the cache entry


def private_bytes() -> int:
    """Bytes of memory that this process shares with no other."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def kernel(x0, x1, x2):
    """Nothing."""


def arrays(number: int) -> list[np.ndarray]:
    """Three arrays whose types together are those of no other `number` below 1000."""
    dtypes = ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    return [np.ones(1, dtypes[number // 10**place % 10]) for place in range(3)]


def main(who: str, what: str, batches: int) -> list[float]:
    """Bytes of one kernel, or of one signature, in each batch."""
    if who == "fast":
        from fastexchange import fast_args

        decorate = fast_args
    else:
        decorate = numba.njit
    kept = []

    def grow(numbers: range) -> None:
        for number in numbers:
            if what == "kernels" or not kept:
                kept.append(decorate(kernel))
            values = arrays(number if what == "signatures" else 0)
            for _ in range(_CALLS):
                kept[-1](*values)

    grow(range(BATCH))
    found = []
    for batch in range(1, batches + 1):
        before = private_bytes()
        grow(range(BATCH * batch, BATCH * (batch + 1)))
        found.append((private_bytes() - before) / BATCH)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
