"""DLTensors: checks, before any pointer of a producer is followed; making managed tensors, and calling their deleters."""

import sys
from collections import namedtuple

import numpy as np
from numba import types

from . import cpython as c
from .cfunction import cfunction
from .dlpack import CPU, CPU_READABLE_MASK, DLPackFlag
from .dlpack import VERSION as DLPACK_VERSION
from .native import call_word, larger, load, native, offset_of, sizeof, stack, store, struct_at

dl_tensor_at = struct_at("DLTensor")
managed_at = struct_at("DLManagedTensorVersioned")
DL_TENSOR = offset_of("DLManagedTensorVersioned", "dl_tensor")
MANAGED_BYTES = sizeof("DLManagedTensorVersioned")
DL_TENSOR_WORDS = sizeof("DLTensor") // 8
INTERFACE_STREAM = MANAGED_BYTES
"""The offset of the stream in an export of an array with ``__cuda_array_interface__``: see ``cuda.array_interface``."""
MAX_NDIM = 64  # NumPy's
MAX_ELEMENTS = 1 << 55  # times 32 bytes an element still fits into 64 bits
MAX_OFFSET = 1 << 60
NOWHERE_BITS = 22 if sys.platform == "linux" else 16
"""No program has memory at addresses of so few bits: on Linux, executables that are not relocatable begin at 4 MiB.

Elsewhere, the first 64 KiB: Windows may hand out what follows them, and macOS keeps 4 GiB free.
"""

READONLY = np.uint64(DLPackFlag.DLPACK_FLAG_BITMASK_READ_ONLY)
READONLY_IS_ASSUMED = np.uint64(1 << 63)
"""A flag of this package besides READONLY, for exports of legacy capsules, which have no flags.

Their memory is taken for readonly, as by ``np.from_dlpack`` (JAX's immutable arrays have such capsules), unless the type is known
to be mutable. No export leaves the package with this flag.
"""

SHIFTS = np.array([size.bit_length() - 1 if size & (size - 1) == 0 else -1 for size in range(33)], np.int64)
"""By item size: its binary logarithm; -1 if it is no power of two."""

# What is wrong with a tensor. ``exchange.errors.wording`` has the messages.
SOUND = 0
NULL_DATA = 32
DEVICE = 33
DTYPE = 34
NDIM = 35
SHAPE = 36
OVERFLOW = 37
VERSION = 38


View = namedtuple("View", "data byte_offset ndim shape strides")
"""Fields of a DLTensor that is nowhere in memory, for functions that take either."""


@native
def check_sizes(tensor):
    """Check a DLTensor's extents, number of elements, strides and offset, for any numbers. Returns SOUND or what is wrong.

    No element may be farther than MAX_ELEMENTS from the first one. Unused strides are ignored.
    """
    if types.intp(tensor.byte_offset) < 0 or types.intp(tensor.byte_offset) > MAX_OFFSET:
        return OVERFLOW
    count = 1
    reach = 0
    for i in range(tensor.ndim):
        extent = load(tensor.shape + 8 * i)
        if extent < 0:
            return SHAPE
        if extent > 1:  # even if another extent is 0: NumPy refuses such arrays, too
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
    """Check a DLTensor's device, dtype and rank. Returns SOUND or what is wrong."""
    device = types.intp(tensor.device.device_type)
    if device < 0 or device > 62 or (CPU_READABLE_MASK >> device) & 1 == 0:
        return DEVICE
    if tensor.dtype.lanes != 1:
        return DTYPE
    return check_rank(tensor)


@native
def check_rank(tensor):
    """Check a DLTensor's rank. Returns SOUND or what is wrong."""
    if tensor.ndim < 0 or tensor.ndim > MAX_NDIM:
        return NDIM
    if tensor.ndim > 0 and tensor.shape == 0:
        return SHAPE
    return SOUND


@native
def is_plain(tensor):
    """Whether device, lanes and rank are sound and usual. If not, :func:`refusal` tells whether something is wrong."""
    return (
        tensor.device.device_type == CPU
        and tensor.dtype.lanes == 1
        and types.uint32(tensor.ndim) <= MAX_NDIM
        and tensor.shape != 0
    )


