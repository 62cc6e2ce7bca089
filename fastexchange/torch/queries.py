"""Ask PyTorch about a tensor and its storage by the C functions behind public methods, where offsets are not known.

Functions of a tensor may run Python code (a mode's, a finalizer's). They are called together with the owning exports, before
any view is borrowed. Functions of a storage run no Python code, so the reading of the arguments calls them last.
"""

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE
from ..ground.dlpack import COMPLEX, INT, UINT
from ..ground.native import call_word, global_address, load, native
from .guard import is_level_open, queries_at


@native
def is_yes(result):
    """Whether `result` is not False; a failed query, 0, counts as True. Drops `result`, clears the exception."""
    if result == 0:
        c.PyErr_Clear()
        return True
    c.decref(result)
    return result != global_address("_Py_FalseStruct")


@native
def number(result):
    """Convert `result` to a number; a failed query, 0, gives 0. Drops `result`, clears the exception."""
    if result == 0:
        c.PyErr_Clear()
        return 0
    value = c.PyLong_AsSsize_t(result)
    c.decref(result)
    return value


@native
def is_differentiating_forward(guard):
    """Whether tensors may have tangents (a level of forward-mode differentiation is open), and the kernel has to refuse them."""
    return guard.asks_autograd != 0 and is_level_open(guard)


@native
def is_odd_if_asked(guard, ob, code, bits):
    """Whether the exported tensor `ob` is odd by PyTorch's answers, without :func:`is_differentiating_forward`.

    `code`, `bits`: the dtype of its export. GIL: held; may run Python code.
    """
    queries = queries_at(guard.queries)
    if guard.odd_types != 0 and bits == 8 and code in (INT, UINT):
        dtype = call_word(queries.dtype, (ob, 0))
        if dtype == 0:
            c.PyErr_Clear()
            return True
        c.decref(dtype)
        if dtype != (queries.int8 if code == INT else queries.uint8):
            return True
    if guard.asks_autograd != 0 and is_yes(call_word(queries.requires_grad, (ob, 0))):
        if is_yes(c.PyObject_CallNoArgs(queries.is_grad_enabled)):
            return True
    if is_yes(call_word(queries.is_neg, (ob, 0))):
        return True
    return code == COMPLEX and is_yes(call_word(queries.is_conj, (ob, 0)))


@native
def is_beyond(guard, storage, begin, end):
    """Whether some of a tensor's memory is outside its storage, which was freed, moved or shrunk. Runs no Python code."""
    queries = queries_at(guard.queries)
    start = number(call_word(queries.data_ptr, (storage, 0)))
    return start == 0 or begin < start or end > start + number(call_word(queries.nbytes, (storage, 0)))


@native
def is_movable(guard, storage):
    """Whether ``resize_()`` can free a storage's memory. Runs no Python code."""
    if guard.storage_movable != 0:
        return load(load(storage + guard.storage_object) + guard.storage_movable) & 0xFF != 0
    return is_yes(call_word(queries_at(guard.queries).resizable, (storage, 0)))


@native
def forbid_moving(guard, storage):
    """Make ``resize_()`` of a storage an error from now on. Runs Python code. If that fails, the storage stays movable."""
    made = c.PyObject_CallOneArg(queries_at(guard.queries).forbid_resizing, storage)
    if made != 0:
        c.Py_DecRef(made)
    else:
        c.PyErr_Clear()


@native
def storage_of(guard, ob):
    """Return a new reference to a tensor's storage; 0, without an exception, if PyTorch gives none."""
    if guard.queries == 0:
        return 0
    queries = queries_at(guard.queries)
    storage = call_word(queries.untyped_storage, (ob, 0))
    if storage == 0:
        c.PyErr_Clear()
    elif Py_TYPE(storage) != queries.storage_type:
        c.decref(storage)
        storage = 0
    return storage
