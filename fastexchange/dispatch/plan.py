"""The parts of a fast entry: reading one argument that looks as it did when the call was planned.

An overload that is called often gets plans, one for each combination of argument types: a record for each parameter of
what the argument was then, its type, its dtype, its flags. An argument that agrees with its record has the record's key,
so nothing is looked up and no key is made.
``entry.fast_entry`` strings the parts together, one for each parameter, and the kernel's call behind them, and compiles
that into one function: the words between them become registers.

Addresses in a plan are those of living objects: the overload holds the dtypes, and a type that dies clears its records
(``state.EntryTable``). A part reads what it needs from the record; only the rank is compiled in.
"""

from numba import types

from .. import cpython as c
from ..cpython import PyErr_Occurred
from ..native import WORDS, call_int, global_address, load, native_inline, part, put, stack
from ..producers.ndarray import ndarray_at
from . import layout
from .entries import Py_TYPE
from .leaves import DL_TENSOR_WORDS, dl_tensor_at, is_plain, pack_ndarray, pack_tensor

OB_FVAL, SCALAR_VALUE = c.OB_FVAL, c.NUMPY_SCALAR_VALUE

AGREES, DIFFERS, FAILED = 1, 0, -1

PART_SIGNATURE = types.intp(types.intp, types.intp, types.intp, WORDS, types.intp)
"""``part(ob, plan, array, words, ndim)``: read `ob`, write its words; an array takes the memory block at `array`."""


@native_inline
def is_odd(guarded, ob):
    """Whether the guard of `ob`'s type (in its entry, or in a plan) says that the tensor is of an unusual kind."""
    implementation = load(ob + guarded.guard_object)
    return guarded.guard_mask != 0 and load(implementation + guarded.guard_word) & guarded.guard_mask != 0


@native_inline
def is_watched(guarded, ob):
    """Whether autograd may know the tensor, so that it has to be asked; that may run Python code."""
    if guarded.guard_pointer == 0:
        return False
    return load(load(ob + guarded.guard_object) + guarded.guard_pointer) != 0


@part(PART_SIGNATURE)
def read_ndarray(ob, plan_address, array_address, words, ndim):
    """An ndarray, its struct read in place."""
    plan = layout.plan_at(plan_address)
    if Py_TYPE(ob) != plan.type:
        return DIFFERS
    array = ndarray_at(ob)
    if (
        array.descr != plan.dtype
        or types.intp(array.nd) != ndim
        or types.intp(array.flags) & layout.KEY_FLAGS != plan.flags
    ):
        return DIFFERS
    put(words, 0, layout.array_at(array_address).meminfo)
    pack_ndarray(ob, ndim, plan.itemsize, words)
    return AGREES


@part(PART_SIGNATURE)
def read_view(ob, plan_address, array_address, words, ndim):
    """A tensor, a borrowed view of it taken through its type's exchange table."""
    plan = layout.plan_at(plan_address)
    if Py_TYPE(ob) != plan.type or is_odd(plan, ob) or is_watched(plan, ob):
        return DIFFERS
    view = stack(DL_TENSOR_WORDS)
    if call_int(plan.borrow, (ob, view)) != 0:
        return FAILED if PyErr_Occurred() != 0 else DIFFERS
    tensor = dl_tensor_at(view)
    if not is_plain(tensor) or types.intp(tensor.ndim) != ndim:
        return DIFFERS
    # One by one, as they were stored: a load of both bytes would wait for both stores to leave the pipeline.
    if types.intp(tensor.dtype.code) != plan.dtype & 0xFF or types.intp(tensor.dtype.bits) != plan.dtype >> 8:
        return DIFFERS
    flags, _ = pack_tensor(view, ndim, plan.dtype, words)
    if flags | layout.WRITEABLE != plan.flags:
        return DIFFERS
    put(words, 0, layout.array_at(array_address).meminfo)
    return AGREES


@part(PART_SIGNATURE)
def read_float(ob, plan_address, array_address, words, ndim):
    """A Python float."""
    put(words, 0, load(ob + OB_FVAL))
    return types.intp(Py_TYPE(ob) == layout.plan_at(plan_address).type)


@part(PART_SIGNATURE)
def read_int(ob, plan_address, array_address, words, ndim):
    """A Python int that fits into int64."""
    if Py_TYPE(ob) != layout.plan_at(plan_address).type:
        return DIFFERS
    overflow = stack(1)
    value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
    put(words, 0, value)
    return types.intp(value != -1 or load(overflow) & 0xFFFFFFFF == 0)


@part(PART_SIGNATURE)
def read_bool(ob, plan_address, array_address, words, ndim):
    """A Python bool."""
    put(words, 0, types.intp(ob == global_address("_Py_TrueStruct")))
    return types.intp(Py_TYPE(ob) == layout.plan_at(plan_address).type)


@part(PART_SIGNATURE)
def read_numpy_scalar(ob, plan_address, array_address, words, ndim):
    """A NumPy scalar of at most 8 bytes."""
    if Py_TYPE(ob) != layout.plan_at(plan_address).type:
        return DIFFERS
    put(words, 0, load(ob + SCALAR_VALUE))
    return AGREES


@part(PART_SIGNATURE)
def read_none(ob, plan_address, array_address, words, ndim):
    """None."""
    put(words, 0, ob)
    return types.intp(Py_TYPE(ob) == layout.plan_at(plan_address).type)


@part(types.intp())
def was_error_set():
    """Whether a producer that returned success has set an exception.

    It is cleared: the general way finds it again, and with it the argument.
    """
    if PyErr_Occurred() == 0:
        return 0
    c.PyErr_Clear()
    return 1


PARTS = {
    layout.KIND_NDARRAY: read_ndarray,
    layout.KIND_EXCHANGE: read_view,
    layout.KIND_FLOAT: read_float,
    layout.KIND_INT: read_int,
    layout.KIND_BOOL: read_bool,
    layout.KIND_NUMPY_SCALAR: read_numpy_scalar,
    layout.KIND_NONE: read_none,
}
"""By kind of entry. A parameter of any other kind has no part, and its overload no fast entry."""
