"""Outputs that the caller's framework allocates: the native part of ``fast_args(out=…)``.

A kernel with outputs has its own vectorcall, :data:`vectorcall_with_outputs`:

1. Put the arguments into parameter order.
2. Allocate the outputs that are not given (:func:`make_outputs`), by ``managed_tensor_allocator`` and
   ``managed_tensor_to_py_object_no_sync`` of the framework's exchange table. Allocation may run Python code, so it comes before
   any view is borrowed. Those of a framework without such a table are arrays of NumPy. Where the first input is on another
   device, they are there, too, and the framework makes them itself: ``fx_entry.make``.
3. Make an ordinary call, with the outputs as the last arguments.
4. Let such arrays become tensors (:func:`become_tensors`), and return the outputs.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import KERNEL_CONTEXT, Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CPU, field_of_type
from ..ground.dltensor import DL_TENSOR_WORDS, MAX_NDIM, delete_managed, describe, dl_tensor_at
from ..ground.native import as_words, call_int, call_word, cstring, external, global_address, load, native, stack, store
from ..ground.promotion import promote
from ..ground.shape_notation import Pattern
from ..ground.shape_program import (
    FITS,
    MAX_NUMBER,
    MAX_OPERANDS,
    MAX_PARAMETERS,
    MAX_VARIABLES,
    evaluate,
)
from . import structs
from .binding import bind_into
from .boxed_results import NEW, as_target
from .frame import drop, give_frame, take_frame
from .python_calls import call_method
from .type_table import find

strncpy = external("strncpy", types.intp, types.intp, types.intp, types.intp)

SHAPES_WORDS = 256  # for the shapes of all inputs, or of all outputs: a thread's stack may have 32 KiB only
SCRATCH_WORDS = MAX_OPERANDS + 1 + MAX_NDIM
CALL_WORDS = 1 + MAX_PARAMETERS
ERROR_BYTES = 256

PROMOTED = -(1 << 32)
DEVICE_SHIFT = 32  # in what `read_shape` returns

compute = native(evaluate)
promote_natively = native(promote)


@native
def refuse_result():
    """Raise TypeError for a result of a kernel that declares outputs. Returns 0."""
    message = cstring("a kernel that declares outputs, fast_args(out=...), has to return None")
    c.PyErr_SetString(global_address("PyExc_TypeError"), message)
    return 0


def _dtype_word(dtype) -> int:
    if dtype is None:
        return PROMOTED
    return ~dtype if isinstance(dtype, int) else field_of_type(dtype.code, dtype.bits)


def words_of(pattern: Pattern) -> list[int] | None:
    """Return the words in which :func:`make_outputs` reads a pattern; None if the pattern is too large for its memory.

    The words: the number of int parameters and their positions; the number of inputs and their positions; for each output its
    dtype field, or ``~position`` of the input that has its dtype, or PROMOTED; the pattern's program.
    """
    if not pattern.is_small:
        return None
    dtypes = [_dtype_word(each.dtype) for each in pattern.outputs]
    inputs = [each.position for each in pattern.inputs]
    return [len(pattern.numbers), *pattern.numbers.values(), len(inputs), *inputs, *dtypes, *pattern.program]


@cfunction(types.void, types.intp, types.intp, types.intp)
def note_error(error_ctx, kind, message):
    """``SetError`` of an allocator: copy the message into the ERROR_BYTES at `error_ctx`, unless that is NULL."""
    if error_ctx != 0 and message != 0:
        strncpy(error_ctx, message, ERROR_BYTES - 1)


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp)
def allocate(allocator, to_object, prototype, set_error, error_ctx):
    """Make a tensor like the DLTensor at `prototype`, by two functions of an exchange table.

    Returns: a new reference. After a failure 0: without an exception if `error_ctx` is NULL, else with one; or None if
    `error_ctx` is not NULL and no exception was set. GIL: held; may run Python code.
    """
    out = stack(2)
    store(out, 0)
    store(out + 8, 0)
    failed = call_int(allocator, (prototype, out, error_ctx, set_error)) != 0
    if failed or load(out) == 0 or PyErr_Occurred() != 0:
        if not failed and load(out) != 0:
            delete_managed(load(out))
    elif call_int(to_object, (load(out), out + 8)) != 0 or load(out + 8) == 0 or PyErr_Occurred() != 0:
        if load(out + 8) != 0:
            c.Py_DecRef(load(out + 8))
        store(out + 8, 0)
    if load(out + 8) == 0:
        if error_ctx == 0:
            c.PyErr_Clear()
        elif PyErr_Occurred() == 0:
            return c.new_none()
    return load(out + 8)


@native
def read_shape(context_address, runtime, ob, shape, room):
    """Store a tensor's extents at `shape`, which has `room` words.

    Returns: the rank, from bit 8 on the dtype field, from bit 32 on the device: 0 for the CPU, else DLPack's type and, 8 bits
    further, its number; or -1 if there is no room, or only Python code can read the tensor.

    That is so of odd tensors, too: PyTorch may trace the call, which must not allocate then.
    """
    entry = find(runtime, Py_TYPE(ob))
    read = structs.kind_at(structs.entry_at(entry).kind).read_shape if entry != 0 else 0
    return call_word(read, (context_address, entry, ob, shape, room)) if read != 0 else -1


@native
def target_of(context, args):
    """The type of the outputs that are allocated, and the argument that has it, or again the type. `args`: in parameter order."""
    if context.returns_type != 0:
        return context.returns_type, context.returns_type
    if context.returns_position >= 0:
        like = load(args + 8 * context.returns_position)
        return Py_TYPE(like), like
    inputs = context.outputs + 8 * (1 + load(context.outputs))  # behind the numbers: how many there are, and their positions
    like = load(args + 8 * load(inputs + 8))
    return Py_TYPE(like), like


@native
def become_tensors(context, runtime, args, made):
    """Let the outputs that :func:`make_outputs` has made as arrays of NumPy become tensors of the target's framework.

    Returns: whether that succeeded; if not, an exception is set. Owns: `args` has all outputs' references, or 0.
    """
    target, like = target_of(context, args)
    if target == runtime.ndarray:
        return True
    for i in range(context.output_count):
        output = args + 8 * (context.parameter_count - context.output_count + i)
        if made >> i & 1 != 0 and Py_TYPE(load(output)) == runtime.ndarray:
            store(output, as_target(context, runtime, load(output), like, NEW))
            if load(output) == 0:
                return False
    return True


@native
def compute_shapes(context, dtypes, shapes, variables, scratch, wanted):
    """Compute the outputs' shapes by the program behind the word at `dtypes`, the last before the outputs' dtypes.

    Returns: whether the inputs, of these shapes, fit the notation. Stores the outputs' shapes at `wanted`.
    """
    program = as_words(dtypes + 8 * (1 + context.output_count))
    rest = as_words(scratch + 8 * MAX_OPERANDS)
    made = as_words(wanted)
    return compute(program, as_words(shapes), as_words(variables), rest, as_words(scratch), made, SHAPES_WORDS) == FITS


@native
def new_tensor(runtime, entry, prototype, device):
    """Make a tensor like the DLTensor at `prototype`, of the type of an ``fx_entry``, or 0; on the CPU else an array of NumPy.

    Returns: a new reference, or 0 without an exception. `device`: 0 for the CPU.
    """
    if device != 0:
        make = structs.entry_at(entry).make if entry != 0 else 0
        return call_word(make, (entry, prototype)) if make != 0 else 0
    if entry == 0 or structs.entry_at(entry).allocator == 0 or structs.entry_at(entry).to_object == 0:
        entry = find(runtime, runtime.ndarray) if runtime.ndarray != 0 else 0
    if entry == 0:
        return 0
    known = structs.entry_at(entry)
    return call_word(runtime.allocate, (known.allocator, known.to_object, prototype, runtime.note_error, 0))


@native
def make_outputs(context_address, runtime, args, made):
    """Allocate the outputs that are omitted in `args`, which is in parameter order, and store them there.

    Returns: whether all outputs are there and fit the inputs. If not (a mismatch, a framework that cannot allocate),
    ``calls.outputs`` does the work in Python, and raises for a mismatch. GIL: held; may run Python code.
    Owns: at `made` a bit is set for each new output, even if False is returned. The caller owns these references.
    """
    context = structs.context_at(context_address)
    variables = stack(MAX_VARIABLES)
    shapes = stack(SHAPES_WORDS)
    fields = stack(MAX_PARAMETERS)
    scratch = stack(SCRATCH_WORDS)
    wanted = stack(SHAPES_WORDS)
    view = stack(DL_TENSOR_WORDS)
    own_shape = stack(MAX_NDIM)
    # 1. Read the ints that are extents, and the inputs' shapes and dtypes.
    at = context.outputs
    for i in range(load(at)):
        at += 8
        ob = load(args + 8 * load(at))
        known = find(runtime, Py_TYPE(ob))
        if known == 0 or structs.kind_at(structs.entry_at(known).kind).schema_type != structs.SCHEMA_INT:
            return False
        value = c.PyLong_AsLongLongAndOverflow(ob, own_shape)
        if value < 0 or value > MAX_NUMBER:
            return False
        store(variables + 8 * i, value)
    at += 8
    end = shapes
    common = 0
    device = 0
    for i in range(load(at)):
        at += 8
        room = SHAPES_WORDS - 1 - (end - shapes) // 8
        found = read_shape(context_address, runtime, load(args + 8 * load(at)), end + 8, room)
        if found < 0:
            return False
        ndim, field = found & 0xFF, found >> 8 & structs.FIELD_MASK
        device = found >> DEVICE_SHIFT if i == 0 else device
        if device == 0 and context.device_type != CPU:  # Python refuses it, or finds who allocates outputs
            return False
        common = field if i == 0 else promote_natively(common, field)
        store(end, ndim)
        store(fields + 8 * load(at), field)
        end += 8 * (1 + ndim)
    # 2. Compute the outputs' shapes.
    if not compute_shapes(context, at, shapes, variables, scratch, wanted):
        return False
    # 3. Make each output, or check its shape.
    target, _ = target_of(context, args)
    shape = wanted
    for i in range(context.output_count):
        at += 8
        ndim = load(shape)
        output = args + 8 * (context.parameter_count - context.output_count + i)
        if load(output) == context.omitted:
            entry = find(runtime, target)
            field = load(at)
            if field == PROMOTED:
                field = common
                if field < 0:
                    return False
            elif field < 0:
                field = load(fields + 8 * ~field)
            describe(dl_tensor_at(view), 0, ndim, field, shape + 8, 0)
            if device != 0:
                dl_tensor_at(view).device.device_type = device & 0xFF
                dl_tensor_at(view).device.device_id = device >> 8
            tensor = new_tensor(runtime, entry, view, device)
            if tensor == 0:
                return False
            store(output, tensor)
            store(made, load(made) | 1 << i)
        if read_shape(context_address, runtime, load(output), own_shape, MAX_NDIM) & 0xFF != ndim:
            return False
        for j in range(ndim):
            if load(own_shape + 8 * j) != load(shape + 8 * (1 + j)):
                return False
        shape += 8 * (1 + ndim)
    return True


@native
def all_outputs(context, args):
    """Make the result of a call from its outputs: a single output itself, or a tuple.

    Returns: 0 with an exception set. Owns: takes the references to the outputs.
    """
    first = context.parameter_count - context.output_count
    if context.output_count == 1:
        return load(args + 8 * first)
    made = c.PyTuple_New(context.output_count)
    for i in range(context.output_count):
        if made != 0:
            store(made + c.OB_ITEM + 8 * i, load(args + 8 * (first + i)))
        else:
            c.Py_DecRef(load(args + 8 * (first + i)))
    return made


NO_MODE = 1 << 62  # of vectorcall_with_outputs alone, which clears it: the same bit is c.TRIED_SITE in the calls that it makes


@native
def is_seen(runtime):
    """Whether a framework has to see the call: a mode is active, a tracer or a counter of operations."""
    return runtime.sees_calls != 0 and call_word(runtime.sees_calls, ()) != 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_heeding_modes(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of a kernel that declares what it writes to, and no outputs: Python makes calls that a mode may see."""
    context_address = load(callable_ + KERNEL_CONTEXT)
    context = structs.context_at(context_address)
    if is_seen(structs.runtime_at(context.runtime)):
        return call_method(context.outputs_name, callable_, args, nargsf, kwnames)
    last = context.last
    return call_word(structs.overload_at(last).enter, (callable_, args, nargsf, kwnames, context_address, last))


