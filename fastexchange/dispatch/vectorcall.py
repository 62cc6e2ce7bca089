"""The native dispatcher: from CPython's vectorcall to a compiled kernel, without Python in between.

:func:`call_any` makes a call in these steps. ``rows.vectorcall`` tries the last cache entry first.

1. Take a frame.
2. Read the arguments into it: words and keys.
3. Find the overload with equal keys (``inline_cache``), and call it by its trampoline.
4. Box the result.
5. Release everything that the call holds.

It never learns by itself: calls that it does not know go to a Python method of the kernel (``python_calls``), the *slow path*.
That uses :data:`attempt`, the same call with a report. Where it has learnt all that native code needs, it leaves the call to it.

Ownership: a frame holds every export of its call; ``frame.release`` releases each exactly once, on every exit.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import KERNEL_CONTEXT, OB_SIZE
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR_WORDS
from ..ground.native import call_word, load, native, stack, store
from . import structs
from .binding import bind_into
from .frame import drop_lists, give_frame, grow_frame, put_back, release, take_frame
from .inline_cache import call_entry, find_cached, look_up, site_of
from .launch import launch as launch_here
from .python_calls import (
    CANNOT,
    MUST,
    call_method,
    call_numbas,
    call_object,
    count_of,
    numbas_part,
    refuse,
    refuse_launch,
)
from .reading import DRY_RUN, FLAG_OWNING, FLAG_PREPARED


@native
def read(context_address, frame_address, args, nargs, flags):
    """Read a call's arguments into a frame, or a larger one if necessary. Returns (STATUS_*, frame, arguments)."""
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    frame = structs.frame_at(frame_address)
    status = call_word(runtime.walk, (context_address, frame_address, args, nargs, flags))
    while status == structs.STATUS_EXPORT or status == structs.STATUS_GROW:
        drop_lists(frame)  # the next round makes them again
        if status == structs.STATUS_EXPORT:
            flags |= frame.flags & FLAG_OWNING
            status = call_word(runtime.export_managed, (context_address, frame_address, args, nargs, flags))
            flags |= FLAG_PREPARED
        if status == structs.STATUS_GROW:
            is_bound = args == frame.bound
            grown = grow_frame(runtime, frame_address, nargs + 1)
            if grown == 0:
                status = structs.STATUS_ERROR
            else:
                frame_address = grown
                frame = structs.frame_at(frame_address)
                if is_bound:  # the arguments have moved with the frame
                    args = frame.bound
                status = structs.STATUS_OK
        if status == structs.STATUS_OK:
            frame.array_count = 0
            status = call_word(runtime.walk, (context_address, frame_address, args, nargs, flags))
    return status, frame_address, args


# The offsets of what a call notes in the four words of its `state`, see `run_by`.
FRAME, RESULT, LAUNCHER, CACHE_ENTRY = 0, 8, 16, 24


@native
def run_by(launch, context_address, args, nargs, flags, state):
    """Make a call with arguments in parameter order.

    `state`: four words: FRAME, which a larger one may replace; RESULT; LAUNCHER, the ``fx_launcher`` of a CUDA kernel;
    CACHE_ENTRY, the one for such calls, or 0.

    Returns: a STATUS_*. With STATUS_OK the result is a new reference, or 0 with an exception set.
    Owns: everything that the call holds is released in any case.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    status, frame_address, args = read(context_address, load(state + FRAME), args, nargs, flags)
    frame = structs.frame_at(frame_address)
    result = 0
    entry = 0
    if status == structs.STATUS_OK:
        at = look_up(context, frame.keys, frame.key_count)
        if at == 0 or flags & DRY_RUN != 0:
            status = structs.STATUS_UNKNOWN_SHAPE
        elif structs.overload_at(at).trampoline == 0:
            status = structs.STATUS_NUMBA
        else:
            chosen = find_cached(context_address, runtime, at, args, frame.entries)
            entry = chosen if chosen != at else 0
            status, result = launch(context_address, frame_address, at, args, load(state + LAUNCHER))
    release(runtime, frame)
    store(state + FRAME, frame_address)
    store(state + RESULT, result)
    store(state + CACHE_ENTRY, entry)
    return status


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def run(context_address, args, nargs, flags, state):
    """:func:`run_by` for CPU kernels: ``fx_context.run``."""
    return run_by(launch_here, context_address, args, nargs, flags, state)


@native
def in_order(context, runtime, frame_address, args, nargs, kwnames):
    """Put a call's arguments into the order of the parameters. Returns a STATUS_*, the frame, the arguments, and their number."""
    if kwnames == 0 and (nargs == context.plain_count or (nargs >= context.parameter_count and context.variadic != 0)):
        return structs.STATUS_OK, frame_address, args, nargs
    status, frame_address = bind_into(context, runtime, frame_address, args, nargs, kwnames)
    return status, frame_address, structs.frame_at(frame_address).bound, context.parameter_count


