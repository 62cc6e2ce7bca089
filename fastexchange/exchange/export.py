"""Owning exports by a type's exchange table, for Python code, and NumPy arrays made of them.

:class:`Export` calls the deleter of an export exactly once, or passes the export on to a new owner.
"""

import ctypes
import sys
from typing import Any, Literal, cast

import numpy as np

from .._abi import ffi
from ..arguments import buffer, dunder
from ..arguments.discovery import discover, exports_itself, learn_type
from ..arguments.ndarrays import NDARRAY, is_masked_array
from ..arguments.others import advice_for
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..ground import dtype_registry
from ..ground.dlpack import DLDeviceType, DLPackFlag, field_of_type, is_readable_by_cpu
from ..ground.dlpack_types import why_not_exported
from ..ground.dltensor import READONLY_IS_ASSUMED
from ..ground.dtypes import bits_of, storage_of
from ..ground.native import address_of
from ..ground.pythonapi import Py_DecRef
from ..ground.safe_repr import a_type_name, type_name
from ..interpreter import DISABLED
from ..producers import numpy_table
from ..producers.framework import framework_of
from ..producers.ndarray import dtype_of
from . import capsules
from .errors import add_note, device_name, status_of, wording

__all__ = ["Export", "export_of", "exporter_of", "exporter_of_another", "is_exportable", "known", "numpy_view"]

COPIED, READONLY = int(DLPackFlag.DLPACK_FLAG_BITMASK_IS_COPIED), int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY)
_WITH_ADDRESSES = (DLDeviceType.kDLCUDA, DLDeviceType.kDLROCM)
"""Device types whose data pointers are addresses, besides those that the CPU can read; those of others may be handles."""
PADDED = int(DLPackFlag.DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED)

