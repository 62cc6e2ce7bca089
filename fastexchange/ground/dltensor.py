"""DLTensors: is one sound? What a producer says is looked at before anybody follows a pointer. Making one, giving one back."""

import numpy as np
from numba import types

from . import cpython as c
from .cfunction import cfunction
from .dlpack import CPU_READABLE_MASK
from .dlpack import VERSION as DLPACK_VERSION
from .native import call_word, load, native, native_inline, offset_of, sizeof, stack, struct_at

dl_tensor_at = struct_at("DLTensor")
managed_at = struct_at("DLManagedTensorVersioned")
DL_TENSOR = offset_of("DLManagedTensorVersioned", "dl_tensor")
MANAGED_BYTES = sizeof("DLManagedTensorVersioned")
DL_TENSOR_WORDS = sizeof("DLTensor") // 8
INTERFACE_STREAM = MANAGED_BYTES
"""Where an export of an array with ``__cuda_array_interface__`` has the stream that this names: see ``cuda.array_interface``."""
MAX_NDIM = 64  # NumPy's
MAX_ELEMENTS = 1 << 55  # with 32 bytes an element, still within 64 bits
MAX_OFFSET = 1 << 60

READONLY = np.uint64(1)
"""``DLPACK_FLAG_BITMASK_READ_ONLY``."""
READONLY_IS_ASSUMED = np.uint64(1 << 63)
"""A flag of this package's own beside READONLY, for exports whose producer gave a legacy capsule: those have no flags.

Their memory is taken for readonly, as ``np.from_dlpack`` does (JAX's immutable arrays come so), unless the type is known to be
mutable. No export leaves the package with it.
"""

SHIFTS = np.array([size.bit_length() - 1 if size & (size - 1) == 0 else -1 for size in range(33)], np.int64)
"""By item size: its binary logarithm, -1 if that is not whole."""

# What is wrong with a tensor. ``exchange.errors.wording`` has the words.
SOUND = 0
NULL_DATA = 32
DEVICE = 33
DTYPE = 34
NDIM = 35
SHAPE = 36
OVERFLOW = 37
VERSION = 38


@native
def check_sizes(tensor):
    """Whether a DLTensor's extents, number of elements, strides and offset are sound. The exact test, for any numbers.

    No element is farther than MAX_ELEMENTS from the first; strides that lead to no element mean nothing.
    """
    if types.intp(tensor.byte_offset) < 0 or types.intp(tensor.byte_offset) > MAX_OFFSET:
        return OVERFLOW
    count = 1
    reach = 0
    for i in range(tensor.ndim):
        extent = load(tensor.shape + 8 * i)
        if extent < 0:
            return SHAPE
        if extent > 1:  # also beside an extent of 0: NumPy has no such arrays either
            if count > MAX_ELEMENTS // extent:
                return OVERFLOW
            count *= extent
            if tensor.strides != 0:
                stride = load(tensor.strides + 8 * i)
                if stride > MAX_ELEMENTS or stride < -MAX_ELEMENTS or abs(stride) > (MAX_ELEMENTS - reach) // (extent - 1):
                    return OVERFLOW
                reach += abs(stride) * (extent - 1)
    return SOUND


@native
def refusal(tensor):
    """What is wrong with a DLTensor's device, element type or rank; SOUND if nothing is."""
    device = types.intp(tensor.device.device_type)
    if device < 0 or device > 62 or (CPU_READABLE_MASK >> device) & 1 == 0:
        return DEVICE
    if tensor.dtype.lanes != 1:
        return DTYPE
    return check_rank(tensor)


@native
def check_rank(tensor):
    """What is wrong with a DLTensor's rank; SOUND if nothing is."""
    if tensor.ndim < 0 or tensor.ndim > MAX_NDIM:
        return NDIM
    if tensor.ndim > 0 and tensor.shape == 0:
        return SHAPE
    return SOUND


@native_inline
def is_plain(tensor):
    """Whether device, lanes and rank are those of nearly all tensors. If not, :func:`refusal` tells what is wrong, if so."""
    return (
        tensor.device.device_type == 1
        and tensor.dtype.lanes == 1
        and types.uint32(tensor.ndim) <= MAX_NDIM
        and tensor.shape != 0
    )


@native_inline
def element_field(tensor):
    """Code and bits of a DLTensor's elements: ``code | bits << 8``."""
    return types.intp(tensor.dtype.code) | types.intp(tensor.dtype.bits) << 8


