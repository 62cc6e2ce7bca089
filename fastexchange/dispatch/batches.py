"""Calls for each item of a batch: a kernel gets its arrays in buffers that have dimensions in front of its own.

A *buffer* is compact and in C order. The results have all items of the batch; an operand may have one of them for all, with an
extent of 1. Without such dimensions there is one item. Another framework's compiled function calls kernels so (``jax.xla``), and
a transformation that maps them (``torch.batches``).
"""

from numba import types

from ..ground.dlpack import COMPLEX, FLOAT, INT
from ..ground.native import bits_of, call_int, external, float_of, load, native, sizeof, stack, store, struct_at
from . import structs
from .frame import MEMINFO_REFCOUNT, NRT_MemInfo_alloc, NRT_MemInfo_release
from .kept import KEEPS_NOTHING
from .pack import misaligned_bits

CDEF = """
/* An array in C order. The layout is that of a buffer of XLA's foreign function interface. */
typedef struct {
    int64_t struct_size;
    int64_t extension_start;
    int32_t dtype;              /* a number of the framework's */
    int64_t data;
    int64_t rank;
    int64_t dims;               /* int64_t[rank] */
} fx_array_buffer;

/* A call, or those for the items of a batch. */
typedef struct {
    int64_t operands, results;  /* fx_array_buffer *[] */
    int64_t key_count;
    int64_t keys;               /* int64_t[key_count]: the key sequence of a call */
    int64_t sources;            /* int64_t[key_count]: where each value comes from */
    int64_t numbers;            /* int64_t[]: the rank of the first result without the batch, then the words of constants */
} fx_batch;
"""

buffer_at = struct_at("fx_array_buffer")
batch_at = struct_at("fx_batch")
BATCH_WORDS = sizeof("fx_batch") // 8
memcpy = external("memcpy", types.intp, *[types.intp] * 3)

# Where a value comes from, in the lowest byte of its source. In the others: the dtype of its buffer; an index of the operands,
# the results or the numbers; a scalar's bytes in its buffer; for CHANGED the index of the result.
NOWHERE, NUMBER, OPERAND, RESULT, CHANGED = range(5)
DTYPE_AT, INDEX_AT, SIZE_AT, RESULT_AT = 8, 16, 32, 40
INDEX_MASK = 0xFFFF

RAN, RAISED, DIFFERS, KEPT = range(4)
"""How calls end: the kernel has raised; a buffer is not as its source and its key say; the kernel has kept an array."""


@native
def words_needed(keys, count):
    """How many words the values of a call have."""
    needed = 0
    for i in range(count):
        needed += structs.words_of(load(keys + 8 * i))
    return needed


# ---- values --------------------------------------------------------------------------------------------------------------


@native
def number_at(address):
    """The number at an address, in the low bytes of a word. Reads no byte of another word: there may be none."""
    return load(address & -8) >> 8 * (address & 7)


@native
def store_number(word, key, address, size):
    """Store the words of a scalar of `size` bytes. One that the key says is of 64 bits, or twice 64, is converted."""
    code = key >> structs.DTYPE_SHIFT & 0xFF
    wanted = key >> structs.DTYPE_SHIFT + 11 & 0xFF
    value = number_at(address)
    if code == COMPLEX:
        first, second = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
        if size == 16:
            first, second = value, load(address + 8)
        elif wanted == 16:
            first, second = bits_of(types.float64(float_of(first, 32))), bits_of(types.float64(float_of(second, 32)))
        store(word, first)
        store(word + 8, second)
    elif code == FLOAT and size == 4 and wanted == 8:
        store(word, bits_of(types.float64(float_of(value, 32))))
    elif code == INT and size == 4 and wanted == 8:
        store(word, types.intp(types.int32(value)))
    else:
        store(word, value if size == 8 else value & (1 << 8 * size) - 1)


@native
def buffer_of(batch, source):
    """The address of a value's buffer, which the kernel reads or writes."""
    kind, index = source & 0xFF, source >> INDEX_AT & INDEX_MASK
    if kind == OPERAND:
        return load(batch.operands + 8 * index)
    return load(batch.results + 8 * (index if kind == RESULT else source >> RESULT_AT))


@native
def item_of(buffer, first, ranks, item):
    """The number of the item of a batch in a buffer, which may have fewer of them. `first`: the first result's buffer."""
    found = 0
    step = 1
    for j in range(ranks):
        d = ranks - 1 - j
        whole = load(first.dims + 8 * d)
        own = load(buffer.dims + 8 * d)
        if own != 1:
            found += item % whole * step
        item //= whole
        step *= own
    return found


@native
def fits_batch(buffer, first, ranks):
    """Whether a buffer has the items of a batch, or one for all, in each of its dimensions."""
    fits = True
    for d in range(ranks):
        own = load(buffer.dims + 8 * d)
        fits = fits and (own == 1 or own == load(first.dims + 8 * d))
    return fits


