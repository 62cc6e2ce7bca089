"""Conversions: ``from_dlpack``, ``to_dlpack``, ``convert``. Zero copy wherever memory can be shared.

Each has the same two steps: the source's exchange table makes an owning export (``export``), and the target's
``managed_tensor_to_py_object_no_sync`` consumes it. Native code (``exchange.transfer``) makes positional calls with known types;
all other calls come to the functions here.

Source: DLPack 1.3; Python array API standard 2024.12, ``from_dlpack`` and ``__dlpack__``.
"""

import functools
import inspect
import operator
import sys
from typing import Any

import numpy as np

from .._abi import ffi
from ..dispatch.runtime import runtime
from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.dlpack import CPU, VERSION
from ..ground.native import address_of
from ..ground.safe_repr import a_type_name, is_type, shown, type_name
from ..interpreter import DISABLED
from ..producers.framework import framework_of, framework_of_type
from .by_python import array_by_python, converted_by_python
from .errors import device_name, memory_status_of, wording
from .export import COPIED, PADDED, Export, copy_of, export_of, is_exportable, known, to_numpy
from .makers import maker
from .transfer import vectorcall_transfer

__all__ = ["convert", "from_dlpack", "to_dlpack"]

_CPU = (CPU, 0)


# ---- native calls --------------------------------------------------------------------------------------------------


class _Transfer(NativeCallable):
    """A function with a native vectorcall, which makes most calls and passes the others to the Python function."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, function, target: type | None):
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(function)
        self._function = function
        self._name = sys.intern("_slowly")
        self._state = ffi.new("fx_transfer *")
        self._state.slow_name = id(self._name)
        self._state.target = id(target) if target is not None else 0

    def __call__(self, /, *args, **kwargs):
        """Make the first call, after which CPython calls native code directly, or all calls where native code makes none."""
        if not runtime().is_native:
            return self._function(*args, **kwargs)
        self._state.runtime = runtime().address
        self._context = address_of(self._state)
        self._vectorcall = vectorcall_transfer.address
        return NativeCallable.__call__(self, *args, **kwargs)

    def __repr__(self):
        return f"<function {self.__module__}.{self.__qualname__}{self.__signature__}>"

    def __reduce__(self):
        return self.__qualname__

    def _slowly(self, /, *args, **kwargs):
        return self._function(*args, **kwargs)


enable_vectorcall(_Transfer, _Transfer.__call__)


def _native(target: type | None):
    """Decorator: native code makes positional calls. Results are of type `target`, or of the type in the second argument."""
    return lambda function: _Transfer(function, target)


# ---- the public functions ------------------------------------------------------------------------------------------


@_native(np.ndarray)
def from_dlpack(x, /, *, dtype=None, device=None, copy=None) -> np.ndarray:
    """Return a NumPy array that shares the memory of `x`, a tensor of any framework.

    The array keeps the memory alive, even if `x` dies. It is readonly if `x` is, or if the producer cannot tell (legacy DLPack).
    A call with `x` alone is fast: it is native from end to end.

    Parameters
    ----------
    x : anything with an exchange table, ``__dlpack__`` or the buffer protocol.
    dtype : the required dtype, for example ``np.float32``; elements are never cast.
    device : ``"cpu"`` or ``(1, 0)`` to have a tensor on another device copied to the CPU by its framework.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed.

    Raises
    ------
    TypeError : `x` cannot be exported, or its elements are not of `dtype`.
    BufferError : its memory cannot be viewed: another device, no memory, no NumPy dtype, or the producer's reason.
    ValueError : a `device` that NumPy does not have, a `copy` that is neither True, False nor None.

    Source: Python array API standard, ``from_dlpack``; DLPack 1.3.

    >>> import torch
    >>> x = torch.arange(3.0)
    >>> from_dlpack(x)[0] = 5
    >>> x
    tensor([5., 1., 2.])
    """
    what = "from_dlpack()"
    if hasattr(type(dtype), "__dlpack__"):  # NumPy would read a tensor's elements for its message
        raise TypeError(f"{what}: dtype is what numpy.dtype takes, not {shown(dtype)}")
    wanted = None if dtype is None else _numpy_dtype(what, dtype)
    _check_copy(what, copy)
    if device is not None and _device(what, device) != _CPU:
        raise ValueError(f"{what}: NumPy's arrays are on device 'cpu' only, not on {shown(device)}")
    if DISABLED:
        array = array_by_python(what, x)
        return _checked(what, array, wanted, copy)
    with export_of(x, what) as export:
        if device is not None and not export.is_on_cpu:
            export.release()
            return from_dlpack(_moved(what, x, copy), dtype=dtype)
        array = to_numpy(export, what)
    return _checked(what, array, wanted, copy)


def _checked(what: str, array: np.ndarray, wanted: np.dtype | None, copy) -> np.ndarray:
    if wanted is not None and array.dtype != wanted:
        raise TypeError(f"{what}: the elements are {array.dtype}, not {wanted}; dtype= does not cast: use .astype()")
    return array.copy(order="K") if copy else array


def to_dlpack(x, /, *, max_version=None, device=None, copy=None):
    """Return a DLPack capsule of a tensor of any framework, which a consumer can consume once.

    The capsule owns an export. It releases the export when it dies without having been consumed.

    Parameters
    ----------
    max_version : the newest DLPack version (major, minor) that the consumer takes: from ``(1, 0)`` on the capsule is
        ``"dltensor_versioned"``, else, and for None, a legacy ``"dltensor"``, which cannot say that memory is readonly.
    device : None, or the required device, ``"cpu"`` or ``(1, 0)``; a tensor on another device is copied.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed.

    Raises TypeError if it cannot be exported, BufferError for a readonly tensor in a legacy capsule or if the producer refuses,
    ValueError for a bad `max_version`, `device` or `copy`.

    Source: Python array API standard, ``__dlpack__``; DLPack 1.3.

    >>> import numpy as np, torch
    >>> torch.from_dlpack(to_dlpack(np.arange(3.0), max_version=(1, 0)))
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    what = "to_dlpack()"
    _check_copy(what, copy)
    is_versioned = _is_versioned(what, max_version)
    wanted = None if device is None else _device(what, device)
    if DISABLED:
        array = array_by_python(what, x)
        its_own = not copy and not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__")  # it has more element types than NumPy
        source = framework_of(x).detached(x) if its_own else array.copy(order="K") if copy else array
        return source.__dlpack__(max_version=max_version)
    with export_of(x, what) as export:
        if wanted is None or wanted == export.device:
            return _capsule(what, export, is_versioned, copy)
        if wanted != _CPU:
            raise BufferError(f"{what}: the tensor is on {device_name(export.tensor.device)}, not on {shown(device)}")
    with export_of(_moved(what, x, copy), what) as moved:
        if moved.device != _CPU:
            place = device_name(moved.tensor.device)
            raise BufferError(f"{what}: its framework was asked to copy the tensor to the CPU, but left it on {place}")
        return _capsule(what, moved, is_versioned, copy)


