"""Classify the arguments of a launch before anything is exported: kind, device and stream of each.

This module also says which arguments only the kernel's own package can read, and prepares arguments for its launches.

Source: DLPack 1.3, Python specification; CUDA Array Interface, version 3.
"""

import contextlib
import ctypes
from typing import NamedTuple

from .._abi import ffi
from ..arguments.discovery import learn_type
from ..arguments.dunder import DUNDER
from ..arguments.kind import OTHER
from ..cupy import device_arrays
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..exchange import wrappers
from ..exchange.errors import check_tensors, device_name, refuse_device, refuse_value, refused
from ..ground.dlpack import DLDeviceType
from ..ground.dtype_registry import key_of
from ..ground.native import address_of
from ..ground.parameters import with_items
from ..ground.safe_repr import is_type, shown
from ..interpreter import DISABLED
from ..jax import launch_arrays
from ..producers.framework import framework_of
from . import kinds
from .array_interface import ArrayInterface, managed_tensor_of_device_array, managed_tensor_of_interface
from .driver import CudaError, driver
from .streams import is_same_stream, stream_of_producer
from .targets import is_device_array, is_of_package

__all__ = [
    "ARRAY",
    "DLPACK",
    "INTERFACE",
    "TUPLE",
    "ArgumentInfo",
    "add_stream",
    "are_exported_by_python",
    "classify_arguments",
    "classify_without_errors",
    "device_and_streams",
    "flatten",
    "for_package",
    "has_interface",
    "is_for_package",
    "is_pinned",
    "only_for_package",
    "paths",
    "unknown_to_package",
]  # fmt: skip

_BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
ON_DEVICE = (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged)
PLAIN, TABLE, DLPACK, INTERFACE, ARRAY, TUPLE, PACKAGE = range(7)
"""How an argument gets into the kernel. ``ARRAY``: a device array of a Numba package, which native code reads once."""


class ArgumentInfo:
    """One argument, or one item of a tuple, before a launch."""

    __slots__ = ("function", "interface", "items", "kind", "place", "position", "stream", "value")

    def __init__(self, position: int, value, kind: int):
        self.position, self.value, self.kind = position, value, kind
        """`position`: of the argument, or of the tuple that contains it. `value`: for a wrapper, the tensor that it wraps."""
        self.items: list[ArgumentInfo] = []
        self.interface: ArrayInterface | None = None
        self.place: tuple[int, int] | None = None
        """A tensor's (device type, number)."""
        self.function = 0
        """The address of its ``current_work_stream``, or 0."""
        self.stream: int | None = None
        """The producer's stream, if its interface names one. None: there is none, or ``__dlpack__`` is told the launch's."""


class DeviceAndStreams(NamedTuple):
    """The device and the streams of a launch."""

    device: int | None
    """The tensors' device; None: there are no tensors, or every device can read them."""
    streams: list[int]
    """The streams of producers that do not order their work themselves: each once, in the order of the arguments."""


# ---- what an argument is ---------------------------------------------------------------------------------------------


def classify_arguments(kernel, bound: tuple) -> list[ArgumentInfo]:
    """Classify each argument once: its kind, the tensor that a wrapper wraps, its device, and its producer's stream.

    Raises what producers raise, and BufferError for memory that a kernel for CUDA cannot read.
    """
    return [_classify(kernel, position, value) for position, value in enumerate(bound)]


def classify_without_errors(kernel, bound: tuple) -> list[ArgumentInfo]:
    """Classify the arguments that raise nothing, and leave out the others."""
    found = []
    for position, value in enumerate(bound):
        with contextlib.suppress(Exception):
            found.append(_classify(kernel, position, value))
    return found


def _classify(kernel, position: int, value) -> ArgumentInfo:
    try:
        info = _classified(position, value)
    except Exception as error:  # a type whose attributes raise
        refused(kernel, position, error)
    if info.kind == TUPLE:
        info.items = [_classify(kernel, position, item) for item in value]
    elif info.kind in (TABLE, DLPACK):
        check_tensors(kernel, position, info.value)
    try:
        _find_place(info)
    except Exception as error:
        refused(kernel, position, error)
    if info.place is not None and info.place[0] not in ON_DEVICE:
        where = _named(info.place)
        refuse_value(
            kernel, position, info.value,
            f"its memory is on device {where}, which a CUDA kernel cannot read; copy it to the GPU first",
        )  # fmt: skip
    return info


