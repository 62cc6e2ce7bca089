"""Rounding to bfloat16 or float16 up or down, at odds that make it right on average: small steps of a sum are not lost.

A number between two neighbours of the type becomes the upper one with the probability of its distance from the lower one, in
units of theirs. Source: M. Croci et al., "Stochastic rounding: implementation, error analysis and applications"
(arXiv:2104.12651), section 2.

The odds are numbers without state: of a key and an element's index, by the last step of A. Appleby's MurmurHash3 (fmix32), which
loops are vectorised with. Tested in ``tests/programs/test_kernels_half.py``.
"""

import numpy as np
from numba import njit
from numba.extending import overload


@njit
def mixed(key):
    """A bijection of 32 bits, of which each bit given changes each bit returned for half of all keys: fmix32."""
    key = np.uint32(key)
    key = np.uint32(np.uint32(key ^ np.uint32(key >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    key = np.uint32(np.uint32(key ^ np.uint32(key >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(key ^ np.uint32(key >> np.uint32(16)))


def rounds(dtype):
    """Whether :func:`rounded` knows a Numba type of elements."""
    return str(dtype) in ("bfloat16", "float16")


def rounded(value, array, key, j):
    """A number, as float32, that is an element's of `array`: the one below or above `value`.

    `key` and `j`, the element's index, give the odds. Of infinity and NaN: themselves. What is too large for float16 may
    become infinity. Elements of other types: `value`.
    """
    return value  # interpreted


@overload(rounded)
def _rounded(value, array, key, j):
    if str(array.dtype) == "bfloat16":

        def to_bfloat16(value, array, key, j):
            value = np.float32(value)
            sum_of_bits = value.view(np.int32) + np.int32(mixed(key + j) & 0xFFFF)
            found = np.int32(sum_of_bits & -0x10000).view(np.float32)
            return found if abs(value) < np.float32(np.inf) else value

        return to_bfloat16
    if str(array.dtype) == "float16":

        def to_float16(value, array, key, j):
            value = np.float32(value)
            odds = np.int32(mixed(key + j) & 0xFFFF)
            sum_of_bits = value.view(np.int32) + (odds >> 3)
            normal = np.int32(sum_of_bits & -0x2000).view(np.float32)
            # below 2**-14, numbers are multiples of 2**-24; here in 1/65536 of that
            size = abs(value)
            size = size if size < np.float32(2.0**-14) else np.float32(0)
            units = (np.int32(size * np.float32(2.0**40)) + odds) >> 16
            small = np.float32(units) * np.float32(2.0**-24)
            small = -small if value < 0 else small
            found = small if abs(value) < np.float32(2.0**-14) else normal
            return found if abs(value) < np.float32(np.inf) else value

        return to_float16
    return lambda value, array, key, j: value
