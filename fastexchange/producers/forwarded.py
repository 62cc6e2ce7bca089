"""Objects that are exported as another object.

Wrappers, whose attribute ``__dlpack_c_exchange_api__`` is no capsule but another object, the one they wrap: the export is that
object's, through its own type's table. A wrapper that forwards to nothing usable is exported by its ``__dlpack__``, if it has
one. And PyTorch tensors without a usable table: their ``__dlpack__`` is that of the detached tensor.
"""

from numba import types

from .. import cpython as c
from ..compiled import cfunction
from ..cpython import OB_ITEM
from ..native import call_int, global_address, load, native
from . import dunder, torch
from .python_side import python_side

MAX_WRAPPERS = 8
"""How many wrappers may be around one another."""


python_items = python_side("fastexchange.producers.forwarded")


@native
def export(py_object, out):
    """Fill the pointer at `out` with an owning export of what `py_object` stands for; the caller calls its deleter, once.

    Needs the GIL, runs Python code. Returns 0, or -1 with an exception set.
    """
    side = python_items()
    if side == 0:
        return types.int32(-1)
    answer = c.PyObject_CallFunctionObjArgs(load(side), py_object, 0)
    if answer == 0:
        return types.int32(-1)
    if answer == global_address("_Py_NoneStruct"):
        failed = call_int(c.PyLong_AsSsize_t(load(side + 8)), (py_object, out))
    else:
        failed = call_int(c.PyLong_AsSsize_t(load(answer + OB_ITEM + 8)), (load(answer + OB_ITEM), out))
    c.Py_DecRef(answer)
    return types.int32(failed)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """:data:`export`, as a function of an exchange table."""
    return export(py_object, out)


def resolve(wrapper):
    """(what it stands for, the address of the function that exports that), or None for its own ``__dlpack__``."""
    if torch.is_tensor_type(type(wrapper)):
        torch.check_storage(wrapper)
        return (wrapper.detach(), dunder.managed_tensor_from_py_object_no_sync.address) if wrapper.requires_grad else None
    from ..discovery import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper
    from ..export import exporter_of
    from ..naming import type_name

    found = _innermost(wrapper, EXCHANGE_ATTRIBUTE, is_wrapper, exporter_of)
    if found is None and not hasattr(type(wrapper), "__dlpack__"):
        raise TypeError(
            f"the {EXCHANGE_ATTRIBUTE} of this {type_name(type(wrapper))} leads to no object whose type has a PyCapsule named "
            f"{CAPSULE_NAME.decode()!r}, and it has no __dlpack__"
        )
    return found


def _innermost(wrapper, attribute: str, is_wrapper, exporter_of):
    inner = wrapper
    for _ in range(MAX_WRAPPERS):
        try:
            inner = getattr(inner, attribute)
        except Exception:  # it forwards to nothing: its own __dlpack__ has the word
            return None
        if not is_wrapper(inner):
            found = exporter_of(inner)
            return (inner, found) if found else None
    return None


def __getattr__(name):
    """``PYTHON_SIDE``: what native code needs of Python, made when it first asks (its last item is compiled then)."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve, dunder.managed_tensor_from_py_object_no_sync.address
