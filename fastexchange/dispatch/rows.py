"""Rows: what a cached call does, step by step, as data.

A cache entry has an ``fx_row`` for each value of its calls: the type's ``fx_entry``, the key, and the row's *reader*. The first
call with such arguments writes the rows (``inline_cache``); nothing is compiled.

A row's reader compares the value with the row, so that nothing is looked up, and writes the value's words. Last, it calls the
reader of the next row. Optimised, that call is a jump: no reader returns to the one before it. The last row has the kernel's
call. From the first view that is borrowed on, no Python code runs until the kernel has returned.

``reader(items, row, word, array, frame)`` returns the result of the whole call. `items`: where the address of the row's value is.
`word`: where the value's first word belongs. `array`: the ``fx_array`` of the value, if it is one.

Each kind of value has one reader (``readers``), which :data:`read_value` calls. The other readers here do the same for frequent
kinds in fewer steps.
"""

import functools
from typing import Any

from numba import types

from .._abi import ffi
from ..ground import cpython as c
from ..ground.cfunction import CFunction, cfunction
from ..ground.cpython import KERNEL_CONTEXT, Py_TYPE
from ..ground.dltensor import DL_TENSOR, READONLY, dl_tensor_at, element_field, is_plain, managed_at
from ..ground.native import (
    as_words,
    call_int,
    call_word,
    global_address,
    load,
    native,
    offset_of,
    put,
    stack,
    store,
    unlikely,
)
from ..producers.ndarray import ndarray_at
from . import readers, structs
from .boxing import box_or_raise
from .exports import BY_PYTORCH, begin_export
from .frame import ARRAY_BYTES, EXPORT_BYTES, give_frame, note_leaks, release, release_exports
from .inline_cache import have_types_of
from .pack import end_of_array, pack_contiguous, pack_ndarray, pack_scattered, pack_tensor
from .torch_guard import (
    OFFSETS,
    Offsets,
    is_in_memory,
    is_on_cpu,
    is_short_by,
    is_surely_unwatched,
    is_watched,
    number_in_memory,
    rank_in_memory,
    view_in_memory,
)

OB_ITEM, OB_SIZE = c.OB_ITEM, c.OB_SIZE
ROW_SIZE = structs.ROW_SIZE
PARENTS, SCRATCH = offset_of("fx_frame", "parents"), offset_of("fx_frame", "scratch")
ITEMSIZE_SHIFT, ITEMSIZE_MASK = structs.DTYPE_SHIFT + 11, 31  # of the key of a tensor that is read in memory
TOGETHER: list[CFunction] = []
"""What nearly each cached call runs: :class:`CFunction`."""


def row_reader(function):
    """Decorator: a row's reader."""
    return cfunction(types.intp, *[types.intp] * 5)(function)


def frequent(function):
    """Decorator: a row's reader that is among the functions of frequent calls."""
    return cfunction(types.intp, *[types.intp] * 5, together=TOGETHER)(function)


@native
def go_on(items, row, word, array, frame):
    """Read the next row."""
    return call_word(load(row + ROW_SIZE), (items, row + ROW_SIZE, word, array, frame))


@native
def leave(row, frame, status):
    """Leave the call to ``vectorcall.leave_row``: a value is not as its row says; `status` as there."""
    runtime = structs.runtime_at(structs.context_at(structs.frame_at(frame).context).runtime)
    return call_word(runtime.leave_row, (frame, status, structs.row_at(row).position))


@native
def is_of_type(ob, row):
    """Whether an object has the type of a row."""
    return Py_TYPE(ob) == load(structs.row_at(row).entry)


@cfunction(*[types.intp] * 5, together=TOGETHER)
def vectorcall(callable_, args, nargsf, kwnames):
    """``PyObject *(*vectorcallfunc)(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames)``.

    Calls the last cache entry, because most calls have the types of the call before. The cache entry leaves
    other calls to ``vectorcall.vectorcall_any``, which makes all calls before there is one.
    """
    context_address = load(callable_ + KERNEL_CONTEXT)
    last = structs.context_at(context_address).last
    return call_word(structs.overload_at(last).fast_entry, (callable_, args, nargsf, kwnames, context_address, last))


