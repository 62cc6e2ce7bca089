"""Jitted functions: each has a Numba type of its own, so each has a key of its own, by the serial number in it."""

import itertools

from numba import typeof
from numba.core.dispatcher import Dispatcher

from ..dispatch import structs
from ..dispatch.reading import runtime_of
from ..dispatch.runtime import runtime
from ..dispatch.type_table import find as find_entry
from ..ground.native import store
from .kind import Discovery, Kind, reader
from .numbers import MEANING, PATH

serial_numbers = itertools.count(1)
"""Numbers in keys of what has a Numba type of its own: ``Runtime.serials`` maps them to it."""


@reader
def read_function(ob, entry, frame, word, array):
    """A jitted function. The object, not only its type, has an ``fx_entry``."""
    known = find_entry(runtime_of(frame), ob)
    if known == 0:
        return -structs.STATUS_UNKNOWN_TYPE
    store(word, ob)
    return structs.entry_at(known).key


def learn(value) -> bool:
    """File a jitted function under its address."""
    entries = runtime().entries
    if value in entries:
        entries.find_again(value)
        return False
    serial = next(serial_numbers)
    runtime().name(serial, value, typeof(value))
    entries.add(value, kind=_FUNCTION, key=structs.KEY_CONSTANT | serial << structs.SERIAL_SHIFT)
    return True


_FUNCTION = Kind(PATH, MEANING, structs.FORM_PLAIN, read_function, learn=learn)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """Numba's dispatchers."""
    return Discovery(_FUNCTION) if any(base is Dispatcher for base in cls.__mro__) else None


def function_type(key: int, decoding) -> object:
    """The Numba type of a jitted function."""
    return decoding.serials[key >> structs.SERIAL_SHIFT]()
