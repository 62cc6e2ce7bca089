"""Kernels of neural networks: layers and the optimiser's step, against formulas in NumPy. PyTorch's own: ``test_kernels.py``."""

import itertools
import math

import numpy as np
import pytest
from frameworks import needs_torch

from kernel_data import (  # isort: skip
    CASES, SHAPES, blank, call, check, contiguous, exp_of_each, random, strided, that_fit, torch, transposed,
)
import kernels.adamw
from kernels.adamw import AdamW, adamw_step
from kernels.cross_entropy import cross_entropy
from kernels.exponential import exp
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rows import largest, sum_of_exp
from kernels.sampling import sample
from kernels.softmax import softmax

LARGE, INF, NAN = (300, 501), math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|Mean of empty):RuntimeWarning")


# ---- what the kernels share ----
@pytest.mark.parametrize(("dtype", "low", "high"), [(np.float32, -104.5, 89.5), (np.float64, -746.0, 710.5)])
def test_exp(dtype, low, high):
    """Within 1.5 units in the last place, of subnormal results too, and exact where it overflows."""
    x = np.concatenate([np.linspace(low, high, 200_001), np.linspace(-1, 1, 20_001), [0.0, -0.0, 1e-30]]).astype(dtype)
    out = np.empty_like(x)
    exp_of_each(x, out)
    # each computed in a wider type, or by the C library within one unit
    exact = np.exp(x.astype(np.float64 if dtype == np.float32 else np.longdouble))
    rounded = exact.astype(dtype)
    np.testing.assert_array_equal(np.isinf(out), np.isinf(rounded))
    finite = np.isfinite(rounded)
    error = abs(out[finite].astype(exact.dtype) - exact[finite])
    assert (error <= 1.5 * np.spacing(rounded[finite])).all()
    x, out = np.array([NAN, -NAN, INF, -INF, 1e30, -1e30], dtype), np.empty(6, dtype)
    exp_of_each(x, out)
    np.testing.assert_array_equal(out, [NAN, NAN, INF, 0, INF, 0])
    assert exp.__name__ == "exp" and exp(dtype(0)) == 1 and exp(1) == math.e  # called by Python


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_largest(dtype):
    for seed, size in enumerate([1, 2, 3, 100, 4097]):
        x = random(size, dtype, seed)
        for view in (x, x[::-1], x - x.max() - dtype(1)):
            assert largest(view) == view.max()
    for row in ([-INF, -INF], [1, INF, -INF], [-0.0, -1], [1, NAN, INF]) if np.dtype(dtype).kind == "f" else ():
        np.testing.assert_equal(largest(np.array(row, dtype)), dtype(max(row) if NAN not in row else NAN))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_exp_is_as_exact_in_long_rows(dtype):
    x = random(1_000_003, dtype)
    expected = np.exp(x.astype(np.float64) - 1).sum()
    np.testing.assert_allclose(sum_of_exp(x, dtype(1)), expected, rtol=2e-7 if dtype == np.float32 else 1e-14)


# ---- row by row ----
def log_softmax_oracle(x):
    below = x - x.max(axis=1, keepdims=True, initial=-INF)
    return below - np.log(np.exp(below).sum(axis=1, keepdims=True))


def rms_norm_oracle(x, weight):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3) * weight


def layer_norm_oracle(x, weight, bias):
    return rms_norm_oracle(x - x.mean(axis=1, keepdims=True), weight) + bias


# a kernel of x, its parameters and out; how many parameters; what it computes; the size of numbers on the way
ROWS = {
    "log_softmax": (log_softmax, 0, log_softmax_oracle, 2),
    "softmax": (softmax, 0, lambda x: np.exp(log_softmax_oracle(x)), 1e-2),
    "rms_norm": (rms_norm, 1, rms_norm_oracle, 1), "layer_norm": (layer_norm, 2, layer_norm_oracle, 10),
}  # fmt: skip


def check_rows(name, x, out):
    kernel, count, oracle, scale = ROWS[name]
    parameters = [random(x.shape[1], out.dtype, seed) for seed in range(1, count + 1)]
    got = call(kernel, x, *parameters, *([1e-3] if count else []), out)
    if got.size:
        check(got, oracle(x.astype(np.longdouble), *parameters), scale)
    return got


@pytest.mark.parametrize(("name", "dtype", "layout", "result", "result_layout"), [
    (name, *case) for name in ROWS for case in CASES[: 4 if "softmax" in name else 3]
])  # fmt: skip
def test_rows(name, dtype, layout, result, result_layout):
    for shape in that_fit(layout, [*SHAPES, LARGE, (1, 100_001)]):
        got = check_rows(name, layout(8 * random(shape, dtype)), blank(shape, result, result_layout))
        if name == "softmax" and shape[1]:
            np.testing.assert_allclose(got.sum(axis=1, dtype=np.float64), 1, rtol=1e-5)


