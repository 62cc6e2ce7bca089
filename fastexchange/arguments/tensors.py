"""Tensors that their producer shows: by a view borrowed from an exchange table, or by an owning export made before the call."""


import numpy as np
from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.frame import ARRAY_BYTES, EXPORT_BYTES
from ..dispatch.pack import flags_in_order, keep_tensor, misaligned_bits, pack_contiguous, pack_tensor
from ..dispatch.reading import FLAG_ASKED, FLAG_MEMORY, FLAG_OWNING, has_no_room, note_array, runtime_of
from ..dispatch.rows import TOGETHER, frequent, go_on, is_of_type, leave
from ..dispatch.type_table import find as find_entry
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    INTERFACE_STREAM,
    READONLY,
    View,
    check_rank,
    dl_tensor_at,
    element_field,
    is_nowhere,
    is_plain,
    managed_at,
    refusal,
)  # fmt: skip
from ..ground.native import as_words, call_int, global_address, load, native, stack, store, unlikely
from . import paddle
from .exchange_tables import OwnTable, own_table
from .kind import Discovery, Kind, reader

NO_FLAGS = np.uint64(0)

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


# ---- views and exports -----------------------------------------------------------------------------------------------


@native
def find_shown(frame_address, ob):
    """Find the export of a device array in its entry. Returns what :func:`find_tensor` does."""
    known = find_entry(runtime_of(frame_address), ob)
    origin = ob + structs.ORIGIN_VIEW
    if known == 0:
        return structs.STATUS_STREAM, 0, NO_FLAGS, origin
    managed = structs.entry_at(known).shown
    return structs.STATUS_OK, managed + DL_TENSOR, managed_at(managed).flags, origin


@native
def take_export(frame, ob):
    """Find the owning export that ``take_exports.export_managed`` has made. Returns what :func:`find_tensor` does."""
    origin = ob + structs.ORIGIN_EXPORT
    if frame.exports_used == frame.export_count:
        return structs.STATUS_EXPORT, 0, NO_FLAGS, origin
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    frame.exports_used += 1
    managed = export.managed
    if export.object != ob:
        return structs.STATUS_CHANGED, 0, NO_FLAGS, origin
    if managed == 0:
        return structs.STATUS_EXPORT, 0, NO_FLAGS, origin
    if managed_at(managed).version.major != 1:
        return structs.STATUS_VERSION, 0, NO_FLAGS, origin
    if export.is_interface != 0 and structs.context_at(frame.context).device_type != CPU:
        note_stream(frame, load(managed + INTERFACE_STREAM))
    return structs.STATUS_OK, managed + DL_TENSOR, managed_at(managed).flags, origin


@native
def borrow_view(frame, ob, entry, view):
    """Borrow a view by the type's exchange table. Returns what :func:`find_tensor` does."""
    origin = ob + structs.ORIGIN_VIEW
    if frame.flags & FLAG_MEMORY != 0 or structs.entry_at(entry).borrow == 0:
        return if_odd(frame), 0, NO_FLAGS, origin
    device = dl_tensor_at(view).device
    device.device_type, device.device_id = 0, 0  # no device, in case the producer writes nothing
    code = call_int(structs.entry_at(entry).borrow, (ob, view))
    if PyErr_Occurred() != 0:
        if not may_be_exported(entry, code):
            return structs.STATUS_ERROR, 0, NO_FLAGS, origin
        c.PyErr_Clear()
        frame.flags |= FLAG_OWNING
        return structs.STATUS_EXPORT, 0, NO_FLAGS, origin
    return structs.STATUS_NO_ERROR_SET if code != 0 else structs.STATUS_OK, view, NO_FLAGS, origin


@native
def may_be_exported(entry, code):
    """Whether a tensor whose view its producer has refused may have an owning export: that of a readonly one can say so.

    `code`: what the producer's function has returned. An exception is set.
    """
    is_refused = code == -1 and c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) != 0
    return is_refused and structs.entry_at(entry).managed != 0


@native
def if_odd(frame):
    """The STATUS_* for a tensor that is odd: its framework is asked, and then only Numba's dispatcher may take it."""
    return structs.STATUS_CHECK if frame.flags & FLAG_ASKED == 0 else structs.STATUS_NUMBA


