"""Pairwise distances and nearest rows, against PyTorch and NumPy."""

import math

import numpy as np
import pytest
from kernel_data import (
    FRAMEWORKS,
    blank,
    check,
    check_refused,
    contiguous,
    make,
    random,
    strided,
    that_fit,
    torch,
    transposed,
    zeros,
)

from kernels.distances import nearest, pairwise


def oracle(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    if torch is not None:
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(torch.from_numpy(x), torch.from_numpy(y), compute_mode=exact).numpy()
    return np.sqrt(((x[:, None] - y[None]) ** 2).sum(axis=2))


def nearest_oracle(distances, k):
    indices = np.argsort(distances, axis=1, kind="stable")[:, :k]  # NaN last
    return np.take_along_axis(distances, indices, axis=1), indices


SIZES = [(0, 0, 0), (0, 3, 2), (3, 0, 2), (2, 3, 0), (1, 1, 1), (5, 7, 3), (3, 64, 8), (17, 65, 9), (4, 130, 24), (150, 300, 20)]
KINDS = [  # of x and y, and of out
    (np.float32, np.float32, contiguous),
    (np.float64, np.float64, transposed),
    (np.int32, np.float64, strided),
]


@pytest.mark.parametrize(("dtype", "out_dtype", "layout"), KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_pairwise(framework, dtype, out_dtype, layout):
    for n, m, columns in that_fit(layout, SIZES):
        x, y = layout(random((n, columns), dtype)), layout(random((m, columns), dtype, seed=1))
        out = blank((n, m), out_dtype, layout)
        pairwise(*(make(framework, a) for a in (x, y, out)))
        check(out, oracle(x, y).astype(out_dtype), scale=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_points_that_are_close_together(framework):
    """Where the expansion into a matrix product has lost all digits."""
    x = transposed(1000 + 1e-3 * random((60, 8), np.float64))
    out = blank((60, 60), np.float64, transposed)
    pairwise(make(framework, x), make(framework, x), make(framework, out))
    np.testing.assert_allclose(out, oracle(x - 1000, x - 1000), rtol=1e-8)
    assert (np.diagonal(out) == 0).all() and (out == out.T).all()


@pytest.mark.parametrize(("dtype", "out_dtype", "layout"), KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nearest(framework, dtype, out_dtype, layout):
    for n, m, columns in that_fit(layout, SIZES):
        for k in {0, min(m, 1), min(m, 5), m if m < 200 else 70} if layout is contiguous else {2, min(m, 70)}:
            x, y = layout(random((n, columns), dtype)), layout(random((m, columns), dtype, seed=1))
            distances, indices = blank((n, k), out_dtype, layout), blank((n, k), np.int64, layout)
            nearest(*(make(framework, a) for a in (x, y)), k, *(make(framework, a) for a in (distances, indices)))
            every = blank((n, m), out_dtype, layout)  # the same numbers, so that equal ones are equal here too
            pairwise(x, y, every)
            for got, expected in zip((distances, indices), nearest_oracle(every, k), strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_nearest_agrees_with_topk():
    x, y = torch.from_numpy(random((100, 6), np.float32)), torch.from_numpy(random((500, 6), np.float32, seed=1))
    distances, indices = torch.empty((100, 9)), torch.empty((100, 9), dtype=torch.int64)
    nearest(x, y, 9, distances, indices)
    values, positions = torch.cdist(x.double(), y.double()).topk(9, largest=False)
    check(distances, values.float().numpy())
    assert torch.equal(indices, positions)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nearest_of_equal_distances_in_order(framework):
    """Points of a small grid, many at equal distances, of which the smaller index comes first; also the farthest first."""
    points = np.random.default_rng(0).integers(-2, 3, (700, 2)).astype(np.float32)
    for y in (points, points[np.argsort(-np.hypot(*points.T), kind="stable")]):
        distances, indices = blank((3, 40), np.float32), blank((3, 40), np.int64)
        given = [make(framework, a) for a in (points[:3].copy(), y, distances, indices)]
        nearest(*given[:2], 40, *given[2:])
        expected, where = nearest_oracle(oracle(points[:3], y).astype(np.float32), 40)
        np.testing.assert_array_equal(indices, where)
        check(distances, expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_and_infinities(framework):
    inf, nan = math.inf, math.nan
    y = np.array([[nan, 0], [inf, 0], [3, 4], [0, nan], [0, 0], [-inf, 0]], np.float32)
    x = np.array([[0.0, 0], [inf, 0], [nan, 0]], np.float32)
    out, distances, indices = blank((3, 6), np.float32), blank((3, 6), np.float32), blank((3, 6), np.int64)
    pairwise(*(make(framework, a) for a in (x, y, out)))
    np.testing.assert_array_equal(out, [[nan, inf, 5, nan, 0, inf], [nan, nan, inf, nan, inf, inf], [nan] * 6])
    given = [make(framework, a) for a in (x, y)]
    nearest(*given, 6, make(framework, distances), make(framework, indices))
    np.testing.assert_array_equal(distances, [[0, 5, inf, inf, nan, nan], [inf, inf, inf, nan, nan, nan], [nan] * 6])
    np.testing.assert_array_equal(indices, [[4, 2, 1, 5, 0, 3], [2, 4, 5, 0, 1, 3], [0, 1, 2, 3, 4, 5]])
    for k in (1, 2, 4):  # NaN gives way to what comes later
        distances, indices = blank((3, k), np.float32), blank((3, k), np.int64)
        nearest(*given, k, make(framework, distances), make(framework, indices))
        np.testing.assert_array_equal(indices, np.array([[4, 2, 1, 5], [2, 4, 5, 0], [0, 1, 2, 3]])[:, :k])


def floats(*shape):
    return zeros(*shape, dtype=np.float32)


X, Y = floats(4, 3), floats(5, 3)
REFUSED = {
    "columns": (pairwise, (X, floats(5, 2), floats(4, 5)), "y: must have as many"),
    "out transposed": (pairwise, (X, Y, floats(5, 4)), "out: its shape"),
    "out integer": (pairwise, (X, Y, zeros(4, 5, dtype=np.int64)), "out: its dtype"),
    "nearest columns": (nearest, (X, floats(5, 2), 2, floats(4, 2), zeros(4, 2, dtype=np.int64)), "y: must have as many"),
    "nearest rows": (nearest, (X, Y, 2, floats(3, 2), zeros(3, 2, dtype=np.int64)), "distances: its shape"),
    "more than there are": (nearest, (X, Y, 6, floats(4, 6), zeros(4, 6, dtype=np.int64)), "k: must be"),
    "less than none": (nearest, (X, Y, -1, floats(4, 0), zeros(4, 0, dtype=np.int64)), "k: must be"),
    "distances columns": (nearest, (X, Y, 3, floats(4, 2), zeros(4, 2, dtype=np.int64)), "distances: its shape"),
    "indices shape": (nearest, (X, Y, 2, floats(4, 2), zeros(4, 3, dtype=np.int64)), "indices: its shape"),
    "distances integer": (nearest, (X, Y, 2, zeros(4, 2, dtype=np.int64), zeros(4, 2, dtype=np.int64)), "distances: its dtype"),
    "indices int32": (nearest, (X, Y, 2, floats(4, 2), zeros(4, 2, dtype=np.int32)), "indices: its dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    kernel, args, message = REFUSED[case]
    own_types = ("distances integer", "indices int32")  # which no other call has; "out integer" is compiled
    check_refused(FRAMEWORKS[-1], kernel, args, message, compiled=case not in own_types)


def test_overlaps_are_refused():
    memory = random(100, np.float32)
    x, y = memory[:12].reshape(4, 3), memory[12:27].reshape(5, 3)
    two, indices = memory[70:78].reshape(4, 2), memory[80:96].reshape(4, 4).view(np.int64)
    refused = [
        (pairwise, (x, y, memory[10:30].reshape(4, 5)), "out: overlaps x or y"),
        (nearest, (x, y, 2, memory[8:16].reshape(4, 2), indices), "distances: overlaps x or y"),
        (nearest, (x, y, 2, two, memory[20:36].reshape(4, 4).view(np.int64)), "indices: overlaps x or y"),
        (nearest, (x, y, 2, memory[84:92].reshape(4, 2), indices), "indices: overlaps distances"),
    ]
    before = memory.copy()
    for kernel, args, message in refused:
        with pytest.raises(ValueError, match="^" + message):
            kernel(*args)
        np.testing.assert_array_equal(memory, before)
    if torch is not None:
        expanded, counts = (torch.zeros(1, dtype=dtype).expand(4, 2) for dtype in (torch.float64, torch.int64))
        x, y = (torch.zeros(n, 6, dtype=torch.int32)[:, ::2] for n in (4, 5))
        with pytest.raises(ValueError, match=r"^out: each element"):
            pairwise(x, y[:2], expanded)
        with pytest.raises(ValueError, match=r"^distances: each element"):
            nearest(x, y, 2, expanded, torch.zeros((4, 4), dtype=torch.int64)[:, ::2])
        with pytest.raises(ValueError, match=r"^indices: each element"):
            nearest(x, y, 2, torch.zeros((4, 4), dtype=torch.float64)[:, ::2], counts)
