"""Find the overload for a call: by its keys, or by its arguments' types in the inline cache.

An overload has an inline cache, a list of entries: each is a copy of the overload with ``rows`` for one call's argument types.
:func:`site_of` leads to an entry by a hash of the arguments.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE
from ..ground.dlpack import CPU
from ..ground.native import call_word, load, native, stack, store
from . import structs
from .frame import ARRAY_BYTES
from .owning_exports import TURNS, has_turn, is_exported
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


IN_ORDER = structs.C_ORDER | structs.ALIGNED | structs.WRITEABLE
PARENTS = structs.MAX_TUPLE_DEPTH
DIFFERS, AGREES, HAS_DIED = 0, 1, 2


@native
def first_value_of(entry_address):
    """The address of the row of a cache entry's first value. Before it there is room for the rows of exports, and one more."""
    return entry_address + structs.OVERLOAD_SIZE + structs.ROW_SIZE * (1 + TURNS * structs.overload_at(entry_address).row_count)


@native
def is_end(row):
    """Whether a row is the end of a tuple."""
    return row.key == 0


@native
def following(row, ob, items, parents):
    """Where the next row's value is, behind the value `ob` of a row. `parents`: the words in which tuples keep their place."""
    if not structs.is_tuple(row.key):
        return items + 8
    store(parents + 8 * row.level, items + 8)
    return ob + OB_ITEM


@native
def have_types_of(entry_address, args):
    """Whether arguments, and items of tuples, have the types of a cache entry."""
    parents = stack(PARENTS)
    items = args
    row_address = first_value_of(entry_address)
    for _ in range(structs.overload_at(entry_address).row_count):
        row = structs.row_at(row_address)
        row_address += structs.ROW_SIZE
        if is_end(row):
            items = load(parents + 8 * row.level)
            continue
        ob = load(items)
        if Py_TYPE(ob) != load(row.entry):
            return False
        if structs.is_tuple(row.key) and load(ob + OB_SIZE) != row.expected[0]:
            return False
        items = following(row, ob, items, parents)
    return True


@native
def compare(first, entry_address, entries):
    """Whether a call with these types has those of a cache entry, AGREES or DIFFERS; HAS_DIED if one of the entry's has died."""
    outcome = AGREES
    for i in range(first.row_count):
        wanted = structs.row_at(first.rows + structs.ROW_SIZE * i)
        if is_end(wanted):
            continue
        found = structs.row_at(first_value_of(entry_address) + structs.ROW_SIZE * i).entry
        if load(found) == 0:
            return HAS_DIED
        if found != load(entries + 8 * wanted.expected[0]):
            outcome = DIFFERS
    return outcome


@native
def place_of(key):
    """The place in ``row_readers`` for values with a key: an array's rank up to 4, or 0; 5 more unless it is in order."""
    if not structs.is_array(key):
        return 0
    rank = key >> structs.NDIM_SHIFT & 0xFF
    is_in_order = key >> structs.FLAGS_SHIFT & IN_ORDER == IN_ORDER
    return (rank if rank <= 4 else 0) + (0 if is_in_order else 5)


@native
def expect_value(context_address, row_address, ob):
    """Fill a row, whose type and key are known, for the value `ob`. Returns False if Python code has changed it since.

    The kind's ``fill_row`` puts into ``expected`` what the reader of its rows compares, or takes that reader out: then
    ``rows.read_value`` reads the value.
    """
    context = structs.context_at(context_address)
    row = structs.row_at(row_address)
    entry = structs.entry_at(row.entry)
    if Py_TYPE(ob) != entry.address:
        return False
    kind = structs.kind_of(context, entry)
    row.reader = entry.row_readers[place_of(row.key)]
    if context.device_type != CPU and structs.is_tensor(kind):  # row readers read tensors on the CPU only
        row.reader = 0
    elif kind.fill_row != 0 and call_word(kind.fill_row, (context_address, row_address, ob)) == 0:
        return False
    if row.reader == 0:
        row.reader = structs.runtime_at(context.runtime).read_value
        row.expected[0] = kind.reader
        row.expected[1] = 8 * structs.words_of(row.key)
        row.expected[2] = ARRAY_BYTES if structs.has_array(row.key) else 0
    return True


@native
def put_exports(context, first, values, exports):
    """Put the rows that make exports before those of the `values`. Returns the address of the first.

    They stand in the order in which ``take_exports.export_managed`` makes exports. It makes them, and there are no rows of them,
    if one is of an item of a tuple.
    """
    rows = values
    for left in range(TURNS):
        turn = TURNS - 1 - left
        index = exports
        for j in range(first.row_count):
            value = structs.row_at(values + structs.ROW_SIZE * (first.row_count - 1 - j))
            if is_end(value) or not is_exported(context, structs.entry_at(value.entry), 0):
                continue
            if value.level != 0:
                return values
            index -= 1
            if has_turn(context, structs.entry_at(value.entry), turn):
                rows -= structs.ROW_SIZE
                row = structs.row_at(rows)
                row.reader, row.entry = structs.runtime_at(context.runtime).export_row, value.entry
                row.position, row.expected[0], row.expected[1] = value.position, turn, index
    return rows


