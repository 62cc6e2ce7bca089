"""Python's buffer protocol (PEP 3118) as a producer: bytes, bytearray, memoryview, array, mmap, ctypes arrays.

The export owns the ``Py_buffer`` and releases it once. A format has one native format character. The export is readonly if the
buffer is.

Source: CPython's buffer protocol, ``Py_buffer`` (a stable layout since CPython 3.3, part of the limited API since 3.11).
"""

import array
import ctypes
import sys

import numpy as np
from numba import typeof, types

from .._abi import ffi
from ..dispatch import structs
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT
from ..ground.dltensor import DL_TENSOR, MAX_NDIM, describe, dl_tensor_at, in_elements, managed_at, new_managed
from ..ground.native import address_of, cstring, external, global_address, load, native, sizeof, store, struct_at
from ..ground.numba_internals import class_of_buffer
from ..ground.once import once
from ..ground.pythonapi import PyType_GetSlot, prototype
from ..ground.readable import is_readable
from ..producers.numpy_table import buffer_error, is_gil_lost, numpy_state, set_delete_buffer
from .kind import Discovery
from .tensors import exported

__all__ = ["CLASSES", "is_buffer_type", "managed_tensor_from_py_object_no_sync", "numba_class", "prepare"]

CDEF = """
typedef struct {
    void *buf;
    void *obj;
    int64_t len, itemsize;
    int32_t readonly, ndim;
    char *format;
    int64_t *shape, *strides, *suboffsets;
    void *internal;
} fx_buffer;

/* An owning export of a buffer, one block. Its extents and strides follow. */
typedef struct {
    DLManagedTensorVersioned managed;
    fx_buffer buffer;
} fx_buffer_export;
"""

buffer_at = struct_at("fx_buffer")
BUFFER = ffi.offsetof("fx_buffer_export", "buffer")
SHAPE = sizeof("fx_buffer_export")
BUFFER_BYTES = sizeof("fx_buffer")
USUAL_NDIM = 8  # blocks that malloc() reuses at once
PyBUF_STRIDED_RO_FORMAT = 0x18 | 0x04

PyObject_GetBuffer = external("PyObject_GetBuffer", c.INT, c.POINTER, c.POINTER, c.INT)
PyBuffer_Release = external("PyBuffer_Release", types.void, c.POINTER)

FOREIGN_ORDER = (ord(">"), ord("!")) if sys.byteorder == "little" else (ord("<"), ord("<"))


@native
def field_of_format(text, itemsize):
    """The dtype field of a PEP 3118 format of one element; 0 if DLPack has no such type.

    A long has the size of the item, because ctypes writes ``<l`` for one of 8 bytes. For any other character the item must have
    the character's size, because ctypes writes ``B`` for unions and packed structures.
    """
    if text == 0:
        return UINT | 8 << 8
    character = load(text) & 0xFF
    if character in FOREIGN_ORDER and itemsize > 1:
        return 0
    if character in (ord("@"), ord("="), ord("<"), ord(">"), ord("!")):
        text += 1
        character = load(text) & 0xFF
    code = -1
    size = 0
    if character in (ord("b"), ord("h"), ord("i"), ord("l"), ord("q"), ord("n")):
        code = INT
    elif character in (ord("B"), ord("H"), ord("I"), ord("L"), ord("Q"), ord("N")):
        code = UINT
    elif character in (ord("e"), ord("f"), ord("d")):
        code = FLOAT
    elif character == ord("?"):
        code = BOOL
    elif character == ord("Z"):
        text += 1
        character = load(text) & 0xFF
        code = COMPLEX
    if character in (ord("b"), ord("B"), ord("?")):
        size = 1
    elif character in (ord("h"), ord("H"), ord("e")):
        size = 2
    elif character in (ord("i"), ord("I"), ord("f")):
        size = 4
    elif character in (ord("q"), ord("Q"), ord("d"), ord("n"), ord("N")):
        size = 8
    elif character in (ord("l"), ord("L")):
        size = itemsize if itemsize == 4 else 8
    if code == COMPLEX:
        size = 2 * size if character in (ord("f"), ord("d")) else 0
    if code < 0 or size != itemsize or load(text + 1) & 0xFF != 0:
        return 0
    return code | 8 * itemsize << 8


@cfunction(types.void, types.intp)
def delete_buffer(managed):
    """Deleter of an exported buffer. GIL: not needed; any thread may call, also at shutdown."""
    if not is_gil_lost():
        state = c.PyGILState_Ensure()
        PyBuffer_Release(managed + BUFFER)
        c.PyGILState_Release(state)
    c.PyMem_RawFree(managed)


