"""Backward passes of operators: a function of PyTorch's form, or steps that name what they need (``calls.backward``).

Source: ``torch.library.register_autograd``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..calls.backward import GRAD, Step, is_function, steps_of
from ..producers.framework import framework_of_type
from .odd_tensors import is_wrapper
from .schema import Schema

__all__ = ["backward_by_place", "register_backward"]


def register_backward(torch, library, overload, kernel, schema: Schema, backward, setup_context, what: str):
    """Register the backward pass of an operator. Raises TypeError or ValueError if it does not fit the operator.

    Returns the ``apply`` of an ``autograd.Function`` that calls the kernel itself, for calls with all arguments, outside of the
    transforms of ``torch.func``; None for operators with lists, which PyTorch takes apart.
    """
    if schema.mutated or not schema.outputs:
        raise ValueError(
            f"{what}: backward= needs an operator that returns its results, out=, and writes to no argument, mutates="
        )
    names = [each.name for each in schema.arguments]
    if is_function(backward):
        function = _checked(backward, names, kernel.__qualname__)
    else:
        if setup_context is not None:
            raise ValueError(f"{what}: kernels in backward= name what they need; setup_context= is for a function")
        passes = backward if isinstance(backward, _ByPlace) else [backward]
        outputs = [output.name for output in kernel._pattern.outputs]
        made = [_backward_of(steps_of(each, names, outputs, what), schema, kernel) for each in passes]
        function, setup_context = made[0] if len(made) == 1 else _by_place(kernel._pattern.inputs[0].position, *made)
    if any(each.type == "Tensor[]" for each in schema.arguments):
        torch.library.register_autograd(overload, function, setup_context=setup_context, lib=library)
        return None
    below = torch._C._AutoDispatchBelowAutograd

    def compute(*args):
        """Call the operator below autograd."""
        with below():
            return overload(*args)

    by_dispatcher = _function(torch, overload, compute, function, setup_context)
    any_requires_grad = getattr(torch._C, "_any_requires_grad", None) or _any_requires_grad
    defaults = tuple(each.default for each in schema.arguments)

    def autograd(*args):
        if not (torch.is_grad_enabled() and any_requires_grad(*args)):
            return compute(*args)
        # PyTorch's dispatcher omits arguments that have their defaults, and a backward pass finds arguments by their positions.
        return by_dispatcher.apply(*args, *defaults[len(args) :])

    library.impl(overload._schema.name.partition("::")[2], autograd, "Autograd")
    # The class's own apply in Python asks for what native code has asked already.
    called = getattr(kernel, "_on_any_device", kernel)
    return super(torch.autograd.Function, _function(torch, overload, called, function, setup_context)).apply


class _ByPlace(NamedTuple):
    """The backward passes of an operator for tensors on the CPU, and for those on a GPU."""

    on_cpu: Any
    on_gpu: Any


def backward_by_place(kernel, backward, what: str):
    """What ``backward=`` means for a kernel that has another one for the CPU, whose backward pass is that for the CPU.

    A function, and operators, are for both. Raises ValueError if there is a backward pass for one of the places only.
    """
    on_cpu = getattr(kernel, "on_cpu", None)
    if on_cpu is None or isinstance(backward, _ByPlace):
        return backward
    steps = backward if isinstance(backward, (list, tuple)) else [backward]
    if backward is not None and not any(getattr(each, "on_cpu", backward) is None for each in steps):
        return backward
    if backward is None and on_cpu.backward is None:
        return None
    if backward is None or on_cpu.backward is None:
        has, lacks = ("the CPU", "a GPU, backward=") if backward is None else ("a GPU", "the CPU, that of the kernel in cpu=")
        raise ValueError(f"{what}: it has a backward pass for tensors on {has}, and needs one for those on {lacks}")
    return _ByPlace(on_cpu.backward, backward)


def _by_place(first: int, on_cpu: tuple, on_gpu: tuple) -> tuple[Callable, Callable]:
    """Of two backward passes the one for the place of the input at `first`."""

    def setup_context(ctx, inputs, output):
        ctx.pass_there, prepare = on_cpu if inputs[first].device.type == "cpu" else on_gpu
        if prepare is not None:
            prepare(ctx, inputs, output)

    def backward(ctx, *grads):
        return ctx.pass_there(ctx, *grads)

    return backward, setup_context


def _any_requires_grad(*args) -> bool:
    """What PyTorch's C function of this name says of arguments that are no lists. PyTorch 2.6 has none."""
    return any(getattr(each, "requires_grad", False) for each in args)


def _function(torch, overload, compute: Callable, backward: Callable, setup_context: Callable | None):
    """Make an ``autograd.Function`` of an operator.

    What ``torch.library.register_autograd`` makes does the same, and takes longer.
    """

    def forward(ctx, *args):
        result = compute(*args)
        if setup_context is not None:
            setup_context(ctx=ctx, inputs=args, output=result)
        return result

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"BackwardOf_{overload._schema.name.replace('::', '_')}", (torch.autograd.Function,), methods)


def _checked(backward: Callable, names: Sequence[str], name: str) -> Callable:
    """`backward`, which raises RuntimeError if the number of gradients differs from the number of arguments."""

    def checked(ctx, *grads):
        found = backward(ctx, *grads)
        count = len(found) if isinstance(found, (list, tuple)) else 1
        if count != len(names):
            gradients = "1 gradient" if count == 1 else f"{count} gradients"
            raise RuntimeError(
                f"{name}(): its backward returned {gradients}, and the operator has {len(names)} arguments, "
                f"{', '.join(names)}; return None for those without one"
            )
        return found

    return checked


