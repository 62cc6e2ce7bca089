"""JAX's arrays as arguments: JAX gives a known array's address, and its shape and dtype are read in memory.

That is right as long as no other thread runs Python code. Another may donate an array to a compiled function of JAX, and that
writes to it, without the GIL, while a kernel reads it. And JAX gives no address of an array that is being donated: it waits, with
the GIL, which the function may need. So once there is another thread, each call holds an export of each array. JAX waits for that
without the GIL, and no function writes to what is exported.
"""

import ctypes
import functools
import sys

import llvmlite.binding
import numpy as np
from numba import types

from .._abi import ffi
from ..arguments import buffer, dunder
from ..arguments.kind import MEANINGS, Discovery, Kind, reader
from ..arguments.ndarrays import learn_dtype, lives_for_ever
from ..arguments.tensors import export_row, find_tensor, if_odd, pack_found, read_tensor
from ..dispatch import structs
from ..dispatch.frame import ARRAY_BYTES
from ..dispatch.pack import dtype_entry, flags_in_order, misaligned_bits
from ..dispatch.reading import FLAG_PREPARED, has_no_room, note_array, runtime_of
from ..dispatch.rows import go_on, is_of_type, leave, row_reader
from ..dispatch.runtime import runtime
from ..dispatch.type_table import GOLDEN
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU
from ..ground.dlpack_types import why_not_exported
from ..ground.dltensor import (
    DL_TENSOR,
    DL_TENSOR_WORDS,
    MAX_NDIM,
    READONLY,
    delete_managed,
    dl_tensor_at,
    element_field,
    is_plain,
    managed_at,
    refusal,
)
from ..ground.dtype_registry import padded_key_of
from ..ground.native import (
    address_of,
    as_words,
    call_int,
    global_address,
    load,
    native,
    put,
    sizeof,
    stack,
    store,
    struct_at,
)
from ..ground.once import for_ever, once
from ..producers.python_side import python_side
from .layout import WR_OBJECT, array_type, layout

CDEF = """
/* Where JAX's arrays have what is read in memory, and which are known: see `jax.layout`. */
typedef struct {
    int64_t aval;               /* in an array: a pointer to its ShapedArray */
    int64_t aval_type;          /* PyTypeObject * */
    int64_t shape, dtype;       /* in that: pointers to a tuple of ints, and to NumPy's dtype object */
    int64_t pointer_name;       /* PyObject *, name of the method that gives an array's address */
    int64_t known;              /* fx_known_array[], in groups, one for each hash of an object's address */
    int64_t turn;               /* counts the known arrays: the next one's place in its group */
} fx_jax;

/* An array that is computed, on the CPU and in C order. */
typedef struct {
    int64_t reference;          /* a weak reference, owned; 0: there is none */
    int64_t object;             /* PyObject *; it lives while the weak reference has it */
    int64_t data;               /* its address then */
} fx_known_array;
"""

GROUP, GROUPS = 4, 512
python_items = python_side("fastexchange.jax.array_kind")
POINTER_NAME = for_ever("unsafe_buffer_pointer")
KNOWN_BYTES = sizeof("fx_known_array")
jax_at = struct_at("fx_jax")
known_at = struct_at("fx_known_array")


# ---- known arrays ----------------------------------------------------------------------------------------------------


@native
def group_of(jax, ob):
    """The address of the first place for a known array."""
    return jax.known + KNOWN_BYTES * GROUP * (ob * GOLDEN >> 40 & (GROUPS - 1))


@native
def is_alive(known):
    """Whether the array of a place lives, if there is one. Another may have its address; the weak reference tells."""
    return known.reference != 0 and load(known.reference + WR_OBJECT) == known.object


@native
def find_known(jax, ob):
    """The address of the ``fx_known_array`` of an array; 0 if it is not known."""
    at = group_of(jax, ob)
    for _ in range(GROUP):
        known = known_at(at)
        if known.object == ob and is_alive(known):
            return at
        at += KNOWN_BYTES
    return 0


@native
def cleared_error():
    """Whether a pending exception, if there is one, is gone: not Ctrl-C, which has to reach the caller."""
    if PyErr_Occurred() != 0 and c.PyErr_ExceptionMatches(global_address("PyExc_Exception")) == 0:
        return False
    c.PyErr_Clear()
    return True


