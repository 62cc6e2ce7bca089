"""Arrays into arrays, element by element: declared outputs, several dtypes, one kernel on all processors."""

import math

import numba
import numpy as np

from fastexchange import fast_args

ONE_IN, TWO_IN = "x[n] -> out[n]", "x[n], y[n] -> out[n]"


@fast_args
def clamped(value, low, high):
    """Called by others."""
    return low if value < low else high if value > high else value


@fast_args
def mixed(a, b, weight):
    """Called by others."""
    return a + weight * (b - a)


@fast_args
def axpy(a, x, y, out):
    for i in range(x.size):
        out[i] = a * x[i] + y[i]


@fast_args(out=TWO_IN)
def add(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


@fast_args(out=TWO_IN)
def multiply(x, y, out):
    for i in range(x.size):
        out[i] = x[i] * y[i]


@fast_args(out=TWO_IN)
def hypotenuse(x, y, out):
    for i in range(x.size):
        out[i] = math.hypot(x[i], y[i])


@fast_args(out=TWO_IN)
def angle(x, y, out):
    for i in range(x.size):
        out[i] = math.atan2(y[i], x[i])


@fast_args(out=TWO_IN)
def larger(x, y, out):
    for i in range(x.size):
        out[i] = max(x[i], y[i])


@fast_args(out=ONE_IN)
def square_root(x, out):
    for i in range(x.size):
        out[i] = math.sqrt(abs(x[i]))


@fast_args(out=ONE_IN)
def cube(x, out):
    for i in range(x.size):
        out[i] = x[i] ** 3


@fast_args(out=ONE_IN)
def fraction(x, out):
    for i in range(x.size):
        out[i] = x[i] - math.floor(x[i])


@fast_args(out="x[n], low, high -> out[n]")
def clip(x, low, high, out):
    for i in range(x.size):
        out[i] = clamped(x[i], low, high)


@fast_args(out="x[n], y[n], weight -> out[n]")
def blend(x, y, weight, out):
    for i in range(x.size):
        out[i] = mixed(x[i], y[i], weight)


@fast_args(out="x[n] -> sine[n], cosine[n]")
def sine_and_cosine(x, sine, cosine):
    for i in range(x.size):
        sine[i], cosine[i] = math.sin(x[i]), math.cos(x[i])


@fast_args(parallel=True)
def scaled_in_parallel(x, factor):
    out = np.empty_like(x)
    for i in numba.prange(x.size):
        out[i] = x[i] * factor
    return out


def __precompile__():
    x, y, out = np.linspace(-2, 3, 60), np.linspace(1, 4, 60), np.zeros(60)
    x32, y32, out32 = (each.astype(np.float32) for each in (x, y, out))
    two_in = [add, multiply, hypotenuse, angle, larger]
    return [
        (clamped, (0.5, 1.0, 2.0)), (mixed, (0.5, 1.0, 2.0)),
        (axpy, (2.0, x, y, out), (2.0, x32, y32, out32)),
        *((kernel, (x, y, out), (x32, y32, out32)) for kernel in two_in),
        *((kernel, (x, out), (x32, out32)) for kernel in (square_root, cube, fraction)),
        (clip, (x, -1.0, 1.0, out)), (blend, (x, y, 0.25, out)), (sine_and_cosine, (x, out, out.copy())),
        (scaled_in_parallel, (x, 3.0)),
    ]  # fmt: skip
