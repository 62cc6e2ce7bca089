"""Owning exports of PyTorch's tensors: what they do in each turn of ``dispatch.owning_exports``, and who owns their memory.

Where tensors are read in memory, a reference to the storage is export enough. Elsewhere PyTorch is asked about each exported one.
"""

from numba import types

from ..dispatch import structs
from ..dispatch.frame import drop
from ..dispatch.owning_exports import HOLDING, make_export
from ..dispatch.reading import DRY_RUN, FLAG_ASKED, is_owning
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR, dl_tensor_at, end_of, is_empty
from ..ground.native import native
from .guard import guard_at, guard_of, is_in_memory, is_odd, is_of, is_short
from .queries import forbid_moving, is_differentiating_forward, is_movable, is_odd_if_asked, storage_of


@native
def hold_storage(context, entry, export, flags):
    """Hold the storage of a tensor if its export needs it, and forbid resizing if the memory is read later."""
    guard = guard_at(guard_of(context, entry))
    if entry.is_own_memory == 0:  # the exports do not hold the storage
        return
    if guard.asks == 0 and entry.asks_python == 0 and is_owning(context, flags) == 0:  # no export is made
        return
    is_read_later = is_owning(context, flags) != 0 and flags & DRY_RUN == 0 and context.device_type == CPU
    before = export.storage
    export.storage = storage_of(guard, export.object)
    if is_read_later and export.storage != 0 and is_movable(guard, export.storage):
        forbid_moving(guard, export.storage)
    if before != 0:
        drop(before)


@native
def is_storage_enough(context, guard, export):
    """Whether no export is needed: the call holds the storage, and the tensor is read in memory."""
    if context.device_type != CPU or export.storage == 0:
        return False
    return guard.storage_object != 0 and is_in_memory(guard, export.object)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def take_turn(context_address, entry_address, export_address, turn, flags):
    """``Kind.take_turn``: hold the storage; make an export, or find that the storage is enough. Checks the tensor."""
    context, entry = structs.context_at(context_address), structs.entry_at(entry_address)
    export = structs.export_at(export_address)
    if turn == HOLDING:
        hold_storage(context, entry, export, flags)
        return structs.STATUS_OK
    address = guard_of(context, entry)
    guard = guard_at(address)
    asks = guard.asks != 0
    ob = export.object
    if_odd = structs.STATUS_CHECK if flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA
    if not asks and is_odd(address, ob):
        return if_odd
    if not is_of(guard, export.storage, ob):
        return structs.STATUS_CHANGED
    if export.state != structs.NEEDS_MANAGED and is_storage_enough(context, guard, export):
        export.state = structs.HOLDS_STORAGE
        return structs.STATUS_OK
    status = make_export(entry, export, flags)
    if status == structs.STATUS_ERROR and entry.is_own_memory != 0 and flags & FLAG_ASKED == 0:
        c.PyErr_Clear()  # the tensor's own __dlpack__ raises a better error
        return structs.STATUS_CHECK
    if status == structs.STATUS_OK and asks:
        dtype = dl_tensor_at(export.managed + DL_TENSOR).dtype
        if export.storage == 0 or is_differentiating_forward(guard):
            return if_odd
        if is_odd_if_asked(guard, ob, types.intp(dtype.code), types.intp(dtype.bits)):
            return if_odd
    return status


@cfunction(types.intp, types.intp, types.intp)
def owner(entry_address, ob):
    """``Kind.owner``: the storage."""
    entry = structs.entry_at(entry_address)
    return storage_of(guard_at(entry.guard), ob) if entry.is_own_memory != 0 else 0


@cfunction(types.intp, types.intp, types.intp, types.intp)
def is_unlike(entry_address, ob, tensor):
    """``Kind.is_odd``."""
    entry = structs.entry_at(entry_address)
    if is_odd(entry.guard, ob):
        return 1
    if tensor == 0 or is_empty(dl_tensor_at(tensor)):
        return 0
    return types.intp(is_short(entry.guard, ob, end_of(dl_tensor_at(tensor)) if entry.is_own_memory != 0 else 0))
