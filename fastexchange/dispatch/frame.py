"""Frames: the working memory of calls, and the release of everything that a call holds.

A frame belongs to one call at a time. Free frames form a list in the runtime: a call takes the first one and gives it back. So
calls may nest (a kernel calls Python code that calls a kernel) and run in parallel (kernels without the GIL).

Each array of a call has one of the frame's memory blocks (``NRT_MemInfo``), on which Numba's reference counting works as for any
array. After the call the block's count tells whether the kernel has kept the array. If so, the block gets an owner
(:func:`let_escape`), and the frame a new block. An array that was not kept costs a load and a comparison. References that a
kernel cannot have kept are leaked ones, and are taken back.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE
from ..ground.dltensor import delete_managed
from ..ground.native import call_int, call_word, external, global_address, larger, load, native, sizeof, stack, store
from . import structs
from .kept import KEEPS_NOTHING, KEEPS_RESULT
from .type_table import find

NRT_MemInfo_alloc = external("NRT_MemInfo_alloc", types.intp, types.intp)  # argument: bytes of data behind the block, here 0
NRT_MemInfo_release = external("NRT_MemInfo_release", types.void, types.intp)
MEMINFO_REFCOUNT, MEMINFO_DTOR, MEMINFO_DTOR_INFO = 0, 8, 16  # NRT_MemInfo; verified by `runtime`

FRAME_BYTES = sizeof("fx_frame")
ARRAY_BYTES = sizeof("fx_array")
EXPORT_BYTES = sizeof("fx_export")
LIST_BYTES = sizeof("fx_list")
DEFAULT_KEYS = 64
MAX_KEPT_KEYS = 8192  # of a frame that is kept for later calls: about 2 MB
ARRAY_WORDS_PER_KEY = 12


@native
def new_frame(keys):
    """Make a frame for calls with up to `keys` leaves. Returns 0 if there is no memory.

    Only arrays check ``words_limit``. Behind it there is room for two words of every leaf, so that other leaves need no check.
    """
    words = keys * ARRAY_WORDS_PER_KEY
    size = FRAME_BYTES + structs.RESULT_BYTES + 8 * words + keys * (16 + 8 + 8 + ARRAY_BYTES + EXPORT_BYTES + LIST_BYTES + 8) + 64
    at = c.PyMem_RawMalloc(size)
    if at == 0:
        return 0
    frame = structs.frame_at(at)
    frame.next = 0
    frame.result = (at + FRAME_BYTES + 15) & -16
    frame.words = frame.result + structs.RESULT_BYTES
    frame.words_limit = frame.words + 8 * words
    frame.keys = frame.words_limit + 16 * keys
    frame.key_capacity = keys
    frame.entries = frame.keys + 8 * keys
    frame.arrays = frame.entries + 8 * keys
    frame.exports = frame.arrays + ARRAY_BYTES * keys
    frame.export_capacity = keys
    frame.lists = frame.exports + EXPORT_BYTES * keys
    frame.bound = frame.lists + LIST_BYTES * keys
    frame.bound_capacity = keys
    frame.key_count = 0
    frame.array_count = 0
    frame.export_count = 0
    frame.list_count = 0
    frame.snapshot_count = 0
    frame.flags, frame.is_owning, frame.exports_used = 0, 0, 0
    frame.takes_back = 0
    frame.code = 0
    frame.scratch = 0
    for i in range(keys):
        structs.array_at(frame.arrays + ARRAY_BYTES * i).held = 1
        meminfo = NRT_MemInfo_alloc(0)
        if meminfo == 0:
            for j in range(i):
                NRT_MemInfo_release(structs.array_at(frame.arrays + ARRAY_BYTES * j).meminfo)
            c.PyMem_RawFree(at)
            return 0
        structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo = meminfo
    return at


@native
def take_frame(runtime):
    """Take a free frame, or make one. Returns 0 with MemoryError set."""
    at = runtime.frames
    if at != 0:
        runtime.frames = structs.frame_at(at).next
        return at
    at = new_frame(DEFAULT_KEYS)
    if at == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
    return at


@native
def put_back(runtime, at):
    """Give back a frame that the call has not changed."""
    structs.frame_at(at).next = runtime.frames
    runtime.frames = at


@native
def give_frame(runtime, at):
    """Give back a frame. Frees it instead if it lacks a memory block (:func:`let_escape`), or is unusually large."""
    frame = structs.frame_at(at)
    if frame.key_capacity != 0 and frame.key_capacity <= MAX_KEPT_KEYS:
        put_back(runtime, at)
        return
    for i in range(frame.export_capacity):
        meminfo = structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo
        if meminfo != 0:
            NRT_MemInfo_release(meminfo)
    c.PyMem_RawFree(at)


@native
def grow_frame(runtime, at, keys):
    """Move exports, list snapshots and bound arguments to a larger frame, and give back the one at `at`. 0: MemoryError."""
    old = structs.frame_at(at)
    made = new_frame(larger(2 * old.key_capacity, keys))
    if made == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    new = structs.frame_at(made)
    for i in range(old.export_count * EXPORT_BYTES // 8):
        store(new.exports + 8 * i, load(old.exports + 8 * i))
    for i in range(old.snapshot_count * LIST_BYTES // 8):
        store(new.lists + 8 * i, load(old.lists + 8 * i))
    for i in range(old.bound_capacity):
        store(new.bound + 8 * i, load(old.bound + 8 * i))
    new.export_count, new.snapshot_count = old.export_count, old.snapshot_count
    old.export_count = 0
    old.snapshot_count = 0
    give_frame(runtime, at)
    return made


@native
def export_of_array(frame, i):
    """The address of the ``fx_export`` of the i-th array. Arrays use a call's exports in order, one each."""
    index = 0
    for j in range(i):
        index += structs.array_at(frame.arrays + ARRAY_BYTES * j).origin & 3 == structs.ORIGIN_EXPORT
    return frame.exports + EXPORT_BYTES * index


