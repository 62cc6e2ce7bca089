"""Kernels in calls that PyTorch traces, compiles, transforms or exports, and what modes, tracers and profilers see of them."""

import functools
import re
import warnings
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch_operators
from forked import fork_python
from frameworks import has_table, has_versioned_capsules
from oracle import type_and_message
from raising import check_raises
from scale_kernels import elementwise
from test_torch_op import product, product_by_x
from torch.testing._internal.two_tensor import TwoTensor
from torch_operators import axpy, axpy_op, doubled, scale, scale_op, tensors, torch, total
from ways import mode_of

from fastexchange import convert, fast_args
from fastexchange.torch import modes as torch_modes
from fastexchange.torch.autograd import _call

nothing_compiled = torch_operators.nothing_compiled
by_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
compiled_whole = functools.partial(torch.compile, fullgraph=True)
make_fx = torch.fx.experimental.proxy_tensor.make_fx


def graph_of(call, *args, mode="real"):
    return make_fx((lambda x: call(x)) if len(args) == 1 else lambda x, w: call(x, w), tracing_mode=mode)(*args)


# ---- modes and tracers ----------------------------------------------------------------------------------------------------
def test_modes_and_tracers_see_operators_and_kernels_that_declare_their_outputs():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    (x, w), seen = tensors(), []
    for _ in range(4):
        scale(x, w)
    with mode_of(TorchDispatchMode, lambda function, args: seen.append(str(function))):
        assert torch.equal(scale_op()(x, w), x * w)
    assert "fx_test.scale.default" in seen
    with FlopCounterMode(display=False):
        assert torch.equal(scale(x, w), x * w) and total(x) == x.sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile() as profile:
            torch.ops.fx_test.scale(x, w)
        assert "fx_test::scale" in [event.name for event in profile.events()]
        for call, name in ((scale_op(), "fx_test::scale"), (scale, "fastexchange::scale_kernels_scale")):
            recorded = torch.jit.trace(lambda x, w, call=call: call(x, w) + 1, (x, w))
            assert torch.equal(recorded(2 * x, w), 2 * x * w + 1) and name in str(recorded.graph)
            for tracing_mode in ("real", "fake", "symbolic"):
                graph = graph_of(call, x, w, mode=tracing_mode)
                assert re.search(rf"torch\.ops\.{name.replace('::', '.')}\w*\.default\w*\(x_1, w_1\)", graph.code)
                assert torch.equal(graph(2 * x, w), 2 * x * w)


PRIVATE_NAMES = (
    "DisableTorchFunctionSubclass", "_disabled_torch_function_impl", "_dispatch_keys", "_dispatch_tls_is_dispatch_key_included",
    "_functorch", "_get_tracing_state", "_is_functional_tensor",
)  # fmt: skip
MODES = "native code cannot tell PyTorch's modes", {"torch: modes"}
OTHERWISE = {
    "modes._KEY_FUNCTIONS = {name: f'{symbol}_' for name, symbol in modes._KEY_FUNCTIONS.items()}": MODES,
    "del torch._C._IncludeDispatchKeyGuard": MODES,
    "modes._find_counter = lambda at: []": ("", {"torch: version counters"}),
    "offsets.function_of = lambda descriptor: 0": ("no C function", {"torch.Tensor"}),
    f"[delattr(torch._C if hasattr(torch._C, name) else torch, name) for name in {PRIVATE_NAMES}]": (
        "PyTorch is asked about each", {"torch: keys", "torch: storage", "torch: autograd", "torch: dtype", "torch.Tensor"}),
}  # fmt: skip
"""What is changed in PyTorch, or found of it: what ``explain`` says then, and what the doctor says is slow."""


@pytest.mark.slow
def test_a_pytorch_that_has_not_all_that_native_code_asks():
    """One interpreter is forked for each change: it has traced once, and knows nothing of this package's offsets."""
    assert torch_modes.why_no_modes() == torch_modes.why_no_counts() == ""
    fork_python("""
        import sys
        import torch
        import torch._subclasses.fake_tensor
        from torch.fx.experimental.proxy_tensor import make_fx
        from children import in_fork

        def check():
            from fastexchange.torch import modes, offsets
            exec(change)
            import test_torch_op_traced as tests
            tests.check_what_is_the_same(*tests.OTHERWISE[change])

        make_fx(lambda x: x + 1)(torch.ones(1))
        for change in sys.argv[1:]:
            assert in_fork(check) == 0, change
    """, *OTHERWISE)  # fmt: skip


