"""Counts of a vector's values in bins of equal width: each block counts in its shared memory, then adds to the result.

Source: see ``kernels.histogram``, whose bins these are. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import check, given, number_of

cuda: Any = None  # given, as are the others
number: Any = None
counter: Any = None
rounding: Any = None
edge: Any = None

THREADS = 1024
VALUES = 8
"""Of each thread at a time."""
MAX_BLOCKS = 264
MAX_BINS = 56 * 1024
"""Their counts of 4 bytes are in a block's shared memory:

224 KiB, which an H100 has, where its driver is asked for them.
"""


def _clear(out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = 0


def _edge(k, width, low):
    return number(cuda.libdevice.dmul_rn(np.float64(k), width) + low)  # each operation rounded: not one fused


def _count(x, low, high, out):
    counts = cuda.shared.array(0, counter)
    bins, n, thread = out.shape[0], x.shape[0], cuda.threadIdx.x
    for k in range(thread, bins, THREADS):
        counts[k] = 0
    cuda.syncthreads()
    width = (high - low) / bins
    first, last, scale = number(low), number(high), number(bins / (high - low))
    near = number(rounding * (max(abs(low), abs(high)) * scale + bins))  # more than a position below may be wrong by
    far = number(1) - near
    values = cuda.local.array(VALUES, number)
    for start in range(cuda.blockIdx.x * THREADS * VALUES + thread, n, cuda.gridDim.x * THREADS * VALUES):
        for v in range(VALUES):
            i = start + v * THREADS
            values[v] = number(x[np.uintp(i)]) if i < n else number(math.nan)
        for v in range(VALUES):
            value = values[v]
            if value >= first and value <= last:
                position = (value - first) * scale
                k = min(max(np.int32(position), 0), bins - 1)
                part = position - number(k)
                if not (part > near and part < far):  # an edge is near: it decides
                    while k > 0 and value < edge(k, width, low):
                        k -= 1
                    while k < bins - 1 and value >= edge(k + 1, width, low):
                        k += 1
                cuda.atomic.add(counts, k, 1)
    cuda.syncthreads()
    for k in range(thread, bins, THREADS):
        if counts[k] != 0:
            cuda.atomic.add(out, k, counts[k])


def body(cuda, number):
    """``(clear, count)``: kernels ``clear(out)`` and ``count(x, low, high, out)``.

    `count` is for blocks of ``THREADS`` with 4 bytes of dynamic shared memory for each bin. Edges are rounded to
    `number`, the floating type of the values.
    """
    names = {"cuda": cuda, "number": number, "counter": cuda.types.int32, "rounding": float(4 * np.finfo(number).eps)}
    names["edge"] = cuda.jit(device=True)(given(_edge, **names))
    return given(_clear, **names), given(_count, **names)


def make(cuda):
    """``histogram(x, low, high, out, stream=None)``: write into ``out[k]`` how many values of `x` lie in bin `k`.

    `x`: shape (n,), floating, fewer than 2**31 values. `low` < `high`: the bounds, finite, as is their difference, in
    float32, or in float64 if `x` is. `out`: shape (bins,), int64, at most ``MAX_BINS``; overwritten. Raises ValueError for
    other shapes and bounds.
    """
    made = {}
    for number in (np.float32, np.float64):
        made[number] = [fast_args(cuda.jit(function)) for function in body(cuda, number)]

    def histogram(x, low, high, out, stream=None):
        check(len(x.shape) == 1 and len(out.shape) == 1, "x, out: must have one dimension")
        bins, n = out.shape[0], x.shape[0]
        check(1 <= bins <= MAX_BINS, f"out: must have from 1 to {MAX_BINS} bins")
        check(n < 2**31, "x: must have fewer than 2**31 values")
        low, high, number = float(low), float(high), number_of(x)
        is_finite = high - low <= np.finfo(number).max and max(abs(low), abs(high)) <= np.finfo(number).max
        check(low < high and is_finite, "low, high: must be finite, low less than high")
        clear, count = made[number]
        clear.forall(bins, stream=stream)(out)
        if n:
            blocks = min(-(-n // (THREADS * VALUES)), MAX_BLOCKS)
            count[blocks, THREADS, stream, 4 * bins](x, low, high, out)

    histogram.kernels = made
    return histogram
