"""The owning exports of a call and the snapshots of its lists. They come before the reading, because they may run Python code.

:data:`read_arguments.walk` then finds them in the frame, in the order of their objects.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR, delete_managed, dl_tensor_at
from ..ground.native import call_int, global_address, load, native, stack, store
from . import structs
from .frame import EXPORT_BYTES, drop
from .lists import may_hold_arrays, take_snapshot
from .read_arguments import note_stop
from .readers import DRY_RUN, FLAG_ASKED, is_owning
from .torch_guard import guard_of, is_in_memory, is_odd, is_of
from .torch_queries import forbid_moving, is_differentiating_forward, is_movable, is_odd_if_asked, storage_of
from .type_table import find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_WORDS = 2 * structs.MAX_TUPLE_DEPTH


BY_PYTHON, STORAGES, BY_PYTORCH = range(3)  # the passes


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def export_managed(context_address, frame_address, args, nargs, flags):
    """Make every owning export of the call, in the order in which :data:`read_arguments.walk` uses them. Returns a STATUS_*.

    Three passes over the arguments:

    1. BY_PYTHON: exports by Python code, and snapshots of lists.
    2. STORAGES: hold the storages of PyTorch's tensors, and forbid resizing.
    3. BY_PYTORCH: export these tensors, and check each at once. This comes last, because Python code of the other passes (also
       by a garbage collection) could change a tensor after its check.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    frame = structs.frame_at(frame_address)
    pending = stack(PENDING_WORDS)
    status = structs.STATUS_OK
    before = frame.snapshot_count
    exported = 0
    ob = 0
    items = args
    depth = 0
    for turn in range(3):
        items = args
        left = nargs
        depth = 0
        made = 0
        lists = 0
        is_waiting = False  # for a later pass
        passed = 0  # a type whose objects need nothing
        while status == structs.STATUS_OK:
            if left == 0:
                if depth == 0:
                    break
                depth -= 1
                items = load(pending + 16 * depth)
                left = load(pending + 16 * depth + 8)
                continue
            ob = load(items)
            items += 8
            left -= 1
            ob_type = Py_TYPE(ob)
            if ob_type == passed:
                continue
            at = find(runtime, ob_type)
            if at == 0:
                status = structs.STATUS_UNKNOWN_TYPE
                break
            entry = structs.entry_at(at)
            kind = entry.kind
            is_interface = False
            if context.device_type != CPU:
                kind = entry.device_kind
                is_interface = kind == structs.KIND_MANAGED and entry.interface != 0
                if kind == structs.KIND_NUMBA and entry.asks_python != 0:
                    status = structs.STATUS_STREAM  # its Python code has to be told the stream
                    break
            if kind == structs.KIND_MANAGED or (kind == structs.KIND_EXCHANGE and is_owning(context, flags) != 0):
                if made == frame.export_count:  # not made in an earlier round with a frame that was too small
                    if made == frame.export_capacity:
                        status = structs.STATUS_GROW
                        break
                    export = structs.export_at(frame.exports + EXPORT_BYTES * made)
                    export.object, export.managed, export.storage, export.state = ob, 0, 0, structs.UNDECIDED
                    export.is_given, export.is_interface = 0, types.intp(is_interface)
                    frame.export_count += 1
                export = structs.export_at(frame.exports + EXPORT_BYTES * made)
                made += 1
                if export.managed == 0:
                    if export.object != ob:
                        status = structs.STATUS_CHANGED
                        break
                    # With or without a table: Python code runs only for odd tensors.
                    is_of_pytorch = entry.guard != 0 and (entry.asks_python == 0 or entry.is_own_memory != 0)
                    if turn == (BY_PYTORCH if is_of_pytorch else BY_PYTHON):
                        status = make_export(context, entry, export, flags)
                        exported += 1
                    elif turn == STORAGES:
                        hold_storage(context, entry, export, flags)
                    is_waiting |= is_of_pytorch
            elif kind == structs.KIND_TUPLE or kind == structs.KIND_NAMED_TUPLE:
                if depth == structs.MAX_TUPLE_DEPTH:
                    status = structs.STATUS_NUMBA
                    break
                store(pending + 16 * depth, items)
                store(pending + 16 * depth + 8, left)
                depth += 1
                items = ob + OB_ITEM
                left = load(ob + OB_SIZE)
            elif kind == structs.KIND_LIST:
                if depth == structs.MAX_TUPLE_DEPTH or (lists == frame.snapshot_count and not may_hold_arrays(runtime, ob)):
                    status = structs.STATUS_NUMBA
                    break
                if lists == frame.key_capacity:
                    status = structs.STATUS_GROW
                    break
                snapshot = take_snapshot(frame, lists, ob)
                if snapshot == 0:
                    status = structs.STATUS_ERROR if PyErr_Occurred() != 0 else structs.STATUS_CHANGED
                    break
                lists += 1
                store(pending + 16 * depth, items)
                store(pending + 16 * depth + 8, left)
                depth += 1
                items = snapshot + OB_ITEM
                left = load(snapshot + OB_SIZE)
            else:
                passed = ob_type
        if status != structs.STATUS_OK or not is_waiting:
            break
    if status == structs.STATUS_OK and exported == 0 and frame.snapshot_count == before:
        status = structs.STATUS_CHANGED  # an object that the reading has asked for is gone
    if status != structs.STATUS_OK:
        note_stop(frame, args, load(pending) if depth > 0 else items, ob)
    return status


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
    return offsets.ndim != 0 and offsets.storage_object != 0 and is_in_memory(offsets, export.object)


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
