"""Scans, segment reductions, the sparse product, run lengths, the IIR filter, and distances, against NumPy and SciPy."""

import math

import numpy as np
import pytest
import scipy.sparse
from kernel_data import FRAMEWORKS, blank, call, check, contiguous, made, random, strided, that_fit, transposed
from scipy import signal

from kernels.csr import csr_matvec
from kernels.distances import nearest, pairwise
from kernels.iir import sosfilt
from kernels.offsets import cut_within
from kernels.runs import run_length_decode, run_length_encode
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum

INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

# ---- exclusive scan ----
@pytest.mark.parametrize("dtype, result, layout", [
    (np.float32, np.float32, contiguous), (np.float64, np.float64, contiguous), (np.int64, np.int64, contiguous),
    (np.uint8, np.int64, strided),
])  # fmt: skip
def test_exclusive_scan(dtype, result, layout):
    for (size,) in that_fit(layout, [(n,) for n in (0, 1, 2, 127, 128, 131, 1000, 16384, 16387, 300_007)]):
        x = layout(abs(random(size, dtype)))
        got = call(exclusive_scan, x, blank(size, result, layout))
        check(got, np.concatenate([[0], np.cumsum(x, dtype=np.int64 if result is np.int64 else np.float64)])[:size])


@pytest.mark.parametrize("size", [9, 40_000])
def test_exclusive_scan_of_nan_and_infinities(size):
    x = np.ones(size, np.float32)
    x[3], x[6] = INF, -INF
    out = call(exclusive_scan, x, blank(size, np.float32))
    np.testing.assert_array_equal(out[:8], [0, 1, 2, 3, INF, INF, INF, NAN])
    assert np.isnan(out[8:]).all()


# ---- segments ----
# a kernel, its `initial`, how NumPy reduces, what becomes of no element
REDUCTIONS = {
    "sum": (segment_sum, (), np.add.reduce, 0), "mean": (segment_mean, (), np.mean, NAN),
    "max": (segment_max, (-100,), np.max, -100), "min": (segment_min, (100,), np.min, 100),
}  # fmt: skip


