"""Kernels as functions of XLA: the handler that compiled functions of JAX call, without Python, the GIL, or a copy.

One handler makes the calls of all kernels. A call's *attributes*, constants in the compiled function, say which kernel, with
which key sequence (``dispatch.structs``), and where each value comes from. They hold no address, so a compiled function may be
kept on disk, or exported to another process.

Under ``jax.vmap`` buffers have more dimensions in front than the kernel's arrays: the handler calls the kernel for each item.

Source: ``xla/ffi/api/c_api.h``, API 0.1 to 0.3, which jaxlib installs (``jax.ffi.include_dir()``).
"""

import llvmlite.binding
from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.frame import MEMINFO_REFCOUNT, NRT_MemInfo_alloc, NRT_MemInfo_release
from ..dispatch.inline_cache import look_up
from ..dispatch.kept import KEEPS_NOTHING
from ..dispatch.pack import misaligned_bits
from ..dispatch.python_calls import drop_error, leave_failure, take_error
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import COMPLEX
from ..ground.native import (
    address_of,
    bits_of,
    call_int,
    call_word,
    cstring,
    external,
    float_of,
    global_address,
    load,
    native,
    offset_of,
    sizeof,
    stack,
    store,
    struct_at,
)
from ..ground.once import for_ever
from ..producers.python_side import python_side

CDEF = """
typedef enum {
    XLA_FFI_DataType_PRED = 1, XLA_FFI_DataType_S8 = 2, XLA_FFI_DataType_S16 = 3, XLA_FFI_DataType_S32 = 4,
    XLA_FFI_DataType_S64 = 5, XLA_FFI_DataType_U8 = 6, XLA_FFI_DataType_U16 = 7, XLA_FFI_DataType_U32 = 8,
    XLA_FFI_DataType_U64 = 9, XLA_FFI_DataType_F16 = 10, XLA_FFI_DataType_F32 = 11, XLA_FFI_DataType_F64 = 12,
    XLA_FFI_DataType_BF16 = 16, XLA_FFI_DataType_C64 = 15, XLA_FFI_DataType_C128 = 18, XLA_FFI_DataType_F8E5M2 = 19,
    XLA_FFI_DataType_F8E3M4 = 29, XLA_FFI_DataType_F8E4M3 = 28, XLA_FFI_DataType_F8E4M3FN = 20,
    XLA_FFI_DataType_F8E4M3B11FNUZ = 23, XLA_FFI_DataType_F8E5M2FNUZ = 24, XLA_FFI_DataType_F8E4M3FNUZ = 25,
    XLA_FFI_DataType_F8E8M0FNU = 33
} XLA_FFI_DataType;
typedef enum { XLA_FFI_AttrType_ARRAY = 1, XLA_FFI_AttrType_SCALAR = 3, XLA_FFI_AttrType_STRING = 4 } XLA_FFI_AttrType;
typedef enum { XLA_FFI_Error_Code_INTERNAL = 13 } XLA_FFI_Error_Code;

typedef struct { size_t struct_size; int type; void *next; } XLA_FFI_Extension_Base;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    int major_version, minor_version;
} XLA_FFI_Api_Version;
typedef struct { size_t struct_size; XLA_FFI_Api_Version api_version; uint32_t traits; } XLA_FFI_Metadata;
typedef struct { XLA_FFI_Extension_Base extension_base; XLA_FFI_Metadata *metadata; } XLA_FFI_Metadata_Extension;

typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    const char *message;
    XLA_FFI_Error_Code errc;
} XLA_FFI_Error_Create_Args;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    XLA_FFI_Api_Version api_version;
    void *internal_api;
    void *XLA_FFI_Error_Create;     /* and more functions */
} XLA_FFI_Api;

typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} XLA_FFI_Buffer;
typedef struct { const char *ptr; size_t len; } XLA_FFI_ByteSpan;
typedef struct { int dtype; void *value; } XLA_FFI_Scalar;
typedef struct { int dtype; size_t size; void *data; } XLA_FFI_Array;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    int64_t size;
    int *types;
    void **args;
} XLA_FFI_Args;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    int64_t size;
    int *types;
    void **rets;
} XLA_FFI_Rets;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    int64_t size;
    int *types;
    XLA_FFI_ByteSpan **names;
    void **attrs;
} XLA_FFI_Attrs;
typedef struct {
    size_t struct_size;
    XLA_FFI_Extension_Base *extension_start;
    const XLA_FFI_Api *api;
    void *ctx;
    int stage;
    XLA_FFI_Args args;
    XLA_FFI_Rets rets;
    XLA_FFI_Attrs attrs;            /* and more, from API 0.2 on */
} XLA_FFI_CallFrame;

/* The attributes of a call, which XLA sorts by name. */
typedef struct {
    const XLA_FFI_Scalar *id;       /* S64: of the kernel */
    const XLA_FFI_ByteSpan *kernel; /* its name, for a process that does not know it yet */
    const XLA_FFI_Array *keys;      /* S64: the call's key sequence */
    const XLA_FFI_Array *numbers;   /* S64: the rank of the first result without batches, then the words of constants */
    const XLA_FFI_Array *sources;   /* S64: for each key, where its value comes from: see `Source` */
} fx_xla_attributes;
typedef struct { int id, kernel, keys, numbers, sources; } fx_xla_types;

/* The kernels that compiled functions name. One per process. */
typedef struct {
    int64_t kernels;            /* (id, fx_context *)[1 + size]: open addressing, linear probing; the first: size - 1; or 0 */
    int64_t fail_by_exception, learn_kernel;    /* of `xla`, by its names */
} fx_xla;
"""

