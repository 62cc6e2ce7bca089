"""Element types: DLPack's ``(code, bits)``, NumPy's dtype and Numba's type, and the 24-bit *field* that keys carry.

A plain dtype's field is ``code | bits << 8``, and so is that of a registered one (``registry``) for which Numba has no type: a
kernel sees its elements as unsigned integers of the same width. A parametric dtype (structured, datetime64, fixed-width text)
gets a number above those, one per distinct dtype, kept for the life of the process like the code compiled for it.
"""

import functools
import itertools
import sys

import numba
import numpy as np

from . import registry

__all__ = ["dtype_field", "dtype_of_dl", "field_itemsize", "field_to_dtype", "field_to_numba"]

_FIRST_PARAMETRIC = 1 << 16
_FIELD_LIMIT = 1 << 24

_FIELDS: dict[np.dtype, int] = {dtype: code | bits << 8 for (code, bits), dtype in registry.BUILT_IN_DTYPES.items()}
_DTYPES: dict[int, np.dtype] = {field: dtype for dtype, field in _FIELDS.items()}
_next_parametric = itertools.count(_FIRST_PARAMETRIC)


def is_native_order(dtype: np.dtype) -> bool:
    """Whether every element, also of a structured dtype's fields, is stored in this machine's byte order."""
    if dtype.fields is not None:
        return all(is_native_order(field[0]) for field in dtype.fields.values())
    return dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")


def dtype_field(dtype: np.dtype) -> int | None:
    """The field of `dtype`; None if Numba has no type for it or it is not in native byte order.

    Equal dtypes have equal fields, whichever objects they are. Types of less than a byte that are kept one in a byte
    (ml_dtypes) have fields as parametric ones have: DLPack's field of that name means packed elements.
    """
    known = _FIELDS.get(dtype)
    if known is not None or not is_native_order(dtype):
        return known
    if not _has_numba_type(dtype) and registry.padded_key_of(dtype) is None:
        return _registered_field(dtype)
    field = next(_next_parametric)
    if field >= _FIELD_LIMIT:
        return None
    _FIELDS[dtype] = field
    _DTYPES[field] = dtype
    return field


def _has_numba_type(dtype: np.dtype) -> bool:
    try:
        numba.from_dtype(dtype)
    except Exception:  # Numba's several ways to say that it has no such type
        return False
    return True


def _registered_field(dtype: np.dtype) -> int | None:
    key = registry.key_of(dtype)
    if key is None or not _is_storable(dtype):
        return None
    return key[0] | key[1] << 8


def _is_storable(dtype: np.dtype) -> bool:
    """Whether elements of `dtype` are bits and nothing else, of which there is an unsigned integer of the same width."""
    return not dtype.hasobject and dtype.subdtype is None and dtype.itemsize in (1, 2, 4, 8) and is_native_order(dtype)


def field_to_dtype(field: int) -> np.dtype:
    """The NumPy dtype of a field that :func:`dtype_field` gave, or of DLPack's code and bits. Raises KeyError."""
    known = _DTYPES.get(field)
    if known is None and field < _FIRST_PARAMETRIC:
        known = registry.dtype_of(field & 0xFF, field >> 8)
    if known is None or not (field >= _FIRST_PARAMETRIC or known in _FIELDS or _is_storable(known)):
        raise KeyError(field)
    return known


def as_numba_has_it(dtype: np.dtype) -> np.dtype:
    """`dtype`, or the unsigned integer of its width if it is a registered one for which Numba has no type."""
    return dtype if _has_numba_type(dtype) else registry.storage_dtype(dtype)


@functools.cache
def field_to_numba(field: int):
    """The Numba type of one element."""
    return numba.from_dtype(as_numba_has_it(field_to_dtype(field)))


def field_itemsize(field: int) -> int:
    """Bytes of one element."""
    return field_to_dtype(field).itemsize


def dtype_of_dl(code: int, bits: int) -> np.dtype | None:
    """The NumPy dtype of a DLPack type of one lane, None if NumPy has none and none is registered."""
    if not (0 <= code < 256 and 0 < bits < 256):
        return None
    try:
        return field_to_dtype(code | bits << 8)
    except KeyError:
        return None


def plain_fields_by_type_number(limit: int = 64) -> list[int]:
    """Indexed by NumPy's type number (``dtype.num``): the field of that plain dtype, 0 where it is parametric or unknown."""
    fields = [0] * limit
    for character in "?bBhHiIlLqQefdFD":
        dtype = np.dtype(character)
        fields[dtype.num] = _FIELDS[dtype]
    return fields
