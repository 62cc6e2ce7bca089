"""``None``, and omitted arguments."""

from numba import types

from ..dispatch import structs
from ..dispatch.rows import frequent, go_on, is_of_type, leave
from ..ground.native import load, store
from ..ground.omitted import Omitted
from .kind import Discovery, Kind, reader
from .numbers import MEANING, PATH


@reader
def read_none(ob, entry, frame, word, array):
    """``None``, for which Numba passes its address."""
    store(word, ob)
    return structs.KEY_NONE


@frequent
def none_row(items, row, word, array, frame):
    """``None``."""
    ob = load(items)
    if not is_of_type(ob, row):
        return leave(row, frame, 0)
    store(word, ob)
    return go_on(items + 8, row, word + 8, array, frame)


@reader
def read_omitted(ob, entry, frame, word, array):
    """An omitted argument, whose default is compiled into the kernel."""
    return structs.KEY_OMITTED


_NONE = Kind(PATH, MEANING, structs.FORM_PLAIN, read_none, lambda fields: (none_row,), schema_type="None")
_OMITTED = Kind(PATH, MEANING, structs.FORM_OMITTED, read_omitted)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """The types of ``None`` and of what stands for an omitted argument."""
    if cls is Omitted:
        return Discovery(_OMITTED)
    return Discovery(_NONE) if cls is type(None) else None


def none_type(key: int, decoding) -> types.Type:
    """The Numba type of ``None``."""
    return types.none


def omitted_type(key: int, decoding) -> types.Type:
    """The Numba type of an omitted argument."""
    return types.Omitted(decoding.defaults[decoding.position])