def check_what_is_the_same(said, slow):
    from fastexchange.command import probe

    op, writing, x = doubled.as_torch_op("fx_otherwise::doubled"), axpy_op(), torch.arange(4.0)
    sums, silent = fast_args(total.py_func), fast_args(total.py_func, nogil=True)
    for _ in range(4):
        y = torch.zeros(4)
        writing(1.0, x, y)
        assert torch.equal(y, x) and y._version == 1
        assert torch.equal(op(x), 2 * x) and torch.equal(doubled(x), 2 * x) and type(doubled(x)) is torch.Tensor
        assert sums(x) == sums.bind(x)() == silent(x) == silent.bind(x)() == sums(x[::2]) + 4 == 6
    assert convert(x, np.ndarray).tolist() == x.tolist()
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    refusal = BufferError if has_versioned_capsules() else (BufferError, RuntimeError)  # which its __dlpack__ raised before
    for odd in (torch.ones(3, requires_grad=True), conjugated, conjugated.imag, torch.ones(3, device="meta")):
        check_raises(refusal, "'x'", sums, odd)
    if hasattr(torch._C, "_functorch"):  # without which PyTorch traces nothing
        for function in (op, doubled):
            assert torch.equal(graph_of(function, x)(x + 1), 2 * x + 2), "the tracer has not seen the call"
        assert torch.equal(torch.jit.trace(lambda x: doubled(x), x)(x + 1), 2 * x + 2)
    found = {status: {each.name for each in probe._torch(torch) if each.status == status} for status in ("slow", "wrong")}
    assert said in str(doubled.explain(x)) + str(silent.explain(x))
    assert found["slow"] == slow
    assert found["wrong"] <= {*["torch: lazily conjugated"] * (refusal is not BufferError)}, "it is refused, but by another error"


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for _ in range(4):  # until native code makes such calls, and allocates their outputs
        scale(*tensors())
    with FakeTensorMode():
        made = scale(torch.empty(2, 3, dtype=torch.float64), torch.empty(3))
        assert isinstance(made, FakeTensor) and made.shape == (2, 3) and made.dtype == torch.float64
        others = r"scale\(\): argument 'w' \(position 1\): dimension d of its shape differs"
        check_raises(ValueError, others, scale, torch.empty(2, 3), torch.empty(4))
        rank = r"scale\(\): argument 'x' \(position 0\) has 1 dimension, .* says x\["
        check_raises(ValueError, rank, scale, torch.empty(2), torch.empty(4))
        said = scale.explain(torch.empty(2, 3), torch.empty(3))
        assert said.kind == "operator" and re.search(r"torch\.ops\.fastexchange\.\w*scale", said.outcome)
        assert total.explain(torch.empty(3)).kind == "refused"
    assert scale.explain(*tensors()).kind in ("native", "new")


def test_make_fx_with_real_tensors_records_what_kernels_declare():
    def written(kernel, x):
        copy = x.clone()
        kernel(copy)
        return copy

    for given in (None, np.ones(3, np.float32), torch.ones(3)):
        twice = fast_args(lambda x, y: y.fill(2 * x[0]), out="x[n] -> y[n]")
        fill = fast_args(lambda x: x.fill(5.0), mutates=("x",))
        for function, kernel, expected in ((twice, twice, 8.0), (functools.partial(written, fill), fill, 5.0)):
            for _ in range(0 if given is None else 40):
                kernel(given)
            graph = graph_of(function, torch.ones(3))
            assert graph(torch.full((3,), 4.0)).tolist() == [expected] * 3, graph.code
            calls = kernel.counts()
            for _ in range(3):
                kernel(torch.ones(3))
                kernel(np.ones(3, np.float32))
            assert kernel.counts().fast - calls.fast >= 4  # no mode is active


# ---- what stays of earlier calls ---------------------------------------------------------------------------------------------
add = elementwise("add(a, b, y)", "y[i] = a[i] + b[i]")
add_twice = elementwise("add_twice(a, b, y, z)", "y[i] = z[i] = a[i] + b[i]")
add_first_of_list = elementwise("add_first_of_list(a, b: 'list[torch.Tensor]', y)", "y[i] = a[i] + b[0][i]", torch=torch)


def add_optional(a, b: "torch.Tensor | None", y):
    y[:] = a
    if b is not None:
        y += b


def faked(call, b):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = call(mode.from_tensor(b)).shape
    return torch.ones(shape) * b + torch.arange(3.0)


