"""Kernels as explicit operators of PyTorch: calls, gradients, schemas, vmap, and what calls them natively."""

import copy
import functools
import sys
import threading

import numpy as np
import pytest
import torch_operators
from numba import objmode, prange
from torch_operators import axpy_op, native_calls, scale, scale_backward, scale_op, tensors, torch

from fastexchange import TorchOp, fast_args
from fastexchange.calls import torch_boxed, torch_library
from fastexchange.ground.numba_code import RUNS_PYTHON

nothing_compiled = torch_operators.nothing_compiled


def test_an_operator_is_called_like_the_kernel():
    x, w = tensors()
    op = scale_op()
    assert isinstance(op, TorchOp) and op.kernel is scale and op.name == "fx_test::scale"
    assert op.overload is torch.ops.fx_test.scale.default
    assert repr(op) == "<fast_args operator fx_test::scale(Tensor x, Tensor w) -> Tensor>"
    assert copy.copy(op) is op and copy.deepcopy({"op": op})["op"] is op
    for result in (op(x, w), op(w=w, x=x), torch.ops.fx_test.scale(x, w), op(x.t().contiguous().t(), w)):
        assert torch.equal(result, x * w)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
    op = scale_op()
    assert torch.autograd.gradcheck(op, (x, w))
    (only_w,) = torch.autograd.grad(op(x.detach(), w).sum(), w)
    torch.testing.assert_close(only_w, x.detach().sum(0))
    with torch.no_grad():
        assert not op(x, w).requires_grad


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


def test_backward_kernels_of_operators_and_of_lazily_conjugated_and_negated_tensors():
    """A backward pass whose kernels are operators has a second one."""

    @fast_args(out="x[n] -> y[n]")
    def square(x, y):
        for i in range(x.size):
            y[i] = x[i] * x[i]

    @fast_args(out="grad_y[n], x[n] -> grad_x[n]")
    def square_backward(grad_y, x, grad_x):
        for i in range(x.size):
            grad_x[i] = 2 * x[i].conjugate() * grad_y[i]

    @fast_args(out="grad_grad_x[n], grad_y[n], x[n] -> grad_grad_y[n], grad_x[n]")
    def square_double(grad_grad_x, grad_y, x, grad_grad_y, grad_x):
        for i in range(x.size):
            grad_grad_y[i] = 2 * x[i] * grad_grad_x[i]
            grad_x[i] = 2 * grad_y[i] * grad_grad_x[i]

    first = square_backward.as_torch_op("fx_test::square_backward", backward=square_double)
    op = square.as_torch_op("fx_test::square", backward=first)
    x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, x) and torch.autograd.gradgradcheck(op, x)

    op = square.as_torch_op("fx_test::square_lazy", backward=square_backward)
    weights = torch.tensor([1 + 2j, 3 - 1j, -2j])
    for lazy in (lambda x, f: f(x).conj(), lambda x, f: f(x.conj()), lambda x, f: f(x.conj().imag)):
        x = torch.tensor([1 + 1j, 2 - 3j, 4j], requires_grad=True)
        wanted, got = (torch.autograd.grad((lazy(x, f) * weights).sum().abs(), x)[0] for f in (torch.square, op))
        assert torch.allclose(got, wanted)


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
    said = r"scale\(\): its backward returned 1 gradients, and the operator has 2 arguments, x, w"
    with pytest.raises(RuntimeError, match=said):
        wrong(x, w).sum().backward()


def test_transforms_that_differentiate_are_refused():
    """PyTorch would give gradients of zeros: these transforms do not see a backward pass that is registered from Python."""
    x, w = tensors()
    without = scale.as_torch_op("fx_test::scale_without")
    for op in (without, scale_op()):
        for _ in range(3):
            op(x, w)
        for call in (torch.func.grad(lambda x: op(x, w).sum()), torch.func.jacfwd(lambda x: op(x, w))):  # noqa: B023
            with pytest.raises(BufferError, match=r"argument 'x' \(position 0\) is differentiated by a transform"):
                call(x)
        assert torch.equal(torch.func.vmap(op, (0, None))(x[None], w)[0], x * w)
    with pytest.raises(BufferError, match="requires grad"):
        without(x.requires_grad_(), w)
    with torch.no_grad():
        assert torch.equal(without(x, w), x * w)
    with pytest.raises(Exception, match="requires grad, and the operator has no backward"):
        torch.compile(without, backend="eager", fullgraph=True)(x, w)


