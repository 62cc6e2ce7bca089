"""The driver stub itself, alone and under each CUDA package: what is compiled and launched is what is recorded."""

import importlib.util
import shutil
import sys
import textwrap

import cuda_stub
import pytest
from interpreter import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or cuda_stub.real_driver(),
    reason="the stub needs Linux, a C compiler, and that no real driver is installed",
)


def _package(module: str, top: str):
    missing = importlib.util.find_spec(top) is None
    return pytest.param(module, marks=pytest.mark.skipif(missing, reason=f"{top} is not installed"), id=top)


PACKAGES = [_package("numba.cuda", "numba_cuda"), _package("numba_cuda_mlir.cuda", "numba_cuda_mlir")]


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("driver")


ALONE = """
import ctypes, struct, threading
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
cu = ctypes.CDLL("libcuda.so.1")  # by its name, as the packages look for it

def ok(name, *arguments):
    code = getattr(cu, name)(*arguments)
    assert code == 0, (name, code)

def made(name, *arguments):
    handle = c_void_p()
    ok(name, byref(handle), *arguments)
    return handle

assert cu.cuDeviceGetCount(byref(c_int())) == 3  # not initialised
ok("cuInit", 0)
context = made("cuDevicePrimaryCtxRetain", 0)
ok("cuCtxSetCurrent", context)
image = cuda_stub.make_cubin({"first": [(0, 1), (8, 8), (16, 4)], "none": []}, shared=1024, registers=32)
library = made("cuLibraryLoadData", image, None, None, 0, None, None, 0)
kernel = made("cuLibraryGetKernel", library, b"first")
function = made("cuKernelGetFunction", kernel)
values = [ctypes.c_uint8(7), ctypes.c_double(1.5), c_int(-2)]
pointers = (c_void_p * 3)(*[ctypes.addressof(value) for value in values])

def launch(handle=function, grid=(1, 1, 1), block=(32, 1, 1), shared=0, stream=None, values=pointers, extra=None):
    return cu.cuLaunchKernel(handle, *map(c_uint, (*grid, *block, shared)), stream, values, extra)
"""


def run_alone(code, directory, **environment):
    return cuda_stub.run_with_stub(ALONE + textwrap.dedent(code), directory, environment)


def test_functions_are_found_by_name_and_version_and_others_are_listed(directory):
    run_alone("""
        found = c_void_p()
        status = c_int()
        def get(name, version):
            return cu.cuGetProcAddress_v2(name, byref(found), version, c_uint64(0), byref(status))
        def address(name):
            return ctypes.cast(getattr(cu, name), c_void_p).value
        assert get(b"cuMemAlloc", 12000) == 0 and found.value == address("cuMemAlloc_v2")
        assert found.value == stub.address("cuMemAlloc_v2")
        assert get(b"cuCtxCreate", 12000) == 0 and found.value == address("cuCtxCreate_v2")
        assert get(b"cuCtxCreate", 13000) == 0 and found.value == address("cuCtxCreate_v4")
        assert get(b"cuNoSuch", 13000) == 500 and status.value == 1 and found.value is None
        assert get(b"cuNoSuch", 13000) == 500
        assert stub.missing == ["cuNoSuch"]
        version = c_int()
        ok("cuDriverGetVersion", byref(version))
        assert version.value == 13000
    """, directory)


def test_devices_are_as_told(directory):
    run_alone("""
        count = c_int()
        ok("cuDeviceGetCount", byref(count))
        assert count.value == 3
        def attribute(number, device):
            value = c_int()
            ok("cuDeviceGetAttribute", byref(value), number, device)
            return value.value
        assert [(attribute(75, i), attribute(76, i)) for i in range(3)] == [(9, 0), (8, 6), (9, 0)]
        assert attribute(16, 0) == 132 and attribute(97, 0) == 232448 and attribute(10, 0) == 32
        assert cu.cuDeviceGetAttribute(byref(count), 16, 3) == 101
        try:
            stub.set_devices(1)
        except ValueError:
            pass
        else:
            raise AssertionError("the number of devices is fixed at cuInit")
    """, directory, CUDA_STUB_DEVICES="3", CUDA_STUB_CAPABILITIES="9.0,8.6")


