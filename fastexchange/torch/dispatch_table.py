"""Dispatch tables of PyTorch's operators: whether a call would come to what this package has registered, and to nothing else.

An operator has a table with a row for each dispatch key: a pointer to a *functor*, which a registration has made, and one to a
function. A program may register implementations at any time, from Python or C++. Native code compares one word of each row that
a call with plain tensors comes by. Where the rows are is found by experiment; where that fails, PyTorch's dispatcher makes all
calls of operators.

Source: ``aten/src/ATen/core/dispatch/OperatorEntry.h``, ``aten/src/ATen/core/boxing/KernelFunction.h``.
"""

import ctypes
import itertools
from collections.abc import Iterator

from ..ground.once import once
from ..ground.passing import reraise_passing
from ..ground.readable import checked_address, is_readable
from .offsets import alone

__all__ = ["Table", "why_no_tables"]

_ON_CPU = "BackendSelect", "AutocastCPU", "ADInplaceOrView", "AutogradCPU", "CPU"
_ON_CUDA = "AutocastCUDA", "AutogradCUDA", "CUDA"
_HANDLE = object.__basicsize__
"""Where an object of pybind11's has the address of the C++ object."""
_CHUNK, _CHUNKS = 2048, 8  # bytes, of an operator's definition

Row = tuple[int, int]  # functor, function


class Table:
    """The part of an operator's dispatch table that calls with plain tensors come by. Made before anything is registered."""

    def __init__(self, overload, is_on_cuda: bool):
        self._rows: dict[int, Row] = {}
        self._clean: dict[int, Row] = {}
        if not why_no_tables():
            start = _definition_of(_handle(overload._schema.name))
            for key in _ON_CPU + _ON_CUDA * is_on_cuda:
                offset, self._clean[start + offset] = _known[key]
                self._rows[start + offset] = _row_at(start + offset)

    def words(self) -> list[int]:
        """Return, for each row, the address of a word and what is there while a call comes to what has been registered since.

        Of a row where nothing has been registered: what PyTorch has there for all operators. []: nothing is known.
        """
        words = []
        for at, before in self._rows.items():
            now = _row_at(at)
            functor, function = now if now != before else self._clean[at]
            words += [at, functor] if functor else [at + 8, function]  # a functor that lives has its address alone
        return words


_known: dict[str, tuple[int, Row]] = {}
"""By dispatch key: where its row is in an operator's definition, and what it is of an operator without an implementation."""


@once
def why_no_tables() -> str:
    """Why native code cannot read dispatch tables; "" if it can. Imports PyTorch."""
    try:
        _known.update(alone(_find_rows))
    except Exception as error:  # a PyTorch with other private names, or another layout
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"
    return ""


def _handle(name: str):
    import torch

    return torch._C._dispatch_find_schema_or_throw(name, "")


def _definition_of(handle) -> int:
    """The address of the C++ object that an operator's handle refers to. It lives until the operator's name is free."""
    inner = checked_address(_word_at(id(handle) + _HANDLE), 8)
    return checked_address(_word_at(inner), _CHUNK)


def _word_at(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _row_at(address: int) -> Row:
    return _word_at(address), _word_at(address + 8)


def _find_rows() -> dict[str, tuple[int, Row]]:
    """Register implementations of some operators, and look at what changes. Raises ValueError if the rows are not found."""
    import torch

    names = "first", "second", "third"
    registered = torch.library.Library("fastexchange_experiment", "FRAGMENT")
    try:
        for name in names:
            registered.define(f"{name}(Tensor x) -> Tensor")
        starts = {name: _definition_of(_handle(f"fastexchange_experiment::{name}")) for name in names}
        counts = {name: _readable_from(start) for name, start in starts.items()}
        clean = {name: _words_from(start, counts[name]) for name, start in starts.items()}
        changes = {
            (key, name): _changes(torch, name, key, starts[name], counts[name])
            for key in _ON_CPU + _ON_CUDA
            for name in names
        }
    finally:
        registered._destroy()
    # All rows get the same function, which calls a functor's Python function. Memory behind the operators changes, too.
    functions = set.intersection(*({function for _, function in found.values()} for found in changes.values()))
    found = {}
    for key in _ON_CPU + _ON_CUDA:
        offsets = set.intersection(
            *({at for at, (_, function) in changes[key, name].items() if function in functions} for name in names)
        )
        if len(offsets) != 1:
            raise ValueError(f"the row of {key} is found at {sorted(offsets)}, not at one place")
        at = offsets.pop()
        rows = {(clean[name][at // 8], clean[name][at // 8 + 1]) for name in names}
        if len(rows) != 1:
            raise ValueError(f"the row of {key} differs between operators without an implementation")
        found[key] = at, rows.pop()
    if len({at for at, _ in found.values()}) != len(found):
        raise ValueError("rows of two dispatch keys are found at one place")
    return found


def _changes(torch, name: str, key: str, start: int, count: int) -> dict[int, Row]:
    """The offsets where a registration puts a pointer and another word, until it is taken back; and these two."""
    before = _words_from(start, count)
    registered = torch.library.Library("fastexchange_experiment", "FRAGMENT")
    registered.impl(name, lambda x: x, key)
    while_registered = _words_from(start, count)
    registered._destroy()
    after = _words_from(start, count)
    return {8 * at: row for at, row in _pointers(before, while_registered) if before[at : at + 2] == after[at : at + 2]}


def _pointers(before: list[int], now: list[int]) -> Iterator[tuple[int, Row]]:
    for at in range(len(now) - 1):
        if now[at] != before[at] and now[at + 1] != before[at + 1] and now[at + 1] and is_readable(now[at], 8):
            yield at, (now[at], now[at + 1])


def _words_from(start: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(start))


def _readable_from(start: int) -> int:
    """How many words of an operator's definition, and of what lies behind it, can be read."""
    chunks = range(start, start + _CHUNK * _CHUNKS, _CHUNK)
    return sum(_CHUNK // 8 for _ in itertools.takewhile(lambda chunk: is_readable(chunk, _CHUNK), chunks))