@native
def data_of(pointer_name, ob):
    """The address of an array's memory, as JAX gives it at once. -1: there is none: it is deleted, or on several devices."""
    arguments = stack(1)
    store(arguments, ob)
    result = c.PyObject_VectorcallMethod(pointer_name, arguments, 1, 0)
    if result == 0:
        c.PyErr_Clear()
        return -1
    data = c.PyLong_AsSsize_t(result)
    c.decref(result)
    return data


@native
def is_known(jax, ob):
    """Whether an array is known, and has the memory that it had then. Returns that, and its address."""
    at = find_known(jax, ob)
    data = data_of(jax.pointer_name, ob) if at != 0 else -1
    return at != 0 and data != -1 and data == known_at(at).data, data


@native
def note_known(jax, ob, data):
    """Make an array known. Without memory for a weak reference it stays unknown."""
    reference = c.PyWeakref_NewRef(ob, 0)
    if reference == 0:
        c.PyErr_Clear()
        return
    at = find_known(jax, ob)
    if at == 0:
        first = group_of(jax, ob)
        jax.turn += 1
        at = first + KNOWN_BYTES * (jax.turn & (GROUP - 1))
        for i in range(GROUP):
            if not is_alive(known_at(first + KNOWN_BYTES * i)):
                at = first + KNOWN_BYTES * i
    known = known_at(at)
    before = known.reference
    known.reference, known.object, known.data = reference, ob, data
    if before != 0:
        c.Py_DecRef(before)


@native
def element_of(jax, runtime, ob):
    """The key of an array's dtype and its item size, as ``pack.dtype_entry``, and its shape, a tuple."""
    aval = load(ob + jax.aval)
    if Py_TYPE(aval) != jax.aval_type:
        return 0, structs.STATUS_NUMBA, 0
    key, itemsize = dtype_entry(runtime, load(aval + jax.dtype))
    return key, itemsize, load(aval + jax.shape)


@native
def has_shape(tensor, shape):
    """Whether a DLTensor has the extents in a tuple."""
    if types.intp(tensor.ndim) != load(shape + OB_SIZE):
        return False
    difference = 0
    for i in range(tensor.ndim):
        difference |= load(tensor.shape + 8 * i) ^ c.PyLong_AsSsize_t(load(shape + OB_ITEM + 8 * i))
    return difference == 0


@native
def is_in_c_order(tensor):
    """Whether a DLTensor's elements are contiguous in C order."""
    expected = 1
    for j in range(tensor.ndim):
        i = tensor.ndim - 1 - j
        extent = load(tensor.shape + 8 * i)
        if extent > 1 and tensor.strides != 0 and load(tensor.strides + 8 * i) != expected:
            return False
        expected *= extent
    return True


@native
def is_alone():
    """Whether no other thread can run Python code."""
    return c.PyThreadState_Next(c.PyInterpreterState_ThreadHead(c.PyInterpreterState_Get())) == 0


@cfunction(types.intp)
def is_only_thread_natively():
    """:func:`is_alone`, for Python."""
    return types.intp(is_alone())


@cfunction(types.intp, types.intp, types.intp, types.intp)
def prepare(context_address, entry_address, ob):
    """``Kind.prepare``: wait until an array is computed, and make it known if it is on the CPU and in C order.

    GIL: held; released while JAX waits.
    """
    if not is_alone():
        return structs.STATUS_OK  # its reading says so
    entry = structs.entry_at(entry_address)
    jax = jax_at(entry.guard)
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    is_known_already, data = is_known(jax, ob)
    if is_known_already:
        return structs.STATUS_OK
    key, itemsize, shape = element_of(jax, runtime, ob)
    if key == 0:
        return itemsize  # a STATUS_*
    out = stack(1)
    store(out, 0)
    failed = call_int(entry.managed, (ob, out)) != 0
    if failed or load(out) == 0 or PyErr_Occurred() != 0:
        if not failed and load(out) != 0:
            delete_managed(load(out))
        # Python code then asks JAX, whose words are better.
        return structs.STATUS_OK if cleared_error() else structs.STATUS_ERROR
    tensor = dl_tensor_at(load(out) + DL_TENSOR)
    data = tensor.data + types.intp(tensor.byte_offset)
    is_sound = is_plain(tensor) or refusal(tensor) == structs.STATUS_OK
    is_array = is_sound and has_shape(tensor, shape) and is_in_c_order(tensor)
    if is_array and element_field(tensor) == key >> structs.DTYPE_SHIFT & structs.FIELD_MASK:
        own = data_of(jax.pointer_name, ob)  # at once: while there is the export nobody donates the array
        if own == data or data == 0:  # for an array without elements JAX exports none
            note_known(jax, ob, own)
    delete_managed(load(out))
    return structs.STATUS_OK


