"""Arrays in a kernel's result that native code (``dispatch.boxed_results``) leaves to Python, and the errors for them.

An array that a kernel has made is returned as a tensor of the *target*: the type in ``fast_args(returns=…)``, or the type of the
argument that it names, or of the call's first tensor. If that type cannot be made of an array, the result is a NumPy array.
"""

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from .._abi import ffi
from ..arguments.discovery import fields_of, learn_type
from ..dispatch import structs
from ..dispatch.boxed_results import BOXING, NEW, SEVERAL, box_result
from ..dispatch.boxing import box
from ..dispatch.runtime import runtime
from ..exchange.by_python import made_by_python
from ..exchange.errors import elements_named
from ..exchange.export import export_of
from ..exchange.makers import has_from_dlpack, maker
from ..ground.dlpack import type_of_field
from ..ground.dtypes import field_to_dtype, storage_of
from ..ground.native import address_of
from ..ground.omitted import OMITTED
from ..ground.once import for_ever, once
from ..ground.safe_repr import a_type_name, type_name
from ..interpreter import DISABLED
from ..producers.framework import framework_of_type
from ..producers.ndarray import dtype_of

__all__ = ["CALLED", "as_target", "check_argument", "check_type", "prepare", "reflect"]

CALLED = ("as_target", "reflect")
"""The functions that native code calls."""


@once
def prepare() -> None:
    """Let native code call :func:`as_target` and :func:`reflect`."""
    runtime().native.results = id(for_ever(sys.modules[__name__]))
    runtime().native.as_target, runtime().native.reflect = (id(for_ever(sys.intern(name))) for name in CALLED)


def as_target(array: np.ndarray, like, kernel: str, field: int = 0):
    """Convert an array that `kernel` has returned to a tensor.

    `like`: a tensor of its framework, beside which the new one lies, or a type of such; None: NumPy's. `field`: the elements'
    dtype field if the kernel got them as integers; NEW for an output, which nobody else has; else 0. An array of a user's class
    stays as it is. If it shows memory without an owner (a global array's, a record's, or at an address), the tensor is a copy.
    Raises BufferError if the framework has no such tensor.
    """
    if type(array) is not np.ndarray:
        return array
    has_owner = array.base is not None or array.flags.owndata
    is_new = field == NEW
    field = 0 if is_new else field
    cls = type(like)  # not isinstance(), which reads __class__
    target, like = (like, None) if like is None or issubclass(cls, type) else (cls, like)
    if not field and target is not None and has_owner:
        made = framework_of_type(target).tensor_of(array, is_new, like)
        if made is not None:
            return made
    what = f"{kernel}(): its result, an array of {dtype_of(array)}"
    key = None
    cls = np.ndarray if target is None else tensor_type(target)
    make = None if cls is np.ndarray else _maker(cls)
    if field:
        try:
            array = array.view(field_to_dtype(field))
        except KeyError:  # NumPy has no such dtype: keep the integers
            if dtype_of(array).kind == "V":
                key = type_of_field(field)
                what = f"{kernel}(): its result, an array of {elements_named(field)}"
                array = array.view(cast(np.dtype, storage_of(field)))
    if make is None:
        if key is not None:
            raise BufferError(f"{what}: NumPy has no such dtype; install ml_dtypes, or name the tensors' type by returns=")
        return array
    if not has_owner:
        array = array.copy()
    if not framework_of_type(cls).takes_all:
        if not array.flags.writeable:
            why = "is readonly, as an argument is whose memory it shows"
        elif any(stride < 0 and extent > 1 for stride, extent in zip(array.strides, array.shape, strict=True)):
            why = "has a negative stride"
        else:
            why = ""
        if why:
            raise BufferError(f"{what}, {why}: {type_name(cls)} has no such tensors; return a copy of it")
    if DISABLED:
        return make(array)
    try:
        with export_of(array, "a result") as export:
            if key is not None:
                export.retype(*key)
            return make(export)
    except (BufferError, TypeError, ValueError) as error:
        raise BufferError(f"{what}, cannot be made {a_type_name(cls)}: {error}") from error


def reflect(list_types: tuple, target: list, index: int, meminfo: int, context: int, frame: int, args: int) -> None:
    """Apply a kernel's changes to the list `target`, the call's `index`-th list.

    `list_types`: of all lists of the call. `meminfo`: the address of the kernel's list. `context`, `frame`, `args`: the addresses
    of the ``fx_context``, the ``fx_frame``, and the arguments in parameter order.
    """
    runtime().add(*BOXING)
    address, constants = box(list_types[index])
    pointers = ffi.new("intptr_t[]", [id(constant) for constant in constants] or [0])
    overload = ffi.new("fx_overload *")
    overload.box, overload.box_constants, overload.boxes_arrays = address, address_of(pointers), SEVERAL
    value = ffi.cast("intptr_t *", ffi.cast("fx_frame *", frame).result)
    value[0], value[1] = meminfo, 0  # no parent: boxing makes a new list
    ffi.cast("intptr_t *", meminfo)[0] += 1  # boxing consumes a reference
    target[:] = _BOX_RESULT(box_result.address)(context, address_of(overload), frame, args)


_BOX_RESULT = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 4)


def tensor_type(cls: type) -> type:
    """The type of new tensors of the framework of `cls`, a tensor type."""
    return np.ndarray if issubclass(cls, np.ndarray) else framework_of_type(cls).tensor_type(cls)


def check_type(cls: type) -> None:
    """Raise TypeError if no tensors of type `cls` can be made, as far as that is known without its exchange table."""
    made = tensor_type(cls)
    if cls is object or not (made is np.ndarray or hasattr(made, "__dlpack_c_exchange_api__") or has_from_dlpack(made)):
        raise _no_target(cls)
    if made is not cls:
        raise TypeError(
            f"fast_args(): returns={type_name(cls)}: its framework makes {a_type_name(made)}; pass that type, and convert it"
        )


def learn_target(cls: type) -> None:
    """Prepare results of type `cls`. Raises TypeError if no tensors of that type can be made."""
    if cls is not np.ndarray and _maker(cls) is None:
        raise _no_target(cls)
    learn_type(cls)


def _no_target(cls: type) -> TypeError:
    return TypeError(f"fast_args(): returns is a type of tensors that can be made of memory, not {type_name(cls)}")


def check_argument(kernel, bound: tuple) -> None:
    """Raise TypeError if the argument that ``returns`` of a kernel names is no tensor."""
    if isinstance(kernel.returns, str):
        position = kernel._parameters.names.index(kernel.returns)
        cls = type(bound[position])
        if not structs.is_tensor.py_func(fields_of(cls)["kind"]):
            given = "omitted" if bound[position] is OMITTED else f"no tensor but of type {type_name(cls)}"
            raise TypeError(
                f"{kernel.__qualname__}(): argument {kernel.returns!r} (position {position}) determines the type of results by "
                f"fast_args(returns={kernel.returns!r}), and is {given}"
            )


def _maker(cls: type) -> Callable[[Any], Any] | None:
    """The function that makes a tensor for the type `cls` of an export, or None."""
    if DISABLED:
        return functools.partial(made_by_python, "a result", cls) if has_from_dlpack(cls) else None
    if id(cls) in _unmakeable:
        return None
    try:
        return maker("a result", cls, is_exact=False)
    except TypeError:
        _unmakeable[id(cls)] = weakref.ref(cls, functools.partial(_forget, id(cls)))
        return None


def _forget(address: int, _reference) -> None:
    _unmakeable.pop(address, None)


_unmakeable: dict[int, weakref.ref] = {}
"""Types, by ``id``, whose tensors cannot be made."""
