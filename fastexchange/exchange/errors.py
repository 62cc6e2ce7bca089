"""Messages and exceptions for refused tensors and arguments: one message for each refusing ``STATUS_*``."""

from typing import NoReturn

from .._abi import ffi
from ..dispatch import structs
from ..ground import dltensor, dtype_registry
from ..ground.dlpack import DLDataTypeCode, DLDeviceType, type_of_field
from ..ground.dtypes import FIRST_PARAMETRIC, field_to_dtype, storage_of
from ..ground.log import say
from ..ground.native import address_of
from ..ground.parameters import flatten, value_at
from ..ground.safe_repr import a_type_name
from ..producers.framework import PLAIN, framework_of

_OF_CUDA = (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAManaged)


def device_name(device) -> str:
    """Return the name of a ``DLDevice``, for example ``kDLCUDA:0``."""
    try:
        return f"{DLDeviceType(int(device.device_type)).name}:{device.device_id}"
    except ValueError:
        return f"{int(device.device_type)}:{device.device_id} (unknown to DLPack 1.3)"


def dtype_name(code: int, bits: int, lanes: int = 1) -> str:
    """A DLPack data type as text, for example ``kDLBfloat of 16 bits``."""
    known = code in DLDataTypeCode._value2member_map_
    name = DLDataTypeCode(code).name if known else f"code {code} (unknown to DLPack 1.3)"
    return f"{name} of {bits} bits" + (f" in {lanes} lanes" if lanes != 1 else "")


def elements_named(field: int) -> str:
    """The name of a dtype field: ``bfloat16``, ``int4``, ``code 200 (unknown to DLPack 1.3) of 16 bits``."""
    if field >= FIRST_PARAMETRIC:
        return field_to_dtype(field).name
    key = type_of_field(field)
    if (known := dtype_registry.dtype_of(*key)) is not None:
        return known.name
    return next((name for name, known in dtype_registry.ML_DTYPES.items() if known == key), dtype_name(*key))


def why_not_computed(field: int, value) -> str:
    """The message for elements of this field, in or as `value`, for which Numba has no type, with advice."""
    name, stored = elements_named(field), storage_of(field)
    is_of_ml_dtypes = name in dtype_registry.ML_DTYPES and field < FIRST_PARAMETRIC
    in_dlpack = f" ({dtype_name(*type_of_field(field))})" if is_of_ml_dtypes else ""
    frameworks = [framework_of(item) for _, item in flatten(0, value)]
    wider = next((wide for known, wide in _WIDER.items() if name.startswith(known)), None)
    ways = []
    if wider is not None:
        framework = next((each for each in frameworks if each is not PLAIN), PLAIN)
        ways.append(f"convert it ({framework.conversion(wider)})")
    if stored is not None:
        ways.append(f"make the kernel with fast_args(storage=True), which gives it their bits as {stored.name}")
    elif field < FIRST_PARAMETRIC and type_of_field(field)[1] < 8:
        return f"Numba cannot compute with its elements, {name}; {_PACKED}"
    return f"Numba cannot compute with its elements, {name}{in_dlpack}; {', or '.join(ways) or 'convert it'}"


_WIDER = {
    "bfloat": "float32", "float": "float32", "complex": "complex64", "bcomplex": "complex64", "int": "int8", "uint": "uint8",
}  # fmt: skip
"""Prefixes of element types' names, and the dtype to convert such elements to."""


def refuse_elements(kernel, bound: tuple, position: int, field: int) -> NoReturn:
    """Raise BufferError for the argument at `position`: the kernel does not take elements of the dtype `field`."""
    position = kernel._parameters.unfolded(position)
    refuse(kernel, position, bound, why_not_computed(field, value_at(bound, position)))


_PACKED = "its numbers lie packed in bytes; pass the bytes, as uint8 (of a torch.Tensor: .view(torch.uint8)), or convert it"


def advice(code: int, bits: int, lanes: int = 1) -> str:
    """Advice for an element type without a NumPy dtype, where a NumPy array is needed."""
    if bits < 8:
        return _PACKED
    if lanes == 1 and (code, bits) in dtype_registry.ML_DTYPES.values():
        return "import ml_dtypes, which has it, or convert it first"
    return "convert it first"


