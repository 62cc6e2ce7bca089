"""Lists of arrays as arguments: for a call they become Numba's reflected lists.

1. Make a *snapshot*, a tuple of the list's items: foreign code may change the list while its items are read.
2. Read the snapshot as a tuple, item by item.
3. :func:`make_list` makes the kernel's list, a memory block, of the items' words. All items share one key, so the length is no
   part of the signature. Items with one dtype and rank but different layouts, alignment or writeability get their common type.
4. After the call, drop lists that the kernel has not changed. Changes (``append``, ``x[0] = …``) are applied to the list in
   Python, as under ``@njit``, with new arrays as tensors of the caller's framework: :data:`reflect_changes`.

The block's layout is that of ``numba.core.datamodel.models.ListPayloadModel``; :func:`verify` compares.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE
from ..ground.native import external, global_address, load, native, stack, store
from ..ground.numba_internals import fields_of, size_of
from . import structs
from .frame import ARRAY_BYTES, LIST_BYTES, MEMINFO_REFCOUNT, NRT_MemInfo_release, drop_lists, let_owned_escape
from .type_table import find

NRT_MemInfo_new_varsize_dtor = external("NRT_MemInfo_new_varsize_dtor", types.intp, types.intp, types.intp)
NRT_MemInfo_data = external("NRT_MemInfo_data", types.intp, types.intp)

SIZE, ALLOCATED, DIRTY, ITEMS = 0, 8, 16, 24  # offsets in a list's payload
ITEM_BYTES_SHIFT = 32  # an item's size is stored in the padding behind DIRTY, a byte: realloc() copies the padding
_TYPE_OF_ITEMS = ~(structs.KEY_FLAGS << structs.FLAGS_SHIFT)  # the bits that are equal in all items' keys


def verify() -> bool:
    """Whether Numba's lists have the layout declared here."""
    array = types.Array(types.float32, 2, "C")
    listed = types.List(array, reflected=True)
    payload = types.ListPayload(listed)
    return (
        [name for name, _ in fields_of(payload)] == ["size", "allocated", "dirty", "data"]
        and (size_of(payload), size_of(array), size_of(types.boolean)) == (ITEMS + 72, 72, 1)
        and [name for name, _ in fields_of(listed)] == ["meminfo", "parent"]
    )


@native
def may_hold_arrays(runtime, ob):
    """Whether a list's first item is a tensor, or of an unknown type. Numba unboxes all other lists."""
    if c.PyList_Size(ob) <= 0:
        return False
    entry = find(runtime, Py_TYPE(c.PyList_GetItem(ob, 0)))
    return entry == 0 or structs.is_tensor(structs.kind_at(structs.entry_at(entry).kind))


@native
def snapshot_of(frame, index, ob):
    """The snapshot of the list `ob`, the call's `index`-th; 0 if the snapshot is of another list."""
    record = structs.list_at(frame.lists + LIST_BYTES * index)
    return record.snapshot if record.object == ob else 0


@native
def take_snapshot(frame, index, ob):
    """Make the snapshot of the list `ob`, the call's `index`-th. Returns 0 if there is another list, or with an exception set.

    GIL: held; the allocation may start a garbage collection, which runs Python code.
    """
    if index < frame.snapshot_count:
        return snapshot_of(frame, index, ob)
    record = structs.list_at(frame.lists + LIST_BYTES * index)
    snapshot = c.PyList_AsTuple(ob)
    if snapshot != 0:
        record.object = ob
        record.snapshot = snapshot
        frame.snapshot_count = index + 1
    return snapshot


@native
def is_same_list(one, other):
    """Whether two records are of one list with the same snapshot."""
    if one.object != other.object or load(one.snapshot + c.OB_SIZE) != load(other.snapshot + c.OB_SIZE):
        return False
    difference = 0
    for i in range(load(one.snapshot + c.OB_SIZE)):
        difference |= load(one.snapshot + c.OB_ITEM + 8 * i) ^ load(other.snapshot + c.OB_ITEM + 8 * i)
    return difference == 0


