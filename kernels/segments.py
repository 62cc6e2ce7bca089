"""Reductions of a vector's segments, or of groups of a matrix's rows: sum, mean, maximum and minimum.

Segment `k` is ``x[offsets[k]:offsets[k + 1]]``: of a vector these elements, which become one number; of a matrix these
rows, which become one row, column by column.

Source: the definition in the reference of ``torch.segment_reduce`` with ``offsets`` and ``axis=0``, and in that of
``np.add.reduceat``; unlike the latter, a segment without elements has the value of a reduction without elements.

Tested in ``tests/programs/test_kernels_sums.py``, segment by segment, against NumPy.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .offsets import cut_within
from .overlap import apart, injective, place

_OUT = "x[n, ...], offsets[cuts] -> out[cuts - 1, ...]"
_WORTH_THREADS = 1 << 15  # elements of x; with fewer, one thread is as fast


@njit
def _check(x, offsets, out):
    """What all four refuse."""
    if x.ndim != 1 and x.ndim != 2:
        raise ValueError("x: must have one or two dimensions")
    if offsets.dtype.kind != "i" and offsets.dtype.kind != "u":
        raise ValueError("offsets: must be integers")
    if not cut_within(offsets, x.shape[0]):
        raise ValueError("offsets: must not decrease, and lie within x")
    if out.ndim != x.ndim or out.shape[0] != offsets.shape[0] - 1 or out.shape[1:] != x.shape[1:]:
        raise ValueError("out: its shape must be that of x, but its length that of offsets less one")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart(place(x), place(out)) and apart(place(offsets), place(out))):
        raise ValueError("out: overlaps x or offsets")


@njit
def _check_sum(x, out):
    if out.dtype.type(0.5) != 0.5:
        if out.itemsize != 8 or out.dtype.type(-1) + 1.0 != 0:
            raise ValueError("out: its dtype must be floating, complex or int64")
        if x.dtype.type(0.5) == 0.5:
            raise ValueError("out: its dtype must be floating or complex, as that of x is")


@njit
def _check_extreme(x, initial, out):
    if out.dtype.kind != x.dtype.kind or out.itemsize != x.itemsize:
        raise ValueError("out: its dtype must be that of x")
    if x.dtype.kind != "f" and not (isinstance(initial, int) and x.dtype.type(initial) == initial):
        raise ValueError("initial: must be an int that the dtype of x has")


# In these, `first` and `last` are unsigned: no index is looked at for being negative, which counts where segments are
# short. "reassoc" lets a vector's sum be vectorised; unlike all of fastmath it keeps NaN and infinities.
@njit(fastmath={"reassoc"})
def _sum(x, first, last, out, k):
    if x.ndim == 1:
        total = out.dtype.type(0) * np.int64(0)  # a float64, complex128 or int64
        for i in range(first, last):
            total += x[i]
        out[k] = total
    else:
        for j in range(x.shape[1]):
            out[k, j] = 0
        for i in range(first, last):
            for j in range(x.shape[1]):
                out[k, j] += x[i, j]


@njit(error_model="numpy")
def _mean(x, first, last, out, k):
    _sum(x, first, last, out, k)
    if x.ndim == 1:
        out[k] /= last - first
    else:
        for j in range(x.shape[1]):
            out[k, j] /= last - first


@njit
def _extreme(x, first, last, initial, largest, out, k):
    """The maximum if `largest`, else the minimum."""
    if x.ndim == 1:
        extreme, nan = x.dtype.type(initial), x.dtype.type(0)
        for i in range(first, last):
            value = x[i]
            if value != value:
                nan = value
            if value > extreme if largest else value < extreme:
                extreme = value
        out[k] = extreme if nan == nan else nan
    else:
        for j in range(x.shape[1]):
            out[k, j] = initial
        for i in range(first, last):
            for j in range(x.shape[1]):
                value, extreme = x[i, j], out[k, j]
                better = value > extreme if largest else value < extreme
                out[k, j] = value if better or value != value else extreme


@fast_args(out=_OUT, parallel=True, cache=True)
def segment_sum(x, offsets, out):
    """Write the sum of each segment of `x` into `out`.

    Parameters
    ----------
    x : shape (n,) or (n, columns), any real or complex dtype.
    offsets : shape (segments + 1,), integers that do not decrease, from 0 to `n`. What lies before the first or from
        the last on belongs to no segment.
    out : shape (segments,) or (segments, columns), floating or complex, or int64 if `x` is integer; made in the dtype
        of `x`. Written. Of a segment without elements it is 0.

    A vector's segment is summed in float64, complex128 or int64, which wraps around, and rounded once, to the dtype of
    `out`. A matrix's rows are added one after the other, in the dtype of `out`.

    Aliasing: `out` must not overlap `x`, `offsets` or itself.

    Raises ValueError if a shape, an offset, the dtype of `out` or an overlap breaks these rules.
    """
    _check(x, offsets, out)
    _check_sum(x, out)
    if x.size < _WORTH_THREADS:
        for k in range(out.shape[0]):
            _sum(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), out, k)
    else:
        for k in prange(out.shape[0]):
            _sum(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), out, k)


@fast_args(out=_OUT, parallel=True, cache=True)
def segment_mean(x, offsets, out):
    """Write the mean of each segment of `x` into `out`.

    Parameters, aliasing and errors are those of :func:`segment_sum`, but `out` is floating or complex. Of a segment
    without elements it is NaN. The sum is divided after it was rounded to the dtype of `out`.
    """
    _check(x, offsets, out)
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating or complex")
    if x.size < _WORTH_THREADS:
        for k in range(out.shape[0]):
            _mean(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), out, k)
    else:
        for k in prange(out.shape[0]):
            _mean(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), out, k)


@fast_args(out=_OUT, parallel=True, cache=True)
def segment_max(x, offsets, initial, out):
    """Write the maximum of `initial` and each segment of `x` into `out`; if one is NaN, NaN.

    Parameters
    ----------
    x : shape (n,) or (n, columns), integer or floating.
    offsets : as for :func:`segment_sum`.
    initial : a real number; for an integer `x` an int that its dtype has. Of a segment without elements it is the result.
    out : shape (segments,) or (segments, columns), of the dtype of `x`. Written.

    Aliasing: `out` must not overlap `x`, `offsets` or itself.

    Raises ValueError if a shape, an offset, `initial`, the dtype of `out` or an overlap breaks these rules.
    """
    _check(x, offsets, out)
    _check_extreme(x, initial, out)
    if x.size < _WORTH_THREADS:
        for k in range(out.shape[0]):
            _extreme(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), initial, True, out, k)
    else:
        for k in prange(out.shape[0]):
            _extreme(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), initial, True, out, k)


@fast_args(out=_OUT, parallel=True, cache=True)
def segment_min(x, offsets, initial, out):
    """Write the minimum of `initial` and each segment of `x` into `out`; all else as for :func:`segment_max`."""
    _check(x, offsets, out)
    _check_extreme(x, initial, out)
    if x.size < _WORTH_THREADS:
        for k in range(out.shape[0]):
            _extreme(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), initial, False, out, k)
    else:
        for k in prange(out.shape[0]):
            _extreme(x, np.uintp(offsets[k]), np.uintp(offsets[k + 1]), initial, False, out, k)
