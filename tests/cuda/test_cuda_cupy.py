"""CuPy's arrays, which launches read in memory: as their ``__cuda_array_interface__`` says, and what kernels compute with them.

With real arrays of CuPy, which is no dependency of the tests: ``.ci/nightly`` installs it.
"""

import functools
import gc
import itertools
import re
import sys

import cupy_stub
import numpy as np
import pytest
from children import at_once
from cuda_checks import check_order, is_refused, new_stream, traced
from cuda_tensors import DeviceTensor
from launches import elementwise, launch_cached
from stub_processes import is_installed, run_with_cupy

from fastexchange import explain, fast_args
from fastexchange.cuda.driver import driver
from fastexchange.cupy.array_fields import fields

pytest.importorskip("cupy_backends")
gpu = pytest.mark.gpu
needs_numba_cuda = pytest.mark.skipif(not is_installed("numba.cuda"), reason="numba-cuda is not installed")


@pytest.fixture
def cupy(stub_or_none, package):
    import cupy

    return cupy


@pytest.fixture
def on_interface(cupy):
    """From an array to one over the same memory that is read by its interface."""
    return lambda array: array.view(type("ByInterface", (cupy.ndarray,), {}))


VIEWS = {
    "a vector": lambda x: x.ravel(), "three dimensions": lambda x: x, "a part": lambda x: x[1:, 1:3],
    "a row, at an offset": lambda x: x[1], "an element": lambda x: x[1, 2, 3], "every second": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1, :, ::-1], "transposed": lambda x: x.T, "axes swapped": lambda x: x.swapaxes(0, 1),
    "axes of one": lambda x: x[None, :, :1, None],
    "empty": lambda x: x[:0], "empty, transposed": lambda x: x.T[:, 1:1], "a diagonal": lambda x: x[0].diagonal(),
    "five dimensions": lambda x: x.reshape(1, 2, 3, 2, 2),
}  # fmt: skip
DTYPES = "f4", "?", "i1", "u2", "i4", "u8", "f2", "f8", "c8", "c16"


def check_like_interface(record, kernel, array, other) -> None:
    """A cached launch of an array passes, and where, what one of `other` does, the same array with only its interface."""
    launch_cached(kernel[1, 32], array)
    for _ in range(2):
        kernel[1, 32](other)
    ours, theirs = record.launches[-3], record.launches[-1]
    assert (ours.packed, ours.device, ours.stream, ours.context) == (theirs.packed, theirs.device, theirs.stream, theirs.context)


@pytest.mark.both_packages
@pytest.mark.parametrize("view, dtype", [
    *[(view, "f4") for view in VIEWS], *itertools.product(("three dimensions", "every second", "an element"), DTYPES[1:]),
])  # fmt: skip
def test_launches_are_those_of_the_interface(record, cupy, kernels, on_interface, view, dtype):
    array = VIEWS[view](cupy.empty((2, 3, 4), dtype))
    check_like_interface(record, kernels[1], array, on_interface(array))


def test_records_are_refused_as_without_native_code(record, cupy, kernels, on_interface):
    """By whatever error CuPy raises: on the stub it has no runtime to ask where their memory is."""
    launch_cached(kernels[1][1, 32], cupy.empty((3,), "f4"))
    record.clear()
    array, said = cupy.empty((3,), np.dtype([("x", "f4"), ("y", "i4")])), []
    for each in (array, on_interface(array)):
        with pytest.raises(Exception) as caught:
            kernels[1][1, 32](each)
        said.append(caught.type)
    assert said[0] is said[1] and not record.launches


def test_new_arrays_each_time_and_in_tuples(record, cupy, kernels):
    for _ in range(9):
        x, y = cupy.empty((3,), "f4"), cupy.empty((3, 2), "i4")
        launch_cached(kernels[2][1, 32], x, (2, (y, 1.5)))
        assert all(each.data.ptr.to_bytes(8, sys.byteorder) in record.launches[-1].packed for each in (x, y))


