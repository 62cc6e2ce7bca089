"""How JAX differentiates kernels: by the backward pass that they declare (``calls.backward``); without one it raises an error."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..calls.backward import GRAD, steps_of

__all__ = ["differentiable"]


def differentiable(function: Callable, traced) -> Callable:
    """``function(*operands)``, a call of a kernel that JAX traces, as JAX differentiates it. `traced`: the call."""
    if traced.kernel.backward is None:
        return _refusing(function, traced)
    import jax

    def forward(*operands):
        values = [each.value for each in operands]
        for given, (position, _) in zip(operands, places, strict=True):
            if given.perturbed and position not in gives:
                raise TypeError(
                    f"{traced.argument(position)} is differentiated, and no step of the kernel's backward= gives "
                    f"{GRAD + names[position]!r}; if no gradient belongs to it, pass jax.lax.stop_gradient() of it"
                )
        made = run(*values)  # not `function`: second derivatives differentiate it
        return made, ([value if at in needed else None for at, value in enumerate(values)], made if keeps_outputs else None)

    def backward(kept, given):
        operands, made = kept
        gradients = [_as_gradient(each) for each in given]
        bound = traced.with_operands(operands)
        known: dict[str, Any] = dict(zip((GRAD + name for name in outputs), gradients, strict=True))
        known |= dict(zip(outputs, made or [None] * len(outputs), strict=True))
        known |= zip(names, bound, strict=False)  # an argument may have the name of a gradient: it is first
        found: list[Any] = [None] * len(names)
        for step in steps:
            made = step.gradients(step.call(*[known[name] for name in step.needs]))
            for position, gradient in zip(step.gives, made, strict=True):
                found[position] = gradient
        return tuple(_gradient_of(aval, found[position], path) for aval, (position, path) in zip(avals, places, strict=True))

    outputs = [each.name for each in traced.kernel._pattern.outputs]
    names = traced.kernel._parameters.names[: -len(outputs)]
    steps = steps_of(traced.kernel.backward, names, outputs, traced.name)
    gives = {position for step in steps for position in step.gives}
    places = traced.places
    needed = {at for at, (position, _) in enumerate(places) if any(names[position] in step.needs for step in steps)}
    keeps_outputs = any(name in step.needs for step in steps for name in outputs)
    avals = [jax.ShapeDtypeStruct(each.shape, jax.dtypes.canonicalize_dtype(each.dtype)) for each in traced.operands]
    run = jax.custom_vjp(lambda *operands: tuple(function(*operands)))
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _refusing(function: Callable, traced) -> Callable:
    """``function(*operands)``, which raises TypeError where JAX differentiates it."""
    import jax

    @jax.custom_jvp
    def run(*operands):
        return tuple(function(*operands))

    @run.defjvp
    def refuse(primals, tangents):
        raise TypeError(
            f"{traced.name}(): JAX differentiates this call, and the kernel declares no backward pass, fast_args(backward=...); "
            "if no gradient belongs to it, pass jax.lax.stop_gradient() of its arguments"
        )

    return run


def _as_gradient(given):
    """The gradient of an output, as a step gets it."""
    import jax

    if isinstance(given, jax.custom_derivatives.SymbolicZero):
        given = jax.numpy.zeros(given.shape, given.dtype)
    return given.conj() if jax.numpy.iscomplexobj(given) else given


def _gradient_of(aval, found, path: tuple):
    """The gradient of an operand, as JAX gets it: what a step has returned for the argument in which the operand is at `path`."""
    import jax

    if not jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
        return np.zeros(aval.shape, jax.dtypes.float0)
    for index in path:
        found = None if found is None else found[index]
    if found is None:
        return jax.numpy.zeros(aval.shape, aval.dtype)
    found = jax.numpy.asarray(found, aval.dtype)
    return found.conj() if jax.numpy.iscomplexobj(found) else found
