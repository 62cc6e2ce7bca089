"""What ``half`` changes in Numba, beyond what ``numba.extending`` offers.

The third file, with ``numba_internals`` and ``numba_code``, in which private names of Numba stand.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import ForceLiteralArg, NumbaError, TypingError

from .numba_internals import cpu_target, module_of, overloads_of
from .passing import reraise_passing

# ---- types -----------------------------------------------------------------------------------------------------------


def add_numbers(added: dict[str, Any], dtype_of: Callable[[Any], np.dtype]) -> None:
    """Let Numba take types for those of numbers that NumPy's arrays have.

    `added`: by name. `dtype_of`: from a type to its dtype, whose name and letter NumPy need not know.
    """
    core = module_of("numba.core.types")
    core.number_domain = core.number_domain.union(added.values())  # of which ufuncs take scalars
    known = frozenset(added.values())
    _replace_as_dtype(known, dtype_of)
    numbas: Any = type(cpu_target.typing_context)

    class Context(numbas):
        def resolve_module_constants(self, typ, attr):  # some passes write `np.bfloat16` for a type of that name
            if typ.pymod is np and attr in added and not hasattr(np, attr):
                return types.NumberClass(added[attr])
            return super().resolve_module_constants(typ, attr)

        def unify_pairs(self, first, second):  # `first` is asked first: Numba's numbers ask NumPy, which need not know the dtype
            return super().unify_pairs(*((second, first) if second in known else (first, second)))

    cpu_target.typing_context.__class__ = Context


def _replace_as_dtype(added: frozenset, dtype_of) -> None:
    """Replace Numba's function from types to dtypes, in the modules that have imported it already, too."""
    numpy_support = module_of("numba.np.numpy_support")
    numbas, can_cast = numpy_support.as_dtype, numpy_support.ufunc_can_cast

    @functools.wraps(numbas)
    def as_dtype(nbtype):
        return dtype_of(nbtype) if nbtype in added else numbas(nbtype)

    @functools.wraps(numbas)
    def real_dtype(nbtype):  # of loops, which NumPy calls: it would call one for bytes with any array
        found = as_dtype(nbtype)
        if nbtype in added and found.type is np.void:
            raise TypeError(f"NumPy has no dtype for {nbtype}; install ml_dtypes, which has it")
        return found

    @functools.wraps(can_cast)
    def ufunc_can_cast(from_, to, *rest, **named):
        try:
            return can_cast(from_, to, *rest, **named)
        except TypeError:  # a letter that NumPy does not know: no ufunc has a loop for it
            return False

    numpy_support.ufunc_can_cast = ufunc_can_cast
    module: Any
    for name, module in [*sys.modules.items()]:
        if name.startswith("numba.") and vars(module).get("as_dtype") is numbas:
            module.as_dtype = real_dtype if name.startswith("numba.np.ufunc.") else as_dtype


def lower_constant_array(function: Callable) -> None:
    """Let `function` compile constant arrays, as ``(context, builder, numba_type, array)``."""
    module_of("numba.np.arrayobj").lower_constant(types.Array)(function)


def set_type_of_dtype(dtype: np.dtype, numba_type: Any) -> None:
    """Let Numba type arrays and scalars of a dtype as `numba_type`."""
    module_of("numba.np.numpy_support").FROM_DTYPE[dtype] = numba_type


# ---- functions -------------------------------------------------------------------------------------------------------


def set_parallel(function: Callable, is_meant: Callable[[Any], bool], chosen: Callable[[Callable], Any]) -> None:
    """Let Numba's parallel pass replace calls of NumPy's `function` whose first argument's type `is_meant`.

    `chosen`: from `function` to what replaces it for one argument, a function with ``prange``; None: nothing does.
    """
    replaced = getattr(module_of("numba.parfors.parfor"), "swap_functions_map", {})
    for name in (function.__name__, f"a{function.__name__}"):  # also np.amax
        if (numbas := replaced.get((name, "numpy"))) is not None:
            replaced[name, "numpy"] = _parallel(function, numbas, is_meant, chosen)


