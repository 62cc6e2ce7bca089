"""The driver stub itself, called by ctypes: what is launched is what is recorded. All other tests are of what packages call."""

import ctypes
import functools
import shutil
import struct
import sys
import threading
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import cuda_stub
import pytest
from interpreter import run_python
from stub_processes import run_with_stub

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or cuda_stub.real_driver(),
    reason="the stub needs Linux, a C compiler, and that no real driver is installed",
)

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
    refused(3, "cuDeviceGetCount", byref(c_int()))  # not initialised
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


def refused(code: int, name: str, *arguments) -> None:
    assert (name, getattr(cu, name)(*arguments)) == (name, code)


def ok(name: str, *arguments) -> None:
    refused(0, name, *arguments)


def made(name, *arguments):
    handle = c_void_p()
    ok(name, byref(handle), *arguments)
    return handle


def launch(handle=None, grid=(1, 1, 1), block=(32, 1, 1), shared=0, stream=None, values=..., extra=None) -> int:
    numbers = map(c_uint, (*grid, *block, shared))
    return cu.cuLaunchKernel(handle or function, *numbers, stream, pointers if values is ... else values, extra)


@alone
def test_a_launch_is_recorded_with_the_bytes_of_each_parameter():
    assert launch(grid=(4, 2, 3), block=(32, 2, 1), shared=48) == 0
    assert launch(handle=kernel) == 0
    buffer, size = ctypes.create_string_buffer(PACKED, len(PACKED)), c_size_t(len(PACKED))
    extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    assert launch(values=None, extra=extra) == 0
    assert launch(extra=extra) == 1  # both
    one, two, three = stub.launches
    assert one == cuda_stub.Launch(
        api="cuLaunchKernel", function=function.value, name="first", context=context.value, device=0, grid=(4, 2, 3),
        block=(32, 2, 1), cluster=(0, 0, 0), shared=48, stream=0, cooperative=False, graph=0, offsets=(0, 8, 16),
        parameters=(bytes([7]), struct.pack("<d", 1.5), struct.pack("<i", -2)), packed=PACKED,
        thread=threading.get_native_id(),
    )  # fmt: skip
    assert two.function == kernel.value and two.packed == three.packed == PACKED
    stub.clear()
    assert stub.launches == [] and stub.log == []


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
    ok("cuFuncSetAttribute", function, 8, 232448 - 1024)
    assert launch(shared=232448 - 1024) == 0
    ok("cuCtxPushCurrent_v2", made("cuDevicePrimaryCtxRetain", 1))
    assert launch() == 400
    assert launch(handle=kernel) == 0 and stub.launches[-1].device == 1
    ok("cuCtxPopCurrent_v2", None)
    ok("cuLibraryUnload", library)
    assert launch() == 400 and launch(handle=kernel) == 400
    ok("cuCtxSetCurrent", None)
    assert launch() == 201 and stub.current_context() == 0
    refused(201, "cuCtxPopCurrent_v2", None)
    ok("cuCtxSetCurrent", context)
    module = made("cuModuleLoadData", cuda_stub.make_cubin({"heavy": []}, registers=128))
    assert launch(made("cuModuleGetFunction", module, b"heavy"), block=(1024, 1, 1), values=None) == 701
    ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert launch() == 709


@alone
def test_a_capture_takes_launches_and_refuses_what_cannot_be_captured():
    one, two = made("cuStreamCreate", 1), made("cuStreamCreate", 1)
    event, graph = made("cuEventCreate", 2), c_void_p()
    ok("cuStreamBeginCapture_v2", one, 0)
    assert launch(stream=one) == 0
    ok("cuEventRecord", event, one)
    ok("cuStreamWaitEvent", two, event, 0)  # joins
    assert launch(stream=two) == launch() == 0  # the legacy stream does not wait for a non-blocking one
    ok("cuStreamEndCapture", one, byref(graph))
    assert [x.graph for x in stub.launches] == [graph.value, graph.value, 0]
    assert [(x.api, x.stream, x.event) for x in stub.log[1:3]] == [
        ("cuEventRecord", one.value, event.value), ("cuStreamWaitEvent", two.value, event.value)]  # fmt: skip
    ok("cuStreamBeginCapture_v2", one, 0)
    refused(900, "cuMemAlloc_v2", byref(c_uint64()), c_size_t(8))
    assert launch(stream=one) == 901
    refused(901, "cuStreamEndCapture", one, byref(graph))


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