def test_a_launch_is_recorded_with_the_bytes_of_each_parameter(directory):
    run_alone("""
        assert launch(grid=(4, 2, 3), block=(32, 2, 1), shared=48) == 0
        assert launch(handle=kernel) == 0
        expected = struct.pack("<BxxxxxxxdI", 7, 1.5, 2**32 - 2)
        buffer = ctypes.create_string_buffer(expected, len(expected))
        size = c_size_t(len(expected))
        extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        assert launch(values=None, extra=extra) == 0
        assert launch(extra=extra) == 1  # both
        one, two, three = stub.launches
        assert one.api == "cuLaunchKernel" and one.name == "first" and one.function == function.value
        assert one.grid == (4, 2, 3) and one.block == (32, 2, 1) and one.shared == 48 and one.stream == 0
        assert one.context == context.value == stub.current_context() and one.device == 0 and not one.cooperative
        assert one.offsets == (0, 8, 16) and one.packed == expected and one.cluster == (0, 0, 0) and one.graph == 0
        assert one.parameters == (bytes([7]), struct.pack("<d", 1.5), struct.pack("<i", -2))
        assert one.thread == threading.get_native_id()
        assert two.function == kernel.value and two.packed == three.packed == expected
        assert [entry.launch for entry in stub.log] == [0, 1, 2]
        offset, size = c_size_t(), c_size_t()
        for i, expected in enumerate([(0, 1), (8, 8), (16, 4)]):
            ok("cuFuncGetParamInfo", function, c_size_t(i), byref(offset), byref(size))
            assert (offset.value, size.value) == expected
        assert cu.cuKernelGetParamInfo(kernel, c_size_t(3), byref(offset), byref(size)) == 1
        stub.clear()
        assert stub.launches == [] and stub.log == []
    """, directory)


def test_occupancy(directory):
    run_alone("""
        grid, block, blocks, size = c_int(), c_int(), c_int(), c_size_t()
        def best(limit):
            ok("cuOccupancyMaxPotentialBlockSize", byref(grid), byref(block), function, None, c_size_t(0), limit)
            return grid.value, block.value
        assert best(0) == (264, 256) and best(128) == (264, 128)
        stub.set_occupancy(11, 96)
        assert best(1024) == (11, 96)
        def active(threads, shared=0):
            ok("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), kernel, threads, c_size_t(shared))
            return blocks.value
        assert (active(1024), active(256), active(32)) == (2, 8, 32)
        assert active(256, 100 * 1024) == 2 and active(1025) == 0
        ok("cuOccupancyAvailableDynamicSMemPerBlock", byref(size), function, 2, 256)
        assert size.value == 233472 // 2 - 1024 - 1024
    """, directory)


def test_attributes_of_a_function_go_before_those_of_its_kernel(directory):
    run_alone("""
        value = c_int()
        def of_kernel(number, device=0):
            ok("cuKernelGetAttribute", byref(value), number, kernel, device)
            return value.value
        def of_function(number):
            ok("cuFuncGetAttribute", byref(value), number, function)
            return value.value
        assert [of_function(i) for i in (0, 1, 3, 4, 6)] == [1024, 1024, 0, 32, 90]
        assert of_kernel(8) == of_function(8) == 47 * 1024
        ok("cuKernelSetAttribute", 8, 60000, kernel, 0)
        assert (of_kernel(8), of_kernel(8, 1), of_function(8)) == (60000, 47 * 1024, 60000)
        ok("cuFuncSetAttribute", function, 8, 50000)
        ok("cuKernelSetAttribute", 8, 70000, kernel, 0)
        assert (of_kernel(8), of_function(8)) == (70000, 50000)
        assert cu.cuFuncSetAttribute(function, 4, 1) == 1 and cu.cuFuncSetAttribute(function, 9, 101) == 1
        name = ctypes.c_char_p()
        ok("cuKernelGetName", byref(name), kernel)
        assert name.value == b"first"
    """, directory)


