"""axpy, heat_step, histogram; of any kernel: outputs that are inputs, or omitted, and PyTorch's own operators; overlap."""

import itertools
import math
import pickle

import numpy as np
import pytest
from forked import fork_python
from frameworks import needs_torch
from kernel_data import (
    CASES,
    FRAMEWORKS,
    SHAPES,
    blank,
    call,
    check,
    contiguous,
    made,
    random,
    strided,
    that_fit,
    torch,
)
from scipy import signal

from kernels.axpy import axpy
from kernels.cross_entropy import cross_entropy
from kernels.csr import csr_matvec
from kernels.distances import nearest, pairwise
from kernels.heat import heat_step
from kernels.histogram import histogram
from kernels.iir import sosfilt
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.overlap import apart, apart_or_same, injective, place
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.runs import run_length_decode, run_length_encode
from kernels.sampling import sample
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum
from kernels.softmax import softmax


# ---- axpy, heat ----
@pytest.mark.parametrize("a, x_dtype, dtype, layout", [
    (2.5, np.float32, np.float32, contiguous), (-0.5, np.float64, np.float64, strided),
    (3, np.int64, np.float64, contiguous), (2j, np.complex128, np.complex128, contiguous),
])  # fmt: skip
def test_axpy(a, x_dtype, dtype, layout):
    for (size,) in that_fit(layout, [(0,), (1,), (2,), (7,), (1023,), (100_003,)]):
        x, y = layout(random(size, x_dtype)), layout(random(size, dtype, seed=1))
        check(call(axpy, a, x, y, blank(size, dtype, layout)), a * x.astype(np.promote_types(x_dtype, np.float64)) + y)


def test_axpy_of_negative_strides():
    x, y, out = random(10, np.float64)[::-1], random(10, np.float64, seed=1), blank(10, np.float64)
    axpy(2.0, x, y, out[::-1])
    check(out[::-1], 2.0 * x + y)


def heat_oracle(u):
    expected = u.astype(np.float64)
    if min(u.shape) > 2:
        neighbours = expected[:-2, 1:-1] + expected[2:, 1:-1] + expected[1:-1, :-2] + expected[1:-1, 2:]
        expected[1:-1, 1:-1] += 0.2 * (neighbours - 4 * expected[1:-1, 1:-1])
    return expected


@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES[:3])
def test_heat_step(dtype, layout, result, result_layout):
    for shape in that_fit(layout, [*SHAPES, (2, 9), (9, 2), (3, 9), (9, 3), (480, 641)]):
        u = layout(random(shape, dtype))
        check(call(heat_step, u, 0.2, blank(shape, result, result_layout)), heat_oracle(u))


