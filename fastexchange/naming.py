"""Names for messages, which run no code of the objects that they name: a message must not be worse than what it is about."""

import enum
from types import BuiltinFunctionType, FunctionType

import numpy as np

__all__ = ["shown", "type_name"]

# As `type` answers, whatever a metaclass says or raises.
_own_name = vars(type)["__qualname__"].__get__
_own_module = vars(type)["__module__"].__get__

_PLAIN = (type(None), bool, int, float, complex, str, bytes, FunctionType, BuiltinFunctionType)
_LONGEST = 200


def type_name(cls: type) -> str:
    """A type's name, with its module unless that is obvious."""
    name, module = _own_name(cls), _own_module(cls)
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def shown(value) -> str:
    """`value` itself if it is of Python's own plain types, a type or a dtype; of anything else what it is an object of.

    To show a tensor means to read its memory, which may be gone.
    """
    if isinstance(value, type):
        return f"the type {type_name(value)}"
    if type(value) in (tuple, list):
        text = ", ".join(map(shown, value[:9])) + ("…" if len(value) > 9 else "")
        text = f"({text})" if type(value) is tuple else f"[{text}]"
    elif type(value) in _PLAIN or isinstance(value, (np.dtype, enum.Enum)):
        text = repr(value)
    else:
        return f"an object of type {type_name(type(value))}"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
