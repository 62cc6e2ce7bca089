"""Counts of a vector's values in bins of equal width: each block counts in its shared memory, then adds to the result.

Source: see ``kernels.histogram``, whose bins these are. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, check, given, is_double

cuda: Any = None  # given, as are the others
number: Any = None
counter: Any = None

MAX_BLOCKS = 264
MAX_BINS = 56 * 1024
"""Their counts of 4 bytes are in a block's shared memory:

224 KiB, which an H100 has, where its driver is asked for them.
"""


def _clear(out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = 0


def _count(x, low, high, out):
    counts = cuda.shared.array(0, counter)
    bins = out.shape[0]
    for k in range(cuda.threadIdx.x, bins, cuda.blockDim.x):
        counts[k] = 0
    cuda.syncthreads()
    width = (high - low) / bins
    first, last = np.float64(number(low)), np.float64(number(high))
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        value = np.float64(x[i])
        if value >= first and value <= last:
            k = min(int((value - low) / width), bins - 1)
            while k > 0 and value < np.float64(number(k * width + low)):
                k -= 1
            while k < bins - 1 and value >= np.float64(number((k + 1) * width + low)):
                k += 1
            cuda.atomic.add(counts, k, 1)
    cuda.syncthreads()
    for k in range(cuda.threadIdx.x, bins, cuda.blockDim.x):
        if counts[k] != 0:
            cuda.atomic.add(out, k, counts[k])


def body(cuda, number):
    """``(clear, count)``: kernels ``clear(out)`` and ``count(x, low, high, out)``.

    `count` is for blocks with 4 bytes of dynamic shared memory for each bin. Edges are rounded to `number`, the
    floating type of the values.
    """
    names = {"cuda": cuda, "number": number, "counter": cuda.types.int32}
    return given(_clear, **names), given(_count, **names)


def make(cuda):
    """``histogram(x, low, high, out, stream=None)``: write into ``out[k]`` how many values of `x` lie in bin `k`.

    `x`: shape (n,), floating, fewer than 2**31 values. `low` < `high`: the bounds, finite. `out`: shape (bins,), int64,
    at most ``MAX_BINS``; overwritten. Raises ValueError for other shapes and bounds.
    """
    made = {}
    for number in (np.float32, np.float64):
        made[number] = [fast_args(cuda.jit(function)) for function in body(cuda, number)]

    def histogram(x, low, high, out, stream=None):
        check(len(x.shape) == 1 and len(out.shape) == 1, "x, out: must have one dimension")
        bins, n = out.shape[0], x.shape[0]
        check(1 <= bins <= MAX_BINS, f"out: must have from 1 to {MAX_BINS} bins")
        check(n < 2**31, "x: must have fewer than 2**31 values")
        check(low < high and math.isfinite(high - low), "low, high: must be finite, low less than high")
        clear, count = made[np.float64 if is_double(x) else np.float32]
        clear.forall(bins, stream=stream)(out)
        if n:
            blocks = min(-(-n // THREADS), MAX_BLOCKS)
            count[blocks, THREADS, stream, 4 * bins](x, float(low), float(high), out)

    histogram.kernels = made
    return histogram
