"""The C ABI against real headers, by the C compiler: every size, offset, enum member and flag; and what is derived from it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import cffi
import pytest
from shell import COMPILER

import fastexchange
from fastexchange import _abi_build
from fastexchange.dispatch.runtime import runtime
from fastexchange.ground import dlpack
from fastexchange.ground.dlpack import ffi


def headers():
    for package, path in [("torch", "include/ATen/dlpack.h"), ("tvm_ffi", "include/dlpack/dlpack.h")]:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            header = Path(spec.origin).parent / path
            if header.exists() and "DLPackExchangeAPI" in header.read_text():  # PyTorch before 2.10 has an older one
                yield pytest.param(header, id=package)


def compiled(text: str, *options: str) -> str:
    return subprocess.run([COMPILER, *options, "-"], input=text, check=True, capture_output=True, text=True).stdout


def described(of: cffi.FFI, name: str):
    """All that is declared of a struct, an enum, or a function's type, but for the names of parameters."""
    ctype = of.typeof(name)

    def words(each) -> str:
        return re.sub(r"\b(struct|enum) ", "", each.cname)

    if ctype.kind == "struct":
        return of.sizeof(ctype), [(field, words(each.type), each.offset) for field, each in ctype.fields]
    return (of.sizeof(ctype), ctype.elements) if ctype.kind == "enum" else words(ctype)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("header", [*headers()])
def test_all_is_declared_as_in_the_header(header):
    text = re.sub(r"#include.*", "", header.read_text())
    theirs, ours = cffi.FFI(), {name for name in ffi.list_types()[0] if name.startswith("DL")} - {"DLPackFlag"}
    theirs.cdef(compiled(text, "-E", "-P"))
    assert {*theirs.list_types()[0]} == ours
    assert [name for name in ours if described(ffi, name) != described(theirs, name)] == []
    for enum in (dlpack.DLDeviceType, dlpack.DLDataTypeCode):
        assert {member.value: member.name for member in enum} == ffi.typeof(enum.__name__).elements
    macros = dict(re.findall(r"#define DLPACK_(\w+) \(?([\dUL< ]+)", compiled(text, "-E", "-dM")))
    numbers = {name: eval(re.sub("U?L", "", value)) for name, value in macros.items()}
    assert dlpack.VERSION == (numbers.pop("MAJOR_VERSION"), numbers.pop("MINOR_VERSION"))
    assert {f"DLPACK_{name}": value for name, value in numbers.items()} == {flag.name: flag.value for flag in dlpack.DLPackFlag}
    structs = {name: ffi.typeof(name) for name in ours if ffi.typeof(name).kind == "struct"}
    claims = [f"sizeof({name}) == {ffi.sizeof(struct)}" for name, struct in structs.items()]
    claims += [f"offsetof({name}, {field}) == {each.offset}" for name, struct in structs.items() for field, each in struct.fields]
    lines = ["#include <stddef.h>", f'#include "{header}"', *(f'_Static_assert({claim}, "");' for claim in claims)]
    compiled("\n".join(lines) + "\n", "-fsyntax-only", "-x", "c")


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