def _backward_of(steps: list[Step], schema: Schema, kernel) -> tuple[Callable, Callable | None]:
    """Return the functions ``backward`` and ``setup_context`` that make these steps; no latter if they need nothing saved."""
    arguments = [each.name for each in schema.arguments]
    outputs = [each.name for each in kernel._pattern.outputs]
    pool = [*arguments, *outputs, *(GRAD + name for name in outputs)]  # an argument may have the name of a gradient: it is first
    values = len(arguments) + len(outputs)
    needed = sorted({at for step in steps for name in step.needs if (at := pool.index(name)) < values})
    is_tensor = [each.type == "Tensor" for each in schema.arguments] + [True] * len(outputs)
    saved = [at for at in needed if is_tensor[at]]
    others = [at for at in needed if not is_tensor[at]]
    kept = [*saved, *others, *range(values, len(pool))]
    places = [[kept.index(pool.index(name)) for name in step.needs] for step in steps]

    gives = {position for step in steps for position in step.gives}
    is_alone = len(steps) == 1 and not steps[0].is_function and steps[0].gives == [*range(len(arguments))]

    taken = {name for step in steps for name in step.needs}
    unused = [at for at, name in enumerate(outputs) if GRAD + name not in taken]
    has_functions = any(step.is_function for step in steps)

    def setup_context(ctx, inputs, output):
        made = output if isinstance(output, tuple) else (output,)
        values = (*inputs, *made)
        ctx.save_for_backward(*[values[at] for at in saved])
        ctx.others = [values[at] for at in others]
        if has_functions:
            ctx.shapes = {at: tuple(value.shape) for at, value in enumerate(inputs) if hasattr(value, "shape")}
        if unused:
            ctx.set_materialize_grads(False)  # so that one that is not asked for is None
            ctx.like = [value.new_zeros(()).expand(value.shape) for value in made]

    def backward(ctx, *grads):
        for at in unused:
            if grads[at] is not None:
                raise RuntimeError(
                    f"{kernel.__qualname__}(): its output {outputs[at]!r} is differentiated, and no step of the kernel's "
                    f"backward= has the parameter {GRAD + outputs[at]!r}"
                )
        if unused:
            grads = tuple(zero.clone() if grad is None else grad for grad, zero in zip(grads, ctx.like, strict=True))
        values = (*ctx.saved_tensors, *ctx.others, *grads) if needed else grads  # as `kept` says
        is_needed = ctx.needs_input_grad
        if is_alone and all(is_needed):
            return _call(steps[0].call, [values[i] for i in places[0]])
        for position, name in enumerate(arguments):
            if is_needed[position] and position not in gives:
                raise RuntimeError(
                    f"{kernel.__qualname__}(): argument {name!r} (position {position}) requires grad, and no step of backward= "
                    f"gives {GRAD + name!r}; if no gradient belongs to it, pass its detach()"
                )
        found: list[Any] = [None] * len(arguments)
        for step, at in zip(steps, places, strict=True):
            if any(is_needed[position] for position in step.gives):
                made = step.gradients(_call(step.call, [values[i] for i in at]), ctx.shapes if has_functions else {})
                for position, grad in zip(step.gives, made, strict=True):
                    found[position] = grad if is_needed[position] else None
        return tuple(found)

    return backward, setup_context if needed or unused or has_functions else None


def _call(kernel, values: list):
    """Call a kernel of a backward pass, or an operator in its place.

    A kernel refuses tensors that are lazily conjugated or negated: those are made plain then. It refuses tensors that wrap
    others: its own operator gets these, as PyTorch's operators do.
    """
    try:
        return kernel(*values)
    except (BufferError, RuntimeError) as error:
        if any(map(is_wrapper, values)) and (made := _by_operator(kernel, values)) is not NotImplemented:
            return made
        if not isinstance(error, BufferError):
            raise
        plain = [value.resolve_conj().resolve_neg() if hasattr(value, "resolve_conj") else value for value in values]
        if all(made is value for made, value in zip(plain, values, strict=True)):
            _refuse_second(kernel, values, error)
            raise
    return kernel(*plain)


def _by_operator(kernel, values: list):
    """Make a call by the operator that a kernel registers itself. Returns NotImplemented if it has none."""
    import torch

    if not hasattr(kernel, "_call_seen"):  # an operator
        return NotImplemented
    return framework_of_type(torch.Tensor).call(kernel, kernel._parameters.bind(*values))


def _refuse_second(kernel, values: list, error: BufferError) -> None:
    """Raise BufferError where a second derivative is asked for, and a kernel of the backward pass has no backward pass."""
    import torch

    is_asked = torch.is_grad_enabled() and _any_requires_grad(*values)  # by create_graph=True
    if is_asked and not getattr(kernel, "_has_backward", getattr(kernel, "backward", None) is not None):
        name = getattr(kernel, "kernel", kernel).__qualname__
        raise BufferError(
            f"{name}(): a second derivative is asked for (create_graph=True), and this kernel of a backward pass declares no "
            "backward pass of its own, fast_args(backward=...)"
        ) from error