# ---- histogram ----
@pytest.mark.parametrize(
    ("dtype", "layout"), [(np.float32, strided), (np.float64, contiguous), (np.int64, contiguous), (np.uint8, strided)]
)
def test_histogram(dtype, layout):
    bounds = [(-3, 3), (0, 11)] if dtype is np.int64 else [(-3.0, 3.0), (0.1, 0.7)]
    for size, bins in that_fit(layout, itertools.product([0, 1, 2, 1001, 300_007], [1, 7, 100])):
        values = random(size, np.float64) * 1.5
        x = layout((values if np.dtype(dtype).kind == "f" else abs(values * 20)).astype(dtype))
        for low, high in bounds:
            counts = call(histogram, x, bins, low, high, blank(bins, np.int64, layout))
            np.testing.assert_array_equal(counts, np.histogram(x, bins, (low, high))[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_histogram_decides_at_the_edges_as_numpys_does(dtype):
    for low, high, bins in [(0.0, 1.0, 10), (-1.0, 2.0, 7), (0.1, 0.7, 60), (1e6, 1e6 + 1, 3), (-1e-30, 1e-30, 5)]:
        edges = np.histogram_bin_edges(np.empty(0, dtype), bins, (low, high)).astype(dtype)
        values = np.concatenate([edges, np.nextafter(edges, dtype(-np.inf)), np.nextafter(edges, dtype(np.inf))])
        counts = histogram(values, bins, low, high)
        np.testing.assert_array_equal(counts, np.histogram(values, bins, (low, high))[0])
        assert histogram(edges[-1:], bins, low, high)[-1] == 1


def test_a_histogram_ignores_what_is_outside():
    x = np.array([math.nan, math.inf, -math.inf, -1e300, 1e300, -0.001, 1.001, 0.0, 1.0, 0.5, -0.0])
    np.testing.assert_array_equal(histogram(x, 2, 0.0, 1.0), [2, 2])


# ---- outputs that are inputs ----
LINE, OTHER = random(40_000, np.float32), random(40_000, np.float32, seed=1)
PAIRS = random(1000, np.float64)
GRID, WIDE, WEIGHT = random((256, 129), np.float32), random((50, 15), np.float64), random(129, np.float32, seed=1)
BY_POSITION = random((2, 65, 9, 32), np.float64).transpose(0, 2, 1, 3)
COS, SIN = random((65, 16), np.float64), random((65, 16), np.float64, seed=1)
LENGTHS = abs(random(70_001, np.int64))
SECTIONS = signal.butter(6, 0.2, output="sos")
SIGNAL, STATE = random((20, 600), np.float64), random((3, 20, 2), np.float64)
# a kernel, its inputs, its outputs
IN_PLACE = {
    "axpy over y": (axpy, (2.0, LINE, OTHER), [OTHER]),
    "axpy over x": (axpy, (2.0, LINE, OTHER), [LINE]),
    "axpy over both": (axpy, (2.0, LINE, LINE), [LINE]),
    "axpy over what lies between the elements of x": (axpy, (2.0, PAIRS[::2], PAIRS[1::2]), [PAIRS[1::2]]),
    "softmax": (softmax, (GRID,), [GRID]),
    "softmax of a few rows": (softmax, (GRID[:3],), [GRID[:3]]),
    "softmax into other columns": (softmax, (WIDE[:, :7],), [WIDE[:, 8:]]),
    "log_softmax": (log_softmax, (GRID,), [GRID]),
    "layer_norm without parameters": (layer_norm, (GRID, None, None, 1e-5), [GRID]),
    "rms_norm": (rms_norm, (GRID, WEIGHT, 1e-5), [GRID]),
    "rotary of halves, positions before heads": (rotary, (BY_POSITION, COS, SIN, 0, False), [BY_POSITION]),
    "rotary of neighbours, positions before heads": (rotary, (BY_POSITION, COS, SIN, 0, True), [BY_POSITION]),
    "heat_step into other columns": (heat_step, (WIDE[:, :7], 0.1), [WIDE[:, 8:]]),
    "exclusive_scan": (exclusive_scan, (LENGTHS,), [LENGTHS]),
    "exclusive_scan of a few": (exclusive_scan, (LENGTHS[:500],), [LENGTHS[:500]]),
    "sosfilt over its signal and its state": (sosfilt, (SECTIONS, SIGNAL, STATE), [SIGNAL, STATE]),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_what_is_written_over_an_input_is_what_is_written_elsewhere(case):
    kernel, inputs, outputs = IN_PLACE[case]
    elsewhere = [(contiguous if output.flags.c_contiguous else strided)(output) for output in outputs]
    kernel(*inputs, *elsewhere)
    got = call(kernel, *inputs, *outputs, written=range(-len(outputs), 0))
    for found, expected in zip(got if len(outputs) > 1 else [got], elsewhere, strict=True):
        check(found, expected)


def test_expanded_inputs_are_fine():
    row = random(6, np.float32)
    expanded = [np.broadcast_to(row, (4, 6))] + [torch.from_numpy(row).expand(4, 6)] * (torch is not None)
    for x in expanded:
        np.testing.assert_array_equal(softmax(x), softmax(np.tile(row, (4, 1))))


# ---- outputs that are omitted ----
F32, F64, I64 = np.float32, np.float64, np.int64
SHORT, SMALL, SEVEN = random(9, F32), random((5, 7), F32), random(7, F32, seed=1)
OFFSETS, TARGET, TURNS = np.array([0, 2, 2, 5]), np.array([0, 6, -100, 3, 1]), random((4, 3), F32)
SOS = np.array([[1.0, 2, 1, 1, 0.5, 0.25], [1.0, 0, -1, 1, 0, 0.5]])
INDPTR, INDICES = np.array([0, 2, 5], np.int32), np.array([0, 6, 1, 2, 3], np.int32)
# a kernel, its inputs, and the shapes and dtypes of what it makes
MADE = [
    (axpy, (2.5, SHORT, SHORT), [((9,), F32)]),
    (softmax, (SMALL,), [((5, 7), F32)]),
    (log_softmax, (SMALL,), [((5, 7), F32)]),
    (layer_norm, (SMALL, SEVEN, SEVEN, 1e-5), [((5, 7), F32)]),
    (rms_norm, (SMALL, SEVEN, 1e-5), [((5, 7), F32)]),
    (rotary, (random((2, 3, 4, 6), F32), TURNS, TURNS, 0, False), [((2, 3, 4, 6), F32)]),
    (cross_entropy, (SMALL, TARGET, 0.1, -100), [((5,), F32)]),
    (sample, (SMALL, 3, 0.5, 1.0, np.linspace(0, 0.9, 5)), [((5,), I64)]),
    (histogram, (SHORT, 4, -1.0, 1.0), [((4,), I64)]),
    (heat_step, (SMALL, 0.2), [((5, 7), F32)]),
    (exclusive_scan, (np.arange(6),), [((6,), I64)]),
    (segment_sum, (SHORT, OFFSETS), [((3,), F32)]),
    (segment_sum, (SMALL, OFFSETS), [((3, 7), F32)]),
    (segment_mean, (SHORT, OFFSETS), [((3,), F32)]),
    (segment_max, (SHORT, OFFSETS, -100), [((3,), F32)]),
    (segment_min, (SHORT, OFFSETS, 100), [((3,), F32)]),
    (pairwise, (SMALL, SMALL[:3].copy()), [((5, 3), F32)]),
    (nearest, (SMALL, SMALL[:3].copy(), 2), [((5, 2), F32), ((5, 2), I64)]),
    (sosfilt, (SOS, random((3, 50), F32), None), [((3, 50), F32), ((2, 3, 2), F64)]),
    (csr_matvec, (INDPTR, INDICES, SHORT[:5].copy(), SEVEN), [((2,), F32)]),
]


@pytest.mark.parametrize("row", MADE, ids=lambda row: row[0].__name__)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_outputs_are_made(framework, row):
    kernel, args, expected = row
    args = [made(framework, value) for value in args]
    given = [made(framework, np.zeros(shape, dtype)) for shape, dtype in expected]
    written = kernel(*args, *given)
    for results in (kernel(*args), kernel(*args, *[None] * len(given))):
        results, back = (results, written) if len(given) > 1 else ((results,), (written,))
        for result, output, returned in zip(results, given, back, strict=True):
            assert returned is output
            assert type(result) is type(output) and result.shape == output.shape and result.dtype == output.dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(output))


def test_one_of_two_outputs_is_given():
    indices = np.empty((5, 2), np.int64)
    distances, same = nearest(SMALL, SMALL[:3].copy(), 2, indices=indices)
    assert same is indices and distances.shape == (5, 2) and distances.dtype == F32


@needs_torch
def test_they_are_of_the_framework_that_the_data_come_from():
    """Not of that which the coefficients, the offsets or the indices come from."""
    for result in (
        *sosfilt(SOS, torch.from_numpy(random((3, 50), F32)), None),
        csr_matvec(INDPTR, INDICES, torch.from_numpy(SHORT[:5]), SEVEN),
        segment_sum(torch.from_numpy(SHORT), OFFSETS),
    ):
        assert type(result) is torch.Tensor


def test_layer_norm_has_a_default_for_eps():
    np.testing.assert_array_equal(layer_norm(SMALL, SEVEN, SEVEN), layer_norm(SMALL, SEVEN, SEVEN, 1e-5))


CALLS = """
import importlib, pickle, sys

called = []
for module, name, args in pickle.load(open(sys.argv[1], "rb")):
    called.append(getattr(importlib.import_module(module), name))
    called[-1](*args)
for kernel in called:
    assert kernel.stats.cache_hits and not kernel.stats.cache_misses, (kernel, kernel.stats)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    calls = [row[:2] for row in MADE]
    calls += [(run_length_encode, (np.ones(4),)), (run_length_decode, (np.ones(1), np.array([4])))]
    file = tmp_path / "calls.pickle"
    file.write_bytes(pickle.dumps([(kernel.__module__, kernel.__name__, args) for kernel, args in calls]))
    fork_python(CALLS, str(file), check=False)  # compiles what no earlier test did, and then fails
    fork_python(CALLS, str(file))


# ---- PyTorch's own ----
@needs_torch
def test_pytorchs_operators_agree():
    """Of rows with NaN and infinities, too."""
    torch.manual_seed(0)
    functional, inf, nan = torch.nn.functional, math.inf, math.nan
    x, weight, bias = torch.randn(40, 30), torch.randn(30), torch.randn(30)
    extreme = torch.tensor([[-inf] * 3, [inf, 0, 1], [nan, 0, 1], [0, 1, -nan], [3e38, 3e38, -3e38], [0, -inf, 0]])
    target, options = torch.arange(40) % 30, {"reduction": "none", "label_smoothing": 0.1, "ignore_index": 7}
    stencil = torch.tensor([[0, 0.2, 0], [0.2, 0.2, 0.2], [0, 0.2, 0]])[None, None]
    for ours, theirs in [
        (axpy(2.5, bias, weight), torch.add(weight, bias, alpha=2.5)),
        (heat_step(x, 0.2)[1:-1, 1:-1], functional.conv2d(x[None, None], stencil)[0, 0]),
        (histogram(x.flatten(), 64, -2.0, 2.0), torch.histc(x, 64, -2.0, 2.0).to(torch.int64)),
        (softmax(x), torch.softmax(x, 1)),
        (softmax(extreme), torch.softmax(extreme, 1)),
        (log_softmax(x), torch.log_softmax(x, 1)),
        (log_softmax(extreme), torch.log_softmax(extreme, 1)),
        (layer_norm(x, weight, bias), functional.layer_norm(x, (30,), weight, bias)),
        (layer_norm(extreme[:4], None, None), functional.layer_norm(extreme[:4], (3,))),
        (rms_norm(x, weight, 0.1), functional.rms_norm(x, (30,), weight, 0.1)),
        (rms_norm(extreme[:4], None, 0.1), functional.rms_norm(extreme[:4], (3,), None, 0.1)),
        (cross_entropy(x, target, 0.1, 7), functional.cross_entropy(x, target, **options)),
        (pairwise(x, weight[None]), torch.cdist(x, weight[None])),
        (exclusive_scan(target), torch.cumsum(target, 0) - target),
    ]:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---- which memory arrays share ----
def test_overlap_is_never_missed():
    """Against NumPy's exact answers, on all pairs of random views; and most that are apart are seen to be."""
    generator = np.random.default_rng(0)
    memory = np.zeros(60)
    views = []
    for _ in range(60):
        start, stop = np.sort(generator.integers(0, 61, 2))
        views.append(memory[start : stop : generator.integers(1, 6)][:: generator.choice([-1, 1])])
        rows = int(generator.integers(1, 11))
        grid = memory[: 60 // rows * rows].reshape(rows, -1)
        top, left, width = generator.integers(0, rows), generator.integers(0, grid.shape[1]), generator.integers(0, 8)
        views.append(grid[top :: generator.integers(1, 3), left : left + width][:: generator.choice([-1, 1])])
    pairs = [
        (apart(place(x), place(y)), np.shares_memory(x, y)) for x, y in itertools.product(views, views)
    ]  # seen to be apart, sharing memory
    assert (True, True) not in pairs
    assert pairs.count((True, False)) > 0.9 * (pairs.count((True, False)) + pairs.count((False, False)))
    assert all(injective(place(x)) and apart_or_same(place(x), place(x)) for x in views)


def test_injective():
    memory = np.arange(40.0)
    for shape, strides in [
        *(((4,), (0,)), ((1,), (0,)), ((0,), (0,)), ((4,), (-1,)), ((4, 3), (1, 12)), ((1, 5), (0, 1)), ((0, 5), (0, 0))),
        *(((4, 5), strides) for strides in [(5, 1), (1, 4), (4, 1), (0, 1), (1, 1)]),
    ]:
        view = np.lib.stride_tricks.as_strided(memory[10:], shape, [8 * stride for stride in strides])
        assert injective(place(view)) == (len(set(view.flat)) == view.size), (shape, strides)
