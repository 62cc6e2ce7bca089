"""Fast entries of cached launches: as those of ``dispatch.fast_entry``, but they call the driver.

The arguments' words are stored in an array on the stack, and the driver gets a pointer to each parameter. No frame is needed,
because a launch keeps no arrays and boxes no result.
"""

import functools

from llvmlite import ir
from numba import types

from ..dispatch import fast_parts
from ..dispatch import structs as dispatch
from ..dispatch.entry_builder import EntryBuilder, Node
from ..dispatch.fast_readers import AGREES, DIFFERS, READERS, borrow, borrow_guarded
from ..dispatch.python_calls import refuse_launch
from ..dispatch.torch_guard import OFFSETS_TYPE
from ..ground import cpython as c
from ..ground.cfunction import code_cache, part
from ..ground.cpython import CALLABLE_CONTEXT, Py_TYPE, PyErr_Occurred
from ..ground.disk_cache import claiming
from ..ground.dlpack import CUDA
from ..ground.native import WORDS, call_word, load, stack
from ..ground.numba_internals import global_compiler_lock
from . import structs
from .converting import convert, words_of
from .native_launch import launchable_of, start

__all__ = ["MAX_WORDS", "launch_entry"]

_INT32, _WORD = ir.IntType(32), ir.IntType(64)
MAX_WORDS = 1024
"""The most words of a fast entry, which has them on its stack."""


# ---- parts -----------------------------------------------------------------------------------------------------------


@part(types.intp(types.intp, types.intp, types.intp))
def is_positional_call(nargsf, kwnames, count):
    """Whether a call has `count` positional arguments and no keyword arguments."""
    return types.intp(kwnames == 0 and nargsf & c.NARGS_MASK == count)


_VIEW = types.intp(types.intp, types.intp, WORDS, types.intp, types.intp, types.intp)


@part(_VIEW)
def read_view(ob, expected_address, words, ndim, is_contiguous, in_elements):
    """Read a tensor on a device. Returns AGREES plus the device's number, or another outcome.

    The last four arguments are constants of the entry. `is_contiguous`: whether the tensor has to be. `in_elements`: whether the
    strides of contiguous tensors are written in elements.
    """
    record = dispatch.expected_at(expected_address)
    if Py_TYPE(ob) != record.type:
        return DIFFERS
    return borrow(ob, record, words, ndim, False, CUDA, is_contiguous, in_elements)


@part(types.intp(*_VIEW.args, OFFSETS_TYPE))
def read_guarded_view(ob, expected_address, words, ndim, is_contiguous, in_elements, offsets):
    """:data:`read_view` of a tensor whose type has a guard."""
    record = dispatch.expected_at(expected_address)
    if Py_TYPE(ob) != record.type:
        return DIFFERS
    return borrow_guarded(ob, record, words, ndim, CUDA, is_contiguous, in_elements, offsets)


@part(types.intp(types.intp))
def stream_of(expected_address):
    """The ``current_work_stream`` of a tensor's producer."""
    return dispatch.expected_at(expected_address).stream


@part(types.intp(types.intp, types.intp))
def convert_word(at, code):
    """``converting.convert``."""
    return types.intp(convert(at, code))


@part(types.intp(*[types.intp] * 6))
def launch(context_address, callable_, overload_address, device, stream_function, pointers):
    """Launch the kernel. Returns the result of vectorcall, or -1 if the general path has to make the launch."""
    context = dispatch.context_at(context_address)
    launcher = structs.launcher_at(load(callable_ + CALLABLE_CONTEXT))
    cuda = structs.cuda_at(dispatch.runtime_at(context.runtime).cuda)
    code = stack(1)
    status = start(cuda, launcher, launchable_of(overload_address), device, stream_function, 0, pointers, code)
    if status == dispatch.STATUS_OK:
        context.calls += 1
        return c.new_none()
    if status == dispatch.STATUS_DRIVER:
        return refuse_launch(context, callable_, load(code))
    return -1


@part(types.intp(*[types.intp] * 5))
def differ(context_address, callable_, args, nargsf, kwnames):
    """Make a call that differs from the cache entry by the general path, which raises a pending exception again."""
    if PyErr_Occurred() != 0:
        c.PyErr_Clear()
    return call_word(dispatch.context_at(context_address).vectorcall_any, (callable_, args, nargsf, kwnames))


@part(types.intp(types.intp, types.intp, types.intp))
def fail(context_address, callable_, position):
    """End the call: the producer of the argument at `position` has set an exception."""
    runtime = dispatch.runtime_at(dispatch.context_at(context_address).runtime)
    return call_word(runtime.refuse_argument, (context_address, callable_, position))


# ---- the entry -------------------------------------------------------------------------------------------------------


@claiming
@global_compiler_lock
def launch_entry(
    nodes: tuple[Node, ...], count: int, words: int, parameters: tuple[int, ...], changes: tuple[int, ...]
) -> int:
    """Return the address of a vectorcall function with two more arguments, as ``dispatch.fast_entry.fast_entry``.

    `words`: the number of words of the arguments. `parameters`: the codes of the kernel's parameters (``structs.parameter``).
    `changes`: the codes of the words' conversions (``structs.conversion``).
    """
    read = tuple(node.code_depends_on for node in nodes)
    key = ("cuda-fast-entry", read, count, words, parameters, changes)
    return code_cache.get(key, lambda: _build(nodes, count, words, parameters, changes), __name__)[0]


