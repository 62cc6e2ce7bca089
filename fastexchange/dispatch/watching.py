"""What a bound launch compares before it uses its memory: words that change when an argument's memory moves, or is shared.

An owning export keeps memory from being freed with its tensor. It does not keep a storage of PyTorch's where it is
(``share_memory_()``), nor its own (``torch._lazy_clone()`` makes it copy-on-write: who writes has to copy it first); and an
ndarray, which has no exports, frees its memory when it is given other (``__setstate__``). So each launch compares, in memory:

- of a PyTorch tensor the address in its storage, and the function that frees that, which is another one for memory that is
  copy-on-write;
- of an ndarray the address, the shape, because a smaller block of memory may lie where the larger one was, the dtype and the
  flags, which can be set to others in place, and the strides, of one that is not contiguous: else the flags tell;
- of an object of ctypes the address, which ``ctypes.resize`` changes, whoever shows its memory;
- for a device the size of a storage, too: on the CPU ``resize_()`` of a bound storage is an error.

A *watch list* is a count, and so many pairs of an address and the word that has to be there: an even number. They are
compared two by two, up to the first that differ: where an address points may depend on the words in pairs before these two.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE
from ..ground.dltensor import DL_TENSOR, dl_tensor_at
from ..ground.native import load, native, native_inline, offset_of, store
from ..producers.ndarray import C_CONTIGUOUS, F_CONTIGUOUS, ndarray_at
from . import structs
from .frame import ARRAY_BYTES, export_of_array
from .type_table import find

DATA, RANK, DIMENSIONS, DESCR, FLAGS = (offset_of("fx_ndarray", name) for name in ("data", "nd", "dimensions", "descr", "flags"))
RANK_OF_SHORT = 3  # from this rank on, a shape of a lower rank may have less room


@native_inline
def is_unmoved(watched):
    """Whether all words of a watch list are as they were."""
    at = watched + 8
    end = at + 16 * load(watched)
    while at != end:
        one, other = load(load(at)) ^ load(at + 8), load(load(at + 16)) ^ load(at + 24)  # no branch between them
        if one | other != 0:
            return False
        at += 32
    return True


@native
def note(watched, count, address):
    """Make the word that is at `address` now the pair number `count`, if there is a list to write to. Returns the next number."""
    if watched != 0:
        store(watched + 8 + 16 * count, address)
        store(watched + 16 + 16 * count, load(address))
    return count + 1


@native
def note_no_more(watched, count):
    """Repeat the last pair if the next one would not begin the next two. Returns the next number."""
    return note(watched, count, load(watched + 16 * count - 8) if watched != 0 else 0) if count & 1 else count


@native
def note_ndarray(watched, count, ob):
    """Watch an ndarray's memory from the pair number `count` on. Returns the next number."""
    rank = types.intp(ndarray_at(ob).nd)
    count = note(watched, count, ob + DATA)
    if rank >= RANK_OF_SHORT:
        count = note(watched, count, ob + RANK)
        count = note(watched, count, ob + DIMENSIONS)
        count = note_no_more(watched, count)
    elif rank > 0:
        count = note(watched, count, ob + DIMENSIONS)
    for i in range(rank):
        count = note(watched, count, ndarray_at(ob).dimensions + 8 * i)
    for i in range(0 if ndarray_at(ob).flags & (C_CONTIGUOUS | F_CONTIGUOUS) else rank):
        count = note(watched, count, ndarray_at(ob).strides + 8 * i)
    count = note(watched, count, ob + DESCR)
    return note(watched, count, ob + FLAGS & -8)  # a word of its own, or the upper half of one


@native
def note_storage(watched, count, guard, storage, has_sizes):
    """Watch a storage, the Python object of it, from the pair number `count` on. Returns the next number; -1 if it cannot be."""
    if storage == 0 or guard.storage_object == 0:
        return -1
    at = load(storage + guard.storage_object)
    count = note(watched, count, at + guard.storage_data)
    count = note(watched, count, at + guard.storage_deleter)
    if has_sizes:
        count = note(watched, count, at + guard.storage_size)
    return count


@native
def note_all(runtime, frame, watched, has_sizes):
    """Write the watch list of a frame to `watched`, unless that is 0. Returns how many pairs it has; -1 if words do not tell."""
    count = 0
    for i in range(frame.array_count):
        origin = structs.array_at(frame.arrays + ARRAY_BYTES * i).origin
        ob = origin & -4
        if origin & 3 == structs.ORIGIN_NDARRAY:
            count = note_ndarray(watched, count, ob)
        elif origin & 3 == structs.ORIGIN_EXPORT:
            entry = find(runtime, Py_TYPE(ob))
            guard = structs.entry_at(entry).guard if entry != 0 else 0
            if guard != 0:
                storage = structs.export_at(export_of_array(frame, i)).storage
                count = note_storage(watched, count, structs.guard_at(guard), storage, has_sizes)
            elif entry != 0 and structs.entry_at(entry).memory != 0:
                at = ob + structs.entry_at(entry).memory
                if load(at) != dl_tensor_at(structs.export_at(export_of_array(frame, i)).managed + DL_TENSOR).data:
                    return -1
                count = note(watched, count, at)
            if count < 0:
                return count
        count = note_no_more(watched, count)
    return count


@native
def watch(runtime, frame, has_sizes):
    """Give a frame, whose arguments have just been read, its watch list. Returns whether there is memory for it.

    Where words do not tell whether memory has moved, its pairs always differ: each is the list itself, and -1.
    """
    count = note_all(runtime, frame, 0, has_sizes)
    watched = c.PyMem_RawMalloc(8 + 16 * (count if count > 0 else 2))
    if watched == 0:
        return False
    frame.watched = watched
    store(watched, count)
    if count < 0:
        store(watched, 2)
        for i in range(2):
            store(watched + 8 + 16 * i, watched)
            store(watched + 16 + 16 * i, -1)
    else:
        note_all(runtime, frame, watched, has_sizes)
    return True
