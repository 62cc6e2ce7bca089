"""PyTorch's tensors, read in memory where their layout is known and verified."""

import functools
from typing import Any

from numba import types

from .._abi import ffi
from ..arguments.dunder import DUNDER
from ..arguments.exchange_tables import EXCHANGE_ATTRIBUTE, is_wrapper, is_wrapper_type, own_table
from ..arguments.kind import MEANINGS, OTHER, Discovery, Kind, reader
from ..arguments.tensors import (
    MEANING,
    PATH,
    borrowed_shape,
    find_tensor,
    functions_of,
    if_odd,
    note_device,
    pack_found,
)
from ..dispatch import structs
from ..dispatch.allocation import DEVICE_SHIFT
from ..dispatch.frame import ARRAY_BYTES, EXPORT_BYTES
from ..dispatch.owning_exports import HOLDING, NATIVELY
from ..dispatch.pack import (
    end_of_array,
    flags_in_order,
    keep_tensor,
    misaligned_bits,
    pack_contiguous,
    pack_scattered,
    pack_tensor,
)
from ..dispatch.reading import DRY_RUN, FLAG_ASKED, has_no_room, note_array
from ..dispatch.rows import SCRATCH, frequent, go_on, is_of_type, leave
from ..dispatch.runtime import runtime
from ..ground import cpython as c
from ..ground.cfunction import CFunction, Library, cfunction
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR_WORDS, MAX_NDIM
from ..ground.native import as_words, call_word, load, native, put, stack, store, unlikely
from . import capsule, checks, modes, offsets, storage_exports
from .guard import (
    OFFSETS,
    Offsets,
    device_in_memory,
    field_in_memory,
    guard_at,
    guard_of,
    is_in_memory,
    is_odd,
    is_odd_by,
    is_of,
    is_on_cpu,
    is_short,
    is_short_by,
    is_surely_unwatched,
    is_watched,
    number_in_memory,
    rank_in_memory,
    shape_in_memory,
    view_in_memory,
)
from .queries import is_beyond, is_movable

ITEMSIZE_SHIFT, ITEMSIZE_MASK = structs.DTYPE_SHIFT + 11, 31  # of the key of a tensor that is read in memory


