"""An exchange table for any type with ``__dlpack__`` and ``__dlpack_device__``, the array API's protocol.

``dltensor_from_py_object_no_sync`` of this table is NULL, which DLPack allows: consumers then use the owning export, which calls
the method.

Source: https://dmlc.github.io/dlpack/latest/python_spec.html, DLPack 1.3.
"""

from numba import types

from .._abi import ffi
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import VERSION
from ..ground.dltensor import DL_TENSOR, DL_TENSOR_WORDS, MANAGED_BYTES, READONLY, READONLY_IS_ASSUMED, managed_at
from ..ground.native import call_word, cstring, global_address, load, native, offset_of, stack, store, struct_at
from ..ground.once import once
from ..producers.framework import PLAIN, framework_of_type
from ..producers.python_side import python_side
from .exchange_tables import EXCHANGE_ATTRIBUTE
from .kind import Discovery
from .tensors import exported

legacy_at = struct_at("DLManagedTensor")
LEGACY_DL_TENSOR = offset_of("DLManagedTensor", "dl_tensor")


@cfunction(types.void, types.intp)
def delete_legacy(managed):
    """Deleter of a DLManagedTensorVersioned that wraps a legacy DLManagedTensor, its ``manager_ctx``."""
    legacy = managed_at(managed).manager_ctx
    deleter = legacy_at(legacy).deleter
    if deleter != 0:
        call_word(deleter, (legacy,))
    c.PyMem_RawFree(managed)


@native
def wrap_legacy(legacy, deleter):
    """Make a DLManagedTensorVersioned that owns the DLManagedTensor at `legacy`. Returns 0 if there is no memory."""
    at = c.PyMem_RawMalloc(MANAGED_BYTES)
    if at == 0:
        return 0
    managed = managed_at(at)
    managed.version.major = 1
    managed.version.minor = 0
    managed.manager_ctx = legacy
    managed.deleter = deleter
    managed.flags = READONLY | READONLY_IS_ASSUMED
    for i in range(DL_TENSOR_WORDS):
        store(at + DL_TENSOR + 8 * i, load(legacy + LEGACY_DL_TENSOR + 8 * i))
    return at


python_items = python_side("fastexchange.arguments.dunder")


@native
def take(capsule, out):
    """Consume a new capsule: fill the pointer at `out` with its export, rename it to ``used_…``, and drop it.

    Returns: 0, or -1 with an exception set.
    """
    side = python_items()
    if side == 0:
        c.Py_DecRef(capsule)
        return types.int32(-1)
    managed = 0
    if c.PyCapsule_IsValid(capsule, cstring("dltensor_versioned")) != 0:
        managed = c.PyCapsule_GetPointer(capsule, cstring("dltensor_versioned"))
        c.PyCapsule_SetName(capsule, cstring("used_dltensor_versioned"))
    elif c.PyCapsule_IsValid(capsule, cstring("dltensor")) != 0:
        legacy = c.PyCapsule_GetPointer(capsule, cstring("dltensor"))
        managed = wrap_legacy(legacy, c.PyLong_AsSsize_t(load(side + 32)))
        if managed != 0:
            c.PyCapsule_SetName(capsule, cstring("used_dltensor"))
        else:
            c.PyErr_SetNone(global_address("PyExc_MemoryError"))
    else:
        refused = c.PyObject_CallOneArg(load(side + 24), capsule)
        if refused != 0:
            c.Py_DecRef(refused)
    c.Py_DecRef(capsule)
    if managed == 0:
        return types.int32(-1)
    store(out, managed)
    return types.int32(0)


