"""The options of ``fast_args``, and checks of them where a kernel is decorated.

An option that neither ``fast_args`` nor ``numba.njit`` has is refused. Numba's own are read from its registry of target options
and from the parameters of ``numba.jit``. If these are not as expected, Numba refuses the option in the first compilation.
"""

import difflib
import functools
import inspect
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numba

from ..dispatch.structs import ALLOWS_BITS, ALLOWS_GRAD
from ..ground.numba_internals import names_of_target_options
from ..ground.parameters import Parameters
from ..ground.passing import reraise_passing
from ..ground.safe_repr import shown
from ..ground.shape_notation import pattern_of
from .backward import steps_of

__all__ = [
    "KernelOptions",
    "check_backward",
    "check_mutated",
    "check_names",
    "checked_mutates",
    "checked_returns",
    "declared",
    "declaring",
    "numba_options",
    "outputs_of",
]


class KernelOptions(NamedTuple):
    """The options of ``fast_args`` that are not Numba's. See :func:`fast_args`."""

    allows_grad: bool = False
    storage: bool = False
    returns: "str | type | None" = None
    out: "str | None" = None
    cuda: Any = None
    launch: Any = None
    mutates: "tuple[str, ...] | None" = None
    backward: "tuple[Any, ...] | None" = None

    @property
    def allows(self) -> int:
        """Which odd tensors the kernel takes: ``structs.ALLOWS_*``."""
        return ALLOWS_GRAD * self.allows_grad | ALLOWS_BITS * self.storage


declaring: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""By ``id``, the kernels whose options say what they return, or write to: these can be operators of frameworks."""
_KNOWN_FOR_SURE = {"nopython", "nogil", "parallel", "fastmath", "cache"}
"""By these it is verified that the registry is what it is taken for."""


@functools.cache
def numba_options() -> frozenset[str] | None:
    """The names of the options of ``numba.njit``; None where they cannot be had."""
    try:
        found = names_of_target_options()
        parameters = list(inspect.signature(numba.jit).parameters.values())
    except Exception as error:  # another Numba
        reraise_passing(error)
        return None
    found |= {p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(found) if found >= _KNOWN_FOR_SURE else None


def check_names(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise TypeError for names that are no options of Numba's, with the nearest ones. `own`: those of ``fast_args`` itself.

    Names with an underscore in front are Numba's private matter.
    """
    known = numba_options()
    unknown = [name for name in given if known is not None and name not in known and not name.startswith("_")]
    if not unknown:
        return
    assert known is not None
    names = sorted(known | set(own))
    nearest = {name: difflib.get_close_matches(name.lower(), names, 1) for name in unknown}
    hints = [f"{found[0]!r}" + (f" for {name!r}" if len(unknown) > 1 else "") for name, found in nearest.items() if found]
    hint = f"; did you mean {', '.join(hints)}?" if hints else "."
    what = f"{'an unknown option' if len(unknown) == 1 else 'unknown options'}, {', '.join(map(repr, unknown))}"
    listed = ", ".join(name for name in names if not name.startswith("_"))
    raise TypeError(f"fast_args() got {what}{hint} Its options and those of numba.njit: {listed}")


def checked_mutates(mutates: Any, what: str = "fast_args()") -> tuple[str, ...]:
    """Return the names of the arguments that a kernel writes to. Raises TypeError if they are no strings."""
    names = (mutates,) if isinstance(mutates, str) else tuple(mutates) if isinstance(mutates, (tuple, list)) else (mutates,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what}: mutates is a tuple of parameters' names, not {shown(mutates)}")
    return names


def check_mutated(names: tuple[str, ...], parameters: Parameters, function) -> None:
    """Raise ValueError if a name that ``mutates`` gives is none of a function's parameters."""
    unknown = [name for name in names if name not in parameters.names]
    if unknown:
        signature = f"{function.__qualname__}{inspect.signature(function)}"
        raise ValueError(f"fast_args(): mutates={names!r} names {unknown[0]!r}, no parameter of {signature}")


def check_backward(options: KernelOptions, pattern, parameters: Parameters, function) -> None:
    """Raise TypeError or ValueError if the backward pass in the options of a function does not fit it."""
    if options.backward is None:
        return
    what = f"fast_args(): {function.__qualname__}()"
    if pattern is None or options.mutates:
        why = "declare its outputs, out=" if pattern is None else "it cannot write to arguments, mutates="
        raise ValueError(f"{what}: a kernel with backward= returns what is differentiated: {why}")
    if options.allows_grad:
        raise ValueError(f"{what}: a kernel with grad='allow' hides its arguments from autograd; backward= needs grad='refuse'")
    outputs = [each.name for each in pattern.outputs]
    steps_of(options.backward, parameters.names[: len(parameters.names) - len(outputs)], outputs, what)


def declared(out: str | None, function):
    """Parse the notation of a function's outputs, if any. Raises ValueError if it does not fit the function."""
    return None if out is None else pattern_of(out, Parameters(function), f"fast_args(): {function.__qualname__}()")


def outputs_of(pattern, parameters: Parameters, name: str):
    """Return the ``Outputs`` of a pattern; None for None."""
    if pattern is None:
        return None
    from .outputs import Outputs

    return Outputs(pattern, parameters, name)


def checked_returns(returns, parameters: Parameters, function) -> type | int | None:
    """Check ``returns`` of a function. Returns a type, a parameter's position, or None; raises TypeError or ValueError."""
    if isinstance(returns, type):
        from .results import check_type

        check_type(returns)
    elif isinstance(returns, str):
        if returns not in parameters.names:
            signature = f"{function.__qualname__}{inspect.signature(function)}"
            raise ValueError(f"fast_args(): returns={returns!r} names no parameter of {signature}")
        return parameters.names.index(returns)
    return returns
