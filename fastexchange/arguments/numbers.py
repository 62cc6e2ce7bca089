"""Numbers of Python, NumPy and ml_dtypes."""

import ctypes
import sys

import numpy as np
from numba import types

from ..dispatch import structs
from ..dispatch.rows import SCRATCH, TOGETHER, frequent, go_on, is_of_type, leave
from ..dispatch.runtime import runtime
from ..ground import cpython as c
from ..ground.cfunction import CFunction, cfunction
from ..ground.dlpack import BOOL, COMPLEX, FLOAT, INT, UINT, field_of_type
from ..ground.dtypes import dtype_field, is_half
from ..ground.half.formats import FORMATS
from ..ground.native import global_address, load, stack, store
from .kind import Discovery, Kind, reader

PATH, MEANING = "scalar", "its value is read in place"
NUMPY_SCALAR_VALUE = c.NUMPY_SCALAR_VALUE


def _key(code: int, bits: int) -> int:
    return structs.KEY_SCALAR | field_of_type(code, bits) << structs.DTYPE_SHIFT


FLOAT64, INT64, UINT64, BOOLEAN, COMPLEX128 = (
    _key(FLOAT, 64),
    _key(INT, 64),
    _key(UINT, 64),
    _key(BOOL, 8),
    _key(COMPLEX, 128),
)

def _row_reader(offset: int) -> CFunction:
    """The row reader of objects that have their value, a word, at an offset."""

    @cfunction(types.intp, *[types.intp] * 5, together=TOGETHER, constants=(offset,))
    def value_row(items, row, word, array, frame):
        ob = load(items)
        if not is_of_type(ob, row):
            return leave(row, frame, 0)
        store(word, load(ob + offset))
        return go_on(items + 8, row, word + 8, array, frame)

    return value_row


float_row = _row_reader(c.OB_FVAL)
numpy_scalar_row = float_row if c.NUMPY_SCALAR_VALUE == c.OB_FVAL else _row_reader(c.NUMPY_SCALAR_VALUE)

# ---- Python's --------------------------------------------------------------------------------------------------------


@reader
def read_float(ob, entry, frame, word, array):
    """A Python float."""
    store(word, load(ob + c.OB_FVAL))
    return FLOAT64


@reader
def read_int(ob, entry, frame, word, array):
    """A Python int: an int64, or a uint64 if it is too large."""
    overflow = stack(1)
    value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
    key = INT64
    if value == -1 and load(overflow) & 0xFFFFFFFF != 0:
        value = types.int64(c.PyLong_AsUnsignedLongLong(ob))
        key = UINT64
        if value == -1 and c.PyErr_Occurred() != 0:
            c.PyErr_Clear()
            key = -structs.STATUS_BIG_INT
    store(word, value)
    return key


@frequent
def int_row(items, row, word, array, frame):
    """A Python int that fits into int64."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    value = c.PyLong_AsLongLongAndOverflow(ob, frame + SCRATCH)
    if value == -1 and load(frame + SCRATCH) & 0xFFFFFFFF != 0:
        return leave(row, frame, 0)
    store(word, value)
    return go_on(items + 8, row, word + 8, array, frame)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fill_int_row(context, row_address, ob):
    """:data:`int_row` reads no uint64."""
    row = structs.row_at(row_address)
    if row.key != INT64:
        row.reader = 0
    return 1


@reader
def read_bool(ob, entry, frame, word, array):
    """A Python bool."""
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return BOOLEAN


@frequent
def bool_row(items, row, word, array, frame):
    """A Python bool."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return go_on(items + 8, row, word + 8, array, frame)


@reader
def read_complex(ob, entry, frame, word, array):
    """A Python complex number."""
    store(word, load(ob + c.OB_FVAL))
    store(word + 8, load(ob + c.OB_FVAL + 8))
    return COMPLEX128


# ---- NumPy's ---------------------------------------------------------------------------------------------------------


@reader
def read_numpy_scalar(ob, entry, frame, word, array):
    """A NumPy scalar of at most 8 bytes. The rest of its word is undefined."""
    store(word, load(ob + c.NUMPY_SCALAR_VALUE))
    return structs.entry_at(entry).key


