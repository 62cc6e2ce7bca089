"""Kernels as operators of PyTorch: explicit ones, and those that traced calls register themselves."""

import copy
import functools
import re
import sys
import threading
import warnings

import numba
import numpy as np
import pytest
from frameworks import has_table, torch
from interpreter import lines_said, run_python
from numba import objmode, prange
from oracle import type_and_message

from fastexchange import TorchOp, fast_args
from fastexchange.calls import torch_boxed, torch_library
from fastexchange.calls.torch_tracing import name_of
from fastexchange.ground.numba_code import RUNS_PYTHON
from fastexchange.producers import torch_modes
from fastexchange.producers.torch_offsets import guard

pytestmark = pytest.mark.skipif(torch is None or not hasattr(torch.library, "register_vmap"), reason="PyTorch is too old")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
needs_views = pytest.mark.skipif(torch is None or not guard().knows_views, reason="tensors are not read in memory here")
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()


@fast_args(out="x[n, d], w[d] -> y[n, d]")
def scale(x, w, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * w[j]


@fast_args(out="grad_y[n, d], x[n, d], w[d] -> grad_x[n, d], grad_w[d]")
def scale_backward(grad_y, x, w, grad_x, grad_w):
    grad_w[:] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            grad_x[i, j] = grad_y[i, j] * w[j]
            grad_w[j] += grad_y[i, j] * x[i, j]


@fast_args
def axpy(a, x, y):
    for i in range(x.size):
        y[i] += a * x[i]


@fast_args
def total(x):
    return x.sum()


def tensors():
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.randn(4)


@functools.cache
def scale_op():
    return scale.as_torch_op("fx_test::scale", backward=scale_backward)


# ---- explicit operators ----------------------------------------------------------------------------------------------


def test_an_operator_is_called_like_the_kernel():
    x, w = tensors()
    op = scale_op()
    assert isinstance(op, TorchOp) and op.kernel is scale and op.name == "fx_test::scale"
    assert op.overload is torch.ops.fx_test.scale.default
    assert repr(op) == "<fast_args operator fx_test::scale(Tensor x, Tensor w) -> Tensor>"
    for result in (op(x, w), op(w=w, x=x), torch.ops.fx_test.scale(x, w), op(x.t().contiguous().t(), w)):
        assert torch.equal(result, x * w)


@by_backend
def test_compiled_with_gradients(backend):
    x, w = tensors()
    op = scale_op()
    compiled = torch.compile(lambda x, w: (op(x, w) ** 2).sum(), fullgraph=True, backend=backend)
    given, own = ([value.clone().requires_grad_() for value in (x, w)] for _ in range(2))
    compiled(*given).backward()
    ((own[0] * own[1]) ** 2).sum().backward()
    for mine, theirs in zip(given, own, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_gradients_are_right():
    x, w = (value.double().requires_grad_() for value in tensors())
    assert torch.autograd.gradcheck(scale_op(), (x, w))
    op = scale_op()
    (only_w,) = torch.autograd.grad(op(x.detach(), w).sum(), w)
    torch.testing.assert_close(only_w, x.detach().sum(0))
    with torch.no_grad():
        assert not op(x, w).requires_grad


def test_gradients_of_calls_that_omit_arguments():
    @fast_args(out="x[n] -> y[n]")
    def power(x, factor: float = 3.0, exponent: float = 2.0, y=None):
        for i in range(x.size):
            y[i] = factor * x[i] ** exponent

    @fast_args(out="grad_y[n], x[n] -> grad_x[n]")
    def power_backward(grad_y, x, factor: float, exponent: float, grad_x):
        for i in range(x.size):
            grad_x[i] = grad_y[i] * factor * exponent * x[i] ** (exponent - 1)

    op = power.as_torch_op("fx_test::power", backward=power_backward)
    for args, kwargs in [((), {}), ((5.0,), {}), ((3.0, 3.0), {}), ((3.0, 2.0), {}), ((), {"exponent": 3.0})]:
        factor, exponent = (*args, 3.0, 2.0)[0], kwargs.get("exponent", (*args, *(3.0, 2.0)[len(args) :])[1])
        x = torch.arange(1.0, 4.0, requires_grad=True)
        wanted = (factor * exponent * x.detach() ** (exponent - 1)).tolist()
        for function in (op, torch.ops.fx_test.power, torch.compile(op, backend="aot_eager", fullgraph=True)):
            assert torch.autograd.grad(function(x, *args, **kwargs).sum(), x)[0].tolist() == wanted


def test_a_backward_pass_of_several_kernels_calls_those_that_are_needed():
    @fast_args(out="grad_z[n], y[n] -> grad_x[n]")
    def of_x(grad_z, y, grad_x):
        for i in range(y.size):
            grad_x[i] = grad_z[i] * y[i]

    @fast_args(out="grad_z[n], x[n] -> grad_y[n]")
    def of_y(grad_z, x, grad_y):
        for i in range(x.size):
            grad_y[i] = grad_z[i] * x[i]

    @fast_args(out="x[n], y[n] -> z[n]")
    def product(x, y, z):
        for i in range(x.size):
            z[i] = x[i] * y[i]

    op = product.as_torch_op("fx_test::product", backward=[of_x, of_y])
    x, y = torch.arange(3.0, requires_grad=True), torch.ones(3)
    op(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1, 1] and of_x.counts().compiled == 1 and of_y.counts().compiled == 0
    assert torch.autograd.gradcheck(op, (x.detach().double().requires_grad_(), y.double().requires_grad_()))


def test_a_backward_pass_whose_kernels_are_operators_has_a_second_one():
    @fast_args(out="x[n] -> y[n]")
    def square(x, y):
        for i in range(x.size):
            y[i] = x[i] * x[i]

    @fast_args(out="grad_y[n], x[n] -> grad_x[n]")
    def square_backward(grad_y, x, grad_x):
        for i in range(x.size):
            grad_x[i] = 2 * x[i] * grad_y[i]

    @fast_args(out="grad_grad_x[n], grad_y[n], x[n] -> grad_grad_y[n], grad_x[n]")
    def square_double(grad_grad_x, grad_y, x, grad_grad_y, grad_x):
        for i in range(x.size):
            grad_grad_y[i] = 2 * x[i] * grad_grad_x[i]
            grad_x[i] = 2 * grad_y[i] * grad_grad_x[i]

    first = square_backward.as_torch_op("fx_test::square_backward", backward=square_double)
    op = square.as_torch_op("fx_test::square", backward=first)
    x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, x) and torch.autograd.gradgradcheck(op, x)


def test_transforms_that_differentiate_are_refused():
    """PyTorch would give gradients of zeros: these transforms do not see a backward pass that is registered from Python."""
    x, w = tensors()
    without = scale.as_torch_op("fx_test::scale_without_backward")
    for op in (without, scale_op()):
        for _ in range(3):
            op(x, w)
        for transform in (lambda f: torch.func.grad(lambda x: f(x, w).sum()), torch.func.jacfwd):
            with pytest.raises(BufferError, match=r"argument 'x' \(position 0\) is differentiated by a transform"):
                transform(op)(x, w) if transform is torch.func.jacfwd else transform(op)(x)
        assert torch.equal(torch.func.vmap(op, (0, None))(x[None], w)[0], x * w)


def test_a_backward_function():
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * w, None

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    op = scale.as_torch_op("fx_test::scale_by_function", backward=backward, setup_context=setup_context)
    x, w = tensors()
    x.requires_grad_()
    op(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.expand(3, 4))
    wrong = scale.as_torch_op("fx_test::scale_wrong", backward=lambda ctx, grad: grad)
    with pytest.raises(
        RuntimeError, match=r"scale\(\): its backward returned 1 gradients, and the operator has 2 arguments, x, w"
    ):
        wrong(x, w).sum().backward()


def test_an_operator_without_a_backward_pass_refuses_what_the_kernel_refuses():
    op = scale.as_torch_op("fx_test::scale_without")
    x, w = tensors()
    with pytest.raises(BufferError, match="requires grad"):
        op(x.requires_grad_(), w)
    with torch.no_grad():
        assert torch.equal(op(x, w), x * w)
    with pytest.raises(Exception, match="requires grad, and the operator has no backward"):
        torch.compile(op, backend="eager", fullgraph=True)(x, w)


def test_backward_kernels_get_lazily_conjugated_and_negated_tensors():
    @fast_args(out="x[n] -> y[n]")
    def square(x, y):
        for i in range(x.size):
            y[i] = x[i] * x[i]

    @fast_args(out="x[n], grad_y[n] -> grad_x[n]")
    def square_backward(x, grad_y, grad_x):
        for i in range(x.size):
            grad_x[i] = 2 * grad_y[i] * x[i].conjugate()

    op = square.as_torch_op("fx_test::square_lazy", backward=square_backward)
    weights = torch.tensor([1 + 2j, 3 - 1j, -2j])
    for lazy in (lambda x, f: f(x).conj(), lambda x, f: f(x.conj()), lambda x, f: f(x.conj().imag)):
        x = torch.tensor([1 + 1j, 2 - 3j, 4j], requires_grad=True)
        wanted, got = (torch.autograd.grad((lazy(x, f) * weights).sum().abs(), x)[0] for f in (torch.square, op))
        assert torch.allclose(got, wanted)


def test_ints_of_more_than_64_bits_are_refused_by_native_calls_too():
    @fast_args(out="x[n] -> y[n]")
    def times(x, k: int, y):
        for i in range(x.size):
            y[i] = x[i] * k

    op = times.as_torch_op("fx_test::times_int")
    x = torch.ones(2)
    for _ in range(3):
        assert op(x, 2**62).tolist() == op(x, -(2**62)).neg().tolist() == [2.0**62] * 2
    for large in (2**63, 2**70, -(2**63) - 1):
        with pytest.raises(RuntimeError, match=r"Expected a value of type 'int'|int too"):
            op(x, large)


def test_mutated_arguments_move_their_version_counters():
    @fast_args
    def double(x, factor: float = 2.0):
        for i in range(x.size):
            x[i] *= factor

    op = double.as_torch_op("fx_test::double", mutates="x")
    assert str(op.overload._schema) == "fx_test::double(Tensor(a!) x, float factor=2.) -> ()"
    x = torch.arange(4.0)
    version = x._version
    assert op(x) is None and x.tolist() == [0, 2, 4, 6] and x._version == version + 1
    op(x, factor=0.5)
    assert x.tolist() == [0, 1, 2, 3] and x._version == version + 2
    leaf = torch.ones(4, requires_grad=True)
    saved = (leaf * x).sum()
    op(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.skipif(torch is None or not hasattr(torch.library, "register_torch_dispatch"), reason="needs PyTorch 2.5")
@pytest.mark.parametrize("has_default", [True, False])
def test_a_compiled_call_that_writes_to_a_saved_tensor_raises_as_pytorchs_own(has_default):
    @fast_args(mutates="x")
    def increase(x, by: float = 1.0):
        for i in range(x.size):
            x[i] += by

    op = increase.as_torch_op(f"fx_test::increase_saved_{has_default}")
    given = () if has_default else (1.0,)

    def loss(write, w, x):
        y = w * x
        write(x, *given)
        return y.sum()

    for write in (lambda x, by=1: x.add_(by), op, op.overload, increase):
        w, x = torch.ones(3, requires_grad=True), torch.ones(3)
        with pytest.raises(Exception, match="modified by an inplace operation"):
            torch.compile(functools.partial(loss, write), backend="aot_eager", fullgraph=True)(w, x).backward()


def test_tensors_without_memory_count_writes_to_them():
    @fast_args(mutates="x")
    def increase(x):
        for i in range(x.size):
            x[i] += 1

    op = increase.as_torch_op("fx_test::increase_fake")
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    for x in (torch.ones(3, device="meta"), fake):
        for count in (1, 2):
            op(x)
            assert x._version == count


DTYPES = ["float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"]
SHAPES = {"plain": (3, 4), "strided": (3, 4), "transposed": (4, 3), "empty": (0, 4)}


@fast_args(out="x[n, m] -> y[m, n]")
def transposed(x, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[j, i] = x[i, j]


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_dtypes_and_layouts(dtype, layout):
    op = _transposed_op()
    x = torch.arange(24).reshape(6, 4).to(getattr(torch, dtype))[: SHAPES[layout][0] or 0]
    x = {"strided": x[:, ::2], "transposed": x.t()}.get(layout, x)
    assert torch.equal(op(x), x.t())
    checks = torch.library.opcheck(op.overload, (x,), raise_exception=True)
    assert set(checks.values()) == {"SUCCESS"}


@functools.cache
def _transposed_op():
    return transposed.as_torch_op("fx_test::transposed")


def test_opcheck_of_other_schemas():
    @fast_args(out="x[n], k -> largest[k], sums[]: float64")
    def several(x, k, largest, sums):
        sums[()] = x.sum()
        largest[:] = np.sort(x)[::-1][:k]

    @fast_args(out="x[n] -> y[n]")
    def optional(x, bias: "torch.Tensor | None", alpha: float, is_on: bool, count: int, y):
        for i in range(x.size):
            y[i] = x[i] * alpha + count
            if is_on and bias is not None:
                y[i] += bias[i]

    @fast_args(out="x[n] -> y[n]")
    def listed(xs: "list[torch.Tensor]", x, y):
        y[:] = x
        for i in range(len(xs)):
            y += xs[i]

    @fast_args(out="x[...] -> y[...]: int64, n[]: x")
    def rest(x, y, n):
        n[()] = x.size
        y[...] = 1

    x = torch.arange(5.0)
    cases = [
        (several.as_torch_op("fx_test::several"), (x, 2), "(Tensor x, SymInt k) -> (Tensor, Tensor)"),
        (optional.as_torch_op("fx_test::optional"), (x, None, 0.5, True, 3), None),
        (optional.as_torch_op("fx_test::optional"), (x, x, 0.5, True, 3), None),
        (listed.as_torch_op("fx_test::listed"), ([x, x], x), "(Tensor[] xs, Tensor x) -> Tensor"),
        (rest.as_torch_op("fx_test::rest"), (torch.ones(2, 3, 4),), None),
        (rest.as_torch_op("fx_test::rest"), (torch.ones(()),), None),
    ]
    for op, args, schema in cases:
        if schema is not None:
            assert str(op.overload._schema).partition("(")[1:] == schema.partition("(")[1:]
        assert set(torch.library.opcheck(op.overload, args).values()) == {"SUCCESS"}
    largest, sums = torch.ops.fx_test.several(x, 2)
    assert largest.tolist() == [4, 3] and sums.item() == 10 and sums.dtype == torch.float64
    assert torch.ops.fx_test.optional(x, x, 0.5, True, 3).tolist() == (x * 1.5 + 3).tolist()
    assert torch.ops.fx_test.listed([x, x], x).tolist() == (3 * x).tolist()


@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (-1, 0), (None, 0)])
def test_vmap(in_dims):
    x, w = tensors()
    xs = x if in_dims[0] is None else torch.stack([x, 2 * x], in_dims[0])
    ws = w if in_dims[1] is None else torch.stack([w, -w])
    for function in (scale_op(), scale):
        assert torch.equal(torch.vmap(function, in_dims)(xs, ws), torch.vmap(torch.mul, in_dims)(xs, ws))


def test_vmap_of_nothing():
    _x, w = tensors()
    assert torch.vmap(scale_op(), (0, None))(torch.empty(0, 3, 4), w).shape == (0, 3, 4)


def test_vmap_of_an_operator_that_writes():
    op = axpy_op()
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    torch.vmap(lambda x, y: op(2.0, x, y), out_dims=None)(x, y)
    assert y.tolist() == [[2.0] * 3] * 2
    with pytest.raises(ValueError, match="'y' is written to, and vmap has not been given a batch of it"):
        torch.vmap(lambda x: op(2.0, x, y[0]), out_dims=None)(x)


def test_keyword_only_arguments():
    @fast_args
    def times(x: "torch.Tensor", *, factor: float = 2.0):
        for i in range(x.size):
            x[i] *= factor

    @fast_args
    def copied(x: "torch.Tensor", *, to: "torch.Tensor"):
        for i in range(x.size):
            to[i] = x[i]

    op = times.as_torch_op("fx_test::times", mutates="x")
    x = torch.ones(2, 3)
    torch.vmap(lambda x: op(x), out_dims=None)(x)
    torch.vmap(lambda x: op(x, factor=3.0), out_dims=None)(x)
    assert x.tolist() == [[6.0] * 3] * 2
    y = torch.zeros(3)
    copied.as_torch_op("fx_test::copied", mutates="to")(x[0], to=y)
    assert torch.equal(y, x[0])
    torch.compile(lambda x, y: copied(x, to=y), backend="aot_eager", fullgraph=True)(x[1] + 1, y)
    assert torch.equal(y, x[1] + 1)


@functools.cache
def axpy_op():
    @fast_args
    def axpy(a: float, x: "torch.Tensor", y: "torch.Tensor"):
        for i in range(x.size):
            y[i] += a * x[i]

    return axpy.as_torch_op("fx_test::axpy", mutates=("y",))


def test_modes_see_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, w = tensors()
    with See():
        assert torch.equal(scale_op()(x, w), x * w)
    assert "fx_test.scale.default" in seen
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, w: scale_op()(x, w), tracing_mode="real")(x, w)
    assert "fx_test.scale.default" in traced.code and torch.equal(traced(2 * x, w), 2 * x * w)