@native
def read_in_memory(ob, entry, frame_address, word, array, origin):
    """A PyTorch tensor, read in its memory; no foreign code runs. Returns its key, or 0 if :data:`read_shown` has to decide.

    That is so where memory is no source, or tells too little, and for every tensor that is odd, unsound or to be refused.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    guard = guard_of(context, structs.entry_at(entry))
    offsets = guard_at(guard)
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
    key = structs.KEY_ARRAY | field << structs.DTYPE_SHIFT | ndim << structs.NDIM_SHIFT | structs.entry_at(entry).key
    return key | (key_flags | structs.WRITEABLE) << structs.FLAGS_SHIFT


@native
def read_held(ob, entry, frame_address, word, array):
    """:func:`read_in_memory` of a tensor whose storage the call holds instead of an export."""
    frame = structs.frame_at(frame_address)
    export = structs.export_at(frame.exports + EXPORT_BYTES * frame.exports_used)
    if frame.exports_used == frame.export_count or export.state != structs.HOLDS_STORAGE or export.object != ob:
        return 0
    guard = guard_at(guard_of(structs.context_at(frame.context), structs.entry_at(entry)))
    if is_of(guard, export.storage, ob) and (frame.flags & DRY_RUN != 0 or not is_movable(guard, export.storage)):
        key = read_in_memory(ob, entry, frame_address, word, array, structs.ORIGIN_EXPORT)
        if key != 0:
            frame.exports_used += 1
            return key
    export.state = structs.NEEDS_MANAGED
    return 0


@reader
def read_shown(ob, entry, frame_address, word, array):
    """A tensor by its owning export, or its table: 1. Check that it is not odd. 2. Read it. 3. Check that its memory is there."""
    frame = structs.frame_at(frame_address)
    context, known = structs.context_at(frame.context), structs.entry_at(entry)
    address = guard_of(context, known)
    guard = guard_at(address)
    # 1. If PyTorch has to be asked, the guard always says odd.
    if known.is_own_memory != 0 and guard.asks == 0 and is_odd(address, ob):
        return -if_odd(frame)
    # 2. Read it.
    view = stack(DL_TENSOR_WORDS)
    status, tensor, flags, origin = find_tensor(frame_address, ob, entry, view)
    is_export = origin & 3 == structs.ORIGIN_EXPORT
    if status != structs.STATUS_OK:
        if status == structs.STATUS_ERROR and not is_export and frame.flags & FLAG_ASKED == 0:
            c.PyErr_Clear()  # the tensor's own __dlpack__ raises a better error
            status = structs.STATUS_CHECK
        return -status
    key = pack_found(frame, entry, tensor, flags, origin, word, array)
    words = as_words(word)
    if key < 0 or words[2] == 0:
        return key
    # 3. Check that its memory is there.
    storage = structs.export_at(frame.exports + EXPORT_BYTES * (frame.exports_used - 1)).storage if is_export else 0
    end = end_of_array(words, key >> structs.NDIM_SHIFT & 0xFF) if known.is_own_memory != 0 else 0
    if is_short(address, ob, end) if storage == 0 else is_beyond(guard, storage, words[4], end):
        status = structs.STATUS_NULL_DATA if storage == 0 else structs.STATUS_CHANGED
        if frame.flags & FLAG_ASKED == 0:
            status = structs.STATUS_CHECK
    elif frame.is_owning != 0 and context.device_type == CPU:
        if storage == 0:
            status = structs.STATUS_NUMBA  # its dispatcher gets a view of a tensor that no other code has
        elif frame.flags & DRY_RUN == 0 and is_movable(guard, storage):
            status = structs.STATUS_MOVABLE
    if status != structs.STATUS_OK:
        keep_tensor(frame, tensor)
        return -status
    return key


@reader
def read_torch(ob, entry, frame, word, array):
    """A tensor of PyTorch."""
    if structs.frame_at(frame).is_owning != 0:
        key = read_held(ob, entry, frame, word, array)
    else:
        key = read_in_memory(ob, entry, frame, word, array, structs.ORIGIN_VIEW)
    if key != 0:
        return key
    guard = guard_at(guard_of(structs.context_at(structs.frame_at(frame).context), structs.entry_at(entry)))
    return call_word(guard.read_shown, (ob, entry, frame, word, array))


# ---- cached calls ----------------------------------------------------------------------------------------------------


@native
def is_checked(ob, offsets, implementation, frame):
    """Whether :data:`check_tensor` need not check a tensor: it just has, or autograd surely does not track the tensor."""
    known = load(implementation + offsets.autograd)
    if unlikely(known != 0) and not is_surely_unwatched(offsets, known):
        checked = load(frame + SCRATCH)
        store(frame + SCRATCH, 0)
        return checked == ob
    return True


@native
def tensor_of(items, row_address, word, array_address, frame, rank, in_order, offsets):
    """A PyTorch tensor on the CPU, read in memory. `rank`: as for :func:`ndarrays.ndarray_of`.

    `in_order`: whether its key says that it is C-contiguous, aligned and writable. `offsets`: :data:`guard.Offsets`.

    `expected`: the kernel's ``fx_guard``, PyTorch's number of the dtype, and the bits of an address that are 0 if an element is
    aligned. The dtype is not odd: the tensor for which the row was made had the same.
    """
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    implementation = load(ob + offsets.object)
    if load(implementation + offsets.keys) & guard_at(row.expected[0]).odd_keys != 0:
        return leave(row_address, frame, 0)
    if not is_checked(ob, offsets, implementation, frame):
        return call_word(guard_at(row.expected[0]).check_tensor, (items, row_address, word, array_address, frame))
    ndim = rank if rank >= 0 else row.key >> structs.NDIM_SHIFT & 0xFF
    if not is_in_memory(offsets, ob) or not is_on_cpu(offsets, ob):
        return leave(row_address, frame, 0)
    if number_in_memory(offsets, ob) != row.expected[1] or rank_in_memory(offsets, ob) != ndim:
        return leave(row_address, frame, 0)
    itemsize = row.key >> ITEMSIZE_SHIFT & ITEMSIZE_MASK
    words = as_words(word)
    view = view_in_memory(offsets, ob, ndim, itemsize)
    here = structs.array_at(array_address)
    here.origin = ob + structs.ORIGIN_VIEW
    store(word, here.meminfo)
    if in_order:
        agrees = pack_contiguous(view, ndim, itemsize, row.expected[2], words)
        end = words[4] + words[2] * words[3]
    else:
        flags = pack_scattered(view, ndim, itemsize, row.expected[2], words)
        agrees = flags | structs.WRITEABLE == row.key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS
        end = end_of_array(words, ndim)
    if not agrees:
        return leave(row_address, frame, 0)
    if words[2] == 0:
        put(words, 4, 0)  # as PyTorch exports it
    elif is_short_by(offsets, ob, end):
        return leave(row_address, frame, 0)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame)


@frequent
def check_tensor(items, row_address, word, array, frame):
    """Leave the call if autograd tracks a tensor; else read it by its row's reader, for which it is noted."""
    row = structs.row_at(row_address)
    ob = load(items)
    guard = guard_at(row.expected[0])
    if guard.autograd != 0 and is_watched(guard, load(load(ob + guard.object) + guard.autograd)):
        return leave(row_address, frame, 0)
    store(frame + SCRATCH, ob)
    return call_word(row.reader, (items, row_address, word, array, frame))


