"""Our launch and the package's own, byte for byte, as the driver stub has recorded them: configuration and parameters.

On a real driver, which does not show what a package launches, kernels are launched that read all of their arguments, and
what they have read is compared.

Each case is launched for the first time, by the general native way and by a fast entry; the package launches a kernel of
its own for the same arguments: device arrays, or objects with ``__cuda_array_interface__``, at the same addresses.

Traps of the packages' own launches, which are not ours: numba-cuda-mlir's takes a kernel compiled for another scalar of
the same Python type, so a new dispatcher makes each of its launches here; both type an array with explicit strides in its
``__cuda_array_interface__`` as "A" even if it is contiguous, so Numba types are compared with those of device arrays. For
what else is wrong there, see :func:`is_right_there`.
"""

import collections

import cuda_stub
import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from launches import (
    ExportedTensor,
    Interface,
    address,
    device_array,
    function_of,
    has_fast_entry,
    kernel_of,
    launch_fast,
    launches_of,
    needs_clusters,
    numbers_of,
    on_their_side,
)

from fastexchange import fast_args

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

pytestmark = pytest.mark.both_packages

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
if ml_dtypes is not None:
    DTYPES.append(ml_dtypes.bfloat16)

Pair = collections.namedtuple("Pair", "first second")


def check(record, package, arguments, configuration=(3, 64), *, is_fast=True, array=None, types_of=device_array, **options):
    """Compare our launch and the package's own.

    `array` makes its arrays, `types_of` those with which types are compared; None: they are not.
    """
    launches = launches_of(record, package, arguments, **options)
    arguments = launches.arguments
    dispatcher = launches.dispatcher()
    dispatcher[configuration](*[on_their_side(package, value, array or (lambda t: exact(package, t))) for value in arguments])
    theirs = launches.seen()
    kernel = fast_args(launches.dispatcher())
    launcher = kernel[configuration]
    launcher(*arguments)
    assert kernel.counts() == (0, 1, 1)
    assert launches.seen() == theirs, "the first launch"
    launcher(*arguments)
    assert kernel.counts() == (1, 1, 1)
    assert launches.seen() == theirs, "the general way"
    if is_fast:
        launch_fast(launcher, *arguments)
        assert launches.seen() == theirs, "the fast entry"
    else:
        for _ in range(40):
            launcher(*arguments)
        assert not has_fast_entry(kernel) and kernel.counts() == (41, 1, 1)
        assert launches.seen() == theirs, "the general way, again"
    if types_of is not None:
        again = launches.dispatcher()
        again.compile(tuple(map(typeof(package), (on_their_side(package, v, lambda t: types_of(package, t)) for v in arguments))))
        assert list(map(str, *kernel.dispatcher.overloads)) == list(map(str, *again.overloads))
        assert list(kernel.dispatcher.overloads) == list(again.overloads)


def exact(package, tensor):
    """An array with the very address, shape and strides of `tensor`.

    Of booleans with strides neither package can type the ``__cuda_array_interface__``, and bfloat16 has no name there.
    """
    return Interface(tensor) if tensor.dtype.kind not in "bV" or 0 in tensor.shape else device_array(package, tensor)


def is_right_there(package, tensor) -> bool:
    """Whether the package's own launch passes an array as the kernel reads it, or passes it at all.

    numba-cuda takes strides of 0 for some of an array without elements that names none. numba-cuda-mlir doubles the strides
    that complex numbers and bfloat16 have in elements: its kernels multiply them by the size of all of an element. Its device
    arrays forget strides that mean nothing.
    """
    if package.__name__ == "numba.cuda":
        return 0 not in tensor.shape or (len(tensor.shape) == 1 and tensor.dtype.kind != "V")
    if tensor.dtype.kind == "V" and 0 in tensor.shape:
        return False
    return tensor.dtype.kind not in "bcV" or tensor._strides is None


def words(package, tensor) -> list[int]:
    """The parameters of an array."""
    shape, size = tensor.shape, tensor.dtype.itemsize
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    if tensor._strides:
        strides = list(tensor._strides)[: len(shape)]
    if package.__name__ == "numba.cuda":
        return [0, 0, int(np.prod(shape)), size, tensor.data, *shape, *[stride * size for stride in strides]]
    return [tensor.data, tensor.data, 0, *shape, *strides]


def typeof(package):
    """The type that a package's own launch infers for an argument."""
    if package.__name__ == "numba.cuda":
        from numba.cuda.typing.typeof import Purpose, typeof

        return lambda value: typeof(value, Purpose.argument)
    from numba_cuda_mlir.descriptor import typeof

    return typeof


# ---- arrays ----------------------------------------------------------------------------------------------------------

