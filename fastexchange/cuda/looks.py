"""What the arguments of a launch are, before anything is exported: of which kind, where, on which stream.

Also here: which arguments are for the kernel's own package, and what it has to be spared.

Source: DLPack 1.3, Python specification; CUDA Array Interface, version 3.
"""

import contextlib
import ctypes
import operator
from typing import NamedTuple

import numpy as np

from .._abi import ffi
from ..dispatch import layout
from ..dispatch.state import runtime
from ..exchange import wrappers
from ..exchange.discovery import learn_type
from ..exchange.errors import check_tensors, device_name, refuse_device, refuse_value, refused
from ..ground.dlpack import DLDeviceType
from ..ground.dtype_registry import key_of
from ..ground.native import address_of
from ..ground.safe_repr import shown
from ..producers import dunder, torch
from .driver import CudaError, driver
from .interface import SAYS_STREAM, managed_tensor_of_device_array, managed_tensor_of_interface
from .streams import are_one, stream_of_producer
from .targets import is_device_array, is_of_package

__all__ = [
    "ARRAY", "DLPACK", "INTERFACE", "TUPLE", "Look", "add_stream", "again", "are_exported", "are_exported_by_python",
    "array_interface", "for_package", "has_interface", "is_for_package", "leaves", "look_at", "looks_without_errors",
    "only_for_package", "paths", "unknown_to_package", "whereabouts",
]  # fmt: skip

_BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
ON_DEVICE = (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged)
PLAIN, TABLE, DLPACK, INTERFACE, ARRAY, TUPLE, PACKAGE = range(7)
"""How an argument gets into the kernel; ``ARRAY``: it is a device array of numba's, which native code remembers."""


class Look:
    """What has been found out of one argument, or an item of a tuple, before a launch."""

    __slots__ = ("function", "interface", "items", "kind", "place", "position", "stream", "value")

    def __init__(self, position: int, value, kind: int):
        self.position, self.value, self.kind = position, value, kind
        """The position is that of the argument that it is, or is in; the value what a wrapper leads to."""
        self.items: list[Look] = []
        self.interface: dict | None = None
        self.place: tuple[int, int] | None = None
        """Of a tensor: (device type, number)."""
        self.function = 0
        """The address of its ``current_work_stream``, or 0."""
        self.stream: int | None = None
        """The stream on which its producer works, if it says so without that; None: it has none, or is told ours."""


class Whereabouts(NamedTuple):
    """Where a launch is."""

    device: int | None
    """The tensors'; None: there are none, or only such as every device reads."""
    streams: list[int]
    """Those of the producers that do not order their work themselves, each once, in the order of the arguments."""


# ---- what an argument is ---------------------------------------------------------------------------------------------


def look_at(kernel, bound: tuple) -> list[Look]:
    """Look at each argument once: what it is, what a wrapper leads to, where its memory is, on which stream its producer works.

    Raises what producers raise, and BufferError for memory that a kernel for CUDA cannot read.
    """
    return [_look(kernel, position, value) for position, value in enumerate(bound)]


def looks_without_errors(kernel, bound: tuple) -> list[Look]:
    """Those of the arguments that can be looked at."""
    found = []
    for position, value in enumerate(bound):
        with contextlib.suppress(Exception):
            found.append(_look(kernel, position, value))
    return found


def _look(kernel, position: int, value) -> Look:
    try:
        look = _classified(position, value)
    except Exception as error:  # a type whose attributes cannot even be asked for
        refused(kernel, position, error)
    if look.kind == TUPLE:
        look.items = [_look(kernel, position, item) for item in value]
    elif look.kind in (TABLE, DLPACK):
        check_tensors(kernel, position, look.value)
    try:
        _find_place(look)
    except Exception as error:
        refused(kernel, position, error)
    if look.place is not None and look.place[0] not in ON_DEVICE:
        where = _named(look.place)
        refuse_value(
            kernel, position, look.value,
            f"its memory is on device {where}, which a CUDA kernel cannot read; copy it to the GPU first",
        )  # fmt: skip
    return look


def _find_place(look: Look) -> None:
    if look.kind == ARRAY:
        look.place = _place(operator.index(look.value.__cuda_array_interface__["data"][0] or 0))
    elif look.kind == INTERFACE:
        assert look.interface is not None
        look.place = _place(operator.index(look.interface["data"][0] or 0))
        look.stream = _stream_in(look.interface)
    elif look.kind in (TABLE, DLPACK):
        fields = runtime().entries.fields(type(look.value))
        look.place = _device(look.value, fields)
        look.function = fields.get("stream", 0) if look.kind == TABLE else 0


