"""Devices, element types and versions as Python values: tuples in every use, texts both ways, and what is refused."""

import copy
import itertools
import pickle
import re
import sys

import numpy as np
import pytest
from interoperability import ml_dtypes
from raising import check_raises

from fastexchange.ground.dlpack import DLDataTypeCode, DLDeviceType
from fastexchange.ground.dlpack_types import DLDataType, DLDevice, DLPackVersion
from fastexchange.ground.dtype_registry import ML_DTYPES, ML_DTYPES_PADDED, register_dlpack_dtype

VALUES = {  # by repr: the value, and the plain tuple
    "DLDevice(device_type=DLDeviceType.kDLCPU, device_id=0)": (DLDevice(DLDeviceType.kDLCPU), (1, 0)),
    "DLDevice(device_type=DLDeviceType.kDLCUDA, device_id=3)": (DLDevice(2, 3), (2, 3)),
    "DLDevice(device_type=99, device_id=1)": (DLDevice(device_id=1, device_type=99), (99, 1)),
    "DLDataType(code=DLDataTypeCode.kDLFloat, bits=32, lanes=1)": (DLDataType(DLDataTypeCode.kDLFloat, 32), (2, 32, 1)),
    "DLDataType(code=DLDataTypeCode.kDLFloat, bits=32, lanes=4)": (DLDataType(lanes=4, bits=32, code=2), (2, 32, 4)),
    "DLDataType(code=200, bits=24, lanes=1)": (DLDataType(200, 24), (200, 24, 1)),
    "DLPackVersion(major=1, minor=3)": (DLPackVersion(minor=3, major=1), (1, 3)),
}


@pytest.mark.parametrize("text", VALUES)
def test_a_value_is_its_plain_tuple_immutable_and_copied_as_its_type(text):
    value, plain = VALUES[text]
    cls = type(value)
    assert value == plain and plain == value and hash(value) == hash(plain)
    assert {value: 1}[plain] == {plain: 1}[value] == 1
    assert value != plain[:-1] and value != (*plain[:-1], plain[-1] + 1) and value != list(plain)
    assert tuple(value) == plain and [*value] == list(plain) and len(value) == len(plain) and value[0] == plain[0]
    assert tuple(getattr(value, name) for name in cls.__match_args__) == plain
    for name in (*cls.__match_args__, "another"):
        check_raises(AttributeError, None, setattr, value, name, 1)
    assert not hasattr(value, "__dict__") and value == plain and repr(value) == text
    pickled = [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for again in (*pickled, copy.copy(value), copy.deepcopy(value), eval(text), cls(*value)):
        assert again == value and type(again) is cls and repr(again) == text


def test_fields_by_name_and_their_types():
    assert DLDevice(13, 2).device_type is DLDeviceType.kDLCUDAManaged
    assert DLDataType(5, 64, 3).code is DLDataTypeCode.kDLComplex
    assert type(DLDevice(99).device_type) is type(DLDataType(200, 8).code) is int  # unknown to DLPack
    device = DLDevice(np.int64(2), np.uint8(1))
    assert device == (2, 1) and type(device.device_id) is int and type(device.device_type) is DLDeviceType
    assert all(type(number) is int for number in DLPackVersion(np.int32(1), True))


def test_texts_of_devices_and_versions():
    names = "cpu cuda cuda_host opencl vulkan metal vpi rocm rocm_host ext_dev cuda_managed oneapi webgpu hexagon maia trn"
    devices = "CPU CUDA CUDAHost OpenCL Vulkan Metal VPI ROCM ROCMHost ExtDev CUDAManaged OneAPI WebGPU Hexagon MAIA Trn"
    texts = {f"kDL{device}": f"{name}:0" for device, name in zip(devices.split(), names.split(), strict=True)}
    assert {device.name: str(DLDevice(device)) for device in DLDeviceType} == texts
    assert str(DLDevice(2, 7)) == "cuda:7" and str(DLDevice(99, 1)) == "device99:1"
    assert f"{DLDevice(1)} and {DLDevice(2)}" == "cpu:0 and cuda:0"
    assert str(DLPackVersion(1, 3)) == "1.3" and str(DLPackVersion(1, 10)) == "1.10"
    assert DLPackVersion(2, 0) > DLPackVersion(1, 10) > DLPackVersion(1, 3) >= (1, 3) > (1, 2) > DLPackVersion(0, 9)


TEXTS = {
    "int8": (0, 8), "int4": (0, 4), "uint8": (1, 8), "uint1": (1, 1), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64),
    "float128": (2, 128), "handle64": (3, 64), "bfloat16": (4, 16), "complex32": (5, 32), "complex64": (5, 64),
    "complex128": (5, 128), "bool": (6, 8), "bool1": (6, 1), "float8_e3m4": (7, 8), "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8), "float8_e4m3fn": (10, 8), "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8), "float8_e8m0fnu": (14, 8), "float6_e2m3fn": (15, 6), "float6_e3m2fn": (16, 6),
    "float4_e2m1fn": (17, 4), "float32x4": (2, 32, 4), "int8x4": (0, 8, 4), "boolx16": (6, 8, 16), "complex64x2": (5, 64, 2),
    "float4_e2m1fnx2": (17, 4, 2), "float8_e4m3b11fnuzx65535": (9, 8, 65535), "code100:16": (100, 16),
    "code255:255x2": (255, 255, 2), "code17:8": (17, 8),  # a width that DLPack leaves unspecified for the code
}  # fmt: skip
OTHER_SPELLINGS = {"bool8": (6, 8, 1), "float32x1": (2, 32, 1), "code2:32": (2, 32, 1), "code17:4": (17, 4, 1)}


