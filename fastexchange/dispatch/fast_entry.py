"""Generated machine code that calls kernels: trampolines, fast entries of cached calls, entries of bound launches.

A *trampoline* loads a kernel's arguments from 8-byte words, one per leaf of Numba's argument list, and calls the kernel by its
address. It has LLVM types only, so one trampoline serves all kernels with the same list. It is cached on disk. ``boxing``
converts the results.

The calling convention is Numba's own (``numba.core.callconv.CPUCallConv``), from which the function type, the order of arguments,
the return codes and the error values are read.
"""

import functools
import platform
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from llvmlite import ir
from numba.core import types

from ..ground.cfunction import CodeUnit, Part, code_cache
from ..ground.cpython import OB_ITEM
from ..ground.numba_code import can_be_linked, may_keep_arguments
from ..ground.numba_internals import argument_leaves, argument_packer, global_compiler_lock, runtime_library
from . import bound_launch, fast_parts, structs
from .boxing import UnsupportedEntry, is_plain, target_context
from .frame import ARRAY_BYTES

_VOID_POINTER = ir.IntType(8).as_pointer()
_INT32, _WORD = ir.IntType(32), ir.IntType(64)


def _as_word_sized(llvm_type):
    """The LLVM type that a trampoline loads: one type for all pointers, so that more signatures share a trampoline."""
    if isinstance(llvm_type, ir.PointerType):
        return _VOID_POINTER
    if isinstance(llvm_type, (ir.FloatType, ir.DoubleType, ir.HalfType)):
        return llvm_type
    if isinstance(llvm_type, ir.IntType) and llvm_type.width <= 64:
        return llvm_type
    raise UnsupportedEntry(f"an argument of LLVM type {llvm_type} is wider than a word")


@global_compiler_lock
def trampoline(given: tuple, taken: tuple) -> int:
    """Return the address of ``int (*)(kernel, result, excinfo, words)`` for a kernel with argument types `taken`.

    `given`: the Numba types of the words. Values of other types than `taken` (an int for an explicit signature with float64) are
    cast as by Numba's dispatcher. The function returns Numba's return code.
    """
    context = target_context()
    leaves = [_as_word_sized(t) for t in argument_leaves(context, given)]
    if given == taken:
        key: tuple = ("trampoline", tuple(str(leaf) for leaf in leaves))
    else:
        key = ("casting-trampoline", given, taken)
    build = functools.partial(_build_trampoline, context, leaves, given, taken)
    return code_cache.get(key, build, __name__, persist=given == taken or all(map(is_plain, given + taken)))[0]


def _build_trampoline(context, leaves, given, taken):
    unit = CodeUnit(context, "trampoline", ir.FunctionType(_INT32, [_VOID_POINTER] * 4))
    kernel, result, excinfo, words = unit.function.args
    builder = unit.builder
    words = builder.bitcast(words, _WORD.as_pointer())
    _clear_excinfo(unit, excinfo)
    builder.ret(_call_kernel(context, unit, kernel, [result, excinfo], words, leaves, given, taken))
    unit.linked.append(runtime_library())
    return unit.finish()


def _call_kernel(context, unit, kernel, pointers, words, leaves, given, taken):
    """Emit the call of the kernel with `leaves` from `words`, cast where `given` and `taken` differ. Returns its return code.

    `pointers`: to the result, and to a word for the ``excinfo *``, which :func:`_clear_excinfo` has cleared.
    """
    builder = unit.builder
    loaded = _load_leaves(builder, words, leaves)
    if given != taken:
        packer = argument_packer(context, given)
        loaded = [
            builder.bitcast(value, wanted) if isinstance(wanted, ir.PointerType) else value
            for value, wanted in zip(loaded, packer.argument_types, strict=True)
        ]
        values = packer.from_arguments(builder, loaded)
        values = [
            context.cast(builder, value, source, target) if source != target else value
            for value, source, target in zip(values, given, taken, strict=True)
        ]
        loaded = list(argument_packer(context, taken).as_arguments(builder, values))
    signature = ir.FunctionType(_INT32, [_VOID_POINTER, _VOID_POINTER, *(value.type for value in loaded)])
    return builder.call(builder.bitcast(kernel, signature.as_pointer()), [*pointers, *loaded])


