"""What the tests rely on where there is a GPU, proved without one: the recorder of launches, digests, and who is the driver."""

import collections
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_stub
import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from digests import digest_of, expressions_of
from launches import address, kernel_of
from recorder import Recorder

from fastexchange import fast_args

HERE = Path(__file__).parent
Pair = collections.namedtuple("Pair", "first second")


def _run(*command: str, **environment: str) -> str:
    """What a process prints that finds the tests' modules."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- the recorder ----------------------------------------------------------------------------------------------------


@pytest.mark.both_packages
def test_the_recorder_sees_what_the_stub_records(stub, package):
    """Of launches of every way; and nothing once it has left its place."""
    x = DeviceTensor((3, 4), "complex64", (8, 2), data=address(package))
    arguments = (np.int8(1), x, (2.5, True), 1j)
    kernel = kernel_of(package, 4)

    def synchronises(a):
        package.cg.this_grid().sync()

    cooperative, stream = fast_args(package.jit(synchronises)), package.stream()
    configurations = [(3, 64), ((2, 3, 4), (8, 4, 2), stream, 100), (1, 32, None, 100_000), (1, 32, 1)]
    if package.__name__ != "numba.cuda":
        configurations.append(((4, 2), 32, None, 0, (2, 1)))
    with Recorder() as recorder:
        for configuration in configurations:
            for _ in range(20):
                kernel[configuration](*arguments)
            kernel[configuration].bind(*arguments)()
        kernel.forall(1000)(*arguments)
        cooperative[2, 32](1.5)
        with pytest.raises(RuntimeError):
            kernel[0, 32](*arguments)
        assert len(recorder.launches) == 21 * len(configurations) + 2
        assert recorder.launches == [launch._replace(name="") for launch in stub.launches]
        assert recorder.current_context() == stub.current_context()
        assert recorder.primary_context(1) == stub.primary_context(1)
        before = stub.allocations()
        recorder.allocate(100)
        assert stub.allocations() == before + 1
        recorder.clear()
        assert recorder.launches == []
    assert stub.allocations() == before
    kernel[1, 32](*arguments)
    assert recorder.launches == []


def test_the_recorder_knows_what_is_captured(stub, package):
    from fastexchange.cuda.driver import driver

    kernel, stream = kernel_of(package, 1)[1, 32], package.stream()
    kernel(1.0)
    on_stream = kernel.kernel[1, 32, stream]
    handle = driver().bindings.CUstream(int(stream.handle))
    stub.clear()
    with Recorder() as recorder:
        on_stream(1.0)
        driver().call("cuStreamBeginCapture", handle, driver().bindings.CUstreamCaptureMode(0))
        on_stream(1.0)
        driver().call("cuStreamEndCapture", handle)
        assert [launch.graph for launch in recorder.launches] == [0, 1]
        assert [launch.graph != 0 for launch in stub.launches] == [False, True]


# ---- digests ---------------------------------------------------------------------------------------------------------


@pytest.mark.both_packages
def test_digests_are_compiled_by_both_packages(stub, package):
    """Of every element type and every kind of number, alone and in tuples."""
    from test_cuda_bytes import DTYPES, SCALARS

    at = address(package)
    arrays = [DeviceTensor(shape, dtype, data=at) for dtype in DTYPES for shape in ((), (2,))]
    x = DeviceTensor((0, 3), "float32", data=at)
    one_of_each = {type(value): value for values in [*SCALARS.values(), [1, 2.5, 2**63]] for value in values}
    arguments = (*arrays, *one_of_each.values(), (), (1, (x, Pair(2.5, (arrays[1],)))))
    function, ints, floats = digest_of(arguments, "g = cg.this_grid(); g.sync()", cuda=package, np=np, cg=package.cg)
    outs = DeviceTensor((ints,), "int64", data=at), DeviceTensor((floats,), "float64", data=at)
    fast_args(package.jit(function))[2, 32](*arguments, *outs)
    assert stub.launches[-1].cooperative and len(stub.launches[-1].parameters) > 150


def test_what_digests_read():
    x = np.zeros((2, 3), "c8")
    ints, floats = expressions_of((1, x, (True, (2.5,)), np.zeros(()), np.zeros((0, 4))))
    assert ints == ["a0", "a1.shape[0]", "a1.shape[1]", "a2[0]", "a4.shape[0]", "a4.shape[1]"]
    read = ["a1[0, 0]", "a1[0, 2]", "a1[1, 0]", "a1[1, 2]"]
    assert floats == [f"{each}.{part}" for each in read for part in ("real", "imag")] + ["a2[1][0]", "a3[()]"]


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda, which simulates, is not installed")
def test_digests_tell_every_argument():
    assert int(_run(str(HERE / "simulated_digests.py"), NUMBA_ENABLE_CUDASIM="1")) > 50


# ---- which driver ----------------------------------------------------------------------------------------------------

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
    assert _run("-c", _WHO, LD_LIBRARY_PATH=path, CUDA_STUB_DEVICES=str(devices)) == found
