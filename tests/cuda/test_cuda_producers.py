"""Device arrays of the packages' own, tensors without an exchange table, and tensors that change between two launches.

The strides of device arrays are what the attribute says, where their ``__cuda_array_interface__`` says None, as it does of
broadcast arrays. numba-cuda's own launch reads the attribute, and is compared byte for byte. numba-cuda-mlir's reads the
interface, and launches its kernels with strides of memory that is not there.
"""

import functools
import gc
import importlib

import numpy as np
import pytest
from comparing import numbers_of, what_is_launched, words_of
from cuda_checks import all_given_back, is_refused
from cuda_producers import CUDA, HOST, ArrayInterface, Exports, ExportsLegacy, Wrapper, both_ways
from cuda_tensors import DeviceTensor
from launches import WARM, Interface, address, device_array, dispatcher_of, kernel_of
from made_producers import Ledger, capsule_name
from stub_processes import PACKAGES, is_installed

from fastexchange import CudaError
from fastexchange._abi import ffi

both_packages = pytest.mark.both_packages


def launched(record, kernel, *arguments) -> list[int]:
    record.clear()
    kernel[2, 32](*arguments)
    (launch,) = record.launches
    return numbers_of(launch)


# ---- device arrays ---------------------------------------------------------------------------------------------------
def broadcast(package, dtype="f4"):
    return package.to_device(np.broadcast_to(np.arange(5).astype(dtype), (4, 5)))


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def says(package, strides):
    return Interface(DeviceTensor((4, 5), "f4", strides, data=address(package)))


MADE = {
    "broadcast": broadcast,
    **{f"broadcast {dtype}": lambda package, dtype=dtype: broadcast(package, dtype) for dtype in ("i1", "?", "c8", "c16")},
    "of one number": lambda package: package.to_device(np.broadcast_to(np.float32(1), (4, 5))),
    "of one row": lambda package: package.to_device(np.broadcast_to(np.ones(5, "f4"), (1, 5))),
    "in the middle": lambda package: package.to_device(np.broadcast_to(np.ones((4, 1, 5), "f4"), (4, 3, 5))),
    "slice of a broadcast": lambda package: broadcast(package)[:, 1:3],
    "item of a broadcast": lambda package: broadcast(package)[1],
    "slice": lambda package: package.device_array((3, 4, 5), "f4")[1:, ::2, 1:3],
    "transposed": lambda package: device_array(package, DeviceTensor((4, 3), "f4", (1, 4), data=address(package))),
    "F": lambda package: package.to_device(np.asfortranarray(np.ones((3, 4), "f4"))),
    "reversed": lambda package: package.device_array((4, 5), "f4")[::-1],
    "reversed, 1": lambda package: package.device_array(5, "f4")[::-1],
    "as_cuda_array": lambda package: package.as_cuda_array(says(package, (0, 1))),
    "as_cuda_array, reversed": lambda package: package.as_cuda_array(says(package, (5, -1))),
    "as_cuda_array of a broadcast": lambda package: package.as_cuda_array(broadcast(package)),
    "managed": lambda package: package.managed_array((3, 4), "f4"),
    "managed, F": lambda package: package.managed_array((3, 4), "f4", order="F"),
    "mapped": lambda package: package.mapped_array((3, 4), "f4"),
    "0-d": lambda package: package.to_device(np.array(3.0, "f4")),
    "no rows": lambda package: package.device_array((0, 4), "f4"),
    "no columns": lambda package: package.device_array((4, 0), "f4"),
    "broadcast, no rows": lambda package: package.to_device(np.broadcast_to(np.ones(4, "f4"), (0, 4))),
    "view": lambda package: package.device_array((3, 4), "f4").view("i2"),
    "on a stream": lambda package: broadcast(package).bind(package.external_stream(0)),
    "bfloat16": lambda package: package.device_array((3, 4), bfloat16()),
    "bfloat16, on a stream": lambda package: package.device_array((3, 4), bfloat16()).bind(package.external_stream(0)),
}


