"""The kernels for CUDA: in numba-cuda's simulator against NumPy, compiled by both packages, and on a GPU against PyTorch."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NAMES = ["axpy", "softmax", "rms_norm", "heat", "histogram"]


def run(code_or_module, *arguments, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *code_or_module, *arguments], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_in_the_simulator(name):
    run(["-m", "tests.simulated_kernels"], f"test_{name}", NUMBA_ENABLE_CUDASIM="1")


LAUNCH = """
import importlib, sys
from tests import cuda_stub
stub = cuda_stub.load({directory!r}, force=True)
from tests.cuda_tensors import DeviceTensor
from kernels.gpu import axpy, heat, histogram, rms_norm, softmax
cuda = importlib.import_module({package!r})

def launched(function, *arguments):
    stub.clear()
    function(*arguments)
    return [(launch.grid, launch.block, launch.shared) for launch in stub.launches]

def refused(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("launched")

for number in "float32", "float64":
    def of(*shape):
        return DeviceTensor(shape, number)
    f = axpy.make(cuda)
    assert launched(f, 2.0, of(700), of(700), of(700)) == [((3, 1, 1), (256, 1, 1), 0)]
    assert launched(f, 2.0, of(0), of(0), of(0)) == []
    assert refused(f, 2.0, of(7), of(8), of(7)).startswith("x, y: ")
    f = softmax.make(cuda)
    assert launched(f, of(3, 300), of(3, 300)) == [((3, 1, 1), (256, 1, 1), 0)]
    assert launched(f, of(0, 300), of(0, 300)) == launched(f, of(3, 0), of(3, 0)) == []
    assert refused(f, of(3, 300), of(300, 3)).startswith("x: ")
    f = rms_norm.make(cuda)
    assert launched(f, of(3, 300), of(300), 1e-6, of(3, 300)) == [((3, 1, 1), (256, 1, 1), 0)]
    assert refused(f, of(3, 300), of(3), 1e-6, of(3, 300)).startswith("weight: ")
    f = heat.make(cuda)
    assert launched(f, of(9, 40), 0.2, of(9, 40)) == [((2, 2, 1), (32, 8, 1), 0)]
    assert refused(f, of(9, 40), 0.2, of(9)).startswith("out: ")
    f = histogram.make(cuda)
    counts = DeviceTensor((20000,), "int64")
    assert launched(f, of(500), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0), ((2, 1, 1), (256, 1, 1), 80000)]
    assert launched(f, of(0), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0)]
    assert refused(f, of(500), 1, 1, counts).startswith("low, high: ")
    assert refused(f, of(500), 0, 1, DeviceTensor((60000,), "int64")).startswith("out: ")
"""


@pytest.mark.parametrize("package", ["numba.cuda", "numba_cuda_mlir.cuda"])
def test_launches(package, tmp_path):
    distribution = "numba_cuda" if package == "numba.cuda" else "numba_cuda_mlir"
    if importlib.util.find_spec(distribution) is None:
        pytest.skip(f"{distribution} is not installed")
    run(["-c", LAUNCH.format(directory=str(tmp_path), package=package)])


ON_GPU = """
import importlib, torch
from kernels.gpu import axpy, heat, histogram, rms_norm, softmax
cuda = importlib.import_module({package!r})
torch.manual_seed(0)
for dtype, tolerance in (torch.float32, 1e-5), (torch.float64, 1e-12):
    def random(*shape):
        return torch.randn(*shape, dtype=dtype, device="cuda")
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    x, y, out = random(100_003), random(100_003), random(100_003)
    axpy.make(cuda)(2.0, x, y, out)
    close(out, torch.add(y, x, alpha=2.0))
    x = random(1000, 777)
    x[5, 6], x[7, 8], out = float("nan"), float("inf"), torch.empty_like(x)
    softmax.make(cuda)(x, out)
    close(out, torch.softmax(x, 1))
    x, weight = random(777, 1000).t(), random(777)
    out = torch.empty_like(x)
    rms_norm.make(cuda)(x, weight, 1e-6, out)
    close(out, torch.nn.functional.rms_norm(x, (777,), weight, 1e-6))
    u = random(1001, 513)
    out, expected = torch.empty_like(u), u.clone()
    heat.make(cuda)(u, 0.2, out)
    expected[1:-1, 1:-1] += 0.2 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
    close(out, expected)
    values, counts = random(1_000_003), torch.empty(20_000, dtype=torch.int64, device="cuda")
    histogram.make(cuda)(values, -3.0, 3.0, counts)
    import numpy as np
    expected = np.histogram(values.cpu().numpy(), 20_000, (-3.0, 3.0))[0]
    assert (counts.cpu().numpy() == expected).all()
"""


def _has_gpu() -> bool:
    torch = sys.modules.get("torch") or (importlib.import_module("torch") if importlib.util.find_spec("torch") else None)
    return torch is not None and torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("package", ["numba.cuda", "numba_cuda_mlir.cuda"])
def test_on_a_gpu(package):
    if not _has_gpu():
        pytest.skip("there is no CUDA device, or PyTorch has no CUDA")
    run(["-c", ON_GPU.format(package=package)])