EXTREMES = [[-INF, 0, 1], [-INF] * 3, [INF, 0, 1], [NAN, 0, 1], [0, 1, -NAN], [1e4, 1e4 - 1, 0], [0, 0, 0], [3, -3, 3]]


@pytest.mark.parametrize(("dtype", "layout"), [(np.float32, contiguous), (np.float64, strided)])
@pytest.mark.parametrize("name", ROWS)
def test_extreme_rows(name, dtype, layout):
    """NaN, infinities, equal numbers, and numbers of which the square, or the exponential, overflows."""
    big = np.finfo(dtype).max if "softmax" in name else dtype(1e30)
    x = layout(np.array([*EXTREMES, [big, big, -big]] + [[-big] * 3] * ("softmax" in name), dtype))
    check_rows(name, x, blank(x.shape, dtype, layout))


@pytest.mark.parametrize(("dtype", "layout", "mean"), [(np.float32, contiguous, 1e4), (np.float64, strided, 1e8)])
def test_layer_norm_of_values_far_from_zero(dtype, layout, mean):
    """The one-pass formula loses every digit here: the mean is 1e8 times the deviation."""
    x = layout((mean + random((4, 1000), np.float64)).astype(dtype))
    got = call(layer_norm, x, np.ones(1000, dtype), np.zeros(1000, dtype), 1e-3, blank(x.shape, dtype, layout))
    np.testing.assert_allclose(got, layer_norm_oracle(x - dtype(mean), 1, 0), rtol=1e-5, atol=1e-6)


# ---- rotary ----
@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout"), CASES[:3])
def test_rotary(dtype, layout, result, result_layout):
    shapes = [(0, 2, 3, 4), (2, 0, 3, 4), (1, 1, 0, 2), (1, 2, 3, 0), (1, 1, 1, 2), (2, 3, 5, 6), (2, 3, 64, 130)]
    for shape, interleaved, start in itertools.product(that_fit(layout, shapes), [False, True], [0, 7]):
        x, pairs = layout(random(shape, dtype)), shape[3] // 2
        angle = random((start + shape[2], pairs), np.float64, seed=1)
        cos, sin = np.cos(angle).astype(result), np.sin(angle).astype(result)
        left, right = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(pairs), slice(pairs, None))
        turned, expected = (x[..., left] + 1j * x[..., right]) * (cos + 1j * sin)[start:], np.empty(shape)
        expected[..., left], expected[..., right] = turned.real, turned.imag
        check(call(rotary, x, cos, sin, start, interleaved, blank(shape, result, result_layout)), expected, scale=10)


# ---- cross entropy ----
@pytest.mark.parametrize(("dtype", "layout", "result", "result_layout", "index"), [
    (*case, index) for case, index in zip(CASES, [np.int64, np.int32, np.uint8], strict=False)
])  # fmt: skip
def test_cross_entropy(dtype, layout, result, result_layout, index):
    shapes = that_fit(layout, [(0, 3), (1, 1), (7, 2), (33, 129), LARGE])
    for (rows, classes), smoothing in itertools.product(shapes, [0.0, 0.1, 1.0]):
        logits = layout(random((rows, classes), dtype))
        target = np.random.default_rng(1).integers(0, min(classes, 256), rows).astype(index)
        target[2::5], ignored = 0, 0 if rows > 1 else 77
        got = call(cross_entropy, logits, target, smoothing, ignored, blank(rows, result, result_layout))
        log_p = log_softmax_oracle(logits.astype(np.float64))
        losses = -(1 - smoothing) * log_p[np.arange(rows), np.where(target == ignored, 0, target)]
        if smoothing:
            losses -= smoothing * log_p.mean(axis=1)
        check(got, np.where(target == ignored, 0, losses), scale=10)


def test_cross_entropy_of_extreme_rows():
    rows = [[-INF, 0, 0], [0, -INF, 0], [-INF] * 3, [INF, 0, 0], [0, NAN, 0], [0, -NAN, 0], [NAN] * 3, [1e38, -1e38, 0]]
    logits, target = np.array(rows, np.float32), np.array([0, 0, 0, 0, 0, 0, -100, 0])
    plain, smoothed = [INF, math.log(2), NAN, NAN, NAN, NAN, 0, 0], [INF, INF, NAN, NAN, NAN, NAN, 0, 1e38 * 0.5]
    for smoothing, expected in [(0.0, plain), (0.5, smoothed)]:
        got = call(cross_entropy, logits, target, smoothing, -100, blank(len(rows), np.float32))
        np.testing.assert_allclose(got, expected, rtol=1e-6)


