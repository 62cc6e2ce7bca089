"""The names in a function's bytecode: which globals and free variables it reads, and which of their attributes."""

import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Iterator
from types import CodeType

__all__ = ["names_in", "parts_of", "steps", "steps_by_dis"]


def names_in(code: CodeType) -> tuple[set[tuple[str, tuple[str, ...]]], str | None]:
    """The names in a function's code, and one module that it imports, or None."""
    found, imported = set(), None
    for part in parts_of(code):
        chain: list[str] = []
        for operation, name in steps(part):
            if chain and operation in _ATTRIBUTES:
                chain.append(name)
                continue
            if chain:
                found.add((chain[0], tuple(chain[1:])))
            is_name = operation in _GLOBALS or (operation in _CELLS and name in code.co_freevars)
            chain = [name] if is_name else []
            if operation == "IMPORT_NAME":
                imported = imported or name
    return found, imported


_ATTRIBUTES = "LOAD_ATTR", "LOAD_METHOD"
_GLOBALS = "LOAD_GLOBAL", "LOAD_NAME"
_CELLS = "LOAD_DEREF", "LOAD_CLASSDEREF"
_READ = {dis.opmap[name]: name for name in (*_ATTRIBUTES, *_GLOBALS, *_CELLS, "IMPORT_NAME") if name in dis.opmap}


def steps_by_dis(code: CodeType) -> Iterator[tuple[str, str]]:
    """The operations of code that read names, each with its name; any other as ("", ""). `dis` decides what they are."""
    for instruction in dis.get_instructions(code):
        if instruction.opcode in _READ:
            yield instruction.opname, instruction.argval
        elif instruction.opname != "EXTENDED_ARG":  # a part of the next: its name is the 257th, or a later one
            yield "", ""


def _steps_here(code: CodeType, shifted: tuple[str, ...], in_one: bool) -> Iterator[tuple[str, str]]:
    """The same, without an object of each instruction, with its line and its labels, which `dis` makes.

    `shifted`: the operations whose argument is twice the name's number. `in_one`: whether cells are numbered after the other
    variables, and those of parameters as parameters. Source: Include/opcode.h, and Objects/codeobject.c.
    """
    variables = code.co_varnames if in_one else ()
    variables = (*variables, *[each for each in code.co_cellvars if each not in variables], *code.co_freevars)
    words, further = code.co_code, 0
    for index in range(0, len(words), 2):
        number, argument = words[index], words[index + 1] | further
        if number == dis.EXTENDED_ARG:
            further = argument << 8
            continue
        further = 0
        if (name := _READ.get(number)) is not None:
            yield name, (variables if name in _CELLS else code.co_names)[argument >> (name in shifted)]
        elif number:  # 0: room for what the interpreter has learned
            yield "", ""


def _sample(y, z, x):  # the third variable, and the first cell
    from os import path as xx

    def inner():
        return x, xz, itertools.chain.from_iterable(xx.y), xz.co_name

    xz = x
    return inner, itertools.chain.from_iterable(x), len(itertools.chain.from_iterable)


def parts_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code and the code of all functions inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from parts_of(each)


def _find_steps() -> Callable[[CodeType], Iterator[tuple[str, str]]]:
    """The quick way for this interpreter, the one that agrees with `dis`; if there is none, `dis`."""
    for shifted, in_one in itertools.product([("LOAD_GLOBAL", "LOAD_ATTR"), ("LOAD_GLOBAL",), ()], [True, False]):
        with contextlib.suppress(IndexError):
            quick = functools.partial(_steps_here, shifted=shifted, in_one=in_one)
            if all(list(quick(part)) == list(steps_by_dis(part)) for part in parts_of(_sample.__code__)):
                return quick
    return steps_by_dis


steps = _find_steps()
