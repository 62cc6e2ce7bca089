"""Tuples and named tuples, whose items are arguments, and lists of tensors, which ``dispatch.lists`` makes Numba's lists of."""

from numba import types

from ..dispatch import structs
from ..dispatch.lists import release_items
from ..dispatch.rows import enter_tuple
from ..dispatch.runtime import runtime
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.native import load
from .functions import serial_numbers
from .kind import Discovery, Kind


@cfunction(types.intp, types.intp, types.intp, types.intp)
def fill_tuple_row(context, row_address, ob):
    """A cached call compares the length."""
    row = structs.row_at(row_address)
    row.expected[0] = row.expected[1]
    return types.intp(load(ob + c.OB_SIZE) == row.expected[0])


_TUPLE = Kind(
    "tuple", "its items are read one by one", structs.FORM_TUPLE, row_readers=lambda fields: (enter_tuple,),
    fill_row=fill_tuple_row, is_read_on_device=True, items=lambda value: value,
)  # fmt: skip
_LIST = Kind(
    "list", "its tensors are read one by one; a list of anything else goes through Numba's own dispatcher", structs.FORM_LIST,
    schema_type="Tensor[]", items=lambda value: value[:1],  # further ones when native code meets them
)  # fmt: skip


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Tuples, named tuples, and lists, but no subclasses of those."""
    if cls is list:
        if "list" in runtime().unverified:
            notes.append("the layout of Numba's lists is not as expected")
            return None
        if runtime().is_native:
            runtime().add(release_items)
        return Discovery(_LIST)
    if not issubclass(cls, tuple) or (cls is not tuple and not hasattr(cls, "_asdict")):
        return None
    if cls is tuple:
        return Discovery(_TUPLE)
    serial = next(serial_numbers)
    runtime().name(serial, cls)
    return Discovery(_TUPLE, {"key": structs.KEY_NAMED_TUPLE | serial << structs.SERIAL_SHIFT})


def tuple_type(key: int, decoding) -> types.Type:
    """The Numba type of a tuple, of which the items' keys follow."""
    number = key >> structs.SERIAL_SHIFT
    cls = decoding.serials[number]() if key & 0xFF == structs.KEY_NAMED_TUPLE else None
    length = len(cls._fields) if cls is not None else number
    return types.BaseTuple.from_types(decoding.items(length), cls)


def list_type(key: int, decoding) -> types.Type:
    """The Numba type of a list of arrays, of which the key follows."""
    return types.List(decoding.items(1)[0], reflected=True)
