"""The dispatch shim: from CPython's vectorcall to a compiled kernel, without Python in between.

:data:`vectorcall` takes a frame of working memory, walks over the arguments once (:func:`walk`), finds the overload
whose keys are equal, calls it through its trampoline and releases what was taken. Whatever it does not know, it leaves
to one Python method of the kernel, the *slow path*; it never learns by itself.

The order inside a call keeps borrowed views safe: producers that may run Python code (owning exports) go first, in
:func:`export_managed`; then all borrowed views are taken, and no Python code runs until the kernel has returned.

Ownership: a frame holds every export of its call; :func:`release` gives each back exactly once, on every exit.
"""

from numba import types

from .. import cpython as c
from ..cpython import Py_IncRef, Py_None, Py_TYPE, PyErr_Occurred
from ..native import call_int, call_word, cfunction, external, global_address, load, native, offset_of, sizeof, stack, store, struct_at
from ..producers.ndarray import C_CONTIGUOUS, F_CONTIGUOUS, FLAG_ALIGNED, FLAG_WRITEABLE, SWAPPED, descr_at, dl_tensor_at, ndarray_at
from .layout import (
    ALIGNED, ARRAY_HEAD_WORDS, DTYPE_SHIFT, ENTRY_SIZE, KIND_ARRAY, KIND_BOOL, KIND_COMPLEX, KIND_CONSTANT, KIND_DTYPE,
    KIND_EXCHANGE, KIND_FLOAT, KIND_INT, KIND_MANAGED, KIND_NAMED_TUPLE, KIND_NDARRAY, KIND_NONE,
    KIND_NUMPY_COMPLEX64, KIND_NUMPY_COMPLEX128,
    KIND_NUMPY_SCALAR, KIND_OMITTED, KIND_SCALAR, KIND_TUPLE, LAYOUT_SHIFT, MAX_NDIM, MAX_TUPLE_DEPTH,
    NDIM_SHIFT, RESULT_BYTES, SERIAL_SHIFT, STATUS_ARITY, STATUS_BIG_INT, STATUS_CHANGED, STATUS_CHECK, STATUS_DEVICE,
    STATUS_DTYPE, STATUS_ERROR, STATUS_EXPORT, STATUS_GROW, STATUS_NDIM, STATUS_NO_ERROR_SET, STATUS_NULL_DATA,
    STATUS_NUMBA, STATUS_OK, STATUS_OVERFLOW, STATUS_SHAPE, STATUS_UNKNOWN_DTYPE, STATUS_UNKNOWN_SHAPE,
    STATUS_UNKNOWN_TYPE, STATUS_VERSION, WRITEABLE, array_at, context_at, entry_at, export_at, frame_at, overload_at,
    report_at, runtime_at,
)  # fmt: skip

NRT_MemInfo_alloc = external("NRT_MemInfo_alloc", types.intp, types.intp)  # bytes of data behind it: none here
NRT_MemInfo_release = external("NRT_MemInfo_release", types.void, types.intp)
MEMINFO_REFCOUNT, MEMINFO_DTOR, MEMINFO_DTOR_INFO = 0, 8, 16  # NRT_MemInfo; verified at set-up (dispatch.state)

managed_at = struct_at("DLManagedTensorVersioned")
DL_TENSOR = offset_of("DLManagedTensorVersioned", "dl_tensor")
DL_TENSOR_WORDS = sizeof("DLTensor") // 8
FRAME_BYTES = sizeof("fx_frame")
ARRAY_BYTES = sizeof("fx_array")
EXPORT_BYTES = sizeof("fx_export")
OB_FVAL, OB_SIZE, OB_ITEM, SCALAR_VALUE = c.OB_FVAL, c.OB_SIZE, c.OB_ITEM, c.NUMPY_SCALAR_VALUE
CALLABLE_CONTEXT = c.CALLABLE_CONTEXT

SCALAR_FLOAT64 = KIND_SCALAR | (2 | 64 << 8) << DTYPE_SHIFT
SCALAR_INT64 = KIND_SCALAR | (0 | 64 << 8) << DTYPE_SHIFT
SCALAR_UINT64 = KIND_SCALAR | (1 | 64 << 8) << DTYPE_SHIFT
SCALAR_BOOL = KIND_SCALAR | (6 | 8 << 8) << DTYPE_SHIFT
SCALAR_COMPLEX128 = KIND_SCALAR | (5 | 128 << 8) << DTYPE_SHIFT

