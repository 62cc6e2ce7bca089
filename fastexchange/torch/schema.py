"""What PyTorch has to know of a kernel that is an operator: its schema, and the shapes of its results without running it.

Both come from what the kernel declares: its parameters, their annotations and defaults, ``fast_args(out=…)``, and the names of
the arguments that it writes to.

Source: ``torch.library``; the grammar of schemas is in ``aten/src/ATen/native/README.md`` of PyTorch.
"""

import inspect
import itertools
import math
import typing
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, NamedTuple

import numpy as np

from ..calls.options import declaring
from ..ground.dlpack_types import DLDataType
from ..ground.omitted import OMITTED
from ..ground.parameters import signature_of
from ..ground.safe_repr import is_type, shown
from ..ground.shape_notation import Pattern, extents_of, shape_of
from .odd_tensors import has_tangent
from .traced import mark_constant

__all__ = ["Argument", "Schema", "fake_of", "schema_of", "with_outputs"]

TENSOR, LIST = "Tensor", "Tensor[]"
_SCALARS: dict[Any, str] = {float: "float", int: "SymInt", bool: "bool"}
_ANNOTATIONS = "torch.Tensor, list[torch.Tensor], float, int or bool, or one of these with '| None'"


class Argument(NamedTuple):
    """An input of an operator. `type`: as in a schema, without ``?``."""

    name: str
    type: str
    is_optional: bool
    default: Any
    is_keyword_only: bool
    is_mutated: bool


class Schema(NamedTuple):
    """The schema of an operator, without its name. `outputs`: how many tensors it returns."""

    arguments: tuple[Argument, ...]
    outputs: int

    def __str__(self) -> str:
        parts: list[str] = []
        aliases = itertools.chain("abcdefghijklmnopqrstuvwxyz", (f"a{number}" for number in itertools.count()))
        for each in self.arguments:
            if each.is_keyword_only and "*" not in parts:
                parts.append("*")
            written = f"({next(aliases)}!)" if each.is_mutated else ""
            kind = each.type.replace(TENSOR, TENSOR + written) + "?" * each.is_optional
            default = "" if each.default is inspect.Parameter.empty else f"={each.default}"
            parts.append(f"{kind} {each.name}{default}")
        returned = TENSOR if self.outputs == 1 else f"({', '.join([TENSOR] * self.outputs)})"
        return f"({', '.join(parts)}) -> {returned}"

    @property
    def mutated(self) -> tuple[int, ...]:
        """The positions of the arguments that it writes to."""
        return tuple(position for position, each in enumerate(self.arguments) if each.is_mutated)


def schema_of(
    function: Callable,
    pattern: Pattern | None,
    mutates: Sequence[str],
    what: str,
    types: dict[str, str] | None = None,
    are_outputs_given: bool = False,
) -> Schema:
    """Return the schema of a kernel of `function`.

    `types`: the types of parameters that have no annotation, by name, where a call has shown them. `are_outputs_given`: the
    declared outputs are arguments, which the operator writes to, and it returns nothing. Raises TypeError for parameters that no
    schema can have, or whose type is unknown, and ValueError for names in `mutates` that are no tensors among the inputs.
    """
    hints = _hints(function, what)
    outputs = [each.name for each in pattern.outputs] if pattern is not None else []
    tensors = [each.name for each in pattern.inputs] if pattern is not None else []
    numbers = list(pattern.numbers) if pattern is not None else []
    if are_outputs_given:
        tensors, mutates, outputs = tensors + outputs, [*mutates, *outputs], []
    arguments = []
    for position, parameter in enumerate(signature_of(function).parameters.values()):
        name = parameter.name
        if name in outputs:
            continue
        where = f"{what}: parameter {name!r} (position {position})"
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(f"{where} takes any number of arguments, which no operator does; name them, or take a list")
        if name in tensors:
            kind, is_optional = TENSOR, False
        elif name in numbers:
            kind, is_optional = _SCALARS[int], False
        elif name in hints:
            kind, is_optional = _type_of(hints[name], where)
        elif types is not None and name in types:
            kind, is_optional = types[name].rstrip("?"), types[name].endswith("?")
        elif name in mutates:
            kind, is_optional = TENSOR, False
        elif type(parameter.default) in _SCALARS:
            kind, is_optional = _SCALARS[type(parameter.default)], False
        else:
            raise TypeError(f"{where} needs an annotation: {_ANNOTATIONS}")
        if name in mutates and not kind.startswith(TENSOR):
            raise ValueError(f"{where} is {kind}, and mutates= names tensors")
        default = _checked_default(parameter.default, kind, is_optional, where)
        is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        arguments.append(Argument(name, kind, is_optional, default, is_keyword_only, name in mutates))
    unknown = [name for name in mutates if name not in [each.name for each in arguments]]
    if unknown:
        kind = "an output, which an operator returns" if unknown[0] in outputs else "no parameter"
        raise ValueError(f"{what}: mutates= names {unknown[0]!r}, which is {kind}")
    return Schema(tuple(arguments), len(outputs))


