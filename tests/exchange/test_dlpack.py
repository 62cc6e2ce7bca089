"""The C ABI against real headers, compiled: every size, offset, enum member and flag; and what is derived from it."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastexchange
from fastexchange import _abi_build
from fastexchange.ground import dlpack, native
from fastexchange.ground.dlpack import ffi

STRUCTS = [
    "DLPackVersion", "DLDevice", "DLDataType", "DLTensor", "DLManagedTensor", "DLManagedTensorVersioned",
    "DLPackExchangeAPIHeader", "DLPackExchangeAPI",
]  # fmt: skip
ENUMS = ["DLDeviceType", "DLDataTypeCode"]
FUNCTION_TYPES = [
    "DLPackManagedTensorAllocator", "DLPackManagedTensorFromPyObjectNoSync", "DLPackDLTensorFromPyObjectNoSync",
    "DLPackCurrentWorkStream", "DLPackManagedTensorToPyObjectNoSync",
]  # fmt: skip


def headers():
    """The ``dlpack.h`` files of installed packages."""
    for package, path in [("torch", "include/ATen/dlpack.h"), ("tvm_ffi", "include/dlpack/dlpack.h")]:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            header = Path(spec.origin).parent / path
            if header.exists() and "DLPackExchangeAPI" in header.read_text():  # PyTorch before 2.10 has an older one
                yield header


HEADERS = list(headers())
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(scope="module", params=HEADERS, ids=lambda path: path.parts[path.parts.index("include") - 1])
def header(request) -> Path:
    return request.param


def test_a_header_and_a_compiler_were_found():
    if not HEADERS:
        pytest.skip("no installed package ships a dlpack.h (PyTorch and apache-tvm-ffi do)")
    if COMPILER is None:
        pytest.skip("no C compiler")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def enums_in(text: str) -> dict[str, list[str]]:
    """The member names of every enum that the header declares."""
    found = re.findall(r"typedef\s+enum\s*\{(.*?)\}\s*(\w+)\s*;", text, flags=re.DOTALL)
    return {name: re.findall(r"\b(kDL\w+)\b\s*(?==|,|$)", body, flags=re.MULTILINE) for body, name in found}


def fields(struct: str) -> list[str]:
    return [name for name, _ in ffi.typeof(struct).fields]


@pytest.fixture(scope="module")
def measured(header, tmp_path_factory) -> dict[str, int]:
    """What the system's C compiler says: ``sizeof X``, ``offsetof X.y``, ``sizeof X.y``, and members and macros by name."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    text = without_comments(header.read_text())
    lines = []
    for struct in STRUCTS:
        lines.append(f'SHOW("sizeof {struct}", sizeof({struct}));')
        for field in fields(struct):
            lines.append(f'SHOW("offsetof {struct}.{field}", offsetof({struct}, {field}));')
            lines.append(f'SHOW("sizeof {struct}.{field}", sizeof((({struct} *)0)->{field}));')
    for enum, members in enums_in(text).items():
        lines.append(f'SHOW("sizeof {enum}", sizeof({enum}));')
        lines.extend(f'SHOW("{member}", {member});' for member in members)
    lines.extend(
        f'SHOW("{macro}", {macro});' for macro in re.findall(r"#define\s+(DLPACK_(?:FLAG|M\w*_VERSION)\w*)", text)
    )
    directory = tmp_path_factory.mktemp("abi")
    source = directory / "abi.c"
    source.write_text(
        f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\n'
        '#define SHOW(name, value) printf("%s=%lld\\n", name, (long long)(value))\n'
        f"int main(void) {{\n{chr(10).join(lines)}\nreturn 0; }}\n"
    )
    subprocess.run([COMPILER, "-o", directory / "abi", source], check=True, capture_output=True, text=True)
    output = subprocess.run([directory / "abi"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in output.splitlines())}


@pytest.fixture(scope="module")
def version(measured) -> tuple[int, int]:
    return measured["DLPACK_MAJOR_VERSION"], measured["DLPACK_MINOR_VERSION"]


def test_the_header_is_of_our_version(version):
    assert version == dlpack.VERSION


@pytest.mark.parametrize("struct", STRUCTS)
def test_size_and_offset_of_every_field(struct, measured):
    assert ffi.sizeof(struct) == measured[f"sizeof {struct}"]
    for name, field in ffi.typeof(struct).fields:
        assert field.offset == measured[f"offsetof {struct}.{name}"], name
        assert ffi.sizeof(field.type) == measured[f"sizeof {struct}.{name}"], name


def test_no_struct_of_the_header_is_missing(header):
    text = without_comments(header.read_text())
    declared = set(re.findall(r"typedef\s+struct\s*\w*\s*\{.*?\}\s*(\w+)\s*;", text, flags=re.DOTALL))
    assert declared == set(STRUCTS)


@pytest.mark.parametrize("struct", STRUCTS)
def test_the_fields_are_those_of_the_header_in_order(struct, header):
    text = without_comments(header.read_text())
    (body,) = re.findall(
        r"typedef\s+struct\s*\w*\s*\{((?:(?!typedef).)*?)\}\s*" + struct + r"\s*;", text, flags=re.DOTALL
    )
    declared = [re.search(r"\(\s*\*\s*(\w+)\s*\)|(\w+)\s*$", part.strip()) for part in body.split(";") if part.strip()]
    assert [match[1] or match[2] for match in declared] == fields(struct)


