"""The kernels of neural networks' layers against PyTorch's operators; without PyTorch, against the formula in NumPy."""

import itertools
import math

import numpy as np
import pytest
from kernel_data import (
    FRAMEWORKS,
    MIXED,
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
)
from numba import njit

from kernels.cross_entropy import cross_entropy
from kernels.exponential import exp
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rows import largest, sum_of_exp
from kernels.softmax import softmax

# dtype and layout of the input, and of the output; each case is a compilation
CASES = [
    (np.float32, contiguous, np.float32, contiguous),
    (np.float64, strided, np.float64, strided),
    (np.int32, transposed, np.float32, contiguous),
]
LARGE = (300, 501)
INF, NAN = math.inf, math.nan


def tensors(*arrays):
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def log_softmax_oracle(x):
    if torch is not None:
        return torch.log_softmax(*tensors(x), dim=1).numpy()
    if x.shape[1] == 0:
        return x.copy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        below = x - x.max(axis=1, keepdims=True)
        return below - np.log(np.exp(below).sum(axis=1, keepdims=True))


def rms_norm_oracle(x, weight, eps):
    if torch is not None:
        x, weight = tensors(x, weight)
        return torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps).numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


def cross_entropy_oracle(logits, target, smoothing, ignore_index):
    if torch is not None:
        options = {"reduction": "none", "label_smoothing": smoothing, "ignore_index": ignore_index}
        return torch.nn.functional.cross_entropy(*tensors(logits, target), **options).numpy()
    log_p = log_softmax_oracle(logits)
    rows = np.arange(target.size)
    losses = -(1 - smoothing) * log_p[rows, np.where(target == ignore_index, 0, target)]
    if smoothing:
        losses -= smoothing * log_p.mean(axis=1)
    return np.where(target == ignore_index, 0, losses)


# ---- what the kernels share ----


