"""Kernels in calls that PyTorch traces, compiles or exports, and what modes, tracers and profilers see of them."""

import functools
import re
import warnings

import numba
import pytest
import torch_operators
from forked import fork_python
from frameworks import has_table
from interpreter import lines_said
from torch_operators import axpy, axpy_op, doubled, refused, scale, scale_op, tensors, torch, total

from fastexchange import fast_args
from fastexchange.calls.torch_tracing import name_of
from fastexchange.producers import torch_modes

nothing_compiled = torch_operators.nothing_compiled
by_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
compiled_whole = functools.partial(torch.compile, fullgraph=True)


def graph_of(call, *args, mode="real"):
    function = (lambda x: call(x)) if len(args) == 1 else lambda x, w: call(x, w)
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode=mode)(*args)


# ---- modes and tracers ----------------------------------------------------------------------------------------------------


def test_modes_and_tracers_see_operators_and_kernels_that_declare_their_outputs():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w = tensors()
    for _ in range(20):
        scale(x, w)
    with See():
        assert torch.equal(scale_op()(x, w), x * w)
    assert "fx_test.scale.default" in seen
    with FlopCounterMode(display=False):
        assert torch.equal(scale(x, w), x * w) and total(x) == total(x)
    with warnings.catch_warnings(), torch.profiler.profile() as profile:
        warnings.simplefilter("ignore")
        torch.ops.fx_test.scale(x, w)
    assert "fx_test::scale" in [event.name for event in profile.events()]
    for call, name in ((scale_op(), "fx_test::scale"), (scale, "fastexchange::torch_operators_scale")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded = torch.jit.trace(lambda x, w, call=call: call(x, w) + 1, (x, w))
        assert torch.equal(recorded(2 * x, w), 2 * x * w + 1) and name in str(recorded.graph)
        for mode in ("real", "fake", "symbolic"):
            graph = graph_of(call, x, w, mode=mode)
            assert re.search(rf"torch\.ops\.{name.replace('::', '.')}\w*\.default\w*\(x_1, w_1\)", graph.code)
            assert torch.equal(graph(2 * x, w), 2 * x * w)


def test_functions_of_pytorch_tell_modes():
    assert torch_modes.why_no_modes() == torch_modes.why_no_counts() == ""


UNTOLD = {
    "a function is missing": "modes._KEY_FUNCTIONS = {name: f'{symbol}_' for name, symbol in modes._KEY_FUNCTIONS.items()}",
    "a private name is missing": "del torch._C._IncludeDispatchKeyGuard",
    "no counter is found": "modes._find_counter = lambda at: []",
}


@pytest.mark.parametrize("change", UNTOLD)
def test_a_pytorch_of_whose_modes_and_counters_nothing_is_known(change):
    """Python makes the calls that a mode may see. Results are the same, and explain and doctor say why."""
    fork_python(f"""
        import torch
        from fastexchange.producers import torch_modes as modes
        {UNTOLD[change]}
        import test_torch_op_traced as tests
        tests.check_what_is_the_same({"counter" not in change})
    """)


def check_what_is_the_same(is_of_modes):
    from fastexchange.command import probe

    op, writing, x = doubled.as_torch_op("fx_untold::doubled"), axpy_op(), torch.arange(4.0)
    for _ in range(20):
        y = torch.zeros(4)
        writing(1.0, x, y)
        assert torch.equal(y, x) and y._version == 1
        assert torch.equal(op(x), 2 * x) and torch.equal(doubled(x), 2 * x)
    for function in (op, doubled):
        assert torch.equal(graph_of(function, x)(x + 1), 2 * x + 2), "the tracer has not seen the call"
    assert torch.equal(torch.jit.trace(lambda x: doubled(x), x)(x + 1), 2 * x + 2)
    assert ("native code cannot tell PyTorch's modes" in str(doubled.explain(x))) == is_of_modes
    found = {each.name: each.status for each in probe._torch(torch)}
    assert "wrong" not in found.values()
    assert (found["torch: modes"] == "slow") == is_of_modes
    assert (found["torch: version counters"] == "slow") == (not is_of_modes)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for _ in range(20):  # until native code makes such calls, and allocates their outputs
        scale(*tensors())
    with FakeTensorMode():
        made = scale(torch.empty(2, 3, dtype=torch.float64), torch.empty(3))
        assert isinstance(made, FakeTensor) and made.shape == (2, 3) and made.dtype == torch.float64
        with pytest.raises(ValueError, match=r"scale\(\): argument 'w' \(position 1\): dimension d of its shape differs"):
            scale(torch.empty(2, 3), torch.empty(4))
        with pytest.raises(ValueError, match=r"scale\(\): argument 'x' \(position 0\) has 1 dimensions"):
            scale(torch.empty(2), torch.empty(4))
        said = scale.explain(torch.empty(2, 3), torch.empty(3))
        assert said.kind == "operator" and re.search(r"torch\.ops\.fastexchange\.\w*scale", said.outcome)
        assert total.explain(torch.empty(3)).kind == "refused"
    assert scale.explain(*tensors()).kind in ("native", "new")


# ---- compiled functions ------------------------------------------------------------------------------------------------------


@by_backend
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_in_compiled_functions(backend, dynamic):
    _x, w = tensors()
    compiled = compiled_whole(lambda x, w: scale(x + 1, w=w) - 1, backend=backend, dynamic=dynamic)
    for rows in (3, 5, 7):
        given = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(given, w), (given + 1) * w - 1)


