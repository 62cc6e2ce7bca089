"""What ``half`` changes in Numba, beyond what ``numba.extending`` offers.

The third file, with ``numba_internals`` and ``numba_code``, in which private names of Numba stand.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.errors import NumbaError, TypingError

from .numba_internals import module_of

# ---- errors ----------------------------------------------------------------------------------------------------------


def name_operations(is_meant: Callable[[Any], bool]) -> None:
    """Let errors of Numba's type inference have :func:`operation_of`, if it has an operand whose type `is_meant`.

    Where Numba fails by an exception that is not for users, a TypingError is raised instead.
    """
    inferer = getattr(module_of("numba.core.typeinfer"), "TypeInferer", None)
    numbas: Any = getattr(inferer, "propagate", None)
    if inferer is None or numbas is None:
        return

    @functools.wraps(numbas)
    def propagate(self, *given, **named):
        try:
            return numbas(self, *given, **named)
        except TypingError as error:
            error.operation = _failed_operation(self, is_meant)
            raise
        except NumbaError:
            raise
        except Exception as error:
            operation = _failed_operation(self, is_meant)
            if operation is None:
                raise
            own = TypingError(f"{operation}: {type(error).__name__}: {error}")
            own.operation = operation
            raise own from error

    inferer.propagate = propagate


def operation_of(error: BaseException) -> str | None:
    """The operation for which type inference has raised `error`, as text with the operands' types; None if unknown.

    It is the innermost one in functions of the user.
    """
    return getattr(error, "operation", None)


def _failed_operation(inferer, is_meant) -> str | None:
    """Find the first constraint that fails: Numba reports it, by an error of its own that does not say which it is."""
    if not any(is_meant(each) for variable in inferer.typevars.values() if variable.defined for each in variable.get()):
        return None
    for constraint in inferer.constraints.constraints:
        try:
            with inferer.warnings.catch_warnings(constraint.loc.filename, constraint.loc.line):
                constraint(inferer)
        except Exception as error:
            try:
                function, operands, text = _described(inferer, getattr(constraint, "fallback", constraint))
            except Exception:  # neither a call nor an attribute, or a Numba that has changed
                return None
            if isinstance(function, types.Dispatcher):
                return operation_of(error)
            return text if any(map(is_meant, operands)) else None
    return None


def _described(inferer, constraint) -> tuple[Any, list, str]:
    """A call, or an attribute: the function's type, the operands' types, and the operation as text."""
    typeinfer, variables = module_of("numba.core.typeinfer"), inferer.typevars
    if isinstance(constraint, typeinfer.GetAttrConstraint):
        value = variables[constraint.value.name].getone()
        return None, [value], f"{value}.{constraint.attr}"
    positional, named = typeinfer.fold_arg_vars(variables, constraint.args, constraint.vararg, constraint.kws)
    operands = [*map(types.unliteral, positional)]
    shown = [*map(str, operands), *(f"{name}={types.unliteral(each)}" for name, each in named.items())]
    if isinstance(constraint, typeinfer.IntrinsicCallConstraint):
        sign = module_of("numba.core.utils").OPERATORS_TO_BUILTINS.get(constraint.func)
        if sign is not None and len(operands) == 2:
            left, right = reversed(shown) if sign == "in" else shown
            return None, operands, f"{left} {sign} {right}"
        name = getattr(constraint.func, "__name__", str(constraint.func))
        return None, operands, f"{sign}{shown[0]}" if sign is not None else f"{name}({', '.join(shown)})"
    function = variables[constraint.func].getone()
    name = getattr(getattr(function, "typing_key", None), "__name__", str(function))
    if isinstance(function, types.BoundFunction):
        name = f"{function.this}.{inferer.func_ir.get_definition(constraint.func).attr}"
        operands.append(function.this)
    return function, [function, *operands, *named.values()], f"{name}({', '.join(shown)})"
