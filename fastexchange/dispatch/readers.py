"""The readers of arguments: one for each kind, all with one signature.

A reader gets the object, the ``fx_entry`` of its type, the call's frame, the address of its first word, and its ``fx_array``. It
writes the words, and returns the key, or ``-STATUS_*``.

The general path files the key (``read_arguments``), a cached call compares it with that of the cache entry (``rows``).
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT, DLDeviceType, field_of_type
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    INTERFACE_STREAM,
    MAX_NDIM,
    READONLY,
    READONLY_IS_ASSUMED,
    check_rank,
    dl_tensor_at,
    element_field,
    end_of,
    is_empty,
    is_plain,
    managed_at,
    refusal,
)  # fmt: skip
from ..ground.native import as_words, call_int, call_word, global_address, load, native, put, stack, store
from ..producers.ndarray import ndarray_at
from . import strings, structs
from .frame import EXPORT_BYTES
from .pack import (
    dtype_entry,
    end_of_array,
    flags_in_order,
    keep_tensor,
    misaligned_bits,
    pack_contiguous,
    pack_ndarray,
    pack_tensor,
)  # fmt: skip
from .torch_guard import (
    device_in_memory,
    field_in_memory,
    guard_of,
    is_in_memory,
    is_odd,
    is_odd_by,
    is_of,
    is_on_cpu,
    is_short,
    is_short_by,
    rank_in_memory,
    view_in_memory,
)
from .torch_queries import is_beyond, is_movable
from .type_table import find

OB_FVAL, SCALAR_VALUE = c.OB_FVAL, c.NUMPY_SCALAR_VALUE
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = map(
    int, (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged)
)
SCALAR_FLOAT64 = structs.KIND_SCALAR | field_of_type(FLOAT, 64) << structs.DTYPE_SHIFT
SCALAR_INT64 = structs.KIND_SCALAR | field_of_type(INT, 64) << structs.DTYPE_SHIFT
SCALAR_UINT64 = structs.KIND_SCALAR | field_of_type(UINT, 64) << structs.DTYPE_SHIFT
SCALAR_BOOL = structs.KIND_SCALAR | field_of_type(BOOL, 8) << structs.DTYPE_SHIFT
SCALAR_COMPLEX128 = structs.KIND_SCALAR | field_of_type(COMPLEX, 128) << structs.DTYPE_SHIFT

FLAG_ASKED = 1  # the slow path has checked all tensors by their frameworks: a tensor that is still odd is refused
DRY_RUN = 2  # stop before the kernel: only read the keys
FLAG_MEMORY = 8  # read tensors in memory only: they are no Python objects


def reader(function):
    """Decorator: a reader."""
    return cfunction(types.intp, *[types.intp] * 5)(function)


@native
def begin_reading(context_address, frame, flags):
    """Note in a frame for which kernel, and by which FLAG_*, its readers read."""
    context = structs.context_at(context_address)
    frame.context, frame.flags, frame.exports_used = context_address, flags, 0
    frame.is_owning = is_owning(context, flags)
    if context.device_type != CPU:
        frame.device, frame.managed_device = -1, -1
        frame.stream, frame.other_stream = 0, 0
        frame.own_stream, frame.own_streams_differ = 0, 0


@native
def is_owning(context, flags):
    """Whether a call needs owning exports of all its tensors: not if they are only read in memory, where the caller owns them."""
    return types.intp(context.needs_owning_exports != 0 and flags & FLAG_MEMORY == 0)


@native
def runtime_of(frame_address):
    """The runtime of the kernel for which a frame is read."""
    return structs.runtime_at(structs.context_at(structs.frame_at(frame_address).context).runtime)


@native
def note_array(array_address, origin, word):
    """Note an array's origin, which owns its memory, and store its memory block at `word`."""
    array = structs.array_at(array_address)
    array.origin = origin
    store(word, array.meminfo)


@native
def has_no_room(frame, word, size):
    """Whether a value of so many words does not fit into the frame."""
    return word + 8 * size > frame.words_limit


