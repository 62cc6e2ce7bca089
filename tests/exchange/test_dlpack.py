"""The C ABI against real headers, compiled: every size, offset, enum member and flag; and what is derived from it."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastexchange
from fastexchange import _abi_build
from fastexchange.dispatch.runtime import runtime
from fastexchange.ground import dlpack
from fastexchange.ground.dlpack import ffi

STRUCTS = (
    "DLPackVersion", "DLDevice", "DLDataType", "DLTensor", "DLManagedTensor", "DLManagedTensorVersioned",
    "DLPackExchangeAPIHeader", "DLPackExchangeAPI",
)  # fmt: skip
ENUMS = ("DLDeviceType", "DLDataTypeCode")
FUNCTION_TYPES = (
    "DLPackManagedTensorAllocator", "DLPackManagedTensorFromPyObjectNoSync", "DLPackDLTensorFromPyObjectNoSync",
    "DLPackCurrentWorkStream", "DLPackManagedTensorToPyObjectNoSync",
)  # fmt: skip


def headers():
    for package, path in [("torch", "include/ATen/dlpack.h"), ("tvm_ffi", "include/dlpack/dlpack.h")]:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            header = Path(spec.origin).parent / path
            if header.exists() and "DLPackExchangeAPI" in header.read_text():  # PyTorch before 2.10 has an older one
                yield header


HEADERS = list(headers())
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


of_each_header = pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.parts[path.parts.index("include") - 1])


def fields(struct: str) -> list[str]:
    return [name for name, _ in ffi.typeof(struct).fields]


@functools.cache
def read(header: Path) -> tuple[str, dict[str, list[str]], dict[str, int]]:
    """The header without its comments, the members of its enums, and what the system's C compiler says.

    That is ``sizeof(X)``, ``offsetof(X, y)``; members and macros by name.
    """
    if COMPILER is None:
        pytest.skip("no C compiler")
    text = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL))
    found = re.findall(r"typedef\s+enum\s*\{(.*?)\}\s*(\w+)\s*;", text, flags=re.DOTALL)
    enums = {name: re.findall(r"\b(kDL\w+)\b\s*(?==|,|$)", body, flags=re.MULTILINE) for body, name in found}
    shown = [f"sizeof({name})" for name in (*STRUCTS, *enums)]
    shown += [f"offsetof({struct}, {field})" for struct in STRUCTS for field in fields(struct)]
    shown += [f"sizeof((({struct} *)0)->{field})" for struct in STRUCTS for field in fields(struct)]
    shown += [member for members in enums.values() for member in members]
    shown += re.findall(r"#define\s+(DLPACK_(?:FLAG|M\w*_VERSION)\w*)", text)
    code = (
        f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\n'
        '#define SHOW(name, value) printf("%s=%lld\\n", name, (long long)(value))\n'
        "int main(void) {\n" + "\n".join(f'SHOW("{word}", {word});' for word in shown) + "\nreturn 0; }\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "abi"))
        subprocess.run([COMPILER, "-x", "c", "-o", program, "-"], input=code, check=True, capture_output=True, text=True)
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return text, enums, {name: int(value) for name, value in (line.split("=") for line in output.splitlines())}


def test_a_header_and_a_compiler_were_found():
    if not HEADERS or COMPILER is None:
        pytest.skip("no installed package ships a dlpack.h (PyTorch and apache-tvm-ffi do), or no C compiler")


@of_each_header
@pytest.mark.parametrize("struct", STRUCTS)
def test_a_struct_has_the_fields_of_the_header_in_order_in_their_places(struct, header):
    text, _, measured = read(header)
    (body,) = re.findall(r"typedef\s+struct\s*\w*\s*\{((?:(?!typedef).)*?)\}\s*" + struct + r"\s*;", text, flags=re.DOTALL)
    declared = [re.search(r"\(\s*\*\s*(\w+)\s*\)|(\w+)\s*$", part.strip()) for part in body.split(";") if part.strip()]
    assert [match[1] or match[2] for match in declared] == fields(struct)
    assert ffi.sizeof(struct) == measured[f"sizeof({struct})"]
    for name, field in ffi.typeof(struct).fields:
        assert field.offset == measured[f"offsetof({struct}, {name})"], name
        assert ffi.sizeof(field.type) == measured[f"sizeof((({struct} *)0)->{name})"], name


@of_each_header
def test_every_enum_member_every_flag_and_no_other(header):
    text, enums, measured = read(header)
    declared = set(re.findall(r"typedef\s+struct\s*\w*\s*\{.*?\}\s*(\w+)\s*;", text, flags=re.DOTALL))
    assert declared == set(STRUCTS) and set(enums) == set(ENUMS)
    for enum in ENUMS:
        ours = {name: value for value, name in ffi.typeof(enum).elements.items()}
        assert ours == {name: measured[name] for name in enums[enum]}
        assert ffi.sizeof(enum) == measured[f"sizeof({enum})"]
        assert {member.name: member.value for member in getattr(dlpack, enum)} == ours
    flags = {name: value for name, value in measured.items() if name.startswith("DLPACK_FLAG")}
    assert {flag.name: flag.value for flag in dlpack.DLPackFlag} == flags
    assert (measured["DLPACK_MAJOR_VERSION"], measured["DLPACK_MINOR_VERSION"]) == dlpack.VERSION


@of_each_header
def test_function_types_take_and_return_what_the_header_says(header):
    """Compared as text, spaces, parameter names and ``const`` apart."""

    def words(part: str) -> str:
        return re.sub(r"\s+|\bconst\b|\bstruct\b", "", part)

    for name in FUNCTION_TYPES:
        (parameters,) = re.findall(rf"typedef\s+int\s*\(\s*\*\s*{name}\s*\)\s*\((.*?)\)\s*;", read(header)[0], flags=re.DOTALL)
        ours = ffi.typeof(name)
        assert ours.result.cname == "int"
        flat = re.sub(r"\([^()]*\*[^()]*\)\s*\([^()]*\)", "callback", parameters)
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


def test_what_a_cpu_reads():
    readable = {device.name for device in dlpack.DLDeviceType if dlpack.is_readable_by_cpu(device)}
    assert readable == {"kDLCPU", "kDLCUDAHost", "kDLCUDAManaged", "kDLROCMHost"}
    assert dlpack.CPU_READABLE_MASK == sum(1 << device for device in dlpack.DLDeviceType if device.name in readable)
    assert not any(map(dlpack.is_readable_by_cpu, (0, -1, 99)))


def test_the_structs_of_cpython_and_numpy_are_verified_here():
    assert runtime().unverified == [], sys.version
