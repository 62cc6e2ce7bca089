"""Bound launches: calls whose arguments are read once, into a frame that keeps them for repeated launches.

:data:`pin_arguments` reads the arguments and takes an owning export of every tensor, so their memory lives as long as the
frame. A capsule owns the frame (:data:`let_go`). :data:`replace_frame` binds a launch to another frame.
``fast_entry.bound_entry`` compiles the parts here into the launch's vectorcall, which checks that the memory has not moved
(``watching``) and calls the kernel. The owner of an array that the kernel keeps is the frame's *holder*, the Python object that
has the capsule.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction, part
from ..ground.cpython import CALLABLE_CONTEXT
from ..ground.dlpack import CPU
from ..ground.native import call_word, cstring, global_address, load, native, store
from . import structs
from .fast_parts import BOXES_ARRAYS, BOXES_NONE, finish
from .frame import (
    ARRAY_BYTES,
    MEMINFO_REFCOUNT,
    drop_lists,
    give_frame,
    is_anything_kept,
    let_escape,
    release,
    take_frame,
)
from .inline_cache import look_up
from .python_calls import call_method
from .readers import FLAG_OWN
from .vectorcall import fill_report, launch, read
from .watching import is_unmoved, watch


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def pin_arguments(context_address, args, nargs, flags, report_address):
    """Read a call's arguments, in parameter order, into a frame, and give the frame to a capsule.

    Returns: by the status in the fx_report: STATUS_OK: a new reference to the capsule, and the report has the frame and the
    overload. STATUS_ERROR: 0 with an exception set. Else: a new reference to None.
    Owns: the capsule owns the frame. Unless STATUS_OK, everything is released.
    """
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    report = structs.report_at(report_address)
    report.status = structs.STATUS_ERROR
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    status, frame_address, _ = read(context_address, frame_address, args, nargs, flags | FLAG_OWN)
    frame = structs.frame_at(frame_address)
    if status == structs.STATUS_OK:
        report.frame = frame_address
        report.overload = look_up(context, frame.keys, frame.key_count)
        if report.overload == 0:
            status = structs.STATUS_UNKNOWN_SHAPE
        elif structs.overload_at(report.overload).trampoline == 0:
            status = structs.STATUS_NUMBA
        elif not watch(runtime, frame, context.device_type != CPU):
            c.PyErr_SetNone(global_address("PyExc_MemoryError"))
            status = structs.STATUS_ERROR
    status = fill_report(report, frame, status)
    result = 0
    if status == structs.STATUS_OK:
        result = c.PyCapsule_New(frame_address, 0, runtime.let_go)
        if result == 0:
            status = structs.STATUS_ERROR
        else:
            c.PyCapsule_SetContext(result, context.runtime)
    elif status != structs.STATUS_ERROR:
        result = c.new_none()
    if status != structs.STATUS_OK:
        give_back(runtime, frame_address)
    report.status = status
    return result


@native
def give_back(runtime, frame_address):
    """Release everything that a frame holds, and the frame. GIL: held."""
    frame = structs.frame_at(frame_address)
    frame.holder = 0
    watched = frame.watched
    frame.watched = 0
    c.PyMem_RawFree(watched)
    release(runtime, frame)
    give_frame(runtime, frame_address)


@cfunction(types.void, types.intp)
def let_go(capsule):
    """Destructor of the capsule that owns a frame. Does nothing at shutdown: the frame's objects may be gone."""
    if c.is_finalizing() == 0:
        give_back(structs.runtime_at(c.PyCapsule_GetContext(capsule)), c.PyCapsule_GetPointer(capsule, 0))


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def replace_frame(callable_, holder, before, after, bound_address):
    """Bind a launch to another frame in one step: no other code runs in between.

    `holder`: a list whose one item is the Python object that holds the frame. The item changes from `before` to `after`.
    `bound_address`: the ``fx_bound`` of `after`.

    Returns: 1; 0, with nothing done, if a call is running or the item is not `before`.
    GIL: held. Dropping `before` may run Python code.
    """
    state = structs.bound_at(load(callable_ + CALLABLE_CONTEXT)).state
    if state == structs.BOUND_RUNNING or c.PyList_GetItem(holder, 0) != before:
        return 0
    store(callable_ + CALLABLE_CONTEXT, bound_address)
    c.incref(after)
    c.PyList_SetItem(holder, 0, after)  # last: dropping `before` may run Python code
    return 1


@cfunction(types.void, types.intp, types.intp)
def let_kept_escape(runtime_address, frame_address):
    """:func:`let_escape` for every array that the kernel has kept, in the frame of a bound launch."""
    runtime = structs.runtime_at(runtime_address)
    frame = structs.frame_at(frame_address)
    for i in range(frame.array_count):
        array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
        if load(array.meminfo + MEMINFO_REFCOUNT) != array.held:
            let_escape(runtime, frame, i)


