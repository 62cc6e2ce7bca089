"""The parts of a fast entry that read arguments, one for each kind. (``readers`` has those of the general path.)

A part compares the argument with its record in the cache entry, and writes its words. From the first part on, no Python code runs
until the kernel has returned.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import part
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.dltensor import DL_TENSOR_WORDS, View, dl_tensor_at, is_nowhere
from ..ground.native import WORDS, call_int, global_address, load, native, put, stack, store
from ..producers.ndarray import ndarray_at
from ..producers.torch_abi import TOLD_WORDS, ask, told_at
from . import strings, structs
from .pack import end_of_array, pack_contiguous, pack_ndarray, pack_tensor
from .torch_guard import (
    OFFSETS_TYPE,
    device_in_memory,
    is_in_memory,
    is_odd_by,
    is_on_cpu,
    is_short_by,
    number_in_memory,
    rank_in_memory,
    view_in_memory,
)

OB_FVAL, SCALAR_VALUE = c.OB_FVAL, c.NUMPY_SCALAR_VALUE
STRING_WORDS = strings.WORDS

AGREES, DIFFERS, FAILED = 1, 0, -1
"""What a part returns: the argument agrees with its record; it does not; its producer has set an exception."""

PART_SIGNATURE = types.intp(types.intp, types.intp, types.intp, WORDS, types.intp)
"""``part(ob, expected, array, words, ndim)``: read `ob` and write its words; an array uses the memory block at `array`."""


@part(PART_SIGNATURE)
def read_ndarray(ob, expected_address, array_address, words, ndim):
    """An ndarray, read in its C struct."""
    expected = structs.expected_at(expected_address)
    if Py_TYPE(ob) != expected.type:
        return DIFFERS
    array = ndarray_at(ob)
    if (
        array.descr != expected.dtype
        or types.intp(array.nd) != ndim
        or types.intp(array.flags) & structs.KEY_FLAGS != expected.flags
    ):
        return DIFFERS
    put(words, 0, structs.array_at(array_address).meminfo)
    pack_ndarray(ob, ndim, expected.itemsize, words)
    return AGREES


@native
def borrow(ob, expected, words, ndim, is_known, device_type, is_contiguous, in_elements):
    """Borrow the view of a tensor that has passed its guard, if any, and write its words but for the first.

    `device_type`: the required one. `is_contiguous`: whether the cache entry requires a C-contiguous, aligned, writable tensor.
    `in_elements`: whether to write such a tensor's strides in elements. `is_known`: whether the general path raises a better
    error than the producer's.

    Returns: AGREES plus the device's number, DIFFERS or FAILED.
    """
    view = stack(DL_TENSOR_WORDS)
    dl_tensor_at(view).device.device_type = 0  # no device, in case the producer writes nothing
    failed = call_int(expected.borrow, (ob, view)) != 0
    if PyErr_Occurred() != 0:
        return DIFFERS if is_known else FAILED
    if failed:
        return DIFFERS
    tensor = dl_tensor_at(view)
    if tensor.device.device_type != device_type or tensor.dtype.lanes != 1 or tensor.shape == 0 or tensor.ndim != ndim:
        return DIFFERS  # is_plain() for a known rank
    # Load the bytes one by one, as they were stored: a load of both would wait until both stores have left the pipeline.
    if types.intp(tensor.dtype.code) != expected.dtype & 0xFF or types.intp(tensor.dtype.bits) != expected.dtype >> 8:
        return DIFFERS
    device_id = types.intp(tensor.device.device_id)
    return pack_view(tensor, False, device_id, expected, words, ndim, device_type, is_contiguous, in_elements)


@native
def pack_view(tensor, is_view, device_id, expected, words, ndim, device_type, is_contiguous, in_elements):
    """Write the words of a DLTensor or a ``View`` with the expected dtype, rank and device type, for :func:`borrow`.

    `is_view`: whether it is a ``View``, which has strides. The caller finds out whether it has memory.
    """
    if is_contiguous:
        has_strides = is_view or tensor.strides != 0
        if not pack_contiguous(tensor, has_strides, ndim, expected.itemsize, expected.misaligned, words, in_elements):
            return DIFFERS
        if not is_view and words[2] != 0 and is_nowhere(tensor):
            return DIFFERS
    else:
        flags, _ = pack_tensor(tensor, ndim, expected.dtype, words)
        if flags | structs.WRITEABLE != expected.flags:
            return DIFFERS
    if device_type == CPU:
        return AGREES
    return AGREES + device_id if device_id >= 0 and device_id < structs.MAX_DEVICES else DIFFERS


@native
def borrow_guarded(ob, expected, words, ndim, device_type, is_contiguous, in_elements, offsets):
    """:func:`borrow` for a type with a guard, whose :data:`torch_guard.Offsets` these are. Reads memory where that is known."""
    if is_odd_by(offsets, expected.guard, ob):
        return DIFFERS
    if offsets.ndim != 0:
        device = CPU if is_on_cpu(offsets, ob) else 0
        if device_type != CPU:
            device = device_in_memory(offsets, expected.guard, ob)
        if device & 0xFF != device_type or number_in_memory(offsets, ob) != expected.number:
            return DIFFERS
        if not is_in_memory(offsets, ob) or rank_in_memory(offsets, ob) != ndim:
            return DIFFERS
        view = view_in_memory(offsets, ob, ndim, expected.itemsize)
        outcome = pack_view(view, True, device >> 8, expected, words, ndim, device_type, is_contiguous, in_elements)
    elif offsets.asks_abi != 0 and device_type == CPU:
        at = stack(TOLD_WORDS)
        told = told_at(at)
        if number_in_memory(offsets, ob) != expected.number or ask(ob, at) != 0 or told.device_type != 0 or told.dim != ndim:
            return DIFFERS
        view = View(told.data, 0, ndim, told.sizes, told.strides)
        outcome = pack_view(view, True, 0, expected, words, ndim, device_type, is_contiguous, in_elements)
    else:
        outcome = borrow(ob, expected, words, ndim, True, device_type, is_contiguous, in_elements)
    if outcome >= AGREES and words[2] == 0:
        put(words, 4, 0)  # as PyTorch exports it
    elif outcome >= AGREES:
        end = words[4] + words[2] * words[3] if is_contiguous else end_of_array(words, ndim)
        if is_short_by(offsets, ob, end):
            return DIFFERS
    return outcome


@part(types.intp(*PART_SIGNATURE.args, types.intp))
def read_view(ob, expected_address, array_address, words, ndim, is_contiguous):
    """A tensor, by a view borrowed from its type's exchange table. `is_contiguous`: as for :func:`borrow`."""
    expected = structs.expected_at(expected_address)
    if Py_TYPE(ob) != expected.type:
        return DIFFERS
    put(words, 0, structs.array_at(array_address).meminfo)
    return borrow(ob, expected, words, ndim, False, CPU, is_contiguous, False)