# ---- scalars ---------------------------------------------------------------------------------------------------------


@reader
def read_float(ob, entry, frame, word, array):
    """A Python float."""
    store(word, load(ob + OB_FVAL))
    return SCALAR_FLOAT64


@reader
def read_int(ob, entry, frame, word, array):
    """A Python int: an int64, or a uint64 if it is too large."""
    overflow = stack(1)
    value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
    key = SCALAR_INT64
    if value == -1 and load(overflow) & 0xFFFFFFFF != 0:
        value = types.int64(c.PyLong_AsUnsignedLongLong(ob))
        key = SCALAR_UINT64
        if value == -1 and PyErr_Occurred() != 0:
            c.PyErr_Clear()
            key = -structs.STATUS_BIG_INT
    store(word, value)
    return key


@reader
def read_bool(ob, entry, frame, word, array):
    """A Python bool."""
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return SCALAR_BOOL


@reader
def read_complex(ob, entry, frame, word, array):
    """A Python complex number."""
    store(word, load(ob + OB_FVAL))
    store(word + 8, load(ob + OB_FVAL + 8))
    return SCALAR_COMPLEX128


@reader
def read_numpy_scalar(ob, entry, frame, word, array):
    """A NumPy scalar of at most 8 bytes. The rest of its word is undefined."""
    store(word, load(ob + SCALAR_VALUE))
    return structs.entry_at(entry).key


@reader
def read_numpy_complex64(ob, entry, frame, word, array):
    """A ``numpy.complex64``: each part is a word."""
    value = load(ob + SCALAR_VALUE)
    store(word, value & 0xFFFFFFFF)
    store(word + 8, (value >> 32) & 0xFFFFFFFF)
    return structs.entry_at(entry).key


@reader
def read_numpy_complex128(ob, entry, frame, word, array):
    """A ``numpy.complex128``."""
    store(word, load(ob + SCALAR_VALUE))
    store(word + 8, load(ob + SCALAR_VALUE + 8))
    return structs.entry_at(entry).key


@reader
def read_string(ob, entry, frame, word, array):
    """A str. Raises MemoryError."""
    if has_no_room(structs.frame_at(frame), word, strings.WORDS):
        return -structs.STATUS_GROW
    if not strings.read_characters(ob, word):
        return -structs.STATUS_ERROR
    note_array(array, ob + structs.ORIGIN_STRING, word + strings.MEMINFO)
    return structs.KIND_STRING


@reader
def read_none(ob, entry, frame, word, array):
    """``None``, for which Numba passes its address."""
    store(word, ob)
    return structs.KIND_NONE


@reader
def read_omitted(ob, entry, frame, word, array):
    """An omitted argument, whose default is compiled into the kernel."""
    return structs.KIND_OMITTED


@reader
def read_constant(ob, entry, frame, word, array):
    """A jitted function. It has a Numba type of its own, so the object, not its type, has an entry."""
    known = find(runtime_of(frame), ob)
    if known == 0:
        return -structs.STATUS_UNKNOWN_TYPE
    store(word, ob)
    return structs.entry_at(known).key


# ---- arrays ----------------------------------------------------------------------------------------------------------


@reader
def read_ndarray(ob, entry, frame, word, array):
    """An ndarray, read in its C struct."""
    ndarray = ndarray_at(ob)
    ndim = types.intp(ndarray.nd)
    dtype_key, itemsize = dtype_entry(runtime_of(frame), ndarray.descr)
    if dtype_key == 0:
        return -itemsize  # a STATUS_*
    if has_no_room(structs.frame_at(frame), word, structs.ARRAY_HEAD_WORDS + 2 * ndim):
        return -structs.STATUS_GROW
    note_array(array, ob + structs.ORIGIN_NDARRAY, word)
    pack_ndarray(ob, ndim, itemsize, as_words(word))
    return dtype_key | ndim << structs.NDIM_SHIFT | (types.intp(ndarray.flags) & structs.KEY_FLAGS) << structs.FLAGS_SHIFT


