"""``explain``: the path that an object takes into a kernel, and why no faster path."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numba

from ..arguments.buffer import is_numba_only
from ..arguments.decoding import UnknownDtype, field_of, numba_types
from ..arguments.discovery import discover, fields_of
from ..arguments.dunder import DUNDER
from ..arguments.kind import MEANINGS, OTHER
from ..arguments.others import advice_for
from ..dispatch import structs
from ..dispatch.boxing import BOXES_ARRAYS
from ..dispatch.reading import DRY_RUN
from ..dispatch.runtime import runtime
from ..exchange.errors import elements_named, refuse_elements, why_not_computed
from ..ground.dlpack import field_of_type
from ..ground.dtypes import bits_of, dtype_field, element_of, is_computed
from ..ground.numba_internals import CPUDispatcher, can_compile, declared_signature
from ..ground.omitted import OMITTED
from ..ground.parameters import flatten
from ..ground.passing import reraise_passing
from ..ground.safe_repr import a_type_name, type_name
from ..producers.framework import Framework, framework_of
from ..producers.ndarray import dtype_of
from .carried_code import Content
from .compile_errors import raise_named, why_none_takes
from .fallback import as_numba_takes_it, check_arguments
from .numba_type import UnknownType, has_numba_type, is_tensor_by_itself
from .outputs import shape_and_dtype
from .resolve import Resolver
from .shipped_kernels import shipped_with

__all__ = ["CallExplanation", "Explanation", "explain", "explain_type"]

_MOST_ITEMS = 9  # items of a tuple or list that are explained


@dataclass(frozen=True)
class Explanation:
    """How an object becomes a kernel argument. ``str()`` gives it as text."""

    type: str
    path: str
    """``c-exchange``, ``ndarray``, ``buffer``, ``dunder``, ``scalar``, ``tuple``, ``list`` or ``numba``.

    For CUDA kernels also ``cupy``, ``device-array``, ``cuda-interface`` and ``package``.
    """
    reasons: tuple[str, ...] = ()
    """Why it takes no faster path, and why kernels refuse its elements, if they do."""
    source: str = ""
    """What gives a PyTorch tensor's view: ``memory`` or ``table``."""

    def __str__(self):
        meaning = MEANINGS.get(self.source) or MEANINGS[self.path]
        lines = [f"{self.type}: path {self.path} ({meaning})"]
        return "\n".join(lines + [f"  - {reason}" for reason in self.reasons])


Kind: TypeAlias = Literal["native", "new", "numba", "numba-signature", "operator", "package", "refused"]
"""Who makes a call.

``native``: native code. ``new``: native code, after the next such call has compiled or loaded it. ``numba``: Numba's own
dispatcher, because of an argument. ``numba-signature``: Numba's own dispatcher, because native code cannot call the code for
these types. ``operator``: PyTorch, which traces the call, by an operator. ``package``: the CUDA kernel's own package.
``refused``: nobody, the call raises.
"""


class Outcome(NamedTuple):
    """Who makes a call: a kind, a text for users, and the names of the arguments' Numba types as far as they are known."""

    kind: Kind
    text: str
    numba_types: Sequence[str] = ()