def _find_place(info: ArgumentInfo) -> None:
    if info.kind in (ARRAY, INTERFACE):
        interface = info.interface or ArrayInterface.of(info.value)
        assert interface is not None
        info.place = _place(interface.data)
        info.stream = interface.stream if info.kind == INTERFACE else None
    elif info.kind in (TABLE, DLPACK):
        fields = runtime().entries.fields(type(info.value))
        info.place = _device(info.value, fields)
        info.function = fields.get("stream", 0) if info.kind == TABLE else 0
        if info.place[0] == DLDeviceType.kDLCUDAHost and _exports(info.value):
            info.kind = DLPACK  # its table may call the memory the CPU's


def _classified(position: int, value) -> ArgumentInfo:
    entries = runtime().entries
    fields = entries.get(type(value))
    if fields is None:
        learn_type(type(value), value)
        fields = entries.fields(type(value))
    if is_of_package(type(value)) and getattr(value, "gpu_data", None) is None:
        raise BufferError(
            "it is a view that NumPy has made of a managed or mapped array, without the array's memory on the device; pass "
            "the whole array, or make the view in the kernel"
        )
    kind = fields["kind"]
    if kind.form == structs.FORM_TUPLE:
        return ArgumentInfo(position, value, TUPLE)
    if kind.exports != structs.EXPORTS_NEVER and not fields.get("asks_python") and not fields.get("key"):
        return ArgumentInfo(position, value, TABLE)
    if kind is DUNDER:
        interface = None
        with contextlib.suppress(Exception):
            interface = ArrayInterface.of(value)
        # Preferred to __dlpack__, which needs the stream, and takes longer. JAX's interface has version 2, without one.
        if interface is not None and interface.has_stream:
            return _with_interface(position, value, interface)
    launch_arrays.learn(type(value))
    if fields.get("asks_python") or (kind.exports == structs.EXPORTS_ALWAYS and hasattr(type(value), "__dlpack__")):
        found = None if kind is DUNDER else _wrapped(value)
        return ArgumentInfo(position, value, DLPACK) if found is None else ArgumentInfo(position, found, TABLE)
    if kind.is_read_on_device and kind.exports == structs.EXPORTS_NEVER:
        return ArgumentInfo(position, value, PLAIN)
    if kind is OTHER:
        if is_device_array(value) and not value.stream and key_of(value.dtype) is not None:
            return ArgumentInfo(position, value, ARRAY)
        interface = ArrayInterface.of(value)
        if interface is not None:
            return _with_interface(position, value, interface)
    return ArgumentInfo(position, value, PACKAGE)


def _with_interface(position: int, value, interface: ArrayInterface) -> ArgumentInfo:
    info = ArgumentInfo(position, value, INTERFACE)
    info.interface = interface
    entries = runtime().entries
    known = entries.fields(type(value))
    if not DISABLED and not known.get("interface"):  # later launches: native code reads usual interfaces
        export = managed_tensor_of_device_array if is_of_package(type(value)) else managed_tensor_of_interface
        kind = known.get("device_kind") or device_arrays.kind_of(type(value)) or kinds.INTERFACE
        entries.update(type(value), interface=export.address, device_kind=kind)
    return info


def _wrapped(value):
    """The tensor with an exchange table that `value` wraps, or None."""
    found = wrappers.resolve(value)
    if found is None or found[0] is value:
        return None
    learn_type(type(found[0]), found[0])
    fields = runtime().entries.fields(type(found[0]))
    return found[0] if fields.get("borrow") or (fields.get("managed") and not fields.get("asks_python")) else None


def flatten(infos: list[ArgumentInfo]):
    for info in infos:
        if info.kind == TUPLE:
            yield from flatten(info.items)
        else:
            yield info


def has_interface(value) -> bool:
    """Whether an argument, or an item of a tuple, is an array with ``__cuda_array_interface__`` and no DLPack protocol."""
    if issubclass(type(value), tuple):
        return any(map(has_interface, value))
    if is_type(value) or getattr(value, "__cuda_array_interface__", None) is None:
        return False
    learn_type(type(value), value)
    return runtime().entries.fields(type(value))["kind"] is OTHER


def paths(infos: list[ArgumentInfo]) -> dict[int, str]:
    """By position, the paths of arguments that differ from those into CPU kernels: see ``Explanation.path``."""
    fields, found = runtime().entries.fields, {}
    for info in infos:
        if info.kind in (ARRAY, PACKAGE):
            found[info.position] = (kinds.VIEW if info.kind == ARRAY else kinds.PACKAGE).path
        elif info.kind == INTERFACE:
            found[info.position] = fields(type(info.value))["device_kind"].path
    return found


