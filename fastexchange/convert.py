"""From a tensor of any framework to a NumPy view of its memory, for the calls that Numba's own dispatcher makes."""

import ctypes

import numpy as np

from ._abi import ffi
from .dispatch import layout
from .dtypes import dtype_of_dl
from .producers.dunder import SAYS_NOTHING_OF_READONLY
from .refusal import status_of, wording

_export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _ManagedMemory:
    """Owns a ``DLManagedTensorVersioned`` and presents it to NumPy; its deleter runs when the last view is gone."""

    def __init__(self, managed):
        self._managed = managed
        if managed.version.major != 1:
            raise BufferError(wording(layout.STATUS_VERSION, None))
        tensor = managed.dl_tensor
        status = status_of(tensor)
        dtype = None if status else dtype_of_dl(tensor.dtype.code, tensor.dtype.bits)
        if status or dtype is None:
            raise BufferError(wording(status or layout.STATUS_DTYPE, tensor))
        self.dtype, self.is_readonly = dtype, bool(managed.flags & (1 | int(SAYS_NOTHING_OF_READONLY)))
        self.shape = shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        strides = None
        if tensor.strides != ffi.NULL:
            strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
        address = int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": dtype.str,
            "data": (address, self.is_readonly),
        }  # fmt: skip

    def __del__(self):
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter != ffi.NULL:
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(int(ffi.cast("intptr_t", managed.deleter)))(
                int(ffi.cast("intptr_t", managed))
            )


def numpy_view(tensor, managed_tensor_from_py_object_no_sync: int) -> np.ndarray:
    """A NumPy array over the memory of `tensor`, which it keeps alive; readonly if the export says so.

    Raises BufferError if a CPU cannot read it, and whatever the producer raises.
    """
    out = ffi.new("DLManagedTensorVersioned **")
    failed = _export(managed_tensor_from_py_object_no_sync)(id(tensor), int(ffi.cast("intptr_t", out)))
    if failed or out[0] == ffi.NULL:
        raise BufferError("its producer failed to export it and did not say why")
    memory = _ManagedMemory(out[0])
    if not all(memory.shape):  # NumPy takes no NULL pointer, not even for no elements
        empty = np.empty(memory.shape, memory.dtype)
        empty.flags.writeable = not memory.is_readonly
        return empty
    return np.asarray(memory)