FLAG_TRUSTED = 1  # the slow path has asked the frameworks about the tensors that a guard flagged
FLAG_LOOK = 2  # stop before the kernel: only the keys are wanted

PENDING_WORDS = 2 * MAX_TUPLE_DEPTH
DEFAULT_KEYS = 64
WORDS_PER_KEY = 12
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


# ---- finding things by address -------------------------------------------------------------------------------------


@native
def slot_of(address, mask):
    """Where the search for `address` starts in a table of `mask` + 1 entries."""
    return ((address >> 4) * GOLDEN >> 40) & mask


@native
def find(runtime, address):
    """The address of the fx_entry of the type or dtype object at `address`, 0 if there is none."""
    mask = runtime.entries_mask
    slot = slot_of(address, mask)
    while True:
        entry = runtime.entries + slot * ENTRY_SIZE
        found = entry_at(entry).address
        if found == address:
            return entry
        if found == 0:
            return 0
        slot = (slot + 1) & mask


@native
def find_overload(context, frame):
    """The address of the overload for the keys in `frame`, 0 if none is compiled."""
    hash_ = frame.hash
    count = frame.key_count
    at = load(context.overloads + 8 * ((hash_ * GOLDEN >> 40) & context.overloads_mask))
    while at != 0:
        overload = overload_at(at)
        if overload.hash == hash_ and overload.key_count == count:
            difference = 0
            for i in range(count):
                difference |= load(frame.keys + 8 * i) ^ load(overload.keys + 8 * i)
            if difference == 0:
                return at
        at = overload.next
    return 0


# ---- frames --------------------------------------------------------------------------------------------------------


@native
def new_frame(keys):
    """A frame for calls of up to `keys` leaves; 0 when memory is out."""
    words = keys * WORDS_PER_KEY
    size = FRAME_BYTES + RESULT_BYTES + 8 * words + keys * (8 + ARRAY_BYTES + 8 + EXPORT_BYTES + 8) + 64
    at = c.PyMem_RawMalloc(size)
    if at == 0:
        return 0
    frame = frame_at(at)
    rest = (at + FRAME_BYTES + 15) & -16
    frame.next = 0
    frame.result = rest
    frame.words = rest + RESULT_BYTES
    frame.word_capacity = words
    frame.keys = frame.words + 8 * words
    frame.key_capacity = keys
    frame.arrays = frame.keys + 8 * keys
    frame.array_capacity = keys
    frame.meminfos = frame.arrays + ARRAY_BYTES * keys
    frame.exports = frame.meminfos + 8 * keys
    frame.export_capacity = keys
    frame.bound = frame.exports + EXPORT_BYTES * keys
    frame.bound_capacity = keys
    frame.key_count = 0
    frame.array_count = 0
    frame.export_count = 0
    for i in range(keys):
        store(frame.meminfos + 8 * i, NRT_MemInfo_alloc(0))
    return at


@native
def take_frame(runtime):
    """A free frame, or a new one; 0 with MemoryError set."""
    at = runtime.frames
    if at != 0:
        runtime.frames = frame_at(at).next
        return at
    at = new_frame(DEFAULT_KEYS)
    if at == 0:
        c.PyErr_SetNone(load(global_address("PyExc_MemoryError")))
    return at


@native
def give_frame(runtime, at):
    frame_at(at).next = runtime.frames
    runtime.frames = at


@native
def grow_frame(runtime, at, keys):
    """A larger frame that takes over the exports of the frame at `at`, which is free again; 0 with MemoryError set."""
    old = frame_at(at)
    larger = new_frame(max(2 * old.key_capacity, keys))
    if larger == 0:
        c.PyErr_SetNone(load(global_address("PyExc_MemoryError")))
        return 0
    new = frame_at(larger)
    for i in range(2 * old.export_count):
        store(new.exports + 8 * i, load(old.exports + 8 * i))
    new.export_count = old.export_count
    old.export_count = 0
    give_frame(runtime, at)
    return larger


# ---- leaves --------------------------------------------------------------------------------------------------------


