"""Kernels that declare their gradients, in PyTorch and in JAX: what they compute and their gradients, however a call is made."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from frameworks import jax_with_64_bits
from interpreter import run_python
from kernel_data import torch

import kernels
from kernels.cross_entropy import cross_entropy
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.softmax import softmax

try:
    import jax
    import jax.test_util
except ImportError:
    jax = None
if torch is not None and not hasattr(torch.library, "register_vmap"):
    torch = None  # too old for operators
if torch is None and jax is None:
    pytest.skip("neither PyTorch nor JAX is installed", allow_module_level=True)


# ---- what is computed: the formulas by `xp`, which is torch or jax.numpy ---------------------------------------------------
def exponentials(xp, x):
    return xp.exp(x) / xp.exp(x).sum(1)[:, None]


def normed(xp, x, weight, eps):
    return x / xp.sqrt((x * x).mean(1)[:, None] + eps) * (1 if weight is None else weight)


def turned(xp, x, cos, sin, start, interleaved):
    cos, sin, half = cos[start : start + x.shape[2]], sin[start : start + x.shape[2]], x.shape[3] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    parts = xp.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2)
    return parts.reshape(x.shape)


def losses(xp, x, target, smoothing, ignore_index):
    log_p, known = xp.log(exponentials(xp, x)), xp.where(target == ignore_index, 0, target)
    loss = (smoothing - 1) * log_p[xp.arange(len(target)), known] - smoothing * log_p.mean(1)
    return xp.where(target == ignore_index, 0, loss)


generator = np.random.default_rng(0)
x, weight, heads = (generator.standard_normal(shape) for shape in ((5, 6), 6, (2, 3, 4, 6)))
angle = np.arange(9.0)[:, None] * np.linspace(1, 0.1, 3)
table, target = (np.cos(angle), np.sin(angle)), np.array([0, 5, 2, -100, 1])
CASES = {
    "softmax": (softmax, exponentials, (x,), (0,)), "rms_norm": (rms_norm, normed, (x, weight, 1e-5), (0, 1)),
    "rms_norm without weight": (rms_norm, normed, (x, None, 1e-5), (0,)),
    "rotary, halves": (rotary, turned, (heads, *table, 3, False), (0,)),
    "rotary, neighbours": (rotary, turned, (heads, *table, 0, True), (0,)),
    "cross_entropy": (cross_entropy, losses, (x, target, 0.0, -100), (0,)),
    "cross_entropy, smoothed": (cross_entropy, losses, (x, target, 0.1, -100), (0,)),
}  # fmt: skip
"""By name: a kernel, its formula, arguments, and the positions of those that have gradients."""
DIFFERENT = ["softmax", "rms_norm", "rotary, halves", "cross_entropy, smoothed"]
"""One of each kernel, where what else it is called with says nothing of how the framework makes the call."""


# ---- the frameworks --------------------------------------------------------------------------------------------------------
XP = {name: xp for name, xp in {"PyTorch": torch, "JAX": jax and jax.numpy}.items() if xp is not None}


def made_by(framework, args):
    """The arguments, with arrays as tensors."""
    return [XP[framework].asarray(each) if isinstance(each, np.ndarray) else each for each in args]


def leaves(args, positions):
    return [each.clone().requires_grad_() if i in positions else each for i, each in enumerate(args)]


def weighted(made, xp):
    return (made * xp.linspace(-1, 1, int(np.prod(made.shape)), dtype=made.dtype).reshape(made.shape)).sum()


def gradients(framework, function, args, positions, backend=None):
    """What a function returns, and the gradients of a sum of that, weighted. Compiled by JAX, all numbers are traced, too."""
    if framework == "PyTorch":
        torch.compiler.reset()
        given = leaves(args, positions)
        made = (torch.compile(function, fullgraph=True, backend=backend) if backend else function)(*given)
        return made.detach(), *torch.autograd.grad(weighted(made, torch), [given[i] for i in positions])

    def differentiated(*args):
        made = function(*args)
        return weighted(made, jax.numpy), made

    call = jax.grad(differentiated, positions, has_aux=True)
    found, made = (jax.jit(call) if backend else call)(*args)
    return made, *found


@pytest.fixture(autouse=True)
def wide():
    """Let JAX have 64 bits."""
    with jax_with_64_bits() if jax is not None else contextlib.nullcontext():
        yield


def check(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("framework", "backend", "name"), [
    *((framework, {"PyTorch": None, "JAX": "jit"}[framework], name) for framework in XP for name in CASES),
    *(("JAX", None, name) for name in DIFFERENT if jax is not None),
    *(("PyTorch", "aot_eager", name) for name in DIFFERENT if torch is not None),
    *(pytest.param("PyTorch", "inductor", name, marks=pytest.mark.slow) for name in DIFFERENT if torch is not None),
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_formula(framework, backend, name):
    kernel, formula, args, positions = CASES[name]
    given = made_by(framework, args)
    found = gradients(framework, lambda *args: kernel(*args), given, positions, backend)
    check(found, gradients(framework, lambda *args: formula(XP[framework], *args), given, positions))


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("framework", XP)
def test_vmap_is_a_loop(framework, name):
    kernel, _, args, _ = CASES[name]
    xp, vmap = XP[framework], (jax if framework == "JAX" else torch).vmap
    x, *others = made_by(framework, [np.stack([args[0], 2 * args[0], -args[0]]), *args[1:]])
    mapped = vmap(lambda x: kernel(x, *others))
    found = gradients(framework, lambda x: mapped(x), [x], (0,), {"PyTorch": None, "JAX": "jit"}[framework])
    check(found, gradients(framework, lambda x: xp.stack([kernel(each, *others) for each in x]), [x], (0,)))


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_integers_have_no_gradient():
    gradient = jax.grad(lambda x, target: cross_entropy(x, target, 0.0, -100).sum(), (0, 1), allow_int=True)
    assert gradient(x, target)[1].dtype == jax.dtypes.float0


# ---- operators of PyTorch that have a name ---------------------------------------------------------------------------------
@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", DIFFERENT)
def test_opcheck(name):
    kernel, _, args, positions = CASES[name]
    op, given = kernel.as_torch_op(f"kernels::{kernel.__name__}", replace=True), made_by("PyTorch", args)
    for each in (given, leaves(given, positions)):
        assert set(torch.library.opcheck(op.overload, tuple(each)).values()) == {"SUCCESS"}


PACKAGED = """
import sys
import torch
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax

rms_norm, softmax = rms_norm.as_torch_op("kernels::rms_norm"), softmax.as_torch_op("kernels::softmax")

class Module(torch.nn.Module):
    def forward(self, x, w):
        return softmax(rms_norm(x, w, 1e-6)) + 1

x, w = torch.randn(5, 6), torch.randn(6)
if sys.argv[1] == "save":
    program = torch.export.export(Module(), (x, w), dynamic_shapes={"x": {0: torch.export.Dim("rows")}, "w": {}})
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
model = torch._inductor.aoti_load_package(sys.argv[2])
for rows in (5, 9):
    x = torch.randn(rows, 6)
    torch.testing.assert_close(model(x, w), Module()(x, w))
"""


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.nightly
def test_a_package_of_aotinductor(tmp_path):
    root = Path(kernels.__file__).parents[1]
    for what in ("save", "load"):
        done = run_python(PACKAGED, what, str(tmp_path / "model.pt2"), PYTHONPATH=str(root), PYTHONWARNINGS="ignore")
        assert not done.stdout
