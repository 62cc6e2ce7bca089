"""Tensors without an exchange table: exported by Python code, for one launch, and shown to native code.

``__dlpack__(stream=…)`` makes its producer see to it that the memory may be used on that stream;
``__cuda_array_interface__`` names the producer's stream, and we order the two.

Source: DLPack 1.3, Python specification; CUDA Array Interface, version 3.
"""

import contextlib
import ctypes
import functools

import numpy as np
from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..exchange.errors import refused
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, NativeCallable
from ..ground.dlpack import VERSION, DLDeviceType, DLPackFlag
from ..ground.dtype_registry import key_of
from ..ground.native import address_of, load, store
from ..ground.once import once
from ..ground.pythonapi import PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from ..ground.safe_repr import shown
from . import resets
from .classify import (
    ARRAY,
    DLPACK,
    INTERFACE,
    TUPLE,
    ArgumentInfo,
    add_stream,
    again,
    array_interface,
    flatten,
    whereabouts,
)
from .streams import default_stream

__all__ = ["exported", "originals"]

_deleter = functools.lru_cache(64)(ctypes.PYFUNCTYPE(None, ctypes.c_void_p))  # by its address: producers have few
_USED = {b"dltensor_versioned": b"used_dltensor_versioned", b"dltensor": b"used_dltensor"}


class _View(NativeCallable):
    """A tensor that native code reads: its ``_context`` is a ``DLManagedTensorVersioned *``, which the view has."""

    __slots__ = ("held", "memory", "native")

    def __init__(self, native, held=None):
        self.native, self.held = native, held
        self.memory: tuple = ()
        self._context = address_of(native)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_of_view(view, out):
    """``managed_tensor_from_py_object_no_sync`` of :class:`_View`.

    The view keeps the tensor: there is no deleter to call.
    """
    store(out, load(view + CALLABLE_CONTEXT))
    return types.int32(0)


def _remember(value, place) -> None:
    """Let native code see a device array of numba's, whose memory and shape stay what they are, as long as it lives."""
    entries = runtime().entries
    resets.watch(place[1])
    view = _from_interface(value, array_interface(value), place)
    view.held = None  # not the array itself, which would live for ever
    if not entries.fields(type(value)).get("is_by_object"):
        entries.update(type(value), is_by_object=1)
    entries.add(value, view, kind=structs.KIND_VIEW, shown=address_of(view.native))


@once
def _prepare() -> bool:
    runtime().entries.add(_View, kind=structs.KIND_MANAGED, managed=managed_tensor_of_view.address)
    return True


@contextlib.contextmanager
def exported(launcher, infos: list[ArgumentInfo]):
    """The arguments that native code reads, the device and the streams of a launch.

    The first stream is the launch's; the others are those of producers that do not order their work themselves. What was
    exported is given back at the end.
    """
    _prepare()
    kernel = launcher.kernel
    device, streams = whereabouts(kernel, infos)
    own = launcher.configuration.stream
    if own is not None:  # arrays with an interface have to be waited for all the same
        streams = [own]
        for info in flatten(infos):
            add_stream(streams, info.stream)
    streams = streams or [default_stream()]
    with contextlib.ExitStack() as stack:
        arguments = tuple([_export(kernel, info, streams[0], stack) for info in infos])
        yield arguments, kernel.default_device() if device is None else device, streams


def _export(kernel, info: ArgumentInfo, stream: int, stack: contextlib.ExitStack):
    """What native code reads of an argument; `stack` gives back what has been exported for that."""
    value = info.value
    if info.kind == TUPLE:
        return again(value, [_export(kernel, item, stream, stack) for item in info.items])
    try:
        if info.kind == DLPACK:
            return _from_dlpack(info, stream, stack)
        if info.kind == INTERFACE:
            return _from_interface(value, info.interface, info.place)
        if info.kind == ARRAY and value not in runtime().entries:
            _remember(value, info.place)
    except Exception as error:
        refused(kernel, info.position, error)
    return value


