"""The notation of ``fast_args(out=…)``: which shape and element type a kernel's outputs have, given its inputs.

``"x[n, d], w[d] -> y[n, d]"``: left of the arrow parameters with the names of their dimensions, right of it the outputs, which
are the kernel's last parameters. A dimension is a name, which stands for one extent throughout, a number, or ``...`` for any
number of dimensions, the same ones throughout. A parameter without brackets is an int, and its name one of the names:
``"x[n], k -> largest[k]"``. Dimensions of outputs may be computed, with ``+ - * //`` and parentheses. An output has the element
type of the first tensor on the left; or what follows a colon: ``-> counts[bins]: int64``, or that of a parameter, ``-> y[n]: w``.
"""

import ast
import re
from typing import NamedTuple

from .dlpack_types import DLDataType
from .parameters import Parameters
from .safe_repr import shown

__all__ = ["MAX_PARAMETERS", "Input", "Output", "Pattern", "pattern_of"]

MAX_PARAMETERS = 64

Rest = type(...)
_ITEM = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*(?:\[(?P<dims>[^\[\]]*)\])?\s*(?::\s*(?P<dtype>\w+))?\s*(?:,|$)")
_LONGEST = 1000
_LARGEST = 2**40
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


class Input(NamedTuple):
    """A tensor on the left. `dims`: names, numbers, at most one ``...``."""

    name: str
    position: int
    dims: tuple["str | int | Rest", ...]  # type: ignore[valid-type]


class Output(NamedTuple):
    """A tensor on the right. `dims`: expressions, ``...``. `dtype`: an element type, or the position of a tensor that has it."""

    name: str
    position: int
    dims: tuple["ast.expr | Rest", ...]  # type: ignore[valid-type]
    dtype: "DLDataType | int"


