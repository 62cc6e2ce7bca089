"""Root mean square normalisation of each row of a matrix, a block of threads for each row.

Source: see ``kernels.rms_norm``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

import math
from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, check, given, is_double, reductions

cuda: Any = None  # given, as are the others
number: Any = None
total: Any = None


def _rms_norm(x, weight, eps, out):
    shared = cuda.shared.array(THREADS, number)
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    features = out.shape[1]
    partial = number(0)
    for j in range(thread, features, THREADS):
        value = number(x[row, j])
        partial += value * value
    mean = total(shared, partial) / number(features)
    scale = number(1) / number(math.sqrt(mean + number(eps)))
    for j in range(thread, features, THREADS):
        out[row, j] = number(x[row, j]) * scale * number(weight[j])


def body(cuda, number):
    """The kernel ``rms_norm(x, weight, eps, out)`` with sums in `number`, for a block of ``THREADS`` for each row."""
    return given(_rms_norm, cuda=cuda, number=number, **reductions(cuda))


def make(cuda):
    """``rms_norm(x, weight, eps, out, stream=None)``: each row of `x`, by its root mean square and weighted, into `out`.

    `x`, `out`: shape (rows, features), floating; `weight`: shape (features,); `eps`: a number. `out` may be `x`.
    Arithmetic is in float32, or in float64 if one of them is. Raises ValueError for other shapes.
    """
    kernels = {number: fast_args(cuda.jit(body(cuda, number))) for number in (np.float32, np.float64)}

    def rms_norm(x, weight, eps, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(x.shape) == tuple(out.shape), "x: its shape must be that of out")
        rows, features = out.shape
        check(tuple(weight.shape) == (features,), "weight: its shape must be (features,)")
        if rows and features:
            number = np.float64 if is_double(x, weight, out) else np.float32
            kernels[number][rows, THREADS, stream](x, weight, eps, out)

    rms_norm.kernels = kernels
    return rms_norm