@cfunction(types.intp, *[types.intp] * 6, together=TOGETHER)
def call_cached(callable_, args, nargsf, kwnames, context_address, overload_address):
    """Make a call by the rows of a cache entry, which leave a call with other arguments to the general path."""
    context = structs.context_at(context_address)
    overload = structs.overload_at(overload_address)
    runtime = structs.runtime_at(context.runtime)
    at = runtime.frames
    if unlikely(kwnames != 0 or nargsf & c.NARGS_MASK != overload.given_count or at == 0):
        return call_word(context.vectorcall_any, (callable_, args, nargsf, kwnames))
    frame = structs.frame_at(at)
    if unlikely(overload.room > frame.key_capacity):
        return call_word(context.vectorcall_any, (callable_, args, nargsf, kwnames))
    runtime.frames = frame.next
    frame.callable, frame.args, frame.nargsf = callable_, args, nargsf
    frame.context, frame.overload = context_address, overload_address
    row = overload.rows
    return call_word(load(row), (args, row, frame.words, frame.arrays, at))


# ---- values ----------------------------------------------------------------------------------------------------------


@frequent
def read_value(items, row_address, word, array, frame):
    """A value of any kind, by its kind's reader.

    `expected`: that reader, how many bytes its words have, and how many its ``fx_array`` has, or 0.
    """
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    key = call_word(row.expected[0], (ob, row.entry, frame, word, array))
    if key != row.key:
        return leave(row_address, frame, -key)
    return go_on(items + 8, row_address, word + row.expected[1], array + row.expected[2], frame)


@frequent
def read_float(items, row, word, array, frame):
    """A Python float."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, load(ob + c.OB_FVAL))
    return go_on(items + 8, row, word + 8, array, frame)


@frequent
def read_int(items, row, word, array, frame):
    """A Python int that fits into int64."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    value = c.PyLong_AsLongLongAndOverflow(ob, frame + SCRATCH)
    if value == -1 and load(frame + SCRATCH) & 0xFFFFFFFF != 0:
        return leave(row, frame, 0)
    store(word, value)
    return go_on(items + 8, row, word + 8, array, frame)


@frequent
def read_bool(items, row, word, array, frame):
    """A Python bool."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return go_on(items + 8, row, word + 8, array, frame)


@frequent
def read_none(items, row, word, array, frame):
    """``None``."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, ob)
    return go_on(items + 8, row, word + 8, array, frame)