@native
def find_tensor(frame_address, ob, entry, view):
    """Find a tensor in a device array's entry, in an owning export made before, or in a view borrowed by the type's table.

    `view`: where that is written. Returns: a STATUS_*, the address of the ``DLTensor``, its flags, and the array's origin.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    known = structs.entry_at(entry)
    if context.device_type != CPU and known.is_by_object != 0:
        return find_shown(frame_address, ob)
    if structs.kind_of(context, known).exports == structs.EXPORTS_ALWAYS or frame.is_owning != 0:
        return take_export(frame, ob)
    return borrow_view(frame, ob, entry, view)


@native
def pack_in_order(tensor, ndim, field, words):
    """:func:`pack_tensor` of a DLTensor with strides, in fewer steps. Returns False for one that those have to look at."""
    view = View(tensor.data, 0, ndim, tensor.shape, tensor.strides)
    is_packed = pack_contiguous(view, ndim, field >> 11, misaligned_bits(field), words)
    return is_packed and tensor.byte_offset == 0 and not is_nowhere(tensor)


@native
def pack_found(frame, entry, tensor, flags, origin, word, array):
    """Check that a tensor is sound, and where the kernel reads it, and pack its words. Returns its key, or -STATUS_*.

    `tensor`, `flags`, `origin`: as :func:`find_tensor` returns them.
    """
    known = structs.entry_at(entry)
    is_cuda = structs.context_at(frame.context).device_type != CPU
    dl_tensor = dl_tensor_at(tensor)
    key_flags = 0
    if is_cuda:
        status = check_rank(dl_tensor) if dl_tensor.dtype.lanes == 1 else structs.STATUS_DTYPE
        if status == structs.STATUS_OK:
            device = dl_tensor.device
            status = note_device(frame, types.intp(device.device_type), types.intp(device.device_id), known.stream)
    else:
        status = structs.STATUS_OK if is_plain(dl_tensor) else refusal(dl_tensor)
    ndim = types.intp(dl_tensor.ndim)
    field = element_field(dl_tensor)
    if status == structs.STATUS_OK:
        if has_no_room(frame, word, structs.ARRAY_HEAD_WORDS + 2 * ndim):
            return -structs.STATUS_GROW
        if dl_tensor.strides != 0 and pack_in_order(dl_tensor, ndim, field, as_words(word)):
            key_flags = flags_in_order(ndim, as_words(word)[2]) | structs.ALIGNED
        else:
            key_flags, status = pack_tensor(dl_tensor, ndim, field, as_words(word))
    if status == structs.STATUS_OK and is_cuda and key_flags & structs.ALIGNED == 0:
        status = structs.STATUS_MISALIGNED
    if status != structs.STATUS_OK:
        keep_tensor(frame, tensor)
        return -status
    if flags & READONLY == 0:
        key_flags |= structs.WRITEABLE
    note_array(array, origin, word)
    key = structs.KEY_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT
    return key | key_flags << structs.FLAGS_SHIFT | known.key


@reader
def read_tensor(ob, entry, frame, word, array):
    """A tensor that is what its export says, or its table."""
    view = stack(DL_TENSOR_WORDS)
    status, tensor, flags, origin = find_tensor(frame, ob, entry, view)
    if status != structs.STATUS_OK:
        return -status
    return pack_found(structs.frame_at(frame), entry, tensor, flags, origin, word, array)


@native
def read_row(tensor, writeable, origin, items, row_address, word, array_address, frame_address, rank):
    """Write the words of a value, a DLTensor, if it is as its row says, and go on. `rank`: of arrays in order, else -1."""
    row = structs.row_at(row_address)
    ndim = rank if rank > 0 else row.key >> structs.NDIM_SHIFT & 0xFF
    field = row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
    expected = row.key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS
    if not is_plain(tensor) or tensor.ndim != ndim or element_field(tensor) != field:
        return leave(row_address, frame_address, 0)
    words = as_words(word)
    if rank > 0 and tensor.strides != 0 and pack_in_order(tensor, ndim, field, words):
        flags = flags_in_order(ndim, words[2]) | structs.ALIGNED
    else:
        flags, status = pack_tensor(tensor, ndim, field, words)
        if status != structs.STATUS_OK:
            return leave(row_address, frame_address, 0)
    if flags | writeable != expected:
        return leave(row_address, frame_address, 0)
    here = structs.array_at(array_address)
    here.origin = origin
    store(word, here.meminfo)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame_address)


@frequent
def export_row(items, row_address, word, array_address, frame_address):
    """A tensor in the owning export that has been made of it."""
    ob = load(items)
    frame = structs.frame_at(frame_address)
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    is_made = frame.exports_used < frame.export_count and export.object == ob and export.managed != 0
    if not is_made or not is_of_type(ob, row_address):
        return leave(row_address, frame_address, 0)
    frame.exports_used += 1
    managed = managed_at(export.managed)
    if managed.version.major != 1:
        return leave(row_address, frame_address, 0)
    tensor, writeable = dl_tensor_at(export.managed + DL_TENSOR), structs.WRITEABLE if managed.flags & READONLY == 0 else 0
    return read_row(tensor, writeable, ob + structs.ORIGIN_EXPORT, items, row_address, word, array_address, frame_address, -1)


@native
def borrow_row(items, row_address, word, array_address, frame_address, rank):
    """A view borrowed by the type's exchange table. `rank`: as in :func:`read_row`."""
    ob = load(items)
    frame = structs.frame_at(frame_address)
    if not is_of_type(ob, row_address) or frame.is_owning != 0 or frame.flags & FLAG_MEMORY != 0:
        return leave(row_address, frame_address, 0)
    view = stack(DL_TENSOR_WORDS)
    tensor = dl_tensor_at(view)
    tensor.device.device_type, tensor.device.device_id = 0, 0
    entry = structs.row_at(row_address).entry
    code = call_int(structs.entry_at(entry).borrow, (ob, view))
    if unlikely(PyErr_Occurred() != 0):
        return leave(row_address, frame_address, 0 if may_be_exported(entry, code) else structs.STATUS_ERROR)
    if unlikely(code != 0):
        return leave(row_address, frame_address, structs.STATUS_NO_ERROR_SET)
    return read_row(
        tensor, structs.WRITEABLE, ob + structs.ORIGIN_VIEW, items, row_address, word, array_address, frame_address, rank
    )