def test_modes_see_kernels_that_declare_their_outputs():
    from torch.utils.flop_counter import FlopCounterMode

    x, w = tensors()
    for _ in range(20):
        scale(x, w)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, w: scale(x, w), tracing_mode="real")(x, w)
    assert "fastexchange." in traced.code and torch.equal(traced(2 * x, w), 2 * x * w)
    with FlopCounterMode(display=False):
        assert torch.equal(scale(x, w), x * w) and total(x) == total(x)


def test_functions_of_pytorch_tell_modes():
    assert torch_modes.why_no_modes() == torch_modes.why_no_counts() == ""


UNTOLD = {
    "a function is missing": "modes._KEY_FUNCTIONS = {name: f'{symbol}_' for name, symbol in modes._KEY_FUNCTIONS.items()}",
    "a private name is missing": "del torch._C._IncludeDispatchKeyGuard",
    "no counter is found": "modes._find_counter = lambda at: []",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", UNTOLD)
def test_a_pytorch_of_whose_modes_and_counters_nothing_is_known(change):
    """Python makes the calls that a mode may see. Results are the same, and explain and doctor say why."""
    is_of_modes = "counter" not in change
    done = run_python(f"""
        import torch
        from fastexchange import fast_args
        from fastexchange.producers import torch_modes as modes
        {UNTOLD[change]}

        @fast_args(out="x[n] -> y[n]")
        def twice(x, y):
            for i in range(x.shape[0]):
                y[i] = 2 * x[i]

        @fast_args
        def add(x: torch.Tensor, y: torch.Tensor):
            for i in range(x.shape[0]):
                y[i] += x[i]

        op, writing = twice.as_torch_op("fx_untold::twice"), add.as_torch_op("fx_untold::add", mutates=("y",))
        x = torch.arange(4.0)
        for _ in range(20):
            y = torch.zeros(4)
            writing(x, y)
            assert torch.equal(y, x) and y._version == 1
            assert torch.equal(op(x), 2 * x) and torch.equal(twice(x), 2 * x)
        for function in (op, twice):
            traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: function(x), tracing_mode="real")(x)
            assert torch.equal(traced(x + 1), 2 * x + 2), "the tracer has not seen the call"
        assert torch.equal(torch.jit.trace(lambda x: twice(x), x)(x + 1), 2 * x + 2)
        assert ("native code cannot tell PyTorch's modes" in str(twice.explain(x))) == {is_of_modes}

        from fastexchange.command import probe
        found = {{each.name: each for each in probe._torch(torch)}}
        assert "wrong" not in {{each.status for each in found.values()}}
        assert (found["torch: modes"].status == "slow") == {is_of_modes}, found["torch: modes"]
        assert (found["torch: version counters"].status == "slow") == (not {is_of_modes}), found["torch: version counters"]
    """)  # fmt: skip
    assert "Exception in thread" not in done.stderr


def native_calls(op, *args):
    """How many calls an operator's kernel makes without PyTorch's dispatcher, of one."""
    before = op.kernel.counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOp, "_dispatch", lambda *args, **kwargs: None)
        op(*args)
    after = op.kernel.counts()
    return after.fast + after.slow - before.fast - before.slow


