"""Every way by which a tensor leaves a framework and comes back, and what is asked of the frameworks themselves.

Functions of exchange tables are called as by a consumer written in C: with the GIL (``PYFUNCTYPE``, which also raises what they
set), the allocator and the deleters without it (``CFUNCTYPE``).
"""

import ctypes
import functools
import gc
import mmap
import pickle
import sys
import time

import numpy as np
import pytest
from frameworks import torch, tvm_ffi
from interoperability import ALL_TARGETS, PRODUCERS, PYARROWS, elements, ml_dtypes, of_kind
from interoperability import LAYOUTS as MATRIX_LAYOUTS
from oracle import ONE_REFERENCE

from made_producers import (  # isort: skip
    DLPACK_CODES, TABLE_CAPSULE, Dunder, Ignorant, Legacy, Tabled, Wrapper, Wraps, address_of, capsule_name, object_at,
)
from fastexchange import convert, exchange_api, from_dlpack, to_dlpack
from fastexchange.ground.dlpack import ffi
from fastexchange.ground.dtype_registry import ML_DTYPES

ATTRIBUTE, OLDER = "__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"
READONLY, COPIED, PADDED = 1, 2, 4
CPU = (1, 0)
SWAPPED = ">" if sys.byteorder == "little" else "<"

needs_tvm_ffi = pytest.mark.skipif(tvm_ffi is None, reason="apache-tvm-ffi is not installed")
needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
needs_the_attribute_free = pytest.mark.skipif(hasattr(np.ndarray, ATTRIBUTE), reason="this NumPy has a table of its own")

# ---- tables, as C calls them -----------------------------------------------------------------------------------------
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def table_in(made):
    return ffi.cast("DLPackExchangeAPI *", _pointer(made, TABLE_CAPSULE))


def call(function, *arguments: int) -> int:
    return ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(arguments))(address_of(function))(*arguments)


TABLE = table_in(exchange_api(np.ndarray))
_int, _at = ctypes.c_int, ctypes.c_void_p
ALLOCATE = ctypes.CFUNCTYPE(_int, _at, _at, _at, _at)(address_of(TABLE.managed_tensor_allocator))
EXPORT = ctypes.PYFUNCTYPE(_int, ctypes.py_object, _at)(address_of(TABLE.managed_tensor_from_py_object_no_sync))
IMPORT = ctypes.PYFUNCTYPE(_int, _at, _at)(address_of(TABLE.managed_tensor_to_py_object_no_sync))
BORROW = ctypes.PYFUNCTYPE(_int, ctypes.py_object, _at)(address_of(TABLE.dltensor_from_py_object_no_sync))
STREAM = ctypes.PYFUNCTYPE(_int, _int, ctypes.c_int32, _at)(address_of(TABLE.current_work_stream))
UNTOUCHED = 0x1DEA


def exported(x, table=TABLE):
    out = ffi.new("DLManagedTensorVersioned **")
    assert call(table.managed_tensor_from_py_object_no_sync, id(x), address_of(out)) == 0
    return out[0]


def delete(managed, prototype=ctypes.CFUNCTYPE):
    prototype(None, _at)(address_of(managed.deleter))(address_of(managed))


def imported(managed) -> np.ndarray:
    """The array that is made of a managed tensor, which it then owns."""
    out = ffi.new("intptr_t *")
    assert IMPORT(address_of(managed), address_of(out)) == 0
    made = object_at(out[0])
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))
    assert sys.getrefcount(made) == ONE_REFERENCE and type(made) is np.ndarray
    return made


def borrowed(array):
    out = ffi.new("DLTensor *")
    assert BORROW(array, address_of(out)) == 0
    return out


def failing(function, argument):
    """Call a table's function that fails: it leaves what it was to fill as it was."""
    out = ffi.new("intptr_t[16]", [UNTOUCHED] * 16)
    try:
        function(argument, address_of(out))
    finally:
        assert out[0] == UNTOUCHED


def words(pointer, count: int) -> tuple[int, ...]:
    return tuple(pointer[i] for i in range(count))


def counted(strides, array) -> list[int]:
    """Those strides that count: of dimensions of several elements."""
    return [strides[i] for i in range(array.ndim) if array.shape[i] > 1] if array.size else []