def wording(status: int, tensor, is_for_cuda: bool = False) -> str:
    """The message for a ``DLTensor *`` refused with this ``STATUS_*``, with advice. Does not read the shape, which may dangle."""
    if status == structs.STATUS_DEVICE and is_for_cuda and int(tensor.device.device_type) in _OF_CUDA:
        return f"its memory is on device {device_name(tensor.device)}, which does not exist"
    if status == structs.STATUS_DEVICE and is_for_cuda:
        return f"its memory is on device {device_name(tensor.device)}, which a CUDA kernel cannot read; copy it to the GPU first"
    if status == structs.STATUS_MISALIGNED:
        return "its elements are not aligned to their size, so a GPU cannot read them; pass a copy of it"
    if status == structs.STATUS_DEVICE:
        return f"its memory is on device {device_name(tensor.device)}, which a CPU kernel cannot read; copy it to the CPU first"
    if status == structs.STATUS_NULL_DATA:
        return (
            "its data pointer is NULL although its shape is not empty: it holds no memory (freed, fake or lazy); pass one that "
            "has memory"
        )
    if status == structs.STATUS_DTYPE:
        dtype = tensor.dtype
        name = dtype_name(dtype.code, dtype.bits, dtype.lanes)
        return f"its element type {name} has no NumPy dtype; {advice(dtype.code, dtype.bits, dtype.lanes)}"
    if status == structs.STATUS_NDIM:
        return f"it has {tensor.ndim} dimensions; from 0 to {structs.MAX_NDIM} are supported"
    if status == structs.STATUS_SHAPE:
        return "its shape is missing or has a negative extent"
    if status == structs.STATUS_OVERFLOW:
        return "its number of elements, its strides or its offset overflow 64 bits"
    if status == structs.STATUS_VERSION:
        return "it was exported with a DLPack ABI of another major version than 1"
    if status == structs.STATUS_CHANGED:
        return "it changed while another argument's producer ran Python code"
    if status == structs.STATUS_NO_ERROR_SET:
        return "its producer failed to export it and did not say why"
    raise AssertionError(f"status {status} is no refusal")


def status_of(tensor) -> int:
    """The status by which native code refuses a ``DLTensor``; 0 if it is sound. Python asks before it makes a view."""
    return _status(dltensor.status_at, tensor)


def memory_status_of(tensor) -> int:
    """The status of a ``DLTensor`` whose rank, extents, strides or address are impossible on any device; else 0."""
    return _status(dltensor.memory_status_at, tensor)


def _status(function, tensor) -> int:
    return ffi.cast("intptr_t (*)(intptr_t)", function.address)(address_of(ffi.addressof(tensor)))


# ---- a call's argument ----------------------------------------------------------------------------------------------

# Exceptions that carry only a message: they can be raised again with the argument's name in it.
_REWORDED = (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, OverflowError)


def _has_only_a_message(error: BaseException) -> bool:
    """Whether an exception carries only its message, so that one of the same type with another message can replace it."""
    cls = type(error)
    if cls.__module__ == "builtins":  # exactly: a RecursionError, for example, stays as it is
        return cls in _REWORDED
    return (
        issubclass(cls, _REWORDED)
        and not any("__init__" in vars(base) or "__new__" in vars(base) or "__str__" in vars(base) for base in _own_bases(cls))
        and not object.__getattribute__(error, "__dict__")
        and len(error.args) == 1
        and type(error.args[0]) is str
    )


def _own_bases(cls: type) -> list[type]:
    """An exception's classes that are not Python's own."""
    return [base for base in cls.__mro__ if base.__module__ != "builtins"]


def expression(kernel, position: int) -> str:
    """The expression of the argument or item at `position`: ``xs[0]``."""
    return kernel._parameters.name_of(position) + "".join(f"[{index}]" for index in getattr(position, "place", ()))


def argument(kernel, position: int) -> str:
    """Name the argument or item at `position` for a message; -1: the stream of a launch."""
    if position < 0:
        return f"{kernel.__qualname__}(): the stream on which the tensors' producer works (its current_work_stream)"
    place = "".join(f"[{index}]" for index in getattr(position, "place", ()))
    what = f"{kernel.__qualname__}(): argument {kernel._parameters.name_of(position)!r} (position {position})"
    return f"{what}, item {place}" if place else what