def _clear_excinfo(unit, excinfo):
    """Emit a store of NULL to the word at the pointer `excinfo`. Returns the pointer.

    The code of a ``try`` takes any other value for a raised exception. Emit the store in a block before the call's: LLVM does not
    move the loads of arguments over a store in the same block, and would copy all words to the stack (32 arrays: 1.4 times the
    time).
    """
    unit.builder.store(_WORD(0), unit.builder.bitcast(excinfo, _WORD.as_pointer()))
    return excinfo


def _write(builder, words):
    """Emit a barrier (no instruction): the `words` are in memory here, so all that they are read from has been read."""
    builder.asm(ir.FunctionType(ir.VoidType(), [words.type]), "", "r,~{memory}", [words], side_effect=True)


def _load_leaves(builder, words, leaves):
    """Load a leaf of each LLVM type from its word."""
    loaded = []
    for index, leaf in enumerate(leaves):
        word = builder.gep(words, [ir.Constant(_INT32, index)])
        loaded.append(builder.load(builder.bitcast(word, leaf.as_pointer())))
    return loaded


MAX_POSTPONED_WORDS = 320
"""LLVM postpones loads to the kernel's call. With more words, it must not: arguments and words no longer fit the first cache.

``python perf/run.py --only calls``: 58 NumPy arrays.
"""

_VIEWS = (structs.KIND_EXCHANGE, structs.KIND_MANAGED)
_ARRAYS = (structs.KIND_NDARRAY, structs.KIND_STRING, *_VIEWS)
"""Kinds of values that have a memory block."""
_FALLIBLE = (structs.KIND_STRING, *_VIEWS)
"""Kinds whose parts may return ``fast_parts.FAILED``."""

MAX_INLINED_VIEWS = 6
"""With more views, one function reads all views of a rank: more inlined copies would not fit the instruction cache."""

_PRESERVES_NONE = (platform.system(), platform.machine()) in (("Linux", "x86_64"), ("Linux", "aarch64"))
READER_CONVENTION = "preserve_nonecc" if _PRESERVES_NONE else "fastcc"
"""That function's LLVM calling convention: saving registers that its caller does not use would cost time for each view.

LLVM does not have it for each platform; ``fastcc`` is everywhere.
"""


class Node(NamedTuple):
    """One value that a fast entry reads: an argument or an item of a tuple. A tuple's items follow it."""

    numba_type: Any
    kind: int
    """The kind of its type's entry, one of ``fast_parts.PARTS``."""
    guard: tuple[int, ...]
    """The offsets ``torch_guard.OFFSETS`` of its type's guard, or ()."""
    items: int
    """A tuple's number of items; -1 for any other value."""

    @property
    def rank(self) -> int:
        """The argument `ndim` of its part: an array's rank, a tuple's number of items."""
        return self.items if self.items >= 0 else getattr(self.numba_type, "ndim", 0)

    @property
    def is_contiguous(self) -> bool:
        """Whether it stands for tensors that are C-contiguous, aligned and writable."""
        array = self.numba_type
        return self.kind == structs.KIND_EXCHANGE and array.layout == "C" and array.aligned and array.mutable


def with_items(numba_types) -> list:
    """Numba types, with a tuple's item types after the tuple type."""
    found: list = []
    for numba_type in numba_types:
        found.append(numba_type)
        if isinstance(numba_type, types.BaseTuple):
            found += with_items(cast(Any, numba_type).types)
    return found