def _parallel(function, numbas, is_meant, chosen):
    @functools.wraps(numbas)
    def replacement(result, *given, **named):
        if not is_meant(given[0]):
            return numbas(result, *given, **named)
        return chosen(function) if len(given) == 1 and not named else None

    return replacement


def overload_first(function: Callable, own: Callable[[Any], Any]) -> None:
    """Let ``overload(function)`` of Numba itself, of one parameter, ask `own` first. Without that, nothing changes."""
    module_of("numba.np.npyimpl")  # which has those for NumPy's functions
    templates = module_of("numba.core.typing.templates").builtin_registry.functions
    template: Any = next((each for each in templates if each.key is function), None)
    numbas = getattr(template, "_overload_func", None)
    if numbas is None:
        return

    @functools.wraps(numbas)
    def overloaded(given):
        return own(given) or numbas(given)

    template._overload_func = staticmethod(overloaded)


def limits_of_numba() -> Any:
    """The named tuple that Numba makes of ``numpy.finfo``."""
    return module_of("numba.np.arraymath").finfo


def convert_arguments(is_meant: Callable[[Any], bool], convert: Callable) -> None:
    """Let Numba compile a function of NumPy or ``random``, for which it has no code that is right for some types, with others.

    `is_meant`: whether a parameter's type is one of them. `convert`: a function with an overload; what it returns of a value of
    such a type is passed. Numba's own code is tried first. A function without a result is not compiled so: it would change a
    copy. What it writes to the parameter ``out`` is copied back.
    """
    template = getattr(module_of("numba.core.typing.templates"), "_OverloadFunctionTemplate", None)
    numbas: Any = getattr(template, "_build_impl", None)
    if template is None or numbas is None:
        return

    @functools.wraps(numbas)
    def build(self, cache_key, args, kws):
        if not any(map(is_meant, (*args, *kws.values()))) or not _is_of_numpy(type(self)):
            return numbas(self, cache_key, args, kws)
        try:
            found = numbas(self, cache_key, args, kws)
        except ForceLiteralArg:
            raise
        except Exception as error:
            reraise_passing(error)
            own = _converting(self, args, kws, is_meant, convert)
            if own is None:
                raise
            found = own
        self._impl_cache[cache_key] = found
        return found

    template._build_impl = build


def _is_of_numpy(template) -> bool:
    """Whether Numba itself implements a function of NumPy or ``random`` by an overload, not one of its own."""
    where = template._overload_func.__module__ or ""
    is_meant = where.startswith("numba.np.") or where == "numba.cpython.randomimpl"
    return is_meant and not (getattr(template.key, "__module__", None) or "").startswith("numba.")


def _converting(template, args, kws, is_meant, convert) -> tuple | None:
    """Make and compile the dispatcher of an overload that calls the same function with converted arguments; or None."""
    parameters = inspect.signature(template._overload_func).parameters
    try:
        given = inspect.signature(template._overload_func).bind(*args, **kws).arguments
        function = _calling(type(template).key, parameters, given, is_meant, convert)
        dispatcher = template._get_jit_decorator()(**template._jit_options)(function)
        found = types.Dispatcher(dispatcher).get_call_type(template.context, args, kws)
    except Exception:  # Numba's first error tells more
        return None
    return None if found is None or found.return_type == types.none else (dispatcher, args)


def _calling(function, parameters, given: dict, is_meant, convert) -> FunctionType:
    """A function with these `parameters` that calls `function` with what is `given` of them."""
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        raise TypeError("a function of any number of arguments")
    has_out = "out" in given and is_meant(given["out"])
    passed = [name for name in given if not (name == "out" and has_out)]
    is_gapless = [*parameters][: len(passed)] == passed
    values = [f"convert({name})" if is_meant(given[name]) else name for name in passed]
    called = ", ".join(values if is_gapless else map("{}={}".format, passed, values))
    shown = [name if each.default is each.empty else f"{name}=defaults[{name!r}]" for name, each in parameters.items()]
    names: dict[str, Any] = {
        "function": function, "convert": convert, "defaults": {name: each.default for name, each in parameters.items()},
    }  # fmt: skip
    source = f" out[...] = function({called})\n return out\n" if has_out else f" return function({called})\n"
    exec(f"def calling({', '.join(shown)}):\n{source}", names)
    del names["defaults"]  # Numba compiles what a function's globals are
    return names["calling"]