def _hints(function: Callable, what: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # a name that is defined nowhere, or only for type checkers
        raise TypeError(f"{what}: its annotations cannot be evaluated: {error}") from error


def _type_of(hint: Any, where: str) -> tuple[str, bool]:
    """Return (type in a schema, whether None is allowed) of an annotation. Raises TypeError for others."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    given = [each for each in options if each is not NoneType]
    if len(given) == 1:
        kind = _SCALARS.get(given[0]) or (TENSOR if _is_tensor(given[0]) else None)
        items = typing.get_args(given[0])
        if typing.get_origin(given[0]) in (list, Sequence) and len(items) == 1 and _is_tensor(items[0]):
            kind = LIST
        if kind is not None:
            return kind, len(given) < len(options)
    raise TypeError(f"{where} is annotated as {shown(hint)}, which no operator takes; annotate it as {_ANNOTATIONS}")


def _is_tensor(cls: Any) -> bool:
    cls = typing.get_origin(cls) or cls  # numpy.typing.NDArray[…]
    return is_type(cls) and (issubclass(cls, np.ndarray) or hasattr(cls, "__dlpack__"))


def _checked_default(default: Any, kind: str, is_optional: bool, where: str) -> Any:
    """Return a default as a schema has it, or ``Parameter.empty``. Raises TypeError for others."""
    if default is inspect.Parameter.empty or (default is None and is_optional):
        return default
    wanted = {name: cls for cls, name in _SCALARS.items()}.get(kind)
    if wanted is float and type(default) is int:
        default = float(default)
    if wanted is None or type(default) is not wanted or not math.isfinite(default):
        raise TypeError(f"{where} has the default {shown(default)}, which an operator's schema cannot have for {kind}")
    return default


# ---- shapes --------------------------------------------------------------------------------------------------------


def fake_of(kernel: Any, schema: Schema) -> Callable:
    """Return the operator's *fake* implementation: it makes results with the right shapes, dtypes and devices, uninitialised.

    It gets tensors without memory, and its extents may be symbols. Raises ValueError for shapes that do not fit the notation, and
    BufferError for tensors that require grad, as the kernel does.
    """
    pattern, name = kernel._pattern, kernel.__qualname__

    def fake(*args, **kwargs):
        import torch

        given = kernel._parameters.bind(*args, **kwargs)
        for position, value in enumerate(given):
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(each, torch.Tensor) or kernel.allows_grad:
                    continue
                if each.requires_grad and torch.is_grad_enabled():
                    raise BufferError(
                        f"{name}(): argument {kernel._parameters.names[position]!r} (position {position}) requires grad, and the "
                        "operator has no backward; declare fast_args(backward=...), or call it within torch.no_grad()"
                    )
                if has_tangent(each):
                    raise BufferError(
                        f"{name}(): argument {kernel._parameters.names[position]!r} (position {position}) carries a tangent of "
                        "forward-mode differentiation, which the operator would lose; pass the primal that "
                        "torch.autograd.forward_ad.unpack_dual() gives for it"
                    )
        if not schema.outputs:
            return None
        extents, rest = extents_of(pattern, given, kernel._parameters.defaults, name, _check)
        made = [_empty(pattern, output, given, extents, rest, partial(_dtype_of, kernel)) for output in pattern.outputs]
        return made[0] if len(made) == 1 else tuple(made)

    return fake


def with_outputs(kernel: Any, given: tuple) -> tuple:
    """`given`, the arguments of a call, with an uninitialised tensor for each output that is omitted or None.

    Dynamo traces this, and takes no message of a check that names more than constants: the kernel checks the extents.
    """
    pattern, address = kernel._pattern, id(kernel)
    extents, rest = extents_of(pattern, given, kernel._parameters.defaults, kernel.__qualname__)

    def dtype_of(position: int, dtypes: tuple):
        return _constant_dtype_of(address, position, dtypes)

    made = []
    for output in pattern.outputs:
        value = given[output.position]
        is_new = value is None or value is OMITTED
        made.append(_empty(pattern, output, given, extents, rest, dtype_of) if is_new else value)
    return (*given[: len(given) - len(made)], *made)


def _check(is_equal, message: Callable[[], str]) -> None:
    """Raise ValueError where extents differ. Symbols become equal."""
    import torch

    torch._check_value(is_equal, message)


def _empty(pattern: Pattern, output, given: tuple, extents: dict[str, Any], rest: tuple, dtype_of: Callable):
    """Return an output, uninitialised: a tensor like the one whose element type it has, or like the first.

    `dtype_of` is called with its position and the inputs' dtypes if it has another one.
    """
    shape = shape_of(output, extents, rest)
    dtypes = tuple([given[each.position].dtype for each in pattern.inputs])
    like = given[output.dtype if isinstance(output.dtype, int) else pattern.inputs[0].position]
    if isinstance(output.dtype, int) or (output.dtype is None and len(set(dtypes)) == 1):
        return like.new_empty(shape)
    return like.new_empty(shape, dtype=dtype_of(output.position, dtypes))


def _dtype_of(kernel: Any, position: int, dtypes: tuple):
    """Return the dtype of the output at this position, declared or promoted from the inputs' dtypes. Raises TypeError."""
    import torch

    pattern = kernel._pattern
    (output,) = [each for each in pattern.outputs if each.position == position]
    known = {each.position: _dl_dtype(dtype) for each, dtype in zip(pattern.inputs, dtypes, strict=True)}
    return getattr(torch, str(pattern.dtype_of(output, known, kernel.__qualname__)))


def dtype_of_output(kernel: Any, position: int, inputs: list):
    """PyTorch's dtype of the output at this position, of a call with these inputs, the first one a tensor of PyTorch's."""
    import torch

    dtypes = [each.dtype if isinstance(each, torch.Tensor) else getattr(torch, str(each.dtype), None) for each in inputs]
    return _dtype_of(kernel, position, tuple(dtypes))


def _constant_dtype_of(address: int, position: int, dtypes: tuple):
    """:func:`_dtype_of` the kernel of this ``id``, which Dynamo calls rather than traces."""
    return _dtype_of(declaring[address], position, dtypes)


mark_constant(_constant_dtype_of)


def _dl_dtype(dtype) -> DLDataType | None:
    """The DLPack type of a dtype of PyTorch; None if it has none."""
    try:
        return DLDataType.from_str(str(dtype).removeprefix("torch."))
    except ValueError:
        return None
