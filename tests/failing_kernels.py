"""Kernels that raise. (Not in a test file: pytest rewrites ``assert`` there, into what Numba cannot compile.)"""

import numba

from fastexchange import fast_args


class Custom(Exception):
    def __init__(self, value, other):
        super().__init__(value, other)


@numba.njit
def inner(x):
    if x[0] > 0:
        raise ValueError("from the inside", 3)
    return x[0]


@fast_args
def fails(how, x):
    """Raises in one of 11 ways, 0 to 10; returns 0 for others."""
    if how == 0:
        raise ValueError
    if how == 1:
        raise ValueError("static", 1, 2.5)
    if how == 2:
        raise ValueError("dynamic", how, x[0])
    if how == 3:
        inner(x)
    if how == 4:
        assert x[0] < 0, "asserted"
    if how == 5:
        assert x[0] < 0
    if how == 6:
        raise Custom(1, "two")
    if how == 7:
        raise StopIteration
    if how == 8:
        return 1 // (how - 8)
    if how == 9:
        raise KeyError("key")
    if how == 10:
        raise MemoryError("much")
    return 0


fails_unlocked = fast_args(fails.py_func, nogil=True)