frame_at = struct_at("XLA_FFI_CallFrame")
api_at = struct_at("XLA_FFI_Api")
error_at = struct_at("XLA_FFI_Error_Create_Args")
extension_at = struct_at("XLA_FFI_Metadata_Extension")
metadata_at = struct_at("XLA_FFI_Metadata")
buffer_at = struct_at("XLA_FFI_Buffer")
array_at = struct_at("XLA_FFI_Array")
span_at = struct_at("XLA_FFI_ByteSpan")
scalar_at = struct_at("XLA_FFI_Scalar")
attributes_at = struct_at("fx_xla_attributes")
types_at = struct_at("fx_xla_types")
xla_at = struct_at("fx_xla")
memcpy = external("memcpy", types.intp, *[types.intp] * 3)

_ENUMS = {text: number for name in ("DataType", "AttrType", "Error_Code") for text, number in
          ffi.typeof(f"XLA_FFI_{name}").relements.items()}  # fmt: skip
DTYPES = {text.rpartition("_")[2]: number for text, number in _ENUMS.items() if "DataType" in text}
"""By XLA's name of an element type, its number in a buffer."""
S32, S64, F32, C64 = (DTYPES[name] for name in ("S32", "S64", "F32", "C64"))
ATTR_ARRAY, ATTR_SCALAR = _ENUMS["XLA_FFI_AttrType_ARRAY"], _ENUMS["XLA_FFI_AttrType_SCALAR"]
ATTR_STRING = _ENUMS["XLA_FFI_AttrType_STRING"]
INTERNAL = _ENUMS["XLA_FFI_Error_Code_INTERNAL"]
FRAME_BYTES, ATTRIBUTES = sizeof("XLA_FFI_CallFrame"), sizeof("fx_xla_attributes") // 8
ERROR_WORDS = sizeof("XLA_FFI_Error_Create_Args") // 8
ERROR_BYTES = offset_of("XLA_FFI_Error_Create_Args", "errc") + sizeof("XLA_FFI_Error_Code")

# Where a value comes from, in the lowest byte of its source. In the others: the dtype of its buffer; an index of the operands,
# the results or the numbers; for CHANGED the index of the result.
NOWHERE, NUMBER, OPERAND, RESULT, CHANGED = range(5)
DTYPE_AT, INDEX_AT, RESULT_AT = 8, 16, 40
INDEX_MASK = (1 << RESULT_AT - INDEX_AT) - 1
MAX_WORDS = 256
"""More words than that are allocated for each call."""
python_items = python_side("fastexchange.jax.xla_calls")

FITS, DIFFERS, KEEPS = 0, 1, 2


# ---- errors --------------------------------------------------------------------------------------------------------------


@native
def failed(frame, message):
    """A new error of XLA's with a text, which it copies: what the handler returns."""
    given = stack(ERROR_WORDS)
    error = error_at(given)
    error.struct_size, error.extension_start, error.message, error.errc = ERROR_BYTES, 0, message, INTERNAL
    return call_word(api_at(frame.api).XLA_FFI_Error_Create, (given,))


