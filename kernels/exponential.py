"""``exp`` that a loop over contiguous memory can be vectorised with; Numba's own calls the C library for each element.

Source: range reduction and Taylor series, as in J.-M. Muller, "Elementary Functions" (3rd ed., 2016), chapter 11:
``exp(x) = 2**n * exp(r)`` with ``n = round(x / log(2))`` and ``r = x - n * log(2)``, so that ``abs(r) <= log(2) / 2``.
``log(2)`` is taken as a sum of two numbers; the first has so few digits that its product with ``n`` is exact. The series
ends where the next term is below a tenth of the last place: after the seventh power in float32, the thirteenth in float64.

Tested in ``tests/programs/test_kernels_nn.py``: within 1.5 units in the last place of the exact value, at every range.
"""

import numpy as np
from numba import types
from numba.extending import overload


def exp(x):
    """The exponential of a number: of a float32 in float32, of any other real number in float64.

    As everywhere: NaN gives NaN, +inf +inf, -inf 0; too large +inf; too small a subnormal number, then 0.
    """
    return np.exp(x) if isinstance(x, np.float32) else np.exp(np.float64(x))  # interpreted


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


# "contract": a multiplication and an addition may become one instruction, which rounds once
@overload(exp, jit_options={"fastmath": {"contract"}})
def _exp(x):
    return _exp32 if x == types.float32 else _exp64
