"""Numba's errors for calls that it cannot make, with the names of the kernel and the argument.

No code reads a message: the types and values of the arguments decide what an error is about.
"""

from typing import Any, cast

import numba
from numba.core import types
from numba.core.errors import TypingError

from ..exchange.errors import argument, instead_of_mixed
from ..ground.half import NotForHalf
from ..ground.numba_internals import has_representation, load_representations
from ..ground.omitted import OMITTED
from ..ground.parameters import item_of
from ..ground.safe_repr import a_type_name, type_name
from .writes import parameters_assigned_to

__all__ = [
    "add_call", "check_items", "is_half", "not_declared", "raise_named", "why_none_takes", "why_not_compiled", "why_not_declared",
    "without_representation",
]  # fmt: skip

_DEEPEST = 100


def add_call(error: TypingError, kernel, positional: list, named: dict[str, Any]) -> None:
    """Put a line in front of Numba's message: the kernel and the argument types that it cannot compile.

    `positional`, `named`: the arguments, or their types.
    """
    error.patch_message(why_not_compiled(error, kernel, positional, named))


def why_not_compiled(error: BaseException, kernel, positional: list, named: dict[str, Any]) -> str:
    """The message for a kernel that cannot be compiled: a line with the kernel's name and its types, then Numba's own."""
    if isinstance(error, NotForHalf):
        return f"{_call(kernel, positional, named)}: {error}"
    line = f"{_call(kernel, positional, named)}: Numba cannot compile the kernel for these argument types."
    if any(map(is_half, [*positional, *named.values()])):
        line += " What it cannot do with numbers of half precision, it can do with x.astype(np.float32)."
    line += _readonly_written(kernel, positional, named)
    line += " It says:"
    if isinstance(error, NotImplementedError):
        line = (
            f"{_call(kernel, positional, named)}: Numba cannot compile the kernel for these argument types: a value in it, its "
            "result or a default is of a type that Numba has no code for on the CPU. It says:"
        )
    return f"{line}\n{error.args[0] if error.args else ''}"


def is_half(value) -> bool:
    """Whether an argument, or its type, is of half precision."""
    numba_type: Any = _as_type(value)
    return hasattr(numba_type.dtype if isinstance(numba_type, types.Array) else numba_type, "format")


def _readonly_written(kernel, positional: list, named: dict[str, Any]) -> str:
    """What to do about a readonly array that the kernel assigns to; "" if there is none."""
    names = map(kernel._parameters.name_of, range(len(positional)))
    given = {**dict(zip(names, positional, strict=True)), **named}
    found = [name for name in parameters_assigned_to(kernel.py_func) if name in given and _is_readonly(given[name])]
    if not found:
        return ""
    outputs = [each.name for each in kernel._pattern.outputs] if kernel._pattern is not None else []
    if found[0] in outputs:
        return f" It writes to its output {found[0]!r}, and is given a readonly array: leave the output out."
    return (
        f" It writes to {found[0]!r}, a readonly array: pass one that is writable, such as numpy.array({found[0]}), or write "
        "to an output, fast_args(out=...)."
    )


def _is_readonly(value) -> bool:
    numba_type = _as_type(value)
    return isinstance(numba_type, types.Array) and not numba_type.mutable


def _as_type(value):
    return value if isinstance(value, types.Type) else _type_of(value)


def why_not_declared(error: BaseException, kernel, positional: list, named: dict[str, Any]) -> str:
    """The message for argument types that fit none of the declared signatures."""
    call = _call(kernel, positional, named)
    why = f"not one of the declared signatures is for these argument types; they take {declared(kernel)}. Numba says:"
    return f"{call}: {why}\n{error}"


def not_declared(kernel, given: tuple, what: str) -> TypeError:
    """The exception for the Numba types `given`, which no declared signature takes. `what`: the function, for the text."""
    return TypeError(f"{what}: {why_none_takes(kernel, given)}")


def why_none_takes(kernel, given: tuple) -> str:
    """The text of :func:`not_declared`, without the function. `given`: types, or their names."""
    return f"not one of the declared signatures is for ({', '.join(map(str, given))}); they take {declared(kernel)}"


