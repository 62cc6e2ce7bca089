"""A gradient that is asked of a kernel, and that nobody has declared, is an error: in every mode of PyTorch, by every name."""

import functools
import itertools

import pytest
import torch_operators
from nights import at_night
from raising import check_raises
from scale_kernels import elementwise
from torch_operators import doubled, doubled_backward, torch

from fastexchange import fast_args

pytestmark = pytest.mark.filterwarnings("ignore")
nothing_compiled = torch_operators.nothing_compiled
redouble = fast_args(elementwise("redouble(x)", "x[i] *= 2"), mutates="x")


@fast_args(mutates="xs")
def redouble_all(xs: "list[torch.Tensor]"):
    for x in xs:
        x *= 2


@functools.cache
def operator(kernel, backward=None):
    name = kernel.__qualname__ + ("" if backward is None else "_with_backward")
    return kernel.as_torch_op(f"fx_gradients::{name}", backward=backward)


def writing(function, is_list=False):
    def call(x):
        made = x * 1
        function([made] if is_list else made)
        return made

    return call


CALLED_BY = {
    "kernel": lambda: doubled, "operator": lambda: operator(doubled), "torch.ops": lambda: operator(doubled).overload,
    "backward": lambda: operator(doubled, doubled_backward),
    "torch.ops backward": lambda: operator(doubled, doubled_backward).overload, "mutates": lambda: writing(redouble),
    "mutates operator": lambda: writing(operator(redouble)),
    "mutates torch.ops": lambda: writing(operator(redouble).overload), "list": lambda: writing(redouble_all, True),
    "list torch.ops": lambda: writing(operator(redouble_all).overload, True),
}  # fmt: skip
"""Functions that double, and reach a kernel by this name."""
by_each_name = pytest.mark.parametrize("name", CALLED_BY)


def in_compiled_code(modes):
    """Some names, each with its share of modes; at night every name with every mode."""
    some = [(name, [*modes][i::4]) for i, name in enumerate(("kernel", "torch.ops backward", "mutates operator", "list"))]
    cases = at_night([*some, *itertools.product(CALLED_BY, [[*modes]])], *some)
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{case[0]}, {len(case[1])} modes")


def loss(function):
    return lambda x: (function(x) * x).sum()


def dual(function):
    forward = torch.autograd.forward_ad

    def call(x):
        with forward.dual_level():
            return forward.unpack_dual(function(forward.make_dual(x, torch.ones_like(x)))).tangent

    return call


def without_grad(function):
    return torch.no_grad()(lambda x: function(x))


def traced(function):
    return lambda x: torch.fx.experimental.proxy_tensor.make_fx(function)(x)(x)


MODES = {
    "grad": lambda f: torch.func.grad(loss(f)), "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x),
    "jacrev": lambda f: torch.func.jacrev(f), "jacfwd": lambda f: torch.func.jacfwd(f),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "linearize": lambda f: lambda x: torch.func.linearize(f, x)[1](x), "dual": dual,
    "make_fx(grad)": lambda f: traced(torch.func.grad(loss(f))),
    "make_fx(jvp)": lambda f: traced(lambda x: torch.func.jvp(f, (x,), (x,))[1]),
    "vmap(grad)": lambda f: lambda x: torch.func.vmap(torch.func.grad(loss(f)))(x[None]),
    "grad(vmap)": lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x[None]).sum()),
    "jvp in no_grad": lambda f: lambda x: torch.func.jvp(without_grad(f), (x,), (x,)),
}  # fmt: skip
OF_FX = "FX to symbolically trace a dynamo-optimized"
REFUSED = r"is differentiated by a transform of torch\.func|carries a tangent|jvp function for custom autograd"


@by_each_name
def test_an_undeclared_gradient_is_an_error(name):
    function, x = CALLED_BY[name](), torch.arange(3.0)
    for transformed in MODES.values():
        for _ in range(2):
            check_raises((BufferError, RuntimeError), REFUSED, transformed(function), x)
            assert function(x).tolist() == [0, 2, 4]  # native code makes this call from now on


@pytest.mark.slow
@in_compiled_code(MODES)
def test_an_undeclared_gradient_is_an_error_in_compiled_code(case):
    function, x = CALLED_BY[case[0]](), torch.arange(3.0)
    for number, name in enumerate(case[1]):
        mode, traces = MODES[name], name == "linearize" or "make_fx" in name
        compiled = functools.partial(torch.compile, backend=["eager", "aot_eager"][number % 2])
        for call, said in ((compiled(mode(function)), REFUSED), (mode(compiled(function)), OF_FX if traces else REFUSED)):
            torch.compiler.reset()
            check_raises((Exception,), said, call, x)


CONSTANTS = {
    "grad": lambda f: torch.func.grad(lambda w: (f(torch.arange(3.0)) * w).sum()),
    "grad, wrapped": lambda f: torch.func.grad(lambda w: (f(w.detach() * 1) * w).sum()),
    "grad, no_grad": lambda f: torch.func.grad(lambda w: (without_grad(f)(w) * w).sum()),
    "vmap(grad)": lambda f: lambda x: torch.func.vmap(torch.func.grad(lambda w: (f(w.detach()) * w).sum()))(x[None])[0],
    "jvp": lambda f: lambda x: torch.func.jvp(lambda w: f(w.detach()) * w, (x,), (torch.ones(3),))[1],
    "make_fx(grad)": lambda f: traced(torch.func.grad(lambda w: (f(w.detach()) * w).sum())),
    "grad, from outside": lambda f: lambda x: torch.func.grad(lambda w: (f(x) * w).sum())(x),
    "vmap(grad), from outside": lambda f: lambda x: torch.vmap(torch.func.grad(lambda w: (f(x) * w).sum()))(x[None])[0],
    "jvp, from outside": lambda f: lambda x: torch.func.jvp(lambda w: f(x) * w, (x,), (torch.ones(3),))[1],
    "vmap": lambda f: lambda x: torch.func.vmap(f)(x[None])[0],
}


@by_each_name
def test_what_needs_no_gradient_passes(name):
    function, x = CALLED_BY[name](), torch.arange(3.0)
    for transformed in CONSTANTS.values():
        for _ in range(2):
            assert transformed(function)(x).tolist() == function(x).tolist() == [0, 2, 4]


@pytest.mark.slow
@in_compiled_code(CONSTANTS)
def test_what_needs_no_gradient_passes_in_compiled_code(case):
    for mode in case[1]:
        compiled = torch.compile(CONSTANTS[mode](CALLED_BY[case[0]]()), backend="aot_eager")
        assert compiled(torch.arange(3.0)).tolist() == [0, 2, 4]


@pytest.mark.slow
def test_an_operator_that_replaces_another_one_is_asked():
    @fast_args(out="x[n] -> y[n], z[n]")
    def double_twice(x, y, z):
        y[:] = z[:] = 2 * x

    x = torch.arange(3.0)
    for kernel in (doubled, double_twice, doubled):
        op = kernel.as_torch_op("fx_gradients::default", replace=True)
        made = torch.vmap(op)(x[None])
        assert (made if kernel is doubled else made[1])[0].tolist() == [0, 2, 4]
        check_raises(BufferError, REFUSED, torch.func.grad(lambda x, op=op: op(x)[0].sum()), x)
