"""Element types: DLPack's ``(code, bits)``, NumPy's dtype and Numba's type, and the 24-bit *field* that keys carry.

A plain dtype, and a registered one (``dtype_registry``) without a Numba type, has the field of its DLPack type
(``dlpack.field_of_type``). Any other dtype (structured, datetime64, fixed-width text, bits without a DLPack type) gets a number
above those, which is kept for the life of the process, like the code compiled for it.

Only :func:`element_of` decides the type of a field's elements in a kernel: Numba's type; if there is none, the package's own
(``half``), or for kernels with ``fast_args(storage=True)`` the *storage integer*, an unsigned integer of the same size. Otherwise
the tensor is refused.
"""

import functools
import itertools
import sys
from typing import Any, cast

import numba
import numpy as np
from numba.core import types

from . import dtype_registry
from .dlpack import field_of_type, type_of_field
from .half.formats import FORMAT_KEYS
from .numba_internals import has_representation, leaves_of
from .passing import reraise_passing

__all__ = [
    "NoNumbaType",
    "as_kernel_has_it",
    "bits_of",
    "dtype_field",
    "element_of",
    "field_itemsize",
    "field_to_dtype",
    "field_to_numba",
    "is_computed",
    "is_half",
    "lacks_dtype",
    "storage_of",
]

FIRST_PARAMETRIC = 1 << 16
"""Fields below are DLPack's code and bits."""
FIRST_STORABLE = 1 << 23
"""Fields from here on: dtypes without a DLPack or Numba type, but with a storage integer. Native code tests the bit."""
PLAIN_DTYPES = tuple(map(np.dtype, "?bBhHiIlLqQefdFD"))
"""NumPy's numbers that DLPack has, in this machine's byte order. Some are equal: a long is an int or a long long."""

_FIELDS: dict[np.dtype, int] = {dtype: field_of_type(*key) for key, dtype in dtype_registry.BUILT_IN_DTYPES.items()}
_DTYPES: dict[int, np.dtype] = {field: dtype for dtype, field in _FIELDS.items()}
_FLOAT16 = _FIELDS[np.dtype(np.float16)]
_next_parametric = itertools.count(FIRST_PARAMETRIC)
_next_storable = itertools.count()


class NoNumbaType(Exception):
    """A kernel cannot take elements of this field: they have no type, and the kernel has not ``storage=True``."""

    def __init__(self, field: int):
        super().__init__(field)
        self.field = field


def is_native_order(dtype: np.dtype) -> bool:
    """Whether a dtype, with all fields of a structured one, has this machine's byte order."""
    if dtype.fields is not None:
        return all(is_native_order(field[0]) for field in dtype.fields.values())
    return dtype.byteorder in ("=", "|", "<" if sys.byteorder == "little" else ">")


def is_half(field: int) -> bool:
    """Whether a field is of a format with which kernels compute by ``half``."""
    return field < FIRST_PARAMETRIC and type_of_field(field) in FORMAT_KEYS


def dtype_field(dtype: np.dtype) -> int | None:
    """The field of `dtype`; None for a foreign byte order, and if there is neither a Numba type nor a storage integer.

    Equal dtypes have equal fields. Types of less than a byte that are stored one in a byte (ml_dtypes) do not have the fields of
    DLPack's types of that name, which are packed.
    """
    known = _FIELDS.get(dtype)
    if known is not None or not is_native_order(dtype):
        return known
    key = dtype_registry.key_of(dtype)
    if key not in FORMAT_KEYS and _has_numba_type(dtype):
        field, limit = next(_next_parametric), FIRST_STORABLE
    elif not _is_storable(dtype):
        return None
    elif key is not None:
        return field_of_type(*key)
    else:
        field = FIRST_STORABLE | dtype.itemsize << 16 | next(_next_storable)
        limit = FIRST_STORABLE | dtype.itemsize + 1 << 16
    if field >= limit:
        return None
    _FIELDS[dtype] = field
    _DTYPES[field] = dtype
    return field


def _has_numba_type(dtype: np.dtype) -> bool:
    try:
        numba.from_dtype(dtype)
    except Exception as error:  # Numba raises several exceptions for dtypes without a type
        reraise_passing(error)
        return False
    return True


def _is_storable(dtype: np.dtype) -> bool:
    """Whether there is an unsigned integer of the width of `dtype`, and its elements are plain bits."""
    return not dtype.hasobject and dtype.subdtype is None and dtype.itemsize in (1, 2, 4, 8) and is_native_order(dtype)


