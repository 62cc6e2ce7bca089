"""PyTorch tensors without an exchange table (PyTorch before 2.10): capsules by PyTorch's C function, without its Python code.

``x.__dlpack__()`` is Python code that checks `x` and then calls the C function ``torch.utils.dlpack.to_dlpack``. The guard makes
the same checks in memory, in a hundredth of the time. So the C function exports tensors whose dispatch keys are those of plain
tensors. ``__dlpack__`` exports all others, and all tensors in a mode that intercepts PyTorch's functions.

The guard's user decides whether a tensor may require grad.
"""

import sys
import types as python_types
from typing import Any

from numba import types

from .._abi import ffi
from ..arguments import dunder, forwarded
from ..dispatch.structs import ALLOWS_GRAD
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dltensor import (
    DL_TENSOR,
    READONLY,
    READONLY_IS_ASSUMED,
    SOUND,
    delete_managed,
    dl_tensor_at,
    end_of,
    examine,
    is_empty,
    managed_at,
)
from ..ground.native import address_of, load, native
from ..ground.once import once
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_GetPointer
from ..producers.python_side import python_side
from . import checks
from .guard import is_odd, is_short
from .offsets import guard
from .queries import is_yes

__all__ = ["forwarded_managed_tensor", "is_usable", "managed_tensor_from_py_object_no_sync"]

python_items = python_side("fastexchange.torch.capsule")


@native
def is_seen(is_mode_enabled):
    """Whether a mode intercepts PyTorch's functions: it has to see the call of ``__dlpack__``."""
    return is_yes(c.PyObject_CallNoArgs(is_mode_enabled))


@native
def export(py_object, out):
    """Fill the pointer at `out` with an owning export of the tensor `py_object`; returns 0, or -1 with an exception set."""
    side = python_items()
    if side == 0:
        return types.int32(-1)
    address = c.PyLong_AsSsize_t(load(side))
    if not is_odd(address, py_object) and not is_seen(load(side + 8)):
        capsule = c.PyObject_CallOneArg(load(side + 16), py_object)
        if capsule == 0:
            c.PyErr_Clear()
        elif dunder.take(capsule, out) == 0:
            tensor = dl_tensor_at(load(out) + DL_TENSOR)
            is_long = examine(tensor) != SOUND or is_empty(tensor) or not is_short(address, py_object, end_of(tensor))
            if is_long and not is_odd(address, py_object):  # again: a new capsule may have run garbage collection, and so Python
                return types.int32(0)
            delete_managed(load(out))
        else:
            c.PyErr_Clear()
    return forwarded.export(py_object, out)


@native
def as_mutable(failed, out):
    """Let the export at `out` be mutable, as all PyTorch tensors are, unless its producer says more. Returns `failed`."""
    if failed == 0 and managed_at(load(out)).flags & READONLY_IS_ASSUMED != 0:
        managed_at(load(out)).flags &= ~(READONLY | READONLY_IS_ASSUMED)
    return failed


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """Store an owning export of the tensor `py_object` at `out`.

    Returns: 0, or -1 with an exception set. Raises: the exceptions of ``__dlpack__``. GIL: held; may run Python code.
    """
    return as_mutable(export(py_object, out), out)


@cfunction(types.int32, types.intp, types.intp)
def forwarded_managed_tensor(py_object, out):
    """:data:`managed_tensor_from_py_object_no_sync` by ``__dlpack__`` of the tensor, or of the detached one."""
    return as_mutable(forwarded.export(py_object, out), out)


# ---- in Python -----------------------------------------------------------------------------------------------------


def is_usable(cls: type) -> bool:
    """Whether tensors of this type are exported here: their ``__dlpack__`` is PyTorch's own, with the verified behaviour."""
    framework: Any = sys.modules["torch"]
    is_own = getattr(cls, "__dlpack__", None) is framework.Tensor.__dlpack__ and not checks.overrides_functions(cls)
    return is_own and _is_verified()


@once
def _is_verified() -> bool:
    """Whether the layout of tensors is verified, and the C function's capsules equal those of ``__dlpack__``."""
    framework: Any = sys.modules["torch"]
    if not guard().knows_all or not all(isinstance(each, python_types.BuiltinFunctionType) for each in _functions()):
        return False
    base = framework.arange(24.0, dtype=framework.float32, device="cpu").reshape(4, 6)
    samples = [base, base.t(), base[1:, ::2], base[0, 0], base[2:2], base.to(framework.int16)[3], base.to(framework.complex64)]
    try:
        return all(_said(_functions()[1](each)) == _said(each.__dlpack__()) for each in samples)
    except Exception as error:  # a PyTorch with other functions, or a mode that intercepts them
        reraise_passing(error)
        return False


def _functions() -> tuple:
    """The functions that tell whether a mode intercepts calls, and that make a capsule; None if this PyTorch lacks them."""
    framework: Any = sys.modules["torch"]
    return tuple(getattr(framework._C, name, None) for name in ("_is_torch_function_mode_enabled", "_to_dlpack"))


def _said(capsule) -> tuple:
    tensor = ffi.cast("DLManagedTensor *", PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor
    return (
        address_of(tensor.data) + tensor.byte_offset, int(tensor.device.device_type), tensor.device.device_id,
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, tensor.ndim,
        [(tensor.shape[i], tensor.strides[i]) for i in range(tensor.ndim)],
    )  # fmt: skip


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return address_of(guard().native + ALLOWS_GRAD), *_functions()
