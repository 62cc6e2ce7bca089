"""Promotion: the element type that an output has if none is declared, as a function of the inputs' types.

The type depends on the element types alone, so that a call has the same outcome for tensors of all frameworks, mixed ones, and
in PyTorch's graphs: bool, integers, floats, complex, of which the last kind decides. An integer never widens a float: int64 and
float32 give float32, as with PyTorch and JAX (NumPy alone says float64). Tensors of no dimensions count as any other (as with
NumPy and JAX).
"""

from .dlpack import BOOL, COMPLEX, FLOAT, INT, UINT, field_of_type
from .dlpack_types import DLDataType

BFLOAT = 4
_FLOAT32 = field_of_type(FLOAT, 32)
NONE = -1
"""The result of :func:`promote` for types that are promoted to none."""


_RANKS = sum(rank << 4 * code for code, rank in {BOOL: 1, INT: 2, UINT: 2, FLOAT: 3, BFLOAT: 3, COMPLEX: 4}.items())
"""Four bits for each of DLPack's codes up to BOOL: the rank of its kind of types; 0 for no kind of numbers."""


def promote(one, other):
    """The dtype field of the type to which two types are promoted, given their fields; NONE. Runs in Python and natively."""
    if one == other:
        return one
    if one < 0 or other < 0 or one >= 1 << 16 or other >= 1 << 16:  # NONE, or a type that DLPack lacks
        return NONE
    if one & 0xFF > BOOL or other & 0xFF > BOOL:  # float8 and narrower floats
        return NONE
    if _RANKS >> 4 * (one & 0xFF) & 0xF > _RANKS >> 4 * (other & 0xFF) & 0xF:
        one, other = other, one
    low = _RANKS >> 4 * (one & 0xFF) & 0xF
    high = _RANKS >> 4 * (other & 0xFF) & 0xF
    bits = one >> 8
    most = other >> 8
    if low == 0 or bits < 8 or most < 8 or (high == 4 and most < 64):  # packed integers, complex32
        return NONE
    if low != high:
        return COMPLEX | 2 * bits << 8 if high == 4 and low == 3 and 2 * bits > most else other
    if one & 0xFF == other & 0xFF:
        return max(one, other)
    if low == 3:  # bfloat16 and another
        if bits == most:
            return _FLOAT32
        return one if bits > most else other
    signed = bits if one & 0xFF == INT else most
    unsigned = most if one & 0xFF == INT else bits
    if signed > unsigned:
        return INT | signed << 8
    return INT | 2 * unsigned << 8 if unsigned < 64 else NONE


def promoted(dtypes: list) -> DLDataType | None:
    """The type to which all these ``DLDataType`` are promoted; None if there is none, or if one is None."""
    found = dtypes[0]
    for dtype in dtypes:
        if dtype == found:
            continue
        if dtype is None or found is None or dtype.lanes != 1 or found.lanes != 1:
            return None
        field = promote(field_of_type(found.code, found.bits), field_of_type(dtype.code, dtype.bits))
        if field == NONE:
            return None
        found = DLDataType(field & 0xFF, field >> 8)
    return found
