"""Our launch and the package's own, byte for byte, as the driver stub has recorded them: configuration and parameters.

On a real driver, which does not show what a package launches, kernels are launched that read all of their arguments, and
what they have read is compared.

Each case is launched for the first time and by a cache entry. What the packages' own launches get wrong: :func:`is_right_there`;
numba-cuda-mlir's takes a kernel compiled for another scalar of the same Python type, so a new dispatcher makes each launch; both
type an array with explicit strides as "A" even if it is contiguous, so Numba types are compared with those of device arrays.
"""

import collections
import contextlib
import functools

import cuda_stub
import numpy as np
import pytest
from comparing import launches_of, numbers_of, on_their_side, words_of
from cuda_checks import is_refused, launched
from cuda_tensors import DeviceTensor
from launches import ExportedTensor, Interface, address, device_array, function_of, kernel_of, launch_cached

from fastexchange import CudaError, fast_args
from fastexchange._abi import ffi

pytestmark = pytest.mark.both_packages
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
with contextlib.suppress(ImportError):
    import ml_dtypes

    DTYPES.append(ml_dtypes.bfloat16)

Pair = collections.namedtuple("Pair", "first second")


def check(record, package, arguments, configuration=(3, 64), *, array=None, types_of=device_array, **options):
    """Compare our launch and the package's own: `array` makes its arrays, `types_of` those whose types ours have to have."""
    arguments, dispatcher, seen = launches_of(record, package, arguments, **options)
    array = array or (lambda tensor: exact(package, tensor))
    dispatcher()[configuration](*[on_their_side(package, value, array) for value in arguments])
    theirs = seen()
    kernel = fast_args(dispatcher())
    launcher = kernel[configuration]
    launcher(*arguments)
    assert kernel.counts() == (0, 1, 1) and seen() == theirs, "the first launch"
    launch_cached(launcher, *arguments)
    assert seen() == theirs, "the cached launch"
    typed = [typeof(package, on_their_side(package, value, lambda tensor: types_of(package, tensor))) for value in arguments]
    assert list(kernel.dispatcher.overloads) == [tuple(typed)] and [*map(str, kernel.signatures[0])] == [*map(str, typed)]


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
    return tensor.dtype.kind not in "bcV" or not tensor.has_strides


def typeof(package, value):
    """The type that a package's own launch infers for an argument."""
    if package.__name__ == "numba.cuda":
        from numba.cuda.typing.typeof import Purpose, typeof

        return typeof(value, Purpose.argument)
    from numba_cuda_mlir.descriptor import typeof

    return typeof(value)


