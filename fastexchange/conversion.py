"""Conversions: ``from_dlpack``, ``to_dlpack``, ``convert``. Zero copy wherever memory can be shared.

Each is the same two steps: an owning export through the source's exchange table, and the target's
``managed_tensor_to_py_object_no_sync``, which takes it. Positional calls of known types are made by native code
(``dispatch.transfer``); what that leaves comes back to the functions here.

Source: DLPack 1.3; Python array API standard 2024.12, ``from_dlpack`` and ``__dlpack__``.
"""

import ctypes
import functools
import importlib
import inspect
import sys
from typing import Any

import numpy as np

from . import registry
from ._abi import ffi
from .cpython import NativeCallable, enable_vectorcall
from .discovery import discover, learn_type, type_name
from .dispatch import layout
from .dispatch.context import address_of
from .dispatch.state import runtime
from .dispatch.transfer import vectorcall_transfer
from .dlpack import DLDeviceType
from .dtypes import dtype_of_dl
from .producers import capsules, numpy_table, torch
from .producers.dunder import SAYS_NOTHING_OF_READONLY
from .refusal import device_name, size_status_of, status_of, wording

__all__ = ["convert", "from_dlpack", "numpy_view", "to_dlpack"]

_CPU = (int(DLDeviceType.kDLCPU), 0)
_READONLY = 1


# ---- exports -------------------------------------------------------------------------------------------------------


class _Export:
    """An owning export: a ``DLManagedTensorVersioned *`` that is given back exactly once, or passed on."""

    def __init__(self, tensor, managed_tensor_from_py_object_no_sync: int):
        out = ffi.new("DLManagedTensorVersioned **")
        self.managed: Any = None
        try:
            failed = _call(managed_tensor_from_py_object_no_sync, id(tensor), address_of(out))
        except BaseException:  # perhaps with success returned, and an export made
            if out[0] != ffi.NULL and out[0].version.major == 1:
                self.managed = out[0]
                self.release()
            raise
        if failed or out[0] == ffi.NULL:
            raise BufferError(f"{_name(tensor)}: its producer failed to export it and did not say why")
        self.managed = out[0]
        if self.managed.version.major != 1:
            self.release()
            raise BufferError(wording(layout.STATUS_VERSION, None))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()

    @property
    def address(self) -> int:
        return address_of(self.managed)

    @property
    def device(self) -> tuple[int, int]:
        device = self.managed.dl_tensor.device
        return int(device.device_type), device.device_id

    def is_readonly(self, cls: type) -> bool:
        """Whether the memory of this tensor of the type `cls` must not be written to."""
        flags = self.managed.flags
        return bool(flags & _READONLY or (flags & int(SAYS_NOTHING_OF_READONLY) and not torch.is_tensor_type(cls)))

    def why_not_shared(self, cls: type, to: type) -> str:
        """Why PyTorch cannot have this tensor of the type `cls` without a copy; nothing if it can."""
        tensor = self.managed.dl_tensor
        if self.is_readonly(cls):
            return f"{type_name(to)} has no readonly tensors"
        if tensor.strides != ffi.NULL and any(tensor.strides[i] < 0 and tensor.shape[i] > 1 for i in range(tensor.ndim)):
            return f"{type_name(to)} has no negative strides"
        return ""

    def into(self, to_object: int):
        """A tensor made of it by a ``managed_tensor_to_py_object_no_sync``, which then owns it."""
        out = ffi.new("intptr_t *")
        if _call(to_object, self.address, address_of(out)) or not out[0]:
            raise BufferError("the tensor's type failed to make one of the export and did not say why")
        self.managed = None
        return _take(out[0])

    def capsule(self, is_versioned: bool):
        """A capsule that then owns it."""
        made = capsules.capsule_of(self.address, is_versioned)
        self.managed = None
        return made

    def release(self) -> None:
        managed, self.managed = self.managed, None
        if managed is not None and managed.deleter != ffi.NULL and not sys.is_finalizing():
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address_of(managed.deleter))(address_of(managed))


