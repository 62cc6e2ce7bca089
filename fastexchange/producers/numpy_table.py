"""An exchange table for NumPy, which has none: all five functions of DLPack's C exchange API.

NumPy's C API makes the arrays. Its function table is public (``numpy.core.multiarray._ARRAY_API``), and its indices have not
changed since NumPy 1.7. Native code reads the addresses in a static struct, which it finds by its symbol's name, so that its
machine code can be cached on disk.

Source: DLPack 1.3, ``DLPackExchangeAPI``; NumPy's C API, ``numpy/__multiarray_api.h``.
"""

import ctypes

import llvmlite.binding
import numpy as np
from numba import types

from .._abi import ffi
from ..ground import cpython as c
from ..ground import dltensor, dtype_registry
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.dlpack import CPU, VERSION, field_of_type, type_of_field
from ..ground.dltensor import (
    DEVICE,
    DL_TENSOR,
    DTYPE,
    MANAGED_BYTES,
    MAX_NDIM,
    NDIM,
    NULL_DATA,
    OVERFLOW,
    READONLY,
    SHAPE,
    SOUND,
    delete_managed,
    describe,
    dl_tensor_at,
    element_field,
    examine,
    in_elements,
    managed_at,
    new_managed,
)  # fmt: skip
from ..ground.dtypes import plain_fields_by_type_number
from ..ground.native import (
    address_of,
    call_word,
    cstring,
    global_address,
    larger,
    load,
    native,
    stack,
    static_array,
    store,
    struct_at,
)
from ..ground.once import for_ever, once
from ..ground.pythonapi import Py_DecRef, PyCapsule_GetPointer
from ..ground.readable import is_readable
from .ndarray import FLAG_WRITEABLE, descr_at, is_swapped, ndarray_at
from .python_side import python_side

__all__ = ["exchange_table"]

CDEF = """
/* Addresses that the functions of NumPy's table need. */
typedef struct {
    int64_t new_from_descr;     /* PyArray_NewFromDescr */
    int64_t descr_from_type;    /* PyArray_DescrFromType */
    int64_t set_base_object;    /* PyArray_SetBaseObject */
    int64_t array_type;         /* &PyArray_Type */
    int64_t owner_name;         /* char *, the name of a capsule that owns an array's managed tensor */
    int64_t delete_export, delete_block, drop_owner, delete_buffer; /* functions of this package */
} fx_numpy;
"""

_ABI_VERSION, _NEW_FROM_DESCR, _DESCR_FROM_TYPE, _SET_BASE_OBJECT, _ARRAY_TYPE = 0, 94, 45, 282, 2  # numpy/__multiarray_api.h
_ABI = 0x2000000
"""NumPy's number for the places of its C functions (NPY_ABI_VERSION): all of NumPy 2 have this one."""
DATA_ALIGNMENT = 256  # bytes; required by DLPack for allocated memory
MAX_BYTES = 1 << 56


FIELDS = np.array(plain_fields_by_type_number(), np.int64)
"""By NumPy's type number: the dtype field of a plain dtype."""
TYPE_NUMBERS = np.full(8 * 32, -1, np.int64)
"""NumPy's type number, by ``code << 5 | item size``. -1: none."""
for _number, _field in reversed(list(enumerate(FIELDS))):
    if _field:
        TYPE_NUMBERS[(_field & 7) << 5 | _field >> 11] = _number

_numpy_at = struct_at("fx_numpy")


@native
def numpy_state():
    """The process's ``fx_numpy``, found by its symbol's name."""
    return _numpy_at(global_address("fastexchange_numpy"))


@native
def buffer_error(message):
    """Set BufferError. Returns -1."""
    c.PyErr_SetString(global_address("PyExc_BufferError"), message)
    return types.int32(-1)


# ---- dtypes --------------------------------------------------------------------------------------------------------


@native
def field_of(array):
    """The dtype field of an ndarray; 0 if DLPack has no such type, or with an exception set."""
    type_num = types.intp(descr_at(array.descr).type_num)
    if 0 <= type_num < 64 and FIELDS[type_num] != 0:
        return FIELDS[type_num]
    field = 0
    side = python_items()
    if side != 0:
        answer = c.PyObject_CallOneArg(load(side), array.descr)
        if answer != 0:
            field = c.PyLong_AsSsize_t(answer)
            c.Py_DecRef(answer)
    return field