def test_calls_with_plain_tensors_go_straight_to_the_kernel():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, w = tensors()
    op, writing = scale_op(), axpy_op()
    for _ in range(20):
        op(x, w)
        writing(2.0, w, w.clone())
    assert native_calls(op, x, w) == native_calls(writing, 2.0, w, w) == 1
    leaf = x.clone().requires_grad_()
    assert native_calls(op, leaf, w) == 1  # by the autograd.Function
    assert op(leaf, w).requires_grad and op(x=leaf, w=w).requires_grad and not op(leaf.detach(), w).requires_grad
    assert native_calls(writing, 2.0, w, leaf[0]) == 0
    with torch.no_grad():
        assert native_calls(op, leaf, w) == 1
    with torch.inference_mode():
        assert native_calls(writing, 2.0, w, torch.ones(4)) == 0  # it has no version counter
    for mode in (Function(), Dispatch()):
        with mode:
            assert native_calls(op, x, w) == 0
    assert native_calls(op, x, w) == 1
    version = w._version
    writing(2.0, x[0], w)
    assert w._version == version + 1
    writing(a=2.0, x=x[0], y=w)
    assert w._version == version + 2


def test_the_short_way_to_autograd_is_taken_where_autograd_alone_sees_the_call(monkeypatch):
    """Modes, transforms and tangents are for PyTorch's dispatcher."""
    import torch.autograd.forward_ad as forward_ad
    from torch.utils.flop_counter import FlopCounterMode

    x, w = tensors()
    leaf = x.clone().requires_grad_()
    op = scale_op()
    for _ in range(3):
        op(leaf, w)
    seen, dispatch = [], type(op)._dispatch

    def noted(self, *args, **kwargs):
        seen.append(args)
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(type(op), "_dispatch", noted)

    def ways(*args, **kwargs) -> int:
        seen.clear()
        op(*args, **kwargs)
        return len(seen)

    assert ways(leaf, w) == ways(torch.nn.Parameter(x), w) == ways(leaf, leaf[0]) == ways(x, w) == 0
    assert ways(leaf, w=w) == ways(leaf.as_subclass(torch.nn.Buffer), w) == 1
    with FlopCounterMode(display=False):
        assert ways(leaf, w) == 1
    torch.func.vmap(lambda _: torch.tensor(ways(leaf, w)))(torch.zeros(2))
    assert len(seen) == 1
    with forward_ad.dual_level():
        assert ways(leaf, w) == 1
        with pytest.raises(BufferError, match="tangent"):
            op(forward_ad.make_dual(x, x), w)
    assert ways(leaf, w) == 0
    with pytest.raises(BufferError, match=r"torch\.func"):
        torch.func.grad(lambda t: op(t, w).sum())(x)


