"""The program of a kernel's declared outputs: what the notation says, natively.

It is made of a ``pattern.Pattern`` by :func:`program_of`: pairs of an operation and what it is about. :func:`run_program` reads
the shapes of the inputs and lets the framework allocate the outputs that are omitted. It gives up at whatever is out of the
ordinary, a mismatch, a framework that cannot allocate: that is for Python (``outputs.Outputs``), which also has the words.
"""

import ast

from numba import types

from ..ground import cpython as c
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dltensor import DL_TENSOR_WORDS, MAX_NDIM, describe, dl_tensor_at, element_field, is_plain
from ..ground.native import call_int, call_word, load, native, stack, store
from ..ground.shape_notation import MAX_PARAMETERS
from ..producers.ndarray import ndarray_at
from . import structs
from .pack import dtype_entry
from .type_table import find

MAX_VARIABLES = 64
_UNSET = -1
_MAX_EXTENT = 1 << 40  # of operands and products, which so stay far within 64 bits; what is larger, Python looks at

# Of an input: read its shape; then one for each dimension.
READ, NUMBER, NAME, EXACTLY, REST, END = 1, 2, 3, 4, 5, 6
# Of an output: its element type; for each dimension an expression, in postfix notation; at its end the tensor is made.
TYPE, TYPE_OF, PUSH, PUSH_NUMBER, ADD, SUBTRACT, MULTIPLY, DIVIDE, EXTENT, EXTENTS, MAKE, STOP = (
    7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 0,
)  # fmt: skip
_OPERATION = {ast.Add: ADD, ast.Sub: SUBTRACT, ast.Mult: MULTIPLY, ast.FloorDiv: DIVIDE}


def program_of(pattern) -> list[int] | None:
    """The words of a pattern's program: pairs of an operation and what it is about. None for one that is too large."""
    words: list[int] = []
    index = {name: i for i, name in enumerate(pattern.variables)}
    for name, position in pattern.numbers.items():
        words += [NUMBER, position << 8 | index[name]]
    for each in pattern.inputs:
        words += [READ, each.position]
        for dim in each.dims:
            if dim is ...:
                words += [REST, len(each.dims) - 1]
            else:
                words += [NAME, index[dim]] if isinstance(dim, str) else [EXACTLY, dim]
        words += [END, 0]
    for output in pattern.outputs:
        if isinstance(output.dtype, int):
            words += [TYPE_OF, output.dtype]
        else:
            words += [TYPE, output.dtype.code | output.dtype.bits << 8]
        for dim in output.dims:
            words += [EXTENTS, 0] if dim is ... else [*_expression(dim, index), EXTENT, 0]
        words += [MAKE, output.position]
    if len(index) > MAX_VARIABLES or len(pattern.outputs) + len(pattern.inputs) > MAX_PARAMETERS // 2:
        return None
    return [*words, STOP, 0]


def _expression(tree: ast.expr, index: dict[str, int]) -> list[int]:
    if isinstance(tree, ast.BinOp):
        return [*_expression(tree.left, index), *_expression(tree.right, index), _OPERATION[type(tree.op)], 0]
    return [PUSH, index[tree.id]] if isinstance(tree, ast.Name) else [PUSH_NUMBER, tree.value]  # type: ignore[attr-defined]


@native
def read_shape(runtime, ob, shape, view):
    """Read a tensor's shape without owning it. Returns (rank, field of its dtype), or (-1, 0): Python has to."""
    entry = find(runtime, Py_TYPE(ob))
    if entry == 0:
        return -1, 0
    kind = structs.entry_at(entry).kind
    if kind == structs.KIND_NDARRAY:
        key, _ = dtype_entry(runtime, ndarray_at(ob).descr)
        ndim = types.intp(ndarray_at(ob).nd)
        if key == 0:
            return -1, 0
        for i in range(ndim):
            store(shape + 8 * i, load(ndarray_at(ob).dimensions + 8 * i))
        return ndim, key >> structs.DTYPE_SHIFT & 0xFFFFFF
    if kind != structs.KIND_EXCHANGE:
        return -1, 0
    dl_tensor_at(view).device.device_type = 0
    failed = call_int(structs.entry_at(entry).borrow, (ob, view)) != 0
    if PyErr_Occurred() != 0:
        c.PyErr_Clear()
        return -1, 0
    tensor = dl_tensor_at(view)
    if failed or not is_plain(tensor):
        return -1, 0
    ndim = types.intp(tensor.ndim)
    for i in range(ndim):
        store(shape + 8 * i, load(tensor.shape + 8 * i))
    return ndim, element_field(tensor)


@native
def target_type(context, args, first):
    """The type after which the outputs go. `first`: the first input."""
    if context.returns_type != 0:
        return context.returns_type
    if context.returns_position >= 0:
        return Py_TYPE(load(args + 8 * context.returns_position))
    return Py_TYPE(first)


