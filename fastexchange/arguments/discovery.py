"""Discovery: the kind of a type's instances. It is found once per type and filed in the type table."""

from typing import Any

from ..dispatch.runtime import runtime
from ..ground.log import say
from ..ground.safe_repr import type_name
from ..interpreter import DISABLED
from ..jax import array_kind
from ..torch import tensor_kind
from . import buffer, dunder, forwarded, functions, ndarrays, nothing, numbers, others, sequences, strings, tensors
from .kind import Discovery

__all__ = ["compare", "discover", "exports_itself", "fields_of", "learn", "learn_type"]

_FIND = (
    numbers.find, nothing.find, strings.find, others.find_typed, ndarrays.find, sequences.find, functions.find,
    tensor_kind.find, array_kind.find, tensors.find, forwarded.find, dunder.find, buffer.find, others.find,
)  # fmt: skip
"""The kinds, in the order in which they are asked: the first that takes a type has it."""
_FIND_BY_PYTHON = (
    numbers.find, nothing.find, strings.find, others.find_typed, ndarrays.find, sequences.find, functions.find,
    dunder.find_by_python, others.find,
)  # fmt: skip
"""The same where native code is switched off."""


def discover(cls: type, instance=None) -> Discovery:
    """Find the kind of the instances of `cls`, of which `instance` is one. Files nothing."""
    notes: list[str] = [runtime().why_not_native] if DISABLED else []
    for find in _FIND_BY_PYTHON if DISABLED else _FIND:
        if (found := find(cls, notes, instance)) is not None:
            return found
    raise AssertionError("the last one takes every type")


def exports_itself(value) -> bool:
    """Whether an object has ``__dlpack__`` and ``__dlpack_device__`` that its class has not. Runs its ``__getattr__``.

    The class is filed as it is: other objects of it may have none, so Python asks each.
    """
    if issubclass(type(value), type) or hasattr(type(value), "__dlpack__"):  # a class has them for its objects
        return False
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def fields_of(cls: type) -> dict[str, Any]:
    """The fields of the ``fx_entry`` of `cls`. Files a new type only where native code makes no calls: otherwise a call does."""
    entries = runtime().entries
    if cls not in entries and not runtime().is_native:
        learn_type(cls)
    return entries.get(cls) or _fields(discover(cls))


def _fields(found: Discovery) -> dict[str, Any]:
    return {"kind": found.kind, **found.fields}


# ---- filing --------------------------------------------------------------------------------------------------------


def learn_type(cls: type, instance=None) -> bool:
    """Discover `cls` by an `instance` of it, and file the result. Returns whether the type was unknown."""
    entries = runtime().entries
    if cls in entries:
        entries.find_again(cls)
        return False
    found = discover(cls, instance)
    entries.add(cls, found.holder, **_fields(found))
    say("%s: path %s%s", type_name(cls), found.path, "; ".join(["", *found.notes]))
    return True


def compare(value) -> None:
    """Let the kind of a value, whose type is filed, compare how native code reads it with what its framework tells."""
    kind = fields_of(type(value))["kind"]
    if kind.compare is not None:
        kind.compare(value)


def learn(value) -> bool:
    """File everything that native code needs to read `value`: its type, items, dtype. Returns whether anything was unknown."""
    news = learn_type(type(value), value)
    kind = runtime().entries.fields(type(value))["kind"]
    news = sum(map(learn, kind.items(value))) > 0 or news  # not any(), which would stop at the first
    return news if kind.learn is None else kind.learn(value) or news
