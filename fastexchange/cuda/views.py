"""Tensors without an exchange table: exported by Python code, for one launch, and shown to native code.

``__dlpack__(stream=…)`` makes its producer see to it that the memory may be used on that stream;
``__cuda_array_interface__`` names the producer's stream, and we order the two. Also here: which arguments are for the
kernel's own package, and what it has to be spared.

Source: DLPack 1.3, Python specification; CUDA Array Interface, version 3.
"""

import contextlib
import ctypes
import functools
import operator
from typing import NamedTuple

import numpy as np
from numba import types

from .._abi import ffi
from ..compiled import cfunction
from ..cpython import CALLABLE_CONTEXT, NativeCallable
from ..discovery import learn_type
from ..dispatch import layout
from ..dispatch.state import runtime
from ..dlpack import VERSION, DLDeviceType, DLPackFlag
from ..naming import shown
from ..native import address_of, load, store
from ..once import once
from ..producers import dunder, forwarded, torch
from ..refusal import check_tensors, device_name, refuse_device, refuse_value, refused
from ..registry import key_of
from .driver import CudaError, driver
from .interface import SAYS_STREAM, managed_tensor_of_interface
from .streams import are_one, default_stream, stream_of_producer
from .targets import is_device_array

__all__ = [
    "Look", "are_exported", "are_exported_by_python", "exported", "for_package", "has_interface", "is_for_package", "look_at",
    "looks_without_errors", "only_for_package", "originals", "paths", "unknown_to_package", "whereabouts",
]  # fmt: skip

_BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_deleter = functools.lru_cache(64)(ctypes.PYFUNCTYPE(None, ctypes.c_void_p))  # by its address: producers have few
_IS_VALID = ctypes.pythonapi.PyCapsule_IsValid
_GET_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_SET_NAME = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(("PyCapsule_SetName", ctypes.pythonapi))
_USED = {b"dltensor_versioned": ctypes.c_char_p(b"used_dltensor_versioned"), b"dltensor": ctypes.c_char_p(b"used_dltensor")}

ON_DEVICE = (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged)
_PLAIN, _TABLE, _DLPACK, _INTERFACE, _ARRAY, _TUPLE, _PACKAGE = range(7)
"""How an argument gets into the kernel; ``_ARRAY``: it is a device array of numba's, which native code remembers."""


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
    view = _from_interface(value, value.__cuda_array_interface__, place)
    view.held = None  # not the array itself, which would live for ever
    if not entries.fields(type(value)).get("is_by_object"):
        entries.update(type(value), is_by_object=1)
    entries.add(value, view, kind=layout.KIND_VIEW, shown=address_of(view.native))


@once
def _prepare() -> bool:
    runtime().entries.add(_View, kind=layout.KIND_MANAGED, managed=managed_tensor_of_view.address)
    return True


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
    if look.kind == _TUPLE:
        look.items = [_look(kernel, position, item) for item in value]
    elif look.kind in (_TABLE, _DLPACK):
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
    if look.kind == _ARRAY:
        look.place = _place(operator.index(look.value.__cuda_array_interface__["data"][0] or 0))
    elif look.kind == _INTERFACE:
        assert look.interface is not None
        look.place = _place(operator.index(look.interface["data"][0] or 0))
        look.stream = _stream_in(look.interface)
    elif look.kind in (_TABLE, _DLPACK):
        fields = runtime().entries.fields(type(look.value))
        look.place = _device(look.value, fields)
        look.function = fields.get("stream", 0) if look.kind == _TABLE else 0