def test_calls_are_the_same_with_native_code_as_with_the_dispatcher():
    """The kernel itself takes more than its operator does: its outputs, and scalars of other types than the schema's."""

    @fast_args(out="x[n] -> y[n]")
    def halved(x, divisor: float = 2.0, steps: int = 1, y=None):
        for i in range(x.size):
            y[i] = x[i] + 7 // divisor + steps

    class Subclass(torch.Tensor):
        pass

    op, x = halved.as_torch_op("fx_test::halved"), torch.arange(3.0)
    native, dispatched = op, op._dispatch
    parameter = torch.nn.Parameter(x, requires_grad=False)
    for value in (x, parameter, x.as_subclass(Subclass)):
        for args, kwargs in [((), {}), ((2.5, 1), {}), ((2, True), {}), ((), {"steps": 3}), ((), {"divisor": 4, "steps": 2})]:
            for _ in range(20):
                result, wanted = native(value, *args, **kwargs), dispatched(value, *args, **kwargs)
                assert torch.equal(result, wanted) and type(result) is type(wanted)
    y = torch.zeros(3)
    for args, kwargs in [((2.0, 1, y), {}), ((2.0, y), {}), ((), {"y": y}), ((2.0,), {"y": y}), ((None,), {}), ((2.0, 1.5), {})]:
        for call in (native, dispatched):
            with pytest.raises(RuntimeError, match="fx_test::halved"):
                call(x, *args, **kwargs)
    assert y.tolist() == [0, 0, 0] and native_calls(op, x) == native_calls(op, parameter, 2.5, 1) == 1


def test_jit_trace_records_operators_and_kernels_that_declare_their_outputs():
    x, w = tensors()
    for call, name in ((scale_op(), "fx_test::scale"), (scale, "fastexchange::test_torch_op_scale")):
        for _ in range(5):
            call(x, w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda x, w, call=call: call(x, w) + 1, (x, w))
        assert torch.equal(traced(2 * x, w), 2 * x * w + 1) and name in str(traced.graph)


def test_deterministic_mode():
    """PyTorch refuses operators that it knows to be nondeterministic. Kernels are not among them."""
    x, w = tensors()
    op, writing = scale_op(), axpy_op()
    leaf = x.clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        for call in (op, op.overload, scale, torch.compile(op, backend="aot_eager", fullgraph=True)):
            for _ in range(3):
                assert torch.equal(call(x, w), x * w)
        assert torch.equal(torch.autograd.grad(op(leaf, w).sum(), leaf)[0], w.expand_as(x))
        for call in (writing, writing.overload):
            y = w.clone()
            call(2.0, w, y)
            assert torch.equal(y, 3 * w)
    finally:
        torch.use_deterministic_algorithms(False)