def test_results_of_a_kernel_that_hides_its_arguments_from_autograd_require_no_grad():
    @fast_args(out="x[n] -> y[n]", grad="allow")
    def hidden(x, y):
        y[:] = x

    op, x = hidden.as_torch_op("fx_test::hidden"), torch.ones(3, requires_grad=True)
    for call in (op, op, op.overload, op._dispatch, torch.compile(op, backend="aot_eager", fullgraph=True)):
        assert not call(x).requires_grad


# ---- arguments that are written to ------------------------------------------------------------------------------------


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


@pytest.mark.skipif(not hasattr(torch.library, "register_torch_dispatch"), reason="needs PyTorch 2.5")
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
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    for x in (torch.ones(3, device="meta"), fake):
        for count in (1, 2):
            op(x, *given)
            assert x._version == count


def test_many_arguments_that_are_written_to():
    names = [f"x{number}" for number in range(30)]
    space: dict = {}
    exec(f"def first({', '.join(names)}):\n    x0[0] = 5", space)
    op = fast_args(space["first"]).as_torch_op("fx_test::first", mutates=names)
    given = [torch.zeros(2) for _ in names]
    op(*given)
    assert given[0].tolist() == [5, 0] and {x._version for x in given} == {1}


# ---- schemas, vmap -----------------------------------------------------------------------------------------------------

SHAPES = {"plain": (3, 4), "strided": (3, 4), "transposed": (4, 3), "empty": (0, 4)}


@pytest.mark.parametrize(("dtype", "layout"), [
    *(("float32", layout) for layout in SHAPES), *((dtype, "plain") for dtype in ("int64", "uint8", "bool", "complex64")),
])  # fmt: skip
def test_opcheck_of_dtypes_and_layouts(dtype, layout):
    op = torch_operators.transposed_op()
    x = torch.arange(24).reshape(6, 4).to(getattr(torch, dtype))[: SHAPES[layout][0] or 0]
    x = {"strided": x[:, ::2], "transposed": x.t()}.get(layout, x)
    assert torch.equal(op(x), x.t())
    assert set(torch.library.opcheck(op.overload, (x,), raise_exception=True).values()) == {"SUCCESS"}


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
    several, optional, listed, rest = (
        kernel.as_torch_op(f"fx_test::{kernel.__name__}") for kernel in (several, optional, listed, rest)
    )
    assert str(several.overload._schema) == "fx_test::several(Tensor x, SymInt k) -> (Tensor, Tensor)"
    assert str(listed.overload._schema) == "fx_test::listed(Tensor[] xs, Tensor x) -> Tensor"
    cases = [
        (several, (x, 2)), (optional, (x, None, 0.5, True, 3)), (optional, (x, x, 0.5, True, 3)), (listed, ([x, x], x)),
        (rest, (torch.ones(2, 3, 4),)), (rest, (torch.ones(()),)),
    ]  # fmt: skip
    for op, args in cases:
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


# ---- calls without PyTorch's dispatcher ----------------------------------------------------------------------------------


def modes():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    return Function(), Dispatch()


def test_calls_with_plain_tensors_go_straight_to_the_kernel():
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
    for mode in modes():
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
    leaf, op = x.clone().requires_grad_(), scale_op()
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
    for _ in range(3):
        assert op(x, 2.0, 2**62).tolist() == op(x, 2.0, -(2**62)).neg().tolist() == [2.0**62] * 3
    for large in (2**63, 2**70, -(2**63) - 1):
        with pytest.raises(RuntimeError, match=r"Expected a value of type 'int'|int too"):
            op(x, 2.0, large)


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


# ---- native code that PyTorch's dispatcher calls ---------------------------------------------------------------------------


def is_native(name):
    return torch_library._registered[f"fx_test::{name}"]._boxed is not None


@torch_operators.needs_abi
@torch_operators.needs_views
def test_the_dispatcher_calls_native_code():
    x, w = tensors()
    op = scale_op()
    torch_operators.transposed_op(), axpy_op()
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


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@torch_operators.needs_abi
@pytest.mark.parametrize("options", [{}, {"nogil": True}, {"nogil": True, "parallel": True}], ids=str)
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
        for _ in range(100):
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
    for _ in range(300_000 if not options else 0):
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
    for _ in range(2):
        before = memory()
        for i in range(200):
            assert op.overload(good, 500_000)[1] == 0
            with pytest.raises((RuntimeError, ValueError), match="positive"):
                op.overload(bad, 500_000 + i)
        grown = memory() - before
    assert grown < 100e6, "of 200 calls with 2 MB each"
    assert counts == [sys.getrefcount(value) for value in (good, bad)] + [good._use_count(), bad._use_count()]
