"""``conformance``: tables that are right, and what it says of tables that are not."""

import re
import subprocess
import sysconfig

import pytest
from frameworks import torch
from nights import at_night
from shell import COMPILER, ROOT, run

from fastexchange.ground.dlpack import CDEF

WRONG = {
    "leaks": "exports hold the tensor and let it go: a hundred exports and their deleters leave +100 references to the tensor",
    "without_strides": "managed_tensor_from_py_object_no_sync: its strides are NULL",
    "of_another_type": "the same as __dlpack__: dtype (2, 16, 1), __dlpack__ says (2, 32, 1)",
    "writes_nothing": "managed_tensor_from_py_object_no_sync: it returned 0, and wrote no tensor",
    "fails": "managed_tensor_from_py_object_no_sync: it returned -1, and set no exception",
    "sets_an_exception": "managed_tensor_from_py_object_no_sync: it returned 0 and left ValueError set",
    "elsewhere": "dltensor_from_py_object_no_sync: address 0x",
    "of_other_strides": "dltensor_from_py_object_no_sync: strides (7, 7), the export says (3, 1)",
    "refuses_views": "dltensor_from_py_object_no_sync: it refuses readonly memory by ValueError",
    "crashes": "dltensor_from_py_object_no_sync: the process that checked it ended by SIGSEGV",
    "exits": "dltensor_from_py_object_no_sync: the process that checked it ended by exit code 0",
    "hangs": "dltensor_from_py_object_no_sync: did not end within 20 s",
    "deletes_at_once": "managed_tensor_to_py_object_no_sync: it called the deleter, and the tensor that it made lives",
    "imports_other_strides": "managed_tensor_to_py_object_no_sync: strides (1, 2), the export that it got says (3, 1)",
    "borrows_the_shape": "managed_tensor_allocator: shape (",
    "allocates_only_matrices": "managed_tensor_allocator: shape (2, 3), the prototype says (2, 3, 4)",
    "tells_and_returns_0": "managed_tensor_allocator: for 2**80 elements it called SetError, and returned 0",
    "no_stream": "current_work_stream: it returned -1, and set no exception",
    "a_stream": "current_work_stream: it wrote 0x101010101010101 for the CPU",
    "silent_stream": "current_work_stream: it returned 0 for device (1, 0), and wrote no stream",
    "number": "table: float has no attribute __dlpack_c_exchange_api__",
}
"""By the function of `TABLES` that makes its tensor: what is said of a table."""
NOT_MADE = {"fails": 8, "sets_an_exception": 8, "writes_nothing": 8, "crashes": 4, "exits": 4, "hangs": 4, "number": 9}
"""How many of the ten checks could not be made."""
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


@pytest.mark.parametrize("name", at_night(WRONG, "of_another_type", "fails", "exits", "sets_an_exception", "deletes_at_once"))
def test_wrong_tables(folder, name):
    done = run("conformance", f"tables:{name}", "--timeout", "20", path=folder)
    *lines, last = done.stdout.splitlines()
    wrong = [line.removeprefix("wrong  ") for line in lines if line.startswith("wrong  ")]
    assert done.returncode == 1 and any(line.startswith(WRONG[name]) for line in wrong), done.stdout
    assert "_Wrong" not in done.stdout and "_Described" not in done.stdout
    assert ("not made" in last) == (name in NOT_MADE), last
    if name in NOT_MADE:
        assert len(wrong) == 1 and last.endswith(f"; not made: {NOT_MADE[name]} of 10 checks"), done.stdout
    if name == "fails":
        assert "-      current_work_stream: not checked: needs an export" in lines


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


