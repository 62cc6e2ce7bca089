"""The driver stub itself, alone and under each CUDA package: what is compiled and launched is what is recorded."""

import ctypes
import functools
import shutil
import struct
import sys
import threading
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import cuda_stub
import numpy as np
import pytest
from interpreter import run_python
from launches import numbers_of
from stub_processes import run_with_stub

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or cuda_stub.real_driver(),
    reason="the stub needs Linux, a C compiler, and that no real driver is installed",
)


# ---- alone: by ctypes ------------------------------------------------------------------------------------------------

cu = stub = context = library = kernel = function = pointers = None  # where a scene runs
VALUES = [ctypes.c_uint8(7), ctypes.c_double(1.5), c_int(-2)]
PACKED = struct.pack("<BxxxxxxxdI", 7, 1.5, 2**32 - 2)


def alone(scene):
    """A test that runs `scene` in a process of its own."""

    @functools.wraps(scene)
    def test():
        code = f"import test_cuda_stub as tests\ntests.begin(stub)\ntests.{scene.__name__}.__wrapped__()"
        run_with_stub(code, "test_cuda_stub", CUDA_STUB_DEVICES="3")

    return test


def begin(loaded) -> None:
    """Make a context, and a kernel with three parameters, as `kernel` and as a `function` of it."""
    global cu, stub, context, library, kernel, function, pointers
    stub, cu = loaded, ctypes.CDLL("libcuda.so.1")  # by its name, as the packages look for it
    assert cu.cuDeviceGetCount(byref(c_int())) == 3  # not initialised
    ok("cuInit", 0)
    with pytest.raises(ValueError, match="before cuInit"):
        stub.set_devices(1)
    context = made("cuDevicePrimaryCtxRetain", 0)
    ok("cuCtxSetCurrent", context)
    image = cuda_stub.make_cubin({"first": [(0, 1), (8, 8), (16, 4)], "none": []}, shared=1024, registers=32)
    library = made("cuLibraryLoadData", image, None, None, 0, None, None, 0)
    kernel = made("cuLibraryGetKernel", library, b"first")
    function = made("cuKernelGetFunction", kernel)
    pointers = (c_void_p * 3)(*map(ctypes.addressof, VALUES))


def ok(name, *arguments) -> None:
    assert (name, getattr(cu, name)(*arguments)) == (name, 0)


def made(name, *arguments):
    handle = c_void_p()
    ok(name, byref(handle), *arguments)
    return handle


def told(kind, name, *arguments):
    """What a function writes where its first argument points."""
    value = kind()
    ok(name, byref(value), *arguments)
    return value.value


def launch(handle=None, grid=(1, 1, 1), block=(32, 1, 1), shared=0, stream=None, values=..., extra=None) -> int:
    numbers = map(c_uint, (*grid, *block, shared))
    return cu.cuLaunchKernel(handle or function, *numbers, stream, pointers if values is ... else values, extra)


@alone
def test_functions_are_found_by_name_and_version_and_others_are_listed():
    found = c_void_p()
    status = c_int()

    def get(name, version):
        return cu.cuGetProcAddress_v2(name, byref(found), version, c_uint64(0), byref(status))

    for name, version, wanted in ((b"cuMemAlloc", 12000, "cuMemAlloc_v2"), (b"cuCtxCreate", 12000, "cuCtxCreate_v2"),
                                  (b"cuCtxCreate", 13000, "cuCtxCreate_v4")):  # fmt: skip
        address = ctypes.cast(getattr(cu, wanted), c_void_p).value
        assert get(name, version) == 0 and found.value == address == stub.address(wanted)
    for _ in range(2):
        assert get(b"cuNoSuch", 13000) == 500 and status.value == 1 and found.value is None
    assert stub.missing == ["cuNoSuch"]
    assert told(c_int, "cuDriverGetVersion") == 13000


