"""Cross entropy between rows of logits and integer targets, with label smoothing: one loss for each row.

With ``log_p`` the logarithm of the row's softmax and ``n`` classes the loss is

    -(1 - smoothing) * log_p[target] - smoothing / n * sum over j of log_p[j]

Source: C. Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (arXiv:1512.00567), section 7, with
equal weight for each class; the stable form of ``log_p`` is that of ``log_softmax``.

Gradient of the logits, with ``g`` that of the loss: ``g * (exp(log_p) - (1 - smoothing) * one_hot(target) - smoothing / n)``.

Tested in ``tests/programs/test_kernels_nn.py`` against the formula in NumPy, and in ``test_kernels.py`` against PyTorch;
the gradient in ``test_kernels_gradients.py``.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, injective, place
from .rows import largest, sum_of_exp

_WORTH_THREADS = 1 << 15  # logits; with fewer, a row at a time in this thread is as fast


# "reassoc" lets the sum be vectorised; unlike all of fastmath it keeps NaN and infinities
@njit(fastmath={"reassoc"})
def _sum_below(x, top):
    """The sum of ``top - x[j]``: no term is negative, so nothing cancels."""
    total = 0.0
    for j in range(x.shape[0]):
        total += np.float64(top - x[j])
    return total


@njit(error_model="numpy")
def _loss(x, target, smoothing):
    top = largest(x) + np.float32(0)  # floating: the difference of two integers may overflow
    log_sum = math.log(sum_of_exp(x, top))
    loss = (1.0 - smoothing) * (np.float64(top) - x[target] + log_sum)
    if smoothing > 0:
        loss += smoothing * (_sum_below(x, top) / x.shape[0] + log_sum)
    return loss


@njit
def _check(logits, target, smoothing, ignore_index, out):
    rows, classes = logits.shape
    if target.shape != (rows,):
        raise ValueError("target: its shape must be (rows,)")
    if target.dtype.kind != "i" and target.dtype.kind != "u":
        raise ValueError("target: its dtype must be integer")
    if out.shape != (rows,):
        raise ValueError("out: its shape must be (rows,)")
    if not (smoothing >= 0 and smoothing <= 1):
        raise ValueError("smoothing: must be from 0 to 1")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart(place(logits), place(out)) and apart(place(target), place(out))):
        raise ValueError("out: overlaps logits or target")
    for i in range(rows):
        if (target[i] < 0 or target[i] >= classes) and target[i] != ignore_index:
            raise ValueError("target: must be a class or ignore_index")


@fast_args(
    out="grad_out[rows], logits[rows, classes], target[rows] -> grad_logits[rows, classes]: logits",
    parallel=True, cache=True, error_model="numpy",
)  # fmt: skip
def cross_entropy_backward(grad_out, logits, target, smoothing: float, ignore_index: int, grad_logits):
    """Write the gradient of cross_entropy into `grad_logits`."""
    rows, classes = logits.shape
    for i in prange(rows):
        if target[i] == ignore_index:
            grad_logits[i] = 0
        else:
            top = largest(logits[i]) + np.float32(0)
            scale = 1.0 / sum_of_exp(logits[i], top)
            for j in range(classes):
                p = math.exp(np.float64(logits[i, j]) - top) * scale
                wanted = smoothing / classes + (1.0 - smoothing if j == target[i] else 0.0)
                grad_logits[i, j] = grad_out[i] * (p - wanted)


@fast_args(
    out="logits[rows, classes], target[rows] -> out[rows]: logits", backward=cross_entropy_backward,
    parallel=True, cache=True, error_model="numpy",
)  # fmt: skip
def cross_entropy(logits, target, smoothing: float, ignore_index: int, out):
    """Write the cross entropy of each row of `logits` with its target into `out`.

    Parameters
    ----------
    logits : shape (rows, classes), any real dtype.
    target : shape (rows,), integer: each row's class, or `ignore_index`.
    smoothing : from 0, for none, to 1: how much of the target's weight is given to all classes alike.
    ignore_index : rows with this target get the loss 0, whatever their logits. PyTorch's default is -100.
    out : shape (rows,), floating; made in the dtype of `logits`. Written. PyTorch's mean is
        ``out.sum() / (target != ignore_index).sum()``.

    Exponentials of logits of float32 or narrower are in float32, as is the sum of each 4096 of them; all else is in
    float64, rounded once, to the dtype of `out`.

    As in PyTorch, a row with a NaN or with +inf, and a row of nothing but -inf, has the loss NaN; where a class with -inf
    has weight, as target or by smoothing, it is +inf.

    Aliasing: `out` must not overlap `logits`, `target` or itself.

    Raises ValueError if a shape, a dtype, a target, `smoothing` or an overlap breaks these rules.
    """
    if logits.ndim != 2:
        raise ValueError("logits: must have two dimensions")
    _check(logits, target, smoothing, ignore_index, out)
    rows, classes = logits.shape
    if rows * classes < _WORTH_THREADS:
        for i in range(rows):
            out[i] = 0.0 if target[i] == ignore_index else _loss(logits[i], np.intp(target[i]), smoothing)
    else:
        for i in prange(rows):
            out[i] = 0.0 if target[i] == ignore_index else _loss(logits[i], np.intp(target[i]), smoothing)
