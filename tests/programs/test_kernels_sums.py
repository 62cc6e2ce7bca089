"""The exclusive scan, the segment reductions, the sparse product and run lengths, against NumPy and SciPy."""

import math

import numpy as np
import pytest
import scipy.sparse
from kernel_data import FRAMEWORKS, blank, call, check, contiguous, made, random, strided, that_fit

from kernels.csr import csr_matvec
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


def offsets_of(segments, size, dtype):
    """Increasing offsets from 0 to `size`, with segments of no, one and many elements."""
    inner = np.random.default_rng(0).integers(0, size + 1, max(segments - 1, 0))
    inner[: segments // 4] = size // 2
    return np.array([0, *np.sort(inner), size][: segments + 1], dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "offset_dtype", "layout"),
    [(name, np.float32, np.int64, contiguous) for name in REDUCTIONS]
    + [(name, np.int64, np.int64, contiguous) for name in ("sum", "max")]  # whose code mean and min share
    + [(name, np.float64, np.int32, strided) for name in ("sum", "max")],
)
def test_segments(name, dtype, offset_dtype, layout):
    kernel, initial, *_ = REDUCTIONS[name]
    vectors = [(0, (0,)), (1, (0,)), (1, (7,)), (9, (101,)), (3000, (50_003,))]
    for segments, shape in [*vectors, (4, (0, 3)), (9, (60, 7)), (300, (5001, 9))]:
        if not that_fit(layout, [(segments, *shape)]):
            continue
        x, offsets = layout(random(shape, dtype)), offsets_of(segments, shape[0], offset_dtype)
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
def sparse(rows, columns, dtype, index):
    """indptr, indices, data of a matrix with empty rows, and the same matrix as a dense one."""
    dense = random((rows, columns), dtype) * (np.random.default_rng(0).random((rows, columns)) < 0.3)
    dense[::5] = 0
    where = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.count_nonzero(dense, axis=1))]).astype(index)
    return indptr, where[1].astype(index), dense.astype(dtype)[where], dense


@pytest.mark.parametrize("dtype, index, layout", [
    (np.float32, np.int32, contiguous), (np.float32, np.int64, strided), (np.float64, np.int64, contiguous),
    (np.complex64, np.int32, contiguous),
])  # fmt: skip
def test_csr_matvec(dtype, index, layout):
    for rows, columns in that_fit(layout, [(0, 0), (0, 3), (3, 0), (1, 1), (7, 5), (40, 33), (600, 400)]):
        *matrix, dense = sparse(rows, columns, dtype, index)
        x = random(columns, dtype, seed=1)
        got = call(csr_matvec, *map(layout, (*matrix, x)), blank(rows, dtype, layout))
        check(got, dense.astype(np.promote_types(dtype, np.float64)) @ x, scale=50)


def test_csr_matvec_with_indices_in_any_order_and_twice():
    """Of integers, and a vector of another dtype."""
    indptr, indices, data = (np.array(each, np.int32) for each in ([0, 3, 3, 5], [3, 1, 3, 0, 0], [1, 2, 3, 4, 5]))
    x = random(4, np.float64)
    got = call(csr_matvec, indptr, indices, data, x, blank(3, np.float64))
    check(got, scipy.sparse.csr_matrix((data, indices, indptr), (3, 4)) @ x)


# ---- runs ----
@pytest.mark.parametrize(
    ("dtype", "layout"), [(np.int64, contiguous), (np.float32, strided), (np.complex128, contiguous), (np.bool_, contiguous)]
)
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
    lengths = np.random.default_rng(0).integers(0, 40, 500).astype(length_dtype)
    for number in [0, 1, 2, 500]:
        values = random(number, np.float64)
        np.testing.assert_array_equal(run_length_decode(values, lengths[:number]), np.repeat(values, lengths[:number]))