def test_a_changed_shape_is_seen(record, cupy, kernels):
    array = cupy.empty((6,), "f4")
    launch_cached(kernels[1][1, 32], array)
    array.shape = 2, 3
    launch_cached(kernels[1][1, 32], array)
    assert "array(float32, 2d, C)" in str(kernels[1][1, 32].explain(array))


def test_nothing_is_kept_and_garbage_is_collected_as_before(record, cupy, kernels):
    array = cupy.empty((3, 4), "f4").T
    launch_cached(kernels[1][1, 32], array)
    gc.collect()
    owned = array, array.data, array.dtype, array.data.mem
    before = [sys.getrefcount(each) for each in owned]
    for _ in range(100):
        kernels[1][1, 32](array)
    assert [sys.getrefcount(each) for each in owned] == before
    for switch in (gc.disable, gc.enable):
        switch()
        kernels[1][1, 32](array)
        assert gc.isenabled() is (switch is gc.enable)


def test_explain_names_the_path(record, cupy, kernels, on_interface):
    """To kernels for the CPU they are as before."""
    array = cupy.empty((3,), "f4")
    kernels[2][1, 32](array, on_interface(array))
    said = kernels[2][1, 32].explain(array, on_interface(array))
    assert [each.path for _, each, _ in said.arguments] == ["cupy", "cuda-interface"] and not said.notes
    assert explain(array).path == "dunder"


@gpu
def test_kernels_for_the_cpu_refuse_them(cupy, kernels):
    array = cupy.empty((3,), "f4")
    kernels[1][1, 32](array)
    is_refused(lambda: fast_args(lambda x: None)(array), BufferError, "'x' (position 0)", "kDLCUDA")


# ---- streams ---------------------------------------------------------------------------------------------------------
def external(cupy):
    """A new stream of CuPy's, made by the driver."""
    handle = new_stream()
    if not hasattr(cupy.cuda.Stream, "from_external"):  # before CuPy 14
        return cupy.cuda.ExternalStream(handle, 0)
    return cupy.cuda.Stream.from_external(type("Handle", (), {"__cuda_stream__": lambda self: (0, handle)})())


def test_the_current_stream_of_the_thread(record, cupy, kernels):
    """In each launch, also of other threads, which have streams of their own, and by a bound launch."""
    array, outer, inner, legacy = cupy.empty((3,), "f4"), external(cupy), external(cupy), 1
    launcher = kernels[1][1, 32]
    bound = launcher.bind(array)

    def check(expected) -> None:
        launch_cached(launcher, array)
        bound()
        assert {each.stream for each in record.launches[-2:]} == {expected}

    check(legacy)
    with outer:
        check(outer.ptr)
        with inner:
            check(inner.ptr)
            at_once(lambda: check(legacy))
            check(inner.ptr)
        check(outer.ptr)
    inner.use()
    try:
        check(inner.ptr)
    finally:
        cupy.cuda.Stream.null.use()
    check(legacy)


def test_a_stream_that_is_given_waits_for_the_current_one(stub, cupy, kernels):
    array, stream, given = cupy.empty((3,), "f4"), external(cupy), new_stream()
    with stream:
        for _ in range(2):
            stub.clear()
            kernels[1][1, 32, given](array)
            check_order(stub, given, [stream.ptr])
        stub.clear()
        launch_cached(kernels[1][1, 32, stream], array)
        assert {each.api for each in stub.log} == {"cuLaunchKernel"}


def test_beside_tensors_of_others(stub, cupy, kernels):
    """A framework on the same stream costs nothing; one on another stream is ordered by events, whichever comes first."""
    array, stream = cupy.empty((3,), "f4"), external(cupy)
    for order in (1, -1):
        DeviceTensor.streams[0] = stream.ptr
        arguments = [array, DeviceTensor((4,))][::order]
        with stream:
            launch_cached(kernels[2][1, 32], *arguments)
            stub.clear()
            DeviceTensor.streams[0] = other = new_stream()
            kernels[2][1, 32](*arguments)
        check_order(stub, *((stream.ptr, [other]) if order == 1 else (other, [stream.ptr])))


