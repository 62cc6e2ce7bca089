"""Read ``__cuda_array_interface__``: :class:`ArrayInterface` any of them, native code the usual ones.

Native code returns -1 for an unusual interface. The launch then reads it by :class:`ArrayInterface`, which raises the errors.

The packages' own arrays have ``strides: None`` also for arrays that are not contiguous, for example broadcast ones. Their
attribute ``strides`` is read instead, as the packages do.

Source: CUDA Array Interface, version 3.
"""

import operator
import sys

import numpy as np
from numba import types

from .._abi import ffi
from ..dispatch.runtime import runtime
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM, Py_TYPE
from ..ground.dlpack import BOOL, COMPLEX, CUDA, CUDA_HOST, CUDA_MANAGED, FLOAT, INT, UINT, VERSION
from ..ground.dltensor import INTERFACE_STREAM, MAX_NDIM, READONLY, managed_at
from ..ground.dtype_registry import key_of
from ..ground.native import call_int, global_address, load, native, stack, store
from ..ground.safe_repr import is_type, shown
from ..producers.python_side import python_side
from . import launch_structs
from .targets import is_of_package

__all__ = ["ArrayInterface", "managed_tensor_of_device_array", "managed_tensor_of_interface"]

OB_SIZE = c.OB_SIZE
INTERFACE_OWNER, INTERFACE_EXTENTS = INTERFACE_STREAM + 8, INTERFACE_STREAM + 16  # the strides follow
_EXTENT_BYTES = 8 * MAX_NDIM
INTERFACE_BYTES = INTERFACE_EXTENTS + 2 * _EXTENT_BYTES
_NAMES = ("__cuda_array_interface__", "version", "data", "typestr", "shape", "strides", "mask", "stream")
_INTERFACE, _VERSION, _DATA, _TYPESTR, _SHAPE, _STRIDES, _MASK, _OWN_STREAM, _CUDA = (8 * i for i in range(len(_NAMES) + 1))
_HAS_STREAM = 3  # the first version of the interface with a stream
_ORDINAL, _IS_MANAGED, _MEMORY_TYPE = 9, 8, 2  # CU_POINTER_ATTRIBUTE_…
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_LESS, _BAR, _EQUALS, _ZERO = map(ord, "<|=0")
_B, _C, _F, _I, _U = map(ord, "bcfiu")

python_items = python_side("fastexchange.cuda.array_interface")


# ---- any interface -------------------------------------------------------------------------------------------------


