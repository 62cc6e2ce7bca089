"""The native dispatcher: from CPython's vectorcall to a compiled kernel, without Python in between.

:func:`call_any` makes a call in these steps. :data:`vectorcall` tries the fast entry of the last cached call first.

1. Take a frame.
2. Read the arguments into it: words and keys.
3. Find the overload with equal keys, and call it by its trampoline.
4. Box the result.
5. Release everything that the call holds.

It never learns by itself: calls that it does not know go to a Python method of the kernel, the *slow path*. That uses
:data:`attempt`, the same call with a report.

Ownership: a frame holds every export of its call; ``frame.release`` releases each exactly once, on every exit.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR_WORDS
from ..ground.native import call_int, call_word, global_address, load, native, stack, store
from ..producers.ndarray import descr_at, ndarray_at
from . import structs
from .binding import bind_into
from .fast_parts import finish
from .frame import TUPLE_WORDS, drop_lists, give_frame, grow_frame, note_origins, release, take_frame
from .lists import drop_unchanged, reflect_changes
from .pack import plain_field
from .readers import DRY_RUN
from .type_table import GOLDEN, find

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM
KERNEL_CONTEXT = c.KERNEL_CONTEXT


@native
def look_up(context, keys, count):
    """The address of the first overload with these keys; 0 if there is none."""
    hash_ = 0
    for i in range(count):
        hash_ = (hash_ << 5) ^ (hash_ >> 59) ^ load(keys + 8 * i)
    buckets = context.buckets
    at = load(buckets + 8 + 8 * ((hash_ * GOLDEN >> 40) & load(buckets)))
    while at != 0:
        overload = structs.overload_at(at)
        if overload.hash == hash_ and overload.key_count == count:
            i = 0
            while i < count and load(keys + 8 * i) == load(overload.keys + 8 * i):
                i += 1
            if i == count:
                return at
        at = overload.next
    return 0


FOLLOWS, IS_OTHER, IS_DEAD = 0, 1, 2


@native
def is_expected(overload, args):
    """Whether arguments have the types of a cache entry; IS_DEAD if one of these types has died."""
    pending = stack(TUPLE_WORDS)
    depth = 0
    items = args
    left = overload.expected_count
    for i in range(overload.expected_count):
        while left == 0:
            depth -= 1
            items = load(pending + 16 * depth)
            left = load(pending + 16 * depth + 8)
        ob = load(items)
        items += 8
        left -= 1
        expected = structs.expected_at(overload.expected + structs.EXPECTED_SIZE * i)
        if Py_TYPE(ob) != expected.type:
            return IS_DEAD if expected.type == 0 else IS_OTHER
        if expected.items >= 0:
            if load(ob + OB_SIZE) != expected.items or depth == structs.MAX_TUPLE_DEPTH:
                return IS_OTHER
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = ob + OB_ITEM
            left = expected.items
    return FOLLOWS


@native
def find_cached(context, first, args):
    """Find the entry in the inline cache of the overload `first` for these arguments' types, and make it the context's last.

    Returns: the entry; `first` if there is none; 0 if one should be made now (``KernelContext.add_cache_entry``).
    """
    if context.variadic != 0:
        return first
    at = structs.overload_at(first).cached
    has_room = structs.overload_at(first).cached_count < structs.MAX_CACHED
    while at != 0:
        overload = structs.overload_at(at)
        outcome = is_expected(overload, args)
        has_room |= outcome == IS_DEAD
        if outcome == FOLLOWS:
            context.last = at
            return at
        at = overload.cached
    overload = structs.overload_at(first)
    if has_room:
        overload.uncached_calls += 1
        if overload.uncached_calls > structs.CALLS_PER_CACHE_ENTRY:
            overload.uncached_calls = 0
            return 0
    return first


@native
def site_of(context, runtime, args, nargs):
    """The address in ``fx_context.sites`` for arguments of these types, dtypes, ranks and flags, as far as is quick."""
    hash_ = 0
    known_type = 0
    entry_address = 0
    for i in range(nargs):
        ob = load(args + 8 * i)
        word = Py_TYPE(ob)
        if word != known_type:
            known_type = word
            entry_address = find(runtime, word)
        if entry_address != 0:
            entry = structs.entry_at(entry_address)
            if entry.kind == structs.KIND_NDARRAY:
                array = ndarray_at(ob)
                word ^= array.descr ^ types.intp(array.nd) << 32 ^ (types.intp(array.flags) & structs.KEY_FLAGS) << 40
            elif entry.kind == structs.KIND_EXCHANGE and entry.guard != 0:
                guard = structs.guard_at(entry.guard)
                implementation = load(ob + guard.object)
                word ^= (load(implementation + guard.element_type) & 63) << 32
                word ^= (load(implementation + guard.ndim) if guard.ndim != 0 else 0) << 40
        hash_ = (hash_ ^ word) * GOLDEN
    return context.sites + 8 * (hash_ >> 40 & (structs.SITES - 1))


@native
def call_entry(context_address, overload_address, callable_, args, nargs):
    """Make a call with positional arguments by the fast entry of an overload, which leaves others to :data:`vectorcall_any`."""
    fast_entry = structs.overload_at(overload_address).fast_entry
    return call_word(fast_entry, (callable_, args, nargs, 0, context_address, overload_address))


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
    if frame.list_count != 0:
        drop_unchanged(frame)
    if code == 0 and overload.boxes_arrays != 0:
        box_result = structs.runtime_at(context.runtime).box_result
        result = call_word(box_result, (context_address, overload_address, frame_address, args))
    else:
        result = finish(context, overload, code, frame.result, excinfo, overload.box)
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


@native
def run_by(launch, context_address, args, nargs, flags, state):
    """Make a call with arguments in parameter order.

    `state`: five words: the frame, which a larger one may replace; the result; whether such calls should get a cache entry now;
    the ``fx_launcher`` of a CUDA kernel; the cache entry for such calls, or 0.

    Returns: a STATUS_*. With STATUS_OK the result is a new reference, or 0 with an exception set.
    Owns: everything that the call holds is released in any case.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    status, frame_address, args = read(context_address, load(state), args, nargs, flags)
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
            chosen = find_cached(context, at, args) if frame.export_count == 0 else at
            wants_cache_entry = chosen == 0
            entry = chosen if chosen != at else 0
            status, result = launch(context_address, frame_address, at, args, load(state + 24))
    release(runtime, frame)
    store(state, frame_address)
    store(state + 8, result)
    store(state + 16, types.intp(wants_cache_entry and result != 0 and status == structs.STATUS_OK))
    store(state + 32, entry)
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
def call_method(name, callable_, args, nargsf, kwnames):
    """Call the kernel's method `name` with the call's arguments. Returns a new reference, or 0 with an exception set."""
    nargs = nargsf & c.NARGS_MASK
    if nargsf < 0:  # PY_VECTORCALL_ARGUMENTS_OFFSET: the word before the arguments may be used during the call
        saved = load(args - 8)
        store(args - 8, callable_)
        result = c.PyObject_VectorcallMethod(name, args - 8, nargs + 1, kwnames)
        store(args - 8, saved)
        return result
    total = nargs + (load(kwnames + OB_SIZE) if kwnames != 0 else 0)
    copy = c.PyMem_RawMalloc(8 * (total + 1))
    if copy == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    store(copy, callable_)
    for i in range(total):
        store(copy + 8 + 8 * i, load(args + 8 * i))
    result = c.PyObject_VectorcallMethod(name, copy, nargs + 1, kwnames)
    c.PyMem_RawFree(copy)
    return result


