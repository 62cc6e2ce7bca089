"""Kernels as operators of PyTorch: their gradients, and their results however PyTorch makes the call."""

from pathlib import Path

import pytest
from interpreter import run_python
from kernel_data import torch

if torch is None or not hasattr(torch.library, "register_vmap"):
    pytest.skip("PyTorch lacks register_vmap", allow_module_level=True)

import kernels
from kernels.torch_ops import cross_entropy_op, rms_norm_op, rotary_op, softmax_op


def angles(longest, pairs, dtype):
    angle = torch.arange(longest, dtype=dtype)[:, None] * torch.linspace(1, 0.1, pairs, dtype=dtype)
    return angle.cos(), angle.sin()


def turned(x, cos, sin, start, interleaved):
    cos, sin = (of[start : start + x.shape[2]] for of in (cos, sin))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def smoothed(logits, target, smoothing, ignore_index):
    options = {"label_smoothing": smoothing, "ignore_index": ignore_index, "reduction": "none"}
    return torch.nn.functional.cross_entropy(logits, target, **options)


def cases(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 6, dtype=dtype), torch.randn(6, dtype=dtype)
    heads, (cos, sin) = torch.randn(2, 3, 4, 6, dtype=dtype), angles(9, 3, dtype)
    target = torch.tensor([0, 5, 2, -100, 1])
    functional = torch.nn.functional
    return {
        "softmax": (softmax_op, lambda x: torch.softmax(x, 1), (x,)),
        "rms_norm": (rms_norm_op, lambda x, w, eps: functional.rms_norm(x, (6,), w, eps), (x, weight, 1e-5)),
        "rms_norm without weight": (rms_norm_op, lambda x, w, eps: functional.rms_norm(x, (6,), w, eps), (x, None, 1e-5)),
        "rotary, halves": (rotary_op, turned, (heads, cos, sin, 3, False)),
        "rotary, neighbours": (rotary_op, turned, (heads, cos, sin, 0, True)),
        "cross_entropy": (cross_entropy_op, smoothed, (x, target, 0.0, -100)),
        "cross_entropy, smoothed": (cross_entropy_op, smoothed, (x, target, 0.1, -100)),
    }


NAMES = list(cases(torch.float32))
by_name = pytest.mark.parametrize("name", NAMES)


def leaves(op, args):
    """The arguments, those with a gradient as leaves, which are returned, too."""
    differentiable = {"softmax": [0], "rms_norm": [0, 1], "rotary": [0], "cross_entropy": [0]}[op.name.partition("::")[2]]
    made = [a.clone().requires_grad_() if i in differentiable and a is not None else a for i, a in enumerate(args)]
    return made, [a for a in made if isinstance(a, torch.Tensor) and a.requires_grad]


@by_name
def test_gradcheck(name):
    op, _, args = cases(torch.float64)[name]
    args, _ = leaves(op, args)
    assert torch.autograd.gradcheck(op, tuple(args))


@by_name
@pytest.mark.parametrize("way", ["eager", "eager graph", "aot_eager", "inductor"])
def test_against_pytorch(name, way):
    op, reference, args = cases(torch.float32)[name]
    torch.compiler.reset()
    backend = {"eager": None, "eager graph": "eager"}.get(way, way)
    function = op if backend is None else torch.compile(lambda *a: op(*a), fullgraph=True, backend=backend)
    results = []
    for called in (function, reference):
        given, wanted = leaves(op, args)
        result = called(*given)
        cotangent = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
        results.append([result, *torch.autograd.grad(result, wanted, cotangent)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@by_name
def test_opcheck(name):
    op, _, args = cases(torch.float32)[name]
    for given in (args, leaves(op, args)[0]):
        checks = torch.library.opcheck(op.overload, tuple(given))
        assert set(checks.values()) == {"SUCCESS"}


def test_a_layer_learns():
    """A compiled step with two of the operators reduces the loss of a linear classifier as PyTorch's own operators do."""
    torch.manual_seed(0)
    x, target = torch.randn(64, 8), torch.randint(0, 4, (64,))
    losses = []
    for is_ours in (True, False):
        torch.manual_seed(1)
        layer, weight = torch.nn.Linear(8, 4), torch.ones(8, requires_grad=True)
        optimizer = torch.optim.SGD([*layer.parameters(), weight], lr=0.5)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def loss_of(x, weight, is_ours=is_ours, layer=layer):
            if is_ours:
                return cross_entropy_op(layer(rms_norm_op(x, weight, 1e-6)), target, 0.0, -100).mean()
            normed = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
            return torch.nn.functional.cross_entropy(layer(normed), target)

        steps = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of(x, weight)
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < losses[0][0] - 0.1
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))


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
