"""The walk over a call's arguments: each leaf read once, its words and its key appended to the frame.

The order inside a call keeps borrowed views safe, and what a guard has said true: what may run Python code (owning exports,
snapshots of lists, which a garbage collection may precede) goes first, in ``take_exports.export_managed``; then :func:`walk` asks
the guards and takes all borrowed views, and no Python code runs until the kernel has returned. So no answer is older than the
last line of Python; none is kept for a later look at the same call.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import DLDeviceType
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    INTERFACE_STREAM,
    READONLY,
    READONLY_IS_ASSUMED,
    dl_tensor_at,
    element_field,
    end_of,
    is_empty,
    is_plain,
    managed_at,
    refusal,
)  # fmt: skip
from ..ground.native import as_words, call_int, global_address, load, native, native_inline, stack, store
from ..producers.ndarray import ndarray_at
from . import structs
from .frame import ARRAY_BYTES, EXPORT_BYTES
from .lists import fold, may_hold_arrays, snapshot_of
from .pack import dtype_entry, keep_tensor, pack_ndarray, pack_tensor
from .structs import DTYPE_SHIFT, KIND_SCALAR
from .torch_guard import guard_of, is_odd, is_short
from .torch_queries import is_beyond, is_movable
from .type_table import find

OB_FVAL, OB_SIZE, OB_ITEM, SCALAR_VALUE = c.OB_FVAL, c.OB_SIZE, c.OB_ITEM, c.NUMPY_SCALAR_VALUE
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = map(
    int, (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged)
)
PENDING_BYTES = 40  # of one level: the items left of the parent; of a list also where its keys, words and arrays begin
PENDING_WORDS = PENDING_BYTES // 8 * structs.MAX_TUPLE_DEPTH

SCALAR_FLOAT64 = KIND_SCALAR | (2 | 64 << 8) << DTYPE_SHIFT
SCALAR_INT64 = KIND_SCALAR | (0 | 64 << 8) << DTYPE_SHIFT
SCALAR_UINT64 = KIND_SCALAR | (1 | 64 << 8) << DTYPE_SHIFT
SCALAR_BOOL = KIND_SCALAR | (6 | 8 << 8) << DTYPE_SHIFT
SCALAR_COMPLEX128 = KIND_SCALAR | (5 | 128 << 8) << DTYPE_SHIFT

FLAG_ASKED = 1  # the slow path has asked the frameworks about all tensors: what they say of one that is odd still is final
DRY_RUN = 2  # stop before the kernel: only the keys are wanted
FLAG_OWN = 4  # take owning exports of all tensors: their memory is used after the call


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


@native
def place(frame, tensor, stream):
    """Note where a tensor is that a launch on a device reads, and by which function its producer tells of its stream.

    Returns a STATUS_*. Pinned memory is read by every device, managed memory by every device that has to.
    """
    if types.intp(tensor.dtype.lanes) != 1:
        return structs.STATUS_DTYPE
    if tensor.ndim < 0 or tensor.ndim > structs.MAX_NDIM:
        return structs.STATUS_NDIM
    if tensor.ndim > 0 and tensor.shape == 0:
        return structs.STATUS_SHAPE
    device = types.intp(tensor.device.device_type)
    number = types.intp(tensor.device.device_id)
    if device != CUDA_HOST and (number < 0 or number >= structs.MAX_DEVICES):
        return structs.STATUS_DEVICE
    if device == CUDA:
        if frame.device >= 0 and frame.device != number:
            return structs.STATUS_DEVICES
        frame.device = number
    elif device == CUDA_MANAGED:
        if frame.managed_device < 0:
            frame.managed_device = number
    elif device != CUDA_HOST:
        return structs.STATUS_DEVICE
    if frame.stream == 0:
        frame.stream = stream
    elif stream != 0 and stream != frame.stream:
        frame.other_stream = stream
    return structs.STATUS_OK


@native
def note_stream(frame, stream):
    """Note the stream, or 0, that an array's ``__cuda_array_interface__`` names."""
    if stream != 0:
        if frame.own_stream == 0:
            frame.own_stream = stream
        elif frame.own_stream != stream:
            frame.own_streams_differ = 1