@native
def expect(context_address, runtime, first, entry_address, args, entries):
    """Fill a cache entry for calls with the types of these arguments. Returns False if Python code has changed one of them."""
    context = structs.context_at(context_address)
    parents = stack(PARENTS)
    values = first_value_of(entry_address)
    row_address = values
    items = args
    exports = 0
    for i in range(first.row_count):
        row = structs.row_at(row_address)
        for word in range(structs.ROW_SIZE // 8):
            store(row_address + 8 * word, load(first.rows + structs.ROW_SIZE * i + 8 * word))
        row_address += structs.ROW_SIZE
        if is_end(row):
            row.reader = runtime.leave_tuple
            items = load(parents + 8 * row.level)
            continue
        ob = load(items)
        row.entry = load(entries + 8 * row.expected[0])
        exports += is_exported(context, structs.entry_at(row.entry), 0)
        if not expect_value(context_address, row_address - structs.ROW_SIZE, ob):
            return False
        items = following(row, ob, items, parents)
    last = structs.row_at(row_address)
    is_direct = exports == 0 and context.device_type == CPU
    last.reader = context.launch_row
    if is_direct and context.release_gil == 0 and first.boxes_arrays == 0:
        last.reader = runtime.call_kernel
    last.expected[0], last.expected[1], last.expected[2] = first.trampoline, first.kernel, first.box
    last.position = -1
    rows = values
    if not is_direct:
        if context.device_type == CPU:
            rows = put_exports(context, first, values, exports)
        rows -= structs.ROW_SIZE
        begin = structs.row_at(rows)
        begin.reader, begin.position = context.begin_row, -1
        begin.expected[0], begin.expected[1] = exports, types.intp(rows + structs.ROW_SIZE == values)
    structs.overload_at(entry_address).rows = rows
    return True


@native
def new_entry(context, first_address):
    """Make a cache entry of an overload, a copy of it, and link it. Returns its address, or 0.

    Behind it are its rows: those for what comes before the reading, those of its values, and the kernel's call.
    """
    first = structs.overload_at(first_address)
    made = c.PyMem_RawMalloc(structs.OVERLOAD_SIZE + structs.ROW_SIZE * (2 + (1 + TURNS) * first.row_count))
    if made == 0:
        return 0
    for i in range(structs.OVERLOAD_SIZE // 8):
        store(made + 8 * i, load(first_address + 8 * i))
    entry = structs.overload_at(made)
    entry.enter = structs.runtime_at(context.runtime).call_cached
    first.cached = made
    first.cached_count += 1
    return made


@native
def kill(first, entry_address, nothing):
    """Let no call agree with a cache entry. `nothing`: an ``fx_entry`` without a type."""
    for i in range(first.row_count):
        structs.row_at(first_value_of(entry_address) + structs.ROW_SIZE * i).entry = nothing


@native
def find_cached(context_address, runtime, first_address, args, entries):
    """Find the entry in the inline cache of an overload for a call, or make it. It becomes the last one.

    `entries`: the ``fx_entry`` of each key. Returns: the overload itself if there is none, and no room for one, or if Python code
    has changed an argument since it was read. A call in progress may have the entry of types that have died: it has begun with
    the same keys, and compares types and keys after its last line of Python code.
    """
    context = structs.context_at(context_address)
    first = structs.overload_at(first_address)
    if first.row_count < 0:
        return first_address
    at = first.cached
    chosen = 0
    while at != 0:
        outcome = compare(first, at, entries)
        if outcome == AGREES:
            context.last = at
            return at
        if outcome == HAS_DIED:
            chosen = at
        at = structs.overload_at(at).cached
    if chosen == 0 and first.cached_count < structs.MAX_CACHED:
        chosen = new_entry(context, first_address)
    if chosen == 0:
        return first_address
    if not expect(context_address, runtime, first, chosen, args, entries):
        kill(first, chosen, runtime.nothing)
        return first_address
    context.last = chosen
    return chosen


@cfunction(types.void, types.intp, types.intp)
def kill_entries(first, nothing):
    """:func:`kill` all cache entries of the overload `first`: its next calls fill them anew."""
    at = structs.overload_at(first).cached
    while at != 0:
        kill(structs.overload_at(first), at, nothing)
        at = structs.overload_at(at).cached


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
            mark = structs.kind_at(structs.entry_at(entry_address).kind).mark
            if mark != 0:
                word ^= call_word(mark, (entry_address, ob))
        hash_ = (hash_ ^ word) * GOLDEN
    return context.sites + 8 * (hash_ >> 40 & (structs.SITES - 1))


@native
def call_entry(context_address, overload_address, callable_, args, nargs):
    """Make a call with positional arguments by the cache entry of an overload, which leaves others to ``vectorcall_any``."""
    enter = structs.overload_at(overload_address).enter
    return call_word(enter, (callable_, args, nargs, 0, context_address, overload_address))
