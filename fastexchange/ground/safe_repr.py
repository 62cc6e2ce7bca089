"""Names for messages. Only an exception's text runs code of the named object, which could raise or crash."""

from contextlib import suppress
from types import BuiltinFunctionType, FunctionType

import numpy as np

__all__ = ["a_type_name", "is_type", "one_line", "shown", "type_name"]

# By `type` itself: a metaclass may override or raise.
_own_name = vars(type)["__qualname__"].__get__
_own_module = vars(type)["__module__"].__get__

_PLAIN = (type(None), bool, int, float, complex, str, bytes, FunctionType, BuiltinFunctionType)
_LONGEST = 200


def is_type(value) -> bool:
    """Whether it is a type, for those who read its memory. ``isinstance`` believes what an object says of its class.

    A proxy of a type says that it is one, and in CPython 3.10 so does ``list[int]``.
    """
    return issubclass(type(value), type)


def type_name(cls: type) -> str:
    """A type's name, with its module unless it is a built-in type."""
    name, module = _own_name(cls), _own_module(cls)
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def a_type_name(cls: type) -> str:
    """A type's name after its article: ``an int``, ``a numpy.ndarray``."""
    name = type_name(cls)
    return f"{'an' if name.startswith(tuple('aeioAEIO')) else 'a'} {name}"


def one_line(error: BaseException) -> str:
    """An exception's type and message as one line; its type alone if its ``__str__`` raises."""
    with suppress(Exception):
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return type(error).__name__


def shown(value, depth: int = 2) -> str:
    """The text of `value` if it is of a plain built-in type, a type or a dtype; for any other object only its type.

    The text of a tensor would read its memory, which may be gone.
    """
    cls = type(value)
    if is_type(value):
        return f"the type {type_name(value)}"
    if cls is int and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if cls in (tuple, list) and depth:
        text = ", ".join(shown(item, depth - 1) for item in value[:9]) + ("…" if len(value) > 9 else "")
        text = f"({text}{',' if len(value) == 1 else ''})" if cls is tuple else f"[{text}]"
    elif cls in _PLAIN or issubclass(cls, np.dtype):
        text = repr(value)
    else:
        return f"an object of type {type_name(cls)}"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
