"""What Numba must not compile for numbers of the formats: functions of NumPy that nobody has tested with them.

Numba compiles many of them all the same, as for any type that it does not know, and some of those wrongly: ``np.argmax`` would
overlook NaN. So each that is not listed here is refused by name.
"""

import operator
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import infer_getattr

from ..numba_internals import (
    AbstractTemplate,
    AttributeTemplate,
    cpu_target,
    functions_of_numpy,
    infer_global,
    leaves_of,
    supported_ufuncs,
)
from . import NotForHalf
from .elements import Half
from .operations import called
from .reductions import is_half_array

_FUNCTIONS = {
    np.empty, np.empty_like, np.zeros, np.zeros_like, np.ones, np.ones_like, np.full, np.full_like, np.copy, np.ravel, np.reshape,
    np.transpose, np.ascontiguousarray, np.asfortranarray, np.broadcast_to, np.concatenate, np.where,
    np.shape, np.size, np.ndim,
}  # fmt: skip
"""Functions that copy elements, or none. Arithmetic is in ``operations``, and what follows is refused after ``reductions``."""
_ATTRIBUTES = {
    "T", "astype", "copy", "ctypes", "dtype", "fill", "flags", "flat", "flatten", "itemsize", "max", "mean", "min", "nbytes",
    "ndim", "ravel", "reshape", "shape", "size", "strides", "sum", "transpose", "view",
}  # fmt: skip
_OF_BITS = "and_", "or_", "xor", "lshift", "rshift", "invert", "iand", "ior", "ixor", "ilshift", "irshift", "matmul", "imatmul"


def _contains_half(numba_type: Any) -> bool:
    """Whether a type is one of the formats', stands for one, or is of something that holds some."""
    holders = types.Sequence, types.Array, types.DTypeSpec, types.Set
    return any(
        _contains_half(cast(Any, each).dtype) if isinstance(each, holders) else isinstance(each, Half)
        for each in leaves_of(numba_type)
    )


def _counts_by_half(numba_type: Any) -> bool:
    """Whether an index or a shape has a number of a format in it, which Numba would take for a member of an enum."""
    parts = cast(Any, numba_type).types if isinstance(numba_type, types.BaseTuple) else (numba_type,)
    return any(isinstance(each, Half) for each in parts)


class _Refused(AbstractTemplate):
    """A function that is not compiled for numbers of the formats, or what contains them."""

    metadata = {"target": "cpu"}  # noqa: RUF012 (as Numba's templates have it)

    def generic(self, args, kws):
        if any(map(_contains_half, (*args, *kws.values()))):
            raise NotForHalf(called(self.key, args, kws))


class _RefusedAsShape(AbstractTemplate):
    """A function of a shape, an index or arrays, which is not compiled for a number of a format there."""

    metadata = {"target": "cpu"}  # noqa: RUF012

    def generic(self, args, kws):
        at = 1 if self.key in _INDEXING else 0
        if len(args) > at and isinstance(args[0], types.Array if at else types.BaseTuple) and _counts_by_half(args[at]):
            raise NotForHalf(called(self.key, args, kws))


_INDEXING = operator.getitem, operator.setitem


@infer_getattr
class _RefusedAttribute(AttributeTemplate):
    key = types.Array
    metadata = {"target": "cpu"}  # noqa: RUF012

    def generic_resolve(self, value, attr):
        if is_half_array(value) and attr not in _ATTRIBUTES and not attr.startswith("_"):  # Numba's own
            raise NotForHalf(f"{value}.{attr}")


@infer_getattr
class _NoAttribute(AttributeTemplate):
    key = Half
    metadata = {"target": "cpu"}  # noqa: RUF012

    def resolve_value(self, half):
        """Members of an enum have it."""
        raise NotForHalf(f"{half}.value")


def _refuse() -> None:
    known = {*functions_of_numpy(), *(getattr(operator, name) for name in _OF_BITS)} - {*supported_ufuncs}
    for function in known | {*_INDEXING}:
        template = _RefusedAsShape if function in _FUNCTIONS or function in _INDEXING else _Refused
        infer_global(function, types.Function(type(f"{function.__name__}_refused", (template,), {"key": function})))
    cpu_target.typing_context.refresh()


_refuse()
