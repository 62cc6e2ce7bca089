"""Kernels as PyTorch's dispatcher calls them: C functions ``void (uint64_t *stack, uint64_t count, uint64_t outputs)``.

The stack has a word for each argument: an int, a bool, the bits of a double, or the handle of a tensor, an ``at::Tensor *`` that
the callee owns. Results replace them.

:data:`call_boxed` makes a call without Python code if all tensors can be read in memory and the signature is known. The word that
a handle points to is what a tensor's Python object has at the offset ``object``. So a *stand-in*, some words with that one and
PyTorch's type, is read as the tensor itself. Only :func:`make_call` sees stand-ins. Python code makes any other call. An array
that the kernel keeps (an exception has it) gets an owner by :func:`own_kept`: the frame's own way asks the argument.

Source: ``torch/csrc/stable/c/shim.h``, ``torch/csrc/inductor/aoti_torch/c/shim.h``.
"""

import functools

from llvmlite import ir
from numba import types

from ..dispatch import structs
from ..dispatch.allocation import PROMOTED, SCRATCH_WORDS, SHAPES_WORDS, compute_shapes
from ..dispatch.boxing import box_or_raise
from ..dispatch.frame import (
    ARRAY_BYTES,
    MEMINFO_DTOR,
    MEMINFO_DTOR_INFO,
    MEMINFO_REFCOUNT,
    give_frame,
    is_anything_kept,
    note_leaks,
    release,
    take_back,
    take_frame,
)
from ..dispatch.inline_cache import look_up
from ..dispatch.python_calls import drop_error, leave_failure, take_error
from ..dispatch.reading import FLAG_MEMORY
from ..dispatch.type_table import find
from ..ground import cpython as c
from ..ground.cfunction import CodeUnit, cfunction, code_cache
from ..ground.disk_cache import claiming
from ..ground.dltensor import MAX_NDIM, packed_strides
from ..ground.native import call_int, call_word, float_of, global_address, load, native, stack, store, struct_at
from ..ground.numba_code import RUNS_PYTHON
from ..ground.numba_internals import global_compiler_lock, target_context_with_references
from ..ground.shape_program import MAX_NUMBER, MAX_VARIABLES
from .guard import (
    guard_at,
    guard_of,
    is_in_memory,
    is_odd_by,
    is_on_cpu,
    number_in_memory,
    rank_in_memory,
    torch_device_in_memory,
    view_in_memory,
)
from .modes import count_write, has_counter

CDEF = """
/* A kernel as PyTorch's dispatcher calls it. */
typedef struct {
    int64_t context;            /* fx_context **, of the kernel; NULL is there before its first call */
    int64_t call;               /* of a kernel for CUDA: what reads the arguments and launches it, as `call_kernel`; else 0 */
    int64_t launcher;           /* PyObject *, its launcher */
    int64_t launch;             /* the launcher's vectorcallfunc while native code makes its launches */
    int64_t owner;              /* PyObject *, makes calls that native code does not, and takes note of exceptions */
    int64_t make_name, note_name;       /* PyObject *, names of its methods for these */
    int64_t tensor_type;        /* PyTypeObject *, torch.Tensor */
    int64_t count;              /* how many arguments there are, without the outputs */
    int64_t kinds;              /* int64_t[count], BOXED_* */
    int64_t mutated, mutated_count;     /* as of an fx_operator */
    int64_t output_count;
    int64_t dtypes;             /* int64_t[output_count], PyTorch's number, or ~position of the tensor that has it, or PROMOTED */
    int64_t promoted;           /* int64_t[64][64], PyTorch's number of the type to which two are promoted; -1: none */
    int64_t empty_strided;      /* PyTorch's C ABI: int (*)(ndim, sizes, strides, dtype, device type, index, at::Tensor **) */
    int64_t delete_tensor;      /* int (*)(at::Tensor *) */
    int64_t delete_value;       /* releases the memory that holds the value of an optional argument */
    int64_t reinterpret;        /* int (*)(at::Tensor *, ndim, sizes, strides, offset, at::Tensor **): of the same storage */
    int64_t release_kept;       /* NRT destructor: drops what owns the memory of an array that the kernel has kept */
} fx_boxed;
"""

