"""Calls for each item of a batch: a kernel gets its arrays in buffers that have dimensions in front of its own.

A *buffer* is compact and in C order. The results have all items of the batch; an operand may have one of them for all, with an
extent of 1. Without such dimensions there is one item. Another framework's compiled function calls kernels so (``jax.xla``), and
a transformation that maps them (``torch.mapped``).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import COMPLEX, FLOAT, INT
from ..ground.dtypes import field_to_dtype
from ..ground.native import (
    bits_of,
    call_int,
    call_word,
    cstring,
    external,
    float_of,
    global_address,
    load,
    native,
    sizeof,
    stack,
    store,
    struct_at,
)
from . import structs
from .frame import NRT_MemInfo_release
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
NRT_MemInfo_alloc_aligned = external("NRT_MemInfo_alloc_aligned", types.intp, types.intp, types.intp)
NRT_MemInfo_data = external("NRT_MemInfo_data", types.intp, types.intp)
ALIGNMENT = 64
memcpy = external("memcpy", types.intp, *[types.intp] * 3)

# Where a value comes from, in the lowest byte of its source. In the others: the dtype of its buffer; an index of the operands,
# the results or the numbers; a scalar's bytes in its buffer; for CHANGED the index of the result.
NOWHERE, NUMBER, OPERAND, RESULT, CHANGED = range(5)
DTYPE_AT, INDEX_AT, SIZE_AT, RESULT_AT = 8, 16, 32, 40
INDEX_MASK = 0xFFFF

RAN, RAISED, DIFFERS, NO_MEMORY = range(4)
"""How calls end: the kernel has raised; a buffer is not as its source and its key say, or the kernel returns something."""


@native
def words_needed(keys, count):
    """How many words a call has: those of its values, and one for each key."""
    needed = count
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
def size_of(key, source):
    """The bytes of an element in a value's buffer."""
    return key >> structs.DTYPE_SHIFT + 11 & (structs.FIELD_MASK >> 11) if structs.is_array(key) else source >> SIZE_AT & 0xFF


@native
def are_as_described(batch, ranks):
    """Whether all buffers are as their sources and keys say, and have the items of the batch, or one for all of them."""
    first = buffer_at(load(batch.results))
    for i in range(batch.key_count):
        key, source = load(batch.keys + 8 * i), load(batch.sources + 8 * i)
        if source & 0xFF != NUMBER and source & 0xFF != NOWHERE:
            buffer = buffer_at(buffer_of(batch, source))
            ndim = key >> structs.NDIM_SHIFT & 0xFF if structs.is_array(key) else 0
            if buffer.rank != ndim + ranks or types.intp(buffer.dtype) != source >> DTYPE_AT & 0xFF:
                return False
            count = 1
            for d in range(buffer.rank):
                count *= load(buffer.dims + 8 * d)
            for d in range(ranks):
                own = load(buffer.dims + 8 * d)
                if own != 1 and own != load(first.dims + 8 * d):
                    return False
            field = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
            if structs.is_array(key) and count != 0 and buffer.data & misaligned_bits(field) != 0:
                return False
            if source & 0xFF == CHANGED:
                operand = buffer_at(load(batch.operands + 8 * (source >> INDEX_AT & INDEX_MASK)))
                if operand.rank != buffer.rank:
                    return False
                for d in range(buffer.rank):
                    if load(operand.dims + 8 * d) != load(buffer.dims + 8 * d):
                        return False
    return True


@native
def copy_changed(batch):
    """Copy each operand that the kernel changes to the result that it is, unless both have the same memory."""
    for i in range(batch.key_count):
        source = load(batch.sources + 8 * i)
        if source & 0xFF == CHANGED:
            result = buffer_at(buffer_of(batch, source))
            operand = buffer_at(load(batch.operands + 8 * (source >> INDEX_AT & INDEX_MASK)))
            size = size_of(load(batch.keys + 8 * i), source)
            for d in range(result.rank):
                size *= load(result.dims + 8 * d)
            if operand.data != result.data:
                memcpy(result.data, operand.data, size)


@native
def write_words(batch, ranks, item, words):
    """Write the words of a call for one item of a batch, whose dimensions are the first `ranks`."""
    first = buffer_at(load(batch.results))
    for i in range(batch.key_count):
        key, source = load(batch.keys + 8 * i), load(batch.sources + 8 * i)
        size = structs.words_of(key)
        if source & 0xFF == NUMBER:
            for j in range(size):
                store(words + 8 * j, load(batch.numbers + 8 * (source >> INDEX_AT & INDEX_MASK) + 8 * j))
        elif source & 0xFF != NOWHERE:
            buffer = buffer_at(buffer_of(batch, source))
            ndim = buffer.rank - ranks
            itemsize = size_of(key, source)
            elements = 1
            for j in range(ndim):
                d = ndim - 1 - j
                extent = load(buffer.dims + 8 * (ranks + d))
                store(words + 8 * (structs.ARRAY_HEAD_WORDS + d), extent)
                store(words + 8 * (structs.ARRAY_HEAD_WORDS + ndim + d), elements * itemsize)
                elements *= extent
            data = buffer.data + item_of(buffer, first, ranks, item) * elements * itemsize
            if structs.is_array(key):
                store(words, 0)
                store(words + 8, 0)
                store(words + 16, elements)
                store(words + 24, itemsize)
                store(words + 32, data)
            else:
                store_number(words, key, data, itemsize)
        words += 8 * size


