"""axpy, heat_step, histogram; of any kernel: outputs that are inputs, or omitted, PyTorch's operators, what is refused."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
from forked import fork_python
from frameworks import needs_torch

from kernel_data import (  # isort: skip
    CASES, FRAMEWORKS, SHAPES, WAYS, blank, call, check, contiguous, made, memory_of, random, strided, that_fit, torch,
)
from oracle import numbas
from scipy import signal

from kernels.adamw import adamw_step
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
    check(axpy(2.0, x, y, out[::-1]), 2.0 * x + y)


@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES[:3])
def test_heat_step(dtype, layout, result, result_layout):
    for shape in that_fit(layout, [*SHAPES, (2, 9), (9, 2), (3, 9), (9, 3), (480, 641)]):
        u = layout(random(shape, dtype))
        expected = u.astype(np.float64)
        if min(shape) > 2:
            neighbours = expected[:-2, 1:-1] + expected[2:, 1:-1] + expected[1:-1, :-2] + expected[1:-1, 2:]
            expected[1:-1, 1:-1] += 0.2 * (neighbours - 4 * expected[1:-1, 1:-1])
        check(call(heat_step, u, 0.2, blank(shape, result, result_layout)), expected)


# ---- histogram ----
@pytest.mark.parametrize(("dtype", "layout"), [
    (np.float32, strided), (np.float64, contiguous), (np.int64, contiguous), (np.uint8, strided),
])  # fmt: skip
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
        np.testing.assert_array_equal(histogram(values, bins, low, high), np.histogram(values, bins, (low, high))[0])
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
    "axpy over y": (axpy, (2.0, LINE, OTHER), [OTHER]), "axpy over x": (axpy, (2.0, LINE, OTHER), [LINE]),
    "axpy over both": (axpy, (2.0, LINE, LINE), [LINE]),
    "axpy over what lies between the elements of x": (axpy, (2.0, PAIRS[::2], PAIRS[1::2]), [PAIRS[1::2]]),
    "softmax": (softmax, (GRID,), [GRID]), "softmax of a few rows": (softmax, (GRID[:3],), [GRID[:3]]),
    "softmax into other columns": (softmax, (WIDE[:, :7],), [WIDE[:, 8:]]), "log_softmax": (log_softmax, (GRID,), [GRID]),
    "layer_norm without parameters": (layer_norm, (GRID, None, None, 1e-5), [GRID]),
    "rms_norm": (rms_norm, (GRID, WEIGHT, 1e-5), [GRID]),
    "rotary of halves, positions before heads": (rotary, (BY_POSITION, COS, SIN, 0, False), [BY_POSITION]),
    "rotary of neighbours, positions before heads": (rotary, (BY_POSITION, COS, SIN, 0, True), [BY_POSITION]),
    "heat_step into other columns": (heat_step, (WIDE[:, :7], 0.1), [WIDE[:, 8:]]),
    "exclusive_scan": (exclusive_scan, (LENGTHS,), [LENGTHS]),
    "exclusive_scan of a few": (exclusive_scan, (LENGTHS[:500],), [LENGTHS[:500]]),
    "sosfilt over its signal and its state": (sosfilt, (SECTIONS, SIGNAL, STATE), [SIGNAL, STATE]),
}  # fmt: skip


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
    (axpy, (2.5, SHORT, SHORT), [((9,), F32)]), (softmax, (SMALL,), [((5, 7), F32)]),
    (log_softmax, (SMALL,), [((5, 7), F32)]), (layer_norm, (SMALL, SEVEN, SEVEN, 1e-5), [((5, 7), F32)]),
    (rms_norm, (SMALL, SEVEN, 1e-5), [((5, 7), F32)]),
    (rotary, (random((2, 3, 4, 6), F32), TURNS, TURNS, 0, False), [((2, 3, 4, 6), F32)]),
    (cross_entropy, (SMALL, TARGET, 0.1, -100), [((5,), F32)]),
    (sample, (SMALL, 3, 0.5, 1.0, np.linspace(0, 0.9, 5)), [((5,), I64)]),
    (histogram, (SHORT, 4, -1.0, 1.0), [((4,), I64)]), (heat_step, (SMALL, 0.2), [((5, 7), F32)]),
    (exclusive_scan, (np.arange(6),), [((6,), I64)]), (segment_sum, (SHORT, OFFSETS), [((3,), F32)]),
    (segment_sum, (SMALL, OFFSETS), [((3, 7), F32)]), (segment_mean, (SHORT, OFFSETS), [((3,), F32)]),
    (segment_max, (SHORT, OFFSETS, -100), [((3,), F32)]), (segment_min, (SHORT, OFFSETS, 100), [((3,), F32)]),
    (pairwise, (SMALL, SMALL[:3].copy()), [((5, 3), F32)]),
    (nearest, (SMALL, SMALL[:3].copy(), 2), [((5, 2), F32), ((5, 2), I64)]),
    (sosfilt, (SOS, random((3, 50), F32), None), [((3, 50), F32), ((2, 3, 2), F64)]),
    (csr_matvec, (INDPTR, INDICES, SHORT[:5].copy(), SEVEN), [((2,), F32)]),
]  # fmt: skip


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


def call_each_kernel() -> list:
    """Those of which something was compiled, or not even looked for on disk."""
    calls = [*(row[:2] for row in MADE), (run_length_encode, (np.ones(4),)), (run_length_decode, (np.ones(1), np.array([4])))]
    for kernel, args in calls:
        kernel(*args)
    return [kernel for kernel, _ in calls if kernel.stats.cache_misses or not kernel.stats.cache_hits]


def test_a_second_process_compiles_nothing():
    said = [fork_python("import test_kernels; print(test_kernels.call_each_kernel())").stdout for _ in range(2)]
    assert said[1] == "[]\n"


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
        *((ours(rows), theirs(rows, 1)) for rows in (x, extreme)
          for ours, theirs in ((softmax, torch.softmax), (log_softmax, torch.log_softmax))),
        (layer_norm(x, weight, bias), functional.layer_norm(x, (30,), weight, bias)),
        (layer_norm(extreme[:4], None, None), functional.layer_norm(extreme[:4], (3,))),
        (rms_norm(x, weight, 0.1), functional.rms_norm(x, (30,), weight, 0.1)),
        (rms_norm(extreme[:4], None, 0.1), functional.rms_norm(extreme[:4], (3,), None, 0.1)),
        (cross_entropy(x, target, 0.1, 7), functional.cross_entropy(x, target, **options)),
        (pairwise(x, weight[None]), torch.cdist(x, weight[None])),
        (exclusive_scan(target), torch.cumsum(target, 0) - target),
    ]:  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---- which memory arrays share ----
def test_overlap_is_never_missed():
    """Against NumPy's exact answers, on all pairs of random views; and most that are apart are seen to be."""
    generator, memory = np.random.default_rng(0), np.zeros(60)
    views = []
    for _ in range(60):
        start, stop = np.sort(generator.integers(0, 61, 2))
        views.append(memory[start : stop : generator.integers(1, 6)][:: generator.choice([-1, 1])])
        rows = int(generator.integers(1, 11))
        grid = memory[: 60 // rows * rows].reshape(rows, -1)
        top, left, width = generator.integers(0, rows), generator.integers(0, grid.shape[1]), generator.integers(0, 8)
        views.append(grid[top :: generator.integers(1, 3), left : left + width][:: generator.choice([-1, 1])])
    # seen to be apart, sharing memory
    pairs = [(apart(place(x), place(y)), np.shares_memory(x, y)) for x, y in itertools.product(views, views)]
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


# ---- what kernels refuse, and in which words: nothing has been written then ----
INF, NAN = math.inf, math.nan


def ints(*values):
    return np.array(values)


def adamw(**changed):
    lists = {name: [random(5, np.float64, i), random(5, np.float64, i + 9)] for i, name in enumerate(LISTS)}
    numbers = {"step": 1, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    return tuple((lists | numbers | changed).values())


def indices_with(bad, at, size):
    indices = np.zeros(size, np.int64)
    indices[at] = bad
    return indices


floats, doubles, longs = (lambda *shape, dtype=dtype: np.zeros(shape, dtype) for dtype in (np.float32, np.float64, np.int64))
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs")
AXPY, GRIDS = (2.0, floats(3), floats(3), floats(3)), (floats(3, 4), floats(3, 4))
ROTARY = (floats(1, 2, 3, 4), floats(4, 2), floats(4, 2), 0, False, floats(1, 2, 3, 4))
CROSS_ENTROPY, SEGMENTS = (floats(3, 4), longs(3), 0.0, -100, floats(3)), (floats(3), ints(0, 3), floats(1))
EXTREMA = (floats(3), ints(0, 3), 0, floats(1))
CSR = (ints(0, 1, 3), longs(3), doubles(3), doubles(2), doubles(2))
MANY = (np.arange(601) * 100, longs(60_000), doubles(60_000), doubles(400), doubles(600))  # read by several threads
NEAREST = (floats(4, 3), floats(5, 3), 2, floats(4, 2), longs(4, 2))
SAMPLE = (floats(2, 5), 3, 0.5, 1.0, doubles(2), longs(2))
SOSFILT = (SECTIONS, doubles(2, 9), doubles(3, 2, 2), doubles(2, 9), doubles(3, 2, 2))
# a kernel, arguments that it takes, and by parameter what it does not take; the message begins with the parameter's name
REFUSED = [
    (axpy, AXPY, {"x": [floats(4)], "y": [floats(2)]}), (softmax, GRIDS, {"x": [floats(2, 4), floats(4, 3)]}),
    (log_softmax, GRIDS, {"x": [floats(2, 4)]}), (heat_step, (floats(4, 4), 0.2, floats(4, 4)), {"u": [floats(4, 5)]}),
    (layer_norm, (floats(3, 4), None, None, 1.0, floats(3, 4)), {"x": [floats(2, 4)]}),
    (layer_norm, (floats(3, 4), floats(4), floats(4), 1.0, floats(3, 4)), {"weight": [floats(3)], "bias": [floats(5)]}),
    (rms_norm, (floats(3, 4), floats(4), 1e-5, floats(3, 4)), {"x": [floats(2, 4)], "weight": [floats(3)]}),
    (histogram, (doubles(3), 4, 0.0, 1e308, longs(4)), {"bins": [0], "out": [longs(3)], "low": [1e308, INF, NAN, -INF, -1e308]}),
    (histogram, (floats(3), 4, 0.0, 1.0, longs(4)), {"low": [-1e39]}),
    (rotary, ROTARY, {"x": [floats(1, 2, 3, 2)], "cos": [floats(4, 4)], "sin": [floats(3, 2)], "start": [2, -1]}),
    (rotary, (floats(1, 2, 3, 5), floats(4, 2), floats(4, 2), 0, False, floats(1, 2, 3, 5)), {"x": [floats(1, 2, 3, 5)]}),
    (cross_entropy, CROSS_ENTROPY,
     {"target": [longs(2), ints(0, 4, 0), ints(-1, 0, 0)], "smoothing": [1.1, -0.1, NAN], "out": [floats(4)]}),
    (cross_entropy, (floats(3, 0), longs(3), 0.0, -100, floats(3)), {"target": [longs(3)]}),
    (exclusive_scan, (doubles(3), doubles(3)), {"x": [doubles(4)]}), (segment_mean, SEGMENTS, {"offsets": [ints(0, 4)]}),
    (segment_sum, SEGMENTS, {"offsets": [longs(0), ints(1, 0), ints(0, 4)], "out": [floats(2)]}),
    (segment_sum, (floats(3, 2), ints(0, 3), floats(1, 2)), {"out": [floats(1, 3)]}),
    (segment_max, EXTREMA, {"offsets": [ints(-1, 3)]}), (segment_min, EXTREMA, {"offsets": [ints(0, 4)]}),
    (csr_matvec, CSR, {"data": [doubles(2)], "out": [doubles(3)], "indptr": [ints(0, 2, 1), ints(0, 1, 4)]}),
    (csr_matvec, CSR, {"indices": [indices_with(2, -1, 3), indices_with(-1, 0, 3)]}),
    (csr_matvec, MANY, {"indices": [indices_with(400, 1000, 60_000), indices_with(-(1 << 31), -1, 60_000)]}),
    (run_length_decode, (doubles(3), longs(3)),
     {"lengths": [longs(2), ints(1, -1, 1), ints(1 << 62, 1 << 62, 5), ints(*[-(1 << 63)] * 3)]}),
    (pairwise, (floats(4, 3), floats(5, 3), floats(4, 5)), {"y": [floats(5, 2)], "out": [floats(5, 4)]}),
    (nearest, NEAREST, {"y": [floats(5, 2)], "distances": [floats(3, 2), floats(4, 3)], "indices": [longs(4, 3)], "k": [6, -1]}),
    (sample, SAMPLE, {"logits": [floats(2, 0)], "k": [0], "p": [0.0, 1.01, NAN], "temperature": [0.0, -1.0, INF, NAN]}),
    (sample, SAMPLE, {"u": [doubles(3), *(np.array([0.5, u]) for u in (1.0, -0.1, NAN))], "out": [longs(3)]}),
    (sosfilt, SOSFILT, {"sos": [SECTIONS[:, 1:], 2 * SECTIONS], "x": [doubles(2, 8)], "initial": [doubles(3, 3, 2)]}),
    (sosfilt, SOSFILT, {"final": [doubles(3, 1, 2), doubles(2, 2, 2)]}),
    *((adamw_step, adamw(), {name: [[doubles(5)], [*[doubles(5)] * 2, doubles(1)], [doubles(5), doubles(4)]]})
      for name in LISTS[1:]),
    (adamw_step, adamw(), {"grads": [[doubles(5, 1), doubles(5, 1)]], "step": [0, -1], "lr": [-1e-9, NAN], "seed": [5]}),
    (adamw_step, adamw(), {"eps": [-1e-9, NAN], "weight_decay": [-1e-9, NAN]}),
    (adamw_step, adamw(), {"beta1": [-0.1, 1.0, NAN], "beta2": [-0.1, 1.0, NAN]}),
]  # fmt: skip
# Of types that no other call has: Python runs the kernel's own lines, and what they call, most of its checks, is compiled.
OF_TYPES = [
    (axpy, AXPY, {"out": [doubles(2, 2), longs(3)]}), (softmax, GRIDS, {"out": [longs(3, 4), floats(3)]}),
    (heat_step, (floats(4, 4), 0.2, floats(4, 4)), {"out": [longs(4, 4)]}), (rotary, ROTARY, {"out": [longs(1, 2, 3, 4)]}),
    (histogram, (doubles(3), 3, 0.0, 1.0, longs(3)), {"x": [doubles(3, 4)], "out": [np.zeros(3, np.int8), doubles(3)]}),
    (cross_entropy, CROSS_ENTROPY, {"target": [floats(3)], "out": [longs(3)]}),
    (exclusive_scan, (longs(2), longs(2)), {"out": [longs(2, 2), np.zeros(2, np.int32), np.zeros(2, np.uint64)]}),
    (exclusive_scan, (doubles(2), doubles(2)), {"out": [longs(2)]}),
    (segment_sum, SEGMENTS, {"x": [floats(3, 2, 2)], "offsets": [floats(2)], "out": [longs(1)]}),
    (segment_sum, (longs(1), ints(0, 1), longs(1)), {"out": [np.zeros(1, np.int32)]}),
    (segment_mean, (longs(1), ints(0, 1), doubles(1)), {"out": [longs(1)]}),
    (segment_max, (floats(1), ints(0, 1), 0, floats(1)), {"out": [doubles(1)]}),
    (segment_max, (longs(1), ints(0, 1), 0, longs(1)), {"initial": [0.5, -INF]}),
    (csr_matvec, CSR, {"indptr": [doubles(3), longs(1, 3)], "indices": [doubles(3)], "x": [doubles(2, 1)], "out": [longs(2)]}),
    (run_length_encode, (doubles(3),), {"x": [doubles(2, 2)]}),
    (run_length_decode, (doubles(3), longs(3)), {"values": [doubles(2, 2)], "lengths": [doubles(3)]}),
    (pairwise, (floats(4, 3), floats(5, 3), floats(4, 5)), {"out": [longs(4, 5)]}),
    (nearest, NEAREST, {"distances": [longs(4, 2)], "indices": [np.zeros((4, 2), np.int32)]}),
    (sample, SAMPLE, {"out": [np.zeros(2, np.int32)]}),
    (sosfilt, SOSFILT, {"out": [longs(2, 9)], "final": [longs(3, 2, 2)]}),
    (adamw_step, adamw(), {"params": [[longs(5)] * 2], "exp_avgs": [[floats(5)] * 2], "exp_avg_sqs": [[longs(5)] * 2]}),
]  # fmt: skip


def each_refused(table):
    """A kernel, arguments, and how the message begins."""
    for kernel, valid, wrong in table:
        names = kernel.py_func.__code__.co_varnames
        for name, values in wrong.items():
            for value in values:
                arguments = dict(zip(names, valid, strict=False)) | {name: value}
                yield kernel, tuple(arguments.values()), rf"{name}(, \w+)?: "


# ---- memory ----
SINGLES, DOUBLES, LONGS = floats(1000), doubles(400), longs(400)
SQUARE = SINGLES[:400].reshape(20, 20)
BITS = floats(64)
BITS_AS_DOUBLES, BITS_AS_LONGS = BITS.view(np.float64), BITS.view(np.int64)
COEFFICIENTS = np.concatenate([SECTIONS.ravel(), DOUBLES])


def at(start, *shape, of=SINGLES):
    return of[start : start + math.prod(shape)].reshape(shape)


def expanded(*shape, dtype=np.float64):
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, [0] * len(shape))


def spread(*shape, dtype=np.float64):
    return strided(np.zeros(shape, dtype))


ROW, POINTS = floats(5, 3), spread(5, 3, dtype=np.int32)
ROTATED = at(0, 1, 1, 3, 16)
X, INITIAL, OUT, FINAL = doubles(2, 9), doubles(3, 2, 2), doubles(2, 9), doubles(3, 2, 2)
OVERLAPPING = [
    (axpy, (2.0, SINGLES[:-1], SINGLES[:-1], SINGLES[1:]), "out: overlaps x or y"),
    (axpy, (2.0, SINGLES[:50], SINGLES[1:51], SINGLES[:50]), "out: overlaps x or y"),
    (softmax, (SQUARE[:-1], SQUARE[1:]), "out: overlaps x"),
    (layer_norm, (floats(20, 20), SQUARE[3], floats(20), 1.0, SQUARE), "out: overlaps weight"),
    (layer_norm, (floats(20, 20), floats(20), SQUARE[3], 1.0, SQUARE), "out: overlaps bias"),
    (rms_norm, (SQUARE, SQUARE[3], 1e-5, SQUARE), "out: overlaps weight"),
    (heat_step, (SQUARE, 0.2, SQUARE), "out: overlaps u"),
    (heat_step, (SQUARE[1:], 0.2, SQUARE[:-1]), "out: overlaps u"),
    (histogram, (LONGS, 10, 0, 1, LONGS[:10]), "out: overlaps x"),
    (rotary, (ROTATED, floats(3, 8), floats(3, 8), 0, False, at(16, 1, 1, 3, 16)), "out: overlaps x"),
    (rotary, (floats(1, 1, 3, 16), at(20, 3, 8), floats(3, 8), 0, False, ROTATED), "out: overlaps cos or sin"),
    (rotary, (floats(1, 1, 3, 16), floats(3, 8), at(20, 3, 8), 0, False, ROTATED), "out: overlaps cos or sin"),
    (cross_entropy, (at(0, 5, 20), longs(5), 0.0, -100, SINGLES[45:50]), "out: overlaps"),
    (exclusive_scan, (DOUBLES[:-1], DOUBLES[1:]), "out: overlaps x without"),
    (exclusive_scan, (LONGS[1:], LONGS[:-1]), "out: overlaps x without"),
    (segment_sum, (SINGLES[:30], longs(4), SINGLES[:3]), "out: overlaps x or offsets"),
    (segment_sum, (LONGS[20:], LONGS[1:5], LONGS[3:6]), "out: overlaps x or offsets"),
    (csr_matvec, (longs(3), longs(3), doubles(3), DOUBLES[:2], DOUBLES[1:3]), "out: overlaps data or x"),
    (csr_matvec, (longs(3), longs(3), DOUBLES[:3], doubles(2), DOUBLES[2:4]), "out: overlaps data or x"),
    (csr_matvec, (BITS_AS_LONGS[:3], longs(0), doubles(0), doubles(2), BITS_AS_DOUBLES[1:3]), "out: overlaps indptr"),
    (pairwise, (at(0, 4, 3), at(12, 5, 3), at(10, 4, 5)), "out: overlaps x or y"),
    (nearest, (at(0, 4, 3), at(12, 5, 3), 2, at(8, 4, 2), longs(4, 2)), "distances: overlaps x or y"),
    (nearest, (at(0, 4, 3, of=BITS), ROW, 2, floats(4, 2), at(0, 4, 2, of=BITS_AS_LONGS)), "indices: overlaps x or y"),
    (nearest, (ROW[:4], ROW, 2, at(2, 4, 2, of=BITS), at(0, 4, 2, of=BITS_AS_LONGS)), "indices: overlaps distances"),
    (sample, (at(0, 4, 4, of=BITS), 2, 0.5, 1.0, doubles(4), BITS_AS_LONGS[2:6]), "out: overlaps logits or u"),
    (sample, (floats(4, 4), 2, 0.5, 1.0, BITS_AS_DOUBLES[8:12], BITS_AS_LONGS[9:13]), "out: overlaps logits or u"),
    (sosfilt, (SECTIONS, at(1, 2, 9, of=DOUBLES), INITIAL, at(0, 2, 9, of=DOUBLES), FINAL), "out: overlaps x without"),
    (sosfilt, (at(0, 3, 6, of=COEFFICIENTS), X, INITIAL, at(9, 2, 9, of=COEFFICIENTS), FINAL), "out: overlaps sos or final"),
    (sosfilt, (SECTIONS, X, INITIAL, at(0, 2, 9, of=DOUBLES), at(10, 3, 2, 2, of=DOUBLES)), "out: overlaps sos or final"),
    (sosfilt, (at(0, 3, 6, of=COEFFICIENTS), X, INITIAL, OUT, at(9, 3, 2, 2, of=COEFFICIENTS)), "final: overlaps sos or x"),
    (sosfilt, (SECTIONS, at(0, 2, 9, of=DOUBLES), INITIAL, OUT, at(9, 3, 2, 2, of=DOUBLES)), "final: overlaps sos or x"),
    (sosfilt, (SECTIONS, X, at(10, 3, 2, 2, of=DOUBLES), at(0, 2, 9, of=DOUBLES), FINAL), "out: overlaps initial"),
    (sosfilt, (SECTIONS, X, at(1, 3, 2, 2, of=DOUBLES), OUT, at(0, 3, 2, 2, of=DOUBLES)), "final: overlaps initial without"),
    *((adamw_step, adamw(**{one: [doubles(5), DOUBLES[:5]], other: [doubles(5), DOUBLES[4:9]]}), f"{names}: one overlaps")
      for (one, other), names in zip(
          itertools.combinations(LISTS, 2), ["params"] * 3 + ["exp_avgs, exp_avg_sqs"] * 2 + ["exp_avgs"], strict=True)),
]  # fmt: skip
# Outputs of which several elements share memory.
EACH_ELEMENT = [
    (axpy, (2.0, spread(6), spread(6), expanded(6)), "out: each element"),
    (softmax, (spread(6, 6), expanded(6, 6)), "out: each element"),
    (heat_step, (spread(6, 6), 0.1, expanded(6, 6)), "out: each element"),
    (histogram, (spread(9, dtype=np.float32), 6, 0.0, 1.0, expanded(6, dtype=np.int64)), "out: each element"),
    (rotary, (spread(1, 1, 6, 6), doubles(6, 3), doubles(6, 3), 0, False, expanded(1, 1, 6, 6)), "out: each element"),
    (cross_entropy, (spread(6, 6), np.zeros(6, np.int32), 0.0, -100, expanded(6)), "out: each element"),
    (exclusive_scan, (spread(2, dtype=np.uint8), expanded(2, dtype=np.int64)), "out: each element"),
    (segment_sum, (spread(2), np.zeros(3, np.int32), expanded(2)), "out: each element"),
    (csr_matvec, (spread(3, dtype=int), spread(0, dtype=int), *[spread(n, dtype=np.float32) for n in (0, 2)],
                  expanded(2, dtype=np.float32)), "out: each element"),
    (pairwise, (POINTS[:4], POINTS[:2], expanded(4, 2)), "out: each element"),
    (nearest, (POINTS[:4], POINTS, 2, expanded(4, 2), spread(4, 2, dtype=int)), "distances: each element"),
    (nearest, (POINTS[:4], POINTS, 2, spread(4, 2), expanded(4, 2, dtype=int)), "indices: each element"),
    (sample, (spread(6, 5), 2, 0.5, 1.0, spread(6), expanded(6, dtype=np.int64)), "out: each element"),
    (sosfilt, (SECTIONS, spread(2, 9), INITIAL, expanded(2, 9), spread(3, 2, 2)), "out: each element"),
    (sosfilt, (SECTIONS, spread(2, 9), INITIAL, spread(2, 9), expanded(3, 2, 2)), "final: each element"),
    *((adamw_step, adamw(**{each: [expanded(4) if each == name else spread(4)] for each in LISTS}), f"{name}: each element")
      for name in ("params", "exp_avgs", "exp_avg_sqs")),
]  # fmt: skip


def as_sentence(row):
    return f"{row[0].__name__} refuses {re.sub('[(].*', '', row[2])}"


@contextlib.contextmanager
def refused(args, message):
    """What is called raises a ValueError that begins with `message`, and has written nothing."""
    before = [array.copy() for array in memory_of(args)]
    with pytest.raises(ValueError, match=f"^({message})") as found:
        yield found
    for array, values in zip(memory_of(args), before, strict=True):
        np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("row", [*each_refused(REFUSED), *OVERLAPPING, EACH_ELEMENT[0]], ids=as_sentence)
def test_refused(row):
    """By compiled code; or before, because its output's notation does not fit, in which case compiled code would, too."""
    kernel, args, message = row
    unfit = rf"{kernel.__name__}\(\): (argument .*(its shape|dimensions)|its output .* cannot be made)"
    for way in WAYS:
        with refused(args, f"{message}|{unfit}") as found:
            kernel(*(made(framework, value) for framework, value in zip(itertools.cycle(way), args, strict=False)))
    if re.match(unfit, str(found.value)):
        with refused(args, message):
            numbas(kernel)(*args)


@pytest.mark.parametrize("row", [*each_refused(OF_TYPES), *EACH_ELEMENT[1:]], ids=as_sentence)
def test_refused_before_anything_is_written(row):
    kernel, args, message = row
    with refused(args, message):
        kernel.py_func(*args)


def test_an_output_that_is_made_is_refused_as_one_that_is_given():
    with pytest.raises(ValueError, match=r"^out: its dtype must be floating"):
        softmax(np.ones((2, 3), np.int32))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_memory_for_the_result(framework):
    with pytest.raises(MemoryError):
        run_length_decode(made(framework, doubles(1)), made(framework, ints(1 << 50)))
