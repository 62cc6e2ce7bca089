"""One tensor into a kernel's words: an ndarray read in place, or the DLTensor that an exchange table filled.

Both write Numba's array struct (meminfo, parent, number of items, item size, data, shape, strides in bytes) and return
the leaf's key. The first word is the caller's to fill.
"""

from numba import types

from ..ground.dltensor import DL_TENSOR_WORDS, check_sizes, dl_tensor_at, is_nowhere
from ..ground.native import load, native, native_inline, put
from ..producers.ndarray import SWAPPED, descr_at, ndarray_at
from . import structs
from .type_table import find


@native_inline
def dtype_entry(runtime, descr_address):
    """(field << DTYPE_SHIFT | KIND_ARRAY, item size) of a NumPy dtype object; (0, STATUS_*) if there is none."""
    descr = descr_at(descr_address)
    type_num = types.intp(descr.type_num)
    field = runtime.dtype_fields[type_num & 63] if type_num < 64 else 0
    if field != 0 and descr.byteorder != SWAPPED:
        return structs.KIND_ARRAY | field << structs.DTYPE_SHIFT, field >> 11
    known = find(runtime, descr_address)
    if known == 0:
        return 0, structs.STATUS_UNKNOWN_DTYPE
    if structs.entry_at(known).kind != structs.KIND_DTYPE:
        return 0, structs.STATUS_NUMBA
    return structs.KIND_ARRAY | structs.entry_at(known).key << structs.DTYPE_SHIFT, structs.entry_at(known).size


@native
def is_plain_dtype(runtime, descr_address):
    """Whether a NumPy dtype object is one of NumPy's numbers, in this machine's byte order."""
    descr = descr_at(descr_address)
    type_num = types.intp(descr.type_num)
    return type_num < 64 and runtime.dtype_fields[type_num & 63] != 0 and descr.byteorder != SWAPPED


@native_inline
def pack_ndarray(ob, ndim, itemsize, words):
    """Write the words of the ndarray `ob`, all but the first."""
    array = ndarray_at(ob)
    dimensions = array.dimensions
    byte_strides = array.strides
    count = 1
    for i in range(ndim):
        extent = load(dimensions + 8 * i)
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, load(byte_strides + 8 * i))
    put(words, 1, ob)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, array.data)


@native_inline
def pack_tensor(at, ndim, field, words):
    """Check the sizes of the DLTensor at `at` and write its words, all but the first.

    Returns (flags of its key without WRITEABLE, or -1; a STATUS_*). Nothing that a producer says is trusted. What passes
    the cheap test of a dimension is sound; what does not is tested exactly.
    """
    tensor = dl_tensor_at(at)
    itemsize = field >> 11
    offset = types.intp(tensor.byte_offset)
    data = tensor.data + offset
    shape = tensor.shape
    given_strides = tensor.strides
    count = 1
    scattered = 0  # nonzero: some stride is not that of C order
    odd = offset >> 40  # nonzero: negative or large numbers, to be looked at exactly
    long = 0  # nonzero: strides that are to be looked at exactly unless they are those of C order
    addresses = data
    for j in range(ndim):  # from the last dimension, as C order counts
        i = ndim - 1 - j
        extent = load(shape + 8 * i)
        odd |= (extent | count) >> 31
        elements = count
        if given_strides != 0:
            elements = load(given_strides + 8 * i)
            long |= (elements ^ (elements >> 63)) >> 18
        stride = elements * itemsize
        if extent != 1:
            scattered |= elements ^ count  # not of the bytes: 64 bits do not hold those of any stride
            addresses |= stride
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, stride)
    odd |= count >> 31
    if odd != 0 or (long != 0 and scattered != 0):  # else no element is farther than 64 << 31 << 18 from the first
        status = check_sizes(tensor)
        if status != structs.STATUS_OK:
            return -1, status
    if is_nowhere(tensor) and count != 0:
        return -1, structs.STATUS_NULL_DATA
    flags = structs.C_ORDER | structs.F_ORDER if ndim < 2 or count == 0 else structs.C_ORDER
    if scattered != 0 and count != 0:
        flags = structs.F_ORDER if ndim > 1 and is_f_contiguous(tensor) else 0
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, data)
    alignment = itemsize >> 1 if field & 0xFF == 5 else itemsize  # a complex number is aligned as its parts
    if addresses & (alignment - 1) == 0 or count == 0:
        flags |= structs.ALIGNED
    return flags, structs.STATUS_OK


@native_inline
def pack_contiguous(at, ndim, field, words, in_elements):
    """:func:`pack_tensor` of a tensor that is expected to be C-contiguous and aligned, as most are: fewer steps.

    `in_elements`: whether strides are to be counted in elements, not in bytes. False where it is not, or where something is
    to be looked at exactly: then the words are not to be used.
    """
    tensor = dl_tensor_at(at)
    itemsize = field >> 11
    offset = types.intp(tensor.byte_offset)
    data = tensor.data + offset
    shape = tensor.shape
    given_strides = tensor.strides
    count = 1
    odd = offset >> 40  # nonzero: negative or large numbers, or strides that are not those of C order
    for j in range(ndim):
        i = ndim - 1 - j
        extent = load(shape + 8 * i)
        odd |= (extent | count) >> 31
        elements = count
        if given_strides != 0:
            elements = load(given_strides + 8 * i)
            odd |= (elements ^ count) if extent != 1 else 0
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, elements if in_elements else elements * itemsize)
    odd |= count >> 31
    alignment = itemsize >> 1 if field & 0xFF == 5 else itemsize
    odd |= data & (alignment - 1)
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, data)
    return odd == 0 and (count == 0 or not is_nowhere(tensor))


@native
def is_f_contiguous(tensor):
    """Whether a DLTensor's strides are those of Fortran order; extents of 1 do not count, as in NumPy."""
    expected = 1
    for i in range(tensor.ndim):
        extent = load(tensor.shape + 8 * i)
        if extent != 1 and (tensor.strides == 0 or load(tensor.strides + 8 * i) != expected):
            return False
        expected *= extent
    return True


@native
def keep_tensor(frame, at):
    """Copy the refused DLTensor at `at` into the frame, for the message."""
    for i in range(DL_TENSOR_WORDS):
        frame.tensor[i] = load(at + 8 * i)