@native
def computed_part(side, ob):
    """A new reference to the part of an array on its only device, another array, which is computed. 0: there is none.

    GIL: held; released while JAX waits.
    """
    arguments = stack(2)
    store(arguments, ob)
    store(arguments + 8, load(side + 8))
    part = c.PyObject_VectorcallMethod(load(side), arguments, 2, 0)
    if part == 0:
        return 0
    store(arguments, part)
    computed = c.PyObject_VectorcallMethod(load(side + 16), arguments, 1, 0)
    if computed != 0:
        c.Py_DecRef(computed)
        if count_of_devices(side, ob) == 1:
            return part
    c.Py_DecRef(part)
    return 0


@native
def count_of_devices(side, ob):
    """On how many devices an array is. -1 with an exception set if JAX does not tell."""
    count = -1
    sharding = c.PyObject_GetAttr(ob, load(side + 24))
    number = c.PyObject_GetAttr(sharding, load(side + 32)) if sharding != 0 else 0
    if number != 0:
        count = c.PyLong_AsSsize_t(number)
        c.Py_DecRef(number)
    if sharding != 0:
        c.Py_DecRef(sharding)
    return count


@native
def export_computed(side, ob, out):
    """Fill the pointer at `out` with an export of a computed array: by its buffer, or by JAX's function behind ``__dlpack__``.

    The latter is for elements of half precision, on the CPU, if this JAX has the function. Returns 0, or -1.
    """
    failed = buffer.export(ob, out)
    function = load(side + 40)
    if failed != 0 and function != global_address("_Py_NoneStruct") and cleared_error():
        capsule = c.PyObject_CallOneArg(function, ob)
        if capsule != 0 and dunder.take(capsule, out) == 0:
            managed_at(load(out)).flags = READONLY
            failed = types.int32(0)
            if dl_tensor_at(load(out) + DL_TENSOR).device.device_type != CPU:
                delete_managed(load(out))
                failed = types.int32(-1)
    return failed


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_from_py_object_no_sync(py_object, out):
    """Fill the pointer at `out` with an owning export of the array `py_object`, its buffer.

    Where there is another thread, an array that is not known is waited for first, by its part: while JAX waits for the array
    itself, without the GIL, another thread may delete it, and JAX 0.10 aborts. (So it does, as in ``np.asarray``, if another
    thread deletes an array in the very moment in which it is exported.) Where there is no buffer (on another device), the array's
    ``__dlpack__`` makes the export, or raises.

    Returns: 0, or -1 with an exception set. Owns: the caller calls the deleter once. GIL: held; released while JAX waits.
    """
    side = python_items()
    if side == 0:
        return types.int32(-1)
    jax = jax_at(global_address("fastexchange_jax"))
    failed = types.int32(-1)
    if find_known(jax, py_object) != 0:
        failed = export_computed(side, py_object, out)
    elif is_alone():
        failed = buffer.export(py_object, out)
    else:
        part = computed_part(side, py_object)
        if part != 0:
            failed = export_computed(side, part, out)
            c.Py_DecRef(part)
            if failed == 0:
                tensor = dl_tensor_at(load(out) + DL_TENSOR)
                if is_in_c_order(tensor):
                    note_known(jax, py_object, tensor.data + types.intp(tensor.byte_offset))
    if failed == 0 or not cleared_error():
        return failed
    checked = c.PyObject_CallOneArg(load(side + 48), py_object)
    if checked == 0:
        return types.int32(-1)
    c.Py_DecRef(checked)
    return dunder.export(py_object, out)


# ---- reading ---------------------------------------------------------------------------------------------------------


@native
def pack_in_order(data, shape, ndim, itemsize, words):
    """Write the words of an array in C order, all but the first. `shape`: a tuple of ints. Returns the number of elements."""
    count = 1
    for j in range(ndim):
        i = ndim - 1 - j
        extent = c.PyLong_AsSsize_t(load(shape + OB_ITEM + 8 * i))
        put(words, structs.ARRAY_HEAD_WORDS + i, extent)
        put(words, structs.ARRAY_HEAD_WORDS + ndim + i, count * itemsize)
        count *= extent
    put(words, 1, 0)
    put(words, 2, count)
    put(words, 3, itemsize)
    put(words, 4, data)
    return count