def test_launches_in_every_way(directory):
    run_alone("""
        class Attribute(ctypes.Structure):
            _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]
        class Config(ctypes.Structure):
            _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                        ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint)]
        attributes = (Attribute * 2)(Attribute(2, 0, (c_uint * 16)(1)), Attribute(4, 0, (c_uint * 16)(2, 1, 1)))
        config = Config((4, 1, 1), (32, 1, 1), 0, None, attributes, 2)
        ok("cuLaunchKernelEx", byref(config), kernel, pointers, None)
        ok("cuLaunchCooperativeKernel", function, 1, 1, 1, 32, 1, 1, 0, None, pointers)
        none = made("cuLibraryGetKernel", library, b"none")
        assert launch(none, values=None) == 0
        first, second, third = stub.launches
        assert (first.api, first.cooperative, first.cluster) == ("cuLaunchKernelEx", True, (2, 1, 1))
        assert (second.api, second.cooperative, second.cluster) == ("cuLaunchCooperativeKernel", True, (0, 0, 0))
        assert third.parameters == () and third.packed == b""
        attributes[1].value[0] = 3
        assert cu.cuLaunchKernelEx(byref(config), kernel, pointers, None) == 1  # 4 blocks are not clusters of 3
        assert cu.cuLaunchCooperativeKernel(function, 132 * 32 + 1, 1, 1, 32, 1, 1, 0, None, pointers) == 720
        assert len(stub.launches) == 3
    """, directory)


def test_bad_launches_fail_as_in_the_driver_and_are_not_recorded(directory):
    run_alone("""
        for axis in range(3):
            for grid in (0, 2**31 if axis == 0 else 65536):
                assert launch(grid=[grid if i == axis else 1 for i in range(3)]) == 1
            for block in (0, 65 if axis == 2 else 1025):
                assert launch(block=[block if i == axis else 1 for i in range(3)]) == 1
        assert launch(block=(32, 33, 1)) == 1
        assert launch(shared=48 * 1024 - 1024 + 1) == 1  # the kernel has 1024 bytes of its own
        assert launch(values=None) == 1
        assert launch(handle=c_void_p(0x1234560)) == 400
        assert launch(stream=c_void_p(0x1234560)) == 400
        assert launch(handle=library) == 400
        assert stub.launches == []
        assert launch(shared=47 * 1024) == 0 and launch(grid=(2**31 - 1, 65535, 65535), block=(16, 1, 64)) == 0
        assert cu.cuFuncSetAttribute(function, 8, 232448) == 1
        ok("cuFuncSetAttribute", function, 8, 232448 - 1024)
        assert launch(shared=232448 - 1024) == 0
        other = made("cuDevicePrimaryCtxRetain", 1)
        ok("cuCtxPushCurrent_v2", other)
        assert launch() == 400
        assert launch(handle=kernel) == 0 and stub.launches[-1].device == 1
        assert launch(handle=kernel, shared=60000) == 1  # set for the function of the first device only
        ok("cuKernelSetAttribute", 8, 60000, kernel, 1)
        assert launch(handle=kernel, shared=60000) == 0
        ok("cuCtxPopCurrent_v2", None)
        ok("cuCtxSetCurrent", None)
        assert launch() == 201
        ok("cuCtxSetCurrent", context)
        ok("cuLibraryUnload", library)
        assert launch() == 400 and launch(handle=kernel) == 400
        heavy = cuda_stub.make_cubin({"heavy": []}, registers=128)
        module = made("cuModuleLoadData", heavy)
        assert launch(made("cuModuleGetFunction", module, b"heavy"), block=(1024, 1, 1), values=None) == 701
        assert cu.cuModuleGetFunction(byref(c_void_p()), module, b"light") == 500
        assert cu.cuModuleLoadData(byref(c_void_p()), bytes(64)) == 200
    """, directory)