# ctypes' PYFUNCTYPE keeps the GIL and raises an exception that the function has set.
_FROM_OR_TO_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_AS_WATCHED = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Export:
    """Owns a ``DLManagedTensorVersioned *``: calls its deleter exactly once, or passes it on.

    Raises the producer's exceptions, and BufferError for an export of another major version.
    """

    def __init__(self, tensor, managed_tensor_from_py_object_no_sync: int):
        self.managed: Any = None
        out = ffi.new("DLManagedTensorVersioned **")
        try:
            failed = _FROM_OR_TO_OBJECT(managed_tensor_from_py_object_no_sync)(id(tensor), address_of(out))
        except BaseException as error:  # the producer may have made an export all the same
            if out[0] != ffi.NULL:
                self.managed = out[0]
                self.release()
            if isinstance(error, RuntimeError):
                raise framework_of(tensor).as_dlpack_raises(tensor, error)  # noqa: B904
            raise
        if failed or out[0] == ffi.NULL:
            raise BufferError(f"{a_type_name(type(tensor))}: its producer failed to export it and did not say why")
        self.managed = out[0]
        if self.managed.version.major != 1:
            self.release()
            raise BufferError(wording(structs.STATUS_VERSION, None))
        if self.managed.flags & int(READONLY_IS_ASSUMED):
            self.managed.flags &= ~int(READONLY_IS_ASSUMED)
            if framework_of(tensor).is_mutable:
                self.managed.flags &= ~READONLY

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()

    @property
    def tensor(self):
        """The ``DLTensor``."""
        return self.managed.dl_tensor

    @property
    def data(self) -> int:
        """The address of the first element."""
        return address_of(self.tensor.data) + self.tensor.byte_offset

    @property
    def device(self) -> tuple[int, int]:
        """Device type and device id."""
        return int(self.tensor.device.device_type), self.tensor.device.device_id

    @property
    def is_on_cpu(self) -> bool:
        """Whether the CPU can read the memory."""
        return is_readable_by_cpu(self.device[0])

    @property
    def is_readonly(self) -> bool:
        """Whether the memory is readonly."""
        return bool(self.managed.flags & READONLY)

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return any(self.tensor.shape[i] == 0 for i in range(self.tensor.ndim))

    @property
    def is_in_c_order(self) -> bool:
        """Whether the elements are contiguous in C order."""
        tensor, expected = self.tensor, 1
        for i in reversed(range(tensor.ndim)):
            if tensor.shape[i] > 1 and tensor.strides != ffi.NULL and tensor.strides[i] != expected:
                return self.is_empty
            expected *= tensor.shape[i]
        return True

    @property
    def runs_backwards(self) -> bool:
        """Whether a stride is negative."""
        tensor = self.tensor
        return tensor.strides != ffi.NULL and any(tensor.strides[i] < 0 and tensor.shape[i] > 1 for i in range(tensor.ndim))

    def into(self, to_object: int):
        """Make a tensor by a ``managed_tensor_to_py_object_no_sync``. The tensor then owns the export.

        After a failure the export has been released, by that function (PyTorch's releases it if it fails late) or here.
        """
        out, told = ffi.new("intptr_t *"), ffi.new("int64_t *")
        watched = self.watch(address_of(told))
        if self.tensor.byte_offset and self.is_on_cpu:  # PaddlePaddle 3.3.1 ignores the offset
            self.tensor.data, self.tensor.byte_offset = ffi.cast("void *", self.data), 0
        try:
            failed = _FROM_OR_TO_OBJECT(to_object)(address_of(watched), address_of(out))
        finally:  # a consumer may have made an object and set an exception
            made = _take(out[0]) if out[0] else None
            if told[0] or made is not None:
                self.managed = None
            if not told[0]:
                watched.told = 0
        if failed or made is None:
            raise BufferError("the tensor's type failed to make one of the export and did not say why")
        return made

    def watch(self, told: int):
        """Wrap the export in an ``fx_watched`` and return that. Its deleter sets the word at `told` to 1, unless that is 0."""
        make = _AS_WATCHED(capsules.as_watched.address)
        at = make(address_of(self.managed), capsules.delete_watched.address, told)
        if not at:
            raise MemoryError("no memory for an export")
        watched = ffi.cast("fx_watched *", at)
        self.managed = ffi.addressof(watched, "managed")
        return watched

    def retype(self, code: int, bits: int, lanes: int = 1) -> None:
        """Change the dtype to another one of the same width. The producer's own struct stays as it is."""
        self.watch(0)
        dtype = self.tensor.dtype
        dtype.code, dtype.bits, dtype.lanes = code, bits, lanes

    def clear_offset(self) -> None:
        """Let the data pointer point to the first element, unless it may be a handle. The producer's struct stays as it is."""
        if self.tensor.byte_offset and (self.is_on_cpu or self.device[0] in _WITH_ADDRESSES):
            self.watch(0)
            self.tensor.data, self.tensor.byte_offset = ffi.cast("void *", self.data), 0

    def capsule(self, is_versioned: bool):
        """Make a capsule, which then owns the export."""
        if ffi.NULL in (self.managed.deleter, self.managed.manager_ctx):  # DLPack allows this, but not every consumer expects it
            self.watch(0)
        made = capsules.capsule_of(address_of(self.managed), is_versioned)
        self.managed = None
        return made

    def passed_on(self) -> "Export":
        """Pass the export on to a new ``Export``."""
        other = Export.__new__(Export)
        other.managed, self.managed = self.managed, None
        return other

    def release(self, is_finalizing=sys.is_finalizing) -> None:
        """Call the deleter, unless the export has been passed on.

        Not while the interpreter ends: then this module's names may be gone, too.
        """
        managed, self.managed = self.managed, None
        if managed is not None and not is_finalizing() and managed.deleter != ffi.NULL:
            _DELETER(address_of(managed.deleter))(address_of(managed))


def _take(address: int):
    """Return the object at `address`; takes over the reference."""
    made = ctypes.cast(address, ctypes.py_object).value
    Py_DecRef(made)
    return made