@native
def pack_ndarray(runtime, frame, ob, word):
    """Write the words of the ndarray `ob` at `word`. Returns (key, or 0 and the status), the words' end."""
    array = ndarray_at(ob)
    ndim = types.intp(array.nd)
    flags = types.intp(array.flags)
    descr = descr_at(array.descr)
    if word + 8 * (ARRAY_HEAD_WORDS + 2 * ndim) > frame.words + 8 * frame.word_capacity:
        return 0, STATUS_GROW
    type_num = types.intp(descr.type_num)
    field = runtime.dtype_fields[type_num & 63] if type_num < 64 else 0
    itemsize = field >> 11
    if field == 0 or descr.byteorder == SWAPPED:
        known = find(runtime, array.descr)
        if known == 0:
            return 0, STATUS_UNKNOWN_DTYPE
        if entry_at(known).kind != KIND_DTYPE:
            return 0, STATUS_NUMBA
        field = entry_at(known).key
        itemsize = entry_at(known).size
    shape = word + 8 * ARRAY_HEAD_WORDS
    strides = shape + 8 * ndim
    count = 1
    for i in range(ndim):
        extent = load(array.dimensions + 8 * i)
        count *= extent
        store(shape + 8 * i, extent)
        store(strides + 8 * i, load(array.strides + 8 * i))
    store(word + 8, ob)
    store(word + 16, count)
    store(word + 24, itemsize)
    store(word + 32, array.data)
    c_contiguous = flags & C_CONTIGUOUS
    layout = c_contiguous if c_contiguous != 0 else flags & F_CONTIGUOUS
    key = (
        KIND_ARRAY
        | field << DTYPE_SHIFT
        | ndim << NDIM_SHIFT
        | layout << LAYOUT_SHIFT
        | ((flags & FLAG_WRITEABLE) >> 10) << (LAYOUT_SHIFT + 2)
        | ((flags & FLAG_ALIGNED) >> 8) << (LAYOUT_SHIFT + 3)
    )
    return key, strides + 8 * ndim


@native
def pack_tensor(runtime, frame, at, word, writeable):
    """Validate the DLTensor at `at` and write its words at `word`. Returns (key, or 0 and the status), the words' end.

    Nothing that a producer says is trusted: device, rank, shape, sizes and data pointer are checked here, the dtype when
    its key is looked up (an unknown one has no overload).
    """
    tensor = dl_tensor_at(at)
    device = types.intp(tensor.device.device_type)
    if device < 0 or device > 62 or (runtime.cpu_readable >> device) & 1 == 0:
        return 0, STATUS_DEVICE
    if tensor.dtype.lanes != 1:
        return 0, STATUS_DTYPE
    ndim = types.intp(tensor.ndim)
    if ndim < 0 or ndim > MAX_NDIM:
        return 0, STATUS_NDIM
    if word + 8 * (ARRAY_HEAD_WORDS + 2 * ndim) > frame.words + 8 * frame.word_capacity:
        return 0, STATUS_GROW
    if ndim > 0 and tensor.shape == 0:
        return 0, STATUS_SHAPE
    code = types.intp(tensor.dtype.code)
    bits = types.intp(tensor.dtype.bits)
    itemsize = bits >> 3
    data = tensor.data + types.intp(tensor.byte_offset)
    shape = word + 8 * ARRAY_HEAD_WORDS
    strides = shape + 8 * ndim
    count = 1
    is_empty = False
    is_c = True
    is_f = True
    addresses = data
    limit = 1 << 62
    expected = itemsize
    for j in range(ndim):  # from the last dimension: C order
        i = ndim - 1 - j
        extent = load(tensor.shape + 8 * i)
        if extent < 0:
            return 0, STATUS_SHAPE
        if extent > 0x7FFFFFFF or count > 0x7FFFFFFF:
            if extent != 0 and count > limit // extent:
                return 0, STATUS_OVERFLOW
        stride = count * itemsize
        if tensor.strides != 0:
            elements = load(tensor.strides + 8 * i)
            if elements > limit or elements < -limit:
                return 0, STATUS_OVERFLOW
            stride = elements * itemsize
        if extent != 1:
            is_c &= stride == expected
            addresses |= stride
        expected *= extent
        is_empty |= extent == 0
        count *= extent
        store(shape + 8 * i, extent)
        store(strides + 8 * i, stride)
    if count > 1 << 55:
        return 0, STATUS_OVERFLOW
    if data == 0 and not is_empty:
        return 0, STATUS_NULL_DATA
    if ndim > 1 and not is_c:
        expected = itemsize
        for i in range(ndim):
            extent = load(shape + 8 * i)
            if extent != 1:
                is_f &= load(strides + 8 * i) == expected
            expected *= extent
    store(word + 8, 0)
    store(word + 16, count)
    store(word + 24, itemsize)
    store(word + 32, data)
    layout = 1 if is_c or is_empty else (2 if is_f and ndim > 1 else 0)
    alignment = itemsize >> 1 if code == 5 else itemsize
    is_aligned = is_empty or addresses & (alignment - 1) == 0
    key = (
        KIND_ARRAY
        | (code | bits << 8) << DTYPE_SHIFT
        | ndim << NDIM_SHIFT
        | layout << LAYOUT_SHIFT
        | (WRITEABLE if writeable else 0)
        | (ALIGNED if is_aligned else 0)
    )
    return key, strides + 8 * ndim


