"""Root mean square layer normalisation: each row of a matrix divided by its root mean square, then weighted.

Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4, with ``eps``
added to the mean square as in ``torch.nn.functional.rms_norm``.

Gradients, with ``g`` that of the result, ``s = 1 / sqrt(mean of x**2 + eps)`` and ``n`` features: of x
``s * g * w - x * s**3 / n * sum of x * g * w``, of the weight the sum over rows of ``s * g * x``. Sums are in float64.

Tested in ``tests/programs/test_kernels_nn.py`` against the formula in NumPy, and in ``test_kernels.py`` against PyTorch;
the gradients in ``test_kernels_gradients.py``.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, place
from .rows import check_rows, real_of, sum_of_squares

_WORTH_THREADS = 1 << 15  # elements; with fewer, a row at a time in this thread is as fast


@njit(error_model="numpy")
def _rms_norm_row(x, weight, eps, out):
    features, real = x.shape[0], real_of(x, out)
    scale = real(1.0 / math.sqrt(sum_of_squares(x, real(0)) / features + eps))
    for j in range(features):
        if weight is None:
            out[j] = x[j] * scale
        else:
            out[j] = x[j] * scale * weight[j]


@njit
def _check(x, weight, out):
    check_rows(x, out)
    features = out.shape[1]
    if weight is not None:
        if weight.shape != (features,):
            raise ValueError("weight: its shape must be (features,)")
        if not apart(place(weight), place(out)):
            raise ValueError("out: overlaps weight")


@fast_args(
    out="grad_out[rows, features], x[rows, features] -> grad_x[rows, features], grad_weight[features]",
    parallel=True, cache=True, error_model="numpy",
)  # fmt: skip
def rms_norm_backward(grad_out, x, weight: np.ndarray | None, eps: float, grad_x, grad_weight):
    """Write the gradients of rms_norm into `grad_x` and `grad_weight`, which is 0 without a weight."""
    rows, features = x.shape
    scales = np.empty(rows)
    for i in prange(rows):
        squares, total = 0.0, 0.0
        for j in range(features):
            value = np.float64(x[i, j])
            squares += value * value
            total += value * grad_out[i, j] * (1.0 if weight is None else weight[j])
        scale = 1.0 / math.sqrt(squares / features + eps)
        scales[i] = scale
        for j in range(features):
            weighted = grad_out[i, j] * (1.0 if weight is None else weight[j])
            grad_x[i, j] = scale * weighted - x[i, j] * scale * scale * scale / features * total
    for j in prange(features):
        total = 0.0
        if weight is not None:
            for i in range(rows):
                total += scales[i] * grad_out[i, j] * x[i, j]
        grad_weight[j] = total


@fast_args(
    out="x[rows, features] -> out[rows, features]", backward=rms_norm_backward,
    parallel=True, cache=True, error_model="numpy",
)  # fmt: skip
def rms_norm(x, weight: np.ndarray | None, eps: float, out):
    """Write ``x / sqrt(mean of x**2 + eps) * weight`` of each row of `x` into `out`.

    Parameters
    ----------
    x : shape (rows, features), any real dtype.
    weight : shape (features,), any real dtype; or None for all ones.
    eps : added to the mean square, in its unit: the square of that of `x`. PyTorch's default is the distance from 1 to
        the next number of its dtype.
    out : shape (rows, features), floating; made in the dtype of `x`. Written. No features: nothing is written.

    All arithmetic is in float64, rounded once, to the dtype of `out`. If `x` and `out` have 16 bits or fewer, it is in
    float32, and only the sum of the sums of each 4096 elements is in float64. A row with a NaN becomes NaN; in one with
    an infinity that becomes NaN and finite numbers 0, as in PyTorch.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself or `weight`.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    _check(x, weight, out)
    rows, features = out.shape
    if features == 0:
        return
    if rows * features < _WORTH_THREADS:
        for i in range(rows):
            _rms_norm_row(x[i], weight, eps, out[i])
    else:
        for i in prange(rows):
            _rms_norm_row(x[i], weight, eps, out[i])
