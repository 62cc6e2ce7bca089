"""The kernels of ``kernels/`` against PyTorch's own operators; without PyTorch, against the formula in NumPy."""

import itertools
import math

import numpy as np
import pytest
from kernel_data import (
    DTYPES,
    FRAMEWORKS,
    MATRICES,
    MIXED,
    RTOL,
    SHAPES,
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

from kernels.axpy import axpy
from kernels.heat import heat_step
from kernels.histogram import histogram
from kernels.layer_norm import layer_norm
from kernels.overlap import apart, apart_or_same, injective, place
from kernels.softmax import softmax


def softmax_oracle(x):
    if torch is not None:
        return torch.softmax(torch.from_numpy(np.ascontiguousarray(x)), dim=1).numpy()
    if x.shape[1] == 0:
        return x.copy()
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)


def layer_norm_oracle(x, weight=None, bias=None, eps=1e-5):
    if torch is not None and x.shape[1]:
        x, weight, bias = (None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in (x, weight, bias))
        return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, eps).numpy()
    if x.shape[1] == 0:
        return x.copy()
    mean = x.mean(axis=1, keepdims=True, dtype=np.float64)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    normal = (x - mean) / np.sqrt(variance + eps)
    return normal * (1 if weight is None else weight) + (0 if bias is None else bias)


def heat_oracle(u, r):
    expected = u.copy()
    if min(u.shape) < 3:
        return expected
    if torch is not None:
        stencil = torch.tensor([[0, r, 0], [r, 1 - 4 * r, r], [0, r, 0]], dtype=torch.from_numpy(u[:0]).dtype)
        grid = torch.from_numpy(np.ascontiguousarray(u))
        expected[1:-1, 1:-1] = torch.nn.functional.conv2d(grid[None, None], stencil[None, None])[0, 0].numpy()
    else:
        inner = u[1:-1, 1:-1]
        expected[1:-1, 1:-1] += r * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * inner)
    return expected


def axpy_oracle(a, x, y):
    if torch is not None:
        return torch.add(torch.from_numpy(y.copy()), torch.from_numpy(x.copy()), alpha=a).numpy()
    return a * x + y


# ---- axpy ----


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1023, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_axpy(framework, dtype, size):
    x, y, out = random(size, dtype), random(size, dtype, seed=1), blank(size, dtype)
    expected = axpy_oracle(2.5, x, y)
    axpy(2.5, make(framework, x), make(framework, y), make(framework, out))
    check(out, expected)


