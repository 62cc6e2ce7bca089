"""The kernels with bfloat16 and float16: against PyTorch in float32, rounded once, and its own operators for these types."""

import itertools
import math

import numpy as np
import pytest
from kernel_data import exp_of_each, torch
from nights import at_night

if torch is None:
    pytest.skip("PyTorch has the tensors", allow_module_level=True)

from torch.nn import functional

from kernels.adamw import AdamW, adamw_step
from kernels.axpy import axpy
from kernels.cross_entropy import cross_entropy
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.sampling import sample
from kernels.softmax import softmax

HALVES = [torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan
each_half = pytest.mark.parametrize("dtype", at_night(HALVES, torch.bfloat16), ids=str)


def normal(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x):
    return torch.full((*x.shape[:-1], 3 * x.shape[-1] + 1), NAN, dtype=x.dtype)[..., 1::3].copy_(x)


def units(numbers, dtype):
    """The unit in the last place of `dtype` at each of `numbers`, in float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(numbers.double().abs().clamp(min=info.tiny))
    return info.eps * 2.0 ** (exponent - 1).double()


def check(got, exact, at_most=0.51, scale=0.0):
    """`got` is `exact` but for `at_most` units in its last place. `scale`: of numbers that were rounded to a wider type."""
    assert got.shape == exact.shape
    exact = exact.double()
    wide, limit = got.double(), at_most * units(exact, got.dtype) + scale * 2.0**-22
    different = (wide - exact).abs() > limit
    alike = (wide == exact.to(got.dtype).double()) | (wide.isnan() & exact.isnan())
    assert not (different | (wide.isnan() != exact.isnan())).logical_and(~alike).any()


# ---- what the kernels share ----
@each_half
def test_exp_of_all_numbers(dtype):
    """Half a unit in the last place, subnormal results too; exact where it overflows; NaN for NaN."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out, wide = torch.empty_like(x), torch.empty(1 << 16)
    exp_of_each(x, out)
    exact = x.double().exp()
    check(out, exact)
    exp_of_each(x, wide)
    finite = (exact > 2.0**-126) & (exact < 2.0**127)
    assert ((wide.double() / exact - 1).abs()[finite] < 7e-6).all()


# ---- rows of matrices ----
# a kernel of x, its parameters and out; how many parameters; PyTorch's operator
KERNELS = {
    "softmax": (softmax, 0, lambda x: torch.softmax(x, 1)),
    "log_softmax": (log_softmax, 0, lambda x: torch.log_softmax(x, 1)),
    "rms_norm": (rms_norm, 1, lambda x, w: functional.rms_norm(x, x.shape[1:], w, 1e-3)),
    "layer_norm": (layer_norm, 2, lambda x, w, b: functional.layer_norm(x, x.shape[1:], w, b, 1e-3)),
}


def call(name, x, parameters, *out):
    kernel, count, _ = KERNELS[name]
    return kernel(x, *parameters, *([1e-3] if count else []), *out)


def given(name, dtype, *shape):
    """Numbers, parameters, and what PyTorch makes of them in float64."""
    _, count, operator = KERNELS[name]
    x, parameters = normal(dtype, *shape), [normal(dtype, shape[1], seed=i) for i in range(1, count + 1)]
    return x, parameters, operator(x.double(), *(each.double() for each in parameters))


@pytest.mark.parametrize("name", KERNELS)
@each_half
def test_rows_are_pytorchs_in_float64_rounded(dtype, name):
    """And no further from it than PyTorch's own operator for the type, in the mean."""
    for shape in [(1, 1), (5, 17), (33, 129), (20, 5000)]:  # the last: more than one block of a sum, and threads
        x, parameters, exact = given(name, dtype, *shape)
        got, theirs = call(name, x, parameters), KERNELS[name][2](x, *parameters)
        assert got.dtype == dtype
        check(got, exact, scale=10)
        ours_off, theirs_off = ((each.double() - exact).abs().mean() for each in (got, theirs))
        assert ours_off <= 1.01 * theirs_off + 1e-9


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "dtype"), [*zip(KERNELS, [*HALVES, *HALVES[::-1]], strict=True)])
def test_rows_in_place_strided_and_of_other_types(name, dtype):
    x, parameters, exact = given(name, dtype, 33, 129)
    expected, wide_parameters = call(name, x, parameters), [each.float() for each in parameters]
    same, out, wide = x.clone(), strided(torch.zeros_like(x)), torch.empty(x.shape)
    call(name, same, parameters, same)
    assert torch.equal(same, expected)
    call(name, strided(x), parameters, out)
    check(out, expected.double(), at_most=1)
    call(name, x, parameters, wide)  # in float32, and rounded to it
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    call(name, x.float(), wide_parameters, same)
    check(same, exact, scale=10)
    if parameters:
        check(call(name, x, wide_parameters), exact, scale=10)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_softmax_of_8_bits(dtype):
    x = normal(dtype, 33, 9)
    assert torch.equal(softmax(x).double(), torch.softmax(x.double(), 1).to(dtype).double())


