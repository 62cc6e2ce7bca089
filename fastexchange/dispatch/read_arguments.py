"""The walk over a call's arguments: each leaf read once, its words and its key appended to the frame.

The order inside a call keeps borrowed views safe, and what a guard has said true: what may run Python code (owning exports,
snapshots of lists, which a garbage collection may precede) goes first, in ``take_exports.export_managed``; then :func:`walk` asks
the guards and takes all borrowed views, and no Python code runs until the kernel has returned. So no answer is older than the
last line of Python; none is kept for a later look at the same call.
"""

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE
from ..ground.dltensor import DL_TENSOR_WORDS
from ..ground.native import load, native, native_inline, stack, store
from ..producers.ndarray import ndarray_at
from . import readers, structs
from .frame import ARRAY_BYTES
from .lists import fold, may_hold_arrays, snapshot_of
from .pack import dtype_entry
from .readers import FLAG_OWN
from .type_table import find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
PENDING_BYTES = 40  # of one level: the items left of the parent; of a list also where its keys, words and arrays begin
PENDING_WORDS = PENDING_BYTES // 8 * structs.MAX_TUPLE_DEPTH


@native
def kind_on_device(entry):
    """By which KIND_* a launch on a device reads what an ``fx_entry`` is about; KIND_NUMBA: not without Python."""
    kind = entry.kind
    if entry.is_by_object != 0:
        return structs.KIND_VIEW
    if entry.interface != 0:
        return structs.KIND_MANAGED
    is_read = (
        kind == structs.KIND_EXCHANGE or kind == structs.KIND_TUPLE or kind == structs.KIND_NAMED_TUPLE
        or (kind == structs.KIND_MANAGED and entry.asks_python == 0)
        or (structs.KIND_FLOAT <= kind and kind <= structs.KIND_NUMPY_COMPLEX128)
    )  # fmt: skip
    return kind if is_read else structs.KIND_NUMBA


@native_inline
def note_array(array_address, origin, word):
    """Note of an array argument who has its memory, and where its words begin; the first of them is its memory block."""
    array = structs.array_at(array_address)
    array.origin = origin
    array.words = word
    store(word, array.meminfo)


@native
def walk(context, runtime, frame, args, nargs, flags):
    """Read all arguments of a kernel for the CPU into `frame`: words, keys, arrays. Returns a STATUS_*."""
    return read_arguments(context, runtime, frame, args, nargs, flags, False)


@native
def walk_for_device(context, runtime, frame, args, nargs, flags):
    """:func:`walk` of a kernel for CUDA: where the tensors are is noted, too."""
    return read_arguments(context, runtime, frame, args, nargs, flags, True)


@native_inline
def read_arguments(context, runtime, frame, args, nargs, flags, is_cuda):
    """:func:`walk` and :func:`walk_for_device`, which are compiled apart: what one of them needs costs the other nothing.

    One loop for everything: a tuple pushes what remains of its parent and goes on with its own items.
    """
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
    needs_owning_exports = context.needs_owning_exports != 0 or flags & FLAG_OWN != 0
    if is_cuda:
        frame.device, frame.managed_device = -1, -1
        frame.stream, frame.other_stream = 0, 0
        frame.own_stream, frame.own_streams_differ = 0, 0
    while True:
        if left == 0:
            if depth > 0:
                depth -= 1
                level = pending + PENDING_BYTES * depth
                items = load(level)
                left = load(level + 8)
                first_key = load(level + 16)
                if first_key != 0:  # a list, whose items' words and keys become one
                    first_word = load(level + 24)
                    status, ob = fold(runtime, frame, first_key, key_at, first_word, load(level + 32))
                    if status != structs.STATUS_OK:
                        break
                    key_end -= key_at - first_key - 16  # there is as much room for arrays, which have not become fewer
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
        reading = readers.Reading(context, runtime, frame, flags, is_cuda, limit, exports, scratch)
        size = 0
        origin = 0
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
            note_array(array_address, origin, word)
            array_address += ARRAY_BYTES
        elif kind == structs.KIND_EXCHANGE or kind == structs.KIND_MANAGED or kind == structs.KIND_VIEW:
            status, key, size, origin = readers.read_tensor(reading, kind, ob, entry_address, view, word)
            exports += kind == structs.KIND_MANAGED or (needs_owning_exports and kind == structs.KIND_EXCHANGE)
            last_type = 0  # foreign code ran: should it have changed the table of types, look again
            last_descr = 0
            if status != structs.STATUS_OK:
                break
            note_array(array_address, origin, word)
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
            status = structs.STATUS_DEVICE if is_there else structs.STATUS_NUMBA  # numba's device arrays are on a device
            break
        if status != structs.STATUS_OK:
            break
        word += size
        store(key_at, key)
        key_at += 8
    if status == structs.STATUS_OK and exports != frame.export_count:
        status = structs.STATUS_CHANGED
    frame.array_count = (array_address - frame.arrays) // ARRAY_BYTES
    frame.key_count = (key_at - frame.keys) >> 3
    if status != structs.STATUS_OK:
        outer = load(pending) if depth > 0 else items
        frame.position = ((outer - args) >> 3) - 1
        frame.object = ob
    return status