_OF_THREADS = """
kernel, array = fast_args(cuda.jit(lambda x: None)), cupy.empty((3,), "f4")
for _ in range(4):
    kernel[1, 32](array)
print({each.stream for each in stub.launches}, kernel[1, 32].explain(array).arguments[0][1].path)
"""


@needs_numba_cuda
@pytest.mark.parametrize("is_of_thread", [0, 1])
def test_default_streams_of_threads(stub, is_of_thread):
    said = run_with_cupy(_OF_THREADS, CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=str(is_of_thread))
    assert said == f"{{{2 if is_of_thread else 1}}} cupy\n"


# ---- devices and memory ----------------------------------------------------------------------------------------------
def unowned(cupy, address: int, device: int = 0, size: int = 4096):
    """Memory that CuPy does not own."""
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, None, device), 0)


def over(cupy, address: int, device: int = 0):
    return cupy.ndarray((3,), "f4", unowned(cupy, address, device))


def test_an_array_of_another_device(stub, cupy, kernels, on_interface, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(cupy_stub.load(stub, cupy_stub.DEVICES), "device", 2)
        array = cupy.empty((3,), "f4")
    for each in (array, over(cupy, stub.allocate(64, 2), 2), over(cupy, stub.allocate(64, 2), 0)):
        check_like_interface(stub, kernels[1], each, on_interface(each))
        assert stub.launches[-1].device == 2
        beside = functools.partial(kernels[2][1, 32], cupy.empty((3,), "f4"), each)
        is_refused(beside, BufferError, "'y' (position 1)", "kDLCUDA:2, but an earlier argument is on kDLCUDA:0")


def test_managed_and_pinned_memory_is_read_from_any_device(stub, cupy, kernels, package, on_interface):
    there = DeviceTensor((4,), device=2)
    for memory in (package.managed_array(4, np.float32), package.pinned_array(4, np.float32)):
        array = over(cupy, memory.ctypes.data)
        check_like_interface(stub, kernels[1], array, on_interface(array))
        for arguments in ((there, array), (array, there)):
            launch_cached(kernels[2][1, 32], *arguments)
            assert stub.launches[-1].device == 2


def test_pools_of_other_memory(stub, cupy, kernels):
    """Memory of a pool is where the memory is of which it is a part: here managed, which CuPy says is on device 0."""
    pool = cupy.cuda.MemoryPool(lambda size: unowned(cupy, int(driver().call("cuMemAllocManaged", size, 1)), size=size))
    with driver().on(0):
        array = cupy.ndarray((3,), "f4", pool.malloc(512))
    assert type(array.data.mem) is cupy.cuda.memory.PooledMemory
    launch_cached(kernels[2][1, 32], array, DeviceTensor((4,), device=1))
    assert stub.launches[-1].device == 1


def test_only_what_is_not_cupys_is_asked_of_the_driver(stub, cupy, kernels):
    # Before CuPy 14 a pool's memory does not say of what it is a part.
    for array, is_known in ((cupy.empty((3,), "f4"), fields().pooled_type != 0), (over(cupy, stub.allocate(64)), False)):
        launch_cached(kernels[1][1, 32], array)
        with traced(stub) as calls:
            kernels[1][1, 32](array)
        assert ("cuPointerGetAttribute" in calls) is not is_known


def test_memory_that_is_not_cudas_is_refused(stub, cupy, kernels):
    launch_cached(kernels[1][1, 32], cupy.empty((3,), "f4"))
    stub.clear()
    array = over(cupy, np.zeros(9).ctypes.data)
    is_refused(lambda: kernels[1][1, 32](array), BufferError, "'x' (position 0)", "is not in CUDA's memory")
    assert not stub.launches


def test_what_is_not_usual_is_as_by_the_interface(stub, cupy, kernels, on_interface):
    """Elements that are not aligned, strides that are no multiple of the size, bytes in the other order."""
    memory = unowned(cupy, stub.allocate(256), size=256)
    for array in (
        cupy.ndarray((3,), "f4", memory + 2), cupy.ndarray((3,), "f4", memory, strides=(6,)),
        cupy.ndarray((2, 1), "f8", memory, strides=(12, 8)),
    ):  # fmt: skip
        ours, theirs = (
            re.sub(r" a \S+(ndarray|ByInterface)", "", is_refused(functools.partial(kernels[1][1, 32], each), BufferError))
            for each in (array, on_interface(array))
        )
        assert ours == theirs and "'x' (position 0)" in ours
    assert not stub.launches


_UNEXPECTED = """
import cupy_backends.cuda.stream as streams
from cupy.cuda import memory
{change}
kernel, array = fast_args(cuda.jit(lambda x: None)), cupy.empty((3, 4), "f4").T
for _ in range(4):
    kernel[1, 32](array)
said = kernel[1, 32].explain(array)
print(len(stub.launches), said.arguments[0][1].path, *said.notes, kernel.counts().fast, end="")
"""
_NOT_READ = "CuPy's arrays are not read in memory"
_NO_FUNCTION = (f"cuda-interface {_NOT_READ}: cupy_backends.cuda.stream has no C function get_current_stream_ptr "
                "of the signature 'intptr_t (void)'")  # fmt: skip
CHANGES = {  # what is not as expected; the path, what `explain` says
    "no function for the stream": ('streams.__pyx_capi__.pop("get_current_stream_ptr")', _NO_FUNCTION),
    "a function of another signature": (
        'streams.__pyx_capi__["get_current_stream_ptr"] = streams.__pyx_capi__["set_current_stream_ptr"]', _NO_FUNCTION),
    "an address that is nowhere": (
        "memory.MemoryPointer = type('Other', (memory.MemoryPointer,), {'ptr': property(lambda self: 5)})",
        f"cuda-interface {_NOT_READ}: its interface has another data"),
    "a pool that is not known": ("del memory.PooledMemory", "cupy"),
}  # fmt: skip


@needs_numba_cuda
@pytest.mark.parametrize("name", CHANGES)
def test_a_layout_that_is_not_as_expected(stub, name):
    """Then the interface is read, and ``explain`` says why. Without the pool's layout the driver says where its memory is."""
    change, said = CHANGES[name]
    assert run_with_cupy(_UNEXPECTED.replace("{change}", change)) == f"4 {said} 3"


# ---- what kernels compute --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def scaled(package):
    """``out = 2 x + 1`` for arrays of one and two dimensions."""

    def of_two(x, out):
        i, j = package.grid(2)
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = x[i, j] + x[i, j] + 1

    of_one = elementwise(package, "of_one(x, out)", "out[i] = x[i] + x[i] + 1")
    return {1: fast_args(of_one)[8, 32], 2: fast_args(package.jit(of_two))[(8, 8), (16, 16)]}


PARTS = {
    "all": lambda x: x, "transposed": lambda x: x.T, "every second row": lambda x: x[::2, 1:], "backwards": lambda x: x[::-1],
    "a row": lambda x: x[3], "a column": lambda x: x[:, 7], "every third": lambda x: x.reshape(-1)[:200:3],
}  # fmt: skip


@gpu
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != "?"])
def test_results(cupy, scaled, dtype, part):
    """The memory around what a kernel writes is as before."""
    rng = np.random.default_rng(0)
    given, into = (rng.integers(0, 60, (37, 53)).astype(dtype) for _ in range(2))
    x, out = (cupy.asarray(each) for each in (given, into))
    for _ in range(4):
        out.set(into)
        scaled[PARTS[part](x).ndim](PARTS[part](x), PARTS[part](out))
        expected = into.copy()
        PARTS[part](expected)[...] = 2 * PARTS[part](given) + 1
        np.testing.assert_array_equal(out.get(), expected)
    np.testing.assert_array_equal(x.get(), given)


