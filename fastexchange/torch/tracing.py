"""Calls of kernels that PyTorch traces or transforms: they are made by operators that the kernels register themselves.

Dynamo (``torch.compile``, ``torch.export``) traces :func:`call_traced`. Tensors that stand for others (fake, functional, those of
``torch.vmap``) come to :func:`call_symbolic`.
"""

import ctypes
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

from numba import types as numba_types
from numba.np import numpy_support

from ..calls import results
from ..calls.options import declaring
from ..dispatch.overloads import METHODS
from ..ground.numba_internals import compile_result, overloads_of
from ..ground.omitted import OMITTED
from ..ground.once import once
from ..ground.safe_repr import a_type_name
from .checks import is_recorded
from .declaration import declaration_of
from .library import has_operators, is_registered, register, registered_as
from .odd_tensors import is_symbolic
from .operator import TorchOp
from .schema import Schema, schema_of, with_outputs
from .traced import mark_constant

__all__ = ["call_symbolic", "call_traced", "find_by_name"]

NAMESPACE = "fastexchange"


def call_traced(kernel, /, *args, **kwargs):
    """Make a call in code that Dynamo traces, by an operator. Dynamo traces this function, too.

    A call that no operator makes breaks Dynamo's graph: Python makes it.
    """
    import torch

    # What Dynamo calls gets constants only (before PyTorch 2.12); for an `id` it guards that the object stays the same.
    address = id(kernel)
    prepare_tracing(address)
    given = kernel._parameters.bind(*args, **kwargs)
    kinds = tuple([_kind(torch, value) for value in given])
    name = traced_name(address, kinds)
    if not name:
        return _breaks[why_untraced(address, kinds)](kernel, args, kwargs)
    return _call(getattr(torch.ops.fastexchange, name).default, kernel, given)


def prepare_tracing(address: int) -> None:
    """Prepare what Dynamo cannot trace: a kernel's parameters, which ``exec`` makes, and functions that it does not enter."""
    find_by_name()
    kernel = _kernel_at(address)
    kernel._parameters  # noqa: B018
    _breaks.update(_untraced_calls())
    _disable_tracing(type(kernel), ("_call_first", *METHODS))
    _disable_tracing(results, results.CALLED)


def traced_name(address: int, kinds: tuple) -> str:
    """Return what :func:`operator_name` does, for the kernel of this ``id``."""
    return operator_name(_kernel_at(address), kinds)


def why_untraced(address: int, kinds: tuple) -> str:
    """Why no operator makes a call with arguments of these kinds of the kernel of this ``id``: a key of `UNTRACED`."""
    kernel = _kernel_at(address)
    if any(kind[0] == "?" for kind in kinds):
        return "argument"
    return "undeclared" if kernel._pattern is None and kernel.mutates is None else "schema"


UNTRACED = {
    "argument": "an argument is neither a tensor, a list of tensors, a number nor None; make NumPy's numbers int() or float() "
    "outside of the compiled function",
    "undeclared": "a kernel returns a value, or nobody knows what it writes to; declare what it returns as outputs, "
    "fast_args(out=...), or the arguments that it writes to, fast_args(mutates=(...))",
    "schema": "a parameter's annotation or default has no place in an operator's schema, kernel.as_torch_op() says which",
}
"""What PyTorch says of a call that it cannot trace."""


@once
def _untraced_calls() -> dict[str, Any]:
    """By key of `UNTRACED`, the function by which Python makes such a call: it breaks Dynamo's graph."""
    import torch

    def made(why: str):
        def call_untraced(kernel, args: tuple, kwargs: dict[str, Any]):
            return kernel._call_first(*args, **kwargs)

        try:
            return torch.compiler.disable(call_untraced, reason=f"fastexchange: {why}")
        except TypeError:  # before PyTorch 2.7
            return torch.compiler.disable(call_untraced)

    return {key: made(why) for key, why in UNTRACED.items()}


def _kernel_at(address: int):
    """The kernel of this ``id``, which Dynamo keeps alive while it traces a call of it."""
    return ctypes.cast(address, ctypes.py_object).value