def segments_oracle(name, x, offsets):
    """Segment by segment: with ``reduceat``, an empty segment would be its next one's first element."""
    _, _, reduce, empty = REDUCTIONS[name]
    pieces = [x[first:last] for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    reduced = [reduce(piece, axis=0) if len(piece) else np.full(x.shape[1:], empty) for piece in pieces]
    return np.array(reduced).reshape(len(pieces), *x.shape[1:])


@pytest.mark.parametrize(("name", "dtype", "offset_dtype", "layout"), [
    *((name, np.float32, np.int64, contiguous) for name in REDUCTIONS),
    *((name, *case) for name in ("sum", "max")  # whose code mean and min share
      for case in ((np.int64, np.int64, contiguous), (np.float64, np.int32, strided))),
])  # fmt: skip
def test_segments(name, dtype, offset_dtype, layout):
    kernel, initial, *_ = REDUCTIONS[name]
    vectors = [(0, (0,)), (1, (0,)), (1, (7,)), (9, (101,)), (3000, (50_003,))]
    for segments, shape in [*vectors, (4, (0, 3)), (9, (60, 7)), (300, (5001, 9))]:
        if not that_fit(layout, [(segments, *shape)]):
            continue
        x, inner = layout(random(shape, dtype)), np.random.default_rng(0).integers(0, shape[0] + 1, max(segments - 1, 0))
        inner[: segments // 4] = shape[0] // 2  # there are segments of no, one and many elements
        offsets = np.array([0, *np.sort(inner), shape[0]][: segments + 1], offset_dtype)
        got = call(kernel, x, offsets, *initial, blank((segments, *shape[1:]), dtype, layout))
        check(got, segments_oracle(name, x if dtype is np.int64 else x.astype(np.float64), offsets), scale=50)


def test_segment_sum_of_complex_numbers():
    x, offsets = random(100, np.complex64), np.array([10, 10, 40, 90])
    check(call(segment_sum, x, offsets, blank(3, np.complex64)), segments_oracle("sum", x, offsets), scale=10)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_segments_of_nan_and_infinities(name):
    kernel, initial, *_ = REDUCTIONS[name]
    x, offsets = np.array([1, NAN, 2, INF, 3, -INF, 4, INF, -INF], np.float32), np.array([0, 3, 5, 7, 9, 9])
    for values, out in [(x, blank(5, np.float32)), (np.stack([x, x], axis=1), blank((5, 2), np.float32))]:
        np.testing.assert_array_equal(call(kernel, values, offsets, *initial, out), segments_oracle(name, values, offsets))
        if initial:
            assert np.isnan(kernel(np.nan_to_num(values), offsets, NAN)).all()


def test_cut_within():
    for offsets in ([], [0], [6], [0, 5], [2, 2, 4], [0, 6], [-1, 5], [0, 3, 2, 5], [0, 1 << 62, 5], [0, (1 << 64) - 1]):
        lie_within = bool(offsets) and offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= 5
        dtype = np.uint64 if max(offsets, default=0) >> 63 else np.int64
        assert cut_within(np.array(offsets, dtype), 5) == lie_within, offsets
    assert not cut_within(np.array([(1 << 64) - 1, 5], np.uint64), 5)
    assert cut_within(np.array([0]), 0)


# ---- CSR matrix times vector ----
@pytest.mark.parametrize("dtype, index, layout", [
    (np.float32, np.int32, contiguous), (np.float32, np.int64, strided), (np.float64, np.int64, contiguous),
    (np.complex64, np.int32, contiguous),
])  # fmt: skip
def test_csr_matvec(dtype, index, layout):
    for rows, columns in that_fit(layout, [(0, 0), (0, 3), (3, 0), (1, 1), (7, 5), (40, 33), (600, 400)]):
        dense = random((rows, columns), dtype) * (np.random.default_rng(0).random((rows, columns)) < 0.3)
        dense[::5] = 0  # there are empty rows
        where, x = np.nonzero(dense), random(columns, dtype, seed=1)
        indptr = np.concatenate([[0], np.cumsum(np.count_nonzero(dense, axis=1))])
        matrix = indptr.astype(index), where[1].astype(index), dense.astype(dtype)[where]
        got = call(csr_matvec, *map(layout, (*matrix, x)), blank(rows, dtype, layout))
        check(got, dense.astype(np.promote_types(dtype, np.float64)) @ x, scale=50)


def test_csr_matvec_with_indices_in_any_order_and_twice():
    """Of integers, and a vector of another dtype."""
    indptr, indices, data = (np.array(each, np.int32) for each in ([0, 3, 3, 5], [3, 1, 3, 0, 0], [1, 2, 3, 4, 5]))
    x = random(4, np.float64)
    got = call(csr_matvec, indptr, indices, data, x, blank(3, np.float64))
    check(got, scipy.sparse.csr_matrix((data, indices, indptr), (3, 4)) @ x)


# ---- runs ----
@pytest.mark.parametrize(("dtype", "layout"), [
    (np.int64, contiguous), (np.float32, strided), (np.complex128, contiguous), (np.bool_, contiguous),
])  # fmt: skip
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_runs(framework, dtype, layout):
    for size in [0, 1, 2, 3, 15, 16, 17, 1000, 100_003]:
        for length in [1, 2, 10, 300, INF]:  # short runs and long ones are found in different ways
            x = np.cumsum(np.random.default_rng(0).random(size) < 1 / length)
            x = layout((x % 2 if dtype is np.bool_ else x).astype(dtype))
            values, lengths = run_length_encode(made(framework, x))
            starts = np.flatnonzero(np.concatenate([np.ones(min(size, 1), bool), x[1:] != x[:-1]]))
            decoded = run_length_decode(values, lengths)
            for got, expected in [(values, x[starts]), (lengths, np.diff(np.append(starts, size))), (decoded, x)]:
                assert type(got) is type(made(framework, expected))
                np.testing.assert_array_equal(np.asarray(got), expected, strict=True)


@pytest.mark.parametrize("start", [[], [7.0] * 500], ids=["short runs", "long runs"])
def test_runs_of_nan_and_signed_zeros(start):
    values, lengths = run_length_encode(np.array([*start, NAN, NAN, -0.0, 0.0, 0.0, -0.0, INF, INF]))
    np.testing.assert_array_equal(lengths, [*[500][: len(start)], 1, 1, 4, 2])
    np.testing.assert_array_equal(values[-4:], [NAN, NAN, 0.0, INF])
    assert math.copysign(1, values[-2]) == -1  # the first of the run


@pytest.mark.parametrize("length_dtype", [np.int64, np.int32, np.uint8])
def test_run_length_decode(length_dtype):
    values, lengths = random(500, np.float64), np.random.default_rng(0).integers(0, 40, 500).astype(length_dtype)
    for n in [0, 1, 2, 500]:
        np.testing.assert_array_equal(run_length_decode(values[:n], lengths[:n]), np.repeat(values[:n], lengths[:n]))


# ---- the IIR filter ----
SECTIONS = signal.butter(6, 0.2, output="sos")
EXTENTS = [(0, 5), (1, 0), (40, 0), (1, 1), (1, 9), (3, 257), (5, 128), (8, 300), (9, 129), (36, 700), (37, 127)]
"""Few channels, which are filtered one by one, and many, side by side; one group of them, several, in several threads."""


@pytest.mark.parametrize("dtype, layout, state_dtype", [
    (np.float64, contiguous, np.float64), (np.float64, strided, np.float64), (np.float32, contiguous, np.float64),
    (np.int16, transposed, np.float32),
])  # fmt: skip
def test_sosfilt(dtype, layout, state_dtype):
    for channels, samples in that_fit(layout, EXTENTS):
        x, initial = layout(random((channels, samples), dtype)), random((3, channels, 2), np.float64, seed=1)
        outputs = blank((channels, samples), np.float64, layout), blank((3, channels, 2), state_dtype, layout)
        out, final = call(sosfilt, SECTIONS, x, initial, *outputs, written=(-2, -1))
        expected = signal.sosfilt(SECTIONS, x, zi=initial) if x.size else (out, initial)
        check(out, expected[0], scale=10)
        check(final, expected[1], scale=10)


def test_sosfilt_in_parts():
    """The same samples in three calls, each with the state of the one before, in place, are filtered as in one."""
    for channels in [2, 20]:
        x, state = random((channels, 600), np.float64), np.zeros((3, channels, 2))
        expected = signal.sosfilt(SECTIONS, x)
        for part in np.split(x, [10, 250], axis=1):
            sosfilt(SECTIONS, part, state, part, state)
        check(x, expected)


def test_sosfilt_without_sections_copies():
    x = random((2, 9), np.float32)
    np.testing.assert_array_equal(sosfilt(np.zeros((0, 6)), x, None)[0], x)


def test_sosfilt_of_nan_and_infinities():
    """They stay in their channel, where they are at all samples that follow, and do not come into its neighbours."""
    for channels in [3, 20]:
        x = random((channels, 50), np.float32)
        x[1, 7], x[2, 7] = math.nan, math.inf
        outputs = blank((channels, 50), np.float32), blank((3, channels, 2), np.float64)
        out, _ = call(sosfilt, SECTIONS, x, None, *outputs, written=(-2, -1))
        check(out, signal.sosfilt(SECTIONS, x.astype(np.float64)))
        assert np.isnan(out[1, 7:]).all() and np.isfinite(out[0]).all() and np.isfinite(out[3:]).all()


# ---- distances ----
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


def test_nearest_of_equal_distances_in_order():
    points = np.random.default_rng(0).integers(-2, 3, (700, 2)).astype(np.float32)
    farthest_first = points[np.argsort(-np.hypot(*points.T), kind="stable")]
    for y in (points, farthest_first):
        check_nearest(points[:3].copy(), y, 40, np.float32)


def test_nan_and_infinities():
    y = np.array([[NAN, 0], [INF, 0], [3, 4], [0, NAN], [0, 0], [-INF, 0]], np.float32)
    x = np.array([[0.0, 0], [INF, 0], [NAN, 0]], np.float32)
    expected = [[NAN, INF, 5, NAN, 0, INF], [NAN, NAN, INF, NAN, INF, INF], [NAN] * 6]
    np.testing.assert_array_equal(call(pairwise, x, y, blank((3, 6), np.float32)), expected)
    for k in (1, 2, 4, 6):  # NaN gives way to what comes later
        check_nearest(x, y, k, np.float32)
