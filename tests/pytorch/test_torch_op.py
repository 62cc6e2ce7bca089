"""Kernels as explicit operators of PyTorch: calls, gradients, schemas, vmap, pickles, and what calls them natively."""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch_operators
from children import at_once
from forked import fork_python
from nights import at_night
from numba import objmode, prange
from oracle import references_kept
from raising import check_raises
from scale_kernels import elementwise
from torch_operators import axpy_op, doubled, native_calls, scale, scale_op, tensors, torch
from ways import mode_of

from fastexchange import TorchOp, fast_args
from fastexchange.ground.numba_code import RUNS_PYTHON
from fastexchange.torch import boxed_operator as torch_boxed
from fastexchange.torch import library as torch_library

nothing_compiled = torch_operators.nothing_compiled
compiled_whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


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
def kernel_of(head, statement, out):
    return fast_args(out=out)(elementwise(head, statement))


product = kernel_of("product(x, y, z)", "z[i] = x[i] * y[i]", "x[n], y[n] -> z[n]")
product_by_x = kernel_of("product_by_x(grad_z, y, grad_x)", "grad_x[i] = grad_z[i] * y[i]", "grad_z[n], y[n] -> grad_x[n]")
product_by_y = kernel_of("product_by_y(grad_z, x, grad_y)", "grad_y[i] = grad_z[i] * x[i]", "grad_z[n], x[n] -> grad_y[n]")
square = kernel_of("square(x, y)", "y[i] = x[i] * x[i]", "x[n] -> y[n]")
square_backward = kernel_of("square_backward(grad_y, x, grad_x)", "grad_x[i] = 2 * x[i].conjugate() * grad_y[i]",
                            "grad_y[n], x[n] -> grad_x[n]")  # fmt: skip
square_double = kernel_of("square_double(grad_grad_x, grad_y, x, grad_grad_y, grad_x)",
                          "grad_grad_y[i], grad_x[i] = 2 * x[i] * grad_grad_x[i], 2 * grad_y[i] * grad_grad_x[i]",
                          "grad_grad_x[n], grad_y[n], x[n] -> grad_grad_y[n], grad_x[n]")  # fmt: skip


@pytest.mark.parametrize("kind", ["native", "Python"])
def test_gradients_with_and_without_a_function_of_pytorch(kind, monkeypatch):
    """``torch._C._any_requires_grad``, which PyTorch 2.6 lacks."""
    if kind == "Python":
        monkeypatch.delattr(torch._C, "_any_requires_grad", raising=False)
    op = scale.as_torch_op(f"fx_test::scale_{kind}", backward=torch_operators.scale_backward)
    x, w = (value.double().requires_grad_() for value in tensors())
    assert torch.autograd.gradcheck(op, (x, w))
    for call in (op, op.overload):
        assert not call(x.detach(), w.detach()).requires_grad
        (grad,) = torch.autograd.grad(call(x.detach(), w).sum(), w)
        torch.testing.assert_close(grad, x.detach().sum(0))
        with torch.no_grad():
            assert not call(x, w).requires_grad


def test_gradients_of_calls_that_omit_arguments():
    head = "power(x, factor: float = 3.0, exponent: float = 2.0, y=None)"
    power = kernel_of(head, "y[i] = factor * x[i] ** exponent", "x[n] -> y[n]")
    power_backward = kernel_of("power_backward(grad_y, x, factor: float, exponent: float, grad_x)",
                               "grad_x[i] = grad_y[i] * factor * exponent * x[i] ** (exponent - 1)",
                               "grad_y[n], x[n] -> grad_x[n]")  # fmt: skip
    op = power.as_torch_op("fx_test::power", backward=power_backward)
    calls = ((), {}, 3.0, 2.0), ((5.0,), {}, 5.0, 2.0), ((3.0, 3.0), {}, 3.0, 3.0), ((), {"exponent": 3.0}, 3.0, 3.0)
    for args, kwargs, factor, exponent in calls:
        x = torch.arange(1.0, 4.0, requires_grad=True)
        wanted = (factor * exponent * x.detach() ** (exponent - 1)).tolist()
        for function in (op, torch.ops.fx_test.power, compiled_whole(op)):
            assert torch.autograd.grad(function(x, *args, **kwargs).sum(), x)[0].tolist() == wanted


