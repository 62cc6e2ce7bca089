"""Sequences of numbers into others, by plain ``numba.njit``: sorting, searching, counting."""

import numba
import numpy as np


@numba.njit
def cumulated(x):
    out = np.empty_like(x)
    s = x[0] * 0
    for i in range(x.size):
        s += x[i]
        out[i] = s
    return out


@numba.njit
def differences(x):
    out = np.empty(x.size - 1, x.dtype)
    for i in range(out.size):
        out[i] = x[i + 1] - x[i]
    return out


@numba.njit
def reversed_copy(x):
    return x[::-1].copy()


@numba.njit
def sort_by_insertion(x):
    """In place; returns how many steps elements were moved."""
    steps = 0
    for i in range(1, x.size):
        value, j = x[i], i
        while j > 0 and x[j - 1] > value:
            x[j] = x[j - 1]
            j -= 1
            steps += 1
        x[j] = value
    return steps


@numba.njit
def place_of(x, value):
    """Where a value belongs in a sorted sequence."""
    low, high = 0, x.size
    while low < high:
        middle = (low + high) // 2
        if x[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit
def merged(x, y):
    out = np.empty(x.size + y.size, x.dtype)
    i = j = 0
    for k in range(out.size):
        if j == y.size or (i < x.size and x[i] <= y[j]):
            out[k], i = x[i], i + 1
        else:
            out[k], j = y[j], j + 1
    return out


@numba.njit
def counted(x, bins):
    """How often each whole number below `bins` occurs."""
    counts = np.zeros(bins, np.int64)
    for value in x:
        counts[value] += 1
    return counts


@numba.njit
def lengths_of_runs(x):
    out = np.zeros(x.size, np.int64)
    runs = 0
    for i in range(x.size):
        runs += i > 0 and x[i] != x[i - 1]
        out[runs] += 1
    return out[: runs + 1]


@numba.njit
def longest_run(x):
    return lengths_of_runs(x).max()


@numba.njit
def edit_distance(x, y):
    """By Levenshtein."""
    row = np.arange(y.size + 1)
    for i in range(x.size):
        before, row[0] = row[0], i + 1
        for j in range(y.size):
            here = min(before + (x[i] != y[j]), row[j] + 1, row[j + 1] + 1)
            before, row[j + 1] = row[j + 1], here
    return row[-1]


@numba.njit
def pseudo_random(seed, n):
    """By a linear congruence."""
    out = np.empty(n, np.int64)
    for i in range(n):
        seed = (seed * 1103515245 + 12345) % 2147483648
        out[i] = seed
    return out


def __precompile__():
    x, n, m = np.linspace(-2, 3, 40), np.arange(40) % 7, np.arange(25) % 4
    return [
        (cumulated, (x,), (n,)), (differences, (x,), (n,)), (reversed_copy, (x,)),
        (sort_by_insertion, (n.copy(),), (x[::-1].copy(),)), (place_of, (x, 0.5)), (merged, (x, x)), (counted, (n, 7)),
        (lengths_of_runs, (n,)), (longest_run, (n,)), (edit_distance, (n, m)), (pseudo_random, (42, 20)),
    ]