@native
def failed_with_exception(frame):
    """A new error of XLA's for the pending exception, which is cleared. Holds: the GIL."""
    error = stack(3)
    take_error(error)
    items = python_items()
    text = c.PyObject_CallOneArg(load(items), load(error + 8)) if items != 0 else 0
    message = c.PyUnicode_AsUTF8AndSize(text, 0) if text != 0 else 0
    if message == 0:
        leave_failure()
        message = cstring("an exception that cannot be shown")
    made = failed(frame, message)
    if text != 0:
        c.Py_DecRef(text)
    drop_error(error)
    return made


@native
def is_python_there():
    """Whether the GIL can be taken."""
    return c.Py_IsInitialized() != 0 and c.is_finalizing() == 0


@cfunction(types.intp, *[types.intp] * 4)
def fail_by_exception(frame, context, code, excinfo):
    """The error for the exception of a kernel that has returned `code`. GIL: taken."""
    if not is_python_there():
        return failed(frame_at(frame), cstring("a kernel has raised an exception, and Python has ended"))
    state = c.PyGILState_Ensure()
    call_word(structs.context_at(context).raise_error, (code, excinfo))
    made = failed_with_exception(frame_at(frame))
    c.PyGILState_Release(state)
    return made


# ---- kernels -------------------------------------------------------------------------------------------------------------


@native
def find_kernel(number):
    """The ``fx_context`` of the kernel with this id; 0: this process does not know it."""
    at = xla_at(global_address("fastexchange_xla")).kernels
    i = number & load(at)
    while load(at + 16 * i + 24) != 0:
        if load(at + 16 * i + 16) == number:
            return load(at + 16 * i + 24)
        i = i + 1 & load(at)
    return 0


@native
def find_overload(attributes):
    """The ``fx_context`` and the ``fx_overload`` that a call names; the latter is 0 if native code knows none."""
    keys = array_at(attributes.keys)
    context = find_kernel(load(scalar_at(attributes.id).value))
    at = look_up(structs.context_at(context), keys.data, types.intp(keys.size)) if context != 0 else 0
    return context, at if at != 0 and structs.overload_at(at).trampoline != 0 else 0


@cfunction(types.intp, types.intp, types.intp)
def learn_kernel(frame, attributes_address):
    """Let Python find the kernel that a call names, and compile it. Returns 0, or an error of XLA's. GIL: taken."""
    if not is_python_there():
        return failed(frame_at(frame), cstring("a kernel is not known yet, and Python has ended"))
    state = c.PyGILState_Ensure()
    made = 0
    items = python_items()
    number = c.PyLong_FromSsize_t(attributes_address)
    result = c.PyObject_CallOneArg(load(items + 8), number) if items != 0 and number != 0 else 0
    if result == 0:
        made = failed_with_exception(frame_at(frame))
    else:
        c.Py_DecRef(result)
    if number != 0:
        c.Py_DecRef(number)
    c.PyGILState_Release(state)
    return made


# ---- values --------------------------------------------------------------------------------------------------------------


@native
def number_at(address):
    """The number at an address, in the low bytes of a word. Reads no byte of another word: there may be none."""
    return load(address & -8) >> 8 * (address & 7)


@native
def store_number(word, key, address, dtype):
    """Store the words of a scalar, and convert it if the kernel has Python's number for it: 64 bits of the same kind."""
    size = key >> structs.DTYPE_SHIFT + 11 & 0xFF
    is_complex = key >> structs.DTYPE_SHIFT & 0xFF == COMPLEX
    value = number_at(address)
    if is_complex and dtype == C64:
        first, second = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
        if size == 16:
            first, second = bits_of(types.float64(float_of(first, 32))), bits_of(types.float64(float_of(second, 32)))
        store(word, first)
        store(word + 8, second)
    elif is_complex:
        store(word, value)
        store(word + 8, load(address + 8))
    elif dtype == F32 and size == 8:
        store(word, bits_of(types.float64(float_of(value, 32))))
    elif dtype == S32 and size == 8:
        store(word, types.intp(types.int32(value)))
    else:
        store(word, value if size == 8 else value & (1 << 8 * size) - 1)


