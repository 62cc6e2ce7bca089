"""Softmax of each row of a matrix: ``exp(x[i, j]) / sum over k of exp(x[i, k])``.

Source: I. Goodfellow, Y. Bengio and A. Courville, "Deep Learning" (2016), section 4.1, equation 4.1, which also gives
the stable form used here: the row's maximum is subtracted first, so that no exponential overflows and the sum is at
least 1.

Gradient, with ``g`` that of the result ``y``: ``y * (g - sum of y * g)``, the sum in float64.

Tested in ``tests/programs/test_kernels_nn.py`` against the formula in NumPy, in ``test_kernels.py`` and, for 16 bits, in
``test_kernels_half.py`` against PyTorch; the gradient in ``test_kernels_gradients.py``.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .rows import check_rows, exp_in_place, largest, row_for

_WORTH_THREADS = 1 << 14  # elements; with fewer, a row at a time in this thread is as fast


@njit(error_model="numpy")
def _softmax_row(x, out):
    top = largest(x) + x.dtype.type(0) * out.dtype.type(0)  # in the common type of both
    row = row_for(out)
    for j in range(x.shape[0]):
        row[j] = x[j] - top
    # of one array alone: where it could overlap another, nothing would be vectorised in place
    scale = row.dtype.type(1.0 / exp_in_place(row, out))
    for j in range(x.shape[0]):
        out[j] = row[j] * scale


@fast_args(out="grad_out[rows, columns], out[rows, columns] -> grad_x[rows, columns]", parallel=True, cache=True)
def softmax_backward(grad_out, out, grad_x):
    """Write the gradient of softmax, whose result is `out`, into `grad_x`."""
    for i in prange(out.shape[0]):
        total = 0.0
        for j in range(out.shape[1]):
            total += np.float64(grad_out[i, j]) * out[i, j]
        for j in range(out.shape[1]):
            grad_x[i, j] = out[i, j] * (grad_out[i, j] - total)


@fast_args(
    out="x[rows, columns] -> out[rows, columns]", backward=softmax_backward,
    parallel=True, cache=True, error_model="numpy",
)  # fmt: skip
def softmax(x, out):
    """Write the softmax of each row of `x` into `out`.

    Parameters
    ----------
    x : shape (rows, columns), any real dtype.
    out : shape (rows, columns), floating; made in the dtype of `x`. Written. Each row sums to 1; no columns: nothing is
        written.

    Differences are taken in the common type of `x` and `out`, exponentials in the dtype of `out`, and the sum of each
    4096 of them; the sum of those is in float64. If `out` has 16 bits or fewer, float32 is in its place, and rounded once.

    As in PyTorch, a row with a NaN or with +inf, and a row of nothing but -inf, becomes NaN; -inf beside finite values
    gives 0.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    check_rows(x, out)
    rows, columns = out.shape
    if columns == 0:
        return
    if rows * columns < _WORTH_THREADS:
        for i in range(rows):
            _softmax_row(x[i], out[i])
    else:
        for i in prange(rows):
            _softmax_row(x[i], out[i])
