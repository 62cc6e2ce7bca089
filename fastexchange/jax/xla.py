"""Kernels as functions of XLA: the handler that compiled functions of JAX call, without Python, the GIL, or a copy.

One handler makes the calls of all kernels. A call's *attributes*, constants in the compiled function, say which kernel, with
which key sequence (``dispatch.structs``), and where each value comes from. They hold no address, so a compiled function may be
kept on disk, or exported to another process.

Under ``jax.vmap`` buffers have more dimensions in front than the kernel's arrays (``dispatch.batches``).

Source: ``xla/ffi/api/c_api.h``, API 0.1 to 0.3, which jaxlib installs (``jax.ffi.include_dir()``).
"""

import os
import time

import llvmlite.binding
from numba import types

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.batches import BATCH_WORDS, NO_MEMORY, RAISED, RAN, batch_at, run_items, words_needed
from ..dispatch.inline_cache import look_up
from ..dispatch.kept import KEEPS_NOTHING
from ..dispatch.python_calls import drop_error, leave_failure, take_error
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.native import (
    address_of,
    atomic_add,
    call_word,
    cstring,
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
from .ending import end_before_jax

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
typedef enum { XLA_FFI_Extension_Metadata = 1 } XLA_FFI_Extension_Type;
typedef enum { XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE = 1 } XLA_FFI_Handler_TraitsBits;

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
    void *XLA_FFI_Error_Create, *XLA_FFI_Error_GetMessage, *XLA_FFI_Error_Destroy, *XLA_FFI_Handler_Register;
    void *XLA_FFI_Stream_Get;       /* and more functions */
} XLA_FFI_Api;
typedef struct { size_t struct_size; XLA_FFI_Extension_Base *extension_start; void *ctx; void *stream; } XLA_FFI_Stream_Get_Args;

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
    const XLA_FFI_Array *sources;   /* S64: for each key, where its value comes from */
} fx_xla_attributes;
typedef struct { int id, kernel, keys, numbers, sources; } fx_xla_types;

/* The kernels that compiled functions name. One per process. */
typedef struct {
    int64_t kernels;            /* (id, fx_context *)[1 + size]: open addressing, linear probing; the first: size - 1; or 0 */
    int64_t fail_by_exception, learn_kernel;    /* of `xla`, by its names */
    int64_t stream;             /* the CUstream that `xla_cuda` has been told last */
    int64_t fail_by_driver;     /* of `xla_cuda`; 0: there is no kernel for CUDA */
    int64_t in_python;          /* how many handlers run Python, or wait for the GIL */
    int64_t is_ending;          /* whether the program is ending: no handler takes the GIL from now on */
} fx_xla;
"""

frame_at = struct_at("XLA_FFI_CallFrame")
api_at = struct_at("XLA_FFI_Api")
error_at = struct_at("XLA_FFI_Error_Create_Args")
extension_at = struct_at("XLA_FFI_Metadata_Extension")
metadata_at = struct_at("XLA_FFI_Metadata")
stream_get_at = struct_at("XLA_FFI_Stream_Get_Args")
array_at = struct_at("XLA_FFI_Array")
span_at = struct_at("XLA_FFI_ByteSpan")
scalar_at = struct_at("XLA_FFI_Scalar")
attributes_at = struct_at("fx_xla_attributes")
types_at = struct_at("fx_xla_types")
xla_at = struct_at("fx_xla")

_NAMES = "DataType", "AttrType", "Error_Code", "Extension_Type", "Handler_TraitsBits"
_ENUMS = {text: number for name in _NAMES for text, number in ffi.typeof(f"XLA_FFI_{name}").relements.items()}
DTYPES = {text.rpartition("_")[2]: number for text, number in _ENUMS.items() if "DataType" in text}
"""By XLA's name of an element type, its number in a buffer."""
ATTR_ARRAY, ATTR_SCALAR = _ENUMS["XLA_FFI_AttrType_ARRAY"], _ENUMS["XLA_FFI_AttrType_SCALAR"]
ATTR_STRING = _ENUMS["XLA_FFI_AttrType_STRING"]
INTERNAL = _ENUMS["XLA_FFI_Error_Code_INTERNAL"]
METADATA = _ENUMS["XLA_FFI_Extension_Metadata"]
MAY_BE_CAPTURED = _ENUMS["XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE"]
FRAME_BYTES, ATTRIBUTES = sizeof("XLA_FFI_CallFrame"), sizeof("fx_xla_attributes") // 8
ERROR_WORDS = sizeof("XLA_FFI_Error_Create_Args") // 8
ERROR_BYTES = offset_of("XLA_FFI_Error_Create_Args", "errc") + sizeof("XLA_FFI_Error_Code")