@native
def call_with_outputs(context_address, callable_, args, nargsf, kwnames):
    """Allocate omitted outputs, make the call, and return all outputs.

    `nargsf` may have the bit NO_MODE: the caller has found no mode active.
    """
    has_no_mode = nargsf & NO_MODE != 0
    nargsf &= ~NO_MODE
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    count = context.parameter_count
    first = count - context.output_count
    own = stack(CALL_WORDS)
    given = own + 8
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return 0
    status, frame_address = bind_into(context, runtime, frame_address, args, nargsf & c.NARGS_MASK, kwnames)
    bound = structs.frame_at(frame_address).bound
    if status == structs.STATUS_OK:
        for i in range(count):
            store(given + 8 * i, load(bound + 8 * i))
        for i in range(first, count):
            if load(given + 8 * i) == global_address("_Py_NoneStruct"):  # out=None
                store(given + 8 * i, context.omitted)
    give_frame(runtime, frame_address)
    if status == structs.STATUS_ERROR:
        return 0
    if status != structs.STATUS_OK or context.outputs == 0 or (not has_no_mode and is_seen(runtime)):
        return call_method(context.outputs_name, callable_, args, nargsf, kwnames)
    made = stack(1)
    store(made, 0)
    is_ready = make_outputs(context_address, runtime, given, made)
    for i in range(first, count):
        is_made = load(made) >> (i - first) & 1 != 0
        if is_ready and not is_made:
            c.incref(load(given + 8 * i))
        elif is_made and not is_ready:
            c.Py_DecRef(load(given + 8 * i))
    if not is_ready:
        return call_method(context.outputs_name, callable_, args, nargsf, kwnames)
    last = context.last
    bits = c.VECTORCALL_ARGUMENTS_OFFSET | (c.MADE_OUTPUTS if load(made) != 0 else 0)
    result = call_word(structs.overload_at(last).enter, (callable_, given, count | bits, 0, context_address, last))
    if result == global_address("_Py_NoneStruct"):
        c.Py_DecRef(result)
        if become_tensors(context, runtime, given, load(made)):
            return all_outputs(context, given)
        result = 0
    is_left = result == context.omitted  # the slow path makes it, which has to tell these outputs from those of the caller
    if result != 0 and not is_left:
        c.Py_DecRef(result)
        refuse_result()
    for i in range(first, count):
        if load(given + 8 * i) != 0:
            drop(load(given + 8 * i))
    return call_method(context.outputs_name, callable_, args, nargsf, kwnames) if is_left else 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_with_outputs(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of a kernel that declares outputs."""
    return call_with_outputs(load(callable_ + KERNEL_CONTEXT), callable_, args, nargsf, kwnames)
