"""Arrays into numbers and tuples of numbers; one kernel raises."""

import math

import numpy as np

from fastexchange import fast_args


@fast_args
def total(x):
    s = x[0] * 0
    for value in x:
        s += value
    return s


@fast_args
def compensated_total(x):
    """By Neumaier: what additions lose is added at the end."""
    s, lost = 0.0, 0.0
    for value in x:
        t = s + value
        lost += (s - t) + value if abs(s) >= abs(value) else (value - t) + s
        s = t
    return s + lost


@fast_args
def mean(x):
    """Raises ValueError for an array without elements."""
    if x.size == 0:
        raise ValueError("an array without elements has no mean")
    return total(x) / x.size


@fast_args
def mean_and_variance(x):
    """In one pass, by Welford."""
    average, squares = 0.0, 0.0
    for i in range(x.size):
        difference = x[i] - average
        average += difference / (i + 1)
        squares += difference * (x[i] - average)
    return average, squares / x.size


@fast_args
def standard_deviation(x):
    return math.sqrt(mean_and_variance(x)[1])


@fast_args
def smallest_and_largest(x):
    low = high = x[0]
    for value in x[1:]:
        low, high = min(low, value), max(high, value)
    return low, high


@fast_args
def index_of_largest(x):
    best = 0
    for i in range(1, x.size):
        if x[i] > x[best]:
            best = i
    return best


@fast_args
def product(x):
    p = 1.0
    for value in x:
        p *= value
    return p


@fast_args
def geometric_mean(x):
    s = 0.0
    for value in x:
        s += math.log(value)
    return math.exp(s / x.size)


@fast_args
def root_mean_square(x):
    s = 0.0
    for value in x:
        s += value * value
    return math.sqrt(s / x.size)


@fast_args
def count_above(x, limit):
    count = 0
    for value in x:
        count += value > limit
    return count


@fast_args
def first_above(x, limit):
    """Or -1."""
    for i in range(x.size):
        if x[i] > limit:
            return i
    return -1


@fast_args
def is_sorted(x):
    falls = 0
    for i in range(1, x.size):
        falls += x[i] < x[i - 1]
    return falls == 0


@fast_args
def polynomial(coefficients, x):
    """By Horner, the highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


@fast_args
def trapezoid(x, y):
    area = 0.0
    for i in range(1, x.size):
        area += (x[i] - x[i - 1]) * (y[i] + y[i - 1]) / 2
    return area


def __precompile__():
    x, n = np.linspace(0.5, 3, 40), np.arange(1, 30)
    x32 = x.astype(np.float32)
    kernels = [
        compensated_total, mean_and_variance, standard_deviation, index_of_largest, product, geometric_mean, root_mean_square,
    ]  # fmt: skip
    return [
        *((kernel, (x,)) for kernel in kernels),
        (total, (x,), (x32,), (n,)), (mean, (x,), (x32,), (x[:0],)), (smallest_and_largest, (x,), (n,)), (is_sorted, (x,), (n,)),
        (count_above, (x, 1.0), (n, 7)), (first_above, (x, 1.0), (x, 9.0)), (polynomial, (x, 0.5)), (trapezoid, (x, x)),
    ]  # fmt: skip