# ---- arrays that a kernel may keep -----------------------------------------------------------------------------------------


@native
def lend_copies(batch, words, addresses):
    """Let a call's arrays be copies in memory of Numba's, which may outlive the call. Returns False without memory for them.

    `addresses`: for each key a word, which gets the address of the array itself, or 0.
    """
    is_whole = True
    for i in range(batch.key_count):
        key = load(batch.keys + 8 * i)
        store(addresses + 8 * i, 0)
        if structs.is_array(key) and is_whole:
            size = load(words + 16) * load(words + 24)
            block = NRT_MemInfo_alloc_aligned(size, ALIGNMENT)
            is_whole = block != 0
            if is_whole:
                store(addresses + 8 * i, load(words + 32))
                memcpy(NRT_MemInfo_data(block), load(words + 32), size)
                store(words, block)
                store(words + 32, NRT_MemInfo_data(block))
        words += 8 * structs.words_of(key)
    return is_whole


@native
def take_copies(batch, words, addresses):
    """Copy results back from the copies that :func:`lend_copies` has made, and release these."""
    for i in range(batch.key_count):
        key, address = load(batch.keys + 8 * i), load(addresses + 8 * i)
        if address != 0:
            if load(batch.sources + 8 * i) & 0xFF >= RESULT:
                memcpy(address, load(words + 32), load(words + 16) * load(words + 24))
            NRT_MemInfo_release(load(words))
        words += 8 * structs.words_of(key)


# ---- calls ---------------------------------------------------------------------------------------------------------------


@native
def run_items(batch, overload, words, excinfo):
    """Call a kernel, which returns None, for each item of a batch, until it raises.

    `words`: room for the values of a call (:func:`words_needed`). `excinfo`: gets the one for ``fx_context.raise_error``.
    Returns: RAN, RAISED, DIFFERS or NO_MEMORY; with RAISED also the kernel's return code. GIL: not needed.
    """
    first = buffer_at(load(batch.results))
    ranks = first.rank - load(batch.numbers)
    result = stack(1)
    if overload.box != 0 or ranks < 0 or not are_as_described(batch, ranks):
        return DIFFERS, 0
    copy_changed(batch)
    items = 1
    for d in range(ranks):
        items *= load(first.dims + 8 * d)
    keeps = overload.keeps != KEEPS_NOTHING
    addresses = words + 8 * (words_needed(batch.keys, batch.key_count) - batch.key_count) if keeps else 0
    for item in range(items):
        write_words(batch, ranks, item, words)
        if keeps and not lend_copies(batch, words, addresses):
            take_copies(batch, words, addresses)
            return NO_MEMORY, 0
        store(excinfo, 0)
        code = call_int(overload.trampoline, (overload.kernel, result, excinfo, words))
        if keeps:
            take_copies(batch, words, addresses)
        if code != 0 and code != -2:  # RETCODE_OK, RETCODE_NONE
            return RAISED, code
    return RAN, 0


@cfunction(types.intp, types.intp, types.intp, types.intp)
def call_items(context_address, overload_address, batch_address):
    """Make the calls of an ``fx_batch``. Returns None, or 0 with the kernel's exception set."""
    context, batch = structs.context_at(context_address), batch_at(batch_address)
    excinfo = stack(1)
    words = c.PyMem_RawMalloc(8 + 8 * words_needed(batch.keys, batch.key_count))
    if words == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    outcome, code = run_items(batch, structs.overload_at(overload_address), words, excinfo)
    c.PyMem_RawFree(words)
    if outcome == NO_MEMORY:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    if outcome == RAN:
        context.calls += 1
        return c.new_none()
    if outcome == RAISED:
        call_word(context.raise_error, (code, load(excinfo)))
    else:
        c.PyErr_SetString(global_address("PyExc_RuntimeError"), cstring("the buffers of a batch are not as they are described"))
    return 0


# ---- in Python -----------------------------------------------------------------------------------------------------------


def sources_of(keys: tuple[int, ...], values: Sequence[tuple[int, Any]], rank: int, outputs: int) -> tuple[list[int], list[int]]:
    """The sources and the numbers of an ``fx_batch``.

    `values`: for each key where its value comes from, and the number itself, or its buffer's dtype and the bytes of an element.
    Operands and results come in their order, changed ones behind the `outputs`. `rank`: the first result's, without the batch.
    """
    numbers = [rank]
    sources = []
    operands = itertools.count()
    results, changed = itertools.count(), itertools.count(outputs)
    for key, (kind, what) in zip(keys, values, strict=True):
        source = kind
        if kind == NUMBER:
            source |= len(numbers) << INDEX_AT
            numbers += _words_of(what, key)
        elif kind != NOWHERE:
            dtype, size = what
            source |= dtype << DTYPE_AT | next(results if kind == RESULT else operands) << INDEX_AT | size << SIZE_AT
            source |= next(changed) << RESULT_AT if kind == CHANGED else 0
        sources.append(source)
    return sources, numbers


def _words_of(value, key: int) -> list[int]:
    """The words of a constant with this key."""
    data = np.asarray(value, field_to_dtype(key >> structs.DTYPE_SHIFT & structs.FIELD_MASK)).tobytes()
    parts = [data] if structs.words_of.py_func(key) == 1 else [data[: len(data) // 2], data[len(data) // 2 :]]
    return [int.from_bytes(part.ljust(8, b"\0"), "little", signed=True) for part in parts]
