"""Objects that are exported as another object: wrappers, and PyTorch tensors without a usable table.

A wrapper's attribute ``__dlpack_c_exchange_api__`` is no capsule but the wrapped tensor, which its own type's table exports. If
that is not usable, the wrapper's ``__dlpack__``, if any, makes the export. For PyTorch tensors without a usable table the
``__dlpack__`` of the detached tensor makes it.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM
from ..ground.native import call_int, global_address, load, native
from ..producers.python_side import python_side
from .exchange_tables import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper, is_wrapper_type
from .kind import Discovery
from .tensors import MEANING, PATH, exported

python_items = python_side("fastexchange.exchange.wrappers")  # imported with the first such object


@native
def export(py_object, out):
    """Fill the pointer at `out` with an owning export of the object for which `py_object` stands.

    Returns: 0, or -1 with an exception set. Owns: the caller calls the deleter once. GIL: held; runs Python code.
    """
    side = python_items()
    if side == 0:
        return types.int32(-1)
    answer = c.PyObject_CallOneArg(load(side), py_object)
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
    """:data:`export` as a function for an exchange table."""
    return export(py_object, out)


_FORWARDED = exported(PATH, MEANING, is_read_on_device=False)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """A wrapper around a tensor whose type has an exchange table."""
    if not is_wrapper_type(cls) and (instance is None or not is_wrapper(instance)):
        return None
    notes.append(
        f"its {EXCHANGE_ATTRIBUTE} is no PyCapsule named {CAPSULE_NAME.decode()!r} but another object: each call exports that "
        "object, or calls __dlpack__ if that object has no exchange table"
    )
    managed = managed_tensor_from_py_object_no_sync.address
    return Discovery(_FORWARDED, {"managed": managed, "asks_python": 1}, notes)
