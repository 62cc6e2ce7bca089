"""Alternatives: other ways to call a kernel with the same arguments, as statements to time. All kernels do nothing."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..calls.kernel import FastKernel
from ..exchange.convert import from_dlpack
from ..ground.dlpack import VERSION
from ..ground.numba_internals import plain_dispatcher
from ..ground.parameters import with_items
from ..producers.framework import framework_of
from .timing import Statement

__all__ = ["alternatives"]


def _expression(value, name: str, form_of: Callable[[Any], str]) -> str:
    """The expression of the argument `value`, named `name`, with each item written by ``form_of(item)``."""
    if isinstance(value, (tuple, list)) and len(value) <= 100 and not hasattr(value, "_fields"):
        items = "".join(_expression(item, f"{name}[{i}]", form_of) + ", " for i, item in enumerate(value))
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    return form_of(value).format(name)


def _by_dlpack(value) -> str:
    return "from_dlpack_({})" if _has_dlpack(value) else "{}"


def _tensors_by_dlpack(value) -> str:
    return _by_dlpack(value) if not isinstance(value, np.ndarray) else "{}"


def _by_numpy(value) -> str:
    return framework_of(value).numpy_expression(value) or _tensors_by_dlpack(value)


def _tensors(value, name: str) -> Iterator[str]:
    """The expressions of all objects with ``__dlpack__`` in an argument."""
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{name}[{i}]")
    elif _has_dlpack(value):
        yield name


def _has_dlpack(value) -> bool:
    return hasattr(type(value), "__dlpack__")


def _view(value):
    """Return a NumPy view, made once before the timing."""
    if isinstance(value, tuple) or type(value) is list:
        return with_items(value, [_view(item) for item in value])
    if isinstance(value, np.ndarray) or not _has_dlpack(value):
        return value
    return from_dlpack(framework_of(value).detached(value))


def alternatives(
    null_kernel: FastKernel, arguments: dict, call: str, is_complete: bool
) -> Iterator[tuple[str, Statement | None, str]]:
    """Return (label, statement, why there is none) of each alternative. Each statement has been tried once.

    `arguments`: the values by their names in the expression `call`, for example ``"a0, a1, out=out"``. `null_kernel`: a kernel
    with the same parameters that does nothing. `is_complete`: whether no output is omitted, so that plain ``@njit`` can make the
    call.
    """
    njit = plain_dispatcher(null_kernel)

    def with_views() -> Statement:
        return Statement(f"f({call})", {"f": njit, **{name: _view(value) for name, value in arguments.items()}})

    def converted(form_of: Callable[[Any], str]) -> Statement:
        parts = []
        for part in call.split(", ") if call else []:
            keyword, _, name = part.rpartition("=")
            written = _expression(arguments[name], name, form_of)
            parts.append(f"{keyword}={written}" if keyword else written)
        return Statement(f"f({', '.join(parts)})", {"f": njit, "from_dlpack_": np.from_dlpack, **arguments})

    values = list(_leaves(arguments.values()))
    tensors = [text for name, value in arguments.items() for text in _tensors(value, name)]
    ways: list[tuple[str, Callable[[], Statement]]] = []
    if is_complete:
        ways.append(("plain @njit, NumPy views made beforehand", with_views))
        forms = {framework_of(value).numpy_expression(value) for value in values} - {""}
        if forms:
            label = max(forms, key=len).format("x")
            ways.append((f"plain @njit, {label} in each call", functools.partial(converted, _by_numpy)))
        if any(map(_has_dlpack, values)):
            ways.append(("plain @njit, np.from_dlpack(x) in each call", functools.partial(converted, _by_dlpack)))
    if tensors:
        exports = "; ".join(f"{text}.__dlpack__(max_version=version_)" for text in tensors)
        names = {**arguments, "version_": VERSION}
        ways.append(("x.__dlpack__(max_version=(1, 3)) of each tensor, no call", lambda: Statement(exports, names)))
    if importlib.util.find_spec("tvm_ffi") is not None:
        ways.append(("tvm-ffi, testing.nop", lambda: _nop(arguments, call)))
    for label, make in ways:
        try:
            made = make()
            exec(made.code, dict(made.names))
        except Exception as error:
            yield label, None, f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            yield label, made, ""


def _nop(arguments: dict, call: str) -> Statement:
    nop = importlib.import_module("tvm_ffi").get_global_func("testing.nop")
    passed = ", ".join(part.rpartition("=")[2] for part in call.split(", "))  # this one takes no keywords
    return Statement(f"f({passed})", {"f": nop, **arguments})


def _leaves(values) -> Iterator:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value