@native
def buffer_of(frame, source):
    """The buffer of a value, which the kernel reads or writes."""
    kind, index = source & 0xFF, source >> INDEX_AT & INDEX_MASK
    if kind == OPERAND:
        return load(frame.args.args + 8 * index)
    return load(frame.rets.rets + 8 * (index if kind == RESULT else source >> RESULT_AT))


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
def write_words(frame, attributes, ranks, item, words, keeps):
    """Write the words of a call for one item of a batch, whose dimensions are the first `ranks`. Returns whether they fit.

    `keeps`: the kernel may keep arrays, so they get memory blocks of their own.
    """
    count = types.intp(array_at(attributes.keys).size)
    keys, sources = array_at(attributes.keys).data, array_at(attributes.sources).data
    numbers = array_at(attributes.numbers).data
    first = buffer_at(load(frame.rets.rets))
    outcome = FITS
    for i in range(count):
        key, source = load(keys + 8 * i), load(sources + 8 * i)
        size = structs.words_of(key)
        if source & 0xFF == NUMBER:
            for j in range(size):
                store(words + 8 * j, load(numbers + 8 * (source >> INDEX_AT) + 8 * j))
        elif source & 0xFF != NOWHERE:
            buffer = buffer_at(buffer_of(frame, source))
            ndim = key >> structs.NDIM_SHIFT & 0xFF if structs.is_array(key) else 0
            field = key >> structs.DTYPE_SHIFT & structs.FIELD_MASK
            if buffer.rank != ndim + ranks or types.intp(buffer.dtype) != source >> DTYPE_AT & 0xFF:
                return DIFFERS
            at = item_of(buffer, first, ranks, item)
            if structs.is_array(key):
                elements = 1
                for j in range(ndim):
                    d = ndim - 1 - j
                    extent = load(buffer.dims + 8 * (ranks + d))
                    store(words + 8 * (structs.ARRAY_HEAD_WORDS + d), extent)
                    store(words + 8 * (structs.ARRAY_HEAD_WORDS + ndim + d), elements * (field >> 11))
                    elements *= extent
                data = buffer.data + at * elements * (field >> 11)
                if data & misaligned_bits(field) != 0 and elements != 0:
                    return DIFFERS
                store(words, NRT_MemInfo_alloc(0) if keeps else 0)
                store(words + 8, 0)
                store(words + 16, elements)
                store(words + 24, field >> 11)
                store(words + 32, data)
            else:
                store_number(words, key, buffer.data + at * size_in_buffer(key, buffer), types.intp(buffer.dtype))
        words += 8 * size
    return outcome


@native
def size_in_buffer(key, buffer):
    """The bytes of one scalar in its buffer, which may have half of those that the kernel gets."""
    dtype = types.intp(buffer.dtype)
    if dtype in (F32, S32):
        return 4
    return 8 if dtype == C64 else key >> structs.DTYPE_SHIFT + 11 & 0xFF


@native
def release_blocks(attributes, words):
    """Release the memory blocks of the arrays of a call. Returns whether the kernel has kept one."""
    keys = array_at(attributes.keys)
    kept = False
    for i in range(types.intp(keys.size)):
        key = load(keys.data + 8 * i)
        if structs.is_array(key):
            kept = kept or load(load(words) + MEMINFO_REFCOUNT) != 1
            NRT_MemInfo_release(load(words))
        words += 8 * structs.words_of(key)
    return kept


@native
def copy_changed(frame, attributes):
    """Copy each operand that the kernel changes to the result that it is, unless XLA has given both the same memory."""
    sources = array_at(attributes.sources)
    for i in range(types.intp(sources.size)):
        source = load(sources.data + 8 * i)
        if source & 0xFF == CHANGED:
            result = buffer_at(buffer_of(frame, source))
            operand = buffer_at(load(frame.args.args + 8 * (source >> INDEX_AT & INDEX_MASK)))
            if operand.data != result.data:
                size = load(array_at(attributes.keys).data + 8 * i) >> structs.DTYPE_SHIFT + 11 & 0xFF
                if operand.rank != result.rank:
                    return False
                for d in range(result.rank):
                    if load(operand.dims + 8 * d) != load(result.dims + 8 * d):
                        return False
                    size *= load(result.dims + 8 * d)
                memcpy(result.data, operand.data, size)
    return True


# ---- the handler ---------------------------------------------------------------------------------------------------------


@native
def are_as_written(attributes):
    """Whether a call's attributes are those of ``xla_calls``: their number, and their types."""
    if attributes.size != ATTRIBUTES:
        return False
    given = types_at(attributes.types)
    are_arrays = given.keys == ATTR_ARRAY and given.numbers == ATTR_ARRAY and given.sources == ATTR_ARRAY
    return given.id == ATTR_SCALAR and given.kernel == ATTR_STRING and are_arrays


