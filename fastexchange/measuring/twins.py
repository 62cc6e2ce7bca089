"""Kernels that do nothing, to measure what calls cost: with the parameters of another kernel, and read as that reads them."""

import functools
import inspect

import numba

from ..kernel import FastKernel, fast_args

__all__ = ["constant_twin", "empty_kernel", "twin", "without_result"]


def twin(kernel: FastKernel, body: str = "pass", inner=None) -> FastKernel:
    """A kernel with the parameters and the manner of `kernel`, and this body, in which `inner` is a name."""
    listed: list[str] = []
    namespace: dict = {"inner": inner}
    parameters = list(inspect.signature(kernel.py_func, follow_wrapped=False).parameters.values())
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
    made = _function(kernel.__name__, ", ".join(listed), body, namespace)
    owns = bool(kernel._native.native.owns)
    return _made(made, _is_nogil(kernel), kernel.allows_grad, owns, returns=kernel.returns, out=kernel.out)


def constant_twin(kernel: FastKernel, result) -> FastKernel | None:
    """The same, returning a number of the type of `result`; None if that is no Python number."""
    constants = {float: "0.5", int: "1000", bool: "True", complex: "0.5j"}
    return twin(kernel, f"return {constants[type(result)]}") if type(result) in constants else None


def without_result(kernel: FastKernel) -> FastKernel:
    """A kernel that calls `kernel` natively and drops what it returns."""
    passed = ", ".join(
        f"*{p.name}" if p.kind is p.VAR_POSITIONAL else f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name
        for p in inspect.signature(kernel.py_func, follow_wrapped=False).parameters.values()
    )
    return twin(kernel, f"inner({passed})", kernel.dispatcher)


def empty_kernel(kernel: FastKernel, given: tuple[str, ...]) -> FastKernel:
    """A kernel that does nothing, for positional arguments of these types, and in the manner of `kernel` but for its outputs.

    The same one for the same types, as names: Numba never frees what it has compiled.
    """
    return _empty_kernel(given, _is_nogil(kernel), kernel.allows_grad, bool(kernel._native.native.owns))


@functools.lru_cache(maxsize=256)
def _empty_kernel(given: tuple[str, ...], nogil: bool, allows_grad: bool, owns: bool) -> FastKernel:
    return _made(_function("kernel", ", ".join(f"a{i}" for i in range(len(given))), "pass", {}), nogil, allows_grad, owns)


def _is_nogil(kernel: FastKernel) -> bool:
    return bool(kernel.dispatcher.targetoptions.get("nogil"))


def _function(name: str, parameters: str, body: str, namespace: dict):
    name = name if name.isidentifier() else "kernel"  # a lambda
    exec(f"def {name}({parameters}): {body}", namespace)
    return namespace[name]


def _made(function, nogil: bool, allows_grad: bool, owns: bool, **manner) -> FastKernel:
    kernel = fast_args(numba.njit(nogil=nogil)(function), grad="allow" if allows_grad else "refuse", **manner)
    if owns:
        kernel._native.native.owns = 1
    return kernel