@native_inline
def is_writeable(flags, guard):
    """Whether a kernel may write to an export with these flags. PyTorch's tensors, which have a guard, are all mutable."""
    return flags & READONLY == 0 or (flags & READONLY_IS_ASSUMED != 0 and guard != 0)


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
    overflow = stack(1)
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
        if kind == structs.KIND_NDARRAY:
            descr = ndarray_at(ob).descr
            if descr != last_descr:
                dtype_key, itemsize = dtype_entry(runtime, descr)
                if dtype_key == 0:
                    status = itemsize
                    break
                last_descr = descr
            ndim = types.intp(ndarray_at(ob).nd)
            if word + 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim) > limit:
                status = structs.STATUS_GROW
                break
            key_flags = types.intp(ndarray_at(ob).flags) & structs.KEY_FLAGS
            key = dtype_key | ndim << structs.NDIM_SHIFT | key_flags << structs.FLAGS_SHIFT
            pack_ndarray(ob, ndim, itemsize, as_words(word))
            array = structs.array_at(array_address)
            array.origin = ob + structs.ORIGIN_NDARRAY
            array.words = word
            store(word, array.meminfo)
            array_address += ARRAY_BYTES
            word += 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
        elif kind == structs.KIND_EXCHANGE or kind == structs.KIND_MANAGED or kind == structs.KIND_VIEW:
            entry = structs.entry_at(entry_address)
            class_key = entry.key
            is_own_memory = entry.is_own_memory != 0
            guard = guard_of(context, entry)  # the entry may move while foreign code runs
            stream = entry.stream
            origin = ob + structs.ORIGIN_VIEW
            storage = 0
            writeable = True
            if kind == structs.KIND_VIEW:
                known = find(runtime, ob)
                if known == 0:
                    status = structs.STATUS_STREAM
                    break
                managed = structs.entry_at(known).shown
                writeable = is_writeable(managed_at(managed).flags, 0)
                tensor = managed + DL_TENSOR
            elif kind == structs.KIND_MANAGED or needs_owning_exports:
                if exports == frame.export_count:
                    status = structs.STATUS_EXPORT
                    break
                export = structs.export_at(frame.exports + EXPORT_BYTES * exports)
                exports += 1
                if export.object != ob:
                    status = structs.STATUS_CHANGED
                    break
                managed = export.managed
                if managed == 0:
                    status = structs.STATUS_EXPORT
                    break
                if is_own_memory and is_odd(guard, ob):  # since it was exported; where PyTorch is asked, it is odd always
                    if structs.guard_at(guard).asks == 0:
                        status = structs.STATUS_CHECK if flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA
                        break
                if managed_at(managed).version.major != 1:
                    status = structs.STATUS_VERSION
                    break
                writeable = is_writeable(managed_at(managed).flags, guard)
                tensor = managed + DL_TENSOR
                if is_cuda and export.is_interface != 0:
                    note_stream(frame, load(managed + INTERFACE_STREAM))
                storage = export.storage
                origin = ob + structs.ORIGIN_EXPORT
            else:
                if is_odd(guard, ob):
                    status = structs.STATUS_CHECK if flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA
                    break
                tensor = view
                dl_tensor_at(view).device.device_type = 0  # of no device, should the producer write nothing
                failed = call_int(entry.borrow, (ob, tensor)) != 0
                if failed or PyErr_Occurred() != 0:
                    status = structs.STATUS_ERROR if PyErr_Occurred() != 0 else structs.STATUS_NO_ERROR_SET
                    if status == structs.STATUS_ERROR and guard != 0 and flags & FLAG_ASKED == 0:
                        c.PyErr_Clear()  # the tensor's own __dlpack__ has better words
                        status = structs.STATUS_CHECK
                    break
            dl_tensor = dl_tensor_at(tensor)
            if is_cuda:
                status = place(frame, dl_tensor, stream)
            else:
                status = structs.STATUS_OK if is_plain(dl_tensor) else refusal(dl_tensor)
            if status != structs.STATUS_OK:
                keep_tensor(frame, tensor)
                break
            ndim = types.intp(dl_tensor.ndim)
            field = element_field(dl_tensor)
            if word + 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim) > limit:
                status = structs.STATUS_GROW
                break
            key_flags, status = pack_tensor(tensor, ndim, field, as_words(word))
            if status == structs.STATUS_OK and guard != 0 and not is_empty(dl_tensor):
                end = end_of(dl_tensor) if is_own_memory else 0
                if storage == 0:
                    is_gone = is_short(guard, ob, end)
                else:
                    begin = dl_tensor.data + types.intp(dl_tensor.byte_offset)
                    is_gone = is_beyond(structs.guard_at(guard), storage, begin, end)
                if is_gone:
                    status = structs.STATUS_NULL_DATA if storage == 0 else structs.STATUS_CHANGED
                    if flags & FLAG_ASKED == 0:
                        status = structs.STATUS_CHECK
                elif is_cuda:
                    pass  # `cuda.bound` sees to it that a launch finds the memory where it was
                elif needs_owning_exports and storage == 0:
                    status = structs.STATUS_NUMBA  # whose dispatcher gets a view of a tensor that nobody else has
                elif needs_owning_exports and flags & DRY_RUN == 0 and is_movable(structs.guard_at(guard), storage):
                    status = structs.STATUS_MOVABLE
            if status == structs.STATUS_OK and is_cuda and key_flags & structs.ALIGNED == 0:
                status = structs.STATUS_MISALIGNED
            if status != structs.STATUS_OK:
                keep_tensor(frame, tensor)
                break
            if writeable:
                key_flags |= structs.WRITEABLE
            dtype_key = structs.KIND_ARRAY | field << structs.DTYPE_SHIFT
            last_descr = 0
            key = dtype_key | ndim << structs.NDIM_SHIFT | key_flags << structs.FLAGS_SHIFT | class_key
            array = structs.array_at(array_address)
            array.origin = origin
            array.words = word
            store(word, array.meminfo)
            array_address += ARRAY_BYTES
            word += 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
            last_type = 0  # foreign code ran: should it have changed the table of types, look again
        elif kind == structs.KIND_FLOAT:
            store(word, load(ob + OB_FVAL))
            word += 8
            key = SCALAR_FLOAT64
        elif kind == structs.KIND_INT:
            value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
            key = SCALAR_INT64
            if value == -1 and load(overflow) & 0xFFFFFFFF != 0:
                value = types.int64(c.PyLong_AsUnsignedLongLong(ob))
                key = SCALAR_UINT64
                if value == -1 and PyErr_Occurred() != 0:
                    c.PyErr_Clear()
                    status = structs.STATUS_BIG_INT
                    break
            store(word, value)
            word += 8
        elif kind == structs.KIND_BOOL:
            store(word, types.intp(ob == global_address("_Py_TrueStruct")))
            word += 8
            key = SCALAR_BOOL
        elif kind == structs.KIND_NUMPY_SCALAR:
            store(word, load(ob + SCALAR_VALUE))
            word += 8
            key = structs.entry_at(entry_address).key
        elif kind == structs.KIND_NUMPY_COMPLEX128:
            store(word, load(ob + SCALAR_VALUE))
            store(word + 8, load(ob + SCALAR_VALUE + 8))
            word += 16
            key = structs.entry_at(entry_address).key
        elif kind == structs.KIND_NONE:
            store(word, ob)
            word += 8
            key = structs.KIND_NONE
        elif kind == structs.KIND_OMITTED:
            key = structs.KIND_OMITTED
        elif kind == structs.KIND_COMPLEX:
            store(word, load(ob + OB_FVAL))
            store(word + 8, load(ob + OB_FVAL + 8))
            word += 16
            key = SCALAR_COMPLEX128
        elif kind == structs.KIND_NUMPY_COMPLEX64:
            value = load(ob + SCALAR_VALUE)
            store(word, value & 0xFFFFFFFF)
            store(word + 8, (value >> 32) & 0xFFFFFFFF)
            word += 16
            key = structs.entry_at(entry_address).key
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
        elif kind == structs.KIND_CONSTANT:
            known = find(runtime, ob)
            if known == 0:
                status = structs.STATUS_UNKNOWN_TYPE
                break
            store(word, ob)
            word += 8
            key = structs.entry_at(known).key
        else:
            is_there = not is_cuda and context.device_kernel != 0 and structs.entry_at(entry_address).is_by_object != 0
            status = structs.STATUS_DEVICE if is_there else structs.STATUS_NUMBA  # numba's device arrays are on a device
            break
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