def test_contexts_are_current_per_thread(directory):
    run_alone("""
        other = made("cuDevicePrimaryCtxRetain", 1)
        found = c_void_p()
        ok("cuCtxPushCurrent_v2", other)
        ok("cuCtxGetCurrent", byref(found))
        assert found.value == other.value == stub.primary_context(1)
        seen = []
        def thread():
            ok("cuCtxGetCurrent", byref(found))
            seen.append((found.value, launch(), stub.current_context()))
            ok("cuCtxSetCurrent", context)
            seen.append(launch())
        worker = threading.Thread(target=thread)
        worker.start()
        worker.join()
        assert seen == [(None, 201, 0), 0]
        ok("cuCtxPopCurrent_v2", byref(found))
        assert found.value == other.value and stub.current_context() == context.value
        ok("cuCtxPopCurrent_v2", byref(found))
        assert cu.cuCtxPopCurrent_v2(byref(found)) == 201
        ok("cuCtxSetCurrent", context)
        flags, active = c_uint(), c_int()
        ok("cuDevicePrimaryCtxRelease_v2", 1)
        ok("cuDevicePrimaryCtxGetState", 1, byref(flags), byref(active))
        assert not active.value
        ok("cuDevicePrimaryCtxRelease_v2", 0)
        assert launch() == 709
    """, directory)


def test_memory_is_the_devices_and_copies_copy(directory):
    run_alone("""
        pointer = c_uint64()
        ok("cuMemAlloc_v2", byref(pointer), c_size_t(100))
        there, here = pointer.value, ctypes.create_string_buffer(bytes(range(100)), 100)
        back = ctypes.create_string_buffer(100)
        ok("cuMemcpyHtoD_v2", pointer, here, c_size_t(100))
        ok("cuMemsetD8_v2", c_uint64(there + 10), 255, c_size_t(5))
        ok("cuMemcpyDtoH_v2", back, pointer, c_size_t(100))
        assert back.raw == bytes(range(10)) + bytes([255] * 5) + bytes(range(15, 100))
        assert cu.cuMemcpyHtoD_v2(c_uint64(there + 1), here, c_size_t(100)) == 1
        def attribute(number, at, kind=c_uint64):
            value = kind()
            code = cu.cuPointerGetAttribute(byref(value), number, c_uint64(at))
            return value.value if code == 0 else -code
        assert attribute(2, there, c_uint) == 2 and attribute(9, there + 99, c_int) == 0
        assert attribute(1, there) == context.value and attribute(9, there + 100, c_int) == -1
        second = stub.allocate(64, device=1)
        assert attribute(9, second, c_int) == 1 and attribute(1, second) == stub.primary_context(1)
        base, size = c_uint64(), c_size_t()
        ok("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(there + 50))
        assert (base.value, size.value) == (there, 100)
        numbers, kind, device = (c_int * 2)(2, 9), c_uint(9), c_int(9)
        data = (c_void_p * 2)(ctypes.addressof(kind), ctypes.addressof(device))
        ok("cuPointerGetAttributes", 2, numbers, data, c_uint64(ctypes.addressof(here)))
        assert (kind.value, device.value) == (0, -2)  # unknown memory
        host = made("cuMemHostAlloc", c_size_t(16), 0)
        assert attribute(2, host.value, c_uint) == 1
        ok("cuMemFreeHost", host)
        ok("cuMemHostRegister_v2", here, c_size_t(100), 0)
        assert attribute(2, ctypes.addressof(here), c_uint) == 1
        ok("cuMemHostUnregister", here)
        ok("cuMemAllocManaged", byref(pointer), c_size_t(8), 1)
        assert attribute(8, pointer.value, ctypes.c_uint8) == 1
        ok("cuMemFree_v2", pointer)
        assert stub.allocations(0) == 1 and stub.allocations(1) == 1
        ok("cuMemFree_v2", c_uint64(there))
        assert cu.cuMemFree_v2(c_uint64(there)) == 1 and stub.allocations(0) == 0
        ok("cuMemAllocAsync", byref(pointer), c_size_t(8), None)
        ok("cuMemFreeAsync", pointer, None)
        assert cu.cuMemAlloc_v2(byref(pointer), c_size_t(1 << 40)) == 2
        stub.free(second)
        assert [entry.api for entry in stub.log] == [
            "cuMemcpyHtoD", "cuMemsetD8", "cuMemcpyDtoH", "cuMemFree", "cuMemFree", "cuMemAllocAsync", "cuMemFreeAsync"]
    """, directory)


