"""The driver stub: it refuses what the driver refuses, of what no package comes to; and it is not loaded beside a driver."""

import ctypes
import shutil
import struct
import sys
import threading
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p

import cuda_stub
import pytest
from cuda_checks import in_threads
from interpreter import run_python

from fastexchange.cuda.driver import driver as ours

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or cuda_stub.real_driver(),
    reason="the stub needs Linux, a C compiler, and that no real driver is installed",
)


class Driver:
    """The driver by ctypes, found by its name, as the packages find it; and a kernel with a float64 for its parameter."""

    def __init__(self, stub, kernel):
        kernel[1, 32](2.5)
        self.stub, self.function, self.cu = stub, c_void_p(stub.launches[-1].function), ctypes.CDLL("libcuda.so.1")
        self._value = ctypes.c_double(2.5)
        self._pointers = (c_void_p * 1)(ctypes.addressof(self._value))

    def call(self, name: str, *arguments, code: int = 0) -> None:
        assert (name, getattr(self.cu, name)(*arguments)) == (name, code)

    def made(self, name: str, *arguments):
        handle = c_void_p()
        self.call(name, byref(handle), *arguments)
        return handle

    def launch(self, function=None, grid=(1, 1, 1), block=(32, 1, 1), shared=0, stream=None, values=..., extra=None) -> int:
        numbers, values = map(c_uint, (*grid, *block, shared)), self._pointers if values is ... else values
        return self.cu.cuLaunchKernel(function or self.function, *numbers, stream, values, extra)


@pytest.fixture
def driver(stub, kernels):
    return Driver(stub, kernels[1])


def test_parameters_come_by_pointers_or_packed(driver):
    (launch,), packed, size = driver.stub.launches, ctypes.c_double(2.5), c_size_t(8)
    assert launch.packed == struct.pack("<d", 2.5) and launch.thread == threading.get_native_id()
    extra = (c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    assert driver.launch() == driver.launch(values=None, extra=extra) == 0
    assert driver.launch(extra=extra) == driver.launch(values=None) == 1  # both, and none
    assert driver.stub.launches == [launch] * 3
    driver.stub.clear()
    assert driver.stub.launches == [] and driver.stub.log == []


def test_bad_launches_fail_as_in_the_driver_and_are_not_recorded(driver):
    launch, nobodys, seen = driver.launch, c_void_p(0x1234560), []
    driver.stub.clear()
    for axis in range(3):
        for grid in (0, 2**31 if axis == 0 else 65536):
            assert launch(grid=[grid if i == axis else 1 for i in range(3)]) == 1
        for block in (0, 65 if axis == 2 else 1025):
            assert launch(block=[block if i == axis else 1 for i in range(3)]) == 1
    assert launch(block=(32, 33, 1)) == launch(shared=48 * 1024 + 1) == 1
    assert launch(nobodys) == launch(stream=nobodys) == 400
    in_threads(lambda: seen.append(launch()))
    assert seen == [201], "the thread has no context"
    with ours().on(1):
        assert launch() == 400, "the function is of another context"
    assert driver.stub.launches == []
    assert launch(shared=48 * 1024) == launch(grid=(2**31 - 1, 65535, 65535), block=(16, 1, 64)) == 0


def test_a_capture_takes_launches_and_refuses_what_cannot_be_captured(driver):
    one, two = driver.made("cuStreamCreate", 1), driver.made("cuStreamCreate", 1)
    event, graph = driver.made("cuEventCreate", 2), c_void_p()
    driver.stub.clear()
    driver.call("cuStreamBeginCapture_v2", one, 0)
    assert driver.launch(stream=one) == 0
    driver.call("cuEventRecord", event, one)
    driver.call("cuStreamWaitEvent", two, event, 0)  # joins
    assert driver.launch(stream=two) == driver.launch() == 0  # the legacy stream does not wait for a non-blocking one
    driver.call("cuStreamEndCapture", one, byref(graph))
    assert [x.graph for x in driver.stub.launches] == [graph.value, graph.value, 0]
    assert [(x.api, x.stream, x.event) for x in driver.stub.log[1:3]] == [
        ("cuEventRecord", one.value, event.value), ("cuStreamWaitEvent", two.value, event.value)]  # fmt: skip
    driver.call("cuStreamBeginCapture_v2", one, 0)
    driver.call("cuMemAlloc_v2", byref(c_uint64()), c_size_t(8), code=900)
    assert driver.launch(stream=one) == 901
    driver.call("cuStreamEndCapture", one, byref(graph), code=901)


# ---- beside a driver -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before, refusal", [
    ("sys.modules['numba_cuda_mlir'] = types.ModuleType('numba_cuda_mlir')", "imported already"),
    ("ctypes.CDLL(sys.argv[1])", "loaded already"), ("cuda_stub.real_driver = lambda: True", "of its own"),
    ("sys.modules['cuda.bindings'] = types.ModuleType('cuda.bindings')", "no refusal"),
])  # fmt: skip
def test_the_stub_is_not_loaded_beside_a_driver(tmp_path, before, refusal):
    code = f"import ctypes, sys, types, cuda_stub\n{before}\ncuda_stub.load(sys.argv[2])\nprint('no refusal')"
    done = run_python(code, str(cuda_stub.build(tmp_path)), str(tmp_path), check=False)
    assert refusal in (done.stdout or done.stderr)
