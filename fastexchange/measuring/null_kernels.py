"""Kernels that do nothing, to measure calls. They have another kernel's parameters and options."""

import functools
import keyword
import math
from typing import Any

import numba
import numpy as np

from ..calls.kernel import FastKernel
from ..calls.options import KernelOptions
from ..exchange.convert import from_dlpack
from ..ground.numba_internals import njit_as
from ..ground.parameters import signature_of

__all__ = ["empty_kernel", "function_of", "null_function", "null_kernel", "returning_null_kernel"]


@numba.njit
def take_output(output):
    """Do nothing."""


def null_function(function, body: str = "pass", **names):
    """Make a function of Python with the parameters of `function`. `body`: may use the parameters and `names`."""
    listed: list[str] = []
    namespace: dict = dict(names)
    parameters = list(signature_of(function).parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.KEYWORD_ONLY not in kinds[:index]:
            listed.append("*")
        text = "*" + parameter.name if parameter.kind is parameter.VAR_POSITIONAL else parameter.name
        if parameter.default is not parameter.empty:
            namespace[f"default_{index}"] = parameter.default
            text += f"=default_{index}"
        listed.append(text)
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.POSITIONAL_ONLY not in kinds[index + 1 :]:
            listed.append("/")
    return _function(function.__name__, ", ".join(listed), body, namespace)


def null_kernel(kernel: FastKernel, body: str = "pass", declares_outputs: bool = True, **names) -> FastKernel:
    """Make a kernel with the parameters and options of `kernel`. `body`: may use the parameters and `names`.

    `declares_outputs`: whether to declare the outputs of `kernel`, if any.
    """
    options = _options_of_calls(kernel)
    if not declares_outputs:
        options = options._replace(out=None)
    elif kernel._pattern is not None:  # an output that is passed to no function is refused, as never written to
        names["take_output"] = take_output
        body = "; ".join([*(f"take_output({each.name})" for each in kernel._pattern.outputs), body])
    return _made(null_function(kernel.py_func, body, **names), options, *_way_of(kernel))


def returning_null_kernel(kernel: FastKernel, arguments: dict, result) -> FastKernel | None:
    """Make a kernel that only returns a value like `result`: numbers, empty arrays, arguments, and tuples of them.

    Returns None for any other `result`. `arguments`: by parameter.
    """
    taken = {*signature_of(kernel.py_func).parameters}
    numpy_name = next(name for name in ("np", "numpy", *(f"np_{i}" for i in range(len(taken) + 1))) if name not in taken)
    expression = _like(result, {name: value for name, value in arguments.items() if name in taken}, numpy_name)
    names: dict[str, Any] = {numpy_name: np}
    return None if expression is None else null_kernel(kernel, f"return {expression}", **names)


def _like(result, arguments: dict, np_: str) -> str | None:
    """An expression for a value like `result`."""
    for name, value in arguments.items():
        if value is result and not isinstance(value, (int, float, complex, str, type(None))):
            return name
    if type(result) in (bool, int, float, complex, type(None)):
        return repr(result) if result == result and abs(result or 0) != math.inf else "0.5"
    if type(result) is tuple:
        items = [_like(item, arguments, np_) for item in result]
        return None if None in items else "(" + "".join(f"{item}, " for item in items) + ")"
    if type(result) in (str, list, set, dict):
        return None
    try:
        array = from_dlpack(result)
    except Exception:
        return None
    if array.dtype.kind not in "biufc":
        return None
    return f"{np_}.empty({array.shape!r}, {np_}.{array.dtype.name if array.dtype.kind != 'b' else 'bool_'})"


def empty_kernel(kernel: FastKernel, given: tuple[str, ...]) -> FastKernel:
    """Return a kernel that does nothing, for positional arguments of these types, with the options of `kernel` but no outputs.

    Kernels are cached by types, because Numba never frees compiled code.
    """
    options = _options_of_calls(kernel)._replace(returns=None, out=None)
    return _empty_kernel(given, options, *_way_of(kernel))


@functools.lru_cache(maxsize=256)
def _empty_kernel(given: tuple[str, ...], options: KernelOptions, nogil: bool, needs_owning_exports: bool) -> FastKernel:
    return _made(function_of(len(given)), options, nogil, needs_owning_exports)


def function_of(count: int):
    """Make a function of Python with so many parameters that does nothing."""
    return _function("kernel", ", ".join(f"a{i}" for i in range(count)), "pass", {})


def _options_of_calls(kernel: FastKernel) -> KernelOptions:
    """The options of a kernel without what concerns other calls than those on the CPU: on a GPU, of operators, of gradients."""
    return kernel._kernel_options._replace(cuda=None, launch=None, mutates=None, backward=None)


def _way_of(kernel: FastKernel) -> tuple[bool, bool]:
    """Whether calls of a kernel release the GIL, and whether they hold owning exports."""
    return bool(kernel.targetoptions.get("nogil")), bool(kernel._native.native.needs_owning_exports)


def _function(name: str, parameters: str, body: str, namespace: dict):
    name = name if name.isidentifier() and not keyword.iskeyword(name) else "kernel"  # a lambda
    exec(f"def {name}({parameters}): {body}", namespace)
    return namespace[name]


def _made(function, options: KernelOptions, nogil: bool, needs_owning_exports: bool) -> FastKernel:
    kernel = njit_as(FastKernel, function, {"nogil": nogil})._apply(options)
    if needs_owning_exports:
        kernel._native.native.needs_owning_exports = 1
    return kernel