def export_of(tensor, what: str) -> Export:
    """Export any producer's tensor, after checks that the producer's own export may leave out.

    Raises TypeError, with the function's name `what`, if it is no tensor; BufferError; and the producer's exceptions.
    """
    cls = type(tensor)
    try:
        managed = exporter_of(tensor) or exporter_of_another(tensor)
    except BufferError as error:  # raised by a check
        raise BufferError(f"{what}: {a_type_name(cls)} cannot be exported: {error}") from error
    dtype = _numpys_dtype(tensor) if managed else None
    if dtype is not None and dtype_registry.key_of(dtype) is None:
        kind = "an array" if issubclass(cls, np.ndarray) else "a scalar"
        raise BufferError(f"{what}: DLPack has no name for {kind}'s dtype {dtype!r}: {why_not_exported(dtype)}")
    if managed:
        try:
            if known(cls).get("is_own_memory"):
                tensor = framework_of(tensor).detached(tensor)  # which no other code changes during checks and export
                framework_of(tensor).check(tensor)
            return Export(tensor, managed)
        except Exception as error:
            if type(error) is BufferError and managed == buffer.managed_tensor_from_py_object_no_sync.address:
                raise BufferError(f"{what}: {a_type_name(cls)} cannot be exported: {error}") from error
            add_note(error, f"raised for the argument of {what}, {a_type_name(cls)}")
            raise
    if is_masked_array(cls):
        raise TypeError(f"{what}: DLPack has no masks, so a masked array cannot be exchanged; pass its filled(), or its data")
    if advice := advice_for(tensor, is_one=True):
        raise TypeError(f"{what}: an object of type {type_name(cls)} is no tensor; {advice}")
    tried = "; ".join(["it has no exchange table, no __dlpack__ and no buffer", *discover(cls, tensor).notes[:-1]])
    raise TypeError(f"{what}: an object of type {type_name(cls)} is no tensor: {tried}")


def exporter_of(tensor) -> int:
    """Check `tensor`, and return the address of the function that exports it; 0 if there is none."""
    cls = type(tensor)
    learn_type(cls, tensor)
    managed = known(cls).get("managed", 0)
    if managed:
        framework_of(tensor).check(tensor)
    return managed


def is_exportable(thing) -> bool:
    """Whether there is a function that exports `thing`; it may still refuse."""
    return bool(known(type(thing)).get("managed") or exporter_of_another(thing))


def exporter_of_another(tensor) -> int:
    """The address of the function that exports what its type's entry does not tell to be a tensor; or 0.

    That are scalars of NumPy, arrays for which Numba has rules of its own, and objects with methods of their own.
    """
    cls = type(tensor)
    if issubclass(cls, np.ndarray) and not is_masked_array(cls):  # a subclass for which Numba has rules of its own
        return _of_ndarrays(cls)
    if exports_itself(tensor):
        return dunder.managed_tensor_from_py_object_no_sync.address
    if buffer.has_buffer(cls) and issubclass(cls, np.generic) and buffer.prepare():
        return buffer.managed_tensor_from_py_object_no_sync.address
    return 0


def _of_ndarrays(cls: type) -> int:
    """The address of the function that exports ndarrays of this type."""
    if getattr(cls, "__dlpack__", None) is not np.ndarray.__dlpack__:  # a subclass with a __dlpack__ of its own
        return dunder.managed_tensor_from_py_object_no_sync.address
    table = numpy_table.exchange_table()
    if table is None:
        return dunder.managed_tensor_from_py_object_no_sync.address
    return address_of(table.managed_tensor_from_py_object_no_sync)


def _numpys_dtype(tensor) -> np.dtype | None:
    """The dtype of an array of NumPy, or of a scalar; None for other objects. Bytes are a buffer."""
    if issubclass(type(tensor), np.ndarray):
        return dtype_of(tensor)
    is_scalar = issubclass(type(tensor), np.generic) and not issubclass(type(tensor), bytes)
    return np.generic.dtype.__get__(tensor) if is_scalar else None