@native
def make_list(runtime, frame, first_key, end_key, words, first_array):
    """Make a list of the items that have been read last, with their keys, words and ``fx_array``.

    The list's two words and two keys replace those of the items. Returns: a STATUS_*, and the object to blame.
    """
    record = structs.list_at(frame.lists + LIST_BYTES * frame.list_count)
    count = load(record.snapshot + c.OB_SIZE)
    key = load(first_key + 8)
    flags = structs.KEY_FLAGS << structs.FLAGS_SHIFT
    if end_key - first_key != 8 + 8 * count or key & 0xFF != structs.KEY_ARRAY or key >> structs.CLASS_SHIFT != 0:
        return structs.STATUS_NUMBA, record.object
    for i in range(count):
        item_key = load(first_key + 8 + 8 * i)
        if (item_key ^ key) & _TYPE_OF_ITEMS != 0:
            if item_key & 0xFF != structs.KEY_ARRAY or item_key >> structs.CLASS_SHIFT != 0:
                return structs.STATUS_NUMBA, record.object
            return structs.STATUS_MIXED, load(record.snapshot + c.OB_ITEM + 8 * i)
        flags &= item_key
    record.meminfo = 0
    for i in range(frame.list_count):
        known = structs.list_at(frame.lists + LIST_BYTES * i)
        if record.meminfo == 0 and is_same_list(known, record):  # a list passed twice is one list in the kernel
            record.meminfo = known.meminfo
            store(known.meminfo + MEMINFO_REFCOUNT, load(known.meminfo + MEMINFO_REFCOUNT) + 1)
    if record.meminfo == 0:
        item_bytes = 8 * (structs.ARRAY_HEAD_WORDS + 2 * (key >> structs.NDIM_SHIFT & 0xFF))
        record.meminfo = NRT_MemInfo_new_varsize_dtor(ITEMS + count * item_bytes, runtime.release_items)
        if record.meminfo == 0:
            c.PyErr_SetNone(global_address("PyExc_MemoryError"))
            return structs.STATUS_ERROR, record.object
        data = NRT_MemInfo_data(record.meminfo)
        store(data + SIZE, count)
        store(data + ALLOCATED, count)
        store(data + DIRTY, item_bytes << ITEM_BYTES_SHIFT)
        for i in range(count * item_bytes // 8):
            store(data + ITEMS + 8 * i, load(words + 8 * i))
        for i in range(count):
            array = structs.array_at(first_array + ARRAY_BYTES * i)
            array.held = 2
            store(array.meminfo + MEMINFO_REFCOUNT, 2)
    frame.list_count += 1
    store(words, record.meminfo)
    store(words + 8, record.object)
    store(first_key, structs.KEY_LIST)
    store(first_key + 8, (key & _TYPE_OF_ITEMS) | flags)
    return structs.STATUS_OK, record.object


@cfunction(types.void, types.intp)
def release_items(payload):
    """Destructor of a list's payload: drops the items that the list has then."""
    item_bytes = load(payload + DIRTY) >> ITEM_BYTES_SHIFT
    for i in range(load(payload + SIZE)):
        meminfo = load(payload + ITEMS + item_bytes * i)
        if meminfo != 0:
            NRT_MemInfo_release(meminfo)


@native
def is_changed(frame, i):
    """Whether the kernel has changed the i-th list, not only its arrays' elements."""
    return load(NRT_MemInfo_data(structs.list_at(frame.lists + LIST_BYTES * i).meminfo) + DIRTY) & 0xFF != 0


@native
def empty_lists(frame):
    """Empty the kernel's lists, which have not changed, before :func:`drop_lists`.

    A block with two references is only the frame's and the list's. So no other thread uses it, and its count needs no atomic
    instruction.
    """
    for i in range(frame.list_count):
        meminfo = structs.list_at(frame.lists + LIST_BYTES * i).meminfo
        if load(meminfo + MEMINFO_REFCOUNT) == 1:  # else the kernel has kept the list, or it has been passed twice
            data = NRT_MemInfo_data(meminfo)
            item_bytes = load(data + DIRTY) >> ITEM_BYTES_SHIFT
            for j in range(load(data + SIZE)):
                block = load(data + ITEMS + item_bytes * j)
                if load(block + MEMINFO_REFCOUNT) == 2:
                    store(block + MEMINFO_REFCOUNT, 1)
                else:
                    NRT_MemInfo_release(block)
            store(data + SIZE, 0)


@native
def drop_unchanged(frame):
    """Drop the lists after a call if none has changed."""
    changed = False
    for i in range(frame.list_count):
        changed |= is_changed(frame, i)
    if changed:
        frame.takes_back = 0  # a list may have got an array
        return
    if frame.takes_back != 0:
        take_back_lists(frame)
    empty_lists(frame)
    drop_lists(frame)


@native
def take_back_lists(frame):
    """Take the references to the lists back that the kernel has leaked (``frame.take_back``). Each has those of its arguments."""
    for i in range(frame.list_count):
        store(structs.list_at(frame.lists + LIST_BYTES * i).meminfo + MEMINFO_REFCOUNT, 0)
    for i in range(frame.list_count):
        count = structs.list_at(frame.lists + LIST_BYTES * i).meminfo + MEMINFO_REFCOUNT
        store(count, load(count) + 1)


@native
def make_ints(at, count):
    """Replace each of the `count` words at `at` by an int object of its value. Returns whether there was memory.

    Raises: MemoryError. Owns: the caller owns the objects; after a failure there are none.
    """
    for i in range(count):
        ob = c.PyLong_FromSsize_t(load(at + 8 * i))
        if ob == 0:
            drop_ints(at, i)
            return False
        store(at + 8 * i, ob)
    return True


@native
def drop_ints(at, count):
    """Drop the objects that :func:`make_ints` has made."""
    for i in range(count):
        c.Py_DecRef(load(at + 8 * i))


@native
def reflect_change(runtime, context_address, overload_address, frame_address, args, i):
    """Apply the kernel's changes to the i-th list by Python's ``calls.results.reflect``.

    Returns: whether that succeeded; if not, an exception is set.
    """
    record = structs.list_at(structs.frame_at(frame_address).lists + LIST_BYTES * i)
    arguments = stack(8)
    store(arguments, runtime.results)
    store(arguments + 8, structs.overload_at(overload_address).lists)
    store(arguments + 16, record.object)
    words = arguments + 24
    store(words, i)
    store(words + 8, record.meminfo)
    store(words + 16, context_address)
    store(words + 24, frame_address)
    store(words + 32, args)
    if not make_ints(words, 5):
        return False
    made = c.PyObject_VectorcallMethod(runtime.reflect, arguments, 8, 0)
    drop_ints(words, 5)
    if made == 0:
        return False
    c.Py_DecRef(made)
    return True


@native
def reflect_changes(context_address, overload_address, frame_address, args, result):
    """Apply the kernel's changes to the lists in Python, after a call with `result`.

    Returns: `result`; 0 with an exception set after a failure. The kernel's own exception takes precedence.
    """
    frame = structs.frame_at(frame_address)
    runtime = structs.runtime_at(structs.context_at(context_address).runtime)
    for i in range(frame.list_count):
        if not is_changed(frame, i):
            continue
        dirty = NRT_MemInfo_data(structs.list_at(frame.lists + LIST_BYTES * i).meminfo) + DIRTY
        store(dirty, load(dirty) & ~0xFF)
        error = stack(3)
        c.save_error(error)
        if reflect_change(runtime, context_address, overload_address, frame_address, args, i) or load(error) != 0:
            c.restore_error(error)  # the kernel's exception replaces that of the change
        elif result != 0:
            c.Py_DecRef(result)
            result = 0
    let_owned_escape(runtime, frame)
    return result
