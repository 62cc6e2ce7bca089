"""Asking PyTorch about a tensor natively, through its public methods: what offsets do not tell, and who holds its memory.

A method costs 20 to 60 ns. Those of a tensor may run Python code (a mode's, a finalizer's), so they are called with the owning
exports, before any view is borrowed. Those of a storage run none, so they have the last word about its memory.
"""

from .. import cpython as c
from ..native import global_address, native, stack, store
from .layout import questions_at


@native
def answer(method, ob):
    """What a method returns for `ob`: a new reference. 0 if it raised an exception, which is dropped."""
    arguments = stack(1)
    store(arguments, ob)
    result = c.PyObject_VectorcallDict(method, arguments, 1, 0)
    if result == 0:
        c.PyErr_Clear()
    return result


@native
def is_yes(result):
    """Whether an answer is True, or none. It is given back."""
    if result == 0:
        c.PyErr_Clear()
        return True
    c.decref(result)
    return result != global_address("_Py_FalseStruct")


@native
def number(result):
    """The number that an answer is, 0 for none. It is given back."""
    if result == 0:
        return 0
    value = c.PyLong_AsSsize_t(result)
    c.decref(result)
    if value == -1:
        c.PyErr_Clear()  # it was none
    return value


@native
def is_differentiating_forward(questions):
    """Whether a level of forward-mode differentiation is open, so that a tensor may carry a tangent."""
    level = c.PyDict_GetItemWithError(questions.forward_names, questions.current_level)
    if level == 0:
        return True
    is_open = c.PyLong_AsSsize_t(level) >= 0
    if c.PyErr_Occurred() != 0:
        c.PyErr_Clear()
        return True
    return is_open


@native
def is_odd_if_asked(guard, ob, is_complex):
    """Whether PyTorch says that the tensor `ob`, which it has exported, is not to be taken for what it seems."""
    questions = questions_at(guard.questions)
    if guard.asks_autograd != 0:
        if is_yes(c.PyObject_GetAttr(ob, questions.requires_grad)):
            if is_yes(c.PyObject_VectorcallDict(questions.is_grad_enabled, 0, 0, 0)):
                return True
        if is_differentiating_forward(questions):
            return True
    if is_yes(answer(questions.is_neg, ob)):
        return True
    return is_complex and is_yes(answer(questions.is_conj, ob))


@native
def is_beyond(guard, storage, end):
    """Whether a storage has been freed, or made so small that it ends before `end`. Runs no Python code."""
    questions = questions_at(guard.questions)
    start = number(answer(questions.data_ptr, storage))
    return start == 0 or end > start + number(answer(questions.nbytes, storage))


@native
def is_movable(guard, storage):
    """Whether ``resize_()`` can free a storage's memory. Runs no Python code."""
    return is_yes(answer(questions_at(guard.questions).resizable, storage))


@native
def storage_of(guard, ob):
    """A new reference to the storage of a tensor; 0 if it has none."""
    if guard.questions == 0:
        return 0
    return answer(questions_at(guard.questions).untyped_storage, ob)