TRACED = {
    "vmap": lambda call, b: torch.vmap(call)(b[None])[0],
    "functionalize": lambda call, b: torch.func.functionalize(call)(b), "fake": faked,
    "make_fx": lambda call, b: make_fx(call)(b)(b),
    "grad of a constant": lambda call, b: torch.func.grad(lambda w: (call(w.detach()) * w).sum())(b),
}  # fmt: skip


@pytest.mark.parametrize("function", [add, add_first_of_list, add_optional, add_twice])
def test_an_output_that_native_code_allocates_is_no_given_one(function):
    kernel = fast_args(out="a[n] -> y[n], z[n]" if function is add_twice else "a[n] -> y[n]")(function)
    a, b = torch.arange(3.0), torch.ones(3)

    def call(b):
        made = kernel(a, [b] if function is add_first_of_list else b)
        return made[0] if function is add_twice else made

    for calls_before in (0, 0, 20, 0):
        for _ in range(calls_before):
            call(b)
        for mode, traced in TRACED.items():
            assert traced(call, b).tolist() == call(b).tolist() == [1, 2, 3], mode


def test_a_given_output_is_written_by_a_call_that_is_traced():
    kernel = fast_args(out="a[n] -> y[n]")(add)
    a, b, y = torch.arange(3.0), torch.ones(1, 3), torch.zeros(1, 3)
    for _ in range(4):
        kernel(a, b[0], torch.zeros(3))
    assert torch.vmap(lambda b, y: kernel(a, b, y))(b, y).tolist() == [[1, 2, 3]] == y.tolist()
    with pytest.raises(ValueError, match="'y' is written to, and vmap has not been given a batch of it"):
        torch.vmap(lambda b: kernel(a, b, torch.zeros(3)))(b)


TEXTS = {"long": "x" + "€" * 50_000, "with a zero": "before\0after", "empty": "", "no text": "\ud800 alone"}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_an_exception_is_whole(name):
    text = TEXTS[name]

    @fast_args(out="x[n] -> y[n]")
    def failing(x, y):
        raise ValueError(text)

    op, x = failing.as_torch_op(f"fx_tracing::failing_{name.replace(' ', '_')}"), torch.ones(2)
    for _ in range(2):
        for call in (lambda: op(x), lambda: torch.vmap(failing)(x[None]), lambda: torch.vmap(op)(x[None])):
            assert type_and_message(call) == (ValueError, text)
        escaped = text.replace("\0", "\\x00").replace("\ud800", "\\ud800")
        assert type_and_message(op.overload, x) in ((RuntimeError, escaped), (ValueError, text))  # where Python code is called


# ---- backward passes ---------------------------------------------------------------------------------------------------------
product_backward = fast_args(out="grad_z[n], x[n], y[n] -> grad_x[n], grad_y[n]")(
    elementwise("product_backward(grad_z, x, y, grad_x, grad_y)", "grad_x[i], grad_y[i] = grad_z[i] * y[i], grad_z[i] * x[i]"))
BACKWARDS = {"one_kernel": product_backward, "a_part": [product_by_x]}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_kernels_take_batched_gradients_and_tensors_that_wrap_others(backward):
    op = product.as_torch_op(f"fx_tracing::product_{backward}", backward=BACKWARDS[backward])
    x, w = torch.arange(3.0, requires_grad=True), torch.full((3,), 2.0)
    for _ in range(3):
        assert torch.equal(torch.autograd.functional.jacobian(lambda x: op(x, w), x, vectorize=True), torch.diag(w))
        (made,) = torch.autograd.grad(op(x, w), x, torch.eye(3), is_grads_batched=True)
        assert torch.equal(made, torch.diag(w))
        op(x, w).sum().backward()  # native code makes this call from now on
    wrapping = TwoTensor(torch.arange(3.0), torch.ones(3)).requires_grad_()
    op(wrapping, TwoTensor(w, 2 * w)).sum().backward()
    assert (wrapping.grad.a.tolist(), wrapping.grad.b.tolist()) == ([2, 2, 2], [4, 4, 4])


def test_an_exception_of_a_backward_kernel_is_raised_once():
    fail = Mock(side_effect=RuntimeError("mine"), _parameters=None)
    check_raises(RuntimeError, "mine", _call, fail, [torch.ones(2)])
    assert fail.call_count == 1


def test_a_second_derivative_names_the_kernel_that_has_no_backward():
    as_operator = product_backward.as_torch_op("fx_tracing::product_backward")
    said = r"^product_backward\(\): a second derivative is asked for .* declares no backward"
    for name, backward in (("kernel", product_backward), ("op", as_operator)):
        op = product.as_torch_op(f"fx_tracing::product_by_{name}", backward=backward)
        x, w = torch.arange(3.0, requires_grad=True), torch.ones(3, requires_grad=True)
        check_raises(BufferError, said, torch.autograd.grad, op(x, w).sum(), x, create_graph=True)


