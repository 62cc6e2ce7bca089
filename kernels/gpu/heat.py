"""One explicit time step of the heat equation on a 2-D grid, a column of sixteen points a thread.

Source: see ``kernels.heat``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, WARP, check, given, lanes, number_of

cuda: Any = None  # given, as are the others
number: Any = None
of_lane: Any = None

POINTS = 16
"""Of each thread, below each other. Threads stand side by side, as columns do in memory: a point's neighbours there are the
threads' beside, which give them; only the outermost ones of a warp read what lies beside it.
"""
_HEIGHT = POINTS + 2
MAX_BLOCKS = 65535
"""Of a grid, in y."""


def _heat_step(u, r, out):
    rows, columns = out.shape
    j, lane = cuda.grid(1), cuda.threadIdx.x % WARP
    column = min(j, columns - 1)  # all lanes of a warp take part
    beside = max(j - 1, 0) if lane == 0 else j + 1
    is_outermost = (lane == 0 or lane == WARP - 1) and beside < columns
    factor = number(r)
    middle = cuda.local.array(_HEIGHT, number)
    sides = cuda.local.array(POINTS, number)
    first = cuda.blockIdx.y * POINTS
    while first < rows:
        for k in range(_HEIGHT):
            i = min(max(first + k - 1, 0), rows - 1)
            middle[k] = u[np.uintp(i), np.uintp(column)]
        for k in range(POINTS):
            i = min(first + k, rows - 1)
            sides[k] = u[np.uintp(i), np.uintp(beside)] if is_outermost else number(0)
        for k in range(POINTS):
            i, value = first + k, middle[k + 1]
            left, right = of_lane(value, (lane - 1) % WARP), of_lane(value, (lane + 1) % WARP)
            if lane == 0:
                left = sides[k]
            if lane == WARP - 1:
                right = sides[k]
            if i < rows and j < columns:
                if 0 < j and j < columns - 1 and i > 0 and i < rows - 1:
                    value += factor * (middle[k] + middle[k + 2] + (left + right) - number(4) * value)
                out[np.uintp(i), np.uintp(j)] = value
        first += cuda.gridDim.y * POINTS


def body(cuda, number):
    """The kernel ``heat_step(u, r, out)`` in `number`: a block's x for ``THREADS`` columns, a y for ``POINTS`` rows or more."""
    return given(_heat_step, cuda=cuda, number=number, of_lane=lanes(cuda, number))


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
