"""Readers of cached calls."""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import Py_TYPE
from ..ground.native import as_words, call_word, global_address, load, native, put, stack, store
from ..producers.ndarray import ndarray_at
from . import structs
from .pack import pack_contiguous, pack_ndarray
from .torch_guard import is_in_memory, is_odd_by, is_on_cpu, is_short_by, number_in_memory, rank_in_memory, view_in_memory


def reader(function):
    return cfunction(types.intp, *[types.intp] * 5)(function)


@native
def note(array_address, origin, word):
    array = structs.array_at(array_address)
    array.origin = origin
    store(word, array.meminfo)


@reader
def read_any(ob, record_address, word, array, frame):
    record = structs.record_at(record_address)
    entry = structs.entry_at(record.entry)
    if Py_TYPE(ob) != entry.address:
        return 0
    key = call_word(entry.reader, (ob, record.entry, frame, word, array))
    return types.intp(key == record.key) if key > 0 else key


@reader
def read_float(ob, record_address, word, array, frame):
    store(word, load(ob + c.OB_FVAL))
    return types.intp(Py_TYPE(ob) == load(load(record_address)))


@reader
def read_bool(ob, record_address, word, array, frame):
    store(word, types.intp(ob == global_address("_Py_TrueStruct")))
    return types.intp(Py_TYPE(ob) == load(load(record_address)))


@reader
def read_int(ob, record_address, word, array, frame):
    if Py_TYPE(ob) != load(load(record_address)):
        return 0
    overflow = stack(1)
    value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
    store(word, value)
    return types.intp(value != -1 or load(overflow) & 0xFFFFFFFF == 0)


@native
def fast_ndarray(ob, record_address, word, array_address, rank):
    record = structs.record_at(record_address)
    if Py_TYPE(ob) != load(record.entry):
        return 0
    array = ndarray_at(ob)
    if array.descr != record.a or types.intp(array.nd) != rank or types.intp(array.flags) & structs.KEY_FLAGS != record.b:
        return 0
    note(array_address, ob + structs.ORIGIN_NDARRAY, word)
    pack_ndarray(ob, rank, record.c, as_words(word))
    return 1


@reader
def read_ndarray_1(ob, record, word, array, frame):
    """An ndarray of 1 dimension."""
    return fast_ndarray(ob, record, word, array, 1)


@native
def fast_in_memory(ob, record_address, word, array, rank):
    record = structs.record_at(record_address)
    if Py_TYPE(ob) != load(record.entry):
        return 0
    guard = record.a
    offsets = structs.guard_at(guard)
    if is_odd_by(offsets, guard, ob) or not is_in_memory(offsets, ob) or not is_on_cpu(offsets, ob):
        return 0
    if number_in_memory(offsets, ob) != record.b or rank_in_memory(offsets, ob) != rank:
        return 0
    itemsize = record.key >> 19 & 0xFF
    words = as_words(word)
    view = view_in_memory(offsets, ob, rank, itemsize)
    note(array, ob + structs.ORIGIN_VIEW, word)
    if not pack_contiguous(view, True, rank, itemsize, record.c, words):
        return 0
    if words[2] == 0:
        put(words, 4, 0)
    elif is_short_by(offsets, ob, words[4] + words[2] * words[3]):
        return 0
    return 1


@reader
def read_exchange_1(ob, record, word, array, frame):
    """A tensor of 1."""
    return fast_in_memory(ob, record, word, array, 1)