def _numpy_dtype(what: str, dtype) -> np.dtype:
    """``np.dtype(dtype)``. Raises TypeError, which names NumPy's dtype for one of another framework."""
    try:
        return np.dtype(dtype)
    except TypeError as error:
        name = str(dtype).rpartition(".")[2]  # torch.float32
        instead = f"; pass {name!r}" if not isinstance(dtype, str) and hasattr(np, name) else ""
        raise TypeError(f"{what}: dtype is what numpy.dtype takes, not {shown(dtype)}{instead}") from error


def _capsule(what: str, export: Export, is_versioned: bool, copy):
    """Make a capsule of an export, or of a copy."""
    _check_sound(what, export.tensor)
    if copy:
        with copy_of(export, what) as copied:
            copied.managed.flags |= COPIED
            return copied.capsule(is_versioned)
    if not is_versioned and export.is_readonly:
        raise BufferError(f"{what}: a legacy capsule cannot say that the tensor is readonly; pass max_version=(1, 0)")
    if not is_versioned and export.managed.flags & PADDED:
        raise BufferError(f"{what}: a legacy capsule cannot say that the elements are padded to bytes; pass max_version=(1, 1)")
    return export.capsule(is_versioned)


@_native(None)
def convert(x, to: type, /, *, copy=None):
    """Return a tensor of the type `to` that shares the memory of `x`, a tensor of any framework.

    The two types' exchange tables do this without a copy. If `to` has no table, its framework's ``from_dlpack`` makes the tensor.
    An `x` of the type `to` is returned itself. Each of `x` and the result keeps the memory alive.

    Parameters
    ----------
    to : the type of the result, for example ``torch.Tensor``, ``numpy.ndarray``, ``jax.Array``.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed: for readonly
        memory and negative strides, if the target's framework has neither (PyTorch).

    Raises
    ------
    TypeError : `x` cannot be exported, or `to` is not a type of tensors.
    BufferError : the memory cannot be shared: the producer refuses, the target cannot view it, or `copy` is False.
    ValueError : a `copy` that is neither True, False nor None.

    Source: DLPack 1.3, ``DLPackExchangeAPI``.

    >>> import numpy as np, torch
    >>> convert(np.arange(3), torch.Tensor)
    tensor([0, 1, 2])
    """
    what = "convert()"
    _check_copy(what, copy)
    if not is_type(to):
        raise TypeError(f"{what}: the second argument is the type of the result, not {shown(to)}")
    if to is object:
        raise TypeError(f"{what}: the second argument is a type of tensors, not object")
    if issubclass(type(x), to) and not copy and (DISABLED or is_exportable(x)):
        return x
    make = None if DISABLED else maker(what, to)
    if copy is not False and issubclass(type(x), np.ndarray) and is_inexpressible_in_dlpack(x):
        x, copy = x.astype(x.dtype.newbyteorder("="), order="C", copy=True), None
    if make is None:
        return converted_by_python(what, x, to, copy)
    if not copy:
        with export_of(x, what) as export:
            _check_sound(what, export.tensor)
            why = _why_not_shared(export, to)
            if why and copy is False:
                raise BufferError(f"{what}: {why}, so a copy is needed, but copy is False")
            is_on_cpu = export.is_on_cpu
            is_final = copy is False or not is_on_cpu or _has_table(to)
            if not why:
                try:
                    address, is_empty = export.data, export.is_empty
                    made = make(export)
                except Exception:  # a framework that refuses the memory may take a copy
                    if is_final:
                        raise
                else:
                    if copy is False and not is_empty and not _has_table(to) and is_on_cpu:
                        _check_shared(what, made, address)
                    return made
    with export_of(x, what) as export:
        _check_sound(what, export.tensor)
        with copy_of(export, what, "K" if _has_table(to) else "C") as copied:
            return make(copied)