@dataclass(frozen=True)
class CallExplanation:
    """What a call would do: an :class:`Explanation` of each argument, its Numba type, and who makes the call."""

    kernel: str
    arguments: tuple[tuple[str, Explanation | None, str], ...]
    """(parameter, explanation of its argument or None if omitted, Numba type or what is wrong with it)"""
    outcome: str
    notes: tuple[str, ...] = field(default=())
    kind: Kind = "native"
    """The outcome as data: see :data:`Kind`."""

    def __str__(self):
        lines = [f"{self.kernel}: {self.outcome}"]
        for name, explanation, numba_type in self.arguments:
            how = str(explanation).replace("\n", "\n    ") if explanation else "omitted: the default"
            lines.append(f"  {name}: {how}\n      as {numba_type}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def explain(obj, /) -> Explanation:
    """Return the path that `obj` takes into a kernel, and why it takes no faster one. Of a type: the path of its instances.

    >>> import numpy as np, torch
    >>> explain(torch.ones(3)).path, explain(np.ones(3)).path, explain(np.ndarray).path
    ('c-exchange', 'ndarray', 'ndarray')
    """
    if issubclass(type(obj), type):
        found = explain_type(obj)
        return replace(found, reasons=(*found.reasons, "it is a type: this is what its instances take"))
    return _explained(obj, structs.MAX_TUPLE_DEPTH)


def _explained(obj, depth: int) -> Explanation:
    """:func:`explain`, with items of tuples and lists down to `depth`."""
    explanation = _path_of(obj, "obj")
    why = framework_of(obj).why_narrow(obj)
    field = _field_of(obj) if why is None else None
    if field is not None and not is_computed(field):
        why = why_not_computed(field, obj)
    if why is not None:
        return replace(explanation, reasons=(*explanation.reasons, why))
    if explanation.path not in ("tuple", "list"):
        return explanation
    items = enumerate(obj[:_MOST_ITEMS] if depth else ())
    inner = [f"item [{index}]: {reason}" for index, item in items for reason in _explained(item, depth - 1).reasons]
    return replace(explanation, reasons=(*explanation.reasons, *inner))


def _path_of(obj, name: str) -> Explanation:
    """:func:`explain` without the elements, which some kernels take and others do not. `name`: of `obj`, for advice."""
    found = discover(type(obj), obj)
    if found.kind.form == structs.FORM_BUFFER and is_numba_only(obj):
        notes = (*found.notes, "its strides are no multiple of its item size, which DLPack cannot describe")
        return Explanation(type_name(type(obj)), OTHER.path, notes)
    if is_tensor_by_itself(obj, found.kind):
        return Explanation(type_name(type(obj)), DUNDER.path, ("its class has no __dlpack__: Python asks each object of it",))
    notes = tuple(found.notes)
    if found.kind is OTHER and (advice := advice_for(obj, name)):
        notes = (*notes[:-1], f"it is no tensor, and Numba refuses it; {advice}")
    elif found.kind is OTHER and not has_numba_type(obj):
        notes = (*notes[:-1], "it is no tensor, and Numba has no type for it: the call raises TypeError")
    return Explanation(type_name(type(obj)), found.path, notes, found.source)


def _field_of(obj) -> int | None:
    """The dtype field of a tensor's elements; None if `obj` is no tensor, or its field cannot be read."""
    kind = discover(type(obj), obj).kind
    if kind.form == structs.FORM_ARRAY:
        return dtype_field(dtype_of(obj))
    if kind.form != structs.FORM_TENSOR and not is_tensor_by_itself(obj, kind):
        return None
    try:
        dtype = shape_and_dtype(obj, "explain()")[1]
    except Exception:  # a tensor that is refused for another reason, or no tensor
        return None
    return field_of_type(dtype.code, dtype.bits) if dtype is not None and dtype.lanes == 1 else None


def explain_type(cls: type, /) -> Explanation:
    """Return the path that instances of `cls` take. A single instance may still need Numba's dispatcher.

    >>> explain_type(float).path
    'scalar'
    """
    found = discover(cls)
    return Explanation(type_name(cls), found.path, tuple(found.notes), found.source)


def is_launched(kernel, bound: tuple) -> bool:
    """Whether the kernel for CUDA beside one for the CPU makes a call with these arguments."""
    is_on_device = runtime().is_native and Resolver(kernel, bound).run(DRY_RUN).status == structs.STATUS_DEVICE
    return kernel._is_for_device_kernel(bound, is_on_device)


def explain_call(kernel, bound: tuple) -> CallExplanation:
    """See :meth:`FastKernel.explain`. Reads the tensors; neither compiles nor runs the kernel. Outputs may be omitted."""
    try:
        bound = kernel._complete(bound)
    except Exception as error:  # inputs that do not fit the notation
        reraise_passing(error)
        return explained(kernel, bound, refusal(error))
    if not runtime().is_native:
        return explained(kernel, bound, Outcome("numba", f"Numba's own dispatcher makes all calls: {runtime().why_not_native}"))
    try:
        report = Resolver(kernel, bound).run(DRY_RUN)
        if kernel._is_for_device_kernel(bound, report.status == structs.STATUS_DEVICE):
            return kernel._device_kernel.explain(bound)
        if report.status == structs.STATUS_UNKNOWN_SHAPE:
            outcome = describe_outcome(kernel, report.keys, bound)
            if kernel._native.find(report.keys) is None:
                raise_named(kernel, bound, as_numba_takes_it)
        else:
            check_arguments(kernel, bound)
            outcome = Outcome("numba", "Numba's own dispatcher makes this call, tensors as NumPy views")
    except Exception as error:
        outcome = refusal(error)
    found = explained(kernel, bound, outcome)
    slow = {_why_slow(value) for value in bound if kernel.out is not None} - {""}
    notes = [f"Python makes each call, because {'; '.join(sorted(slow))}"] if slow else []
    if outcome.kind == "native" and _makes_tensors_by_python(kernel, report.keys, bound):
        notes.append("Python code makes tensors of the arrays in its result; with returns=numpy.ndarray native code makes arrays")
    return replace(found, notes=(*found.notes, *notes))


def _why_slow(value) -> str:
    """Why Python makes each call of a kernel that declares outputs if `value` is an argument; "" if native code does."""
    kind = fields_of(type(value))["kind"]
    if kind.form == structs.FORM_TENSOR and kind.read_shape is None:
        return f"native code cannot read the shape of {a_type_name(type(value))}, from which those of outputs follow"
    return framework_of(value).why_calls_are_slow()


def _makes_tensors_by_python(kernel, keys: tuple[int, ...], bound: tuple) -> bool:
    """Whether Python code makes what the arrays in a call's result become, which native code makes otherwise."""
    overload = kernel._native.find(keys)
    if overload is None or overload.code.boxes != BOXES_ARRAYS:
        return False
    if isinstance(kernel.returns, type):
        target: type | None = kernel.returns
    elif kernel.returns is not None:
        target = type(bound[kernel._parameters.names.index(kernel.returns)])
    else:
        types = (type(value) for position, argument in enumerate(bound) for _, value in flatten(position, argument))
        target = next((cls for cls in types if structs.is_tensor.py_func(fields_of(cls)["kind"])), None)
    kind = fields_of(target)["kind"] if target is not None else None
    return kind is not None and kind.form == structs.FORM_TENSOR and not kind.makes_tensors


def explained(kernel, bound: tuple, outcome: Outcome, paths: dict[int, str] | None = None) -> CallExplanation:
    """Return the explanation of a call with this outcome.

    `paths`: by position, the paths of arguments that differ from those into a kernel for the CPU.
    """

    name_of = kernel._parameters.name_of

    def how(position: int, value) -> Explanation:
        if paths and position in paths:
            return Explanation(type_name(type(value)), paths[position])
        return _path_of(value, name_of(position))

    arguments = tuple(
        (
            name_of(position),
            None if value is OMITTED else how(position, value),
            _numba_name(outcome.numba_types, position, value),
        )
        for position, value in enumerate(bound)
    )
    odd = runtime().unverified
    notes = tuple(f"the layout {what!r} is not as expected: it is left to Numba or to __dlpack__" for what in odd)
    if isinstance(kernel, CPUDispatcher) and (shipped := shipped_with(kernel)) is not None:
        notes += (f"machine code that comes with {shipped.package}: {shipped.note}",)
    if (content := pickled(kernel)) is not None:
        notes += (f"a pickle of the kernel carries {content}",)
    return CallExplanation(kernel.__qualname__, arguments, outcome.text, notes, outcome.kind)


def explain_seen(kernel, bound: tuple, framework: Framework) -> CallExplanation | None:
    """Return the explanation of a call that a framework makes; None if it does not."""
    paths = {position: path for position, value in enumerate(bound) if (path := framework.path_of(value))}
    try:
        text, types = framework.called(kernel, bound)
    except Exception as error:  # what the call raises
        reraise_passing(error)
        text, types = "", [_UNKNOWN_YET if i in paths else _numba_name((), i, value) for i, value in enumerate(bound)]
        return explained(kernel, bound, refusal(error)._replace(numba_types=types), paths)
    return explained(kernel, bound, Outcome("operator", text, types), paths) if text else None


def pickled(kernel) -> Content | None:
    """What a pickle of a kernel carries; None for a kernel without compiled code, and for one of another class."""
    return kernel._pickled() if isinstance(kernel, CPUDispatcher) and kernel.overloads else None


def describe_outcome(kernel, keys: tuple[int, ...], bound: tuple) -> Outcome:
    """Return the outcome of a call with these keys. Raises BufferError for elements that the kernel does not take."""
    given: tuple = ()
    unknown = None
    try:
        given = numba_types(keys, kernel._parameters.defaults, kernel._native.runtime.serials, kernel._element_of)
    except UnknownDtype as error:
        unknown = error.position, error.field
    if unknown is not None:
        refuse_elements(kernel, bound, *unknown)
    names = [str(numba_type) for numba_type in given]
    shown = names
    if len(keys) == len(given):  # no tuples
        shown = [name + _stored_as(kernel, key) for name, key in zip(names, keys, strict=True)]
    overload = kernel._native.find(keys)
    if overload is not None:
        if overload.is_native:
            return Outcome("native", "known: native from the first argument to the result", shown)
        return Outcome("numba-signature", "known: Numba's own dispatcher makes this call", shown)
    if why := kernel._native.retries.why(keys):
        text = f"Numba's own dispatcher makes such calls until a later one tries again to compile them: {why}"
        return Outcome("numba", text, shown)
    is_compiled_for_all = not isinstance(kernel, CPUDispatcher) or can_compile(kernel)
    if not is_compiled_for_all and declared_signature(kernel, given) is None:
        return Outcome("refused", f"refused with TypeError: {why_none_takes(kernel, tuple(names))}", shown)
    text = f"the next such call {_how_made(kernel, given)} it" if is_compiled_for_all else "a declared signature takes such calls"
    return Outcome("new", f"new: {text}", shown)


def _how_made(kernel, given: tuple) -> str:
    """What the next call with these argument types does to get its code. Neither compiles nor loads it."""
    if not isinstance(kernel, CPUDispatcher):
        is_kept = getattr(getattr(kernel.dispatcher, "stats", None), "cache_path", None) is not None
        return "compiles, or loads from the cache of the kernel's own package," if is_kept else "compiles"
    if given in kernel.overloads:
        return "finds compiled code, and takes"
    has_code = getattr(kernel._cache, "has_code", None)  # Numba's cache, of a kernel without cache=True, has none
    return "loads" if has_code is not None and has_code(given, kernel.targetctx.codegen()) else "compiles"


def refusal(error: BaseException) -> Outcome:
    """Return the outcome of a call that raises `error`, with the exception type that Python's users expect."""
    kind: type = TypeError if isinstance(error, UnknownType) else type(error)
    return Outcome("refused", f"refused with {kind.__name__}: {error}")


def _stored_as(kernel, key: int) -> str:
    """Describe the elements of an array that the kernel gets as integers; "" for any other."""
    field = field_of(key)
    if not structs.is_array.py_func(key) or kernel._element_of(field) != element_of(field, storage=True):
        return ""
    if bits_of(field, storage=True) is None:
        return ""
    return f", the bits of its elements, which are {elements_named(field)}"


_UNKNOWN_YET = "what is known when the call is made"
_UNSEEN = {structs.FORM_TENSOR: "an array", structs.FORM_TUPLE: "a tuple", structs.FORM_LIST: "a list"}


def _numba_name(names: Sequence[str], position: int, value) -> str:
    if position < len(names):
        return names[position]
    if value is OMITTED:
        return "its default, of a type that is not looked at here"
    kind = discover(type(value), value).kind
    try:
        return str(numba.typeof(value if kind.for_numba is None else kind.for_numba(value)))
    except Exception as error:
        if kind.form in _UNSEEN:
            return f"{_UNSEEN[kind.form]}, of a type that is not looked at here"
        return f"(no Numba type: {error})".splitlines()[0]