def convert_elements(converted: Callable[[Any], Any]) -> None:
    """Let functions of ``numba.vectorize`` have loops for the types that ``converted`` returns, in place of those it is given.

    A loop that is declared for the given types comes first, also in those of ``numba.guvectorize``, where nothing is converted.
    """
    function: Any = getattr(module_of("numba.np.ufunc.dufunc"), "DUFunc", None)
    generalised: Any = getattr(module_of("numba.np.ufunc.gufunc"), "GUFunc", None)
    compile_: Any = getattr(function, "_compile_for_argtys", None)
    if compile_ is None or not all(hasattr(each, "find_ewise_function") for each in (function, generalised)):
        return

    @functools.wraps(compile_)
    def compile_for_argtys(self, argtys, return_type=None):  # which is given with what is declared
        return compile_(self, tuple(map(converted, argtys)) if return_type is None else argtys, return_type)

    function._compile_for_argtys = compile_for_argtys
    function.find_ewise_function = _declared_first(function.find_ewise_function, converted, converted)
    generalised.find_ewise_function = _declared_first(generalised.find_ewise_function, converted, lambda given: given)


def _declared_first(find, converted, taken) -> Callable:
    """`find`, which gets `taken` of each type. Where a type would be `converted`, a loop of exactly these types comes first."""

    @functools.wraps(find)
    def find_ewise_function(self, ewise_types):
        given = tuple(ewise_types)
        if given != tuple(map(converted, given)):
            for declared, compiled in overloads_of(self._dispatcher):
                elements = tuple(each.dtype if isinstance(each, types.Array) else each for each in declared.args)
                if elements[: len(given)] == given:
                    return declared, compiled
        return find(self, tuple(map(taken, given)))

    return find_ewise_function


# ---- results ---------------------------------------------------------------------------------------------------------


def refuse_results(why_not: Callable[[Any], str | None]) -> None:
    """Let Numba's own calls of a compiled function raise TypeError before it runs, if `why_not` says why of its result's type."""
    wrapper = getattr(module_of("numba.core.callwrapper"), "PyCallWrapper", None)
    numbas: Any = getattr(wrapper, "build_wrapper", None)
    if wrapper is None or numbas is None:
        return

    @functools.wraps(numbas)
    def build_wrapper(self, api, builder, *given):
        why = why_not(self.fndesc.restype)
        if why is None:
            return numbas(self, api, builder, *given)
        api.err_set_string("PyExc_TypeError", f"{self.fndesc.qualname}(): {why}")
        return builder.ret(api.get_null_object())

    wrapper.build_wrapper = build_wrapper


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
            reraise_passing(error)  # Numba's dispatcher remembers a TypingError, and never tries again
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
            except Exception:  # none of these, or a Numba that has changed
                return None
            if isinstance(function, types.Dispatcher):
                return operation_of(error)
            return text if any(map(is_meant, operands)) else None
    return None


def _described(inferer, constraint) -> tuple[Any, list, str]:
    """A call, an attribute or a store: the function's type, the operands' types, and the operation as text."""
    typeinfer, variables = module_of("numba.core.typeinfer"), inferer.typevars
    if isinstance(constraint, typeinfer.GetAttrConstraint):
        value = variables[constraint.value.name].getone()
        return None, [value], f"{value}.{constraint.attr}"
    if isinstance(constraint, (typeinfer.SetItemConstraint, typeinfer.StaticSetItemConstraint)):
        index = getattr(constraint, "index_var", constraint.index)
        operands = [types.unliteral(variables[each.name].getone()) for each in (constraint.target, index, constraint.value)]
        return None, operands, "{}[{}] = {}".format(*operands)
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
