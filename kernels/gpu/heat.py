"""One explicit time step of the heat equation on a 2-D grid, a column of eight points a thread.

Source: see ``kernels.heat``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, check, given, number_of

cuda: Any = None  # given, as is the other
number: Any = None

POINTS = 8
"""Of each thread, below each other. Threads stand side by side, as columns do in memory."""
_HEIGHT = POINTS + 2
MAX_BLOCKS = 65535
"""Of a grid, in y."""


def _heat_step(u, r, out):
    rows, columns = out.shape
    j = cuda.grid(1)
    if j >= columns:
        return
    factor, left, right = number(r), max(j - 1, 0), min(j + 1, columns - 1)
    middle = cuda.local.array(_HEIGHT, number)
    sides = cuda.local.array(POINTS, number)
    first = cuda.blockIdx.y * POINTS
    while first < rows:
        for k in range(_HEIGHT):
            i = min(max(first + k - 1, 0), rows - 1)
            middle[k] = u[np.uintp(i), np.uintp(j)]
        for k in range(POINTS):
            i = min(first + k, rows - 1)
            sides[k] = number(u[np.uintp(i), np.uintp(left)]) + number(u[np.uintp(i), np.uintp(right)])
        for k in range(POINTS):
            i, value = first + k, middle[k + 1]
            if i < rows:
                if left < j and j < right and i > 0 and i < rows - 1:
                    value += factor * (middle[k] + middle[k + 2] + sides[k] - number(4) * value)
                out[np.uintp(i), np.uintp(j)] = value
        first += cuda.gridDim.y * POINTS


def body(cuda, number):
    """The kernel ``heat_step(u, r, out)`` in `number`: a block's x for ``THREADS`` columns, a y for ``POINTS`` rows or more."""
    return given(_heat_step, cuda=cuda, number=number)


def make(cuda):
    """``heat_step(u, r, out, stream=None)``: write the temperatures after one time step into `out`.

    `u`, `out`: shape (rows, columns), floating, not overlapping; the outermost rows and columns are copied. `r`: see
    ``kernels.heat.heat_step``. Arithmetic, `r` included, is in float32, or in float64 if one of them is. Raises
    ValueError for other shapes.
    """
    kernels = {number: fast_args(cuda.jit(body(cuda, number))) for number in (np.float32, np.float64)}

    def heat_step(u, r, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(u.shape) == tuple(out.shape), "u: its shape must be that of out")
        rows, columns = out.shape
        if rows and columns:
            grid = -(-columns // THREADS), min(-(-rows // POINTS), MAX_BLOCKS)
            kernels[number_of(u, out)][grid, THREADS, stream](u, r, out)

    heat_step.kernels = kernels
    return heat_step
