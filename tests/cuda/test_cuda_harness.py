"""What the tests rely on: the driver stub; and where there is a GPU, proved without one, the recorder of launches and digests."""

import functools
import shutil
import sys
from types import SimpleNamespace

import cuda_stub
import numpy as np
import pytest
from comparing import MAGIC, digest_of
from cuda_checks import both_ways
from cuda_tensors import DeviceTensor
from interpreter import run_python
from launches import address, kernel_of
from recorder import Recorder
from test_cuda_bytes import DTYPES, SCALARS, Pair

from fastexchange import fast_args
from fastexchange.cuda.driver import driver


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
            both_ways(functools.partial(kernel[configuration], *arguments))
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


def test_digests_are_all_that_the_arguments_are():
    """Their kernel is run as the function of Python that it is."""
    places = {"gridDim": (2, 1, 1), "blockDim": (4, 3, 1), "blockIdx": (0, 0, 0), "threadIdx": (0, 0, 0)}
    cuda = SimpleNamespace(**{name: SimpleNamespace(x=x, y=y, z=z) for name, (x, y, z) in places.items()})
    cube, counts, nothing = np.arange(24.0).reshape(2, 3, 4), np.array([70, 71, 72], "u1"), np.zeros((0, 5))
    arguments = cube, (5, 2.5), Pair(1j + 3, Pair(True, (counts,))), nothing, np.array(9.5), np.float16(0.5)
    function, *sizes = digest_of(arguments, cuda=cuda, np=np)
    ints, floats = np.full(sizes[0], -1), np.full(sizes[1], -1.0)
    function(*arguments, ints, floats)
    assert ints.tolist() == [MAGIC, 2, 1, 1, 4, 3, 1, 2, 3, 4, 5, 1, 3, 70, 72, 0, 5]
    assert floats.tolist() == [0, 3, 8, 12, 23, 2.5, 3, 1, 9.5, 0.5]  # the first element, those at the ends, and the last


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or cuda_stub.real_driver(),
    reason="the driver stub needs Linux, a C compiler, and that there is no driver",
)
@pytest.mark.parametrize("before, refusal", [
    ("sys.modules['numba_cuda_mlir'] = types.ModuleType('numba_cuda_mlir')", "imported already"),
    ("ctypes.CDLL(sys.argv[1])", "loaded already"), ("cuda_stub.real_driver = lambda: True", "of its own"),
    ("sys.modules['cuda.bindings'] = types.ModuleType('cuda.bindings')", "no refusal"),
])  # fmt: skip
def test_the_stub_is_not_loaded_beside_a_driver(tmp_path, before, refusal):
    code = f"import ctypes, sys, types, cuda_stub\n{before}\ncuda_stub.load(sys.argv[2])\nprint('no refusal')"
    done = run_python(code, str(cuda_stub.build(tmp_path)), str(tmp_path), check=False)
    assert refusal in (done.stdout or done.stderr)
