"""The optimiser's step against ``torch.optim.AdamW``; without PyTorch, against the formula in NumPy."""

import math

import numpy as np
import pytest
from kernel_data import FRAMEWORKS, contiguous, make, random, strided, torch, transposed

import kernels.adamw
from kernels.adamw import AdamW, adamw_step

RTOL = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-14}
NUMBERS = 0.01, 0.9, 0.99, 1e-6, 0.1  # lr, beta1, beta2, eps, weight_decay
NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs")
VECTORS = [(0,), (1,), (7,), (64,), (200_003,)]  # the last is updated by threads
MATRICES = [(0, 3), (3, 0), (1, 1), (5, 17), (32, 32), (300, 401)]


def oracle(params, grads, numbers):
    """Copies of `params` after one step for each item of `grads`, and their averages."""
    lr, beta1, beta2, eps, weight_decay = numbers
    if torch is not None:
        tensors = [torch.nn.Parameter(torch.from_numpy(param.copy())) for param in params]
        options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay, "foreach": True}
        optimiser = torch.optim.AdamW(tensors, **options)
        for now in grads:
            for tensor, grad in zip(tensors, now, strict=True):
                tensor.grad = torch.from_numpy(grad.copy()).to(tensor.dtype)
            optimiser.step()
        states = [optimiser.state[tensor] for tensor in tensors]
        averages = [[state[name].numpy() for state in states] for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().numpy() for tensor in tensors], *averages
    params = [param.copy() for param in params]
    m, v = ([np.zeros_like(param) for param in params] for _ in range(2))
    for step, now in enumerate(grads, 1):
        for i, grad in enumerate(now):
            grad = grad.astype(m[i].dtype)
            m[i] = beta1 * m[i] + (1 - beta1) * grad
            v[i] = beta2 * v[i] + (1 - beta2) * grad * grad
            root = np.sqrt(v[i] / (1 - beta2**step)) + eps
            with np.errstate(invalid="ignore"):
                params[i] = params[i] * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m[i] / root
    return params, m, v


def check(got, expected, scale=1.0):
    for lists in zip(got, expected, strict=True):
        for array, like in zip(*lists, strict=True):
            rtol = RTOL[np.dtype(like.dtype)]
            np.testing.assert_allclose(np.asarray(array), like, rtol=rtol, atol=rtol * scale)


# dtype of parameters, gradients and averages, shapes, layout; each case is a compilation
CASES = [
    (np.float32, np.float32, np.float32, VECTORS, contiguous),
    (np.float64, np.float64, np.float64, VECTORS, strided),
    (np.float32, np.float32, np.float64, VECTORS, contiguous),
    (np.float32, np.float32, np.float32, MATRICES, contiguous),
    (np.float64, np.float32, np.float64, MATRICES, transposed),
    (np.float64, np.float64, np.float64, [(2, 1, 3), (4, 5, 6)], transposed),
    (np.float64, np.int32, np.float64, [(), ()], contiguous),
]


