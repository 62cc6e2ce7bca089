"""Conversions where native code is switched off: by the frameworks' own Python functions, with NumPy's arrays between them."""

import numpy as np

from ..arguments.buffer import is_buffer_type
from ..ground import dtype_registry
from ..ground.dlpack_types import why_not_exported
from ..ground.safe_repr import type_name
from ..producers.framework import framework_of, framework_of_type
from .makers import own_from_dlpack

__all__ = ["array_by_python", "converted_by_python", "made_by_python"]


def made_by_python(what: str, to: type, array: np.ndarray):
    """Make a tensor of the type `to` over an array's memory, where native code is switched off. Raises TypeError, BufferError."""
    if to is np.ndarray:
        return array
    own = own_from_dlpack(what, to)
    try:
        return framework_of_type(to).from_numpy(array, own)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        reason = str(error).partition("\n")[0]
        raise BufferError(f"{what}: no {type_name(to)} can be made of an array of {array.dtype}: {reason}") from error


def array_by_python(what: str, x) -> np.ndarray:
    """An array over any tensor's memory, where native code is switched off. Raises TypeError, and what its framework raises."""
    if isinstance(x, np.ndarray):
        return _named_in_dlpack(what, x.view(np.ndarray))
    if not (hasattr(x, "__dlpack__") or is_buffer_type(type(x))):
        raise TypeError(f"{what}: an object of type {type_name(type(x))} is no tensor: it has no __dlpack__ and no buffer")
    framework = framework_of(x)
    framework.check(x)
    return _named_in_dlpack(what, framework.as_numpy(x))


def _named_in_dlpack(what: str, array: np.ndarray) -> np.ndarray:
    if dtype_registry.key_of(array.dtype) is None:
        raise BufferError(f"{what}: DLPack has no name for the dtype {array.dtype!r}: {why_not_exported(array.dtype)}")
    return array


def converted_by_python(what: str, x, to: type, copy):
    """:func:`convert` where native code is switched off."""
    array = array_by_python(what, x)
    if not copy and not framework_of_type(to).takes_all:
        why = "" if array.flags.writeable else f"{type_name(to)} has no readonly tensors"
        if any(stride < 0 and extent > 1 for stride, extent in zip(array.strides, array.shape, strict=True)):
            why = f"{type_name(to)} has no negative strides"
        if why and copy is False:
            raise BufferError(f"{what}: {why}, so a copy is needed, but copy is False")
        copy = copy or bool(why)
    if copy:
        return made_by_python(what, to, array.copy(order="C"))
    try:
        made = made_by_python(what, to, array)
    except BufferError:  # a framework that refuses the memory may take a copy
        if copy is False:
            raise
        return made_by_python(what, to, array.copy(order="C"))
    if copy is False and array.size and not np.shares_memory(array_by_python(what, made), array):
        raise BufferError(f"{what}: the framework of {type_name(to)} has copied the tensor, but copy is False")
    return made
