"""Objects that are exported in place of another object.

- Wrappers: their attribute ``__dlpack_c_exchange_api__`` is not a capsule but the wrapped object. The wrapped object is exported
  by the exchange table of its type. If it has none, the wrapper's own ``__dlpack__`` is called.
- PyTorch tensors without a usable table: if one requires grad, the detached tensor's ``__dlpack__`` is called.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM
from ..ground.native import call_int, global_address, load, native
from .python_side import python_side

python_items = python_side("fastexchange.exchange.wrappers")  # imported when the first such object is met


@native
def export(py_object, out):
    """Store an owning export at `out`, of the object that ``exchange.wrappers`` finds for `py_object`.

    Returns: 0; -1 with an exception set. GIL: held; runs Python code. Owns: the caller calls the export's deleter once.
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
    """:data:`export` as a function for an exchange table."""
    return export(py_object, out)
