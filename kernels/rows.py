"""What kernels do that work row by row: check their matrices, find a row's largest element, sum elements and exponentials.

The loops are vectorised where the row is contiguous. Tested in ``tests/programs/test_kernels_nn.py`` and
``test_kernels_half.py``.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from .exponential import exp_for, is_narrow
from .overlap import apart_or_same, injective, place

_BLOCK = 1 << 12  # elements whose sum may be in float32: lanes add up few of them; the sum of such sums is in float64


@njit
def check_rows(x, out):
    """Raise ValueError if rows of `x` cannot be turned into rows of a floating `out`, which may be `x`."""
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not apart_or_same(place(x), place(out)):
        raise ValueError("out: overlaps x without being the same view")


def _ordered(x):
    """The number `x` as an integer, if it is floating: the larger of two numbers has the larger integer.

    LLVM vectorises the maximum of integers, but not that of floating numbers, because of NaN. A NaN is above +inf, or
    below -inf if its sign bit is set. Interpreted: the number itself.
    """
    return x


def _number(order, like):
    """The number with this order, of the type of `like`."""
    return order


@overload(_ordered)
def _ordered_of(x):
    if x == types.float32 or is_narrow(x):

        def of_float32(x):
            bits = np.float32(x).view(np.int32)
            return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))

        return of_float32
    if x == types.float64:

        def of_float64(x):
            bits = np.float64(x).view(np.int64)
            return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)

        return of_float64
    return lambda x: x


@overload(_number)
def _number_of(order, like):
    if like == types.float32 or is_narrow(like):
        return lambda order, like: np.int32(order ^ ((order >> 31) & 0x7FFFFFFF)).view(np.float32)
    if like == types.float64:
        return lambda order, like: np.int64(order ^ ((order >> 63) & 0x7FFFFFFFFFFFFFFF)).view(np.float64)
    return lambda order, like: order


@njit
def largest(x):
    """The largest element of a row that has one. If an element is NaN: NaN, or the largest of the others."""
    first = x[0]
    most = _ordered(first)
    for j in range(1, x.shape[0]):
        order = _ordered(x[j])
        most = order if order > most else most
    return _number(most, first)


# "reassoc" lets the sums be vectorised; unlike all of fastmath it keeps NaN and infinities
@njit(fastmath={"reassoc"})
def sum_of_exp(x, shift):
    """The sum over a row of ``exp(x[j] - shift)``, exponentials in float32 if both numbers are, else in float64."""
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        block = x[start : start + _BLOCK]
        part = exp_for(block[0] - shift, x)
        for j in range(1, block.shape[0]):
            part += exp_for(block[j] - shift, x)
        total += part
    return total


@njit(fastmath={"reassoc"})
def exp_in_place(x, array):
    """Replace each number of a floating row by its exponential, for elements of `array`, and return their sum."""
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        block = x[start : start + _BLOCK]
        part = x.dtype.type(0)
        for j in range(block.shape[0]):
            e = exp_for(block[j], array)
            block[j] = e
            part += e
        total += part
    return total


def real_of(x, out):
    """The type in which rows of `x` become rows of `out`: float32 if all elements have 16 bits or fewer, else float64."""
    return np.float32 if max(x.itemsize, out.itemsize) <= 2 and out.dtype.kind == x.dtype.kind != "i" else np.float64


@overload(real_of)
def _real_of(x, out):
    if is_narrow(x.dtype) and is_narrow(out.dtype):
        return lambda x, out: np.float32
    return lambda x, out: np.float64


def row_for(out):
    """A row for numbers on the way to `out`: `out`, or one of float32 if its elements have 16 bits or fewer."""
    return out


@overload(row_for)
def _row_for(out):
    if is_narrow(out.dtype):
        return lambda out: np.empty(out.shape[0], np.float32)
    return lambda out: out


@njit(fastmath={"reassoc"})
def sum_of(x, real):
    """The sum of a row in float64; of each 4096 elements in `real`."""
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        block = x[start : start + _BLOCK]
        part = real(0)
        for j in range(block.shape[0]):
            part += real(block[j])
        total += part
    return total


@njit(fastmath={"reassoc"})
def sum_of_squares(x, mean):
    """The sum of ``(x[j] - mean)**2`` over a row in float64; all else in the type of `mean`."""
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        block = x[start : start + _BLOCK]
        part = type(mean)(0)
        for j in range(block.shape[0]):
            deviation = type(mean)(block[j]) - mean
            part += deviation * deviation
        total += part
    return total
