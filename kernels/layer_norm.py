"""Layer normalisation: each row of a matrix shifted to mean 0, scaled to variance 1, then weighted and biased.

Source: J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization" (arXiv:1607.06450), equation 4, with ``eps``
added to the variance as in ``torch.nn.functional.layer_norm``. The variance is the biased one: divided by the number
of features.

The mean and the variance are computed in two passes: the one-pass formula "mean of squares minus square of
the mean" cancels when the mean is large against the deviation.

Tested in ``tests/programs/test_kernels_nn.py`` against the formula in NumPy, and in ``test_kernels.py`` against PyTorch.
"""

import math

from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, place
from .rows import check_rows, real_of, sum_of, sum_of_squares

_WORTH_THREADS = 1 << 14  # elements; with fewer, a row at a time in this thread is as fast


@njit(error_model="numpy")
def _layer_norm_row(x, weight, bias, eps, out):
    features, real = x.shape[0], real_of(x, out)
    mean = real(sum_of(x, real) / features)
    scale = real(1.0 / math.sqrt(sum_of_squares(x, mean) / features + eps))
    for j in range(features):
        value = (x[j] - mean) * scale
        if weight is not None:
            value *= weight[j]
        if bias is not None:
            value += bias[j]
        out[j] = value


@njit
def _check(x, weight, bias, out):
    check_rows(x, out)
    features = out.shape[1]
    if weight is not None:
        if weight.shape != (features,):
            raise ValueError("weight: its shape must be (features,)")
        if not apart(place(weight), place(out)):
            raise ValueError("out: overlaps weight")
    if bias is not None:
        if bias.shape != (features,):
            raise ValueError("bias: its shape must be (features,)")
        if not apart(place(bias), place(out)):
            raise ValueError("out: overlaps bias")


@fast_args(out="x[rows, features] -> out[rows, features]", parallel=True, cache=True, error_model="numpy")
def layer_norm(x, weight, bias, eps=1e-5, out=None):
    """Write each row of `x`, normalised, into `out`: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Parameters
    ----------
    x : shape (rows, features), any real dtype.
    weight, bias : shape (features,), any real dtype; or None for all ones, all zeros.
    eps : added to the variance, in its unit: the square of that of `x`.
    out : shape (rows, features), floating; made in the dtype of `x`. Written. No features: nothing is written.

    All arithmetic is in float64, rounded once, to the dtype of `out`. If `x` and `out` have 16 bits or fewer, it is in
    float32, and only the sum of the sums of each 4096 elements is in float64. A row with a NaN or an infinity becomes
    NaN, as in PyTorch.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself, `weight` or `bias`.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    _check(x, weight, bias, out)
    rows, features = out.shape
    if features == 0:
        return
    if rows * features < _WORTH_THREADS:
        for i in range(rows):
            _layer_norm_row(x[i], weight, bias, eps, out[i])
    else:
        for i in prange(rows):
            _layer_norm_row(x[i], weight, bias, eps, out[i])