def test_every_type_has_a_text_of_its_own_that_is_read_back():
    for text, fields in TEXTS.items():
        assert str(DLDataType(*fields)) == text
    for text, fields in (TEXTS | OTHER_SPELLINGS).items():
        assert DLDataType.from_str(text) == DLDataType(*fields)
    values = [DLDataType(*each) for each in itertools.product(range(256), (1, 4, 6, 8, 16, 24, 32, 64, 128, 255), (1, 2))]
    assert len({str(value) for value in values}) == len(values)
    for value in values:
        again = DLDataType.from_str(str(value))
        assert again == value and type(again.code) is type(value.code)


NO_NAMES = [
    "", " float32", "float32 ", "float32\n", "Float32", "float", "float032", "float32x", "float32x04", "float-32", "f4",
    "32", "x4", "float32x4x2", "code100", "code100:", "code:16", "code007:16", "float8_e9m9", "float8_e4m3f", "boolean",
    "float٣٢", "code1e2:16", "bool x4", "complex",
]  # fmt: skip
OUT_OF_RANGE = ["float0", "float256", "float32x0", "float32x65536", "code256:8", "code1:999"]


def test_texts_that_name_nothing_are_out_of_range_or_no_text():
    for text in NO_NAMES + OUT_OF_RANGE:
        words = "names no DLPack type; write it like" if text in NO_NAMES else None
        check_raises(ValueError, words, DLDataType.from_str, text)
    for text in (None, b"float32", 32, np.dtype("f4")):
        check_raises(TypeError, "text must be a str, not", DLDataType.from_str, text)


FIELDS = [  # class, the values of the fields before, the field, its range
    (DLDataType, (), "code", 0, 255), (DLDataType, (2,), "bits", 1, 255), (DLDataType, (2, 32), "lanes", 1, 65535),
    (DLDevice, (), "device_type", 0, 2147483647), (DLDevice, (1,), "device_id", 0, 2147483647),
    (DLPackVersion, (), "major", 0, 4294967295), (DLPackVersion, (1,), "minor", 0, 4294967295),
]  # fmt: skip


def test_fields_out_of_range_or_no_ints():
    for cls, before, field, lowest, highest in FIELDS:
        behind = (8,) if field in ("code", "major") else ()
        for value in (lowest - 1, highest + 1, -32):
            words = f"{cls.__name__}: {field} must be in {lowest}..{highest}, not {value}"
            check_raises(ValueError, re.escape(words), cls, *before, value, *behind)
        for value in (1.0, "1", None, np.float64(1), [1]):
            check_raises(TypeError, f"{field} must be an int, not {type(value).__name__}", cls, *before, value, *behind)


PLAIN = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
         "complex64", "complex128"]  # fmt: skip