def _call(function: int, *arguments: int) -> int:
    """Call a function of an exchange table, with the GIL, which ctypes' ``PYFUNCTYPE`` keeps. An exception it sets is raised."""
    return ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * len(arguments))(function)(*arguments)


def _take(address: int):
    """The object to which `address` is a new reference."""
    made = ctypes.cast(address, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))
    return made


def _name(tensor) -> str:
    return f"a {type_name(type(tensor))}"


def _export(tensor, what: str) -> _Export:
    """An owning export of any producer's tensor, after the checks that its own export may leave out."""
    cls = type(tensor)
    fields = _known(cls)
    managed = fields.get("managed", 0)
    if not managed:
        reasons = "; ".join(discover(cls).notes) or "it is no tensor"
        raise TypeError(f"{what}: an object of type {type_name(cls)} cannot be exported: {reasons}")
    if torch.is_tensor_type(cls):
        torch.check(tensor)
    elif isinstance(tensor, np.ndarray):
        registry.key_of(tensor.dtype)  # a dtype of ml_dtypes becomes known when it is asked for
    return _Export(tensor, managed)


def _known(cls: type) -> dict[str, int]:
    """The fields of the entry of `cls`, with those that only conversions need."""
    learn_type(cls)
    entries = runtime().entries
    fields = entries.fields(cls)
    if fields["kind"] == layout.KIND_NDARRAY and not fields.get("managed"):
        registry.subscribe(_publish)  # once: later calls find the fields filed
        table = numpy_table.exchange_table()
        if table is not None:
            made = {"to_object": address_of(table.managed_tensor_to_py_object_no_sync), "takes_all": 1}
            more = made if cls is np.ndarray else {}
            entries.update(cls, managed=address_of(table.managed_tensor_from_py_object_no_sync), **more)
    return entries.fields(cls)


def exporter_of(tensor) -> int:
    """The address of the function that exports `tensor`, after the checks that it leaves out; 0 if there is none."""
    cls = type(tensor)
    managed = _known(cls).get("managed", 0)
    if managed and torch.is_tensor_type(cls):
        torch.check(tensor)
    return managed


_registered: list[tuple[int, int, np.dtype]] = []


def _publish(code: int, bits: int, dtype: np.dtype) -> None:
    """Let native code know what has been registered."""
    if (code, bits, dtype) in _registered or dtype_of_dl(code, bits) is None:
        return
    _registered.append((code, bits, dtype))
    numpy_table.publish_dtypes(
        [
            (known, code, bits, registry.key_of(known) == (code, bits), registry.dtype_of(code, bits) is known)
            for code, bits, known in _registered.copy()
        ]
    )


def _to_numpy(export: _Export) -> np.ndarray:
    to_object = _known(np.ndarray).get("to_object")
    if not to_object:
        raise BufferError("this NumPy's C API is not as expected: arrays over other memory cannot be made")
    tensor = export.managed.dl_tensor
    status = status_of(tensor)
    if not status and dtype_of_dl(tensor.dtype.code, tensor.dtype.bits) is None:
        status = layout.STATUS_DTYPE
    if status:
        raise BufferError(wording(status, tensor))
    return export.into(to_object)


def numpy_view(tensor, managed_tensor_from_py_object_no_sync: int) -> np.ndarray:
    """A NumPy array over the memory of `tensor`, which it keeps alive; readonly if the export says so.

    Raises BufferError if a CPU cannot read it, and whatever the producer raises.
    """
    with _Export(tensor, managed_tensor_from_py_object_no_sync) as export:
        is_mutable = not export.is_readonly(type(tensor))
        array = _to_numpy(export)
    if is_mutable and not array.flags.writeable:  # a legacy export of a type that is known to be mutable
        array.flags.writeable = True
    return array


# ---- native calls --------------------------------------------------------------------------------------------------