boxed_at = struct_at("fx_boxed")
# Of an argument that PyTorch's dispatcher gives; the last: a tensor, or None.
BOXED_TENSOR, BOXED_INT, BOXED_FLOAT, BOXED_BOOL, BOXED_OPTIONAL = range(5)
MAX_ARGUMENTS = 16  # with the outputs
STAND_IN_WORDS = 8
STAND_INS_WORDS = MAX_ARGUMENTS * STAND_IN_WORDS
TORCH_NUMBERS = 64
"""More than the numbers of PyTorch's dtypes."""
MADE, FAILED, LEFT = 0, 1, 2


@native
def is_tensor_kind(kind):
    """Whether a BOXED_* is that of an argument that may be a tensor. The word of None is 0, once :func:`unwrap` has run."""
    return kind in (BOXED_TENSOR, BOXED_OPTIONAL)


@native
def unwrap(boxed, words):
    """Replace the words of optional arguments, which point to the values, by these."""
    for i in range(boxed.count):
        at = load(words + 8 * i)
        if load(boxed.kinds + 8 * i) == BOXED_OPTIONAL and at != 0:
            store(words + 8 * i, load(at))
            call_int(boxed.delete_value, (at,))


@native
def as_stand_in(boxed, guard, at, handle):
    """Make the stand-in of a tensor at `at`. Returns `at`."""
    store(at, 1 << 30)  # references: nobody counts them
    store(at + c.OB_TYPE, boxed.tensor_type)
    store(at + guard.object, load(handle))
    return at