@njit
def _exp_of_each(x, out):
    for j in range(x.shape[0]):
        out[j] = exp(x[j])


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.float32, -104.5, 89.5), (np.float64, -746.0, 710.5)])
def test_exp(dtype, low, high):
    """Within 1.5 units in the last place, of subnormal results too, and exact where it overflows."""
    x = np.concatenate([np.linspace(low, high, 200_001), np.linspace(-1, 1, 20_001), [0.0, -0.0, 1e-30]]).astype(dtype)
    out = np.empty_like(x)
    _exp_of_each(x, out)
    # each computed in a wider type, or by the C library within one unit
    exact = np.exp(x.astype(np.float64 if dtype == np.float32 else np.longdouble))
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    np.testing.assert_array_equal(np.isinf(out), np.isinf(rounded))
    finite = np.isfinite(rounded)
    error = abs(out[finite].astype(exact.dtype) - exact[finite])
    assert (error <= 1.5 * np.spacing(rounded[finite])).all()
    x = np.array([NAN, -NAN, INF, -INF, 1e30, -1e30], dtype)
    out = np.empty_like(x)
    _exp_of_each(x, out)
    np.testing.assert_array_equal(out, [NAN, NAN, INF, 0, INF, 0])
    assert exp.__name__ == "exp" and exp(dtype(0)) == 1 and exp(1) == math.e  # called by Python


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_largest(dtype):
    for seed, size in enumerate([1, 2, 3, 100, 4097]):
        x = random(size, dtype, seed)
        for view in (x, x[::-1], x - x.max() - dtype(1)):
            assert largest(view) == view.max()
    if np.dtype(dtype).kind == "f":
        inf, nan = dtype(INF), dtype(NAN)
        assert largest(np.array([-inf, -inf])) == -inf and largest(np.array([1, inf, -inf])) == inf
        assert largest(np.array([dtype(-0.0), dtype(-1)])) == 0
        assert math.isnan(largest(np.array([1, nan, inf], dtype)))
        assert largest(np.array([1, -nan, 3], dtype)) in (1, 3) or math.isnan(largest(np.array([1, -nan, 3], dtype)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_exp_is_as_exact_in_long_rows(dtype):
    x = random(1_000_003, dtype)
    expected = np.exp(x.astype(np.float64) - 1).sum()
    rtol = 2e-7 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(sum_of_exp(x, dtype(1)), expected, rtol=rtol)


# ---- softmax, log_softmax, layer norm ----


@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_log_softmax(framework, dtype, layout, result, result_layout):
    for shape in that_fit(layout, [*SHAPES, LARGE, (1, 100_001)]):
        x, out = layout(random(shape, dtype)), blank(shape, result, result_layout)
        log_softmax(make(framework, x), make(framework, out))
        check(out, log_softmax_oracle(x.astype(result)), scale=2)
        if shape[1]:
            np.testing.assert_allclose(np.exp(out.astype(np.float64)).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("frameworks", MIXED)
def test_log_softmax_of_float32_in_float64(frameworks):
    x, out = random((65, 127), np.float32), blank((65, 127), np.float64)
    log_softmax(make(frameworks[0], x), make(frameworks[1], out))
    check(out, log_softmax_oracle(x.astype(np.float64)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_log_softmax_of_extreme_values(framework, dtype):
    big = np.finfo(dtype).max
    finite = [[1e4, 1e4 - 1, 0], [big, big, -big], [-big, -big, -big]]
    x = np.array([*finite, [-INF, 0, 1], [-INF] * 3, [INF, 0, 1], [NAN, 0, 1], [0, 1, -NAN]], dtype)
    out = blank(x.shape, dtype)
    log_softmax(make(framework, x), make(framework, out))
    one = math.log1p(math.exp(-1))
    expected = [
        [-one, -1 - one, -1e4 - one],
        [-math.log(2), -math.log(2), -INF],
        [-math.log(3)] * 3,
        [-INF, -1 - one, -one],
    ]
    expected = np.array(expected + [[NAN] * 3] * 4)
    check(out, expected, scale=0.1)
    check(out, log_softmax_oracle(x), scale=0.1)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_integers(framework):
    """softmax and layer_norm of integers; their other dtypes are in test_kernels.py."""
    for shape in [(5, 17), (129, 501)]:
        x, out = transposed(random(shape, np.int32)), blank(shape, np.float32)
        softmax(make(framework, x), make(framework, out))
        np.testing.assert_allclose(out, np.exp(log_softmax_oracle(x.astype(np.float64))), rtol=1e-6, atol=1e-30)
        layer_norm(make(framework, x), None, None, 1e-5, make(framework, out))
        wide = x.astype(np.float64)
        check(out, (wide - wide.mean(axis=1, keepdims=True)) / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5))


# ---- rms_norm ----


@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rms_norm(framework, dtype, layout, result, result_layout):
    for shape in that_fit(layout, [*SHAPES, LARGE]):
        x, out, weight = (
            layout(random(shape, dtype)),
            blank(shape, result, result_layout),
            random(shape[1], result, seed=1),
        )
        rms_norm(make(framework, x), make(framework, weight), 1e-3, make(framework, out))
        if shape[1]:
            check(out, rms_norm_oracle(x.astype(result), weight, 1e-3))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rms_norm_in_place_without_weight(framework):
    for shape in [(1, 1), (3, 5), (256, 129)]:
        x = random(shape, np.float32)
        same = make(framework, x.copy())
        rms_norm(same, None, 0.0, same)
        check(same, rms_norm_oracle(x, np.ones(shape[1], np.float32), 0.0))
        np.testing.assert_allclose((np.asarray(same, np.float64) ** 2).mean(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rms_norm_of_constant_and_non_finite_rows(framework):
    x = np.array([[0, 0, 0], [3, -3, 3], [1, NAN, 2], [1, -INF, 2], [1e30, 1e30, -1e30]], np.float32)
    out, weight = blank(x.shape, np.float32), np.array([1, 1, 2], np.float32)
    rms_norm(make(framework, x), make(framework, weight), 0.25, make(framework, out))
    a = 3 / math.sqrt(9.25)
    np.testing.assert_allclose(out, [[0, 0, 0], [a, -a, 2 * a], [NAN] * 3, [0, NAN, 0], [1, 1, -2]], rtol=1e-6)
    np.testing.assert_allclose(out[:4], rms_norm_oracle(x, weight, 0.25)[:4], rtol=1e-6)  # PyTorch's float32 overflows


# ---- rotary ----


def angles(positions, pairs, dtype=np.float64):
    angle = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(pairs) / max(pairs, 1))
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def rotary_oracle(x, cos, sin, start, interleaved):
    """The formula as models have it, in PyTorch; in NumPy, as a product of complex numbers."""
    positions, head_dim = x.shape[2:]
    cos, sin = cos[start : start + positions], sin[start : start + positions]
    if torch is not None:
        x, cos, sin = tensors(x, cos, sin)
        if interleaved:
            left, right = x[..., 0::2], x[..., 1::2]
            return torch.stack((left * cos - right * sin, right * cos + left * sin), -1).flatten(-2).numpy()
        left, right = x.chunk(2, -1)
        return (x * torch.cat((cos, cos), -1) + torch.cat((-right, left), -1) * torch.cat((sin, sin), -1)).numpy()
    pairs = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(head_dim // 2), slice(head_dim // 2, None))
    )
    turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * (cos + 1j * sin)
    expected = np.empty(x.shape, turned.real.dtype)
    expected[..., pairs[0]], expected[..., pairs[1]] = turned.real, turned.imag
    return expected


HEADS = [(0, 2, 3, 4), (2, 0, 3, 4), (1, 1, 0, 2), (1, 2, 3, 0), (1, 1, 1, 2), (2, 3, 5, 6), (2, 3, 64, 130)]


@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rotary(framework, dtype, layout, result, result_layout):
    for shape, interleaved, start in itertools.product(that_fit(layout, HEADS), [False, True], [0, 7]):
        x, out = layout(random(shape, dtype)), blank(shape, result, result_layout)
        cos, sin = angles(start + shape[2], shape[3] // 2, result)
        given = [make(framework, a) for a in (x, cos, sin, out)]
        rotary(*given[:3], start, interleaved, given[3])
        if out.size:
            check(out, rotary_oracle(x.astype(result), cos, sin, start, interleaved).astype(result), scale=10)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rotary_in_place_and_of_positions_before_heads(framework):
    for interleaved in (False, True):
        x = random((2, 9, 4, 16), np.float32)
        cos, sin = angles(9, 8, np.float32)
        expected = rotary_oracle(x.transpose(0, 2, 1, 3), cos, sin, 0, interleaved)
        seen = make(framework, x.transpose(0, 2, 1, 3))
        rotary(seen, make(framework, cos), make(framework, sin), 0, interleaved, seen)
        check(x.transpose(0, 2, 1, 3), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_products_depend_on_the_distance_only(interleaved):
    """Equation 16 of the paper: the product of a query and a key turned by m and n is a function of m - n."""
    query, key = random((1, 1, 1, 32), np.float32), random((1, 1, 1, 32), np.float32, seed=1)
    cos, sin = angles(100, 16, np.float32)
    products = []
    for m, n in [(5, 2), (55, 52), (99, 96), (5, 3)]:
        turned = [blank(query.shape, np.float32) for _ in range(2)]
        rotary(query, cos, sin, m, interleaved, turned[0])
        rotary(key, cos, sin, n, interleaved, turned[1])
        products.append((turned[0].astype(np.float64) * turned[1]).sum())
    np.testing.assert_allclose(products[1:3], products[0], atol=1e-5)
    assert abs(products[3] - products[0]) > 1e-3


# ---- cross entropy ----


@pytest.mark.parametrize(
    ("dtype", "layout", "result", "result_layout", "index"),
    [(*case, index) for case, index in zip(CASES, [np.int64, np.int32, np.uint8], strict=True)],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cross_entropy(framework, dtype, layout, result, result_layout, index):
    shapes = that_fit(layout, [(0, 3), (1, 1), (7, 2), (33, 129), LARGE])
    for (rows, classes), smoothing in itertools.product(shapes, [0.0, 0.1, 1.0]):
        logits = layout(random((rows, classes), dtype))
        target = np.random.default_rng(1).integers(0, min(classes, 256), rows).astype(index)
        target[2::5] = 0
        out, ignored = blank(rows, result, result_layout), 0 if rows > 1 else 77
        cross_entropy(*(make(framework, a) for a in (logits, target)), smoothing, ignored, make(framework, out))
        expected = cross_entropy_oracle(logits.astype(result), target.astype(np.int64), smoothing, ignored)
        check(out, expected, scale=10)
        if rows > 30:
            assert (out[target == 0] == 0).all() and (target == 0).any() and (out[target != 0] != 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cross_entropy_of_extreme_rows(framework):
    rows = [[-INF, 0, 0], [0, -INF, 0], [-INF] * 3, [INF, 0, 0], [0, NAN, 0], [0, -NAN, 0], [NAN] * 3, [1e38, -1e38, 0]]
    logits, target = np.array(rows, np.float32), np.array([0, 0, 0, 0, 0, 0, -100, 0])
    plain, smoothed = [INF, math.log(2), NAN, NAN, NAN, NAN, 0, 0], [INF, INF, NAN, NAN, NAN, NAN, 0, 1e38 * 0.5]
    for smoothing, expected in [(0.0, plain), (0.5, smoothed)]:
        out = blank(len(rows), np.float32)
        cross_entropy(make(framework, logits), make(framework, target), smoothing, -100, make(framework, out))
        np.testing.assert_allclose(out, np.array(expected, np.float32), rtol=1e-6)
        np.testing.assert_allclose(out[:-1], cross_entropy_oracle(logits, target, smoothing, -100)[:-1], rtol=1e-6)


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_the_mean_of_cross_entropy():
    logits, target = torch.randn(50, 10), torch.randint(10, (50,))
    target[::3] = -100
    out = torch.empty(50)
    cross_entropy(logits, target, 0.1, -100, out)
    expected = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(out.sum() / (target != -100).sum(), expected)


# ---- what is refused ----


def grid(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def heads(*shape):
    return grid(*(shape or (1, 2, 3, 4)))


LABELS = np.arange(3)
REFUSED = {
    "log_softmax rows": (log_softmax, (grid(3, 4), grid(2, 4)), "x: its shape"),
    "log_softmax transposed": (log_softmax, (grid(3, 4), grid(4, 3)), "x: its shape"),
    "rms_norm rows": (rms_norm, (grid(3, 4), grid(4), 1e-5, grid(2, 4)), "x: its shape"),
    "rms_norm weight": (rms_norm, (grid(3, 4), grid(3), 1e-5, grid(3, 4)), "weight: its shape"),
    "rotary x": (rotary, (heads(1, 2, 3, 2), grid(3, 2), grid(3, 2), 0, False, heads()), "x: its shape"),
    "rotary odd": (rotary, (heads(1, 2, 3, 5), grid(3, 2), grid(3, 2), 0, False, heads(1, 2, 3, 5)), "x: its last"),
    "rotary cos": (rotary, (heads(), grid(3, 4), grid(3, 4), 0, False, heads()), "cos: its shape"),
    "rotary sin": (rotary, (heads(), grid(4, 2), grid(3, 2), 0, False, heads()), "sin: its shape"),
    "rotary start": (rotary, (heads(), grid(5, 2), grid(5, 2), 3, False, heads()), "start: "),
    "rotary before start": (rotary, (heads(), grid(5, 2), grid(5, 2), -1, False, heads()), "start: "),
    "rotary short": (rotary, (heads(), grid(2, 2), grid(2, 2), 0, False, heads()), "start: "),
    "rotary out": (rotary, (heads(), grid(3, 2), grid(3, 2), 0, False, heads().astype(np.int64)), "out: its dtype"),
    "cross_entropy target": (cross_entropy, (grid(3, 4), np.arange(2), 0.0, -100, grid(3)), "target: its shape"),
    "cross_entropy floats": (cross_entropy, (grid(3, 4), grid(3), 0.0, -100, grid(3)), "target: its dtype"),
    "cross_entropy class": (cross_entropy, (grid(3, 2), LABELS, 0.0, -100, grid(3)), "target: must be a class"),
    "cross_entropy negative": (cross_entropy, (grid(3, 4), LABELS - 1, 0.0, -100, grid(3)), "target: must be a class"),
    "cross_entropy no classes": (cross_entropy, (grid(3, 0), LABELS, 0.0, -100, grid(3)), "target: must be a class"),
    "cross_entropy smoothing": (cross_entropy, (grid(3, 4), LABELS, 1.1, -100, grid(3)), "smoothing: "),
    "cross_entropy NaN": (cross_entropy, (grid(3, 4), LABELS, NAN, -100, grid(3)), "smoothing: "),
    "cross_entropy rows": (cross_entropy, (grid(3, 4), LABELS, 0.0, -100, grid(4)), "out: its shape"),
    "cross_entropy out": (cross_entropy, (grid(3, 4), LABELS, 0.0, -100, LABELS), "out: its dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework, case):
    own_types = ("rotary out", "cross_entropy floats")  # which no other call has; "cross_entropy out" is compiled
    check_refused(framework, *REFUSED[case], compiled=case not in own_types)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    memory, table = make(framework, random((21, 20), np.float32)), make(framework, random((30, 8), np.float32))
    line, labels = make(framework, random(20, np.float32)), make(framework, np.zeros(5, np.int64))
    long = make(framework, random(400, np.float32))
    x, out = long[:48].reshape(1, 1, 3, 16), long[16:64].reshape(1, 1, 3, 16)
    own = make(framework, random((1, 1, 3, 16), np.float32))
    inside = long[20:44].reshape(3, 8)
    refused = [
        (log_softmax, (memory[:-1], memory[1:])),
        (rms_norm, (memory[1:], None, 1e-5, memory[:-1])),
        (rms_norm, (memory, memory[3], 1e-5, memory)),
        (rotary, (x, table, table, 0, False, out)),
        (rotary, (own, inside, table[:3], 0, False, out)),
        (rotary, (own, table[:3], inside, 0, False, out)),
        (cross_entropy, (memory[:5], labels, 0.0, -100, memory[2, 5:10])),
    ]
    arrays = (memory, table, line, labels, long, own)
    for kernel, args in refused:
        before = [np.asarray(tensor).copy() for tensor in arrays]
        with pytest.raises(ValueError, match=r"^out: overlaps"):
            kernel(*args)
        for tensor, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(np.asarray(tensor), copy)


@pytest.mark.skipif(torch is None, reason="NumPy's expanded arrays are readonly")
def test_expanded_outputs_are_refused():
    double = torch.float64
    x, weight, table = (
        torch.randn(6, 12, dtype=double)[:, ::2],
        torch.ones(6, dtype=double),
        torch.ones(6, 3, dtype=double),
    )
    line, out = torch.zeros(1, dtype=double).expand(6), torch.zeros(1, 6, dtype=double).expand(6, 6)
    refused = [
        (log_softmax, (x, out)),
        (rms_norm, (x, weight, 1e-5, out)),
        (rotary, (x[None, None], table, table, 0, False, out[None, None])),
        (cross_entropy, (x, torch.zeros(6, dtype=torch.int32), 0.0, -100, line)),
    ]
    for kernel, args in refused:
        with pytest.raises(ValueError, match=r"^out: each element"):
            kernel(*args)
        assert not args[-1].any()
