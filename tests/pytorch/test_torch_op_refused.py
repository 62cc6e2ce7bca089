"""Operators of PyTorch that cannot be made, that are replaced, or whose kernels raise, are interrupted, or cheat."""

import functools
import warnings
from unittest.mock import Mock

import numpy as np
import pytest
import torch_operators
from forked import fork_python
from raising import check_raises
from scale_kernels import elementwise
from torch_operators import doubled, needs_abi, scale, scale_backward, scale_op, tensors, torch, transposed
from ways import mode_of

from fastexchange import fast_args
from fastexchange.torch import boxed_operator as torch_boxed
from fastexchange.torch import library as torch_library

nothing_compiled = torch_operators.nothing_compiled


unknown, text = elementwise("unknown(x, alpha, y)", "pass"), elementwise("text(x, name: str)", "pass")
hiding = fast_args(out="x[n] -> y[n]", grad="allow")(lambda x, y: None)
arrays = fast_args(out="x[n] -> y[n]", returns=np.ndarray)(lambda x, y: None)
NO_OPERATORS = [
    (TypeError, r"unknown.as_torch_op\(\): parameter 'alpha' \(position 1\) needs an annotation: torch.Tensor, ",
     fast_args(out="x[n] -> y[n]")(unknown), {}),
    (ValueError, "grad='allow' hides its arguments", hiding, {"backward": scale_backward}),
    (TypeError, "returns=numpy.ndarray", arrays, {}),
    (TypeError, "takes any number of arguments", fast_args(lambda *xs: None), {"mutates": "xs"}),
    (TypeError, "'name' .* is annotated as .*str.*, which no operator takes", fast_args(text), {"mutates": "x"}),
    (TypeError, "declares neither outputs", torch_operators.total, {}),
    (ValueError, "mutates= names 'z', which is no parameter", scale, {"mutates": "z"}),
    (ValueError, "mutates= names 'y', which is an output", scale, {"mutates": "y"}),
    (TypeError, "mutates is a tuple of parameters' names, not 3", scale, {"mutates": 3}),
    (ValueError, "name is 'namespace::name', not 'scale'", scale, {"name": "scale"}),
    (ValueError, "name is 'namespace::name', not 3", scale, {"name": 3}),
    (ValueError, "setup_context= needs backward=", scale, {"setup_context": print}),
    (ValueError, r"backward kernel transposed\(\) has the output 'y', which is none of grad_x, grad_w", scale,
     {"backward": transposed}),
    (TypeError, "backward= is a function, or kernels that declare outputs", scale, {"backward": torch_operators.total}),
    (ValueError, "two steps of backward= give 'grad_x'", scale, {"backward": [scale_backward, scale_backward]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "kernel", "options"), NO_OPERATORS, ids=[row[1] for row in NO_OPERATORS])
def test_what_cannot_be_an_operator_is_refused(kind, words, kernel, options):
    check_raises(kind, words, kernel.as_torch_op, **{"name": "fx_bad::a", **options})
    assert not hasattr(torch.ops.fx_bad, "a"), "nothing is left of a refused one"


def test_a_name_is_registered_once():
    op = scale.as_torch_op("fx_test::once")
    assert scale.as_torch_op("fx_test::once").overload is op.overload
    check_raises(ValueError, "'fx_test::once' is registered, by <fast_args .*scale", transposed.as_torch_op, "fx_test::once")
    check_raises(ValueError, "'aten::add' is registered, by another library", transposed.as_torch_op, "aten::add")


def test_replaced_operators():
    """Overloads that compiled graphs hold call the kernel that has their name, and no other operator's."""

    def times(factor):
        return fast_args(out="x[n] -> y[n]")(lambda x, y: y.fill(factor * x[0]))

    x, first = torch.ones(3), times(2).as_torch_op("fx_test::replaced")
    for _ in range(5):
        first(x), first.overload(x)
    by_name = lambda x: torch.ops.fx_test.replaced(x)  # noqa: E731
    calls = [first, first.overload, first._dispatch, by_name, torch.compile(by_name, backend="aot_eager")]
    assert [call(x)[0].item() for call in calls] == [2.0] * 5
    with pytest.raises(ValueError, match="has the output 'y', which is none of grad_x"):
        times(3).as_torch_op("fx_test::replaced", replace=True, backward=times(4))
    times(5).as_torch_op("fx_test::made_after_replaced")
    assert [call(x)[0].item() for call in calls] == [2.0] * 5
    calls.append(times(6).as_torch_op("fx_test::replaced", replace=True))
    assert [call(x)[0].item() for call in calls] == [6.0] * 6
    assert len([name for name in vars(torch.ops.fx_test) if name.startswith("replaced")]) == 2, "names that lead nowhere"


def test_shapes_that_do_not_fit():
    x, w = tensors()
    for call in (scale_op(), torch.compile(scale_op(), backend="eager")):
        check_raises((Exception,), r"scale\(\): argument 'w' \(position 1\): dimension", call, x, x[0, :3])
    assert torch.equal(scale_op()(x, w), x * w)


@functools.cache
def raising_op():
    """Of a kernel that raises at a positive number."""

    @fast_args(out="x[n] -> y[n]")
    def raising_arrays(x, y):
        y[:] = x
        if x[0] > 0:
            raise ValueError("with arrays", x, y)

    op = raising_arrays.as_torch_op("fx_test::raising_arrays")
    op.overload(torch.zeros(3))
    return op


def test_an_exception_of_the_kernel_reaches_the_caller_and_its_arrays_keep_their_memory():
    op = raising_op()
    for x in (torch.ones(3), torch.ones(2, 3)[:, 0], torch.ones(3, requires_grad=True)):
        kind, words = (BufferError, "requires grad") if x.requires_grad else (ValueError, "with arrays")
        for _ in range(3):
            for call, kinds in ((op, kind), (op._dispatch, kind), (op.overload, (kind, RuntimeError))):
                check_raises(kinds, words, call, x)
    assert not vars(torch_boxed._thread).get("error")
    x = torch.full((500,), 2.0)
    for value in (2.0, 3.0, 4.0):
        with pytest.raises(ValueError, match="with arrays") as info:
            op._dispatch(x)
        x.set_(torch.full((500,), value + 1))
        others = [torch.full((500,), -1.0) for _ in range(20)]
        assert [array[-1] for array in info.value.args[1:]] == [value] * 2 and others


@needs_abi
@torch_operators.needs_views
def test_modes_see_no_stand_in():
    """What native code reads as a tensor is no Python object: a mode that keeps it would read freed memory."""
    from torch.overrides import TorchFunctionMode

    op, seen = raising_op(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = torch.jit.trace(lambda x: torch.ops.fx_test.raising_arrays(x), torch.zeros(3))  # a mode does not see it call
    x = torch.ones(3)
    with mode_of(TorchFunctionMode, lambda *call: seen.append(call)), pytest.raises(RuntimeError, match="with arrays"):
        call(x)
    assert op.kernel.counts().fast and seen == []


@needs_abi
@pytest.mark.parametrize("method", ["make", "_kernel"])
def test_ctrl_c_in_a_call_of_the_dispatcher(method, monkeypatch):
    """PyTorch's dispatcher has a RuntimeError for everything; programs catch that."""
    op = fast_args(out="x[n] -> y[n]")(doubled.py_func).as_torch_op(f"fx_test::interrupted_{method.strip('_')}")
    (boxed,) = torch_library._registered[op.name]._boxed
    monkeypatch.setattr(torch_boxed.BoxedKernel if method == "make" else boxed, method, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        try:
            op.overload(torch.ones(3))
        except RuntimeError:
            for _ in range(1000):  # as after any signal, some statements may run before
                pass
    monkeypatch.undo()
    assert op.overload(torch.ones(3)).tolist() == [2, 2, 2]


def test_an_operator_without_outputs_returns_none():
    @fast_args
    def returning(x: "torch.Tensor"):
        return x[0]

    @fast_args
    def returning_of_lists(x: "list[torch.Tensor]"):  # PyTorch's dispatcher calls Python code
        return x[0][0]

    for kernel, given in ((returning, torch.ones(3)), (returning_of_lists, [torch.ones(3)])):
        op = kernel.as_torch_op(f"fx_test::{kernel.__name__}", mutates="x")
        for call in (op, op.overload) * 3:
            check_raises((TypeError, RuntimeError), r"declares no outputs, .* has to return None", call, given)


@pytest.mark.parametrize("is_debug", [False, True])
def test_undeclared_writes_are_found_on_request(is_debug, monkeypatch):
    """Native code calls an operator's kernel from the second call on, and the ``autograd.Function`` of it."""
    cheating = fast_args(elementwise("cheating(x, scalar, y)", "y[i], x[i] = x[i], 1"), out="x[n], scalar[] -> y[n]")
    monkeypatch.setenv("FASTEXCHANGE_DEBUG", str(int(is_debug)))
    op = cheating.as_torch_op(f"fx_test::cheating_{is_debug}", backward=lambda ctx, grad: (grad, None))
    for requires_grad in (False, True, False, True):
        for call in (op, op.overload):
            x = torch.zeros(3, requires_grad=requires_grad)
            if is_debug:
                said = r"cheating\(\): the kernel has written to argument 'x' \(position 0\), which mutates= does not name"
                check_raises(RuntimeError, said, call, x, torch.zeros(()))
            else:
                assert call(x, torch.zeros(())).tolist() == [0, 0, 0] and x.tolist() == [1, 1, 1]
            assert call(torch.ones(3), torch.zeros(())).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_operators_without_compiling():
    fork_python("""
        import torch
        from torch_operators import scale, scale_backward
        op, x, w = scale.as_torch_op("fx::op", backward=scale_backward), torch.ones(3, 4), torch.ones(4, requires_grad=True)
        op(x, w).sum().backward()
        assert w.grad.tolist() == [3.0] * 4
        assert torch.compile(op, backend="aot_eager", fullgraph=True)(x, w.detach()).sum() == 12
    """, NUMBA_DISABLE_JIT="1")
