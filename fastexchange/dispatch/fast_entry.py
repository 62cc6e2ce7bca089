"""Fast entries: generated functions that make the calls of one cache entry, from the arguments to the kernel and back.

A fast entry consists of parts, which are inlined into it, and the kernel's call. ``fast_parts`` has the parts around the kernel's
call, ``fast_readers`` one for each kind of argument, ``fast_exports`` those for tensors whose memory the call owns.
"""

import functools

from llvmlite import ir

from ..ground.cfunction import Part, code_cache
from ..ground.disk_cache import claiming
from ..ground.numba_internals import global_compiler_lock, runtime_library, target_context_with_references
from . import fast_exports, fast_parts, fast_readers, structs
from .boxing import is_plain
from .entry_builder import VIEWS, EntryBuilder, Node
from .frame import ARRAY_BYTES
from .trampoline import call_kernel, clear_excinfo, word_types_of

_VOID_POINTER = ir.IntType(8).as_pointer()
_WORD = ir.IntType(64)

MAX_POSTPONED_WORDS = 320
"""LLVM postpones loads to the kernel's call. With more words, it must not: arguments and words no longer fit the first cache.

``python perf/run.py --only calls``: 58 NumPy arrays.
"""

_ARRAYS = (structs.KIND_NDARRAY, structs.KIND_STRING, *VIEWS)
"""Kinds of values that have a memory block."""
_FALLIBLE = (structs.KIND_STRING, *VIEWS)
"""Kinds whose parts may return ``fast_readers.FAILED``."""


@claiming
@global_compiler_lock
def fast_entry(
    given: tuple, taken: tuple, nodes: tuple[Node, ...], count: int, boxing: int, needs_owning_exports: bool
) -> int:
    """Return the address of a vectorcall function with two more arguments, ``fx_context`` and a cache entry's ``fx_overload``.

    The function makes calls that agree with the cache entry, and leaves others to ``vectorcall.vectorcall_any``.

    `given` and `taken`: the Numba types of the arguments and of the kernel's parameters. `nodes`: the values that the function
    reads, in their order. `count`: of positional arguments. `boxing`: one of ``boxing.BOXES_*``. `needs_owning_exports`: whether
    other code may run before the kernel has returned, so the call holds the storages of PyTorch's tensors.
    """
    word_types = word_types_of(given)
    casts = () if given == taken else (given, taken)
    read = tuple(node.code_depends_on for node in nodes)
    key = ("fast-entry", tuple(map(str, word_types)), read, count, boxing, needs_owning_exports, casts)
    build = functools.partial(_build_fast_entry, word_types, given, taken, nodes, count, boxing, needs_owning_exports)
    return code_cache.get(key, build, __name__, persist=not casts or all(map(is_plain, given + taken)))[0]


