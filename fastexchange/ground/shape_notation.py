"""The notation of ``fast_args(out=…)``: the shapes and element types of a kernel's outputs, as functions of its inputs.

``"x[n, d], w[d] -> y[n, d]"``: inputs on the left of the arrow, and on the right the outputs, which are the kernel's last
parameters.

- A dimension is a name, a number, or ``...``. A name has the same extent everywhere. ``...`` is any number of dimensions, the
  same ones everywhere.
- A parameter without brackets is an int, whose value is the extent of its name: ``"x[n], k -> largest[k]"``.
- Dimensions of outputs may be expressions with ``+ - * //`` and parentheses.
- An output has the element type of the tensors on the left; if they differ, the one to which they are promoted (``promotion``).
  A colon gives another type, ``-> counts[bins]: int64``, or the type of a parameter, ``-> y[n]: w``.

A pattern is compiled into a *program* of words, from which ``shape_program.evaluate`` computes the outputs' shapes.
:meth:`Pattern.shapes_of` calls it, and makes the error messages.
"""

import ast
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from . import shape_program as op
from .dlpack_types import DLDataType
from .omitted import OMITTED
from .parameters import Parameters
from .promotion import promoted
from .safe_repr import shown, type_name

__all__ = ["Input", "Output", "Pattern", "extents_of", "pattern_of", "shape_of"]

Rest = type(...)
_ITEM = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*(?:\[(?P<dims>[^\[\]]*)\])?\s*(?::\s*(?P<dtype>\w+))?\s*(?:,|$)")
_LONGEST = 1000
_LARGEST = 2**40
_OPERATORS = {ast.Add: op.ADD, ast.Sub: op.SUBTRACT, ast.Mult: op.MULTIPLY, ast.FloorDiv: op.DIVIDE}


class Input(NamedTuple):
    """A tensor on the left. `dims`: names, numbers and at most one ``...``."""

    name: str
    position: int
    dims: tuple["str | int | Rest", ...]  # type: ignore[valid-type]

    def __str__(self) -> str:
        """As in the notation: ``x[n, d]``."""
        return f"{self.name}[{', '.join('...' if dim is ... else str(dim) for dim in self.dims)}]"


class Output(NamedTuple):
    """A tensor on the right. `dims`: expressions and ``...``.

    `dtype`: an element type, or a tensor's position; None: the promoted type of the inputs.
    """

    name: str
    position: int
    dims: tuple["ast.expr | Rest", ...]  # type: ignore[valid-type]
    dtype: "DLDataType | int | None"

    def __str__(self) -> str:
        """As in the notation, without the element type: ``y[n, 2 * d]``."""
        return f"{self.name}[{', '.join('...' if dim is ... else ast.unparse(dim) for dim in self.dims)}]"

    @property
    def is_always_empty(self) -> bool:
        """Whether an extent is 0 whatever the inputs are."""
        return any(isinstance(dim, ast.Constant) and dim.value == 0 for dim in self.dims)


