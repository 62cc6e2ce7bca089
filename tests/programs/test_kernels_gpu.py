"""The kernels for CUDA in processes of their own: in numba-cuda's simulator against NumPy, and compiled by both packages."""

import importlib
import importlib.util
import math

import cuda_stub
import numpy as np
import pytest
from interpreter import run_python
from raising import check_raises

from kernels.gpu.common import team_for

NAMES = ["axpy", "softmax", "rms_norm", "heat", "histogram"]
PACKAGES = [name for name in ("numba.cuda", "numba_cuda_mlir.cuda") if importlib.util.find_spec(name.split(".")[0])]


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_in_the_simulator(name):
    code = "import runpy; runpy.run_module('simulated_kernels', run_name='__main__')"
    run_python(code, f"test_{name}", NUMBA_ENABLE_CUDASIM="1")


def launch(package, directory):
    stub = cuda_stub.load(directory, force=True)
    from cuda_tensors import DeviceTensor

    def launched(function, *arguments):
        stub.clear()
        function(*arguments)
        return [(launch.grid, launch.block, launch.shared) for launch in stub.launches]

    cuda = importlib.import_module(package)
    for number in "float32", "float64":

        def of(*shape, number=number):
            return DeviceTensor(shape, number)

        axpy, softmax, rms_norm, heat, histogram = (importlib.import_module(f"kernels.gpu.{name}").make(cuda) for name in NAMES)
        assert launched(axpy, 2.0, of(513), of(513), of(513)) == [((2, 1, 1), (256, 1, 1), 0)]
        assert launched(axpy, 2.0, of(0), of(0), of(0)) == []
        check_raises(ValueError, "^x, y: ", axpy, 2.0, of(7), of(8), of(7))
        for columns, block, blocks in ((1, (32, 4), 3), (513, (64, 1), 9), (99999, (512, 1), 9)):
            expected = [((blocks, 1, 1), (*block, 1), 0)]
            assert launched(softmax, of(9, columns), of(9, columns)) == expected
            assert launched(rms_norm, of(9, columns), of(columns), 1e-6, of(9, columns)) == expected
        assert launched(softmax, of(0, 300), of(0, 300)) == launched(softmax, of(3, 0), of(3, 0)) == []
        check_raises(ValueError, "^x: ", softmax, of(3, 300), of(300, 3))
        check_raises(ValueError, "^weight: ", rms_norm, of(3, 300), of(3), 1e-6, of(3, 300))
        assert launched(heat, of(17, 300), 0.2, of(17, 300)) == [((2, 2, 1), (256, 1, 1), 0)]
        assert launched(heat, of(2**20 + 1, 1), 0.2, of(2**20 + 1, 1)) == [((1, 65535, 2), (256, 1, 1), 0)]
        check_raises(ValueError, "^out: ", heat, of(9, 40), 0.2, of(9))
        counts = DeviceTensor((20000,), "int64")
        assert launched(histogram, of(9000), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0), ((2, 1, 1), (1024, 1, 1), 80000)]
        assert launched(histogram, of(0), -1, 1, counts) == [((79, 1, 1), (256, 1, 1), 0)]
        check_raises(ValueError, "^low, high: ", histogram, of(500), 1, 1, counts)
        check_raises(ValueError, "^low, high: ", histogram, of(500), -math.inf, 1, counts)
        check_raises(ValueError, "^out: ", histogram, of(500), 0, 1, DeviceTensor((60000,), "int64"))


def test_which_rows_are_kept_whole():
    """A thread has 32 registers of a row at most: all of a block's fit in a multiprocessor's."""
    teams = [team_for(columns, number) for columns, number in ((1, np.float64), (16384, np.float32), (8192, np.float64))]
    assert teams == [(32, 1, True), (512, 32, True), (512, 16, True)]
    assert team_for(16385, np.float32) == team_for(8193, np.float64) == (512, 8, False)


@pytest.mark.nightly if not cuda_stub.real_driver() else lambda test: test  # of perf/cuda_check.py, too
@pytest.mark.parametrize("package", PACKAGES)
def test_launches(package, tmp_path):
    run_python(f"import test_kernels_gpu; test_kernels_gpu.launch({package!r}, {str(tmp_path)!r})")
