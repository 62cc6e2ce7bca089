"""NumPy's arrays, read in their C struct."""

import sys
from typing import Literal

import numpy as np
from numba import types

from ..dispatch import structs
from ..dispatch.frame import ARRAY_BYTES
from ..dispatch.pack import dtype_entry, pack_ndarray
from ..dispatch.reading import has_no_room, note_array, runtime_of
from ..dispatch.rows import TOGETHER, go_on, is_of_type, leave
from ..dispatch.runtime import runtime
from ..ground.cfunction import CFunction, cfunction
from ..ground.dtypes import PLAIN_DTYPES, dtype_field, field_itemsize
from ..ground.native import as_words, load, native, store
from ..producers.ndarray import descr_at, dtype_of, ndarray_at
from .buffer import CLASSES
from .kind import OTHER, Discovery, Kind, reader


@reader
def read_ndarray(ob, entry, frame, word, array):
    """An ndarray, read in its C struct."""
    ndarray = ndarray_at(ob)
    ndim = types.intp(ndarray.nd)
    dtype_key, itemsize = dtype_entry(runtime_of(frame), ndarray.descr)
    if dtype_key == 0:
        return -itemsize  # a STATUS_*
    if has_no_room(structs.frame_at(frame), word, structs.ARRAY_HEAD_WORDS + 2 * ndim):
        return -structs.STATUS_GROW
    note_array(array, ob + structs.ORIGIN_NDARRAY, word)
    pack_ndarray(ob, ndim, itemsize, as_words(word))
    return (
        dtype_key | ndim << structs.NDIM_SHIFT | (types.intp(ndarray.flags) & structs.KEY_FLAGS) << structs.FLAGS_SHIFT
    )


@native
def ndarray_of(items, row_address, word, array_address, frame, rank):
    """An ndarray. `rank`: its number of dimensions, or -1: that of the row's key.

    `expected`: the dtype object, the flags of the key, the item size.
    """
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    ndim = rank if rank >= 0 else row.key >> structs.NDIM_SHIFT & 0xFF
    array = ndarray_at(ob)
    flags = types.intp(array.flags) & structs.KEY_FLAGS
    if array.descr != row.expected[0] or flags != row.expected[1] or types.intp(array.nd) != ndim:
        return leave(row_address, frame, 0)
    here = structs.array_at(array_address)
    here.origin = ob + structs.ORIGIN_NDARRAY
    store(word, here.meminfo)
    pack_ndarray(ob, ndim, row.expected[2], as_words(word))
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame)


def _row_reader(rank: int) -> CFunction:
    """The row reader for arrays of so many dimensions, a constant in its code; -1: of any number."""

    @cfunction(types.intp, *[types.intp] * 5, together=TOGETHER, constants=(rank,))
    def ndarray_row(items, row, word, array, frame):
        return ndarray_of(items, row, word, array, frame, rank)

    return ndarray_row


_ROW_READERS = tuple(map(_row_reader, (-1, 1, 2, 3, 4)))
"""By rank, of arrays in any order."""


@native
def lives_for_ever(runtime, descr):
    """Whether a dtype object never dies. The address of another one may be used again, so no row compares that."""
    number = types.intp(descr_at(descr).type_num)
    return number < 64 and runtime.descrs[number & 63] == descr


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fill_ndarray_row(context_address, row_address, ob):
    """See :func:`ndarray_of`."""
    row = structs.row_at(row_address)
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    descr = ndarray_at(ob).descr
    key, itemsize = dtype_entry(runtime, descr)
    if key >> structs.DTYPE_SHIFT != row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK:
        return 0
    row.expected[0], row.expected[1], row.expected[2] = (
        descr,
        row.key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS,
        itemsize,
    )
    if not lives_for_ever(runtime, descr):
        row.reader = 0
    return 1


@cfunction(types.intp, types.intp, types.intp)
def mark_ndarray(entry, ob):
    """The dtype, the rank and the flags of an ndarray."""
    array = ndarray_at(ob)
    return array.descr ^ types.intp(array.nd) << 32 ^ (types.intp(array.flags) & structs.KEY_FLAGS) << 40


@cfunction(types.intp, *[types.intp] * 5)
def read_ndarray_shape(context_address, entry, ob, shape, room):
    """The shape of an ndarray: see ``allocation.read_shape``."""
    key, _ = dtype_entry(structs.runtime_at(structs.context_at(context_address).runtime), ndarray_at(ob).descr)
    ndim = types.intp(ndarray_at(ob).nd)
    if key == 0 or ndim > room:
        return -1
    for i in range(ndim):
        store(shape + 8 * i, load(ndarray_at(ob).dimensions + 8 * i))
    return ndim | (key >> structs.DTYPE_SHIFT & structs.FIELD_MASK) << 8


_plain_dtypes = frozenset(PLAIN_DTYPES)


def learn(value) -> bool:
    """File the dtype of an array. Returns whether it was unknown."""
    return learn_dtype(dtype_of(value))


def learn_dtype(dtype: np.dtype) -> bool:
    """File a dtype object. Returns whether it was unknown."""
    entries = runtime().entries
    if dtype in _plain_dtypes:
        return False
    if dtype in entries:
        entries.find_again(dtype)
        return False
    element = dtype_field(dtype)
    if element is None:
        entries.add_kept(dtype, kind=OTHER)
    else:
        entries.add_kept(dtype, kind=OTHER, key=element, size=field_itemsize(element))
    return True


NDARRAY = Kind(
    "ndarray", "its C struct is read in place", structs.FORM_ARRAY, read_ndarray, lambda fields: _ROW_READERS,
    fill_row=fill_ndarray_row, mark=mark_ndarray, read_shape=read_ndarray_shape, learn=learn, makes_tensors=True,
)  # fmt: skip


def is_masked_array(cls: type) -> bool:
    """Whether this is ``numpy.ma.MaskedArray`` or derived from it. Does not import ``numpy.ma``, which takes time."""
    ma = sys.modules.get("numpy.ma")
    return issubclass(cls, getattr(ma, "MaskedArray", ()))


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """``numpy.ndarray`` and its subclasses, which Numba treats as ndarrays."""
    if not issubclass(cls, np.ndarray):
        return None
    if is_masked_array(cls) or hasattr(cls, "__numba_array_subtype_dispatch__"):
        notes.append("Numba has rules of its own for this subclass of ndarray")
        return Discovery(OTHER, notes=notes)
    if "ndarray" in runtime().unverified:
        notes.append("this NumPy's array struct is not as declared: each call calls __dlpack__")
        return None
    return Discovery(NDARRAY, notes=notes)


def array_type(key: int, decoding) -> types.Type:
    """The Numba type of an array, whatever its framework. Raises: UnknownDtype."""
    flags = key >> structs.FLAGS_SHIFT
    cls = CLASSES[key >> structs.CLASS_SHIFT]
    element, ndim = decoding.element_of(key), (key >> structs.NDIM_SHIFT) & 0xFF
    order: Literal["C", "F", "A"] = "C" if flags & structs.C_ORDER else "F" if flags & structs.F_ORDER else "A"
    readonly = not flags & structs.WRITEABLE
    if cls is types.Array:
        return types.Array(element, ndim, order, readonly, aligned=bool(flags & structs.ALIGNED))
    return cls(element, ndim, order, readonly)  # Numba takes these classes for aligned in any case
