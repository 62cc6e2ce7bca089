"""Which memory do arrays share? What kernels ask before they write.

A kernel that writes ``out`` while it still reads ``x`` is right if the two share no memory, or if they are the same
view and each element is read before it is written. Deciding that exactly for any two strided views means solving a
Diophantine equation; the functions here decide it for the views that slicing, transposing and reshaping make, and
count what they cannot decide as an overlap.

Addresses, strides and spans are in bytes. All but :func:`place` see no array but its address, item size, shape and
strides, as if it had four dimensions, so that one compiled version serves all dtypes, layouts and shapes. Tested in
``tests/programs/test_kernels.py`` against ``numpy.shares_memory``, which is exact.
"""

import numpy as np
from numba import njit

_NO_PITCH = np.intp(1 << 62)  # larger than any address on a 64-bit machine
_ONES = (1, 1, 1, 1)


@njit
def place(x):
    """Where the array `x` lies: its address, item size, shape and strides. What the other functions here take.

    Of less than four dimensions there are four all the same, the last of them with one element.
    """
    if x.ndim > 4:
        return np.intp(x.ctypes.data), np.intp(x.itemsize), x.shape, x.strides
    return np.intp(x.ctypes.data), np.intp(x.itemsize), (x.shape + _ONES)[:4], (x.strides + _ONES)[:4]


@njit
def _is_empty(x):
    empty = False
    for extent in x[2]:
        empty = empty or extent == 0
    return empty


@njit
def _span_and_start(x, pitch):
    """The length of what a non-empty array covers of a piece of memory `pitch` long, and its lowest address."""
    start, span, shape, strides = x
    for d in range(len(shape)):
        if shape[d] > 1 and (pitch == _NO_PITCH or strides[d] % pitch != 0):
            reach = strides[d] * (shape[d] - 1)
            span += abs(reach)
            start += min(reach, 0)
    return span, start


@njit
def _separated(x, y, pitch):
    """Whether two non-empty arrays lie at different offsets in pieces of memory `pitch` long.

    A stride that is a multiple of the pitch does not change an element's offset in its piece, so only the other
    dimensions count. With a row's stride as the pitch this tells apart two groups of columns of one matrix.
    """
    x_span, x_start = _span_and_start(x, pitch)
    y_span, y_start = _span_and_start(y, pitch)
    distance = (y_start - x_start) % pitch
    return distance >= x_span and distance + y_span <= pitch


@njit
def _interleaved(z, x, y):
    """Whether :func:`_separated` sees that `x` and `y` are apart with a stride of `z` as the pitch."""
    found = False
    for d in range(len(z[2])):
        found = found or (z[2][d] > 1 and z[3][d] != 0 and _separated(x, y, abs(z[3][d])))
    return found


@njit
def apart(x, y):
    """Whether two arrays, given by their places, certainly share no memory."""
    return _is_empty(x) or _is_empty(y) or _separated(x, y, _NO_PITCH) or _interleaved(x, x, y) or _interleaved(y, x, y)


@njit
def apart_or_same(x, y):
    """Whether two arrays of equal shape certainly share no memory, or have each element at the same address."""
    same = x[0] == y[0] and x[1] == y[1]
    for d in range(len(x[2])):
        same = same and (x[3][d] == y[3][d] or x[2][d] <= 1)
    return same or apart(x, y)


@njit
def injective(x):
    """Whether each element of an array certainly has memory of its own; an expanded array, with stride 0, has not."""
    if _is_empty(x):
        return True
    _, itemsize, shape, strides = x
    for d in range(len(shape)):
        if shape[d] > 1:
            stride = abs(strides[d])
            inner = itemsize  # what the dimensions with smaller strides span
            for e in range(len(shape)):
                other = abs(strides[e])
                if other < stride or (other == stride and e < d):
                    inner += other * (shape[e] - 1)
            if stride < inner:
                return False
    return True
