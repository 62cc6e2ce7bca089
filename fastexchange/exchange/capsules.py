"""DLPack's two kinds of PyCapsule of an owning export.

``"dltensor_versioned"`` holds a DLManagedTensorVersioned, ``"dltensor"`` a DLManagedTensor. A consumer renames a capsule that it
consumes to ``"used_…"``. A capsule that dies unconsumed calls the deleter.

Source: DLPack 1.3, the Python specification.
"""

import ctypes

from numba import types

from .._abi import ffi
from ..arguments.dunder import LEGACY_DL_TENSOR
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dltensor import DL_TENSOR, DL_TENSOR_WORDS, MANAGED_BYTES, delete_managed, managed_at
from ..ground.native import call_word, cstring, load, native, sizeof, stack, store, struct_at
from ..ground.once import for_ever
from ..ground.pythonapi import PyCapsule_New, PyMem_RawFree

CDEF = """
/* A managed tensor that owns another one, and notes the call of its deleter. */
typedef struct {
    DLManagedTensorVersioned managed;
    int64_t stands_for;         /* DLManagedTensorVersioned *, the other one */
    int64_t told;               /* int64_t *, set to 1 by the deleter; or 0 */
} fx_watched;
"""

legacy_at = struct_at("DLManagedTensor")
watched_at = struct_at("fx_watched")
WATCHED_BYTES = sizeof("fx_watched")
LEGACY_BYTES = sizeof("DLManagedTensor")

VERSIONED_NAME, LEGACY_NAME = b"dltensor_versioned", b"dltensor"
_names = {name: for_ever(ffi.new("char[]", name)) for name in (VERSIONED_NAME, LEGACY_NAME)}  # a capsule keeps the pointer


@native
def call_deleter(managed):
    """Call the deleter of a managed tensor, if it has one."""
    deleter = managed_at(managed).deleter
    if deleter != 0:
        call_word(deleter, (managed,))


@cfunction(types.void, types.intp)
def delete_wrapped(legacy):
    """Deleter of a DLManagedTensor whose ``manager_ctx`` is the DLManagedTensorVersioned that it owns."""
    call_deleter(legacy_at(legacy).manager_ctx)
    c.PyMem_RawFree(legacy)


@cfunction(types.intp, types.intp, types.intp)
def as_legacy(managed, deleter):
    """Make a DLManagedTensor that owns the DLManagedTensorVersioned at `managed`. Returns 0 if there is no memory.

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
    """Destructor of both kinds of capsule: calls the deleter of an unconsumed tensor, but not at shutdown."""
    if c.is_finalizing() != 0:
        return
    if c.PyCapsule_IsValid(capsule, cstring("dltensor_versioned")) != 0:
        delete_managed(c.PyCapsule_GetPointer(capsule, cstring("dltensor_versioned")))
    elif c.PyCapsule_IsValid(capsule, cstring("dltensor")) != 0:
        legacy = c.PyCapsule_GetPointer(capsule, cstring("dltensor"))
        error = stack(3)  # keeps the exception of a consumer that has refused the tensor
        c.save_error(error)
        call_word(legacy_at(legacy).deleter, (legacy,))
        c.restore_error(error)


@cfunction(types.void, types.intp)
def delete_watched(at):
    """Deleter of the managed tensor in an ``fx_watched``: calls the wrapped tensor's deleter and sets the word at ``told``.

    GIL: as for the wrapped tensor's deleter.
    """
    watched = watched_at(at)
    if watched.told != 0:
        store(watched.told, 1)
    call_deleter(watched.stands_for)
    c.PyMem_RawFree(at)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def as_watched(managed, deleter, told):
    """Make an ``fx_watched`` that owns the DLManagedTensorVersioned at `managed`. Returns 0 if there is no memory.

    `deleter`: the address of :data:`delete_watched`. `told`: the address of a word that its deleter sets to 1, or 0.
    """
    at = c.PyMem_RawMalloc(WATCHED_BYTES)
    if at != 0:
        for i in range(MANAGED_BYTES // 8):
            store(at + 8 * i, load(managed + 8 * i))
        managed_at(at).deleter = deleter
        managed_at(at).manager_ctx = at  # PaddlePaddle 3.3.1 does not call the deleter if this is NULL
        watched_at(at).stands_for = managed
        watched_at(at).told = told
    return at


def capsule_of(managed: int, is_versioned: bool):
    """Make a capsule that owns the DLManagedTensorVersioned at `managed`. After MemoryError the caller still owns it."""
    pointer, name = managed, VERSIONED_NAME
    if not is_versioned:
        convert = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(as_legacy.address)
        pointer, name = convert(managed, delete_wrapped.address), LEGACY_NAME
        if not pointer:
            raise MemoryError("no memory for a legacy DLPack tensor")
    try:
        return PyCapsule_New(pointer, int(ffi.cast("intptr_t", _names[name])), drop_capsule.address)
    except MemoryError:
        if not is_versioned:
            PyMem_RawFree(pointer)
        raise