@native
def call_any(launch, context_address, launcher, callable_, args, nargsf, kwnames):
    """The general path: make any call, also with keywords, defaults, ``*args`` and unknown types. `launch`: as in `run_by`."""
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    nargs = nargsf & c.NARGS_MASK
    site = 0
    is_on_cpu = launcher == 0 and context.device_type == CPU
    if is_on_cpu and kwnames == 0 and nargs == context.plain_count:
        site = site_of(context, runtime, args, nargs)
        entry = load(site)
        if entry != 0 and entry != context.last and nargsf & c.TRIED_SITE == 0:
            context.last = entry
            # If the cache entry leaves the call, it comes here again, with this bit: then no entry is tried. A flag elsewhere
            # would be cleared by other calls, which the Python code of a producer makes, or another thread.
            return call_entry(context_address, entry, callable_, args, nargsf | c.TRIED_SITE)
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    items = args
    status = structs.STATUS_OK
    if kwnames != 0 or nargs != context.plain_count:
        is_whole = kwnames != 0 and nargs + load(kwnames + OB_SIZE) == context.plain_count
        status, frame_address, items, nargs = in_order(context, runtime, frame_address, args, nargs, kwnames)
        if status == structs.STATUS_OK and is_whole and is_on_cpu:  # a call with positional arguments
            result = call_entry(context_address, context.last, callable_, items, nargs)
            give_frame(runtime, frame_address)
            return result
    state = stack(4)
    store(state + FRAME, frame_address)
    store(state + LAUNCHER, launcher)
    buckets = context.buckets
    if status == structs.STATUS_OK:
        status = run_by(launch, context_address, items, nargs, 0, state)
    frame = load(state + FRAME)
    position = structs.frame_at(frame).position
    code = structs.frame_at(frame).code
    give_frame(runtime, frame)
    has_learnt = nargsf & c.HAS_LEARNT != 0
    if status == structs.STATUS_OK:
        if not has_learnt:  # otherwise it counts as slow
            context.calls += 1
        result = load(state + RESULT)
        # What a tensor's release runs, or another thread during it, may have made the kernel forget its overloads.
        if site != 0 and load(state + CACHE_ENTRY) != 0 and context.buckets == buckets:
            store(site, load(state + CACHE_ENTRY))
        return result
    if status == structs.STATUS_ERROR:
        return refuse(context, callable_, position)
    if status == structs.STATUS_DRIVER:
        return refuse_launch(context, callable_, code)
    if status == structs.STATUS_DEVICE and context.device_kernel != 0:
        return call_object(context.device_kernel, args, nargsf, kwnames)
    method = context.slow_name if not has_learnt else context.itself_name
    if status == structs.STATUS_NUMBA or status == structs.STATUS_STREAM or status == structs.STATUS_STREAMS:
        nargs = nargsf & c.NARGS_MASK
        part = numbas_part(context, runtime, args, nargs + count_of(kwnames)) if launcher == 0 else CANNOT
        if part == MUST:
            context.last = runtime.numbas_entry
            if site != 0:
                store(site, runtime.numbas_entry)
        if part != CANNOT:
            return call_numbas(context, runtime, callable_, args, nargs, kwnames)
        method = context.numba_name
    elif nargsf & c.MADE_OUTPUTS != 0:
        return context.omitted
    result = call_method(method, callable_, args, nargsf, kwnames)
    if result != 0 and result == context.again:
        # Native code makes the call that Python has learnt, so that the kernel's exceptions have no frames of ours.
        c.Py_DecRef(result)
        return call_word(context.vectorcall_any, (callable_, args, nargsf | c.HAS_LEARNT, kwnames))
    return result


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_any(callable_, args, nargsf, kwnames):
    """:func:`call_any` for CPU kernels."""
    return call_any(launch_here, load(callable_ + KERNEL_CONTEXT), 0, callable_, args, nargsf, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def leave_row(frame_address, status, position):
    """Make a cached call that a row has left, by the general path, or raise a producer's exception.

    `status`: 0 or less: a value is not as its row says. STATUS_ERROR: the producer of the argument at `position` has set an
    exception. Any other: the exports of the call are not complete, or only the general path can make the launch.
    """
    frame = structs.frame_at(frame_address)
    context = structs.context_at(frame.context)
    runtime = structs.runtime_at(context.runtime)
    callable_, args, nargsf = frame.callable, frame.args, frame.nargsf
    frame.array_count = 0
    if status != structs.STATUS_ERROR:
        c.PyErr_Clear()
    is_exported = status <= 0 and frame.export_count != 0 and context.device_type == CPU
    if is_exported:  # no producer is asked a second time
        state = stack(4)
        context_address = frame.context
        status, frame_address, items, nargs = in_order(context, runtime, frame_address, args, nargsf & c.NARGS_MASK, 0)
        store(state + FRAME, frame_address)
        store(state + LAUNCHER, 0)
        if status == structs.STATUS_OK:
            status = call_word(context.run, (context_address, items, nargs, 0, state))
        else:
            release(runtime, structs.frame_at(frame_address))
        position = structs.frame_at(load(state + FRAME)).position
        give_frame(runtime, load(state + FRAME))
        if status == structs.STATUS_OK:
            context.calls += 1
            return load(state + RESULT)
    else:
        release(runtime, frame)
        put_back(runtime, frame_address)
    if status == structs.STATUS_ERROR:
        return refuse(context, callable_, position)
    return call_word(context.vectorcall_any, (callable_, args, nargsf, 0))


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def call_numbas_cached(callable_, args, nargsf, kwnames, context_address, overload_address):
    """The cache entry of ``fx_runtime.numbas_entry``: calls with arguments that only Numba can read. Leaves others."""
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    nargs = nargsf & c.NARGS_MASK
    count = nargs + count_of(kwnames)
    has_names = count == nargs or context.positional_only == 0  # Numba takes all parameters by name
    if (count <= context.plain_count or context.variadic != 0) and has_names:
        if numbas_part(context, runtime, args, count) == MUST:
            return call_numbas(context, runtime, callable_, args, nargs, kwnames)
    return call_word(context.vectorcall_any, (callable_, args, nargsf, kwnames))


@native
def fill_report(report, frame, status):
    """Fill an fx_report from a frame that was read with this status. Returns the status, or STATUS_NUMBA."""
    report.position = frame.position
    report.object = frame.object
    report.key_count = frame.key_count
    report.code = frame.code
    report.device, report.managed_device = frame.device, frame.managed_device
    for i in range(DL_TENSOR_WORDS):
        report.tensor[i] = frame.tensor[i]
    has_keys = status == structs.STATUS_UNKNOWN_SHAPE or status == structs.STATUS_UNBOUND or status == structs.STATUS_RANGE
    if has_keys or status == structs.STATUS_NUMBA:  # then a part of them, or all: a package's launch is known by them
        if frame.key_count > report.key_capacity:
            status = structs.STATUS_NUMBA
            report.key_count = 0
        else:
            for i in range(frame.key_count):
                store(report.keys + 8 * i, load(frame.keys + 8 * i))
    return status


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def attempt(context_address, args, nargs, flags, report_address):
    """Attempt a call for the slow path, and fill in the fx_report.

    Returns: by the status in the report: STATUS_OK: a new reference to the result, or 0 with an exception set. STATUS_ERROR: 0
    with an exception set. Else: a new reference to None.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    report = structs.report_at(report_address)
    report.status = structs.STATUS_ERROR
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    state = stack(4)
    store(state + FRAME, frame_address)
    store(state + LAUNCHER, report.launcher)
    status = call_word(context.run, (context_address, args, nargs, flags, state))
    frame_address = load(state + FRAME)
    frame = structs.frame_at(frame_address)
    result = load(state + RESULT)
    status = fill_report(report, frame, status)
    give_frame(runtime, frame_address)
    report.status = status
    if status != structs.STATUS_OK and status != structs.STATUS_ERROR:
        result = c.new_none()
    return result
