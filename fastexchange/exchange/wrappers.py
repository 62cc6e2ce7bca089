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
    try:
        inner = _innermost(wrapper)
    except Exception:  # it wraps no tensor: its own __dlpack__ decides
        inner = None
    if exporter := exporter_of(inner):
        return inner, exporter
    if advice := advice_for(wrapper):
        raise TypeError(advice)
    if not hasattr(type(wrapper), "__dlpack__"):
        where = f"the {EXCHANGE_ATTRIBUTE} of this {type_name(type(wrapper))}"
        raise TypeError(f"{where} leads to {_end(wrapper)}, and it has no __dlpack__")
    return None


def _innermost(wrapper):
    """Return what is wrapped, by one wrapper or several; None if they are too many. Raises what reading an attribute raises."""
    inner = wrapper
    for _ in range(MAX_WRAPPERS):
        inner = getattr(inner, EXCHANGE_ATTRIBUTE)
        if not is_wrapper(inner):
            return inner
    return None


def _end(wrapper) -> str:
    """What a wrapper leads to that is no tensor. It is read again: an exception kept since the first time would keep it."""
    try:
        _innermost(wrapper)
    except Exception as error:
        return f"an exception, {one_line(error)}"
    return f"no object whose type has a PyCapsule named {CAPSULE_NAME.decode()!r}"


def __getattr__(name):
    """``PYTHON_SIDE``: the Python objects that native code needs, made (the last one compiled) on first access."""
    if name != "PYTHON_SIDE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve, dunder.managed_tensor_from_py_object_no_sync.address