def _classified(position: int, value) -> Look:
    entries = runtime().entries
    fields = entries.get(type(value))
    if fields is None:
        learn_type(type(value), value)
        fields = entries.fields(type(value))
    if is_of_package(type(value)) and getattr(value, "gpu_data", None) is None:
        raise BufferError(
            "it is a view that NumPy has made of a managed or mapped array, and has lost the array's memory on the device; pass "
            "the whole array, or make the view in the kernel"
        )
    kind = fields["kind"]
    if kind in (layout.KIND_TUPLE, layout.KIND_NAMED_TUPLE):
        return Look(position, value, TUPLE)
    if kind in (layout.KIND_EXCHANGE, layout.KIND_MANAGED) and not fields.get("asks_python") and not fields.get("key"):
        return Look(position, value, TABLE)
    has_dunder = kind == layout.KIND_MANAGED and fields["managed"] == dunder.managed_tensor_from_py_object_no_sync.address
    if has_dunder:
        interface = None
        with contextlib.suppress(Exception):
            interface = array_interface(value)
        # Rather than its __dlpack__, which has to be told of a stream, and takes longer. JAX's has version 2, without streams.
        if interface is not None and _version(interface) >= SAYS_STREAM:
            return _with_interface(position, value, interface)
    if kind == layout.KIND_MANAGED and (fields.get("asks_python") or hasattr(type(value), "__dlpack__")):
        found = None if has_dunder else _wrapped(value)
        return Look(position, value, DLPACK) if found is None else Look(position, found, TABLE)
    if layout.KIND_FLOAT <= kind <= layout.KIND_NUMPY_COMPLEX128:
        return Look(position, value, PLAIN)
    if kind == layout.KIND_NUMBA:
        if is_device_array(value) and not value.stream and key_of(value.dtype) is not None:
            return Look(position, value, ARRAY)
        interface = array_interface(value)
        if interface is not None:
            return _with_interface(position, value, interface)
    return Look(position, value, PACKAGE)


def _version(interface: dict) -> int:
    version = interface.get("version")
    return version if type(version) is int else 0


def _with_interface(position: int, value, interface: dict) -> Look:
    look = Look(position, value, INTERFACE)
    look.interface = interface
    entries = runtime().entries
    if not entries.fields(type(value)).get("interface"):  # from now on native code reads what is as usual
        export = managed_tensor_of_device_array if is_of_package(type(value)) else managed_tensor_of_interface
        entries.update(type(value), interface=export.address)
    return look


def array_interface(value) -> dict | None:
    """The ``__cuda_array_interface__`` of an array of numbers; None for anything else, records and dates among it."""
    found = None if isinstance(value, type) else getattr(value, "__cuda_array_interface__", None)
    if found is None or key_of(np.dtype(found["typestr"])) is None:
        return None
    # The packages' own arrays say None of broadcast ones, too.
    return {**found, "strides": tuple(value.strides)} if is_of_package(type(value)) else found


def _wrapped(value):
    """The tensor with an exchange table that `value` stands for; None if it stands for itself."""
    found = wrappers.resolve(value)
    if found is None or found[0] is value:
        return None
    learn_type(type(found[0]), found[0])
    fields = runtime().entries.fields(type(found[0]))
    return found[0] if fields.get("borrow") or (fields.get("managed") and not fields.get("asks_python")) else None


def leaves(looks: list[Look]):
    for look in looks:
        if look.kind == TUPLE:
            yield from leaves(look.items)
        else:
            yield look


def has_interface(value) -> bool:
    """Whether an argument, or an item of a tuple, is an array with ``__cuda_array_interface__`` and nothing better."""
    if issubclass(type(value), tuple):
        return any(map(has_interface, value))
    if isinstance(value, type) or getattr(value, "__cuda_array_interface__", None) is None:
        return False
    learn_type(type(value), value)
    return runtime().entries.fields(type(value))["kind"] == layout.KIND_NUMBA


def paths(looks: list[Look]) -> dict[int, str]:
    """How arguments come in that a kernel for the CPU would get otherwise, by their positions: see ``Explanation.path``."""
    names = {ARRAY: "device-array", INTERFACE: "cuda-interface", PACKAGE: "package"}
    return {look.position: names[look.kind] for look in looks if look.kind in names}


def unknown_to_package(kernel, looks: list[Look]) -> Look | None:
    """A tensor that the kernel's own package has no type for: it has no ``__cuda_array_interface__``, say."""
    for look in leaves(looks):
        if look.kind in (TABLE, DLPACK):
            try:
                kernel.target.type_of_value(kernel.dispatcher, for_package(look))
            except Exception:
                return look
    return None