@reader
def read_numpy_complex64(ob, entry, frame, word, array):
    """A ``numpy.complex64``: each part is a word."""
    value = load(ob + c.NUMPY_SCALAR_VALUE)
    store(word, value & 0xFFFFFFFF)
    store(word + 8, (value >> 32) & 0xFFFFFFFF)
    return structs.entry_at(entry).key


@reader
def read_numpy_complex128(ob, entry, frame, word, array):
    """A ``numpy.complex128``."""
    store(word, load(ob + c.NUMPY_SCALAR_VALUE))
    store(word + 8, load(ob + c.NUMPY_SCALAR_VALUE + 8))
    return structs.entry_at(entry).key


# ---- their kinds -----------------------------------------------------------------------------------------------------


def _kind(reader, row_reader=None, fill_row=None, schema_type: str = "", for_numba=None, form=structs.FORM_PLAIN) -> Kind:
    return Kind(
        PATH, MEANING, form, reader, fill_row=fill_row, schema_type=schema_type, is_read_on_device=True,
        row_readers=lambda fields: (row_reader,) if row_reader else (), for_numba=for_numba,
    )  # fmt: skip


def require_64_bits(value: int) -> int:
    """`value`. Raises OverflowError if it is beyond int64 and uint64."""
    if not -(2**63) <= value < 2**64:
        shown = str(value) if value.bit_length() <= 128 else f"of {value.bit_length()} bits"
        raise OverflowError(f"int {shown} does not fit into 64 bits")
    return value


_INT = _kind(read_int, int_row, fill_int_row, "SymInt", require_64_bits)
_PYTHONS = (
    (float, _kind(read_float, float_row, schema_type="float")),
    (int, _INT),
    (bool, _kind(read_bool, bool_row, schema_type="bool")),
    (complex, _kind(read_complex)),
)
_NUMPYS = _kind(read_numpy_scalar, numpy_scalar_row)
_HALVES = _kind(read_numpy_scalar, numpy_scalar_row, for_numba=np.float32, form=structs.FORM_OTHER)
"""Numbers for which Numba has no arithmetic on a CPU: see ``ground.half``."""
_COMPLEX64, _COMPLEX128 = _kind(read_numpy_complex64), _kind(read_numpy_complex128)
_DTYPES = {
    id(np.dtype(code).type): np.dtype(code) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
"""By NumPy's scalar types' ``id``, because hashing an unknown type may raise."""


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Scalar types, but not their subclasses, whose value may mean something else."""
    kind = next((kind for known, kind in _PYTHONS if cls is known), None)
    if kind is not None:
        if cls.__name__ in runtime().unverified:
            notes.append(f"the layout of {cls.__name__} is not as expected")
            return None
        return Discovery(kind)
    dtype = _dtype_of(cls)
    element = dtype_field(dtype) if dtype is not None and dtype.itemsize <= 16 else None
    if dtype is None or element is None:
        return None
    if not _reads_as_declared(dtype):
        notes.append(f"the layout of {cls.__name__} is not as expected")
        return None
    kind = _HALVES if is_half(element) else _NUMPYS
    if dtype.kind == "c":
        kind = _COMPLEX64 if dtype.itemsize == 8 else _COMPLEX128
    return Discovery(kind, {"key": structs.KEY_SCALAR | element << structs.DTYPE_SHIFT})


def _dtype_of(cls: type) -> np.dtype | None:
    """The dtype of a scalar type of NumPy or ml_dtypes with which kernels compute, or None."""
    known = _DTYPES.get(id(cls))
    ml_dtypes = sys.modules.get("ml_dtypes")
    if known is None and any(getattr(ml_dtypes, form.name, None) is cls for form in FORMATS):
        return np.dtype(cls)
    return known


def _reads_as_declared(dtype: np.dtype) -> bool:
    """Whether a NumPy scalar's value follows the object's head. Tests a scalar whose bytes all differ."""
    expected = bytes([1]) if dtype.kind == "b" else bytes(range(1, dtype.itemsize + 1))
    if dtype.type.__basicsize__ < NUMPY_SCALAR_VALUE + max(8, dtype.itemsize):
        return False
    value = np.frombuffer(expected, dtype)[0]
    return ctypes.string_at(id(value) + NUMPY_SCALAR_VALUE, dtype.itemsize) == expected


def scalar_type(key: int, decoding):
    """The Numba type of a number."""
    return decoding.scalar(key >> structs.DTYPE_SHIFT & structs.FIELD_MASK)
