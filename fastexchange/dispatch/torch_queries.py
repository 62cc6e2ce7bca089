"""Asking PyTorch about a tensor natively: what is not read in memory, and who holds its memory.

The C functions behind public methods are called. Those of a tensor may run Python code (a mode's, a finalizer's), so they are
called with the owning exports, before any view is borrowed. Those of a storage run none: they have the last word about its
memory.
"""

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE
from ..ground.dlpack import COMPLEX, INT, UINT
from ..ground.native import call_word, global_address, native, native_inline
from .structs import torch_queries_at
from .torch_guard import is_level_open


@native_inline
def is_yes(result):
    """Whether an answer is True, or none. It is given back."""
    if result == 0:
        c.PyErr_Clear()
        return True
    c.decref(result)
    return result != global_address("_Py_FalseStruct")


@native_inline
def number(result):
    """The number that an answer is, 0 for none. It is given back."""
    if result == 0:
        c.PyErr_Clear()
        return 0
    value = c.PyLong_AsSsize_t(result)
    c.decref(result)
    return value


@native
def is_differentiating_forward(guard):
    """Whether a level of forward-mode differentiation is open, so that a tensor may carry a tangent, and that matters."""
    return guard.asks_autograd != 0 and is_level_open(guard)


@native
def is_odd_if_asked(guard, ob, code, bits):
    """Whether PyTorch says that the tensor `ob`, which it has exported, is not to be taken for what it seems.

    But for :func:`is_differentiating_forward`, which is not about a tensor. `code`, `bits`: what its export says of its elements.
    """
    queries = torch_queries_at(guard.queries)
    if guard.odd_types != 0 and bits == 8 and code in (INT, UINT):
        dtype = call_word(queries.dtype, (ob, 0))
        if dtype == 0:
            c.PyErr_Clear()
            return True
        c.decref(dtype)
        if dtype != (queries.int8 if code == INT else queries.uint8):
            return True
    if guard.asks_autograd != 0 and is_yes(call_word(queries.requires_grad, (ob, 0))):
        if is_yes(c.PyObject_CallFunctionObjArgs(queries.is_grad_enabled, 0, 0)):
            return True
    if is_yes(call_word(queries.is_neg, (ob, 0))):
        return True
    return code == COMPLEX and is_yes(call_word(queries.is_conj, (ob, 0)))


@native
def is_beyond(guard, storage, begin, end):
    """Whether not all of a tensor's memory lies in a storage: that has been freed, moved or made smaller. Runs no Python code."""
    queries = torch_queries_at(guard.queries)
    start = number(call_word(queries.data_ptr, (storage, 0)))
    return start == 0 or begin < start or end > start + number(call_word(queries.nbytes, (storage, 0)))


@native
def is_movable(guard, storage):
    """Whether ``resize_()`` can free a storage's memory. Runs no Python code."""
    return is_yes(call_word(torch_queries_at(guard.queries).resizable, (storage, 0)))


@native
def forbid_moving(guard, storage):
    """Have ``resize_()`` of a storage be an error from now on. Runs Python code; if that fails, the storage is movable still."""
    made = c.PyObject_CallFunctionObjArgs(torch_queries_at(guard.queries).forbid_resizing, storage, 0)
    if made != 0:
        c.Py_DecRef(made)
    else:
        c.PyErr_Clear()


@native
def storage_of(guard, ob):
    """A new reference to the storage of a tensor; 0 if it has none, or PyTorch cannot be asked."""
    if guard.queries == 0:
        return 0
    queries = torch_queries_at(guard.queries)
    storage = call_word(queries.untyped_storage, (ob, 0))
    if storage == 0:
        c.PyErr_Clear()
    elif Py_TYPE(storage) != queries.storage_type:
        c.decref(storage)
        storage = 0
    return storage
