"""Run-length encoding of a vector: what repeats in a row, once, and how often; and back.

Source: S. W. Golomb, "Run-Length Encodings", IEEE Transactions on Information Theory 12 (1966); here as pairs of a
value and its count, as ``torch.unique_consecutive`` with ``return_counts=True`` and ``np.repeat`` have them.

Tested in ``tests/programs/test_kernels_sums.py`` against NumPy.
"""

import numpy as np
from numba import njit

from fastexchange import fast_args

_LONG_RUNS = 32  # elements in a run on average; with fewer, a branch for each run is too often mispredicted
_STORED = 16  # elements of a decoded run that are stored without a branch; the next run is stored over those too many


@njit
def _runs(x):
    runs = min(x.shape[0], 1)
    for i in range(1, x.shape[0]):
        runs += x[i] != x[i - 1]
    return runs


# Serial: where a run is stored depends on all runs before it.
@fast_args(cache=True)
def run_length_encode(x):
    """The runs of equal elements of `x`: their values and their lengths, in two new arrays.

    Parameters
    ----------
    x : shape (n,), any dtype that has ``==``.

    Returns ``values``, shape (runs,), of the dtype of `x`, and ``lengths``, shape (runs,), int64, each at least 1, in sum
    `n`. Elements are compared by ``==``: 0.0 and -0.0 are one run, whose value is the first of them, and each NaN is a
    run of its own.

    Raises ValueError if `x` has not one dimension.
    """
    if x.ndim != 1:
        raise ValueError("x: must have one dimension")
    n, runs = x.shape[0], _runs(x)
    values, lengths = np.empty(runs, x.dtype), np.empty(runs, np.int64)
    if n == 0:
        return values, lengths
    # first where each run starts
    if runs * _LONG_RUNS <= n:
        k = np.uintp(0)
        for i in range(1, n):
            if x[i] != x[i - 1]:
                k += np.uintp(1)
                values[k], lengths[k] = x[i], i
    else:  # each element is stored as its run's start, from the last to the first, which stays
        k = np.uintp(runs - 1)
        for i in range(n - 1, 0, -1):
            values[k], lengths[k] = x[i], i
            k -= np.uintp(x[i] != x[i - 1])
    values[0], lengths[0] = x[0], 0
    for j in range(runs - 1):
        lengths[j] = lengths[j + 1] - lengths[j]
    lengths[runs - 1] = n - lengths[runs - 1]
    return values, lengths


@njit
def _total(lengths):
    """The sum of all lengths, or a negative number if one is negative or the sum is more than an int64 holds."""
    total = 0
    for k in range(lengths.shape[0]):
        total += np.int64(lengths[k])
        if np.int64(lengths[k]) < 0 or total < 0:
            return -1
    return total


@fast_args(cache=True)
def run_length_decode(values, lengths):
    """The vector whose runs have these values and lengths, a new array.

    Parameters
    ----------
    values : shape (runs,), any dtype.
    lengths : shape (runs,), integers from 0, in sum less than 2**63.

    Returns a vector of the dtype of `values`, as long as the sum of `lengths`.

    Raises ValueError if a shape or a length breaks these rules, MemoryError if there is no memory for the result.
    """
    if values.ndim != 1:
        raise ValueError("values: must have one dimension")
    if lengths.shape != values.shape:
        raise ValueError("lengths: its shape must be that of values")
    if lengths.dtype.kind != "i" and lengths.dtype.kind != "u":
        raise ValueError("lengths: must be integers")
    total = _total(lengths)
    if total < 0:
        raise ValueError("lengths: must not be negative, nor their sum too large")
    out = np.empty(total, values.dtype)
    end = np.uintp(0)
    for k in range(lengths.shape[0]):
        start, end = end, end + np.uintp(lengths[k])
        value = values[k]
        if start + np.uintp(_STORED) <= np.uintp(total):
            for i in range(np.uintp(_STORED)):
                out[start + i] = value
            start += np.uintp(_STORED)
        for i in range(start, end):
            out[i] = value
    return out
