"""Kernels that ``perf/scale.py`` starts workers with: one without a result, one with a scalar's, one with an array's."""

import numpy as np

from fastexchange import fast_args


@fast_args(cache=True)
def scale(x, k):
    """Multiply in place."""
    for i in range(len(x)):
        x[i] *= k


@fast_args(cache=True)
def dot(x, k):
    """A weighted sum."""
    value = 0.0
    for i in range(len(x)):
        value += x[i] * k
    return value


@fast_args(cache=True)
def shifted(x, k):
    """A new array."""
    return np.sqrt(x) + k


KERNELS = [scale, dot, shifted]