@pytest.mark.parametrize("frameworks", MIXED)
def test_axpy_mixes_frameworks_dtypes_and_layouts(frameworks):
    x, y = strided(random(1001, np.float32)), strided(random(1001, np.float64, seed=1))
    out = blank(1001, np.float64, strided)
    axpy(-0.5, make(frameworks[0], x), make(frameworks[1], y), make(frameworks[0], out))
    check(out, -0.5 * x.astype(np.float64) + y)
    assert np.isnan(out.base[0::3]).all() and np.isnan(out.base[2::3]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_axpy_of_integers_and_complex_numbers(framework):
    x, y, out = np.arange(9), np.ones(9), blank(9, np.float64)
    axpy(3, make(framework, x), make(framework, y), make(framework, out))
    np.testing.assert_array_equal(out, 3.0 * np.arange(9) + 1)
    z, w = random(9, np.float64) + 1j * random(9, np.float64, seed=1), np.ones(9, np.complex128)
    out = blank(9, np.complex128)
    axpy(2j, make(framework, z), make(framework, w), make(framework, out))
    np.testing.assert_allclose(out, 2j * z + w, rtol=1e-14)


def test_axpy_negative_strides():
    x, y, out = random(10, np.float64)[::-1], random(10, np.float64, seed=1), blank(10, np.float64)
    axpy(2.0, x, y, out[::-1])
    check(out[::-1], 2.0 * x + y)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_axpy_in_place(framework):
    x, y = random(100, np.float64), random(100, np.float64, seed=1)
    expected = axpy_oracle(2.0, x, y)
    in_y = make(framework, y.copy())
    axpy(2.0, make(framework, x), in_y, in_y)
    check(in_y, expected)
    in_x = make(framework, x.copy())
    axpy(2.0, in_x, make(framework, y), in_x)
    check(in_x, expected)
    both = make(framework, x.copy())
    axpy(2.0, both, both, both)
    check(both, 3 * x)
    interleaved = np.stack([x, y], axis=1).reshape(-1)
    even, odd = make(framework, interleaved[0::2]), make(framework, interleaved[1::2])
    axpy(2.0, even, odd, odd)
    check(odd, expected)
    check(even, x)


# ---- softmax ----


@pytest.mark.parametrize(("dtype", "layout"), MATRICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_softmax(framework, dtype, layout):
    for shape in that_fit(layout, [*SHAPES, (1024, 1000)]):
        x, out = layout(8 * random(shape, dtype)), blank(shape, dtype, layout)
        softmax(make(framework, x), make(framework, out))
        check(out, softmax_oracle(x), scale=1e-2)
        if shape[1]:
            np.testing.assert_allclose(out.sum(axis=1, dtype=np.float64), 1, rtol=RTOL[np.dtype(dtype)])


@pytest.mark.parametrize("frameworks", MIXED)
def test_softmax_mixes_frameworks_dtypes_and_layouts(frameworks):
    x, out = random((65, 127), np.float32), blank((65, 127), np.float64, transposed)
    softmax(make(frameworks[0], x), make(frameworks[1], out))
    check(out, softmax_oracle(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_softmax_of_extreme_values(framework, dtype):
    big, inf, nan = np.finfo(dtype).max, math.inf, math.nan
    finite = [[1e4, 1e4 - 1, 0], [big, big, -big], [-big, -big, -big]]
    x = np.array([*finite, [-inf, 0, 1], [-inf] * 3, [inf, 0, 1], [nan, 0, 1], [0, 1, nan]], dtype)
    out = blank(x.shape, dtype)
    softmax(make(framework, x), make(framework, out))
    sigmoid = 1 / (1 + math.exp(-1.0))
    expected = [[sigmoid, 1 - sigmoid, 0], [0.5, 0.5, 0], [1 / 3] * 3, [0, 1 - sigmoid, sigmoid]] + [[nan] * 3] * 4
    check(out, np.array(expected))
    check(out, softmax_oracle(x))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_softmax_in_place(framework):
    for shape in [(3, 5), (128, 128)]:
        x = random(shape, np.float64)
        same = make(framework, x.copy())
        softmax(same, same)
        check(same, softmax_oracle(x))


# ---- layer norm ----


@pytest.mark.parametrize(("dtype", "layout"), MATRICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layer_norm(framework, dtype, layout):
    for shape in that_fit(layout, [*SHAPES, (512, 768)]):
        x, out = layout(random(shape, dtype)), blank(shape, dtype, layout)
        weight, bias = random(shape[1], dtype, seed=1), random(shape[1], dtype, seed=2)
        layer_norm(*(make(framework, a) for a in (x, weight, bias)), 1e-5, make(framework, out))
        check(out, layer_norm_oracle(*(a.astype(np.float64) for a in (x, weight, bias))), scale=10)
        if shape[1] > 2:  # between two close values PyTorch's own float32 differs in the fifth digit
            check(out, layer_norm_oracle(x, weight, bias), scale=10)


@pytest.mark.parametrize("frameworks", MIXED)
def test_layer_norm_without_weight_and_bias(frameworks):
    x, weight = random((40, 30), np.float32), random(30, np.float64, seed=1)
    out = blank(x.shape, np.float32)
    tensor, result = make(frameworks[0], x), make(frameworks[1], out)
    layer_norm(tensor, None, None, 1e-5, result)
    check(out, layer_norm_oracle(x), scale=10)
    layer_norm(tensor, make(frameworks[1], weight), None, 0.5, result)
    check(out, layer_norm_oracle(x, weight.astype(np.float32), None, eps=0.5), scale=10)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layer_norm_of_values_far_from_zero(framework):
    """The one-pass formula loses every digit here: the mean is 1e8 times the deviation."""
    x = 1e8 + random((4, 1000), np.float64)
    out = blank(x.shape, np.float64)
    layer_norm(make(framework, x), None, None, 1e-5, make(framework, out))
    shifted = x - 1e8
    np.testing.assert_allclose(out, layer_norm_oracle(shifted), atol=1e-6)
    x = (1e4 + random((4, 1000), np.float64)).astype(np.float32)
    out = blank(x.shape, np.float32)
    layer_norm(make(framework, x), None, None, 1e-5, make(framework, out))
    check(out, layer_norm_oracle(x.astype(np.float64)), scale=1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layer_norm_of_constant_and_non_finite_rows(framework):
    x = np.array([[2.0] * 4, [1, 2, 3, math.nan], [1, 2, 3, math.inf]])
    bias, out = np.arange(4.0), blank(x.shape, np.float64)
    layer_norm(make(framework, x), None, make(framework, bias), 1e-5, make(framework, out))
    np.testing.assert_array_equal(out, [[0, 1, 2, 3], [math.nan] * 4, [math.nan] * 4])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layer_norm_in_place(framework):
    for shape in [(3, 5), (256, 128)]:
        x = random(shape, np.float64)
        same = make(framework, x.copy())
        layer_norm(same, None, None, 1e-5, same)
        check(same, layer_norm_oracle(x), scale=10)


# ---- histogram ----


def counts_of(framework, x, low, high, bins, layout=contiguous):
    out = blank(bins, np.int64, layout)
    histogram(make(framework, x), bins, low, high, make(framework, out))
    return out


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (np.float32, strided),
        (np.float64, contiguous),
        (np.int64, contiguous),
        (np.uint8, strided),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_histogram(framework, dtype, layout):
    bounds = [(-3, 3), (0, 11)] if dtype is np.int64 else [(-3.0, 3.0), (0.0, 11.0), (0.1, 0.7)]
    for size, bins in that_fit(layout, itertools.product([0, 1, 2, 1001, 300_007], [1, 7, 100])):
        values = random(size, np.float64) * 1.5
        x = layout((values if np.dtype(dtype).kind == "f" else abs(values * 20)).astype(dtype))
        for low, high in bounds:
            expected, _ = np.histogram(x, bins, (low, high))
            np.testing.assert_array_equal(counts_of(framework, x, low, high, bins, layout), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("low", "high", "bins"), [(0.0, 1.0, 10), (-1.0, 2.0, 7), (0.1, 0.7, 60), (1e6, 1e6 + 1, 3), (-1e-30, 1e-30, 5)]
)
def test_histogram_decides_at_the_edges_as_numpy_does(framework, dtype, low, high, bins):
    """Every edge, and the next number to either side of it, is counted in the bin where numpy.histogram counts it."""
    edges = np.histogram_bin_edges(np.empty(0, dtype), bins, (low, high)).astype(dtype)
    values = np.concatenate([edges, np.nextafter(edges, dtype(-np.inf)), np.nextafter(edges, dtype(np.inf))])
    expected, _ = np.histogram(values, bins, (low, high))
    counts = counts_of(framework, values, low, high, bins)
    np.testing.assert_array_equal(counts, expected)
    assert counts_of(framework, edges[-1:], low, high, bins)[-1] == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_histogram_ignores_what_is_outside(framework):
    x = np.array([math.nan, math.inf, -math.inf, -1e300, 1e300, -0.001, 1.001, 0.0, 1.0, 0.5, -0.0])
    np.testing.assert_array_equal(counts_of(framework, x, 0.0, 1.0, 2), [2, 2])


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_histogram_agrees_with_histc():
    x = torch.from_numpy(random(200_000, np.float64))
    out = torch.empty(64, dtype=torch.int64)
    histogram(x, 64, -2.0, 2.0, out)
    assert torch.equal(out, torch.histc(x, 64, -2.0, 2.0).to(torch.int64))


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf), (-1e308, 1e308)])
def test_histogram_refuses_bounds(bounds):
    with pytest.raises(ValueError, match="low, high"):
        histogram(np.zeros(3), 4, *bounds, np.zeros(4, np.int64))


def test_histogram_refuses_bounds_that_are_infinite_as_float32():
    with pytest.raises(ValueError, match="low, high: must be finite in"):
        histogram(np.zeros(3, np.float32), 4, -1e39, 1.0, np.zeros(4, np.int64))


# ---- heat ----


@pytest.mark.parametrize(("dtype", "layout"), MATRICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_heat_step(framework, dtype, layout):
    for shape in that_fit(layout, [*SHAPES, (2, 9), (9, 2), (3, 9), (9, 3), (480, 641)]):
        u, out = layout(random(shape, dtype)), blank(shape, dtype, layout)
        heat_step(make(framework, u), 0.2, make(framework, out))
        check(out, heat_oracle(u, 0.2))


@pytest.mark.parametrize("frameworks", MIXED)
def test_heat_step_mixes_frameworks_dtypes_and_layouts(frameworks):
    u, out = np.arange(30 * 40, dtype=np.int32).reshape(30, 40) ** 2 % 101, blank((30, 40), np.float64, transposed)
    heat_step(make(frameworks[0], u), 0.25, make(frameworks[1], out))
    check(out, heat_oracle(u.astype(np.float64), 0.25))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_heat_step_decays_a_sine_wave_exactly(framework):
    """sin(pi x) sin(pi y) is an eigenvector of the step; see the book named in the module for its eigenvalue."""
    n, r, steps = 64, 0.25, 40
    line = np.sin(np.pi * np.arange(n + 1) / n)
    wave = np.outer(line, line)
    now, then = make(framework, wave.copy()), make(framework, np.zeros_like(wave))
    for _ in range(steps):
        heat_step(now, r, then)
        now, then = then, now
    eigenvalue = 1 - 8 * r * np.sin(np.pi / (2 * n)) ** 2
    np.testing.assert_allclose(np.asarray(now), eigenvalue**steps * wave, atol=1e-13)


# ---- what is refused ----


REFUSED = {
    "axpy x longer": (axpy, (2.0, zeros(4), zeros(3), zeros(3)), "x: its shape"),
    "axpy x shorter": (axpy, (2.0, zeros(2), zeros(3), zeros(3)), "x: its shape"),
    "axpy y shorter": (axpy, (2.0, zeros(3), zeros(2), zeros(3)), "y: its shape"),
    "axpy y empty": (axpy, (2.0, zeros(3), zeros(0), zeros(3)), "y: its shape"),
    "axpy matrices": (axpy, (2.0, zeros(2, 2), zeros(2, 2), zeros(2, 2)), "out: must have one"),
    "axpy integer out": (axpy, (2.0, zeros(3), zeros(3), zeros(3, dtype=np.int64)), "out: its dtype"),
    "softmax rows": (softmax, (zeros(3, 4), zeros(2, 4)), "x: its shape"),
    "softmax columns": (softmax, (zeros(3, 4), zeros(3, 5)), "x: its shape"),
    "softmax transposed": (softmax, (zeros(3, 4), zeros(4, 3)), "x: its shape"),
    "softmax integer out": (softmax, (zeros(3, 4), zeros(3, 4, dtype=np.int64)), "out: its dtype"),
    "layer norm rows": (layer_norm, (zeros(3, 4), None, None, 1.0, zeros(2, 4)), "x: its shape"),
    "layer norm weight": (layer_norm, (zeros(3, 4), zeros(3), zeros(4), 1.0, zeros(3, 4)), "weight: its shape"),
    "layer norm bias": (layer_norm, (zeros(3, 4), None, zeros(5), 1.0, zeros(3, 4)), "bias: its shape"),
    "histogram matrix": (histogram, (zeros(3, 4), 3, 0.0, 1.0, zeros(3, dtype=np.int64)), "x: must have one"),
    "histogram no bins": (histogram, (zeros(3), 0, 0.0, 1.0, zeros(0, dtype=np.int64)), "bins: must be"),
    "histogram bins": (histogram, (zeros(3), 4, 0.0, 1.0, zeros(3, dtype=np.int64)), "out: its shape"),
    "histogram narrow out": (histogram, (zeros(3), 3, 0.0, 1.0, zeros(3, dtype=np.int8)), "out: its dtype"),
    "histogram floating out": (histogram, (zeros(3), 3, 0.0, 1.0, zeros(3)), "out: its dtype"),
    "heat rows": (heat_step, (zeros(5, 4), 0.2, zeros(4, 4)), "u: its shape"),
    "heat columns": (heat_step, (zeros(4, 4), 0.2, zeros(4, 5)), "u: its shape"),
    "heat integer out": (heat_step, (zeros(4, 4), 0.2, zeros(4, 4, dtype=np.int64)), "out: its dtype"),
}


OF_TYPES = ["axpy integer out", "softmax integer out", "histogram floating out", "heat integer out"]
"""Those that no other call has the types of; "histogram narrow out", which is another, is compiled."""


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework, case):
    check_refused(framework, *REFUSED[case], compiled=case not in OF_TYPES)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    line = make(framework, random(101, np.float64))
    grid, other = (make(framework, random((21, 20), np.float32, seed)) for seed in (0, 1))
    row = make(framework, random(20, np.float32))
    counts = make(framework, np.arange(101))
    refused = [
        (axpy, (2.0, line[:-1], line[:-1], line[1:])),
        (axpy, (2.0, line[:50], line[1:51], line[:50])),
        (softmax, (grid[:-1], grid[1:])),
        (layer_norm, (grid[1:], None, None, 1.0, grid[:-1])),
        (layer_norm, (other, grid[3], row, 1.0, grid)),
        (layer_norm, (other, row, grid[3], 1.0, grid)),
        (histogram, (counts, 10, 0, 1, counts[:10])),
        (heat_step, (grid, 0.2, grid)),
        (heat_step, (grid[:, 1:], 0.2, grid[:, :-1])),
    ]
    for kernel, args in refused:
        before = [np.asarray(tensor).copy() for tensor in (line, grid, counts)]
        with pytest.raises(ValueError, match=r"^out: overlaps"):
            kernel(*args)
        for tensor, copy in zip((line, grid, counts), before, strict=True):
            np.testing.assert_array_equal(np.asarray(tensor), copy)


@pytest.mark.skipif(torch is None, reason="NumPy's expanded arrays are readonly")
def test_expanded_outputs_are_refused():
    expanded_row, expanded_column = torch.zeros(1, 6).expand(6, 6), torch.zeros(6, 1).expand(6, 6)
    x, line = torch.randn(6, 12)[:, ::2], torch.randn(6)
    for out in (expanded_row, expanded_column):
        for kernel, args in [(softmax, (x, out)), (layer_norm, (x, line, line, 1.0, out)), (heat_step, (x, 0.1, out))]:
            with pytest.raises(ValueError, match=r"^out: each element"):
                kernel(*args)
    line, double = x[0], x.double()[:, 0]
    with pytest.raises(ValueError, match=r"^out: each element"):
        axpy(2.0, line, double, torch.zeros(1, dtype=torch.float64).expand(6))
    with pytest.raises(ValueError, match=r"^out: each element"):
        histogram(line, 6, 0.0, 1.0, torch.zeros(1, dtype=torch.int64).expand(6))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_expanded_inputs_are_fine(framework):
    row = random(6, np.float32)
    x = torch.from_numpy(row).expand(4, 6) if framework == "torch" else np.broadcast_to(row, (4, 6))
    out = blank((4, 6), np.float32, strided)
    softmax(x, make(framework, out))
    check(out, softmax_oracle(np.tile(row, (4, 1))))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_halves_of_one_matrix_are_apart(framework):
    """Input and output may be different columns, or different planes, of one array."""
    both = random((50, 14), np.float32)
    x = both[:, :7].copy()
    softmax(make(framework, both[:, :7]), make(framework, both[:, 7:]))
    check(both[:, 7:], softmax_oracle(x))
    np.testing.assert_array_equal(both[:, :7], x)
    planes = random((6, 5, 2), np.float32)
    u = planes[..., 0].copy()
    heat_step(make(framework, planes[..., 0]), 0.1, make(framework, planes[..., 1]))
    check(planes[..., 1], heat_oracle(u, 0.1))


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
    seen_apart = really_apart = 0
    for x, y in itertools.product(views, views):
        shared = np.shares_memory(x, y)
        really_apart += not shared
        found = apart(place(x), place(y))
        seen_apart += found
        assert not (found and shared)
    assert seen_apart > 0.9 * really_apart
    for x in views:
        assert injective(place(x)) and apart_or_same(place(x), place(x))


def test_injective():
    memory = np.zeros(40)
    strided_views = np.lib.stride_tricks.as_strided
    for shape, steps, expected in [
        ((4,), (0,), False),
        ((1,), (0,), True),
        ((0,), (0,), True),
        ((4,), (-1,), True),
        ((4, 5), (5, 1), True),
        ((4, 5), (1, 4), True),
        ((4, 5), (4, 1), False),
        ((4, 5), (0, 1), False),
        ((4, 5), (1, 1), False),
        ((1, 5), (0, 1), True),
        ((0, 5), (0, 0), True),
        ((4, 3), (1, 12), True),
    ]:
        view = strided_views(memory[10:], shape, [8 * step for step in steps])
        assert injective(place(view)) == expected, (shape, steps)