@native
def find_shown(frame_address, ob):
    """Find the export of a device array in its entry. Returns a STATUS_* and the four values that :func:`read_tensor` needs."""
    known = find(runtime_of(frame_address), ob)
    if known == 0:
        return structs.STATUS_STREAM, 0, True, 0, ob + structs.ORIGIN_VIEW
    managed = structs.entry_at(known).shown
    return (
        structs.STATUS_OK, managed + DL_TENSOR, is_writeable(managed_at(managed).flags, 0), 0, ob + structs.ORIGIN_VIEW
    )  # fmt: skip


@native
def take_export(frame_address, ob, entry):
    """Find the owning export that ``take_exports.export_managed`` has made. Returns as :func:`find_shown`."""
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    origin = ob + structs.ORIGIN_EXPORT
    if frame.exports_used == frame.export_count:
        return structs.STATUS_EXPORT, 0, True, 0, origin
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    frame.exports_used += 1
    managed = export.managed
    if export.object != ob:
        return structs.STATUS_CHANGED, 0, True, 0, origin
    if managed == 0:
        return structs.STATUS_EXPORT, 0, True, 0, origin
    guard = guard_of(context, structs.entry_at(entry))
    # The tensor may have become odd since its export. If PyTorch has to be asked, the guard always says odd.
    if structs.entry_at(entry).is_own_memory != 0 and is_odd(guard, ob) and structs.guard_at(guard).asks == 0:
        return (structs.STATUS_CHECK if frame.flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA), 0, True, 0, origin
    if managed_at(managed).version.major != 1:
        return structs.STATUS_VERSION, 0, True, 0, origin
    if context.device_type != CPU and export.is_interface != 0:
        note_stream(frame, load(managed + INTERFACE_STREAM))
    return structs.STATUS_OK, managed + DL_TENSOR, is_writeable(managed_at(managed).flags, guard), export.storage, origin


@native
def borrow_view(frame_address, ob, entry, view):
    """Borrow a view by the type's exchange table. Returns as :func:`find_shown`."""
    frame = structs.frame_at(frame_address)
    origin = ob + structs.ORIGIN_VIEW
    guard = guard_of(structs.context_at(frame.context), structs.entry_at(entry))
    if is_odd(guard, ob) or frame.flags & FLAG_MEMORY != 0 or structs.entry_at(entry).borrow == 0:
        return (structs.STATUS_CHECK if frame.flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA), 0, True, 0, origin
    device = dl_tensor_at(view).device
    device.device_type, device.device_id = 0, 0  # no device, in case the producer writes nothing
    failed = call_int(structs.entry_at(entry).borrow, (ob, view)) != 0
    if failed or PyErr_Occurred() != 0:
        if PyErr_Occurred() == 0:
            return structs.STATUS_NO_ERROR_SET, 0, True, 0, origin
        if guard != 0 and frame.flags & FLAG_ASKED == 0:
            c.PyErr_Clear()  # the tensor's own __dlpack__ raises a better error
            return structs.STATUS_CHECK, 0, True, 0, origin
        return structs.STATUS_ERROR, 0, True, 0, origin
    return structs.STATUS_OK, view, True, 0, origin


# ---- where a tensor is --------------------------------------------------------------------------------------------------


@native
def note_device(frame, device, number, stream):
    """Note the device of a tensor of a launch, and its producer's function ``current_work_stream``.

    Every device reads pinned and managed memory. Returns: a STATUS_*.
    """
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
    """Note the stream in an array's ``__cuda_array_interface__``, or 0."""
    if stream != 0:
        if frame.own_stream == 0:
            frame.own_stream = stream
        elif frame.own_stream != stream:
            frame.own_streams_differ = 1