def _registered_field(dtype: np.dtype) -> int:
    key = dtype_registry.key_of(dtype)
    return 0 if key is None else field_of_type(*key)


@native
def descr_of(field):
    """Return a new reference to the dtype object of this field; 0 with an exception set if there is none."""
    code, size = field & 0xFF, field >> 11
    if code < 8 and field >> 8 == 8 * size and size < 32:
        number = TYPE_NUMBERS[code << 5 | size]
        if number >= 0:
            return call_word(numpy_state().descr_from_type, (number,))
    side = python_items()
    if side == 0:
        return 0
    asked = c.PyLong_FromSsize_t(field)
    if asked == 0:
        return 0
    descr = c.PyObject_CallOneArg(load(side + 8), asked)
    c.Py_DecRef(asked)
    return descr


def _registered_dtype(field: int) -> np.dtype:
    dtype = dtype_registry.dtype_of(*type_of_field(field))
    if dtype is None:
        raise BufferError("the tensor's element type has no NumPy dtype")
    return dtype


PYTHON_SIDE = _registered_field, _registered_dtype
"""Native code calls these for dtypes that are not NumPy's own."""
python_items = python_side("fastexchange.producers.numpy_table")


# ---- out of NumPy --------------------------------------------------------------------------------------------------


@native
def is_gil_lost():
    """Whether the interpreter shuts down, so that no thread can take the GIL any more."""
    return c.Py_IsInitialized() == 0


@cfunction(types.void, types.intp)
def delete_export(managed):
    """Deleter of an exported array: drops the array. GIL: not needed; any thread may call, also at shutdown."""
    if not is_gil_lost():  # at shutdown the array is leaked
        state = c.PyGILState_Ensure()
        c.decref(managed_at(managed).manager_ctx)
        c.PyGILState_Release(state)
    c.PyMem_RawFree(managed)


@native
def put_strides(array, ndim, itemsize, strides):
    """Write an ndarray's strides in elements. Returns whether they are whole numbers; unused strides do not count."""
    rest = 0
    count = 1
    for i in range(ndim):
        stride = load(array.strides + 8 * i)
        extent = load(array.dimensions + 8 * i)
        elements = in_elements(stride, itemsize)
        if extent > 1:
            rest |= stride - elements * itemsize
        count *= extent
        store(strides + 8 * i, elements)
    return rest == 0 or count == 0


@native
def exportable_field(array):
    """:func:`field_of` an array, which must be in native byte order. Returns: 0 with an exception set."""
    if is_swapped(array):
        buffer_error(cstring("an array in swapped byte order cannot be exported by DLPack"))
        return 0
    field = field_of(array)
    if field == 0 and PyErr_Occurred() == 0:
        buffer_error(cstring("an array of this dtype cannot be exported by DLPack"))
    return field


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """Fill the pointer at `out` with an owning export of the ndarray `py_object`.

    The export shares the array's memory, and has the readonly flag if the array is readonly.

    Returns: 0, or -1 with an exception set and nothing to release.
    Raises: BufferError for dtypes unknown to DLPack, foreign byte order, and strides that are no multiple of the item size.
    Owns: the caller calls the deleter once. GIL: held; runs Python code for dtypes that are not NumPy's own.
    """
    array = ndarray_at(py_object)
    field = exportable_field(array)
    if field == 0:
        return types.int32(-1)
    ndim = types.intp(array.nd)
    at = new_managed(ndim, 0)
    if at == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return types.int32(-1)
    shape = at + MANAGED_BYTES
    strides = shape + 8 * ndim
    if not put_strides(array, ndim, field >> 11, strides):
        c.PyMem_RawFree(at)
        return buffer_error(cstring("an array whose strides are no multiple of its item size cannot be exported"))
    for i in range(ndim):
        store(shape + 8 * i, load(array.dimensions + 8 * i))
    managed = managed_at(at)
    managed.manager_ctx = py_object
    managed.deleter = numpy_state().delete_export
    managed.flags = types.uint64(array.flags & FLAG_WRITEABLE == 0)
    describe(dl_tensor_at(at + DL_TENSOR), array.data, ndim, field, shape, strides)
    c.incref(py_object)
    store(out, at)
    return types.int32(0)