@native
def refuse_format(buffer):
    """Set BufferError for the format of an fx_buffer, which is not NULL. Raises another exception if there is no memory."""
    template = c.PyUnicode_FromString(
        cstring(
            "its buffer's format is %r, items of %d bytes, not one bool, integer, float or complex in native byte order; pass a "
            "view of it with another dtype, for example by numpy.frombuffer()"
        )
    )
    given = c.PyTuple_New(2)
    if template != 0 and given != 0:
        store(given + c.OB_ITEM, c.PyUnicode_FromString(buffer.format))
        store(given + c.OB_ITEM + 8, c.PyLong_FromSsize_t(buffer.itemsize))
        if load(given + c.OB_ITEM) != 0 and load(given + c.OB_ITEM + 8) != 0:
            message = c.PyNumber_Remainder(template, given)  # str % tuple
            if message != 0:
                c.PyErr_SetObject(global_address("PyExc_BufferError"), message)
                c.Py_DecRef(message)
    if template != 0:
        c.Py_DecRef(template)
    if given != 0:
        c.Py_DecRef(given)


@native
def fill(at, strides_at):
    """Fill the DLTensor of the fx_buffer_export at `at` from its buffer. `strides_at`: where its strides belong.

    Returns: whether DLPack can describe the buffer. Raises: BufferError if not.
    """
    buffer = buffer_at(at + BUFFER)
    field = field_of_format(buffer.format, buffer.itemsize)
    if field == 0:
        refuse_format(buffer)
        return False
    ndim = types.intp(buffer.ndim)
    if ndim > MAX_NDIM:
        buffer_error(cstring("its buffer has more than 64 dimensions"))
        return False
    compact = buffer.itemsize
    for j in range(ndim):
        i = ndim - 1 - j
        extent = load(buffer.shape + 8 * i)
        stride = load(buffer.strides + 8 * i) if buffer.strides != 0 else compact  # ctypes' buffers have no strides
        compact *= extent
        elements = in_elements(stride, buffer.itemsize)
        if extent > 1 and elements * buffer.itemsize != stride and buffer.len != 0:
            buffer_error(cstring("its buffer's strides are no multiple of its item size"))
            return False
        store(at + SHAPE + 8 * i, extent)
        store(strides_at + 8 * i, elements)
    describe(dl_tensor_at(at + DL_TENSOR), buffer.buf, ndim, field, at + SHAPE, strides_at)
    managed_at(at).flags = types.uint64(buffer.readonly != 0)
    return True


@native
def open_buffer(py_object, room):
    """Make an fx_buffer_export with room for `room` dimensions, and get an object's buffer. Returns 0 with an exception set."""
    at = new_managed(room, BUFFER_BYTES)
    if at == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    if PyObject_GetBuffer(py_object, at + BUFFER, PyBUF_STRIDED_RO_FORMAT) != 0:
        c.PyMem_RawFree(at)
        return 0
    return at


@native
def export(py_object, out):
    """Fill the pointer at `out` with an owning export of an object's buffer.

    Returns: 0; -1 with an exception set, and nothing to release. Raises: BufferError for a buffer that DLPack cannot describe.
    Owns: the caller calls the deleter once. The buffer is held until then, so a bytearray, for example, cannot be resized.
    GIL: held; runs Python code only if a class written in Python has ``__buffer__``.
    """
    room = USUAL_NDIM
    at = open_buffer(py_object, room)
    if at != 0 and buffer_at(at + BUFFER).ndim > room:
        PyBuffer_Release(at + BUFFER)
        c.PyMem_RawFree(at)
        room = MAX_NDIM
        at = open_buffer(py_object, room)
    if at == 0:
        return types.int32(-1)
    if not fill(at, at + SHAPE + 8 * room):
        PyBuffer_Release(at + BUFFER)
        c.PyMem_RawFree(at)
        return types.int32(-1)
    managed_at(at).deleter = numpy_state().delete_buffer
    store(out, at)
    return types.int32(0)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """:func:`export` as a function for an exchange table."""
    return export(py_object, out)


# ---- types ---------------------------------------------------------------------------------------------------------