@both_packages
@pytest.mark.parametrize("name", MADE)
def test_strides_are_those_of_the_array(stub, package, name):
    array, kernel = MADE[name](package), kernel_of(package, 1)
    for launch in range(WARM + 1):
        kernel[1, 32](array)
        assert numbers_of(stub.launches[-1]) == words_of(package, array), launch
    ours = what_is_launched(stub.launches[-1])
    if type(array).__name__ == "DeviceNDArray" and not array.stream:  # the package launches kernels with managed and mapped ones
        kernel[1, 32].bind(array)()
        assert what_is_launched(stub.launches[-1]) == ours
    if package.__name__ == "numba.cuda":
        dispatcher_of(package, 1)[1, 32](array)
        assert what_is_launched(stub.launches[-1]) == ours
    array_type = kernel.signatures[0][0]
    assert array_type.ndim == array.ndim
    if 0 in array.strides and array.size and array.size > max(array.shape):
        assert array_type.layout == "A"


@both_packages
@pytest.mark.parametrize("name", ["broadcast", "in the middle", "of one number", "reversed", "0-d", "no rows"])
def test_those_that_are_read_in_each_launch(stub, package, name):
    """Of a class under the packages', whose interface native code asks; and those with a stream of their own."""
    made, stream = MADE[name](package), package.stream()
    cls = type("Array", (type(made),), {})
    array = cls(made.shape, made.strides, made.dtype, gpu_data=made.gpu_data)
    assert array.strides == made.strides
    for value in (array, array.bind(stream), made.bind(stream)):
        kernel = kernel_of(package, 1)
        for _ in range(WARM):
            kernel[1, 32](value)
            assert numbers_of(stub.launches[-1]) == words_of(package, made)
        assert kernel.counts().fast == (WARM - 1 if value is array and made.size else 0) or type(value) is cls
        assert stub.launches[-1].stream == (int(stream.handle) if value is not array else 0)


@both_packages
def test_in_a_tuple_and_of_the_other_package(stub, package):
    array, kernel = broadcast(package), kernel_of(package, 2)
    expected = [*words_of(package, array), 2, *words_of(package, array)]
    for _ in range(WARM):
        kernel[1, 32]((array, 2), array)
        assert numbers_of(stub.launches[-1]) == expected
    (other,) = (name for name in PACKAGES if name != package.__name__)
    if not is_installed(other):
        pytest.skip(f"{other} is not installed")
    array, kernel = broadcast(importlib.import_module(other)), kernel_of(package, 1)
    for _ in range(WARM):
        kernel[1, 32](array)
        assert numbers_of(stub.launches[-1]) == words_of(package, array)


@both_packages
@pytest.mark.parametrize("make", ["managed_array", "mapped_array"])
def test_a_view_that_has_lost_its_memory_is_refused(stub, package, make):
    """NumPy makes views of managed and mapped arrays, which do not know of the memory any more; its package may crash on them."""
    array = getattr(package, make)((3, 4), "f4")
    for view in (array[:, 1:3], np.broadcast_to(array, (2, 3, 4), subok=True)):
        for _ in range(3):
            is_refused(lambda: kernel_of(package, 1)[1, 32](view), BufferError, "argument 'a0' (position 0)", "view")  # noqa: B023


def test_what_comes_and_goes(record, package, kernels):
    """A type, or a device array, at the address of one that has died is looked at anew."""
    for i in range(60):
        made = [
            lambda: type("Array", (ArrayInterface,), {})(record, shape=(i + 1,)),  # noqa: B023
            lambda: type("Export", (Exports,), {})(Ledger(), array=np.zeros(i + 1, np.float32)),  # noqa: B023
            lambda: package.to_device(np.zeros(i + 1, np.int32)),  # noqa: B023
        ][i % 3]()
        assert i + 1 in launched(record, kernels[1], made)
        del made
        gc.collect()