class Pattern:
    """A parsed notation. Raises ValueError for one that makes no sense with these parameters, TypeError if it is no string."""

    def __init__(self, text: str, names: list[str], what: str):
        self._text, self._names, self._what = text, names, what
        if not isinstance(text, str):
            raise TypeError(f"{what}: out is a notation such as 'x[n] -> y[n]', not {shown(text)}")
        if len(text) > _LONGEST:
            self._wrong(f"it has more than {_LONGEST} characters")
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            self._wrong("it needs one '->', inputs on the left and outputs on the right")
        self.inputs: list[Input] = []
        self.numbers: dict[str, int] = {}
        """Parameters that are dimensions themselves: their positions."""
        for name, dims, dtype in self._items(left):
            if dtype is not None:
                self._wrong(f"{name!r} is an input: it has an element type already")
            if dims is None:
                self.numbers[name] = self._position(name)
            else:
                self.inputs.append(Input(name, self._position(name), tuple(map(self._dimension, dims))))
        if not self.inputs:
            self._wrong("it needs a tensor on the left")
        for each in self.inputs:
            if each.dims.count(...) > 1:
                self._wrong(f"{each.name!r} has '...' more than once")
        self.variables = list(self.numbers)
        """All names of dimensions."""
        for each in self.inputs:
            self.variables += [dim for dim in each.dims if isinstance(dim, str) and dim not in self.variables]
        self.has_rest = any(... in each.dims for each in self.inputs)
        self.outputs = [self._output(*item) for item in self._items(right)]
        last = list(range(len(names) - len(self.outputs), len(names)))
        if not last or [each.position for each in self.outputs] != last:
            listed = ", ".join(each.name for each in self.outputs)
            self._wrong(f"its outputs, {listed or 'none'}, are not the last parameters, in their order ({', '.join(names)})")
        given = [*self.numbers.values(), *(each.position for each in self.inputs)]
        if any(given.count(position) > 1 or position >= len(names) - len(self.outputs) for position in given):
            self._wrong("a parameter stands in it twice")

    def __str__(self) -> str:
        return self._text

    def _wrong(self, why: str):
        raise ValueError(f"{self._what}: out={self._text!r}: {why}") from None

    def _items(self, text: str) -> list[tuple]:
        """(name, the texts of its dimensions or None, the name of its type or None) of each item."""
        found, end = [], 0
        while text[end:].strip():
            match = _ITEM.match(text, end)
            if match is None:
                self._wrong(f"cannot read {text[end:].strip()!r}; write name[dimension, dimension]")
            assert match is not None
            dims = match["dims"]
            parts = None if dims is None else [part.strip() for part in dims.split(",")] if dims.strip() else []
            found.append((match["name"], parts, match["dtype"]))
            end = match.end()
        return found

    def _position(self, name: str) -> int:
        if name not in self._names:
            self._wrong(f"{name!r} is no parameter of the kernel ({', '.join(self._names)})")
        return self._names.index(name)

    def _dimension(self, text: str):
        if text == "...":
            return ...
        if text.isdecimal():
            if int(text) > _LARGEST:
                self._wrong(f"{text} is larger than any extent")
            return int(text)
        if not text.isidentifier():
            self._wrong(f"{text!r} is no dimension of an input: a name, a number or '...'")
        return text

    def _output(self, name: str, dims, dtype) -> Output:
        if dims is None:
            self._wrong(f"output {name!r} has no dimensions; write {name}[...] or {name}[] ")
        if dims.count("...") > 1 or ("..." in dims and not self.has_rest):
            self._wrong(f"output {name!r}: '...' stands for dimensions that an input has, once")
        first = self.inputs[0].position
        known: DLDataType | int = first if dtype is None else self._dtype(dtype)
        return Output(name, self._position(name), tuple(map(self._expression, dims)), known)

    def _dtype(self, name: str) -> "DLDataType | int":
        for each in self.inputs:
            if each.name == name:
                return each.position
        try:
            known = DLDataType.from_str(name)
        except ValueError:
            self._wrong(f"{name!r} is neither an element type such as float32 nor a tensor on its left")
            raise
        if known.lanes != 1:
            self._wrong(f"{name!r} is a vector type; write {DLDataType(known.code, known.bits)} and a dimension of {known.lanes}")
        return known

    def _expression(self, text: str):
        if text == "...":
            return ...
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:
            self._wrong(f"{text!r} is no dimension")
        self._check(tree, text)
        return tree

    def _check(self, tree: ast.expr, text: str) -> None:
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
            self._check(tree.left, text)
            self._check(tree.right, text)
        elif isinstance(tree, ast.Name):
            if tree.id not in self.variables:
                self._wrong(f"{tree.id!r} is no dimension of an input")
        elif not isinstance(tree, ast.Constant) or type(tree.value) is not int:
            self._wrong(f"{text!r} is no dimension: names and numbers, with + - * // and parentheses")
        elif tree.value > _LARGEST:
            self._wrong(f"{tree.value} is larger than any extent")

    # ---- its meaning -------------------------------------------------------------------------------------------------

    def shape_of(self, output: Output, extents: dict[str, int], rest: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an output. Raises ValueError for one that is negative, or a division by zero."""
        shape: list[int] = []
        for dim in output.dims:
            if dim is ...:
                shape += rest
                continue
            try:
                extent = _value(dim, extents)
            except ZeroDivisionError:
                extent = None
            if extent is None or not 0 <= extent < 2**63:
                given = ", ".join(f"{name}={value}" for name, value in extents.items())
                why = "divides by zero" if extent is None else f"is {extent}"
                raise ValueError(f"its output {output.name!r} cannot be made: dimension {ast.unparse(dim)} {why} ({given})")
            shape.append(extent)
        return tuple(shape)


def _value(tree: ast.expr, extents: dict[str, int]) -> int:
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, extents), _value(tree.right, extents)
        if isinstance(tree.op, ast.Add):
            return left + right
        if isinstance(tree.op, ast.Sub):
            return left - right
        return left * right if isinstance(tree.op, ast.Mult) else left // right
    return extents[tree.id] if isinstance(tree, ast.Name) else tree.value  # type: ignore[attr-defined]


def pattern_of(text: str, parameters: Parameters, what: str) -> Pattern:
    """The notation of a kernel with these parameters. Raises ValueError for kernels that cannot declare outputs."""
    if parameters.variadic is not None or parameters.positional < len(parameters.names):
        raise ValueError(f"{what}: out={text!r}: a kernel with *args or keyword-only parameters cannot declare outputs")
    if len(parameters.names) >= MAX_PARAMETERS:
        raise ValueError(f"{what}: out={text!r}: a kernel with outputs has less than {MAX_PARAMETERS} parameters")
    return Pattern(text, parameters.names, what)
