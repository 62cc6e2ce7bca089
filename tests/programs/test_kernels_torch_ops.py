"""Kernels as operators of PyTorch: their gradients, and their results however PyTorch makes the call."""

from pathlib import Path

import pytest
from interpreter import run_python
from kernel_data import torch

if torch is None or not hasattr(torch.library, "register_vmap"):
    pytest.skip("PyTorch lacks register_vmap", allow_module_level=True)

from torch.nn import functional

import kernels
from kernels.torch_ops import cross_entropy_op, rms_norm_op, rotary_op, softmax_op


def turned(x, cos, sin, start, interleaved):
    cos, sin = (of[start : start + x.shape[2]] for of in (cos, sin))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def smoothed(logits, target, smoothing, ignore_index):
    options = {"label_smoothing": smoothing, "ignore_index": ignore_index, "reduction": "none"}
    return functional.cross_entropy(logits, target, **options)


def normed(x, weight, eps):
    return functional.rms_norm(x, (6,), weight, eps)


def cases(dtype):
    """By name: an operator, what PyTorch has for it, arguments, and those of them that have gradients."""
    torch.manual_seed(0)
    x, weight, heads = torch.randn(5, 6, dtype=dtype), torch.randn(6, dtype=dtype), torch.randn(2, 3, 4, 6, dtype=dtype)
    angle = torch.arange(9, dtype=dtype)[:, None] * torch.linspace(1, 0.1, 3, dtype=dtype)
    cos, sin, target = angle.cos(), angle.sin(), torch.tensor([0, 5, 2, -100, 1])
    return {
        "softmax": (softmax_op, lambda x: torch.softmax(x, 1), (x,), [0]),
        "rms_norm": (rms_norm_op, normed, (x, weight, 1e-5), [0, 1]),
        "rms_norm without weight": (rms_norm_op, normed, (x, None, 1e-5), [0]),
        "rotary, halves": (rotary_op, turned, (heads, cos, sin, 3, False), [0]),
        "rotary, neighbours": (rotary_op, turned, (heads, cos, sin, 0, True), [0]),
        "cross_entropy": (cross_entropy_op, smoothed, (x, target, 0.0, -100), [0]),
        "cross_entropy, smoothed": (cross_entropy_op, smoothed, (x, target, 0.1, -100), [0]),
    }


NAMES = list(cases(torch.float32))
DIFFERENT = ["softmax", "rms_norm", "rotary, halves", "cross_entropy, smoothed"]
"""One of each operator, where what else it is called with says nothing of how PyTorch calls it."""


def leaves(args, differentiable):
    """The arguments, those with a gradient as leaves, which are returned, too."""
    made = [a.clone().requires_grad_() if i in differentiable else a for i, a in enumerate(args)]
    return made, [made[i] for i in differentiable]


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    op, _, args, differentiable = cases(torch.float64)[name]
    assert torch.autograd.gradcheck(op, tuple(leaves(args, differentiable)[0]))


@pytest.mark.parametrize("name, backend", [
    *((name, None) for name in NAMES), *((name, "aot_eager") for name in DIFFERENT),
    *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in DIFFERENT), ("softmax", "eager"),
])  # fmt: skip
def test_against_pytorch(name, backend):
    op, reference, args, differentiable = cases(torch.float32)[name]
    torch.compiler.reset()
    function = op if backend is None else torch.compile(lambda *a: op(*a), fullgraph=True, backend=backend)
    results = []
    for called in (function, reference):
        given, wanted = leaves(args, differentiable)
        result = called(*given)
        cotangent = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
        results.append([result, *torch.autograd.grad(result, wanted, cotangent)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", DIFFERENT)
def test_opcheck(name):
    op, _, args, differentiable = cases(torch.float32)[name]
    for given in (args, leaves(args, differentiable)[0]):
        assert set(torch.library.opcheck(op.overload, tuple(given)).values()) == {"SUCCESS"}


PACKAGED = """
import sys
import torch
from kernels.torch_ops import rms_norm_op, softmax_op

class Module(torch.nn.Module):
    def forward(self, x, w):
        return softmax_op(rms_norm_op(x, w, 1e-6)) + 1

x, w = torch.randn(5, 6), torch.randn(6)
if sys.argv[1] == "save":
    program = torch.export.export(Module(), (x, w), dynamic_shapes={"x": {0: torch.export.Dim("rows")}, "w": {}})
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
model = torch._inductor.aoti_load_package(sys.argv[2])
for rows in (5, 9):
    x = torch.randn(rows, 6)
    torch.testing.assert_close(model(x, w), Module()(x, w))
"""


@pytest.mark.nightly
def test_a_package_of_aotinductor(tmp_path):
    root = Path(kernels.__file__).parents[1]
    for what in ("save", "load"):
        done = run_python(PACKAGED, what, str(tmp_path / "model.pt2"), PYTHONPATH=str(root), PYTHONWARNINGS="ignore")
        assert not done.stdout