@native
def call_object(callable_, args, nargsf, kwnames):
    """Call an object of this package by its vectorcall with the call's arguments. Returns a new reference, or 0."""
    return call_word(load(callable_ + c.CALLABLE_VECTORCALL), (callable_, args, nargsf, kwnames))


@native
def refuse_launch(context, callable_, code):
    """Let Python raise the error of CUDA's driver for a launch. Returns 0."""
    arguments = stack(2)
    number = c.PyLong_FromSsize_t(code)
    if number == 0:
        return 0
    store(arguments, callable_)
    store(arguments + 8, number)
    result = c.PyObject_VectorcallMethod(context.driver_error_name, arguments, 2, 0)
    c.Py_DecRef(number)
    if result != 0:
        c.Py_DecRef(result)
    return 0


@native
def take_error(error):
    """Move the pending exception to the three words at `error`: type, value and traceback. Owns: the caller owns them."""
    c.save_error(error)
    c.PyErr_NormalizeException(error, error + 8, error + 16)
    if load(error + 16) != 0:
        c.PyException_SetTraceback(load(error + 8), load(error + 16))


@native
def drop_error(error):
    """Drop the references that :func:`take_error` has stored at `error`."""
    for i in range(3):
        if load(error + 8 * i) != 0:
            c.Py_DecRef(load(error + 8 * i))


