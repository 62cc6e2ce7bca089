"""Declared signatures: Numba's, in which the numbers of ``half`` may stand."""

from typing import Any, cast

from numba.core import sigutils, types

from ..ground.half.formats import FORMATS

__all__ = ["as_computed"]


def as_computed(signature):
    """A signature with the types of ``half``: for their names in a text, and for Numba's float16, with which it cannot compute.

    `signature`: what ``numba.njit`` takes, a text, a tuple of types or a type with arguments.
    """
    if not any(form.name in str(signature) for form in FORMATS):
        return signature
    from ..ground.half.known import TYPES

    if isinstance(signature, str):
        signature = eval(signature, {}, {**vars(types), **TYPES})  # as Numba does
    arguments, result = sigutils.normalize_signature(signature)
    taken = tuple(_as_computed(each, TYPES["float16"]) for each in arguments)
    return taken if result is None else _as_computed(result, TYPES["float16"])(*taken)


def _as_computed(numba_type: Any, float16) -> Any:
    if isinstance(numba_type, (types.Array, types.List)):
        return numba_type.copy(dtype=_as_computed(numba_type.dtype, float16))
    if isinstance(numba_type, types.Optional):
        return types.Optional(_as_computed(numba_type.type, float16))
    if isinstance(numba_type, types.BaseTuple):
        cls = cast(Any, numba_type).instance_class if isinstance(numba_type, types.BaseNamedTuple) else None
        return types.BaseTuple.from_types([_as_computed(each, float16) for each in cast(Any, numba_type)], cls)
    return float16 if numba_type == types.float16 else numba_type
