"""Rotary position embedding: each pair of numbers in a head turned by an angle that grows with the position.

``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)``, where ``cos`` and ``sin`` are of the angle of the position
and of the pair.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864), section 3.2.2,
equation 15, and equation 34 for the form that is computed. There the pairs are neighbours, ``(x[2 * j], x[2 * j + 1])``;
many models pair the halves of a head instead, ``(x[j], x[j + head_dim / 2])``.

The gradient of `x` is that of the result, each pair turned back. `cos` and `sin` have none.

Tested in ``tests/programs/test_kernels_nn.py`` against a product of complex numbers in NumPy; the gradient in
``test_kernels_gradients.py``.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, apart_or_same, injective, place

_WORTH_THREADS = 1 << 15  # elements; with fewer, one thread is as fast


@njit
def _copy(x, out):
    for j in range(x.shape[0]):
        out[j] = x[j]


@njit
def _turn_neighbours(x, cos, sin, out):
    for j in range(cos.shape[0]):
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j] = a * cos[j] - b * sin[j]
        out[2 * j + 1] = b * cos[j] + a * sin[j]


@njit
def _turn_halves(x, cos, sin, out):
    pairs = cos.shape[0]
    left, right, out_left, out_right = x[:pairs], x[pairs:], out[:pairs], out[pairs:]
    for j in range(pairs):
        out_left[j] = left[j] * cos[j] - right[j] * sin[j]
        out_right[j] = right[j] * cos[j] + left[j] * sin[j]


@njit
def _rotary_head(x, cos, sin, interleaved, out):
    """All positions of one head."""
    # rows of their own: `out` may be `x`, and a loop over arrays that overlap, or are strided, is not vectorised
    given, turned = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], out.dtype)
    for p in range(x.shape[0]):
        _copy(x[p], given)
        if interleaved:
            _turn_neighbours(given, cos[p], sin[p], turned)
        else:
            _turn_halves(given, cos[p], sin[p], turned)
        _copy(turned, out[p])


@njit
def _check(x, cos, sin, start, out):
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    positions, head_dim = out.shape[2:]
    if head_dim % 2 != 0:
        raise ValueError("x: its last dimension must be even")
    if cos.ndim != 2 or cos.shape[1] != head_dim // 2:
        raise ValueError("cos: its shape must be (longest, head_dim // 2)")
    if sin.shape != cos.shape:
        raise ValueError("sin: its shape must be that of cos")
    if start < 0 or start > cos.shape[0] - positions:
        raise ValueError("start: cos and sin must have a row for each position from start on")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart_or_same(place(x), place(out)):
        raise ValueError("out: overlaps x without being the same view")
    if not (apart(place(cos), place(out)) and apart(place(sin), place(out))):
        raise ValueError("out: overlaps cos or sin")


@fast_args(out="grad_out[batch, heads, positions, dim] -> grad_x[batch, heads, positions, dim]", cache=True)
def rotary_backward(grad_out, cos: np.ndarray, sin: np.ndarray, start: int, interleaved: bool, grad_x):
    """Write the gradient of rotary's `x` into `grad_x`: each pair turned back."""
    rotary(grad_out, cos, -sin, start, interleaved, grad_x)


@fast_args(
    out="x[batch, heads, positions, dim] -> out[batch, heads, positions, dim]", backward=rotary_backward,
    parallel=True, cache=True,
)  # fmt: skip
def rotary(x, cos: np.ndarray, sin: np.ndarray, start: int, interleaved: bool, out):
    """Write `x` with each pair turned by the angle of its position into `out`.

    Parameters
    ----------
    x : shape (batch, heads, positions, head_dim), head_dim even, any real dtype.
    cos, sin : shape (longest, head_dim // 2), any real dtype: cosine and sine of the angle of each position and pair. By
        the paper the angle is ``position * 10000 ** (-2 * j / head_dim)``.
    start : the position of ``x[:, :, 0]``, an index into `cos` and `sin`; in decoding, how many tokens came before.
    interleaved : True: a pair is ``x[..., 2 * j], x[..., 2 * j + 1]``. False: ``x[..., j], x[..., j + head_dim // 2]``.
    out : shape of `x`, floating; made in the dtype of `x`. Written.

    The arithmetic is in the common type of `x`, `cos` and `sin`, rounded to the dtype of `out`. NaN and infinities are as the
    formula has them. Tensors laid out (batch, positions, heads, head_dim) come as ``x.transpose(1, 2)``.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself, `cos` or `sin`.

    Raises ValueError if a shape, `start`, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 4:
        raise ValueError("out: must have four dimensions")
    _check(x, cos, sin, start, out)
    batch, heads, positions, _ = out.shape
    cos, sin = cos[start : start + positions], sin[start : start + positions]
    if out.size < _WORTH_THREADS:
        for i in range(batch * heads):
            _rotary_head(x[i // heads, i % heads], cos, sin, interleaved, out[i // heads, i % heads])
    else:
        for i in prange(batch * heads):
            _rotary_head(x[i // heads, i % heads], cos, sin, interleaved, out[i // heads, i % heads])