# ---- sampling, against its definition: a sort of all tokens, a cumulative sum, a search ----
LAST = np.nextafter(1.0, 0.0)


def check_drawn(logits, k, p, temperature, u, layout=contiguous):
    tokens = []
    for row, number in zip(logits.astype(np.float64), u, strict=True):
        order = np.argsort(-row, kind="stable")
        weights = np.exp((row[order] - row.max()) / temperature)
        weights[k:] = 0
        if p < 1:
            weights[np.cumsum(weights) - weights >= p * weights.sum()] = 0
        sums = np.cumsum(weights)
        tokens.append(order[np.searchsorted(sums, number * sums[-1], side="right")])
    got = call(sample, logits, k, p, temperature, u, blank(len(logits), np.int64, layout))
    np.testing.assert_array_equal(got, tokens, f"{logits.shape[1]} {k} {p}")


@pytest.mark.parametrize(("dtype", "layout"), [(np.float32, contiguous), (np.float64, strided), (np.int32, transposed)])
def test_sample(dtype, layout):
    for rows, vocabulary in that_fit(layout, [(0, 5), (1, 1), (3, 2), (7, 65), (50, 700), (3, 5003)]):
        logits = layout(random((rows, vocabulary), dtype))
        u = layout(np.random.default_rng(1).random(rows))
        for k, p in itertools.product([1, 3, 100, 500, 10**6], [0.001, 0.6, 1.0]):
            temperature = 0.5 if k == 3 else 2.0
            check_drawn(logits, k, p, temperature, u, contiguous if layout is transposed else layout)


@pytest.mark.parametrize(("vocabulary", "likely"), [(16, np.arange(16)), (1000, np.arange(5, 1000, 60)[:16])])
def test_equal_logits_are_ordered_by_index(vocabulary, likely):
    logits = np.full((16, vocabulary), -INF, np.float32)
    logits[:, likely] = 2.0
    for k, p in [(16, 1.0), (1000, 1.0), (16, 0.5), (4, 1.0), (8, 0.5), (1000, 0.25), (1, 1.0)]:
        check_drawn(logits, k, p, 1.0, np.arange(16) / 16)


def test_sample_of_sorted_rows():
    """Ascending, each token displaces one of the k; descending, none does. Spread wide, most are in the last step."""
    rows = [np.linspace(-5, 5, 3001), np.linspace(5, -5, 3001), np.linspace(-500, 500, 3001), np.zeros(3001)]
    for k, p in itertools.product([5, 128, 129, 2999, 3001], [0.3, 1.0]):
        check_drawn(np.array(rows, np.float32), k, p, 1.0, np.array([0.1, 0.5, 0.9, 0.99]))


@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_rows_without_a_distribution(vocabulary):
    logits = np.full((7, vocabulary), -INF, np.float32)
    logits[:, 2] = [1, NAN, -NAN, INF, -INF, 1, 3e38]
    logits[0, 1] = NAN
    logits[1:3, 0] = 5
    logits[6, 0] = -3e38
    for k, p in [(1, 1.0), (1000, 1.0), (2, 0.5), (1000, 0.5)]:
        for u in (0.0, 0.5, LAST):
            np.testing.assert_array_equal(sample(logits, k, p, 1.0, np.full(7, u)), [-1, -1, -1, -1, -1, 2, 2])


def test_the_largest_u_draws_the_last_token_kept():
    logits = random((200, 300), np.float32)
    order = np.argsort(-logits, axis=1, kind="stable")
    for k in (1, 60, 128, 299, 300):
        np.testing.assert_array_equal(sample(logits, k, 1.0, 1.0, np.full(200, LAST)), order[:, k - 1])


# ---- the optimiser, against the formula, and against ``torch.optim.AdamW`` ----
NUMBERS = 0.01, 0.9, 0.99, 1e-6, 0.1  # lr, beta1, beta2, eps, weight_decay
VECTORS = [(0,), (1,), (7,), (64,), (200_003,)]  # the last is updated by threads
MATRICES = [(0, 3), (3, 0), (1, 1), (5, 17), (32, 32), (300, 401)]


