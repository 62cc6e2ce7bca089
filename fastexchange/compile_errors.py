"""What Numba raises for a call that it cannot make, with the kernel and the argument named.

Which exception it is about is decided by types and values: no code reads a message.
"""

from typing import Any, cast

import numba
from numba.core import types
from numba.core.errors import TypingError

from .naming import type_name
from .numba_internals import has_representation
from .producers.omitted import OMITTED
from .refusal import argument

__all__ = ["add_call", "check_items", "raise_named", "without_representation"]

_DEEPEST = 100


def add_call(error: TypingError, kernel, positional: list, named: dict[str, Any]) -> None:
    """Put a line in front of what Numba says: which kernel it cannot compile for which argument types."""
    names = [kernel._parameters.name_of(position) for position in range(len(positional))]
    given = [*zip(names, positional, strict=True), *named.items()]
    listed = ", ".join(f"{name}: {_numba_name(value)}" for name, value in given)
    line = f"{kernel.__qualname__}({listed}): Numba cannot compile the kernel for these argument types. It says:"
    error.patch_message(f"{line}\n{error.args[0] if error.args else ''}")


def _numba_name(value) -> str:
    try:
        return str(numba.typeof(value))
    except Exception:  # it is this of which Numba says something
        return f"an object of type {type_name(type(value))}"


def raise_named(kernel, bound: tuple, as_numba_takes_it) -> None:
    """Say why Numba's dispatcher has raised NotImplementedError or TypeError for a call, if an argument is the reason.

    `as_numba_takes_it`: what makes of an argument what the dispatcher got.
    """
    for position, value in enumerate(bound):
        if value is OMITTED:
            continue
        viewed = as_numba_takes_it(kernel, position, value)
        if (found := without_representation(viewed)) is not None:
            _refuse_number(kernel, position, value, found)
        mixed = _first_mixed(viewed)
        if mixed is not None:
            first, other, index = mixed
            raise TypeError(
                f"{argument(kernel, position)}: the items of a list have one type; item 0 is {_numba_name(first)}, item {index} "
                f"{_numba_name(other)}; pass a tuple, or convert them"
            )


def without_representation(value):
    """The Numba type in an argument, as the dispatcher gets it, that has no machine representation on the CPU; else None."""
    try:
        numba_type: Any = numba.typeof(value)
    except Exception:  # it is not known, which is another matter
        return None
    return _inmost(numba_type)


def _inmost(numba_type: Any):
    """A type, or what it is made of, that has no representation; None if all have."""
    inside: Any = (numba_type.dtype,) if isinstance(numba_type, (types.Array, types.List)) else ()
    if isinstance(numba_type, types.BaseTuple):
        inside = cast(Any, numba_type).types
    for part in inside:
        if (found := _inmost(part)) is not None:
            return found
    return None if has_representation(numba_type) else numba_type


def _refuse_number(kernel, position: int, value, found) -> None:
    what = f"{argument(kernel, position)}, a {type_name(type(value))}"
    raise NotImplementedError(f"{what}: Numba has no arithmetic on {found} on the CPU; convert it, for example by float()")


def _first_mixed(value) -> tuple | None:
    """The first item of a list, here or in a tuple, the first that is of another type, and its index; None if there is none."""
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
    """Raise ValueError for a list or a set without items, here or within: Numba takes its type from the first."""
    for _ in range(_DEEPEST):  # a list may hold itself
        if type(value) not in (list, set):
            return
        if not value:
            kind = type_name(type(value))
            instead = "numba.typed.List.empty_list(item type), or a tuple" if type(value) is list else "one with an item"
            raise ValueError(f"{argument(kernel, position)}: Numba cannot tell the type of an empty {kind}; pass {instead}")
        value = next(iter(value))