class _Transfer(NativeCallable):
    """A function behind a native vectorcall, which makes most of its calls and leaves the others to it."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, function, target: type | None):
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(function)
        self._function = function
        self._name = sys.intern("_slowly")
        self._state = ffi.new("fx_transfer *")
        self._state.runtime = runtime().address
        self._state.slow_name = id(self._name)
        self._state.target = id(target) if target is not None else 0
        self._context = address_of(self._state)
        self._vectorcall = vectorcall_transfer.address

    def __repr__(self):
        return f"<function {self.__module__}.{self.__qualname__}{self.__signature__}>"

    def __reduce__(self):
        return self.__qualname__

    def _slowly(self, /, *args, **kwargs):
        return self._function(*args, **kwargs)


enable_vectorcall(_Transfer)


def _native(target: type | None):
    """Decorator: calls with positional arguments only are native, to tensors of type `target` or of the second argument."""
    return lambda function: _Transfer(function, target)


# ---- the public functions ------------------------------------------------------------------------------------------


@_native(np.ndarray)
def from_dlpack(x, /, *, dtype=None, device=None, copy=None) -> np.ndarray:
    """A NumPy array that shares the memory of `x`, a tensor of any framework.

    The array keeps the memory alive, whatever becomes of `x`. It is readonly if `x` is, or if its producer cannot say
    (legacy DLPack). The fast way, native from end to end, is the call with `x` alone.

    Parameters
    ----------
    x : anything with an exchange table, ``__dlpack__`` or the buffer protocol.
    dtype : what the elements have to be, for example ``np.float32``; never a cast.
    device : ``"cpu"`` or ``(1, 0)`` to have a tensor on another device copied to the CPU by its framework.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed.

    Raises
    ------
    TypeError : `x` cannot be exported, or its elements are not of `dtype`.
    BufferError : its memory cannot be viewed: another device, no memory, no NumPy dtype, or what its producer says.
    ValueError : a `device` that NumPy does not have, a `copy` that is neither True, False nor None.

    Source: Python array API standard, ``from_dlpack``; DLPack 1.3.

    >>> import numpy as np
    >>> a = np.arange(3.0)
    >>> from_dlpack(a)[0] = 5.0
    >>> a
    array([5., 1., 2.])
    """
    what = "from_dlpack()"
    wanted = None if dtype is None else np.dtype(dtype)
    _check_copy(what, copy)
    if device is not None and _device(what, device) != _CPU:
        raise ValueError(f"{what}: NumPy's arrays are on device 'cpu' only, not on {device!r}")
    export = _export(x, what)
    with export:
        if device is not None and not _is_cpu(export):
            export.release()
            moved = _moved(what, x, copy)
            return from_dlpack(moved, dtype=dtype)
        is_mutable = not export.is_readonly(type(x))
        array = _to_numpy(export)
    if is_mutable and not array.flags.writeable:
        array.flags.writeable = True
    if wanted is not None and array.dtype != wanted:
        raise TypeError(f"{what}: the elements are {array.dtype}, not {wanted}; dtype= is no cast: use .astype()")
    return array.copy(order="K") if copy else array


def to_dlpack(x, /, *, max_version=None, device=None, copy=None):
    """A DLPack capsule of a tensor of any framework, to be consumed once.

    The capsule owns an export; if nobody consumes it, it gives the export back when it dies.

    Parameters
    ----------
    max_version : the newest DLPack version (major, minor) that the consumer takes: from ``(1, 0)`` on the capsule is
        ``"dltensor_versioned"``, else, and for None, a legacy ``"dltensor"``, which cannot say that memory is readonly.
    device : None, or the device on which the tensor has to be, ``"cpu"`` or ``(1, 0)``, copied there if it is not.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed.

    Raises TypeError for what cannot be exported, BufferError for a readonly tensor in a legacy capsule and for what its
    producer refuses, ValueError for a bad `max_version`, `device` or `copy`.

    Source: Python array API standard, ``__dlpack__``; DLPack 1.3.
    """
    what = "to_dlpack()"
    _check_copy(what, copy)
    is_versioned = _is_versioned(what, max_version)
    if device is not None and _device(what, device) != _CPU:
        with _export(x, what) as export:
            if export.device != _device(what, device):
                raise BufferError(f"{what}: the tensor is on {device_name(export.managed.dl_tensor.device)}, not on {device!r}")
        device = None
    with _export(x, what) as export:
        if device is not None and not _is_cpu(export):
            export.release()
            return to_dlpack(_moved(what, x, copy), max_version=max_version)
        if copy:
            return to_dlpack(_copied(what, x, export), max_version=max_version)
        if not is_versioned and export.is_readonly(type(x)):
            raise BufferError(f"{what}: a legacy capsule cannot say that the tensor is readonly; pass max_version=(1, 0)")
        export.managed.flags &= ~int(SAYS_NOTHING_OF_READONLY)
        return export.capsule(is_versioned)


@_native(None)
def convert(x, to: type, /, *, copy=None):
    """A tensor of the type `to` that shares the memory of `x`, a tensor of any framework.

    Zero copy through the two types' exchange tables; a target without one is made by its framework's ``from_dlpack``; an `x`
    that is of the type `to` already is returned as it is. The result keeps the memory alive, whatever becomes of `x`, and the
    other way round.

    Parameters
    ----------
    to : the type of the result, for example ``torch.Tensor``, ``numpy.ndarray``, ``jax.Array``.
    copy : True for a copy, False for an error where one would be needed, None for a copy only where it is needed: readonly
        memory, and negative strides, to a framework that has neither (PyTorch).

    Raises
    ------
    TypeError : `x` cannot be exported, or `to` is not a type of tensors.
    BufferError : the memory cannot be shared: what the producer refuses, what the target cannot view, a needed copy.
    ValueError : a `copy` that is neither True, False nor None.

    Source: DLPack 1.3, ``DLPackExchangeAPI``.

    >>> import numpy as np
    >>> convert(memoryview(b"abc"), np.ndarray)
    array([97, 98, 99], dtype=uint8)
    """
    what = "convert()"
    _check_copy(what, copy)
    if not isinstance(to, type):
        raise TypeError(f"{what}: the second argument is the type of the result, not {to!r}")
    if issubclass(type(x), to) and not copy and _known(type(x)).get("managed"):
        return x
    target = _known(to)
    has_table = bool(target.get("to_object"))
    make = None if has_table else _maker(what, to)
    with _export(x, what) as export:
        _check_sound(what, export.managed.dl_tensor)
        why = export.why_not_shared(type(x), to) if has_table and not target["takes_all"] else ""
        if why and not copy:
            if copy is False:
                raise BufferError(f"{what}: {why}, and copy=False rules out a copy of this one")
            copy = True
        if copy:
            return convert(_copied(what, x, export), to)
        if make is not None:
            return _made(what, x, make, export, copy, to.__module__.partition(".")[0] in _IMMUTABLE)
        if not export.is_readonly(type(x)):
            export.managed.flags &= ~int(SAYS_NOTHING_OF_READONLY)
        return export.into(target["to_object"])


def _made(what: str, x, make, export: _Export, copy, is_immutable: bool):
    """What a framework's own ``from_dlpack`` makes of an export; of a copy if it does not take it as it is.

    `is_immutable`: all tensors of the framework are readonly, though it may ask for a capsule that cannot say so.
    """
    spare = None
    if copy is None and _is_cpu(export):
        spare = _Export(x, _known(type(x))["managed"])
    try:
        return make(_Exported(export, export.is_readonly(type(x)) and not is_immutable))
    except Exception:
        if spare is None:
            raise
        return make(_Exported(_export(_to_numpy(spare).copy(order="C"), what), is_readonly=False))
    finally:
        if spare is not None:
            spare.release()


class _Exported:
    """An export as an object with ``__dlpack__``, for frameworks whose way in is their own ``from_dlpack``."""

    def __init__(self, export: _Export, is_readonly: bool):
        self._device = export.device
        self._is_readonly = is_readonly
        self._export = _Export.__new__(_Export)
        self._export.managed, export.managed = export.managed, None

    def __del__(self):
        self._export.release()

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if self._export.managed is None:
            raise BufferError("this export has been consumed")
        is_versioned = max_version is not None and tuple(max_version) >= (1, 0)
        if self._is_readonly:
            if not is_versioned:
                raise BufferError("a legacy capsule cannot say that the tensor is readonly")
            self._export.managed.flags |= _READONLY
        return self._export.capsule(is_versioned)


def _maker(what: str, to: type):
    """The function ``from_dlpack`` of the framework to which the type `to` belongs."""
    own = getattr(to, "from_dlpack", None)
    if callable(own):
        return own
    root = to.__module__.partition(".")[0]
    for name in (root, f"{root}.dlpack", *_FRAMEWORKS.get(root, ())):
        module = sys.modules.get(name)
        found = getattr(module, "from_dlpack", None)
        if found is None and module is None and name in _FRAMEWORKS.get(root, ()):
            found = getattr(importlib.import_module(name), "from_dlpack", None)
        if callable(found):
            return found
    raise TypeError(f"{what}: {type_name(to)} has no exchange table, and its framework no from_dlpack: it is no type of tensors")


_IMMUTABLE = ("jax", "jaxlib")
_FRAMEWORKS = {"jax": ("jax.dlpack",), "jaxlib": ("jax.dlpack",)}


def _copied(what: str, x, export: _Export) -> np.ndarray:
    """A copy of a tensor in the CPU's memory."""
    if not _is_cpu(export):
        device = device_name(export.managed.dl_tensor.device)
        raise BufferError(f"{what}: the tensor is on {device}; copy it with its own framework")
    return _to_numpy(export).copy(order="K")


