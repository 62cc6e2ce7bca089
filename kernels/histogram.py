"""Counts of a vector's values in bins of equal width between two bounds.

Source: the definition in the reference of ``numpy.histogram`` (with ``bins`` a number and ``range`` given): bin ``k``
of ``n`` holds ``edge[k] <= value < edge[k + 1]``, the last bin also its upper edge, where ``edge = linspace(low, high,
n + 1)``, rounded to the dtype of the values if that is floating. Values outside, NaN and infinities are not counted.

Tested in ``tests/programs/test_kernels.py`` against ``numpy.histogram``, count for count, and against ``torch.histc``, which may
count a value within rounding of an edge in the other bin.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, injective, place

_WORTH_THREADS = 1 << 15  # values; with fewer, one thread is as fast
_BLOCKS = 8  # that many values are cut into, each with counts of its own
_WORTH_COUNTS = 16  # values for each of those counts; with fewer, summing them takes too long


@njit(error_model="numpy")
def _count(x, edges, counts):
    """Add to ``counts[k]`` how many values of `x` lie in bin `k`."""
    bins = counts.shape[0]
    first, last = edges[0], edges[bins]
    scale = bins / (last - first)
    for i in range(x.shape[0]):
        value = np.float64(x[i])
        if value >= first and value <= last:
            position = (value - first) * scale
            # `not <` also catches NaN, from bounds so close that they are equal in the dtype of x
            k = np.uintp(bins - 1 if not position < bins else np.intp(position))
            # position and edges are rounded differently; the edges decide
            while value < edges[k]:
                k -= np.uintp(1)
            while k < np.uintp(bins - 1) and value >= edges[k + np.uintp(1)]:
                k += np.uintp(1)
            counts[k] += 1


@njit
def _edges(x, bins, low, high):
    width = (np.float64(high) - np.float64(low)) / bins
    edges = np.empty(bins + 1)
    for k in range(bins):
        edges[k] = k * width + low
    edges[bins] = high
    if x.dtype.kind == "f":
        for k in range(bins + 1):
            edges[k] = x.dtype.type(edges[k])
    return edges


@njit
def _check(x, bins, low, high, out):
    if bins < 1:
        raise ValueError("bins: must be at least 1")
    if out.shape != (bins,):
        raise ValueError("out: its shape must be (bins,)")
    if (out.dtype.kind != "i" and out.dtype.kind != "u") or out.itemsize != 8:
        raise ValueError("out: its dtype must be int64 or uint64")
    if not (low < high and np.isfinite(np.float64(high) - np.float64(low))):
        raise ValueError("low, high: must be finite, low less than high")
    if x.dtype.kind == "f" and not (np.isfinite(x.dtype.type(low)) and np.isfinite(x.dtype.type(high))):
        raise ValueError("low, high: must be finite in the dtype of x")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart(place(x), place(out)):
        raise ValueError("out: overlaps x")


@fast_args(out="x[n], bins -> out[bins]: int64", parallel=True, cache=True, error_model="numpy")
def histogram(x, bins, low, high, out):
    """Write into ``out[k]`` how many values of `x` lie in bin `k`.

    Parameters
    ----------
    x : shape (n,), integer or floating. Integers are compared as float64, exactly up to 2**53.
    bins : how many, an int, at least 1.
    low, high : the bounds, ``low < high``, finite also in the dtype of `x`; in the unit of `x`.
    out : shape (bins,), int64 or uint64; made in int64. Overwritten, not added to.

    Aliasing: `out` must not overlap `x`, nor itself.

    Raises ValueError if a shape, `bins`, the dtype of `out`, a bound or an overlap breaks these rules.
    """
    if x.ndim != 1:
        raise ValueError("x: must have one dimension")
    _check(x, bins, low, high, out)
    edges = _edges(x, bins, low, high)
    for k in range(bins):
        out[k] = 0
    n = x.shape[0]
    if n < _WORTH_THREADS or n < _WORTH_COUNTS * _BLOCKS * bins:
        _count(x, edges, out)
        return
    counts = np.zeros((_BLOCKS, bins), np.int64)
    for block in prange(_BLOCKS):
        _count(x[n * block // _BLOCKS : n * (block + 1) // _BLOCKS], edges, counts[block])
    for block in range(_BLOCKS):
        for k in range(bins):
            out[k] += counts[block, k]