def unknown_to_package(kernel, infos: list[ArgumentInfo]) -> ArgumentInfo | None:
    """The first tensor for which the kernel's own package has no type, for example without ``__cuda_array_interface__``."""
    for info in flatten(infos):
        if info.kind in (TABLE, DLPACK):
            try:
                kernel.target.type_of_value(kernel.dispatcher, for_package(kernel, info))
            except Exception:
                return info
    return None


def only_for_package(infos: list[ArgumentInfo]) -> list[ArgumentInfo]:
    """The arguments that only the kernel's own package can read, those of Python's built-in types first."""
    found = [info for info in flatten(infos) if info.kind == PACKAGE]
    return sorted(found, key=lambda info: type(info.value).__module__ != "builtins")


def is_for_package(infos: list[ArgumentInfo]) -> bool:
    """Whether only the kernel's own package can read an argument: an array of the host, a record, a hint …"""
    return bool(only_for_package(infos))


def are_exported_by_python(infos: list[ArgumentInfo]) -> bool:
    """Whether native code cannot export all arguments."""
    found = [info for info in flatten(infos) if info.kind in (DLPACK, INTERFACE)]
    return any(info.interface is None or not info.interface.has_stream for info in found)


def for_package(kernel, info: ArgumentInfo):
    """An argument for the package's own launch. A tensor that requires grad is detached: PyTorch gives no interface of it."""
    value = info.value
    if info.kind == TUPLE:
        return with_items(value, [for_package(kernel, item) for item in info.items])
    return kernel.target.readable(framework_of(value).detached(value))


# ---- devices ---------------------------------------------------------------------------------------------------------


def _device(value, fields: dict[str, int]) -> tuple[int, int]:
    """(device type, number) of a tensor."""
    if fields.get("borrow") and not hasattr(type(value), "__dlpack_device__"):
        tensor = ffi.new("DLTensor *")
        if _BORROW(fields["borrow"])(value, address_of(tensor)) == 0:
            return int(tensor.device.device_type), tensor.device.device_id
    device_type, number = value.__dlpack_device__()
    return int(device_type), int(number or 0)  # PaddlePaddle names no number on a CPU


def is_pinned(value) -> bool:
    """Whether ``__dlpack_device__`` of a tensor says that its memory is pinned: PyTorch's exports call that the CPU's."""
    if not _exports(value):
        return False
    try:
        return _device(value, {})[0] == DLDeviceType.kDLCUDAHost
    except Exception:  # PyTorch cannot use the driver, or the tensor has no device
        return False


def _exports(value) -> bool:
    return hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")


def _named(place: tuple[int, int]) -> str:
    device = ffi.new("DLDevice *", place)
    return device_name(device)


def add_stream(streams: list[int], stream: int | None) -> None:
    """Add a stream if it is not in the list."""
    if stream is not None and not any(is_same_stream(stream, known) for known in streams):
        streams.append(stream)


def device_and_streams(kernel, infos: list[ArgumentInfo]) -> DeviceAndStreams:
    """Return the device and the streams of a launch with these arguments.

    Raises BufferError for tensors on different devices. Every device can read managed memory, so that decides only if no other
    tensor does.
    """
    placed = [info for info in flatten(infos) if info.place is not None]
    tensors = [info for info in placed if info.place[0] != DLDeviceType.kDLCUDAHost]  # every device reads pinned memory
    device = None
    for info in tensors:
        device_type, number = info.place
        if not driver().has(number):  # frameworks have no stream of such a device
            refuse_value(kernel, info.position, info.value, f"its memory is on device {_named(info.place)}, which does not exist")
        if device_type == DLDeviceType.kDLCUDA:
            if device is not None and number != device:
                refuse_device(kernel, info.position, info.value, number, device)
            device = number
    if device is None and tensors:
        device = tensors[0].place[1]
    streams: list[int] = []
    for info in placed:
        on = kernel._default_device() if device is None else device
        stream = stream_of_producer(info.function, on) if info.function else info.stream
        add_stream(streams, stream)
    return DeviceAndStreams(device, streams)


def _place(pointer: int) -> tuple[int, int]:
    """(device type, number) of the memory at an address."""
    if not pointer:  # an array without elements, which is on every device
        return int(DLDeviceType.kDLCUDAHost), 0
    if not 0 < pointer < 2**64:
        raise BufferError(f"its address {shown(pointer)} is not one of 64 bits")
    try:
        memory = driver().memory_at(pointer)
    except CudaError as error:
        if error.code != 1:
            raise
        raise BufferError(f"its address {pointer:#x} is not in CUDA's memory") from None
    if memory.is_managed:
        return int(DLDeviceType.kDLCUDAManaged), memory.device
    return int(DLDeviceType.kDLCUDA if memory.is_on_device else DLDeviceType.kDLCUDAHost), memory.device
