"""The exclusive scan, the segment reductions and the sparse product, against PyTorch, SciPy and NumPy."""

import math

import numpy as np
import pytest
import scipy.sparse
from kernel_data import (
    FRAMEWORKS,
    MIXED,
    blank,
    check,
    check_refused,
    contiguous,
    make,
    random,
    strided,
    that_fit,
    torch,
    zeros,
)

from kernels.csr import csr_matvec
from kernels.offsets import cut_within
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum


def ints(*values, dtype=np.int64):
    return np.array(values, dtype)


def offsets_of(segments, size, seed=0, dtype=np.int64):
    """Increasing offsets from 0 to `size`, with segments of no, one and many elements."""
    inner = np.random.default_rng(seed).integers(0, size + 1, max(segments - 1, 0))
    inner[: segments // 4] = size // 2
    return np.array([0, *np.sort(inner), size][: segments + 1], dtype)


# ---- exclusive scan ----


def scan_oracle(x, dtype):
    if torch is not None and x.size:
        total = torch.cumsum(torch.from_numpy(np.ascontiguousarray(x)), 0, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
        total = total.numpy()
    else:
        total = np.cumsum(x, dtype=dtype)
    return np.concatenate([np.zeros(1, dtype), total])[: x.size]


SCANS = [  # of x and of out
    (np.float32, np.float32, contiguous),
    (np.float64, np.float64, contiguous),
    (np.int64, np.int64, contiguous),
    (np.uint8, np.int64, strided),
]


@pytest.mark.parametrize(("dtype", "out_dtype", "layout"), SCANS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_exclusive_scan(framework, dtype, out_dtype, layout):
    for (size,) in that_fit(layout, [(n,) for n in (0, 1, 2, 127, 128, 131, 1000, 16384, 16387, 300_007)]):
        x, out = layout(abs(random(size, dtype))), blank(size, out_dtype, layout)
        exclusive_scan(make(framework, x), make(framework, out))
        if out_dtype is np.int64:
            np.testing.assert_array_equal(out, scan_oracle(x, out_dtype))
        else:  # PyTorch's own sums of float32 lose more digits than these, in float64
            check(out, scan_oracle(x.astype(np.float64), np.float64).astype(out_dtype))
            np.testing.assert_allclose(out, scan_oracle(x, out_dtype), rtol=1e-3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_exclusive_scan_in_place(framework):
    for size in [5, 500, 70_001]:
        lengths = abs(random(size, np.int64))
        same = make(framework, lengths.copy())
        exclusive_scan(same, same)
        np.testing.assert_array_equal(same, scan_oracle(lengths, np.int64))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_exclusive_scan_of_nan_and_infinities(framework):
    for size in [9, 40_000]:
        x = np.ones(size, np.float32)
        x[3] = math.inf
        x[6] = -math.inf
        out = blank(size, np.float32)
        exclusive_scan(make(framework, x), make(framework, out))
        np.testing.assert_array_equal(out[:7], [0, 1, 2, 3, math.inf, math.inf, math.inf])
        assert np.isnan(out[7:]).all()


# ---- segments ----

REDUCTIONS = {
    "sum": (segment_sum, (), np.add, 0),
    "mean": (segment_mean, (), np.add, math.nan),
    "max": (segment_max, (-100,), np.maximum, -100),
    "min": (segment_min, (100,), np.minimum, 100),
}
SEGMENTED = [
    (np.float32, np.int64, contiguous),
    (np.float64, np.int32, strided),
    (np.int64, np.int64, contiguous),
]


def segments_oracle(name, x, offsets, dtype):
    """Segment by segment, in NumPy: with ``reduceat``, an empty segment would be its next one's first element."""
    _, _, reduce, empty = REDUCTIONS[name]
    out = np.full((offsets.size - 1, *x.shape[1:]), empty, dtype)
    for k, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if first < last:
            out[k] = reduce.reduce(x[first:last], axis=0, dtype=dtype) / (last - first if name == "mean" else 1)
    return out


# Each is a compilation; of mean and min, which share their code with the others, not all.
REDUCED = [
    (name, *case) for name in REDUCTIONS for case in SEGMENTED if name not in ("mean", "min") or case[-1] is not strided
]


@pytest.mark.parametrize(("name", "dtype", "offset_dtype", "layout"), REDUCED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_segments(framework, dtype, offset_dtype, layout, name):
    kernel, initial, *_ = REDUCTIONS[name]
    out_dtype = np.float64 if name == "mean" and dtype is np.int64 else dtype
    vectors = [(0, (0,)), (1, (0,)), (1, (7,)), (9, (101,)), (3000, (50_003,))]
    for segments, shape in [*vectors, (4, (0, 3)), (9, (60, 7)), (300, (5001, 9))]:
        if not that_fit(layout, [(segments, *shape)]):
            continue
        x = layout(random(shape, dtype))
        offsets = offsets_of(segments, shape[0], dtype=offset_dtype)
        out = blank((segments, *shape[1:]), out_dtype, layout)
        arguments = [make(framework, x), make(framework, offsets)]
        kernel(*arguments, *initial, make(framework, out))
        expected = segments_oracle(name, x, offsets, np.float64 if out_dtype != np.int64 else np.int64)
        if out_dtype is np.int64:
            np.testing.assert_array_equal(out, expected)
        else:
            check(out, expected, scale=50)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_segments_agree_with_segment_reduce(name):
    kernel, initial, _, empty = REDUCTIONS[name]
    for shape in [(1001,), (60, 7)]:
        x, offsets = torch.from_numpy(random(shape, np.float32)), torch.from_numpy(offsets_of(9, shape[0]))
        out = torch.empty((9, *shape[1:]), dtype=x.dtype)
        kernel(x, offsets, *initial, out)
        expected = torch.segment_reduce(x, name, offsets=offsets, initial=empty if initial else None)
        check(out, expected.numpy(), scale=50)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_segment_sum_of_complex_numbers(framework):
    x, offsets, out = random(100, np.complex64), ints(10, 10, 40, 90), blank(3, np.complex64)
    segment_sum(make(framework, x), make(framework, offsets), make(framework, out))
    check(out, np.array([0, x[10:40].sum(), x[40:90].sum()], np.complex64), scale=10)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_segments_of_nan_and_infinities(framework):
    inf, nan = math.inf, math.nan
    x, offsets = np.array([1, nan, 2, inf, 3, -inf, 4, inf, -inf], np.float32), ints(0, 3, 5, 7, 9, 9)
    expected = {
        "sum": [nan, inf, -inf, nan, 0],
        "mean": [nan, inf, -inf, nan, nan],
        "max": [nan, inf, 4, inf, -100],
        "min": [nan, 3, -inf, -inf, 100],
    }
    for name, (kernel, initial, *_) in REDUCTIONS.items():
        out, table = blank(5, np.float32), blank((5, 2), np.float32)
        kernel(make(framework, x), make(framework, offsets), *initial, make(framework, out))
        np.testing.assert_array_equal(out, expected[name])
        kernel(make(framework, np.stack([x, x], axis=1)), make(framework, offsets), *initial, make(framework, table))
        np.testing.assert_array_equal(table, np.stack([expected[name]] * 2, axis=1))
        if initial:
            kernel(make(framework, np.ones(9, np.float32)), make(framework, offsets), nan, make(framework, out))
            assert np.isnan(out).all()


def test_cut_within():
    for offsets, size, expected in [
        ([], 5, False),
        ([0], 0, True),
        ([0], 5, True),
        ([6], 5, False),
        ([0, 5], 5, True),
        ([2, 2, 4], 5, True),
        ([0, 6], 5, False),
        ([-1, 5], 5, False),
        ([0, 3, 2, 5], 5, False),
        ([0, 1 << 62, 5], 5, False),
    ]:
        assert cut_within(np.array(offsets, np.int64), size) == expected, offsets
    assert not cut_within(np.array([0, (1 << 64) - 1], np.uint64), 5)
    assert not cut_within(np.array([(1 << 64) - 1, 5], np.uint64), 5)


# ---- CSR matrix times vector ----


def sparse(rows, columns, dtype, index=np.int32, seed=0):
    """indptr, indices, data of a matrix with empty rows, and the same matrix as a dense one."""
    dense = random((rows, columns), dtype, seed) * (np.random.default_rng(seed).random((rows, columns)) < 0.3)
    dense[::5] = 0
    dense = dense.astype(dtype)
    where = np.nonzero(dense)
    indptr = np.concatenate([[0], np.cumsum(np.count_nonzero(dense, axis=1))]).astype(index)
    return indptr, where[1].astype(index), dense[where], dense


@pytest.mark.parametrize(
    ("dtype", "index", "layout"),
    [
        (np.float32, np.int32, contiguous),
        (np.float32, np.int64, strided),
        (np.float64, np.int64, contiguous),
        (np.complex64, np.int32, contiguous),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_csr_matvec(framework, dtype, index, layout):
    for rows, columns in that_fit(layout, [(0, 0), (0, 3), (3, 0), (1, 1), (7, 5), (40, 33), (600, 400)]):
        indptr, indices, data, dense = sparse(rows, columns, dtype, index)
        x, out = random(columns, dtype, seed=1), blank(rows, dtype, layout)
        csr_matvec(*(make(framework, layout(a)) for a in (indptr, indices, data, x)), make(framework, out))
        check(out, (dense.astype(np.promote_types(dtype, np.float64)) @ x).astype(dtype), scale=50)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_csr_matvec_agrees_with_pytorch():
    indptr, indices, data, dense = sparse(50, 60, np.float32, np.int64)
    x, out = random(60, np.float32), blank(50, np.float32)
    csr_matvec(indptr, indices, data, x, out)
    matrix = torch.sparse_csr_tensor(*(torch.from_numpy(a) for a in (indptr, indices, data)), dense.shape)
    check(out, (matrix @ torch.from_numpy(x)).numpy(), scale=10)


@pytest.mark.parametrize("frameworks", MIXED)
def test_csr_matvec_agrees_with_scipy(frameworks):
    """Whose matrix may have its indices in any order, and twice; here also integers and a vector of another dtype."""
    indptr, indices, data = ints(0, 3, 3, 5, dtype=np.int32), ints(3, 1, 3, 0, 0, dtype=np.int32), ints(1, 2, 3, 4, 5)
    x, out = random(4, np.float64), blank(3, np.float64)
    csr_matvec(indptr, indices, make(frameworks[0], data), make(frameworks[0], x), make(frameworks[1], out))
    check(out, scipy.sparse.csr_matrix((data, indices, indptr), (3, 4)) @ x)


@pytest.mark.parametrize("bad", [-1, 400, -(1 << 31)])
@pytest.mark.parametrize("place", [0, 1000, -1])
@pytest.mark.parametrize("rows", [20, 600])  # in one thread and in several
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_csr_matvec_refuses_indices_before_it_writes(framework, rows, place, bad):
    indptr, indices, data, _ = sparse(rows, 400, np.float32)
    indices[place] = bad
    args = (indptr, indices, data, random(400, np.float32), blank(rows, np.float32))
    check_refused(framework, csr_matvec, args, "indices: must lie within x")


# ---- what is refused ----


def floats(*shape):
    return zeros(*shape, dtype=np.float32)


LINE = (ints(0, 1, 3), ints(1, 0, 1), zeros(3), zeros(2), zeros(2))  # a matrix times a vector


def but(position, value, args=LINE):
    return (*args[:position], value, *args[position + 1 :])


REFUSED = {
    "scan matrix": (exclusive_scan, (zeros(3, 2), zeros(3, 2)), "out: must have one"),
    "scan shorter": (exclusive_scan, (zeros(4), zeros(3)), "x: its shape"),
    "scan int32 out": (exclusive_scan, (ints(1, 2), zeros(2, dtype=np.int32)), "out: its dtype must be floating or int64"),
    "scan uint64 out": (exclusive_scan, (ints(1, 2), zeros(2, dtype=np.uint64)), "out: its dtype must be floating or int64"),
    "scan floats into integers": (exclusive_scan, (zeros(2), ints(1, 2)), "out: its dtype must be floating, as"),
    "sum scalar": (segment_sum, (floats(2, 2, 2), ints(0, 2), floats(1, 2, 2)), "x: must have one or two"),
    "sum floating offsets": (segment_sum, (floats(3), floats(2), floats(1)), "offsets: must be integers"),
    "sum no offsets": (segment_sum, (floats(3), ints(), floats(0)), "offsets: must not decrease"),
    "sum descent": (segment_sum, (floats(3), ints(0, 2, 1), floats(2)), "offsets: must not decrease"),
    "mean beyond": (segment_mean, (floats(3), ints(0, 4), floats(1)), "offsets: must not decrease"),
    "max before": (segment_max, (floats(3), ints(-1, 3), 0, floats(1)), "offsets: must not decrease"),
    "min beyond": (segment_min, (floats(3), ints(0, 4), 0, floats(1)), "offsets: must not decrease"),
    "sum out longer": (segment_sum, (floats(3), ints(0, 3), floats(2)), "out: its shape"),
    "sum out wider": (segment_sum, (floats(3, 2), ints(0, 3), floats(1, 3)), "out: its shape"),
    "sum int32 out": (segment_sum, (ints(1), ints(0, 1), zeros(1, dtype=np.int32)), "out: its dtype must be floating, complex"),
    "sum floats into integers": (segment_sum, (floats(1), ints(0, 1), ints(1)), "out: its dtype must be floating or complex"),
    "mean integer out": (segment_mean, (ints(1), ints(0, 1), ints(1)), "out: its dtype"),
    "max other dtype": (segment_max, (floats(1), ints(0, 1), 0, zeros(1)), "out: its dtype"),
    "max initial": (segment_max, (ints(1), ints(0, 1), 0.5, ints(1)), "initial: "),
    "max initial infinite": (segment_max, (ints(1), ints(0, 1), -math.inf, ints(1)), "initial: "),
    "csr indptr floating": (csr_matvec, but(0, zeros(3)), "indptr: must be integers"),
    "csr indptr matrix": (csr_matvec, but(0, ints(0, 1, 3)[None]), "indptr: must have one"),
    "csr indices floating": (csr_matvec, but(1, zeros(3)), "indices: must be integers"),
    "csr data shorter": (csr_matvec, but(2, zeros(2)), "data: its shape"),
    "csr x matrix": (csr_matvec, but(3, zeros(2, 1)), "x: must have one"),
    "csr out longer": (csr_matvec, but(4, zeros(3)), "out: its length"),
    "csr out integer": (csr_matvec, but(4, ints(1, 1)), "out: its dtype"),
    "csr indptr descends": (csr_matvec, but(0, ints(0, 2, 1)), "indptr: must not decrease"),
    "csr indptr beyond": (csr_matvec, but(0, ints(0, 1, 4)), "indptr: must not decrease"),
}


OF_TYPES = [
    "scan int32 out", "scan uint64 out", "scan floats into integers", "sum scalar", "sum floating offsets", "sum int32 out",
    "sum floats into integers", "mean integer out", "max other dtype", "max initial", "max initial infinite",
    "csr indptr floating", "csr indices floating", "csr out integer",
]  # fmt: skip
"""Those that no other call has the types of: each would be a compilation of a second or more, of threads above all."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    kernel, args, message = REFUSED[case]
    check_refused(FRAMEWORKS[-1], kernel, args, message, compiled=case not in OF_TYPES)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    line, counts = make(framework, random(40, np.float64)), make(framework, np.arange(40))
    short = make(framework, random(40, np.float32))
    x = make(framework, zeros(2))
    data, indptr, indices = (make(framework, a) for a in (zeros(3), ints(0, 1, 3), ints(1, 0, 1)))
    refused = [
        (exclusive_scan, (line[:-1], line[1:]), "x without"),
        (exclusive_scan, (counts[1:], counts[:-1]), "x without"),
        (segment_sum, (short[:30], counts[:4], short[:3]), "x or offsets"),
        (segment_sum, (counts[20:], counts[1:5], counts[3:6]), "x or offsets"),
        (segment_mean, (short[:30], counts[:4], short[10:13]), "x or offsets"),
        (segment_max, (short[:30], counts[:4], 0, short[:3]), "x or offsets"),
        (segment_min, (short[:30], counts[:4], 0, short[:3]), "x or offsets"),
        (csr_matvec, (indptr, indices, data, line[:2], line[1:3]), "data or x"),
        (csr_matvec, (indptr, indices, line[:3], x, line[2:4]), "data or x"),
    ]
    for kernel, args, what in refused:
        before = [np.asarray(tensor).copy() for tensor in (line, short, counts)]
        with pytest.raises(ValueError, match=f"^out: overlaps {what}"):
            kernel(*args)
        for tensor, copy in zip((line, short, counts), before, strict=True):
            np.testing.assert_array_equal(np.asarray(tensor), copy)
    if framework == "torch":
        def every_third(dtype, *values):
            return torch.tensor(values, dtype=dtype).repeat_interleave(3)[::3]

        doubles, counts = every_third(torch.float64, 0, 0), every_third(torch.uint8, 0, 0)
        offsets, singles = torch.zeros(3, dtype=torch.int32), every_third(torch.float32, 0, 0, 0)
        places = [every_third(torch.int64, 0, 1, 3), every_third(torch.int64, 1, 0, 1)]
        for kernel, args, dtype in [
            (exclusive_scan, (counts,), torch.int64),
            (segment_sum, (doubles, offsets), torch.float64),
            (csr_matvec, (*places, singles, singles[:2]), torch.float32),
        ]:
            one = torch.full((1,), 7, dtype=dtype)
            with pytest.raises(ValueError, match=r"^out: each element"):
                kernel(*args, one.expand(2))
            assert one == 7
    # an output that lies in what the offsets are read from, seen as floats: only NumPy's views do that
    memory = np.zeros(8)
    with pytest.raises(ValueError, match=r"^out: overlaps indptr or indices"):
        csr_matvec(memory[:3].view(np.int64), np.zeros(0, np.int64), zeros(0), zeros(2), memory[1:3])