@native
def refuse(context, callable_, position):
    """Let Python raise a producer's exception with the argument's name (``kernel._refused(position, exception)``). Returns 0."""
    error = stack(3)
    arguments = stack(3)
    take_error(error)
    index = c.PyLong_FromSsize_t(position)
    if index != 0:
        store(arguments, callable_)
        store(arguments + 8, index)
        store(arguments + 16, load(error + 8))
        result = c.PyObject_VectorcallMethod(context.refused_name, arguments, 3, 0)
        if result != 0:
            c.Py_DecRef(result)
        c.Py_DecRef(index)
    drop_error(error)
    return 0


@native
def is_numbas(context, runtime, args, nargs):
    """Whether Numba's dispatcher can make the call itself: it takes the arguments as they are, and its result is the result."""
    if context.returns_type != 0 or context.returns_position >= 0 or context.device_kernel != 0:
        return False
    if context.positional_count != context.parameter_count:  # Numba assigns the defaults of keyword-only parameters otherwise
        return False
    for i in range(nargs):
        ob = load(args + 8 * i)
        entry_address = find(runtime, Py_TYPE(ob))
        if entry_address == 0:
            return False
        entry = structs.entry_at(entry_address)
        kind = entry.kind
        if kind == structs.KIND_NUMBA:
            if entry.is_typed == 0:
                return False
        elif kind == structs.KIND_NDARRAY:
            if plain_field(runtime, descr_at(ndarray_at(ob).descr)) == 0:
                return False
        elif (
            not structs.is_scalar_kind(kind) and kind != structs.KIND_NONE and kind != structs.KIND_CONSTANT
            and kind != structs.KIND_STRING
        ):  # fmt: skip
            return False
    return True


@native
def call_numbas(context, runtime, callable_, args, nargs):
    """Make a call by Numba's dispatcher. ``kernel._failed(exception, arguments)`` raises its exceptions."""
    given = c.PyTuple_New(nargs)
    if given == 0:
        return 0
    for i in range(nargs):
        c.incref(load(args + 8 * i))
        store(given + OB_ITEM + 8 * i, load(args + 8 * i))
    context.numba_calls += 1
    result = call_word(runtime.numbas_call, (callable_, given, 0))
    if result == 0 and c.PyErr_Occurred() != 0:
        error = stack(3)
        arguments = stack(3)
        take_error(error)
        store(arguments, callable_)
        store(arguments + 8, load(error + 8))
        store(arguments + 16, given)
        result = c.PyObject_VectorcallMethod(context.failed_name, arguments, 3, 0)
        drop_error(error)
    c.Py_DecRef(given)
    return result


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
        if entry != 0 and entry != context.last and context.is_trying == 0:
            context.last, context.is_trying = entry, 1
            result = call_entry(context_address, entry, callable_, args, nargsf)
            context.is_trying = 0
            return result
        context.is_trying = 0
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
    store(state, frame_address)
    store(state + 24, launcher)
    if status == structs.STATUS_OK:
        status = run_by(launch, context_address, items, nargs, 0, state)
    frame = load(state)
    position = structs.frame_at(frame).position
    code = structs.frame_at(frame).code
    give_frame(runtime, frame)
    if status == structs.STATUS_OK:
        context.calls += 1
        result = load(state + 8)
        if site != 0 and load(state + 32) != 0:
            store(site, load(state + 32))
        if load(state + 16) != 0:
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
    store(state, frame_address)
    store(state + 24, report.launcher)
    status = call_word(context.run, (context_address, args, nargs, flags, state))
    frame_address = load(state)
    frame = structs.frame_at(frame_address)
    result = load(state + 8)
    status = fill_report(report, frame, status)
    give_frame(runtime, frame_address)
    report.status = status
    if status != structs.STATUS_OK and status != structs.STATUS_ERROR:
        result = c.new_none()
    return result