def test_the_log_has_the_order_between_streams(directory):
    run_alone("""
        one, two = made("cuStreamCreate", 1), made("cuStreamCreate", 1)
        event = made("cuEventCreate", 2)
        assert launch(stream=one) == 0
        ok("cuEventRecord", event, one)
        ok("cuStreamWaitEvent", two, event, 0)
        assert launch(stream=two) == 0
        ok("cuStreamSynchronize", two)
        ok("cuCtxSynchronize")
        a, b, e = one.value, two.value, event.value
        assert [(x.api, x.stream, x.event, x.launch) for x in stub.log] == [
            ("cuLaunchKernel", a, 0, 0), ("cuEventRecord", a, e, -1), ("cuStreamWaitEvent", b, e, -1),
            ("cuLaunchKernel", b, 0, 1), ("cuStreamSynchronize", b, 0, -1), ("cuCtxSynchronize", 0, 0, -1)]
        found = c_void_p()
        ok("cuStreamGetCtx", two, byref(found))
        assert found.value == context.value
        other = made("cuDevicePrimaryCtxRetain", 1)
        ok("cuCtxPushCurrent_v2", other)
        assert launch(handle=kernel, stream=one) == 400  # a stream of the other context
        foreign = made("cuEventCreate", 2)
        assert cu.cuEventRecord(foreign, one) == 400
        ok("cuEventRecord", event, one)
        ok("cuStreamWaitEvent", None, event, 0)
        assert stub.log[-1].context == other.value
        ok("cuStreamDestroy_v2", one)
        assert cu.cuStreamSynchronize(one) == 400 and cu.cuStreamDestroy_v2(one) == 400
        ok("cuEventDestroy_v2", event)
        assert cu.cuEventQuery(event) == 400
    """, directory)


def test_a_launch_on_a_capturing_stream_is_captured(directory):
    run_alone("""
        one, two = made("cuStreamCreate", 1), made("cuStreamCreate", 1)
        event = made("cuEventCreate", 2)
        status, graph = c_int(), c_void_p()
        ok("cuStreamBeginCapture_v2", one, 0)
        ok("cuStreamIsCapturing", one, byref(status))
        assert status.value == 1
        assert launch(stream=one) == 0
        ok("cuEventRecord", event, one)
        ok("cuStreamWaitEvent", two, event, 0)  # joins
        assert launch(stream=two) == 0
        assert launch() == 0  # the legacy stream does not wait for a non-blocking one
        ok("cuStreamEndCapture", one, byref(graph))
        assert [x.graph for x in stub.launches] == [graph.value, graph.value, 0]
        assert launch(stream=two) == 0 and stub.launches[-1].graph == 0
        ok("cuStreamBeginCapture_v2", one, 0)
        assert cu.cuMemAlloc_v2(byref(c_uint64()), c_size_t(8)) == 900
        assert launch(stream=one) == 901
        ok("cuStreamIsCapturing", one, byref(status))
        assert status.value == 2
        assert cu.cuStreamEndCapture(one, byref(graph)) == 901 and graph.value is None
        ok("cuStreamBeginCapture_v2", one, 2)
        ok("cuMemAlloc_v2", byref(c_uint64()), c_size_t(8))  # relaxed
        assert cu.cuStreamSynchronize(one) == 900
        assert cu.cuStreamEndCapture(one, byref(graph)) == 901
        blocking = made("cuStreamCreate", 0)
        ok("cuStreamBeginCapture_v2", blocking, 0)
        assert launch() == 906
    """, directory)


def test_injected_errors(directory):
    run_alone("""
        stub.fail("cuLaunchKernel", 719, after=1)
        assert [launch() for _ in range(3)] == [0, 719, 0]
        stub.fail("cuMemAlloc", 2)
        assert cu.cuMemAlloc_v2(byref(c_uint64()), c_size_t(8)) == 2
        stub.fail("cuLaunchKernel", 700, sticky=True)
        name = ctypes.c_char_p()
        assert launch() == 700 and cu.cuCtxSynchronize() == 700 and cu.cuInit(0) == 700
        ok("cuGetErrorName", 700, byref(name))
        assert name.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
        assert cu.cuGetErrorName(12345, byref(name)) == 1 and name.value is None
        stub.reset()
        assert launch() == 0 and len(stub.launches) == 3
    """, directory)