def _from_dlpack(info: ArgumentInfo, stream: int, stack: contextlib.ExitStack) -> _View:
    """A view of what ``__dlpack__`` exports for use on a stream; `stack` gives it back."""
    value = info.value
    # Of the default stream DLPack says 1, for 0 could be either default. Memory of the host has no stream.
    told = None if info.place is None or info.place[0] == DLDeviceType.kDLCUDAHost else (stream or 1)
    try:
        capsule = value.__dlpack__(stream=told, max_version=VERSION)
    except TypeError:
        capsule = value.__dlpack__(stream=told)
    flags_of_legacy = _flags_of_legacy(value)  # which runs the producer's code: before the capsule is ours
    for name, used in _USED.items():
        if PyCapsule_IsValid(capsule, name):
            pointer = PyCapsule_GetPointer(capsule, name)
            PyCapsule_SetName(capsule, used)
            break
    else:
        raise BufferError("__dlpack__ returned no unconsumed capsule named 'dltensor_versioned' or 'dltensor'")
    is_versioned = name == b"dltensor_versioned"
    theirs = ffi.cast("DLManagedTensorVersioned *" if is_versioned else "DLManagedTensor *", pointer)
    if theirs.deleter != ffi.NULL:
        stack.callback(_deleter(int(ffi.cast("intptr_t", theirs.deleter))), pointer)
    if is_versioned and theirs.version.major != 1:
        raise BufferError("it was exported with a DLPack ABI of another major version than 1")
    return _own(theirs.dl_tensor, theirs.flags if is_versioned else flags_of_legacy, value)


def _flags_of_legacy(value) -> int:
    """A legacy capsule does not say whether its memory is readonly; the array interface does."""
    interface = array_interface(value)
    is_readonly = True if interface is None else interface["data"][1]
    return int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY) if is_readonly else 0


def _own(tensor, flags: int, held) -> _View:
    """A view with a copy of a ``DLTensor``, whose extents and strides stay the producer's."""
    native = ffi.new("DLManagedTensorVersioned *")
    native.version.major, native.version.minor = VERSION
    native.flags = flags & int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY)
    native.dl_tensor = tensor
    return _View(native, held)


def originals(bound: tuple) -> tuple:
    """The arguments of a launch, each view among them as what it is a view of."""

    def original(value):
        if type(value) is not tuple:
            return value.held if type(value) is _View else value
        return originals(value)

    return tuple(map(original, bound))


def _from_interface(value, interface, place) -> _View:
    """A view of an array with ``__cuda_array_interface__``, whose memory is at `place`, (device type, number)."""
    if interface.get("mask") is not None:
        raise BufferError("its array interface has a mask, which a kernel would not see")
    dtype, shape, strides = np.dtype(interface["typestr"]), tuple(interface["shape"]), interface.get("strides")
    key, itemsize = key_of(dtype), dtype.itemsize
    assert key is not None
    pointer, is_readonly = interface["data"]
    extents = _int64s("shape", shape)
    steps = None
    if strides is not None and len(strides) != len(shape):
        raise BufferError(f"its shape has {len(shape)} dimensions, its strides {len(strides)}")
    if strides is not None and shape:
        if any(stride % itemsize for stride in strides):
            raise BufferError("its strides are no multiples of its item size")
        steps = _int64s("strides", [stride // itemsize for stride in strides])
    native = ffi.new("DLManagedTensorVersioned *")
    native.version.major, native.version.minor = VERSION
    native.flags = int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY) if is_readonly else 0
    tensor = native.dl_tensor
    tensor.data, tensor.ndim, tensor.shape = ffi.cast("void *", pointer or 0), len(shape), extents
    tensor.strides = ffi.NULL if steps is None else steps
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = key[0], key[1], 1
    tensor.device.device_type, tensor.device.device_id = place
    view = _View(native, value)
    view.memory = extents, steps
    return view


def _int64s(what: str, numbers):
    """An ``int64_t[]`` of these numbers, at least one long."""
    try:
        return ffi.new("int64_t[]", list(numbers) or [0])
    except OverflowError:
        raise BufferError(f"its {what} {shown(numbers)} lead out of 64 bits") from None