class Pattern:
    """A parsed notation. Raises ValueError if it is invalid or does not fit the parameters, TypeError if it is not a string."""

    option = "out"
    """The name of the argument that gives the notation."""

    def __init__(self, text: str, names: list[str], what: str):
        self._text, self._names, self._what = text, names, what
        if not isinstance(text, str):
            raise TypeError(f"{what}: out is a notation such as 'x[n] -> y[n]', not {shown(text)}")
        if len(text) > _LONGEST:
            self._wrong(f"it has more than {_LONGEST} characters")
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            self._wrong("it needs one '->', inputs on the left and outputs on the right")
        self._read_inputs(left)
        self.outputs = [self._output(*item) for item in self._items(right)]
        last = list(range(len(names) - len(self.outputs), len(names)))
        if not last or [each.position for each in self.outputs] != last:
            listed = ", ".join(each.name for each in self.outputs)
            self._wrong(f"its outputs, {listed or 'none'}, are not the last parameters, in their order ({', '.join(names)})")
        if any(position in last for position in self._given()):
            self._wrong("a parameter stands in it twice")
        self._compile()

    def _read_inputs(self, left: str) -> None:
        """Read what is on the left of the arrow."""
        self.inputs: list[Input] = []
        self.numbers: dict[str, int] = {}
        """The positions of the parameters that are extents, by name. Others without ``[]`` may be anything."""
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
        if len(set(self._given())) < len(self._given()):
            self._wrong("a parameter stands in it twice")
        self.variables = list(self.numbers)
        """All names of dimensions."""
        for each in self.inputs:
            self.variables += [dim for dim in each.dims if isinstance(dim, str) and dim not in self.variables]
        self.has_rest = any(... in each.dims for each in self.inputs)

    def _given(self) -> list[int]:
        """The positions of the parameters on the left."""
        return [*self.numbers.values(), *(each.position for each in self.inputs)]

    def _compile(self) -> None:
        """Make the program, without the parameters that no dimension names."""
        unused = self.numbers.keys() - self._used()
        self.numbers = {name: position for name, position in self.numbers.items() if name not in unused}
        self.variables = [name for name in self.variables if name not in unused]
        self.program = self._program()

    def __str__(self) -> str:
        return self._text

    def _wrong(self, why: str) -> NoReturn:
        raise ValueError(f"{self._what}: {self.option}={self._text!r}: {why}") from None

    def _items(self, text: str) -> list[tuple]:
        """Return (name, texts of the dimensions or None, name of the type or None) for each item."""
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

    def _used(self) -> set:
        """The names in dimensions."""
        expressions = [dim for each in self.outputs for dim in each.dims if isinstance(dim, ast.expr)]
        names = (node.id for dim in expressions for node in ast.walk(dim) if isinstance(node, ast.Name))
        return {*names, *(dim for each in self.inputs for dim in each.dims)}

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
            like = self.inputs[0]._replace(name=name)
            self._wrong(f"output {name!r} has no brackets; write its dimensions, as in {like}, or {name}[] for none")
        if dims.count("...") > 1 or ("..." in dims and not self.has_rest):
            self._wrong(f"output {name!r}: '...' stands for dimensions that an input has, once")
        known: DLDataType | int | None = self._dtype(dtype) if dtype is not None else None
        if dtype is None and len(self.inputs) == 1:
            known = self.inputs[0].position
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

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def dtype_of(self, output: Output, dtypes: "dict[int, DLDataType | None]", name: str) -> DLDataType:
        """Return an output's element type, given those of :attr:`inputs` by position; None: a type that DLPack lacks.

        `name`: the kernel's. Raises TypeError if the output has none.
        """
        known = dtypes[output.dtype] if isinstance(output.dtype, int) else output.dtype
        if output.dtype is None:
            known = promoted(list(dtypes.values()))
            if known is None and len(set(dtypes.values())) > 1:
                found = ", ".join(f"{each.name!r} is {dtypes[each.position] or 'of none of DLPack'}" for each in self.inputs)
                raise TypeError(
                    f"{name}(): its output {output.name!r} has no declared type, and the types of its inputs are promoted to "
                    f"none: {found}; write {output}: float32, or {output}: {self.inputs[0].name}, in out="
                )
        if known is None:
            at = output.dtype if isinstance(output.dtype, int) else self.inputs[0].position
            raise TypeError(
                f"{name}(): argument {self._names[at]!r} (position {at}): its elements have no DLPack type, so output "
                f"{output.name!r} cannot be made like it; give the output, or declare its type"
            )
        return known

    def values_of(self, given: tuple, defaults: dict[int, Any], name: str) -> list[int]:
        """Return the values of :attr:`numbers` in a call, whose arguments are `given`, in parameter order. `name`: the kernel's.

        Raises TypeError for one that is no int, OverflowError for one beyond 64 bits.
        """
        values = []
        for position in self.numbers.values():
            value = defaults[position] if given[position] is OMITTED else given[position]
            where = f"{name}(): argument {self._names[position]!r} (position {position})"
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"{where} is an extent in {str(self)!r}: an int, not {type_name(type(value))}")
            if not -(2**63) <= value < 2**63:
                raise OverflowError(f"{where} is an extent that does not fit into 64 bits")
            values.append(int(value))
        return values

    def _program(self) -> list[int]:
        words: list[int] = []
        index = {name: i for i, name in enumerate(self.variables)}
        known: set = set(self.numbers)
        for each in self.inputs:
            words += [op.INPUT, len(each.dims) - 1 | op.HAS_REST if ... in each.dims else len(each.dims)]
            for dim in each.dims:
                if dim is ...:
                    words += [op.SAME_REST if dim in known else op.REST, 0]
                elif isinstance(dim, int):
                    words += [op.EXACTLY, dim]
                else:
                    words += [op.SAME_NAME if dim in known else op.NAME, index[dim]]
                known.add(dim)
        operands = 0
        for i, output in enumerate(self.outputs):
            words += [op.OUTPUT, i]
            for dim in output.dims:
                expression = [] if dim is ... else _postfix(dim, index)
                operands = max(operands, len(expression) // 2)
                words += [*expression, op.ALL_OF_REST if dim is ... else op.EXTENT, 0]
        tensors = len(self.inputs) + len(self.outputs)
        self.is_small = len(index) <= op.MAX_VARIABLES and operands <= op.MAX_OPERANDS and tensors <= op.MAX_TENSORS
        """Whether native code can evaluate the program."""
        return [*words, op.STOP, 0]

    def shapes_of(self, numbers: list[int], shapes: list[tuple[int, ...]], name: str) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs, given the values of :attr:`numbers` and the shapes of :attr:`inputs`.

        `name`: the kernel's. Raises ValueError if the inputs do not fit the notation, or an output cannot be made.
        """
        variables = numbers + [0] * (len(self.variables) - len(numbers))
        longest = 1 + max(map(len, shapes))
        rest, stack, made = [0] * longest, [0] * len(self.program), [0] * (len(self.program) + len(self.outputs) * longest)
        flat = [word for shape in shapes for word in (len(shape), *shape)]
        outcome = op.evaluate(self.program, flat, variables, rest, stack, made, len(made))
        if outcome != op.FITS:
            self._refuse(outcome, shapes, variables, stack[0], name)
        found, at = [], 0
        for _ in self.outputs:
            found.append(tuple(made[at + 1 : at + 1 + made[at]]))
            at += 1 + made[at]
        return found

    def _of(self, output: Output) -> str:
        """The words for an output whose shape cannot be computed."""
        return f"its output {output.name!r} cannot be made"

    def _refuse(self, outcome: int, shapes: list[tuple[int, ...]], variables: list[int], value: int, name: str):
        """Raise the ValueError for a result of `evaluate`. `value`: the value of the expression at which it stopped."""
        why, item, index = outcome & 0xFF, outcome >> 8 & 0xFF, outcome >> 16
        if why in (op.NEGATIVE, op.ZERO_DIVISION, op.TOO_LARGE, op.TOO_MANY):
            output = self.outputs[item]
            given = ", ".join(f"{variable}={extent}" for variable, extent in zip(self.variables, variables, strict=True))
            wrong = {op.NEGATIVE: f"is {value}", op.ZERO_DIVISION: "divides by zero", op.TOO_LARGE: "is too large"}.get(why)
            reason = f"it has more than {op.MAX_NDIM} dimensions"
            if wrong is not None:
                reason = f"dimension {ast.unparse(output.dims[index])} {wrong} ({given})"
            raise ValueError(f"{name}(): {self._of(output)}: {reason}")

        def argument(position: int) -> str:
            return f"argument {self._names[position]!r} (position {position})"

        each, shape = self.inputs[item], shapes[item]
        what = f"{name}(): {argument(each.position)}"
        if why == op.RANK:
            count = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
            raise ValueError(f"{what} has {count}, {shape}; {self._text!r} says {each}")
        if why == op.DIFFERENT_REST:
            first = next(i for i, other in enumerate(self.inputs) if ... in other.dims)
            known, here = (_rest(self.inputs[i], shapes[i]) for i in (first, item))
            where = argument(self.inputs[first].position)
            raise ValueError(f"{what}: '...' is {here} in its shape {shape}, but {known} in {where}")
        dims: list = list(each.dims)
        if ... in dims:
            at = dims.index(...)
            dims[at : at + 1] = _rest(each, shape)
        origin = f"it must be {dims[index]}"
        if isinstance(dim := dims[index], str):
            positions = [other.position for other in self.inputs if dim in other.dims]
            known_in = argument(self.numbers.get(dim, positions[0]))
            origin = f"{dim!r} is {variables[self.variables.index(dim)]} in {known_in}"
        raise ValueError(f"{what}: dimension {index} of its shape {shape} is {shape[index]}, but {origin} ({self._text})")


def _rest(each: Input, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of ``...`` in an input of this shape."""
    at = each.dims.index(...)
    return shape[at : at + 1 + len(shape) - len(each.dims)]


def _postfix(tree: ast.expr, index: dict[str, int]) -> list[int]:
    if isinstance(tree, ast.BinOp):
        return [*_postfix(tree.left, index), *_postfix(tree.right, index), _OPERATORS[type(tree.op)], 0]
    return [op.PUSH, index[tree.id]] if isinstance(tree, ast.Name) else [op.PUSH_NUMBER, tree.value]  # type: ignore[attr-defined]


# ---- extents that may be symbols -------------------------------------------------------------------------------------


def extents_of(
    pattern: Pattern, given: tuple, defaults: dict[int, Any], name: str, check: Callable | None = None
) -> tuple[dict[str, Any], tuple]:
    """Return the extents of the names in a notation, and those that ``...`` stands for, where extents may be symbols.

    `given`: a call's arguments, those in the notation with a ``shape``. `name`: the kernel's. ``check(is_equal, message)`` raises
    ValueError, with what ``message()`` returns, for extents that are not equal; None: nobody does. PyTorch's Dynamo traces this.
    Raises ValueError for ranks that do not fit.
    """
    extents: dict[str, Any] = {
        each: defaults[position] if given[position] is OMITTED else given[position]
        for each, position in pattern.numbers.items()
    }
    rest: tuple | None = None
    for each in pattern.inputs:
        shape, dims = tuple(given[each.position].shape), list(each.dims)
        where = f"{name}(): argument {each.name!r} (position {each.position})"
        if ... in dims:
            at, count = dims.index(cast(Any, ...)), len(shape) - len(dims) + 1
            own = shape[at : at + count] if count >= 0 else ()
            if rest is not None and len(rest) != len(own):
                raise ValueError(f"{where}: '...' is {len(own)} dimensions in it, and {len(rest)} in another ({pattern})")
            rest = own if rest is None else rest
            dims[at : at + 1] = rest
        if len(dims) != len(shape):
            found = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
            raise ValueError(f"{where} has {found}, {shape}; {str(pattern)!r} says {each}")
        for dim, extent in zip(dims, shape, strict=True):
            wanted = extents.setdefault(dim, extent) if isinstance(dim, str) else dim
            if check is not None:
                check(extent == wanted, lambda: f"{where}: dimension {dim} of its shape differs ({pattern})")  # noqa: B023
    return extents, rest or ()


def shape_of(output: Output, extents: dict[str, Any], rest: tuple) -> list:
    """The shape of an output, with the extents that :func:`extents_of` returns."""
    shape: list[Any] = []
    for dim in output.dims:
        shape += rest if dim is ... else [_value(dim, extents)]
    return shape


def _value(tree: ast.expr, extents: dict[str, Any]):
    """Evaluate an expression of a notation with these extents."""
    if isinstance(tree, ast.Name):
        return extents[tree.id]
    if isinstance(tree, ast.Constant):
        return tree.value
    assert isinstance(tree, ast.BinOp)
    left, right = _value(tree.left, extents), _value(tree.right, extents)
    if isinstance(tree.op, ast.Add):
        return left + right
    if isinstance(tree.op, ast.Sub):
        return left - right
    return left * right if isinstance(tree.op, ast.Mult) else left // right


def pattern_of(text: str, parameters: Parameters, what: str) -> Pattern:
    """Parse the notation of a kernel with these parameters. Raises ValueError for kernels that cannot declare outputs."""
    if parameters.variadic is not None or parameters.positional < len(parameters.names):
        raise ValueError(f"{what}: out={text!r}: a kernel with *args or keyword-only parameters cannot declare outputs")
    if len(parameters.names) >= op.MAX_PARAMETERS:
        raise ValueError(f"{what}: out={text!r}: a kernel with outputs has less than {op.MAX_PARAMETERS} parameters")
    return Pattern(text, parameters.names, what)