@by_backend
def test_kernels_that_write_in_compiled_functions(backend):
    @fast_args
    def writing(a, x, y):
        for i in range(x.size):
            y[i] += a * x[i]

    def inplace(x, y):
        y = y.clone()
        writing(2.0, x, y)
        writing(a=1, x=x, y=y)
        return y * 2

    def given(x, w):
        y = torch.zeros_like(x)
        return scale(x, w, y), y

    x, w = tensors()
    torch.testing.assert_close(compiled_whole(inplace, backend=backend)(x[0], w), (w + 3 * x[0]) * 2)
    for result in compiled_whole(given, backend=backend)(x, w):
        torch.testing.assert_close(result, x * w)
    y = torch.zeros(4)
    compiled_whole(lambda y: writing(1.0, w, y), backend=backend)(y)
    assert torch.equal(y, w)


def test_recompilations():
    """A compiled function is compiled again for other dtypes and ranks, once more for other sizes, and never for other values."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    op = axpy_op()

    @compiled_whole(backend=backend)
    def run(x, y, a: float):
        y = scale(x, y[0]) + y
        op(2.0, x.view(-1), y.view(-1))
        return y * a

    def compiled(*args) -> int:
        before = len(graphs)
        wanted = (args[0] * args[1][0] + args[1] + 2.0 * args[0]) * args[2]
        torch.testing.assert_close(run(*args), wanted)
        return len(graphs) - before

    def pair(*shape, dtype=torch.float32):
        return torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)

    assert [compiled(*pair(3, 4), 2.0) for _ in range(3)] == [1, 0, 0]
    assert [compiled(*pair(5 + i, 4), 2.0) for i in range(3)] == [1, 0, 0]  # the size is a symbol from then on
    assert [compiled(*pair(6, 4, dtype=torch.float64), 2.0) for _ in range(2)] == [1, 0]
    eager = torch.compile(lambda x: scale(x, x[0]), backend=backend, dynamic=True)
    graphs.clear()
    for n in (3, 4, 7, 9):
        x = torch.rand(n, n + 2)
        assert torch.equal(eager(x), x * x[0])
    assert len(graphs) == 1


def test_kernels_that_replace_others_in_compiled_functions():
    """A graph is of one kernel: the function is compiled again when its variable has another, also one of the same types."""

    @fast_args(out="x[n] -> y[n]")
    def thrice(x, y):
        for i in range(x.size):
            y[i] = 3 * x[i]

    compiled = compiled_whole(lambda x, kernels: kernels[0](x), backend="eager")
    for kernel, factor in ((doubled, 2), (thrice, 3), (doubled, 2)):
        assert compiled(torch.ones(3), [kernel]).tolist() == [factor] * 3


def test_a_kernel_that_returns_something_breaks_the_graph():
    x, _ = tensors()
    assert torch.compile(lambda x: total(x) + 1, backend="eager")(x) == total(x) + 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_whole(lambda x: total(x) + 1, backend="eager")(x)
    for _ in range(3):
        assert torch.compile(lambda x: (scale(x, x[0]), total(x)), backend="eager")(x)[1] == total(x)


def _of_dimensions(x):
    raise NotImplementedError


@numba.extending.overload(_of_dimensions)
def _of_dimensions_of(x):
    return (lambda x: None) if x.ndim == 1 else (lambda x: x.sum())


def test_a_kernel_that_returns_a_value_for_some_types():
    """What it returns for others is no answer: a value would be lost."""
    sometimes = fast_args(lambda x: _of_dimensions(x))
    assert sometimes(torch.ones(3)) is None
    assert torch.compile(lambda x: (sometimes(x), x + 1), backend="eager")(torch.ones(2, 3))[0] == 6


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
        assert compiled(sums, x) == 4
        assert compiled(products, x).tolist() == [3] * 3
    refused(BufferError, "'x'.* requires grad", compiled, sums, torch.ones(3, requires_grad=True))
    refused(BufferError, "'x'.* device meta", compiled, sums, torch.ones(3, device="meta"))
    own = [each.co_name for each in torch._dynamo.utils.get_compilation_metrics() if "/fastexchange/" in each.co_filename]
    assert set(own) <= {"__call__", "call_traced"}


def test_the_option_mutates():
    refused(ValueError, r"mutates=\('z',\) names 'z', no parameter of total\(x\)", fast_args, total.py_func, mutates="z")
    refused(TypeError, "mutates is a tuple of parameters' names, not 3", fast_args, total.py_func, mutates=3)
    kernel = fast_args(axpy.py_func, mutates=["y"])
    assert kernel.mutates == ("y",)
    x, y = torch.ones(3), torch.zeros(3)
    compiled_whole(lambda x, y: kernel(2.0, x, y), backend="aot_eager")(x, y)
    assert y.tolist() == [2, 2, 2]
    (name,) = kernel._operators.values()
    arguments = getattr(torch.ops.fastexchange, name).default._schema.arguments
    assert [each.name for each in arguments if each.alias_info] == ["y"]


def test_pytorch_without_operators(monkeypatch):
    """A PyTorch that is too old: kernels are no operators, and their calls break a graph, as any call of Python code does."""
    kernel = fast_args(out="x[n] -> y[n]")(doubled.py_func)
    monkeypatch.delattr(torch.library, "register_vmap")
    refused(ImportError, r"doubled.as_torch_op\(\) needs a PyTorch with torch.library.register_vmap", kernel.as_torch_op, "a::b")
    for _ in range(3):
        assert torch.compile(lambda x: kernel(x) + 1, backend="eager")(torch.ones(3)).tolist() == [3] * 3
    assert not hasattr(torch.ops.fastexchange, name_of(kernel))


# ---- exported programs ----------------------------------------------------------------------------------------------------


class Scaling(torch.nn.Module):
    def forward(self, x, w):
        return scale(x, w) + 1


def test_export():
    x, w = tensors()
    rows = torch.export.Dim("rows")
    program = torch.export.export(Scaling(), (x, w), dynamic_shapes={"x": {0: rows}, "w": {}})
    assert "fastexchange." in program.graph_module.code
    torch.testing.assert_close(program.module()(torch.ones(5, 4), w), torch.ones(5, 4) * w + 1)


def test_an_exported_program_is_loaded_where_the_kernel_is_imported(tmp_path):
    path = str(tmp_path / "program.pt2")
    torch.export.save(torch.export.export(Scaling(), (torch.ones(3, 4), torch.ones(4))), path)
    load = """
        import sys, warnings, torch, torch_operators
        warnings.simplefilter("ignore")
        print(torch.export.load(sys.argv[1]).module()(torch.ones(3, 4), 2 * torch.ones(4)).sum().item())
    """
    done = fork_python(load, path)
    assert done.stdout == "36.0\n" and lines_said(done.stderr) == []
