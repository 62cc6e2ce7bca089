"""Tensors that their producer shows: by a view borrowed from an exchange table, or by an owning export made before the call."""

from typing import Any

from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.frame import ARRAY_BYTES, EXPORT_BYTES
from ..dispatch.pack import keep_tensor, pack_tensor
from ..dispatch.reading import DRY_RUN, FLAG_ASKED, FLAG_MEMORY, has_no_room, note_array, runtime_of
from ..dispatch.rows import frequent, go_on, is_of_type, leave
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
from ..ground.native import as_words, call_int, load, native, stack, store
from ..torch.guard import guard_of, is_odd, is_short
from ..torch.queries import is_beyond, is_movable
from . import paddle
from .kind import Discovery, Kind, reader
from .tables import OwnTable, own_table

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
def is_writeable(flags, guard):
    """Whether a kernel may write to an export with these flags. PyTorch's tensors, which have a guard, are all mutable."""
    return flags & READONLY == 0 or (flags & READONLY_IS_ASSUMED != 0 and guard != 0)


@native
def find_shown(frame_address, ob):
    """Find the export of a device array in its entry. Returns a STATUS_* and the four values that :func:`read_tensor` needs."""
    known = find_entry(runtime_of(frame_address), ob)
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
    return (
        structs.STATUS_OK,
        managed + DL_TENSOR,
        is_writeable(managed_at(managed).flags, guard),
        export.storage,
        origin,
    )


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
    guard = guard_of(context, known)
    if is_cuda and known.is_by_object != 0:
        status, tensor, writeable, storage, origin = find_shown(frame_address, ob)
    elif structs.kind_of(context, known).exports == structs.EXPORTS_ALWAYS or frame.is_owning != 0:
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
    key = structs.KEY_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT
    return key | key_flags << structs.FLAGS_SHIFT | known.key


@frequent
def export_row(items, row_address, word, array_address, frame_address):
    """A tensor that is not PyTorch's, in the owning export that has been made of it."""
    ob = load(items)
    row = structs.row_at(row_address)
    frame = structs.frame_at(frame_address)
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    is_made = frame.exports_used < frame.export_count and export.object == ob and export.managed != 0
    if not is_made or not is_of_type(ob, row_address):
        return leave(row_address, frame_address, 0)
    frame.exports_used += 1
    managed = managed_at(export.managed)
    tensor = dl_tensor_at(export.managed + DL_TENSOR)
    ndim = row.key >> structs.NDIM_SHIFT & 0xFF
    field = row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
    if managed.version.major != 1 or not is_plain(tensor) or tensor.ndim != ndim or element_field(tensor) != field:
        return leave(row_address, frame_address, 0)
    flags, status = pack_tensor(tensor, ndim, field, as_words(word))
    flags |= structs.WRITEABLE if managed.flags & READONLY == 0 else 0
    if status != structs.STATUS_OK or flags != row.key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS:
        return leave(row_address, frame_address, 0)
    here = structs.array_at(array_address)
    here.origin = ob + structs.ORIGIN_EXPORT
    store(word, here.meminfo)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame_address)


@native
def borrowed_shape(entry, ob, shape, room):
    """Store a tensor's extents at `shape`, which has `room` words: see ``outputs.read_shape``."""
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

    def row_readers(fields: dict[str, Any]):
        return () if fields.get("guard") else (export_row,)  # an export of PyTorch's tensor is checked again

    return Kind(
        path, meaning, form, read_tensor, row_readers, exports=structs.EXPORTS_ALWAYS, is_read_on_device=is_read_on_device
    )  # fmt: skip


def borrowed(path: str, meaning: str, is_read_on_device: bool = True) -> Kind:
    """A kind of tensors of which a call borrows views, or takes owning exports if other code may run before it has returned.

    The entries of their types have the fields ``borrow``, a ``dltensor_from_py_object_no_sync``, and ``managed``, a
    ``managed_tensor_from_py_object_no_sync``: see DLPack's ``DLPackExchangeAPI``.
    """
    return Kind(
        path, meaning, structs.FORM_TENSOR, read_tensor, exports=structs.EXPORTS_IF_OWNING, read_shape=read_borrowed_shape,
        is_read_on_device=is_read_on_device,
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