@functools.cache
def row_readers(offsets: Offsets) -> tuple[CFunction, ...]:
    """The row readers of tensors with these offsets, which are constants in their code: loading them takes time."""

    together = Library()

    def reader(rank, in_order):
        @cfunction(types.intp, *[types.intp] * 5, together=together, constants=(rank, in_order, *offsets))
        def read_tensor(items, row, word, array, frame):
            return tensor_of(items, row, word, array, frame, rank, in_order, offsets)

        return read_tensor

    in_order, others = [reader(rank, True) for rank in (-1, 1, 2, 3, 4)], [reader(rank, False) for rank in (-1, 2)]
    return (*in_order, others[0], others[0], others[1], others[0], others[0])


_SHIPPED = row_readers(Offsets(
    object=16, keys=168, element_type=160, autograd=24, storage=16, storage_data=16, storage_size=48, ndim=56, sizes=64,
    strides=104, inline_ndim=5, storage_offset=144, device=162, storage_checked=59, tangent=64, requires_grad=128, grad_fn=48,
    is_view=130, has_base=232, base=184,
))  # fmt: skip
"""Those of PyTorch 2.13 and 2.14 on 64-bit machines, which come with the package.

Those for other offsets are compiled where PyTorch has them.
"""


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fill_tensor_row(context_address, row_address, ob):
    """See :func:`tensor_of`. A call that needs owning exports reads no tensor so."""
    context = structs.context_at(context_address)
    row = structs.row_at(row_address)
    if context.needs_owning_exports != 0:
        row.reader = 0
    elif row.reader != 0:
        guard = guard_of(context, structs.entry_at(row.entry))
        field = row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
        if field_in_memory(guard_at(guard), guard, ob) != field:
            return 0
        row.expected[0], row.expected[1] = guard, number_in_memory(guard_at(guard), ob)
        row.expected[2] = misaligned_bits(field)
    return 1


@cfunction(types.intp, types.intp, types.intp)
def mark_tensor(entry, ob):
    """The dtype and the rank of a tensor."""
    guard = guard_at(structs.entry_at(entry).guard)
    implementation = load(ob + guard.object)
    ndim = load(implementation + guard.ndim) if guard.ndim != 0 else 0
    return (load(implementation + guard.element_type) & 63) << 32 ^ ndim << 40


@cfunction(types.intp, *[types.intp] * 5)
def read_tensor_shape(context_address, entry, ob, shape, room):
    """The shape of a tensor that is not odd: see ``allocation.read_shape``."""
    context = structs.context_at(context_address)
    guard = guard_of(context, structs.entry_at(entry))
    if is_odd(guard, ob):
        return -1
    if not is_in_memory(guard_at(guard), ob):
        return borrowed_shape(structs.entry_at(entry), ob, shape, room)
    ndim, field, sizes = shape_in_memory(guard_at(guard), guard, ob)
    device = device_in_memory(guard_at(guard), guard, ob)
    if ndim > room or field - 1 >> 16 != 0 or device == 0:  # the field is 0, or has lanes
        return -1
    for i in range(ndim):
        store(shape + 8 * i, load(sizes + 8 * i))
    return ndim | field << 8 | (device if device & 0xFF != CPU else 0) << DEVICE_SHIFT


# ---- their kind ------------------------------------------------------------------------------------------------------


def _row_readers(fields: dict[str, Any]) -> tuple[CFunction, ...]:
    guard = ffi.cast("fx_guard *", fields["guard"])
    return row_readers(Offsets(*(getattr(guard, name) for name in OFFSETS))) if guard.ndim else ()


def compare_memory(value) -> None:
    """Compare how native code reads a tensor of PyTorch in memory with what PyTorch tells, before code for its like is called.

    Once they differ, no tensor is read in memory, and the types are learnt anew. Tensors on a GPU are read there once one of them
    has been as PyTorch tells.
    """
    if why := offsets.guard().why_wrong_about(value):
        offsets.guard().distrust(why)
        runtime().entries.remove_kind(TENSOR)


