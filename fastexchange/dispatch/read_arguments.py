"""The reading of a call's arguments: each value is read once, and its words and key are appended to the frame.

The order of steps in a call keeps borrowed views and the guards' answers valid:

1. Steps that may run Python code come first, in ``take_exports.export_managed``: owning exports, and snapshots of lists, whose
   allocation may start a garbage collection.
2. :data:`walk` asks the guards and borrows all views. No Python code runs from here until the kernel has returned.

So every answer is newer than the last Python code. No answer is kept for another reading of the same call.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE
from ..ground.dlpack import CPU
from ..ground.native import call_word, load, native, stack, store
from . import structs
from .frame import ARRAY_BYTES
from .lists import make_list, may_hold_arrays, snapshot_of
from .reading import begin_reading
from .type_table import find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_BYTES = 40  # for each level: the parent's remaining items; for a list also where its keys, words and arrays begin
PENDING_WORDS = PENDING_BYTES // 8 * structs.MAX_TUPLE_DEPTH


@native
def note_stop(frame, args, items, ob):
    """Note the object `ob` at which the reading has stopped, and the argument: the last one before `items`."""
    frame.position = ((items - args) >> 3) - 1
    frame.object = ob


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def walk(context_address, frame_address, args, nargs, flags):
    """Read all arguments into a frame: words, keys, arrays; for a kernel on a device also where tensors are. Returns a STATUS_*.

    One loop reads all values. A tuple or list pushes its parent's remaining items, and the loop goes on with its own items.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    frame = structs.frame_at(frame_address)
    begin_reading(context_address, frame, flags)
    is_cuda = context.device_type != CPU
    kind_offset = structs.ENTRY_DEVICE_KIND if is_cuda else structs.ENTRY_KIND
    word = frame.words
    array_address = frame.arrays
    key_at = frame.keys
    to_entries = frame.entries - frame.keys
    key_end = frame.keys + 8 * frame.key_capacity
    lists = 0
    status = structs.STATUS_OK
    pending = stack(PENDING_WORDS)
    depth = 0
    items = args
    left = context.parameter_count
    variadic = context.variadic
    last_type = 0
    entry = 0
    kind_address = 0
    ob = 0
    while True:
        # 1. At the end of a tuple or list, go on with its parent. At the end of the parameters, begin ``*args``, a tuple.
        if left == 0:
            if depth > 0:
                depth -= 1
                level = pending + PENDING_BYTES * depth
                items = load(level)
                left = load(level + 8)
                first_key = load(level + 16)
                if first_key != 0:  # the end of a list: its items' words and keys become one
                    first_word = load(level + 24)
                    status, ob = make_list(runtime, frame, first_key, key_at, first_word, load(level + 32))
                    if status != structs.STATUS_OK:
                        break
                    key_end -= key_at - first_key - 16  # the room for arrays is the same, and their number has not changed
                    key_at = first_key + 16
                    word = first_word + 16
                continue
            if variadic == 0:
                break
            if key_at >= key_end:
                status = structs.STATUS_GROW
                break
            variadic = 0
            left = nargs - context.parameter_count
            store(key_at, structs.KEY_TUPLE | left << structs.SERIAL_SHIFT)
            key_at += 8
            continue
        # 2. Take the next object, and find the kind of its type.
        if key_at >= key_end:
            status = structs.STATUS_GROW
            break
        ob = load(items)
        items += 8
        left -= 1
        if Py_TYPE(ob) != last_type:
            last_type = Py_TYPE(ob)
            entry = find(runtime, last_type)
            if entry == 0:
                status = structs.STATUS_UNKNOWN_TYPE
                break
            kind_address = load(entry + kind_offset)
        # 3. Read it by the reader of its kind, or begin its items.
        kind = structs.kind_at(kind_address)
        if kind.reader != 0:
            key = call_word(kind.reader, (ob, entry, frame_address, word, array_address))
            if key < 0:
                status = -key
                break
            word += 8 * structs.words_of(key)
            array_address += ARRAY_BYTES if structs.has_array(key) else 0
        elif kind.form == structs.FORM_TUPLE:
            if depth == structs.MAX_TUPLE_DEPTH:
                status = structs.STATUS_NUMBA
                break
            level = pending + PENDING_BYTES * depth
            store(level, items)
            store(level + 8, left)
            store(level + 16, 0)
            depth += 1
            items = ob + OB_ITEM
            left = load(ob + OB_SIZE)
            key = structs.entry_at(entry).key
            if key == 0:  # no named tuple
                key = structs.KEY_TUPLE | left << structs.SERIAL_SHIFT
        elif kind.form == structs.FORM_LIST:
            if lists == frame.snapshot_count:
                status = structs.STATUS_EXPORT if may_hold_arrays(runtime, ob) else structs.STATUS_NUMBA
                break
            snapshot = snapshot_of(frame, lists, ob)
            if depth == structs.MAX_TUPLE_DEPTH or snapshot == 0:
                status = structs.STATUS_NUMBA if snapshot != 0 else structs.STATUS_CHANGED
                break
            lists += 1
            level = pending + PENDING_BYTES * depth
            store(level, items)
            store(level + 8, left)
            store(level + 16, key_at)
            store(level + 24, word)
            store(level + 32, array_address)
            depth += 1
            items = snapshot + OB_ITEM
            left = load(snapshot + OB_SIZE)
            key = structs.KEY_LIST
        elif is_cuda:
            status = structs.STATUS_STREAM if structs.entry_at(entry).asks_python != 0 else structs.STATUS_NUMBA
            break
        else:  # the packages' device arrays are on a device
            is_there = context.device_kernel != 0 and structs.entry_at(entry).is_by_object != 0
            status = structs.STATUS_DEVICE if is_there else structs.STATUS_NUMBA
            break
        # 4. Store its key, and the entry of its type.
        store(key_at, key)
        store(key_at + to_entries, entry)
        key_at += 8
    if status == structs.STATUS_OK and frame.exports_used != frame.export_count:
        status = structs.STATUS_CHANGED
    frame.array_count = (array_address - frame.arrays) // ARRAY_BYTES
    frame.key_count = (key_at - frame.keys) >> 3
    if status != structs.STATUS_OK:
        note_stop(frame, args, load(pending) if depth > 0 else items, ob)
    return status
