"""``conformance``: tables that are right, and what it says of tables that are not."""

import re
import shutil
import subprocess
import sysconfig

import pytest
from frameworks import torch
from nights import at_night
from shell import ROOT, run

from fastexchange.ground.dlpack import CDEF

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
TABLES = """
import ctypes
import numpy as np
import torch
from fastexchange import polyfill
from fastexchange._abi import ffi

def tensors():
    print("[what the function prints]")
    return [torch.arange(6.0).reshape(2, 3).T, torch.empty(0), torch.tensor(1.0)]

def arrays():
    polyfill(np.ndarray)
    readonly = np.arange(3.0)
    readonly.flags.writeable = False
    return [np.arange(6.0)[::2], readonly]

def number():
    return 1.0

def none():
    return []

pythonapi = ctypes.pythonapi
get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", pythonapi))
capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", pythonapi))
NAME = b"dlpack_exchange_api"
OWN = ffi.cast("DLPackExchangeAPI *", get(torch.Tensor.__dlpack_c_exchange_api__, NAME))
TAKES = {"managed_tensor_from_py_object_no_sync": 2, "dltensor_from_py_object_no_sync": 2, "current_work_stream": 3}
kept = []

def with_another(name, change, fails=0):
    '''A tensor of a type whose function `name` does `change` to what it was given, after the right thing.'''
    arguments = [ctypes.c_void_p] * TAKES[name]
    right = ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)(int(ffi.cast("intptr_t", getattr(OWN, name))))

    @ctypes.PYFUNCTYPE(ctypes.c_int, *arguments)
    def wrong(*given):
        code = right(*given)
        change(*given)
        return fails or code

    table = ffi.new("DLPackExchangeAPI *", OWN[0])
    setattr(table, name, ffi.cast(ffi.typeof(getattr(table, name)), ctypes.cast(wrong, ctypes.c_void_p).value))
    kept.append((table, wrong))
    address = int(ffi.cast("intptr_t", table))

    class Other(torch.Tensor):
        __dlpack_c_exchange_api__ = capsule(address, NAME, None)

    return torch.arange(6.0).reshape(2, 3).as_subclass(Other)

def shown(out):
    return ffi.cast("DLManagedTensorVersioned **", out)[0].dl_tensor

EXPORT, VIEW = "managed_tensor_from_py_object_no_sync", "dltensor_from_py_object_no_sync"

def leaks():
    return with_another(EXPORT, lambda ob, out: pythonapi.Py_IncRef(ctypes.py_object(ctypes.cast(ob, ctypes.py_object).value)))

def without_strides():
    return with_another(EXPORT, lambda ob, out: setattr(shown(out), "strides", ffi.NULL))

def of_another_type():
    return with_another(EXPORT, lambda ob, out: setattr(shown(out).dtype, "bits", 16))

def writes_nothing():
    return with_another(EXPORT, lambda ob, out: ctypes.memset(out, 0, 8))

def fails():
    return with_another(EXPORT, lambda ob, out: None, -1)

def elsewhere():
    return with_another(VIEW, lambda ob, out: setattr(ffi.cast("DLTensor *", out), "byte_offset", 4))

def crashes():
    return with_another(VIEW, lambda ob, out: ctypes.string_at(0))

def no_stream():
    return with_another("current_work_stream", lambda *given: None, -1)
"""
WRONG = {
    "leaks": "exports hold the tensor and let it go: a hundred exports and their deleters leave +100 references to the tensor",
    "without_strides": "managed_tensor_from_py_object_no_sync: its strides are NULL",
    "of_another_type": "the same as __dlpack__: its dtype is (2, 16, 1), and that of __dlpack__ (2, 32, 1)",
    "writes_nothing": "managed_tensor_from_py_object_no_sync: it returned 0, and wrote no tensor",
    "fails": "managed_tensor_from_py_object_no_sync: it returned -1, and set no exception",
    "elsewhere": "dltensor_from_py_object_no_sync: it says ",
    "crashes": "dltensor_from_py_object_no_sync: the process that checked it ended by SIGSEGV",
    "no_stream": "current_work_stream: it returned -1 for device (1, 0), and set no exception",
    "number": "table: float has no attribute __dlpack_c_exchange_api__",
}
pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(not hasattr(torch, "Tensor") or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
                                         reason="PyTorch 2.10 or newer has a table"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("conformance")
    (made / "tables.py").write_text(TABLES)
    return made


@pytest.mark.parametrize(("name", "count"), [("tensors", 30), ("arrays", 20)])
def test_right_tables(folder, name, count):
    done = run("conformance", f"tables:{name}", path=folder)
    assert done.returncode == 0 and f"all {count} right" in done.stdout and "wrong" not in done.stdout, done.stdout
    assert ("readonly" in done.stdout) == (name == "arrays") and "what the function prints" not in done.stdout


@pytest.mark.parametrize("name", at_night(WRONG, "of_another_type", "fails", "crashes", "no_stream"))
def test_wrong_tables(folder, name):
    done = run("conformance", f"tables:{name}", path=folder)
    wrong = [line.removeprefix("wrong  ") for line in done.stdout.splitlines() if line.startswith("wrong  ")]
    assert done.returncode == 1 and any(line.startswith(WRONG[name]) for line in wrong), done.stdout


@pytest.mark.parametrize(("what", "said"), [
    ("tables", "name a function that makes a tensor"), ("tables:nothing", "has no 'nothing'"), ("tables:none", "made no tensor"),
    ("tables:NAME", "is no function"), ("no_such_module:f", "cannot be imported"),
])  # fmt: skip
def test_bad_input(folder, what, said):
    done = run("conformance", what, path=folder)
    assert done.returncode == 2 and said in done.stderr and not done.stdout, done


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_table_that_the_documents_show(tmp_path):
    """The C of ``docs/users/producers.md`` is that of the example, whose table is right."""
    source = (ROOT / "examples/exchange_table/vectors.c").read_text()
    shown = re.findall(r"^```c\n(.*?)^```", (ROOT / "docs/users/producers.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(shown) == 3 and [each for each in shown if each not in source] == []
    (tmp_path / "dlpack.h").write_text(f"#include <stdint.h>\n{CDEF}")
    (tmp_path / "made.py").write_text("import vectors\ndef tensors(): return [vectors.zeros(5), vectors.zeros(0)]\n")
    options = ["-Wall", "-Werror", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", f"-I{tmp_path}"]
    subprocess.run([COMPILER, *options, "-o", tmp_path / "vectors.so", "-xc", "-"], input=source, text=True, check=True)
    done = run("conformance", "made:tensors", path=tmp_path)
    assert done.returncode == 0 and "all 20 right" in done.stdout, done.stdout