IN_PYTHON = offset_of("fx_xla", "in_python")
ENDED = -1
"""The outcome of a call that has not been made, because the program ends."""

MAX_WORDS = 256
"""More words than that are allocated for each call."""
python_items = python_side("fastexchange.jax.xla_target")
DESCRIBE, LEARN, LEARN_LAUNCH = range(3)
"""The places of its functions."""

# ---- the GIL -------------------------------------------------------------------------------------------------------------


@native
def end_python():
    """See :func:`begin_python`."""
    atomic_add(global_address("fastexchange_xla") + IN_PYTHON, -1)


@native
def begin_python():
    """Whether the GIL can be taken. If so, a program does not end before the handler has called :func:`end_python`."""
    xla = global_address("fastexchange_xla")
    atomic_add(xla + IN_PYTHON, 1)
    if c.Py_IsInitialized() != 0 and c.is_finalizing() == 0 and xla_at(xla).is_ending == 0:
        return True
    end_python()
    return False


# ---- errors --------------------------------------------------------------------------------------------------------------


@native
def failed(frame, message):
    """A new error of XLA's with a text, which it copies: what the handler returns."""
    given = stack(ERROR_WORDS)
    error = error_at(given)
    error.struct_size, error.extension_start, error.message, error.errc = ERROR_BYTES, 0, message, INTERNAL
    return call_word(api_at(frame.api).XLA_FFI_Error_Create, (given,))


@native
def failed_with_exception(frame, kernel):
    """A new error of XLA's for the pending exception, which is cleared. `kernel`: its name, or None. Holds: the GIL."""
    error, arguments = stack(3), stack(2)
    take_error(error)
    store(arguments, load(error + 8))
    store(arguments + 8, kernel)
    items = python_items()
    text = c.PyObject_VectorcallDict(load(items + 8 * DESCRIBE), arguments, 2, 0) if items != 0 else 0
    message = c.PyUnicode_AsUTF8AndSize(text, 0) if text != 0 else 0
    if message == 0:
        leave_failure()
        message = cstring("an exception that cannot be shown")
    made = failed(frame, message)
    if text != 0:
        c.Py_DecRef(text)
    drop_error(error)
    return made


@cfunction(types.intp, *[types.intp] * 4)
def fail_by_exception(frame, context, code, excinfo):
    """The error for the exception of a kernel that has returned `code`. GIL: taken."""
    if not begin_python():
        return failed(frame_at(frame), cstring("a kernel has raised an exception, and the program is ending"))
    state = c.PyGILState_Ensure()
    call_word(structs.context_at(context).raise_error, (code, excinfo))
    made = failed_with_exception(frame_at(frame), structs.context_at(context).name)
    c.PyGILState_Release(state)
    end_python()
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
    """The ``fx_context`` and the ``fx_overload`` that a call names; the latter is 0 if none is known."""
    keys = array_at(attributes.keys)
    context = find_kernel(load(scalar_at(attributes.id).value))
    at = look_up(structs.context_at(context), keys.data, types.intp(keys.size)) if context != 0 else 0
    return context, at if at != 0 and structs.overload_at(at).trampoline != 0 else 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def learn_kernel(frame, attributes_address, function, out):
    """Let Python find the kernel that a call names, and compile it. Returns 0, or an error of XLA's. GIL: taken.

    `function`: the place of the function that does so among :data:`python_items`. `out`: gets the address of the kernel's
    ``fx_overload``, which is right also if another thread recompiles the kernel meanwhile.
    """
    if not begin_python():
        return failed(frame_at(frame), cstring("a kernel is not known yet, and the program is ending"))
    state = c.PyGILState_Ensure()
    made = 0
    items = python_items()
    number = c.PyLong_FromSsize_t(attributes_address)
    result = c.PyObject_CallOneArg(load(items + 8 * function), number) if items != 0 and number != 0 else 0
    if result == 0:
        made = failed_with_exception(frame_at(frame), global_address("_Py_NoneStruct"))
    else:
        store(out, c.PyLong_AsSsize_t(result))
        c.Py_DecRef(result)
    if number != 0:
        c.Py_DecRef(number)
    c.PyGILState_Release(state)
    end_python()
    return made


# ---- the handler ---------------------------------------------------------------------------------------------------------


@native
def tells_metadata(frame, traits):
    """Whether XLA asks what a handler is, before its first call. If so, the answer is stored."""
    extension = extension_at(frame.extension_start)
    if frame.extension_start == 0 or extension.extension_base.type != METADATA:
        return False
    metadata = metadata_at(extension.metadata)  # XLA compares the version with its own
    metadata.api_version.major_version, metadata.api_version.minor_version = 0, 1
    metadata.traits = traits
    return True


