"""The kernels of ``kernels/gpu`` on a device: against PyTorch in their own arithmetic, and histograms count for count.

Each pair of dtype and layout is a compilation, as is each way to split a row: there are as many here as differ in what they do.
"""

import functools
import importlib
import math

import numpy as np
import pytest

pytestmark = [pytest.mark.both_packages, pytest.mark.gpu]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
LONG = 20_001
"""A row that is read twice."""


@pytest.fixture(scope="module")
def made(package):
    """A kernel of a name, the same for all tests."""
    return functools.cache(lambda name: importlib.import_module(f"kernels.gpu.{name}").make(package))


def computed(torch, x):
    """As the kernels compute with it."""
    return x if x.dtype == torch.float64 else x.float()


def check(torch, out, expected):
    torch.testing.assert_close(out, expected.to(out.dtype), equal_nan=True)


def noise(torch, dtype, *shape):
    return torch.randn(shape, device="cuda").to(getattr(torch, dtype))


def heated(u, r):
    found = u.clone()
    found[1:-1, 1:-1] += r * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
    return found


def rms_normed(x, weight):
    return x * (x**2).mean(-1, keepdim=True).add(1e-5).rsqrt() * weight


WORK = {  # of tensors x and y: what a kernel gets before its output, and what it computes
    "axpy": lambda torch, x, y: ((2.5, x, y), 2.5 * computed(torch, x) + computed(torch, y)),
    "heat": lambda torch, x, _: ((x, 0.2), heated(computed(torch, x), 0.2)),
    "rms_norm": lambda torch, x, y: ((x, y, 1e-5), rms_normed(x.double(), y.double())),
    "softmax": lambda torch, x, _: ((x,), computed(torch, x).softmax(-1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_axpy(torch, made, dtype):
    for count in (0, 1, 511, 4097):
        for step in (1, 3) if dtype == "float32" else (1,):
            x, y = (noise(torch, dtype, count * step)[::step] for _ in range(2))
            given, expected = WORK["axpy"](torch, x, y)
            for out in (torch.full_like(x, 7), x):
                made("axpy")(*given, out)
                check(torch, out, expected)


SHAPES = {
    "float32": [(1, 1), (33, 257), (5, 8201), (3, LONG)], "float64": [(33, 257), (3, LONG)], "float16": [(33, 257)],
    "bfloat16": [(3, LONG)],
}  # fmt: skip
"""Of rows that one warp has, that a block keeps, and that are read twice."""


@pytest.mark.parametrize("name", ["softmax", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(torch, made, package, name, dtype):
    """Also in place. A NaN makes its row NaN, but where numba-cuda-mlir rounds it to bfloat16: it becomes a number there."""
    has_nan = name == "rms_norm" and (dtype != "bfloat16" or "mlir" not in package.__name__)
    for shape in SHAPES[dtype]:
        x, weight = noise(torch, dtype, *shape) * (8 if name == "softmax" else 1), noise(torch, dtype, shape[1])
        if has_nan:
            x[0, 0] = math.nan
        given, expected = WORK[name](torch, x, weight)
        out = torch.full_like(x, 7)
        made(name)(*given, out)
        check(torch, out, expected)
        assert out[0].isnan().all() == has_nan and not out[1:].isnan().any()
        made(name)(*given, x)
        torch.testing.assert_close(x, out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [257, LONG])
def test_softmax_of_infinities_and_nan(torch, made, columns):
    x = noise(torch, "float32", 8, columns)
    x[0, 5], x[1, columns - 1], x[2] = math.nan, math.inf, -math.inf
    x[3, 1:] = x[4, :-1] = x[5, ::2] = -math.inf
    x[6] += 200  # whose exponentials overflow
    out = torch.full_like(x, 7)
    made("softmax")(x, out)
    assert out[:3].isnan().all()
    check(torch, out, torch.softmax(x, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heat(torch, made, dtype):
    """Around the edges of warps, of blocks and of what a thread has; one row, one column; more rows than a grid's y is for."""
    small = (1, 1), (1, 70), (70, 1), (2, 2), (3, 3), (15, 31), (16, 32), (17, 33), (18, 34)
    for shape in (*small, (50, 256), (50, 257), (49, 515), (65535 * 16 + 17, 3)):
        (u, r), expected = WORK["heat"](torch, noise(torch, dtype, *shape), None)
        out = torch.full_like(u, 7)
        made("heat")(u, r, out)
        check(torch, out, expected)


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "heat"])
def test_any_strides(torch, made, name):
    """Nothing beside the output is written."""
    given, expected = WORK[name](torch, noise(torch, "float32", 257, 200).T[::2], noise(torch, "float32", 257))
    target = torch.full((257, 300), 7.0, device="cuda")
    out = target.T[::3]
    made(name)(*given, out)
    check(torch, out, expected)
    out[:] = 7
    assert (target == 7).all()


@pytest.mark.parametrize("name", WORK)
def test_nothing_to_write(torch, made, name):
    for shape in ((0,),) if name == "axpy" else ((0, 5), (5, 0)):
        x = torch.empty(shape, device="cuda")
        given, _ = WORK[name](torch, x, x if name == "axpy" else torch.ones(shape[-1], device="cuda"))
        made(name)(*given, torch.empty_like(x))
    torch.cuda.synchronize()


BINS = {
    "fractions": (10, -0.3, 0.7), "whole numbers": (256, 0.0, 256.0), "one": (1, 0.1, 0.2), "near one": (9, 1.0, 1.0 + 1e-6),
    "the smallest": (3, 0.0, 3e-45), "many": (56 * 1024, -1.0, 1.0), "far from 0": (100, 1000.0, 1001.0),
}  # fmt: skip


@pytest.mark.parametrize("case", BINS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_histogram_count_for_count(torch, made, dtype, case):
    """Values on edges, next to them, and between; what is outside, infinite or NaN is not counted."""
    bins, low, high = BINS[case]
    number = np.dtype(dtype).type
    edges = np.linspace(low, high, bins + 1).astype(number)
    between = np.random.default_rng(0).uniform(low - (high - low) / 9, high + (high - low) / 9, 200_001).astype(number)
    beside = [np.nextafter(edges, number(sign * math.inf)) for sign in (-1, 1)]
    values = np.concatenate([between, np.tile(edges, 3), *beside, np.array([math.nan, math.inf, -math.inf, -0.0], number)])
    check_counts(torch, made, torch.tensor(values, device="cuda"), edges, low, high)


FROM_0_TO_1 = {  # values, and the number of bins; edges are float32's
    **{dtype: (lambda torch, dtype=dtype: torch.rand(100_003, device="cuda").to(getattr(torch, dtype)), 64)
       for dtype in ("float16", "bfloat16")},
    **{f"at most one value, {values}": (lambda torch, values=values: torch.tensor(values, device="cuda", dtype=torch.float32), 2)
       for values in ([], [0.5], [1.0], [2.0], [math.nan])},
    "any strides": (lambda torch: torch.rand(100_003, device="cuda")[5::7], 10),
}  # fmt: skip


@pytest.mark.parametrize("case", FROM_0_TO_1)
def test_histogram_from_0_to_1(torch, made, case):
    make, bins = FROM_0_TO_1[case]
    check_counts(torch, made, make(torch), np.linspace(0, 1, bins + 1).astype(np.float32), 0.0, 1.0)


def check_counts(torch, made, x, edges, low, high):
    bins = len(edges) - 1
    out = torch.full((bins,), 7, device="cuda", dtype=torch.int64)
    made("histogram")(x, low, high, out)
    values, exact = x.double().cpu().numpy(), edges.astype(np.float64)
    inside = values[(values >= exact[0]) & (values <= exact[-1])]
    places = np.minimum(np.searchsorted(exact, inside, "right") - 1, bins - 1)
    np.testing.assert_array_equal(out.cpu().numpy(), np.bincount(places, minlength=bins))