def check_tensors(kernel, position: int, value) -> None:
    """Check by their frameworks that tensors in `value` are plain, or can be read as plain ones. Raises the refusal otherwise."""
    for at, tensor in flatten(position, value):
        _check_tensor(kernel, at, tensor)


def _check_tensor(kernel, position: int, tensor) -> None:
    framework = framework_of(tensor)
    try:
        framework.check(tensor, kernel.allows_grad, kernel.storage)
        return
    except Exception as error:
        narrow = None if kernel.storage else framework.why_narrow(tensor)
        why = narrow or (str(error) if isinstance(error, BufferError) else None)
        if why is None:
            refused(kernel, position, error)
    refuse_value(kernel, position, tensor, why)


def refuse(kernel, position: int, bound: tuple, why: str) -> NoReturn:
    """Raise BufferError for the argument at `position`."""
    value = value_at(bound, position)
    refuse_value(kernel, position, value, framework_of(value).why_no_memory(value) or why)


def refuse_value(kernel, position: int, value, why: str) -> NoReturn:
    """Raise BufferError for `value`, the argument at `position` or a part of it."""
    refusal = f"{argument(kernel, position)}, {a_type_name(type(value))}, cannot be passed to the kernel: {why}"
    say("refused: %s", refusal)
    raise BufferError(refusal)


def refuse_device(kernel, position: int, value, device: int, other: int) -> NoReturn:
    """Raise BufferError for `value`, which is on another CUDA device than the arguments before it."""
    refuse_value(
        kernel, position, value,
        f"its memory is on device kDLCUDA:{device}, but an earlier argument is on kDLCUDA:{other}; copy one of them",
    )  # fmt: skip


def refuse_mixed(kernel, position: int, bound: tuple, item) -> NoReturn:
    """Raise TypeError for a list in the argument at `position` whose `item` differs from the first one."""
    lists = [part for _, part in flatten(position, bound[position]) if type(part) is list]
    found = next((part for part in lists if any(each is item for each in part)), None)
    if found is None:  # another thread has changed the list
        raise TypeError(mixed(kernel, position, "its items differ in element type or number of dimensions"))
    index = next(i for i, each in enumerate(found) if each is item)
    raise TypeError(mixed(kernel, position, f"item 0 is {_elements(found[0])}, item {index} {_elements(item)}"))


def instead_of_mixed(kernel, position: int) -> str:
    """The advice for a list, the argument or item at `position`, whose items are of several types."""
    name = expression(kernel, position)
    return f"convert them, or pass a tuple: `from numba import literal_unroll`, `for each in literal_unroll({name})`"


def mixed(kernel, position: int, why: str) -> str:
    """Return the message for a list whose items differ; `why`: how."""
    return (
        f"{argument(kernel, position)}: the tensors of a list have one element type and one number of dimensions; {why}; "
        f"{instead_of_mixed(kernel, position)}"
    )


def _elements(tensor) -> str:
    return f"{getattr(tensor, 'ndim', '?')}-d {getattr(tensor, 'dtype', '?')}"


def refused(kernel, position: int, error: BaseException) -> NoReturn:
    """Raise a producer's exception again with the argument's name in its message, or in a note if it carries more than that."""
    try:
        if not _has_only_a_message(error):
            if isinstance(error, Exception):
                add_note(error, f"raised for {argument(kernel, position)}")
            raise error
        why = "cannot be passed to the kernel" if position >= 0 else "is not known"
        refusal = f"{argument(kernel, position)} {why}: {error}"
        say("refused: %s", refusal)
        raise type(error)(refusal) from error
    finally:
        del error  # its traceback holds this frame


def add_note(error: Exception, note: str) -> None:
    """Add a note to an exception, once; not before Python 3.11. Runs no code of the exception's class."""
    if hasattr(BaseException, "add_note"):
        known = object.__getattribute__(error, "__dict__").get("__notes__")
        if known is None or (type(known) is list and not any(type(each) is str and each == note for each in known)):
            BaseException.add_note(error, note)