# ---- arrays ----------------------------------------------------------------------------------------------------------
# shape, strides in elements
LAYOUTS = {
    "0-d": ((), None), "C": ((5,), None), "strided": ((5,), (3,)), "reversed": ((5,), (-1,)), "broadcast": ((5,), (0,)),
    "one": ((1,), None), "none": ((0,), None), "C-2": ((3, 4), None), "C-2 with strides": ((3, 4), (4, 1)),
    "F-2": ((3, 4), (1, 3)), "strided-2": ((3, 4), (10, 2)), "reversed-2": ((3, 4), (-4, -1)), "no rows": ((0, 4), None),
    "one row": ((1, 4), (4, 1)), "one column of F": ((4, 1), (1, 4)), "C-3": ((2, 3, 4), None),
    "F-3": ((2, 3, 4), (1, 2, 6)), "moved-3": ((2, 3, 4), (4, 8, 1)), "ones-3": ((1, 1, 1), None),
    "C-4": ((2, 3, 2, 2), None), "F-4": ((2, 3, 2, 2), (1, 2, 6, 12)), "strided-4": ((2, 3, 2, 2), (100, 20, -4, 2)),
}  # fmt: skip
ARRAYS = {
    "every layout": [("f8", layout) for layout in LAYOUTS],
    "every dtype": [(dtype, layout) for dtype in DTYPES for layout in ("0-d", "C", "reversed-2", "none")],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(record, package, name):
    """All in one launch; those that the package itself passes as it should also beside its own."""
    at = address(package)
    arrays = [DeviceTensor(LAYOUTS[layout][0], dtype, LAYOUTS[layout][1], data=at) for dtype, layout in ARRAYS[name]]
    check(record, package, [array for array in arrays if is_right_there(package, array)])
    launcher = kernel_of(package, len(arrays))[1, 32]
    expected = [word for array in arrays for word in words_of(package, array)]
    for launch in (launcher, launcher, lambda *arguments: launch_cached(launcher, *arguments)):
        launch(*arrays)
        assert numbers_of(record.launches[-1]) == expected


def test_readonly_arrays(record, package):
    """What a table only exports, in flags. Device arrays cannot be readonly: types are those of objects without strides."""
    arrays = [
        ExportedTensor(shape, "float64", data=address(package), readonly=readonly)
        for readonly in (False, True) for shape in [(), (3,), (2, 3), (0,)]
    ]  # fmt: skip
    check(record, package, arrays, array=Interface, types_of=lambda package, tensor: Interface(tensor))
    kernel = kernel_of(package, 8)
    kernel[1, 1](*arrays)
    assert [each.mutable for each in kernel.signatures[0]] == [True] * 4 + [False] * 4
    assert all(array.exported == array.deleted > 2 for array in arrays)


# ---- numbers, tuples, and many -----------------------------------------------------------------------------------------
def numbers(dtypes: str, *values):
    return [np.dtype(name).type(value) for name in dtypes.split() for value in values]


SCALARS = {
    "ints": [0, 1, -1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)],
    "ints beyond int64": [2**63, 2**64 - 1],
    "floats": [0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e300],
    "NumPy's": [True, False, np.True_, np.False_, *numbers("i1 i2 i4 i8", -1, 5, -128), *numbers("u1 u2 u4 u8", 5, 255),
                np.uint64(2**64 - 1), *numbers("f2 f4 f8", -1.5, "inf", "-0.0"), np.float32("nan"), np.float64("nan")],
    "small ones close to each other, large ones aligned": [
        np.int8(1), 2.0, True, np.int16(3), np.float32(4), np.uint8(5), 6, np.bool_(1), np.float16(7), np.uint64(8)],
    "complex": [1 + 2j, complex(-0.0, float("nan")), complex(float("inf"), -1), np.complex64(1 - 2j), np.complex128(3 - 4j),
                np.int8(1), 2 + 3j, np.int8(4), np.complex64(5 + 6j), np.int16(7)],
}  # fmt: skip
ARGUMENTS = {
    **{name: lambda x, y, values=values: values for name, values in SCALARS.items()},
    "tuples of numbers": lambda x, y: [
        (1, 2.5), (1, 2, 3), (np.int8(1), np.int16(2), True), np.int8(3), ((1, 2.0), (np.float32(3), (4,))), 5,
        Pair(1, 2.5), Pair(Pair(True, 2), (3,)), (), 1, ((),)],
    "tuples of tensors": lambda x, y: [(x, y), 1, (y, y, y), Pair(x, y), y, Pair((x, 2), 3.0)],
    "tuples of complex numbers": lambda x, y: [(1j, 2), Pair(np.complex64(1), x)],
    "none": lambda x, y: [],
    "32 of all kinds": lambda x, y: [x, 1, y, 2.5, True, np.int16(3), (x, 4), np.float32(5)] * 4,
    "220 tensors, more than 4 KiB, for which a launch has no room on its stack": lambda x, y: [
        DeviceTensor((4,), "float32", data=x.data + 64 * i) for i in range(220)],
    "256 numbers": lambda x, y: [[7, 1.5, True, np.int16(-2)][i % 4] for i in range(256)],
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(record, package, name):
    x = DeviceTensor((3, 4), "float32", (8, 1), data=address(package))
    y = DeviceTensor((2, 2, 2), "float64", (1, 2, 4), data=address(package) + 1024)
    if name == "ints beyond int64" and package.__name__ != "numba.cuda":
        pytest.skip("the package's own launch refuses them: test_cuda_mlir_kernels.py")
    check(record, package, ARGUMENTS[name](x, y))


def test_a_float16_that_is_no_number_keeps_its_bits(record, package):
    """numba-cuda-mlir's own launch makes another one of it."""
    kernel = kernel_of(package, 1)
    for bits in (0x7E00, 0x7E01, 0xFE55):
        assert launched(record, kernel[1, 1], np.uint16(bits).view(np.float16)).parameters == (bits.to_bytes(2, "little"),)


# ---- configurations --------------------------------------------------------------------------------------------------
CONFIGURATIONS = [
    (7, 32), ((7,), (32,)), ((7, 5), (32, 2)), ((7, 5, 3), (8, 4, 2)), (2**31 - 1, 1024), ((1, 65535, 65535), (1, 1, 64)),
    (1, 32, 0, 48 * 1024),
]  # fmt: skip


def test_configurations(record, package):
    arguments, dispatcher, seen = launches_of(record, package, [1, DeviceTensor((3,), data=address(package))])
    theirs, ours = dispatcher(), fast_args(dispatcher())
    given = [on_their_side(package, value, Interface) for value in arguments]
    for configuration in CONFIGURATIONS:
        if np.prod(configuration[0]) > 2**30 and not isinstance(record, cuda_stub.Stub):
            continue  # so many blocks take a GPU minutes
        theirs[configuration](*given)
        expected = seen()
        for launch in (ours[configuration], lambda *given: launch_cached(ours[configuration], *given)):  # noqa: B023
            launch(*arguments)
            assert seen() == expected, configuration
        assert record.launches[-1].shared == (configuration[3] if len(configuration) > 3 else 0)
    odd = [np.int32(7), 5], [np.uint8(32), True], None, np.int64(16)  # the packages want ints and tuples
    launch = launched(record, ours[odd], *arguments)
    assert (launch.grid, launch.block, launch.shared) == ((7, 5, 1), (32, 1, 1), 16)


def test_cooperative_launches(record, package):
    """More blocks than run at the same time are refused, and the next launch is as before."""
    body = "g = cg.this_grid(); g.sync()"
    function_of(1, body).__globals__["cg"] = package.cg
    check(record, package, [1.0], (2, 32), body=body)
    kernel = kernel_of(package, 1, body)
    launch_cached(kernel[2, 32], 1.0)
    for refused in (lambda: kernel[10**6, 1024](1.0), kernel[10**6, 1024].bind(1.0)):
        is_refused(refused, CudaError, "kernel() was not launched", "COOPERATIVE_LAUNCH_TOO_LARGE", "same time")
    kernel[2, 32].bind(1.0)()
    assert {(each.cooperative, each.api) for each in record.launches} == {(True, "cuLaunchKernelEx")}


def test_clusters(record, package):
    if package.__name__ == "numba.cuda" or package.get_current_device().compute_capability < (9, 0):
        pytest.skip("numba-cuda launches no clusters, nor do devices of compute capability below 9.0")
    check(record, package, [1.0], ((8, 2, 1), 32, 0, 0, (2, 2, 1)))
    launch = record.launches[-1]
    assert launch.cluster == (2, 2, 1) and launch.api == "cuLaunchKernelEx" and not launch.cooperative
    check(record, package, [1.0], (8, 32, 0, 0, 4))


# ---- cached launches, whose rows read contiguous tensors in fewer steps; they leave what is not as expected ------------
AT = 0x7F1234560000
TAKEN = {
    "the same": {}, "without strides": {"strides": None}, "an offset": {"offset": 64}, "a large offset": {"offset": 1 << 41},
    "an extent of 1, whatever its stride": {"shape": (1, 4), "strides": (99, 1)},
    "a last extent of 1": {"shape": (4, 1), "strides": (1, 7)}, "both of 1": {"shape": (1, 1), "strides": (-5, 1 << 40)},
    "no elements": {"shape": (0, 4)}, "no elements, odd strides": {"shape": (3, 0), "strides": (7, 9), "data": 0},
    "strided": {"strides": (8, 2)}, "transposed": {"strides": (1, 3)}, "float64": {"dtype": "f8"}, "int32": {"dtype": "i4"},
    "large": {"shape": (1 << 20,) * 2, "strides": (1 << 20, 1)}, "very large": {"shape": (1 << 33, 2), "strides": (2, 1)},
    "a vector": {"shape": (4,), "strides": (1,)}, "0-d": {"shape": (), "strides": ()},
    "of another device": {"device": 1}, "managed": {"device_type": 13},
}  # fmt: skip
REFUSED = {
    "misaligned": {"data": AT + 2}, "misaligned by its offset": {"offset": 2}, "no memory": {"data": 0},
    "hardly any memory": {"data": 0, "offset": 4096}, "a negative extent": {"shape": (-3, 4)}, "vectors": {"lanes": 2},
    "sizes that overflow": {"shape": (1 << 40,) * 2, "strides": (1 << 40, 1)}, "no shape": {"has_shape": False},
    "of the host": {"device_type": 1},
}  # fmt: skip


def matrix(cls, offset=0, lanes=1, has_shape=True, **options):
    tensor = cls(**{"shape": (3, 4), "strides": (4, 1), "data": AT, **options})
    said = tensor._managed.dl_tensor
    said.byte_offset, said.dtype.lanes = offset, lanes
    if not has_shape:
        said.shape = ffi.NULL
    return tensor


@pytest.fixture(scope="module")
def cached(package):
    """A launcher with a cache entry for a contiguous matrix."""
    launcher = kernel_of(package, 2)[2, 32]
    launch_cached(launcher, matrix(DeviceTensor), 1.5)
    return launcher


@pytest.mark.parametrize("case", [*TAKEN, *REFUSED])
def test_a_cached_launch_is_as_the_first_one_with_a_type(cached, record, case):
    """Also of a tensor that has changed since its last launch; when that is as before, so is its next one."""
    if not isinstance(record, cuda_stub.Stub) and case in ("of another device", "managed"):
        pytest.skip("a GPU knows what lies there")
    options, changing = (TAKEN | REFUSED)[case], matrix(DeviceTensor)
    cached(changing, 2.5)
    usual, original = record.launches[-1], ffi.new("DLTensor *", changing._managed.dl_tensor)
    fresh = type("DeviceTensor", (DeviceTensor,), {"__module__": DeviceTensor.__module__})
    tensors = [matrix(fresh, **options), matrix(DeviceTensor, **options), changing]
    changing._managed.dl_tensor = tensors[1]._managed.dl_tensor
    record.clear()
    if case in REFUSED:
        assert len({is_refused(functools.partial(cached, each, 2.5), BufferError) for each in tensors}) == 1
        assert not record.launches
    else:  # also the kernel is the same: another one for other layouts
        assert len({launched(record, cached, tensor, 2.5) for tensor in tensors}) == 1
    changing._managed.dl_tensor = original[0]
    cached(changing, 2.5)
    assert record.launches[-1] == usual
