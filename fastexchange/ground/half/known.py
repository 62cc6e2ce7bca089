"""Numba's types of the formats by DLPack's types and NumPy's dtypes. Importing this module teaches Numba."""

import contextlib
import functools
from typing import Any, cast

import numpy as np
from numba.core import types

from ..dtype_registry import dtype_of
from ..numba_changes import (
    add_numbers,
    convert_arguments,
    convert_elements,
    name_operations,
    refuse_results,
    set_type_of_dtype,
)
from . import operations, reductions  # noqa: F401 (register what they implement)
from .elements import TYPES, Half
from .formats import FORMATS

__all__ = ["TYPES", "learn_dtype", "type_of_key"]

_KEYS = {(form.code, form.bits): TYPES[form.name] for form in FORMATS}


def type_of_key(code: int, bits: int) -> Half:
    """The type of elements of DLPack's type ``(code, bits)``, one of ``FORMAT_KEYS``."""
    return _KEYS[code, bits]


def learn_dtype(half: Half) -> np.dtype:
    """NumPy's dtype of a type's elements, of which Numba knows from then on.

    Only ml_dtypes has the dtype of most. Without it, Numba's boxing code gets bytes, which are no numbers.
    """
    found = dtype_of(half.format.code, half.format.bits)
    if found is None:
        return np.dtype(f"V{half.bitwidth // 8}")
    set_type_of_dtype(found, half)
    return found


def _why_no_result(numba_type) -> str | None:
    """Why Numba cannot make a Python object of a result; None: it can, as far as this package knows."""
    if isinstance(numba_type, types.BaseTuple):
        return next(filter(None, map(_why_no_result, cast(Any, numba_type).types)), None)
    if isinstance(numba_type, (types.List, types.Optional)):
        return _why_no_result(numba_type.dtype if isinstance(numba_type, types.List) else numba_type.type)
    if not reductions.is_half_array(numba_type) or learn_dtype(numba_type.dtype).type is not np.void:
        return None
    return f"NumPy has no dtype for its result, {numba_type}; install ml_dtypes, which has one, or return .astype(np.float32)"


with contextlib.suppress(ImportError):  # whose import registers the dtypes with NumPy; without it, NumPy has float16 only
    import ml_dtypes  # noqa: F401
add_numbers({**TYPES}, learn_dtype)
convert_elements(lambda numba_type: types.float32 if isinstance(numba_type, Half) else numba_type)
refuse_results(_why_no_result)
convert_arguments(reductions.contains_half, reductions.wide)
name_operations(functools.partial(reductions.contains_half, with_dtypes=True))
for _half in TYPES.values():
    learn_dtype(_half)