@native
def is_empty(tensor):
    """Whether a tensor of sound sizes has no elements."""
    is_zero = False
    for i in range(tensor.ndim):
        is_zero |= load(tensor.shape + 8 * i) == 0
    return is_zero


@native_inline
def is_nowhere(tensor):
    """Whether a tensor's memory is NULL, or NULL and an offset, which a producer may have added itself or subtracted.

    Below 4 MiB no program has memory: on Linux executables that are not relocatable begin there.
    """
    return (tensor.data >> 22 == 0) | ((tensor.data + types.intp(tensor.byte_offset)) >> 22 == 0)


@native
def end_of(tensor):
    """The address behind the last element of a tensor of sound sizes with elements and without negative strides."""
    itemsize = (types.intp(tensor.dtype.bits) * types.intp(tensor.dtype.lanes) + 7) >> 3
    last = 0
    compact = 1
    for j in range(tensor.ndim):
        i = tensor.ndim - 1 - j
        extent = load(tensor.shape + 8 * i)
        last += (extent - 1) * (compact if tensor.strides == 0 else load(tensor.strides + 8 * i))
        compact *= extent
    return tensor.data + types.intp(tensor.byte_offset) + (last + 1) * itemsize


@native
def is_lost(tensor):
    """Whether a tensor of sound sizes, on whatever device, has elements and no memory."""
    if tensor.device.device_type == 1:
        lost = is_nowhere(tensor)
    else:
        lost = tensor.data == 0 or tensor.data + types.intp(tensor.byte_offset) == 0
    return lost and not is_empty(tensor)


@native
def examine(tensor):
    """All of it: SOUND, or what is wrong with the DLTensor."""
    status = SOUND if is_plain(tensor) else refusal(tensor)
    if status == SOUND:
        status = check_sizes(tensor)
    if status == SOUND and is_nowhere(tensor) and not is_empty(tensor):
        status = NULL_DATA
    return status


@cfunction(types.intp, types.intp)
def status_at(address):
    """:func:`examine` of the DLTensor at an address, for Python."""
    return examine(dl_tensor_at(address))


@cfunction(types.intp, types.intp)
def memory_status_at(address):
    """What is wrong with rank, sizes or memory of the DLTensor at an address, on whatever device; for Python."""
    tensor = dl_tensor_at(address)
    status = check_rank(tensor)
    if status == SOUND:
        status = check_sizes(tensor)
    return NULL_DATA if status == SOUND and is_lost(tensor) else status


@native_inline
def in_elements(stride, itemsize):
    """A stride in bytes as one in elements, rounded down."""
    shift = SHIFTS[itemsize] if itemsize < 33 else -1
    return stride >> shift if shift >= 0 else stride // itemsize


@native_inline
def describe(tensor, data, ndim, field, shape, strides):
    """Fill a DLTensor for memory of the CPU."""
    tensor.data = data
    tensor.device.device_type = 1
    tensor.device.device_id = 0
    tensor.ndim = ndim
    tensor.dtype.code = field & 0xFF
    tensor.dtype.bits = field >> 8
    tensor.dtype.lanes = 1
    tensor.shape = shape
    tensor.strides = strides
    tensor.byte_offset = 0


@native
def new_managed(ndim, extra):
    """The address of a managed tensor of version 1.3 with room for `ndim` extents and strides and `extra` bytes; or 0."""
    at = c.PyMem_RawMalloc(MANAGED_BYTES + 16 * ndim + extra)
    if at != 0:
        managed = managed_at(at)
        managed.version.major = DLPACK_VERSION[0]
        managed.version.minor = DLPACK_VERSION[1]
        managed.manager_ctx = 0
        managed.flags = 0
    return at


@native
def delete_managed(managed):
    """Call the deleter of a managed tensor, keeping the pending exception, if any, out of its way. Needs the GIL."""
    deleter = managed_at(managed).deleter
    if deleter == 0:
        return
    if c.PyErr_Occurred() == 0:
        call_word(deleter, (managed,))
        if c.PyErr_Occurred() != 0:
            c.PyErr_Clear()
        return
    error = stack(3)
    c.PyErr_Fetch(error, error + 8, error + 16)
    call_word(deleter, (managed,))
    c.PyErr_Restore(load(error), load(error + 8), load(error + 16))