def test_a_backward_pass_of_several_kernels_calls_those_that_are_needed():
    op = product.as_torch_op("fx_test::product", backward=[product_by_x, product_by_y])
    x, y, by_y = torch.arange(3.0, requires_grad=True), torch.ones(3), product_by_y.counts()
    op(x, y).sum().backward()
    assert x.grad.tolist() == [1, 1, 1] and product_by_y.counts() == by_y
    assert torch.autograd.gradcheck(op, (x.detach().double().requires_grad_(), y.double().requires_grad_()))


def test_backward_kernels_of_operators_and_of_lazily_conjugated_and_negated_tensors():
    """A backward pass whose kernels are operators has a second one."""
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
    op = scale.as_torch_op(
        "fx_test::scale_by_function",
        backward=lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    x, w = tensors()
    x.requires_grad_()
    op(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.expand(3, 4))
    wrong = scale.as_torch_op("fx_test::scale_wrong", backward=lambda ctx, grad: grad)
    said = r"scale\(\): its backward returned 1 gradient, and the operator has 2 arguments, x, w"
    check_raises(RuntimeError, said, wrong(x, w).sum().backward)


def test_an_operator_without_a_backward_pass():
    x, w = tensors()
    op = scale.as_torch_op("fx_test::scale_without")
    assert torch.equal(op(x, w), x * w)
    check_raises(BufferError, "requires grad", op, x.requires_grad_(), w)
    with torch.no_grad():
        assert torch.equal(op(x, w), x * w)
    whole = torch.compile(op, backend="eager", fullgraph=True)
    check_raises((Exception,), "requires grad, and the operator has no backward", whole, x, w)
    hidden = fast_args(grad="allow", out="x[n] -> y[n]")(doubled.py_func).as_torch_op("fx_test::hidden")
    leaf = torch.ones(3, requires_grad=True)
    for call in (hidden, hidden, hidden.overload, hidden._dispatch, compiled_whole(hidden)):
        assert not call(leaf).requires_grad
    for call in (hidden, hidden.overload):
        assert torch.func.grad(lambda x, call=call: (call(x) * x).sum())(torch.arange(3.0)).tolist() == [0, 2, 4]


# ---- arguments that are written to ------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [(), (1.0,)], ids=["by default", "given"])
def test_mutated_arguments_move_their_version_counters(given):
    @fast_args(mutates="x")
    def increase(x, by: float = 1.0):
        x += by

    op = increase.as_torch_op(f"fx_test::increase_{len(given)}")
    assert str(op.overload._schema) == f"{op.name}(Tensor(a!) x, float by=1.) -> ()"
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    for x in (torch.ones(3), torch.ones(3, device="meta"), fake):
        for count in (1, 2):
            assert op(x, *given) is None and x._version == count

    def loss(write, w, x):
        y = w * x
        write(x, *given)
        return y.sum()

    calls = [functools.partial(loss, write) for write in (lambda x, by=1: x.add_(by), op, op.overload, increase)]
    for call in (*calls[:3], *map(compiled_whole, calls)):
        w, x = torch.ones(3, requires_grad=True), torch.ones(3)
        with pytest.raises(Exception, match="modified by an inplace operation"):
            call(w, x).backward()


def test_many_arguments_that_are_written_to():
    names = [f"x{number}" for number in range(30)]
    op = fast_args(eval(f"lambda {', '.join(names)}: x0.fill(5)")).as_torch_op("fx_test::first", mutates=names)
    given = [torch.zeros(2) for _ in names]
    op(*given)
    assert given[0].tolist() == [5, 5] and {x._version for x in given} == {1}


# ---- schemas, vmap -----------------------------------------------------------------------------------------------------
@fast_args(out="x[n], k -> first[k], sums[]: float64")
def several(x, k, first, sums):
    sums[()] = x.sum()
    first[:] = x[:k]


@fast_args(out="x[n] -> y[n]")
def optional(x, bias: "torch.Tensor | None", alpha: float, is_on: bool, count: int, y):
    y[:] = x * alpha + count
    if is_on and bias is not None:
        y += bias


@fast_args(out="x[n] -> y[n]")
def listed(xs: "list[torch.Tensor]", x, y):
    y[:] = x
    for each in xs:
        y += each


@fast_args(out="x[...] -> y[...]: int64, n[]: x")
def rest(x, y, n):
    n[()] = x.size
    y[...] = 1


matrix, vector = torch.arange(12.0).view(3, 4), torch.arange(5.0)
CHECKED = {
    **{name: (torch_operators.transposed, (x,), torch.t) for name, x in {
        "strided": matrix[:, ::2], "transposed": matrix.t(), "empty": matrix[:0], "int64": matrix.long(), "bool": matrix.bool(),
        "complex64": matrix.to(torch.complex64),
    }.items()},
    "several outputs": (several, (vector, 2), lambda x, k: (x[:k], x.double().sum())),
    "None": (optional, (vector, None, 0.5, True, 3), lambda x, *rest: x / 2 + 3),
    "not None": (optional, (vector, vector, 0.5, True, 3), lambda x, *rest: x * 1.5 + 3),
    "a list": (listed, ([vector, vector], vector), lambda xs, x: 3 * x),
    "any rank": (rest, (torch.ones(2, 3, 4),), lambda x: (torch.ones_like(x).long(), torch.tensor(24.0))),
    "no dimension": (rest, (torch.ones(()),), lambda x: (torch.tensor(1), torch.tensor(1.0))),
}  # fmt: skip
SCHEMAS = {several: "(Tensor x, SymInt k) -> (Tensor, Tensor)", listed: "(Tensor[] xs, Tensor x) -> Tensor"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name):
    kernel, args, oracle = CHECKED[name]
    op = kernel.as_torch_op(f"fx_test::{kernel.__name__}")
    assert str(op.overload._schema).endswith(SCHEMAS.get(kernel, ""))
    torch.testing.assert_close(op.overload(*args), oracle(*args), rtol=0, atol=0)
    assert set(torch.library.opcheck(op.overload, args).values()) == {"SUCCESS"}


def test_vmap():
    assert torch.vmap(scale_op(), (0, None))(torch.empty(0, 3, 4), torch.ones(4)).shape == (0, 3, 4)
    op, x, y = axpy_op(), torch.ones(2, 3), torch.zeros(2, 3)
    torch.vmap(lambda x, y: op(2.0, x, y), out_dims=None)(x, y)
    assert y.tolist() == [[2.0] * 3] * 2
    said = "'y' is written to, and vmap has not been given a batch of it"
    check_raises(ValueError, said, torch.vmap(lambda x: op(2.0, x, y[0]), out_dims=None), x)


@pytest.mark.parametrize("function", [scale, scale_op()], ids=["kernel", "operator"])
@pytest.mark.parametrize("dims", [
    ((0, None),), ((-1, 0),), ((None, 0),), ((0, None),) * 2, ((0, 0), (2, None)), ((1, None), (0, 0)),
    ((0, None), (None, 0), (2, None)),
])  # fmt: skip
def test_vmap_within_vmap(dims, function):
    """One native loop over all batches, of which an argument may have none."""
    extents, kernel, oracle = iter((2, 5, 6)), function, torch.mul
    x, w = torch.arange(12.0).view(3, 4), torch.arange(4.0)
    for of_x, of_w in dims:  # the innermost first
        function, oracle, extent = torch.vmap(function, (of_x, of_w)), torch.vmap(oracle, (of_x, of_w)), next(extents)
        x, w = (each if dim is None else torch.stack([each + i for i in range(extent)], dim)
                for each, dim in ((x, of_x), (w, of_w)))  # fmt: skip
    before = scale.counts().fast
    assert torch.equal(function(x, w), oracle(x, w))
    if kernel is scale:
        assert scale.counts().fast == before + 1
        check_raises(BufferError, r"'w' .* requires grad", function, x, w.requires_grad_())


def test_keyword_only_arguments():
    @fast_args
    def times(x: "torch.Tensor", *, factor: float = 2.0):
        x *= factor

    @fast_args
    def copied(x: "torch.Tensor", *, to: "torch.Tensor"):
        to[:] = x

    op, x, y = times.as_torch_op("fx_test::times", mutates="x"), torch.ones(2, 3), torch.zeros(3)
    torch.vmap(lambda x: op(x), out_dims=None)(x)
    torch.vmap(lambda x: op(x, factor=3.0), out_dims=None)(x)
    assert x.tolist() == [[6.0] * 3] * 2
    copied.as_torch_op("fx_test::copied", mutates="to")(x[0], to=y)
    assert torch.equal(y, x[0])
    compiled_whole(lambda x, y: copied(x, to=y))(x[1] + 1, y)
    assert torch.equal(y, x[1] + 1)


# ---- calls without PyTorch's dispatcher ----------------------------------------------------------------------------------
def test_calls_with_plain_tensors_go_straight_to_the_kernel_and_others_to_the_dispatcher(monkeypatch):
    """So do calls that autograd alone sees. Modes, transforms and tangents are for PyTorch's dispatcher."""
    from torch.autograd import forward_ad
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    x, w = tensors()
    op, writing, leaf = scale_op(), axpy_op(), x.clone().requires_grad_()
    for _ in range(4):
        op(x, w), op(leaf, w), writing(2.0, w, w.clone())
    assert native_calls(op, x, w) == native_calls(op, leaf, w) == native_calls(writing, 2.0, w, w.clone()) == 1
    seen, dispatch = [], TorchOp._dispatch
    monkeypatch.setattr(TorchOp, "_dispatch", lambda self, *args, **kwargs: seen.append(1) or dispatch(self, *args, **kwargs))

    def ways(op, *args, **kwargs) -> int:
        seen.clear()
        op(*args, **kwargs)
        return len(seen)

    assert ways(op, x, w) == ways(op, leaf, w) == ways(op, torch.nn.Parameter(x), w) == ways(op, leaf, leaf[0]) == 0
    assert ways(op, leaf, w=w) == ways(op, leaf.as_subclass(torch.nn.Buffer), w) == 1
    check_raises(BufferError, "requires grad", writing, 2.0, w, leaf[0])
    with torch.no_grad():
        assert ways(op, leaf, w) == 0
    with torch.inference_mode():
        assert ways(writing, 2.0, w, torch.ones(4)) == 1  # it has no version counter
    for kind in (TorchFunctionMode, TorchDispatchMode):
        with mode_of(kind, lambda *call: None):
            assert ways(op, x, w) == ways(op, leaf, w) == 1
    assert torch.func.vmap(lambda _: torch.tensor(ways(op, leaf, w)))(torch.zeros(2)).sum() == len(seen) * 2 == 2
    with forward_ad.dual_level():
        assert ways(op, leaf, w) == 1
        check_raises(BufferError, "tangent", op, forward_ad.make_dual(x, x), w)
    assert ways(op, leaf, w) == 0 and op(leaf, w).requires_grad and op(x=leaf, w=w).requires_grad
    version = w._version
    writing(2.0, x[0], w), writing(a=2.0, x=x[0], y=w)
    assert w._version == version + 2


def test_calls_are_the_same_with_native_code_as_with_the_dispatcher():
    """The kernel itself takes more than its operator does: its outputs, and scalars of other types than the schema's."""

    @fast_args(out="x[n] -> y[n]")
    def halved(x, divisor: float = 2.0, steps: int = 1, y=None):
        y[:] = x + 7 // divisor + steps

    op, x, y = halved.as_torch_op("fx_test::halved"), torch.arange(3.0), torch.zeros(3)
    native, dispatched, parameter = op, op._dispatch, torch.nn.Parameter(x, requires_grad=False)
    for value in (x, parameter, x.as_subclass(type("Subclass", (torch.Tensor,), {}))):
        for args, kwargs in [((), {}), ((2.5, 1), {}), ((2, True), {}), ((), {"divisor": 4, "steps": 2})]:
            for _ in range(4):
                result, wanted = native(value, *args, **kwargs), dispatched(value, *args, **kwargs)
                assert torch.equal(result, wanted) and type(result) is type(wanted)
    for args, kwargs in [((2.0, 1, y), {}), ((2.0, y), {}), ((), {"y": y}), ((None,), {}), ((2.0, 1.5), {})]:
        for call in (native, dispatched):
            check_raises(RuntimeError, "fx_test::halved", call, x, *args, **kwargs)
    assert y.tolist() == [0, 0, 0] and native_calls(op, x) == native_calls(op, parameter, 2.5, 1) == 1
    for _ in range(3):
        assert op(x, 2.0, 2**62).tolist() == op(x, 2.0, -(2**62)).neg().tolist() == [2.0**62] * 3
    for large in (2**63, 2**70, -(2**63) - 1):
        check_raises(RuntimeError, r"Expected a value of type 'int'|int too", op, x, 2.0, large)


# ---- native code that PyTorch's dispatcher calls ---------------------------------------------------------------------------
def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def biased(x, bias: "torch.Tensor | None", n: int, y):
    for i in prange(x.size):
        y[i] = x[i] * n
        if bias is not None:
            y[i] += bias[i]


@torch_operators.needs_abi
@torch_operators.needs_views
@pytest.mark.parametrize("options", [{}, {"nogil": True}, {"nogil": True, "parallel": True}], ids=str)
def test_the_dispatcher_calls_native_code(options, monkeypatch):
    """Also without the GIL, from threads, with optional tensors, and with a kernel that writes. Nothing is left of a call."""
    op = fast_args(**options, out="x[n] -> y[n]")(biased).as_torch_op("fx_test::biased_" + "_".join(options))
    x, bias, writing, wrong = torch.arange(5.0), torch.ones(5), axpy_op(), []
    wanted = {id(None): x * 3, id(bias): x * 3 + 1}
    for given in (None, bias):
        op.overload(x, given, 3)
    writing.overload(2.0, x, torch.zeros(5))
    assert all(torch_library._registered[each.name]._boxed for each in (op, writing))
    counts = [value._use_count() for value in (x, bias)]

    def call():
        for _ in range(100):
            for given in (None, bias):
                if not torch.equal(op.overload(x, given, 3), wanted[id(given)]):
                    wrong.append(given)

    with monkeypatch.context() as patch:
        patch.setattr(torch_boxed.BoxedKernel, "make", lambda *args: wrong.append("Python code was called"))
        at_once(call, call, call)
        assert torch.equal(op.overload(torch.ones(500), None, 2), torch.full((500,), 2.0))
        y = torch.zeros(5)
        writing.overload(2.0, x, y)
        assert torch.equal(y, 2 * x)
    assert not wrong and counts == [value._use_count() for value in (x, bias)]
    before, empty = resident(), x[:0]
    for _ in range(300_000 if not options else 0):
        op.overload(empty, bias, 3)
    assert resident() - before < 5e6, "8 bytes for each value of an optional argument, and more for each tensor"
    check_raises(RuntimeError, "complex128", op.overload, x, bias.to(torch.complex128), 3)
    assert torch.equal(op.overload(x, bias, 3), wanted[id(bias)])


types_seen: list[tuple] = []


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


def test_the_dispatcher_calls_native_code_again_and_again():
    """Nothing is left of a call: neither handles of its arguments, nor results, nor what a failed call has allocated."""

    @fast_args(out="x[n], k -> y[k]")
    def maybe(x, k, y):
        if x[0] > 0:
            raise ValueError("positive")
        y[:] = x[0]

    op, good, bad = maybe.as_torch_op("fx_test::maybe"), torch.zeros(3), torch.ones(3)
    counts = good._use_count(), bad._use_count()
    with references_kept(good, bad):
        for _ in range(2):
            before = resident()
            for i in range(100):
                assert op.overload(good, 500_000)[1] == 0
                check_raises((RuntimeError, ValueError), "positive", op.overload, bad, 500_000 + i)
            grown = resident() - before
    assert grown < 50e6, "of 100 calls with 2 MB each"
    assert counts == (good._use_count(), bad._use_count())


@fast_args
def add(x: torch.Tensor, y: torch.Tensor):
    y[:] = x + y


def thrice(ctx, grad):
    return 3 * grad


def test_a_pickle_finds_the_operator_of_its_name():
    op = doubled.as_torch_op("fx_pickled::same", backward=torch_operators.doubled_backward)
    again, x = pickle.loads(pickle.dumps(op)), torch.ones(3, requires_grad=True)
    assert again.kernel is doubled and again.overload is op.overload
    for _ in range(4):
        again(x).sum().backward()
    assert x.grad.tolist() == [8.0] * 3
    data = pickle.dumps(op)
    add.as_torch_op("fx_pickled::same", mutates=("y",), replace=True)
    check_raises(ValueError, "'fx_pickled::same' is registered, by <fast_args .*add.*another declaration", pickle.loads, data)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        backwards = {"by_kernel": torch_operators.doubled_backward, "by_function": thrice}
        self.operators = [doubled.as_torch_op(f"fx_pickled::{name}", backward=each) for name, each in backwards.items()]
        self.add = add.as_torch_op("fx_pickled::add", mutates=("y",))

    def forward(self, x):
        y = torch.zeros_like(x.detach())
        self.add(x.detach(), y)
        return sum(op(x) for op in self.operators) + y


@pytest.mark.slow
@pytest.mark.parametrize("is_module_first", at_night([False, True], False))
def test_a_module_is_saved_and_loaded_elsewhere(is_module_first, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(Model(), path)
    done = fork_python(f"""
        import torch, test_torch_op
        first = test_torch_op.Model() if {is_module_first} else None
        model = torch.load({str(path)!r}, weights_only=False)
        x = torch.ones(3, requires_grad=True)
        y = model(x)
        y.sum().backward()
        print(y.tolist(), x.grad.tolist(), torch.ops.fx_pickled.by_kernel(x).tolist())
        print(torch.compile(model, backend="aot_eager", fullgraph=True)(x).tolist())
    """)
    assert done.stdout == "[5.0, 5.0, 5.0] [5.0, 5.0, 5.0] [2.0, 2.0, 2.0]\n[5.0, 5.0, 5.0]\n"
