"""The kernels for CUDA in processes of their own: in numba-cuda's simulator against NumPy, and compiled by both packages."""

import importlib
import importlib.util
import math

import cuda_stub
import numpy as np
import pytest
from interpreter import run_python

NAMES = ["axpy", "softmax", "rms_norm", "heat", "histogram"]
PACKAGES = [name for name in ("numba.cuda", "numba_cuda_mlir.cuda") if importlib.util.find_spec(name.split(".")[0])]


def made(package):
    cuda = importlib.import_module(package)
    return (importlib.import_module(f"kernels.gpu.{name}").make(cuda) for name in NAMES)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
def test_in_the_simulator():
    code = "import runpy; runpy.run_module('simulated_kernels', run_name='__main__')"
    run_python(code, *(f"test_{name}" for name in NAMES), NUMBA_ENABLE_CUDASIM="1")


def launch(package, directory):
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
        assert launched(axpy, 2.0, of(1025), of(1025), of(1025)) == [((2, 1, 1), (256, 1, 1), 0)]
        assert launched(axpy, 2.0, of(0), of(0), of(0)) == []
        assert refused(axpy, 2.0, of(7), of(8), of(7)).startswith("x, y: ")
        for columns, block, blocks in ((1, (32, 8), 2), (513, (64, 1), 9), (99999, (512, 1), 9)):
            expected = [((blocks, 1, 1), (*block, 1), 0)]
            assert launched(softmax, of(9, columns), of(9, columns)) == expected
            assert launched(rms_norm, of(9, columns), of(columns), 1e-6, of(9, columns)) == expected
        assert launched(softmax, of(0, 300), of(0, 300)) == launched(softmax, of(3, 0), of(3, 0)) == []
        assert refused(softmax, of(3, 300), of(300, 3)).startswith("x: ")
        assert refused(rms_norm, of(3, 300), of(3), 1e-6, of(3, 300)).startswith("weight: ")
        assert launched(heat, of(17, 300), 0.2, of(17, 300)) == [((2, 2, 1), (256, 1, 1), 0)]
        assert launched(heat, of(2**20, 1), 0.2, of(2**20, 1)) == [((1, 65535, 1), (256, 1, 1), 0)]
        assert refused(heat, of(9, 40), 0.2, of(9)).startswith("out: ")
        counts = DeviceTensor((20000,), "int64")
        assert launched(histogram, of(9000), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0), ((2, 1, 1), (1024, 1, 1), 80000)]
        assert launched(histogram, of(0), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0)]
        assert refused(histogram, of(500), 1, 1, counts).startswith("low, high: ")
        assert refused(histogram, of(500), -math.inf, 1, counts).startswith("low, high: ")
        assert refused(histogram, of(500), 0, 1, DeviceTensor((60000,), "int64")).startswith("out: ")


@pytest.mark.nightly if not cuda_stub.real_driver() else lambda test: test  # of perf/cuda_check.py, too
@pytest.mark.parametrize("package", PACKAGES)
def test_launches(package, tmp_path):
    run_python(f"import test_kernels_gpu; test_kernels_gpu.launch({package!r}, {str(tmp_path)!r})")


def right(package, torch):
    """What the kernels compute on a GPU, against float64 on it, for shapes and values at which their forms change."""
    import kernels.histogram

    axpy, softmax, rms_norm, heat, histogram = made(package)
    torch.manual_seed(0)

    def of(*shape, dtype=torch.float32):
        return torch.randn(*shape, dtype=torch.float64, device="cuda").to(dtype)

    def are_close(found, wanted):
        wide = found.dtype == torch.float64
        bounds = (1e-13, 1e-13) if wide else (2e-2, 2e-2) if found.dtype.itemsize == 2 else (2e-5, 2e-6)
        torch.testing.assert_close(found.double(), wanted, rtol=bounds[0], atol=bounds[1], equal_nan=True)

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for n in (0, 1, 5000):
            x, y = of(2 * n, dtype=dtype)[::2], of(n, dtype=dtype)
            wanted = 2.5 * x.double() + y.double()
            axpy(2.5, x, y, y)
            are_close(y, wanted)
        for rows, columns in ((300, 128),) if dtype.itemsize == 2 else ((9, 1), (300, 128), (3, 4096), (2, 70_000)):
            x, weight = of(rows, columns, dtype=dtype), of(columns, dtype=dtype)
            out = torch.empty_like(x)
            rms_norm(x, weight, 1e-6, out)
            wide = x.double()
            are_close(out, wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double())
            x[0, columns // 2], x[1] = float("nan"), -torch.inf
            wanted = torch.softmax(x.double(), 1)
            softmax(x, x)
            are_close(x, wanted)
        for shape in ((1, 5), (2, 2), (5, 1), (33, 31), (40, 300)):
            u = of(*shape[::-1], dtype=dtype).t()
            out, wanted = torch.empty_like(u), u.double()
            inner = wanted[1:-1, 1:-1]
            sides = wanted[:-2, 1:-1] + wanted[2:, 1:-1] + wanted[1:-1, :-2] + wanted[1:-1, 2:]
            changed = wanted.clone()
            changed[1:-1, 1:-1] = inner + 0.2 * (sides - 4 * inner)
            heat(u, 0.2, out)
            are_close(out, changed)
    for dtype in (torch.float32, torch.float64):
        for bins, low, high in ((7, -1.0, 1.0), (256, -0.3, 0.7), (9, 1.0, 1.0 + 1e-6), (20_000, -2.0, 2.0)):
            edges = torch.linspace(low, high, bins + 1, dtype=torch.float64).to(dtype)
            x = torch.cat([of(100_000, dtype=dtype), edges.cuda(), torch.nextafter(edges, edges + 1).cuda()])
            counts = torch.empty(bins, dtype=torch.int64, device="cuda")
            histogram(x, low, high, counts)
            wanted = np.empty(bins, np.int64)
            kernels.histogram.histogram(x.cpu().numpy(), bins, low, high, wanted)
            assert np.array_equal(counts.cpu().numpy(), wanted), (dtype, bins)


@pytest.mark.parametrize("package", PACKAGES)
def test_values_on_a_gpu(package):
    if not cuda_stub.real_driver():
        pytest.skip("there is no CUDA device")
    torch = pytest.importorskip("torch")
    right(package, torch)