def _borrow_row(rank):
    @cfunction(types.intp, *[types.intp] * 5, together=TOGETHER, constants=(rank,))
    def read_borrowed(items, row, word, array, frame):
        return borrow_row(items, row, word, array, frame, rank)

    return read_borrowed


_ANY_RANK, *_IN_ORDER = (_borrow_row(rank) for rank in (-1, 1, 2, 3, 4))
_BORROW_ROWS = (_ANY_RANK, *_IN_ORDER, *[_ANY_RANK] * 5)


@native
def borrowed_shape(entry, ob, shape, room):
    """Store a tensor's extents at `shape`, which has `room` words: see ``allocation.read_shape``."""
    view = stack(DL_TENSOR_WORDS)
    if entry.borrow == 0:
        return -1
    dl_tensor_at(view).device.device_type = 0
    failed = call_int(entry.borrow, (ob, view)) != 0
    if PyErr_Occurred() != 0:
        c.PyErr_Clear()
        return -1
    tensor = dl_tensor_at(view)
    ndim = types.intp(tensor.ndim)
    if failed or ndim > room or not is_plain(tensor):
        return -1
    for i in range(ndim):
        store(shape + 8 * i, load(tensor.shape + 8 * i))
    return ndim | element_field(tensor) << 8


@cfunction(types.intp, *[types.intp] * 5)
def read_borrowed_shape(context, entry, ob, shape, room):
    """The shape of a tensor with an exchange table."""
    return borrowed_shape(structs.entry_at(entry), ob, shape, room)


# ---- their kinds -----------------------------------------------------------------------------------------------------

PATH, MEANING = "c-exchange", "its type's exchange table gives its view"


def exported(path: str, meaning: str, form: int = structs.FORM_TENSOR, is_read_on_device: bool = True) -> Kind:
    """A kind of tensors of which each call takes an owning export, by the field ``managed`` of their types' entries."""

    return Kind(
        path, meaning, form, read_tensor, lambda fields: (export_row,), exports=structs.EXPORTS_ALWAYS,
        is_read_on_device=is_read_on_device,
    )  # fmt: skip


def borrowed(path: str, meaning: str, is_read_on_device: bool = True) -> Kind:
    """A kind of tensors of which a call borrows views, or takes owning exports if other code may run before it has returned.

    The entries of their types have the fields ``borrow``, a ``dltensor_from_py_object_no_sync``, and ``managed``, a
    ``managed_tensor_from_py_object_no_sync``: see DLPack's ``DLPackExchangeAPI``.
    """
    return Kind(
        path, meaning, structs.FORM_TENSOR, read_tensor, lambda fields: _BORROW_ROWS, exports=structs.EXPORTS_IF_OWNING,
        read_shape=read_borrowed_shape, is_read_on_device=is_read_on_device,
    )  # fmt: skip


EXPORTED, _BORROWED = exported(PATH, MEANING), borrowed(PATH, MEANING)


def functions_of(found: OwnTable) -> dict[str, int]:
    """The fields of an ``fx_entry`` that are functions of an exchange table."""
    fields = {
        "borrow": "dltensor_from_py_object_no_sync", "managed": "managed_tensor_from_py_object_no_sync",
        "to_object": "managed_tensor_to_py_object_no_sync", "allocator": "managed_tensor_allocator",
        "stream": "current_work_stream",
    }  # fmt: skip
    return {name: int(ffi.cast("intptr_t", getattr(found.table, function))) for name, function in fields.items()}


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """A type with an exchange table, own or inherited."""
    found = own_table(cls, notes)
    if found is None:
        return None
    fields = functions_of(found)
    if paddle.is_tensor_type(cls):
        fields["borrow"] = fields["borrow"] and paddle.dltensor_from_py_object_no_sync.address
        fields["managed"] = paddle.managed_tensor_from_py_object_no_sync.address
    if not fields["borrow"]:
        notes.append("its exchange table has no dltensor_from_py_object_no_sync: each call takes an owning export")
    elif hasattr(cls, "readonly"):  # the name of it in Python's buffers, too
        notes.append("it may be readonly, which a borrowed view cannot say: each call takes an owning export")
        fields["borrow"] = 0
    fields |= {"is_own_memory": int(bool(fields["borrow"])), "takes_all": int(not paddle.is_tensor_type(cls))}
    return Discovery(_BORROWED if fields["borrow"] else EXPORTED, fields, notes, found.capsule)
