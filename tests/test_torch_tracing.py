"""Calls that PyTorch traces or transforms: what stays of earlier calls, backward passes, exceptions, and what is said."""

import pytest
from frameworks import torch

from fastexchange import fast_args

pytestmark = pytest.mark.skipif(torch is None or not hasattr(torch.library, "register_vmap"), reason="PyTorch is too old")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


def with_tensor():
    @fast_args(out="a[n] -> y[n]")
    def add(a, b, y):
        for i in range(a.size):
            y[i] = a[i] + b[i]

    return add, lambda b: b


def with_list():
    @fast_args(out="a[n] -> y[n]")
    def add_first(a, b: "list[torch.Tensor]", y):
        for i in range(a.size):
            y[i] = a[i] + b[0][i]

    return add_first, lambda b: [b]


def with_optional():
    @fast_args(out="a[n] -> y[n]")
    def add_if(a, b: "torch.Tensor | None", y):
        for i in range(a.size):
            y[i] = a[i]
            if b is not None:
                y[i] += b[i]

    return add_if, lambda b: b


def with_two_outputs():
    @fast_args(out="a[n] -> y[n], z[n]")
    def add_twice(a, b, y, z):
        for i in range(a.size):
            y[i] = z[i] = a[i] + b[i]

    return lambda a, b, *given: add_twice(a, b, *given)[0], lambda b: b


def faked(call, b):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = call(mode.from_tensor(b)).shape
    return torch.ones(shape) * b + torch.arange(3.0)


TRACED = {
    "vmap": lambda call, b: torch.vmap(call)(b[None])[0],
    "functionalize": lambda call, b: torch.func.functionalize(call)(b),
    "fake": faked,
    "make_fx": lambda call, b: torch.fx.experimental.proxy_tensor.make_fx(call)(b)(b),
    "grad of a constant": lambda call, b: torch.func.grad(lambda w: (call(w.detach()) * w).sum())(b),
}


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("mode", TRACED)
@pytest.mark.parametrize("make", [with_tensor, with_list, with_optional, with_two_outputs])
def test_an_output_that_native_code_allocates_is_no_given_one(make, mode, is_warm):
    kernel, given = make()
    a, b = torch.arange(3.0), torch.ones(3)
    for _ in range(20 * is_warm):
        kernel(a, given(b))
    for _ in range(2):
        assert TRACED[mode](lambda b: kernel(a, given(b)), b).tolist() == [1, 2, 3]
        assert kernel(a, given(b)).tolist() == [1, 2, 3]


def test_a_given_output_is_written_by_a_call_that_is_traced():
    kernel, _ = with_tensor()
    a, b, y = torch.arange(3.0), torch.ones(1, 3), torch.zeros(1, 3)
    for _ in range(20):
        kernel(a, b[0], torch.zeros(3))
    assert torch.vmap(lambda b, y: kernel(a, b, y))(b, y).tolist() == [[1, 2, 3]] == y.tolist()
    with pytest.raises(ValueError, match="'y' is written to, and vmap has not been given a batch of it"):
        torch.vmap(lambda b: kernel(a, b, torch.zeros(3)))(b)


# ---- exceptions ------------------------------------------------------------------------------------------------------

TEXTS = ["ä" * 3000, "x" + "€" * 5000, "e" * 100_000, "before\0after", "", "\ud800 alone"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_text_of_an_exception_is_whole(text):
    @fast_args(out="x[n] -> y[n]")
    def failing(x, y):
        raise ValueError(text)

    op, x = failing.as_torch_op(f"fx_tracing::failing_{TEXTS.index(text)}"), torch.ones(2)
    said = text.replace("\0", "\\x00").replace("\ud800", "\\ud800")
    for _ in range(2):
        for call in (lambda: op(x), lambda: torch.vmap(failing)(x[None]), lambda: torch.vmap(op)(x[None])):
            with pytest.raises(ValueError) as info:
                call()
            assert str(info.value) == text
        with pytest.raises((RuntimeError, ValueError)) as info:
            op.overload(x)
        assert str(info.value) in (said, text)  # the latter where PyTorch calls Python code
