"""Four kernels as operators of PyTorch, with their backward passes: for training, ``torch.compile`` and ``torch.export``.

Importing this module registers ``torch.ops.kernels.softmax``, ``rms_norm``, ``rotary`` and ``cross_entropy``. They are called as
the kernels are, without ``out``.

Gradients, with ``g`` the gradient of the output and ``n`` the number of elements of a row:

- softmax ``y``: ``y * (g - sum of y * g)``.
- rms_norm with ``s = 1 / sqrt(mean of x**2 + eps)``: of x ``s * g * w - x * s**3 / n * sum of x * g * w``, of the weight the sum
  over rows of ``s * g * x``.
- rotary: the same turn, backwards.
- cross_entropy: ``g * (softmax - (1 - smoothing) * one_hot(target) - smoothing / n)``.

Sums are in float64. Tested in ``tests/programs/test_kernels_torch_ops.py`` by ``torch.autograd.gradcheck`` and against PyTorch.
"""

import math

import numpy as np
from numba import prange

from fastexchange import fast_args

from .cross_entropy import cross_entropy
from .rms_norm import rms_norm
from .rotary import rotary
from .rows import largest, sum_of_exp
from .softmax import softmax

__all__ = ["cross_entropy_op", "rms_norm_op", "rotary_op", "softmax_op"]


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
    out="grad_out[batch, heads, positions, dim] -> grad_x[batch, heads, positions, dim]", parallel=True, cache=True
)
def rotary_backward(grad_out, cos: np.ndarray, sin: np.ndarray, start: int, interleaved: bool, grad_x):
    """Write the gradient of rotary into `grad_x`: each pair turned back."""
    batch, heads, positions, dim = grad_out.shape
    for at in prange(batch * heads):
        for p in range(positions):
            for j in range(dim // 2):
                left, right = (2 * j, 2 * j + 1) if interleaved else (j, j + dim // 2)
                a, b = grad_out[at // heads, at % heads, p, left], grad_out[at // heads, at % heads, p, right]
                c, s = cos[start + p, j], sin[start + p, j]
                grad_x[at // heads, at % heads, p, left] = a * c + b * s
                grad_x[at // heads, at % heads, p, right] = b * c - a * s


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


softmax_op = softmax.as_torch_op("kernels::softmax", backward=softmax_backward)
rms_norm_op = rms_norm.as_torch_op("kernels::rms_norm", backward=rms_norm_backward)
rotary_op = rotary.as_torch_op("kernels::rotary", backward=rotary_backward)
cross_entropy_op = cross_entropy.as_torch_op("kernels::cross_entropy", backward=cross_entropy_backward)
