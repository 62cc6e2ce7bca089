"""Which memory do arrays share? What kernels ask before they write.

A kernel that writes ``out`` while it still reads ``x`` is right if the two share no memory, or if they are the same view and
each element is read before it is written. Deciding that exactly for any two strided views means solving a Diophantine
equation; the functions here decide it for the views that slicing, transposing and reshaping make, and count what
they cannot decide as an overlap. Addresses, strides and spans are in bytes. Tested in ``tests/test_kernels.py`` against
``numpy.shares_memory``, which is exact.
"""

import numpy as np
from numba import njit

_NO_PITCH = 1 << 62  # larger than any address on a 64-bit machine


@njit(cache=True)
def _span_and_start(x, pitch):
    """Where one pitch's worth of the non-empty array `x` lies: its length in bytes, and its lowest address."""
    span = np.intp(x.itemsize)
    start = np.intp(x.ctypes.data)
    for d in range(x.ndim):
        stride = np.intp(x.strides[d])
        if stride % pitch != 0:
            reach = stride * np.intp(x.shape[d] - 1)
            span += abs(reach)
            start += min(reach, 0)
    return span, start


@njit(cache=True)
def _separated(x, y, pitch):
    """Whether the bytes of `x` and `y`, non-empty, lie in different places of a memory cut into pieces of `pitch` bytes.

    A stride that is a multiple of the pitch does not move an element within its piece, so only the other dimensions count. With a
    row's stride as the pitch this tells apart two groups of columns of one matrix.
    """
    x_span, x_start = _span_and_start(x, pitch)
    y_span, y_start = _span_and_start(y, pitch)
    distance = (y_start - x_start) % pitch
    return distance >= x_span and distance + y_span <= pitch


@njit(cache=True)
def apart(x, y):
    """Whether `x` and `y` certainly share no memory."""
    if x.size == 0 or y.size == 0 or _separated(x, y, np.intp(_NO_PITCH)):
        return True
    for stride in x.strides:
        if stride != 0 and _separated(x, y, np.intp(abs(stride))):
            return True
    for stride in y.strides:
        if stride != 0 and _separated(x, y, np.intp(abs(stride))):
            return True
    return False


@njit(cache=True)
def apart_or_same(x, y):
    """Whether `x` and `y`, of equal shape, certainly share no memory, or have each element at the same address."""
    same = x.ctypes.data == y.ctypes.data and x.itemsize == y.itemsize
    for d in range(x.ndim):
        same = same and (x.strides[d] == y.strides[d] or x.shape[d] <= 1)
    return same or apart(x, y)


@njit(cache=True)
def injective(x):
    """Whether each element of `x` certainly has memory of its own; an expanded array, with stride 0, has not."""
    if x.size == 0:
        return True
    for d in range(x.ndim):
        if x.shape[d] > 1:
            stride = abs(x.strides[d])
            inner = x.itemsize  # bytes that the dimensions with smaller strides span
            for e in range(x.ndim):
                if e != d and x.shape[e] > 1:
                    other = abs(x.strides[e])
                    if other < stride or (other == stride and e < d):
                        inner += other * (x.shape[e] - 1)
            if stride < inner:
                return False
    return True
