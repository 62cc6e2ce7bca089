"""``numpy.ndarray``: native code reads its C struct, which NumPy has kept stable since 1.7, and which is verified at import.

NumPy has no ``__dlpack_c_exchange_api__`` yet. Other consumers get ``numpy_table``.

Source: NumPy's C API, ``PyArrayObject_fields`` and ``PyArray_Descr`` (numpy/ndarraytypes.h).
"""

import sys

import numpy as np

from .._abi import ffi
from ..ground.native import address_of, native, struct_at
from ..ground.readable import is_readable

CDEF = """
typedef struct {
    fx_object ob_base;
    void *data;
    int32_t nd;
    int64_t *dimensions;
    int64_t *strides;           /* in bytes */
    void *base;
    void *descr;
    int32_t flags;
} fx_ndarray;

typedef struct { fx_object ob_base; void *typeobj; char kind; char type; char byteorder; char flags; int32_t type_num; }
    fx_descr;
"""

ndarray_at = struct_at("fx_ndarray")
descr_at = struct_at("fx_descr")

dtype_of = np.ndarray.dtype.__get__
"""An array's dtype, even if a subclass overrides the attribute."""

C_CONTIGUOUS, F_CONTIGUOUS, FLAG_ALIGNED, FLAG_WRITEABLE = 0x0001, 0x0002, 0x0100, 0x0400
SWAPPED = ord(">") if sys.byteorder == "little" else ord("<")


def verify() -> bool:
    """Whether the layouts of this NumPy's arrays and dtypes are as declared above."""
    base = np.zeros((3, 4, 5), np.float32)
    readonly = np.zeros(7, np.int16)
    readonly.flags.writeable = False
    misaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
    arrays = [base, base.T, base[::2, 1:, ::-1], base[0, 0, 0:0], np.zeros(()), readonly, misaligned, np.zeros(2, ">i4")]
    return all(_reads_as_declared(array) for array in arrays)


def _reads_as_declared(array: np.ndarray) -> bool:
    if type(array).__basicsize__ < ffi.sizeof("fx_ndarray"):
        return False
    view = ffi.cast("fx_ndarray *", id(array))
    flags = array.flags
    expected = (
        C_CONTIGUOUS * flags.c_contiguous | F_CONTIGUOUS * flags.f_contiguous
        | FLAG_ALIGNED * flags.aligned | FLAG_WRITEABLE * flags.writeable
    )  # fmt: skip
    if (
        view.nd != array.ndim
        or address_of(view.data) != array.ctypes.data
        or address_of(view.descr) != id(array.dtype)
        or view.flags & (C_CONTIGUOUS | F_CONTIGUOUS | FLAG_ALIGNED | FLAG_WRITEABLE) != expected
        or _words(view.dimensions, array.ndim) != array.shape
        or _words(view.strides, array.ndim) != array.strides
    ):
        return False
    descr = ffi.cast("fx_descr *", id(array.dtype))
    return descr.type_num == array.dtype.num and descr.byteorder == array.dtype.byteorder.encode()


def _words(pointer, count: int) -> tuple[int, ...] | None:
    """The words behind a pointer; None if it is none."""
    if count and not is_readable(address_of(pointer), 8 * count):
        return None
    return tuple(pointer[i] for i in range(count))


@native
def is_swapped(array):
    """Whether an ndarray's elements have a foreign byte order."""
    return descr_at(array.descr).byteorder == SWAPPED
