"""Devices, element types and versions as Python values: tuples in every use, texts both ways, and what is refused."""

import copy
import itertools
import pickle
import sys

import numpy as np
import pytest
from frameworks import has_versioned_capsules
from interpreter import run_python

from fastexchange.ground.dlpack import DLDataTypeCode, DLDeviceType
from fastexchange.ground.dlpack_types import DLDataType, DLDevice, DLPackVersion
from fastexchange.ground.dtype_registry import ML_DTYPES, ML_DTYPES_PADDED, register_dlpack_dtype

VALUES = [
    (DLDevice(DLDeviceType.kDLCPU), (1, 0)),
    (DLDevice(2, 3), (2, 3)),
    (DLDevice(99, 1), (99, 1)),
    (DLDataType(DLDataTypeCode.kDLFloat, 32), (2, 32, 1)),
    (DLDataType(2, 32, 4), (2, 32, 4)),
    (DLDataType(200, 24), (200, 24, 1)),
    (DLPackVersion(1, 3), (1, 3)),
]
values = pytest.mark.parametrize(("value", "plain"), VALUES, ids=lambda value: repr(value) if type(value) is tuple else "")


# ---- tuples --------------------------------------------------------------------------------------------------------


@values
def test_equal_and_hashed_as_the_plain_tuple(value, plain):
    assert value == plain and plain == value
    assert hash(value) == hash(plain) and {value: 1}[plain] == 1 and {plain: 1}[value] == 1
    assert value != plain[:-1] and value != (*plain[:-1], plain[-1] + 1) and value != list(plain)
    assert tuple(value) == plain and [*value] == list(plain) and len(value) == len(plain) and value[0] == plain[0]


@values
def test_immutable(value, plain):
    for name in (*type(value).__match_args__, "another"):
        with pytest.raises(AttributeError):
            setattr(value, name, 1)
    with pytest.raises(TypeError):
        value[0] = 1
    assert not hasattr(value, "__dict__") and value == plain


@values
def test_copies_are_of_the_same_type_and_checked(value, plain):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert again == value and type(again) is type(value) and repr(again) == repr(value)
    assert type(copy.copy(value)) is type(copy.deepcopy(value)) is type(value)
    assert type(value)(*value) == value


@values
def test_repr_makes_it_again(value, plain):
    again = eval(repr(value))
    assert again == value and type(again) is type(value)


def test_reprs():
    assert repr(DLDevice(1)) == "DLDevice(device_type=DLDeviceType.kDLCPU, device_id=0)"
    assert repr(DLDevice(99, 2)) == "DLDevice(device_type=99, device_id=2)"
    assert repr(DLDataType(2, 32)) == "DLDataType(code=DLDataTypeCode.kDLFloat, bits=32, lanes=1)"
    assert repr(DLPackVersion(1, 3)) == "DLPackVersion(major=1, minor=3)"


def test_fields_by_name():
    device, dtype, version = DLDevice(13, 2), DLDataType(5, 64, 3), DLPackVersion(1, 3)
    assert device.device_type is DLDeviceType.kDLCUDAManaged and device.device_id == 2
    assert dtype.code is DLDataTypeCode.kDLComplex and (dtype.bits, dtype.lanes) == (64, 3)
    assert (version.major, version.minor) == (1, 3)
    match device:
        case DLDevice(DLDeviceType.kDLCUDAManaged, device_id=index):
            assert index == 2
        case _:
            pytest.fail("no match")


def test_keywords():
    assert DLDevice(device_type=2, device_id=1) == (2, 1)
    assert DLDataType(code=2, bits=16, lanes=2) == (2, 16, 2)
    assert DLPackVersion(major=1, minor=0) == (1, 0)


def test_names_unknown_to_dlpack_stay_ints():
    assert type(DLDevice(99).device_type) is int and type(DLDataType(200, 8).code) is int


def test_ints_of_other_types_become_ints():
    device = DLDevice(np.int64(2), np.uint8(1))
    assert device == (2, 1) and type(device.device_id) is int and type(device.device_type) is DLDeviceType
    assert all(type(number) is int for number in DLPackVersion(np.int32(1), True))


# ---- where DLPack meets tuples -------------------------------------------------------------------------------------


def test_a_numpy_array_tells_and_takes_them():
    array = np.arange(3.0)
    device = DLDevice(*array.__dlpack_device__())
    assert device == array.__dlpack_device__() and device == DLDevice(DLDeviceType.kDLCPU)
    capsule = array.__dlpack__(max_version=DLPackVersion(1, 0), dl_device=device)
    assert '"dltensor_versioned"' in repr(capsule)


