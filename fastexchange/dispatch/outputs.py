"""Outputs that the caller's framework allocates: ``fast_args(out=…)``, natively.

A kernel with outputs has a vectorcall of its own, :data:`vectorcall_with_outputs`. It brings the arguments into parameter order,
makes the outputs that are not given (``program.run_program``, by ``managed_tensor_allocator`` and
``managed_tensor_to_py_object_no_sync`` of the framework's table), makes the call like any other, with the outputs as its last
arguments, and returns them. Allocation may run Python code, so it comes before any view is borrowed.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import KERNEL_CONTEXT, PyErr_Occurred
from ..ground.dltensor import delete_managed
from ..ground.native import call_int, call_word, external, global_address, load, native, stack, store
from ..ground.shape_notation import MAX_PARAMETERS
from . import structs
from .binding import bind_into
from .bound_launch import refuse_result
from .frame import drop, give_frame, take_frame
from .program import run_program
from .vectorcall import call_method

strncpy = external("strncpy", types.intp, types.intp, types.intp, types.intp)

CALL_WORDS = 1 + MAX_PARAMETERS
ERROR_BYTES = 256


@cfunction(types.void, types.intp, types.intp, types.intp)
def note_error(error_ctx, kind, message):
    """``SetError`` of an allocator: copy what it says into the ERROR_BYTES at `error_ctx`, unless that is NULL."""
    if error_ctx != 0 and message != 0:
        strncpy(error_ctx, message, ERROR_BYTES - 1)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def allocate(allocator, to_object, prototype, set_error, error_ctx):
    """A new tensor by a table's two functions, like the DLTensor at `prototype`: a new reference, or 0.

    Of an exception that was set nothing is left if `error_ctx` is NULL; if it is not, and none was set, the result is None.
    """
    out = stack(2)
    store(out, 0)
    store(out + 8, 0)
    failed = call_int(allocator, (prototype, out, error_ctx, set_error)) != 0
    if failed or load(out) == 0 or PyErr_Occurred() != 0:
        if not failed and load(out) != 0:
            delete_managed(load(out))
    elif call_int(to_object, (load(out), out + 8)) != 0 or load(out + 8) == 0 or PyErr_Occurred() != 0:
        if load(out + 8) != 0:
            c.Py_DecRef(load(out + 8))
        store(out + 8, 0)
    if load(out + 8) == 0:
        if error_ctx == 0:
            c.PyErr_Clear()
        elif PyErr_Occurred() == 0:
            none = global_address("_Py_NoneStruct")
            c.incref(none)
            return none
    return load(out + 8)


@native
def all_outputs(context, args):
    """The outputs among the arguments, which are new references: one is the result, of several a tuple; 0 with an exception."""
    first = context.parameter_count - context.output_count
    if context.output_count == 1:
        return load(args + 8 * first)
    made = c.PyTuple_New(context.output_count)
    for i in range(context.output_count):
        if made != 0:
            store(made + c.OB_ITEM + 8 * i, load(args + 8 * (first + i)))
        else:
            c.Py_DecRef(load(args + 8 * (first + i)))
    return made


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_with_outputs(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of a kernel that declares outputs: those that are not given are allocated, and all are returned."""
    context_address = load(callable_ + KERNEL_CONTEXT)
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    count = context.parameter_count
    first = count - context.output_count
    own = stack(CALL_WORDS)
    given = own + 8
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    status, frame_address = bind_into(context, runtime, frame_address, args, nargsf & c.NARGS_MASK, kwnames)
    bound = structs.frame_at(frame_address).bound
    if status == structs.STATUS_OK:
        for i in range(count):
            store(given + 8 * i, load(bound + 8 * i))
        for i in range(first, count):
            if load(given + 8 * i) == global_address("_Py_NoneStruct"):  # out=None
                store(given + 8 * i, context.omitted)
    give_frame(runtime, frame_address)
    if status == structs.STATUS_ERROR:
        return 0
    if status != structs.STATUS_OK or context.outputs == 0:
        return call_method(context.outputs_name, callable_, args, nargsf, kwnames)
    made = stack(1)
    store(made, 0)
    is_ready = run_program(context, runtime, given, made)
    for i in range(first, count):
        is_made = load(made) >> (i - first) & 1 != 0
        if is_ready and not is_made:
            c.incref(load(given + 8 * i))
        elif is_made and not is_ready:
            c.Py_DecRef(load(given + 8 * i))
    if not is_ready:
        return call_method(context.outputs_name, callable_, args, nargsf, kwnames)
    last = context.last
    plain = (callable_, given, count | c.VECTORCALL_ARGUMENTS_OFFSET, 0, context_address, last)
    result = call_word(structs.overload_at(last).fast_entry, plain)
    if result == global_address("_Py_NoneStruct"):
        c.Py_DecRef(result)
        return all_outputs(context, given)
    if result != 0:
        c.Py_DecRef(result)
        refuse_result()
    for i in range(first, count):
        drop(load(given + 8 * i))
    return 0