@native
def allocate(boxed, context, guard, words, given, made):
    """Allocate the outputs, on the device of the first input. Stores their handles at `made`.

    Returns: how many there are; -1 if only Python code can make them.

    `given`: the stand-ins. 1. Read the extents. 2. Compute the shapes. 3. Allocate.
    """
    variables = stack(MAX_VARIABLES)
    shapes = stack(SHAPES_WORDS)
    wanted = stack(SHAPES_WORDS)
    scratch = stack(SCRATCH_WORDS)
    strides = stack(MAX_NDIM)
    # 1. Read the extents.
    at = context.outputs
    for i in range(load(at)):
        at += 8
        value = load(words + 8 * load(at))
        if value < 0 or value > MAX_NUMBER:
            return -1
        store(variables + 8 * i, value)
    at += 8
    end = shapes
    common = 0
    kind, index = 0, 0
    for i in range(load(at)):
        at += 8
        ob = load(given + 8 * load(at))
        if i == 0 and not is_on_cpu(guard, ob):
            kind, index = torch_device_in_memory(guard, ob)
        number = number_in_memory(guard, ob)
        if i == 0 or boxed.promoted == 0:
            common = number
        elif common >= 0:
            is_known = common < TORCH_NUMBERS and number < TORCH_NUMBERS
            common = load(boxed.promoted + 8 * (TORCH_NUMBERS * common + number)) if is_known else -1
        ndim = rank_in_memory(guard, ob)
        if ndim > min(MAX_NDIM, SHAPES_WORDS - 1 - (end - shapes) // 8):
            return -1
        sizes = view_in_memory(guard, ob, ndim, 1).shape
        store(end, ndim)
        for j in range(ndim):
            store(end + 8 + 8 * j, load(sizes + 8 * j))
        end += 8 * (1 + ndim)
    # 2. Compute the shapes.
    if common < 0 or not compute_shapes(context, at, shapes, variables, scratch, wanted):
        return -1
    # 3. Allocate.
    shape = wanted
    for i in range(boxed.output_count):
        ndim = load(shape)
        packed_strides(ndim, shape + 8, strides)
        dtype = load(boxed.dtypes + 8 * i)
        if dtype == PROMOTED:
            dtype = common
        elif dtype < 0:
            dtype = number_in_memory(guard, load(given + 8 * ~dtype))
        if call_int(boxed.empty_strided, (ndim, shape + 8, strides, dtype, kind, index, made + 8 * i)) != 0:
            for j in range(i):
                call_int(boxed.delete_tensor, (load(made + 8 * j),))
            return -1
        shape += 8 * (1 + ndim)
    return boxed.output_count


@native
def make_arguments(boxed, context, runtime, words, given, stand_ins):
    """Store an object for each argument at `given`, tensors as stand-ins.

    Returns: whether native code can read all of them. Owns: the objects of numbers, which :func:`drop_numbers` drops. Those that
    are not made are NULL.
    """
    entry = find(runtime, boxed.tensor_type)
    for i in range(boxed.count):
        store(given + 8 * i, 0)
    if entry == 0 or structs.entry_at(entry).guard == 0:
        return False
    guard = guard_at(guard_of(context, structs.entry_at(entry)))
    if guard.asks != 0 or guard.object > 8 * (STAND_IN_WORDS - 1):
        return False
    address = guard_of(context, structs.entry_at(entry))
    is_right = True
    for i in range(boxed.count):
        kind = load(boxed.kinds + 8 * i)
        word = load(words + 8 * i)
        if is_tensor_kind(kind) and word != 0:
            ob = as_stand_in(boxed, guard, stand_ins + 8 * STAND_IN_WORDS * i, word)
            is_right = is_right and not is_odd_by(guard, address, ob) and is_in_memory(guard, ob)
        elif is_tensor_kind(kind):
            ob = global_address("_Py_NoneStruct")
        elif kind == BOXED_INT:
            ob = c.PyLong_FromSsize_t(word)
        elif kind == BOXED_FLOAT:
            ob = c.PyFloat_FromDouble(float_of(word, 64))
        else:
            ob = global_address("_Py_TrueStruct") if word & 0xFF != 0 else global_address("_Py_FalseStruct")
            c.incref(ob)
        store(given + 8 * i, ob)
        is_right = is_right and ob != 0
    return is_right


@native
def drop_numbers(boxed, given):
    """Drop the objects of numbers that :func:`make_arguments` has made."""
    for i in range(boxed.count):
        if not is_tensor_kind(load(boxed.kinds + 8 * i)) and load(given + 8 * i) != 0:
            c.Py_DecRef(load(given + 8 * i))


@native
def call_kernel(context_address, frame_address, given, count):
    """Read the arguments and call the kernel. Returns MADE, FAILED with an exception set, or LEFT: nothing was done.

    No Python code runs, and tensors are read in memory only: they are stand-ins.
    """
    context = structs.context_at(context_address)
    frame = structs.frame_at(frame_address)
    excinfo = stack(1)
    store(excinfo, 0)
    status = call_word(structs.runtime_at(context.runtime).walk, (context_address, frame_address, given, count, FLAG_MEMORY))
    if status != structs.STATUS_OK:
        if status == structs.STATUS_ERROR:
            c.PyErr_Clear()
        return LEFT
    at = look_up(context, frame.keys, frame.key_count)
    if at == 0:
        return LEFT
    overload = structs.overload_at(at)
    if overload.trampoline == 0 or overload.box != 0:
        return LEFT
    thread = c.PyEval_SaveThread() if context.release_gil != 0 else 0
    code = call_int(overload.trampoline, (overload.kernel, frame.result, excinfo, frame.words))
    if thread != 0:
        c.PyEval_RestoreThread(thread)
    note_leaks(frame, overload, code)
    result = box_or_raise(context, overload, code, frame.result, excinfo, False)
    if result == 0:
        return FAILED
    c.Py_DecRef(result)
    context.calls += 1
    return MADE


@cfunction(types.void, types.intp, types.intp, types.intp)
def release_kept(data, size, pair):
    """NRT destructor: call the function at `pair` with the handle behind it. GIL: not needed; any thread."""
    if pair != 0 and c.Py_IsInitialized() != 0 and c.is_finalizing() == 0:
        state = c.PyGILState_Ensure()
        call_int(load(pair), (load(pair + 8),))
        c.PyMem_RawFree(pair)
        c.PyGILState_Release(state)


@native
def own_kept(boxed, frame, words, made, stand_ins):
    """Give each array that the kernel has kept an owner: a tensor of its own with the storage. No Python code runs.

    Without memory for that, nothing owns the array's memory.
    """
    for i in range(frame.array_count):
        array = structs.array_at(frame.arrays + ARRAY_BYTES * i)
        if load(array.meminfo + MEMINFO_REFCOUNT) != 1:
            at = ((array.origin & -4) - stand_ins) // (8 * STAND_IN_WORDS)
            handle = load(words + 8 * at if at < boxed.count else made + 8 * (at - boxed.count))
            pair = c.PyMem_RawMalloc(16)
            if pair != 0:
                store(pair, boxed.delete_tensor)
                if call_int(boxed.reinterpret, (handle, 0, pair, pair, 0, pair + 8)) != 0:
                    c.PyMem_RawFree(pair)
                    pair = 0
            store(array.meminfo + MEMINFO_DTOR, boxed.release_kept)
            store(array.meminfo + MEMINFO_DTOR_INFO, pair)


@native
def make_call(boxed_address, words):
    """Make a call natively. Returns MADE, FAILED with an exception set, or LEFT: nothing was done."""
    boxed = boxed_at(boxed_address)
    context_address = load(boxed.context)
    if context_address == 0:
        return LEFT
    context = structs.context_at(context_address)
    runtime = structs.runtime_at(context.runtime)
    if context.needs_owning_exports >= RUNS_PYTHON or (boxed.output_count != 0 and context.outputs == 0):
        return LEFT
    given = stack(MAX_ARGUMENTS)
    made = stack(MAX_ARGUMENTS)
    stand_ins = stack(STAND_INS_WORDS)
    frame_address = take_frame(runtime)
    if frame_address == 0:
        return FAILED
    outcome = LEFT
    outputs = -1
    if make_arguments(boxed, context, runtime, words, given, stand_ins):
        outputs = 0
        guard = guard_at(guard_of(context, structs.entry_at(find(runtime, boxed.tensor_type))))
        if boxed.output_count != 0:
            outputs = allocate(boxed, context, guard, words, given, made)
        for i in range(outputs):
            at = stand_ins + 8 * STAND_IN_WORDS * (boxed.count + i)
            store(given + 8 * (boxed.count + i), as_stand_in(boxed, guard, at, load(made + 8 * i)))
    if outputs >= 0:
        if boxed.call != 0:
            outcome = call_word(boxed.call, (boxed_address, frame_address, given, boxed.count + outputs))
        else:
            outcome = call_kernel(context_address, frame_address, given, boxed.count + outputs)
        frame = structs.frame_at(frame_address)
        take_back(frame)
        if is_anything_kept(frame, frame.array_count):
            own_kept(boxed, frame, words, made, stand_ins)
        release(runtime, frame)
        for i in range(outputs):
            if outcome != MADE:
                call_int(boxed.delete_tensor, (load(made + 8 * i),))
    give_frame(runtime, frame_address)
    drop_numbers(boxed, given)
    if outcome != LEFT:
        for i in range(boxed.mutated_count):
            position = load(boxed.mutated + 8 * i)
            if load(words + 8 * position) != 0 and has_counter(load(given + 8 * position)):
                count_write(load(given + 8 * position))
        for i in range(boxed.count):
            if is_tensor_kind(load(boxed.kinds + 8 * i)) and load(words + 8 * i) != 0:
                call_int(boxed.delete_tensor, (load(words + 8 * i),))
    if outcome == MADE:
        for i in range(outputs):
            store(words + 8 * i, load(made + 8 * i))
    return outcome


@native
def call_owner(name, owner, word, ob, message):
    """Call a method of the owner with the object `ob`, or the number `word`, and `message`, an address. Returns its result."""
    arguments = stack(3)
    result = 0
    first = c.PyLong_FromSsize_t(word) if ob == 0 else ob
    second = c.PyLong_FromSsize_t(message)
    if first != 0 and second != 0:
        store(arguments, owner)
        store(arguments + 8, first)
        store(arguments + 16, second)
        result = c.PyObject_VectorcallMethod(name, arguments, 3, 0)
    if ob == 0 and first != 0:
        c.Py_DecRef(first)
    if second != 0:
        c.Py_DecRef(second)
    return result


@cfunction(types.intp, types.intp, types.intp, types.intp)
def call_boxed(boxed_address, words, message):
    """Make a call of PyTorch's dispatcher. `words`: its stack. `message`: gets the address of an error's text.

    Returns: 0, or 1 after an error; the owner keeps its text until the thread's next one.
    GIL: any; taken here, because kernels' tables are read.
    Owns: takes the tensors of the arguments; the caller owns those of the results.
    """
    boxed = boxed_at(boxed_address)
    state = c.PyGILState_Ensure()
    unwrap(boxed, words)
    outcome = make_call(boxed_address, words)
    if outcome == FAILED:
        error = stack(3)
        take_error(error)
        result = call_owner(boxed.note_name, boxed.owner, 0, load(error + 8), message)
        drop_error(error)
        if result != 0:
            c.Py_DecRef(result)
        else:
            leave_failure()
    elif outcome == LEFT:
        result = call_owner(boxed.make_name, boxed.owner, words, 0, message)
        outcome = FAILED
        if result != 0:
            outcome = MADE if result == global_address("_Py_TrueStruct") else FAILED
            c.Py_DecRef(result)
        else:
            leave_failure()
    c.PyGILState_Release(state)
    return types.intp(outcome != MADE)


# ---- the function that PyTorch is given ------------------------------------------------------------------------------

_WORD = ir.IntType(64)


@claiming
@global_compiler_lock
def boxed_function(boxed: int, fail: int) -> int:
    """Return the address of a C function for PyTorch's dispatcher: :data:`call_boxed` of the ``fx_boxed`` at `boxed`.

    `fail`: the address of ``void (*)(function, file, line, message)``, which throws PyTorch's C++ exception and does not return.
    """
    build = functools.partial(_build, boxed, fail)
    return code_cache.get(("boxed", boxed), build, __name__, persist=False)[0]


def _build(boxed: int, fail: int):
    unit = CodeUnit(target_context_with_references(), "boxed", ir.FunctionType(ir.VoidType(), [_WORD.as_pointer(), _WORD, _WORD]))
    unit.function.attributes.add("uwtable")  # C++ exceptions pass through it
    builder = unit.builder
    message = builder.alloca(_WORD, size=ir.Constant(ir.IntType(32), 2))  # the address of a text, and an empty one
    builder.store(_WORD(0), builder.gep(message, [ir.IntType(32)(1)]))
    builder.store(builder.ptrtoint(builder.gep(message, [ir.IntType(32)(1)]), _WORD), message)
    make = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD]).as_pointer()
    at = builder.ptrtoint(message, _WORD)
    words = builder.ptrtoint(unit.function.args[0], _WORD)
    failed = builder.call(builder.inttoptr(_WORD(call_boxed.address), make), [_WORD(boxed), words, at])
    with builder.if_then(builder.icmp_signed("!=", failed, _WORD(0)), likely=False):
        throw = ir.FunctionType(ir.VoidType(), [_WORD, _WORD, ir.IntType(32), _WORD]).as_pointer()
        text = builder.load(message)
        builder.call(builder.inttoptr(_WORD(fail), throw), [text, text, ir.IntType(32)(0), text])
    builder.ret_void()
    return unit.finish()
