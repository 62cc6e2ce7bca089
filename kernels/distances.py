"""Euclidean distances between the rows of two matrices: all of them, or the nearest few of each row.

``distance(x, y) = sqrt(sum over k of (x[k] - y[k])**2)``, computed as it stands. The expansion into squared lengths and
a matrix product, which ``torch.cdist`` uses for more than 25 rows, loses the digits of points that are close together.

Source: M. M. Deza and E. Deza, "Encyclopedia of Distances" (2009), section 1.1 (the Euclidean metric).

Tested in ``tests/programs/test_kernels_sums.py`` against NumPy, and in ``test_kernels.py`` against ``torch.cdist``.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, injective, place

_WORTH_THREADS = 1 << 16  # differences; with fewer, one thread is as fast
_ROWS = 16  # rows of x that a thread takes at a time
_PANEL = 512  # bytes of a panel's row


@njit
def _packed(x, out):
    """A C-contiguous copy in the dtype of `out`."""
    copy = np.empty(x.shape, out.dtype)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            copy[i, k] = x[i, k]
    return copy


@njit
def _panels(y, out):
    """The rows of `y` in the dtype of `out`, in groups, each transposed: element k of a group's rows is one panel row.

    So all distances of a vector from a group are computed in lockstep. What fills up the last group is 0.
    """
    lanes = _PANEL // out.itemsize
    panels = np.zeros((-(-y.shape[0] // lanes), y.shape[1], lanes), out.dtype)
    for j in range(y.shape[0]):
        for k in range(y.shape[1]):
            panels[j // lanes, k, j % lanes] = y[j, k]
    return panels


# "contract" joins a product and a sum; unlike all of fastmath it keeps NaN and infinities
@njit(fastmath={"contract"})
def _distances(x, panel, out):
    """Write the distances of the vector `x` from a panel's rows into `out`, eight elements of all of them at a time."""
    columns, lanes = panel.shape
    for j in range(lanes):
        out[j] = 0
    eights = columns - columns % 8
    for k in range(0, eights, 8):
        x0, x1, x2, x3, x4, x5, x6, x7 = x[k], x[k + 1], x[k + 2], x[k + 3], x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        y0, y1, y2, y3 = panel[k], panel[k + 1], panel[k + 2], panel[k + 3]
        y4, y5, y6, y7 = panel[k + 4], panel[k + 5], panel[k + 6], panel[k + 7]
        for j in range(lanes):
            d0, d1, d2, d3 = x0 - y0[j], x1 - y1[j], x2 - y2[j], x3 - y3[j]
            d4, d5, d6, d7 = x4 - y4[j], x5 - y5[j], x6 - y6[j], x7 - y7[j]
            out[j] += ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)) + ((d4 * d4 + d5 * d5) + (d6 * d6 + d7 * d7))
    for k in range(eights, columns):
        for j in range(lanes):
            difference = x[k] - panel[k, j]
            out[j] += difference * difference
    for j in range(lanes):
        out[j] = math.sqrt(out[j])


@njit
def _pairwise_rows(x, panels, out):
    lanes = panels.shape[2]
    found = np.empty(lanes, x.dtype)
    for p in range(panels.shape[0]):
        for i in range(x.shape[0]):
            _distances(x[i], panels[p], found)
            here = out[i, p * lanes : (p + 1) * lanes]
            for j in range(here.shape[0]):
                here[j] = found[j]


@njit
def _before(a, b):
    """Whether `a` is sorted before `b`: numbers ascend, NaN comes last."""
    return a < b or (b != b and a == a)


@njit
def _keep_nearest(found, first, kept, distances, indices):
    """Sort those of `found` that are near enough into the vectors of the nearest, of which there are `kept` already.

    What comes later goes behind its equals, so equal distances stay in the order of their indices.
    """
    k = distances.shape[0]
    farthest = distances[k - 1] if kept == k else np.nan
    for j in range(found.shape[0]):
        value = found[j]
        if value >= farthest:  # by far the most
            continue
        if kept == k and not _before(value, distances[k - 1]):
            continue
        kept = min(kept + 1, k)
        position = kept - 1
        while position > 0 and _before(value, distances[position - 1]):
            distances[position], indices[position] = distances[position - 1], indices[position - 1]
            position -= 1
        distances[position], indices[position] = value, first + j
        if kept == k:
            farthest = distances[k - 1]


@njit
def _nearest_rows(x, panels, m, distances, indices):
    lanes = panels.shape[2]
    found = np.empty(lanes, x.dtype)
    for p in range(panels.shape[0]):
        first = p * lanes
        for i in range(x.shape[0]):
            _distances(x[i], panels[p], found)
            kept = min(first, distances.shape[1])
            _keep_nearest(found[: min(lanes, m - first)], first, kept, distances[i], indices[i])