# ---- the parts of a bound launch's entry -----------------------------------------------------------------------------


@part(types.intp(types.intp, types.intp, types.intp, types.intp))
def enter(callable_, nargsf, kwnames, is_alone):
    """Return the launch's ``fx_bound``; 0 if the call has arguments, another call is in progress, or memory has moved.

    `is_alone`: no other code can run during the kernel, so the state needs no check.
    """
    at = load(callable_ + CALLABLE_CONTEXT)
    bound = structs.bound_at(at)
    if nargsf & c.NARGS_MASK != 0 or kwnames != 0:
        return 0
    if (is_alone == 0 and bound.state != structs.BOUND_FREE) or not is_unmoved(bound.watched):
        return 0
    if is_alone == 0:
        bound.state = structs.BOUND_RUNNING
    return at


@part(types.intp(types.intp, types.intp, types.intp, types.intp))
def refuse(callable_, args, nargsf, kwnames):
    """Make a call that :func:`enter` has refused by the slow path's method."""
    bound = structs.bound_at(load(callable_ + CALLABLE_CONTEXT))
    return call_method(bound.slow_name, callable_, args, nargsf, kwnames)


@part(types.intp(types.intp))
def words_of(bound_address):
    """The address of the arguments' words."""
    return structs.bound_at(bound_address).words


@part(types.intp(types.intp))
def result_of(bound_address):
    """The address to which the kernel writes its result."""
    return structs.frame_at(structs.bound_at(bound_address).frame).result


@part(types.intp(types.intp))
def kernel_of(bound_address):
    """The address of the compiled kernel."""
    return structs.overload_at(structs.bound_at(bound_address).overload).kernel


@native
def with_outputs(bound, value):
    """Return the outputs as the result of a kernel that declares some. Drops `value`, the kernel's own result; 0: it has raised.

    Returns: a new reference, or 0 with an exception set. Raises: TypeError if `value` is not None.
    """
    if value == 0:
        return 0
    is_none = value == global_address("_Py_NoneStruct")
    c.Py_DecRef(value)
    if not is_none:
        return refuse_result()
    c.Py_IncRef(bound.outputs)
    return bound.outputs


@native
def refuse_result():
    """Raise TypeError for a result of a kernel that declares outputs. Returns 0."""
    message = cstring("a kernel that declares outputs, fast_args(out=...), has to return None")
    c.PyErr_SetString(global_address("PyExc_TypeError"), message)
    return 0


@part(types.intp(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp, types.intp))
def leave(bound_address, code, excinfo, boxing, may_keep, is_alone, has_outputs):
    """End a launch whose kernel has returned `code`. Returns a new reference, or 0 with an exception set."""
    bound = structs.bound_at(bound_address)
    context = structs.context_at(bound.context)
    runtime = structs.runtime_at(context.runtime)
    overload = structs.overload_at(bound.overload)
    frame = structs.frame_at(bound.frame)
    if boxing == BOXES_ARRAYS and code == 0:
        value = call_word(runtime.box_result, (bound.context, bound.overload, bound.frame, bound.args))
    else:
        value = finish(context, overload, code, frame.result, excinfo, boxing != BOXES_NONE)
    if may_keep != 0 and is_anything_kept(frame, frame.array_count):
        call_word(runtime.let_kept_escape, (context.runtime, bound.frame))
    if has_outputs != 0:
        value = with_outputs(bound, value)
    if is_alone == 0:
        bound.state = structs.BOUND_FREE
    context.calls += 1
    return value


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_unlocked(callable_, args, nargsf, kwnames):
    """The vectorcall of bound launches that release the GIL, have lists among their arguments, or have no entry of their own."""
    bound = structs.bound_at(load(callable_ + CALLABLE_CONTEXT))
    if nargsf & c.NARGS_MASK != 0 or kwnames != 0 or bound.state != structs.BOUND_FREE or not is_unmoved(bound.watched):
        return call_method(bound.slow_name, callable_, args, nargsf, kwnames)
    context = structs.context_at(bound.context)
    frame = structs.frame_at(bound.frame)
    bound.state = structs.BOUND_RUNNING
    result = launch(bound.context, bound.frame, bound.overload, bound.args)
    if frame.lists_changed != 0:  # the launch becomes BOUND_SPENT: no other call uses this frame
        drop_lists(frame)
    if is_anything_kept(frame, frame.array_count):
        call_word(structs.runtime_at(context.runtime).let_kept_escape, (context.runtime, bound.frame))
    if bound.outputs != 0:
        result = with_outputs(bound, result)
    bound.state = structs.BOUND_SPENT if frame.lists_changed != 0 else structs.BOUND_FREE
    context.calls += 1
    return result
