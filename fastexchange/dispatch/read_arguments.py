"""The reading of a call's arguments: each leaf is read once, and its words and key are appended to the frame.

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
from ..ground.dltensor import DL_TENSOR_WORDS
from ..ground.native import call_word, load, native, smaller, stack, store
from ..producers.ndarray import ndarray_at
from . import readers, strings, structs
from .frame import ARRAY_BYTES
from .lists import make_list, may_hold_arrays, snapshot_of
from .pack import dtype_entry
from .readers import is_owning
from .torch_guard import guard_of
from .type_table import find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_BYTES = 40  # for each level: the parent's remaining items; for a list also where its keys, words and arrays begin
PENDING_WORDS = PENDING_BYTES // 8 * structs.MAX_TUPLE_DEPTH


@native
def kind_on_device(entry):
    """The KIND_* by which a launch on a device reads objects of an ``fx_entry``; KIND_NUMBA: only Python can."""
    kind = entry.kind
    if entry.is_by_object != 0:
        return structs.KIND_VIEW
    if entry.interface != 0:
        return structs.KIND_MANAGED
    is_read = (
        kind == structs.KIND_TUPLE or kind == structs.KIND_NAMED_TUPLE
        or ((kind == structs.KIND_EXCHANGE or kind == structs.KIND_MANAGED) and entry.asks_python == 0)
        or structs.is_scalar_kind(kind)
    )  # fmt: skip
    return kind if is_read else structs.KIND_NUMBA


@native
def note_stop(frame, args, items, ob):
    """Note the object `ob` at which the reading has stopped, and the argument: the last one before `items`."""
    frame.position = ((items - args) >> 3) - 1
    frame.object = ob


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def walk(context_address, frame_address, args, nargs, flags):
    """Read all arguments of a CPU kernel into a frame: words, keys, arrays. Returns a STATUS_*."""
    return read_arguments(context_address, frame_address, args, nargs, flags, False)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def walk_for_device(context_address, frame_address, args, nargs, flags):
    """:func:`walk` for CUDA kernels. Also notes the tensors' devices."""
    return read_arguments(context_address, frame_address, args, nargs, flags, True)