@pytest.mark.parametrize(("dtype", "grad_dtype", "state", "shapes", "layout"), CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_steps(framework, dtype, grad_dtype, state, shapes, layout):
    layout = layout if shapes[0] else np.array
    params = [layout(np.array(random(shape, dtype, i))) for i, shape in enumerate(shapes)]
    grads = [[layout(np.array(random(shape, grad_dtype, 10 * i + n))) for i, shape in enumerate(shapes)] for n in range(4)]
    expected = oracle([param.astype(state) for param in params], grads, NUMBERS)
    averages = [[layout(np.zeros(shape, state)) for shape in shapes] for _ in range(2)]
    lists = [[make(framework, array) for array in arrays] for arrays in (params, *averages)]
    before = [[grad.copy() for grad in now] for now in grads]
    for step, now in enumerate(grads, 1):
        assert adamw_step(lists[0], [make(framework, grad) for grad in now], *lists[1:], step, *NUMBERS) is None
    if state != dtype:  # rounded to float32 after each step
        expected = [array.astype(dtype) for array in expected[0]], *expected[1:]
    check((params, *averages), expected)
    for now, copies in zip(grads, before, strict=True):
        for grad, copy in zip(now, copies, strict=True):
            np.testing.assert_array_equal(grad, copy)
    if layout is strided:
        assert all(np.isnan(param.base[..., 0::3]).all() for param in params)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers(framework):
    """Each number at the end of its range, by the formula; the learning rate may be an int."""
    for numbers in [(1, 0.0, 0.0, 1e-3, 0.0), (0.5, 0.0, 0.9, 0.1, 2.0), (0, 0.9, 0.9, 0.1, 0.3), (0.1, 0.9, 0.0, 0.5, 0)]:
        params, grads = [random(9, np.float64)], [[random(9, np.float64, seed)] for seed in (1, 2)]
        lists = [[array.copy()] for array in (params[0], np.zeros(9), np.zeros(9))]
        tensors = [[make(framework, array) for array in arrays] for arrays in lists]
        for step in (1, 2):
            adamw_step(tensors[0], [make(framework, grads[step - 1][0])], *tensors[1:], step, *numbers)
        check(lists, oracle(params, grads, numbers))


def test_the_first_step_is_the_learning_rate():
    """Without decay and eps, the first step goes by `lr` against each gradient's sign, whatever its size."""
    param, grad = np.zeros(5), np.array([1e-150, -1e-3, 2.0, -1e100, 5.0])
    adamw_step([param], [grad], [np.zeros(5)], [np.zeros(5)], 1, 0.125, 0.9, 0.999, 0.0, 0.0)
    np.testing.assert_allclose(param, -0.125 * np.sign(grad), rtol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_that_are_not_finite(framework):
    grad = np.array([math.nan, math.inf, -math.inf, 0, 1, 1])
    param = np.array([1, 1, 1, 1, math.nan, -math.inf])
    arrays = param.copy(), grad, np.zeros(6), np.zeros(6)
    adamw_step(*([make(framework, array)] for array in arrays), 1, *NUMBERS)
    check([[array] for array in (arrays[0], *arrays[2:])], oracle([param], [[grad]], NUMBERS))
    assert np.isnan(arrays[0]).tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_parameter_that_stands_twice_is_updated_twice(framework):
    param, grad = random(7, np.float64), random(7, np.float64, seed=1)
    once = [param.copy(), grad, np.zeros(7), np.zeros(7)]
    for _ in range(2):
        adamw_step(*([make(framework, array)] for array in once), 3, *NUMBERS)
    twice = [param.copy(), grad, np.zeros(7), np.zeros(7)]
    adamw_step(*([make(framework, array)] * 2 for array in twice), 3, *NUMBERS)
    for array, like in zip(twice, once, strict=True):
        np.testing.assert_array_equal(array, like)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bound(framework):
    params, grads = [random(64, np.float64), random(9, np.float64)], [random(64, np.float64, 1), random(9, np.float64, 2)]
    expected = oracle(params, [grads], NUMBERS)
    averages = [[np.zeros_like(param) for param in params] for _ in range(2)]
    lists = [[make(framework, array) for array in arrays] for arrays in (params, grads, *averages)]
    launch = adamw_step.bind(*lists, 1, *NUMBERS)
    launch()
    check((params, *averages), expected)
    launch.rebind(step=2)


# ---- what is refused ----


def given(**replaced):
    """The arguments of a step of two vectors, some of them replaced."""
    lists = {name: [random(5, np.float64, 2 * i), random(3, np.float64, 2 * i + 1)] for i, name in enumerate(NAMES)}
    arguments = lists | dict(zip(("step", "lr", "beta1", "beta2", "eps", "weight_decay"), (1, *NUMBERS), strict=True))
    return arguments | replaced


def refuse(arguments, message, framework="numpy", compiled=True):
    """The step raises a ValueError that begins with `message`, and has written nothing.

    If not `compiled`, Python runs the kernel's own lines: for types that would be compiled for this refusal only.
    """
    step = adamw_step if compiled else adamw_step.py_func
    arguments = {
        name: [make(framework, item) for item in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    items = [item for value in arguments.values() if isinstance(value, list) for item in value]
    before = [np.asarray(item).copy() for item in items]
    for _ in range(2):  # the call that compiles, and one that finds the kernel compiled
        with pytest.raises(ValueError, match="^" + message):
            step(**arguments)
    for item, copy in zip(items, before, strict=True):
        np.testing.assert_array_equal(np.asarray(item), copy)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lists_that_do_not_fit(framework, name):
    vectors = [np.ones(5), np.ones(3)]
    refuse(given(**{name: vectors[:1]}), f"{name}: must be as many", framework)
    refuse(given(**{name: [*vectors, np.ones(1)]}), f"{name}: must be as many", framework)
    refuse(given(**{name: [np.ones(5), np.ones(4)]}), f"{name}: their shapes", framework)


def test_lists_of_another_rank():
    refuse(given(grads=[np.ones((5, 1)), np.ones((3, 1))]), "grads: their shapes")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("params", np.int64, "params: their dtype"),
        ("exp_avgs", np.float32, "exp_avgs: their dtype"),
        ("exp_avg_sqs", np.int64, "exp_avg_sqs: their dtype"),
    ],
)
def test_dtypes_that_are_refused(name, dtype, message):
    refuse(given(**{name: [np.ones(5, dtype), np.ones(3, dtype)]}), message, compiled=name == "params")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step", (0, -1)),
        ("lr", (-1e-9, math.nan)),
        ("beta1", (-0.1, 1.0, math.nan)),
        ("beta2", (-0.1, 1.0, math.nan)),
        ("eps", (-1e-9, math.nan)),
        ("weight_decay", (-1e-9, math.nan)),
    ],
)
def test_numbers_that_are_refused(name, values):
    for value in values:
        refuse(given(**{name: value}), f"{name}: must")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    """Of the second item, after one that is right."""
    memory = random(9, np.float64)
    for i, name in enumerate(NAMES):
        for other in NAMES[i + 1 :]:
            lists = given()
            lists[name], lists[other] = [lists[name][0], memory[:5]], [lists[other][0], memory[4:]]
            for third in NAMES:
                if third not in (name, other):
                    lists[third] = [lists[third][0], random(5, np.float64, 9)]
            refuse(lists, "(params|exp_avgs|exp_avgs, exp_avg_sqs): one overlaps", framework)


