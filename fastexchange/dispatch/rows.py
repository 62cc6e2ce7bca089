"""Rows: what a cached call does, step by step, as data.

A cache entry has an ``fx_row`` for each value of its calls: the type's ``fx_entry``, the key, and the row's *reader*. The first
call with such arguments writes the rows (``inline_cache``); nothing is compiled.

A row's reader compares the value with the row, so that nothing is looked up, and writes the value's words. Last, it calls the
reader of the next row. Optimised, that call is a jump: no reader returns to the one before it. The last row has the kernel's
call. From the first view that is borrowed on, no Python code runs until the kernel has returned.

``reader(items, row, word, array, frame)`` returns the result of the whole call. `items`: where the address of the row's value is.
`word`: where the value's first word belongs. `array`: the ``fx_array`` of the value, if it is one.

Each kind of value has one reader, which :data:`read_value` calls. Frequent kinds have quicker ones, beside it in ``arguments``.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import Library, cfunction
from ..ground.cpython import KERNEL_CONTEXT, Py_TYPE
from ..ground.native import call_int, call_word, load, native, offset_of, stack, store, unlikely
from . import structs
from .boxing import box_or_raise
from .frame import ARRAY_BYTES, EXPORT_BYTES, give_frame, note_leaks, release
from .inline_cache import have_types_of
from .launch import launch
from .owning_exports import NATIVELY, begin_export
from .reading import is_owning

OB_ITEM, OB_SIZE = c.OB_ITEM, c.OB_SIZE
ROW_SIZE = structs.ROW_SIZE
PARENTS, SCRATCH = offset_of("fx_frame", "parents"), offset_of("fx_frame", "scratch")
TOGETHER = Library(f"{__package__.rpartition('.')[0]}.arguments.discovery")
"""What nearly each cached call runs. Kinds of arguments add their row readers."""


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
    return call_word(structs.overload_at(last).enter, (callable_, args, nargsf, kwnames, context_address, last))


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
    frame.is_owning = is_owning(structs.context_at(frame.context), 0)
    return begin_exports(items, row, word, array, frame_address)


@frequent
def export_row(items, row_address, word, array, frame_address):
    """A turn of the export of one argument; `expected`: which turn, and the index of the export."""
    frame = structs.frame_at(frame_address)
    row = structs.row_at(row_address)
    ob = load(frame.args + 8 * row.position)
    export = structs.export_at(frame.exports + EXPORT_BYTES * row.expected[1])
    # Another call, by Python code of an export, may have made other rows of these.
    is_known = export.object == ob or (export.object == 0 and row.expected[0] != NATIVELY)
    if not is_of_type(ob, row_address) or row.expected[1] >= frame.export_count or not is_known or export.managed != 0:
        return leave(row_address, frame_address, structs.STATUS_CHANGED)
    export.object = ob
    runtime = structs.runtime_at(structs.context_at(frame.context).runtime)
    address = frame.exports + EXPORT_BYTES * row.expected[1]
    status = call_word(runtime.take_turn, (frame.context, row.entry, address, row.expected[0], 0))  # so this row can jump
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
    """Call any kernel: also one whose result has arrays, one without the GIL, or with values that need exports."""
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    if frame.exports_used != frame.export_count:
        return leave(row_address, frame_address, 0)
    frame.array_count = structs.overload_at(frame.overload).array_count
    _, result = launch(frame.context, frame_address, frame.overload, frame.args, 0)
    context.calls += 1
    release(runtime, frame)
    give_frame(runtime, frame_address)
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