@native
def element_field(tensor):
    """The dtype field of a DLTensor: ``code | bits << 8``."""
    return types.intp(tensor.dtype.code) | types.intp(tensor.dtype.bits) << 8


@native
def is_empty(tensor):
    """Whether a tensor with sound sizes has no elements."""
    is_zero = False
    for i in range(tensor.ndim):
        is_zero |= load(tensor.shape + 8 * i) == 0
    return is_zero


@native
def is_nowhere(tensor):
    """Whether a tensor's memory is NULL, or NULL plus an offset that the producer has added or subtracted.

    No program has memory there: see NOWHERE_BITS.
    """
    return (tensor.data >> NOWHERE_BITS == 0) | ((tensor.data + types.intp(tensor.byte_offset)) >> NOWHERE_BITS == 0)


@native
def end_of(tensor):
    """The address behind the last element of a tensor with sound sizes, which is not empty and has no negative strides."""
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
    """Whether a tensor with sound sizes, on any device, has elements but no memory."""
    if tensor.device.device_type == CPU:
        lost = is_nowhere(tensor)
    else:
        lost = tensor.data == 0 or tensor.data + types.intp(tensor.byte_offset) == 0
    return lost and not is_empty(tensor)


@native
def examine(tensor):
    """Check everything in a DLTensor. Returns SOUND or what is wrong."""
    status = SOUND if is_plain(tensor) else refusal(tensor)
    if status == SOUND:
        status = check_sizes(tensor)
    if status == SOUND and is_nowhere(tensor) and not is_empty(tensor):
        status = NULL_DATA
    return status


@native
def examine_memory(tensor):
    """Check a DLTensor's rank, sizes and memory, on any device. Returns SOUND or what is wrong."""
    status = check_rank(tensor)
    if status == SOUND:
        status = check_sizes(tensor)
    return NULL_DATA if status == SOUND and is_lost(tensor) else status


@cfunction(types.intp, types.intp)
def status_at(address):
    """:func:`examine` of the DLTensor at an address, for Python."""
    return examine(dl_tensor_at(address))


@cfunction(types.intp, types.intp)
def memory_status_at(address):
    """:func:`examine_memory` of the DLTensor at an address, for Python."""
    return examine_memory(dl_tensor_at(address))


@native
def in_elements(stride, itemsize):
    """Convert a stride from bytes to elements, rounded down."""
    shift = SHIFTS[itemsize] if itemsize < 33 else -1
    return stride >> shift if shift >= 0 else stride // itemsize


@native
def describe(tensor, data, ndim, field, shape, strides):
    """Fill a DLTensor for the CPU's memory."""
    tensor.data = data
    tensor.device.device_type = CPU
    tensor.device.device_id = 0
    tensor.ndim = ndim
    tensor.dtype.code = field & 0xFF
    tensor.dtype.bits = field >> 8
    tensor.dtype.lanes = 1
    tensor.shape = shape
    tensor.strides = strides
    tensor.byte_offset = 0


@native
def packed_strides(ndim, shape, strides):
    """Store the strides of a packed tensor, in elements."""
    step = 1
    for j in range(ndim):
        store(strides + 8 * (ndim - 1 - j), step)
        step *= larger(load(shape + 8 * (ndim - 1 - j)), 1)


@native
def new_managed(ndim, extra):
    """Allocate a managed tensor (version 1.3) with room for `ndim` extents and strides and `extra` bytes. 0: no memory."""
    at = c.PyMem_RawMalloc(MANAGED_BYTES + 16 * ndim + extra)
    if at != 0:
        managed = managed_at(at)
        managed.version.major = DLPACK_VERSION[0]
        managed.version.minor = DLPACK_VERSION[1]
        managed.manager_ctx = at  # not NULL, with which PaddlePaddle 3.3.1 does not call the deleter
        managed.flags = 0
    return at


@native
def delete_managed(managed):
    """Call the deleter of a managed tensor with the pending exception, if any, put aside. GIL: held."""
    deleter = managed_at(managed).deleter
    if deleter == 0:
        return
    if c.PyErr_Occurred() == 0:
        call_word(deleter, (managed,))
        c.PyErr_Clear()
        return
    error = stack(3)
    c.save_error(error)
    call_word(deleter, (managed,))
    c.restore_error(error)