def check_describes(tensor, array: np.ndarray, field=None) -> None:
    """A DLTensor is that array: the same memory, the same extents, the strides that count. `field`: DLPack's code and bits."""
    assert address_of(tensor.data) + tensor.byte_offset == array.ctypes.data or not array.size
    assert (tensor.device.device_type, tensor.device.device_id) == CPU
    field = field or NARROW.get(array.dtype.name) or (DLPACK_CODES[array.dtype.kind], 8 * array.itemsize)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (*field, 1)
    assert tensor.ndim == array.ndim and words(tensor.shape, array.ndim) == array.shape
    compact = [stride // 8 for stride in np.broadcast_to(np.float64(0), array.shape).copy().strides]
    strides = words(tensor.strides, array.ndim) if tensor.strides != ffi.NULL else compact
    assert [array.itemsize * stride for stride in counted(strides, array)] == counted(array.strides, array)


def managed_in(capsule):
    name = capsule_name(capsule)
    kind = {b"dltensor_versioned": "DLManagedTensorVersioned *", b"dltensor": "DLManagedTensor *"}[name]
    return ffi.cast(kind, _pointer(capsule, name))


_USED = ctypes.c_char_p(b"used_dltensor_versioned")  # a capsule keeps a pointer to its name


def taken_from(capsule):
    managed = managed_in(capsule)
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), _USED)
    return managed


Sub = type("Sub", (np.ndarray,), {})


class ByCachedProperty(Wrapper):
    __dlpack_c_exchange_api__ = functools.cached_property(lambda self: self.inner)


class BySlot(Wraps):
    __slots__ = (ATTRIBUTE, "inner")

    def __init__(self, inner):
        self.inner = self.__dlpack_c_exchange_api__ = inner


WRAPPERS = [Wrapper, ByCachedProperty, BySlot]


def _mapped(array):
    made = mmap.mmap(-1, array.size)
    made[:] = array.tobytes()
    return made


SOURCES = {
    **{name.replace("`", ""): make for name, make in PRODUCERS.items()},
    "exchange table": Tabled,
    "max_version ignored": Ignorant,
    "subclass of ndarray": lambda array: array.view(Sub),
    "PickleBuffer": pickle.PickleBuffer,
    "mmap": of_kind("bytes", _mapped),
    "wrapper of a table's": lambda array: BySlot(Tabled(array)),
    "wrapper of __dlpack__": lambda array: ByCachedProperty(Dunder(array)),
    "wrapper of legacy __dlpack__": lambda array: Wrapper(Legacy(array)),
    "wrapper of a wrapper of a memoryview": lambda array: Wrapper(BySlot(memoryview(array))),
}
"""By name: what makes a tensor over an array's memory, or over a copy of its own, or raises."""
if torch is not None:
    SOURCES["wrapper of PyTorch's"] = lambda array: Wrapper(SOURCES["torch.Tensor"](array))
ALWAYS_READONLY = ("jax.Array", "pyarrow.Array", "bytes", "only legacy __dlpack__", "max_version ignored",
                   "wrapper of legacy __dlpack__")  # fmt: skip
"""Immutable, or exported by legacy capsules, which cannot say that they are not."""
VECTORS = ("array.array", "bytearray", "bytes", "ctypes array", "pyarrow.Array", "mmap")
"""Sources of plain vectors only; nothing is readonly there but what always is."""
OF_ALL_DTYPES = ("numpy.ndarray", "subclass of ndarray", "wrapper of an ndarray")
"""Sources that have dtypes beyond NumPy's own."""
COUNTED = (Tabled, Dunder, Legacy, Ignorant)
TARGETS = {"numpy.ndarray": np.ndarray, **ALL_TARGETS, "pyarrow.Array": PYARROWS}
TARGETS = {name: cls for name, cls in TARGETS.items() if cls is not None}
LAYOUTS = {
    **MATRIX_LAYOUTS,
    "all strides negative": lambda a: a.reshape(3, 4)[::-1, ::-1],
    "one element of many": lambda a: a.reshape(3, 4)[1:2, 2:3],
    "3-d permuted": lambda a: a.reshape(2, 3, 2).transpose(1, 2, 0),
    "5-d permuted": lambda a: a.reshape(2, 1, 3, 1, 2).transpose(4, 2, 0, 3, 1),
    "64-d": lambda a: a[:4].reshape((1,) * 31 + (2,) + (1,) * 31 + (2,)),
    "empty and strided": lambda a: a.reshape(3, 4)[::2, 4:],
    "offset": lambda a: a[5:],
    "overlapping": lambda a: np.ndarray((4, 4), a.dtype, a, strides=(2 * a.itemsize, a.itemsize)),
    "empty, strides off the grid": lambda a: np.ndarray((5, 0), a.dtype, a, strides=(2 * a.itemsize + 1, a.itemsize)),
    "one element, strides off the grid": lambda a: np.ndarray((1, 1), a.dtype, a, strides=(3 * a.itemsize + 1, 1)),
}
NARROW = {name: field for name, field in ML_DTYPES.items() if name != "complex32" and hasattr(ml_dtypes, name)}
"""Floats of ml_dtypes: DLPack's code and bits."""