@native
def are_as_written(attributes):
    """Whether a call's attributes are those of ``xla_calls``: their number, and their types."""
    if attributes.size != ATTRIBUTES:
        return False
    given = types_at(attributes.types)
    are_arrays = given.keys == ATTR_ARRAY and given.numbers == ATTR_ARRAY and given.sources == ATTR_ARRAY
    return given.id == ATTR_SCALAR and given.kernel == ATTR_STRING and are_arrays


@cfunction(types.intp, types.intp)
def call_by_xla(frame_address):
    """``XLA_FFI_Error *(*XLA_FFI_Handler)(XLA_FFI_CallFrame *)``. GIL: not needed; any thread."""
    frame = frame_at(frame_address)
    if tells_metadata(frame, 0):
        return 0
    if frame.struct_size < FRAME_BYTES or not are_as_written(frame.attrs) or frame.rets.size == 0:
        return failed(frame, cstring("fastexchange: XLA's call frame is not as expected"))
    attributes = attributes_at(frame.attrs.attrs)
    context, at = find_overload(attributes)
    if at == 0:
        learnt = stack(1)
        learn = xla_at(global_address("fastexchange_xla")).learn_kernel
        error = call_word(learn, (frame_address, frame.attrs.attrs, LEARN, learnt))
        if error != 0:
            return error
        context, at = find_kernel(load(scalar_at(attributes.id).value)), load(learnt)
    batch = batch_at(stack(BATCH_WORDS))
    batch.operands, batch.results = frame.args.args, frame.rets.rets
    batch.key_count, batch.keys = types.intp(array_at(attributes.keys).size), array_at(attributes.keys).data
    batch.sources, batch.numbers = array_at(attributes.sources).data, array_at(attributes.numbers).data
    needed = words_needed(batch.keys, batch.key_count)
    words, excinfo = stack(MAX_WORDS), stack(1)
    if needed > MAX_WORDS:
        words = c.PyMem_RawMalloc(8 * needed)
        if words == 0:
            return failed(frame, cstring("out of memory"))
    may_run_python = structs.overload_at(at).keeps != KEEPS_NOTHING
    outcome, code = ENDED, 0
    if not may_run_python or begin_python():
        outcome, code = run_items(batch, structs.overload_at(at), words, excinfo)
        if may_run_python:
            end_python()
    if needed > MAX_WORDS:
        c.PyMem_RawFree(words)
    if outcome == RAN:
        return 0
    if outcome == RAISED:
        fail = xla_at(global_address("fastexchange_xla")).fail_by_exception
        return call_word(fail, (frame_address, context, code, load(excinfo)))
    if outcome == NO_MEMORY:
        return failed(frame, cstring("out of memory"))
    if outcome == ENDED:
        return failed(frame, cstring("a kernel may run Python, and the program is ending"))
    return failed(frame, cstring("fastexchange: the buffers of a call are not as they were when it was traced"))


# ---- in Python -------------------------------------------------------------------------------------------------------------

state = for_ever(ffi.new("fx_xla *"))
llvmlite.binding.add_symbol("fastexchange_xla", address_of(state))
_contexts: dict[int, int] = {}


def know_kernel(number: int, context: int) -> None:
    """Let the handler find the kernel with this id: its ``fx_context``, which must live as long as the process.

    Holds: a lock of the caller's.
    """
    _contexts[number] = context
    if state.kernels and 2 * len(_contexts) <= ffi.cast("int64_t *", state.kernels)[0]:
        _add(ffi.cast("int64_t *", state.kernels), number, context)
        return
    mask = 7
    while mask < 4 * len(_contexts):
        mask = 2 * mask + 1
    table = for_ever(ffi.new("int64_t[]", 2 * (mask + 2)))  # a larger one: handlers read the old one meanwhile
    table[0] = mask
    for known, address in _contexts.items():
        _add(table, known, address)
    state.kernels = address_of(table)


def _add(table, number: int, context: int) -> None:
    """Add a kernel to a table, which handlers may be reading."""
    i = number & table[0]
    while table[2 * i + 3]:
        i = i + 1 & table[0]
    table[2 * i + 2] = number
    table[2 * i + 3] = context  # last: with it the place is taken


def handler() -> int:
    """The address of the handler."""
    if not state.kernels:
        state.fail_by_exception, state.learn_kernel = fail_by_exception.address, learn_kernel.address
        know_kernel(0, 0)
        end_before_jax()
    return call_by_xla.address


def end() -> None:
    """Let no handler take the GIL from now on, and wait for those that have it, or wait for it."""
    state.is_ending = 1
    while True:
        time.sleep(0.001)  # without the GIL; a handler that begins now is counted, or has seen `is_ending`
        if state.in_python <= 0:
            return


def _forget_handlers() -> None:
    """In a forked child there are no threads of XLA."""
    state.in_python = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_handlers)