@native
def keep_tensor(frame, at):
    """Copy the refused DLTensor at `at` into the frame, for the message."""
    for i in range(DL_TENSOR_WORDS):
        frame.tensor[i] = load(at + 8 * i)


@native
def is_flagged(entry, ob):
    """Whether the guard of `ob`'s type says that the tensor is not plain."""
    implementation = load(ob + entry.guard_object)
    if load(implementation + entry.guard_word) & entry.guard_mask != 0:
        return True
    return entry.guard_pointer != 0 and load(implementation + entry.guard_pointer) != 0


@native
def walk(context, runtime, frame, args, nargs, flags):
    """Read all arguments into `frame`: words, keys, arrays. Returns a STATUS_*.

    One loop for everything: a tuple pushes what remains of its parent and goes on with its own items.
    """
    word = frame.words
    word_end = frame.words + 8 * frame.word_capacity - 16
    key_at = frame.keys
    key_end = frame.keys + 8 * frame.key_capacity
    arrays = 0
    exports = 0
    hash_ = 0
    has_views = False
    status = STATUS_OK
    pending = stack(PENDING_WORDS)
    view = stack(DL_TENSOR_WORDS)
    overflow = stack(1)
    depth = 0
    items = args
    left = context.parameter_count
    variadic = context.variadic
    last_type = 0
    entry_address = 0
    ob = 0
    key = 0
    while True:
        if left == 0:
            if depth > 0:
                depth -= 1
                items = load(pending + 16 * depth)
                left = load(pending + 16 * depth + 8)
                continue
            if variadic == 0:
                break
            if key_at >= key_end:
                status = STATUS_GROW
                break
            variadic = 0
            left = nargs - context.parameter_count
            key = KIND_TUPLE | left << SERIAL_SHIFT
            store(key_at, key)
            key_at += 8
            hash_ = (hash_ << 5) ^ (hash_ >> 59) ^ key
            continue
        if key_at >= key_end or word > word_end:
            status = STATUS_GROW
            break
        ob = load(items)
        items += 8
        left -= 1
        ob_type = Py_TYPE(ob)
        if ob_type != last_type:
            entry_address = find(runtime, ob_type)
            if entry_address == 0:
                status = STATUS_UNKNOWN_TYPE
                break
            last_type = ob_type
        entry = entry_at(entry_address)
        kind = entry.kind
        if kind == KIND_NDARRAY:
            key, end = pack_ndarray(runtime, frame, ob, word)
            if key == 0:
                status = end
                break
            store(word, load(frame.meminfos + 8 * arrays))
            array = array_at(frame.arrays + ARRAY_BYTES * arrays)
            array.object = ob
            array.managed = 0
            array.export = 0
            arrays += 1
            word = end
        elif kind == KIND_EXCHANGE or kind == KIND_MANAGED:
            if flags & FLAG_TRUSTED == 0 and entry.guard_mask != 0 and is_flagged(entry, ob):
                status = STATUS_CHECK
                break
            managed = 0
            writeable = True
            if kind == KIND_MANAGED or context.release_gil != 0:
                if exports == frame.export_count:
                    status = STATUS_EXPORT
                    break
                export = export_at(frame.exports + EXPORT_BYTES * exports)
                exports += 1
                if export.object != ob:
                    status = STATUS_CHANGED
                    break
                managed = export.managed
                if managed_at(managed).version.major != 1:
                    status = STATUS_VERSION
                    break
                writeable = managed_at(managed).flags & 1 == 0
                tensor = managed + DL_TENSOR
            else:
                tensor = view
                has_views = True
                if call_int(entry.borrow, (ob, tensor)) != 0:
                    status = STATUS_ERROR if PyErr_Occurred() != 0 else STATUS_NO_ERROR_SET
                    break
            key, end = pack_tensor(runtime, frame, tensor, word, writeable)
            if key == 0:
                status = end
                keep_tensor(frame, tensor)
                break
            store(word, load(frame.meminfos + 8 * arrays))
            array = array_at(frame.arrays + ARRAY_BYTES * arrays)
            array.object = ob
            array.managed = managed
            array.export = entry.managed
            arrays += 1
            word = end
            last_type = 0  # foreign code ran: should it have changed the table of types, look again
        elif kind == KIND_FLOAT:
            store(word, load(ob + OB_FVAL))
            word += 8
            key = SCALAR_FLOAT64
        elif kind == KIND_INT:
            value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
            key = SCALAR_INT64
            if value == -1 and load(overflow) & 0xFFFFFFFF != 0:
                value = types.int64(c.PyLong_AsUnsignedLongLong(ob))
                key = SCALAR_UINT64
                if value == -1 and PyErr_Occurred() != 0:
                    c.PyErr_Clear()
                    status = STATUS_BIG_INT
                    break
            store(word, value)
            word += 8
        elif kind == KIND_BOOL:
            store(word, types.intp(ob == global_address("_Py_TrueStruct")))
            word += 8
            key = SCALAR_BOOL
        elif kind == KIND_NUMPY_SCALAR:
            store(word, load(ob + SCALAR_VALUE))
            word += 8
            key = entry.key
        elif kind == KIND_NUMPY_COMPLEX128:
            store(word, load(ob + SCALAR_VALUE))
            store(word + 8, load(ob + SCALAR_VALUE + 8))
            word += 16
            key = entry.key
        elif kind == KIND_NONE:
            store(word, ob)
            word += 8
            key = KIND_NONE
        elif kind == KIND_OMITTED:
            key = KIND_OMITTED
        elif kind == KIND_COMPLEX:
            store(word, load(ob + OB_FVAL))
            store(word + 8, load(ob + OB_FVAL + 8))
            word += 16
            key = SCALAR_COMPLEX128
        elif kind == KIND_NUMPY_COMPLEX64:
            value = load(ob + SCALAR_VALUE)
            store(word, value & 0xFFFFFFFF)
            store(word + 8, (value >> 32) & 0xFFFFFFFF)
            word += 16
            key = entry.key
        elif kind == KIND_TUPLE or kind == KIND_NAMED_TUPLE:
            if depth == MAX_TUPLE_DEPTH:
                status = STATUS_NUMBA
                break
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = ob + OB_ITEM
            left = load(ob + OB_SIZE)
            key = entry.key if kind == KIND_NAMED_TUPLE else KIND_TUPLE | left << SERIAL_SHIFT
        elif kind == KIND_CONSTANT:
            known = find(runtime, ob)
            if known == 0:
                status = STATUS_UNKNOWN_TYPE
                break
            store(word, ob)
            word += 8
            key = entry_at(known).key
        else:
            status = STATUS_NUMBA
            break
        store(key_at, key)
        key_at += 8
        hash_ = (hash_ << 5) ^ (hash_ >> 59) ^ key
    if status == STATUS_OK and has_views and PyErr_Occurred() != 0:
        status = STATUS_ERROR
    if status == STATUS_OK and exports != frame.export_count:
        status = STATUS_CHANGED
    frame.array_count = arrays
    frame.key_count = (key_at - frame.keys) >> 3
    frame.hash = hash_
    if status != STATUS_OK:
        outer = load(pending) if depth > 0 else items
        frame.position = ((outer - args) >> 3) - 1
        frame.object = ob
    return status


