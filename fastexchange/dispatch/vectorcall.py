"""The native dispatcher: from CPython's vectorcall to a compiled kernel, without Python in between.

:func:`call_any` makes a call in these steps. :data:`vectorcall` tries the fast entry of the last cached call first.

1. Take a frame.
2. Read the arguments into it: words and keys.
3. Find the overload with equal keys (``inline_cache``), and call it by its trampoline.
4. Box the result.
5. Release everything that the call holds.

It never learns by itself: calls that it does not know go to a Python method of the kernel (``python_calls``), the *slow path*.
That uses :data:`attempt`, the same call with a report.

Ownership: a frame holds every export of its call; ``frame.release`` releases each exactly once, on every exit.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import KERNEL_CONTEXT, OB_SIZE
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR_WORDS
from ..ground.native import call_int, call_word, load, native, stack, store
from . import structs
from .binding import bind_into
from .boxing import box_or_raise
from .frame import (
    drop_lists,
    give_frame,
    grow_frame,
    is_anything_kept,
    note_leaks,
    note_origins,
    release,
    take_frame,
)  # fmt: skip
from .inline_cache import call_entry, find_cached, look_up, site_of
from .lists import drop_unchanged, reflect_changes
from .python_calls import call_method, call_numbas, call_object, is_numbas, refuse, refuse_launch
from .readers import DRY_RUN


@native
def launch(context_address, frame_address, overload_address, args):
    """Call the kernel with the words in a frame. Returns a new reference to its result, or 0 with an exception set."""
    context = structs.context_at(context_address)
    frame = structs.frame_at(frame_address)
    overload = structs.overload_at(overload_address)
    excinfo = stack(1)
    if context.release_gil != 0:
        thread = c.PyEval_SaveThread()
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
        c.PyEval_RestoreThread(thread)
    else:
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
    if overload.keeps != 0 and is_anything_kept(frame, frame.array_count):
        note_leaks(frame, overload, code)
    if frame.list_count != 0:
        drop_unchanged(frame)
    if code == 0 and overload.boxes_arrays != 0:
        box_result = structs.runtime_at(context.runtime).box_result
        result = call_word(box_result, (context_address, overload_address, frame_address, args))
    else:
        result = box_or_raise(context, overload, code, frame.result, excinfo, overload.box)
    if frame.list_count != 0:
        result = reflect_changes(context_address, overload_address, frame_address, args, result)
    return result


@native
def read(context_address, frame_address, args, nargs, flags):
    """Read a call's arguments into a frame, or a larger one if necessary. Returns (STATUS_*, frame, arguments)."""
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    frame = structs.frame_at(frame_address)
    status = call_word(context.walk, (context_address, frame_address, args, nargs, flags))
    while status == structs.STATUS_EXPORT or status == structs.STATUS_GROW:
        drop_lists(frame)  # the next round makes them again
        if status == structs.STATUS_EXPORT:
            status = call_word(runtime.export_managed, (context_address, frame_address, args, nargs, flags))
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
            status = call_word(context.walk, (context_address, frame_address, args, nargs, flags))
    return status, frame_address, args


# The offsets of what a call notes in the five words of its `state`, see `run_by`.
FRAME, RESULT, WANTS_CACHE_ENTRY, LAUNCHER, CACHE_ENTRY = 0, 8, 16, 24, 32


