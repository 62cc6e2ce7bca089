"""Find the overload for a call: by its keys, or by its arguments' types in the inline cache.

An overload has an inline cache, a list of entries: each is a copy of the overload with the types of one call's arguments, and
``cached_call`` makes such calls by it. :func:`site_of` leads to an entry by a hash of the arguments.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE
from ..ground.dlpack import CPU
from ..ground.native import call_word, load, native, stack, store
from ..producers.ndarray import ndarray_at
from . import structs
from .pack import misaligned_bits
from .torch_guard import guard_of, number_in_memory
from .type_table import GOLDEN, find


@native
def look_up(context, keys, count):
    """The address of the first overload with these keys; 0 if there is none."""
    hash_ = 0
    for i in range(count):
        hash_ = (hash_ << 5) ^ (hash_ >> 59) ^ load(keys + 8 * i)
    buckets = context.buckets
    at = load(buckets + 8 + 8 * ((hash_ * GOLDEN >> 40) & load(buckets)))
    while at != 0:
        overload = structs.overload_at(at)
        if overload.hash == hash_ and overload.key_count == count:
            i = 0
            while i < count and load(keys + 8 * i) == load(overload.keys + 8 * i):
                i += 1
            if i == count:
                return at
        at = overload.next
    return 0


MAX_LEVELS = structs.MAX_TUPLE_DEPTH + 1


@native
def item_of(levels, row, args):
    """The value of an ``fx_row``. `levels`: where the items of the tuples begin that the value is in."""
    return load((load(levels + 8 * row.depth) if row.depth != 0 else args) + row.source)


@native
def enter(levels, row, ob):
    """Note where the items of a tuple begin. Returns whether it has as many as its row says; any other value has no items."""
    if row.items < 0:
        return True
    store(levels + 8 * (row.depth + 1), ob + OB_ITEM)
    return load(ob + OB_SIZE) == row.items


DIFFERS, AGREES, HAS_DIED = 0, 1, 2


@native
def is_expected(overload, args):
    """Whether arguments with the keys of a cache entry have its types, too; HAS_DIED if one of these types has died."""
    levels = stack(MAX_LEVELS)
    for i in range(overload.row_count):
        row = structs.row_at(overload.rows + structs.ROW_SIZE * i)
        ob = item_of(levels, row, args)
        expected = structs.entry_at(load(overload.types + 64 * i)).address
        if Py_TYPE(ob) != expected:
            return HAS_DIED if expected == 0 else DIFFERS
        enter(levels, row, ob)
    return AGREES


@native
def expect(context, runtime, overload, args):
    """Make the types of arguments those of a cache entry, which has their keys."""
    levels = stack(MAX_LEVELS)
    overload.has_exports = 0
    for i in range(overload.row_count):
        row = structs.row_at(overload.rows + structs.ROW_SIZE * i)
        ob = item_of(levels, row, args)
        at = find(runtime, Py_TYPE(ob))
        entry = structs.entry_at(at)
        record = structs.record_at(overload.types + 64 * i)
        record.entry, record.key, record.size, record.array = at, row.key, row.size, row.array
        record.reader = entry.ranked
        field = row.key >> 8 & 0xFFFFFF
        if entry.kind == structs.KIND_NDARRAY:
            record.a, record.b, record.c = ndarray_at(ob).descr, row.key >> 40 & structs.KEY_FLAGS, field >> 11
        elif entry.kind == structs.KIND_EXCHANGE:
            record.a, record.c = guard_of(context, entry), misaligned_bits(field)
            record.b = number_in_memory(structs.guard_at(guard_of(context, entry)), ob)
        kind = entry.kind if context.device_type == CPU else entry.device_kind
        if kind == structs.KIND_MANAGED or (kind == structs.KIND_EXCHANGE and context.needs_owning_exports != 0):
            overload.has_exports = 1
        enter(levels, row, ob)


@native
def new_entry(context, first):
    """Make a cache entry of the overload `first`, a copy of it with room for types, and link it. Returns its address, or 0."""
    overload = structs.overload_at(first)
    size = structs.OVERLOAD_SIZE + 64 * overload.row_count
    made = c.PyMem_RawMalloc(size)
    if made == 0:
        return 0
    for i in range(structs.OVERLOAD_SIZE // 8):
        store(made + 8 * i, load(first + 8 * i))
    entry = structs.overload_at(made)
    entry.types = made + structs.OVERLOAD_SIZE
    entry.fast_entry = context.call_cached
    for i in range(entry.row_count):
        store(entry.types + 64 * i, 0)
    overload.cached = made
    overload.cached_count += 1
    return made


@native
def find_cached(context, runtime, first, args):
    """Find the entry in the inline cache of the overload `first` for these arguments' types, or make it. It becomes the last one.

    Returns: `first` if there is none, and no room for one. A call in progress may have the entry of types that have died: it has
    begun with the same keys, and compares types and keys after its last line of Python code.
    """
    if structs.overload_at(first).row_count < 0:
        return first
    at = structs.overload_at(first).cached
    dead = 0
    while at != 0:
        outcome = is_expected(structs.overload_at(at), args)
        if outcome == AGREES:
            context.last = at
            return at
        if outcome == HAS_DIED:
            dead = at
        at = structs.overload_at(at).cached
    if dead == 0 and structs.overload_at(first).cached_count < structs.MAX_CACHED:
        dead = new_entry(context, first)
    if dead == 0:
        return first
    expect(context, runtime, structs.overload_at(dead), args)
    context.last = dead
    return dead


@cfunction(types.void, types.intp)
def free_entries(first):
    """Free the cache entries of the overload `first`, whose kernel has died."""
    at = structs.overload_at(first).cached
    structs.overload_at(first).cached = 0
    while at != 0:
        following = structs.overload_at(at).cached
        c.PyMem_RawFree(at)
        at = following


@native
def site_of(context, runtime, args, nargs):
    """The address in ``fx_context.sites`` for arguments of these types, dtypes, ranks and flags, as far as is quick."""
    hash_ = 0
    known_type = 0
    entry_address = 0
    for i in range(nargs):
        ob = load(args + 8 * i)
        word = Py_TYPE(ob)
        if word != known_type:
            known_type = word
            entry_address = find(runtime, word)
        if entry_address != 0:
            entry = structs.entry_at(entry_address)
            if entry.kind == structs.KIND_NDARRAY:
                array = ndarray_at(ob)
                word ^= array.descr ^ types.intp(array.nd) << 32 ^ (types.intp(array.flags) & structs.KEY_FLAGS) << 40
            elif entry.kind == structs.KIND_EXCHANGE and entry.guard != 0:
                guard = structs.guard_at(entry.guard)
                implementation = load(ob + guard.object)
                word ^= (load(implementation + guard.element_type) & 63) << 32
                word ^= (load(implementation + guard.ndim) if guard.ndim != 0 else 0) << 40
        hash_ = (hash_ ^ word) * GOLDEN
    return context.sites + 8 * (hash_ >> 40 & (structs.SITES - 1))


@native
def call_entry(context_address, overload_address, callable_, args, nargs):
    """Make a call with positional arguments by the fast entry of an overload, which leaves others to ``vectorcall_any``."""
    fast_entry = structs.overload_at(overload_address).fast_entry
    return call_word(fast_entry, (callable_, args, nargs, 0, context_address, overload_address))
