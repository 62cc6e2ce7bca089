"""The kernels with bfloat16 and float16: against PyTorch in float32, rounded once, and against its own operators for these types.

Errors are in units in the last place of the type.
"""

import math

import numpy as np
import pytest
from kernel_data import torch

if torch is None:
    pytest.skip("PyTorch has the tensors", allow_module_level=True)

from torch.nn import functional

from fastexchange import fast_args
from kernels.adamw import AdamW, adamw_step
from kernels.axpy import axpy
from kernels.cross_entropy import cross_entropy
from kernels.exponential import exp
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.rows import largest, sum_of, sum_of_exp, sum_of_squares
from kernels.sampling import sample
from kernels.softmax import softmax
from kernels.stochastic_rounding import mixed

HALVES = [torch.bfloat16, torch.float16]
MATRICES = [(1, 1), (5, 17), (33, 129), (20, 5000)]  # the last: more than one block of a sum, and threads
INF, NAN = math.inf, math.nan


def normal(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x):
    """The same values at every third element of memory that is NaN elsewhere."""
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1] + 1), NAN, dtype=x.dtype)
    view = wide[..., 1::3]
    view.copy_(x)
    return view


def units(numbers, dtype):
    """The unit in the last place of `dtype` at each of `numbers`, in float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(numbers.double().abs().clamp(min=info.tiny))
    return info.eps * 2.0 ** (exponent - 1).double()


def check(got, exact, at_most=0.51, scale=0.0):
    """`got` is `exact`, computed in a wider type, but for `at_most` units in the last place of its type.

    `scale`: the size of a number that was rounded to a wider type on the way.
    """
    assert got.shape == exact.shape
    exact = exact.double()
    wide, limit = got.double(), at_most * units(exact, got.dtype) + scale * 2.0**-22
    different = (wide - exact).abs() > limit
    alike = (wide == exact.to(got.dtype).double()) | (wide.isnan() & exact.isnan())
    assert not (different | (wide.isnan() != exact.isnan())).logical_and(~alike).any()


# ---- what the kernels share ----


@fast_args
def _exp_of_each(x, out):
    for j in range(x.shape[0]):
        out[j] = exp(x[j])


@pytest.mark.parametrize("dtype", HALVES)
def test_exp_of_all_numbers(dtype):
    """Half a unit in the last place, subnormal results too; exact where it overflows; NaN for NaN."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out, wide = torch.empty_like(x), torch.empty(1 << 16)
    _exp_of_each(x, out)
    exact = x.double().exp()
    check(out, exact)
    _exp_of_each(x, wide)
    finite = (exact > 2.0**-126) & (exact < 2.0**127)
    assert ((wide.double() / exact - 1).abs()[finite] < 7e-6).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_rows(dtype):
    @fast_args
    def of_a_row(x):
        return largest(x), sum_of_exp(x, np.float32(1)), sum_of(x, np.float32), sum_of_squares(x, np.float32(0.25))

    for n in (1, 2, 63, 4096, 10_001):
        x = normal(dtype, n, seed=n)
        for row in (x, strided(x)):
            top, exps, total, squares = of_a_row(row)
            wide = x.double()
            assert top == wide.max()
            assert exps == pytest.approx((wide - 1).exp().sum().item(), rel=7e-6)
            assert total == pytest.approx(wide.sum().item(), abs=1e-4)
            assert squares == pytest.approx(((wide - 0.25) ** 2).sum().item(), rel=1e-5)  # strided: one by one
    assert of_a_row(torch.tensor([-INF, -INF], dtype=dtype))[0] == -INF
    assert math.isnan(of_a_row(torch.tensor([1, NAN, INF], dtype=dtype))[0])


# ---- rows of matrices ----

KERNELS = {
    "softmax": (softmax, lambda x, w, b: torch.softmax(x, 1), False),
    "log_softmax": (log_softmax, lambda x, w, b: torch.log_softmax(x, 1), False),
    "rms_norm": (lambda x, w, b, out=None: rms_norm(x, w, 1e-3, out) if out is not None else rms_norm(x, w, 1e-3),
                 lambda x, w, b: functional.rms_norm(x, x.shape[1:], w, 1e-3), True),
    "layer_norm": (lambda x, w, b, out=None: layer_norm(x, w, b, 1e-3, out),
                   lambda x, w, b: functional.layer_norm(x, x.shape[1:], w, b, 1e-3), True),
}  # fmt: skip


