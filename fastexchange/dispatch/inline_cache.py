"""Find the overload for a call: by its keys, or by its arguments' types in the inline cache.

An overload that is called often has an inline cache, a list of entries: each is a copy of the overload with the types of one
call's arguments and a fast entry for them. :func:`site_of` leads to an entry by a hash of the arguments.
"""

from numba import types

from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE
from ..ground.native import call_word, load, native, stack, store
from ..producers.ndarray import ndarray_at
from . import structs
from .frame import TUPLE_WORDS
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


AGREES, DIFFERS, IS_DEAD = 0, 1, 2


@native
def is_expected(overload, args):
    """Whether arguments have the types of a cache entry; IS_DEAD if one of these types has died."""
    pending = stack(TUPLE_WORDS)
    depth = 0
    items = args
    left = overload.expected_count
    for i in range(overload.expected_count):
        while left == 0:
            depth -= 1
            items = load(pending + 16 * depth)
            left = load(pending + 16 * depth + 8)
        ob = load(items)
        items += 8
        left -= 1
        expected = structs.expected_at(overload.expected + structs.EXPECTED_SIZE * i)
        if Py_TYPE(ob) != expected.type:
            return IS_DEAD if expected.type == 0 else DIFFERS
        if expected.items >= 0:
            if load(ob + OB_SIZE) != expected.items or depth == structs.MAX_TUPLE_DEPTH:
                return DIFFERS
            store(pending + 16 * depth, items)
            store(pending + 16 * depth + 8, left)
            depth += 1
            items = ob + OB_ITEM
            left = expected.items
    return AGREES


@native
def find_cached(context, first, args):
    """Find the entry in the inline cache of the overload `first` for these arguments' types, and make it the context's last.

    Returns: the entry; `first` if there is none; 0 if one should be made now (``KernelContext.add_cache_entry``).
    """
    if context.variadic != 0:
        return first
    at = structs.overload_at(first).cached
    has_room = structs.overload_at(first).cached_count < structs.MAX_CACHED
    while at != 0:
        overload = structs.overload_at(at)
        outcome = is_expected(overload, args)
        has_room |= outcome == IS_DEAD
        if outcome == AGREES:
            context.last = at
            return at
        at = overload.cached
    overload = structs.overload_at(first)
    if has_room:
        overload.uncached_calls += 1
        if overload.uncached_calls > structs.CALLS_PER_CACHE_ENTRY:
            overload.uncached_calls = structs.WANTS_CACHE_ENTRY
            return 0
    return first


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