@frequent
def read_numpy_scalar(items, row, word, array, frame):
    """A NumPy scalar of at most 8 bytes."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, load(ob + c.NUMPY_SCALAR_VALUE))
    return go_on(items + 8, row, word + 8, array, frame)


@native
def ndarray_of(items, row_address, word, array_address, frame, rank):
    """An ndarray. `rank`: its number of dimensions, or -1: that of the row's key.

    `expected`: the dtype object, the flags of the key, the item size.
    """
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    ndim = rank if rank >= 0 else row.key >> structs.NDIM_SHIFT & 0xFF
    array = ndarray_at(ob)
    flags = types.intp(array.flags) & structs.KEY_FLAGS
    if array.descr != row.expected[0] or flags != row.expected[1] or types.intp(array.nd) != ndim:
        return leave(row_address, frame, 0)
    here = structs.array_at(array_address)
    here.origin = ob + structs.ORIGIN_NDARRAY
    store(word, here.meminfo)
    pack_ndarray(ob, ndim, row.expected[2], as_words(word))
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame)


def ndarray_reader(rank: int) -> CFunction:
    """The reader for arrays of so many dimensions, a constant in its code; -1: of any number."""

    @cfunction(types.intp, *[types.intp] * 5, together=TOGETHER, constants=(rank,))
    def read_ndarray(items, row, word, array, frame):
        return ndarray_of(items, row, word, array, frame, rank)

    return read_ndarray


NDARRAY_READERS = tuple(map(ndarray_reader, (-1, 1, 2, 3, 4)))


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
    """A PyTorch tensor on the CPU, read in memory. `rank`: as for :func:`ndarray_of`.

    `in_order`: whether its key says that it is C-contiguous, aligned and writable. `offsets`: :data:`torch_guard.Offsets`.

    `expected`: the kernel's ``fx_guard``, PyTorch's number of the dtype, and the bits of an address that are 0 if an element is
    aligned. The dtype is not odd: the tensor for which the row was made had the same.
    """
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    implementation = load(ob + offsets.object)
    if load(implementation + offsets.keys) & structs.guard_at(row.expected[0]).odd_keys != 0:
        return leave(row_address, frame, 0)
    if not is_checked(ob, offsets, implementation, frame):
        runtime = structs.runtime_at(structs.context_at(structs.frame_at(frame).context).runtime)
        return call_word(runtime.check_tensor, (items, row_address, word, array_address, frame))
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
    guard = structs.guard_at(row.expected[0])
    if guard.autograd != 0 and is_watched(guard, load(load(ob + guard.object) + guard.autograd)):
        return leave(row_address, frame, 0)
    store(frame + SCRATCH, ob)
    return call_word(row.reader, (items, row_address, word, array, frame))


@functools.cache
def tensor_readers(offsets: Offsets) -> tuple[CFunction, ...]:
    """The row readers of tensors with these offsets, which are constants in their code: loading them takes time."""

    together: list[CFunction] = []

    def reader(rank, in_order):
        @cfunction(types.intp, *[types.intp] * 5, together=together, constants=(rank, in_order, *offsets))
        def read_tensor(items, row, word, array, frame):
            return tensor_of(items, row, word, array, frame, rank, in_order, offsets)

        return read_tensor

    in_order, others = [reader(rank, True) for rank in (-1, 1, 2, 3, 4)], [reader(rank, False) for rank in (-1, 2)]
    return (*in_order, others[0], others[0], others[1], others[0], others[0])


TENSOR_READERS = tensor_readers(Offsets(
    object=16, keys=168, element_type=160, autograd=24, storage=16, storage_data=16, storage_size=48, ndim=56, sizes=64,
    strides=104, inline_ndim=5, storage_offset=144, device=162, storage_checked=59, tangent=64, requires_grad=128, grad_fn=48,
    is_view=130, has_base=232, base=184,
))  # fmt: skip
"""Those of PyTorch 2.13 and 2.14 on 64-bit machines, which come with the package.

Those for other offsets are compiled where PyTorch has them.
"""


@frequent
def read_export(items, row_address, word, array_address, frame_address):
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


# ---- steps that read no value ----------------------------------------------------------------------------------------


@frequent
def enter_tuple(items, row_address, word, array, frame):
    """A tuple, whose items' rows follow, and then one with :data:`leave_tuple`. `expected`: how many items it has."""
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address) or load(ob + OB_SIZE) != row.expected[0]:
        return leave(row_address, frame, 0)
    if row.level != 0:
        store(frame + PARENTS + 8 * row.level, items + 8)
    return go_on(ob + OB_ITEM, row_address, word, array, frame)


@frequent
def leave_tuple(items, row_address, word, array, frame):
    """The end of a tuple: go on behind it, an argument of the call or an item of another tuple."""
    row = structs.row_at(row_address)
    if row.level != 0:
        behind = load(frame + PARENTS + 8 * row.level)
    else:  # so the next argument is loaded before this tuple's items are there
        behind = structs.frame_at(frame).args + 8 * (row.position + 1)
    return go_on(behind, row_address, word, array, frame)