TABLES = """
import ctypes, os, time
import numba
import numpy as np
import torch
from fastexchange import polyfill
from fastexchange._abi import ffi
from fastexchange.ground import cpython
from fastexchange.ground.native import address_of, cstring, global_address

def tensors():
    print("[what the function prints]")
    return [MATRIX.T, torch.empty(0), torch.tensor(1.0)]

def readonly():
    polyfill(np.ndarray)
    array = np.arange(3.0)
    array.flags.writeable = False
    return array

arrays = lambda: [np.arange(6.0)[::2], readonly()]
number = lambda: 1.0
none = lambda: []

pythonapi = ctypes.pythonapi
get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", pythonapi))
capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", pythonapi))
NAME, MATRIX = b"dlpack_exchange_api", torch.arange(6.0).reshape(2, 3)
EXPORT, VIEW, IMPORT = (f"{name}_no_sync" for name in (
    "managed_tensor_from_py_object", "dltensor_from_py_object", "managed_tensor_to_py_object"))
ALLOCATOR, STREAM = "managed_tensor_allocator", "current_work_stream"
TAKES = {EXPORT: 2, VIEW: 2, IMPORT: 2, ALLOCATOR: 4, STREAM: 3}
kept = []

def table_of(tensor):
    return ffi.cast("DLPackExchangeAPI *", get(type(tensor).__dlpack_c_exchange_api__, NAME))

def with_function(name, function, of=MATRIX):
    '''A tensor of a type whose table has this function.'''
    table = ffi.new("DLPackExchangeAPI *", table_of(of)[0])
    address = getattr(function, "address", None) or ctypes.cast(function, ctypes.c_void_p).value
    setattr(table, name, ffi.cast(ffi.typeof(getattr(table, name)), address))
    kept.append((table, function))

    class Other(type(of)):
        __dlpack_c_exchange_api__ = capsule(address_of(table), NAME, None)

    return of.view(Other) if isinstance(of, np.ndarray) else of.as_subclass(Other)

def with_another(name, change=lambda *given: None, returns=None, prepare=lambda *given: None, of=MATRIX):
    '''The function does `change` to what it was given, after the right thing, and returns what that has returned.'''
    arguments = [ctypes.c_void_p] * TAKES[name]
    prototype = ctypes.CFUNCTYPE if name == ALLOCATOR else ctypes.PYFUNCTYPE
    right = prototype(ctypes.c_int, *arguments)(address_of(getattr(table_of(of), name)))

    @prototype(ctypes.c_int, *arguments)
    def wrong(*given):
        prepare(*given)
        code = right(*given)
        change(*given)
        return code if returns is None else returns

    return with_function(name, wrong, of)

def raising(code):
    '''It sets an exception, as a callback of ctypes cannot, and returns `code`.'''
    @numba.cfunc("int32(intp, intp)")
    def wrong(ob, out):
        cpython.PyErr_SetString(global_address("PyExc_ValueError"), cstring("no"))
        return code

    return wrong

shown = lambda out: ffi.cast("DLManagedTensorVersioned **", out)[0].dl_tensor
viewed = lambda out: ffi.cast("DLTensor *", out)
STRIDES = ffi.new("int64_t[]", [7, 7])
hold = lambda ob: pythonapi.Py_IncRef(ctypes.py_object(ctypes.cast(ob, ctypes.py_object).value))
leaks = lambda: with_another(EXPORT, lambda ob, out: hold(ob))
without_strides = lambda: with_another(EXPORT, lambda ob, out: setattr(shown(out), "strides", ffi.NULL))
of_another_type = lambda: with_another(EXPORT, lambda ob, out: setattr(shown(out).dtype, "bits", 16))
writes_nothing = lambda: with_another(EXPORT, lambda ob, out: ctypes.memset(out, 0, 8))
fails = lambda: with_another(EXPORT, returns=-1)
sets_an_exception = lambda: with_function(EXPORT, raising(0))
elsewhere = lambda: with_another(VIEW, lambda ob, out: setattr(viewed(out), "byte_offset", 4))
of_other_strides = lambda: with_another(VIEW, lambda ob, out: setattr(viewed(out), "strides", STRIDES))
refuses_views = lambda: with_function(VIEW, raising(-1), of=readonly())
crashes = lambda: with_another(VIEW, lambda ob, out: ctypes.string_at(0))
exits = lambda: with_another(VIEW, lambda *given: os._exit(0))
hangs = lambda: with_another(VIEW, lambda *given: time.sleep(1000))
no_stream = lambda: with_another(STREAM, returns=-1)
a_stream = lambda: with_another(STREAM, lambda kind, number, out: ctypes.memset(out, 1, 8))
silent_stream = lambda: with_function(STREAM, ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(lambda *given: 0))
tells_and_returns_0 = lambda: with_another(ALLOCATOR, returns=0)

def deletes_at_once():
    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def wrong(managed, out):
        '''The import gets an export of its own; the one that was given is deleted.'''
        given = ffi.cast("DLManagedTensorVersioned *", managed)
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address_of(given.deleter))(managed)
        made_here = torch.Tensor.view(made, 2, 3).as_subclass(type(made))
        pythonapi.Py_IncRef(ctypes.py_object(made_here))
        ctypes.c_void_p.from_address(out).value = id(made_here)
        return 0

    made = with_function(IMPORT, wrong)
    return made

def turn(managed, out):
    strides = ffi.cast("DLManagedTensorVersioned *", managed).dl_tensor.strides
    strides[0], strides[1] = 1, 2

def lend_the_shape(prototype, out, *rest):
    if ffi.cast("DLManagedTensorVersioned **", out)[0]:
        shown(out).shape = viewed(prototype).shape

flatten = lambda prototype, *rest: setattr(viewed(prototype), "ndim", 2)
imports_other_strides = lambda: with_another(IMPORT, prepare=turn)
borrows_the_shape = lambda: with_another(ALLOCATOR, lend_the_shape)
allocates_only_matrices = lambda: with_another(ALLOCATOR, prepare=flatten, of=torch.arange(24.0).reshape(2, 3, 4))
"""
