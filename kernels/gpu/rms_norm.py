"""Root mean square normalisation of each row of a matrix, a team of threads for each row.

Source: see ``kernels.rms_norm``. Tested in ``tests/programs/test_kernels_gpu.py`` and
``tests/cuda/test_cuda_gpu_kernels.py``.
"""

import functools
import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import MAX_REGISTERS, Team, check, given, number_of, reductions, team_for

cuda: Any = None  # given, as are the others
number: Any = None
threads: Any = None
values: Any = None
total: Any = None


def _whole_rows(x, weight, eps, out):
    row, thread = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.threadIdx.x
    rows, features = out.shape
    if row >= rows:  # of a whole warp
        return
    kept, weights = cuda.local.array(values, number), cuda.local.array(values, number)
    for k in range(values):
        j = thread + k * threads
        kept[k] = number(x[np.uintp(row), np.uintp(j)]) if j < features else number(0)
    for k in range(values):  # now, so that they are there when the sum is
        j = thread + k * threads
        weights[k] = number(weight[np.uintp(j)]) if j < features else number(0)
    partial = number(0)
    for k in range(values):
        partial += kept[k] * kept[k]
    scale = number(1) / number(math.sqrt(total(partial) / number(features) + number(eps)))
    for k in range(values):
        j = thread + k * threads
        if j < features:
            out[np.uintp(row), np.uintp(j)] = kept[k] * scale * weights[k]


def _in_parts(x, weight, eps, out):
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    features = out.shape[1]
    kept, weights = cuda.local.array(values, number), cuda.local.array(values, number)
    partial = number(0)
    for first in range(thread, features, threads * values):
        for k in range(values):
            j = first + k * threads
            kept[k] = number(x[np.uintp(row), np.uintp(j)]) if j < features else number(0)
        for k in range(values):
            partial += kept[k] * kept[k]
    scale = number(1) / number(math.sqrt(total(partial) / number(features) + number(eps)))
    for first in range(thread, features, threads * values):
        for k in range(values):
            j = first + k * threads
            if j < features:
                kept[k], weights[k] = x[np.uintp(row), np.uintp(j)], weight[np.uintp(j)]
        for k in range(values):
            j = first + k * threads
            if j < features:
                out[np.uintp(row), np.uintp(j)] = kept[k] * scale * weights[k]


def body(cuda, number, team: Team):
    """The kernel ``rms_norm(x, weight, eps, out)`` in `number`, for ``team.grid(rows)`` blocks of ``team.block``."""
    names = {"cuda": cuda, "number": number, "threads": team.threads, "values": team.values}
    return given(_whole_rows if team.is_whole else _in_parts, **names, **reductions(cuda, number, team.threads))


def make(cuda):
    """``rms_norm(x, weight, eps, out, stream=None)``: each row of `x`, by its root mean square and weighted, into `out`.

    `x`, `out`: shape (rows, features), floating; `weight`: shape (features,); `eps`: a number. `out` may be `x`.
    Arithmetic is in float32, or in float64 if one of them is. Raises ValueError for other shapes.
    """

    @functools.cache
    def kernel(number, team):
        return fast_args(cuda.jit(max_registers=MAX_REGISTERS)(body(cuda, number, team)))

    def rms_norm(x, weight, eps, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(x.shape) == tuple(out.shape), "x: its shape must be that of out")
        rows, features = out.shape
        check(tuple(weight.shape) == (features,), "weight: its shape must be (features,)")
        if rows and features:
            number = number_of(x, weight, out)
            team = team_for(features, number)
            kernel(number, team)[team.grid(rows), team.block, stream](x, weight, eps, out)

    rms_norm.kernel = kernel
    return rms_norm