def _build(nodes, count, word_count, parameters, changes):
    entry = EntryBuilder("cuda_fast_entry", nodes)
    unit, builder = entry.unit, entry.unit.builder
    callable_, args, nargsf, kwnames, own, overload = unit.function.args
    words = unit.stack_slot(ir.ArrayType(_WORD, word_count + 1))  # the last one is 0: _point_at_parameters
    pointers = unit.stack_slot(ir.ArrayType(_WORD, len(parameters) + 1))
    entry.go_on_if(is_positional_call.call(unit, [nargsf, kwnames, _WORD(count)]))
    first = builder.bitcast(words, _WORD.as_pointer())
    records = fast_parts.expected_of.call(unit, [overload])
    in_elements = any(code & 0xFF == structs.ELEMENTS for code in parameters)
    counted: set[int] = set()  # the words of arrays whose strides are read in elements
    device, stream = _WORD(-1), _WORD(0)
    for leaf in entry.leaves(args, records, first, count, words_of):
        node = leaf.node
        if node.kind != dispatch.KIND_EXCHANGE:
            values = [leaf.ob, leaf.record, _WORD(0), leaf.word, _WORD(node.rank)]
            entry.go_on_if(READERS[node.kind].call(unit, values))
            continue
        if in_elements and node.is_contiguous:
            counted.update(range(leaf.first_word, leaf.first_word + words_of(node.numba_type)))
        outcome = entry.read(node, [leaf.ob, leaf.record, leaf.word], functools.partial(_read, unit, node, in_elements))
        with builder.if_then(builder.icmp_signed("<", outcome, _WORD(DIFFERS)), likely=False):
            builder.ret(fail.call(unit, [own, callable_, _WORD(leaf.position)]))
        is_there = builder.icmp_signed(">", outcome, _WORD(DIFFERS))
        number = builder.sub(outcome, _WORD(AGREES))
        if stream.__class__ is ir.Constant:
            stream = stream_of.call(unit, [leaf.record])
            device = number
        else:
            is_there = builder.and_(is_there, builder.icmp_signed("==", number, device))
        entry.go_on_if(is_there)
    for code in changes:
        at = builder.ptrtoint(builder.gep(first, [_INT32(code & 0xFFFFFF)]), _WORD)
        entry.go_on_if(convert_word.call(unit, [at, _WORD(code)]))
    codes = [_as_word(code) if _word_of(code) in counted else code for code in parameters]
    _point_at_parameters(builder, first, pointers, word_count, codes)
    result = launch.call(unit, [own, callable_, overload, device, stream, builder.ptrtoint(pointers, _WORD)])
    entry.go_on_if(builder.icmp_signed("!=", result, _WORD(-1)))
    builder.ret(result)
    builder.position_at_end(entry.differs)
    entry.end_rarely(differ, [own, callable_, args, nargsf, kwnames])
    return unit.finish()


def _read(unit, node, in_elements: bool, values: list):
    known = [_WORD(node.rank), _WORD(int(node.is_contiguous)), _WORD(int(in_elements))]
    reader = read_guarded_view if node.guard else read_view
    return reader.call(unit, [*values, *known, *map(_WORD, node.guard)])


def _word_of(code: int) -> int:
    return code >> structs.PARAMETER_WORD_SHIFT & 0xFFFFFF


def _as_word(code: int) -> int:
    """The code of a parameter whose word has elements already, not bytes."""
    return structs.parameter(structs.WORD, _word_of(code)) if code & 0xFF == structs.ELEMENTS else code


_LANES = 4


def _point_at_parameters(builder, first, pointers, zero: int, parameters) -> None:
    """Emit ``native_launch.point_at_parameters`` for parameters that are known at compile time.

    `zero`: the index of the word that becomes 0. All pointers are at a fixed distance from `first`, so _LANES of them are stored
    at a time.
    """
    builder.store(_WORD(0), builder.gep(first, [_INT32(zero)]))
    offsets = []
    for code in parameters:
        word = _word_of(code)
        at = builder.gep(first, [_INT32(word)])
        if code & 0xFF == structs.ELEMENTS:
            builder.store(builder.sdiv(builder.load(at), _WORD(code >> structs.PARAMETER_SIZE_SHIFT), flags=("exact",)), at)
        elif code & 0xFF == structs.JOINED:
            low = builder.and_(builder.load(at), _WORD(0xFFFFFFFF))
            high = builder.shl(builder.load(builder.gep(at, [_INT32(1)])), _WORD(32))
            builder.store(builder.or_(low, high), at)
        offsets.append(8 * (zero if code & 0xFF == structs.ZERO else word))
    base = builder.ptrtoint(first, _WORD)
    for begin in range(0, len(offsets), _LANES):
        some = offsets[begin : begin + _LANES]
        vector = ir.VectorType(_WORD, len(some))
        bases = ir.Constant(vector, ir.Undefined)
        for lane in range(len(some)):
            bases = builder.insert_element(bases, base, _INT32(lane))
        place = builder.bitcast(builder.gep(pointers, [_INT32(0), _INT32(begin)]), vector.as_pointer())
        builder.store(builder.add(bases, ir.Constant(vector, some)), place, align=8)
