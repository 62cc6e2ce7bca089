"""``exp`` that a loop over contiguous memory can be vectorised with; Numba's own calls the C library for each element.

Source: range reduction and Taylor series, as in J.-M. Muller, "Elementary Functions" (3rd ed., 2016), chapter 11:
``exp(x) = 2**n * exp(r)`` with ``n = round(x / log(2))`` and ``r = x - n * log(2)``, so that ``abs(r) <= log(2) / 2``.
``log(2)`` is taken as a sum of two numbers; the first has so few digits that its product with ``n`` is exact. The series
ends where the next term is below a tenth of the last place: after the seventh power in float32, the thirteenth in float64.
For elements of 16 bits, and of fewer, a polynomial of degree 4 for ``2**f`` is near enough.

Tested in ``tests/programs/test_kernels_nn.py``: within 1.5 units in the last place of the exact value, at every range; and in
``tests/programs/test_kernels_half.py``.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload


def is_narrow(dtype):
    """Whether the type of an element is a floating one of 16 bits or fewer. It is none of Numba's own."""
    return not isinstance(dtype, (types.Integer, types.Boolean)) and getattr(dtype, "bitwidth", 64) <= 16


def exp(x):
    """The exponential of a number: of a float32, or of one of 16 bits or fewer, in float32, of any other real number in float64.

    As everywhere: NaN gives NaN, +inf +inf, -inf 0; too large +inf; too small a subnormal number, then 0.
    """
    return np.exp(x) if isinstance(x, np.float32) else np.exp(np.float64(x))  # interpreted


def exp_for(x, array):
    """:func:`exp` of a number on the way to elements of `array`: of a float32, only as exact as these need it."""
    return exp(x)


# "contract": a multiplication and an addition may become one instruction, which rounds once
@njit(fastmath={"contract"})
def _exp16(x):
    """Within 7e-6 times the exact value, 1/70 unit in the last place of float16; exact at 0."""
    # 2**n * 2**f, abs(f) <= 1/2; of a sum with 1.5 * 2**23 the last bits are the integer n. NaN is less than nothing.
    y = np.float32(x) * np.float32(1.44269504)
    y = np.float32(-151.0) if y < np.float32(-151.0) else y
    y = np.float32(129.0) if y > np.float32(129.0) else y
    shifted = np.float32(y + np.float32(12582912.0 + 254))
    f = y - (shifted - np.float32(12582912.0 + 254))
    # minimax in the relative error of those that are 1 at 0, by Lawson's iteration
    p = np.float32(0.009582853153360497)
    p = p * f + np.float32(0.0559064249292696)
    p = p * f + np.float32(0.2402409861088647)
    p = p * f + np.float32(0.6931241933800626)
    p = p * f + np.float32(1.0)
    # in two steps, because 2**n itself may overflow or underflow; k = n + 254
    k = np.int32(shifted.view(np.int32) & 0x3FF)
    half = np.int32(k >> 1)
    return p * np.int32(half << 23).view(np.float32) * np.int32((k - half) << 23).view(np.float32)


def _exp32(x):
    # between these all is finite or 0; NaN, which is no greater than anything, is put back at the end
    y = x if x > np.float32(-104.0) else np.float32(-104.0)
    y = y if y < np.float32(89.0) else np.float32(89.0)
    n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
    r = y - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    # in two steps, because 2**n itself may overflow or underflow
    k = np.int32(n)
    half = np.int32(k >> 1)
    p = p * np.int32((half + 127) << 23).view(np.float32) * np.int32((k - half + 127) << 23).view(np.float32)
    return p if x == x else x


def _exp64(x):
    x = np.float64(x)
    y = x if x > -746.0 else -746.0
    y = y if y < 710.0 else 710.0
    n = np.floor(y * 1.4426950408889634 + 0.5)
    r = y - n * 0.693145751953125 - n * 1.4286068203094173e-6
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    k = np.int64(n)
    half = k >> 1
    p = p * np.int64((half + 1023) << 52).view(np.float64) * np.int64((k - half + 1023) << 52).view(np.float64)
    return p if x == x else x


@overload(exp, jit_options={"fastmath": {"contract"}})
def _exp(x):
    if is_narrow(x):
        return lambda x: _exp16(x)
    return _exp32 if x == types.float32 else _exp64


@overload(exp_for)
def _exp_for(x, array):
    if x == types.float32 and is_narrow(array.dtype):
        return lambda x, array: _exp16(x)
    return lambda x, array: exp(x)
