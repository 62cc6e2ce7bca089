"""The kernels for CUDA: in numba-cuda's simulator against NumPy, compiled by both packages, and on a GPU against PyTorch.

Each of the tests needs a process of its own: a driver, real or not, is there once and for all.
"""

import importlib
import importlib.util

import numpy as np
import pytest
from interpreter import run_python

pytestmark = pytest.mark.slow
NAMES = ["axpy", "softmax", "rms_norm", "heat", "histogram"]
PACKAGES = [name for name in ("numba.cuda", "numba_cuda_mlir.cuda") if importlib.util.find_spec(name.split(".")[0])]


def made(package):
    """The kernels, compiled by this package when they are launched."""
    cuda = importlib.import_module(package)
    return (importlib.import_module(f"kernels.gpu.{name}").make(cuda) for name in NAMES)


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
def test_in_the_simulator():
    code = "import runpy; runpy.run_module('simulated_kernels', run_name='__main__')"
    run_python(code, *(f"test_{name}" for name in NAMES), NUMBA_ENABLE_CUDASIM="1")


def launch(package, directory):
    import cuda_stub

    stub = cuda_stub.load(directory, force=True)
    from cuda_tensors import DeviceTensor

    def launched(function, *arguments):
        stub.clear()
        function(*arguments)
        return [(launch.grid, launch.block, launch.shared) for launch in stub.launches]

    def refused(function, *arguments):
        with pytest.raises(ValueError) as raised:
            function(*arguments)
        return str(raised.value)

    for number in "float32", "float64":

        def of(*shape, number=number):
            return DeviceTensor(shape, number)

        axpy, softmax, rms_norm, heat, histogram = made(package)
        assert launched(axpy, 2.0, of(700), of(700), of(700)) == [((3, 1, 1), (256, 1, 1), 0)]
        assert launched(axpy, 2.0, of(0), of(0), of(0)) == []
        assert refused(axpy, 2.0, of(7), of(8), of(7)).startswith("x, y: ")
        assert launched(softmax, of(3, 300), of(3, 300)) == [((3, 1, 1), (256, 1, 1), 0)]
        assert launched(softmax, of(0, 300), of(0, 300)) == launched(softmax, of(3, 0), of(3, 0)) == []
        assert refused(softmax, of(3, 300), of(300, 3)).startswith("x: ")
        assert launched(rms_norm, of(3, 300), of(300), 1e-6, of(3, 300)) == [((3, 1, 1), (256, 1, 1), 0)]
        assert refused(rms_norm, of(3, 300), of(3), 1e-6, of(3, 300)).startswith("weight: ")
        assert launched(heat, of(9, 40), 0.2, of(9, 40)) == [((2, 2, 1), (32, 8, 1), 0)]
        assert refused(heat, of(9, 40), 0.2, of(9)).startswith("out: ")
        counts = DeviceTensor((20000,), "int64")
        assert launched(histogram, of(500), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0), ((2, 1, 1), (256, 1, 1), 80000)]
        assert launched(histogram, of(0), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0)]
        assert refused(histogram, of(500), 1, 1, counts).startswith("low, high: ")
        assert refused(histogram, of(500), 0, 1, DeviceTensor((60000,), "int64")).startswith("out: ")


@pytest.mark.parametrize("package", PACKAGES)
def test_launches(package, tmp_path):
    run_python(f"import test_kernels_gpu; test_kernels_gpu.launch({package!r}, {str(tmp_path)!r})")


def launch_on_a_gpu(package):
    import torch

    torch.manual_seed(0)
    for dtype, tolerance in (torch.float32, 1e-5), (torch.float64, 1e-12):

        def random(*shape, dtype=dtype):
            return torch.randn(*shape, dtype=dtype, device="cuda")

        def close(a, b, tolerance=tolerance):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

        axpy, softmax, rms_norm, heat, histogram = made(package)
        x, y, out = random(100_003), random(100_003), random(100_003)
        axpy(2.0, x, y, out)
        close(out, torch.add(y, x, alpha=2.0))
        x = random(1000, 777)
        x[5, 6], x[7, 8], out = float("nan"), float("inf"), torch.empty_like(x)
        softmax(x, out)
        close(out, torch.softmax(x, 1))
        x, weight = random(777, 1000).t(), random(777)
        out = torch.empty_like(x)
        rms_norm(x, weight, 1e-6, out)
        close(out, torch.nn.functional.rms_norm(x, (777,), weight, 1e-6))
        u = random(1001, 513)
        out, expected = torch.empty_like(u), u.clone()
        heat(u, 0.2, out)
        expected[1:-1, 1:-1] += 0.2 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
        close(out, expected)
        values, counts = random(1_000_003), torch.empty(20_000, dtype=torch.int64, device="cuda")
        histogram(values, -3.0, 3.0, counts)
        np.testing.assert_array_equal(counts.cpu(), np.histogram(values.cpu(), 20_000, (-3.0, 3.0))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("package", PACKAGES)
def test_on_a_gpu(package):
    if importlib.util.find_spec("torch") is None or not importlib.import_module("torch").cuda.is_available():
        pytest.skip("there is no CUDA device, or PyTorch has no CUDA")
    run_python(f"import test_kernels_gpu; test_kernels_gpu.launch_on_a_gpu({package!r})")