def declared(kernel) -> str:
    """The argument types of a kernel's declared signatures."""
    return ", or ".join(f"({', '.join(map(str, signature))})" for signature in kernel.overloads)


def _call(kernel, positional: list, named: dict[str, Any]) -> str:
    names = [kernel._parameters.name_of(position) for position in range(len(positional))]
    given = [*zip(names, positional, strict=True), *named.items()]
    return f"{kernel.__qualname__}({', '.join(f'{name}: {_numba_name(value)}' for name, value in given)})"


def _numba_name(value) -> str:
    if isinstance(value, types.Type):
        return str(value)
    try:
        return str(numba.typeof(value))
    except Exception:  # it is this of which Numba says something
        return f"an object of type {type_name(type(value))}"


def raise_named(kernel, bound: tuple, as_numba_takes_it) -> None:
    """Raise NotImplementedError or TypeError with the name of the argument that Numba's dispatcher cannot take, if there is one.

    `as_numba_takes_it`: converts an argument to what the dispatcher gets.
    """
    load_representations()
    for position, value in enumerate(bound):
        if value is OMITTED:
            continue
        viewed = as_numba_takes_it(kernel, position, value)
        if not kernel._is_interpreted and (found := without_representation(viewed)) is not None:
            where, item = _item_without_representation(position, viewed)
            _refuse_number(kernel, where, item, found)
        mixed = _first_mixed(viewed)
        if mixed is not None:
            first, other, index = mixed
            raise TypeError(
                f"{argument(kernel, position)}: the items of a list have one type; item 0 is {_numba_name(first)}, item {index} "
                f"{_numba_name(other)}; {instead_of_mixed(kernel, position)}"
            )


def without_representation(value):
    """The Numba type in an argument, as the dispatcher gets it, without a machine representation on the CPU, or None."""
    try:
        numba_type: Any = numba.typeof(value)
    except Exception:  # an unknown type, which another function refuses
        return None
    return _inmost(numba_type)


def _inmost(numba_type: Any):
    """The type itself, or a type that it contains, without a representation; None if all have one."""
    inside: Any = (numba_type.dtype,) if isinstance(numba_type, (types.Array, types.List)) else ()
    if isinstance(numba_type, types.BaseTuple):
        inside = cast(Any, numba_type).types
    for part in inside:
        if (found := _inmost(part)) is not None:
            return found
    return None if has_representation(numba_type) else numba_type


def _refuse_number(kernel, position: int, value, found) -> None:
    what = f"{argument(kernel, position)}, {a_type_name(type(value))}"
    raise NotImplementedError(f"{what}: Numba has no arithmetic on {found} on the CPU; convert it, for example by float()")


def _item_without_representation(position: int, value) -> tuple[int, Any]:
    """The position and the value without a representation: the argument itself, or an item of it."""
    for index, item in enumerate(value) if isinstance(value, (tuple, list)) else ():
        if without_representation(item) is not None:
            return _item_without_representation(item_of(position, index), item)
    return position, value


def _first_mixed(value) -> tuple | None:
    """For a list (also in a tuple) with items of several types: its first item, the first of another type, and its index."""
    if isinstance(value, tuple):
        return next((found for item in value if (found := _first_mixed(item)) is not None), None)
    if type(value) is not list or not value:
        return None
    first = _type_of(value[0])
    for index, item in enumerate(value):
        if first is not None and _type_of(item) != first:
            return value[0], item, index
    return None


def _type_of(value):
    try:
        return numba.typeof(value)
    except Exception:
        return type(value)


def check_items(kernel, position: int, value) -> None:
    """Raise ValueError for an empty list or set, also in a list: Numba takes a list's type from its first item."""
    for _ in range(_DEEPEST):  # a list may contain itself
        if type(value) not in (list, set):
            return
        if not value:
            kind = type_name(type(value))
            instead = "numba.typed.List.empty_list(item type), or a tuple" if type(value) is list else "one with an item"
            raise ValueError(f"{argument(kernel, position)}: Numba cannot tell the type of an empty {kind}; pass {instead}")
        position, value = item_of(position, 0), next(iter(value))
