"""The readers of arguments: one for each kind, all with one signature.

A reader gets the call's :data:`Reading`, the object, the address of its type's ``fx_entry``, and the address of its first word.
It writes the words. It returns a STATUS_*, the key, the number of bytes written, and for an array its origin, else 0.

Readers are inlined into the loop over the arguments, ``read_arguments.read_arguments``, once for the CPU and once for devices.
"""

from collections import namedtuple

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT, DLDeviceType, field_of_type
from ..ground.dltensor import (
    DL_TENSOR,
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
from ..ground.native import as_words, call_int, global_address, load, native, put, smaller, store
from ..producers.ndarray import ndarray_at
from . import strings, structs
from .frame import ARRAY_BYTES, EXPORT_BYTES
from .pack import end_of_array, flags_in_order, keep_tensor, misaligned_bits, pack_contiguous, pack_ndarray, pack_tensor
from .torch_guard import (
    device_in_memory,
    end_of_storage,
    field_in_memory,
    guard_of,
    is_in_memory,
    is_odd,
    is_odd_by,
    is_of,
    is_on_cpu,
    is_short,
    is_short_by,
    number_in_memory,
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


Reading = namedtuple("Reading", "context runtime frame flags is_cuda limit exports scratch")  # for Numba
"""The call's data for its readers.

``limit``: the end of the frame's words. ``exports``: the number of owning exports used so far. ``scratch``: a word for C
functions.
"""


@native
def is_owning(context, flags):
    """Whether a call needs owning exports of all its tensors: not if they are only read in memory, where the caller owns them."""
    return context.needs_owning_exports != 0 and flags & FLAG_MEMORY == 0


# ---- scalars ---------------------------------------------------------------------------------------------------------


@native
def read_float(reading, ob, entry, word):
    """A Python float."""
    store(word, load(ob + OB_FVAL))
    return structs.STATUS_OK, SCALAR_FLOAT64, 8, 0


@native
def read_int(reading, ob, entry, word):
    """A Python int: an int64, or a uint64 if it is too large."""
    scratch = reading.scratch
    value = c.PyLong_AsLongLongAndOverflow(ob, scratch)
    key = SCALAR_INT64
    status = structs.STATUS_OK
    if value == -1 and load(scratch) & 0xFFFFFFFF != 0:
        value = types.int64(c.PyLong_AsUnsignedLongLong(ob))
        key = SCALAR_UINT64
        if value == -1 and PyErr_Occurred() != 0:
            c.PyErr_Clear()
            status = structs.STATUS_BIG_INT
    store(word, value)
    return status, key, 8, 0


@native
def read_bool(reading, ob, entry, word):
    """A Python bool."""
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return structs.STATUS_OK, SCALAR_BOOL, 8, 0


@native
def read_complex(reading, ob, entry, word):
    """A Python complex number."""
    store(word, load(ob + OB_FVAL))
    store(word + 8, load(ob + OB_FVAL + 8))
    return structs.STATUS_OK, SCALAR_COMPLEX128, 16, 0


@native
def read_numpy_scalar(reading, ob, entry, word):
    """A NumPy scalar of at most 8 bytes. The rest of its word is undefined."""
    store(word, load(ob + SCALAR_VALUE))
    return structs.STATUS_OK, structs.entry_at(entry).key, 8, 0


@native
def read_numpy_complex64(reading, ob, entry, word):
    """A ``numpy.complex64``: each part is a word."""
    value = load(ob + SCALAR_VALUE)
    store(word, value & 0xFFFFFFFF)
    store(word + 8, (value >> 32) & 0xFFFFFFFF)
    return structs.STATUS_OK, structs.entry_at(entry).key, 16, 0


@native
def read_numpy_complex128(reading, ob, entry, word):
    """A ``numpy.complex128``."""
    store(word, load(ob + SCALAR_VALUE))
    store(word + 8, load(ob + SCALAR_VALUE + 8))
    return structs.STATUS_OK, structs.entry_at(entry).key, 16, 0


@native
def read_string(reading, ob, entry, word):
    """A str."""
    size = 8 * strings.WORDS
    if word + size > reading.limit:
        return structs.STATUS_GROW, 0, 0, 0
    status = structs.STATUS_OK if strings.read_characters(ob, word) else structs.STATUS_ERROR
    return status, structs.KIND_STRING, size, ob + structs.ORIGIN_STRING


@native
def read_none(reading, ob, entry, word):
    """``None``, for which Numba passes its address."""
    store(word, ob)
    return structs.STATUS_OK, structs.KIND_NONE, 8, 0


@native
def read_omitted(reading, ob, entry, word):
    """An omitted argument, whose default is compiled into the kernel."""
    return structs.STATUS_OK, structs.KIND_OMITTED, 0, 0


@native
def read_constant(reading, ob, entry, word):
    """A jitted function. It has a Numba type of its own, so the object, not its type, has an entry."""
    known = find(reading.runtime, ob)
    if known == 0:
        return structs.STATUS_UNKNOWN_TYPE, 0, 0, 0
    store(word, ob)
    return structs.STATUS_OK, structs.entry_at(known).key, 8, 0


# ---- arrays ----------------------------------------------------------------------------------------------------------


@native
def read_ndarray(reading, ob, dtype_key, itemsize, word):
    """An ndarray, read in its C struct. `dtype_key`: of its dtype."""
    ndim = types.intp(ndarray_at(ob).nd)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    if word + size > reading.limit:
        return structs.STATUS_GROW, 0, 0, 0
    key_flags = types.intp(ndarray_at(ob).flags) & structs.KEY_FLAGS
    pack_ndarray(ob, ndim, itemsize, as_words(word))
    key = dtype_key | ndim << structs.NDIM_SHIFT | key_flags << structs.FLAGS_SHIFT
    return structs.STATUS_OK, key, size, ob + structs.ORIGIN_NDARRAY


@native
def find_shown(reading, ob, entry, view):
    """Find the export of a device array in its entry. Returns a STATUS_* and the four values that :func:`read_tensor` needs."""
    known = find(reading.runtime, ob)
    if known == 0:
        return structs.STATUS_STREAM, 0, True, 0, ob + structs.ORIGIN_VIEW
    managed = structs.entry_at(known).shown
    return (
        structs.STATUS_OK, managed + DL_TENSOR, is_writeable(managed_at(managed).flags, 0), 0, ob + structs.ORIGIN_VIEW
    )  # fmt: skip


@native
def take_export(reading, ob, entry, view):
    """Find the owning export that ``take_exports.export_managed`` has made. Returns as :func:`find_shown`."""
    origin = ob + structs.ORIGIN_EXPORT
    if reading.exports == reading.frame.export_count:
        return structs.STATUS_EXPORT, 0, True, 0, origin
    export = structs.export_at(reading.frame.exports + EXPORT_BYTES * reading.exports)
    managed = export.managed
    if export.object != ob:
        return structs.STATUS_CHANGED, 0, True, 0, origin
    if managed == 0:
        return structs.STATUS_EXPORT, 0, True, 0, origin
    guard = guard_of(reading.context, structs.entry_at(entry))
    # The tensor may have become odd since its export. If PyTorch has to be asked, the guard always says odd.
    if structs.entry_at(entry).is_own_memory != 0 and is_odd(guard, ob) and structs.guard_at(guard).asks == 0:
        return (structs.STATUS_CHECK if reading.flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA), 0, True, 0, origin
    if managed_at(managed).version.major != 1:
        return structs.STATUS_VERSION, 0, True, 0, origin
    if reading.is_cuda and export.is_interface != 0:
        note_stream(reading.frame, load(managed + INTERFACE_STREAM))
    return structs.STATUS_OK, managed + DL_TENSOR, is_writeable(managed_at(managed).flags, guard), export.storage, origin


@native
def borrow_view(reading, ob, entry, view):
    """Borrow a view by the type's exchange table, or PyTorch's C ABI. Returns as :func:`find_shown`."""
    origin = ob + structs.ORIGIN_VIEW
    guard = guard_of(reading.context, structs.entry_at(entry))
    if is_odd(guard, ob) or reading.flags & FLAG_MEMORY != 0:
        return (structs.STATUS_CHECK if reading.flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA), 0, True, 0, origin
    device = dl_tensor_at(view).device
    device.device_type, device.device_id = 0, 0  # no device, in case the producer writes nothing
    failed = call_int(structs.entry_at(entry).borrow, (ob, view)) != 0
    if failed or PyErr_Occurred() != 0:
        if PyErr_Occurred() == 0:
            return structs.STATUS_NO_ERROR_SET, 0, True, 0, origin
        if guard != 0 and reading.flags & FLAG_ASKED == 0:
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
def read_in_memory(reading, ob, entry, word):
    """A PyTorch tensor, read in its memory; no foreign code runs. The number of bytes is 0 if :func:`read_tensor` has to decide.

    That is so where memory is no source, or tells too little, and for every tensor that is odd, unsound or to be refused.
    """
    guard = guard_of(reading.context, structs.entry_at(entry))
    offsets = structs.guard_at(guard)
    if guard == 0 or offsets.ndim == 0 or is_odd_by(offsets, guard, ob) or not is_in_memory(offsets, ob):
        return structs.STATUS_OK, 0, 0, 0
    field = field_in_memory(offsets, guard, ob)
    ndim = rank_in_memory(offsets, ob)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    if field - 1 >> 16 != 0 or ndim > MAX_NDIM or word + size > reading.limit:  # the field is 0, or has lanes
        return structs.STATUS_OK, 0, 0, 0
    if not reading.is_cuda and not is_on_cpu(offsets, ob):
        return structs.STATUS_OK, 0, 0, 0
    words = as_words(word)
    view = view_in_memory(offsets, ob, ndim, field >> 11)
    if pack_contiguous(view, True, ndim, field >> 11, misaligned_bits(field), words, False):
        key_flags = flags_in_order(ndim, words[2]) | structs.ALIGNED
        end = words[4] + words[2] * words[3]
    else:
        key_flags, status = pack_tensor(view, ndim, field, words)
        if status != structs.STATUS_OK:
            return structs.STATUS_OK, 0, 0, 0
        end = end_of_array(words, ndim)
    if words[2] == 0:
        put(words, 4, 0)  # as PyTorch exports it
    elif is_short_by(offsets, ob, end):
        return structs.STATUS_OK, 0, 0, 0
    if reading.is_cuda:
        device = device_in_memory(offsets, guard, ob)
        status = note_device(reading.frame, device & 0xFF, device >> 8, structs.entry_at(entry).stream)
        if device == 0 or key_flags & structs.ALIGNED == 0 or status != structs.STATUS_OK:
            return structs.STATUS_OK, 0, 0, 0
    key = structs.KIND_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT | structs.entry_at(entry).key
    return structs.STATUS_OK, key | (key_flags | structs.WRITEABLE) << structs.FLAGS_SHIFT, size, ob + structs.ORIGIN_VIEW


@native
def note_array(array_address, origin, word):
    """Note an array argument's origin, which owns its memory, and its first word, which gets the memory block."""
    array = structs.array_at(array_address)
    array.origin = origin
    store(word, array.meminfo)


@cfunction(types.intp, *[types.intp] * 8)
def read_alike(guard, items, count, key, word, limit, key_at, array_address):
    """Read up to `count` PyTorch tensors at `items` as :func:`read_in_memory` does. It has read the one before, with this `key`.

    Tensors with one type, dtype and rank often follow each other in a list or in ``*args``. This loop has few values, so they are
    in registers: half the time of the loop over all kinds of arguments.

    Returns: how many it has read. The next one, if any, differs: in its key, in being odd or unsound, in not being in C order.
    """
    offsets = structs.guard_at(guard)
    first = load(items - 8)
    ob_type = Py_TYPE(first)
    number = number_in_memory(offsets, first)
    field = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
    ndim = key >> structs.NDIM_SHIFT & 0xFF
    itemsize = field >> 11
    misaligned = misaligned_bits(field)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    if key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS != flags_in_order(ndim, 1) | structs.ALIGNED | structs.WRITEABLE:
        return 0
    count = smaller(count, (limit - word) // size)  # `limit`: the end of the room for words
    for i in range(count):
        ob = load(items + 8 * i)
        if Py_TYPE(ob) != ob_type or is_odd_by(offsets, guard, ob) or not is_in_memory(offsets, ob):
            return i
        if number_in_memory(offsets, ob) != number or rank_in_memory(offsets, ob) != ndim or not is_on_cpu(offsets, ob):
            return i
        words = as_words(word)
        view = view_in_memory(offsets, ob, ndim, itemsize)
        end = end_of_storage(offsets, ob)  # before words are stored, after which all is loaded again
        if not pack_contiguous(view, True, ndim, itemsize, misaligned, words, False) or words[2] == 0:
            return i
        if words[4] + words[2] * itemsize > end:
            return i
        note_array(array_address, ob + structs.ORIGIN_VIEW, word)
        store(key_at + 8 * i, key)
        word += size
        array_address += ARRAY_BYTES
    return count


@native
def read_held(reading, ob, entry, word):
    """:func:`read_in_memory` of a tensor whose storage the call holds instead of an export. If not, the number of bytes is 0."""
    export = structs.export_at(reading.frame.exports + EXPORT_BYTES * reading.exports)
    if reading.exports == reading.frame.export_count or export.state != structs.HOLDS_STORAGE or export.object != ob:
        return structs.STATUS_OK, 0, 0, 0
    guard = structs.guard_at(guard_of(reading.context, structs.entry_at(entry)))
    if is_of(guard, export.storage, ob) and (reading.flags & DRY_RUN != 0 or not is_movable(guard, export.storage)):
        status, key, size, _ = read_in_memory(reading, ob, entry, word)
        if size != 0:
            return status, key, size, ob + structs.ORIGIN_EXPORT
    export.state = structs.NEEDS_MANAGED
    return structs.STATUS_OK, 0, 0, 0


@native
def read_tensor(reading, kind, ob, entry, view, word):
    """A tensor: from a device array's entry, from an owning export made before, or from a view borrowed at `view`.

    1. Find the tensor. 2. Check that it is sound, and on a device that the kernel reads. 3. Pack its words. 4. Check that its
    memory has not been freed, and cannot be freed during the call.
    """
    # 1. Read the entry before foreign code runs, which may move the entry. Then find the tensor.
    class_key = structs.entry_at(entry).key
    is_own_memory = structs.entry_at(entry).is_own_memory != 0
    guard = guard_of(reading.context, structs.entry_at(entry))
    stream = structs.entry_at(entry).stream
    needs_owning_exports = is_owning(reading.context, reading.flags)
    if kind == structs.KIND_VIEW:
        status, tensor, writeable, storage, origin = find_shown(reading, ob, entry, view)
    elif kind == structs.KIND_MANAGED or needs_owning_exports:
        status, tensor, writeable, storage, origin = take_export(reading, ob, entry, view)
    else:
        status, tensor, writeable, storage, origin = borrow_view(reading, ob, entry, view)
    if status != structs.STATUS_OK:
        return status, 0, 0, 0
    # 2. Check that it is sound.
    dl_tensor = dl_tensor_at(tensor)
    if reading.is_cuda:
        status = check_rank(dl_tensor) if dl_tensor.dtype.lanes == 1 else structs.STATUS_DTYPE
        if status == structs.STATUS_OK:
            device = dl_tensor.device
            status = note_device(reading.frame, types.intp(device.device_type), types.intp(device.device_id), stream)
    else:
        status = structs.STATUS_OK if is_plain(dl_tensor) else refusal(dl_tensor)
    if status != structs.STATUS_OK:
        keep_tensor(reading.frame, tensor)
        return status, 0, 0, 0
    ndim = types.intp(dl_tensor.ndim)
    field = element_field(dl_tensor)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    if word + size > reading.limit:
        return structs.STATUS_GROW, 0, 0, 0
    # 3. Pack its words.
    key_flags, status = pack_tensor(dl_tensor, ndim, field, as_words(word))
    # 4. Check its memory.
    if status == structs.STATUS_OK and guard != 0 and not is_empty(dl_tensor):
        end = end_of(dl_tensor) if is_own_memory else 0
        if storage == 0:
            is_gone = is_short(guard, ob, end)
        else:
            begin = dl_tensor.data + types.intp(dl_tensor.byte_offset)
            is_gone = is_beyond(structs.guard_at(guard), storage, begin, end)
        if is_gone:
            status = structs.STATUS_NULL_DATA if storage == 0 else structs.STATUS_CHANGED
            if reading.flags & FLAG_ASKED == 0:
                status = structs.STATUS_CHECK
        elif needs_owning_exports and not reading.is_cuda:
            if storage == 0:
                status = structs.STATUS_NUMBA  # its dispatcher gets a view of a tensor that no other code has
            elif reading.flags & DRY_RUN == 0 and is_movable(structs.guard_at(guard), storage):
                status = structs.STATUS_MOVABLE
    if status == structs.STATUS_OK and reading.is_cuda and key_flags & structs.ALIGNED == 0:
        status = structs.STATUS_MISALIGNED
    if status != structs.STATUS_OK:
        keep_tensor(reading.frame, tensor)
        return status, 0, 0, 0
    if writeable:
        key_flags |= structs.WRITEABLE
    key = structs.KIND_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT
    return structs.STATUS_OK, key | key_flags << structs.FLAGS_SHIFT | class_key, size, origin