# shape, strides in elements
LAYOUTS = {
    "0-d": ((), None), "C": ((5,), None), "strided": ((5,), (3,)), "reversed": ((5,), (-1,)), "broadcast": ((5,), (0,)),
    "one": ((1,), None), "none": ((0,), None), "C-2": ((3, 4), None), "C-2 with strides": ((3, 4), (4, 1)),
    "F-2": ((3, 4), (1, 3)), "strided-2": ((3, 4), (10, 2)), "reversed-2": ((3, 4), (-4, -1)), "one row": ((1, 4), (4, 1)),
    "one column of F": ((4, 1), (1, 4)), "no rows": ((0, 4), None), "C-3": ((2, 3, 4), None), "F-3": ((2, 3, 4), (1, 2, 6)),
    "moved-3": ((2, 3, 4), (4, 8, 1)), "ones-3": ((1, 1, 1), None), "C-4": ((2, 3, 2, 2), None),
    "F-4": ((2, 3, 2, 2), (1, 2, 6, 12)), "strided-4": ((2, 3, 2, 2), (100, 20, -4, 2)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_arrays(record, package, dtype):
    """All layouts of one element type in one launch; those that the package itself passes as it should also beside its own."""
    arrays = [DeviceTensor(shape, dtype, strides, data=address(package)) for shape, strides in LAYOUTS.values()]
    right = [array for array in arrays if is_right_there(package, array)]
    assert len(right) >= 7
    check(record, package, right)
    launcher = kernel_of(package, len(arrays))[1, 32]
    expected = [word for array in arrays for word in words(package, array)]
    for launch in (launcher, launcher, lambda *arguments: launch_fast(launcher, *arguments)):
        launch(*arrays)
        assert numbers_of(record.launches[-1]) == expected


@pytest.mark.parametrize("readonly", [False, True])
def test_readonly_arrays(record, package, readonly):
    """What a table only exports, in flags. Device arrays cannot be readonly: types are those of objects without strides."""
    arrays = [ExportedTensor(shape, "float64", data=address(package), readonly=readonly) for shape in [(), (3,), (2, 3), (0,)]]
    check(record, package, arrays, array=Interface, types_of=lambda package, tensor: Interface(tensor), is_fast=False)
    kernel = kernel_of(package, 1)
    kernel[1, 1](arrays[1])
    ((numba_type,),) = kernel.signatures
    assert numba_type.mutable is not readonly
    assert all(array.exported == array.deleted > 40 for array in arrays)


# ---- scalars ---------------------------------------------------------------------------------------------------------


SCALARS = {
    "int": [0, 1, -1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)],
    "float": [0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e300],
    "bool": [True, False, np.True_, np.False_],
    "signed": [np.dtype(name).type(value) for name in ("i1", "i2", "i4", "i8") for value in (-1, 5, np.iinfo(name).min)],
    "unsigned": [np.dtype(name).type(value) for name in ("u1", "u2", "u4", "u8") for value in (5, np.iinfo(name).max)],
    "floating": [*[np.dtype(name).type(value) for name in ("f2", "f4", "f8") for value in (-1.5, "inf", "-0.0")],
                 np.float32("nan"), np.float64("nan")],
    "complex": [1 + 2j, complex(-0.0, float("nan")), complex(float("inf"), -1), np.complex64(1 - 2j), np.complex128(3 - 4j)],
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(record, package, name):
    is_fast = name != "complex"
    check(record, package, SCALARS[name], is_fast=is_fast)
    check(record, package, SCALARS[name][-1:], is_fast=is_fast)


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_an_int_beyond_int64(record, package, value):
    """uint64, as numba-cuda has it; numba-cuda-mlir's own launch refuses it with OverflowError."""
    if package.__name__ == "numba.cuda":
        check(record, package, [value], is_fast=False)
    kernel = kernel_of(package, 1)
    for _ in range(40):
        kernel[1, 1](value)
        assert record.launches[-1].parameters == (value.to_bytes(8, "little"),)
    ((numba_type,),) = kernel.signatures
    assert str(numba_type) == "uint64"


def test_a_float16_that_is_no_number_keeps_its_bits(record, package):
    """numba-cuda-mlir's own launch makes another one of it."""
    kernel = kernel_of(package, 1)
    for bits in (0x7E00, 0x7E01, 0xFE55):
        kernel[1, 1](np.uint16(bits).view(np.float16))
        assert record.launches[-1].parameters == (bits.to_bytes(2, "little"),)


def test_scalars_of_all_sizes_beside_each_other(record, package):
    """What is small lies close, what is large is aligned."""
    sizes = [np.int8(1), 2.0, True, np.int16(3), np.float32(4), np.uint8(5), 6, np.bool_(1), np.float16(7), np.uint64(8)]
    check(record, package, sizes)
    check(record, package, [np.int8(1), 2 + 3j, np.int8(4), np.complex64(5 + 6j), np.int16(7)], is_fast=False)


# ---- tuples ----------------------------------------------------------------------------------------------------------


TUPLES = {
    "numbers": lambda x, y: ((1, 2.5),),
    "alike": lambda x, y: ((1, 2, 3),),
    "small": lambda x, y: ((np.int8(1), np.int16(2), True), np.int8(3)),
    "nested": lambda x, y: (((1, 2.0), (np.float32(3), (4,))), 5),
    "named": lambda x, y: (Pair(1, 2.5), Pair(Pair(True, 2), (3,))),
    "empty": lambda x, y: ((), 1, ((),)),
    "tensors": lambda x, y: ((x, y), 1),
    "tensors alike": lambda x, y: ((y, y, y),),
    "named tensors": lambda x, y: (Pair(x, y), y, Pair((x, 2), 3.0)),
    "complex": lambda x, y: ((1j, 2), Pair(np.complex64(1), x)),
}


@pytest.mark.parametrize("name", TUPLES)
def test_tuples(record, package, name):
    x = DeviceTensor((3, 4), "float32", (8, 1), data=address(package))
    y = DeviceTensor((5,), "int64", data=address(package) + 256)
    check(record, package, TUPLES[name](x, y), is_fast=name != "complex")


# ---- many ------------------------------------------------------------------------------------------------------------


MANY = {
    "none": lambda x, y: [],
    "32 of all kinds": lambda x, y: [x, 1, y, 2.5, True, np.int16(3), (x, 4), np.float32(5)] * 4,
    "26 tensors": lambda x, y: [DeviceTensor((4,), "float32", data=x.data + 64 * i) for i in range(26)],
    "256 scalars": lambda x, y: [[7, 1.5, True, np.int16(-2)][i % 4] for i in range(256)],
}


@pytest.mark.parametrize("name", MANY)
def test_many_arguments(record, package, name):
    x = DeviceTensor((3, 4), "float32", data=address(package))
    y = DeviceTensor((2, 2, 2), "float64", (1, 2, 4), data=address(package) + 1024)
    check(record, package, MANY[name](x, y))


@pytest.mark.parametrize("count", [78, 100, 220])
def test_more_than_4_kib_of_parameters(stub, package, count):
    """And, at 220 vectors, more parameters than a launch has room for on its stack."""
    arrays = [DeviceTensor((4,), "float32", data=address(package) + 64 * (i % 1000)) for i in range(count)]
    kernel = kernel_of(package, count)
    expected = [word for array in arrays for word in words(package, array)]
    for _ in range(40):
        kernel[1, 32](*arrays)
    assert all(numbers_of(launch) == expected for launch in stub.launches)
    assert kernel.counts() == (39, 1, 1) and len(stub.launches) == 40


# ---- configurations --------------------------------------------------------------------------------------------------

CONFIGURATIONS = [
    (7, 32), ((7,), (32,)), ((7, 5), (32, 2)), ((7, 5, 3), (8, 4, 2)), (2**31 - 1, 1024), ((1, 65535, 65535), (1, 1, 64)),
    (1, 32, 0, 48 * 1024),
]  # fmt: skip


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_configurations(record, package, configuration):
    if np.prod(configuration[0]) > 2**30 and not isinstance(record, cuda_stub.Stub):
        pytest.skip("so many blocks take a GPU minutes")
    check(record, package, [1, DeviceTensor((3,), data=address(package))], configuration, types_of=None)
    assert record.launches[-1].shared == (configuration[3] if len(configuration) > 3 else 0)


def test_numbers_of_other_types_and_lists(record, package):
    """The packages themselves want ints and tuples."""
    kernel = kernel_of(package, 0)
    kernel[[np.int32(7), 5], [np.uint8(32), True], None, np.int64(16)]()
    launch = record.launches[-1]
    assert (launch.grid, launch.block, launch.shared) == ((7, 5, 1), (32, 1, 1), 16)


def test_a_stream(record, package):
    stream = package.stream()
    handle = int(stream.handle)
    check(record, package, [DeviceTensor((3,), data=address(package))], (1, 32, stream), types_of=None)
    assert record.launches[-1].stream == handle != 0
    x = DeviceTensor((3,), data=address(package))
    launches = launches_of(record, package, [x])
    dispatcher, kernel = launches.dispatcher(), fast_args(launches.dispatcher())
    dispatcher[1, 32, stream](*[Interface(tensor) for tensor in launches.arguments])
    theirs = launches.seen()
    DeviceTensor.streams[0] = handle
    launch_fast(kernel[1, 32], *launches.arguments)
    assert launches.seen() == theirs and record.launches[-1].stream == handle


def test_cooperative_launches(record, package):
    body = "g = cg.this_grid(); g.sync()"
    function = function_of(1, body)
    function.__globals__["cg"] = package.cg
    check(record, package, [1.0], (2, 32), body=body)
    assert record.launches[-1].cooperative


def test_clusters(record, package):
    if package.__name__ == "numba.cuda":
        pytest.skip("numba-cuda launches no clusters")
    needs_clusters(package)
    check(record, package, [1.0], ((8, 2, 1), 32, 0, 0, (2, 2, 1)), types_of=None)
    launch = record.launches[-1]
    assert launch.cluster == (2, 2, 1) and launch.api == "cuLaunchKernelEx" and not launch.cooperative
    check(record, package, [1.0], (8, 32, 0, 0, 4), types_of=None)
