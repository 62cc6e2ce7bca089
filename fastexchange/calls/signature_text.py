"""Signatures as text for files, that Numba reads, too: ``(float64[:, ::1], int64)``."""

import ast
from typing import Any, cast

from numba.core import types

from ..ground.half.formats import FORMATS

__all__ = ["text_of", "types_in"]

_LAYOUTS = {
    "A": lambda ndim: [":"] * ndim,
    "C": lambda ndim: [":"] * (ndim - 1) + ["::1"],
    "F": lambda ndim: ["::1"] + [":"] * (ndim - 1),
}
_DEFAULTS = type(None), bool, int, float, complex, str


def text_of(signature: tuple) -> str | None:
    """Return the text of argument types, for ``numba.njit`` and ``precompile``. None: a type in it cannot be written so."""
    text = _listed(signature)
    try:
        return text if types_in(text) == signature else None
    except ValueError:
        return None


def types_in(text: str) -> tuple:
    """Return the argument types of a text of :func:`text_of`. Any other text is a ValueError; none is evaluated."""
    names = vars(types)
    if any(form.name in text for form in FORMATS):
        from ..ground.half.known import TYPES

        names = {**names, **TYPES}
    try:
        return _read_all(ast.parse(text, mode="eval").body, names)
    except Exception as error:  # the parser's, or that of a type, whose values are not as text_of writes them
        raise ValueError(f"{text[:100]!r} is no signature: {type(error).__name__}") from error


def _read_all(node: ast.AST, names: dict) -> tuple:
    if not isinstance(node, ast.Tuple):
        raise ValueError
    return tuple(_read(each, names) for each in node.elts)


def _read(node: ast.AST, names: dict) -> Any:
    if isinstance(node, ast.Name):
        found = names.get(node.id)
    elif isinstance(node, ast.Subscript):
        dims = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        slices = [slice(None, None, _DIMS[ast.unparse(dim)]) for dim in dims]
        found = _read(node.value, names)[slices[0] if len(slices) == 1 else tuple(slices)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first, *further = node.args
        options = {cast(str, option.arg): ast.literal_eval(option.value) for option in node.keywords}
        found = getattr(types, node.func.id)(_MADE_OF[node.func.id](first, names), *map(ast.literal_eval, further), **options)
    else:
        found = None
    if not isinstance(found, types.Type):
        raise ValueError
    return found


_DIMS = {":": None, "::1": 1}
_MADE_OF = {
    **dict.fromkeys(("Array", "List", "Optional"), _read),
    **dict.fromkeys(("NPDatetime", "NPTimedelta", "Omitted"), lambda node, names: ast.literal_eval(node)),
    "Tuple": _read_all,
}
"""The types that :func:`_text` writes as a call, and how their first argument is read."""


def _listed(numba_types) -> str:
    parts = list(map(_text, numba_types))
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _text(numba_type: Any) -> str:
    kind = type(numba_type)
    if kind is types.Array:
        element, ndim, layout = _text(numba_type.dtype), numba_type.ndim, numba_type.layout
        if ndim and numba_type.mutable and numba_type.aligned:
            return f"{element}[{', '.join(_LAYOUTS[layout](ndim))}]"
        return f"Array({element}, {ndim}, {layout!r}, readonly={not numba_type.mutable}, aligned={numba_type.aligned})"
    if kind in (types.UniTuple, types.Tuple):
        return f"Tuple({_listed(cast(Any, numba_type).types)})"
    if kind is types.Omitted and type(numba_type.value) in _DEFAULTS:
        return f"Omitted({numba_type.value!r})"
    if kind is types.Optional:
        return f"Optional({_text(numba_type.type)})"
    if kind is types.List:
        return f"List({_text(numba_type.dtype)}, reflected={numba_type.reflected})"
    if kind in (types.NPDatetime, types.NPTimedelta):
        return f"{kind.__name__}({numba_type.unit!r})"
    return "boolean" if kind is types.Boolean else str(numba_type)
