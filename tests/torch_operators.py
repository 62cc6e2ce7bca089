"""Kernels that are operators of PyTorch, for tests of these; and how many calls are made without PyTorch's dispatcher."""

import functools

import numpy as np
import pytest
from scale_kernels import scale, scale_backward

torch = pytest.importorskip("torch")

from fastexchange import TorchOp, fast_args  # noqa: E402
from fastexchange.torch import boxed_operator as torch_boxed  # noqa: E402
from fastexchange.torch.offsets import guard  # noqa: E402

needs_views = pytest.mark.skipif(not guard().knows_views, reason="tensors are not read in memory here")
UNKNOWN = """
from fastexchange.torch import offsets as torch_offsets
torch_offsets.Guard._find_views = lambda self: self.why.setdefault("views", "unknown") == ""
"""
"""Makes PyTorch's tensors of a process such as are not read in memory."""
WITHOUT_TABLE = """
import torch
for name in {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"} & {*vars(torch.Tensor)}:
    delattr(torch.Tensor, name)
"""
needs_abi = pytest.mark.skipif(not torch_boxed._abi(), reason="PyTorch's C ABI lacks a function")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """PyTorch's compiler has compiled nothing."""
    torch.compiler.reset()


@fast_args
def axpy(a: float, x: torch.Tensor, y: torch.Tensor):
    for i in range(x.size):
        y[i] += a * x[i]


@fast_args(out="x[n] -> y[n]")
def doubled(x, y):
    for i in range(x.size):
        y[i] = 2 * x[i]


@fast_args(out="grad_y[n] -> grad_x[n]")
def doubled_backward(grad_y, grad_x):
    for i in range(grad_y.size):
        grad_x[i] = 2 * grad_y[i]


@fast_args(out="x[n, m] -> y[m, n]")
def transposed(x, y):
    for i, j in np.ndindex(x.shape):
        y[j, i] = x[i, j]


@fast_args
def total(x):
    s = 0.0
    for each in x.flat:
        s += each
    return s


scale_op = functools.cache(lambda: scale.as_torch_op("fx_test::scale", backward=scale_backward))
axpy_op = functools.cache(lambda: axpy.as_torch_op("fx_test::axpy", mutates=("y",)))


def tensors():
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.randn(4)


def native_calls(op, *args):
    """How many calls an operator's kernel makes without PyTorch's dispatcher, of one."""
    before = op.kernel.counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchOp, "_dispatch", lambda *args, **kwargs: None)
        op(*args)
    after = op.kernel.counts()
    return after.fast + after.slow - before.fast - before.slow
