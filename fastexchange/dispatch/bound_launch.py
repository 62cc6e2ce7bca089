"""Bound launches: calls whose arguments are read once, into a frame that keeps them for repeated launches.

:data:`pin_arguments` reads the arguments and takes an owning export of every tensor, so their memory lives as long as the
frame. A capsule owns the frame (:data:`let_go`). :data:`replace_frame` binds a launch to another frame.
The launch's vectorcall checks that the memory has not moved (``watching``) and calls the kernel. It is generated
(``bound_entry``), or :data:`vectorcall_unlocked`. The owner of an array that the kernel keeps is the frame's *holder*, the Python
object that has the capsule.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT
from ..ground.dlpack import CPU
from ..ground.native import call_word, cstring, global_address, load, native, store
from . import structs
from .frame import (
    ARRAY_BYTES,
    MEMINFO_REFCOUNT,
    drop_lists,
    give_frame,
    is_anything_kept,
    let_escape,
    release,
    take_back,
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
    take_back(frame)
    for i in range(frame.array_count):
        array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
        if load(array.meminfo + MEMINFO_REFCOUNT) != array.held:
            let_escape(runtime, frame, i)


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