def test_fast_trace_and_hook(directory):
    run_alone("""
        stub.set_fast(True)
        assert launch() == 0 and launch(handle=None) == 0 and stub.fast_count == 2 and stub.launches == []
        stub.set_fast(False)
        stub.set_trace(True)
        ok("cuCtxPushCurrent_v2", context)
        assert launch() == 0
        stub.set_trace(False)
        ok("cuCtxSynchronize")
        assert stub.trace == ["cuCtxPushCurrent", "cuLaunchKernel"]
        seen = []
        stub.set_hook(seen.append)
        assert launch(grid=(9, 1, 1)) == 0
        stub.set_hook(None)
        assert launch() == 0
        assert [x.grid[0] for x in seen] == [9] and seen[0] == stub.launches[1]
    """, directory)


def test_a_forked_child_has_no_driver(directory):
    run_alone("""
        import os
        child = os.fork()
        if child == 0:
            os._exit(0 if (launch(), cu.cuInit(0)) == (3, 3) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert launch() == 0
    """, directory)


PACKAGE_BEFORE = "sys.modules['numba_cuda_mlir'] = types.ModuleType('numba_cuda_mlir')"
BINDINGS = "sys.modules['cuda.bindings'] = types.ModuleType('cuda.bindings')"
LOADED = "ctypes.CDLL(sys.argv[1])"


@pytest.mark.parametrize(
    "before, refusal",
    [(PACKAGE_BEFORE, "imported already"), (LOADED, "loaded already"), (BINDINGS, "no refusal"), ("", "no refusal")],
)
def test_the_stub_is_not_loaded_beside_a_driver(directory, before, refusal):
    code = f"""
        import ctypes, sys, types
        {before}
        import cuda_stub
        try:
            cuda_stub.load(sys.argv[2], force=True)
            print("no refusal")
        except cuda_stub.StubRefused as error:
            print(error)
    """
    assert refusal in run_python(code, str(cuda_stub.build(directory)), str(directory)).stdout


def test_a_real_driver_is_not_shadowed(directory):
    run_python("""
        import sys, cuda_stub
        cuda_stub.real_driver = lambda: True
        try:
            cuda_stub.load(sys.argv[1])
        except cuda_stub.StubRefused as error:
            assert "of its own" in str(error), error
        else:
            raise AssertionError("no refusal")
    """, str(directory))


PACKAGE = """
import struct, threading, warnings
import numpy as np
from PACKAGE_NAME import jit
import PACKAGE_NAME as cuda
numba_cuda = "PACKAGE_NAME" == "numba.cuda"
warnings.simplefilter("ignore")  # of small grids, and of host arrays

def words(array):
    "The parameters of a device array."
    shape, strides, size = array.shape, array.strides, array.dtype.itemsize
    pointer = array.__cuda_array_interface__["data"][0]
    if numba_cuda:
        return [0, 0, array.size, size, pointer, *shape, *strides]
    return [pointer, pointer, 0, *shape, *[stride // size for stride in strides]]

def numbers(parameters):
    return [struct.unpack("<q", parameter)[0] for parameter in parameters]

def last(kernel, *arguments, grid=1, block=32, stream=0, shared=0):
    kernel[grid, block, stream, shared](*arguments)
    return stub.launches[-1]

def fresh():
    @jit
    def kernel(value):
        pass
    return kernel

@jit
def axpy(a, x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] += a * x[i]

x, y = cuda.to_device(np.arange(10, dtype=np.float32)), cuda.device_array(10, np.float32)
"""