@native
def export_managed(context, runtime, frame, args, nargs, flags):
    """Make every owning export of the call, in the order in which :func:`walk` will ask for them. Returns a STATUS_*.

    Python code may run here: in a producer's ``__dlpack__``, and in what that sets free.
    """
    pending = stack(PENDING_WORDS)
    out = stack(1)
    depth = 0
    items = args
    left = nargs
    status = STATUS_OK
    ob = 0
    made = 0
    while True:
        if left == 0:
            if depth == 0:
                break
            depth -= 1
            items = load(pending + 16 * depth)
            left = load(pending + 16 * depth + 8)
            continue
        ob = load(items)
        items += 8
        left -= 1
        at = find(runtime, Py_TYPE(ob))
        if at == 0:
            status = STATUS_UNKNOWN_TYPE
            break
        entry = entry_at(at)
        kind = entry.kind
        if kind == KIND_MANAGED or (kind == KIND_EXCHANGE and context.release_gil != 0):
            if made < frame.export_count:  # by an earlier round, in a frame that was too small
                made += 1
                continue
            if frame.export_count == frame.export_capacity:
                status = STATUS_GROW
                break
            if flags & FLAG_TRUSTED == 0 and entry.guard_mask != 0 and is_flagged(entry, ob):
                status = STATUS_CHECK
                break
            store(out, 0)
            failed = call_int(entry.managed, (ob, out)) != 0
            if failed or PyErr_Occurred() != 0 or load(out) == 0:
                if not failed and load(out) != 0:
                    delete_managed(load(out))
                status = STATUS_ERROR if PyErr_Occurred() != 0 else STATUS_NO_ERROR_SET
                break
            export = export_at(frame.exports + EXPORT_BYTES * frame.export_count)
            export.object = ob
            export.managed = load(out)
            frame.export_count += 1
            made += 1
        elif kind == KIND_TUPLE or kind == KIND_NAMED_TUPLE:
            if depth == MAX_TUPLE_DEPTH:
                status = STATUS_NUMBA
                break
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = ob + OB_ITEM
            left = load(ob + OB_SIZE)
    if status != STATUS_OK:
        outer = load(pending) if depth > 0 else items
        frame.position = ((outer - args) >> 3) - 1
        frame.object = ob
    return status