def is_inexpressible_in_dlpack(array: np.ndarray) -> bool:
    """Whether DLPack cannot describe an array: its strides are no multiples of the item size, or its byte order is foreign."""
    steps = [stride for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
    return not array.dtype.isnative or any(stride % array.itemsize for stride in steps)


def _has_table(to: type) -> bool:
    """Whether the exchange table of the type `to` makes its tensors."""
    return bool(known(to).get("to_object"))


def _why_not_shared(export: Export, to: type) -> str:
    """Why the type `to` cannot share this export's memory; "" if it can, or if its framework has to decide."""
    if not framework_of_type(to).takes_all or (_has_table(to) and not known(to)["takes_all"]):
        if export.is_readonly:
            return f"{type_name(to)} has no readonly tensors"
        if export.runs_backwards:
            return f"{type_name(to)} has no negative strides"
    if not _has_table(to) and not export.is_in_c_order and _misreads_strides(to):
        return f"the from_dlpack of this version of {type_name(to)} ignores strides"
    return ""


@functools.cache
def _misreads_strides(to: type) -> bool:
    """Whether a framework's own ``from_dlpack`` misreads arrays in Fortran order, as JAX 0.6 does.

    Found by experiment, with aligned memory, which is not copied.
    """
    memory = np.zeros(128, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 24].view(np.float32).reshape(2, 3)
    array[...] = np.arange(6).reshape(2, 3)
    try:
        with export_of(array.T, "convert()") as export:
            made = maker("convert()", to)(export)
        return not np.array_equal(from_dlpack(made), array.T)
    except Exception:  # the framework refuses such arrays
        return False


def _check_shared(what: str, made, address: int) -> None:
    """Raise BufferError if the tensor `made` does not begin at `address`, because its framework has made a copy."""
    with export_of(made, what) as export:
        if export.data != address:
            raise BufferError(f"{what}: the framework of {type_name(type(made))} has copied the tensor, but copy is False")


def _moved(what: str, x, copy):
    """Let the framework of `x` copy it to the CPU."""
    name = a_type_name(type(x))
    if copy is False:
        raise BufferError(f"{what}: {name} is not on the CPU, so a copy is needed, but copy is False")
    try:
        capsule = x.__dlpack__(max_version=VERSION, dl_device=_CPU, copy=copy)
    except (AttributeError, TypeError) as error:
        raise BufferError(f"{what}: {name} is not on the CPU, and its framework cannot copy it there: {error}") from error
    return _CapsuleProducer(capsule)


class _CapsuleProducer:
    """A capsule as an object with ``__dlpack__``."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack_device__(self):
        return _CPU

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        capsule, self._capsule = self._capsule, None
        return capsule


def _check_sound(what: str, tensor) -> None:
    """Raise BufferError for a ``DLTensor *`` whose rank, extents, strides or address are impossible on any device."""
    status = memory_status_of(tensor)
    if status:
        raise BufferError(f"{what}: {wording(status, tensor)}")


def _device(what: str, device) -> tuple[int, int]:
    """``(device type, device id)`` of a user's `device`. Raises ValueError."""
    if isinstance(device, str):
        name, _, number = device.partition(":")
        if name == "cpu" and number in ("", "0"):
            return _CPU
        raise ValueError(f"{what}: device {shown(device)} is not known; pass 'cpu' or a pair (device type, device id)")
    found = _pair(device)
    if found is None:
        raise ValueError(f"{what}: device must be 'cpu' or a pair (device type, device id), not {shown(device)}")
    return found


def _pair(value) -> tuple[int, int] | None:
    """`value` if it is a pair of ints, for a device or a version; else None."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    try:
        return operator.index(value[0]), operator.index(value[1])
    except TypeError:
        return None


def _check_copy(what: str, copy) -> None:
    if copy is not None and copy is not True and copy is not False:
        raise ValueError(f"{what}: copy must be True, False or None, not {shown(copy)}")


def _is_versioned(what: str, max_version: Any) -> bool:
    if max_version is None:
        return False
    version = _pair(max_version)
    if version is None:
        raise ValueError(f"{what}: max_version must be None or a pair (major, minor), not {shown(max_version)}")
    return version >= (1, 0)