@native
def write_words(batch, ranks, item, words, keeps):
    """Write the words of a call for one item of a batch, whose dimensions are the first `ranks`. Returns whether they fit.

    `keeps`: the kernel may keep arrays, so they get memory blocks of their own.
    """
    first = buffer_at(load(batch.results))
    for i in range(batch.key_count):
        key, source = load(batch.keys + 8 * i), load(batch.sources + 8 * i)
        size = structs.words_of(key)
        if source & 0xFF == NUMBER:
            for j in range(size):
                store(words + 8 * j, load(batch.numbers + 8 * (source >> INDEX_AT & INDEX_MASK) + 8 * j))
        elif source & 0xFF != NOWHERE:
            buffer = buffer_at(buffer_of(batch, source))
            ndim = key >> structs.NDIM_SHIFT & 0xFF if structs.is_array(key) else 0
            itemsize = key >> structs.DTYPE_SHIFT + 11 & (structs.FIELD_MASK >> 11)
            if not structs.is_array(key):
                itemsize = source >> SIZE_AT & 0xFF
            if buffer.rank != ndim + ranks or types.intp(buffer.dtype) != source >> DTYPE_AT & 0xFF:
                return False
            if item == 0 and not fits_batch(buffer, first, ranks):
                return False
            elements = 1
            for j in range(ndim):
                d = ndim - 1 - j
                extent = load(buffer.dims + 8 * (ranks + d))
                store(words + 8 * (structs.ARRAY_HEAD_WORDS + d), extent)
                store(words + 8 * (structs.ARRAY_HEAD_WORDS + ndim + d), elements * itemsize)
                elements *= extent
            data = buffer.data + item_of(buffer, first, ranks, item) * elements * itemsize
            if structs.is_array(key):
                if data & misaligned_bits(key >> structs.DTYPE_SHIFT & structs.FIELD_MASK) != 0 and elements != 0:
                    return False
                store(words, NRT_MemInfo_alloc(0) if keeps else 0)
                store(words + 8, 0)
                store(words + 16, elements)
                store(words + 24, itemsize)
                store(words + 32, data)
            else:
                store_number(words, key, data, itemsize)
        words += 8 * size
    return True


@native
def release_blocks(batch, words):
    """Release the memory blocks of the arrays of a call. Returns whether the kernel has kept one."""
    kept = False
    for i in range(batch.key_count):
        key = load(batch.keys + 8 * i)
        if structs.is_array(key):
            kept = kept or load(load(words) + MEMINFO_REFCOUNT) != 1
            NRT_MemInfo_release(load(words))
        words += 8 * structs.words_of(key)
    return kept


@native
def copy_changed(batch):
    """Copy each operand that the kernel changes to the result that it is, unless both have the same memory."""
    for i in range(batch.key_count):
        source = load(batch.sources + 8 * i)
        if source & 0xFF == CHANGED:
            result = buffer_at(buffer_of(batch, source))
            operand = buffer_at(load(batch.operands + 8 * (source >> INDEX_AT & INDEX_MASK)))
            if operand.data != result.data:
                size = load(batch.keys + 8 * i) >> structs.DTYPE_SHIFT + 11 & (structs.FIELD_MASK >> 11)
                if operand.rank != result.rank:
                    return False
                for d in range(result.rank):
                    if load(operand.dims + 8 * d) != load(result.dims + 8 * d):
                        return False
                    size *= load(result.dims + 8 * d)
                memcpy(result.data, operand.data, size)
    return True


# ---- calls ---------------------------------------------------------------------------------------------------------------


@native
def run_items(batch, overload, words, excinfo):
    """Call a kernel for each item of a batch, until it raises. Returns RAN, RAISED, DIFFERS or KEPT; and its return code.

    `words`: room for the values of a call. `excinfo`: gets the exception's, for ``fx_context.raise_error``. GIL: not needed.
    """
    first = buffer_at(load(batch.results))
    ranks = first.rank - load(batch.numbers)
    keeps = overload.keeps != KEEPS_NOTHING
    result = stack(2)
    if ranks < 0 or not copy_changed(batch):
        return DIFFERS, 0
    items = 1
    for d in range(ranks):
        items *= load(first.dims + 8 * d)
    for item in range(items):
        if not write_words(batch, ranks, item, words, keeps):
            return DIFFERS, 0
        store(excinfo, 0)
        code = call_int(overload.trampoline, (overload.kernel, result, excinfo, words))
        is_kept = keeps and release_blocks(batch, words)
        if code != 0 and code != -2:  # RETCODE_OK, RETCODE_NONE
            return RAISED, code
        if is_kept:
            return KEPT, 0
    return RAN, 0