# ---- release -------------------------------------------------------------------------------------------------------


@native
def delete_managed(managed):
    """Call the deleter of a managed tensor, keeping the pending exception, if any, out of its way. Needs the GIL."""
    deleter = managed_at(managed).deleter
    if deleter == 0:
        return
    error = stack(3)
    c.PyErr_Fetch(error, error + 8, error + 16)
    call_word(deleter, (managed,))
    c.PyErr_Restore(load(error), load(error + 8), load(error + 16))


@native
def let_escape(runtime, frame, i):
    """The kernel, or what it called, kept the i-th array: hand its memory block an owner, and the frame a new block."""
    array = array_at(frame.arrays + ARRAY_BYTES * i)
    meminfo = load(frame.meminfos + 8 * i)
    managed = array.managed
    if managed != 0:
        for j in range(frame.export_count):
            export = export_at(frame.exports + EXPORT_BYTES * j)
            if export.managed == managed:
                export.managed = 0
    elif array.export != 0:
        # A borrowed view: only an export of its own keeps the memory if the tensor is resized or freed.
        out = stack(1)
        error = stack(3)
        store(out, 0)
        c.PyErr_Fetch(error, error + 8, error + 16)
        if call_int(array.export, (array.object, out)) == 0:
            managed = load(out)
        c.PyErr_Restore(load(error), load(error + 8), load(error + 16))
    if managed != 0:
        store(meminfo + MEMINFO_DTOR, runtime.release_managed)
        store(meminfo + MEMINFO_DTOR_INFO, managed)
    else:
        Py_IncRef(array.object)
        store(meminfo + MEMINFO_DTOR, runtime.release_owner)
        store(meminfo + MEMINFO_DTOR_INFO, array.object)
    NRT_MemInfo_release(meminfo)
    store(frame.meminfos + 8 * i, NRT_MemInfo_alloc(0))


@native
def release(runtime, frame):
    """Give back everything that the call took: escaped arrays get their owners, managed tensors their deleters' call."""
    for i in range(frame.array_count):
        meminfo = load(frame.meminfos + 8 * i)
        if meminfo != 0 and load(meminfo + MEMINFO_REFCOUNT) != 1:
            let_escape(runtime, frame, i)
    frame.array_count = 0
    count = frame.export_count
    frame.export_count = 0
    for i in range(count):
        managed = export_at(frame.exports + EXPORT_BYTES * i).managed
        if managed != 0:
            delete_managed(managed)


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_owner(data, size, owner):
    """NRT destructor: drop the Python reference that kept an escaped array's memory. Any thread, GIL or not."""
    if c.Py_IsInitialized() != 0:
        state = c.PyGILState_Ensure()
        c.Py_DecRef(owner)
        c.PyGILState_Release(state)


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_managed(data, size, managed):
    """NRT destructor: call the deleter of an escaped array's managed tensor. Any thread, GIL or not."""
    if c.Py_IsInitialized() != 0:
        state = c.PyGILState_Ensure()
        delete_managed(managed)
        c.PyGILState_Release(state)