def _disable_tracing(owner, names: tuple[str, ...]) -> None:
    """Let Dynamo trace neither these functions of a class or module, nor what they call.

    Python makes a call that breaks a graph, while Dynamo traces every Python function that starts, also those that native code
    calls. It would compile dozens of them, and PyTorch 2.8 fails in one.
    """
    import torch

    if owner not in _untraced:
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
        _untraced.add(owner)


_breaks: dict[str, Any] = {}
"""What :func:`_untraced_calls` has made, for Dynamo, which looks it up."""
_untraced: set[Any] = set()
"""The classes and modules for which this is done."""
mark_constant(prepare_tracing)
mark_constant(traced_name)
mark_constant(why_untraced)


def call_symbolic(kernel, bound: tuple):
    """Make a call that PyTorch has to see. Returns NotImplemented if no operator makes such calls."""
    name = operator_of(kernel, bound)
    if not name:
        return NotImplemented
    if kernel.backward is not None and _has_outputs(kernel, bound) and not any(map(is_symbolic, bound)):
        return NotImplemented
    operator = _operators.get(name)
    if operator is None:
        qualified = f"{NAMESPACE}::{name}"
        registered: Any = registered_as(qualified)
        operator = _operators[name] = TorchOp(kernel, qualified, registered.schema, registered)
    if kernel.backward is not None and kernel._call_differentiated is None:
        kernel._call_differentiated = functools.partial(_call_differentiated, {})
    if kernel.backward is not None and not any(isinstance(each, (list, tuple)) for each in bound):
        given = bound[: len(bound) - len(kernel._pattern.outputs)]
        if not any(each is OMITTED for each in given):
            kernel._call_differentiated.args[0][tuple(map(type, given))] = operator
    return _call(operator, kernel, bound)


def check_recorded(kernel, bound: tuple) -> None:
    """Raise TypeError or BufferError for a call that autograd has to see, and that no operator makes."""
    import torch

    if not is_recorded(bound):
        return
    for position in range(len(bound) - len(kernel._pattern.outputs), len(bound)):
        if bound[position] is not OMITTED and bound[position] is not None:
            name = kernel._parameters.name_of(position)
            raise BufferError(
                f"{kernel.__qualname__}(): argument {name!r} (position {position}) is an output, and a tensor requires grad: "
                "leave it out"
            )
    why = UNTRACED["schema"]
    for position, value in enumerate(bound):
        if _kind(torch, value)[0] == "?":
            name, kind = kernel._parameters.name_of(position), a_type_name(type(value))
            why = f"argument {name!r} (position {position}) is {kind}; pass a PyTorch tensor, a list of such, a number or None"
    raise TypeError(f"{kernel.__qualname__}(): a tensor requires grad, and PyTorch cannot record the call: {why}")


def _has_outputs(kernel, bound: tuple) -> bool:
    """Whether a declared output is given."""
    first = len(bound) - len(kernel._pattern.outputs)
    return any(value is not OMITTED and value is not None for value in bound[first:])


def _call_differentiated(operators: dict[tuple[type, ...], Any], args: tuple):
    """Make a call that autograd has to see by the operator for arguments of these types. NotImplemented for any other call."""
    operator = operators.get(tuple(map(type, args)))
    if operator is None or not is_recorded(args):
        return NotImplemented
    return operator(*args)


_operators: dict[str, Any] = {}
"""By name, the objects that call the operators that kernels register themselves."""


def operator_of(kernel, bound: tuple) -> str:
    """Return the name of the operator that makes a call with these arguments; "" if there is none."""
    import torch

    return operator_name(kernel, tuple(_kind(torch, value) for value in bound))


