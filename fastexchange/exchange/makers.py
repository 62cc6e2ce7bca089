"""New tensors of a given type from an export: by the type's exchange table, or else by its framework's ``from_dlpack``.

Source: DLPack 1.3; Python array API standard 2024.12, ``from_dlpack``.
"""

import importlib
import sys

import numpy as np

from .._abi import ffi
from ..ground.native import address_of
from ..ground.pythonapi import PyCapsule_SetName
from ..ground.safe_repr import a_type_name, type_name
from ..producers.framework import framework_of_type
from .errors import device_name, dtype_name
from .export import Export, known, to_numpy

__all__ = ["has_from_dlpack", "maker", "own_from_dlpack"]


def maker(what: str, to: type, is_exact: bool = True):
    """Return a function that makes a tensor of the type `to` of an export, and consumes it. Raises TypeError if there is none.

    `is_exact`: the function raises TypeError for a tensor of another type.
    """
    to_object = known(to).get("to_object", 0)
    own = None if to_object else own_from_dlpack(what, to)
    is_immutable = to.__module__.partition(".")[0] in _IMMUTABLE
    ignores_offset = own is not None and framework_of_type(to).ignores_offset

    def make(export: Export):
        dtype, device = export.tensor.dtype, export.tensor.device
        kind = f"{dtype_name(dtype.code, dtype.bits, dtype.lanes)} on {device_name(device)}"
        try:
            if to is np.ndarray:
                made = to_numpy(export, what)
            else:
                if ignores_offset:
                    export.clear_offset()
                made = export.into(to_object) if own is None else _ExportProducer(export, is_immutable).passed_to(own)
        except (RuntimeError, BufferError) as error:  # PyTorch, JAX and pyarrow raise RuntimeError in place of BufferError
            if isinstance(error, BufferError) and own is None:  # it names the call, as NumPy's table does
                raise
            reason = str(error).partition("\n")[0]
            raise BufferError(f"{what}: no {type_name(to)} can be made of {kind}: {reason}") from error
        if is_exact and not isinstance(made, to):
            raise TypeError(
                f"{what}: no {type_name(to)} can be made: its framework makes {a_type_name(type(made))}; convert to that type"
            )
        return made

    return make


class _ExportProducer:
    """An export as an object with ``__dlpack__``, for frameworks that import tensors by their own ``from_dlpack``.

    `is_immutable`: all tensors of the framework are readonly, so it may get readonly memory in a capsule without flags.
    """

    def __init__(self, export: Export, is_immutable: bool):
        self._device = export.device
        self._is_immutable = is_immutable
        self._export = export.passed_on()
        self._capsule = self._watched = None
        self._told = ffi.new("int64_t *")

    def passed_to(self, from_dlpack):
        """Return the tensor that `from_dlpack` makes of the export.

        PyTorch's, before version 2.10, may call the deleter and fail after that, without renaming the capsule. The capsule would
        call the deleter again.
        """
        try:
            return from_dlpack(self)
        finally:
            if self._told[0]:
                PyCapsule_SetName(self._capsule, None)
            elif self._watched is not None:
                self._watched.told = 0
            self._capsule = self._watched = self._told = None

    def __del__(self):
        self._export.release()

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if self._export.managed is None:
            raise BufferError("this export has been consumed")
        is_versioned = max_version is not None and tuple(max_version) >= (1, 0)
        if self._export.is_readonly and not is_versioned and not self._is_immutable:
            raise BufferError("a legacy capsule cannot say that the tensor is readonly")
        if self._told is None:
            return self._export.capsule(is_versioned)
        self._watched = self._export.watch(address_of(self._told))
        self._capsule = self._export.capsule(is_versioned)
        return self._capsule


def has_from_dlpack(to: type) -> bool:
    """Whether the framework of the type `to` has a function ``from_dlpack``."""
    try:
        return callable(own_from_dlpack("a result", to))
    except TypeError:
        return False


def own_from_dlpack(what: str, to: type):
    """The function ``from_dlpack`` of the framework of the type `to`, or of a base of that type."""
    own = getattr(to, "from_dlpack", None)
    if callable(own):
        return own
    roots = dict.fromkeys(_root(base) for base in to.__mro__)
    places = {root: (root, f"{root}.dlpack", *_FRAMEWORKS.get(root, ())) for root in roots}
    its_own = {name.partition(".")[0] for names in places.values() for name in names}
    for root, names in places.items():
        for name in names:
            module = sys.modules.get(name)
            found = getattr(module, "from_dlpack", None)
            if found is None and module is None and name in _FRAMEWORKS.get(root, ()):
                found = getattr(importlib.import_module(name), "from_dlpack", None)
            if callable(found) and _root(found) in (*its_own, ""):  # otherwise imported from another framework
                return found
    raise TypeError(f"{what}: {type_name(to)} is no tensor type: it has no exchange table, and its framework has no from_dlpack")


def _root(thing) -> str:
    """The package that defines a type or a function; "" if unknown."""
    name = getattr(thing, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


_IMMUTABLE = ("jax", "jaxlib")


_FRAMEWORKS = {"jax": ("jax.dlpack",), "jaxlib": ("jax.dlpack",)}