@native
def begin_exports(items, row_address, word, array, frame_address):
    """What :data:`begin_row` says, for any device."""
    frame = structs.frame_at(frame_address)
    row = structs.row_at(row_address)
    runtime = structs.runtime_at(structs.context_at(frame.context).runtime)
    if row.expected[0] != 0:
        if not have_types_of(frame.overload, frame.args):  # the general path makes the exports: each only once
            return leave(row_address, frame_address, structs.STATUS_CHANGED)
        if row.expected[1] != 0:
            count = structs.overload_at(frame.overload).given_count
            status = call_word(runtime.export_managed, (frame.context, frame_address, frame.args, count, 0))
            if status != structs.STATUS_OK:
                return call_word(runtime.leave_row, (frame_address, status, frame.position))
        else:
            for _ in range(row.expected[0]):
                begin_export(frame, 0, False)
    return go_on(items, row_address, word, array, frame_address)


@frequent
def begin_row(items, row, word, array, frame_address):
    """What comes before the reading of a call's values, some of which need owning exports.

    `expected`: how many exports there are, and whether to make them here; else each has rows of its own.
    """
    frame = structs.frame_at(frame_address)
    frame.is_owning = readers.is_owning(structs.context_at(frame.context), 0)
    return begin_exports(items, row, word, array, frame_address)


@frequent
def export_row(items, row_address, word, array, frame_address):
    """A turn of the export of one argument; `expected`: which turn, and the index of the export."""
    frame = structs.frame_at(frame_address)
    row = structs.row_at(row_address)
    ob = load(frame.args + 8 * row.position)
    export = structs.export_at(frame.exports + EXPORT_BYTES * row.expected[1])
    # Another call, by Python code of an export, may have made other rows of these.
    is_known = export.object == ob or (export.object == 0 and row.expected[0] != BY_PYTORCH)
    if not is_of_type(ob, row_address) or row.expected[1] >= frame.export_count or not is_known or export.managed != 0:
        return leave(row_address, frame_address, structs.STATUS_CHANGED)
    export.object = ob
    runtime = structs.runtime_at(structs.context_at(frame.context).runtime)
    address = frame.exports + EXPORT_BYTES * row.expected[1]
    status = call_word(runtime.take_turn_of, (frame.context, row.entry, address, row.expected[0]))  # so this row can jump
    if status != structs.STATUS_OK:
        return leave(row_address, frame_address, status)
    return go_on(items, row_address, word, array, frame_address)


@native
def give_back(runtime, frame_address, array, code):
    """Give back the frame of a call whose kernel has returned `code`. `array`: the end of the call's ``fx_array``s."""
    frame = structs.frame_at(frame_address)
    kept = 0
    at = frame.arrays
    while at != array:
        kept |= load(load(at)) ^ 1
        at += ARRAY_BYTES
    if unlikely(kept != 0):
        call_word(runtime.end_call, (frame_address, code))
    else:
        if unlikely(frame.export_count != 0 or frame.is_owning != 0):
            release_exports(frame)
            frame.is_owning, frame.exports_used = 0, 0
        frame.next = runtime.frames
        runtime.frames = frame_address


