"""Exclusive scan of a vector: ``out[i] = x[0] + ... + x[i - 1]``, the sum of all elements before the i-th.

The scan of lengths is offsets: where each piece begins if they lie one behind the other.

Source: G. E. Blelloch, "Prefix Sums and Their Applications" (CMU-CS-90-190, 1990), sections 1.2 and 1.4: the scan of a
vector cut into pieces is the scan of each piece, begun with the scan of the pieces' sums. Here that serves twice: a
thread scans four pieces at a time, whose additions need not wait for each other, and there are several threads.

Tested in ``tests/programs/test_kernels_sums.py`` against ``np.cumsum``, shifted by one.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart_or_same, injective, place

_WORTH_PIECES = 128  # elements; with fewer, one sum after the other is as fast
_WORTH_THREADS = 1 << 15
_GROUP = 1 << 14  # elements of four pieces: they stay in the nearest cache between the passes


@njit
def _zero(out):
    """What sums begin with: 0 as a float64 if `out` is floating, as an int64 if it is int64."""
    return out.dtype.type(0) * np.int64(0)


@njit(fastmath={"reassoc"})
def _sum(x, out):
    total = _zero(out)
    for i in range(x.shape[0]):
        total += out.dtype.type(x[i])
    return total


@njit
def _scan(x, out, total):
    for i in range(x.shape[0]):
        value = out.dtype.type(x[i])
        out[i] = total
        total += value


@njit
def _scan_four(x, out, starts):
    """Scan four pieces of equal length, each begun with its element of `starts`."""
    a, b, c, d = starts[0], starts[1], starts[2], starts[3]
    piece = x.shape[0] // 4
    for i in range(piece):
        j, k, m = i + piece, i + 2 * piece, i + 3 * piece
        xa, xb, xc, xd = x[i], x[j], x[k], x[m]
        out[i], out[j], out[k], out[m] = a, b, c, d
        a += out.dtype.type(xa)
        b += out.dtype.type(xb)
        c += out.dtype.type(xc)
        d += out.dtype.type(xd)


@njit
def _pass(x, out, starts, piece, group, writing):
    """Over four pieces: their sums into `starts`, or, with `starts` scanned, the pieces' scans into `out`."""
    first = 4 * group
    if writing:
        here = slice(first * piece, (first + 4) * piece)
        _scan_four(x[here], out[here], starts[first : first + 4])
    else:
        for p in range(first, first + 4):
            starts[p] = _sum(x[p * piece : (p + 1) * piece], out)


@njit
def _check(x, out):
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    if out.dtype.type(0.5) != 0.5:
        if out.itemsize != 8 or out.dtype.type(-1) + 1.0 != 0:
            raise ValueError("out: its dtype must be floating or int64")
        if x.dtype.kind == "f":
            raise ValueError("out: its dtype must be floating, as that of x is")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart_or_same(place(x), place(out)):
        raise ValueError("out: overlaps x without being the same view")


@fast_args(out="x[n] -> out[n]", parallel=True, cache=True)
def exclusive_scan(x, out):
    """Write the sum of ``x[:i]`` into ``out[i]``.

    Parameters
    ----------
    x : shape (n,), integer or floating.
    out : shape (n,), floating, or int64 if `x` is integer; made in the dtype of `x`. Written.

    Elements of `x` are converted to the dtype of `out`, added in float64 or int64, and each sum is rounded once, to the
    dtype of `out`. int64 wraps around. The order of the additions depends on `n` only, not on the number of threads. A
    NaN, or infinities of both signs, make all sums after them NaN.

    Aliasing: `out` may be `x`; it must not overlap `x` otherwise, nor itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    if out.ndim != 1:
        raise ValueError("out: must have one dimension")
    _check(x, out)
    n = x.shape[0]
    groups = 0 if n < _WORTH_PIECES else max(1, n // _GROUP)
    piece = 0 if groups == 0 else n // (4 * groups)
    starts = np.full(4 * groups + 1, _zero(out))
    for writing in (False, True):
        if n < _WORTH_THREADS:
            for group in range(groups):
                _pass(x, out, starts, piece, group, writing)
        else:
            for group in prange(groups):
                _pass(x, out, starts, piece, group, writing)
        if not writing:
            _scan(starts, starts, _zero(out))
    done = 4 * groups * piece
    _scan(x[done:], out[done:], starts[4 * groups])