def _build_fast_entry(word_types, given, taken, nodes, count, boxing, needs_owning_exports):
    context = target_context_with_references()
    entry = EntryBuilder("fast_entry", nodes)
    unit, builder = entry.unit, entry.unit.builder
    callable_, args, nargsf, kwnames, own, overload = unit.function.args
    words, unused_result = (unit.stack_slot(ir.ArrayType(_WORD, size)) for size in (len(word_types) + 1, 1))
    excinfo = clear_excinfo(unit, unit.stack_slot(_WORD))
    first = builder.bitcast(words, _WORD.as_pointer())
    frame = fast_parts.enter.call(unit, [own, nargsf, kwnames, _WORD(count)])
    entry.go_on_if(frame)
    arrays, records = fast_parts.arrays_of.call(unit, [frame]), fast_parts.expected_of.call(unit, [overload])
    owners = _owners(nodes, needs_owning_exports)

    def go_on_if_it_agrees(outcome, leaf):
        if leaf.node.kind in _FALLIBLE:
            with builder.if_then(builder.icmp_signed("<", outcome, _WORD(0)), likely=False):
                entry.end_rarely(fast_parts.fail, [own, frame, callable_, _WORD(leaf.position)])
        entry.go_on_if(builder.icmp_signed(">", outcome, _WORD(0)))

    # 1. Take what owns memory, because this may run Python code.
    taken_owners = 0
    for leaf in entry.leaves(args, records, first, count) if any(owners.values()) else ():
        if leaf.node.items >= 0:
            entry.go_on_if(_read(unit, leaf.node, [leaf.ob, leaf.record, arrays, leaf.word]))
        elif (take := owners.get(leaf.node.kind)) is not None:
            go_on_if_it_agrees(take.call(unit, [leaf.ob, leaf.record, frame, _WORD(taken_owners)]), leaf)
            taken_owners += 1
    # 2. Read all values. From here on no Python code runs until the kernel has returned.
    used_arrays = used_owners = 0
    for leaf in entry.leaves(args, records, first, count):
        node, owner = leaf.node, [frame, _WORD(used_owners)]
        values = [leaf.ob, leaf.record, builder.add(arrays, _WORD(ARRAY_BYTES * used_arrays)), leaf.word]
        if node.kind == structs.KIND_MANAGED:
            values += owner
        go_on_if_it_agrees(entry.read(node, values, functools.partial(_read, unit, node)), leaf)
        if node.kind == structs.KIND_EXCHANGE and node.kind in owners:
            entry.go_on_if(fast_exports.is_storage_kept.call(unit, [leaf.ob, leaf.record, *owner]))
        used_owners += node.kind in owners
        used_arrays += node.kind in _ARRAYS
    if len(word_types) > MAX_POSTPONED_WORDS:
        _finish_loads(builder, first)
    # 3. Call the kernel.
    kernel = builder.inttoptr(fast_parts.kernel_of.call(unit, [overload]), _VOID_POINTER)
    result = fast_parts.result_of.call(unit, [frame]) if boxing else builder.ptrtoint(unused_result, _WORD)
    pointers = [builder.inttoptr(result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    thread = fast_parts.leave_gil.call(unit, [own]) if needs_owning_exports else None
    code = builder.sext(call_kernel(context, unit, kernel, pointers, first, word_types, given, taken), _WORD)
    if needs_owning_exports:
        fast_parts.take_gil.call(unit, [thread])
    # 4. Box the result, and release what the call owns.
    ending = [own, overload, frame, args, code, result, builder.ptrtoint(excinfo, _WORD)]
    builder.ret(fast_parts.leave.call(unit, [*ending, _WORD(boxing), _WORD(used_arrays), _WORD(used_owners)]))
    # A call that differs from the cache entry.
    builder.position_at_end(entry.differs)
    entry.end_rarely(fast_parts.differ, [own, frame, callable_, args, nargsf, kwnames])
    unit.linked.append(runtime_library())  # a cast may call it, and parts from a wheel do not bring it
    return unit.finish()


def _finish_loads(builder, words):
    """Emit a barrier, which is no instruction: LLVM stores all `words` before it, so their values are loaded before it, too."""
    builder.asm(ir.FunctionType(ir.VoidType(), [words.type]), "", "r,~{memory}", [words], side_effect=True)


def _owners(nodes: tuple[Node, ...], needs_owning_exports: bool) -> dict[int, Part]:
    """The parts that take what owns the memory of arrays, by the kinds of nodes that need an owner."""
    owners = {structs.KIND_MANAGED: fast_exports.take_export}
    if needs_owning_exports:
        owners[structs.KIND_EXCHANGE] = fast_exports.hold_storage
    return {kind: part for kind, part in owners.items() if any(node.kind == kind for node in nodes)}


def _read(unit, node: Node, values: list):
    """Emit the part that reads a node's value. Returns its result."""
    if node.kind == structs.KIND_MANAGED:
        *values, frame, index = values
        return fast_exports.read_export.call(unit, [*values, _WORD(node.rank), frame, index])
    if node.kind == structs.KIND_EXCHANGE:
        reader = fast_readers.read_guarded_view if node.guard else fast_readers.read_view
        return reader.call(unit, [*values, _WORD(node.rank), _WORD(int(node.is_contiguous)), *map(_WORD, node.guard)])
    return fast_readers.READERS[node.kind].call(unit, [*values, _WORD(node.rank)])