@native
def export(py_object, out):
    """Fill the pointer at `out` with an owning export of `py_object`.

    Calls ``__dlpack__(max_version=(1, 3))`` and, if that raises a TypeError, ``__dlpack__()``, and consumes the capsule. A
    subclass of TypeError (pyarrow's for an array with nulls) is no sign of an older method: CPython raises none. Does not
    call ``__dlpack_device__`` first: the consumer reads the device in the tensor, and on the CPU it has no stream to pass
    (PyTorch's ``__dlpack_device__`` takes 1.3 µs).

    Returns: 0, or -1 with an exception set. Owns: the caller calls the deleter once. GIL: held; runs Python code.
    """
    side = python_items()
    if side == 0:
        return types.int32(-1)
    arguments = stack(2)
    store(arguments, py_object)
    store(arguments + 8, load(side + 8))
    capsule = c.PyObject_VectorcallMethod(load(side), arguments, 1, load(side + 16))
    if capsule == 0:
        if c.PyErr_Occurred() != global_address("PyExc_TypeError"):
            return types.int32(-1)
        c.PyErr_Clear()
        capsule = c.PyObject_VectorcallMethod(load(side), arguments, 1, 0)
        if capsule == 0:
            return types.int32(-1)
    return take(capsule, out)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """:data:`export` for this package, with the flag READONLY_IS_ASSUMED where it applies."""
    return export(py_object, out)


@cfunction(types.int32, types.intp, types.intp)
def lent_managed_tensor_from_py_object_no_sync(py_object, out):
    """:data:`export` for other consumers, with DLPack's own flags only."""
    failed = export(py_object, out)
    if failed == 0:
        managed_at(load(out)).flags &= ~READONLY_IS_ASSUMED
    return failed


def _refuse_capsule(result):
    """Raise BufferError for a result of ``__dlpack__`` that is no unconsumed DLPack capsule."""
    detail = repr(result) if type(result) is c.CapsuleType else f"an object of type {type(result).__name__}"
    raise BufferError(f"__dlpack__ returned {detail}, not an unconsumed capsule named 'dltensor_versioned' or 'dltensor'")


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made (the last one compiled) on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return "__dlpack__", VERSION, ("max_version",), _refuse_capsule, delete_legacy.address


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_to_py_object_no_sync(tensor, out_py_object):
    """Set BufferError and return -1: a table for all types cannot know the type of the new tensor."""
    c.PyErr_SetString(
        global_address("PyExc_BufferError"),
        cstring("a type without an exchange table makes tensors with its framework's from_dlpack only"),
    )
    return types.int32(-1)


@once
def exchange_table():
    """The ``DLPackExchangeAPI *`` for all types with ``__dlpack__`` and without a table. It is never freed."""
    from ..producers import numpy_table

    table = ffi.new("DLPackExchangeAPI *")
    table.header.version.major, table.header.version.minor = VERSION
    for function in (
        numpy_table.managed_tensor_allocator, lent_managed_tensor_from_py_object_no_sync,
        managed_tensor_to_py_object_no_sync, numpy_table.current_work_stream,
    ):  # fmt: skip
        name = function.__name__.removeprefix("lent_")
        setattr(table, name, ffi.cast(ffi.typeof(getattr(table, name)), function.address))
    return table


DUNDER = exported("dunder", "its __dlpack__ is called", is_read_on_device=False)


def find_by_python(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """A type of tensors whose views Python makes (``Framework.as_numpy``), because native code is switched off."""
    is_tensor_type = framework_of_type(cls) is not PLAIN or (hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"))
    return Discovery(DUNDER, {"asks_python": 1}, notes) if is_tensor_type else None


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """A type with ``__dlpack__`` and ``__dlpack_device__``."""
    if not hasattr(cls, "__dlpack__"):
        return None
    if not hasattr(cls, "__dlpack_device__"):
        notes.append("it has __dlpack__ but no __dlpack_device__")
        return None
    if not notes:
        notes.append(f"it has no {EXCHANGE_ATTRIBUTE}: each call calls its __dlpack__")
    return Discovery(DUNDER, {"managed": managed_tensor_from_py_object_no_sync.address, "asks_python": 1}, notes)
