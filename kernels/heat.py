"""One explicit time step of the heat equation on a 2-D grid: the five-point stencil.

``out[i, j] = u[i, j] + r * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1] - 4 * u[i, j])`` inside; the
outermost rows and columns are copied (fixed boundary values, Dirichlet).

Source: K. W. Morton and D. F. Mayers, "Numerical Solution of Partial Differential Equations" (2nd ed., 2005), section
3.1: the explicit scheme in two dimensions with equal spacings. It is stable for ``r <= 1/4``.

Tested in ``tests/programs/test_kernels.py`` against ``torch.nn.functional.conv2d`` and the same formula with NumPy
slices.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, injective, place

_WORTH_THREADS = 1 << 15  # elements; with fewer, a row at a time in this thread is as fast


@njit
def _heat_row(u, r, out, i):
    """Write row `i` of `out`."""
    rows, columns = out.shape
    if i == 0 or i == rows - 1 or columns < 3:
        for j in range(columns):
            out[i, j] = u[i, j]
        return
    out[i, 0] = u[i, 0]
    for j in range(1, columns - 1):
        neighbours = np.float64(u[i - 1, j]) + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]
        out[i, j] = u[i, j] + r * (neighbours - 4 * np.float64(u[i, j]))
    out[i, columns - 1] = u[i, columns - 1]


@njit
def _check(u, out):
    if u.shape != out.shape:
        raise ValueError("u: its shape must be that of out")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart(place(u), place(out)):
        raise ValueError("out: overlaps u")


@fast_args(out="u[rows, columns] -> out[rows, columns]", parallel=True, cache=True)
def heat_step(u, r, out):
    """Write the temperatures after one time step into `out`.

    Parameters
    ----------
    u : shape (rows, columns), any real dtype: temperatures at the grid's points.
    r : diffusivity * time step / spacing**2, without unit. The scheme is stable up to 1/4; this is not checked.
    out : shape (rows, columns), floating; made in the dtype of `u`. Written, in the unit of `u`. With fewer than three
        rows or columns it is a copy of `u`.

    The arithmetic is in float64, rounded once, to the dtype of `out`.

    Aliasing: `out` must not overlap `u`, because a neighbour would be read after it was written; nor itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    _check(u, out)
    rows, columns = out.shape
    if rows * columns < _WORTH_THREADS:
        for i in range(rows):
            _heat_row(u, r, out, i)
    else:
        for i in prange(rows):
            _heat_row(u, r, out, i)
