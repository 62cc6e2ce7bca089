"""Backward passes: kernels, or Python functions, whose parameters are named by what they need.

A *step* of a backward pass is one of these. Each of its inputs has the name of an argument or an output of the kernel that is
differentiated, or is ``grad_`` and an output's name: the gradient of that output. A kernel's outputs, ``fast_args(out=…)``, are
``grad_`` and an argument's name. A function returns a gradient, or None, for each argument.

Gradients of complex numbers are PyTorch's: the conjugate of JAX's.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ground.safe_repr import shown
from ..ground.shape_notation import Pattern

__all__ = ["GRAD", "Step", "check_shapes", "is_function", "steps_of"]

GRAD = "grad_"


def is_function(value) -> bool:
    """Whether a step is a Python function."""
    return callable(value) and getattr(value, "py_func", None) is None and not hasattr(value, "overload")


class Step:
    """A step.

    Attributes
    ----------
    call : the kernel or function.
    needs : the names of its inputs.
    gives : the positions of the arguments whose gradients it returns.
    """

    def __init__(self, called: Any, arguments: Sequence[str], outputs: Sequence[str], what: str):
        kernel = getattr(called, "kernel", called)  # a TorchOp has a backward of its own
        pattern = getattr(kernel, "_pattern", None)
        self.is_function = is_function(called)
        if pattern is None and not self.is_function:
            thing = f"{kernel.__qualname__}(), which declares none" if hasattr(kernel, "py_func") else shown(called)
            raise TypeError(
                f"{what}: backward= is a function, or kernels that declare outputs, fast_args(out=...), not {thing}"
            )
        self.call, self._arguments, self._what = called, list(arguments), what
        self.name = f"{getattr(kernel, '__qualname__', type(kernel).__name__)}()"
        names = _parameters_of(called, what) if self.is_function else kernel._parameters.names
        given = [each.name for each in pattern.outputs] if pattern is not None else []
        self.needs = [name for name in names if name not in given]
        known = {*arguments, *outputs, *(GRAD + name for name in outputs)}
        wrong = [name for name in self.needs if name not in known]
        self._kind = "function" if self.is_function else "kernel"
        if wrong:
            raise ValueError(
                f"{what}: backward {self._kind} {self.name} has the parameter {wrong[0]!r}, which is none of "
                f"{', '.join(sorted(known))}"
            )
        wrong = [name for name in given if not name.startswith(GRAD) or name[len(GRAD) :] not in arguments]
        if wrong:
            wanted = ", ".join(GRAD + name for name in arguments)
            raise ValueError(f"{what}: backward kernel {self.name} has the output {wrong[0]!r}, which is none of {wanted}")
        self.gives = [self._arguments.index(name[len(GRAD) :]) for name in given] or list(range(len(arguments)))

    def gradients(self, made, shapes: dict[int, tuple]) -> list:
        """The gradients for ``gives`` in what ``call`` has returned. `shapes`: of arguments that are arrays, by position.

        Raises RuntimeError for another number of them, and for a gradient of another shape than in `shapes`.
        """
        found = list(made) if isinstance(made, (list, tuple)) else [made]
        if len(found) != len(self.gives):
            count = "1 gradient" if len(found) == 1 else f"{len(found)} gradients"
            raise RuntimeError(
                f"{self._what}: backward {self._kind} {self.name} returned {count}, and the kernel has "
                f"{len(self._arguments)} arguments, {', '.join(self._arguments)}; return None for those without one"
            )
        for position, gradient in zip(self.gives, found, strict=True):
            shape = getattr(gradient, "shape", None)
            if shape is not None and position in shapes and tuple(shape) != shapes[position]:
                name = self._arguments[position]
                raise RuntimeError(
                    f"{self._what}: backward {self._kind} {self.name} returned a gradient of the shape {tuple(shape)} for "
                    f"{name!r}, which has {shapes[position]}"
                )
        return found


def check_shapes(steps: list[Step], pattern: Pattern, what: str) -> None:
    """Raise ValueError for a kernel whose notation gives a gradient another shape than its argument's, whatever the extents are.

    `pattern`: of the kernel that is differentiated. Both notations are evaluated with several extents for its names, also equal
    ones, and those that stand in the notations as numbers. Expressions with ``//`` are left to the call.
    """
    for step in steps:
        own = getattr(getattr(step.call, "kernel", step.call), "_pattern", None)
        if own is None or step.is_function or "//" in f"{own}{pattern}" or not own.numbers.keys() <= pattern.numbers.keys():
            continue
        inputs = {each.name: each for each in pattern.inputs}
        extents = itertools.product(_extents(f"{own}{pattern}"), (0, 2) if pattern.has_rest else (0,))
        tried = [shapes for each in extents if (shapes := _shapes(own, pattern, *each)) is not None]
        for index, output in enumerate(own.outputs):
            each = inputs.get(output.name[len(GRAD) :])
            pairs = [(made[index], given[each.name]) for made, given in tried] if each is not None else []
            if pairs and all(made != wanted for made, wanted in pairs):
                raise ValueError(
                    f"{what}: backward kernel {step.name} returns {output}, which never has the shape of {each}: its out= is "
                    f"{str(own)!r}, and that of the kernel {str(pattern)!r}"
                )


def _extents(text: str) -> Iterator[Callable[[int], int]]:
    """Functions that give the i-th name of a notation an extent. `text`: the notations."""
    for number in {1, 2, *map(int, re.findall(r"\b\d+\b", text))}:
        yield lambda i, number=number: number  # type: ignore[misc]
    yield from (lambda i: 5 + 3 * i, lambda i: 997 - 5 * i)


def _shapes(own: Pattern, pattern: Pattern, extent: Callable, count: int) -> tuple[list, dict[str, tuple]] | None:
    """The shapes of a step's outputs, and those of the differentiated kernel's arguments by name; None if extents do not fit.

    `extent`: of :func:`_extents`. `count`: how many dimensions ``...`` stands for.
    """
    known: dict[Any, int] = {name: extent(i) for i, name in enumerate(pattern.variables)}
    rest = tuple(extent(len(known) + i) for i in range(count))
    dims = {each.name: ((rest if dim is ... else (known.get(dim, dim),)) for dim in each.dims) for each in pattern.inputs}
    given = {name: tuple(itertools.chain(*parts)) for name, parts in dims.items()}
    try:
        made = pattern.shapes_of([known[name] for name in pattern.numbers], list(given.values()), "")
        outputs = {each.name: shape for each, shape in zip(pattern.outputs, made, strict=True)}
        of_inputs = given | outputs | {GRAD + name: shape for name, shape in outputs.items()}
        shapes = [of_inputs[each.name] for each in own.inputs]
        return own.shapes_of([known[name] for name in own.numbers], shapes, ""), given
    except (ValueError, KeyError):  # KeyError: an argument whose shape the notation does not say
        return None


def _parameters_of(function, what: str) -> list[str]:
    """The names of a function's parameters. Raises TypeError if they cannot all be given by position."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function in C
        parameters = None
    if parameters is None or any(each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters):
        raise TypeError(f"{what}: a function in backward= has named, positional parameters, and {shown(function)} has others")
    return [each.name for each in parameters]


def steps_of(backward: Any, arguments: Sequence[str], outputs: Sequence[str], what: str) -> list[Step]:
    """The steps of a backward pass: of one, or a list. `what`: who has been given it, for the errors.

    Raises TypeError for what is no step, and ValueError for names that do not fit, and for a gradient that two steps have.
    """
    steps = [Step(each, arguments, outputs, what) for each in (backward if isinstance(backward, (list, tuple)) else [backward])]
    if not steps:
        raise ValueError(f"{what}: backward= has no step")
    gives = [position for step in steps for position in step.gives]
    if len(set(gives)) < len(gives):
        twice = next(name for i, name in enumerate(arguments) if gives.count(i) > 1)
        raise ValueError(f"{what}: two steps of backward= give {GRAD + twice!r}")
    return steps