# ---- calls ---------------------------------------------------------------------------------------------------------


@native
def launch(context, frame, overload):
    """Call the kernel with the words in `frame`. Returns a new reference to its result, or 0 with an exception set."""
    excinfo = stack(1)
    store(excinfo, 0)
    if context.release_gil != 0:
        thread = c.PyEval_SaveThread()
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
        c.PyEval_RestoreThread(thread)
    else:
        code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
    if code == 0 and overload.box != 0:
        return call_word(overload.box, (frame.result, overload.box_constants))
    if code == 0 or code == -2:  # RETCODE_OK, RETCODE_NONE
        none = Py_None()
        Py_IncRef(none)
        return none
    call_word(context.raise_error, (code, load(excinfo)))
    return 0


@native
def run(context, runtime, frame_address, args, nargs, flags):
    """Walk, find the overload, launch. Returns (status, result, frame): a grown frame replaces the one given.

    The frame's exports and arrays are released, whatever happened. The result is a new reference, or 0 with an
    exception set, if the status is STATUS_OK; 0 otherwise.
    """
    while True:
        frame = frame_at(frame_address)
        status = walk(context, runtime, frame, args, nargs, flags)
        if status == STATUS_EXPORT:
            frame.array_count = 0
            status = export_managed(context, runtime, frame, args, nargs, flags)
            if status == STATUS_OK:
                status = walk(context, runtime, frame, args, nargs, flags)
                if status == STATUS_EXPORT:
                    status = STATUS_CHANGED
        if status != STATUS_GROW:
            break
        frame.array_count = 0
        position = frame.position
        grown = grow_frame(runtime, frame_address, nargs + 1)
        if grown == 0:
            frame.position = position
            status = STATUS_ERROR
            break
        frame_address = grown
    frame = frame_at(frame_address)
    result = 0
    if status == STATUS_OK:
        at = find_overload(context, frame)
        if at == 0 or flags & FLAG_LOOK != 0:
            status = STATUS_UNKNOWN_SHAPE
        elif overload_at(at).trampoline == 0:
            status = STATUS_NUMBA
        else:
            result = launch(context, frame, overload_at(at))
    release(runtime, frame)
    return status, result, frame_address


@native
def bind(context, frame, args, nargs, kwnames):
    """Put positional and keyword arguments in parameter order into ``frame.bound``. Returns a STATUS_*.

    Names are compared by identity: CPython interns the names of keyword arguments. Any other is left to the slow path.
    """
    count = context.parameter_count
    if count > frame.bound_capacity:
        return STATUS_GROW
    if nargs > count:
        return STATUS_ARITY
    bound = frame.bound
    for i in range(nargs):
        store(bound + 8 * i, load(args + 8 * i))
    for i in range(nargs, count):
        store(bound + 8 * i, 0)
    keywords = load(kwnames + OB_SIZE) if kwnames != 0 else 0
    for k in range(keywords):
        name = load(kwnames + OB_ITEM + 8 * k)
        i = max(nargs, context.positional_only)
        while i < count and load(context.names + 8 * i) != name:
            i += 1
        if i == count or load(bound + 8 * i) != 0:
            return STATUS_ARITY
        store(bound + 8 * i, load(args + 8 * (nargs + k)))
    for i in range(nargs, count):
        if load(bound + 8 * i) == 0:
            if i < context.required_count:
                return STATUS_ARITY
            store(bound + 8 * i, context.omitted)
    return STATUS_OK