def _classified(position: int, value) -> Look:
    entries = runtime().entries
    fields = entries.get(type(value))
    if fields is None:
        learn_type(type(value), value)
        fields = entries.fields(type(value))
    kind = fields["kind"]
    if kind in (layout.KIND_TUPLE, layout.KIND_NAMED_TUPLE):
        return Look(position, value, _TUPLE)
    if kind in (layout.KIND_EXCHANGE, layout.KIND_MANAGED) and not fields.get("asks_python") and not fields.get("key"):
        return Look(position, value, _TABLE)
    if kind == layout.KIND_MANAGED and fields["managed"] == dunder.managed_tensor_from_py_object_no_sync.address:
        interface = None
        with contextlib.suppress(Exception):
            interface = _interface(value)
        # Rather than its __dlpack__, which has to be told of a stream, and takes longer. JAX's has version 2, without streams.
        if interface is not None and _version(interface) >= SAYS_STREAM:
            return _with_interface(position, value, interface)
    if kind == layout.KIND_MANAGED and (fields.get("asks_python") or hasattr(type(value), "__dlpack__")):
        found = _wrapped(value, fields)
        return Look(position, value, _DLPACK) if found is None else Look(position, found, _TABLE)
    if layout.KIND_FLOAT <= kind <= layout.KIND_NUMPY_COMPLEX128:
        return Look(position, value, _PLAIN)
    if kind == layout.KIND_NUMBA:
        if is_device_array(value) and not value.stream and key_of(value.dtype) is not None:
            return Look(position, value, _ARRAY)
        interface = _interface(value)
        if interface is not None:
            return _with_interface(position, value, interface)
    return Look(position, value, _PACKAGE)


def _version(interface: dict) -> int:
    version = interface.get("version")
    return version if type(version) is int else 0


def _with_interface(position: int, value, interface: dict) -> Look:
    look = Look(position, value, _INTERFACE)
    look.interface = interface
    entries = runtime().entries
    if not entries.fields(type(value)).get("interface"):  # from now on native code reads what is as usual
        entries.update(type(value), interface=managed_tensor_of_interface.address)
    return look


def _interface(value) -> dict | None:
    """The ``__cuda_array_interface__`` of an array of numbers; None for anything else, records and dates among it."""
    found = None if isinstance(value, type) else getattr(value, "__cuda_array_interface__", None)
    return None if found is None or key_of(np.dtype(found["typestr"])) is None else found


def _wrapped(value, fields: dict[str, int]):
    """The tensor with an exchange table that `value` stands for; None if it stands for itself."""
    if fields["managed"] == dunder.managed_tensor_from_py_object_no_sync.address:
        return None
    found = forwarded.resolve(value)
    if found is None or found[0] is value:
        return None
    learn_type(type(found[0]), found[0])
    fields = runtime().entries.fields(type(found[0]))
    return found[0] if fields.get("borrow") or (fields.get("managed") and not fields.get("asks_python")) else None


def _leaves(looks: list[Look]):
    for look in looks:
        if look.kind == _TUPLE:
            yield from _leaves(look.items)
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
    names = {_ARRAY: "device-array", _INTERFACE: "cuda-interface", _PACKAGE: "package"}
    return {look.position: names[look.kind] for look in looks if look.kind in names}


def unknown_to_package(kernel, looks: list[Look]) -> Look | None:
    """A tensor that the kernel's own package has no type for: it has no ``__cuda_array_interface__``, say."""
    for look in _leaves(looks):
        if look.kind in (_TABLE, _DLPACK):
            try:
                kernel.target.type_of_value(kernel.dispatcher, for_package(look))
            except Exception:
                return look
    return None


def only_for_package(looks: list[Look]) -> list[Look]:
    """What only the kernel's own package understands, the built-in types of Python first, which it likely does not either."""
    found = [look for look in _leaves(looks) if look.kind == _PACKAGE]
    return sorted(found, key=lambda look: type(look.value).__module__ != "builtins")


def is_for_package(looks: list[Look]) -> bool:
    """Whether there is an argument that only the kernel's own package understands: of the host, a record, a hint …"""
    return bool(only_for_package(looks))


def are_exported(looks: list[Look]) -> bool:
    """Whether Python code has to export an argument for each launch."""
    return any(look.kind in (_DLPACK, _INTERFACE) for look in _leaves(looks))


def are_exported_by_python(looks: list[Look]) -> bool:
    """Whether native code surely cannot export all of them."""
    found = [look for look in _leaves(looks) if look.kind in (_DLPACK, _INTERFACE)]
    return any(look.interface is None or _version(look.interface) < SAYS_STREAM for look in found)