MEANINGS |= {"memory": "it is read in memory, where the verified layout has it", "table": MEANING}
_OF_ALL = {
    "form": structs.FORM_TENSOR, "owner": storage_exports.owner, "is_odd": storage_exports.is_unlike,
    "take_turn": storage_exports.take_turn,
}  # fmt: skip
# With or without a table: Python code runs only for odd tensors.
_OF_MOST = {**_OF_ALL, "turns": 1 << HOLDING | 1 << NATIVELY, "makes_tensors": True, "is_read_on_device": True}
TENSOR = Kind(
    PATH, MEANING, reader=read_torch, row_readers=_row_readers, fill_row=fill_tensor_row, mark=mark_tensor,
    read_shape=read_tensor_shape, exports=structs.EXPORTS_IF_OWNING, schema_type="Tensor", compare=compare_memory, **_OF_MOST,
)  # fmt: skip
_EXPORTED = Kind(PATH, MEANING, reader=read_shown, exports=structs.EXPORTS_ALWAYS, **_OF_MOST)
_BY_CAPSULE = Kind(DUNDER.path, DUNDER.meaning, reader=read_shown, exports=structs.EXPORTS_ALWAYS, **_OF_MOST)
_BY_DUNDER = Kind(DUNDER.path, DUNDER.meaning, reader=read_shown, exports=structs.EXPORTS_ALWAYS, **_OF_ALL)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """``torch.Tensor`` and its subclasses."""
    if not checks.is_tensor_type(cls):
        return None
    found = own_table(cls, notes)
    if found is not None:
        fields = functions_of(found)
        if not fields["borrow"]:
            notes.append("its exchange table has no dltensor_from_py_object_no_sync: each call takes an owning export")
        source = _source_of_views(notes) if fields["borrow"] else ""
        guard = _guard(cls, notes)
        fields |= {"guard": guard, "is_own_memory": int(bool(fields["borrow"]))}
        # Asking PyTorch may run Python code: it comes before any view is borrowed.
        is_read = fields["borrow"] and not ffi.cast("fx_guard *", guard).asks
        return Discovery(TENSOR if is_read else _EXPORTED, fields, notes, found.capsule, source)
    if is_wrapper_type(cls) or (instance is not None and is_wrapper(instance)):
        return None
    if not (hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__")):
        return None
    if capsule.is_usable(cls):
        notes.append(
            f"it has no usable {EXCHANGE_ATTRIBUTE}: an owning export is a capsule of torch.utils.dlpack.to_dlpack"
        )
        source = _source_of_views(notes, has_table=False)
        managed = capsule.managed_tensor_from_py_object_no_sync.address
        asked = {"managed": managed, "guard": _guard(cls, notes), "is_own_memory": 1, "asks_python": 1, "device_kind": OTHER}
        # What is not read in memory is for Numba's dispatcher.
        return Discovery(TENSOR if source else _BY_CAPSULE, asked, notes, source=source)
    if not notes:
        notes.append(f"it has no {EXCHANGE_ATTRIBUTE}: each call calls its __dlpack__")
    # PyTorch's __dlpack__ refuses tensors that require grad. The guard refuses them instead, only in grad mode.
    managed = capsule.forwarded_managed_tensor.address
    return Discovery(_BY_DUNDER, {"managed": managed, "guard": _guard(cls, notes), "asks_python": 1}, notes)


def _source_of_views(notes: list[str], has_table: bool = True) -> str:
    """The source of most views of PyTorch's tensors, a key of ``MEANINGS``; "" if each is exported."""
    modes.expect_modes()
    guard = offsets.guard()
    if not guard.knows_all:
        return ""
    if guard.knows_views:
        return "memory"
    notes.append(f"it is not read in memory: {guard.why_no_views}")
    return "table" if has_table else ""


def _guard(cls: type, notes: list[str]) -> int:
    """The address of the ``fx_guard`` for tensors of this type."""
    modes.expect_modes()
    guard = offsets.guard()
    if runtime().is_native:
        guard.add(read_shown, check_tensor)
    if not guard.knows_all:
        notes.append(
            "this PyTorch's tensors do not have the expected layout: PyTorch is asked about each, and each is exported"
        )
    elif not guard.can_ask:
        who = "Numba's own dispatcher makes the calls of kernels without the GIL"
        notes.append(f"no C function tells native code of PyTorch's storages, so {who}: {guard.why['queries']}")
    return guard.address_for(cls)
