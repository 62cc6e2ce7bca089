"""Softmax of each row of a matrix: ``exp(x[i, j]) / sum over k of exp(x[i, k])``.

Source: I. Goodfellow, Y. Bengio and A. Courville, "Deep Learning" (2016), section 4.1, equation 4.1, which also gives
the stable form used here: the row's maximum is subtracted first, so that no exponential overflows and the sum is at
least 1.

Tested in ``tests/test_kernels.py`` against ``torch.softmax(x, dim=1)`` and the same formula in NumPy.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart_or_same, injective, place

_WORTH_THREADS = 1 << 12  # elements; with fewer, a row at a time in this thread is as fast


@njit(cache=True, error_model="numpy")
def _softmax_row(x, out):
    largest = x[0]
    for j in range(1, x.shape[0]):
        if x[j] > largest:
            largest = x[j]
    total = 0.0
    for j in range(x.shape[0]):
        e = math.exp(np.float64(x[j]) - largest)
        out[j] = e
        total += e
    scale = 1.0 / total
    for j in range(x.shape[0]):
        out[j] = out[j] * scale


@fast_args(parallel=True, cache=True, error_model="numpy")
def softmax(x, out):
    """Write the softmax of each row of `x` into `out`.

    Parameters
    ----------
    x : shape (rows, columns), any real dtype.
    out : shape (rows, columns), floating. Written. Each row sums to 1; no columns: nothing is written.

    Exponentials and their sum are in float64; what is stored is rounded twice to the dtype of `out`, before and after
    it is divided by the sum.

    As in PyTorch, a row with a NaN or with +inf, and a row of nothing but -inf, becomes NaN; -inf beside finite values
    gives 0.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart_or_same(place(x), place(out)):
        raise ValueError("out: overlaps x without being the same view")
    rows, columns = out.shape
    if columns == 0:
        return
    if rows * columns < _WORTH_THREADS:
        for i in range(rows):
            _softmax_row(x[i], out[i])
    else:
        for i in prange(rows):
            _softmax_row(x[i], out[i])