def test_a_pytorch_tensor_tells_and_takes_them():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(3.0)
    device = DLDevice(*tensor.__dlpack_device__())
    assert tensor.__dlpack_device__() == device and str(device) == "cpu:0"
    if has_versioned_capsules():
        assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=DLPackVersion(1, 3), dl_device=device))


# ---- texts ---------------------------------------------------------------------------------------------------------


def test_device_texts():
    names = {device: str(DLDevice(device)) for device in DLDeviceType}
    assert names == {
        DLDeviceType.kDLCPU: "cpu:0", DLDeviceType.kDLCUDA: "cuda:0", DLDeviceType.kDLCUDAHost: "cuda_host:0",
        DLDeviceType.kDLOpenCL: "opencl:0", DLDeviceType.kDLVulkan: "vulkan:0", DLDeviceType.kDLMetal: "metal:0",
        DLDeviceType.kDLVPI: "vpi:0", DLDeviceType.kDLROCM: "rocm:0", DLDeviceType.kDLROCMHost: "rocm_host:0",
        DLDeviceType.kDLExtDev: "ext_dev:0", DLDeviceType.kDLCUDAManaged: "cuda_managed:0",
        DLDeviceType.kDLOneAPI: "oneapi:0", DLDeviceType.kDLWebGPU: "webgpu:0", DLDeviceType.kDLHexagon: "hexagon:0",
        DLDeviceType.kDLMAIA: "maia:0", DLDeviceType.kDLTrn: "trn:0",
    }  # fmt: skip
    assert str(DLDevice(2, 7)) == "cuda:7" and str(DLDevice(99, 1)) == "device99:1"
    assert f"{DLDevice(1)} and {DLDevice(2)}" == "cpu:0 and cuda:0"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((0, 8), "int8"),
        ((0, 4), "int4"),
        ((1, 8), "uint8"),
        ((1, 1), "uint1"),
        ((2, 16), "float16"),
        ((2, 32), "float32"),
        ((2, 64), "float64"),
        ((2, 128), "float128"),
        ((3, 64), "handle64"),
        ((4, 16), "bfloat16"),
        ((5, 32), "complex32"),
        ((5, 64), "complex64"),
        ((5, 128), "complex128"),
        ((6, 8), "bool"),
        ((6, 1), "bool1"),
        ((7, 8), "float8_e3m4"),
        ((8, 8), "float8_e4m3"),
        ((9, 8), "float8_e4m3b11fnuz"),
        ((10, 8), "float8_e4m3fn"),
        ((11, 8), "float8_e4m3fnuz"),
        ((12, 8), "float8_e5m2"),
        ((13, 8), "float8_e5m2fnuz"),
        ((14, 8), "float8_e8m0fnu"),
        ((15, 6), "float6_e2m3fn"),
        ((16, 6), "float6_e3m2fn"),
        ((17, 4), "float4_e2m1fn"),
        ((2, 32, 4), "float32x4"),
        ((0, 8, 4), "int8x4"),
        ((6, 8, 16), "boolx16"),
        ((5, 64, 2), "complex64x2"),
        ((17, 4, 2), "float4_e2m1fnx2"),
        ((9, 8, 65535), "float8_e4m3b11fnuzx65535"),
        ((17, 8), "code17:8"),  # a width that DLPack leaves unspecified for the code
        ((100, 16), "code100:16"),
        ((255, 255, 2), "code255:255x2"),
    ],
)
def test_data_type_texts(fields, text):
    assert str(DLDataType(*fields)) == text
    assert DLDataType.from_str(text) == DLDataType(*fields)


def test_every_type_has_a_text_of_its_own_that_is_read_back():
    seen = {}
    for code, bits, lanes in itertools.product(range(256), range(1, 256), (1, 2)):
        value = DLDataType(code, bits, lanes)
        assert seen.setdefault(str(value), value) is value
    for text, value in seen.items():
        again = DLDataType.from_str(text)
        assert again == value and type(again.code) is type(value.code)


@pytest.mark.parametrize(
    ("text", "fields"), [("bool8", (6, 8, 1)), ("float32x1", (2, 32, 1)), ("code2:32", (2, 32, 1)), ("code17:4", (17, 4, 1))]
)
def test_other_spellings(text, fields):
    assert DLDataType.from_str(text) == fields


