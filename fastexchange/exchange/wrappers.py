"""Find the object to export in place of a wrapper. ``producers.forwarded`` calls :func:`resolve`."""

from ..ground.safe_repr import type_name
from ..producers import dunder, torch
from .discovery import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper
from .export import exporter_of

MAX_WRAPPERS = 8
"""The largest number of nested wrappers."""


def resolve(wrapper):
    """Return (the object to export, the address of its export function); None if the wrapper's ``__dlpack__`` is to be called."""
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
        except Exception:  # no wrapped object: the wrapper's own __dlpack__ is called, and raises if it must
            return None
        if not is_wrapper(inner):
            found = exporter_of(inner)
            return (inner, found) if found else None
    return None


def __getattr__(name):
    """Make ``PYTHON_SIDE``, the Python objects that native code needs, when native code first reads it; compiles the last one."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve, dunder.managed_tensor_from_py_object_no_sync.address
