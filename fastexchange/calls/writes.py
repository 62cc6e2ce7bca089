"""What a kernel's code writes to, as Numba's typed intermediate representation shows it when the kernel is compiled.

1. Writes to readonly memory that Numba's own types do not show: through ``x.flat`` and ``np.nditer``, through records of a
   readonly array (numba#5950), and by jitclasses that get a readonly array (numba#5726). They are a TypingError, as other such
   writes are.
2. Array parameters that the code provably never writes to. For a declared output that is a ValueError.
3. Stores of floats into declared outputs of integers or bools. They are a warning.

What the called functions do is not read: an argument that is passed to one may be written to there.
"""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba.core import types
from numba.core.errors import NumbaWarning, TypingError

from ..ground.numba_internals import AnalysisPass, NopythonTypeInference, leaves_of, register_pass, run_frontend
from ..ground.numba_internals import numba_ir as ir
from ..ground.passing import reraise_passing

__all__ = ["NEVER_WRITTEN", "add_pass", "check_outputs", "parameters_assigned_to", "warn_of_lost_fractions"]

NEVER_WRITTEN = "fastexchange_never_written"
"""The attribute of a code library with the names of the parameters that its kernel never writes to."""
_FRACTIONS_LOST = "fastexchange_fractions_lost"
"""The attribute with a source location for each parameter of integers or bools that floats are stored into, by name.

It is not kept on disk.
"""

_READS = frozenset({
    "shape", "size", "ndim", "dtype", "itemsize", "strides", "nbytes",
    "all", "any", "astype", "copy", "max", "mean", "min", "prod", "std", "sum", "var",
})  # fmt: skip
"""Attributes of an array that give nothing by which it can be written to."""
_READERS = frozenset({len, np.copy, np.empty_like, np.full_like, np.ones_like, np.shape, np.size, np.zeros_like})
_VALUES = types.Number, types.Boolean, types.NPDatetime, types.NPTimedelta, types.CharSeq, types.UnicodeCharSeq
"""Types of elements that are copied when they are read."""

_WAYS = types.Record, types.NumpyFlatType, types.IteratorType, types.Pair
"""Types by whose values memory can be written to, besides arrays and tuples."""
_NUMBERING = frozenset({enumerate, np.ndenumerate})
_SHOW = frozenset({iter, next, np.nditer, *_NUMBERING})
"""Functions whose results show the memory of their first argument."""
_SHOW_IF_CONTIGUOUS = frozenset({np.ascontiguousarray, np.asfortranarray, np.ravel})
_VIEWS = frozenset({
    np.asarray, np.atleast_1d, np.atleast_2d, np.atleast_3d, np.expand_dims, np.flip, np.fliplr, np.flipud, np.reshape,
    np.transpose,
})  # fmt: skip
"""Functions that return a view of their first argument, an array."""
_SHOWING_METHODS = frozenset({"reshape", "transpose", "view"})
_WRITERS = {np.fill_diagonal: 0, np.dot: 2}
"""Functions with the position of the argument that they write to; also ufuncs do, to what follows their inputs."""
_WRITING_METHODS = frozenset({"fill", "itemset", "sort"})


@register_pass(mutates_CFG=False, analysis_only=True)
class FindWrites(AnalysisPass):
    """The pass behind type inference."""

    _name = "fastexchange_find_writes"

    def __init__(self):
        AnalysisPass.__init__(self)

    def run_pass(self, state) -> bool:
        """Raise TypingError for a write to readonly memory, and note the parameters on the code library."""
        code = _Code(state.func_ir, state.typemap)
        code.refuse_writes_to_readonly()
        parameters = {name: code.also_named(name) for name in code.array_parameters()}
        unwritten = [name for name, variables in parameters.items() if code.is_never_written(variables)]
        lost = ((name, code.losing_store(variables)) for name, variables in parameters.items())
        setattr(state.library, NEVER_WRITTEN, tuple(unwritten) if code.can_return() else ())
        setattr(state.library, _FRACTIONS_LOST, {name: place for name, place in lost if place is not None})
        return False


def add_pass(manager) -> None:
    """Add :class:`FindWrites` to a ``PassManager`` that infers types."""
    if any(each is NopythonTypeInference for each, _ in manager.passes):
        manager.add_pass_after(FindWrites, NopythonTypeInference)
        manager.finalize()


