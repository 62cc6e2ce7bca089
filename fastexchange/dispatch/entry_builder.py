"""What the fast entries of calls (``fast_entry``) and of launches (``cuda.launch_entry``) have in common: reading the arguments.

A fast entry reads one *node* after the other, and leaves the call at the first one that differs from the cache entry.
"""

import functools
import platform
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from llvmlite import ir
from numba.core import types

from ..ground.cfunction import CodeUnit
from ..ground.cpython import OB_ITEM
from ..ground.numba_internals import argument_leaves, target_context, target_context_with_references
from . import structs

_INT32, _WORD = ir.IntType(32), ir.IntType(64)
VIEWS = (structs.KIND_EXCHANGE, structs.KIND_MANAGED)
"""Kinds of tensors that are read by a view."""

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
    """The kind of its type's entry, KIND_MANAGED or one of ``fast_readers.READERS``."""
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

    @property
    def code_depends_on(self) -> tuple:
        """What the code that reads it depends on."""
        return self.kind, self.guard, self.rank, self.items, self.is_contiguous


def with_items(numba_types) -> list:
    """Numba types, with a tuple's item types after the tuple type."""
    found: list = []
    for numba_type in numba_types:
        found.append(numba_type)
        if isinstance(numba_type, types.BaseTuple):
            found += with_items(cast(Any, numba_type).types)
    return found


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
        self.unit = CodeUnit(target_context_with_references(), name, ir.FunctionType(_WORD, [_WORD] * 6))
        self.nodes = nodes
        self.differs = self.unit.function.append_basic_block("differs")
        self._views = sum(node.kind in VIEWS for node in nodes)

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
        if node.kind not in VIEWS or self._views <= MAX_INLINED_VIEWS:
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