@native
def is_writeable(flags, guard):
    """Whether a kernel may write to an export with these flags. PyTorch's tensors, which have a guard, are all mutable."""
    return flags & READONLY == 0 or (flags & READONLY_IS_ASSUMED != 0 and guard != 0)


@native
def read_in_memory(ob, entry, frame_address, word, array, origin):
    """A PyTorch tensor, read in its memory; no foreign code runs. Returns its key, or 0 if :data:`read_tensor` has to decide.

    That is so where memory is no source, or tells too little, and for every tensor that is odd, unsound or to be refused.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    guard = guard_of(context, structs.entry_at(entry))
    offsets = structs.guard_at(guard)
    if guard == 0 or is_odd_by(offsets, guard, ob) or not is_in_memory(offsets, ob):
        return 0
    field = field_in_memory(offsets, guard, ob)
    ndim = rank_in_memory(offsets, ob)
    if field - 1 >> 16 != 0 or ndim > MAX_NDIM:  # the field is 0, or has lanes
        return 0
    is_cuda = context.device_type != CPU
    if has_no_room(frame, word, structs.ARRAY_HEAD_WORDS + 2 * ndim) or (not is_cuda and not is_on_cpu(offsets, ob)):
        return 0
    words = as_words(word)
    view = view_in_memory(offsets, ob, ndim, field >> 11)
    if pack_contiguous(view, ndim, field >> 11, misaligned_bits(field), words):
        key_flags = flags_in_order(ndim, words[2]) | structs.ALIGNED
        end = words[4] + words[2] * words[3]
    else:
        key_flags, status = pack_tensor(view, ndim, field, words)
        if status != structs.STATUS_OK:
            return 0
        end = end_of_array(words, ndim)
    if words[2] == 0:
        put(words, 4, 0)  # as PyTorch exports it
    elif is_short_by(offsets, ob, end):
        return 0
    if is_cuda:
        device = device_in_memory(offsets, guard, ob)
        status = note_device(frame, device & 0xFF, device >> 8, structs.entry_at(entry).stream)
        if device == 0 or key_flags & structs.ALIGNED == 0 or status != structs.STATUS_OK:
            return 0
    note_array(array, ob + origin, word)
    key = structs.KIND_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT | structs.entry_at(entry).key
    return key | (key_flags | structs.WRITEABLE) << structs.FLAGS_SHIFT


@native
def read_held(ob, entry, frame_address, word, array):
    """:func:`read_in_memory` of a tensor whose storage the call holds instead of an export."""
    frame = structs.frame_at(frame_address)
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    if frame.exports_used == frame.export_count or export.state != structs.HOLDS_STORAGE or export.object != ob:
        return 0
    guard = structs.guard_at(guard_of(structs.context_at(frame.context), structs.entry_at(entry)))
    if is_of(guard, export.storage, ob) and (frame.flags & DRY_RUN != 0 or not is_movable(guard, export.storage)):
        key = read_in_memory(ob, entry, frame_address, word, array, structs.ORIGIN_EXPORT)
        if key != 0:
            frame.exports_used += 1
            return key
    export.state = structs.NEEDS_MANAGED
    return 0


@reader
def read_exchange(ob, entry, frame, word, array):
    """A tensor of a type with an exchange table. Its functions may run any code that does not need the interpreter."""
    if structs.frame_at(frame).is_owning != 0:
        key = read_held(ob, entry, frame, word, array)
    else:
        key = read_in_memory(ob, entry, frame, word, array, structs.ORIGIN_VIEW)
    return key if key != 0 else call_word(runtime_of(frame).read_tensor, (ob, entry, frame, word, array))


@reader
def read_tensor(ob, entry, frame_address, word, array):
    """A tensor: from a device array's entry, from an owning export made before, or from a view borrowed by the type's table.

    1. Find the tensor. 2. Check that it is sound, and on a device that the kernel reads. 3. Pack its words. 4. Check that its
    memory has not been freed, and cannot be freed during the call.
    """
    # 1. Find the tensor.
    view = stack(DL_TENSOR_WORDS)
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    is_cuda = context.device_type != CPU
    known = structs.entry_at(entry)
    kind = known.device_kind if is_cuda else known.kind
    guard = guard_of(context, known)
    if kind == structs.KIND_VIEW:
        status, tensor, writeable, storage, origin = find_shown(frame_address, ob)
    elif kind == structs.KIND_MANAGED or frame.is_owning != 0:
        status, tensor, writeable, storage, origin = take_export(frame_address, ob, entry)
    else:
        status, tensor, writeable, storage, origin = borrow_view(frame_address, ob, entry, view)
    if status != structs.STATUS_OK:
        return -status
    # 2. Check that it is sound.
    dl_tensor = dl_tensor_at(tensor)
    if is_cuda:
        status = check_rank(dl_tensor) if dl_tensor.dtype.lanes == 1 else structs.STATUS_DTYPE
        if status == structs.STATUS_OK:
            device = dl_tensor.device
            status = note_device(frame, types.intp(device.device_type), types.intp(device.device_id), known.stream)
    else:
        status = structs.STATUS_OK if is_plain(dl_tensor) else refusal(dl_tensor)
    if status != structs.STATUS_OK:
        keep_tensor(frame, tensor)
        return -status
    ndim = types.intp(dl_tensor.ndim)
    field = element_field(dl_tensor)
    if has_no_room(frame, word, structs.ARRAY_HEAD_WORDS + 2 * ndim):
        return -structs.STATUS_GROW
    # 3. Pack its words.
    key_flags, status = pack_tensor(dl_tensor, ndim, field, as_words(word))
    # 4. Check its memory.
    if status == structs.STATUS_OK and guard != 0 and not is_empty(dl_tensor):
        end = end_of(dl_tensor) if known.is_own_memory != 0 else 0
        if storage == 0:
            is_gone = is_short(guard, ob, end)
        else:
            begin = dl_tensor.data + types.intp(dl_tensor.byte_offset)
            is_gone = is_beyond(structs.guard_at(guard), storage, begin, end)
        if is_gone:
            status = structs.STATUS_NULL_DATA if storage == 0 else structs.STATUS_CHANGED
            if frame.flags & FLAG_ASKED == 0:
                status = structs.STATUS_CHECK
        elif frame.is_owning != 0 and not is_cuda:
            if storage == 0:
                status = structs.STATUS_NUMBA  # its dispatcher gets a view of a tensor that no other code has
            elif frame.flags & DRY_RUN == 0 and is_movable(structs.guard_at(guard), storage):
                status = structs.STATUS_MOVABLE
    if status == structs.STATUS_OK and is_cuda and key_flags & structs.ALIGNED == 0:
        status = structs.STATUS_MISALIGNED
    if status != structs.STATUS_OK:
        keep_tensor(frame, tensor)
        return -status
    if writeable:
        key_flags |= structs.WRITEABLE
    note_array(array, origin, word)
    key = structs.KIND_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT
    return key | key_flags << structs.FLAGS_SHIFT | known.key


READERS = {
    structs.KIND_FLOAT: read_float,
    structs.KIND_INT: read_int,
    structs.KIND_BOOL: read_bool,
    structs.KIND_COMPLEX: read_complex,
    structs.KIND_NUMPY_SCALAR: read_numpy_scalar,
    structs.KIND_NUMPY_COMPLEX64: read_numpy_complex64,
    structs.KIND_NUMPY_COMPLEX128: read_numpy_complex128,
    structs.KIND_STRING: read_string,
    structs.KIND_NONE: read_none,
    structs.KIND_OMITTED: read_omitted,
    structs.KIND_CONSTANT: read_constant,
    structs.KIND_NDARRAY: read_ndarray,
    structs.KIND_EXCHANGE: read_exchange,
    structs.KIND_MANAGED: read_tensor,
    structs.KIND_VIEW: read_tensor,
}
"""By the kind of a type's entry. Tuples and lists have none: their items have."""
