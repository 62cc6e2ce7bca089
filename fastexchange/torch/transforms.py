"""Operators within the transforms of ``torch.func``: a gradient that is asked for, and that nobody gives, is an error.

``grad``, ``vjp`` and ``jvp`` see no backward pass that is registered from Python; for an operator without one PyTorch takes
zeros, also in code that ``torch.compile`` has made. A function registered for the dispatch key by which transforms come first is
asked, and no other call has this key: none gets slower. It cannot go on to PyTorch's own function for the key, which is a
fallback. So it calls a second operator, the *shadow*, for which there is only the fallback, and what this leads to calls the
operator itself.

Source: ``aten/src/ATen/functorch/DynamicLayer.cpp``.
"""

import itertools

from .odd_tensors import is_differentiated
from .schema import Schema

__all__ = ["refuse_gradients"]

SHADOWS = "fastexchange_shadows"
_numbers = itertools.count()


def refuse_gradients(torch, library, overload, kernel, schema: Schema, has_backward: bool):
    """Let an operator raise BufferError where a transform of ``torch.func`` differentiates by one of its arguments.

    `library`: of the operator's registrations. Returns the library of the shadow, which has to live as long.
    """
    short = overload._schema.name.partition("::")[2]
    shadows = torch.library.Library(SHADOWS, "FRAGMENT")
    name = f"shadow_{next(_numbers)}"  # never that of another one: PyTorch keeps what it has found by a name
    shadows.define(f"{name}{schema}")
    shadow = getattr(getattr(torch.ops, SHADOWS), name).default

    def go_on(*args, **kwargs):
        return overload(*args, **kwargs)

    for key in ("CompositeImplicitAutograd", "FuncTorchBatched", "Functionalize"):
        shadows.impl(name, go_on, key)

    def transformed(*args, **kwargs):
        for position, each in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(each.name)
            if any(map(is_differentiated, value if isinstance(value, (list, tuple)) else (value,))):
                raise BufferError(
                    f"{kernel.__qualname__}(): argument {each.name!r} (position {position}) is differentiated by a transform of "
                    f"torch.func (grad, vjp, jvp ...), {why}"
                )
        return shadow(*args, **kwargs)

    if has_backward:
        why = "which does not see the backward pass of an operator; use torch.autograd.grad, or pass its detach()"
    else:
        why = "and the operator has no backward; pass its detach(), or use torch.autograd.grad and fast_args(backward=...)"
    library.impl(short, transformed, "FuncTorchDynamicLayerFrontMode")
    return shadows
