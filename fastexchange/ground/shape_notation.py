"""The notation of ``fast_args(out=…)``: the shapes and element types of a kernel's outputs, as functions of its inputs.

``"x[n, d], w[d] -> y[n, d]"``: inputs on the left of the arrow, and on the right the outputs, which are the kernel's last
parameters.

- A dimension is a name, a number, or ``...``. A name has the same extent everywhere. ``...`` is any number of dimensions, the
  same ones everywhere.
- A parameter without brackets is an int, whose value is the extent of its name: ``"x[n], k -> largest[k]"``.
- Dimensions of outputs may be expressions with ``+ - * //`` and parentheses.
- An output has the element type of the first tensor on the left. A colon gives another type, ``-> counts[bins]: int64``, or the
  type of a parameter, ``-> y[n]: w``.

A pattern is compiled into a *program* of words, from which :func:`evaluate` computes the outputs' shapes. Native code compiles
that function (``dispatch.outputs``). Python calls the same function (:meth:`Pattern.shapes_of`), and makes the error messages.
"""

import ast
import re
from typing import NamedTuple

from .dlpack_types import DLDataType
from .parameters import Parameters
from .safe_repr import shown

__all__ = [
    "FITS", "MAX_NUMBER", "MAX_OPERANDS", "MAX_PARAMETERS", "MAX_TENSORS", "MAX_VARIABLES", "Input", "Output", "Pattern",
    "evaluate", "pattern_of",
]  # fmt: skip

MAX_PARAMETERS = 64
MAX_NDIM = 64
MAX_NUMBER = 1 << 61
"""The limit of operands and products of an expression, so that the sum of two fits 64 bits."""
MAX_VARIABLES, MAX_OPERANDS, MAX_TENSORS = 64, 64, 32
"""The most names, operands of one expression, and inputs plus outputs for which native code has memory."""

# The operations of a program: pairs of words, an operation and its operand. An input has its start, then one operation for each
# dimension. It defines a name, or `...`, at the first occurrence and compares it at later ones.
_STOP, _INPUT, _EXACTLY, _NAME, _SAME_NAME, _REST, _SAME_REST = range(7)
# An output has its start, then for each dimension an expression in postfix notation and its end, or the dimensions of `...`.
_PUSH, _PUSH_NUMBER, _ADD, _SUBTRACT, _MULTIPLY, _DIVIDE, _EXTENT, _ALL_OF_REST, _OUTPUT = range(7, 16)
_HAS_REST = 1 << 16  # added to the number of other dimensions in the operand of _INPUT
# The results of `evaluate`: FITS, or why the inputs do not fit, | index of the item << 8 | index of the dimension << 16.
FITS, _RANK, _DIMENSION, _DIFFERENT_REST, _NEGATIVE, _ZERO_DIVISION, _TOO_LARGE, _TOO_MANY = range(8)

Rest = type(...)
_ITEM = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*(?:\[(?P<dims>[^\[\]]*)\])?\s*(?::\s*(?P<dtype>\w+))?\s*(?:,|$)")
_LONGEST = 1000
_LARGEST = 2**40
_OPERATORS = {ast.Add: _ADD, ast.Sub: _SUBTRACT, ast.Mult: _MULTIPLY, ast.FloorDiv: _DIVIDE}


class Input(NamedTuple):
    """A tensor on the left. `dims`: names, numbers and at most one ``...``."""

    name: str
    position: int
    dims: tuple["str | int | Rest", ...]  # type: ignore[valid-type]


class Output(NamedTuple):
    """A tensor on the right. `dims`: expressions and ``...``. `dtype`: an element type, or a tensor's position."""

    name: str
    position: int
    dims: tuple["ast.expr | Rest", ...]  # type: ignore[valid-type]
    dtype: "DLDataType | int"


