"""The kernels of ``kernels/gpu`` in numba-cuda's simulator, held against NumPy. Run by ``tests/programs/test_kernels_gpu.py``.

The simulator takes the place of the compiler when ``numba.cuda`` is imported, so it needs a process of its own.
"""

import math
import sys

import numpy as np
from numba import cuda

from kernels.gpu import axpy, heat, histogram, rms_norm, softmax
from kernels.gpu.common import THREADS

rng = np.random.default_rng(0)
RTOL = {np.float32: 2e-6, np.float64: 1e-14}


def vector(number, n):
    return rng.normal(size=n).astype(number)


def matrix(number, rows, columns):
    """Random numbers, in Fortran order."""
    return np.asfortranarray(rng.normal(size=(rows, columns)).astype(number))


def test_axpy(number):
    x, y, out = (vector(number, 70) for _ in range(3))
    before = out.copy()
    kernel = cuda.jit(axpy.body(cuda))
    kernel[2, 32](2.0, x, y, out)
    np.testing.assert_allclose(out[:64], (2 * x + y)[:64], RTOL[number])
    assert (out[64:] == before[64:]).all()  # too few threads: the rest is left alone
    kernel[3, 32](2.0, x, y, y)
    np.testing.assert_allclose(out[:64], y[:64], RTOL[number])


def test_softmax(number):
    x, kernel = matrix(number, 5, THREADS + 3), cuda.jit(softmax.body(cuda, number))
    x[1, 5], x[2, 7], x[3, :], x[4, 1:] = np.nan, np.inf, -np.inf, -np.inf
    x[0] += 100  # whose exponential overflows in float32
    with np.errstate(invalid="ignore"):
        exponentials = np.exp((x - x.max(1, keepdims=True)).astype(np.float64))
        expected = exponentials / exponentials.sum(1, keepdims=True)
    out = np.zeros_like(x)
    kernel[5, THREADS](x, out)
    np.testing.assert_allclose(out, expected, 50 * RTOL[number])
    assert np.isnan(out[1:4]).all() and out[4].tolist() == [1.0] + [0.0] * (x.shape[1] - 1)
    kernel[5, THREADS](x, x)
    np.testing.assert_array_equal(out, x)


def test_rms_norm(number):
    x, weight, kernel = matrix(number, 2, THREADS + 44), vector(number, THREADS + 44), cuda.jit(rms_norm.body(cuda, number))
    out = np.zeros_like(x)
    kernel[2, THREADS](x, weight, 1e-5, out)
    exact = x.astype(np.float64)
    scale = np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, exact / scale * weight, 10 * RTOL[number])


def test_heat(number):
    kernel = cuda.jit(heat.body(cuda))
    for shape in ((9, 40), (1, 5), (2, 2), (3, 3)):
        u = matrix(number, *shape)
        out, expected = np.zeros_like(u), u.copy()
        expected[1:-1, 1:-1] += 0.2 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
        kernel[(2, 2), (32, 8)](u, 0.2, out)
        np.testing.assert_allclose(out, expected, 10 * RTOL[number], 10 * RTOL[number])


def test_histogram(number):
    clear, count = map(cuda.jit, histogram.body(cuda, number))
    for bins, low, high in ((7, -1.0, 1.0), (1, 0.1, 0.2), (10, -0.3, 0.7)):
        edges = np.linspace(low, high, bins + 1).astype(number)
        values = np.concatenate([rng.uniform(-1.2, 1.2, 200).astype(number), edges, np.nextafter(edges, number(9))])
        values = np.append(values, [np.nan, np.inf, -np.inf]).astype(number)
        out = np.full(bins, 9, np.int64)
        clear[1, 32](out)
        count[2, 32, 0, 4 * bins](values, low, high, out)
        expected = np.histogram(values[np.isfinite(values)], bins, (low, high))[0]
        np.testing.assert_array_equal(out, expected)
        assert math.isclose(out.sum(), ((values >= edges[0]) & (values <= edges[-1])).sum())


if __name__ == "__main__":
    for each in (np.float32, np.float64):
        for name in sys.argv[1:]:
            globals()[name](each)
