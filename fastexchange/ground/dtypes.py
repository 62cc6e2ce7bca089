"""Element types: DLPack's ``(code, bits)``, NumPy's dtype and Numba's type, and the 24-bit *field* that keys carry.

A plain dtype's field is ``code | bits << 8``, and so is that of a registered one (``dtype_registry``) for which Numba has no
type. Any other dtype (structured, datetime64, fixed-width text; bits that have no DLPack name) gets a number above those, one
per distinct dtype, kept for the life of the process like the code compiled for it.

What a kernel computes with for a field is decided here, in :func:`element_of` and nowhere else: Numba's type for it; where it
has none, the *storage integer*, if the kernel asks for that (``fast_args(storage=True)``); else the tensor is refused.
"""

import functools
import itertools
import sys
from typing import cast

import numba
import numpy as np

from . import dtype_registry
from .numba_internals import has_representation

__all__ = [
    "NoNumbaType",
    "as_kernel_has_it",
    "dtype_field",
    "dtype_of_dl",
    "element_of",
    "field_itemsize",
    "field_to_dtype",
    "field_to_numba",
    "is_computed",
    "storage_of",
]

FIRST_PARAMETRIC = 1 << 16
"""Fields below are DLPack's code and bits."""
_FIRST_STORABLE = 1 << 23
"""From here on: dtypes that have neither a DLPack name nor a Numba type, but a storage integer. Native code looks at the bit."""
_FIELD_LIMIT = 1 << 24

_FIELDS: dict[np.dtype, int] = {dtype: code | bits << 8 for (code, bits), dtype in dtype_registry.BUILT_IN_DTYPES.items()}
_DTYPES: dict[int, np.dtype] = {field: dtype for dtype, field in _FIELDS.items()}
_next_parametric = itertools.count(FIRST_PARAMETRIC)
_next_storable = itertools.count()


class NoNumbaType(Exception):
    """Elements of this field are not for a kernel: Numba has no type for them, and they are not asked for as they are stored."""

    def __init__(self, field: int):
        super().__init__(field)
        self.field = field


def is_native_order(dtype: np.dtype) -> bool:
    """Whether every element, also of a structured dtype's fields, is stored in this machine's byte order."""
    if dtype.fields is not None:
        return all(is_native_order(field[0]) for field in dtype.fields.values())
    return dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")


def dtype_field(dtype: np.dtype) -> int | None:
    """The field of `dtype`; None if it is not in native byte order, or neither Numba nor a storage integer is of any use for it.

    Equal dtypes have equal fields, whichever objects they are. Types of less than a byte that are kept one in a byte
    (ml_dtypes) have no field of DLPack's: those of that name mean packed elements.
    """
    known = _FIELDS.get(dtype)
    if known is not None or not is_native_order(dtype):
        return known
    if _has_numba_type(dtype):
        field, limit = next(_next_parametric), _FIRST_STORABLE
    elif not _is_storable(dtype):
        return None
    elif (key := dtype_registry.key_of(dtype)) is not None:
        return key[0] | key[1] << 8
    else:
        field = _FIRST_STORABLE | dtype.itemsize << 16 | next(_next_storable)
        limit = _FIRST_STORABLE | dtype.itemsize + 1 << 16
    if field >= limit:
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


def _is_storable(dtype: np.dtype) -> bool:
    """Whether elements of `dtype` are bits and nothing else, of which there is an unsigned integer of the same width."""
    return not dtype.hasobject and dtype.subdtype is None and dtype.itemsize in (1, 2, 4, 8) and is_native_order(dtype)


def field_to_dtype(field: int) -> np.dtype:
    """The NumPy dtype of a field that :func:`dtype_field` gave, or of DLPack's code and bits. Raises KeyError."""
    known = _DTYPES.get(field)
    if known is None and field < FIRST_PARAMETRIC:
        known = dtype_registry.dtype_of(field & 0xFF, field >> 8)
    if known is None or not (field >= FIRST_PARAMETRIC or known in _FIELDS or _is_storable(known)):
        raise KeyError(field)
    return known


# ---- what a kernel computes with -----------------------------------------------------------------------------------


@functools.cache  # of what is found: an exception is not kept, and a type may be registered later
def field_to_numba(field: int):
    """Numba's type for elements of this field, which need not be one for the CPU. Raises NoNumbaType."""
    try:
        return numba.from_dtype(field_to_dtype(field))
    except Exception:  # Numba's several ways to say that it has no such type
        raise NoNumbaType(field) from None


@functools.cache
def field_to_computed(field: int):
    """Numba's type for elements of this field with which it computes on the CPU: there it has no float16. Raises NoNumbaType."""
    found = field_to_numba(field)
    if not has_representation(found):
        raise NoNumbaType(field)
    return found


def storage_of(field: int) -> np.dtype | None:
    """The storage integer of elements of this field: the unsigned one of the same width; None if there is none."""
    bits = 8 * (field >> 16 & 0x7F) if field >= _FIRST_STORABLE else field >> 8
    return np.dtype(f"u{bits // 8}") if bits in (8, 16, 32, 64) else None


def element_of(field: int, storage: bool, type_of=field_to_computed):
    """The Numba type as which a kernel sees elements of this field. Raises NoNumbaType: a tensor of them is refused.

    `storage`: whether the kernel asks for the bits of what Numba has no type for. `type_of`: which types there are.
    """
    try:
        return type_of(field)
    except NoNumbaType:
        stored = storage_of(field)
        if not storage or stored is None:
            raise
        return numba.from_dtype(stored)


def as_kernel_has_it(dtype: np.dtype, storage: bool) -> np.dtype:
    """The dtype as which a kernel sees an array of `dtype`, as :func:`element_of` decides. Raises NoNumbaType.

    Itself also where no kernel has a place for it, and Numba the words.
    """
    field = dtype_field(dtype)
    if field is None:
        return dtype
    element_of(field, storage)
    return dtype if is_computed(field) else cast(np.dtype, storage_of(field))


def is_computed(field: int) -> bool:
    """Whether Numba computes with elements of this field on the CPU."""
    try:
        field_to_computed(field)
    except NoNumbaType:
        return False
    return True


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
