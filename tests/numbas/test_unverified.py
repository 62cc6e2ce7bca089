"""An interpreter, a NumPy or a Numba whose objects do not lie in memory as native code assumes.

Results are the same by the next safer way, and ``explain`` and ``doctor`` say so. PyTorch's are in ``test_torch_views.py`` and
``test_torch.py``, Numba's functions in ``test_numba_internals.py``.
"""

import array
import ctypes
import mmap
import sys
import types

import pytest
from forked import needs_fork
from interpreter import copy_native_code
from other_ways import run_changed
from raising import check_raises

from fastexchange._abi import ffi
from fastexchange.arguments import buffer
from fastexchange.ground import cpython
from fastexchange.ground.cfunction import code_cache
from fastexchange.ground.readable import checked_address, is_readable
from fastexchange.producers import ndarray, numpy_table

CHANGED = """
import sys
from types import SimpleNamespace
from fastexchange._abi import ffi
from fastexchange.arguments import buffer, numbers, strings
from fastexchange.dispatch import lists, runtime
from fastexchange.ground import cpython
from fastexchange.producers import ndarray
exec(sys.argv[2])
import numpy as np
from array import array
from other_ways import check

changed = sys.argv[1].split()
kernel, length = check()
text = str(kernel.explain(2.0, np.ones(3), (1.0, 2.0))) + str(length.explain("abc", np.float32(1), array("h", [1, 2])))
for what in changed:
    assert f"layout of {what} is" in text or f"layout {what!r} is" in text, text
from fastexchange.command import probe
for each in probe._native():
    assert each.status in ("ok", "slow", "-"), each
    if "is not as expected" in each.text:
        assert each.status == "slow"
        break  # all that follows takes seconds
else:
    raise AssertionError("doctor does not say it")
if {"object", "tuple", "meminfo", "dispatcher"} & {*changed}:
    assert kernel.counts().fast == 0
"""
LAYOUTS = [  # what is read lies elsewhere than it does in this interpreter: of an object its count, too
    {"object": "cpython.OB_TYPE += 8"}, {"object": "cpython._word = lambda at, word=cpython._word: word(at) + 1"},
    {"tuple": "cpython.OB_ITEM -= 8"},  # as with code for CPython 3.13 on 3.14
    {"tuple": "cpython.OB_SIZE -= 8", "dispatcher": "cpython.KERNEL_CONTEXT -= 8"},
    {"meminfo": "moved = lambda kind, at: ffi.cast(kind, at + 8 if kind == 'intptr_t *' else at)\n"
                "runtime.ffi = SimpleNamespace(cast=moved, new=ffi.new, callback=ffi.callback)"},
    {"float": "cpython._double = lambda at: 0.0", "complex": "cpython.OB_FVAL -= 8",
     "float32": "numbers.NUMPY_SCALAR_VALUE -= 8"},
    {"ndarray": "moved = lambda kind, at: ffi.cast(kind, at + 8 * isinstance(at, int))\n"
                "ndarray.ffi = SimpleNamespace(cast=moved, sizeof=ffi.sizeof)",
     "list": "lists.ITEMS += 8",
     "str": "strings.fields_of = lambda numba_type, own=strings.fields_of: own(numba_type)[::-1]",
     "Py_buffer": "view_of = lambda view: ffi.cast('fx_buffer *', buffer.address_of(view) + 8)\n"
                  "reads = buffer._reads_as_declared\n"
                  "buffer._reads_as_declared = lambda view, right: reads(view_of(view), right)"},
    {"list": "lists.fields_of = lambda numba_type, own=lists.fields_of: own(numba_type)[::-1]",  # by its fields
     "str": "swapped = lambda extract: lambda text, length, kind, *more: extract(text, kind, length, *more)\n"  # as it is read
            "strings._is_read = lambda extract, text, size, own=strings._is_read: own(swapped(extract), text, size)"},
]  # fmt: skip


@needs_fork
@pytest.mark.parametrize("changes", LAYOUTS, ids=" and ".join)
def test_a_layout_that_has_changed_is_noticed(changes):
    run_changed(CHANGED, " ".join(changes), "\n".join(changes.values()))


KEPT_ELSEWHERE = """
import sys
from fastexchange.ground import cpython, numba_code
from fastexchange.dispatch import read_arguments
if sys.argv[1] == "other":
    for module, name in ((cpython, "OB_ITEM"), (read_arguments, "OB_ITEM"), (numba_code, "TUPLE_ITEMS")):
        setattr(module, name, getattr(module, name, 0) + 8)
    read_arguments.walk.address
else:
    import numpy as np
    from fastexchange import fast_args
    x = np.arange(3.0)
    assert fast_args(lambda pair: pair[0].sum() + pair[1][1])((x, x)) == 4.0
"""