_RING_WORDS = 1 << 17  # 1 MiB: the strides of the last 2048 or more arrays stay valid


@native
def strides_ring(words):
    """Return the address of `words` words of static memory, which is reused after about 1 MiB of further requests."""
    ring = static_array("strides_ring", _RING_WORDS)
    cursor = static_array("strides_cursor", 1)
    at = load(cursor)
    if at + words > _RING_WORDS:
        at = 0
    store(cursor, at + words)
    return ring + 8 * at


@cfunction(types.int32, types.intp, types.intp)
def dltensor_from_py_object_no_sync(py_object, out):
    """Fill the DLTensor at `out` with a borrowed view of the ndarray `py_object`.

    Data and shape are the array's. Strides, which DLPack counts in elements and NumPy in bytes, are in static memory, which is
    reused after some thousand further exports.

    Returns: 0, or -1 with an exception set. Raises: BufferError, also for a readonly array, because a borrowed view has no flags.
    GIL: held; runs Python code for dtypes that are not NumPy's own.
    """
    array = ndarray_at(py_object)
    if array.flags & FLAG_WRITEABLE == 0:
        return buffer_error(cstring("a readonly array cannot be borrowed as a DLTensor, which has no readonly flag"))
    field = exportable_field(array)
    if field == 0:
        return types.int32(-1)
    ndim = types.intp(array.nd)
    strides = strides_ring(ndim)
    if not put_strides(array, ndim, field >> 11, strides):
        return buffer_error(cstring("an array whose strides are no multiple of its item size cannot be exported"))
    describe(dl_tensor_at(out), array.data, ndim, field, array.dimensions, strides)
    return types.int32(0)


# ---- into NumPy ----------------------------------------------------------------------------------------------------


@cfunction(types.void, types.intp)
def drop_owner(capsule):
    """Destructor of the capsule that owns an array's managed tensor.

    At shutdown the tensor is leaked, because a deleter that was made in Python, such as a cffi callback, may be gone.
    """
    managed = c.PyCapsule_GetPointer(capsule, numpy_state().owner_name)
    if managed != 0 and c.is_finalizing() == 0:
        delete_managed(managed)


@native
def raise_unsound(status):
    """Set BufferError for a status of ``ground.dltensor.examine``."""
    if status == DEVICE:
        buffer_error(cstring("the tensor's memory is on a device that the CPU cannot read; copy it to the CPU first"))
    elif status == DTYPE:
        buffer_error(cstring("the tensor's elements have several lanes, for which NumPy has no dtype"))
    elif status == NDIM:
        buffer_error(cstring("the tensor has fewer than 0 or more than 64 dimensions"))
    elif status == SHAPE:
        buffer_error(cstring("the tensor's shape is missing or has a negative extent"))
    elif status == OVERFLOW:
        buffer_error(cstring("the tensor's number of elements, its strides or its offset overflow 64 bits"))
    elif status == NULL_DATA:
        buffer_error(cstring("the tensor's data pointer is NULL although its shape is not empty"))
    else:
        buffer_error(cstring("the tensor was exported with a DLPack ABI of another major version than 1"))