# ---- compiled functions ------------------------------------------------------------------------------------------------------
@by_backend
def test_kernels_that_write_in_compiled_functions(backend):
    writing = fast_args(axpy.py_func, mutates=["y"])
    assert writing.mutates == ("y",)

    @compiled_whole(backend=backend)
    def inplace(x, y):
        y = y.clone()
        writing(2.0, x, y)
        writing(a=1, x=x, y=y)
        return y * 2

    @compiled_whole(backend=backend, dynamic=True)
    def given(x, w):
        y = torch.zeros_like(x)
        return scale(x, w, y), y, scale(x, w=w)

    (x, w), y = tensors(), torch.zeros(4)
    torch.testing.assert_close(inplace(x[0], w), (w + 3 * x[0]) * 2)
    for rows in (x, torch.cat([x, x])):
        for result in given(rows, w):
            torch.testing.assert_close(result, rows * w)
    compiled_whole(lambda y: writing(1.0, w, y), backend=backend)(y)
    assert torch.equal(y, w)
    for name in writing._operators.values():
        arguments = getattr(torch.ops.fastexchange, name).default._schema.arguments
        assert [each.name for each in arguments if each.alias_info] == ["y"]


def test_the_option_mutates():
    check_raises(ValueError, r"mutates=\('z',\) names 'z', no parameter of total\(x\)", fast_args, total.py_func, mutates="z")
    check_raises(TypeError, "mutates is a tuple of parameters' names, not 3", fast_args, total.py_func, mutates=3)


@fast_args(out="x[n, d], w[d], k -> y[n, d], z[k]: float64, s[]")
def several(x, w, k, y, z, s):
    for i in np.ndindex(x.shape):
        y[i] = x[i] * w[i[1]]
    for i in range(k):
        z[i] += k  # what a given output holds counts
    s[()] = 7


@pytest.mark.parametrize(("backend", "is_dynamic"), [("eager", True), ("aot_eager", None)])
def test_some_of_the_outputs_are_given_in_a_graph(backend, is_dynamic):
    def call(x, w, z):
        y, same, s = several(x, w, 4, z=z)
        return y + s, same

    x, w, z = torch.ones(2, 3), torch.arange(3.0), torch.ones(4, dtype=torch.float64)
    compiled = compiled_whole(call, backend=backend, dynamic=is_dynamic)
    wanted = call(x, w, z.clone())
    for made in (compiled(x, w, z)[0], torch.vmap(call)(x[None], w[None], torch.zeros(1, 4))[0][0]):
        assert torch.equal(made, wanted[0])
    assert z.tolist() == wanted[1].tolist() == [5] * 4
    check_raises((Exception,), r"several\(\).* shape", compiled, x, w, torch.zeros(3, dtype=torch.float64))


def test_recompilations():
    """A compiled function is compiled again for other dtypes and ranks, once more for other sizes, and never for other values."""
    graphs, op = [], axpy_op()

    @compiled_whole(backend=lambda graph, inputs: graphs.append(graph) or graph)
    def run(x, y, a: float):
        y = scale(x, y[0]) + y
        op(2.0, x.view(-1), y.view(-1))
        return y * a

    def compiled(*shape, a=2.0, dtype=torch.float32) -> int:
        before, x, y = len(graphs), torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
        torch.testing.assert_close(run(x, y, a), (x * y[0] + y + 2.0 * x) * a)
        return len(graphs) - before

    assert [compiled(3, 4) for _ in range(3)] == [1, 0, 0]
    assert [compiled(5 + i, 4) for i in range(3)] == [1, 0, 0]  # the size is a symbol from then on
    assert [compiled(6, 4, dtype=torch.float64) for _ in range(2)] == [1, 0]


def test_kernels_that_replace_others_in_compiled_functions():
    """A graph is of one kernel: the function is compiled again when its variable has another, also one of the same types."""
    halved = fast_args(lambda x, y: y.fill(x[0] / 2), out="x[n] -> y[n]")
    compiled = compiled_whole(lambda x, kernels: kernels[0](x), backend="eager")
    for kernel, factor in ((doubled, 2), (halved, 0.5), (doubled, 2)):
        assert compiled(torch.ones(3), [kernel]).tolist() == [factor] * 3


def _of_dimensions(x):
    raise NotImplementedError


@numba.extending.overload(_of_dimensions)
def _of_dimensions_of(x):
    return (lambda x: None) if x.ndim == 1 else (lambda x: x.sum())