@pytest.mark.skipif(torch is None, reason="NumPy's expanded arrays are readonly")
@pytest.mark.parametrize("name", ["params", "exp_avgs", "exp_avg_sqs"])
def test_expanded_tensors_are_refused(name):
    lists = {each: [torch.ones(4, dtype=torch.float64)] for each in NAMES}
    lists[name] = [torch.ones(1, dtype=torch.float64).expand(4)]
    with pytest.raises(ValueError, match=rf"^{name}: each element"):
        adamw_step(**lists, step=1, lr=1.0, beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0.1)
    assert all((tensor == 1).all() for each in lists.values() for tensor in each)


def test_empty_lists_are_refused():
    with pytest.raises(ValueError, match="empty list"):
        adamw_step([], [], [], [], 1, *NUMBERS)


# ---- the optimiser ----


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
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
    arrays = [random((2, 3), np.float64, seed) for seed in range(4)]
    arrays[3] = abs(arrays[3])
    numbers = tuple(np.float64(x) for x in (0.99, 0.9, 0.1, 0.99, 0.01, 2.0, 1e-6, 0.05))
    flat = [array.copy().reshape(-1) for array in arrays]
    kernels.adamw._update_block.py_func(*flat, numbers)
    kernels.adamw._update(*arrays, numbers)
    for array, like in zip(arrays, flat, strict=True):
        np.testing.assert_allclose(array.reshape(-1), like, rtol=1e-14)