def test_recompilations():
    """A compiled function is compiled again for other dtypes and ranks, once more for other sizes, and never for other values."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    op = axpy_op()

    @torch.compile(backend=backend, fullgraph=True)
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


def test_the_profiler_sees_operators():
    x, w = tensors()
    with warnings.catch_warnings(), torch.profiler.profile() as profile:
        warnings.simplefilter("ignore")
        torch.ops.fx_test.scale(x, w) if scale_op() else None
    assert "fx_test::scale" in [event.name for event in profile.events()]


# ---- calls that are traced -------------------------------------------------------------------------------------------


@by_backend
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_in_compiled_functions(backend, dynamic):
    _x, w = tensors()
    compiled = torch.compile(lambda x, w: scale(x + 1, w=w) - 1, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 5, 7):
        given = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(given, w), (given + 1) * w - 1)


@by_backend
def test_kernels_that_write_in_compiled_functions(backend):
    def inplace(x, y):
        y = y.clone()
        axpy(2.0, x, y)
        axpy(a=1, x=x, y=y)
        return y * 2

    def given(x, w):
        y = torch.zeros_like(x)
        return scale(x, w, y), y

    x, w = tensors()
    torch.testing.assert_close(torch.compile(inplace, fullgraph=True, backend=backend)(x[0], w), (w + 3 * x[0]) * 2)
    for result in torch.compile(given, fullgraph=True, backend=backend)(x, w):
        torch.testing.assert_close(result, x * w)
    y = torch.zeros(4)
    torch.compile(lambda y: axpy(1.0, w, y), fullgraph=True, backend=backend)(y)
    assert torch.equal(y, w)


def test_kernels_that_replace_others_in_compiled_functions():
    """A graph is of one kernel: the function is compiled again when its variable has another, also one of the same types."""

    @fast_args(out="x[n] -> y[n]")
    def twice(x, y):
        for i in range(x.size):
            y[i] = 2 * x[i]

    @fast_args(out="x[n] -> y[n]")
    def thrice(x, y):
        for i in range(x.size):
            y[i] = 3 * x[i]

    compiled = torch.compile(lambda x, kernels: kernels[0](x), fullgraph=True, backend="eager")
    for kernel, factor in ((twice, 2), (thrice, 3), (twice, 2)):
        assert compiled(torch.ones(3), [kernel]).tolist() == [factor] * 3


def test_a_kernel_that_returns_something_breaks_the_graph():
    x, _ = tensors()
    assert torch.compile(lambda x: total(x) + 1, backend="eager")(x) == total(x) + 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: total(x) + 1, backend="eager", fullgraph=True)(x)
    for _ in range(3):
        assert torch.compile(lambda x: (scale(x, x[0]), total(x)), backend="eager")(x)[1] == total(x)


def test_calls_outside_of_the_compiler_stay_native():
    x, w = tensors()
    given = (x, w) if has_table() else (x, w, torch.empty(3, 4))  # without a table Python makes the outputs
    scale(*given)
    slow = scale.counts().slow
    torch.compile(lambda: 0, backend="eager")()
    for _ in range(3):
        scale(*given)
    assert scale.counts().slow == slow


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx(mode):
    x, w = tensors()
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, w: scale(x, w), tracing_mode=mode)(x, w)
    assert re.search(r"torch\.ops\.fastexchange\.\w*test_torch_op_scale__\w+\.default\(x_1, w_1\)", traced.code)
    assert torch.equal(traced(2 * x, w), 2 * x * w)


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


def test_explained():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        said = scale.explain(torch.empty(2, 3), torch.empty(3))
        assert said.kind == "operator" and re.search(r"torch\.ops\.fastexchange\.\w*scale", said.outcome)
        assert total.explain(torch.empty(3)).kind == "refused"
    assert scale.explain(*tensors()).kind in ("native", "new")


def test_export():
    class Module(torch.nn.Module):
        def forward(self, x, w):
            return scale(x, w) + 1

    x, w = tensors()
    rows = torch.export.Dim("rows")
    program = torch.export.export(Module(), (x, w), dynamic_shapes={"x": {0: rows}, "w": {}})
    assert "fastexchange." in program.graph_module.code
    torch.testing.assert_close(program.module()(torch.ones(5, 4), w), torch.ones(5, 4) * w + 1)


EXPORTED = """
import io, sys
import torch
from test_torch_op import scale
class Module(torch.nn.Module):
    def forward(self, x, w):
        return scale(x, w) + 1
