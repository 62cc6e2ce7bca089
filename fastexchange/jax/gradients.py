"""How JAX differentiates kernels: by the backward pass that they declare (``calls.backward``); without one it raises an error."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..calls.backward import GRAD, steps_of
from .mesh_axes import as_varying, distributed_as

__all__ = ["differentiable"]


def differentiable(function: Callable, traced, axes: frozenset) -> Callable:
    """``function(*operands)``, a call of a kernel that JAX traces, as JAX differentiates it.

    `traced`: the call. `axes`: of a mesh, by which all operands differ between devices.
    """
    if traced.kernel.backward is None:
        return _refusing(function, traced)
    import jax

    def forward(*operands):
        values = [each.value for each in operands] if is_partial else operands
        for given, (position, _) in zip(operands, places, strict=True):
            if is_partial and given.perturbed and position not in gives:
                raise TypeError(
                    f"{traced.argument(position)} is differentiated, and no step of the kernel's backward= gives "
                    f"{GRAD + names[position]!r}; if no gradient belongs to it, pass jax.lax.stop_gradient() of it"
                )
        made = run(*values)  # not `function`: second derivatives differentiate it
        return made, ([value if at in needed else None for at, value in enumerate(values)], made if keeps_outputs else None)

    def backward(kept, given):
        operands, made = kept
        for each, name in zip(given, outputs, strict=True):
            if name in unused and not isinstance(each, jax.custom_derivatives.SymbolicZero):
                raise TypeError(
                    f"{traced.name}(): its output {name!r} is differentiated, and no step of the kernel's backward= has the "
                    f"parameter {GRAD + name!r}"
                )
        gradients = [_as_gradient(each, result) for each, result in zip(given, traced.results, strict=True)]
        bound = traced.with_operands(None if each is None else jax.numpy.asarray(each) for each in operands)
        known: dict[str, Any] = dict(zip((GRAD + name for name in outputs), gradients, strict=True))
        made = [jax.numpy.asarray(each) for each in made or ()]  # JAX may keep constants of a type of its own
        known |= dict(zip(outputs, made or [None] * len(outputs), strict=True))
        known |= zip(names, bound, strict=False)  # an argument may have the name of a gradient: it is first
        found: list[Any] = [None] * len(names)
        for step in steps:
            call = getattr(step.call, "kernel", step.call)  # of an operator of PyTorch
            given = step.gradients(call(*[known[name] for name in step.needs]), shapes)
            for position, gradient in zip(step.gives, given, strict=True):
                found[position] = gradient
        pairs = zip(traced.operands, places, strict=True)
        return tuple(_gradient_of(each, found[position], path, axes) for each, (position, path) in pairs)

    outputs = [each.name for each in traced.kernel._pattern.outputs]
    names = traced.kernel._parameters.names[: -len(outputs)]
    steps = steps_of(traced.kernel.backward, names, outputs, traced.name)
    gives = {position for step in steps for position in step.gives}
    places = traced.places
    shapes = {position: tuple(each.shape) for each, (position, path) in zip(traced.operands, places, strict=True) if not path}
    taken = {name for step in steps for name in step.needs}
    unused = {
        name for name, each in zip(outputs, traced.results, strict=True)
        if GRAD + name not in taken and jax.numpy.issubdtype(each.dtype, jax.numpy.inexact)
    }  # fmt: skip
    # Only where some gradient is missing: not all of JAX takes functions that ask whether an operand is differentiated.
    is_partial = bool(unused) or any(
        position not in gives and jax.numpy.issubdtype(each.dtype, jax.numpy.inexact)
        for each, (position, _) in zip(traced.operands, places, strict=True)
    )
    needed = {at for at, (position, _) in enumerate(places) if any(names[position] in step.needs for step in steps)}
    keeps_outputs = any(name in step.needs for step in steps for name in outputs)
    run = jax.custom_vjp(lambda *operands: tuple(function(*operands)))
    run.defvjp(forward, backward, symbolic_zeros=is_partial)
    return run


def _refusing(function: Callable, traced) -> Callable:
    """``function(*operands)``, which raises TypeError where JAX differentiates it."""
    import jax

    @jax.custom_jvp
    def run(*operands):
        return tuple(function(*operands))

    @run.defjvp
    def refuse(primals, tangents):
        outputs = "outputs, fast_args(out=...), with a " if traced.kernel._pattern is None else ""
        raise TypeError(
            f"{traced.name}(): JAX differentiates this call, and the kernel declares no {outputs}backward pass, "
            "fast_args(backward=...), for reverse mode (jax.grad, jax.jacrev); forward mode (jax.jvp, jax.jacfwd, jax.hessian) "
            "takes no kernel; if no gradient belongs to it, pass jax.lax.stop_gradient() of its arguments"
        )

    return run


def _as_gradient(given, result):
    """The gradient of an output of this shape and dtype, as a step gets it: of an integer, 0."""
    import jax

    if isinstance(given, jax.custom_derivatives.SymbolicZero) or given.dtype == jax.dtypes.float0:
        given = jax.numpy.zeros(result.shape, jax.dtypes.canonicalize_dtype(result.dtype))
    return given.conj() if jax.numpy.iscomplexobj(given) else given


def _gradient_of(operand, found, path: tuple, axes: frozenset):
    """The gradient of an operand, as JAX gets it: what a step has returned for the argument in which the operand is at `path`."""
    import jax

    if not jax.numpy.issubdtype(operand.dtype, jax.numpy.inexact):
        return np.zeros(operand.shape, jax.dtypes.float0)
    for index in path:
        found = None if found is None else found[index]
    if found is None:
        found = jax.numpy.zeros(operand.shape, operand.dtype)
    found = distributed_as(as_varying(jax.numpy.asarray(found, operand.dtype), axes), operand.sharding)
    return found.conj() if jax.numpy.iscomplexobj(found) else found