def known(cls: type) -> dict[str, int]:
    """The fields of the entry of `cls`, including those that only conversions need."""
    learn_type(cls)
    entries = runtime().entries
    fields = entries.fields(cls)
    if fields["kind"] is NDARRAY and not fields.get("managed"):
        table = numpy_table.exchange_table()
        made = {}
        if table is not None and cls is np.ndarray:
            made = {
                "to_object": address_of(table.managed_tensor_to_py_object_no_sync),
                "allocator": address_of(table.managed_tensor_allocator),
                "takes_all": 1,
            }
        entries.update(cls, managed=_of_ndarrays(cls), **made)
        if made:
            runtime().native.ndarray = id(np.ndarray)
    return entries.fields(cls)


def to_numpy(export: Export, what: str = "", storage: np.dtype | None = None) -> np.ndarray:
    """Make a NumPy array of an export, which the array then owns. Raises BufferError, with the function's name `what`.

    `storage`: return elements without a NumPy dtype as integers of the same size.
    """
    prefix = f"{what}: " if what else ""
    to_object = known(np.ndarray).get("to_object")
    tensor = export.tensor
    status = status_of(tensor)
    if not status and dtype_registry.dtype_of(tensor.dtype.code, tensor.dtype.bits) is None:
        if storage is None:
            status = structs.STATUS_DTYPE
        else:
            export.retype(*cast(tuple, dtype_registry.key_of(storage)))
    if status:
        raise BufferError(prefix + wording(status, tensor))
    return export.into(to_object) if to_object else _Memory(export).array()


class _Memory:
    """An export for ``np.asarray``, whose array keeps it alive: the way where NumPy's C API is not as expected.

    Source: NumPy's array interface, version 3.
    """

    def __init__(self, export: Export):
        dtype = export.tensor.dtype
        self._dtype = cast(np.dtype, dtype_registry.dtype_of(dtype.code, dtype.bits))
        self._export = export.passed_on()

    def __del__(self):
        self._export.release()

    @property
    def __array_interface__(self):
        export = self._export
        tensor, size = export.tensor, self._dtype.itemsize
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = None if tensor.strides == ffi.NULL else tuple(size * tensor.strides[i] for i in range(tensor.ndim))
        data = (export.data, export.is_readonly)
        return {"version": 3, "shape": shape, "strides": strides, "data": data, "typestr": self._dtype.str}

    def array(self) -> np.ndarray:
        """The array."""
        made = np.asarray(self)
        return made if made.dtype == self._dtype else made.view(self._dtype)  # to the interface some dtypes are only bytes


def copy_of(export: Export, what: str, order: Literal["C", "K"] = "K") -> Export:
    """Copy an export to the CPU's memory, in C order or nearly the same layout (K). Returns an export; consumes the given one.

    The copy has the same element type, even if NumPy has no dtype for it.
    """
    if not export.is_on_cpu:
        raise BufferError(f"{what}: the tensor is on {device_name(export.tensor.device)}; copy it with its own framework")
    dtype = export.tensor.dtype
    code, bits, lanes = dtype.code, dtype.bits, dtype.lanes
    has_dtype = lanes == 1 and dtype_registry.dtype_of(code, bits) is not None
    storage = None if has_dtype else storage_of(field_of_type(code, bits * lanes))
    if storage is not None:
        export.retype(*cast(tuple, dtype_registry.key_of(storage)))
    copied = export_of(to_numpy(export, what).copy(order=order), what)
    if storage is not None:
        copied.retype(code, bits, lanes)
    return copied


def numpy_view(tensor, managed_tensor_from_py_object_no_sync: int, storage: bool) -> np.ndarray:
    """Make a NumPy array over the memory of `tensor` for a kernel. It keeps the memory alive, and is readonly if the export is.

    `storage`: the kernel's option of that name. Raises NoNumbaType for elements that the kernel does not take, BufferError if the
    CPU cannot read the memory, and the producer's exceptions.
    """
    if DISABLED:
        return framework_of(tensor).as_numpy(tensor)
    with Export(tensor, managed_tensor_from_py_object_no_sync) as export:
        dtype = export.tensor.dtype
        field = field_of_type(dtype.code, dtype.bits)
        return to_numpy(export, storage=bits_of(field, storage) if dtype.lanes == 1 else None)