@native
def flags_of(field, ndim, count, data):
    """The flags of the key of an array in C order. It is readonly."""
    is_aligned = data & misaligned_bits(field) == 0 or count == 0
    return flags_in_order(ndim, count) | (structs.ALIGNED if is_aligned else 0)


@reader
def read_jax(ob, entry, frame_address, word, array):
    """An array of JAX."""
    frame = structs.frame_at(frame_address)
    jax = jax_at(structs.entry_at(entry).guard)
    if frame.is_owning != 0:
        view = stack(DL_TENSOR_WORDS)
        status, tensor, flags, origin = find_tensor(frame_address, ob, entry, view)
        if status != structs.STATUS_OK:
            return -status
        return pack_found(frame, entry, tensor, flags, origin, word, array)
    if not is_alone():
        return -structs.STATUS_UNKNOWN_TYPE  # its kind is another now: see `learn`
    is_read, data = is_known(jax, ob)
    if not is_read:
        return -(structs.STATUS_EXPORT if frame.flags & FLAG_PREPARED == 0 else if_odd(frame))
    key, itemsize, shape = element_of(jax, runtime_of(frame_address), ob)
    if key == 0:
        return -itemsize  # a STATUS_*
    ndim = load(shape + OB_SIZE)
    if ndim > MAX_NDIM:
        return -if_odd(frame)
    if has_no_room(frame, word, structs.ARRAY_HEAD_WORDS + 2 * ndim):
        return -structs.STATUS_GROW
    count = pack_in_order(data, shape, ndim, itemsize, as_words(word))
    note_array(array, ob + structs.ORIGIN_VIEW, word)
    flags = flags_of(key >> structs.DTYPE_SHIFT & structs.FIELD_MASK, ndim, count, data)
    return key | ndim << structs.NDIM_SHIFT | flags << structs.FLAGS_SHIFT


@row_reader
def jax_row(items, row_address, word, array_address, frame):
    """A known array of JAX. `expected`: the dtype object, the item size."""
    ob = load(items)
    row = structs.row_at(row_address)
    if not is_of_type(ob, row_address):
        return leave(row_address, frame, 0)
    jax = jax_at(structs.entry_at(row.entry).guard)
    aval = load(ob + jax.aval)
    ndim = row.key >> structs.NDIM_SHIFT & 0xFF
    if Py_TYPE(aval) != jax.aval_type or load(aval + jax.dtype) != row.expected[0]:
        return leave(row_address, frame, 0)
    shape = load(aval + jax.shape)
    if not is_alone():
        return leave(row_address, frame, 0)
    is_read, data = is_known(jax, ob)
    if not is_read or load(shape + OB_SIZE) != ndim:
        return leave(row_address, frame, 0)
    count = pack_in_order(data, shape, ndim, row.expected[1], as_words(word))
    flags = flags_of(row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK, ndim, count, data)
    if flags != row.key >> structs.FLAGS_SHIFT & structs.KEY_FLAGS:
        return leave(row_address, frame, 0)
    here = structs.array_at(array_address)
    here.origin = ob + structs.ORIGIN_VIEW
    store(word, here.meminfo)
    size = 8 * (structs.ARRAY_HEAD_WORDS + 2 * ndim)
    return go_on(items + 8, row_address, word + size, array_address + ARRAY_BYTES, frame)


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fill_row(context_address, row_address, ob):
    """See :data:`jax_row`. A call that needs owning exports reads no array so."""
    context = structs.context_at(context_address)
    row = structs.row_at(row_address)
    runtime = structs.runtime_at(context.runtime)
    jax = jax_at(structs.entry_at(row.entry).guard)
    key, itemsize, _ = element_of(jax, runtime, ob)
    if key >> structs.DTYPE_SHIFT != row.key >> structs.DTYPE_SHIFT & structs.FIELD_MASK:
        return 0
    row.expected[0], row.expected[1] = load(load(ob + jax.aval) + jax.dtype), itemsize
    if context.needs_owning_exports != 0 or not lives_for_ever(runtime, row.expected[0]):
        row.reader = 0
    return 1


@cfunction(types.intp, types.intp, types.intp)
def mark_array(entry, ob):
    """What tells arrays of several dtypes and ranks apart."""
    jax = jax_at(structs.entry_at(entry).guard)
    aval = load(ob + jax.aval)
    return load(aval + jax.dtype) ^ load(load(aval + jax.shape) + OB_SIZE) << 32 if Py_TYPE(aval) == jax.aval_type else 0


