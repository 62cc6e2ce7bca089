"""Translate the keys of a call to Numba types.

Only the keys decide, not the arguments. An argument that changes between two reads can therefore never reach machine code
for another type.
"""

from collections.abc import Callable, Iterator

from ..dispatch import structs
from ..ground.dtypes import NoNumbaType, field_to_computed
from ..ground.parameters import item_of
from . import functions, ndarrays, nothing, numbers, sequences, strings


class UnknownDtype(Exception):
    """The kernel does not take a key's dtype. `position`: of the argument or item. `field`: the dtype field."""

    def __init__(self, position: int, field: int):
        super().__init__(position, field)
        self.position, self.field = position, field


_TYPE_OF = {
    structs.KEY_ARRAY: ndarrays.array_type,
    structs.KEY_SCALAR: numbers.scalar_type,
    structs.KEY_NONE: nothing.none_type,
    structs.KEY_OMITTED: nothing.omitted_type,
    structs.KEY_TUPLE: sequences.tuple_type,
    structs.KEY_NAMED_TUPLE: sequences.tuple_type,
    structs.KEY_LIST: sequences.list_type,
    structs.KEY_CONSTANT: functions.function_type,
    structs.KEY_STRING: strings.string_type,
}


class Decoding:
    """Keys that become Numba types, one after the other."""

    def __init__(self, keys, defaults: dict[int, object], serials, element, scalar):
        self.keys: Iterator[int] = iter(keys)
        """Those that are left."""
        self.defaults = defaults
        self.serials: dict[int, Callable] = serials
        self._element, self.scalar = element, scalar
        self.position = 0
        """Of the argument or item."""

    def type_of(self, key: int, position: int):
        """The type of the value with this key."""
        self.position = position
        return _TYPE_OF[key & 0xFF](key, self)

    def items(self, count: int) -> list:
        """The types of so many items of the value that is decoded."""
        position = self.position
        return [self.type_of(next(self.keys), item_of(position, i)) for i in range(count)]

    def element_of(self, key: int):
        """The type of an array's elements. Raises: UnknownDtype."""
        try:
            return self._element(field_of(key))
        except NoNumbaType as error:
            raise UnknownDtype(self.position, error.field) from None


def field_of(key: int) -> int:
    """The dtype field in a key."""
    return key >> structs.DTYPE_SHIFT & structs.FIELD_MASK


def numba_types(keys, defaults: dict[int, object], serials, element, scalar=field_to_computed) -> tuple:
    """The Numba types of a call's arguments, with ``*args`` as one tuple type, as in Numba's dispatcher.

    `keys`: the key sequence. `defaults`: by parameter index, the defaults of omitted arguments. `serials`: from serial number to
    a function that returns the named tuple class, or the constant's Numba type. `element`: from dtype field to an array's
    element type; raises NoNumbaType. `scalar`: the same for NumPy's scalars. Raises: UnknownDtype.
    """
    decoding = Decoding(keys, defaults, serials, element, scalar)
    decoded: list[object] = []
    for key in decoding.keys:
        decoded.append(decoding.type_of(key, len(decoded)))
    return tuple(decoded)