def run_package(package, code, directory, **environment):
    return cuda_stub.run_with_stub(
        PACKAGE.replace("PACKAGE_NAME", package) + textwrap.dedent(code), directory, environment, (package,))


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_launches_what_it_was_told(directory, package):
    run_package(package, """
        record = last(axpy, 2.0, x, y, grid=(4, 3, 2), block=(32, 2, 1), shared=128)
        assert record.grid == (4, 3, 2) and record.block == (32, 2, 1) and record.shared == 128
        assert record.device == 0 and record.context == stub.current_context() == stub.primary_context(0)
        assert record.stream == 0 and not record.cooperative and record.graph == 0 and "axpy" in record.name
        assert record.parameters[0] == struct.pack("<d", 2.0)
        assert numbers(record.parameters[1:]) == words(x) + words(y)
        assert (x.copy_to_host() == np.arange(10)).all()
        stream = cuda.stream()
        record = last(axpy, 2.0, x, y, stream=stream)
        assert record.stream == int(stream.handle) != 0
        stream.synchronize()
        assert [(e.api, e.stream) for e in stub.log[-2:]] == [
            (record.api, record.stream), ("cuStreamSynchronize", record.stream)]
        event = cuda.event()
        event.record(stream)
        event.wait()
        assert [(e.api, e.stream) for e in stub.log[-2:]] == [
            ("cuEventRecord", record.stream), ("cuStreamWaitEvent", 0)]
        axpy.forall(1000)(2.0, x, y)  # a block of 1024 or of 128 threads: neither package asks the driver
        block = stub.launches[-1].block[0]
        assert block > 1 and stub.launches[-1].grid == (-(-1000 // block), 1, 1)
        @jit
        def together(x):
            group = cuda.cg.this_grid()
            group.sync()
            x[0] = 1
        assert last(together, x, grid=2).cooperative
        @jit(debug=True, opt=False)
        def checked(x):
            x[0] = 1
        assert numbers(last(checked, x).parameters) == words(x)  # its error code, a global of the module, is zero
        assert stub.log[-1].api == "cuMemcpyDtoH" and stub.log[-1].size == 4
        pinned = cuda.pinned_array(4, np.float32)
        mapped = cuda.mapped_array(4, np.float32)
        assert numbers(last(fresh(), mapped).parameters) == words(mapped)
        pinned[:] = 3
        moved = cuda.to_device(pinned, stream=stream)
        assert (moved.copy_to_host() == 3).all()
    """, directory)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_words_of_arrays(directory, package):
    run_package(package, """
        a = np.arange(24, dtype=np.float32)
        to_device = cuda.to_device
        for array in [
            to_device(a), to_device(a.reshape(4, 6)), to_device(np.asfortranarray(a.reshape(4, 6))),
            to_device(a.reshape(4, 6))[:, ::2], to_device(a)[::-1], to_device(a)[5:], to_device(a.reshape(2, 3, 4)),
            to_device(np.array(3.0)), to_device(np.zeros(4, np.float16)), to_device(np.ones(4, bool)),
            to_device(np.ones(4, np.complex64)), to_device(np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])),
        ]:
            record = last(fresh(), array)
            assert numbers(record.parameters) == words(array), array.dtype
            assert record.offsets == tuple(range(0, len(record.packed), 8))
        empty = cuda.device_array((0, 3), np.float64)
        shape_and_strides = [0, 3, 24, 8] if numba_cuda else [0, 3, 3, 1]
        assert numbers(last(fresh(), empty).parameters)[-4:] == shape_and_strides
        class ReadOnly:
            def __init__(self, array):
                interface = array.__cuda_array_interface__
                self.array = array
                self.__cuda_array_interface__ = {**interface, "data": (interface["data"][0], True)}
        kernel, array = fresh(), to_device(a)
        record = last(kernel, ReadOnly(array))
        assert numbers(record.parameters) == words(array)
        (argument,), = kernel.overloads
        assert not argument.mutable
    """, directory)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_bytes_of_scalars_and_tuples(directory, package):
    run_package(package, """
        import collections, enum
        class Color(enum.IntEnum):
            red = 3
        Pair = collections.namedtuple("Pair", "a b")
        i8 = lambda value: struct.pack("<q", value)
        f8 = lambda value: struct.pack("<d", value)
        cases = [
            (5, [i8(5)]), (-5, [i8(-5)]), (2**40, [i8(2**40)]), (True, [b"\\1"]), (np.True_, [b"\\1"]),
            (1.5, [f8(1.5)]), (Color.red, [i8(3)]), (np.datetime64(5, "ns"), [i8(5)]),
            (np.timedelta64(5, "s"), [i8(5)]),
            ((1, 2.5), [i8(1), f8(2.5)]), ((1, 2, 3), [i8(1), i8(2), i8(3)]), (((1, 2.0), 3), [i8(1), f8(2), i8(3)]),
            ((), []), (Pair(1, 2.5), [i8(1), f8(2.5)]), ((np.int8(1), np.int16(2)), [b"\\1", b"\\2\\0"]),
        ]
        for kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16,
                     np.float32, np.float64):
            cases.append((kind(7), [kind(7).tobytes()]))
        for kind, part in ((np.complex64, "<f"), (np.complex128, "<d")):
            parts = [struct.pack(part, 1), struct.pack(part, 2)]
            cases.append((kind(1 + 2j), parts if numba_cuda else [b"".join(parts)]))
        for value, expected in cases:
            assert list(last(fresh(), value).parameters) == expected, repr(value)
        record = last(fresh(), (x, 4))
        assert numbers(record.parameters) == [*words(x), 4]
        @jit
        def four(a, b, c, d):
            pass
        record = last(four, np.int8(1), 2.0, True, np.int16(3))
        assert record.offsets == (0, 8, 16, 18) and record.packed == struct.pack("<bxxxxxxxd?xh", 1, 2.0, True, 3)
    """, directory)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_devices_and_threads(directory, package):
    run_package(package, """
        assert [tuple(gpu.compute_capability) for gpu in cuda.gpus] == [(9, 0), (8, 0)]
        first = last(axpy, 2.0, x, y)
        with cuda.gpus[1]:
            there = cuda.to_device(np.arange(3, dtype=np.float32))
            second = last(axpy, 2.0, there, there)
        assert (first.device, second.device) == (0, 1) and second.context == stub.primary_context(1)
        assert last(axpy, 2.0, x, y).device == 0
        seen = []
        def thread():
            seen.append(stub.current_context())
            seen.append(last(axpy, 2.0, x, y))
        worker = threading.Thread(target=thread)
        worker.start()
        worker.join()
        assert seen[0] == 0 and seen[1].context == first.context and seen[1].thread != first.thread
    """, directory, CUDA_STUB_CAPABILITIES="9.0,8.0")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_errors_of_the_driver_reach_the_caller(directory, package):
    run_package(package, """
        def refused(text, *arguments, **options):
            try:
                last(axpy, *arguments, **options)
            except Exception as error:
                assert text in str(error), error
            else:
                raise AssertionError("launched")
        api = last(axpy, 2.0, x, y).api
        refused("CUDA_ERROR_INVALID_VALUE", 2.0, x, y, block=2000)
        stub.fail(api, 719)
        refused("CUDA_ERROR_LAUNCH_FAILED", 2.0, x, y)
        last(axpy, 2.0, x, y)
        stub.fail(api, 700, sticky=True)
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", 2.0, x, y)
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", 2.0, x, y)
        stub.reset()
        last(axpy, 2.0, x, y)
        stub.fail("cuMemAlloc", 2)
        stub.fail("cuMemAlloc", 2)  # the package tries again
        try:
            cuda.device_array(10, np.float32)
        except Exception as error:
            assert "OUT_OF_MEMORY" in str(error), error
        else:
            raise AssertionError("allocated")
    """, directory)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_disk_cache_serves_a_second_process(directory, package, tmp_path):
    (tmp_path / "cached_kernels.py").write_text(
        f"from {package} import grid, jit\n\n\n@jit(cache=True)\ndef cached(a, x):\n    x[grid(1)] = a\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from cached_kernels import cached
        record = last(cached, 2.0, x)
        hits, misses = cached.stats.cache_hits, cached.stats.cache_misses
        print(sum(hits.values()), sum(misses.values()), record.name, record.packed[:8])
    """
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_CUDA_MLIR_CACHE_DIR": str(tmp_path / "cache")}
    first = run_package(package, code, directory, **environment).split(maxsplit=2)
    second = run_package(package, code, directory, **environment).split(maxsplit=2)
    assert first[:2] == ["0", "1"] and second[:2] == ["1", "0"]
    assert first[2] == second[2]
