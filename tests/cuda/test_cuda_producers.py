"""Tensors without an exchange table, tensors that change between two launches, and producers that report nonsense."""

import gc
import sys

import numpy as np
import pytest
from cuda_producers import CUDA, HOST, ArrayInterface, Exports, ExportsLegacy, Wrapper, both_ways
from cuda_tensors import DeviceTensor
from launches import kernel_of, numbers_of
from made_producers import Ledger

from fastexchange import CudaError
from fastexchange._abi import ffi


def launched(record, kernel, *arguments) -> list[int]:
    """The parameters of one launch."""
    record.clear()
    kernel[2, 32](*arguments)
    (launch,) = record.launches
    return numbers_of(launch)


# ---- device arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["numba.cuda", "numba_cuda_mlir.cuda"])
def test_device_arrays_of_each_package(record, kernels, module):
    package = pytest.importorskip(module)
    value = package.to_device(np.zeros((3, 4), np.float32))
    for each in (value, value[::2], value[:, 1:3], value.T):
        interface = each.__cuda_array_interface__
        strides = interface["strides"] and [stride // 4 for stride in interface["strides"]]
        twin = DeviceTensor(interface["shape"], strides=strides, data=interface["data"][0])
        expected = launched(record, kernels[1], twin)
        for _ in range(30):
            assert launched(record, kernels[1], each) == expected
    del value, each
    gc.collect()
    again = [package.to_device(np.zeros(i + 1, np.int32)) for i in range(20)]
    for i, each in enumerate(again):
        assert i + 1 in launched(record, kernels[1], each), "an array at the address of one that has died"


# ---- __dlpack__ ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Exports, ExportsLegacy])
@pytest.mark.parametrize("device_type", [CUDA, HOST])
def test_exports_are_given_back(stub, kernels, cls, device_type):
    value = cls(Ledger(), device_type=device_type)
    both_ways(lambda: kernels[1][1, 32](value), 20)
    both_ways(lambda: kernels[2][1, 32](3, (value, DeviceTensor((4,)))), 3)
    assert value.told == [1 if device_type == CUDA else None] * 23
    value.ledger.check(23)
    for _ in range(3):
        with pytest.raises(BufferError):
            kernels[2][1, 32](value, DeviceTensor((4,), device_type=1))
        stub.fail("cuLaunchKernel", 1)
        with pytest.raises(CudaError):
            kernels[1][1, 32](value)
        with pytest.raises(BufferError):
            kernels[2][1, 32](value, ArrayInterface(stub, strides=(6,)))
    value.ledger.check(value.ledger.made)
    bound = kernels[1][1, 32].bind(value)
    assert value.ledger.out == 1
    bound()
    del bound
    gc.collect()
    value.ledger.check(value.ledger.made)


def readonly(array):
    array.flags.writeable = False
    return array


WRITABLE = {
    "an export": lambda record: Exports(Ledger()),
    "an interface": ArrayInterface,
    "an interface that Python reads": lambda record: ArrayInterface(record, version=2),
}
NOT_WRITABLE = {
    "a readonly export": lambda record: Exports(Ledger(), array=readonly(np.zeros(4, np.float32))),
    "a legacy export, which cannot say it": lambda record: ExportsLegacy(Ledger()),
    "a readonly interface": lambda record: ArrayInterface(record, readonly=True),
    "a readonly interface that Python reads": lambda record: ArrayInterface(record, readonly=True, version=2),
}


@pytest.mark.parametrize("name", [*WRITABLE, *NOT_WRITABLE])
def test_what_is_readonly(record, package, name):
    kernel, value = kernel_of(package, 1), (WRITABLE | NOT_WRITABLE)[name](record)
    for _ in range(3):
        kernel[1, 32](value)
    ((numba_type,),) = kernel.signatures
    assert numba_type.mutable is (name in WRITABLE)


# ---- wrappers, buffers, tensors of PyTorch ---------------------------------------------------------------------------


def test_wrappers(stub, kernels):
    x = DeviceTensor((3, 4), device=1)
    expected = launched(stub, kernels[1], x)
    for value in (Wrapper(x), Wrapper(Wrapper(x)), Wrapper(Wrapper(Wrapper(x)))):
        for _ in range(20):
            assert launched(stub, kernels[1], value) == expected
            assert stub.launches[0].device == 1
    with pytest.raises(BufferError, match="kDLCPU"):
        kernels[1][1, 32](Wrapper(DeviceTensor((4,), device_type=1)))
    with pytest.raises((TypeError, BufferError)):
        kernels[1][1, 32](Wrapper(3))
    count = sys.getrefcount(x)
    both_ways(lambda: kernels[1][1, 32](Wrapper(x)), 20)
    assert sys.getrefcount(x) == count and x.deleted == 0


# ---- what changes between two launches -------------------------------------------------------------------------------


def test_a_tensor_that_changes(stub, kernels):
    """Each launch has what the tensor is then, or is refused; after both, the fast entry is still right."""
    x = DeviceTensor((4, 4))
    tensor = x._managed.dl_tensor
    both_ways(lambda: kernels[1][2, 32](x))
    original = ffi.new("DLTensor *", tensor)
    expected = launched(stub, kernels[1], x)
    other = ffi.new("int64_t[]", [2, 8])
    steps = ffi.new("int64_t[]", [1, 4])

    def twin(**options):
        return launched(stub, kernels[1], DeviceTensor(**{"shape": (4, 4), "data": x.data, **options}))

    changes = [
        (lambda: setattr(tensor, "shape", other), {"shape": (2, 8)}),
        (lambda: setattr(tensor, "strides", steps), {"strides": (1, 4)}),
        (lambda: setattr(tensor.dtype, "bits", 64), {"dtype": "float64"}),
        (lambda: setattr(tensor.dtype, "code", 0), {"dtype": "int32"}),
        (lambda: setattr(tensor, "ndim", 1), {"shape": (4,)}),
        (lambda: setattr(tensor, "ndim", 0), {"shape": ()}),
        (lambda: setattr(tensor.device, "device_id", 1), {"device": 1}),
        (lambda: setattr(tensor.device, "device_type", 13), {}),
        (lambda: setattr(tensor, "byte_offset", 64), {"data": x.data + 64}),
        (lambda: setattr(tensor, "data", ffi.NULL), None),
        (lambda: setattr(tensor, "byte_offset", 2), None),
        (lambda: setattr(tensor.device, "device_type", 1), None),
        (lambda: setattr(tensor.dtype, "lanes", 2), None),
        (lambda: setattr(tensor, "shape", ffi.NULL), None),
    ]
    for change, options in changes:
        change()
        if options is None:
            for _ in range(2):
                with pytest.raises(BufferError):
                    kernels[1][2, 32](x)
        else:
            wanted = twin(**options)
            device = stub.launches[0].device
            for _ in range(20):
                assert launched(stub, kernels[1], x) == wanted and stub.launches[0].device == device
        x._managed.dl_tensor = original[0]
        for _ in range(20):
            assert launched(stub, kernels[1], x) == expected


def test_types_that_come_and_go(record, kernels):
    """A type at the address of one that has died is looked at anew."""
    for i in range(60):
        if i % 2:
            made = type("Array", (ArrayInterface,), {})(record, shape=(i + 1,))
        else:
            made = type("Export", (Exports,), {})(Ledger(), array=np.zeros(i + 1, np.float32))
        assert i + 1 in launched(record, kernels[1], made)
        del made
        gc.collect()