@native
def call_slowly(context, callable_, args, nargsf, kwnames):
    """``kernel._call_slowly(*args, **kwargs)``: a new reference, or 0 with an exception set."""
    nargs = nargsf & 0x7FFFFFFFFFFFFFFF
    if nargsf < 0:  # PY_VECTORCALL_ARGUMENTS_OFFSET: the word before the arguments is ours for the time of the call
        saved = load(args - 8)
        store(args - 8, callable_)
        result = c.PyObject_VectorcallMethod(context.slow_name, args - 8, nargs + 1, kwnames)
        store(args - 8, saved)
        return result
    total = nargs + (load(kwnames + OB_SIZE) if kwnames != 0 else 0)
    copy = c.PyMem_RawMalloc(8 * (total + 1))
    if copy == 0:
        c.PyErr_SetNone(load(global_address("PyExc_MemoryError")))
        return 0
    store(copy, callable_)
    for i in range(total):
        store(copy + 8 + 8 * i, load(args + 8 * i))
    result = c.PyObject_VectorcallMethod(context.slow_name, copy, nargs + 1, kwnames)
    c.PyMem_RawFree(copy)
    return result


@native
def refuse(context, callable_, position):
    """A producer set an exception: let Python name the argument (``kernel._refused(position, exception)``). Returns 0."""
    error = stack(3)
    arguments = stack(3)
    c.PyErr_Fetch(error, error + 8, error + 16)
    c.PyErr_NormalizeException(error, error + 8, error + 16)
    if load(error + 16) != 0:
        c.PyException_SetTraceback(load(error + 8), load(error + 16))
    index = c.PyLong_FromSsize_t(position)
    if index != 0:
        store(arguments, callable_)
        store(arguments + 8, index)
        store(arguments + 16, load(error + 8))
        result = c.PyObject_VectorcallMethod(context.refused_name, arguments, 3, 0)
        if result != 0:
            c.Py_DecRef(result)
        c.Py_DecRef(index)
    for i in range(3):
        if load(error + 8 * i) != 0:
            c.Py_DecRef(load(error + 8 * i))
    return 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall(callable_, args, nargsf, kwnames):
    """``PyObject *(*vectorcallfunc)(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames)``."""
    context = context_at(load(callable_ + CALLABLE_CONTEXT))
    runtime = runtime_at(context.runtime)
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    nargs = nargsf & 0x7FFFFFFFFFFFFFFF
    status = STATUS_OK
    items = args
    if kwnames != 0 or nargs != context.parameter_count:
        if kwnames != 0 or nargs < context.parameter_count or context.variadic == 0:
            status = bind(context, frame_at(frame_address), args, nargs, kwnames)
            if status == STATUS_GROW:
                grown = grow_frame(runtime, frame_address, context.parameter_count)
                if grown == 0:
                    give_frame(runtime, frame_address)
                    return 0
                frame_address = grown
                status = bind(context, frame_at(frame_address), args, nargs, kwnames)
            items = frame_at(frame_address).bound
            nargs = context.parameter_count
    result = 0
    if status == STATUS_OK:
        status, result, frame_address = run(context, runtime, frame_address, items, nargs, 0)
    position = frame_at(frame_address).position
    give_frame(runtime, frame_address)
    if status == STATUS_OK:
        context.calls += 1
        return result
    if status == STATUS_ERROR:
        return refuse(context, callable_, position)
    return call_slowly(context, callable_, args, nargsf, kwnames)


@cfunction(types.int32, types.intp, types.intp, types.intp, types.intp, types.intp)
def attempt(context_address, args, nargs, flags, report_address):
    """The same call for the slow path: what stopped it goes into the fx_report. Returns a STATUS_*.

    STATUS_OK: ``report.result`` is a new reference, or 0 and an exception is set. STATUS_ERROR: an exception is set.
    """
    context = context_at(context_address)
    runtime = runtime_at(context.runtime)
    report = report_at(report_address)
    report.result = 0
    report.status = STATUS_ERROR
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return types.int32(STATUS_ERROR)
    status, result, frame_address = run(context, runtime, frame_address, args, nargs, flags)
    frame = frame_at(frame_address)
    report.result = result
    report.position = frame.position
    report.object = frame.object
    report.key_count = frame.key_count
    for i in range(DL_TENSOR_WORDS):
        report.tensor[i] = frame.tensor[i]
    if status == STATUS_UNKNOWN_SHAPE:
        if frame.key_count > report.key_capacity:
            status = STATUS_NUMBA
        else:
            for i in range(frame.key_count):
                store(report.keys + 8 * i, load(frame.keys + 8 * i))
    give_frame(runtime, frame_address)
    report.status = status
    return types.int32(status)