@alone
def test_a_launch_is_recorded_with_the_bytes_of_each_parameter():
    assert launch(grid=(4, 2, 3), block=(32, 2, 1), shared=48) == 0
    assert launch(handle=kernel) == 0
    buffer, size = ctypes.create_string_buffer(PACKED, len(PACKED)), c_size_t(len(PACKED))
    extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    assert launch(values=None, extra=extra) == 0
    assert launch(extra=extra) == 1  # both
    one, two, three = stub.launches
    assert one.api == "cuLaunchKernel" and one.name == "first" and one.function == function.value
    assert one.grid == (4, 2, 3) and one.block == (32, 2, 1) and one.shared == 48 and one.stream == 0
    assert one.context == context.value == stub.current_context() and one.device == 0 and not one.cooperative
    assert one.offsets == (0, 8, 16) and one.packed == PACKED and one.cluster == (0, 0, 0) and one.graph == 0
    assert one.parameters == (bytes([7]), struct.pack("<d", 1.5), struct.pack("<i", -2))
    assert one.thread == threading.get_native_id()
    assert two.function == kernel.value and two.packed == three.packed == PACKED
    assert [entry.launch for entry in stub.log] == [0, 1, 2]
    offset, size = c_size_t(), c_size_t()
    for i, expected in enumerate([(0, 1), (8, 8), (16, 4)]):
        ok("cuFuncGetParamInfo", function, c_size_t(i), byref(offset), byref(size))
        assert (offset.value, size.value) == expected
    assert cu.cuKernelGetParamInfo(kernel, c_size_t(3), byref(offset), byref(size)) == 1
    stub.clear()
    assert stub.launches == [] and stub.log == []


@alone
def test_attributes_of_a_function_go_before_those_of_its_kernel():
    def of_kernel(number, device=0):
        return told(c_int, "cuKernelGetAttribute", number, kernel, device)

    def of_function(number):
        return told(c_int, "cuFuncGetAttribute", number, function)

    assert [of_function(i) for i in (0, 1, 3, 4, 6)] == [1024, 1024, 0, 32, 90]
    assert of_kernel(8) == of_function(8) == 47 * 1024
    ok("cuKernelSetAttribute", 8, 60000, kernel, 0)
    assert (of_kernel(8), of_kernel(8, 1), of_function(8)) == (60000, 47 * 1024, 60000)
    ok("cuFuncSetAttribute", function, 8, 50000)
    ok("cuKernelSetAttribute", 8, 70000, kernel, 0)
    assert (of_kernel(8), of_function(8)) == (70000, 50000)
    assert cu.cuFuncSetAttribute(function, 4, 1) == 1 and cu.cuFuncSetAttribute(function, 9, 101) == 1
    assert told(ctypes.c_char_p, "cuKernelGetName", kernel) == b"first"


class Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint)]  # fmt: skip


@alone
def test_launches_in_every_way():
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


@alone
def test_bad_launches_fail_as_in_the_driver_and_are_not_recorded():
    for axis in range(3):
        for grid in (0, 2**31 if axis == 0 else 65536):
            assert launch(grid=[grid if i == axis else 1 for i in range(3)]) == 1
        for block in (0, 65 if axis == 2 else 1025):
            assert launch(block=[block if i == axis else 1 for i in range(3)]) == 1
    assert launch(block=(32, 33, 1)) == launch(values=None) == 1
    assert launch(shared=48 * 1024 - 1024 + 1) == 1  # the kernel has 1024 bytes of its own
    for nobodys in ({"handle": c_void_p(0x1234560)}, {"stream": c_void_p(0x1234560)}, {"handle": library}):
        assert launch(**nobodys) == 400
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


@alone
def test_contexts_are_current_per_thread():
    other, seen = made("cuDevicePrimaryCtxRetain", 1), []
    ok("cuCtxPushCurrent_v2", other)
    assert told(c_void_p, "cuCtxGetCurrent") == other.value == stub.primary_context(1)

    def thread():
        seen.append((told(c_void_p, "cuCtxGetCurrent"), launch(), stub.current_context()))
        ok("cuCtxSetCurrent", context)
        seen.append(launch())
    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    assert seen == [(None, 201, 0), 0]
    assert told(c_void_p, "cuCtxPopCurrent_v2") == other.value and stub.current_context() == context.value
    ok("cuCtxPopCurrent_v2", None)
    assert cu.cuCtxPopCurrent_v2(None) == 201
    ok("cuCtxSetCurrent", context)
    flags, active = c_uint(), c_int()
    ok("cuDevicePrimaryCtxRelease_v2", 1)
    ok("cuDevicePrimaryCtxGetState", 1, byref(flags), byref(active))
    assert not active.value
    ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert launch() == 709


@alone
def test_memory_is_the_devices_and_copies_copy():
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


@alone
def test_the_log_has_the_order_between_streams():
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


@alone
def test_a_launch_on_a_capturing_stream_is_captured():
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


