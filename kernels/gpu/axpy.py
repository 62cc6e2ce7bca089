"""``out = a * x + y`` of vectors, two elements a thread.

Source: see ``kernels.axpy``. Tested in ``tests/programs/test_kernels_gpu.py`` and
``tests/cuda/test_cuda_gpu_kernels.py``.
"""

from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, check, given, number_of

cuda: Any = None  # given, as is the other
number: Any = None

VALUES = 2
"""Elements of each thread, a block's threads apart."""


def _axpy(a, x, y, out):
    n = out.shape[0]
    first = cuda.blockIdx.x * (THREADS * VALUES) + cuda.threadIdx.x
    xs, ys = cuda.local.array(VALUES, number), cuda.local.array(VALUES, number)
    for k in range(VALUES):
        i = first + k * THREADS
        if i < n:
            xs[k], ys[k] = x[np.uintp(i)], y[np.uintp(i)]
    factor = number(a)
    for k in range(VALUES):
        i = first + k * THREADS
        if i < n:
            out[np.uintp(i)] = factor * xs[k] + ys[k]


def body(cuda, number):
    """The kernel ``axpy(a, x, y, out)`` in `number`, for a block of ``THREADS`` for each ``THREADS * VALUES`` elements."""
    return given(_axpy, cuda=cuda, number=number)


def make(cuda):
    """``axpy(a, x, y, out, stream=None)``: write ``a * x + y`` into `out`.

    `x`, `y`, `out`: shape (n,), floating; `out` may be `x`, `y` or both. Arithmetic, `a` included, is in float32, or in
    float64 if one of them is. Raises ValueError for other shapes.
    """
    kernels = {number: fast_args(cuda.jit(body(cuda, number))) for number in (np.float32, np.float64)}

    def axpy(a, x, y, out, stream=None):
        check(len(out.shape) == 1, "out: must have one dimension")
        check(tuple(x.shape) == tuple(y.shape) == tuple(out.shape), "x, y: their shapes must be that of out")
        n = out.shape[0]
        if n:
            kernels[number_of(x, y, out)][-(-n // (THREADS * VALUES)), THREADS, stream](a, x, y, out)

    axpy.kernels = kernels
    return axpy
