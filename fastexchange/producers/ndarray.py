"""``numpy.ndarray``: read from its C struct, which NumPy has kept stable since 1.7 and which is verified at import.

NumPy has no ``__dlpack_c_exchange_api__`` of its own yet. The shim reads the struct in place; other consumers get
:data:`dltensor_from_py_object_no_sync`, in the table that ``numpy_table`` makes.

Source: NumPy's C API, ``PyArrayObject_fields`` and ``PyArray_Descr`` (numpy/ndarraytypes.h).
"""

import sys

import numpy as np
from numba import types

from .._abi import ffi
from ..compiled import cfunction
from ..cpython import PyErr_SetString
from ..dltensor import dl_tensor_at
from ..dtypes import plain_fields_by_type_number
from ..native import cstring, global_address, load, native, static_array, store, struct_at

CDEF = """
typedef struct {
    fx_object ob_base;
    void *data;
    int32_t nd;
    int64_t *dimensions;
    int64_t *strides;           /* in bytes */
    void *base;
    void *descr;
    int32_t flags;
} fx_ndarray;

typedef struct { fx_object ob_base; void *typeobj; char kind; char type; char byteorder; char flags; int32_t type_num; }
    fx_descr;
"""

ndarray_at = struct_at("fx_ndarray")
descr_at = struct_at("fx_descr")

C_CONTIGUOUS, F_CONTIGUOUS, FLAG_ALIGNED, FLAG_WRITEABLE = 0x0001, 0x0002, 0x0100, 0x0400
SWAPPED = ord(">") if sys.byteorder == "little" else ord("<")


def verify() -> bool:
    """Whether arrays and dtypes of this NumPy lie in memory as declared above."""
    base = np.zeros((3, 4, 5), np.float32)
    readonly = np.zeros(7, np.int16)
    readonly.flags.writeable = False
    misaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
    arrays = [base, base.T, base[::2, 1:, ::-1], base[0, 0, 0:0], np.zeros(()), readonly, misaligned, np.zeros(2, ">i4")]
    return all(_reads_as_declared(array) for array in arrays)


def _reads_as_declared(array: np.ndarray) -> bool:
    if type(array).__basicsize__ < ffi.sizeof("fx_ndarray"):
        return False
    view = ffi.cast("fx_ndarray *", id(array))
    flags = array.flags
    expected = (
        C_CONTIGUOUS * flags.c_contiguous | F_CONTIGUOUS * flags.f_contiguous
        | FLAG_ALIGNED * flags.aligned | FLAG_WRITEABLE * flags.writeable
    )  # fmt: skip
    if (
        view.nd != array.ndim
        or int(ffi.cast("intptr_t", view.data)) != array.ctypes.data
        or int(ffi.cast("intptr_t", view.descr)) != id(array.dtype)
        or view.flags & (C_CONTIGUOUS | F_CONTIGUOUS | FLAG_ALIGNED | FLAG_WRITEABLE) != expected
        or tuple(view.dimensions[i] for i in range(array.ndim)) != array.shape
        or tuple(view.strides[i] for i in range(array.ndim)) != array.strides
    ):
        return False
    descr = ffi.cast("fx_descr *", id(array.dtype))
    return descr.type_num == array.dtype.num and descr.byteorder.decode() == array.dtype.byteorder


_RING_WORDS = 1 << 17  # 1 MiB: the strides of at least 2048 arrays, exported one after the other, stay valid


@native
def strides_ring(words):
    """The address of `words` words of static memory, good until about 1 MiB more has been asked for."""
    ring = static_array("strides_ring", _RING_WORDS)
    cursor = static_array("strides_cursor", 1)
    at = load(cursor)
    if at + words > _RING_WORDS:
        at = 0
    store(cursor, at + words)
    return ring + 8 * at


DTYPE_FIELDS = np.array(plain_fields_by_type_number(), np.int64)


@native
def dl_data_type(type_num):
    """DLPack's code and bits of a NumPy type number; bits 0 if DLPack has none."""
    field = DTYPE_FIELDS[type_num] if 0 <= type_num < 64 else 0
    return field & 0xFF, field >> 8


@native
def buffer_error(message):
    PyErr_SetString(global_address("PyExc_BufferError"), message)
    return types.int32(-1)


@cfunction(types.int32, types.intp, types.intp)
def dltensor_from_py_object_no_sync(py_object, out):
    """Fill the DLTensor at `out` with a borrowed view of the ndarray `py_object` (DLPack 1.3).

    Data and shape belong to the array. Strides, which DLPack counts in elements and NumPy in bytes, lie in static memory
    that is used again after some thousand more exports. A readonly array is refused: a borrowed view cannot say it.
    Needs the GIL. Returns 0, or -1 with BufferError set.
    """
    array = ndarray_at(py_object)
    descr = descr_at(array.descr)
    tensor = dl_tensor_at(out)
    if array.flags & FLAG_WRITEABLE == 0:
        return buffer_error(cstring("a readonly array cannot be lent as a DLTensor, which has no readonly flag"))
    if descr.byteorder == SWAPPED:
        return buffer_error(cstring("an array in swapped byte order cannot be exported by DLPack"))
    code, bits = dl_data_type(descr.type_num)
    if bits == 0:
        return buffer_error(cstring("an array of this dtype cannot be exported by DLPack"))
    ndim = array.nd
    itemsize = bits >> 3
    strides = strides_ring(ndim)
    for i in range(ndim):
        stride = load(array.strides + 8 * i)
        if stride % itemsize != 0:
            return buffer_error(cstring("an array whose strides are no multiple of its item size cannot be exported"))
        store(strides + 8 * i, stride // itemsize)
    tensor.data = array.data
    tensor.device.device_type = 1
    tensor.device.device_id = 0
    tensor.ndim = ndim
    tensor.dtype.code = code
    tensor.dtype.bits = bits
    tensor.dtype.lanes = 1
    tensor.shape = array.dimensions
    tensor.strides = strides
    tensor.byte_offset = 0
    return types.int32(0)