@native
def owner_of(runtime, ob):
    """Return a new reference to what owns a tensor's memory; 0 if its kind knows of nothing but the tensor.

    An export does not keep the memory if the tensor is set to other memory. A pending exception stays.
    """
    entry = find(runtime, Py_TYPE(ob))
    owner = structs.kind_at(structs.entry_at(entry).kind).owner if entry != 0 else 0
    if owner == 0:
        return 0
    error = stack(3)
    c.save_error(error)
    made = call_word(owner, (entry, ob))
    c.restore_error(error)
    return made


@native
def give_owner(runtime, frame, i):
    """Give the memory block of the i-th array, which the kernel has kept, an owner, unless it has one.

    The frame keeps the block until :func:`let_escape`.
    """
    array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
    meminfo = array.meminfo
    if load(meminfo + MEMINFO_DTOR) != 0:
        return
    ob = array.origin & -4
    origin = array.origin & 3
    managed = 0
    held = 0  # an object that has to live as long as the managed tensor
    storage = 0  # a new reference
    if origin == structs.ORIGIN_EXPORT:
        export = structs.export_at(export_of_array(frame, i))
        held = export.storage
        if held == 0:
            storage = owner_of(runtime, ob)
        if storage != 0:
            ob = storage
        elif export.managed == 0:
            ob, held = held, 0
        else:
            managed = export.managed
            export.is_given = 1
    elif origin == structs.ORIGIN_VIEW:
        # A borrowed view: an owning export has to keep the memory if the tensor is resized or freed.
        out = stack(1)
        error = stack(3)
        store(out, 0)
        storage = owner_of(runtime, ob)
        c.save_error(error)
        entry = find(runtime, Py_TYPE(ob))
        if storage != 0:
            ob = storage
        elif entry != 0 and call_int(structs.entry_at(entry).managed, (ob, out)) == 0:
            managed = load(out)
            held = ob  # the export may have other memory than the view had
        c.restore_error(error)
    release, owner = runtime.release_owner, ob
    if managed != 0:
        release, owner = runtime.release_managed, managed
        pair = c.PyMem_RawMalloc(16) if held != 0 else 0
        if pair != 0:
            store(pair, managed)
            store(pair + 8, held)
            release, owner = runtime.release_both, pair
    if release == runtime.release_both:
        c.Py_IncRef(held)
    elif release == runtime.release_owner and storage == 0:
        c.Py_IncRef(ob)
    store(meminfo + MEMINFO_DTOR, release)
    store(meminfo + MEMINFO_DTOR_INFO, owner)


@native
def let_escape(runtime, frame, i):
    """Give the memory block of the i-th array an owner, drop it, and take a new one."""
    give_owner(runtime, frame, i)
    array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
    meminfo = array.meminfo
    NRT_MemInfo_release(meminfo)
    array.meminfo = NRT_MemInfo_alloc(0)
    if array.meminfo == 0:
        frame.key_capacity = 0  # out of memory: no other call can use this frame