@native
def run_program(context, runtime, args, made):
    """Make the outputs that are omitted in `args`, in parameter order, and put them there. Returns whether all fit the inputs.

    `made`: where a bit is set for each output that was made, whatever comes then.
    """
    own_shape = stack(MAX_NDIM)
    fields = stack(MAX_PARAMETERS)
    variables = stack(MAX_VARIABLES)
    rest = stack(MAX_NDIM)
    shape = stack(MAX_NDIM)
    numbers = stack(MAX_VARIABLES)
    view = stack(DL_TENSOR_WORDS)
    overflow = stack(1)
    for i in range(MAX_VARIABLES):
        store(variables + 8 * i, _UNSET)
    rest_count = _UNSET
    ndim = 0
    cursor = 0
    field = 0
    depth = 0
    first = 0
    at = context.outputs
    while load(at) != STOP:
        operation = load(at)
        operand = load(at + 8)
        at += 16
        if operation == READ:
            ob = load(args + 8 * operand)
            ndim, field = read_shape(runtime, ob, shape, view)
            cursor = 0
            if ndim < 0:
                return False
            store(fields + 8 * operand, field)
            if first == 0:
                first = ob
        elif operation == NUMBER:
            ob = load(args + 8 * (operand >> 8))
            known = find(runtime, Py_TYPE(ob))
            if known == 0 or structs.entry_at(known).kind != structs.KIND_INT:
                return False
            value = c.PyLong_AsLongLongAndOverflow(ob, overflow)
            if value < 0 or value > _MAX_EXTENT:
                return False
            store(variables + 8 * (operand & 0xFF), value)
        elif operation in (NAME, EXACTLY):
            if cursor >= ndim:
                return False
            extent = load(shape + 8 * cursor)
            cursor += 1
            if operation == EXACTLY:
                if extent != operand:
                    return False
            elif load(variables + 8 * operand) == _UNSET:
                store(variables + 8 * operand, extent)
            elif load(variables + 8 * operand) != extent:
                return False
        elif operation == REST:
            count = ndim - operand
            if count < 0 or (rest_count != _UNSET and rest_count != count):
                return False
            for i in range(count):
                extent = load(shape + 8 * (cursor + i))
                if rest_count != _UNSET and load(rest + 8 * i) != extent:
                    return False
                store(rest + 8 * i, extent)
            rest_count = count
            cursor += count
        elif operation == END:
            if cursor != ndim:
                return False
        elif operation == TYPE:
            field = operand
            ndim = 0
        elif operation == TYPE_OF:
            field = load(fields + 8 * operand)
            ndim = 0
        elif operation in (PUSH, PUSH_NUMBER):
            store(numbers + 8 * depth, load(variables + 8 * operand) if operation == PUSH else operand)
            depth += 1
            if depth == MAX_VARIABLES:
                return False
        elif operation == EXTENT:
            depth -= 1
            if ndim == MAX_NDIM or load(numbers + 8 * depth) < 0:
                return False
            store(shape + 8 * ndim, load(numbers + 8 * depth))
            ndim += 1
        elif operation == EXTENTS:
            if ndim + rest_count > MAX_NDIM:
                return False
            for i in range(rest_count):
                store(shape + 8 * ndim, load(rest + 8 * i))
                ndim += 1
        elif operation == MAKE:
            given = load(args + 8 * operand)
            if given == context.omitted:
                entry = find(runtime, target_type(context, args, first))
                allocator = structs.entry_at(entry).allocator if entry != 0 else 0
                to_object = structs.entry_at(entry).to_object if entry != 0 else 0
                if allocator == 0 or to_object == 0:
                    return False
                describe(dl_tensor_at(view), 0, ndim, field, shape, 0)
                given = call_word(runtime.allocate, (allocator, to_object, view, runtime.note_error, 0))
                if given == 0:
                    return False
                store(args + 8 * operand, given)
                store(made, load(made) | 1 << (operand - (context.parameter_count - context.output_count)))
            if read_shape(runtime, given, own_shape, view)[0] != ndim:
                return False
            for i in range(ndim):
                if load(own_shape + 8 * i) != load(shape + 8 * i):
                    return False
        else:
            depth -= 1
            right = load(numbers + 8 * depth)
            left = load(numbers + 8 * (depth - 1))
            if abs(left) > _MAX_EXTENT or abs(right) > _MAX_EXTENT or (operation == DIVIDE and right == 0):
                return False
            value = left + right
            if operation == SUBTRACT:
                value = left - right
            elif operation == MULTIPLY:
                if left != 0 and abs(right) > _MAX_EXTENT // abs(left):
                    return False
                value = left * right
            elif operation == DIVIDE:
                value = left // right
            store(numbers + 8 * (depth - 1), value)
    return True
