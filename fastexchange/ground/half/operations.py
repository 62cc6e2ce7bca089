"""What functions and operators of Numba do with numbers of the formats, and with arrays of them.

Numba has implementations for float32 and float64. A template for each function comes before Numba's own, because it is one for
the CPU alone; it replaces the formats' types by float32 and asks for the function again. A whole-array operation has Numba's
result for float32, too: an array of float32 or, for comparisons, of bool.
"""

import operator
from typing import Any

import numpy as np
from numba.core import types
from numba.core.errors import ForceLiteralArg, TypingError
from numba.extending import lower_builtin

from ..numba_internals import (
    AbstractTemplate,
    functions_of_math,
    infer_global,
    signature,
    supported_ufuncs,
)
from . import NotForHalf
from .elements import Half, computed_as
from .reductions import has_half, wide

_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow",
    "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip
_COMPARISONS = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge
_OPERATORS = [getattr(operator, name) for name in (*_BINARY, "neg", "pos")]
_BUILTINS = [abs, round, min, max, pow, divmod, bool, float, int, complex]
_PROMOTING = {*_OPERATORS, min, max, pow, divmod, *supported_ufuncs} - {np.ldexp}
"""Functions of numbers of one kind, by NumPy's promotion. Others have parameters of their own, as ``round`` and ``ldexp``."""


def _as_computed(numba_type: Any, is_promoted: bool) -> Any:
    if isinstance(numba_type, types.Optional):
        return types.Optional(_as_computed(numba_type.type, is_promoted))
    if isinstance(numba_type, types.Array):
        element = _as_computed(numba_type.dtype, is_promoted)
        return numba_type if element == numba_type.dtype else numba_type.copy(dtype=element)
    return computed_as(numba_type) if is_promoted or isinstance(numba_type, Half) else types.unliteral(numba_type)


def called(function: Any, args, kws=()) -> str:
    """A call as text: the function's name, and the arguments' types."""
    module = getattr(function, "__module__", None) or "numpy"  # NumPy's ufuncs name none before 2.2
    module = "np" if module == "numpy" else module.replace("numpy.", "np.").removeprefix("_")
    shown = [*map(str, map(types.unliteral, args)), *(f"{name}={types.unliteral(each)}" for name, each in dict(kws).items())]
    return f"{'' if module == 'builtins' else module + '.'}{function.__name__}({', '.join(shown)})"


class _AsFloat32(AbstractTemplate):
    """A function, for arguments of which some have a format's type."""

    metadata = {"target": "cpu"}  # noqa: RUF012 (as Numba's templates have it)
    prefer_literal = True

    def generic(self, args, kws):
        if kws or not any(map(has_half, args)):
            return None
        if self.key in _COMPARISONS and args[0] == args[1] and isinstance(args[0], Half):
            self._implementation = self.key  # with these types, of which Numba compares values without a cast
            return signature(types.boolean, *args)
        is_ufunc, with_array = self.key in supported_ufuncs, any(isinstance(each, types.Array) for each in args)
        if is_ufunc and with_array and any(isinstance(each, Half) for each in args[: self.key.nin]):
            raise NotForHalf(called(self.key, args))  # Numba makes loops of numbers that it knows
        taken = tuple(_as_computed(each, self.key in _PROMOTING) for each in args)
        found = self._resolved(taken)
        if found is None:
            raise NotForHalf(called(self.key, args))
        self._implementation = self.context.resolve_value_type(self.key).get_impl_key(found)
        if not with_array:
            return found
        ufunc = _IN_PLACE.get(self.key) or _UFUNCS.get(self.key, self.key)
        if ufunc not in supported_ufuncs:
            return None
        # Numba compiles most expressions of arrays as loops over their elements, and needs only the type. What it does not:
        written = args[0] if self.key in _IN_PLACE else args[ufunc.nin] if len(args) > ufunc.nin else None
        is_loop = ufunc.nout == 1 and getattr(found.return_type, "ndim", 0) > 0
        if not is_loop:
            found = self.context.resolve_function_type(self.key, tuple(_as_computed(each, False) for each in args), {})
        self._implementation = ufunc, _loop if is_loop else _no_loop
        taken = (types.float32 if isinstance(each, Half) else types.unliteral(each) for each in args)
        return signature(written or found.return_type, *taken)

    def _resolved(self, taken):
        try:
            return self.context.resolve_function_type(self.key, taken, {})
        except ForceLiteralArg:
            raise
        except TypingError:
            return None

    def get_impl_key(self, _signature):
        return self._implementation


_loop, _no_loop = "loop over arrays of a format", "function of arrays of a format"
_UFUNCS = {
    operator.add: np.add, operator.sub: np.subtract, operator.mul: np.multiply, operator.truediv: np.true_divide,
    operator.floordiv: np.floor_divide, operator.mod: np.remainder, operator.pow: np.power, operator.eq: np.equal,
    operator.ne: np.not_equal, operator.lt: np.less, operator.le: np.less_equal, operator.gt: np.greater,
    operator.ge: np.greater_equal, operator.neg: np.negative, operator.pos: np.positive, abs: np.absolute,
}  # fmt: skip
_IN_PLACE = {getattr(operator, f"i{each.__name__}"): _UFUNCS[each] for each in _UFUNCS if f"i{each.__name__}" in _BINARY}


def _lower_whole_array(function, kind: str, argument: str) -> None:
    """Compile what is no expression that Numba makes a loop of: operations in place, functions with ``out``, of no dimension.

    `argument`: the text of an argument with the name {}.
    """
    count = function.nin
    names = [f"x{i}" for i in range(count)]
    # The name, because Numba takes two functions of equal code for the same one.
    called = f"{function.__name__}({', '.join(map(argument.format, names))})"
    made: dict[str, Any] = {}
    source = f"def plain({', '.join(names)}): return {called}\n"
    source += f"def into({', '.join(names)}, out):\n out[...] = {called}\n return out\n"
    source += f"def in_place({', '.join(names)}):\n x0[...] = {called}\n return x0\n"
    exec(source, {function.__name__: function, "wide": wide}, made)

    @lower_builtin((function, kind), types.VarArg(types.Any))
    def lower(context, builder, sig, args):
        is_in_place = len(args) == count and sig.return_type == sig.args[0] and has_half(sig.args[0])
        chosen = "into" if len(args) > count else "in_place" if is_in_place else "plain"
        return context.compile_internal(builder, made[chosen], sig, args)


def _lower_comparison(function) -> None:
    """Compile a comparison of two numbers of a format."""

    @lower_builtin(function, Half, Half)
    def lower(context, builder, sig, args):
        compared = signature(types.boolean, types.float32, types.float32)
        taken = [context.cast(builder, *each, types.float32) for each in zip(args, sig.args, strict=True)]
        return context.get_function(function, compared)(builder, taken)


for _function in dict.fromkeys([*_OPERATORS, *_BUILTINS, *functions_of_math, *supported_ufuncs]):
    # Not as a decorator, which asks for the module of a function: NumPy's have one only from 2.2 on.
    infer_global(_function, types.Function(type(f"{_function.__name__}_AsFloat32", (_AsFloat32,), {"key": _function})))
for _function in supported_ufuncs:
    _lower_whole_array(_function, _loop, "{}")
    _lower_whole_array(_function, _no_loop, "wide({})")
for _function in _COMPARISONS:
    _lower_comparison(_function)
