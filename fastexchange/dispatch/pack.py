"""Write a kernel's words for one tensor: an ndarray, read in place, or a DLTensor from an exchange table.

The words are Numba's array struct: meminfo, parent, number of items, item size, data, shape, strides in bytes. The caller
writes the first word.
"""

from numba import types

from ..ground.dlpack import COMPLEX
from ..ground.dltensor import DL_TENSOR_WORDS, check_sizes, is_nowhere
from ..ground.native import load, native, put
from ..producers.ndarray import SWAPPED, descr_at, ndarray_at
from . import structs
from .type_table import find


@native
def plain_field(runtime, descr):
    """The dtype field of one of NumPy's numbers in this machine's byte order; 0 for any other dtype."""
    type_num = types.intp(descr.type_num)
    return runtime.dtype_fields[type_num & 63] if type_num < 64 and descr.byteorder != SWAPPED else 0


@native
def dtype_entry(runtime, descr_address):
    """Return (field << DTYPE_SHIFT | KEY_ARRAY, item size) of a NumPy dtype object; (0, STATUS_*) if it is unknown."""
    field = plain_field(runtime, descr_at(descr_address))
    if field != 0:
        return structs.KEY_ARRAY | field << structs.DTYPE_SHIFT, field >> 11
    known = find(runtime, descr_address)
    if known == 0:
        return 0, structs.STATUS_UNKNOWN_DTYPE
    if structs.entry_at(known).size == 0:
        return 0, structs.STATUS_NUMBA
    return structs.KEY_ARRAY | structs.entry_at(known).key << structs.DTYPE_SHIFT, structs.entry_at(known).size


@native
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


@native
def misaligned_bits(field):
    """The alignment mask of a dtype field: the bits of an aligned address that are 0. Complex numbers use that of their parts."""
    itemsize = field >> 11
    return (itemsize >> 1 if field & 0xFF == COMPLEX else itemsize) - 1


@native
def flags_in_order(ndim, count):
    """The flags of a C-contiguous array with `count` elements, as of DLPack: F_ORDER only if there can be no other order."""
    return structs.C_ORDER | structs.F_ORDER if ndim < 2 or count == 0 else structs.C_ORDER


@native
def pack_tensor(tensor, ndim, field, words):
    """Check the sizes of a DLTensor or a :data:`dltensor.View`, which are not trusted, and write its words, all but the first.

    1. In one loop over the dimensions, write extents and strides, and collect in `odd` and `long` whether any is too large for
       the arithmetic here.
    2. If so, check the sizes exactly (``check_sizes``).
    3. Compute the flags of the key.

    Returns: (flags without WRITEABLE, or -1; a STATUS_*).
    """
    itemsize = field >> 11
    offset = types.intp(tensor.byte_offset)
    data = tensor.data + offset
    shape = tensor.shape
    given_strides = tensor.strides
    count = 1
    scattered = 0  # nonzero: some stride is not that of C order
    odd = offset >> 40  # nonzero: negative or large numbers
    long = 0  # nonzero: long strides, harmless in C order
    addresses = data
    for j in range(ndim):  # from the last dimension, whose stride is 1 in C order
        i = ndim - 1 - j
        extent = load(shape + 8 * i)
        odd |= (extent | count) >> 31
        elements = count
        if given_strides != 0:
            elements = load(given_strides + 8 * i)
            long |= (elements ^ (elements >> 63)) >> 18
        stride = elements * itemsize
        if extent != 1:
            scattered |= elements ^ count  # in elements: a stride in bytes may overflow 64 bits
            addresses |= stride
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, stride)
    odd |= count >> 31
    if odd != 0 or (long != 0 and scattered != 0):  # else every element is within 64 << 31 << 18 of the first
        status = check_sizes(tensor)
        if status != structs.STATUS_OK:
            return -1, status
    if is_nowhere(tensor) and count != 0:
        return -1, structs.STATUS_NULL_DATA
    flags = flags_in_order(ndim, count)
    if scattered != 0 and count != 0:
        flags = structs.F_ORDER if ndim > 1 and is_f_contiguous(tensor) else 0
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, data)
    if addresses & misaligned_bits(field) == 0 or count == 0:
        flags |= structs.ALIGNED
    return flags, structs.STATUS_OK


@native
def pack_contiguous(view, ndim, itemsize, misaligned, words):
    """:func:`pack_tensor` with fewer steps, for a :data:`dltensor.View` that should be C-contiguous and aligned.

    `misaligned`: the bits of an address that are 0 if an element is aligned. Returns False, and the words are invalid, if the
    tensor is not so, or its sizes need an exact check.
    """
    count = 1
    odd = 0  # nonzero: negative or large numbers, or strides that are not those of C order
    for j in range(ndim):
        i = ndim - 1 - j
        extent, elements = load(view.shape + 8 * i), load(view.strides + 8 * i)
        odd |= (extent | count) >> 31
        odd |= (elements ^ count) if extent != 1 else 0
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, elements * itemsize)
    odd |= count >> 31
    odd |= view.data & misaligned
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, view.data)
    return odd == 0


@native
def pack_scattered(view, ndim, itemsize, misaligned, words):
    """:func:`pack_tensor` with fewer steps, for a :data:`dltensor.View` that has elements. Returns its flags without WRITEABLE.

    Returns -1, and the words are invalid, if it has no elements, or its sizes need an exact check.
    """
    count = 1
    ahead = 1
    scattered = 0  # nonzero: some stride is not that of C order
    turned = 0  # nonzero: some stride is not that of F order
    odd = 0  # nonzero: negative or large numbers
    addresses = view.data
    for j in range(ndim):
        i = ndim - 1 - j
        extent, elements = load(view.shape + 8 * i), load(view.strides + 8 * i)
        odd |= (extent | count) >> 31 | (elements ^ (elements >> 63)) >> 18
        stride = elements * itemsize
        scattered |= (elements ^ count) if extent != 1 else 0
        addresses |= stride if extent != 1 else 0
        count *= extent
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, stride)
    for i in range(ndim):
        extent = load(view.shape + 8 * i)
        turned |= (load(view.strides + 8 * i) ^ ahead) if extent != 1 else 0
        ahead *= extent
    odd |= count >> 31
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, view.data)
    if odd != 0 or count == 0:
        return -1
    flags = structs.F_ORDER if turned == 0 and ndim > 1 else 0
    flags = flags_in_order(ndim, count) if scattered == 0 else flags
    return flags | (structs.ALIGNED if addresses & misaligned == 0 else 0)


@native
def end_of_array(words, ndim):
    """The address behind the last element of the array in `words`, which is not empty and has no negative strides."""
    end = words[4] + words[3]
    for i in range(ndim):
        end += (words[structs.ARRAY_HEAD_WORDS + i] - 1) * words[structs.ARRAY_HEAD_WORDS + ndim + i]
    return end


@native
def is_f_contiguous(tensor):
    """Whether a DLTensor's strides are those of Fortran order, ignoring dimensions of extent 1, as NumPy does."""
    expected = 1
    for i in range(tensor.ndim):
        extent = load(tensor.shape + 8 * i)
        if extent != 1 and (tensor.strides == 0 or load(tensor.strides + 8 * i) != expected):
            return False
        expected *= extent
    return True


@native
def keep_tensor(frame, at):
    """Copy the refused DLTensor at `at` into the frame, for the error message."""
    for i in range(DL_TENSOR_WORDS):
        frame.tensor[i] = load(at + 8 * i)
