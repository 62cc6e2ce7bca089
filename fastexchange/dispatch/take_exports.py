"""Make all owning exports of a call, and the snapshots of its lists, before the reading, because they may run Python code.

:data:`read_arguments.walk` then finds them in the frame, in the order of their objects.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.native import call_word, load, stack, store
from . import structs
from .frame import EXPORT_BYTES
from .lists import may_hold_arrays, take_snapshot
from .owning_exports import BY_PYTHON, HOLDING, NATIVELY, TURNS, begin_export, has_turn, is_exported
from .read_arguments import note_stop
from .type_table import find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_WORDS = 2 * structs.MAX_TUPLE_DEPTH


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def export_managed(context_address, frame_address, args, nargs, flags):
    """Make every owning export of the call, in the order in which :data:`read_arguments.walk` uses them. Returns a STATUS_*.

    It passes over the arguments in each turn of ``owning_exports``. The first one also makes snapshots of lists.
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
    for turn in range(TURNS):
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
            kind = structs.kind_of(context, entry)
            is_cuda = context.device_type != CPU
            if is_cuda and kind.form == structs.FORM_OTHER and entry.asks_python != 0:
                status = structs.STATUS_STREAM  # its Python code has to be told the stream
                break
            if is_exported(context, entry, flags):
                if made == frame.export_count:  # not made in an earlier round with a frame that was too small
                    if made == frame.export_capacity:
                        status = structs.STATUS_GROW
                        break
                    begin_export(frame, ob, is_cuda and entry.interface != 0)
                export = structs.export_at(frame.exports + EXPORT_BYTES * made)
                made += 1
                if export.managed == 0:
                    if export.object != ob:
                        status = structs.STATUS_CHANGED
                        break
                    if has_turn(context, entry, turn):
                        address = frame.exports + EXPORT_BYTES * (made - 1)
                        status = call_word(runtime.take_turn, (context_address, at, address, turn, flags))
                        exported += turn != HOLDING
                    is_waiting |= has_turn(context, entry, NATIVELY)
            elif kind.form == structs.FORM_TUPLE:
                if depth == structs.MAX_TUPLE_DEPTH:
                    status = structs.STATUS_NUMBA
                    break
                store(pending + 16 * depth, items)
                store(pending + 16 * depth + 8, left)
                depth += 1
                items = ob + OB_ITEM
                left = load(ob + OB_SIZE)
            elif kind.form == structs.FORM_LIST:
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
            elif kind.prepare != 0:
                status = call_word(kind.prepare, (context_address, at, ob)) if turn == BY_PYTHON else status
                exported += 1
            else:
                passed = ob_type
        if status != structs.STATUS_OK or not is_waiting:
            break
    if status == structs.STATUS_OK and exported == 0 and frame.snapshot_count == before:
        status = structs.STATUS_CHANGED  # an object that the reading has asked for is gone
    if status != structs.STATUS_OK:
        note_stop(frame, args, load(pending) if depth > 0 else items, ob)
    return status