# ---- beside a driver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before, refusal", [
    ("sys.modules['numba_cuda_mlir'] = types.ModuleType('numba_cuda_mlir')", "imported already"),
    ("ctypes.CDLL(sys.argv[1])", "loaded already"),
    ("cuda_stub.real_driver = lambda: True", "of its own"),
    ("sys.modules['cuda.bindings'] = types.ModuleType('cuda.bindings')", "no refusal"),
])  # fmt: skip
def test_the_stub_is_not_loaded_beside_a_driver(tmp_path, before, refusal):
    code = f"""
        import ctypes, sys, types, cuda_stub
        {before}
        try:
            cuda_stub.load(sys.argv[2])
            print("no refusal")
        except cuda_stub.StubRefused as error:
            print(error)
    """
    assert refusal in run_python(code, str(cuda_stub.build(tmp_path)), str(tmp_path)).stdout


# ---- under a package -------------------------------------------------------------------------------------------------


@pytest.mark.both_packages
def test_a_package_launches_what_it_was_told(stub, package):
    def last(kernel, *arguments, grid=1, block=32, stream=0, shared=0):
        kernel[grid, block, stream, shared](*arguments)
        return stub.launches[-1]

    def words(array):
        shape, strides, size = array.shape, array.strides, array.dtype.itemsize
        pointer = array.__cuda_array_interface__["data"][0]
        if package.__name__ == "numba.cuda":
            return [0, 0, array.size, size, pointer, *shape, *strides]
        return [pointer, pointer, 0, *shape, *[stride // size for stride in strides]]

    @package.jit
    def axpy(a, x, y):
        i = package.grid(1)
        if i < y.size:
            y[i] += a * x[i]

    x, y = package.to_device(np.arange(10, dtype=np.float32)), package.device_array(10, np.float32)
    record = last(axpy, 2.0, x, y, grid=(4, 3, 2), block=(32, 2, 1), shared=128)
    assert record.grid == (4, 3, 2) and record.block == (32, 2, 1) and record.shared == 128
    assert record.device == 0 and record.context == stub.current_context() == stub.primary_context(0)
    assert record.stream == 0 and not record.cooperative and record.graph == 0 and "axpy" in record.name
    assert record.parameters[0] == struct.pack("<d", 2.0)
    assert numbers_of(record)[1:] == words(x) + words(y)
    assert (x.copy_to_host() == np.arange(10)).all()

    stream, event = package.stream(), package.event()
    record = last(axpy, 2.0, x, y, stream=stream)
    assert record.stream == int(stream.handle) != 0
    stream.synchronize()
    event.record(stream)
    event.wait()
    assert [(each.api, each.stream) for each in stub.log[-4:]] == [
        (record.api, record.stream), ("cuStreamSynchronize", record.stream), ("cuEventRecord", record.stream),
        ("cuStreamWaitEvent", 0),
    ]  # fmt: skip
    axpy.forall(1000)(2.0, x, y)  # a block of 1024 or of 128 threads: neither package asks the driver
    block = stub.launches[-1].block[0]
    assert block > 1 and stub.launches[-1].grid == (-(-1000 // block), 1, 1)

    def together(x):
        package.cg.this_grid().sync()
        x[0] = 1

    def checked(x):
        x[0] = 1

    assert last(package.jit(together), x, grid=2).cooperative
    assert numbers_of(last(package.jit(debug=True, opt=False)(checked), x)) == words(x)
    assert stub.log[-1].api == "cuMemcpyDtoH" and stub.log[-1].size == 4  # its error code, a global of the module, is zero
    pinned, mapped = package.pinned_array(4, np.float32), package.mapped_array(4, np.float32)
    assert numbers_of(last(package.jit(lambda x: None), mapped)) == words(mapped)
    pinned[:] = 3
    assert (package.to_device(pinned, stream=stream).copy_to_host() == 3).all()
    with package.gpus[1]:
        there = package.to_device(np.arange(3, dtype=np.float32))
        record = last(axpy, 2.0, there, there)
    assert record.device == 1 and record.context == stub.primary_context(1) and last(axpy, 2.0, x, y).device == 0

    for code, is_sticky, text in ((719, False, "LAUNCH_FAILED"), (700, True, "ILLEGAL_ADDRESS")):
        stub.fail(record.api, code, sticky=is_sticky)
        for _ in range(1 + is_sticky):
            with pytest.raises(Exception, match=text):
                last(axpy, 2.0, x, y)
        stub.reset()
        last(axpy, 2.0, x, y)
