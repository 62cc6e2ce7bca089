"""PaddlePaddle: its exchange table's exports, behind the checks of its ``__dlpack__``.

The functions of the table check nothing: they read a sparse tensor as if it were a dense one, and export tensors that require
gradients. The functions here ask the tensor first, by the C functions behind ``is_dense()`` and ``stop_gradient``, which run no
Python code. A tensor that is not plain is given to its ``__dlpack__``, which raises.

Tried with PaddlePaddle 3.3.1.
"""

import sys
import types as python_types
from typing import Any, NoReturn

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import function_of
from ..ground.dlpack import VERSION
from ..ground.native import address_of, call_int, call_word, global_address, load, native
from ..producers.python_side import python_side

__all__ = ["dltensor_from_py_object_no_sync", "is_tensor_type", "managed_tensor_from_py_object_no_sync", "stands_before"]

python_items = python_side("fastexchange.arguments.paddle")


@native
def is_true(result):
    """Whether `result` is True; False for a failed query, 0, whose exception stays. Drops `result`."""
    if result == 0:
        return False
    c.decref(result)
    return result == global_address("_Py_TrueStruct")


@native
def export(py_object, out, place):
    """Call the table's function whose address is in the item at `place`, if the tensor is plain.

    Returns: 0, or -1 with an exception set. Raises: the exceptions of ``__dlpack__``. GIL: held; Python code runs only to raise.
    """
    side = python_items()
    if side == 0:
        return types.int32(-1)
    if is_true(c.PyObject_CallOneArg(load(side), py_object)):
        if is_true(call_word(c.PyLong_AsSsize_t(load(side + 8)), (py_object, 0))):
            return types.int32(call_int(c.PyLong_AsSsize_t(load(side + place)), (py_object, out)))
    if c.PyErr_Occurred() == 0:
        c.PyObject_CallOneArg(load(side + 16), py_object)
    return types.int32(-1)


@cfunction(types.int32, types.intp, types.intp)
def dltensor_from_py_object_no_sync(py_object, out):
    """Fill the DLTensor at `out` with a borrowed view of a plain tensor: :func:`export`."""
    return export(py_object, out, 24)


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """Fill the pointer at `out` with an owning export of a plain tensor: :func:`export`. The caller calls the deleter once."""
    return export(py_object, out, 32)


# ---- in Python -----------------------------------------------------------------------------------------------------


def is_tensor_type(cls: type) -> bool:
    """Whether `cls` is PaddlePaddle's tensor type or derived from it. Does not import PaddlePaddle."""
    base = getattr(sys.modules.get("paddle"), "Tensor", None)
    return isinstance(base, type) and issubclass(cls, base)


_tables: list[Any] = []  # PaddlePaddle's own, once it is known


def stands_before(table) -> bool:
    """Whether the functions here can be used instead of those of `table`, a ``DLPackExchangeAPI *`` of PaddlePaddle's tensors.

    They cannot before the table of a subclass, or if the C functions to ask are not as expected.
    """
    if not _tables:
        _tables.append(table)
    is_dense, stop_gradient = _queries()
    can_ask = type(is_dense) is python_types.MethodDescriptorType and function_of(stop_gradient) != 0
    return can_ask and table == _tables[0]


def _queries() -> tuple:
    own = vars(sys.modules["paddle"].Tensor)
    return own.get("is_dense"), own.get("stop_gradient")


def _refuse(tensor) -> NoReturn:
    """Raise what ``__dlpack__`` raises for a tensor that is not plain; BufferError if it raises nothing."""
    tensor.__dlpack__(max_version=VERSION)
    raise BufferError("it is no dense tensor, so its memory is not its value")


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_dense, stop_gradient = _queries()
    table = _tables[0]
    functions = table.dltensor_from_py_object_no_sync, table.managed_tensor_from_py_object_no_sync
    return is_dense, function_of(stop_gradient), _refuse, *map(address_of, functions)