@njit
def _check(x, y):
    if x.shape[1] != y.shape[1]:
        raise ValueError("y: must have as many columns as x")


@njit
def _check_pairwise(x, y, out):
    _check(x, y)
    if out.ndim != 2 or out.shape[0] != x.shape[0] or out.shape[1] != y.shape[0]:
        raise ValueError("out: its shape must be the number of rows of x and that of y")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart(place(x), place(out)) and apart(place(y), place(out))):
        raise ValueError("out: overlaps x or y")


@fast_args(out="x[n, columns], y[m, columns] -> out[n, m]: x", parallel=True, cache=True)
def pairwise(x, y, out):
    """Write the distance of row `i` of `x` from row `j` of `y` into ``out[i, j]``.

    Parameters
    ----------
    x : shape (n, columns), any real dtype.
    y : shape (m, columns), any real dtype.
    out : shape (n, m), floating; made in the dtype of `x`. Written, in the unit of `x` and `y`. Without columns all
        distances are 0.

    `x` and `y` are converted to the dtype of `out`, and all arithmetic is in it. A row with a NaN has the distance NaN
    from every other, one with an infinity infinity or, where the same element of the other is infinite too, NaN.

    Aliasing: `out` must not overlap `x`, `y` or itself.

    Raises ValueError if a shape, the dtype of `out` or an overlap breaks these rules.
    """
    _check_pairwise(x, y, out)
    rows, panels = _packed(x, out), _panels(y, out)
    n = x.shape[0]
    if out.size * x.shape[1] < _WORTH_THREADS:
        _pairwise_rows(rows, panels, out)
    else:
        for block in prange(-(-n // _ROWS)):
            first, last = block * _ROWS, min((block + 1) * _ROWS, n)
            _pairwise_rows(rows[first:last], panels, out[first:last])


@njit
def _check_nearest(x, y, k, distances, indices):
    _check(x, y)
    if k < 0 or k > y.shape[0]:
        raise ValueError("k: must be from 0 to the number of rows of y")
    if distances.shape != (x.shape[0], k):
        raise ValueError("distances: its shape must be the number of rows of x and k")
    if indices.shape != distances.shape:
        raise ValueError("indices: its shape must be that of distances")
    if distances.dtype.type(0.5) != 0.5:
        raise ValueError("distances: its dtype must be floating")
    if indices.dtype.kind != "i" or indices.itemsize != 8:
        raise ValueError("indices: its dtype must be int64")
    if not injective(place(distances)):
        raise ValueError("distances: each element must have memory of its own")
    if not injective(place(indices)):
        raise ValueError("indices: each element must have memory of its own")
    if not (apart(place(x), place(distances)) and apart(place(y), place(distances))):
        raise ValueError("distances: overlaps x or y")
    if not (apart(place(x), place(indices)) and apart(place(y), place(indices))):
        raise ValueError("indices: overlaps x or y")
    if not apart(place(distances), place(indices)):
        raise ValueError("indices: overlaps distances")


@fast_args(
    out="x[n, columns], y[m, columns], k -> distances[n, k]: x, indices[n, k]: int64", parallel=True, cache=True
)
def nearest(x, y, k, distances, indices):
    """Write the distances of the `k` nearest rows of `y`, and their indices, for each row of `x`, the nearest first.

    Parameters
    ----------
    x : shape (n, columns), any real dtype.
    y : shape (m, columns), any real dtype.
    k : how many, an int from 0 to `m`.
    distances : shape (n, k), floating; made in the dtype of `x`. Written, as by :func:`pairwise`, ascending, NaN last.
    indices : shape (n, k), int64. Written: which row of `y` it is. Of equal distances the smaller index comes first.

    There is no matrix of all distances. Each row's nearest are kept sorted, which suits small `k`: the time is
    O(n m columns) and, if the nearest come last, O(n m k).

    Aliasing: `distances` and `indices` must not overlap any other argument, each other or themselves.

    Raises ValueError if a shape, `k`, the dtype of `distances` or `indices` or an overlap breaks these rules.
    """
    _check_nearest(x, y, k, distances, indices)
    if distances.size == 0:
        return
    rows, panels = _packed(x, distances), _panels(y, distances)
    n, m = x.shape[0], y.shape[0]
    if x.size * m < _WORTH_THREADS:
        _nearest_rows(rows, panels, m, distances, indices)
    else:
        for block in prange(-(-n // _ROWS)):
            first, last = block * _ROWS, min((block + 1) * _ROWS, n)
            _nearest_rows(rows[first:last], panels, m, distances[first:last], indices[first:last])