def field_to_dtype(field: int) -> np.dtype:
    """The NumPy dtype of a field. Raises KeyError."""
    known = _DTYPES.get(field)
    if known is None and field < FIRST_PARAMETRIC:
        known = dtype_registry.dtype_of(*type_of_field(field))
    if known is None or not (field >= FIRST_PARAMETRIC or known in _FIELDS or _is_storable(known)):
        raise KeyError(field)
    return known


# ---- what a kernel computes with -----------------------------------------------------------------------------------


@functools.cache  # exceptions are not cached: a type may be registered later
def field_to_numba(field: int):
    """Numba's own type for elements of this field, even if the CPU target lacks it. Raises NoNumbaType."""
    if is_half(field):  # `half` may let Numba give these dtypes to the package's types
        if field == _FLOAT16:
            return types.float16
        raise NoNumbaType(field)
    try:
        return numba.from_dtype(field_to_dtype(field))
    except Exception as error:  # Numba raises several exceptions for dtypes without a type
        reraise_passing(error)
        raise NoNumbaType(field) from None


@functools.cache
def _numbas_own(field: int):
    """Numba's type for elements of this field on the CPU, which has no float16. Raises NoNumbaType."""
    found = field_to_numba(field)
    if not has_representation(found):
        raise NoNumbaType(field)
    return found


@functools.cache
def field_to_computed(field: int):
    """The type of elements of this field on the CPU, Numba's or this package's. Raises NoNumbaType."""
    try:
        return _numbas_own(field)
    except NoNumbaType:
        if not is_half(field):
            raise
    from .half.known import type_of_key

    return type_of_key(*type_of_field(field))


def storage_of(field: int) -> np.dtype | None:
    """The storage integer of this field, or None."""
    bits = 8 * (field >> 16 & 0x7F) if field >= FIRST_STORABLE else type_of_field(field)[1]
    return np.dtype(f"u{bits // 8}") if bits in (8, 16, 32, 64) else None


def element_of(field: int, storage: bool, type_of=field_to_computed):
    """The Numba type of elements of this field in a kernel. Raises NoNumbaType if the kernel does not take them.

    `storage`: the kernel's option. `type_of`: from a field to a type; raises NoNumbaType.
    """
    if not storage:
        return type_of(field)
    try:
        return _numbas_own(field) if type_of is field_to_computed else type_of(field)
    except NoNumbaType:
        stored = storage_of(field)
        if stored is None:
            raise
        return numba.from_dtype(stored)


def bits_of(field: int, storage: bool) -> np.dtype | None:
    """The storage integer, if a kernel on the CPU gets elements of this field as that; None if it computes with them.

    Raises NoNumbaType if the kernel does not take them.
    """
    element_of(field, storage)
    try:
        _numbas_own(field)
    except NoNumbaType:
        return storage_of(field) if storage else None
    return None


def lacks_dtype(numba_type) -> bool:
    """Whether elements of a type, or of arrays in it, are numbers of ``half`` for which NumPy has no dtype: without ml_dtypes."""
    elements = (each.dtype if isinstance(each, types.Array) else each for each in leaves_of(numba_type))
    formats = (getattr(each, "format", None) for each in elements)
    return any(each is not None and dtype_registry.dtype_of(each.code, each.bits) is None for each in formats)


def as_kernel_has_it(array: np.ndarray, dtype: np.dtype, storage: bool) -> np.ndarray:
    """The view of an array of `dtype` that Numba's dispatcher types by :func:`element_of`. Raises NoNumbaType.

    Returns `array` also if the dispatcher refuses it with an error of its own.
    """
    field = dtype_field(dtype)
    if field is None:
        return array
    bits = bits_of(field, storage)
    if bits is None and is_half(field) and not cast(Any, numba.config).DISABLE_JIT:
        from .half.known import TypedArray

        return array.view(TypedArray)
    return array if bits is None else array.view(bits)


def is_computed(field: int) -> bool:
    """Whether kernels on the CPU compute with elements of this field."""
    try:
        field_to_computed(field)
    except NoNumbaType:
        return False
    return True


def field_itemsize(field: int) -> int:
    """Bytes of one element."""
    return field_to_dtype(field).itemsize


def plain_fields_by_type_number(limit: int = 64) -> list[int]:
    """By NumPy's type number (``dtype.num``): the field of the plain dtype; 0 for parametric or unknown ones."""
    fields = [0] * limit
    for dtype in PLAIN_DTYPES:
        fields[dtype.num] = _FIELDS[dtype]
    return fields
