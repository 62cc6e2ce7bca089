"""The parts of a fast entry: enter a cached call, read one argument, leave the call.

An overload that is called often has an inline cache: an entry for each combination of argument types. An entry has a record for
each argument and each item of a tuple: its type, dtype and flags. An argument that agrees with its record has the record's key,
so nothing is looked up.

``fast_entry.fast_entry`` compiles the parts into one function: :func:`enter`, a part for each argument, the kernel's call, and
:func:`leave`. The words between them become registers.

The addresses in a cache entry stay valid: the overload holds the dtypes, and a type that dies clears its records
(``type_table.TypeTable``). A part reads its data in the record; only the rank is compiled in.
"""


from numba import types

from ..ground import cpython as c
from ..ground.cfunction import part
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import DLDeviceType
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    READONLY,
    View,
    dl_tensor_at,
    element_field,
    is_nowhere,
    is_plain,
    managed_at,
)  # fmt: skip
from ..ground.native import WORDS, call_int, call_word, global_address, load, native, put, stack, store
from ..producers.ndarray import ndarray_at
from ..producers.torch_abi import TOLD_WORDS, ask, told_at
from . import strings, structs
from .frame import EXPORT_BYTES, is_anything_kept, put_back, release_exports
from .pack import end_of_array, pack_contiguous, pack_ndarray, pack_tensor
from .torch_guard import (
    OFFSETS,
    Offsets,
    device_in_memory,
    is_in_memory,
    is_odd_by,
    is_of,
    is_on_cpu,
    is_short_by,
    number_in_memory,
    rank_in_memory,
    view_in_memory,
)
from .torch_queries import is_movable, storage_of

OB_FVAL, SCALAR_VALUE = c.OB_FVAL, c.NUMPY_SCALAR_VALUE
STRING_WORDS = strings.WORDS
CPU = int(DLDeviceType.kDLCPU)

AGREES, DIFFERS, FAILED = 1, 0, -1
NONE_IS_IMMORTAL = c.NONE_IS_IMMORTAL
BOXES_NONE, BOXES_SCALARS, BOXES_ARRAYS = 0, 1, 2  # what boxing a kernel's result needs
_WORD = types.intp

PART_SIGNATURE = types.intp(types.intp, types.intp, types.intp, WORDS, types.intp)
"""``part(ob, expected, array, words, ndim)``: read `ob` and write its words; an array uses the memory block at `array`."""


@native
def finish(context, overload, code, result, excinfo, is_boxed):
    """Box the result of a kernel by its return code. Returns a new reference, or 0 with the kernel's exception set."""
    if code == 0 and is_boxed:
        return call_word(overload.box, (result, overload.box_constants, 0))
    if code == 0 or code == -2:  # RETCODE_OK, RETCODE_NONE
        none = global_address("_Py_NoneStruct")
        if not NONE_IS_IMMORTAL:
            store(none, load(none) + 1)
        return none
    call_word(context.raise_error, (code, load(excinfo)))
    return 0


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def enter(context_address, nargsf, kwnames, count):
    """Take a free frame for a call with `count` positional arguments. Returns 0 for any other call, or if no frame is free."""
    if kwnames != 0 or nargsf & c.NARGS_MASK != count:
        return 0
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    at = runtime.frames
    if at != 0:
        runtime.frames = structs.frame_at(at).next
    return at


@part(_WORD(_WORD))
def arrays_of(frame_address):
    """The ``fx_array[]`` of a frame."""
    return structs.frame_at(frame_address).arrays


@part(_WORD(_WORD))
def result_of(frame_address):
    """The address to which the kernel writes its result."""
    return structs.frame_at(frame_address).result


@part(_WORD(_WORD))
def expected_of(overload_address):
    """The ``fx_expected[]`` of an overload."""
    return structs.overload_at(overload_address).expected


@part(_WORD(_WORD))
def kernel_of(overload_address):
    """The address of an overload's compiled kernel."""
    return structs.overload_at(overload_address).kernel


@native
def note_export(frame, index, ob, managed, storage, state):
    """Make what the call owns the frame's last export, of number `index`."""
    export = structs.export_at(frame.exports + EXPORT_BYTES * index)
    export.object, export.managed, export.storage, export.state = ob, managed, storage, state
    export.is_given, export.is_interface = 0, 0
    frame.export_count = index + 1


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def hold_storage(ob, expected_address, frame_address, index):
    """Hold the storage of a PyTorch tensor, as the frame's export `index`. A garbage collection may run Python code."""
    expected = structs.expected_at(expected_address)
    frame = structs.frame_at(frame_address)
    if Py_TYPE(ob) != expected.type or index == frame.export_capacity:
        return DIFFERS
    storage = storage_of(structs.guard_at(expected.guard), ob)
    if storage == 0:
        return DIFFERS
    note_export(frame, index, ob, 0, storage, structs.HOLDS_STORAGE)
    return AGREES


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def take_export(ob, expected_address, frame_address, index):
    """Make an owning export of a tensor that is no PyTorch tensor, as the frame's export `index`. Python code may run.

    Returns: AGREES, DIFFERS, or FAILED with the producer's exception set.
    """
    expected = structs.expected_at(expected_address)
    frame = structs.frame_at(frame_address)
    if Py_TYPE(ob) != expected.type or index == frame.export_capacity:
        return DIFFERS
    is_buffer = expected.flags >> structs.CLASS_SHIFT - structs.FLAGS_SHIFT != 0
    out = stack(1)
    store(out, 0)
    failed = call_int(expected.borrow, (ob, out)) != 0
    if not failed and load(out) != 0:
        note_export(frame, index, ob, load(out), 0, structs.NEEDS_MANAGED)
    if PyErr_Occurred() != 0:
        # Numba may be able to read a buffer that DLPack cannot describe.
        is_for_numba = is_buffer and c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) != 0
        return DIFFERS if is_for_numba else FAILED
    return types.intp(not failed and load(out) != 0)