def _call(operator, kernel, bound: tuple):
    """Call an operator with a kernel's arguments, as ``Parameters.bind`` returns them. Dynamo traces this function, too."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    outputs = 0 if kernel._pattern is None else len(kernel._pattern.outputs)
    first = len(bound) - outputs
    are_given = [value is not OMITTED and value is not None for value in bound[first:]]
    if any(are_given) and not all(are_given):
        bound = with_outputs(kernel, bound)
    for position, (name, value) in enumerate(zip(kernel._parameters.names, bound, strict=True)):
        if value is OMITTED or (position >= first and value is None):
            continue
        if len(positional) == position and position < kernel._parameters.positional:
            positional.append(value)
        else:
            named[name] = value
    result = operator(*positional, **named)
    if any(are_given):
        return bound[first] if outputs == 1 else tuple(bound[first:])
    return result


def _kind(torch, value) -> Any:
    """What decides by which operator a call is made: a schema's type of an argument, and what Numba's type depends on."""
    if isinstance(value, torch.Tensor):
        return "Tensor", value.dtype, value.dim(), value.is_contiguous()
    if isinstance(value, (list, tuple)):
        return ("Tensor[]",) if len(value) and all(isinstance(each, torch.Tensor) for each in value) else ("?",)
    if value is None or value is OMITTED:
        return ("None",) if value is None else ("",)
    for cls, kind in ((bool, "bool"), ((int, torch.SymInt), "SymInt"), ((float, torch.SymFloat), "float")):
        if isinstance(value, cls):
            return (kind,)
    return ("?",)


def operator_name(kernel, kinds: tuple) -> str:
    """Return the name of the operator for calls with arguments of these kinds, given by :func:`_kind`; "" if there is none."""
    import torch

    if not has_operators(torch):
        return ""
    known = kernel.__dict__.setdefault("_operators", {})
    if ("?",) in kinds:
        return ""
    if kernel._pattern is None and kernel.mutates is None and not _returns_none(kernel, kinds):
        return ""
    key = _key(kernel, kinds)
    if key not in known:
        known[key] = _implicit(torch, kernel, *key)
    return known[key]


def _key(kernel, kinds: tuple) -> tuple[str, bool]:
    """What tells a kernel's operators apart: the types of parameters that nothing else says, and whether outputs are given."""
    outputs = 0 if kernel._pattern is None else len(kernel._pattern.outputs)
    are_given = any(kind[0] not in ("", "None") for kind in kinds[len(kinds) - outputs :])
    untyped = _untyped(kernel)
    if not untyped:
        return "", are_given
    named = zip(kinds, kernel._parameters.names, strict=True)
    return "".join(_LETTERS[kind[0]] for kind, name in named if name in untyped), are_given


_LETTERS = {"Tensor": "t", "Tensor[]": "l", "float": "f", "SymInt": "i", "bool": "b", "None": "n", "": "d"}
_TYPES = {letter: "Tensor?" if kind == "None" else kind for kind, letter in _LETTERS.items() if kind}


def _untyped(kernel) -> list[str]:
    """The names of parameters whose type in a schema depends on the call: no annotation and no notation says it."""
    known = kernel.__dict__.get("_untyped")
    if known is None:
        pattern = kernel._pattern
        declared = [] if pattern is None else [*pattern.numbers, *(each.name for each in (*pattern.inputs, *pattern.outputs))]
        declared += kernel.py_func.__annotations__
        known = kernel._untyped = [name for name in kernel._parameters.names if name not in declared]
    return known


def _implicit(torch, kernel, letters: str, are_given: bool) -> str:
    """Register the operator for calls with such arguments. Returns its name; "" if no schema can have the parameters.

    The name follows from the kernel's, the arguments' types and what it declares, so that it is the same in another process.
    """
    schema = _schema(kernel, letters, are_given)
    if schema is None:
        return ""
    name = _name_with(kernel, schema, letters, are_given)
    unused = next(each for each in _numbered(name) if not is_registered(f"{NAMESPACE}::{each}"))
    backward = None if are_given else kernel.backward
    options = str(schema), backward, None, "loop"
    register(torch, kernel, f"{NAMESPACE}::{unused}", schema, options, False, kernel.__qualname__)
    return unused


def _schema(kernel, letters: str, are_given: bool) -> Schema | None:
    """The schema of the operator for calls with such arguments; None if there is none."""
    types = {name: _TYPES[letter] for name, letter in zip(_untyped(kernel), letters, strict=True) if letter in _TYPES}
    defaults = {kernel._parameters.names[position]: value for position, value in kernel._parameters.defaults.items()}
    for name in types:
        if types[name] == "SymInt" and type(defaults.get(name)) is float:
            types[name] = "float"
    make = functools.partial(schema_of, kernel.py_func, kernel._pattern, what=kernel.__qualname__, types=types)
    try:
        mutates = kernel.mutates or ()
        if kernel.mutates is None and kernel._pattern is None:
            mutates = [each.name for each in make(mutates=()).arguments if each.type.startswith("Tensor")]
        return make(mutates=mutates, are_outputs_given=are_given)
    except (TypeError, ValueError):
        return None