def check_outputs(kernel, compiled) -> None:
    """Raise ValueError if the compiled code of a kernel never writes to an output that the kernel declares.

    A kernel that returns something is left to the TypeError of its call.
    """
    unwritten = getattr(compiled.library, NEVER_WRITTEN, ()) if compiled.signature.return_type == types.none else ()
    for output in kernel._pattern.outputs:
        if output.name in unwritten and not output.is_always_empty:
            name = output.name
            raise ValueError(
                f"{kernel.__qualname__}(): the kernel never writes to its output {name!r}, out={kernel.out!r}: an assignment "
                f"{name} = ... makes a new array; write {name}[:] = ... or {name}[i] = ..."
            )


def warn_of_lost_fractions(kernel, compiled) -> None:
    """Warn, at the store's place in the source, if compiled code stores floats into an output of integers or bools."""
    places = getattr(compiled.library, _FRACTIONS_LOST, {})
    for output in kernel._pattern.outputs:
        if output.name in places:
            place, name = places[output.name], output.name
            dtype = compiled.signature.args[output.position].dtype
            lost = "lose their fractions; store int(...)"
            if dtype == types.boolean:
                lost = "all but 0 become True; store a comparison"
            message = (
                f"{kernel.__qualname__}(): floats are stored into its output {name!r}, whose elements are {dtype}, and "
                f"{lost}, or declare another type in out=, {output}: float64"
            )
            warnings.warn_explicit(message, NumbaWarning, place.filename, place.line or 0)


def parameters_assigned_to(function) -> list[str]:
    """The parameters of a function whose items it assigns to, as far as that is plain before types are inferred."""
    try:
        blocks = run_frontend(function).blocks.values()
    except Exception as error:  # Numba does not read it
        reraise_passing(error)
        return []
    statements = [statement for block in blocks for statement in block.body]
    names: dict[str, str] = {}  # of variables that are a parameter
    for each in statements:
        if isinstance(each, ir.Assign) and isinstance(each.value, ir.Arg):
            names[each.target.name] = each.value.name
        elif isinstance(each, ir.Assign) and isinstance(each.value, ir.Var) and each.value.name in names:
            names[each.target.name] = names[each.value.name]
    written = [each.target.name for each in statements if isinstance(each, (ir.SetItem, ir.StaticSetItem))]
    return list(dict.fromkeys(names[name] for name in written if name in names))


