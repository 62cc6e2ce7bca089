"""The kernels of ``kernels/gpu`` in numba-cuda's simulator, held against NumPy. Run by ``tests/programs/test_kernels_gpu.py``.

The simulator takes the place of the compiler when ``numba.cuda`` is imported, so it needs a process of its own.
"""

import functools
import math
import operator
import sys
import threading
from types import SimpleNamespace

import numpy as np
from numba import cuda

from kernels.gpu import axpy, heat, histogram, rms_norm, softmax
from kernels.gpu.common import Team, given

rng = np.random.default_rng(0)
RTOL = {np.float32: 2e-6, np.float64: 1e-14}
TEAMS = [Team(32, 2, True), Team(64, 2, True), Team(64, 1, False)]


@cuda.jit(device=True)
def simulated():
    return cuda


class Simulator:
    """``numba.cuda`` with what the simulator lacks: shuffles, which all threads of a block call together, and libdevice."""

    jit = staticmethod(cuda.jit)
    types = cuda.types
    libdevice = SimpleNamespace(dmul_rn=lambda a, b: a * b)

    def __init__(self):
        self._given = {}
        self.shfl_xor_sync, self.shfl_up_sync, self.shfl_down_sync = (
            functools.partial(self._shuffled, function) for function in (operator.xor, operator.sub, operator.add)
        )

    def __getattr__(self, name):
        return getattr(simulated(), name)

    def _shuffled(self, source_of, mask, value, distance):
        assert mask == 0xFFFFFFFF
        number = threading.current_thread().thread_id
        source = source_of(number % 32, distance)
        self._given[number] = value
        self.syncthreads()
        other = self._given[number - number % 32 + source] if 0 <= source < 32 else value
        self.syncthreads()
        return other


simulator = Simulator()


def vector(number, n):
    return rng.normal(size=n).astype(number)


def matrix(number, rows, columns):
    """Random numbers, in Fortran order."""
    return np.asfortranarray(rng.normal(size=(rows, columns)).astype(number))


def test_axpy(number):
    kernel = cuda.jit(axpy.body(simulator, number))
    for n in (1, axpy.THREADS * axpy.VALUES + 3):
        x, y, out = (vector(number, n) for _ in range(3))
        kernel[2, axpy.THREADS](2.0, x, y, out)
        np.testing.assert_allclose(out, 2 * x + y, RTOL[number], RTOL[number])
        kernel[2, axpy.THREADS](2.0, x, y, y)
        np.testing.assert_array_equal(out, y)


def test_softmax(number):
    for team in TEAMS:
        columns = team.threads * team.values - 3 if team.is_whole else 2 * team.threads + 3
        kernel, x = cuda.jit(softmax.body(simulator, number, team)), matrix(number, 8, columns)
        x[1, 5], x[2, 7], x[3, :], x[4, 1:], x[5, :-1] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
        x[0] += 100  # whose exponential overflows in float32
        x[6] -= 1000
        x[7, ::2] = -np.inf
        with np.errstate(invalid="ignore"):
            exponentials = np.exp((x - x.max(1, keepdims=True)).astype(np.float64))
            expected = exponentials / exponentials.sum(1, keepdims=True)
        out = np.zeros_like(x)
        kernel[team.grid(8), team.block](x, out)
        np.testing.assert_allclose(out, expected, 50 * RTOL[number])
        assert np.isnan(out[1:4]).all() and out[4].tolist() == [1.0] + [0.0] * (columns - 1) == out[5].tolist()[::-1]
        kernel[team.grid(8), team.block](x, x)
        np.testing.assert_array_equal(out, x)


def test_rms_norm(number):
    for team in TEAMS:
        features = team.threads * team.values - 3 if team.is_whole else 2 * team.threads + 3
        kernel = cuda.jit(rms_norm.body(simulator, number, team))
        x, weight = matrix(number, 2, features), vector(number, features)
        exact, out = x.astype(np.float64), np.zeros_like(x)
        expected = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5) * weight
        kernel[team.grid(2), team.block](x, weight, 1e-5, out)
        np.testing.assert_allclose(out, expected, 10 * RTOL[number])
        kernel[team.grid(2), team.block](x, weight, 1e-5, x)
        np.testing.assert_array_equal(out, x)


def test_heat(number):
    kernel = cuda.jit(given(heat.body(simulator, number), THREADS=64, POINTS=4, _HEIGHT=6))
    for shape in ((7, 100), (4, 33), (1, 5), (3, 3), (6, 1)):
        u = matrix(number, *shape)
        out, expected = np.zeros_like(u), u.copy()
        expected[1:-1, 1:-1] += number(0.2) * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
        kernel[(-(-shape[1] // 64), 1, -(-shape[0] // 4)), 64](u, 0.2, out)
        np.testing.assert_allclose(out, expected, 10 * RTOL[number], 10 * RTOL[number])


def test_histogram(number):
    clear, count = map(cuda.jit, histogram.body(simulator, number))
    for bins, low, high in ((7, -1.0, 1.0), (1, 0.1, 0.2), (10, -0.3, 0.7), (9, 1.0, 1.0 + 1e-6), (3, 0.0, 3e-45)):
        edges = np.linspace(low, high, bins + 1).astype(number)
        values = np.concatenate([rng.uniform(-1.2, 1.2, 200).astype(number), edges, np.nextafter(edges, number(9))])
        values = np.append(values, [np.nan, np.inf, -np.inf]).astype(number)
        out = np.full(bins, 9, np.int64)
        clear[1, 32](out)
        count[2, histogram.THREADS, 0, 4 * bins](values, low, high, out)
        inside = values[(values >= edges[0]) & (values <= edges[-1])]
        places = np.minimum(np.searchsorted(edges, inside, "right") - 1, bins - 1)
        np.testing.assert_array_equal(out, np.bincount(places, minlength=bins))
        assert math.isclose(out.sum(), len(inside))


if __name__ == "__main__":
    for each in (np.float32, np.float64):
        for name in sys.argv[1:]:
            globals()[name](each)
