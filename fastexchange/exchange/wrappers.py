"""Resolve wrappers to the tensors that they wrap. The native code of ``arguments.forwarded`` calls this."""

from ..arguments import dunder
from ..arguments.exchange_tables import CAPSULE_NAME, EXCHANGE_ATTRIBUTE, is_wrapper
from ..arguments.others import advice_for
from ..ground.safe_repr import one_line, type_name
from ..producers.framework import PLAIN, framework_of
from .export import exporter_of

MAX_WRAPPERS = 8
"""The most wrappers inside one another."""


def resolve(wrapper):
    """Return (the wrapped tensor, the address of the function that exports it), or None to use the wrapper's ``__dlpack__``."""
    framework = framework_of(wrapper)
    if framework is not PLAIN:
        tensor = framework.exported_as(wrapper)
        return None if tensor is wrapper else (tensor, dunder.managed_tensor_from_py_object_no_sync.address)
    inner = _innermost(wrapper)
    if exporter := exporter_of(inner):
        return inner, exporter
    if advice := advice_for(wrapper):
        raise TypeError(advice)
    if not hasattr(type(wrapper), "__dlpack__"):
        raise TypeError(f"{_why_not(wrapper)}, and it has no __dlpack__")
    return None


def _innermost(wrapper):
    """Return what is wrapped, by one wrapper or several; None if that cannot be told."""
    inner = wrapper
    for _ in range(MAX_WRAPPERS):
        try:
            inner = getattr(inner, EXCHANGE_ATTRIBUTE)
        except Exception:  # it wraps no tensor: its own __dlpack__ decides
            return None
        if not is_wrapper(inner):
            return inner
    return None


def _why_not(wrapper) -> str:
    """What is wrong with a wrapper that leads to no tensor: its attribute is read again, since an exception would keep it."""
    inner = wrapper
    for _ in range(MAX_WRAPPERS):
        try:
            inner = getattr(inner, EXCHANGE_ATTRIBUTE)
        except Exception as error:
            return f"the {EXCHANGE_ATTRIBUTE} of this {type_name(type(inner))} cannot be read ({one_line(error)})"
        if not is_wrapper(inner):
            break
    leads = f"leads to no object whose type has a PyCapsule named {CAPSULE_NAME.decode()!r}"
    return f"the {EXCHANGE_ATTRIBUTE} of this {type_name(type(wrapper))} {leads}"


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made (the last one compiled) on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve, dunder.managed_tensor_from_py_object_no_sync.address