@gpu
def test_results_of_booleans_and_elements(cupy, package):
    kernel = fast_args(elementwise(package, "turned(x, number, out)", "out[i], number[()] = not x[i], 42"))[1, 32]
    given = np.random.default_rng(0).random(20) > 0.5
    x = cupy.asarray(given)
    for _ in range(4):
        number, out = cupy.zeros((), "i8"), cupy.zeros((20,), "?")
        kernel(x, number, out)
        np.testing.assert_array_equal(out.get(), ~given)
        assert int(number.get()) == 42


_CUPYS = """
extern "C" __global__ void late(float *x, float number, long long cycles) {
    for (long long begin = clock64(); clock64() - begin < cycles;) {}
    x[threadIdx.x] = number;
}
extern "C" __global__ void copy(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x]; }
"""
STREAMS = {
    "null": lambda stream: stream.null, "its own": lambda stream: stream(),
    "non-blocking": lambda stream: stream(non_blocking=True), "the thread's default": lambda stream: stream.ptds,
}  # fmt: skip


@gpu
@pytest.mark.parametrize("name", STREAMS)
def test_a_launch_is_between_cupys_own(cupy, scaled, name):
    """It reads what CuPy writes late on its current stream, and CuPy reads there what the launch writes."""
    module = cupy.RawModule(code=_CUPYS)
    late, copy = module.get_function("late"), module.get_function("copy")
    x, out, y = (cupy.zeros((200,), "f4") for _ in range(3))
    scaled[1](x, out)
    cupy.cuda.Device().synchronize()
    with STREAMS[name](cupy.cuda.Stream) as stream:
        for number in range(1, 9):
            late((1,), (200,), (x, np.float32(number), np.int64(5_000_000)))
            scaled[1](x, out)
            copy((1,), (200,), (out, y))
            stream.synchronize()
            np.testing.assert_array_equal(y.get(), np.full(200, 2 * number + 1, "f4"), f"launch {number}")