@cfunction(types.intp, *[types.intp] * 5)
def read_shape(context_address, entry, ob, shape, room):
    """The shape of an array: see ``allocation.read_shape``."""
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    key, _, extents = element_of(jax_at(structs.entry_at(entry).guard), runtime, ob)
    if key == 0 or load(extents + OB_SIZE) > room:
        return -1
    for i in range(load(extents + OB_SIZE)):
        store(shape + 8 * i, c.PyLong_AsSsize_t(load(extents + OB_ITEM + 8 * i)))
    return load(extents + OB_SIZE) | (key >> structs.DTYPE_SHIFT & structs.FIELD_MASK) << 8


# ---- in Python -------------------------------------------------------------------------------------------------------

def learn(value) -> bool:
    """``Kind.learn``. Once there is another thread it forgets the kind :data:`ARRAY`, and the type is learnt anew."""
    news = learn_dtype(value.aval.dtype)
    return (_has_seen_threads() and runtime().entries.remove_kind(ARRAY)) or news


PATH, MEANING = "jax", "JAX gives its address; shape and dtype are read in memory"
ARRAY = Kind(
    PATH, MEANING, structs.FORM_TENSOR, read_jax, lambda fields: (jax_row,), fill_row, mark_array, read_shape,
    exports=structs.EXPORTS_IF_OWNING, prepare=prepare, learn=learn,
)  # fmt: skip
HELD = Kind(
    PATH, MEANING, structs.FORM_TENSOR, read_tensor, lambda fields: (export_row,), None, mark_array, read_shape,
    exports=structs.EXPORTS_ALWAYS, learn=learn,
)  # fmt: skip
MEANINGS |= {"held": "each call holds an export of it, because another thread could donate it meanwhile"}
_state = for_ever(ffi.new("fx_jax *"))
llvmlite.binding.add_symbol("fastexchange_jax", address_of(_state))


def new_table():
    """A new ``fx_jax``, which knows no array. Raises RuntimeError where the layout of JAX's arrays is not as expected."""
    found = layout()
    if isinstance(found, str):
        raise RuntimeError(found)
    known = for_ever(ffi.new("fx_known_array[]", GROUP * GROUPS))
    return for_ever(ffi.new("fx_jax *", {
        "aval": found.aval, "aval_type": id(found.aval_type), "shape": found.shape, "dtype": found.dtype,
        "pointer_name": id(POINTER_NAME), "known": address_of(known),
    }))  # fmt: skip


@once
def _native():
    """The ``fx_jax`` of arrays on the CPU."""
    _state[0] = new_table()[0]
    return _state


@functools.cache
def _only_thread():
    return ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(is_only_thread_natively.address)


def is_only_thread() -> bool:
    """Whether no other thread can run Python code."""
    return bool(_only_thread()())


def _has_seen_threads() -> bool:
    """Whether there is another thread, or was one when this was asked before: what a type is changes once."""
    global _seen
    _seen = _seen or not is_only_thread()
    return _seen


_seen = False


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    to_dlpack = getattr(sys.modules.get("jaxlib._jax"), "buffer_to_dlpack_managed_tensor", None)
    return "addressable_data", 0, "block_until_ready", "sharding", "num_devices", to_dlpack, _check_elements


def _check_elements(array) -> None:
    """Raise BufferError for elements of less than a byte that JAX keeps one in a byte: its own error is no BufferError."""
    if isinstance(array.dtype, np.dtype) and padded_key_of(array.dtype) is not None:
        raise BufferError(f"JAX does not export its elements, {array.dtype}: {why_not_exported(array.dtype)}")


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """The type of JAX's arrays."""
    if cls is not array_type():
        return None
    found = layout()
    if not isinstance(found, str) and not buffer.prepare():
        found = "the layout of Py_buffer is not as expected"
    if isinstance(found, str) or not runtime().is_native:
        notes.append(f"JAX's arrays are not read natively: {found if isinstance(found, str) else runtime().why_not_native}")
        return None
    fields = {"managed": managed_tensor_from_py_object_no_sync.address, "guard": address_of(_native()), "asks_python": 1}
    return Discovery(HELD, fields, notes, source="held") if _has_seen_threads() else Discovery(ARRAY, fields, notes)
