"""Softmax of each row of a matrix, a block of threads for each row.

Source: see ``kernels.softmax``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, check, given, is_double, reductions

cuda: Any = None  # given, as are the others
number: Any = None
total: Any = None
largest: Any = None


def _softmax(x, out):
    shared = cuda.shared.array(THREADS, number)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    columns = out.shape[1]
    top = number(-math.inf)
    for j in range(thread, columns, THREADS):
        value = number(x[row, j])
        if value > top or value != value:
            top = value
    top = largest(shared, top)
    partial = number(0)
    for j in range(thread, columns, THREADS):
        partial += number(math.exp(number(x[row, j]) - top))
    scale = number(1) / total(shared, partial)
    for j in range(thread, columns, THREADS):
        out[row, j] = number(math.exp(number(x[row, j]) - top)) * scale


def body(cuda, number):
    """The kernel ``softmax(x, out)`` with sums in `number`, for a block of ``THREADS`` for each row."""
    return given(_softmax, cuda=cuda, number=number, **reductions(cuda))


def make(cuda):
    """``softmax(x, out, stream=None)``: write the softmax of each row of `x` into `out`.

    `x`, `out`: shape (rows, columns), floating; `out` may be `x`. Differences and sums are in float32, or in float64 if
    one of them is. As in PyTorch, a row with a NaN or +inf, and one of nothing but -inf, becomes NaN. Raises ValueError
    for other shapes.
    """
    kernels = {number: fast_args(cuda.jit(body(cuda, number))) for number in (np.float32, np.float64)}

    def softmax(x, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(x.shape) == tuple(out.shape), "x: its shape must be that of out")
        rows, columns = out.shape
        if rows and columns:
            kernels[np.float64 if is_double(x, out) else np.float32][rows, THREADS, stream](x, out)

    softmax.kernels = kernels
    return softmax
