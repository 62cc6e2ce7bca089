"""Matrices: declared outputs with several dimensions, arrays in both orders."""

import numpy as np

from fastexchange import fast_args


@fast_args(out="a[m, n], x[n] -> out[m]")
def matrix_times_vector(a, x, out):
    for i in range(a.shape[0]):
        s = 0.0
        for j in range(a.shape[1]):
            s += a[i, j] * x[j]
        out[i] = s


@fast_args(out="a[m, k], b[k, n] -> out[m, n]")
def matrix_product(a, b, out):
    out[:] = 0
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                out[i, j] += a[i, k] * b[k, j]


@fast_args(out="x[m], y[n] -> out[m, n]")
def outer_product(x, y, out):
    for i in range(x.size):
        for j in range(y.size):
            out[i, j] = x[i] * y[j]


@fast_args(out="a[m, n] -> out[n, m]")
def transposed(a, out):
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = a[i, j]


@fast_args(out="a[m, n] -> out[m]")
def sums_of_rows(a, out):
    for i in range(a.shape[0]):
        out[i] = a[i].sum()


@fast_args(out="a[m, n] -> out[n]")
def sums_of_columns(a, out):
    out[:] = 0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j] += a[i, j]


@fast_args
def trace(a):
    s = 0.0
    for i in range(min(a.shape)):
        s += a[i, i]
    return s


@fast_args
def frobenius(a):
    s = 0.0
    for row in a:
        for value in row:
            s += value * value
    return np.sqrt(s)


@fast_args
def determinant(a):
    """By elimination, of a copy."""
    a = a.copy()
    value = 1.0
    for k in range(a.shape[0]):
        pivot = k + np.argmax(np.abs(a[k:, k]))
        if a[pivot, k] == 0:
            return 0.0
        if pivot != k:
            for j in range(a.shape[1]):
                a[k, j], a[pivot, j] = a[pivot, j], a[k, j]
            value = -value
        value *= a[k, k]
        for i in range(k + 1, a.shape[0]):
            a[i, k:] -= a[k, k:] * (a[i, k] / a[k, k])
    return value


@fast_args
def power(a, steps):
    """The dominant eigenvalue of a symmetric matrix, and its vector."""
    x = np.ones(a.shape[0])
    y = np.empty_like(x)
    value = 0.0
    for _ in range(steps):
        matrix_times_vector(a, x, y)
        value = np.sqrt((y * y).sum())
        x[:] = y / value
    return value, x


@fast_args(out="a[m, n] -> out[m, n]")
def heat_step(a, out):
    """Of the equation of heat, the border as it is."""
    out[:] = a
    for i in range(1, a.shape[0] - 1):
        for j in range(1, a.shape[1] - 1):
            out[i, j] = a[i, j] + 0.1 * (a[i - 1, j] + a[i + 1, j] + a[i, j - 1] + a[i, j + 1] - 4 * a[i, j])


def __precompile__():
    a = np.sin(np.arange(30.0)).reshape(5, 6)
    square = np.cos(np.arange(36.0)).reshape(6, 6)
    symmetric = square + square.T
    x = np.linspace(0, 1, 6)
    fortran = np.asfortranarray(square)
    return [
        (matrix_times_vector, (a, x, np.empty(5))), (matrix_product, (a, square, np.empty((5, 6)))),
        (outer_product, (x, x, np.empty((6, 6)))), (transposed, (a, np.empty((6, 5)))),
        (sums_of_rows, (a, np.empty(5))), (sums_of_columns, (a, np.empty(6))), (trace, (square,), (fortran,)),
        (frobenius, (a,)), (determinant, (square,)), (power, (symmetric, 50)),
        (heat_step, (square, np.empty((6, 6)))),
    ]  # fmt: skip