def _moved(what: str, x, copy):
    """`x` copied to the CPU by its own framework."""
    if copy is False:
        raise BufferError(f"{what}: {_name(x)} is not on the CPU, and copy=False rules out a copy")
    try:
        capsule = x.__dlpack__(max_version=(1, 3), dl_device=_CPU, copy=copy)
    except TypeError as error:
        raise BufferError(f"{what}: {_name(x)} is not on the CPU, and its framework cannot copy it there: {error}") from error
    return _Given(capsule)


class _Given:
    """A capsule as an object with ``__dlpack__``."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack_device__(self):
        return _CPU

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        capsule, self._capsule = self._capsule, None
        return capsule


def _check_sound(what: str, tensor) -> None:
    """Raise BufferError for a ``DLTensor *`` whose rank, extents or strides are not those of memory, wherever it lies."""
    status = size_status_of(tensor)
    if status:
        raise BufferError(f"{what}: {wording(status, tensor)}")


def _is_cpu(export: _Export) -> bool:
    return export.device[0] in (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLROCMHost)


def _device(what: str, device) -> tuple[int, int]:
    """``(device type, device id)`` of what a user may write for a device."""
    if isinstance(device, str):
        name, _, number = device.partition(":")
        if name == "cpu" and number in ("", "0"):
            return _CPU
        raise ValueError(f"{what}: device {device!r} is not known; pass 'cpu' or a pair (device type, device id)")
    try:
        kind, number = device
        return int(kind), int(number)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: device is 'cpu' or a pair (device type, device id), not {device!r}") from None


def _check_copy(what: str, copy) -> None:
    if copy is not None and copy is not True and copy is not False:
        raise ValueError(f"{what}: copy is True, False or None, not {copy!r}")


def _is_versioned(what: str, max_version: Any) -> bool:
    if max_version is None:
        return False
    try:
        major, minor = max_version
        return (int(major), int(minor)) >= (1, 0)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: max_version is None or a pair (major, minor), not {max_version!r}") from None
