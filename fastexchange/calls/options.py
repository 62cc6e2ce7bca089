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
from ..ground.once import cached_property
from ..ground.parameters import Parameters
from ..ground.passing import reraise_passing
from ..ground.safe_repr import is_type, shown
from ..ground.shape_notation import pattern_of
from .backward import check_shapes, steps_of

__all__ = ["KernelOptions", "OptionsOf", "check_names", "checked_mutates", "declaring", "launched", "numba_options"]


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

    @classmethod
    def given(cls, grad, storage, returns, out, cuda, launch, mutates, backward) -> "KernelOptions":
        """What users have given. Raises TypeError or ValueError. :class:`OptionsOf` checks what is about parameters."""
        if not isinstance(grad, str) or grad not in ("refuse", "allow"):
            raise ValueError(f"fast_args(): grad is 'refuse' or 'allow', not {shown(grad)}")
        if returns is not None and not isinstance(returns, str) and not is_type(returns):
            raise TypeError(f"fast_args(): returns is a type of tensors, the name of a parameter or None, not {shown(returns)}")
        if not isinstance(storage, bool):
            raise TypeError(f"fast_args(): storage is True or False, not {shown(storage)}")
        mutates = None if mutates is None else checked_mutates(mutates)
        steps = None if backward is None else tuple(backward) if isinstance(backward, (list, tuple)) else (backward,)
        return cls(grad == "allow", storage, returns, out, cuda, launch, mutates, steps)

    @property
    def allows(self) -> int:
        """Which odd tensors the kernel takes: ``structs.ALLOWS_*``."""
        return ALLOWS_GRAD * self.allows_grad | ALLOWS_BITS * self.storage


declaring: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""By ``id``, the kernels whose options say what they return, or write to: these can be operators of frameworks."""
launched: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""By ``id``, the kernels for CUDA that are launched by a configuration, and declare what they return, or write to."""
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


class OptionsOf:
    """The options of a function: parsed, and checked against its parameters, each when it is first asked for.

    Raises TypeError or ValueError for an option that does not fit.
    """

    def __init__(self, options: KernelOptions, function: Any):
        self.options, self.function = options, function

    @cached_property
    def pattern(self):
        """The parsed ``out``; None without it."""
        options = self.options
        return None if options.out is None else pattern_of(options.out, Parameters(self.function), self._what)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters, of which the declared outputs may be omitted."""
        return Parameters(self.function, 0 if self.pattern is None else len(self.pattern.outputs))

    @property
    def signature(self) -> inspect.Signature:
        """The signature of calls: outputs may be left out."""
        found = inspect.signature(self.function)
        outputs = {each.name for each in self.pattern.outputs} if self.pattern is not None else set()
        given = [each.replace(default=None) if each.name in outputs else each for each in found.parameters.values()]
        return found.replace(parameters=given)

    @cached_property
    def outputs(self):
        """The ``Outputs`` that ``out`` declares; None without it."""
        if self.pattern is None:
            return None
        from .outputs import Outputs

        return Outputs(self.pattern, self.parameters, self.function.__qualname__)

    @cached_property
    def returns(self) -> type | int | None:
        """``returns`` for native code: a type, a parameter's position, or None."""
        returns = self.options.returns
        if isinstance(returns, type):
            from .results import check_type

            check_type(returns)
        return self._position_of(returns, f"returns={returns!r} names") if isinstance(returns, str) else returns

    def check(self) -> None:
        """Check what is given. Parameters are looked at only if an option is about them."""
        for name in self.options.mutates or ():
            self._position_of(name, f"mutates={self.options.mutates!r} names {name!r},")
        if self.pattern is not None or self.options.returns is not None:
            _ = self.parameters, self.returns
        if self.options.backward is not None:
            self._check_backward()

    @property
    def _what(self) -> str:
        return f"fast_args(): {self.function.__qualname__}()"

    def _position_of(self, name: str, says: str) -> int:
        if name not in self.parameters.names:
            signature = f"{self.function.__qualname__}{inspect.signature(self.function)}"
            raise ValueError(f"fast_args(): {says} no parameter of {signature}")
        return self.parameters.names.index(name)

    def _check_backward(self) -> None:
        if self.pattern is None or self.options.mutates:
            why = "declare its outputs, out=" if self.pattern is None else "it cannot write to arguments, mutates="
            raise ValueError(f"{self._what}: a kernel with backward= returns what is differentiated: {why}")
        if self.options.allows_grad:
            raise ValueError(
                f"{self._what}: a kernel with grad='allow' hides its arguments from autograd; backward= needs grad='refuse'"
            )
        outputs = [each.name for each in self.pattern.outputs]
        names = self.parameters.names
        steps = steps_of(self.options.backward or (), names[: len(names) - len(outputs)], outputs, self._what)
        check_shapes(steps, self.pattern, self._what)