@native
def read_arguments(context_address, frame_address, args, nargs, flags, is_cuda):
    """:data:`walk` and :data:`walk_for_device`, which are compiled separately, so that neither pays for the other.

    One loop reads all leaves. A tuple or list pushes its parent's remaining items, and the loop goes on with its own items.
    The readers of scalars are called here, not by a function of their own: that took 3 % more time.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    frame = structs.frame_at(frame_address)
    word = frame.words
    array_address = frame.arrays
    limit = frame.words_limit
    key_at = frame.keys
    key_end = frame.keys + 8 * frame.key_capacity
    exports = 0
    lists = 0
    status = structs.STATUS_OK
    pending = stack(PENDING_WORDS)
    view = stack(DL_TENSOR_WORDS)
    scratch = stack(1)
    depth = 0
    items = args
    left = context.parameter_count
    variadic = context.variadic
    last_type = 0
    last_descr = 0
    entry_address = 0
    kind = 0
    dtype_key = 0
    itemsize = 0
    ob = 0
    key = 0
    needs_owning_exports = is_owning(context, flags)
    if is_cuda:
        frame.device, frame.managed_device = -1, -1
        frame.stream, frame.other_stream = 0, 0
        frame.own_stream, frame.own_streams_differ = 0, 0
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
            key = structs.KIND_TUPLE | left << structs.SERIAL_SHIFT
            store(key_at, key)
            key_at += 8
            continue
        # 2. Take the next object, and find the kind of its type.
        if key_at >= key_end:
            status = structs.STATUS_GROW
            break
        ob = load(items)
        items += 8
        left -= 1
        ob_type = Py_TYPE(ob)
        if ob_type != last_type:
            entry_address = find(runtime, ob_type)
            if entry_address == 0:
                status = structs.STATUS_UNKNOWN_TYPE
                break
            last_type = ob_type
            kind = kind_on_device(structs.entry_at(entry_address)) if is_cuda else structs.entry_at(entry_address).kind
            if is_cuda and kind == structs.KIND_NUMBA:
                status = structs.STATUS_STREAM if structs.entry_at(entry_address).asks_python != 0 else structs.STATUS_NUMBA
                break
        # 3. Read it by the reader of its kind, or begin its items.
        reading = readers.Reading(context, runtime, frame, flags, is_cuda, limit, exports, scratch)
        size = 0
        origin = 0
        is_alike = False  # whether the next item is likely to be read as this one
        if kind == structs.KIND_NDARRAY:
            descr = ndarray_at(ob).descr
            if descr != last_descr:
                dtype_key, itemsize = dtype_entry(runtime, descr)
                if dtype_key == 0:
                    status = itemsize
                    break
                last_descr = descr
            status, key, size, origin = readers.read_ndarray(reading, ob, dtype_key, itemsize, word)
            if status != structs.STATUS_OK:
                break
            readers.note_array(array_address, origin, word)
            array_address += ARRAY_BYTES
        elif kind == structs.KIND_EXCHANGE or kind == structs.KIND_MANAGED or kind == structs.KIND_VIEW:
            if kind == structs.KIND_EXCHANGE and needs_owning_exports:
                status, key, size, origin = readers.read_held(reading, ob, entry_address, word)
                exports += size != 0
            elif kind == structs.KIND_EXCHANGE:
                status, key, size, origin = readers.read_in_memory(reading, ob, entry_address, word)
                is_alike = size != 0
            if size == 0:
                status, key, size, origin = readers.read_tensor(reading, kind, ob, entry_address, view, word)
                exports += kind == structs.KIND_MANAGED or (needs_owning_exports and kind == structs.KIND_EXCHANGE)
                last_type = 0  # foreign code may have changed the type table
                last_descr = 0
            if status != structs.STATUS_OK:
                break
            readers.note_array(array_address, origin, word)
            array_address += ARRAY_BYTES
        elif kind == structs.KIND_FLOAT:
            status, key, size, origin = readers.read_float(reading, ob, entry_address, word)
        elif kind == structs.KIND_INT:
            status, key, size, origin = readers.read_int(reading, ob, entry_address, word)
        elif kind == structs.KIND_BOOL:
            status, key, size, origin = readers.read_bool(reading, ob, entry_address, word)
        elif kind == structs.KIND_NUMPY_SCALAR:
            status, key, size, origin = readers.read_numpy_scalar(reading, ob, entry_address, word)
        elif kind == structs.KIND_NUMPY_COMPLEX128:
            status, key, size, origin = readers.read_numpy_complex128(reading, ob, entry_address, word)
        elif kind == structs.KIND_STRING:
            status, key, size, origin = readers.read_string(reading, ob, entry_address, word)
            if status != structs.STATUS_OK:
                break
            readers.note_array(array_address, origin, word + strings.MEMINFO)
            array_address += ARRAY_BYTES
        elif kind == structs.KIND_NONE:
            status, key, size, origin = readers.read_none(reading, ob, entry_address, word)
        elif kind == structs.KIND_OMITTED:
            status, key, size, origin = readers.read_omitted(reading, ob, entry_address, word)
        elif kind == structs.KIND_COMPLEX:
            status, key, size, origin = readers.read_complex(reading, ob, entry_address, word)
        elif kind == structs.KIND_NUMPY_COMPLEX64:
            status, key, size, origin = readers.read_numpy_complex64(reading, ob, entry_address, word)
        elif kind == structs.KIND_CONSTANT:
            status, key, size, origin = readers.read_constant(reading, ob, entry_address, word)
        elif kind == structs.KIND_TUPLE or kind == structs.KIND_NAMED_TUPLE:
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
            key = structs.KIND_TUPLE | left << structs.SERIAL_SHIFT
            if kind == structs.KIND_NAMED_TUPLE:
                key = structs.entry_at(entry_address).key
        elif kind == structs.KIND_LIST:
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
            key = structs.KIND_LIST
        else:
            is_there = not is_cuda and context.device_kernel != 0 and structs.entry_at(entry_address).is_by_object != 0
            status = structs.STATUS_DEVICE if is_there else structs.STATUS_NUMBA  # the packages' device arrays are on a device
            break
        if status != structs.STATUS_OK:
            break
        # 4. Store its key.
        word += size
        store(key_at, key)
        key_at += 8
        if not is_cuda and is_alike and left > 0 and Py_TYPE(load(items)) == ob_type:
            guard = guard_of(context, structs.entry_at(entry_address))
            most = smaller(left, (key_end - key_at) >> 3)
            count = call_word(runtime.read_alike, (guard, items, most, key, word, limit, key_at, array_address))
            items += 8 * count
            left -= count
            word += size * count
            key_at += 8 * count
            array_address += ARRAY_BYTES * count
    if status == structs.STATUS_OK and exports != frame.export_count:
        status = structs.STATUS_CHANGED
    frame.array_count = (array_address - frame.arrays) // ARRAY_BYTES
    frame.key_count = (key_at - frame.keys) >> 3
    if status != structs.STATUS_OK:
        note_stop(frame, args, load(pending) if depth > 0 else items, ob)
    return status
