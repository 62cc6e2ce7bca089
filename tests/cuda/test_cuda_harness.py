"""What the tests rely on where there is a GPU, proved without one: the recorder of launches, digests, and who is the driver."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import cuda_stub
import numpy as np
import pytest
from comparing import MAGIC, digest_of
from cuda_tensors import DeviceTensor
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
    arguments = (np.int8(1), DeviceTensor((3, 4), "complex64", (8, 2), data=address(package)), (2.5, True), 1j)
    kernel, stream, bindings = kernel_of(package, 4), package.stream(), driver().bindings
    configurations = [(3, 64), ((2, 3, 4), (8, 4, 2), stream, 100), (1, 32, None, 100_000), (1, 32, 1)]
    configurations += [((4, 2), 32, None, 0, (2, 1))] * (package.__name__ != "numba.cuda")

    def synchronises(a):
        package.cg.this_grid().sync()

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
    at = address(package)
    arrays = [DeviceTensor(shape, dtype, data=at) for dtype in DTYPES for shape in ((), (2,))]
    x = DeviceTensor((0, 3), "float32", data=at)
    one_of_each = {type(value): value for values in [*SCALARS.values(), [1, 2.5, 2**63]] for value in values}
    arguments = (*arrays, *one_of_each.values(), (), (1, (x, Pair(2.5, (arrays[1],)))))
    function, ints, floats = digest_of(arguments, "g = cg.this_grid(); g.sync()", cuda=package, np=np, cg=package.cg)
    outs = DeviceTensor((ints,), "int64", data=at), DeviceTensor((floats,), "float64", data=at)
    fast_args(package.jit(function))[2, 32](*arguments, *outs)
    assert stub.launches[-1].cooperative and len(stub.launches[-1].parameters) > 150


def digest(arguments, grid=(2, 1, 1), block=(4, 1, 1)) -> tuple[bytes, bytes]:
    """What the first thread writes: the kernel is run as the function of Python that it is."""
    places = {"gridDim": grid, "blockDim": block, "blockIdx": (0, 0, 0), "threadIdx": (0, 0, 0)}
    cuda = SimpleNamespace(**{name: SimpleNamespace(x=x, y=y, z=z) for name, (x, y, z) in places.items()})
    function, *counts = digest_of((arguments,), cuda=cuda, np=np)
    ints, floats = np.full(counts[0], -1), np.full(counts[1], -1.0)
    function(arguments, ints, floats)
    assert ints[0] == MAGIC
    return ints.tobytes(), floats.tobytes()


def others(value):
    """Values of the same type, each with one thing changed."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            for other in others(item):
                items = [*value[:i], other, *value[i + 1 :]]
                yield value._make(items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, np.ndarray):
        view = np.lib.stride_tricks.as_strided
        memory, each = np.arange(1, 1000).astype(value.dtype), range(value.ndim)
        if value.size:  # else nobody sees where it is
            yield view(memory[1:], value.shape, value.strides)
        for i, extent in enumerate(value.shape):
            if extent > 1 and value.size:
                yield view(memory, value.shape, [value.strides[j] + value.itemsize * (j == i) for j in each])
            yield view(memory, [value.shape[j] + (j == i) for j in each], value.strides)
    elif isinstance(value, bool | np.bool_):
        yield type(value)(not value)
    else:
        yield from (type(value)(value + step) for step in (1, 1j)[: 1 + np.iscomplexobj(value)])


def array(dtype, *shape):
    return np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)


def test_digests_tell_every_argument():
    arguments = (
        1, 2.5, True, 3j, np.int8(4), np.uint64(5), np.float32(6), np.complex64(7),
        *(array(dtype, 2, 3) for dtype in ("i1", "u8", "f2", "f4", "f8", "c8", "c16")), array("f4"), array("i8", 0, 3),
        array("f4", 2, 2, 2), (1, (2.5, array("i4", 3))), Pair(1j, Pair(array("f8", 2), 3)),
    )  # fmt: skip
    usual, changed = digest(arguments), list(others(arguments))
    assert len(changed) > 50 and digest(arguments) == usual
    assert digest(arguments, (3, 1, 1)) != usual != digest(arguments, block=(4, 2, 1))
    assert all(digest(each) != usual for each in changed)


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
