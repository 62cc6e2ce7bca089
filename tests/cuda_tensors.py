"""Tensors on CUDA devices without a GPU: types with exchange tables of our own, with native functions, like PyTorch's.

``DeviceTensor`` stands for a framework that works on one stream for each device, ``OtherTensor`` for another one. There
need not be memory where a tensor is: the driver stub runs no kernel.
"""

import itertools
import math

import numpy as np
from made_producers import TABLE_CAPSULE, capsule, exchange_table
from numba import types

from fastexchange._abi import ffi
from fastexchange.ground.cfunction import cfunction
from fastexchange.ground.cpython import CALLABLE_CONTEXT, NativeCallable
from fastexchange.ground.dlpack import DLDeviceType
from fastexchange.ground.dtype_registry import key_of
from fastexchange.ground.native import address_of, load, static_array, store

VIEW_WORDS = ffi.sizeof("DLTensor") // 8
MANAGER_CONTEXT = ffi.offsetof("DLManagedTensorVersioned", "manager_ctx")
MANAGED_VIEW = ffi.offsetof("DLManagedTensorVersioned", "dl_tensor")

_addresses = itertools.count(0x7F0000000000, 1 << 20)


@cfunction(types.int32, types.intp, types.intp)
def borrow(tensor, out):
    """``dltensor_from_py_object_no_sync``."""
    view = load(tensor + CALLABLE_CONTEXT) + MANAGED_VIEW
    for i in range(VIEW_WORDS):
        store(out + 8 * i, load(view + 8 * i))
    return types.int32(0)


@cfunction(types.int32, types.intp, types.intp)
def export_and_count(tensor, out):
    """``managed_tensor_from_py_object_no_sync``; counts, and the deleter is the tensor's, which counts."""
    managed = load(tensor + CALLABLE_CONTEXT)
    store(managed + MANAGER_CONTEXT, load(managed + MANAGER_CONTEXT) + 1)
    store(out, managed)
    return types.int32(0)


# A framework's streams by device are static memory of its ``current_work_stream``, which gives the address for device -1.


@cfunction(types.int32, types.int32, types.int32, types.intp)
def first_stream(device_type, device, out):
    streams = static_array("first_streams", 64)
    store(out, streams if device < 0 else load(streams + 8 * device))
    return types.int32(0)


@cfunction(types.int32, types.int32, types.int32, types.intp)
def second_stream(device_type, device, out):
    streams = static_array("second_streams", 64)
    store(out, streams if device < 0 else load(streams + 8 * device))
    return types.int32(0)


def _streams(function):
    """The streams of a framework, by device."""
    out = ffi.new("void **")
    ffi.cast("int (*)(int, int, void **)", function.address)(2, -1, out)
    return ffi.cast("intptr_t *", out[0])


class _Tensor(NativeCallable):
    """A tensor on a device; `strides` are given in elements, and then counted in bytes."""

    __slots__ = ("__dict__", "__weakref__")

    def __init_subclass__(cls, stream=None, **changes):
        """A type with an exchange table, changed as ``exchange_table`` says."""
        super().__init_subclass__()
        if stream is not None:
            functions = {"managed_tensor_from_py_object_no_sync": export_and_count, "dltensor_from_py_object_no_sync": borrow}
            functions = {name: function.address for name, function in (functions | {"current_work_stream": stream}).items()}
            cls.__dlpack_c_exchange_api__ = capsule(exchange_table(**functions | changes), TABLE_CAPSULE)
            cls.streams = _streams(stream)

    def __init__(
        self, shape, dtype="float32", strides=None, *,
        device=0, device_type=DLDeviceType.kDLCUDA, data=None, readonly=False,
    ):  # fmt: skip
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.data = next(_addresses) if data is None else data
        self.has_strides = strides is not None
        if strides is None:
            strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        self.strides = tuple(self.dtype.itemsize * stride for stride in strides[: len(self.shape)])
        self._words = ffi.new("int64_t[]", list(self.shape) or [0]), ffi.new("int64_t[]", list(strides) or [0])
        self.deleted = 0
        self._deleter = ffi.callback("void(struct DLManagedTensorVersioned *)", self._delete)
        managed = self._managed = ffi.new("DLManagedTensorVersioned *")
        managed.version.major, managed.version.minor = 1, 3
        managed.deleter = self._deleter
        managed.flags = int(readonly)
        tensor = managed.dl_tensor
        tensor.data = ffi.cast("void *", self.data)
        tensor.device.device_type, tensor.device.device_id = device_type, device
        tensor.ndim = len(self.shape)
        tensor.dtype.code, tensor.dtype.bits = key_of(self.dtype)
        tensor.dtype.lanes = 1
        tensor.shape, tensor.strides = self._words[0], self._words[1] if self.has_strides else ffi.NULL
        self._context = address_of(managed)

    @property
    def exported(self) -> int:
        """How often it has been exported; `deleted`: how often that has been given back."""
        return int(ffi.cast("intptr_t", self._managed.manager_ctx))

    def _delete(self, managed):
        self.deleted += 1

    def __dlpack_device__(self):
        device = self._managed.dl_tensor.device
        return int(device.device_type), device.device_id


class DeviceTensor(_Tensor, stream=first_stream):
    """Of a framework that works on the stream ``DeviceTensor.streams[device]``."""

    __slots__ = ()


class OtherTensor(_Tensor, stream=second_stream):
    """Of another framework."""

    __slots__ = ()