@native
def call_kernel(frame_address, attributes, context, overload, words):
    """Call the kernel, for each item of a batch. Returns 0, or an error of XLA's."""
    frame = frame_at(frame_address)
    first = buffer_at(load(frame.rets.rets))
    ranks = first.rank - load(array_at(attributes.numbers).data)
    items = 1
    for d in range(ranks):
        items *= load(first.dims + 8 * d)
    keeps = overload.keeps != KEEPS_NOTHING
    result, excinfo = stack(2), stack(1)
    if ranks < 0 or not copy_changed(frame, attributes):
        return failed(frame, cstring("fastexchange: the buffers of a call are not as they were when it was traced"))
    for item in range(items):
        if write_words(frame, attributes, ranks, item, words, keeps) != FITS:
            return failed(frame, cstring("fastexchange: the buffers of a call are not as they were when it was traced"))
        store(excinfo, 0)
        code = call_int(overload.trampoline, (overload.kernel, result, excinfo, words))
        is_kept = keeps and release_blocks(attributes, words)
        if code != 0 and code != -2:  # RETCODE_OK, RETCODE_NONE
            fail = xla_at(global_address("fastexchange_xla")).fail_by_exception
            return call_word(fail, (frame_address, context, code, load(excinfo)))
        if is_kept:
            return failed(frame, cstring("a kernel has kept an array, whose memory XLA frees: keep a copy of it"))
    return 0


@cfunction(types.intp, types.intp)
def call_by_xla(frame_address):
    """``XLA_FFI_Error *(*XLA_FFI_Handler)(XLA_FFI_CallFrame *)``. GIL: not needed; any thread."""
    frame = frame_at(frame_address)
    if frame.extension_start != 0:  # a query of what the handler is: XLA compares the version with its own
        metadata = metadata_at(extension_at(frame.extension_start).metadata)
        metadata.api_version.major_version, metadata.api_version.minor_version = 0, 1
        return 0
    if frame.struct_size < FRAME_BYTES or not are_as_written(frame.attrs) or frame.rets.size == 0:
        return failed(frame, cstring("fastexchange: XLA's call frame is not as expected"))
    attributes = attributes_at(frame.attrs.attrs)
    context, at = find_overload(attributes)
    if at == 0:
        error = call_word(xla_at(global_address("fastexchange_xla")).learn_kernel, (frame_address, frame.attrs.attrs))
        if error != 0:
            return error
        context, at = find_overload(attributes)
    if at == 0:
        return failed(frame, cstring("fastexchange: native code cannot call the kernel with these types"))
    keys = array_at(attributes.keys)
    needed = 0
    for i in range(types.intp(keys.size)):
        needed += structs.words_of(load(keys.data + 8 * i))
    words = stack(MAX_WORDS)
    if needed > MAX_WORDS:
        words = c.PyMem_RawMalloc(8 * needed)
        if words == 0:
            return failed(frame, cstring("out of memory"))
    made = call_kernel(frame_address, attributes, context, structs.overload_at(at), words)
    if needed > MAX_WORDS:
        c.PyMem_RawFree(words)
    return made


# ---- in Python -------------------------------------------------------------------------------------------------------------

_state = for_ever(ffi.new("fx_xla *"))
llvmlite.binding.add_symbol("fastexchange_xla", address_of(_state))
_contexts: dict[int, int] = {}


def know_kernel(number: int, context: int) -> None:
    """Let the handler find the kernel with this id: its ``fx_context``, which must live as long as the process.

    Holds: a lock of the caller's.
    """
    _contexts[number] = context
    mask = 7
    while mask < 2 * len(_contexts):
        mask = 2 * mask + 1
    table = for_ever(ffi.new("int64_t[]", 2 * (mask + 2)))  # a new one: handlers read the old one meanwhile
    table[0] = mask
    for known, address in _contexts.items():
        i = known & mask
        while table[2 * i + 3]:
            i = i + 1 & mask
        table[2 * i + 2], table[2 * i + 3] = known, address
    _state.kernels = address_of(table)


def handler() -> int:
    """The address of the handler."""
    if not _state.kernels:
        _state.fail_by_exception, _state.learn_kernel = fail_by_exception.address, learn_kernel.address
        know_kernel(0, 0)
    return call_by_xla.address
