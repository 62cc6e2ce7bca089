"""Softmax of each row of a matrix, a team of threads for each row.

Source: see ``kernels.softmax``; M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax"
(arXiv:1805.02867), algorithm 3: a sum is kept relative to the largest element so far. Tested in
``tests/programs/test_kernels_gpu.py``.
"""

import functools
import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import Team, check, given, number_of, reductions, team_for

cuda: Any = None  # given, as are the others
number: Any = None
threads: Any = None
values: Any = None
total: Any = None
largest: Any = None

LOWEST = -math.inf


def _whole(x, out):
    """Rows that a team keeps: read once."""
    row, thread = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.threadIdx.x
    rows, columns = out.shape
    if row >= rows:  # of a whole warp
        return
    kept = cuda.local.array(values, number)
    own, partial = number(LOWEST), number(0)
    for k in range(values):
        j = thread + k * threads
        kept[k] = number(x[np.uintp(row), np.uintp(j)]) if j < columns else number(LOWEST)
    for k in range(values):
        own = max(own, kept[k])
    top = largest(own)
    for k in range(values):
        kept[k] = math.exp(kept[k] - top)
        partial += kept[k]
    scale = number(1) / total(partial)
    for k in range(values):
        j = thread + k * threads
        if j < columns:
            out[np.uintp(row), np.uintp(j)] = kept[k] * scale


def _in_parts(x, out):
    """Longer rows: read twice."""
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    columns = out.shape[1]
    kept = cuda.local.array(values, number)
    own, partial = number(LOWEST), number(0)  # the largest of this thread's elements; its sum, relative to that
    for first in range(thread, columns, threads * values):
        before = own
        for k in range(values):
            j = first + k * threads
            kept[k] = number(x[np.uintp(row), np.uintp(j)]) if j < columns else number(LOWEST)
        for k in range(values):
            own = max(own, kept[k])
        origin = own if own > LOWEST else number(0)
        partial *= math.exp(before - origin)
        for k in range(values):
            partial += math.exp(kept[k] - origin)
    top = largest(own)
    scale = number(1) / total(partial * math.exp(own - top))
    for first in range(thread, columns, threads * values):
        for k in range(values):
            j = first + k * threads
            if j < columns:
                kept[k] = x[np.uintp(row), np.uintp(j)]
        for k in range(values):
            j = first + k * threads
            if j < columns:
                out[np.uintp(row), np.uintp(j)] = math.exp(kept[k] - top) * scale


def body(cuda, number, team: Team):
    """The kernel ``softmax(x, out)`` in `number`, for ``team.grid(rows)`` blocks of ``team.block``."""
    function, given_names = _whole if team.is_whole else _in_parts, reductions(cuda, number, team.threads)
    return given(function, cuda=cuda, number=number, threads=team.threads, values=team.values, **given_names)


def make(cuda):
    """``softmax(x, out, stream=None)``: write the softmax of each row of `x` into `out`.

    `x`, `out`: shape (rows, columns), floating; `out` may be `x`. Arithmetic is in float32, or in float64 if one of them
    is. As in PyTorch, a row with a NaN or +inf, and one of nothing but -inf, becomes NaN. Raises ValueError for other
    shapes.
    """

    @functools.cache
    def kernel(number, team):
        return fast_args(cuda.jit(body(cuda, number, team)))

    def softmax(x, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(x.shape) == tuple(out.shape), "x: its shape must be that of out")
        rows, columns = out.shape
        if rows and columns:
            team = team_for(columns)
            kernel(number_of(x, out), team)[team.grid(rows), team.block, stream](x, out)

    softmax.kernel = kernel
    return softmax
