"""Tensors without an exchange table: Python code exports them for one launch, as views for native code.

``__dlpack__(stream=…)`` lets the producer order its work before that stream. ``__cuda_array_interface__`` names the producer's
stream, and this package orders the two.

Source: DLPack 1.3, Python specification; CUDA Array Interface, version 3.
"""

import contextlib
import ctypes
import functools

from numba import types

from .._abi import ffi
from ..arguments.tensors import EXPORTED
from ..dispatch.runtime import runtime
from ..exchange.errors import refused
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, NativeCallable
from ..ground.dlpack import VERSION, DLDeviceType, DLPackFlag
from ..ground.native import address_of, load, store
from ..ground.once import once
from ..ground.parameters import with_items
from ..ground.pythonapi import PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from ..producers.framework import framework_of
from . import resets
from .array_interface import ArrayInterface
from .classify import (
    ARRAY,
    DLPACK,
    INTERFACE,
    TUPLE,
    ArgumentInfo,
    add_stream,
    device_and_streams,
    flatten,
)
from .kinds import VIEW
from .streams import default_stream

__all__ = ["exported", "originals"]

_deleter = functools.lru_cache(64)(ctypes.PYFUNCTYPE(None, ctypes.c_void_p))  # by address: a producer has few deleters
_USED = {b"dltensor_versioned": b"used_dltensor_versioned", b"dltensor": b"used_dltensor"}


class _View(NativeCallable):
    """A tensor for native code. ``_context`` is a ``DLManagedTensorVersioned *``, whose memory the view owns."""

    __slots__ = ("held", "memory", "native")

    def __init__(self, native, held=None):
        self.native, self.held = native, held
        self.memory: tuple = ()
        self._context = address_of(native)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_of_view(view, out):
    """``managed_tensor_from_py_object_no_sync`` of :class:`_View`.

    The view owns the tensor, so that has no deleter.
    """
    store(out, load(view + CALLABLE_CONTEXT))
    return types.int32(0)


def _remember(value, place) -> None:
    """Let native code read a device array of a Numba package. Its memory and shape do not change while it lives."""
    entries = runtime().entries
    resets.watch(place[1])
    interface = ArrayInterface.of(value)
    assert interface is not None
    view = _from_interface(value, interface, place)
    view.held = None  # not the array, which would then never die
    if not entries.fields(type(value)).get("is_by_object"):
        entries.update(type(value), is_by_object=1, device_kind=VIEW)
    entries.add(value, view, kind=VIEW, shown=address_of(view.native))


@once
def _prepare() -> bool:
    runtime().entries.add(_View, kind=EXPORTED, managed=managed_tensor_of_view.address)
    return True


@contextlib.contextmanager
def exported(launcher, infos: list[ArgumentInfo]):
    """Context manager: the arguments for native code, the device and the streams of a launch.

    The first stream is the launch's; the others are those of producers that do not order their work themselves. All exports are
    released at the end.
    """
    _prepare()
    kernel = launcher.kernel
    device, streams = device_and_streams(kernel, infos)
    own = launcher.configuration.stream
    if own is not None:  # the launch still has to wait for arrays with an interface
        streams = [own]
        for info in flatten(infos):
            add_stream(streams, info.stream)
    streams = streams or [default_stream()]
    with contextlib.ExitStack() as stack:
        arguments = tuple([_export(kernel, info, streams[0], stack) for info in infos])
        yield arguments, kernel._default_device() if device is None else device, streams


def _export(kernel, info: ArgumentInfo, stream: int, stack: contextlib.ExitStack):
    """Return the object that native code reads for an argument. `stack` releases the exports."""
    value = info.value
    if info.kind == TUPLE:
        return with_items(value, [_export(kernel, item, stream, stack) for item in info.items])
    try:
        if info.kind == DLPACK:
            return _from_dlpack(info, stream, stack)
        if info.kind == INTERFACE:
            assert info.interface is not None and info.place is not None
            return _from_interface(value, info.interface, info.place)
        if info.kind == ARRAY and value not in runtime().entries:
            _remember(value, info.place)
    except Exception as error:
        refused(kernel, info.position, error)
    return value


def _from_dlpack(info: ArgumentInfo, stream: int, stack: contextlib.ExitStack) -> _View:
    """Return a view of the export of ``__dlpack__`` for a stream. `stack` releases the export."""
    value = framework_of(info.value).exported_as(info.value)
    # DLPack has 1 for the legacy default stream, because 0 is ambiguous. Memory of the host has no stream.
    assert info.place is not None
    told = None if info.place[0] == DLDeviceType.kDLCUDAHost else (stream or 1)
    try:
        capsule = value.__dlpack__(stream=told, max_version=VERSION)
    except TypeError as error:
        if type(error) is not TypeError:  # as in producers.dunder
            raise
        capsule = value.__dlpack__(stream=told)
    flags_of_legacy = _flags_of_legacy(value)  # first: runs the producer's code, and nothing is owned yet
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
    view = _view_of(theirs.dl_tensor, theirs.flags if is_versioned else flags_of_legacy, info.value)
    device = view.native.dl_tensor.device
    if info.place[0] == DLDeviceType.kDLCUDAHost and device.device_type == DLDeviceType.kDLCPU:
        device.device_type = DLDeviceType.kDLCUDAHost  # PyTorch's capsules name the CPU, and only __dlpack_device__ tells
    return view


def _flags_of_legacy(value) -> int:
    """The flags for a legacy capsule, which has none: the framework or the array interface says whether memory is readonly."""
    if framework_of(value).is_mutable:
        return 0
    interface = ArrayInterface.of(value)
    is_readonly = True if interface is None else interface.is_readonly
    return int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY) if is_readonly else 0


def _view_of(tensor, flags: int, held) -> _View:
    """Return a view with a copy of a ``DLTensor``. The producer still owns the extents and strides."""
    native = ffi.new("DLManagedTensorVersioned *")
    native.version.major, native.version.minor = VERSION
    native.flags = flags & int(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY)
    native.dl_tensor = tensor
    return _View(native, held)


def originals(bound: tuple) -> tuple:
    """The arguments of a launch with the original objects in place of the views."""

    def original(value):
        if type(value) is not tuple:
            return value.held if type(value) is _View else value
        return originals(value)

    return tuple(map(original, bound))


def _from_interface(value, interface: ArrayInterface, place: tuple[int, int]) -> _View:
    """Return a view of an array with ``__cuda_array_interface__``. `place`: (device type, number) of its memory."""
    native, memory = interface.managed_tensor(place)
    view = _View(native, value)
    view.memory = memory
    return view