@frequent
def call_kernel(items, row_address, word, array, frame_address):
    """Call the kernel, whose result is none or numbers. `expected`: its trampoline, its address, the box of its result or 0."""
    frame = structs.frame_at(frame_address)
    row = structs.row_at(row_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    excinfo = stack(1)
    store(excinfo, 0)
    code = call_int(row.expected[0], (row.expected[1], frame.result, excinfo, frame.words))
    result = box_or_raise(context, structs.overload_at(frame.overload), code, frame.result, excinfo, row.expected[2])
    context.calls += 1
    give_back(runtime, frame_address, array, code)
    return result


@frequent
def launch_row(items, row_address, word, array, frame_address):
    """Call any kernel: also one whose result has arrays, one without the GIL, or with values that need exports.

    `expected`: as for :data:`call_kernel`.
    """
    frame = structs.frame_at(frame_address)
    row = structs.row_at(row_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    overload = structs.overload_at(frame.overload)
    if frame.exports_used != frame.export_count:
        return leave(row_address, frame_address, 0)
    excinfo = stack(1)
    store(excinfo, 0)
    thread = c.PyEval_SaveThread() if context.release_gil != 0 else 0
    code = call_int(row.expected[0], (row.expected[1], frame.result, excinfo, frame.words))
    if thread != 0:
        c.PyEval_RestoreThread(thread)
    if code == 0 and overload.boxes_arrays != 0:
        frame.array_count = overload.array_count
        result = call_word(runtime.box_result, (frame.context, frame.overload, frame_address, frame.args))
    else:
        result = box_or_raise(context, overload, code, frame.result, excinfo, row.expected[2])
    context.calls += 1
    give_back(runtime, frame_address, array, code)
    return result


@cfunction(types.void, types.intp, types.intp)
def end_call(frame_address, code):
    """End a cached call that has returned `code`: release all that it holds, and what the kernel has kept gets an owner."""
    frame = structs.frame_at(frame_address)
    runtime = structs.runtime_at(structs.context_at(frame.context).runtime)
    overload = structs.overload_at(frame.overload)
    frame.array_count = overload.array_count
    note_leaks(frame, overload, code)
    release(runtime, frame)
    give_frame(runtime, frame_address)


PLACES = 10
NO_READERS = (0,) * PLACES
READERS = {
    structs.KIND_FLOAT: read_float,
    structs.KIND_INT: read_int,
    structs.KIND_BOOL: read_bool,
    structs.KIND_NUMPY_SCALAR: read_numpy_scalar,
    structs.KIND_NONE: read_none,
    structs.KIND_TUPLE: enter_tuple,
    structs.KIND_NAMED_TUPLE: enter_tuple,
}
"""By the kind of a type's entry: the readers of values other than arrays."""


def row_readers(kind: int, guard: int) -> tuple[int, ...]:
    """``fx_entry.row_readers`` of the types of a kind; zeros: :data:`read_value` reads their objects."""
    found: tuple[CFunction, ...] = ()
    if kind in READERS:
        found = (READERS[kind],) * PLACES
    elif kind == structs.KIND_NDARRAY:
        found = 2 * NDARRAY_READERS  # in order or not
    elif kind == structs.KIND_MANAGED and not guard:
        found = (read_export,) * PLACES
    elif kind == structs.KIND_EXCHANGE and guard and ffi.cast("fx_guard *", guard).ndim:
        offsets = ffi.cast("fx_guard *", guard)
        found = tensor_readers(Offsets(*(getattr(offsets, name) for name in OFFSETS)))
    return tuple(reader.address for reader in found) or NO_READERS


def derived_fields(fields: dict[str, int]) -> dict[str, Any]:
    """The fields of an ``fx_entry`` that others determine: its readers, and by which kind kernels on a device read."""
    kind = fields["kind"]
    is_tensor = kind in (structs.KIND_EXCHANGE, structs.KIND_MANAGED) and not fields.get("asks_python")
    is_read = is_tensor or kind in structs.TUPLE_KINDS or structs.is_scalar_kind.py_func(kind)
    if fields.get("is_by_object"):
        on_device = structs.KIND_VIEW
    elif fields.get("interface"):
        on_device = structs.KIND_MANAGED
    else:
        on_device = kind if is_read else structs.KIND_NUMBA
    here, there = (readers.READERS[each].address if each in readers.READERS else 0 for each in (kind, on_device))
    rows_there = NO_READERS if on_device in structs.TENSOR_KINDS else row_readers(on_device, 0)
    return {
        "reader": here, "row_readers": row_readers(kind, fields.get("guard", 0)),
        "device_kind": on_device, "device_reader": there, "device_row_readers": rows_there,
    }  # fmt: skip
