"""Translate the keys of a call to Numba types.

Only the keys decide, not the arguments. An argument that changes between two reads can therefore never reach machine code
for another type.
"""

from typing import Any, Literal, cast

from numba.core import types

from ..ground.dtypes import NoNumbaType, field_to_computed
from ..ground.parameters import item_of
from ..producers.buffer import CLASSES
from .structs import (
    ALIGNED,
    C_ORDER,
    CLASS_SHIFT,
    DTYPE_SHIFT,
    F_ORDER,
    FIELD_MASK,
    FLAGS_SHIFT,
    KIND_ARRAY,
    KIND_CONSTANT,
    KIND_LIST,
    KIND_NAMED_TUPLE,
    KIND_NONE,
    KIND_OMITTED,
    KIND_SCALAR,
    KIND_STRING,
    KIND_TUPLE,
    NDIM_SHIFT,
    SERIAL_SHIFT,
    WRITEABLE,
)  # fmt: skip


class UnknownDtype(Exception):
    """The kernel does not take a key's dtype. `position`: of the argument or item. `field`: the dtype field."""

    def __init__(self, position: int, field: int):
        super().__init__(position, field)
        self.position, self.field = position, field


def numba_types(keys, defaults: dict[int, object], serials, element, scalar=field_to_computed) -> tuple:
    """The Numba types of a call's arguments, with ``*args`` as one tuple type, as in Numba's dispatcher.

    `keys`: the key sequence. `defaults`: by parameter index, the defaults of omitted arguments. `serials`: from serial number to
    a function that returns the named tuple class, or the constant's Numba type. `element`: from dtype field to an array's
    element type; raises NoNumbaType. `scalar`: the same for NumPy's scalars. Raises: UnknownDtype.
    """
    stream = iter(keys)
    decoded: list[object] = []
    for key in stream:
        position = len(decoded)
        decoded.append(_decode(key, stream, position, defaults, serials, element, scalar))
    return tuple(decoded)


def _decode(key: int, stream, position: int, defaults, serials, element, scalar):
    kind = key & 0xFF
    if kind == KIND_ARRAY:
        return _array_type(key, position, element)
    if kind == KIND_SCALAR:
        return scalar(_field(key))
    if kind == KIND_NONE:
        return types.none
    if kind == KIND_STRING:
        return types.unicode_type
    if kind == KIND_OMITTED:
        return types.Omitted(defaults[position])
    if kind in (KIND_TUPLE, KIND_NAMED_TUPLE):
        number = key >> SERIAL_SHIFT
        cls = serials[number]() if kind == KIND_NAMED_TUPLE else None
        length = len(cls._fields) if cls is not None else number
        places = (item_of(position, i) for i in range(length))
        items = [_decode(next(stream), stream, place, defaults, serials, element, scalar) for place in places]
        return types.BaseTuple.from_types(items, cls)
    if kind == KIND_LIST:
        return types.List(_array_type(next(stream), item_of(position, 0), element), reflected=True)
    if kind == KIND_CONSTANT:
        return serials[key >> SERIAL_SHIFT]()
    raise AssertionError(f"key {key:#x} of an unknown kind")


def lists_in(numba_types) -> tuple:
    """The list types among these, also in tuples, in the order in which they are read."""
    found: list = []
    for numba_type in numba_types:
        if isinstance(numba_type, types.List):
            found.append(numba_type)
        elif isinstance(numba_type, types.BaseTuple):
            found += lists_in(cast(Any, numba_type).types)
    return tuple(found)


def readonly_arrays(numba_types) -> int:
    """``fx_overload.readonly_arrays`` for parameters of these types. With a list among them, all bits are equal."""
    lists = lists_in(numba_types)
    with_blocks = [leaf for leaf in _leaves(numba_types) if isinstance(leaf, types.Buffer | types.UnicodeType)]
    readonly = [isinstance(leaf, types.Buffer) and not leaf.mutable for leaf in with_blocks]
    if lists:
        return -int(any(readonly) or any(not each.dtype.mutable for each in lists if isinstance(each.dtype, types.Buffer)))
    return sum(1 << index for index in {min(index, 62) for index, is_readonly in enumerate(readonly) if is_readonly})


def _leaves(numba_types):
    for numba_type in numba_types:
        if isinstance(numba_type, types.BaseTuple):
            yield from _leaves(cast(Any, numba_type).types)
        else:
            yield numba_type


def _field(key: int) -> int:
    return key >> DTYPE_SHIFT & FIELD_MASK


def _array_type(key: int, position: int, element_of):
    flags = key >> FLAGS_SHIFT
    cls = CLASSES[key >> CLASS_SHIFT]
    try:
        element, ndim = element_of(_field(key)), (key >> NDIM_SHIFT) & 0xFF
    except NoNumbaType as error:
        raise UnknownDtype(position, error.field) from None
    order: Literal["C", "F", "A"] = "C" if flags & C_ORDER else "F" if flags & F_ORDER else "A"
    readonly = not flags & WRITEABLE
    if cls is types.Array:
        return types.Array(element, ndim, order, readonly, aligned=bool(flags & ALIGNED))
    return cls(element, ndim, order, readonly)  # Numba takes these classes for aligned in any case
