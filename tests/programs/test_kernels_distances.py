"""Pairwise distances and nearest rows, against NumPy."""

import math

import numpy as np
import pytest
from kernel_data import blank, call, check, contiguous, random, strided, that_fit, transposed

from kernels.distances import nearest, pairwise

INF, NAN = math.inf, math.nan
SIZES = [(0, 0, 0), (0, 3, 2), (3, 0, 2), (2, 3, 0), (1, 1, 1), (5, 7, 3), (3, 64, 8), (17, 65, 9), (4, 130, 24), (150, 300, 20)]
each_kind = pytest.mark.parametrize("dtype, result, layout", [
    (np.float32, np.float32, contiguous), (np.float64, np.float64, transposed), (np.int32, np.float64, strided),
])  # fmt: skip


def oracle(x, y):
    return np.sqrt(((x[:, None].astype(np.float64) - y[None]) ** 2).sum(axis=2))


def check_nearest(x, y, k, result, layout=contiguous):
    """The nearest are the first of all distances sorted, NaN last. Of equal distances the smaller index comes first."""
    outputs = blank((len(x), k), result, layout), blank((len(x), k), np.int64, layout)
    distances, indices = call(nearest, x, y, k, *outputs, written=(-2, -1))
    every = blank((len(x), len(y)), result, layout)  # the same numbers, so that equal ones are equal here, too
    pairwise(x, y, every)
    expected = np.argsort(every, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(distances, np.take_along_axis(every, expected, axis=1))


@each_kind
def test_pairwise(dtype, result, layout):
    for n, m, columns in that_fit(layout, SIZES):
        x, y = layout(random((n, columns), dtype)), layout(random((m, columns), dtype, seed=1))
        check(call(pairwise, x, y, blank((n, m), result, layout)), oracle(x, y), scale=1e-3)


def test_points_that_are_close_together():
    """Where the expansion into a matrix product has lost all digits."""
    x = transposed(1000 + 1e-3 * random((60, 8), np.float64))
    out = call(pairwise, x, x, blank((60, 60), np.float64, transposed))
    np.testing.assert_allclose(out, oracle(x - 1000, x - 1000), rtol=1e-8)
    assert (np.diagonal(out) == 0).all() and (out == out.T).all()


@each_kind
def test_nearest(dtype, result, layout):
    for n, m, columns in that_fit(layout, SIZES):
        for k in {0, min(m, 1), min(m, 5), m if m < 200 else 70} if layout is contiguous else {2, min(m, 70)}:
            x, y = layout(random((n, columns), dtype)), layout(random((m, columns), dtype, seed=1))
            check_nearest(x, y, k, result, layout)


@pytest.mark.parametrize("farthest_first", [False, True])
def test_nearest_of_equal_distances_in_order(farthest_first):
    points = np.random.default_rng(0).integers(-2, 3, (700, 2)).astype(np.float32)
    y = points[np.argsort(-np.hypot(*points.T), kind="stable")] if farthest_first else points
    check_nearest(points[:3].copy(), y, 40, np.float32)


def test_nan_and_infinities():
    y = np.array([[NAN, 0], [INF, 0], [3, 4], [0, NAN], [0, 0], [-INF, 0]], np.float32)
    x = np.array([[0.0, 0], [INF, 0], [NAN, 0]], np.float32)
    expected = [[NAN, INF, 5, NAN, 0, INF], [NAN, NAN, INF, NAN, INF, INF], [NAN] * 6]
    np.testing.assert_array_equal(call(pairwise, x, y, blank((3, 6), np.float32)), expected)
    for k in (1, 2, 4, 6):  # NaN gives way to what comes later
        check_nearest(x, y, k, np.float32)
