"""Signatures as text that Numba reads again, for files: ``(float64[:, ::1], int64)``."""

from typing import Any, cast

from numba.core import sigutils, types

from .declared import as_computed

__all__ = ["text_of"]

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
        is_right = sigutils.normalize_signature(as_computed(text))[0] == signature
    except Exception:  # it is evaluated: a name that Numba does not have, a default that Python does not read
        return None
    return text if is_right else None


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