@pytest.mark.parametrize(
    "text",
    [
        "", " float32", "float32 ", "float32\n", "Float32", "float", "float032", "float32x", "float32x04", "float-32", "f4",
        "32", "x4", "float32x4x2", "code100", "code100:", "code:16", "code007:16", "float8_e9m9", "float8_e4m3f", "boolean",
        "float٣٢", "code1e2:16", "bool x4", "complex",
    ],
)  # fmt: skip
def test_texts_that_name_nothing(text):
    with pytest.raises(ValueError, match="names no DLPack type; write it like"):
        DLDataType.from_str(text)


@pytest.mark.parametrize("text", ["float0", "float256", "float32x0", "float32x65536", "code256:8", "code1:999"])
def test_texts_out_of_range(text):
    with pytest.raises(ValueError):
        DLDataType.from_str(text)


@pytest.mark.parametrize("text", [None, b"float32", 32, np.dtype("f4")])
def test_from_str_takes_text(text):
    with pytest.raises(TypeError, match="text must be a str, not"):
        DLDataType.from_str(text)


def test_versions():
    assert str(DLPackVersion(1, 3)) == "1.3" and str(DLPackVersion(1, 10)) == "1.10"
    ordered = [DLPackVersion(0, 9), DLPackVersion(1, 0), DLPackVersion(1, 3), DLPackVersion(1, 10), DLPackVersion(2, 0)]
    assert sorted(set(ordered)) == ordered
    assert DLPackVersion(1, 10) > DLPackVersion(1, 3) >= (1, 3) > (1, 2) and max(ordered) == (2, 0)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLDataType(256, 8), r"DLDataType: code must be in 0\.\.255, not 256"),
        (lambda: DLDataType(-1, 8), r"DLDataType: code must be in 0\.\.255, not -1"),
        (lambda: DLDataType(2, 0), r"DLDataType: bits must be in 1\.\.255, not 0"),
        (lambda: DLDataType(2, 256), r"DLDataType: bits must be in 1\.\.255, not 256"),
        (lambda: DLDataType(2, -32), r"DLDataType: bits must be in 1\.\.255, not -32"),
        (lambda: DLDataType(2, 32, 0), r"DLDataType: lanes must be in 1\.\.65535, not 0"),
        (lambda: DLDataType(2, 32, 65536), r"DLDataType: lanes must be in 1\.\.65535, not 65536"),
        (lambda: DLDevice(-1), r"DLDevice: device_type must be in 0\.\.2147483647, not -1"),
        (lambda: DLDevice(1, -1), r"DLDevice: device_id must be in 0\.\.2147483647, not -1"),
        (lambda: DLDevice(2**31), r"DLDevice: device_type must be in 0\.\.2147483647, not 2147483648"),
        (lambda: DLPackVersion(1, -1), r"DLPackVersion: minor must be in 0\.\.4294967295, not -1"),
        (lambda: DLPackVersion(2**32, 0), r"DLPackVersion: major must be in 0\.\.4294967295, not 4294967296"),
    ],
)
def test_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [1.0, "1", None, np.float64(1), [1]])
def test_not_an_int(value):
    for make, name in ((DLDevice, "device_type"), (lambda v: DLDataType(2, v), "bits"), (lambda v: DLPackVersion(1, v), "minor")):
        with pytest.raises(TypeError, match=f"{name} must be an int, not {type(value).__name__}"):
            make(value)


# ---- NumPy's dtypes ------------------------------------------------------------------------------------------------

PLAIN = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
         "complex64", "complex128"]  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_dtypes_there_and_back(name):
    value = DLDataType.from_dtype(name)
    assert str(value) == name and value.lanes == 1 and value.bits == 8 * np.dtype(name).itemsize
    assert value.to_dtype() == np.dtype(name) and value.to_dtype().isnative
    assert value == DLDataType.from_dtype(np.dtype(name)) == DLDataType.from_dtype(np.dtype(name).type)


@pytest.mark.parametrize(
    ("like", "text"),
    [(float, "float64"), (bool, "bool"), (complex, "complex128"), ("<i4" if sys.byteorder == "little" else ">i4", "int32"),
     (np.longlong, "int64"), (np.intp, "int64"), (np.int_, "int64"), ("d", "float64")],
)  # fmt: skip
def test_anything_that_numpy_takes_for_a_dtype(like, text):
    assert str(DLDataType.from_dtype(like)) == text