@native
def array_over(at):
    """Make an ndarray over a managed tensor's memory, which it does not own yet. Returns 0 with an exception set."""
    managed = managed_at(at)
    tensor = dl_tensor_at(at + DL_TENSOR)
    if managed.version.major != 1:
        raise_unsound(dltensor.VERSION)
        return 0
    field = element_field(tensor)
    descr = descr_of(field)
    if descr == 0:
        return 0
    status = examine(tensor)  # here, because no Python code runs after this
    if status != SOUND:
        c.Py_DecRef(descr)
        raise_unsound(status)
        return 0
    ndim = types.intp(tensor.ndim)
    data = tensor.data + types.intp(tensor.byte_offset)
    strides = 0
    if tensor.strides != 0 and data != 0:
        strides = stack(MAX_NDIM)
        for i in range(ndim):
            store(strides + 8 * i, load(tensor.strides + 8 * i) * (field >> 11))
    flags = FLAG_WRITEABLE if data != 0 else 0  # if NumPy allocates the memory, these flags would mean the order
    state = numpy_state()
    array = call_word(state.new_from_descr, (state.array_type, descr, ndim, tensor.shape, strides, data, flags, 0))
    if array != 0 and managed.flags & READONLY != 0:
        ndarray_at(array).flags &= ~FLAG_WRITEABLE
    return array


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_to_py_object_no_sync(tensor, out_py_object):
    """Store at `out_py_object` a new ndarray over the memory of the DLManagedTensorVersioned at `tensor`.

    The array is readonly if the export is, or if it is a legacy export, which has no flags.

    Returns: 0, or -1 with an exception set. Raises: BufferError for memory that NumPy cannot view.
    Owns: on success the array owns the tensor, and its deleter is called once, when the last view has died. On failure the caller
    still owns it, as with PyTorch's function. GIL: held.
    """
    array = array_over(tensor)
    if array == 0:
        return types.int32(-1)
    state = numpy_state()
    owner = c.PyCapsule_New(tensor, state.owner_name, 0)
    if owner == 0 or call_word(state.set_base_object, (array, owner)) & 0xFFFFFFFF != 0:  # steals the reference to the owner
        c.Py_DecRef(array)
        return types.int32(-1)
    c.PyCapsule_SetDestructor(owner, state.drop_owner)
    store(out_py_object, array)
    return types.int32(0)


# ---- memory and streams --------------------------------------------------------------------------------------------


@cfunction(types.void, types.intp)
def delete_block(managed):
    """Deleter of a tensor in one memory block. GIL: not needed; any thread may call."""
    c.PyMem_RawFree(managed)


@native
def report_error(error_ctx, set_error, kind, message):
    """Call the allocator's `set_error`, unless it is NULL. Returns -1."""
    if set_error != 0:
        call_word(set_error, (error_ctx, kind, message))
    return types.int32(-1)


@cfunction(types.int32, types.intp, types.intp, types.intp, types.intp)
def managed_tensor_allocator(prototype, out, error_ctx, set_error):
    """Store a new managed tensor at `out`, row-major, with device, dtype and shape of the DLTensor at `prototype`.

    Memory is uninitialised and aligned to 256 bytes.

    Returns: 0, or -1 after a call of `set_error`, unless that is NULL, with ``BufferError`` for an impossible prototype, or
    ``MemoryError``. GIL: not needed.
    """
    wanted = dl_tensor_at(prototype)
    invalid = cstring("BufferError")
    no_memory = cstring("MemoryError")
    if wanted.device.device_type != CPU:
        return report_error(error_ctx, set_error, invalid, cstring("NumPy allocates memory of the CPU (kDLCPU) only"))
    ndim = types.intp(wanted.ndim)
    if ndim < 0 or ndim > MAX_NDIM or (ndim > 0 and wanted.shape == 0):
        return report_error(error_ctx, set_error, invalid, cstring("the prototype needs a shape of 0 to 64 dimensions"))
    bits = types.intp(wanted.dtype.bits) * types.intp(wanted.dtype.lanes)
    if bits == 0 or bits & 7 != 0:
        return report_error(error_ctx, set_error, invalid, cstring("the prototype's elements are not of whole bytes"))
    count = 1
    is_empty = False
    for i in range(ndim):
        extent = load(wanted.shape + 8 * i)
        if extent < 0:
            return report_error(error_ctx, set_error, invalid, cstring("the prototype has a negative extent"))
        if extent > 0:
            if count > MAX_BYTES // (bits >> 3) // extent:
                return report_error(error_ctx, set_error, no_memory, cstring("the prototype has too many elements for memory"))
            count *= extent
        is_empty |= extent == 0
    size = 0 if is_empty else count * (bits >> 3)
    at = new_managed(ndim, DATA_ALIGNMENT + size)
    if at == 0:
        return report_error(error_ctx, set_error, no_memory, cstring("out of memory"))
    shape = at + MANAGED_BYTES
    strides = shape + 8 * ndim
    stride = 1
    for j in range(ndim):
        i = ndim - 1 - j
        extent = load(wanted.shape + 8 * i)
        store(shape + 8 * i, extent)
        store(strides + 8 * i, stride)
        stride *= larger(extent, 1)
    managed_at(at).deleter = numpy_state().delete_block
    data = (strides + 8 * ndim + DATA_ALIGNMENT - 1) & -DATA_ALIGNMENT
    tensor = dl_tensor_at(at + DL_TENSOR)
    describe(tensor, data, ndim, element_field(wanted), shape, strides)
    tensor.dtype.lanes = wanted.dtype.lanes
    store(out, at)
    return types.int32(0)