@pytest.mark.slow
@needs_fork
def test_code_that_another_layout_has_left_on_disk(tmp_path):
    """As when a prerelease of CPython, whose tuples are larger or smaller, is replaced by the next, which has the same ABI."""
    if code_cache.directory is not None:  # but for what is compiled for the other layout
        copy_native_code(tmp_path, "*read_arguments*")
    for which in ("other", "own"):
        run_changed(KEPT_ELSEWHERE, which, NUMBA_CACHE_DIR=str(tmp_path))


class Moved:
    """A view of a C struct of which one field lies elsewhere."""

    def __init__(self, view, field: str, step: int):
        self.view, self.field = view, field
        self.elsewhere = ffi.cast(ffi.typeof(view), int(ffi.cast("intptr_t", view)) + step)

    def __getattr__(self, name):
        return getattr(self.elsewhere if name == self.field else self.view, name)


def moving(field: str, step: int) -> types.SimpleNamespace:
    """``ffi`` that makes views of which one field lies elsewhere."""

    def cast(kind, at):
        return Moved(ffi.cast(kind, at), field, step) if isinstance(at, int) else ffi.cast(kind, at)

    return types.SimpleNamespace(cast=cast, sizeof=ffi.sizeof, buffer=ffi.buffer, NULL=ffi.NULL)


METHODS = str.isascii, dict.values, int.real
FIELDS = [  # a module, what it verifies, the fields, and the steps by which they lie elsewhere
    (ndarray, ndarray.verify, ["data", "nd", "dimensions", "strides", "descr", "flags", "byteorder", "type_num"], (-8, 8, 24)),
    (cpython, lambda: any(map(cpython.function_of, METHODS)), ["type", "name", "definition"], (-8, 8, 16)),
]


@pytest.mark.parametrize(("module", "verify", "field", "step"), [
    (module, verify, field, step) for module, verify, fields, steps in FIELDS for field in fields for step in steps
])  # fmt: skip
def test_each_field_is_verified(module, verify, field, step, monkeypatch):
    """Of NumPy's arrays, and of descriptors. No word is followed that is no address: many are NULL, or small numbers."""
    assert verify() and all(map(cpython.function_of, METHODS))
    monkeypatch.setattr(module, "ffi", moving(field, step))
    assert not verify()


@pytest.mark.parametrize("step", (-8, 8, 24))
@pytest.mark.parametrize("field", ["len", "itemsize", "readonly", "ndim", "format", "shape", "strides", "buf"])
def test_each_field_of_buffers_is_verified(field, step):
    views = [memoryview(array.array("h", range(24))).cast("B").cast("h", (4, 6))[::2], memoryview(b"abc")]
    found = []
    for view in views:
        own = ffi.new("char[]", 3 * ffi.sizeof("fx_buffer"))  # a field may be read before or behind the struct
        at = ffi.cast("fx_buffer *", own + ffi.sizeof("fx_buffer"))
        buffer.acquire_buffer(view, buffer.address_of(at), buffer.PyBUF_STRIDED_RO_FORMAT)
        assert buffer._reads_as_declared(at, view)
        found.append(buffer._reads_as_declared(Moved(at, field, step), view))
        buffer.release_buffer(buffer.address_of(at))
    assert not all(found)


@pytest.mark.parametrize("name", ["_ABI", "_ARRAY_TYPE"])
def test_a_numpy_with_another_abi(name, monkeypatch):
    """Its C functions may have other places: none is called but the one that tells, whose place is for ever the first."""
    assert numpy_table._find_numpy_api()
    monkeypatch.setattr(numpy_table, name, getattr(numpy_table, name) + 1)
    assert not numpy_table._find_numpy_api()


def test_addresses_that_cannot_be_read():
    text = ffi.new("char[16]")
    at = int(ffi.cast("intptr_t", text))
    assert is_readable(at, 16) and is_readable(at + 1, 1, alignment=1) and checked_address(at, 16) == at
    for word in (0, at + 1, -8, 2**63 - 8, 2**64):
        assert not is_readable(word, 8)
        check_raises(ValueError, "no address", checked_address, word, 8)


@pytest.mark.skipif(sys.platform == "win32", reason="memory is protected by another function")
def test_protected_memory_cannot_be_read(monkeypatch):
    """Nor is that found out in a file of Linux, which other systems lack."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(at + page, page, 0) == 0

    def missing(path, *options, **more):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", missing)
    seen = [is_readable(at + offset, 16) for offset in (0, page - 16, page - 8, page)], is_readable(8, 8)
    monkeypatch.undo()
    assert seen == ([True, True, False, False], False)
    plenty = ctypes.create_string_buffer(1 << 22)
    assert not is_readable(ctypes.addressof(plenty), len(plenty), 1), "more than a pipe holds, for which no call waits"