def test_what_numpy_does_not_take_it_refuses_itself():
    with pytest.raises(TypeError, match="no_such_type"):
        DLDataType.from_dtype("no_such_type")


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (np.dtype("f4").newbyteorder("S"), "not in this machine's byte order; convert the array to dtype\\('float32'\\)"),
        (np.dtype("U3").newbyteorder("S"), "not in this machine's byte order"),
        (np.dtype(("f4", (2, 3))), "a sub-array.*; ask for dtype\\('float32'\\)"),
        (np.dtype(("f2", (1,))), "a sub-array"),
        (np.dtype([("a", "f4"), ("b", "f4")]), r"register a type with register_dlpack_dtype\(\(code, 64\), dtype\)"),
        (np.dtype("M8[ns]"), r"register_dlpack_dtype\(\(code, 64\), dtype\)"),
        (np.dtype("V40"), "convert the array to another dtype"),
        (np.dtype("S0"), "convert the array to another dtype"),
        (np.dtype(object), "convert the array to another dtype"),
    ],
    ids=repr,
)
def test_dtypes_that_dlpack_cannot_name(dtype, why):
    with pytest.raises(TypeError, match=rf"(?s)DLDataType.from_dtype: .* has no DLPack type: .*{why}"):
        DLDataType.from_dtype(dtype)


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="a long double is a double here")
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_double_has_no_type(dtype):
    with pytest.raises(TypeError, match="convert the array to another dtype"):
        DLDataType.from_dtype(dtype)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("float32x4", "4 lanes; take that of float32 and a last dimension of 4"),
        ("boolx2", "2 lanes; take that of bool"),
        ("int4", "packed elements of 4 bits; unpack them first"),
        ("float6_e2m3fn", "packed elements of 6 bits"),
        ("float4_e2m1fn", "packed elements of 4 bits"),
        ("bool1", "packed elements of 1 bits"),
        ("handle64", r"register one with register_dlpack_dtype\(\(3, 64\), dtype\)"),
        ("float128", r"register_dlpack_dtype\(\(2, 128\), dtype\)"),
        ("code199:16", r"register_dlpack_dtype\(\(199, 16\), dtype\)"),
        ("code10:16", r"register_dlpack_dtype\(\(10, 16\), dtype\)"),
    ],
)
def test_types_without_a_numpy_dtype(text, why):
    with pytest.raises(ValueError, match=f"DLDataType.to_dtype: {text} has no NumPy dtype: .*{why}"):
        DLDataType.from_str(text).to_dtype()


def test_registered_types_there_and_back():
    dtype = np.dtype([("real", "i2"), ("imaginary", "i2")])
    register_dlpack_dtype((101, 32), dtype)
    assert DLDataType.from_dtype(dtype) == (101, 32, 1) and DLDataType(101, 32).to_dtype() is dtype
    with pytest.raises(ValueError, match="4 lanes; take that of code101:32"):
        DLDataType(101, 32, 4).to_dtype()


# ---- ml_dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_there_and_back(name):
    scalar = getattr(pytest.importorskip("ml_dtypes"), name)
    value = DLDataType.from_dtype(scalar)
    assert str(value) == name and value.to_dtype() is np.dtype(scalar)
    assert DLDataType.from_str(name) == value == DLDataType.from_dtype(name)


@pytest.mark.parametrize("name", ML_DTYPES_PADDED)
def test_ml_dtypes_of_less_than_a_byte_are_not_packed(name):
    scalar = getattr(pytest.importorskip("ml_dtypes"), name)
    bits = ML_DTYPES_PADDED[name][1]
    with pytest.raises(TypeError, match=rf"one element of {bits} bits in a byte, and DLPack's {name} is packed"):
        DLDataType.from_dtype(scalar)
    with pytest.raises(ValueError, match="packed elements"):
        DLDataType.from_str(name).to_dtype()


def test_without_ml_dtypes_its_types_have_a_name_and_no_dtype():
    run_python("""
        import sys
        import numpy as np
        from fastexchange.ground.dlpack_types import DLDataType
        value = DLDataType.from_str("bfloat16")
        try:
            value.to_dtype()
        except ValueError as refused:
            assert "bfloat16 has no NumPy dtype: a recent ml_dtypes has one; import it" in str(refused), refused
        else:
            raise AssertionError
        assert "ml_dtypes" not in sys.modules
    """)