"""


@pytest.mark.slow
def test_an_exported_program_is_loaded_where_the_kernel_is_imported(tmp_path):
    path = str(tmp_path / "program.pt2")
    save = EXPORTED + "torch.export.save(torch.export.export(Module(), (torch.ones(3, 4), torch.ones(4))), sys.argv[1])"
    load = EXPORTED + "print(torch.export.load(sys.argv[1]).module()(torch.ones(3, 4), 2 * torch.ones(4)).sum().item())"
    assert run_python(save, path, PYTHONWARNINGS="ignore")
    done = run_python(load, path, PYTHONWARNINGS="ignore")
    assert done.stdout == "36.0\n" and lines_said(done.stderr) == []


def test_pytorch_without_operators(monkeypatch):
    """A PyTorch that is too old: kernels are no operators, and their calls break a graph, as any call of Python code does."""

    @fast_args(out="x[n] -> y[n]")
    def twice(x, y):
        for i in range(x.size):
            y[i] = 2 * x[i]

    monkeypatch.delattr(torch.library, "register_vmap")
    with pytest.raises(ImportError, match=r"twice.as_torch_op\(\) needs a PyTorch with torch.library.register_vmap"):
        twice.as_torch_op("fx_test::twice")
    for _ in range(3):
        assert torch.compile(lambda x: twice(x) + 1, backend="eager")(torch.ones(3)).tolist() == [3] * 3
    assert not hasattr(torch.ops.fastexchange, name_of(twice))


def test_dynamo_compiles_nothing_of_a_call_that_breaks_its_graph():
    """Python makes the call while Dynamo traces what starts, so also the methods of the kernel that native code calls."""

    @fast_args
    def total(x):
        return x.sum()

    @fast_args
    def doubled(x):
        return 2 * x

    compiled = torch.compile(lambda kernel, x: kernel(x) + 1, backend="eager")
    torch.compiler.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    given = torch.ones(3), torch.ones(3, 2)[:, 0], torch.ones(3, dtype=torch.float64)
    for x in (*given, *given):  # the first call, further signatures, known ones
        assert compiled(total, x) == 4
        assert compiled(doubled, x).tolist() == [3] * 3
    refused(BufferError, "'x'.* requires grad", lambda: compiled(total, torch.ones(3, requires_grad=True)))
    refused(BufferError, "'x'.* device meta", lambda: compiled(total, torch.ones(3, device="meta")))
    own = [each.co_name for each in torch._dynamo.utils.get_compilation_metrics() if "/fastexchange/" in each.co_filename]
    assert set(own) <= {"__call__", "call_traced"}


@pytest.mark.parametrize("kind", ["native", "Python"])
def test_gradients_with_and_without_a_function_of_pytorch(kind, monkeypatch):
    """``torch._C._any_requires_grad``, which PyTorch 2.6 lacks."""
    if kind == "Python":
        monkeypatch.delattr(torch._C, "_any_requires_grad", raising=False)
    op = scale.as_torch_op(f"fx_test::scale_{kind}", backward=scale_backward)
    x, w = tensors()
    w.requires_grad_()
    for call in (op, op.overload):
        assert not call(x, w.detach()).requires_grad
        (grad,) = torch.autograd.grad(call(x, w).sum(), w)
        torch.testing.assert_close(grad, x.sum(0))


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(kind, words, call):
    given, message = type_and_message(call)
    assert given is kind and re.search(words, message), (given, message)


def test_what_cannot_be_an_operator_is_refused():
    @fast_args(out="x[n] -> y[n]")
    def unknown(x, alpha, y):
        pass

    @fast_args(out="x[n] -> y[n]", grad="allow")
    def hiding(x, y):
        pass

    @fast_args(out="x[n] -> y[n]", returns=np.ndarray)
    def arrays(x, y):
        pass

    @fast_args
    def many(*xs):
        pass

    @fast_args
    def text(x, name: str):
        pass

    _x, _w = tensors()
    make = scale.as_torch_op
    refused(TypeError, r"unknown.as_torch_op\(\): parameter 'alpha' \(position 1\) needs an annotation: torch.Tensor, list",
            lambda: unknown.as_torch_op("fx_bad::a"))  # fmt: skip
    refused(ValueError, "grad='allow' hides its arguments", lambda: hiding.as_torch_op("fx_bad::a", backward=scale_backward))
    refused(TypeError, "returns=numpy.ndarray", lambda: arrays.as_torch_op("fx_bad::a"))
    refused(TypeError, "takes any number of arguments", lambda: many.as_torch_op("fx_bad::a", mutates="xs"))
    refused(
        TypeError,
        "'name' .* is annotated as .*str.*, which no operator takes",
        lambda: text.as_torch_op("fx_bad::a", mutates="x"),
    )
    refused(TypeError, "declares neither outputs", lambda: total.as_torch_op("fx_bad::a"))
    refused(ValueError, "mutates= names 'z', which is no parameter", lambda: make("fx_bad::a", mutates="z"))
    refused(ValueError, "mutates= names 'y', which is an output", lambda: make("fx_bad::a", mutates="y"))
    refused(TypeError, "mutates is a tuple of parameters' names, not 3", lambda: make("fx_bad::a", mutates=3))
    refused(ValueError, "name is 'namespace::name', not 'scale'", lambda: make("scale"))
    refused(ValueError, "name is 'namespace::name', not 3", lambda: make(3))
    refused(ValueError, "setup_context= needs backward=", lambda: make("fx_bad::a", setup_context=print))
    refused(ValueError, r"backward kernel transposed\(\) has the output 'y', which is none of grad_x, grad_w",
            lambda: make("fx_bad::a", backward=transposed))  # fmt: skip
    refused(TypeError, "backward= is a function, or kernels that declare outputs", lambda: make("fx_bad::a", backward=total))
    refused(ValueError, "two backward kernels have the output 'grad_x'",
            lambda: make("fx_bad::a", backward=[scale_backward, scale_backward]))  # fmt: skip
    assert not hasattr(torch.ops.fx_bad, "a"), "nothing is left of a refused one"


def test_an_operator_is_copied_as_functions_are():
    op = scale_op()
    assert copy.copy(op) is op and copy.deepcopy({"op": op})["op"] is op


def test_many_arguments_that_are_written_to():
    names = [f"x{number}" for number in range(30)]
    space: dict = {}
    exec(f"def first({', '.join(names)}):\n    x0[0] = 5", space)
    op = fast_args(space["first"]).as_torch_op("fx_test::first", mutates=names)
    given = [torch.zeros(2) for _ in names]
    op(*given)
    assert given[0].tolist() == [5, 0] and {x._version for x in given} == {1}


def test_results_of_a_kernel_that_hides_its_arguments_from_autograd_require_no_grad():
    @fast_args(out="x[n] -> y[n]", grad="allow")
    def hidden(x, y):
        y[:] = x

    op, x = hidden.as_torch_op("fx_test::hidden"), torch.ones(3, requires_grad=True)
    for call in (op, op, op.overload, op._dispatch, torch.compile(op, backend="aot_eager", fullgraph=True)):
        assert not call(x).requires_grad


def test_a_name_is_registered_once():
    x, _w = tensors()
    op = scale.as_torch_op("fx_test::once")
    assert scale.as_torch_op("fx_test::once").overload is op.overload
    refused(ValueError, "'fx_test::once' is registered, by <fast_args .*scale", lambda: transposed.as_torch_op("fx_test::once"))
    refused(ValueError, "'aten::add' is registered, by another library", lambda: transposed.as_torch_op("aten::add"))
    other = transposed.as_torch_op("fx_test::once", replace=True)
    assert torch.equal(other(x), x.t()) and torch.equal(torch.ops.fx_test.once(x), x.t())


def test_replaced_operators():
    """Overloads that compiled graphs hold call the kernel that has their name, and no other operator's."""

    def times(factor):
        @fast_args(out="x[n] -> y[n]")
        def multiplied(x, y):
            for i in range(x.size):
                y[i] = factor * x[i]

        return multiplied

    x = torch.ones(3)
    first = times(2).as_torch_op("fx_test::replaced")
    for _ in range(5):
        first(x), first.overload(x)
    compiled = torch.compile(lambda x: torch.ops.fx_test.replaced(x), backend="aot_eager")
    calls = {"object": first, "overload": first.overload, "dispatch": first._dispatch, "compiled": compiled,
             "packet": lambda x: torch.ops.fx_test.replaced(x)}  # fmt: skip
    assert {name: call(x).tolist() for name, call in calls.items()} == dict.fromkeys(calls, [2.0] * 3)
    with pytest.raises(ValueError, match="has the output 'y', which is none of grad_x"):
        times(3).as_torch_op("fx_test::replaced", replace=True, backward=times(4))
    times(5).as_torch_op("fx_test::made_after_replaced")
    assert {name: call(x).tolist() for name, call in calls.items()} == dict.fromkeys(calls, [2.0] * 3)
    second = times(6).as_torch_op("fx_test::replaced", replace=True)
    calls["second"] = second
    assert {name: call(x).tolist() for name, call in calls.items()} == dict.fromkeys(calls, [6.0] * 3)