@global_compiler_lock
def fast_entry(given: tuple, taken: tuple, nodes: tuple[Node, ...], count: int, boxing: int, holds: bool) -> int:
    """Return the address of a vectorcall function with two more arguments, ``fx_context`` and a cache entry's ``fx_overload``.

    The function makes calls that agree with the cache entry, and leaves others to ``vectorcall.vectorcall_any``. `nodes`: the
    values that it reads, in their order. `count`: of positional arguments. `boxing`: one of ``fast_parts.BOXES_*``. `holds`:
    whether other code may run before the kernel has returned, so the call holds the storages of PyTorch's tensors.
    """
    context = target_context()
    leaves = [_as_word_sized(t) for t in argument_leaves(context, given)]
    casts = () if given == taken else (given, taken)
    read = tuple((node.kind, node.guard, node.rank, node.items, node.is_contiguous) for node in nodes)
    key = ("fast-entry", tuple(str(leaf) for leaf in leaves), read, count, boxing, holds, casts)
    build = functools.partial(_build_fast_entry, context, leaves, given, taken, nodes, count, boxing, holds)
    return code_cache.get(key, build, __name__, persist=not casts or all(map(is_plain, given + taken)))[0]


def _build_fast_entry(context, leaves, given, taken, nodes, count, boxing, holds):
    entry = EntryBuilder("fast_entry", nodes)
    unit, builder = entry.unit, entry.unit.builder
    callable_, args, nargsf, kwnames, own, overload = unit.function.args
    words, own_result = (unit.stack_slot(ir.ArrayType(_WORD, size)) for size in (len(leaves) + 1, 1))
    excinfo = _clear_excinfo(unit, unit.stack_slot(_WORD))
    first = builder.bitcast(words, _WORD.as_pointer())
    frame = fast_parts.enter.call(unit, [own, nargsf, kwnames, _WORD(count)])
    entry.go_on_if(frame)
    arrays, records = fast_parts.arrays_of.call(unit, [frame]), fast_parts.expected_of.call(unit, [overload])
    owners = _owners(nodes, holds)

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
            entry.go_on_if(fast_parts.is_storage_kept.call(unit, [leaf.ob, leaf.record, *owner]))
        used_owners += node.kind in owners
        used_arrays += node.kind in _ARRAYS
    if len(leaves) > MAX_POSTPONED_WORDS:
        _write(builder, first)
    kernel = builder.inttoptr(fast_parts.kernel_of.call(unit, [overload]), _VOID_POINTER)
    result = fast_parts.result_of.call(unit, [frame]) if boxing else builder.ptrtoint(own_result, _WORD)
    pointers = [builder.inttoptr(result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    # 3. Call the kernel, and release what the call owns.
    thread = fast_parts.leave_gil.call(unit, [own]) if holds else None
    code = builder.sext(_call_kernel(context, unit, kernel, pointers, first, leaves, given, taken), _WORD)
    if holds:
        fast_parts.take_gil.call(unit, [thread])
    ending = [own, overload, frame, args, code, result, builder.ptrtoint(excinfo, _WORD)]
    builder.ret(fast_parts.leave.call(unit, [*ending, _WORD(boxing), _WORD(used_arrays), _WORD(used_owners)]))
    builder.position_at_end(entry.differs)
    entry.end_rarely(fast_parts.differ, [own, frame, callable_, args, nargsf, kwnames])
    unit.linked.append(runtime_library())
    return unit.finish()


@global_compiler_lock
def bound_entry(given: tuple, taken: tuple, compiled, boxing: int, has_outputs: bool) -> int:
    """Return the address of the vectorcall of a launch that is bound to arguments of these types. Its frame has their words.

    If possible, the kernel is linked into it, so that only the words that it uses are loaded.
    """
    # The library by identity: symbols of a kernel from the disk cache may belong to another process's kernel.
    key = ("bound-entry", compiled.library, boxing, has_outputs, () if given == taken else (given, taken))
    build = functools.partial(_build_bound_entry, given, taken, compiled, boxing, has_outputs)
    return code_cache.get(key, build, __name__, persist=False)[0]


def _build_bound_entry(given, taken, compiled, boxing, has_outputs):
    context = target_context()
    leaves = [_as_word_sized(t) for t in argument_leaves(context, given)]
    unit = CodeUnit(context, "bound_entry", ir.FunctionType(_WORD, [_WORD] * 4))
    builder = unit.builder
    callable_, args, nargsf, kwnames = unit.function.args
    own_result, excinfo = unit.stack_slot(_WORD), _clear_excinfo(unit, unit.stack_slot(_WORD))
    is_linked = can_be_linked(compiled.library)
    may_keep = not is_linked or may_keep_arguments(compiled.library)
    # If so, no Python code runs between enter and leave: not in the kernel, and no result is boxed, no array escapes.
    is_alone = _WORD(int(is_linked and not may_keep and boxing == fast_parts.BOXES_NONE))
    bound = bound_launch.enter.call(unit, [callable_, nargsf, kwnames, is_alone])
    with builder.if_then(builder.icmp_signed("==", bound, _WORD(0)), likely=False):
        builder.ret(bound_launch.refuse.call(unit, [callable_, args, nargsf, kwnames]))
    words = builder.inttoptr(bound_launch.words_of.call(unit, [bound]), _WORD.as_pointer())
    if is_linked:
        unit.linked.append(compiled.library)
        function_type = context.call_conv.get_function_type(compiled.signature.return_type, compiled.signature.args)
        kernel = ir.Function(unit.module, function_type, compiled.fndesc.llvm_func_name)
    else:
        kernel = builder.inttoptr(bound_launch.kernel_of.call(unit, [bound]), _VOID_POINTER)
    result = builder.inttoptr(bound_launch.result_of.call(unit, [bound]), _VOID_POINTER)
    pointers = [result if boxing else builder.bitcast(own_result, _VOID_POINTER), builder.bitcast(excinfo, _VOID_POINTER)]
    code = builder.sext(_call_kernel(context, unit, kernel, pointers, words, leaves, given, taken), _WORD)
    ending = [bound, code, builder.ptrtoint(excinfo, _WORD), _WORD(boxing), _WORD(int(may_keep)), is_alone]
    ending.append(_WORD(int(has_outputs)))
    builder.ret(bound_launch.leave.call(unit, ending))
    unit.linked.append(runtime_library())
    return unit.finish()


class Leaf(NamedTuple):
    """The next value that a fast entry reads, and where it writes the words: LLVM values."""

    node: Node
    position: int
    """The argument's position."""
    ob: Any
    record: Any
    """The ``fx_expected``."""
    word: Any
    """The pointer to its first word."""
    first_word: int
    """The index of that word."""


def _words_of(numba_type) -> int:
    """The number of words of a leaf of this type."""
    return len(argument_leaves(target_context(), (numba_type,)))


class EntryBuilder:
    """Emits a fast entry: a vectorcall function with two more arguments, ``fx_context`` and a cache entry's ``fx_overload``.

    It reads the arguments one by one, and branches to the block ``differs`` at the first that differs from the cache entry.
    """

    def __init__(self, name: str, nodes: tuple[Node, ...]):
        self.unit = CodeUnit(target_context(), name, ir.FunctionType(_WORD, [_WORD] * 6))
        self.nodes = nodes
        self.differs = self.unit.function.append_basic_block("differs")
        self._views = sum(node.kind in _VIEWS for node in nodes)

    def go_on_if(self, condition) -> None:
        """Emit a branch to ``differs`` unless `condition`, a word or a bit, is true."""
        builder = self.unit.builder
        if condition.type == _WORD:
            condition = builder.icmp_signed("!=", condition, _WORD(0))
        following = self.unit.function.append_basic_block("so_far")
        builder.cbranch(condition, following, self.differs)
        builder.position_at_end(following)

    def leaves(self, args, records, first, count: int, words_of: Callable[[Any], int] = _words_of):
        """Emit loads of the arguments of a call with `count` arguments and of tuples' items, in the order of the nodes.

        Emit the reading of each leaf before asking for the next one. `words_of`: the number of words of a leaf of a type.
        """
        builder = self.unit.builder
        used_words = 0
        position = -1
        pending = [(args, 0, count)]  # address of a tuple's items, how many have been read, how many there are
        for index, node in enumerate(self.nodes):
            while pending[-1][1] == pending[-1][2]:
                pending.pop()
            items, item, of = pending.pop()
            pending.append((items, item + 1, of))
            position += len(pending) == 1
            ob = builder.load(builder.inttoptr(builder.add(items, _WORD(8 * item)), _WORD.as_pointer()))
            record = builder.add(records, _WORD(structs.EXPECTED_SIZE * index))
            yield Leaf(node, position, ob, record, builder.gep(first, [_INT32(used_words)]), used_words)
            if node.items >= 0:
                pending.append((builder.add(ob, _WORD(OB_ITEM)), 0, node.items))
            else:
                used_words += words_of(node.numba_type)

    def read(self, node: Node, values: list, emit: Callable[[list], Any]):
        """Emit the reading of a leaf by ``emit(values)``. Returns its result.

        With many views, one function reads all views with the same rank, guard and contiguity. Beside `values`, `emit` may depend
        on these only.
        """
        if node.kind not in _VIEWS or self._views <= MAX_INLINED_VIEWS:
            return emit(values)
        layout = ".contiguous" if node.is_contiguous else ""
        name = f"view{node.kind}.{node.rank}.{'guarded' if node.guard else 'plain'}{layout}"  # a process has one guard
        return self._call(name, values, emit, READER_CONVENTION)

    def end_rarely(self, part, values: list) -> None:
        """Emit a return of the result of a part, in a function of its own.

        LLVM keeps what leads to a cold function away from the other code, and out of its registers.
        """
        builder = self.unit.builder
        builder.ret(self._call(part.__name__, values, functools.partial(part.call, self.unit), "", "cold"))

    def _call(self, name: str, values: list, emit: Callable[[list], Any], convention: str, *attributes: str):
        """Emit a call of a function of this unit that is not inlined, and at the first call the function. Returns its result."""
        unit = self.unit
        name = f"{unit.symbol}.{name}"
        if name not in unit.module.globals:
            function = ir.Function(unit.module, ir.FunctionType(_WORD, [value.type for value in values]), name)
            function.linkage = "internal"
            function.calling_convention = convention
            for attribute in ("noinline", "noimplicitfloat", *attributes):
                function.attributes.add(attribute)
            outer, unit.builder = unit.builder, ir.IRBuilder(function.append_basic_block("entry"))
            unit.builder.ret(emit(list(function.args)))
            unit.builder = outer
        return unit.builder.call(unit.module.globals[name], values, cconv=convention)


def _owners(nodes: tuple[Node, ...], holds: bool) -> dict[int, Part]:
    """The parts that take what owns the memory of arrays, by the kinds that need an owner."""
    owners = {structs.KIND_MANAGED: fast_parts.take_export}
    if holds:
        owners[structs.KIND_EXCHANGE] = fast_parts.hold_storage
    return {kind: part for kind, part in owners.items() if any(node.kind == kind for node in nodes)}


def _read(unit, node: Node, values: list):
    """Emit the part that reads a node's value. Returns its result."""
    if node.kind == structs.KIND_MANAGED:
        *values, frame, index = values
        return fast_parts.read_export.call(unit, [*values, _WORD(node.rank), frame, index])
    if node.kind == structs.KIND_EXCHANGE:
        reader = fast_parts.read_guarded_view if node.guard else fast_parts.read_view
        return reader.call(unit, [*values, _WORD(node.rank), _WORD(int(node.is_contiguous)), *map(_WORD, node.guard)])
    return fast_parts.PARTS[node.kind].call(unit, [*values, _WORD(node.rank)])
