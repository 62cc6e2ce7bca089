"""The fast half of the walk: arguments that look as in the last call.

Every overload carries a plan, one record for each parameter, of what the argument was when the overload was filed: its
type, its dtype, its rank, its flags. An argument that agrees with its record has the record's key, so nothing is looked
up, and no key is made. The first that does not agree ends the plan, and :func:`walk.walk` goes on from there.

Addresses in a plan are those of living objects: the overload holds the dtypes, and a type that dies clears its records
(``state.EntryTable``).
"""

from numba import types

from .. import cpython as c
from ..cpython import PyErr_Occurred
from ..native import call_int, global_address, load, native, native_inline, stack, store
from ..producers.ndarray import ndarray_at
from . import layout
from .entries import Py_TYPE
from .frame import ARRAY_BYTES
from .leaves import DL_TENSOR_WORDS, dl_tensor_at, element_field, is_plain, pack_ndarray, pack_tensor

OB_FVAL, SCALAR_VALUE = c.OB_FVAL, c.NUMPY_SCALAR_VALUE


@native_inline
def is_flagged(guarded, ob):
    """Whether the guard of `ob`'s type (in its entry, or in a plan) says that the tensor is not plain."""
    implementation = load(ob + guarded.guard_object)
    if load(implementation + guarded.guard_word) & guarded.guard_mask != 0:
        return True
    if guarded.guard_pointer == 0 or load(implementation + guarded.guard_pointer) == 0:
        return False
    return is_attribute_set(ob, guarded.guard_name)


@native
def is_attribute_set(ob, name):
    """Whether the attribute is anything but False; also if it cannot be asked natively (`name` 0)."""
    if name == 0:
        return True
    answer = c.PyObject_GetAttr(ob, name)
    if answer == 0:
        c.PyErr_Clear()
        return True
    c.Py_DecRef(answer)
    return answer != global_address("_Py_FalseStruct")


@native_inline
def follow(overload, frame, args, nargs):
    """Read arguments into `frame` as long as they agree with the overload's plan. Returns how many did.

    ``frame.start…`` then say where to go on. A producer's exception, or a view that is no longer as planned, counts as
    disagreement; nothing is owned, so the argument can be read again. (-1: a producer set an exception at ``frame.position``.)
    """
    plan_address = overload.plan
    word = frame.words
    array_address = frame.arrays
    item = args
    end = args + 8 * nargs
    view = stack(DL_TENSOR_WORDS)
    overflow = stack(1)
    has_views = False
    while item < end:
        ob = load(item)
        plan = layout.plan_at(plan_address)
        if Py_TYPE(ob) != plan.type:
            break
        kind = plan.kind
        if kind == layout.KIND_NDARRAY:
            array = ndarray_at(ob)
            if (
                array.descr != plan.dtype
                or types.intp(array.nd) != plan.ndim
                or types.intp(array.flags) & layout.KEY_FLAGS != plan.flags
            ):
                break
            slot = layout.array_at(array_address)
            slot.origin = ob + layout.ORIGIN_NDARRAY
            store(word, slot.meminfo)
            array_address += ARRAY_BYTES
            word = pack_ndarray(ob, plan.ndim, plan.itemsize, word)
        elif kind == layout.KIND_EXCHANGE:
            if plan.guard_mask != 0 and is_flagged(plan, ob):
                break
            has_views = True
            if call_int(plan.borrow, (ob, view)) != 0:
                if PyErr_Occurred() != 0:
                    frame.position = (item - args) >> 3
                    return -1
                break
            tensor = dl_tensor_at(view)
            if not is_plain(tensor) or types.intp(tensor.ndim) != plan.ndim or element_field(tensor) != plan.dtype:
                break
            flags, words_end = pack_tensor(view, plan.ndim, plan.dtype, word)
            if flags | layout.WRITEABLE != plan.flags:
                break
            slot = layout.array_at(array_address)
            slot.origin = ob + layout.ORIGIN_VIEW
            store(word, slot.meminfo)
            array_address += ARRAY_BYTES
            word = words_end
        elif kind == layout.KIND_FLOAT:
            store(word, load(ob + OB_FVAL))
            word += 8
        elif kind == layout.KIND_INT:
            value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
            if value == -1 and load(overflow) & 0xFFFFFFFF != 0:
                break
            store(word, value)
            word += 8
        elif kind == layout.KIND_BOOL:
            store(word, types.intp(ob == global_address("_Py_TrueStruct")))
            word += 8
        elif kind == layout.KIND_NUMPY_SCALAR:
            store(word, load(ob + SCALAR_VALUE))
            word += 8
        else:  # KIND_NONE: no other kind is planned
            store(word, ob)
            word += 8
        item += 8
        plan_address += layout.PLAN_SIZE
    frame.start = (item - args) >> 3
    frame.start_word = word
    frame.start_array = array_address
    if has_views and PyErr_Occurred() != 0:
        frame.position = frame.start - 1
        return -1
    return frame.start
