"""DLPack's two kinds of PyCapsule around an owning export, for consumers that take capsules.

``"dltensor_versioned"`` holds a DLManagedTensorVersioned, ``"dltensor"`` a DLManagedTensor. A consumer renames the capsule
it has taken to ``"used_…"``; a capsule that nobody took gives its tensor back when it dies.

Source: DLPack 1.3, the Python specification.
"""

import ctypes

from numba import types

from .. import cpython as c
from .._abi import ffi
from ..compiled import cfunction
from ..dltensor import DL_TENSOR, DL_TENSOR_WORDS, delete_managed, managed_at
from ..native import call_word, cstring, load, sizeof, store, struct_at
from ..once import for_ever
from .dunder import LEGACY_DL_TENSOR

legacy_at = struct_at("DLManagedTensor")
LEGACY_BYTES = sizeof("DLManagedTensor")

VERSIONED_NAME, LEGACY_NAME = b"dltensor_versioned", b"dltensor"
_names = {name: for_ever(ffi.new("char[]", name)) for name in (VERSIONED_NAME, LEGACY_NAME)}  # a capsule keeps the pointer


@cfunction(types.void, types.intp)
def delete_wrapped(legacy):
    """Deleter of a DLManagedTensor whose ``manager_ctx`` is the DLManagedTensorVersioned that it stands for."""
    managed = legacy_at(legacy).manager_ctx
    deleter = managed_at(managed).deleter
    if deleter != 0:
        call_word(deleter, (managed,))
    c.PyMem_RawFree(legacy)


@cfunction(types.intp, types.intp, types.intp)
def as_legacy(managed, deleter):
    """A DLManagedTensor that owns the DLManagedTensorVersioned at `managed`; 0 without memory.

    `deleter`: the address of :data:`delete_wrapped`.
    """
    at = c.PyMem_RawMalloc(LEGACY_BYTES)
    if at != 0:
        for i in range(DL_TENSOR_WORDS):
            store(at + LEGACY_DL_TENSOR + 8 * i, load(managed + DL_TENSOR + 8 * i))
        legacy_at(at).manager_ctx = managed
        legacy_at(at).deleter = deleter
    return at


@cfunction(types.void, types.intp)
def drop_capsule(capsule):
    """Destructor of both kinds of capsule: gives back a tensor that nobody has taken, unless Python shuts down."""
    if c.is_finalizing() != 0:
        return
    if c.PyCapsule_IsValid(capsule, cstring("dltensor_versioned")) != 0:
        delete_managed(c.PyCapsule_GetPointer(capsule, cstring("dltensor_versioned")))
    elif c.PyCapsule_IsValid(capsule, cstring("dltensor")) != 0:
        legacy = c.PyCapsule_GetPointer(capsule, cstring("dltensor"))
        call_word(legacy_at(legacy).deleter, (legacy,))


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyMem_RawFree", ctypes.pythonapi))


def capsule_of(managed: int, is_versioned: bool):
    """A new capsule that owns the DLManagedTensorVersioned at `managed`. Raises MemoryError, and then owns nothing."""
    pointer, name = managed, VERSIONED_NAME
    if not is_versioned:
        convert = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(as_legacy.address)
        pointer, name = convert(managed, delete_wrapped.address), LEGACY_NAME
        if not pointer:
            raise MemoryError("no memory for a legacy DLPack tensor")
    try:
        return _new_capsule(pointer, int(ffi.cast("intptr_t", _names[name])), drop_capsule.address)
    except MemoryError:
        if not is_versioned:
            _free(pointer)
        raise