class ArrayInterface:
    """The ``__cuda_array_interface__`` of an array of numbers. Nothing of it is trusted.

    The object refers to the interface, not to the array. Its methods raise BufferError for what the protocol does not allow.
    """

    __slots__ = ("_dtype", "_fields")

    def __init__(self, fields: dict, dtype: np.dtype):
        self._fields, self._dtype = fields, dtype

    @classmethod
    def of(cls, value) -> "ArrayInterface | None":
        """The interface of an array of numbers; None for any other object, such as an array of records."""
        found = None if is_type(value) else getattr(value, "__cuda_array_interface__", None)
        if found is None:
            return None
        if is_of_package(type(value)):
            # The packages' own arrays give bytes as the type of bfloat16, and None as the strides of broadcast arrays.
            found = {**found, "typestr": value.dtype, "strides": tuple(value.strides)}
        if found["typestr"] is None:
            raise TypeError("the typestr in its array interface is None")  # NumPy takes None for float64
        dtype = np.dtype(found["typestr"])
        return None if key_of(dtype) is None else cls(found, dtype)

    @property
    def has_stream(self) -> bool:
        """Whether the interface's version is one that names the producer's stream."""
        version = self._fields.get("version")
        return type(version) is int and version >= _HAS_STREAM

    @property
    def stream(self) -> int | None:
        """The ``CUstream`` on which the producer works; None: nothing has to be waited for."""
        stream = self._fields.get("stream")
        if stream is None:
            return None
        if isinstance(stream, bool) or not hasattr(type(stream), "__index__") or not 0 <= operator.index(stream) < 2**63:
            raise BufferError(f"the stream in its array interface is {shown(stream)}, not None or the handle of a stream")
        return operator.index(stream)

    @property
    def data(self) -> int:
        """The address of the first element; 0 for an empty array."""
        pointer, _ = self._fields["data"]
        return operator.index(pointer or 0)

    @property
    def is_readonly(self) -> bool:
        """Whether the memory must not be written to."""
        _, is_readonly = self._fields["data"]
        return bool(is_readonly)

    def managed_tensor(self, place: tuple[int, int]):
        """Return a ``DLManagedTensorVersioned *`` without a deleter, and the memory to which it refers.

        `place`: (device type, number) of the array's memory.
        """
        fields = self._fields
        if fields.get("mask") is not None:
            raise BufferError("its array interface has a mask, which a kernel would not see")
        shape, strides = tuple(fields["shape"]), fields.get("strides")
        key, itemsize = key_of(self._dtype), self._dtype.itemsize
        assert key is not None
        extents, steps = _int64s("shape", shape), None
        if strides is not None and len(strides) != len(shape):
            raise BufferError(f"its shape has {len(shape)} dimensions, its strides {len(strides)}")
        if strides is not None and shape:
            if any(stride % itemsize for stride in strides):
                raise BufferError("its strides are no multiples of its item size")
            steps = _int64s("strides", [stride // itemsize for stride in strides])
        native = ffi.new("DLManagedTensorVersioned *")
        native.version.major, native.version.minor = VERSION
        native.flags = READONLY if self.is_readonly else 0
        tensor = native.dl_tensor
        tensor.data, tensor.ndim, tensor.shape = ffi.cast("void *", self.data), len(shape), extents
        tensor.strides = ffi.NULL if steps is None else steps
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = key[0], key[1], 1
        tensor.device.device_type, tensor.device.device_id = place
        return native, (extents, steps)


def _int64s(what: str, numbers):
    """Return an ``int64_t[]`` of these numbers, with at least one item."""
    try:
        return ffi.new("int64_t[]", list(numbers) or [0])
    except OverflowError:
        raise BufferError(f"its {what} {shown(numbers)} overflow 64 bits") from None


# ---- usual interfaces, read natively -------------------------------------------------------------------------------


@cfunction(types.void, types.intp)
def delete_interface(managed):
    """Deleter of the tensors of :data:`managed_tensor_of_interface`. GIL: held; these tensors never outlive a call."""
    c.Py_DecRef(load(managed + INTERFACE_OWNER))
    c.PyMem_RawFree(managed)


@native
def is_int(ob, at):
    """Store the int `ob` at `at`. Returns whether it is an exact int of at most 64 bits."""
    if Py_TYPE(ob) != global_address("PyLong_Type"):
        return False
    overflow = stack(1)
    store(overflow, 0)
    store(at, types.intp(c.PyLong_AsLongLongAndOverflow(ob, overflow)))
    return load(overflow) & 0xFFFFFFFF == 0


@native
def are_ints(ob, at):
    """Store the ints of the tuple `ob` from `at` on. Returns their number; -1 if `ob` is no exact tuple of such ints."""
    if Py_TYPE(ob) != global_address("PyTuple_Type"):
        return -1
    count = load(ob + OB_SIZE)
    if count > MAX_NDIM:
        return -1
    for i in range(count):
        if not is_int(load(ob + OB_ITEM + 8 * i), at + 8 * i):
            return -1
    return count


@native
def element_of(ob):
    """The dtype field, ``code | bits << 8``, of a ``typestr``; -1 for an unusual one."""
    if Py_TYPE(ob) != global_address("PyUnicode_Type"):
        return -1
    size = stack(1)
    text = c.PyUnicode_AsUTF8AndSize(ob, size)
    if text == 0 or text & 7 != 0 or load(size) < 3 or load(size) > 4:  # the text fits into one word
        return -1
    word = load(text)
    order, kind, itemsize = word & 0xFF, word >> 8 & 0xFF, (word >> 16 & 0xFF) - _ZERO
    if itemsize < 1 or itemsize > 9:
        return -1
    if load(size) == 4:
        unit = (word >> 24 & 0xFF) - _ZERO
        if unit < 0 or unit > 9:
            return -1
        itemsize = 10 * itemsize + unit
    if order != _LESS and order != _BAR and order != _EQUALS:
        return -1
    code = -1
    if itemsize == 1 or itemsize == 2 or itemsize == 4 or itemsize == 8:
        if kind == _I:
            code = INT
        elif kind == _U:
            code = UINT
        elif kind == _F and itemsize > 1:
            code = FLOAT
        elif kind == _B and itemsize == 1:
            code = BOOL
    if kind == _C and (itemsize == 8 or itemsize == 16):
        code = COMPLEX
    return code | itemsize << 11 if code >= 0 else -1


@native
def find_place(cuda, tensor):
    """:func:`find_place_there` in a current context: the default device's if the thread has none."""
    code = find_place_there(cuda, tensor)
    context = cuda.contexts[cuda.default_device]
    if code == launch_structs.INVALID_CONTEXT and context != 0:
        if call_int(cuda.push_current, (context,)) == 0:
            code = find_place_there(cuda, tensor)
            popped = stack(1)
            call_int(cuda.pop_current, (popped,))
    return code == 0


@native
def find_place_there(cuda, tensor):
    """Set the device of a DLTensor by the driver. Returns a ``CUresult``."""
    number, is_managed, kind = stack(1), stack(1), stack(1)
    store(number, 0)
    store(is_managed, 0)
    store(kind, 0)
    data = tensor.data
    code = call_int(cuda.get_attribute, (number, _ORDINAL, data))
    if code == 0:
        code = call_int(cuda.get_attribute, (is_managed, _IS_MANAGED, data))
    if code == 0:
        code = call_int(cuda.get_attribute, (kind, _MEMORY_TYPE, data))
    tensor.device.device_id = load(number) & 0xFFFFFFFF
    if load(is_managed) & 0xFFFFFFFF != 0:
        tensor.device.device_type = CUDA_MANAGED
    elif load(kind) & 0xFFFFFFFF == _ON_DEVICE:
        tensor.device.device_type = CUDA
    else:
        tensor.device.device_type = CUDA_HOST
    return code


@native
def read(interface, own_strides, side, at):
    """Fill the managed tensor at `at` from the dict `interface`. Returns whether the interface is usual.

    `own_strides`: a borrowed object with the strides, or 0 for the dict's.

    Each value is read completely before the next lookup: with unusual keys a lookup may run Python code, which may change the
    dict.
    """
    managed = managed_at(at)
    tensor = managed.dl_tensor
    pair = stack(1)
    found = c.PyDict_GetItemWithError(interface, load(side + _VERSION))
    if found == 0 or not is_int(found, pair) or load(pair) < _HAS_STREAM:
        return False
    found = c.PyDict_GetItemWithError(interface, load(side + _MASK))
    if found != 0 and found != global_address("_Py_NoneStruct"):
        return False
    found = c.PyDict_GetItemWithError(interface, load(side + _DATA))
    if found == 0 or Py_TYPE(found) != global_address("PyTuple_Type") or load(found + OB_SIZE) != 2:
        return False
    readonly = load(found + OB_ITEM + 8)
    if not is_int(load(found + OB_ITEM), pair) or load(pair) <= 0:
        return False
    if readonly == global_address("_Py_TrueStruct"):
        managed.flags = READONLY
    elif readonly == global_address("_Py_FalseStruct"):
        managed.flags = 0
    else:
        return False
    tensor.data = load(pair)
    found = c.PyDict_GetItemWithError(interface, load(side + _TYPESTR))
    field = element_of(found) if found != 0 else -1
    if field < 0:
        return False
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = field & 0xFF, field >> 8, 1
    found = c.PyDict_GetItemWithError(interface, load(side + _SHAPE))
    ndim = are_ints(found, at + INTERFACE_EXTENTS) if found != 0 else -1
    if ndim < 0:
        return False
    tensor.ndim, tensor.shape, tensor.strides = ndim, at + INTERFACE_EXTENTS, 0
    found = own_strides if own_strides != 0 else c.PyDict_GetItemWithError(interface, load(side + _STRIDES))
    if found != 0 and found != global_address("_Py_NoneStruct"):
        strides = at + INTERFACE_EXTENTS + _EXTENT_BYTES
        if are_ints(found, strides) != ndim:
            return False
        itemsize = field >> 11
        for i in range(ndim):
            elements = load(strides + 8 * i) // itemsize
            if elements * itemsize != load(strides + 8 * i):
                return False
            store(strides + 8 * i, elements)
        tensor.strides = strides
    store(at + INTERFACE_STREAM, 0)
    found = c.PyDict_GetItemWithError(interface, load(side + _OWN_STREAM))
    if found != 0 and found != global_address("_Py_NoneStruct"):
        if not is_int(found, at + INTERFACE_STREAM) or load(at + INTERFACE_STREAM) <= 0:
            return False
    return find_place(launch_structs.cuda_at(c.PyLong_AsSsize_t(load(side + _CUDA))), tensor)


@native
def export(ob, has_strides, out):
    """Fill the pointer at `out` with an owning export of an array with ``__cuda_array_interface__``.

    `has_strides`: whether to read its attribute ``strides``.

    Returns: 0, or -1 for an unusual array, for which :class:`ArrayInterface` raises the error.
    Raises: only exceptions that are no ``Exception``, such as KeyboardInterrupt. GIL: held; runs Python code.
    """
    side = python_items()
    if side == 0:
        return -1
    interface = c.PyObject_GetAttr(ob, load(side + _INTERFACE))
    strides = c.PyObject_GetAttr(ob, load(side + _STRIDES)) if has_strides and interface != 0 else 0
    at = 0
    if interface != 0 and (strides != 0 or not has_strides) and Py_TYPE(interface) == global_address("PyDict_Type"):
        at = c.PyMem_RawMalloc(INTERFACE_BYTES)
    is_usual = False
    if at != 0:
        managed = managed_at(at)
        managed.version.major, managed.version.minor = 1, 0
        managed.manager_ctx, managed.deleter = 0, c.PyLong_AsSsize_t(load(side + _CUDA + 8))
        managed.dl_tensor.byte_offset = 0
        is_usual = read(interface, strides, side, at)
    if c.PyErr_Occurred() != 0:
        is_usual = False
        if c.PyErr_ExceptionMatches(global_address("PyExc_Exception")) != 0:
            c.PyErr_Clear()
    if strides != 0:
        c.Py_DecRef(strides)
    if interface != 0:
        c.Py_DecRef(interface)
    if not is_usual:
        if at != 0:
            c.PyMem_RawFree(at)
        return -1
    c.incref(ob)
    store(at + INTERFACE_OWNER, ob)
    store(out, at)
    return 0


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_of_interface(ob, out):
    """:func:`export` of an array whose interface has its strides."""
    return types.int32(export(ob, False, out))


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_of_device_array(ob, out):
    """:func:`export` of a package's own array."""
    return types.int32(export(ob, True, out))


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .driver import driver

    driver()
    return *map(sys.intern, _NAMES), runtime().native.cuda, delete_interface.address