@gpu
def test_a_graph(cupy, scaled):
    x, out, stream = cupy.zeros((200,), "f4"), cupy.zeros((200,), "f4"), cupy.cuda.Stream(non_blocking=True)
    scaled[1](x, out)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        scaled[1](x, out)
        graph = stream.end_capture()
    for number in range(1, 4):
        x.set(np.full(200, number, "f4"))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), np.full(200, 2 * number + 1, "f4"))


ALLOCATORS = {
    "the pool": lambda cuda: cuda.MemoryPool().malloc, "no pool": lambda cuda: cuda.memory._malloc,
    "managed": lambda cuda: cuda.malloc_managed, "a managed pool": lambda cuda: cuda.MemoryPool(cuda.malloc_managed).malloc,
    "in the stream's order": lambda cuda: cuda.malloc_async, "its pool": lambda cuda: cuda.MemoryAsyncPool().malloc,
}  # fmt: skip


@gpu
@pytest.mark.parametrize("name", ALLOCATORS)
def test_allocators(cupy, record, scaled, on_interface, name):
    given = np.arange(200, dtype="f4")
    with cupy.cuda.using_allocator(ALLOCATORS[name](cupy.cuda)):
        x, out = cupy.asarray(given), cupy.zeros((200,), "f4")
        launch_cached(scaled[1], x, out)
        ours = record.launches[-1]
        np.testing.assert_array_equal(out.get(), 2 * given + 1)
        for _ in range(2):
            scaled[1](on_interface(x), on_interface(out))
        assert (record.launches[-1].packed, record.launches[-1].device) == (ours.packed, ours.device)


@gpu
def test_memory_of_pytorch(cupy, scaled):
    torch = pytest.importorskip("torch")
    x, out = torch.arange(200.0, device="cuda"), torch.zeros(200, device="cuda")
    theirs = cupy.from_dlpack(x), cupy.from_dlpack(out)
    launch_cached(scaled[1], *theirs)
    launch_cached(scaled[1], x, theirs[1])  # both are on the default stream
    assert bool((out == x + x + 1).all())