class _Code:
    """A function's typed intermediate representation."""

    def __init__(self, func_ir, typemap):
        self._typemap = typemap
        self._statements = [statement for block in func_ir.blocks.values() for statement in block.body]
        self._assigned: list[tuple[str, Any]] = []
        """The names of variables with the values that are assigned to them."""
        for each in self._statements:
            if isinstance(each, ir.Assign):
                self._assigned.append((each.target.name, each.value))

    def _type(self, variable) -> Any:
        return self._typemap[variable.name]

    def can_return(self) -> bool:
        """Whether the function may return, not only raise."""
        return any(isinstance(each, ir.Return) for each in self._statements)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def array_parameters(self) -> list[str]:
        return [
            value.name
            for target, value in self._assigned
            if isinstance(value, ir.Arg) and isinstance(self._typemap[target], types.Array)
        ]

    def also_named(self, parameter: str) -> set[str]:
        """The variables that may be the parameter's array itself."""
        found = {target for target, value in self._assigned if isinstance(value, ir.Arg) and value.name == parameter}
        size = 0
        while size != len(found):
            size = len(found)
            found |= {target for target, value in self._assigned if any(each.name in found for each in _copied(value))}
        return found

    def is_never_written(self, names: set[str]) -> bool:
        """Whether no use of these variables can write to their array."""
        return all(self._only_reads(each, names) for each in self._statements)

    def _only_reads(self, statement, names: set[str]) -> bool:
        if isinstance(statement, ir.Del):
            return True
        if isinstance(statement, ir.Assign):
            value = statement.value
            if isinstance(value, (ir.Var, ir.Arg, ir.Const, ir.Global, ir.FreeVar)):
                return True
            return not _names_of(value) & names or self._only_gives_values(value, statement.target, names)
        if isinstance(statement, (ir.SetItem, ir.StaticSetItem)) and statement.target.name not in names:
            return isinstance(self._type(statement.target), types.Array)  # a copy of its elements; a list would get the array
        return not _names_of(statement) & names

    def _only_gives_values(self, value, target, names: set[str]) -> bool:
        """Whether an expression with the array gives no other way to it."""
        if not isinstance(value, ir.Expr):
            return False
        if value.op in ("binop", "unary") or _copied(value):
            return True
        if value.op == "inplace_binop":
            return value.lhs.name not in names
        if value.op == "getattr":
            return value.attr in _READS
        if value.op in ("getitem", "static_getitem"):
            return isinstance(self._type(target), _VALUES) or value.value.name not in names
        if value.op == "call":
            return _key_of(self._type(value.func)) in _READERS
        return False

    def losing_store(self, names: set[str]) -> Any:
        """The place of a store of floats into these variables' array of integers or bools, or None."""
        for each in self._statements:
            if isinstance(each, (ir.SetItem, ir.StaticSetItem)) and each.target.name in names:
                array, stored = self._type(each.target), self._type(each.value)
                stored = stored.dtype if isinstance(stored, types.Array) else stored
                array = array.type if isinstance(array, types.Optional) else array
                if isinstance(array.dtype, (types.Integer, types.Boolean)) and isinstance(stored, types.Float):
                    return each.loc
        return None

    # ---- readonly memory ---------------------------------------------------------------------------------------------

    def refuse_writes_to_readonly(self) -> None:
        """Raise TypingError for a write to memory of a readonly array that Numba lets pass."""
        shown = self._shown_memory()
        for each in self._statements:
            for variable in self._written_by(each, shown):
                origin = self._origin(variable, shown)
                of = "" if origin.startswith("$") else f" {origin!r}"
                raise TypingError(
                    f"Cannot modify readonly array{of} of type: {self._typemap[origin]}, here through a {self._type(variable)}",
                    loc=each.loc,
                )
            self._refuse_readonly_field(each)

    def _shown_memory(self) -> dict[str, Any]:
        """By its name, each variable through which a readonly array could be written to, with the array's name.

        For tuples, and what yields tuples, it is a tuple: of names, or None, for each item.
        """
        shown: dict[str, Any] = {}
        size = -1
        while size != len(shown):
            size = len(shown)
            for target, value in self._assigned:
                if target not in shown and _is_way(self._typemap[target]):
                    found = self._shown_by(value, target, shown)
                    if found is not None:
                        shown[target] = found
        return shown

    def _origin(self, variable, shown: dict[str, Any]) -> Any:
        return shown.get(variable.name) or _readonly_in(self._typemap.get(variable.name), variable.name)

    def _shown_by(self, value, target: str, shown: dict[str, Any]) -> Any:
        """The readonly array that a value shows, as in :meth:`_shown_memory`."""
        if copied := _copied(value):
            return next((found for each in copied if (found := self._origin(each, shown)) is not None), None)
        if not isinstance(value, ir.Expr):
            return None
        if value.op in ("getattr", "getiter", "iternext", "pair_first", "exhaust_iter"):
            found = self._origin(value.value, shown)
            if value.op == "getattr" and isinstance(found, tuple):  # of a named tuple
                return dict(zip(self._type(value.value).fields, found, strict=True)).get(value.attr)
            if value.op == "getiter" and isinstance(self._type(value.value), types.BaseTuple):
                return found[0] if found is not None and None not in found else None
            return found
        if value.op in ("getitem", "static_getitem"):
            found = self._origin(value.value, shown)
            if not isinstance(found, tuple):
                return found
            index = getattr(value, "index", None)
            return found[index] if value.op == "static_getitem" and isinstance(index, (int, slice)) else None
        if value.op == "build_tuple":
            return _unless_none(self._origin(each, shown) for each in value.items)
        return self._shown_by_call(value, target, shown) if value.op == "call" else None

    def _shown_by_call(self, value, target: str, shown: dict[str, Any]) -> Any:
        function = self._type(value.func)
        key = _key_of(function)
        if isinstance(function, types.BoundFunction):
            return shown.get(value.func.name) if key in _SHOWING_METHODS else None
        if key is zip or (isinstance(function, types.NamedTupleClass) and not value.kws and value.vararg is None):
            return _unless_none(self._origin(each, shown) for each in value.args)
        is_view = key in _VIEWS and isinstance(self._typemap[target], types.Array)
        is_view = is_view and not value.kws and (len(value.args) == 1 or key is not np.asarray)  # with a dtype it may be a copy
        if key in _SHOW or is_view or (key in _SHOW_IF_CONTIGUOUS and self._is_same_layout(value, target)):
            found = self._origin(value.args[0], shown) if value.args else None
            return _unless_none((None, found)) if key in _NUMBERING else found
        return None

    def _is_same_layout(self, value, target: str) -> bool:
        given, made = self._type(value.args[0]), self._typemap[target]
        return isinstance(given, types.Array) and (given.layout == made.layout or (given.ndim <= 1 and given.layout in "CF"))

    def _written_by(self, statement, shown: dict[str, Any]) -> Iterator:
        """The variables through which a statement writes to readonly memory."""
        if isinstance(statement, (ir.SetItem, ir.StaticSetItem, ir.SetAttr)):
            if isinstance(shown.get(statement.target.name), str):
                yield statement.target
        elif isinstance(statement, ir.Assign) and isinstance(value := statement.value, ir.Expr):
            if value.op == "inplace_binop" and value.lhs.name in shown and isinstance(self._type(value.lhs), types.Array):
                yield value.lhs
            elif value.op == "call" and (key := _key_of(self._type(value.func))) is not None:
                if key in _WRITING_METHODS and value.func.name in shown:
                    yield value.func
                else:
                    first = key.nin if isinstance(key, np.ufunc) else _WRITERS.get(key, len(value.args))
                    last = len(value.args) if isinstance(key, np.ufunc) else first + 1
                    yield from (each for each in value.args[first:last] if isinstance(self._origin(each, shown), str))

    def _refuse_readonly_field(self, statement) -> None:
        """Raise TypingError for a readonly array that becomes a field, of a jitclass or a structref, typed as a writable one."""
        if isinstance(statement, ir.SetAttr):
            self._refuse_field(self._type(statement.target), statement.attr, statement.value, statement.loc)
        elif isinstance(statement, ir.Assign) and isinstance(value := statement.value, ir.Expr) and value.op == "call":
            made = self._type(value.func)
            if isinstance(made, types.ClassType) and value.vararg is None:
                for field, given in _fields_set(made, value):
                    self._refuse_field(made.instance_type, field, given, statement.loc)

    def _refuse_field(self, instance, field: str, given, loc) -> None:
        fields = getattr(instance, "struct", None) or getattr(instance, "field_dict", {})
        declared = fields.get(field) if isinstance(instance, (types.ClassInstanceType, types.StructRef)) else None
        if isinstance(declared, types.Array) and declared.mutable and _readonly_in(self._type(given), "it"):
            raise TypingError(
                f"Cannot give the field {field!r} of {instance} a readonly array of type: {self._type(given)}; pass a copy, or "
                "declare the field as readonly",
                loc=loc,
            )