def only_for_package(looks: list[Look]) -> list[Look]:
    """What only the kernel's own package understands, the built-in types of Python first, which it likely does not either."""
    found = [look for look in leaves(looks) if look.kind == PACKAGE]
    return sorted(found, key=lambda look: type(look.value).__module__ != "builtins")


def is_for_package(looks: list[Look]) -> bool:
    """Whether there is an argument that only the kernel's own package understands: of the host, a record, a hint …"""
    return bool(only_for_package(looks))


def are_exported(looks: list[Look]) -> bool:
    """Whether Python code has to export an argument for each launch."""
    return any(look.kind in (DLPACK, INTERFACE) for look in leaves(looks))


def are_exported_by_python(looks: list[Look]) -> bool:
    """Whether native code surely cannot export all of them."""
    found = [look for look in leaves(looks) if look.kind in (DLPACK, INTERFACE)]
    return any(look.interface is None or _version(look.interface) < SAYS_STREAM for look in found)


def for_package(look: Look):
    """An argument for the package's own launch, which asks PyTorch's tensors for what kernels need not mind."""
    value = look.value
    if look.kind == TUPLE:
        return again(value, [for_package(item) for item in look.items])
    if torch.is_tensor_type(type(value)) and value.requires_grad:
        return value.detach()
    return value


def again(value: tuple, items: list) -> tuple:
    """A tuple of the type of `value` with other items."""
    return tuple(items) if type(value) is tuple else type(value)._make(items)  # type: ignore[attr-defined]


# ---- where it is -----------------------------------------------------------------------------------------------------


def _device(value, fields: dict[str, int]) -> tuple[int, int]:
    """(device type, number) of a tensor."""
    if fields.get("borrow") and not hasattr(type(value), "__dlpack_device__"):
        tensor = ffi.new("DLTensor *")
        if _BORROW(fields["borrow"])(value, address_of(tensor)) == 0:
            return int(tensor.device.device_type), tensor.device.device_id
    device_type, number = value.__dlpack_device__()
    return int(device_type), int(number)


def _named(place: tuple[int, int]) -> str:
    device = ffi.new("DLDevice *", place)
    return device_name(device)


def _stream_in(interface: dict) -> int | None:
    """The stream in an array's ``__cuda_array_interface__``."""
    stream = interface.get("stream")
    if stream is None:
        return None
    if isinstance(stream, bool) or not hasattr(type(stream), "__index__") or not 0 <= operator.index(stream) < 2**63:
        raise BufferError(f"the stream in its array interface is {shown(stream)}, not None or the handle of a stream")
    return operator.index(stream)


def add_stream(streams: list[int], stream: int | None) -> None:
    """Add a stream that is not among them yet."""
    if stream is not None and not any(are_one(stream, known) for known in streams):
        streams.append(stream)


def whereabouts(kernel, looks: list[Look]) -> Whereabouts:
    """Where a launch with these arguments is.

    Raises BufferError for tensors on different devices. Managed memory is read by every device: it decides only where
    nothing else does.
    """
    placed = [look for look in leaves(looks) if look.place is not None]
    tensors = [look for look in placed if look.place[0] != DLDeviceType.kDLCUDAHost]  # memory of the host is everywhere
    device = None
    for look in tensors:
        device_type, number = look.place
        if not driver().has(number):  # no framework could say on which stream of it it works
            refuse_value(kernel, look.position, look.value, f"its memory is on device {_named(look.place)}, which does not exist")
        if device_type == DLDeviceType.kDLCUDA:
            if device is not None and number != device:
                refuse_device(kernel, look.position, look.value, number, device)
            device = number
    if device is None and tensors:
        device = tensors[0].place[1]
    streams: list[int] = []
    for look in placed:
        on = kernel.default_device() if device is None else device
        stream = stream_of_producer(look.function, on) if look.function else look.stream
        add_stream(streams, stream)
    return Whereabouts(device, streams)


def _place(pointer: int) -> tuple[int, int]:
    """(device type, number) of the memory at an address."""
    if not pointer:  # of an array without elements, which is wherever the launch is
        return int(DLDeviceType.kDLCUDAHost), 0
    if not 0 < pointer < 2**64:
        raise BufferError(f"its address {shown(pointer)} is none")
    try:
        memory = driver().memory_at(pointer)
    except CudaError as error:
        if error.code != 1:
            raise
        raise BufferError(f"its address {pointer:#x} is not one of CUDA's memory") from None
    if memory.is_managed:
        return int(DLDeviceType.kDLCUDAManaged), memory.device
    return int(DLDeviceType.kDLCUDA if memory.is_on_device else DLDeviceType.kDLCUDAHost), memory.device
