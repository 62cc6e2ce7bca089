"""One explicit time step of the heat equation on a 2-D grid, a column of sixteen points a thread.

Source: see ``kernels.heat``. Tested in ``tests/programs/test_kernels_gpu.py`` and
``tests/cuda/test_cuda_gpu_kernels.py``.
"""

from typing import Any

import numpy as np

from fastexchange import fast_args

from .common import THREADS, WARP, check, given, number_of, shuffles

cuda: Any = None  # given, as are the others
number: Any = None
from_before: Any = None
from_after: Any = None

POINTS = 16
"""Of each thread, below each other. Threads stand side by side, as columns do in memory."""
_HEIGHT = POINTS + 2
MAX_BLOCKS = 65535
"""Of a grid, in y."""


def _heat_step(u, r, out):
    rows, columns = out.shape
    j = cuda.grid(1)
    first = (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * POINTS
    lane = cuda.threadIdx.x % WARP
    is_outer, is_inside = lane % (WARP - 1) == 0, 0 < j and j < columns - 1
    # Outside of the grid the nearest point is read, and not used: all of a warp take part in shuffles.
    column = min(j, columns - 1)
    beside = min(max(j - 1 if lane == 0 else j + 1, 0), columns - 1)  # an outer lane's neighbour in another warp
    middle, sides = cuda.local.array(_HEIGHT, number), cuda.local.array(POINTS, number)
    for k in range(_HEIGHT):
        i = min(max(first + k - 1, 0), rows - 1)
        middle[k] = u[np.uintp(i), np.uintp(column)]
    for k in range(POINTS):
        i = min(first + k, rows - 1)
        sides[k] = number(u[np.uintp(i), np.uintp(beside)]) if is_outer else number(0)
    factor = number(r)
    for k in range(POINTS):
        i, value = first + k, middle[k + 1]
        left, right = from_before(value, 1), from_after(value, 1)
        left = sides[k] if lane == 0 else left
        right = sides[k] if lane == WARP - 1 else right
        if i < rows and j < columns:
            if is_inside and 0 < i and i < rows - 1:
                value += factor * (middle[k] + middle[k + 2] + left + right - number(4) * value)
            out[np.uintp(i), np.uintp(j)] = value


def body(cuda, number):
    """The kernel ``heat_step(u, r, out)`` in `number`, for blocks of ``THREADS``.

    A block's x is for ``THREADS`` columns, its y, and after all of these its z, for ``POINTS`` rows.
    """
    return given(_heat_step, cuda=cuda, number=number, **shuffles(cuda, number))


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
            down = -(-rows // POINTS)
            grid = -(-columns // THREADS), min(down, MAX_BLOCKS), -(-down // MAX_BLOCKS)
            kernels[number_of(u, out)][grid, THREADS, stream](u, r, out)

    heat_step.kernels = kernels
    return heat_step