# ---- __dlpack__, wrappers, and what is readonly ------------------------------------------------------------------------
@pytest.mark.parametrize("cls", [Exports, ExportsLegacy])
@pytest.mark.parametrize("device_type", [CUDA, HOST])
def test_exports_are_given_back(stub, kernels, cls, device_type):
    value = cls(Ledger(), device_type=device_type)
    both_ways(lambda: kernels[1][1, 32](value))
    both_ways(lambda: kernels[2][1, 32](3, (value, DeviceTensor((4,)))))
    assert value.told == [1 if device_type == CUDA else None] * 8
    value.ledger.check(8)
    assert capsule_name(value.capsule).startswith(b"used_dltensor")
    for _ in range(3):
        is_refused(lambda: kernels[2][1, 32](value, DeviceTensor((4,), device_type=1)), BufferError)
        is_refused(lambda: kernels[2][1, 32](value, ArrayInterface(stub, strides=(6,))), BufferError)
        stub.fail("cuLaunchKernel", 1)
        is_refused(lambda: kernels[1][1, 32](value), CudaError)
    value.ledger.check(value.ledger.made)
    bound = kernels[1][1, 32].bind(value)
    assert value.ledger.out == 0
    bound()
    del bound
    gc.collect()
    value.ledger.check(value.ledger.made)


def test_wrappers(stub, kernels):
    x = DeviceTensor((3, 4), device=1)
    expected = launched(stub, kernels[1], x)
    for value in (Wrapper(x), Wrapper(Wrapper(Wrapper(x)))):
        with all_given_back(x):
            assert [launched(stub, kernels[1], value) for _ in range(4)] == [expected] * 4 and stub.launches[0].device == 1
    with pytest.raises((TypeError, BufferError)):
        kernels[1][1, 32](Wrapper(3))


def test_what_is_readonly(record, package):
    """As an export or an interface that Python reads says; a legacy export cannot say it."""
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    for value, is_mutable in (
        (Exports(Ledger()), True), (Exports(Ledger(), array=array), False), (ExportsLegacy(Ledger()), False),
        (ArrayInterface(record, version=2), True), (ArrayInterface(record, version=2, readonly=True), False),
    ):  # fmt: skip
        kernel = kernel_of(package, 1)
        for _ in range(3):
            kernel[1, 32](value)
        ((numba_type,),) = kernel.signatures
        assert numba_type.mutable is is_mutable


# ---- what changes between two launches -------------------------------------------------------------------------------
EXTENTS, STEPS = ffi.new("int64_t[]", [2, 8]), ffi.new("int64_t[]", [1, 4])
# where, what stands there, and the tensor that it is then; None: it is refused
CHANGES = [
    ("shape", EXTENTS, {"shape": (2, 8)}), ("strides", STEPS, {"strides": (1, 4)}), ("dtype.bits", 64, {"dtype": "float64"}),
    ("dtype.code", 0, {"dtype": "int32"}), ("ndim", 1, {"shape": (4,)}), ("ndim", 0, {"shape": ()}),
    ("device.device_id", 1, {"device": 1}), ("device.device_type", 13, {}), ("byte_offset", 64, {"offset": 64}),
    ("data", ffi.NULL, None), ("byte_offset", 2, None), ("device.device_type", 1, None), ("dtype.lanes", 2, None),
    ("shape", ffi.NULL, None),
]  # fmt: skip


def test_a_tensor_that_changes(stub, kernels):
    x = DeviceTensor((4, 4))
    both_ways(lambda: kernels[1][2, 32](x))
    original, expected = ffi.new("DLTensor *", x._managed.dl_tensor), launched(stub, kernels[1], x)
    for where, value, options in CHANGES:
        *parts, field = where.split(".")
        setattr(functools.reduce(getattr, parts, x._managed.dl_tensor), field, value)
        if options is None:
            for _ in range(2):
                is_refused(lambda: kernels[1][2, 32](x), BufferError)
        else:
            twin = {"shape": (4, 4), "data": x.data + options.get("offset", 0), **options}
            wanted = launched(stub, kernels[1], DeviceTensor(**{k: v for k, v in twin.items() if k != "offset"}))
            device = stub.launches[0].device
            for _ in range(4):
                assert launched(stub, kernels[1], x) == wanted and stub.launches[0].device == device
        x._managed.dl_tensor = original[0]
        for _ in range(4):
            assert launched(stub, kernels[1], x) == expected