@native
def run_by(launch, context_address, args, nargs, flags, state):
    """Make a call with arguments in parameter order.

    `state`: five words: FRAME, which a larger one may replace; RESULT; WANTS_CACHE_ENTRY, whether such calls should get a cache
    entry now; LAUNCHER, the ``fx_launcher`` of a CUDA kernel; CACHE_ENTRY, the one for such calls, or 0.

    Returns: a STATUS_*. With STATUS_OK the result is a new reference, or 0 with an exception set.
    Owns: everything that the call holds is released in any case.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    status, frame_address, args = read(context_address, load(state + FRAME), args, nargs, flags)
    frame = structs.frame_at(frame_address)
    result = 0
    wants_cache_entry = False
    entry = 0
    if status == structs.STATUS_OK:
        at = look_up(context, frame.keys, frame.key_count)
        if at == 0 or flags & DRY_RUN != 0:
            status = structs.STATUS_UNKNOWN_SHAPE
        elif structs.overload_at(at).trampoline == 0:
            status = structs.STATUS_NUMBA
        else:
            chosen = find_cached(context, at, args)
            wants_cache_entry = chosen == 0
            entry = chosen if chosen != at else 0
            status, result = launch(context_address, frame_address, at, args, load(state + LAUNCHER))
    release(runtime, frame)
    store(state + FRAME, frame_address)
    store(state + RESULT, result)
    store(state + WANTS_CACHE_ENTRY, types.intp(wants_cache_entry and result != 0 and status == structs.STATUS_OK))
    store(state + CACHE_ENTRY, entry)
    return status


@native
def launch_here(context_address, frame_address, overload_address, args, launcher):
    """:func:`launch` with the signature that :func:`run_by` needs."""
    return structs.STATUS_OK, launch(context_address, frame_address, overload_address, args)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def run(context_address, args, nargs, flags, state):
    """:func:`run_by` for CPU kernels: ``fx_context.run``."""
    return run_by(launch_here, context_address, args, nargs, flags, state)


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
            # If the fast entry leaves the call, it comes here again, with this bit: then no entry is tried. A flag elsewhere
            # would be cleared by other calls, which the Python code of a producer makes, or another thread.
            return call_entry(context_address, entry, callable_, args, nargsf | c.TRIED_SITE)
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    items = args
    status = structs.STATUS_OK
    if kwnames != 0 or nargs != context.plain_count:
        if kwnames != 0 or nargs < context.parameter_count or context.variadic == 0:
            is_whole = kwnames != 0 and nargs + load(kwnames + OB_SIZE) == context.plain_count
            status, frame_address = bind_into(context, runtime, frame_address, args, nargs, kwnames)
            items = structs.frame_at(frame_address).bound
            nargs = context.parameter_count
            if status == structs.STATUS_OK and is_whole and is_on_cpu:  # a call with positional arguments
                result = call_entry(context_address, context.last, callable_, items, nargs)
                give_frame(runtime, frame_address)
                return result
    state = stack(5)
    store(state + FRAME, frame_address)
    store(state + LAUNCHER, launcher)
    buckets = context.buckets
    if status == structs.STATUS_OK:
        status = run_by(launch, context_address, items, nargs, 0, state)
    frame = load(state + FRAME)
    position = structs.frame_at(frame).position
    code = structs.frame_at(frame).code
    give_frame(runtime, frame)
    if status == structs.STATUS_OK:
        context.calls += 1
        result = load(state + RESULT)
        # What a tensor's release runs, or another thread during it, may have made the kernel forget its overloads.
        if site != 0 and load(state + CACHE_ENTRY) != 0 and context.buckets == buckets:
            store(site, load(state + CACHE_ENTRY))
        if load(state + WANTS_CACHE_ENTRY) != 0:
            filed = call_method(context.cache_name, callable_, args, nargsf, kwnames)
            if filed == 0:  # interrupted
                c.Py_DecRef(result)
                return 0
            c.Py_DecRef(filed)
        return result
    if status == structs.STATUS_ERROR:
        return refuse(context, callable_, position)
    if status == structs.STATUS_DRIVER:
        return refuse_launch(context, callable_, code)
    if status == structs.STATUS_DEVICE and context.device_kernel != 0:
        return call_object(context.device_kernel, args, nargsf, kwnames)
    method = context.slow_name
    if status == structs.STATUS_NUMBA or status == structs.STATUS_STREAM or status == structs.STATUS_STREAMS:
        if launcher == 0 and kwnames == 0 and is_numbas(context, runtime, args, nargsf & c.NARGS_MASK):
            return call_numbas(context, runtime, callable_, args, nargsf & c.NARGS_MASK)
        method = context.numba_name
    return call_method(method, callable_, args, nargsf, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_any(callable_, args, nargsf, kwnames):
    """:func:`call_any` for CPU kernels."""
    return call_any(launch_here, load(callable_ + KERNEL_CONTEXT), 0, callable_, args, nargsf, kwnames)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def refuse_argument(context_address, callable_, position):
    """End a call by the exception of the producer of the argument at `position`. Returns 0."""
    return refuse(structs.context_at(context_address), callable_, position)


@cfunction(types.void, types.intp, types.intp, types.intp, types.intp)
def release_cached(runtime_address, frame_address, args, overload_address):
    """Release a fast entry's frame and give it back. The fast entry has not filled in ``fx_array.origin``: this does."""
    runtime = structs.runtime_at(runtime_address)
    frame = structs.frame_at(frame_address)
    note_origins(frame, structs.overload_at(overload_address), args)
    release(runtime, frame)
    give_frame(runtime, frame_address)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall(callable_, args, nargsf, kwnames):
    """``PyObject *(*vectorcallfunc)(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames)``.

    Calls the fast entry of the last cached call, because most calls have the types of the call before. The fast entry leaves
    other calls to :data:`vectorcall_any`, which is also the entry before there is a cache entry.
    """
    context_address = load(callable_ + KERNEL_CONTEXT)
    last = structs.context_at(context_address).last
    return call_word(structs.overload_at(last).fast_entry, (callable_, args, nargsf, kwnames, context_address, last))


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
    if status == structs.STATUS_UNKNOWN_SHAPE or status == structs.STATUS_UNBOUND or status == structs.STATUS_RANGE:
        if frame.key_count > report.key_capacity:
            status = structs.STATUS_NUMBA
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
    state = stack(5)
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