def _copied(value) -> list:
    """The variables whose value an assignment takes over as it is."""
    if isinstance(value, ir.Var):
        return [value]
    if isinstance(value, ir.Expr) and value.op == "cast":
        return [value.value]
    if isinstance(value, ir.Expr) and value.op == "phi":
        return [each for each in value.incoming_values if isinstance(each, ir.Var)]
    return []


def _unless_none(items) -> tuple | None:
    found = tuple(items)
    return None if all(each is None for each in found) else found


def _names_of(of) -> set[str]:
    return {each.name for each in of.list_vars()}


def _key_of(function) -> Any:
    """What identifies a function that is called: the Python function, or a method's name; None if unknown."""
    key = getattr(function, "typing_key", None)
    if isinstance(function, types.BoundFunction):
        return key[-1] if isinstance(key, tuple) else str(key).rpartition(".")[2]
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_way(numba_type: Any) -> bool:
    """Whether memory can be written to through values of a type, or is shown by them."""
    parts = (each.this if isinstance(each, types.BoundFunction) else each for each in leaves_of(numba_type))
    return any(isinstance(each, (types.Array, *_WAYS)) for each in parts)


def _readonly_in(numba_type: Any, name: str) -> Any:
    """`name` for a readonly array, or for each one in a tuple."""
    if isinstance(numba_type, types.BaseTuple):
        return _unless_none(_readonly_in(each, name) for each in numba_type)  # type: ignore[attr-defined]
    return name if isinstance(numba_type, types.Array) and not numba_type.mutable else None


def _fields_set(made, call) -> Iterator[tuple[str, Any]]:
    """The fields that a jitclass's ``__init__`` sets to its arguments as they are, with the variables of a call."""
    init = made.instance_type.jit_methods["__init__"].py_func
    code = run_frontend(init)
    bound = inspect.signature(init).bind_partial(None, *call.args).arguments  # it takes no keywords
    statements = [each for block in code.blocks.values() for each in block.body]
    assigned = [each.target.name for each in statements if isinstance(each, ir.Assign)]
    names: dict[str, str] = {}
    for statement in statements:
        if isinstance(statement, ir.Assign) and assigned.count(statement.target.name) == 1:  # it is never another value
            if isinstance(statement.value, ir.Arg):
                names[statement.target.name] = statement.value.name
            elif isinstance(statement.value, ir.Var) and statement.value.name in names:
                names[statement.target.name] = names[statement.value.name]
        elif isinstance(statement, ir.SetAttr) and names.get(statement.target.name) == code.arg_names[0]:
            given = bound.get(names.get(statement.value.name, ""))
            if isinstance(given, ir.Var):
                yield statement.attr, given
