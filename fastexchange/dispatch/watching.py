"""Watch lists: the words that a bound launch compares before each call, to see that its arguments' memory has not changed.

An owning export keeps memory alive when its tensor is freed. It does not prevent that PyTorch moves a storage
(``share_memory_()``) or makes it copy-on-write (``torch._lazy_clone()``: a writer has to copy the memory first). An ndarray
has no exports: it frees its memory when it gets other memory (``__setstate__``). So each launch compares:

- of a PyTorch tensor, its storage's address, and the word with the byte that says whether PyTorch checks each access;
- of an ndarray, the address; the shape, because a smaller block may lie at the same address; the dtype and the flags, which can
  be set in place; and the strides, unless the flags say contiguous;
- of a ctypes object, the address, which ``ctypes.resize`` changes;
- for a CUDA launch, also a storage's size. On the CPU, ``resize_()`` of a bound storage is an error.

A *watch list* is a count, then this (even) number of pairs: an address, and the word expected there. A launch compares two pairs
at a time and stops at the first difference: whether an address is valid may depend on the pairs before these two.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE
from ..ground.dltensor import DL_TENSOR, dl_tensor_at
from ..ground.native import load, native, offset_of, store
from ..producers.ndarray import C_CONTIGUOUS, F_CONTIGUOUS, ndarray_at
from . import structs
from .frame import ARRAY_BYTES, export_of_array
from .type_table import find

DATA, RANK, DIMENSIONS, DESCR, FLAGS = (offset_of("fx_ndarray", name) for name in ("data", "nd", "dimensions", "descr", "flags"))
FIRST_COMPARED_RANK = 3  # from this rank on, compare the rank first: the shape of a lower rank may have less memory


@native
def is_unmoved(watched):
    """Whether all words of a watch list are unchanged."""
    at = watched + 8
    end = at + 16 * load(watched)
    while at != end:
        one, other = load(load(at)) ^ load(at + 8), load(load(at + 16)) ^ load(at + 24)  # no branch between the two loads
        if one | other != 0:
            return False
        at += 32
    return True


@native
def note(watched, count, address):
    """Write pair number `count`: `address`, and the word there now. With `watched` 0, only count. Returns the next number."""
    if watched != 0:
        store(watched + 8 + 16 * count, address)
        store(watched + 16 + 16 * count, load(address))
    return count + 1


@native
def make_even(watched, count):
    """Repeat the last pair if the number of pairs is odd. Returns the next number."""
    return note(watched, count, load(watched + 16 * count - 8) if watched != 0 else 0) if count & 1 else count


@native
def note_ndarray(watched, count, ob):
    """Watch an ndarray's memory from pair number `count` on. Returns the next number."""
    rank = types.intp(ndarray_at(ob).nd)
    count = note(watched, count, ob + DATA)
    if rank >= FIRST_COMPARED_RANK:
        count = note(watched, count, ob + RANK)
        count = note(watched, count, ob + DIMENSIONS)
        count = make_even(watched, count)
    elif rank > 0:
        count = note(watched, count, ob + DIMENSIONS)
    for i in range(rank):
        count = note(watched, count, ndarray_at(ob).dimensions + 8 * i)
    for i in range(0 if ndarray_at(ob).flags & (C_CONTIGUOUS | F_CONTIGUOUS) else rank):
        count = note(watched, count, ndarray_at(ob).strides + 8 * i)
    count = note(watched, count, ob + DESCR)
    return note(watched, count, ob + FLAGS & -8)  # the flags may be the upper half of their word


@native
def note_storage(watched, count, guard, storage, has_sizes):
    """Watch a storage object from pair number `count` on. Returns the next number; -1 if offsets are unknown."""
    if storage == 0 or guard.storage_object == 0:
        return -1
    at = load(storage + guard.storage_object)
    count = note(watched, count, at + guard.storage_data)
    count = note(watched, count, at + (guard.storage_checked & -8))
    if has_sizes:
        count = note(watched, count, at + guard.storage_size)
    return count


@native
def note_all(runtime, frame, watched, has_sizes):
    """Write a frame's watch list to `watched`, or only count its pairs if it is 0. Returns the count, or -1 as :func:`watch`."""
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
        count = make_even(watched, count)
    return count


@native
def watch(runtime, frame, has_sizes):
    """Make the watch list of a frame whose arguments have just been read. Returns False if memory is out.

    1. Count the pairs. 2. Allocate the list. 3. Write it. If no words tell whether some memory has moved, the list has two pairs
    that always differ: the list's own address, and -1.

    Owns: the frame owns the list.
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