ALIKE = {float: "float64", bool: "bool", complex: "complex128", "<i4" if sys.byteorder == "little" else ">i4": "int32",
         np.longlong: "int64", np.intp: "int64", np.int_: "int64", "d": "float64"}  # fmt: skip


def test_dtypes_there_and_back_and_what_numpy_takes_for_them():
    """``tests/exchange/test_registry.py`` has what is registered."""
    for name in [*PLAIN, *ML_DTYPES] if ml_dtypes is not None else PLAIN:
        dtype = np.dtype(name if name in PLAIN else getattr(ml_dtypes, name))
        value = DLDataType.from_dtype(name)
        assert str(value) == name and value.lanes == 1 and value.bits == 8 * dtype.itemsize
        assert value.to_dtype() == dtype and value.to_dtype().isnative
        assert value == DLDataType.from_dtype(dtype) == DLDataType.from_dtype(dtype.type) == DLDataType.from_str(name)
    assert {like: str(DLDataType.from_dtype(like)) for like in ALIKE} == ALIKE
    check_raises(TypeError, "no_such_type", DLDataType.from_dtype, "no_such_type")  # as NumPy says it


ELSE = "convert the array to another dtype"
WITHOUT_TYPE = [
    (np.dtype("f4").newbyteorder("S"), r"not in this machine's byte order; convert the array to dtype\('float32'\)"),
    (np.dtype("U3").newbyteorder("S"), "not in this machine's byte order"),
    (np.dtype(("f4", (2, 3))), r"a sub-array.*; ask for dtype\('float32'\)"),
    (np.dtype(("f2", (1,))), "a sub-array"),
    (np.dtype([("a", "f4"), ("b", "f4")]), r"register a type with register_dlpack_dtype\(\(code, 64\), dtype\)"),
    (np.dtype("M8[ns]"), r"register_dlpack_dtype\(\(code, 64\), dtype\)"),
    *((np.dtype(code), ELSE) for code in ("V40", "S0", "O") + (("g", "G") if np.dtype("g").itemsize > 8 else ())),
]
WITHOUT_DTYPE = {
    "float32x4": "4 lanes; take that of float32 and a last dimension of 4", "boolx2": "2 lanes; take that of bool",
    "int4": "packed elements of 4 bits; unpack them first", "float6_e2m3fn": "packed elements of 6 bits",
    "float4_e2m1fn": "packed elements of 4 bits", "bool1": "packed elements of 1 bits",
    "handle64": r"register one with register_dlpack_dtype\(\(3, 64\), dtype\)",
    "float128": r"register_dlpack_dtype\(\(2, 128\), dtype\)",
    "code199:16": r"register_dlpack_dtype\(\(199, 16\), dtype\)", "code10:16": r"register_dlpack_dtype\(\(10, 16\), dtype\)",
}  # fmt: skip


def test_dtypes_that_dlpack_cannot_name_and_types_without_a_numpy_dtype():
    for dtype, why in WITHOUT_TYPE:
        said = rf"(?s)DLDataType.from_dtype: .* has no DLPack type: .*{why}"
        check_raises(TypeError, said, DLDataType.from_dtype, dtype)
    for text, why in WITHOUT_DTYPE.items():
        said = f"DLDataType.to_dtype: {text} has no NumPy dtype: .*{why}"
        check_raises(ValueError, said, DLDataType.from_str(text).to_dtype)


    for name, (_, bits, *_) in ML_DTYPES_PADDED.items() if ml_dtypes is not None else ():  # of less than a byte: not packed
        said = f"one element of {bits} bits in a byte, and DLPack's {name} is packed"
        check_raises(TypeError, said, DLDataType.from_dtype, getattr(ml_dtypes, name))
        check_raises(ValueError, "packed elements", DLDataType.from_str(name).to_dtype)
    dtype = np.dtype([("real", "i2"), ("imaginary", "i2")])
    register_dlpack_dtype((101, 32), dtype)
    assert DLDataType.from_dtype(dtype) == (101, 32, 1) and DLDataType(101, 32).to_dtype() is dtype
    check_raises(ValueError, "4 lanes; take that of code101:32", DLDataType(101, 32, 4).to_dtype)