def test_shapes_that_do_not_fit():
    x, w = tensors()
    for call in (scale_op(), torch.compile(scale_op(), backend="eager")):
        with pytest.raises(Exception, match=r"scale\(\): argument 'w' \(position 1\): dimension"):
            call(x, x[0, :3])
    assert torch.equal(scale_op()(x, w), x * w)


def test_an_exception_of_the_kernel_reaches_the_caller():
    @fast_args(out="x[n] -> y[n]")
    def failing(x, y):
        raise ValueError("no such luck")

    op = failing.as_torch_op("fx_test::failing")
    for x in (torch.ones(3), torch.ones(2, 3)[:, 0], torch.ones(3, requires_grad=True)):
        for _ in range(3):
            kind, words = (BufferError, "requires grad") if x.requires_grad else (ValueError, "no such luck")
            with pytest.raises(kind, match=words):
                op(x)
            with pytest.raises(kind, match=words):
                op._dispatch(x)
            with pytest.raises((kind, RuntimeError), match=words):
                torch.ops.fx_test.failing(x)
    assert not vars(torch_boxed._thread).get("error")


def is_native(name):
    return torch_library._registered[f"fx_test::{name}"]._boxed is not None


@pytest.mark.skipif(torch is None or not torch_boxed._abi(), reason="PyTorch's C ABI lacks a function")
@needs_views
def test_the_dispatcher_calls_native_code():
    x, w = tensors()
    op = scale_op()
    _transposed_op(), axpy_op()
    assert is_native("scale") and is_native("transposed") and is_native("axpy")
    op.overload(x, w)
    torch.ops.fx_test.axpy(2.0, w, torch.zeros(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_boxed.BoxedKernel, "make", lambda *args: pytest.fail("Python code was called"))
        for y in (x, torch.randn(50, 4)):
            assert torch.equal(op.overload(y, w), y * w)
        y = torch.zeros(4)
        torch.ops.fx_test.axpy(2.0, w, y)
        assert torch.equal(y, 2 * w)


def _added(x, bias: "torch.Tensor | None", n: int, y):
    for i in prange(x.size):
        y[i] = x[i] * n
        if bias is not None:
            y[i] += bias[i]


@pytest.mark.skipif(torch is None or not torch_boxed._abi(), reason="PyTorch's C ABI lacks a function")
@pytest.mark.parametrize("options", [{}, {"nogil": True}, {"parallel": True}, {"nogil": True, "parallel": True}], ids=str)
def test_the_dispatcher_calls_native_code_without_the_gil_and_with_optional_tensors(options):
    """Nothing is left of these calls either. Other threads run meanwhile."""
    name = "added_" + "_".join(options)
    op = fast_args(**options, out="x[n] -> y[n]")(_added).as_torch_op(f"fx_test::{name}")
    x, bias = torch.arange(5.0), torch.ones(5)
    wanted = {id(None): x * 3, id(bias): x * 3 + 1}
    for given in (None, bias):
        op.overload(x, given, 3)
    counts = [value._use_count() for value in (x, bias)]
    assert is_native(name)
    wrong = []

    def call():
        for _ in range(300):
            for given in (None, bias):
                if not torch.equal(op.overload(x, given, 3), wanted[id(given)]):
                    wrong.append(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_boxed.BoxedKernel, "make", lambda *args: wrong.append("Python code was called"))
        threads = [threading.Thread(target=call) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not wrong and counts == [value._use_count() for value in (x, bias)]
    before = memory()
    for _ in range(300_000):
        op.overload(x[:0], bias, 3)
    assert memory() - before < 5e6, "8 bytes for each value of an optional argument, and more for each tensor"
    with pytest.raises(RuntimeError, match="complex128"):
        op.overload(x, bias.to(torch.complex128), 3)
    assert torch.equal(op.overload(x, bias, 3), wanted[id(bias)])


def test_a_kernel_that_runs_python_code_is_called_by_python_code():
    """It might see what stands for a tensor in native calls."""

    @fast_args(out="x[n] -> y[n]")
    def printing(x, y):
        y[:] = x
        with objmode():
            types_seen.append((type(x), type(y)))

    types_seen.clear()
    op, x = printing.as_torch_op("fx_test::printing"), torch.arange(3.0)
    for _ in range(3):
        assert torch.equal(op.overload(x), x)
    assert types_seen == [(np.ndarray, np.ndarray)] * 3 and printing._native.native.needs_owning_exports == RUNS_PYTHON


types_seen: list[tuple] = []


def test_the_dispatcher_calls_native_code_again_and_again():
    """Nothing is left of a call: neither handles of its arguments, nor results, nor what a failed call has allocated."""

    @fast_args(out="x[n], k -> y[k]")
    def maybe(x, k, y):
        if x[0] > 0:
            raise ValueError("positive")
        y[:] = x[0]

    op = maybe.as_torch_op("fx_test::maybe")
    good, bad = torch.zeros(3), torch.ones(3)
    counts = [sys.getrefcount(value) for value in (good, bad)] + [good._use_count(), bad._use_count()]
    for _ in range(3):
        before = memory()
        for i in range(300):
            assert op.overload(good, 500_000)[1] == 0
            with pytest.raises((RuntimeError, ValueError), match="positive"):
                op.overload(bad, 500_000 + i)
        grown = memory() - before
    assert grown < 100e6, "of 300 calls with 2 MB each"
    assert counts == [sys.getrefcount(value) for value in (good, bad)] + [good._use_count(), bad._use_count()]


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_the_dispatcher_calls_native_code_from_threads():
    x, w = tensors()
    op, results = scale_op(), []

    def call():
        for rows in range(200):
            y = x[:1].expand(rows, 4)
            results.append(torch.equal(op.overload(y, w), y * w))

    threads = [threading.Thread(target=call) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(results) == 800 and all(results)


def test_the_option_mutates():
    with pytest.raises(ValueError, match=r"mutates=\('z',\) names 'z', no parameter of total\(x\)"):
        fast_args(total.py_func, mutates="z")
    with pytest.raises(TypeError, match="mutates is a tuple of parameters' names, not 3"):
        fast_args(total.py_func, mutates=3)
    kernel = fast_args(axpy.py_func, mutates=["y"])
    assert kernel.mutates == ("y",)
    x, y = torch.ones(3), torch.zeros(3)
    torch.compile(lambda x, y: kernel(2.0, x, y), fullgraph=True, backend="aot_eager")(x, y)
    assert y.tolist() == [2, 2, 2]
    assert [each.name for each in kernel._operators and torch.ops.fastexchange.__getattr__(
        next(iter(kernel._operators.values()))).default._schema.arguments if each.alias_info] == ["y"]  # fmt: skip


@pytest.mark.slow
def test_operators_without_compiling():
    """Under NUMBA_DISABLE_JIT operators work, too, by the Python function."""
    code = """
    import torch
    from test_torch_op import scale, scale_backward
    op = scale.as_torch_op("fx_test::interpreted", backward=scale_backward)
    x, w = torch.ones(3, 4), torch.ones(4, requires_grad=True)
    op(x, w).sum().backward()
    print(w.grad.tolist(), torch.compile(op, backend="aot_eager", fullgraph=True)(x, w.detach()).sum().item())
    """
    assert run_python(code, NUMBA_DISABLE_JIT="1", PYTHONWARNINGS="ignore").stdout == "[3.0, 3.0, 3.0, 3.0] 12.0\n"


def test_a_kernel_that_returns_a_value_for_some_types():
    """What it returns for others is no answer: a value would be lost."""

    @fast_args
    def sometimes(x):
        return _of_dimensions(x)

    assert sometimes(torch.ones(3)) is None
    two = torch.ones(2, 3)
    assert torch.compile(lambda x: (sometimes(x), x + 1), backend="eager")(two)[0] == 6


def _of_dimensions(x):
    raise NotImplementedError


@numba.extending.overload(_of_dimensions)
def _of_dimensions_of(x):
    return (lambda x: None) if x.ndim == 1 else (lambda x: x.sum())


def test_an_operator_without_outputs_returns_none():
    @fast_args
    def returning(x: "torch.Tensor"):
        x[0] += 1
        return x[0]

    @fast_args
    def returning_of_lists(x: "list[torch.Tensor]"):  # PyTorch's dispatcher calls Python code
        x[0][0] += 1
        return x[0][0]

    for kernel, given in ((returning, torch.ones(3)), (returning_of_lists, [torch.ones(3)])):
        op = kernel.as_torch_op(f"fx_test::{kernel.__name__}", mutates="x")
        for _ in range(3):
            for call in (op, op.overload):
                with pytest.raises((TypeError, RuntimeError), match=r"declares no outputs, .* has to return None"):
                    call(given)


@pytest.mark.slow
def test_undeclared_writes_are_found_on_request():
    code = """
    import torch
    from fastexchange import fast_args
    @fast_args(out="x[n], scalar[] -> y[n]")
    def cheating(x, scalar, y):
        x[0] = 1
        y[:] = x
    op = cheating.as_torch_op("fx_test::cheating")
    try:
        print(torch.ops.fx_test.cheating(torch.zeros(3), torch.zeros(())))
    except RuntimeError as error:
        print(error)
    print(torch.ops.fx_test.cheating(torch.ones(3), torch.zeros(())).tolist())
    """
    assert run_python(code, FASTEXCHANGE_DEBUG="0").stdout == "tensor([1., 0., 0.])\n[1.0, 1.0, 1.0]\n"
    said = run_python(code, FASTEXCHANGE_DEBUG="1").stdout
    assert said.startswith("cheating(): the kernel has written to argument 'x' (position 0), which mutates= does not name")
    assert said.endswith("[1.0, 1.0, 1.0]\n")


@pytest.mark.slow
def test_debug_runs_check_every_call():
    """Native code calls an operator's kernel from the second call on, and the ``autograd.Function`` of it."""
    code = """
    import torch
    from fastexchange import fast_args

    @fast_args(out="x[n] -> y[n]")
    def cheating(x, y):
        for i in range(x.size):
            y[i] = x[i]
            x[i] = -1

    @fast_args(out="grad_y[n] -> grad_x[n]")
    def backward(grad_y, grad_x):
        grad_x[:] = grad_y

    op = cheating.as_torch_op("fx_test::cheating_again", backward=backward)
    for requires_grad in (False, True, False, True):
        try:
            print(op(torch.ones(3, requires_grad=requires_grad)).shape)
        except RuntimeError as error:
            print(str(error).partition(":")[0])
    """
    assert run_python(code, FASTEXCHANGE_DEBUG="0").stdout == "torch.Size([3])\n" * 4
    assert run_python(code, FASTEXCHANGE_DEBUG="1").stdout == "cheating()\n" * 4


@fast_args(out="x[n] -> y[n]")
def raising_arrays(x, y):
    y[:] = x
    if x[0] > 0:
        raise ValueError("with arrays", x, y)


@functools.cache
def raising_op():
    op = raising_arrays.as_torch_op("fx_test::raising_arrays")
    op.overload(torch.zeros(3))
    return op


@pytest.mark.skipif(torch is None or not torch_boxed._abi(), reason="PyTorch's C ABI lacks a function")
@pytest.mark.parametrize("method", ["make", "_kernel"])
def test_ctrl_c_in_a_call_of_the_dispatcher(method, monkeypatch):
    """PyTorch's dispatcher has a RuntimeError for everything; programs catch that."""

    @fast_args(out="x[n] -> y[n]")
    def interrupted(x, y):
        y[:] = x

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    op = interrupted.as_torch_op(f"fx_test::interrupted_{method.strip('_')}")
    boxed = torch_library._registered[op.name]._boxed
    monkeypatch.setattr(torch_boxed.BoxedKernel if method == "make" else boxed, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        try:
            op.overload(torch.ones(3))
        except RuntimeError:
            for _ in range(1000):  # as after any signal, some statements may run before
                pass
    monkeypatch.undo()
    assert op.overload(torch.ones(3)).tolist() == [1, 1, 1]


def test_arrays_in_an_exception_keep_their_memory():
    x = torch.full((500,), 2.0)
    for value in (2.0, 3.0, 4.0):
        with pytest.raises(ValueError, match="with arrays") as info:
            raising_op()._dispatch(x)
        arrays = info.value.args[1:]
        x.set_(torch.full((500,), value + 1))
        others = [torch.full((500,), -1.0) for _ in range(20)]
        assert [array[-1] for array in arrays] == [value] * 2 and others


@pytest.mark.skipif(torch is None or not torch_boxed._abi(), reason="PyTorch's C ABI lacks a function")
@needs_views
def test_modes_see_no_stand_in():
    """What native code reads as a tensor is no Python object: a mode that keeps it would read freed memory."""
    from torch.overrides import TorchFunctionMode

    op, seen = raising_op(), []

    class See(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append((function, args))
            return function(*args, **(kwargs or {}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = torch.jit.trace(lambda x: torch.ops.fx_test.raising_arrays(x), torch.zeros(3))  # a mode does not see it call
    x = torch.ones(3)
    with See(), pytest.raises(RuntimeError, match="with arrays"):
        call(x)
    assert op.kernel.counts().fast and seen == []