def for_package(look: Look):
    """An argument for the package's own launch, which asks PyTorch's tensors for what kernels need not mind."""
    value = look.value
    if look.kind == _TUPLE:
        return _again(value, [for_package(item) for item in look.items])
    if torch.is_tensor_type(type(value)) and value.requires_grad:
        return value.detach()
    return value


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


def _add(streams: list[int], stream: int | None) -> None:
    """Add a stream that is not among them yet."""
    if stream is not None and not any(are_one(stream, known) for known in streams):
        streams.append(stream)


def whereabouts(kernel, looks: list[Look]) -> Whereabouts:
    """Where a launch with these arguments is.

    Raises BufferError for tensors on different devices. Managed memory is read by every device: it decides only where
    nothing else does.
    """
    placed = [look for look in _leaves(looks) if look.place is not None]
    tensors = [look for look in placed if look.place[0] != DLDeviceType.kDLCUDAHost]  # memory of the host is everywhere
    device = None
    for look in tensors:
        device_type, number = look.place
        if not driver().has(number):  # no framework could say on which stream of it it works
            refuse_value(kernel, look.position, look.value, f"its memory is on device {_named(look.place)}, which there is not")
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
        _add(streams, stream)
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


# ---- exporting -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exported(launcher, looks: list[Look]):
    """The arguments that native code reads, the device and the streams of a launch.

    The first stream is the launch's; the others are those of producers that do not order their work themselves. What was
    exported is given back at the end.
    """
    _prepare()
    kernel = launcher.kernel
    device, streams = whereabouts(kernel, looks)
    own = launcher.configuration.stream
    if own is not None:  # arrays with an interface have to be waited for all the same
        streams = [own]
        for look in _leaves(looks):
            _add(streams, look.stream)
    streams = streams or [default_stream()]
    with contextlib.ExitStack() as stack:
        arguments = tuple([_export(kernel, look, streams[0], stack) for look in looks])
        yield arguments, kernel.default_device() if device is None else device, streams


def _again(value: tuple, items: list) -> tuple:
    """A tuple of the type of `value` with other items."""
    return tuple(items) if type(value) is tuple else type(value)._make(items)  # type: ignore[attr-defined]


def _export(kernel, look: Look, stream: int, stack: contextlib.ExitStack):
    """What native code reads of an argument; `stack` gives back what has been exported for that."""
    value = look.value
    if look.kind == _TUPLE:
        return _again(value, [_export(kernel, item, stream, stack) for item in look.items])
    try:
        if look.kind == _DLPACK:
            return _from_dlpack(look, stream, stack)
        if look.kind == _INTERFACE:
            return _from_interface(value, look.interface, look.place)
        if look.kind == _ARRAY and value not in runtime().entries:
            _remember(value, look.place)
    except Exception as error:
        refused(kernel, look.position, error)
    return value


def _from_dlpack(look: Look, stream: int, stack: contextlib.ExitStack) -> _View:
    """A view of what ``__dlpack__`` exports for use on a stream; `stack` gives it back."""
    value = look.value
    # Of the default stream DLPack says 1, for 0 could be either default. Memory of the host has no stream.
    told = None if look.place is None or look.place[0] == DLDeviceType.kDLCUDAHost else (stream or 1)
    try:
        capsule = value.__dlpack__(stream=told, max_version=VERSION)
    except TypeError:
        capsule = value.__dlpack__(stream=told)
    flags_of_legacy = _flags_of_legacy(value)  # which runs the producer's code: before the capsule is ours
    for name, used in _USED.items():
        if _IS_VALID(ctypes.py_object(capsule), name):
            pointer = _GET_POINTER(ctypes.py_object(capsule), name)
            _SET_NAME(capsule, ctypes.cast(used, ctypes.c_void_p))
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
    interface = _interface(value)
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
    return tuple(value.held if type(value) is _View else value for value in bound)


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
