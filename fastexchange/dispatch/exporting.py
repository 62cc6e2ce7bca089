"""The owning exports of a call, which come before the walk: to make them may run Python code.

Then :func:`walk.walk` finds them in the frame, in the order in which it meets their objects.
"""

from numba import types

from .. import cpython as c
from ..cpython import PyErr_Occurred
from ..dltensor import DL_TENSOR, delete_managed, dl_tensor_at
from ..native import call_int, global_address, load, native, stack, store
from . import layout
from .asking import forbid_moving, is_differentiating_forward, is_movable, is_odd_if_asked, storage_of
from .entries import Py_TYPE, find
from .frame import EXPORT_BYTES, drop
from .guard import guard_of, is_odd
from .lists import may_hold_arrays, open_list
from .walk import COMPLEX, CPU, FLAG_LOOK, FLAG_OWN, FLAG_TRUSTED, kind_on_device

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_WORDS = 2 * layout.MAX_TUPLE_DEPTH


@native
def export_managed(context, runtime, frame, args, nargs, flags):
    """Make every owning export of the call, in the order in which :func:`walk` will ask for them. Returns a STATUS_*.

    Python code may run here: in a producer's ``__dlpack__``, and in what that sets free.
    """
    pending = stack(PENDING_WORDS)
    out = stack(1)
    depth = 0
    items = args
    left = nargs
    status = layout.STATUS_OK
    ob = 0
    made = 0
    lists = 0
    owns = context.owns != 0 or flags & FLAG_OWN != 0
    differentiates = -1  # not asked yet
    while True:
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
        at = find(runtime, Py_TYPE(ob))
        if at == 0:
            status = layout.STATUS_UNKNOWN_TYPE
            break
        entry = layout.entry_at(at)
        kind = entry.kind
        is_interface = False
        if context.device_type != CPU:
            kind = kind_on_device(entry)
            is_interface = kind == layout.KIND_MANAGED and entry.interface != 0
            if kind == layout.KIND_NUMBA and entry.asks_python != 0:
                status = layout.STATUS_STREAM  # before its Python code exports it: that has to be told of the stream
                break
        if kind == layout.KIND_MANAGED or (kind == layout.KIND_EXCHANGE and owns):
            if made < frame.export_count:  # by an earlier round, in a frame that was too small
                made += 1
                continue
            if frame.export_count == frame.export_capacity:
                status = layout.STATUS_GROW
                break
            export_function = entry.interface if is_interface else entry.managed  # the entry may move while Python code runs
            guard = guard_of(context, entry)
            is_buffer = entry.key != 0
            is_own_memory = entry.is_own_memory != 0
            asks = guard != 0 and layout.guard_at(guard).asks != 0
            if flags & FLAG_TRUSTED == 0 and not asks and is_odd(guard, ob):
                status = layout.STATUS_CHECK
                break
            storage = 0
            if guard != 0 and is_own_memory and (asks or owns):  # PyTorch's exports do not hold it
                storage = storage_of(layout.guard_at(guard), ob)
                is_read_later = owns and flags & FLAG_LOOK == 0 and context.device_type == CPU
                if is_read_later and storage != 0 and is_movable(layout.guard_at(guard), storage):
                    forbid_moving(layout.guard_at(guard), storage)
            store(out, 0)
            failed = call_int(export_function, (ob, out)) != 0
            if failed or PyErr_Occurred() != 0 or load(out) == 0:
                if not failed and load(out) != 0:
                    delete_managed(load(out))
                if storage != 0:
                    drop(storage)
                status = layout.STATUS_ERROR if PyErr_Occurred() != 0 else layout.STATUS_NO_ERROR_SET
                if is_interface:
                    if status == layout.STATUS_NO_ERROR_SET:  # it is not as usual: Python has to look at it
                        status = layout.STATUS_STREAM
                    break
                if status == layout.STATUS_ERROR and flags & FLAG_TRUSTED == 0:
                    if is_own_memory:
                        is_final = guard == 0  # the tensor's own __dlpack__ has better words
                    else:  # Numba may take what DLPack cannot describe
                        is_final = not is_buffer or c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) == 0
                    if not is_final:
                        c.PyErr_Clear()
                        status = layout.STATUS_CHECK
                break
            export = layout.export_at(frame.exports + EXPORT_BYTES * frame.export_count)
            export.object = ob
            export.managed = load(out)
            export.storage = storage
            export.is_given = 0
            export.is_interface = types.intp(is_interface)
            frame.export_count += 1
            made += 1
            if asks and flags & FLAG_TRUSTED == 0:
                is_complex = dl_tensor_at(load(out) + DL_TENSOR).dtype.code == COMPLEX
                if differentiates < 0:
                    differentiates = types.intp(is_differentiating_forward(layout.guard_at(guard)))
                if storage == 0 or differentiates != 0 or is_odd_if_asked(layout.guard_at(guard), ob, is_complex):
                    status = layout.STATUS_CHECK
                    break
        elif kind == layout.KIND_TUPLE or kind == layout.KIND_NAMED_TUPLE:
            if depth == layout.MAX_TUPLE_DEPTH:
                status = layout.STATUS_NUMBA
                break
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = ob + OB_ITEM
            left = load(ob + OB_SIZE)
        elif kind == layout.KIND_LIST:
            if depth == layout.MAX_TUPLE_DEPTH or (lists == frame.snapshot_count and not may_hold_arrays(runtime, ob)):
                status = layout.STATUS_NUMBA
                break
            if lists == frame.key_capacity:
                status = layout.STATUS_GROW
                break
            snapshot = open_list(frame, lists, ob)
            if snapshot == 0:
                status = layout.STATUS_ERROR if PyErr_Occurred() != 0 else layout.STATUS_CHANGED
                break
            lists += 1
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = snapshot + OB_ITEM
            left = load(snapshot + OB_SIZE)
    if status != layout.STATUS_OK:
        outer = load(pending) if depth > 0 else items
        frame.position = ((outer - args) >> 3) - 1
        frame.object = ob
    return status
