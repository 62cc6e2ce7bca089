"""Logarithm of the softmax of each row of a matrix: ``x[i, j] - log(sum over k of exp(x[i, k]))``.

Source: I. Goodfellow, Y. Bengio and A. Courville, "Deep Learning" (2016), section 6.2.2.3, equation 6.30. As in section
4.1 the row's maximum is subtracted first, so that no exponential overflows and the sum is at least 1.

Tested in ``tests/programs/test_kernels_nn.py`` against the formula in NumPy, and in ``test_kernels.py`` against PyTorch.
"""

import math

from numba import njit, prange

from fastexchange import fast_args

from .rows import check_rows, largest, sum_of_exp

_WORTH_THREADS = 1 << 14  # elements; with fewer, a row at a time in this thread is as fast


@njit(error_model="numpy")
def _log_softmax_row(x, out):
    zero = x.dtype.type(0) * out.dtype.type(0)  # of the common type of both
    top = largest(x) + zero
    log_sum = type(zero)(math.log(sum_of_exp(x, top)))
    for j in range(x.shape[0]):
        out[j] = x[j] - top - log_sum


@fast_args(out="x[rows, columns] -> out[rows, columns]", parallel=True, cache=True, error_model="numpy")
def log_softmax(x, out):
    """Write the logarithm of the softmax of each row of `x` into `out`.

    Parameters
    ----------
    x : shape (rows, columns), any real dtype.
    out : shape (rows, columns), floating; made in the dtype of `x`. Written. No columns: nothing is written.

    Differences and exponentials are in the common type of `x` and `out`, but no narrower than float32, and the sum of
    each 4096 exponentials; the sum of those and its logarithm are in float64.

    As in PyTorch, a row with a NaN or with +inf, and a row of nothing but -inf, becomes NaN; -inf beside finite values
    gives -inf.

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
            _log_softmax_row(x[i], out[i])
    else:
        for i in prange(rows):
            _log_softmax_row(x[i], out[i])