def call(name, x, weight, bias, *out):
    kernel, _, is_weighted = KERNELS[name]
    return kernel(x, weight, bias, *out) if is_weighted else kernel(x, *out)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_are_pytorchs_in_float64_rounded(dtype, name):
    """And no further from it than PyTorch's own operator for the type, in the mean."""
    for shape in MATRICES:
        x, weight, bias = (normal(dtype, *size, seed=i) for i, size in enumerate((shape, shape[1:], shape[1:])))
        got = call(name, x, weight, bias)
        exact = KERNELS[name][1](x.double(), weight.double(), bias.double())
        assert got.dtype == dtype
        check(got, exact, scale=10)
        theirs = KERNELS[name][1](x, weight, bias)
        ours_off, theirs_off = ((each.double() - exact).abs().mean() for each in (got, theirs))
        assert ours_off <= 1.01 * theirs_off + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_in_place_strided_and_of_other_types(dtype, name):
    x, weight, bias = (normal(dtype, *size, seed=i) for i, size in enumerate(((33, 129), (129,), (129,))))
    expected = call(name, x, weight, bias)
    same = x.clone()
    call(name, same, weight, bias, same)
    assert torch.equal(same, expected)
    out = strided(torch.zeros_like(x))
    call(name, strided(x), weight, bias, out)
    check(out, expected.double(), at_most=1)
    wide = torch.empty(x.shape)
    call(name, x, weight, bias, wide)  # in float32, and rounded to it
    exact = KERNELS[name][1](x.double(), weight.double(), bias.double())
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    narrow = torch.empty_like(x)
    call(name, x.float(), weight.float(), bias.float(), narrow)
    check(narrow, exact, scale=10)
    if KERNELS[name][2]:
        check(call(name, x, weight.float(), bias.float()), exact, scale=10)


