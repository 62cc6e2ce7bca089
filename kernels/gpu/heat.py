"""One explicit time step of the heat equation on a 2-D grid, a thread for each point.

Source: see ``kernels.heat``. Tested in ``tests/programs/test_kernels_gpu.py``.
"""

from typing import Any

from fastexchange import fast_args

from .common import check, given

cuda: Any = None  # given

BLOCK = 8, 32
"""Threads in a block: rows, columns. Columns are next to each other in memory, as the threads of a warp are."""


def _heat_step(u, r, out):
    j, i = cuda.grid(2)
    rows, columns = out.shape
    if i < rows and j < columns:
        if i == 0 or i == rows - 1 or j == 0 or j == columns - 1:
            out[i, j] = u[i, j]
        else:
            out[i, j] = u[i, j] + r * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1] - 4 * u[i, j])


def body(cuda):
    """The kernel ``heat_step(u, r, out)``, for at least as many threads as points, columns along the grid's x."""
    return given(_heat_step, cuda=cuda)


def make(cuda):
    """``heat_step(u, r, out, stream=None)``: write the temperatures after one time step into `out`.

    `u`, `out`: shape (rows, columns), floating, not overlapping; the outermost rows and columns are copied. `r`: see
    ``kernels.heat.heat_step``. Raises ValueError for other shapes.
    """
    kernel = fast_args(cuda.jit(body(cuda)))

    def heat_step(u, r, out, stream=None):
        check(len(out.shape) == 2, "out: must have two dimensions")
        check(tuple(u.shape) == tuple(out.shape), "u: its shape must be that of out")
        rows, columns = out.shape
        if rows and columns:
            grid = -(-columns // BLOCK[1]), -(-rows // BLOCK[0])
            kernel[grid, (BLOCK[1], BLOCK[0]), stream](u, r, out)

    heat_step.kernel = kernel
    return heat_step