_FUNCTION = ctypes.CFUNCTYPE(None).__mro__[1]  # ctypes' type of functions, which also has the buffer protocol
_CDATA = ctypes.Array.__mro__[1]  # the base of all ctypes types
_GETBUFFER = 1  # Py_bf_getbuffer, typeslots.h; static types have slots for PyType_GetSlot from CPython 3.10 on

CLASSES = (types.Array, types.Buffer, types.Bytes, types.ByteArray, types.MemoryView, types.PyArray)
"""Numba's types for buffers, by their numbers in keys. All have the same layout."""


def is_buffer_type(cls: type) -> bool:
    """Whether instances of `cls` are tensors by the buffer protocol. NumPy's scalars and ctypes' functions are not."""
    return has_buffer(cls) and (issubclass(cls, bytes) or not issubclass(cls, (np.generic, _FUNCTION)))


def has_buffer(cls: type) -> bool:
    """Whether instances of `cls` have the buffer protocol."""
    return bool(PyType_GetSlot(cls, _GETBUFFER))


def numba_class(cls: type) -> int:
    """Return the index in :data:`CLASSES` of the type that ``numba.typeof`` gives instances of `cls`.

    The index of arrays if it gives none, because it cannot read the formats of ctypes.
    """
    return 0 if issubclass(cls, (ctypes.Array, ctypes._SimpleCData)) else CLASSES.index(class_of_buffer(cls))


def memory_of(cls: type) -> int:
    """The offset in instances of `cls` of their memory's address if ``ctypes.resize`` can change it; else 0."""
    return object.__basicsize__ if issubclass(cls, _CDATA) else 0


def is_numba_only(thing) -> bool:
    """Whether `thing` is a buffer that only Numba can describe: its strides are no multiples of its item size."""
    if not is_buffer_type(type(thing)):
        return False
    try:
        view = memoryview(thing)
        typeof(thing)  # raises for formats that Numba cannot read
    except Exception:  # Numba's dispatcher raises its own error
        return False
    with view:
        steps = zip(view.shape or (), view.strides or (), strict=True) if view.nbytes else ()
        return any(extent > 1 and stride % view.itemsize for extent, stride in steps)


def prepare() -> bool:
    """Compile or load the native functions. Returns False if the layout of ``Py_buffer`` is not as declared."""
    set_delete_buffer(delete_buffer.address)
    return _is_verified()


acquire_buffer = prototype("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
release_buffer = prototype("PyBuffer_Release", None, ctypes.c_void_p)


@once
def _is_verified() -> bool:
    data = array.array("h", range(24))
    for view in (memoryview(data), memoryview(b"abc"), memoryview(data).cast("B").cast("h", (4, 6))[::2]):
        buffer = ffi.new("fx_buffer *")
        acquire_buffer(view, address_of(buffer), PyBUF_STRIDED_RO_FORMAT)
        is_right = _reads_as_declared(buffer, view)
        release_buffer(address_of(buffer))
        if not is_right:
            return False
    return True


def _reads_as_declared(buffer, view: memoryview) -> bool:
    """Whether an ``fx_buffer`` says what Python says of the same buffer. No word is followed that is no address."""
    numbers = buffer.len, buffer.itemsize, buffer.readonly, buffer.ndim
    pointers = ((buffer.format, 2, 1), (buffer.shape, 8 * view.ndim, 8), (buffer.strides, 8 * view.ndim, 8), (buffer.buf, 1, 1))
    if numbers != (view.nbytes, view.itemsize, view.readonly, view.ndim):
        return False
    if not all(is_readable(address_of(pointer), size, alignment) for pointer, size, alignment in pointers):
        return False
    return (
        ffi.string(buffer.format, 2).decode("latin-1"), tuple(buffer.shape[i] for i in range(view.ndim)),
        tuple(buffer.strides[i] for i in range(view.ndim)), bytes(ffi.buffer(buffer.buf, 1)),
    ) == (view.format, view.shape, view.strides, view.tobytes()[:1])  # fmt: skip


_BUFFER = exported("buffer", "its buffer is taken for the call", structs.FORM_BUFFER)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """A type with the buffer protocol and no faster path."""
    if not is_buffer_type(cls):
        return None
    if not prepare():
        notes.append("the layout of Py_buffer is not as expected")
        return None
    notes.append("it has the buffer protocol only: each call takes its buffer")
    fields = {
        "managed": managed_tensor_from_py_object_no_sync.address, "key": numba_class(cls) << structs.CLASS_SHIFT,
        "memory": memory_of(cls),
    }  # fmt: skip
    return Discovery(_BUFFER, fields, notes)
