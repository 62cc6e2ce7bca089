"""What the tests rely on where there is a GPU, proved without one: the recorder of launches, digests, and who is the driver."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import cuda_stub
import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from digests import digest_of
from interpreter import run_python
from launches import address, kernel_of
from recorder import Recorder
from test_cuda_bytes import DTYPES, SCALARS, Pair

from fastexchange import fast_args
from fastexchange.cuda.driver import driver

HERE = Path(__file__).parent


@pytest.mark.both_packages
def test_the_recorder_sees_what_the_stub_records(stub, package):
    """Of launches of every way, also what is captured; and nothing once it has left its place."""
    x = DeviceTensor((3, 4), "complex64", (8, 2), data=address(package))
    arguments = (np.int8(1), x, (2.5, True), 1j)
    kernel, stream, bindings = kernel_of(package, 4), package.stream(), driver().bindings

    def synchronises(a):
        package.cg.this_grid().sync()

    configurations = [(3, 64), ((2, 3, 4), (8, 4, 2), stream, 100), (1, 32, None, 100_000), (1, 32, 1)]
    if package.__name__ != "numba.cuda":
        configurations.append(((4, 2), 32, None, 0, (2, 1)))
    with Recorder() as recorder:
        for configuration in configurations:
            for _ in range(4):
                kernel[configuration](*arguments)
            kernel[configuration].bind(*arguments)()
        kernel.forall(1000)(*arguments)
        fast_args(package.jit(synchronises))[2, 32](1.5)
        with pytest.raises(RuntimeError):
            kernel[0, 32](*arguments)
        assert len(recorder.launches) == 5 * len(configurations) + 2
        assert recorder.launches == [launch._replace(name="") for launch in stub.launches]
        assert recorder.current_context() == stub.current_context()
        assert recorder.primary_context(1) == stub.primary_context(1)
        before = stub.allocations()
        recorder.allocate(100)
        assert stub.allocations() == before + 1
        recorder.clear()
        handle = bindings.CUstream(int(stream.handle))
        driver().call("cuStreamBeginCapture", handle, bindings.CUstreamCaptureMode(0))
        kernel[1, 32, stream](*arguments)
        driver().call("cuStreamEndCapture", handle)
        assert [launch.graph for launch in recorder.launches] == [1] and stub.launches[-1].graph
    assert stub.allocations() == before
    kernel[1, 32](*arguments)
    assert len(recorder.launches) == 1


@pytest.mark.both_packages
def test_digests_are_compiled_by_both_packages(stub, package):
    """Of every element type and every kind of number, alone and in tuples."""
    at = address(package)
    arrays = [DeviceTensor(shape, dtype, data=at) for dtype in DTYPES for shape in ((), (2,))]
    x = DeviceTensor((0, 3), "float32", data=at)
    one_of_each = {type(value): value for values in [*SCALARS.values(), [1, 2.5, 2**63]] for value in values}
    arguments = (*arrays, *one_of_each.values(), (), (1, (x, Pair(2.5, (arrays[1],)))))
    function, ints, floats = digest_of(arguments, "g = cg.this_grid(); g.sync()", cuda=package, np=np, cg=package.cg)
    outs = DeviceTensor((ints,), "int64", data=at), DeviceTensor((floats,), "float64", data=at)
    fast_args(package.jit(function))[2, 32](*arguments, *outs)
    assert stub.launches[-1].cooperative and len(stub.launches[-1].parameters) > 150


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
def test_digests_tell_every_argument():
    """Whatever changes in one, something else is written. The simulator needs a process of its own."""
    said = run_python("import simulated_digests", NUMBA_ENABLE_CUDASIM="1").stdout
    assert int(said) > 50


_WHO = """
import conftest
from cuda.bindings import driver
(failed,), (_, count) = driver.cuInit(0), driver.cuDeviceGetCount()
print(conftest.STUB is not None, conftest.WHY_NOT == "", int(failed), count)
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="the driver stub needs Linux and a C compiler")
@pytest.mark.parametrize("devices, found", [(0, "True True 0 3\n"), (2, "False True 0 2\n")], ids=["none", "two"])
def test_a_driver_without_a_device_gives_way_to_the_stub(tmp_path, devices, found):
    """The machine's driver is played by the stub: with a device it is used, and nothing else is loaded."""
    pytest.importorskip("cuda.bindings")
    cuda_stub.build(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    code = f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{_WHO}"
    assert run_python(code, LD_LIBRARY_PATH=path, CUDA_STUB_DEVICES=str(devices)).stdout == found
