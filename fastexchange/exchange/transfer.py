"""Native conversions: ``from_dlpack`` and ``convert`` between types with exchange tables.

Calls that native code cannot make (unknown types, keywords, tensors that need their framework's checks, copies) go to a Python
method.
"""

from numba import types

from ..dispatch import structs
from ..dispatch.python_calls import call_method
from ..dispatch.type_table import find
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.dltensor import (
    DL_TENSOR,
    READONLY,
    READONLY_IS_ASSUMED,
    SOUND,
    delete_managed,
    dl_tensor_at,
    examine_memory,
    managed_at,
)  # fmt: skip
from ..ground.native import call_int, call_word, global_address, load, native, stack, store, struct_at

CDEF = """
/* The context of from_dlpack or convert. */
typedef struct {
    int64_t runtime;
    int64_t slow_name;          /* PyObject *, the name of the fallback, a method */
    int64_t target;             /* the type of the result; 0: the call's second argument */
} fx_transfer;
"""

transfer_at = struct_at("fx_transfer")


@native
def is_subtype(cls, base):
    """Whether the type at `cls` is the type at `base`, or derives from it."""
    if cls == base:
        return True
    # `base` may be any object: PyType_IsSubtype takes types only.
    return c.PyType_IsSubtype(Py_TYPE(base), global_address("PyType_Type")) != 0 and c.PyType_IsSubtype(cls, base) != 0


@native
def is_final():
    """Whether the pending exception ends the call.

    After a BufferError or a RuntimeError (PyTorch raises it in place of BufferError) Python tries again, or raises a better
    message.
    """
    if PyErr_Occurred() == 0:
        return False
    if (
        c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) == 0
        and c.PyErr_ExceptionMatches(global_address("PyExc_RuntimeError")) == 0
    ):
        return True
    c.PyErr_Clear()
    return False


@native
def runs_backwards(tensor):
    """Whether a DLTensor has a negative stride, on which PyTorch aborts the process."""
    if tensor.strides == 0:
        return False
    backwards = False
    for i in range(tensor.ndim):
        backwards |= load(tensor.strides + 8 * i) < 0 and load(tensor.shape + 8 * i) > 1
    return backwards


@native
def is_odd(entry, ob, tensor):
    """What the kind of an object's type says of it: see ``Kind.is_odd``."""
    function = structs.kind_at(structs.entry_at(entry).kind).is_odd
    return function != 0 and call_word(function, (entry, ob, tensor)) != 0


@native
def transfer(state, ob, to):
    """Make a tensor of the type at `to` that shares memory with `ob`.

    Returns: (a new reference, or 0 with an exception set; True), or (0, False) if Python has to make it.
    """
    runtime = structs.runtime_at(state.runtime)
    source = find(runtime, Py_TYPE(ob))
    target = find(runtime, to)
    if source == 0 or target == 0 or structs.entry_at(source).managed == 0:
        return 0, False
    to_object = structs.entry_at(target).to_object
    takes_all = structs.entry_at(target).takes_all
    if to_object == 0 or structs.kind_at(structs.entry_at(target).kind).makes_tensors == 0:
        return 0, False  # another function may have consumed the export before it failed: only Python can tell
    if is_odd(source, ob, 0):
        return 0, False
    out = stack(1)
    store(out, 0)
    if call_int(structs.entry_at(source).managed, (ob, out)) != 0 or load(out) == 0:
        return 0, is_final()
    export = load(out)
    managed = managed_at(export)
    if managed.version.major != 1:  # of other versions only the deleter's place is known
        delete_managed(export)
        return 0, PyErr_Occurred() != 0
    is_mutable = managed.flags & READONLY == 0
    managed.flags &= ~(READONLY | READONLY_IS_ASSUMED)
    if not is_mutable:
        managed.flags |= READONLY
    tensor = dl_tensor_at(export + DL_TENSOR)
    # PyTorch before 2.9 ignores an offset, also behind the table that tvm-ffi gives it: Python code clears it.
    has_offset = tensor.byte_offset != 0
    if PyErr_Occurred() != 0 or examine_memory(tensor) != SOUND or (
        takes_all == 0 and (not is_mutable or has_offset or runs_backwards(tensor) or tensor.device.device_type != CPU)
    ):
        delete_managed(export)
        return 0, PyErr_Occurred() != 0
    if is_odd(source, ob, export + DL_TENSOR):  # Python code may have changed it during the export
        delete_managed(export)
        return 0, False
    made = stack(1)
    store(made, 0)
    if call_int(to_object, (export, made)) != 0 or load(made) == 0:
        delete_managed(export)  # the function has consumed nothing
        return 0, is_final()
    if PyErr_Occurred() != 0:
        c.Py_DecRef(load(made))
        return 0, True
    if Py_TYPE(load(made)) != to:  # `to` is a subclass of the type with the table
        c.Py_DecRef(load(made))
        return 0, False
    return load(made), True


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_transfer(callable_, args, nargsf, kwnames):
    """Vectorcall of ``from_dlpack`` (one argument) and of ``convert`` (two)."""
    state = transfer_at(load(callable_ + CALLABLE_CONTEXT))
    nargs = nargsf & c.NARGS_MASK
    if kwnames == 0:
        if state.target != 0 and nargs == 1:
            result, was_tried = transfer(state, load(args), state.target)
            if was_tried:
                return result
        elif state.target == 0 and nargs == 2:
            ob = load(args)
            to = load(args + 8)
            known = find(structs.runtime_at(state.runtime), Py_TYPE(ob))
            is_tensor = known != 0 and structs.entry_at(known).managed != 0
            if is_tensor and to != global_address("PyBaseObject_Type") and is_subtype(Py_TYPE(ob), to):
                c.Py_IncRef(ob)
                return ob
            result, was_tried = transfer(state, ob, to)
            if was_tried:
                return result
    return call_method(state.slow_name, callable_, args, nargsf, kwnames)