@each_half
def test_softmax_of_extreme_rows(dtype):
    most = torch.finfo(dtype).max
    finite = [[most, most, -most], [-most] * 3, [0, -80, -95]]
    x = torch.tensor([*finite, [-INF, 0, 1], [-INF] * 3, [INF, 0, 1], [NAN, 0, 1], [0, 1, -NAN]], dtype=dtype)
    for name, scale in (("softmax", 0), ("log_softmax", 0.1)):
        got, operator = call(name, x, []), KERNELS[name][2]
        check(got, operator(x.double()), scale=scale)
        assert torch.equal(got.isnan(), operator(x).isnan())


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@each_half
def test_norms_of_a_large_mean_and_of_non_finite_rows(dtype, name):
    """The deviations are what counts: one pass over squares would cancel."""
    x, parameters = normal(dtype, 4, 4097) + 100, [None] * KERNELS[name][1]
    x[1:, 0] = torch.tensor([INF, -INF, NAN], dtype=dtype)
    got, operator = call(name, x, parameters), KERNELS[name][2]
    check(got[:1], operator(x.double(), *parameters)[:1], scale=40)
    assert torch.equal(got.isnan(), operator(x.float(), *parameters).isnan())


# ---- rotary, cross entropy, sampling, axpy ----
@each_half
def test_rotary(dtype):
    for interleaved in (False, True):
        x, angle = normal(dtype, 2, 3, 65, 128), normal(torch.float64, 70, 64)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        got = rotary(x, cos, sin, 5, interleaved)
        check(got, rotary(x.float(), cos.float(), sin.float(), 5, interleaved), scale=4)
        rotary(x, cos, sin, 5, interleaved, x)
        assert torch.equal(x, got)


@each_half
def test_cross_entropy(dtype):
    for (rows, classes), smoothing in itertools.product([(1, 1), (33, 129), (20, 5000)], [0.0, 0.1]):
        logits, target = 3 * normal(dtype, rows, classes), torch.randint(classes, (rows,))
        target[3::7] = -100
        exact = functional.cross_entropy(logits.double(), target, reduction="none", label_smoothing=smoothing)
        check(cross_entropy(logits, target, smoothing, -100), exact, scale=40)


@each_half
def test_sampling(dtype):
    logits, u = 3 * normal(dtype, 9, 2000), torch.rand(9, dtype=torch.float64)
    for k, p in [(20, 1.0), (2000, 0.9), (500, 0.5)]:
        assert torch.equal(sample(logits, k, p, 0.7, u), sample(logits.float(), k, p, 0.7, u))


@each_half
def test_axpy(dtype):
    """`a` is taken as a number of float32, whatever its type, and nothing is rounded before the sum is (PyTorch's product is)."""
    for n in (0, 1, 33, 100_001):
        x, y = normal(dtype, n), normal(dtype, n, seed=1)
        expected = (x.float() * 2.3 + y.float()).to(dtype)
        assert torch.equal(axpy(2.3, x, y), expected)
        assert torch.equal(axpy(2.3, strided(x), y, y.clone()), expected)
    assert torch.equal(axpy(np.float64(2.3), x, y), expected) and torch.equal(axpy(2, x, y), torch.add(y, x, alpha=2))
    assert torch.equal(axpy(2.5, x.float(), y), (x.double() * 2.5 + y.double()).float())


# ---- AdamW ----
NUMBERS = 0.01, 0.9, 0.99, 1e-6, 0.1  # lr, beta1, beta2, eps, weight_decay


def steps(param, grads, average, seed=None):
    """`param` after a step for each of `grads`."""
    param, averages = param.clone(), [torch.zeros_like(param, dtype=average) for _ in range(2)]
    for step, grad in enumerate(grads, 1):
        adamw_step([param], [grad], *([each] for each in averages), step, *NUMBERS, seed)
    return param, *averages