@part(types.intp(*PART_SIGNATURE.args, types.intp, OFFSETS_TYPE))
def read_guarded_view(ob, expected_address, array_address, words, ndim, is_contiguous, offsets):
    """:data:`read_view` for a type with a guard, whose :data:`torch_guard.Offsets` these are."""
    expected = structs.expected_at(expected_address)
    if Py_TYPE(ob) != expected.type:
        return DIFFERS
    put(words, 0, structs.array_at(array_address).meminfo)
    return borrow_guarded(ob, expected, words, ndim, CPU, is_contiguous, False, offsets)


@part(PART_SIGNATURE)
def read_float(ob, expected_address, array_address, words, ndim):
    """A Python float."""
    put(words, 0, load(ob + OB_FVAL))
    return types.intp(Py_TYPE(ob) == structs.expected_at(expected_address).type)


@part(PART_SIGNATURE)
def read_int(ob, expected_address, array_address, words, ndim):
    """A Python int that fits into int64."""
    if Py_TYPE(ob) != structs.expected_at(expected_address).type:
        return DIFFERS
    overflow = stack(1)
    value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
    put(words, 0, value)
    return types.intp(value != -1 or load(overflow) & 0xFFFFFFFF == 0)


@part(PART_SIGNATURE)
def read_bool(ob, expected_address, array_address, words, ndim):
    """A Python bool."""
    put(words, 0, types.intp(ob == global_address("_Py_TrueStruct")))
    return types.intp(Py_TYPE(ob) == structs.expected_at(expected_address).type)


@part(PART_SIGNATURE)
def read_numpy_scalar(ob, expected_address, array_address, words, ndim):
    """A NumPy scalar of at most 8 bytes."""
    if Py_TYPE(ob) != structs.expected_at(expected_address).type:
        return DIFFERS
    put(words, 0, load(ob + SCALAR_VALUE))
    return AGREES


@part(PART_SIGNATURE)
def read_none(ob, expected_address, array_address, words, ndim):
    """None."""
    put(words, 0, ob)
    return types.intp(Py_TYPE(ob) == structs.expected_at(expected_address).type)


@part(PART_SIGNATURE)
def read_string(ob, expected_address, array_address, words, ndim):
    """A str."""
    if Py_TYPE(ob) != structs.expected_at(expected_address).type:
        return DIFFERS
    at = stack(STRING_WORDS)
    is_read = strings.read_characters(ob, at)
    store(at + strings.MEMINFO, structs.array_at(array_address).meminfo)
    for i in range(STRING_WORDS):
        put(words, i, load(at + 8 * i))
    return AGREES if is_read else FAILED


@part(PART_SIGNATURE)
def read_tuple(ob, expected_address, array_address, words, items):
    """A tuple or a named tuple with this number of items. Further parts read the items."""
    return types.intp(Py_TYPE(ob) == structs.expected_at(expected_address).type and load(ob + c.OB_SIZE) == items)


READERS = {
    structs.KIND_NDARRAY: read_ndarray,
    structs.KIND_EXCHANGE: read_view,
    structs.KIND_FLOAT: read_float,
    structs.KIND_INT: read_int,
    structs.KIND_BOOL: read_bool,
    structs.KIND_NUMPY_SCALAR: read_numpy_scalar,
    structs.KIND_NONE: read_none,
    structs.KIND_STRING: read_string,
    structs.KIND_TUPLE: read_tuple,
    structs.KIND_NAMED_TUPLE: read_tuple,
}
"""By the kind of the type's entry. An overload with a parameter of any other kind but KIND_MANAGED has no fast entry."""