@cfunction(types.int32, types.int32, types.int32, types.intp)
def current_work_stream(device_type, device_id, out_current_stream):
    """Set the pointer at `out_current_stream` to NULL, because the CPU has no streams. Returns 0, or -1 for other devices."""
    store(out_current_stream, 0)
    if device_type != CPU:
        return buffer_error(cstring("NumPy's arrays are on the CPU (kDLCPU): it has no stream for another device"))
    return types.int32(0)


# ---- the table -----------------------------------------------------------------------------------------------------

_FUNCTIONS = (
    managed_tensor_allocator, managed_tensor_from_py_object_no_sync, managed_tensor_to_py_object_no_sync,
    dltensor_from_py_object_no_sync, current_work_stream,
)  # fmt: skip

_state = for_ever(ffi.new("fx_numpy *"))
_owner_name = for_ever(ffi.new("char[]", b"fastexchange.managed_tensor"))


llvmlite.binding.add_symbol("fastexchange_numpy", address_of(_state))


@once
def exchange_table():
    """NumPy's ``DLPackExchangeAPI *``, which is never freed; None if a layout of NumPy or CPython is not as expected."""
    if not c.verify()["object"] or not _find_numpy_api():
        return None
    _state.owner_name = address_of(_owner_name)
    for function in (delete_export, delete_block, drop_owner):
        setattr(_state, function.__name__, function.address)
    table = ffi.new("DLPackExchangeAPI *")
    table.header.version.major, table.header.version.minor = VERSION
    for function in _FUNCTIONS:
        name = function.__name__
        setattr(table, name, ffi.cast(ffi.typeof(getattr(table, name)), function.address))
    return table if _makes_arrays(table) else None


def _find_numpy_api() -> bool:
    """Read the addresses of three functions of NumPy's C API."""
    try:
        from numpy._core import multiarray
    except ImportError:
        from numpy.core import multiarray  # type: ignore[no-redef]
    api = ffi.cast("intptr_t *", PyCapsule_GetPointer(multiarray._ARRAY_API, None))
    if not is_readable(api[_ABI_VERSION], 1, 1) or api[_ARRAY_TYPE] != id(np.ndarray):
        return False
    if ctypes.PYFUNCTYPE(ctypes.c_uint)(api[_ABI_VERSION])() != _ABI:  # PyArray_GetNDArrayCVersion
        return False
    _state.array_type = id(np.ndarray)
    _state.new_from_descr = api[_NEW_FROM_DESCR]
    _state.descr_from_type = api[_DESCR_FROM_TYPE]
    _state.set_base_object = api[_SET_BASE_OBJECT]
    return True


def _makes_arrays(table) -> bool:
    """Whether an array that is exported and imported again is equal to the original."""
    for array in (np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2), np.int8), np.array(3, np.complex64)):
        managed, made = ffi.new("DLManagedTensorVersioned **"), ffi.new("intptr_t *")
        if _call(table.managed_tensor_from_py_object_no_sync, id(array), address_of(managed)):
            return False
        if _call(table.managed_tensor_to_py_object_no_sync, address_of(managed[0]), address_of(made)):
            return False
        back = ctypes.cast(made[0], ctypes.py_object).value
        Py_DecRef(back)
        if type(back) is not np.ndarray or back.dtype != array.dtype or not np.array_equal(back, array):
            return False
    return True


def _call(function, *arguments: int) -> int:
    """Call a function of a table with the GIL, which cffi would release."""
    return ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(arguments))(address_of(function))(*arguments)


def set_delete_buffer(address: int) -> None:
    """Give native code the address of ``buffer.delete_buffer``."""
    _state.delete_buffer = address