@pytest.mark.parametrize(("dtype", "of_float32", "narrow"), [
    (torch.bfloat16, [(7,), (70_001,), ()], [(70_001,), (33, 17)]),
    pytest.param(torch.float16, [], [(7,), (70_001,)], marks=pytest.mark.nightly),
], ids=str)  # fmt: skip
def test_adamw(dtype, of_float32, narrow):
    """One step is that of a parameter of float32, rounded; the averages are of float32, or as narrow: each kind compiles anew."""
    for shape, average in [*((each, torch.float32) for each in of_float32), *((each, dtype) for each in narrow)]:
        param, grad = normal(dtype, *shape), normal(dtype, *shape, seed=1)
        exact = steps(param.float(), [grad.float()], torch.float32)
        for got, like, scale in zip(steps(param, [grad], average), exact, (3, 0, 0), strict=True):
            if got.dtype == torch.float32:
                torch.testing.assert_close(got, like, rtol=1e-5, atol=1e-12)
            else:
                check(got, like, scale=scale)


@each_half
def test_stochastic_rounding_is_right_in_the_mean(dtype):
    """Both neighbours and nothing else, as often as the distance says; subnormal numbers of float16, too."""
    size = 1e-6 if dtype == torch.float16 else 1.0
    param, grad = size * normal(torch.float32, 4000), normal(dtype, 4000, seed=1)
    param = param.to(dtype)
    numbers = lr, *_, eps, _ = size / 300, 0.9, 0.99, 1e-8, 0.0

    def step(param, seed):
        adamw_step([param], [grad], *([torch.zeros(4000)] for _ in range(2)), 1, *numbers, seed)

    exact = param.double() - lr * grad.double() / (grad.double().abs() + eps)  # in a first step both averages are the gradient's
    unit, got = units(exact, dtype), [param.clone() for _ in range(200)]
    for seed, each in enumerate(got):
        step(each, seed)
    wide = torch.stack(got).double()
    assert ((wide - exact).abs() < 1.001 * unit).all()
    assert abs(((wide.mean(0) - exact) / unit).mean()) < 3e-3  # each has a deviation of 0.4 at most, of 800,000
    nearest = param.clone()
    step(nearest, None)
    assert ((wide.mean(0) - exact) / unit).std() < 0.4 * ((nearest.double() - exact) / unit).std()


def test_a_seed_repeats_and_steps_differ():
    param, *grads = (normal(torch.bfloat16, 100_003, seed=i) for i in range(3))
    first = steps(param, grads, torch.float32, seed=7)
    assert all(map(torch.equal, first, steps(param, grads, torch.float32, seed=7)))
    for seed in (8, 7 + (1 << 32), -7):
        assert (first[0] != steps(param, grads, torch.float32, seed=seed)[0]).float().mean() > 0.1
    values = torch.full((2, 1000), 1.0, dtype=torch.bfloat16)  # both rows of a matrix without a layout of its own
    views = [strided(values), strided(torch.ones_like(values)), *(strided(torch.zeros(2, 1000)) for _ in range(2))]
    adamw_step(*([view] for view in views), 1, 1e-3, 0.9, 0.99, 1e-8, 0.0, 3)
    assert all(set(row.tolist()) == {1.0, 1 - 2**-8} for row in views[0]) and not torch.equal(*views[0])


def test_stochastic_rounding_keeps_what_is_not_finite():
    for seed in range(20):
        got = torch.tensor([INF, -INF, NAN, 3.3e38, 0.0], dtype=torch.bfloat16)
        adamw_step([got], *([torch.zeros(5)] for _ in range(3)), 1, 0.1, 0.9, 0.99, 1e-8, 0.0, seed)
        assert torch.equal(got.nan_to_num(0, 9, -9)[[0, 1, 2, 4]], torch.tensor([9, -9, 0, 0], dtype=torch.bfloat16))
        assert got[2].isnan()


@pytest.mark.parametrize("seed", [None, 3])
def test_the_optimiser_has_averages_of_float32(seed):
    param = torch.nn.Parameter(normal(torch.bfloat16, 33, 17))
    before, param.grad = param.detach().clone(), normal(torch.bfloat16, 33, 17, seed=1)
    optimiser = AdamW([param], *NUMBERS[:1], NUMBERS[1:3], *NUMBERS[3:], seed)
    optimiser.step()
    ((_, (exp_avg,), (exp_avg_sq,)),) = optimiser.groups
    expected = steps(before, [param.grad], torch.float32, seed)
    assert all(map(torch.equal, (param.detach(), exp_avg, exp_avg_sq), expected))
