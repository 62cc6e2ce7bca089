"""Owning exports: of which values a call needs them, and what makes one.

Exports are made in three turns:

1. BY_PYTHON: exports by Python code.
2. STORAGES: hold the storages of PyTorch's tensors, and forbid resizing.
3. NATIVELY: export these tensors, and check each at once. This comes last, because Python code of the other turns (also by a
   garbage collection) could change a tensor after its check.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR, delete_managed, dl_tensor_at
from ..ground.native import call_int, global_address, load, native, stack, store
from ..torch.guard import guard_of, is_in_memory, is_odd, is_of
from ..torch.queries import forbid_moving, is_differentiating_forward, is_movable, is_odd_if_asked, storage_of
from . import structs
from .frame import EXPORT_BYTES, drop
from .reading import DRY_RUN, FLAG_ASKED, is_owning

TURNS = 3
BY_PYTHON, STORAGES, NATIVELY = range(TURNS)


@native
def is_exported(context, entry, flags):
    """Whether a call needs owning exports of values of a type."""
    exports = structs.kind_of(context, entry).exports
    return exports == structs.EXPORTS_ALWAYS or (exports == structs.EXPORTS_IF_OWNING and is_owning(context, flags) != 0)


@native
def has_turn(entry, turn):
    """Whether exports of a type's values do something in a turn."""
    # With or without a table: Python code runs only for odd tensors.
    is_of_pytorch = entry.guard != 0 and (entry.asks_python == 0 or entry.is_own_memory != 0)
    return (turn != BY_PYTHON) == is_of_pytorch


@native
def begin_export(frame, ob, is_interface):
    """Add an export that is still to be made. `ob`: of which object; 0: not known yet."""
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.export_count)
    export.object, export.managed, export.storage, export.state = ob, 0, 0, structs.UNDECIDED
    export.is_given, export.is_interface = 0, types.intp(is_interface)
    frame.export_count += 1


@native
def take_turn(context, entry, export, turn, flags):
    """What an export does in one of its turns. Returns a STATUS_*."""
    if turn == STORAGES:
        hold_storage(context, entry, export, flags)
        return structs.STATUS_OK
    return make_export(context, entry, export, flags)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def take_turn_of(context_address, entry_address, export_address, turn):
    """:func:`take_turn` of a cached call's export, by addresses."""
    context, entry = structs.context_at(context_address), structs.entry_at(entry_address)
    return take_turn(context, entry, structs.export_at(export_address), turn, 0)


@native
def hold_storage(context, entry, export, flags):
    """Hold the storage of a PyTorch tensor if its export needs it, and forbid resizing if the memory is read later."""
    guard = structs.guard_at(guard_of(context, entry))
    if entry.is_own_memory == 0:  # PyTorch's exports do not hold the storage
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
    if guard == 0 or context.device_type != CPU or export.storage == 0:
        return False
    offsets = structs.guard_at(guard)
    return offsets.storage_object != 0 and is_in_memory(offsets, export.object)


@native
def make_export(context, entry, export, flags):
    """Make an owning export, or find that its storage is enough; check the tensor if it is PyTorch's. Returns a STATUS_*."""
    ob = export.object
    out = stack(1)
    export_function = entry.interface if export.is_interface != 0 else entry.managed
    guard = guard_of(context, entry)
    is_buffer = entry.key != 0
    is_own_memory = entry.is_own_memory != 0
    asks = guard != 0 and structs.guard_at(guard).asks != 0
    if_odd = structs.STATUS_CHECK if flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA
    if not asks and is_odd(guard, ob):
        return if_odd
    if guard != 0 and not is_of(structs.guard_at(guard), export.storage, ob):
        return structs.STATUS_CHANGED
    if export.state != structs.NEEDS_MANAGED and is_storage_enough(context, guard, export):
        export.state = structs.HOLDS_STORAGE
        return structs.STATUS_OK
    store(out, 0)
    failed = call_int(export_function, (ob, out)) != 0
    if failed or PyErr_Occurred() != 0 or load(out) == 0:
        if not failed and load(out) != 0:
            delete_managed(load(out))
        status = structs.STATUS_ERROR if PyErr_Occurred() != 0 else structs.STATUS_NO_ERROR_SET
        if export.is_interface != 0:
            if status == structs.STATUS_NO_ERROR_SET:  # an unusual array, which Python has to read
                status = structs.STATUS_STREAM
        elif status == structs.STATUS_ERROR and flags & FLAG_ASKED == 0:
            if is_own_memory:
                is_final = guard == 0  # the tensor's own __dlpack__ raises a better error
            else:  # Numba may be able to read what DLPack cannot describe
                is_final = not is_buffer or c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) == 0
            if not is_final:
                c.PyErr_Clear()
                status = structs.STATUS_CHECK
        return status
    export.managed = load(out)
    if asks:
        dtype = dl_tensor_at(load(out) + DL_TENSOR).dtype
        if export.storage == 0 or is_differentiating_forward(structs.guard_at(guard)):
            return if_odd
        if is_odd_if_asked(structs.guard_at(guard), ob, types.intp(dtype.code), types.intp(dtype.bits)):
            return if_odd
    return structs.STATUS_OK