def _name_with(kernel, schema: Schema, letters: str, are_given: bool) -> str:
    """The name of the operator for calls with such arguments. It has a digest of what the kernel declares."""
    name = name_of(kernel) + f"__{letters}" * bool(letters) + "__out" * are_given
    return f"{name}__{declaration_of(kernel, schema, None if are_given else kernel.backward)}"


def name_of(kernel) -> str:
    """The name of a kernel's own operator, without what depends on a call.

    It does not begin with an underscore: Inductor writes it in a class, where Python changes names that begin with two.
    """
    module, name = (kernel.py_func.__module__ or "").strip("_"), kernel.py_func.__qualname__
    return re.sub(r"\W", "_", f"{module}_{name}", flags=re.ASCII).lstrip("_")


def _numbered(name: str) -> Iterator[str]:
    """Yield `name`, then ``name_2`` and so on: kernels of the same name, as those of a notebook, are different operators."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def _returns_none(kernel, kinds: tuple) -> bool:
    """Whether the kernel returns None for arguments of these kinds. Compiles it if it has to.

    Of types that are not known by their kinds (lists, elements without a Numba type), the signatures compiled so far tell.
    """
    try:
        given = tuple(_numba_type(kernel, position, kind) for position, kind in enumerate(kinds))
        if compile_result(kernel, given) is None:
            kernel.compile(given)
        known = [compile_result(kernel, given)]
    except Exception:  # the call raises it
        known = [compiled for _, compiled in overloads_of(kernel)]
    return bool(known) and all(compiled.signature.return_type == numba_types.none for compiled in known)


def _numba_type(kernel, position: int, kind: tuple):
    """The Numba type of an argument of a kind. Raises for those that are not known by it."""
    if kind[0] == "Tensor":
        import torch

        dtype = torch.empty(0, dtype=kind[1], device="cpu").numpy().dtype
        return numba_types.Array(numpy_support.from_dtype(dtype), kind[2], "C" if kind[3] else "A")
    if kind[0] == "":
        return numba_types.Omitted(kernel._parameters.defaults[position])
    return {"bool": numba_types.boolean, "SymInt": numba_types.intp, "float": numba_types.float64, "None": numba_types.none}[
        kind[0]
    ]


# ---- operators that another process has traced -----------------------------------------------------------------------


@once
def find_by_name() -> None:
    """Let ``torch.ops.fastexchange.name`` register the operator of a kernel that this process has decorated.

    Exported programs, and graphs in PyTorch's disk cache, refer to operators by their names.
    """
    import torch

    class Namespace(type(torch.ops.aten)):  # type: ignore[misc]
        """``torch.ops.fastexchange``."""

        def __getattr__(self, name: str):
            try:
                return super().__getattr__(name)
            except AttributeError:
                if not _register_named(torch, name):
                    raise
            return super().__getattr__(name)

    Namespace.__module__ = type(torch.ops.aten).__module__  # PyTorch finds operators by it
    setattr(torch.ops, NAMESPACE, Namespace(NAMESPACE))


def _register_named(torch, name: str) -> bool:
    """Register the operator of this name, if a kernel has it. Returns whether it has."""
    if is_registered(f"{NAMESPACE}::{name}"):
        return False
    base = name.rpartition("__")[0].removesuffix("__out")
    are_given = "__out__" in name[len(base) :]
    for kernel in reversed(list(declaring.values())):
        own, letters = name_of(kernel), ""
        if _untyped(kernel):
            own, _, letters = base.rpartition("__")
        is_its = own == name_of(kernel) and base in (own, f"{own}__{letters}")
        if is_its and len(letters) == len(_untyped(kernel)) and set(letters) <= set(_LETTERS.values()):
            schema = _schema(kernel, letters, are_given)
            if schema is not None and _name_with(kernel, schema, letters, are_given) == name:
                known = kernel.__dict__.setdefault("_operators", {})
                known[letters, are_given] = _implicit(torch, kernel, letters, are_given)
                return True
    return False