def test_numpys_float16():
    x = normal(torch.float16, 33, 129)
    got = softmax(x.numpy())
    assert got.dtype == np.float16 and np.array_equal(got, softmax(x).numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_softmax_of_8_bits(dtype):
    x = normal(dtype, 33, 9)
    exact = torch.softmax(x.double(), 1)
    assert torch.equal(softmax(x).double(), exact.to(dtype).double())


@pytest.mark.parametrize("dtype", HALVES)
def test_softmax_of_extreme_rows(dtype):
    most = torch.finfo(dtype).max
    rows = [[most, most, -most], [-most] * 3, [-INF, 0, 1], [-INF] * 3, [INF, 0, 1], [NAN, 0, 1], [0, 1, -NAN], [0, -80, -95]]
    x = torch.tensor(rows, dtype=dtype)
    for kernel, theirs in ((softmax, torch.softmax), (log_softmax, torch.log_softmax)):
        got, expected = kernel(x), theirs(x.double(), 1)
        check(got, expected, scale=0.1 if kernel is log_softmax else 0)
        assert torch.equal(got.isnan(), theirs(x, 1).isnan())


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_a_large_mean_and_of_non_finite_rows(dtype):
    """The deviations are what counts: one pass over squares would cancel."""
    x = normal(dtype, 4, 4097) + 100
    x[1:, 0] = torch.tensor([INF, -INF, NAN], dtype=dtype)
    for name in ("layer_norm", "rms_norm"):
        got = call(name, x, None, None)
        check(got[:1], KERNELS[name][1](x.double(), None, None)[:1], scale=40)
        assert torch.equal(got.isnan(), KERNELS[name][1](x.float(), None, None).isnan())


# ---- rotary, cross entropy, sampling, axpy ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_rotary(dtype, interleaved):
    x, angle = normal(dtype, 2, 3, 65, 128), normal(torch.float64, 70, 64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    got = rotary(x, cos, sin, 5, interleaved)
    exact = rotary(x.double(), cos.double(), sin.double(), 5, interleaved)
    check(got, exact, scale=4)
    rotary(x, cos, sin, 5, interleaved, x)
    assert torch.equal(x, got)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALVES)
def test_cross_entropy(dtype, smoothing):
    for rows, classes in [(1, 1), (33, 129), (20, 5000)]:
        logits, target = 3 * normal(dtype, rows, classes), torch.randint(classes, (rows,))
        target[3::7] = -100
        got = cross_entropy(logits, target, smoothing, -100)
        exact = functional.cross_entropy(logits.double(), target, reduction="none", label_smoothing=smoothing)
        check(got, exact, scale=40)


@pytest.mark.parametrize("dtype", HALVES)
def test_sampling(dtype):
    """The tokens of the same logits in float64."""
    logits, u = 3 * normal(dtype, 9, 2000), torch.rand(9, dtype=torch.float64)
    for k, p in [(20, 1.0), (2000, 0.9), (500, 0.5)]:
        assert torch.equal(sample(logits, k, p, 0.7, u), sample(logits.double(), k, p, 0.7, u))


@pytest.mark.parametrize("dtype", HALVES)
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


@pytest.mark.parametrize("shape", [(7,), (70_001,), (33, 17), ()])
@pytest.mark.parametrize("dtype", HALVES)
def test_adamw(dtype, shape):
    """One step is PyTorch's for a parameter of float64, rounded; the averages are of float32, or as narrow."""
    param, grad = normal(dtype, *shape), normal(dtype, *shape, seed=1)
    for average in (torch.float32, dtype):
        exact = steps(param.double(), [grad.double()], torch.float64)
        for got, like, scale in zip(steps(param, [grad], average), exact, (3, 0, 0), strict=True):
            if got.dtype == torch.float32:
                torch.testing.assert_close(got.double(), like, rtol=1e-5, atol=1e-12)
            else:
                check(got, like, scale=scale)


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_is_right_in_the_mean(dtype):
    """Both neighbours and nothing else, as often as the distance says; subnormal numbers of float16, too."""
    size = 1e-6 if dtype == torch.float16 else 1.0
    param, grad = size * normal(torch.float32, 4000), normal(dtype, 4000, seed=1)
    param = param.to(dtype)
    adamw = lambda param, wide, seed: adamw_step(  # noqa: E731
        [param], [grad], [torch.zeros_like(param, dtype=wide)], [torch.zeros_like(param, dtype=wide)],
        1, size / 300, 0.9, 0.99, 1e-8, 0.0, seed,
    )  # fmt: skip
    exact = param.double()
    adamw(exact, torch.float64, None)
    got = []
    for seed in range(200):
        got.append(param.clone())
        adamw(got[-1], torch.float32, seed)
    wide = torch.stack(got).double()
    unit = units(exact, dtype)
    assert ((wide - exact).abs() < 1.001 * unit).all()
    assert abs(((wide.mean(0) - exact) / unit).mean()) < 3e-3  # each has a deviation of 0.4 at most, of 800,000
    nearest = param.clone()
    adamw(nearest, torch.float32, None)
    assert ((wide.mean(0) - exact) / unit).std() < 0.4 * ((nearest.double() - exact) / unit).std()


def test_a_seed_repeats_and_steps_differ():
    for shape in ((100_003,), (99, 33)):
        param, grads = normal(torch.bfloat16, *shape), [normal(torch.bfloat16, *shape, seed=i) for i in (1, 2)]
        first = steps(param, grads, torch.float32, seed=7)
        assert all(map(torch.equal, first, steps(param, grads, torch.float32, seed=7)))
        for seed in (8, 7 + (1 << 32), -7):
            assert (first[0] != steps(param, grads, torch.float32, seed=seed)[0]).float().mean() > 0.1
    values = torch.full((2, 1000), 1.0, dtype=torch.bfloat16)  # both rows of a matrix without a layout of its own
    views = [strided(values), strided(torch.ones_like(values)), *(strided(torch.zeros(2, 1000)) for _ in range(2))]
    adamw_step(*([view] for view in views), 1, 1e-3, 0.9, 0.99, 1e-8, 0.0, 3)
    assert set(views[0].flatten().tolist()) == {1.0, 1 - 2**-8} and not torch.equal(*views[0])


def test_stochastic_rounding_keeps_what_is_not_finite():
    param = torch.tensor([INF, -INF, NAN, 3.3e38, 0.0], dtype=torch.bfloat16)
    zeros = [torch.zeros(5) for _ in range(3)]
    for seed in range(20):
        got = param.clone()
        adamw_step([got], *([each.clone()] for each in zeros), 1, 0.1, 0.9, 0.99, 1e-8, 0.0, seed)
        assert torch.equal(got.nan_to_num(0, 9, -9)[[0, 1, 2, 4]], torch.tensor([9, -9, 0, 0], dtype=torch.bfloat16))
        assert got[2].isnan()


def test_small_steps_are_not_lost_by_stochastic_rounding():
    """Steps of a tenth of the last place, rounded to nearest, leave a parameter where it is."""
    for seed, low, high in ((None, 1, 1), (0, 0.9, 0.985)):
        param, averages = torch.ones(1000, dtype=torch.bfloat16), [[torch.zeros(1000)] for _ in range(2)]
        for step in range(1, 101):
            given = None if seed is None else seed + step
            adamw_step([param], [torch.ones(1000)], *averages, step, 4e-4, 0.9, 0.99, 1e-8, 0.0, given)
        assert low <= param.float().mean() <= high


def test_a_seed_is_refused_for_wider_parameters():
    vectors = [[np.ones(3)] for _ in range(4)]
    with pytest.raises(ValueError, match=r"^seed: only parameters of bfloat16 and float16"):
        adamw_step(*vectors, 1, *NUMBERS, 5)


def test_mixed_is_murmurhash3s_last_step():
    def fmix32(h):
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return h ^ h >> 16

    for key in (0, 1, 0xDEADBEEF, 0xFFFFFFFF):
        assert mixed(key) == fmix32(key)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_optimiser_trains_parameters_of_16_bits(seed):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
    optimiser = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, seed=seed)
    assert {each.dtype for _, *averages in optimiser.groups for group in averages for each in group} == {torch.float32}
    x, y = torch.randn(64, 8).bfloat16(), torch.randn(64, 1).bfloat16()
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ---- what is refused ----


def test_refused_as_in_wider_types():
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^out: its dtype"):
        softmax(x, torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^out: overlaps"):
        memory = torch.zeros(4, 4, dtype=torch.bfloat16)
        layer_norm(memory[1:], None, None, 1e-5, memory[:-1])
    with pytest.raises(ValueError, match=r"^exp_avgs: their dtype"):
        vectors = torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3)
        adamw_step(*([each] for each in vectors), 1, *NUMBERS)