def test_a_kernel_that_returns_something_breaks_the_graph():
    """Also one that returns a value for some types: what it returns for others is no answer."""
    x = tensors()[0]
    assert torch.compile(lambda x: total(x) + 1, backend="eager")(x) == total(x) + 1
    for _ in range(3):
        assert torch.compile(lambda x: (scale(x, x[0]), total(x)), backend="eager")(x)[1] == total(x)
    sometimes = fast_args(lambda x: _of_dimensions(x))
    assert sometimes(torch.ones(3)) is None
    assert torch.compile(lambda x: (sometimes(x), x + 1), backend="eager")(torch.ones(2, 3))[0] == 6


scaled = fast_args(elementwise("scaled(x, factor, y)", "y[i] = x[i] * factor"), out="x[n] -> y[n]")
step = fast_args(lambda parameters, gradients: parameters[0].fill(gradients[0][0]), grad="allow")
with_default = fast_args(mutates="x")(lambda x, words="abc": x.fill(len(words)))
UNTRACED = {
    "a value": (lambda x: total(x), r"declare what it returns as outputs, fast_args\(out=\.\.\.\), or .* fast_args\(mutates="),
    "lists": (lambda x: step([x], [x]), r"declare .* the arguments that it writes to, fast_args\(mutates="),
    "NumPy's": (lambda x: scaled(x, np.int64(3)), r"make NumPy's numbers int\(\) or float\(\) outside"),
    "no schema": (lambda x: with_default(x), r"default has no place in an operator's schema"),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_a_call_that_no_operator_makes_is_said_to_be_one(name):
    call, said = UNTRACED[name]
    check_raises(torch._dynamo.exc.Unsupported, said, compiled_whole(call, backend="eager"), torch.ones(3))
    torch.compiler.reset()
    torch.compile(call, backend="eager")(torch.ones(3))  # Python makes the call


def test_nested_tensors_and_proxies_of_fx_are_said_to_be_such():
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    for _ in range(2):
        check_raises(BufferError, r"scaled\(\): argument 'x' \(position 0\).* it is a nested tensor", scaled, nested, 2)
    for call in (lambda x: total(x), lambda x: scaled(x, 2)):
        check_raises(TypeError, "is a Proxy, by which torch.fx.symbolic_trace records operators", torch.fx.symbolic_trace, call)


def test_calls_outside_of_the_compiler_stay_native():
    x, w = tensors()
    given = (x, w) if has_table() else (x, w, torch.empty(3, 4))  # without a table Python makes the outputs
    scale(*given)
    slow = scale.counts().slow
    torch.compile(lambda: 0, backend="eager")()
    for _ in range(3):
        scale(*given)
    assert scale.counts().slow == slow


def test_dynamo_compiles_nothing_of_a_call_that_breaks_its_graph():
    """Python makes the call while Dynamo traces what starts, so also the methods of the kernel that native code calls."""
    sums, products = fast_args(lambda x: x.sum()), fast_args(lambda x: 2 * x)
    compiled = torch.compile(lambda kernel, x: kernel(x) + 1, backend="eager")
    torch.compiler.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    given = torch.ones(3), torch.ones(3, 2)[:, 0], torch.ones(3, dtype=torch.float64)
    for x in (*given, *given):  # the first call, further signatures, known ones
        assert compiled(sums, x) == 4 and compiled(products, x).tolist() == [3] * 3
    check_raises(BufferError, "'x'.* requires grad", compiled, sums, torch.ones(3, requires_grad=True))
    check_raises(BufferError, "'x'.* device meta", compiled, sums, torch.ones(3, device="meta"))
    own = [each.co_name for each in torch._dynamo.utils.get_compilation_metrics() if "/fastexchange/" in each.co_filename]
    assert set(own) <= {"__call__", "call_traced"}


def test_pytorch_without_operators(monkeypatch):
    """A PyTorch that is too old: kernels are no operators, and their calls break a graph, as any call of Python code does."""
    def own_operators():
        return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastexchange::")]

    kernel, before = fast_args(out="x[n] -> y[n]")(doubled.py_func), own_operators()
    monkeypatch.delattr(torch.library, "register_vmap")
    said = r"doubled.as_torch_op\(\) needs a PyTorch with torch.library.register_vmap"
    check_raises(ImportError, said, kernel.as_torch_op, "a::b")
    for _ in range(3):
        assert torch.compile(lambda x: kernel(x) + 1, backend="eager")(torch.ones(3)).tolist() == [3] * 3
    assert own_operators() == before