def aligned(dtype="f4") -> np.ndarray:
    """Twelve elements that JAX takes without a copy: it wants an alignment of 64 bytes."""
    dtype = np.dtype(getattr(ml_dtypes, dtype) if str(dtype) in NARROW else dtype)
    raw = np.zeros(12 * dtype.itemsize + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][: 12 * dtype.itemsize].view(dtype)
    array[...] = np.arange(1, 13)
    return array


def tensors(source: str, layout: str, dtypes=("u1", "f4")):
    """``(array, tensor, is_readonly)`` of each dtype and mutability that the source has in that layout."""
    for dtype in dtypes:
        for readonly in (False, True) if source not in VECTORS else (False,):
            array = LAYOUTS[layout](aligned(dtype))
            array.flags.writeable = not readonly
            try:
                tensor = SOURCES[source](array)
            except Exception:  # each framework says no in its own way
                continue
            yield array, tensor, readonly or source in ALWAYS_READONLY


def one(source: str):
    return next(tensors(source, "1-d"))[:2]


class Given:
    def __init__(self, give):
        self.give = give if callable(give) else lambda **_: give

    def __dlpack_device__(self):
        return CPU

    def __dlpack__(self, *, max_version=None, dl_device=None, copy=None, **_):
        return self.give(max_version=max_version, device=dl_device, copy=copy)


def exporter(tensor):
    return Given(functools.partial(to_dlpack, tensor))


to_versioned = functools.partial(to_dlpack, max_version=(1, 0))


def by_its_table(x):
    managed = exported(x, table_in(exchange_api(type(x))))
    assert managed.version.major == 1 and managed.version.minor <= 3 and managed.flags & ~READONLY == 0
    check_describes(managed.dl_tensor, elements(x))
    return imported(managed)


FROM_AND_TO = {
    "from_dlpack": from_dlpack,
    "from_dlpack, keywords": lambda x: from_dlpack(x, dtype=None, copy=None),
    "from_dlpack to the CPU": lambda x: from_dlpack(x, device="cpu"),
    "to_dlpack": to_versioned,
    "to_dlpack, a copy": lambda x: to_versioned(x, copy=True),
}
CALLS = {
    **FROM_AND_TO,
    "convert": lambda x: convert(x, np.ndarray),
    "convert, keywords": lambda x: convert(x, np.ndarray, copy=False),
    "convert, a copy": lambda x: convert(x, np.ndarray, copy=True),
}
"""Every way through the three functions that needs no other framework."""
CONVERSIONS = {f"to {name}": functools.partial(lambda to, x: convert(x, to), to) for name, to in TARGETS.items()}
FORMS = ({}, {}, {"copy": None}, {"copy": False})
"""Options of a call that Python code makes first, where it has to learn something, then native code, then Python code."""


def result_or_exception(call, *arguments, **keywords):
    """What a call returns, or the exception that it raises, whose frames are let go of."""
    try:
        return call(*arguments, **keywords)
    except BaseException as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error


def eventually(condition) -> bool:
    """Whether it comes true: a framework may give memory back from a thread of its own."""
    for i in range(200):
        if condition():
            return True
        if i % 20 == 0:  # a collection takes a second where many frameworks are imported
            gc.collect()
        time.sleep(0.005)
    return False


TABLE_PRELUDE = """
    import ctypes, gc, sys, threading
    import numpy as np
    from fastexchange import exchange_api, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill
    from made_producers import TABLE_CAPSULE, address_of as at, capsule, exchange_table, ffi

    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ffi.cast("DLPackExchangeAPI *", get(exchange_api(np.ndarray), TABLE_CAPSULE))
    call = lambda function, *words: ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(words))(at(function))(*words)
"""