@native
def let_owned_escape(runtime, frame):
    """:func:`let_escape` for all arrays whose blocks have an owner."""
    for i in range(frame.array_count):
        if load(structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo + MEMINFO_DTOR) != 0:
            let_escape(runtime, frame, i)


@native
def is_anything_kept(frame, count):
    """Whether the kernel has kept one of the first `count` arrays of the call: returned or stored it."""
    arrays = frame.arrays
    changed = 0
    for i in range(count):
        changed |= load(structs.array_at(arrays + ARRAY_BYTES * i).meminfo + MEMINFO_REFCOUNT) ^ 1
    return changed != 0


@native
def note_leaks(frame, overload, code):
    """After a kernel that has returned `code`: note whether references that are left are leaked ones (``kept``)."""
    has_raised = code != 0 and code != -2  # RETCODE_OK, RETCODE_NONE
    if overload.keeps == KEEPS_NOTHING or (overload.keeps == KEEPS_RESULT and has_raised):
        frame.takes_back = 1


@native
def take_back(frame):
    """Take the references back that the kernel has leaked, if :func:`note_leaks` has found that they are."""
    if frame.takes_back != 0:
        frame.takes_back = 0
        for i in range(frame.array_count):
            array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
            store(array.meminfo + MEMINFO_REFCOUNT, array.held)


@native
def drop(ob):
    """Drop a storage or a snapshot. Python code that this may run does not see the pending exception."""
    if load(ob) > 1:  # nearly always for a storage, because the tensor holds it too
        c.decref(ob)
        return
    error = stack(3)
    c.save_error(error)
    c.Py_DecRef(ob)
    c.restore_error(error)


@native
def drop_lists(frame):
    """Drop the kernel's lists, and with them their references to the arrays' blocks."""
    count = frame.list_count
    frame.list_count = 0
    for i in range(count):
        NRT_MemInfo_release(structs.list_at(frame.lists + LIST_BYTES * i).meminfo)
    for i in range(frame.array_count):
        structs.array_at(frame.arrays + ARRAY_BYTES * i).held = 1


@native
def release_exports(frame):
    """Call the deleters of the call's exports, and drop the storages that it holds."""
    count = frame.export_count
    frame.export_count = 0
    for i in range(count):
        export = structs.export_at(frame.exports + EXPORT_BYTES * i)
        storage = export.storage
        if export.is_given == 0 and export.managed != 0:
            delete_managed(export.managed)
        if storage != 0:
            drop(storage)


@native
def release(runtime, frame):
    """Release everything that the call holds: escaped arrays get owners, and all deleters are called."""
    if frame.list_count != 0:
        drop_lists(frame)
    take_back(frame)
    for i in range(frame.array_count):
        if load(structs.array_at(frame.arrays + ARRAY_BYTES * i).meminfo + MEMINFO_REFCOUNT) != 1:
            let_escape(runtime, frame, i)
    frame.array_count = 0
    release_exports(frame)
    frame.flags, frame.is_owning, frame.exports_used = 0, 0, 0
    count = frame.snapshot_count
    frame.snapshot_count = 0
    for i in range(count):
        drop(structs.list_at(frame.lists + LIST_BYTES * i).snapshot)


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_owner(data, size, owner):
    """NRT destructor: drop the Python object that owns an escaped array's memory. GIL: not needed; any thread."""
    if c.Py_IsInitialized() != 0:
        state = c.PyGILState_Ensure()
        c.Py_DecRef(owner)
        c.PyGILState_Release(state)


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_managed(data, size, managed):
    """NRT destructor: call the deleter of an escaped array's managed tensor. GIL: not needed; any thread."""
    if c.Py_IsInitialized() != 0 and c.is_finalizing() == 0:  # at shutdown a deleter made in Python may be gone
        state = c.PyGILState_Ensure()
        delete_managed(managed)
        c.PyGILState_Release(state)


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_both(data, size, pair):
    """NRT destructor: :data:`release_managed` and :data:`release_owner` of the two words at `pair`."""
    if c.Py_IsInitialized() != 0 and c.is_finalizing() == 0:  # at shutdown a deleter made in Python may be gone
        state = c.PyGILState_Ensure()
        delete_managed(load(pair))
        c.Py_DecRef(load(pair + 8))
        c.PyGILState_Release(state)
    c.PyMem_RawFree(pair)
