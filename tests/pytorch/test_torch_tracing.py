"""Calls that PyTorch traces or transforms: what stays of earlier calls, backward passes, exceptions, and what is said."""

import numpy as np
import pytest
import torch_operators
from torch_operators import torch, total

from fastexchange import fast_args

nothing_compiled = torch_operators.nothing_compiled


def add(a, b, y):
    for i in range(a.size):
        y[i] = a[i] + b[i]


def add_first_of_list(a, b: "list[torch.Tensor]", y):
    for i in range(a.size):
        y[i] = a[i] + b[0][i]


def add_optional(a, b: "torch.Tensor | None", y):
    for i in range(a.size):
        y[i] = a[i]
        if b is not None:
            y[i] += b[i]


def add_twice(a, b, y, z):
    for i in range(a.size):
        y[i] = z[i] = a[i] + b[i]


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


@pytest.mark.parametrize("mode", TRACED)
@pytest.mark.parametrize("function", [add, add_first_of_list, add_optional, add_twice])
def test_an_output_that_native_code_allocates_is_no_given_one(function, mode):
    kernel = fast_args(out="a[n] -> y[n], z[n]" if function is add_twice else "a[n] -> y[n]")(function)
    a, b = torch.arange(3.0), torch.ones(3)

    def call(b):
        made = kernel(a, [b] if function is add_first_of_list else b)
        return made[0] if function is add_twice else made

    for calls_before in (0, 0, 20, 0):
        for _ in range(calls_before):
            call(b)
        assert TRACED[mode](call, b).tolist() == call(b).tolist() == [1, 2, 3]


def test_a_given_output_is_written_by_a_call_that_is_traced():
    kernel = fast_args(out="a[n] -> y[n]")(add)
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


# ---- backward passes -------------------------------------------------------------------------------------------------


@fast_args(out="x[n], w[n] -> y[n]")
def product(x, w, y):
    for i in range(x.size):
        y[i] = x[i] * w[i]


@fast_args(out="grad_y[n], x[n], w[n] -> grad_x[n], grad_w[n]")
def product_backward(grad_y, x, w, grad_x, grad_w):
    for i in range(x.size):
        grad_x[i] = grad_y[i] * w[i]
        grad_w[i] = grad_y[i] * x[i]


@fast_args(out="grad_y[n], w[n] -> grad_x[n]")
def product_by_x(grad_y, w, grad_x):
    for i in range(w.size):
        grad_x[i] = grad_y[i] * w[i]


BACKWARDS = {"one kernel": product_backward, "a part": [product_by_x]}


def product_op(backward):
    return product.as_torch_op(f"fx_tracing::product_{backward.replace(' ', '_')}", backward=BACKWARDS[backward])


@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_kernels_take_batched_gradients(backward):
    op = product_op(backward)
    x, w = torch.arange(3.0, requires_grad=True), torch.full((3,), 2.0)
    for _ in range(3):
        assert torch.equal(torch.autograd.functional.jacobian(lambda x: op(x, w), x, vectorize=True), torch.diag(w))
        (made,) = torch.autograd.grad(op(x, w), x, torch.eye(3), is_grads_batched=True)
        assert torch.equal(made, torch.diag(w))
        op(x, w).sum().backward()  # native code makes this call from now on


def test_backward_kernels_take_tensors_that_wrap_others():
    class Wrapping(torch.Tensor):
        @staticmethod
        def __new__(cls, inner, requires_grad=False):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad)

        def __init__(self, inner, requires_grad=False):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            map_only = torch.utils._pytree.tree_map_only
            args, kwargs = map_only(cls, lambda each: each.inner, (args, kwargs or {}))
            return map_only(torch.Tensor, cls, function(*args, **kwargs))

    for backward in BACKWARDS:
        x = Wrapping(torch.arange(3.0), True)
        product_op(backward)(x, Wrapping(torch.full((3,), 2.0))).sum().backward()
        assert x.grad.inner.tolist() == [2, 2, 2]


def test_an_exception_of_a_backward_kernel_is_raised_once():
    """It is no refusal: the kernel is not called again, by its operator."""
    calls = []

    class Failing:
        _parameters = None

        def __call__(self, *args):
            calls.append(args)
            raise RuntimeError("mine")

    from fastexchange.calls.torch_backward import _call

    with pytest.raises(RuntimeError, match="mine"):
        _call(Failing(), [torch.ones(2)])
    assert len(calls) == 1


def test_a_second_derivative_names_the_kernel_that_has_no_backward():
    as_operator = product_backward.as_torch_op("fx_tracing::product_backward")
    ops = [product_op("one kernel"), product.as_torch_op("fx_tracing::product_by_op", backward=as_operator)]
    for op in ops:
        x, w = torch.arange(3.0, requires_grad=True), torch.ones(3, requires_grad=True)
        with pytest.raises(BufferError, match=r"^product_backward\(\): a second derivative is asked for .* has no backward="):
            torch.autograd.grad(op(x, w).sum(), x, create_graph=True)