@pytest.mark.parametrize("enum", ENUMS)
def test_every_enum_member_and_no_other(enum, measured, header):
    declared = enums_in(without_comments(header.read_text()))[enum]
    ours = {name: value for value, name in ffi.typeof(enum).elements.items()}
    assert ours == {name: measured[name] for name in declared}
    assert ffi.sizeof(enum) == measured[f"sizeof {enum}"]
    assert {member.name: member.value for member in getattr(dlpack, enum)} == ours


def test_no_enum_of_the_header_is_missing(header):
    assert set(enums_in(without_comments(header.read_text()))) == set(ENUMS)


def test_every_flag_and_no_other(measured):
    declared = {name: value for name, value in measured.items() if name.startswith("DLPACK_FLAG")}
    assert {flag.name: flag.value for flag in dlpack.DLPackFlag} == declared


def test_function_types_take_and_return_what_the_header_says(header):
    """Compared as text, spaces, parameter names and ``const`` apart."""
    text = without_comments(header.read_text())

    def words(part: str) -> str:
        return re.sub(r"\s+|\bconst\b|\bstruct\b", "", part)

    for name in FUNCTION_TYPES:
        (parameters,) = re.findall(rf"typedef\s+int\s*\(\s*\*\s*{name}\s*\)\s*\((.*?)\)\s*;", text, flags=re.DOTALL)
        ours = ffi.typeof(name)
        assert ours.result.cname == "int"
        flat = re.sub(r"\([^()]*\*[^()]*\)\s*\([^()]*\)", "callback", parameters)
        assert len(ours.args) == len(flat.split(",")), name
        for argument, declared in zip(ours.args, flat.split(","), strict=True):
            if "callback" not in declared:
                assert words(declared).startswith(words(argument.cname)), (name, argument.cname, declared)


# ---- what is derived -----------------------------------------------------------------------------------------------


def test_the_committed_abi_module_is_what_the_declarations_make(tmp_path):
    _abi_build.emit(tmp_path / "made.py")
    committed = Path(fastexchange.__file__).with_name("_abi.py")
    made, kept = (tmp_path / "made.py").read_text(), committed.read_text()
    version = re.compile(r"_version = \w+")
    if version.search(made)[0] != version.search(kept)[0]:
        pytest.skip("this cffi writes another format than the one that made _abi.py")
    assert made == kept, "run python -m fastexchange._abi_build"


ALL_STRUCTS = sorted(
    name for name in ffi.list_types()[0] if ffi.typeof(name).kind == "struct" and ffi.typeof(name).fields
)


def leaves(struct, at=0):
    for _name, field in struct.fields:
        if field.type.kind == "struct":
            yield from leaves(field.type, at + field.offset)
        else:
            yield at + field.offset, ffi.sizeof(field.type)


@pytest.mark.parametrize("name", ALL_STRUCTS)
def test_numpy_dtypes_agree_with_cffi(name):
    ctype, dtype = ffi.typeof(name), native.numpy_dtype(ffi.typeof(name))
    assert dtype.itemsize == ffi.sizeof(ctype) == native.sizeof(name)
    assert dtype.alignment == ffi.alignof(ctype)
    assert list(dtype.names) == fields(name)
    for field_name, field in ctype.fields:
        field_dtype, offset = dtype.fields[field_name]
        assert offset == field.offset == native.offset_of(name, field_name)
        assert field_dtype.itemsize == ffi.sizeof(field.type)


def test_records_read_what_cffi_wrote():
    tensor = ffi.new("DLManagedTensorVersioned *")
    tensor.version.major, tensor.version.minor, tensor.flags = 1, 3, 2**63 + 5
    tensor.dl_tensor.device.device_type, tensor.dl_tensor.device.device_id = 13, -7
    tensor.dl_tensor.ndim, tensor.dl_tensor.byte_offset = -2, 2**64 - 1
    tensor.dl_tensor.dtype.code, tensor.dl_tensor.dtype.bits, tensor.dl_tensor.dtype.lanes = 17, 255, 65535
    tensor.dl_tensor.data = ffi.cast("void *", 2**64 - 16)
    dtype = native.numpy_dtype(ffi.typeof("DLManagedTensorVersioned"))
    record = np.frombuffer(ffi.buffer(tensor), dtype)[0]
    assert record["version"].tolist() == (1, 3) and record["flags"] == 2**63 + 5
    inner = record["dl_tensor"]
    assert inner["device"].tolist() == (13, -7) and inner["ndim"] == -2 and inner["byte_offset"] == 2**64 - 1
    assert inner["dtype"].tolist() == (17, 255, 65535) and inner["data"] == -16


@pytest.mark.parametrize(
    ("declaration", "dtype"),
    [("int32_t", "i4"), ("uint16_t", "u2"), ("int64_t", "i8"), ("uint64_t", "u8"), ("double *", "i8")],
)
def test_numpy_dtypes_of_plain_types(declaration, dtype):
    assert native.numpy_dtype(ffi.typeof(declaration)) == np.dtype(dtype)


def test_what_a_cpu_reads():
    readable = {device.name for device in dlpack.DLDeviceType if dlpack.is_readable_by_cpu(device)}
    assert readable == {"kDLCPU", "kDLCUDAHost", "kDLCUDAManaged", "kDLROCMHost"}
    assert dlpack.CPU_READABLE_MASK == sum(1 << device for device in dlpack.DLDeviceType if device.name in readable)
    assert not dlpack.is_readable_by_cpu(0) and not dlpack.is_readable_by_cpu(-1) and not dlpack.is_readable_by_cpu(99)


def test_the_structs_of_cpython_and_numpy_are_verified_here():
    from fastexchange.dispatch.runtime import runtime

    assert runtime().unverified == [], sys.version