class Pattern:
    """A parsed notation. Raises ValueError if it is invalid or does not fit the parameters, TypeError if it is not a string."""

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
        """The positions of the int parameters, by name."""
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
        self.program = self._program()

    def __str__(self) -> str:
        return self._text

    def _wrong(self, why: str):
        raise ValueError(f"{self._what}: out={self._text!r}: {why}") from None

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

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _program(self) -> list[int]:
        words: list[int] = []
        index = {name: i for i, name in enumerate(self.variables)}
        known: set = set(self.numbers)
        for each in self.inputs:
            words += [_INPUT, len(each.dims) - 1 | _HAS_REST if ... in each.dims else len(each.dims)]
            for dim in each.dims:
                if dim is ...:
                    words += [_SAME_REST if dim in known else _REST, 0]
                else:
                    words += [_EXACTLY, dim] if isinstance(dim, int) else [_SAME_NAME if dim in known else _NAME, index[dim]]
                known.add(dim)
        operands = 0
        for i, output in enumerate(self.outputs):
            words += [_OUTPUT, i]
            for dim in output.dims:
                expression = [] if dim is ... else _postfix(dim, index)
                operands = max(operands, len(expression) // 2)
                words += [*expression, _ALL_OF_REST if dim is ... else _EXTENT, 0]
        tensors = len(self.inputs) + len(self.outputs)
        self.is_small = len(index) <= MAX_VARIABLES and operands <= MAX_OPERANDS and tensors <= MAX_TENSORS
        """Whether native code can evaluate the program."""
        return [*words, _STOP, 0]

    def shapes_of(self, numbers: list[int], shapes: list[tuple[int, ...]], name: str) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs, given the values of :attr:`numbers` and the shapes of :attr:`inputs`.

        `name`: the kernel's. Raises ValueError if the inputs do not fit the notation, or an output cannot be made.
        """
        variables = numbers + [0] * (len(self.variables) - len(numbers))
        longest = 1 + max(map(len, shapes))
        rest, stack, made = [0] * longest, [0] * len(self.program), [0] * (len(self.program) + len(self.outputs) * longest)
        flat = [word for shape in shapes for word in (len(shape), *shape)]
        outcome = evaluate(self.program, flat, variables, rest, stack, made)
        if outcome != FITS:
            self._refuse(outcome, shapes, variables, stack[0], name)
        found, at = [], 0
        for _ in self.outputs:
            found.append(tuple(made[at + 1 : at + 1 + made[at]]))
            at += 1 + made[at]
        return found

    def _refuse(self, outcome: int, shapes: list[tuple[int, ...]], variables: list[int], value: int, name: str):
        """Raise the ValueError for a result of `evaluate`. `value`: the value of the expression at which it stopped."""
        why, item, index = outcome & 0xFF, outcome >> 8 & 0xFF, outcome >> 16
        if why in (_NEGATIVE, _ZERO_DIVISION, _TOO_LARGE, _TOO_MANY):
            output = self.outputs[item]
            given = ", ".join(f"{variable}={extent}" for variable, extent in zip(self.variables, variables, strict=True))
            wrong = {_NEGATIVE: f"is {value}", _ZERO_DIVISION: "divides by zero", _TOO_LARGE: "is too large"}.get(why)
            reason = f"it has more than {MAX_NDIM} dimensions"
            if wrong is not None:
                reason = f"dimension {ast.unparse(output.dims[index])} {wrong} ({given})"
            raise ValueError(f"{name}(): its output {output.name!r} cannot be made: {reason}")

        def argument(position: int) -> str:
            return f"{name}(): argument {self._names[position]!r} (position {position})"

        each, shape = self.inputs[item], shapes[item]
        what = argument(each.position)
        if why == _RANK:
            wanted = ", ".join("..." if dim is ... else str(dim) for dim in each.dims)
            raise ValueError(f"{what} has {len(shape)} dimensions, {shape}; {self._text!r} says {each.name}[{wanted}]")
        if why == _DIFFERENT_REST:
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
    return [_PUSH, index[tree.id]] if isinstance(tree, ast.Name) else [_PUSH_NUMBER, tree.value]  # type: ignore[attr-defined]


def evaluate(program, shapes, variables, rest, stack, made):
    """Run a pattern's `program`: check that the shapes of the inputs fit the notation, and compute the shapes of the outputs.

    All arguments are lists of ints, in native code pointers to words. `shapes`: the rank and the extents of each input, one after
    the other. `variables`: the extent of each name; first come those of the int arguments, which are set before the call. `made`:
    receives the rank and the extents of each output. `rest` (the extents of ``...``) and `stack` are scratch memory.

    Returns: FITS, or why the inputs do not fit.
    """
    at = 0
    item = -1  # the index of the current input or output
    begin = 0  # where its shape begins in `shapes` or `made`; `end`: where it ends
    end = 0
    dim = 0
    count = 0  # the number of dimensions of `...`
    depth = 0
    while program[at] != _STOP:
        operation = program[at]
        operand = program[at + 1]
        at += 2
        if operation == _INPUT:
            item += 1
            begin = end
            end += 1 + shapes[begin]
            dim = 0
            count = shapes[begin] - (operand & (_HAS_REST - 1))
            if count < 0 or (count > 0 and operand < _HAS_REST):
                return _RANK | item << 8
        elif operation <= _SAME_NAME:
            extent = shapes[begin + 1 + dim]
            if operation == _NAME:
                variables[operand] = extent
            elif extent != (operand if operation == _EXACTLY else variables[operand]):
                return _DIMENSION | item << 8 | dim << 16
            dim += 1
        elif operation <= _SAME_REST:
            is_known = operation == _SAME_REST
            if is_known and rest[0] != count:
                return _DIFFERENT_REST | item << 8
            rest[0] = count
            for i in range(1, 1 + count):
                if is_known and rest[i] != shapes[begin + dim + i]:
                    return _DIFFERENT_REST | item << 8
                rest[i] = shapes[begin + dim + i]
            dim += count
        elif operation <= _PUSH_NUMBER:
            stack[depth] = variables[operand] if operation == _PUSH else operand
            depth += 1
        elif operation <= _DIVIDE:
            depth -= 1
            left = stack[depth - 1]
            right = stack[depth]
            if abs(left) > MAX_NUMBER or abs(right) > MAX_NUMBER:
                return _TOO_LARGE | item << 8 | dim << 16
            if operation == _ADD:
                left += right
            elif operation == _SUBTRACT:
                left -= right
            elif operation == _MULTIPLY:
                if left != 0 and abs(right) > MAX_NUMBER // abs(left):
                    return _TOO_LARGE | item << 8 | dim << 16
                left *= right
            elif right == 0:
                return _ZERO_DIVISION | item << 8 | dim << 16
            else:
                left //= right
            stack[depth - 1] = left
        elif operation == _OUTPUT:
            item = operand
            begin = 0 if item == 0 else end
            made[begin] = 0
            end = begin + 1
            dim = 0
        else:
            count = rest[0] if operation == _ALL_OF_REST else 1
            made[begin] += count
            if made[begin] > MAX_NDIM:
                return _TOO_MANY | item << 8
            for i in range(count):
                made[end + i] = rest[1 + i] if operation == _ALL_OF_REST else stack[0]
            if made[end] < 0 and count == 1:
                return _NEGATIVE | item << 8 | dim << 16
            end += count
            dim += 1
            depth = 0
    return FITS


def pattern_of(text: str, parameters: Parameters, what: str) -> Pattern:
    """Parse the notation of a kernel with these parameters. Raises ValueError for kernels that cannot declare outputs."""
    if parameters.variadic is not None or parameters.positional < len(parameters.names):
        raise ValueError(f"{what}: out={text!r}: a kernel with *args or keyword-only parameters cannot declare outputs")
    if len(parameters.names) >= MAX_PARAMETERS:
        raise ValueError(f"{what}: out={text!r}: a kernel with outputs has less than {MAX_PARAMETERS} parameters")
    return Pattern(text, parameters.names, what)
