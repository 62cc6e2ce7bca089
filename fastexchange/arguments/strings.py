"""Strings as arguments: the kernel sees the characters of the Python object, as under ``@njit``.

The words are Numba's struct of a string: data, length, bytes of a character, whether all are ASCII, hash (-1: not computed yet),
memory block, Python object. Numba's own C function reads the object. The object owns the characters, so its memory block is one
of the frame's, as an array's is.
"""

import ctypes
import functools

import llvmlite.binding
from numba import types

from ..dispatch import structs
from ..dispatch.reading import has_no_room, note_array
from ..ground.native import external, native, store
from ..ground.numba_internals import fields_of, has_representation, load_representations, size_of
from .kind import Discovery, Kind, reader
from .numbers import MEANING, PATH

MEMINFO = 40  # the offset of the memory block
_EXTRACT = "numba_extract_unicode"
numba_extract_unicode = external(_EXTRACT, *[types.intp] * 6)
_FIELDS = ["data", "length", "kind", "is_ascii", "hash", "meminfo", "parent"]
_TEXTS = (("", 1), ("text", 1), ("t\xe9xt", 1), ("\u20ac", 2), ("\U0001f600", 4))
"""Strings, and how many bytes their characters take."""


@native
def read_characters(ob, at):
    """Write the words of the str `ob` at the address `at`, all but that of its memory block.

    Returns: False with an exception set, if there was no memory for a legacy string's characters. GIL: held; no Python runs.
    """
    store(at + 16, 0)
    store(at + 24, 0)
    data = numba_extract_unicode(ob, at + 8, at + 16, at + 24, at + 32)
    store(at, data)
    store(at + 48, ob)
    return data != 0


@reader
def read_string(ob, entry, frame, word, array):
    """A str. Raises MemoryError."""
    if has_no_room(structs.frame_at(frame), word, structs.STRING_WORDS):
        return -structs.STATUS_GROW
    if not read_characters(ob, word):
        return -structs.STATUS_ERROR
    note_array(array, ob + structs.ORIGIN_STRING, word + MEMINFO)
    return structs.KEY_STRING


_STRING = Kind(PATH, MEANING, structs.FORM_PLAIN, read_string)


def find(cls: type, notes: list[str], instance=None) -> Discovery | None:
    """The type ``str``, but not its subclasses."""
    if cls is not str:
        return None
    if not verify():
        notes.append("the layout of str is not as expected")
        return None
    return Discovery(_STRING)


def string_type(key: int, decoding) -> types.Type:
    """The Numba type of a string."""
    return types.unicode_type


@functools.cache  # without a lock of its own, which would be held while Numba's is taken
def verify() -> bool:
    """Whether Numba's function and struct are as declared here. Asked with the first string, for which Numba loads much."""
    load_representations()
    if not has_representation(types.unicode_type):
        return False
    address = llvmlite.binding.address_of_symbol(_EXTRACT)
    names = [name for name, _ in fields_of(types.unicode_type)]
    if not address or names != _FIELDS or size_of(types.unicode_type) != 8 * (structs.STRING_WORDS - 1):
        return False
    extract = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, *[ctypes.c_void_p] * 4)(address)
    return all(_is_read(extract, *each) for each in _TEXTS)


def _is_read(extract, text: str, size: int) -> bool:
    words = (ctypes.c_int64 * 4)()
    at = ctypes.addressof(words)
    data = extract(text, at, at + 8, at + 16, at + 24)
    coding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[size]
    length, kind, is_ascii, _ = words
    return (
        bool(data) and (length, kind, is_ascii) == (len(text), size, int(text.isascii()))
        and ctypes.string_at(data, length * size) == text.encode(coding)
    )  # fmt: skip
