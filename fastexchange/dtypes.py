"""Element types: DLPack's ``(code, bits)``, NumPy's dtype and Numba's type, and the 24-bit *field* that keys carry.

A plain dtype's field is ``code | bits << 8``. A parametric one (structured, datetime64, fixed-width text) gets a number
above those, one per distinct dtype, kept for the life of the process like the code compiled for it.
"""

import functools
import itertools
import sys

import numba
import numpy as np

from .dlpack import DLDataTypeCode

__all__ = ["dtype_field", "dtype_of_dl", "field_itemsize", "field_to_dtype", "field_to_numba"]

_FIRST_PARAMETRIC = 1 << 16
_FIELD_LIMIT = 1 << 24

_CODES = {
    "i": DLDataTypeCode.kDLInt,
    "u": DLDataTypeCode.kDLUInt,
    "f": DLDataTypeCode.kDLFloat,
    "c": DLDataTypeCode.kDLComplex,
    "b": DLDataTypeCode.kDLBool,
}
_PLAIN = [np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]

_FIELDS: dict[np.dtype, int] = {dtype: _CODES[dtype.kind] | 8 * dtype.itemsize << 8 for dtype in _PLAIN}
_DTYPES: dict[int, np.dtype] = {field: dtype for dtype, field in _FIELDS.items()}
_next_parametric = itertools.count(_FIRST_PARAMETRIC)


def is_native_order(dtype: np.dtype) -> bool:
    """Whether every element, also of a structured dtype's fields, is stored in this machine's byte order."""
    if dtype.fields is not None:
        return all(is_native_order(field[0]) for field in dtype.fields.values())
    return dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")


def dtype_field(dtype: np.dtype) -> int | None:
    """The field of `dtype`; None if Numba has no type for it or it is not in native byte order.

    Equal dtypes have equal fields, whichever objects they are.
    """
    known = _FIELDS.get(dtype)
    if known is not None or not is_native_order(dtype):
        return known
    try:
        numba.from_dtype(dtype)
    except Exception:  # Numba's several ways to say that it has no such type
        return None
    field = next(_next_parametric)
    if field >= _FIELD_LIMIT:
        return None
    _FIELDS[dtype] = field
    _DTYPES[field] = dtype
    return field


def field_to_dtype(field: int) -> np.dtype:
    """The NumPy dtype of a field that :func:`dtype_field` gave."""
    return _DTYPES[field]


@functools.cache
def field_to_numba(field: int):
    """The Numba type of one element."""
    return numba.from_dtype(_DTYPES[field])


def field_itemsize(field: int) -> int:
    """Bytes of one element."""
    return _DTYPES[field].itemsize


def dtype_of_dl(code: int, bits: int) -> np.dtype | None:
    """The NumPy dtype of a DLPack type of one lane, None if NumPy has none of its own."""
    return _DTYPES.get(code | bits << 8) if 0 <= code < 256 and 0 < bits < 256 else None


def plain_fields_by_type_number(limit: int = 64) -> list[int]:
    """Indexed by NumPy's type number (``dtype.num``): the field of that plain dtype, 0 where it is parametric or unknown."""
    fields = [0] * limit
    for character in "?bBhHiIlLqQefdFD":
        dtype = np.dtype(character)
        fields[dtype.num] = _FIELDS[dtype]
    return fields