def check_steps(params, exp_avgs, exp_avg_sqs, grads, numbers=NUMBERS):
    """A step for each item of `grads` does what the formula says."""
    lr, beta1, beta2, eps, weight_decay = numbers
    results = []
    for param, m, v, *own in zip(params, exp_avgs, exp_avg_sqs, *grads, strict=True):
        for step, grad in enumerate(own, 1):
            grad = grad.astype(m.dtype)
            m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
            root = np.sqrt(v / (1 - beta2**step)) + eps
            param = (param * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / root).astype(param.dtype)
        results.append((param, m, v))
    expected = [each for several in zip(*results, strict=True) for each in several]
    for step, now in enumerate(grads, 1):
        got = call(adamw_step, params, now, exp_avgs, exp_avg_sqs, step, *numbers, written=(0, 2, 3))
        for array, values in zip([*params, *exp_avgs, *exp_avg_sqs], got, strict=True):
            array[...] = values
    for array, like in zip(got, expected, strict=True):
        rtol = 2e-6 if array.dtype == np.float32 else 1e-14
        np.testing.assert_allclose(array, like, rtol=rtol, atol=rtol)
    return got


@pytest.mark.parametrize(("dtype", "grad_dtype", "state", "shapes", "layout"), [  # each is a compilation
    (np.float32, np.float32, np.float32, VECTORS, contiguous), (np.float64, np.float64, np.float64, VECTORS, strided),
    (np.float32, np.float32, np.float64, VECTORS, contiguous), (np.float32, np.float32, np.float32, MATRICES, contiguous),
    (np.float64, np.float32, np.float64, MATRICES, transposed), (np.float64, np.int32, np.float64, [(), ()], np.array),
    (np.float64, np.float64, np.float64, [(2, 1, 3), (4, 5, 6)], transposed),
])  # fmt: skip
def test_steps(dtype, grad_dtype, state, shapes, layout):
    def lists(dtype, seed):
        return [layout(random(shape, dtype, 10 * i + seed)) for i, shape in enumerate(shapes)]

    averages = [[layout(np.zeros(shape, state)) for shape in shapes] for _ in range(2)]
    check_steps(lists(dtype, 0), *averages, [lists(grad_dtype, seed) for seed in range(1, 5)])


def test_numbers_at_the_end_of_their_range():
    for numbers in ((1, 0.0, 0.0, 1e-3, 0), (0.5, 0.0, 0.9, 0.1, 2.0), (0.0, 0.9, 0.9, 0.1, 0.3), (0.1, 0.9, 0.0, 0.5, 0.0)):
        vectors = [[array] for array in (random(9, np.float64), np.zeros(9), np.zeros(9))]
        check_steps(*vectors, [[random(9, np.float64, seed)] for seed in (1, 2)], numbers)


def test_values_that_are_not_finite():
    grad = np.array([math.nan, math.inf, -math.inf, 0, 1, 1])
    param = np.array([1, 1, 1, 1, math.nan, -math.inf])
    check_steps([param], [np.zeros(6)], [np.zeros(6)], [[grad]])
    assert np.isnan(param).tolist() == [True, True, True, False, True, False]


def test_a_parameter_that_stands_twice_is_updated_twice():
    once, twice = ([random(7, np.float64), random(7, np.float64, 1), np.zeros(7), np.zeros(7)] for _ in range(2))
    for _ in range(2):
        adamw_step(*([array] for array in once), 3, *NUMBERS)
    adamw_step(*([array] * 2 for array in twice), 3, *NUMBERS)
    np.testing.assert_array_equal(twice, once)


@needs_torch
def test_the_optimiser_trains_as_pytorchs_does():
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = AdamW(models[0].parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(models[1].parameters(), lr=0.01, weight_decay=0.1, foreach=True)
    assert len(ours.groups) == 2
    x, y, losses = torch.randn(64, 8), torch.randn(64, 1), []
    for model, optimiser in [*zip(models, (ours, theirs), strict=True)] * 30:
        optimiser.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    ours.zero_grad()
    before = [param.clone() for param in models[0].parameters()]
    models[0][2](models[0][0](x)).sum().backward()
    models[0][0].weight.grad = None
    with pytest.raises(ValueError, match=r"^params: one has no grad"):
        ours.step()
    assert all(map(torch.equal, before, models[0].parameters())) and ours.steps == 30


def test_interpreted():
    """With ``NUMBA_DISABLE_JIT`` the update of any shape is that of its elements."""
    arrays = [abs(random((2, 3), np.float64, seed)) for seed in range(4)]
    numbers = tuple(np.float64(x) for x in (0.99, 0.9, 0.1, 0.99, 0.01, 2.0, 1e-6, 0.05))
    flat = [array.copy().reshape(-1) for array in arrays]
    kernels.adamw._update_block.py_func(*flat, numbers)
    kernels.adamw._update(*arrays, numbers)
    np.testing.assert_allclose(np.reshape(arrays, (4, 6)), flat, rtol=1e-14)
