"""Cached."""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import PyErr_Occurred
from ..ground.native import call_int, call_word, load, native, stack, unlikely
from . import structs
from .boxing import box_or_raise
from .frame import give_frame, put_back, release, release_exports
from .launch import launch_here
from .python_calls import refuse, refuse_launch
from .readers import begin_reading


@cfunction(types.intp, *[types.intp] * 6)
def leave_cached(callable_, args, nargsf, kwnames, frame_address, status):
    context = structs.context_at(structs.frame_at(frame_address).context)
    put_back(structs.runtime_at(context.runtime), frame_address)
    return call_word(context.vectorcall_any, (callable_, args, nargsf, kwnames))


@cfunction(types.void, types.intp, types.intp)
def release_call(runtime_address, frame_address):
    runtime = structs.runtime_at(runtime_address)
    release(runtime, structs.frame_at(frame_address))
    give_frame(runtime, frame_address)


@cfunction(types.intp, *[types.intp] * 6)
def call_cached(callable_, args, nargsf, kwnames, context_address, overload_address):
    context = structs.context_at(context_address)
    overload = structs.overload_at(overload_address)
    runtime = structs.runtime_at(context.runtime)
    frame_address = runtime.frames
    if unlikely(kwnames != 0 or nargsf & c.NARGS_MASK != overload.given_count or frame_address == 0):
        return call_word(context.vectorcall_any, (callable_, args, nargsf, kwnames))
    frame = structs.frame_at(frame_address)
    runtime.frames = frame.next
    frame.context, frame.flags, frame.exports_used, frame.is_owning = context_address, 0, 0, 0
    words = frame.words
    array = frame.arrays
    word = words
    items = args
    record = overload.types
    end = record + 64 * overload.row_count
    while record != end:
        outcome = call_word(load(record + 8), (load(items), record, word, array, frame_address))
        if unlikely(outcome <= 0):
            return call_word(runtime.leave_cached, (callable_, args, nargsf, kwnames, frame_address, outcome))
        word += load(record + 16)
        array += load(record + 24)
        record += 64
        items += 8
    excinfo = stack(1)
    result = frame.result
    code = call_int(overload.trampoline, (overload.kernel, result, excinfo, words))
    value = box_or_raise(context, overload, code, result, excinfo, overload.box)
    context.calls += 1
    changed = 0
    at = frame.arrays
    while at != array:
        changed |= load(load(at)) ^ 1
        at += 24
    if unlikely(changed != 0):
        call_word(runtime.release_call, (context.runtime, frame_address))
        return value
    frame.next = runtime.frames
    runtime.frames = frame_address
    return value
