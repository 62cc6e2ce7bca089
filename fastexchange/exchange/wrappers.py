"""For what an object stands that is exported as another one: see ``producers.forwarded``, whose native code asks here."""

from ..ground.safe_repr import type_name
from ..producers import dunder, torch
from .discovery import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper
from .export import exporter_of

MAX_WRAPPERS = 8
"""How many wrappers may be around one another."""


def resolve(wrapper):
    """(what it stands for, the address of the function that exports that), or None for its own ``__dlpack__``."""
    if torch.is_tensor_type(type(wrapper)):
        torch.check_storage(wrapper)
        return (wrapper.detach(), dunder.managed_tensor_from_py_object_no_sync.address) if wrapper.requires_grad else None
    found = _innermost(wrapper, EXCHANGE_ATTRIBUTE, is_wrapper, exporter_of)
    if found is None and not hasattr(type(wrapper), "__dlpack__"):
        raise TypeError(
            f"the {EXCHANGE_ATTRIBUTE} of this {type_name(type(wrapper))} leads to no object whose type has a PyCapsule named "
            f"{CAPSULE_NAME.decode()!r}, and it has no __dlpack__"
        )
    return found


def _innermost(wrapper, attribute: str, is_wrapper, exporter_of):
    inner = wrapper
    for _ in range(MAX_WRAPPERS):
        try:
            inner = getattr(inner, attribute)
        except Exception:  # it forwards to nothing: its own __dlpack__ has the word
            return None
        if not is_wrapper(inner):
            found = exporter_of(inner)
            return (inner, found) if found else None
    return None


def __getattr__(name):
    """``PYTHON_SIDE``: what native code needs of Python, made when it first asks (its last item is compiled then)."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve, dunder.managed_tensor_from_py_object_no_sync.address