# ---- torch.compile(fullgraph=True), and what is said -----------------------------------------------------------------


@fast_args(out="x[n, d], w[d], k -> y[n, d], z[k]: float64, s[]")
def several(x, w, k, y, z, s):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * w[j]
    for i in range(k):
        z[i] += k  # what a given output holds counts
    s[()] = 7


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_dynamic", [None, True])
def test_some_of_the_outputs_are_given_in_a_graph(backend, is_dynamic):
    def call(x, w, z):
        y, same, s = several(x, w, 4, z=z)
        return y + s, same

    x, w, z = torch.ones(2, 3), torch.arange(3.0), torch.ones(4, dtype=torch.float64)
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=is_dynamic)
    wanted = call(x, w, z.clone())
    for made in (compiled(x, w, z)[0], torch.vmap(call)(x[None], w[None], torch.zeros(1, 4))[0][0]):
        assert torch.equal(made, wanted[0])
    assert z.tolist() == wanted[1].tolist() == [5] * 4
    with pytest.raises(Exception, match=r"several\(\).* shape"):
        compiled(x, w, torch.zeros(3, dtype=torch.float64))


@fast_args(grad="allow")
def step(parameters, gradients, rate):
    for i in range(len(parameters)):
        for j in range(parameters[i].shape[0]):
            parameters[i][j] -= rate * gradients[i][j]


@fast_args(out="x[n] -> y[n]")
def scaled(x, factor, y):
    for i in range(x.size):
        y[i] = x[i] * factor


@fast_args(mutates="x")
def with_default(x, words="abc"):
    x[0] = len(words)


UNTRACED = {
    "a value": (lambda x: total(x), r"declare what it returns as outputs, fast_args\(out=\.\.\.\), or .* fast_args\(mutates="),
    "lists": (lambda x: step([x], [x], 0.1), r"declare .* the arguments that it writes to, fast_args\(mutates="),
    "np.int64": (lambda x: scaled(x, np.int64(3)), r"make NumPy's numbers int\(\) or float\(\) outside"),
    "np.float64": (lambda x: scaled(x, np.float64(3)), r"make NumPy's numbers int\(\) or float\(\) outside"),
    "no schema": (lambda x: with_default(x), r"default has no place in an operator's schema"),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_a_call_that_no_operator_makes_is_said_to_be_one(name):
    call, said = UNTRACED[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        torch.compile(call, fullgraph=True, backend="eager")(torch.ones(3))
    torch.compiler.reset()
    torch.compile(call, backend="eager")(torch.ones(3))  # Python makes the call


@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_refused_by_kernels_with_outputs(layout):
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=getattr(torch, layout))
    for _ in range(3):
        with pytest.raises(BufferError, match=r"scaled\(\): argument 'x' \(position 0\).* it is a nested tensor"):
            scaled(nested, 2)
        assert scaled(torch.ones(1), 2).tolist() == [2]


def test_a_proxy_of_fx_is_said_to_be_one():
    for call in (lambda x: total(x), lambda x: scaled(x, 2)):
        with pytest.raises(TypeError, match=r"it is a Proxy, by which torch\.fx\.symbolic_trace records operators"):
            torch.fx.symbolic_trace(call)


def real_graph(function):
    return torch.fx.experimental.proxy_tensor.make_fx(lambda x: function(x) + 0, tracing_mode="real")(torch.ones(3))


MET = {"nothing": lambda: None, "NumPy's arrays": lambda: np.ones(3, np.float32), "tensors": lambda: torch.ones(3)}


@pytest.mark.parametrize("made", MET.values(), ids=MET)
def test_make_fx_with_real_tensors_records_what_kernels_declare(made):
    """Whatever a kernel was called with before; another kernel has met PyTorch's tensors."""
    twice = fast_args(lambda x, y: y.fill(2 * x[0]), out="x[n] -> y[n]")
    fill = fast_args(lambda x: x.fill(5.0), mutates=("x",))

    def written(x):
        copy = x.clone()
        fill(copy)
        return copy

    total(torch.ones(3))
    for function, kernel, expected in ((twice, twice, 8.0), (written, fill, 5.0)):
        for _ in range(40 if made() is not None else 0):
            kernel(made())
        graph = real_graph(function)
        assert graph(torch.full((3,), 4.0)).tolist() == [expected] * 3, graph.code
        calls = kernel.counts()
        for _ in range(3):
            kernel(torch.ones(3))
            kernel(np.ones(3, np.float32))
        assert kernel.counts().fast - calls.fast >= 4  # no mode is active
