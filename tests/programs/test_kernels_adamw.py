"""The optimiser's step against the formula in NumPy, and the optimiser against ``torch.optim.AdamW``."""

import math

import numpy as np
import pytest
from frameworks import needs_torch
from kernel_data import call, contiguous, random, strided, torch, transposed

import kernels.adamw
from kernels.adamw import AdamW, adamw_step

NUMBERS = 0.01, 0.9, 0.99, 1e-6, 0.1  # lr, beta1, beta2, eps, weight_decay
VECTORS = [(0,), (1,), (7,), (64,), (200_003,)]  # the last is updated by threads
MATRICES = [(0, 3), (3, 0), (1, 1), (5, 17), (32, 32), (300, 401)]


def oracle(params, exp_avgs, exp_avg_sqs, grads, numbers):
    """The parameters and their averages after one step for each item of `grads`."""
    lr, beta1, beta2, eps, weight_decay = numbers
    results = []
    for param, m, v, *own in zip(params, exp_avgs, exp_avg_sqs, *grads, strict=True):
        for step, grad in enumerate(own, 1):
            grad = grad.astype(m.dtype)
            m = beta1 * m + (1 - beta1) * grad
            v = beta2 * v + (1 - beta2) * grad * grad
            root = np.sqrt(v / (1 - beta2**step)) + eps
            param = (param * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / root).astype(param.dtype)
        results.append((param, m, v))
    return [each for several in zip(*results, strict=True) for each in several]


def check_steps(params, exp_avgs, exp_avg_sqs, grads, numbers=NUMBERS):
    """A step for each item of `grads` does what the formula says."""
    expected = oracle(params, exp_avgs, exp_avg_sqs, grads, numbers)
    for step, now in enumerate(grads, 1):
        got = call(adamw_step, params, now, exp_avgs, exp_avg_sqs, step, *numbers, written=(0, 2, 3))
        for array, values in zip([*params, *exp_avgs, *exp_avg_sqs], got, strict=True):
            array[...] = values
    for array, like in zip(got, expected, strict=True):
        rtol = 2e-6 if np.dtype(array.dtype) == np.float32 else 1e-14
        np.testing.assert_allclose(array, like, rtol=rtol, atol=rtol)
    return got


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "state", "shapes", "layout"),
    # each is a compilation
    [
        (np.float32, np.float32, np.float32, VECTORS, contiguous),
        (np.float64, np.float64, np.float64, VECTORS, strided),
        (np.float32, np.float32, np.float64, VECTORS, contiguous),
        (np.float32, np.float32, np.float32, MATRICES, contiguous),
        (np.float64, np.float32, np.float64, MATRICES, transposed),
        (np.float64, np.float64, np.float64, [(2, 1, 3), (4, 5, 6)], transposed),
        (np.float64, np.int32, np.float64, [(), ()], np.array),
    ],
)
def test_steps(dtype, grad_dtype, state, shapes, layout):
    def lists(dtype, seed):
        return [layout(random(shape, dtype, 10 * i + seed)) for i, shape in enumerate(shapes)]

    averages = [[layout(np.zeros(shape, state)) for shape in shapes] for _ in range(2)]
    check_steps(lists(dtype, 0), *averages, [lists(grad_dtype, seed) for seed in range(1, 5)])


@pytest.mark.parametrize(
    "numbers", [(1, 0.0, 0.0, 1e-3, 0.0), (0.5, 0.0, 0.9, 0.1, 2.0), (0, 0.9, 0.9, 0.1, 0.3), (0.1, 0.9, 0.0, 0.5, 0)]
)
def test_numbers_at_the_end_of_their_range(numbers):
    vectors = [[array] for array in (random(9, np.float64), np.zeros(9), np.zeros(9))]
    check_steps(*vectors, [[random(9, np.float64, seed)] for seed in (1, 2)], numbers)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
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
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    losses = []
    for _ in range(30):
        for model, optimiser in zip(models, (ours, theirs), strict=True):
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
