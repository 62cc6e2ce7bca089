"""The packages' own arrays: their strides are what the attribute says, where their ``__cuda_array_interface__`` says None.

It says None of broadcast arrays. numba-cuda's own launch reads the attribute, and is compared byte for byte.
numba-cuda-mlir's reads the interface, and launches its kernels with strides of memory that is not there.
"""

import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from launches import WARM, Interface, address, dispatcher_of, is_refused, kernel_of, numbers_of, what_is_launched

pytestmark = pytest.mark.both_packages


def broadcast(package, dtype="f4"):
    return package.to_device(np.broadcast_to(np.arange(5).astype(dtype), (4, 5)))


def bfloat16():
    return pytest.importorskip("ml_dtypes").bfloat16


def says(package, strides):
    """An array with ``__cuda_array_interface__`` and nothing else; strides in elements."""
    return Interface(DeviceTensor((4, 5), "f4", strides, data=address(package)))


def own(array, shape, strides):
    """An array with these strides, in bytes, of the memory of another."""
    return type(array)(shape, strides, array.dtype, gpu_data=array.gpu_data)


MADE = {
    "broadcast": broadcast,
    "broadcast int8": lambda package: broadcast(package, "i1"),
    "broadcast bool": lambda package: broadcast(package, "?"),
    "broadcast complex64": lambda package: broadcast(package, "c8"),
    "broadcast complex128": lambda package: broadcast(package, "c16"),
    "of one number": lambda package: package.to_device(np.broadcast_to(np.float32(1), (4, 5))),
    "of one row": lambda package: package.to_device(np.broadcast_to(np.ones(5, "f4"), (1, 5))),
    "in the middle": lambda package: package.to_device(np.broadcast_to(np.ones((4, 1, 5), "f4"), (4, 3, 5))),
    "slice of a broadcast": lambda package: broadcast(package)[:, 1:3],
    "item of a broadcast": lambda package: broadcast(package)[1],
    "slice": lambda package: package.device_array((3, 4, 5), "f4")[1:, ::2, 1:3],
    "transposed": lambda package: own(package.device_array((3, 4), "f4"), (4, 3), (4, 16)),
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


def expected(package, array) -> list[int]:
    """The parameters of an array, whose attributes say it."""
    data, size = array.__cuda_array_interface__["data"][0], array.dtype.itemsize
    if package.__name__ == "numba.cuda":
        return [0, 0, array.size, size, data, *array.shape, *array.strides]
    return [data, data, 0, *array.shape, *[stride // size for stride in array.strides]]


@pytest.mark.parametrize("name", MADE)
def test_strides_are_those_of_the_array(stub, package, name):
    array, kernel = MADE[name](package), kernel_of(package, 1)
    for launch in range(WARM + 1):
        kernel[1, 32](array)
        assert numbers_of(stub.launches[-1]) == expected(package, array), launch
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


READ_ANEW = ["broadcast", "slice of a broadcast", "in the middle", "of one number", "reversed", "0-d", "no rows"]


@pytest.mark.parametrize("name", READ_ANEW)
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
            assert numbers_of(stub.launches[-1]) == expected(package, made)
        assert kernel.counts().fast == (WARM - 1 if value is array and made.size else 0) or type(value) is cls
        assert stub.launches[-1].stream == (int(stream.handle) if value is not array else 0)


def test_in_a_tuple_and_beside_others(stub, package):
    array, kernel = broadcast(package), kernel_of(package, 2)
    for _ in range(WARM):
        kernel[1, 32]((array, 2), array)
        half = expected(package, array)
        assert numbers_of(stub.launches[-1]) == [*half, 2, *half]


def test_of_the_other_package(stub, package):
    """A device array of one package for a kernel of the other."""
    pytest.importorskip("numba_cuda_mlir")
    pytest.importorskip("numba_cuda")
    from numba import cuda
    from numba_cuda_mlir import cuda as other

    array = broadcast(other if package is cuda else cuda)
    kernel = kernel_of(package, 1)
    for _ in range(WARM):
        kernel[1, 32](array)
        assert numbers_of(stub.launches[-1]) == expected(package, array)


@pytest.mark.parametrize("make", ["managed_array", "mapped_array"])
def test_a_view_that_has_lost_its_memory_is_refused(stub, package, make):
    """NumPy makes views of managed and mapped arrays, which do not know of the memory any more; its package may crash on them."""
    array = getattr(package, make)((3, 4), "f4")
    for view in (array[:, 1:3], np.broadcast_to(array, (2, 3, 4), subok=True)):
        for _ in range(3):
            is_refused(lambda: kernel_of(package, 1)[1, 32](view), BufferError, "argument 'a0' (position 0)", "view")  # noqa: B023
    kernel_of(package, 1)[1, 32](array)
    assert numbers_of(stub.launches[-1]) == expected(package, array)