@part(_WORD(*PART_SIGNATURE.args, _WORD, _WORD))
def read_export(ob, expected_address, array_address, words, ndim, frame_address, index):
    """A tensor, in the owning export that :data:`take_export` has made of it."""
    expected = structs.expected_at(expected_address)
    managed_address = structs.export_at(structs.frame_at(frame_address).exports + EXPORT_BYTES * index).managed
    managed = managed_at(managed_address)
    put(words, 0, structs.array_at(array_address).meminfo)
    if managed.version.major != 1:
        return DIFFERS
    tensor = dl_tensor_at(managed_address + DL_TENSOR)
    if not is_plain(tensor) or tensor.ndim != ndim or element_field(tensor) != expected.dtype:
        return DIFFERS
    flags, status = pack_tensor(tensor, ndim, expected.dtype, words)
    if managed.flags & READONLY == 0:
        flags |= structs.WRITEABLE
    return types.intp(status == structs.STATUS_OK and flags == expected.flags & structs.KEY_FLAGS)


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def is_storage_kept(ob, expected_address, frame_address, index):
    """Whether the frame's export `index` holds the storage of the tensor `ob`, whose memory stays. Runs no Python code."""
    guard = structs.guard_at(structs.expected_at(expected_address).guard)
    storage = structs.export_at(structs.frame_at(frame_address).exports + EXPORT_BYTES * index).storage
    return types.intp(is_of(guard, storage, ob) and not is_movable(guard, storage))


@part(_WORD(_WORD))
def leave_gil(context_address):
    """Give up the GIL if the kernel runs without. Returns the thread's state for :data:`take_gil`, or 0."""
    return c.PyEval_SaveThread() if structs.context_at(context_address).release_gil != 0 else 0


@part(_WORD(_WORD))
def take_gil(thread):
    """Take the GIL again, if :data:`leave_gil` has given it up."""
    if thread != 0:
        c.PyEval_RestoreThread(thread)
    return 0


@part(_WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
def leave(context_address, overload_address, frame_address, args, code, result, excinfo, boxing, array_count, holds):
    """End a call whose kernel has returned `code`. `holds`: whether the frame has exports. Returns the result of vectorcall."""
    context = structs.context_at(context_address)
    overload = structs.overload_at(overload_address)
    runtime = structs.runtime_at(context.runtime)
    if boxing == BOXES_ARRAYS and code == 0:
        value = call_word(runtime.box_cached_result, (context_address, overload_address, frame_address, args))
    else:
        value = finish(context, overload, code, result, excinfo, boxing != BOXES_NONE)
    context.calls += 1
    if is_anything_kept(structs.frame_at(frame_address), array_count):
        call_word(runtime.release_cached, (context.runtime, frame_address, args, overload_address))
    else:
        if holds:
            release_exports(structs.frame_at(frame_address))
        put_back(runtime, frame_address)
    return value


@part(_WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
def differ(context_address, frame_address, callable_, args, nargsf, kwnames):
    """Make a call that differs from the cache entry by the general path. `frame_address`: 0 if no frame has been taken."""
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    if frame_address != 0:
        release_exports(structs.frame_at(frame_address))
        put_back(runtime, frame_address)
        if PyErr_Occurred() != 0:
            c.PyErr_Clear()
    return call_word(structs.context_at(context_address).vectorcall_any, (callable_, args, nargsf, kwnames))


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def fail(context_address, frame_address, callable_, position):
    """End the call: the producer of the argument at `position` has set an exception."""
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    release_exports(structs.frame_at(frame_address))
    put_back(runtime, frame_address)
    return call_word(runtime.refuse_argument, (context_address, callable_, position))


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
    return pack(tensor, False, device_id, expected, words, ndim, device_type, is_contiguous, in_elements)


@native
def pack(tensor, is_view, device_id, expected, words, ndim, device_type, is_contiguous, in_elements):
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
        outcome = pack(view, True, device >> 8, expected, words, ndim, device_type, is_contiguous, in_elements)
    elif offsets.asks_abi != 0 and device_type == CPU:
        at = stack(TOLD_WORDS)
        told = told_at(at)
        if number_in_memory(offsets, ob) != expected.number or ask(ob, at) != 0 or told.device_type != 0 or told.dim != ndim:
            return DIFFERS
        view = View(told.data, 0, ndim, told.sizes, told.strides)
        outcome = pack(view, True, 0, expected, words, ndim, device_type, is_contiguous, in_elements)
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


@part(types.intp(*PART_SIGNATURE.args, types.intp, *[types.intp] * len(OFFSETS)))
def read_guarded_view(
    ob, expected_address, array_address, words, ndim, is_contiguous, object_, keys, odd_keys, element_type, odd_types, autograd,
    storage, storage_data, storage_size, ndim_at, sizes, strides, inline_ndim, storage_offset, device, storage_checked,
    asks_abi,
):  # fmt: skip
    """:data:`read_view` for a type with a guard, whose :data:`torch_guard.OFFSETS` are the last arguments."""
    expected = structs.expected_at(expected_address)
    if Py_TYPE(ob) != expected.type:
        return DIFFERS
    put(words, 0, structs.array_at(array_address).meminfo)
    offsets = Offsets(
        object_, keys, odd_keys, element_type, odd_types, autograd, storage, storage_data, storage_size, ndim_at, sizes, strides,
        inline_ndim, storage_offset, device, storage_checked, asks_abi,
    )  # fmt: skip
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


PARTS = {
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
"""By the entry's kind. An overload with a parameter of any other kind has no fast entry."""
