"""Things that an exchange refuses and that take some lines to build; where one cannot be built, the reason in its place."""

import ctypes
import functools
import mmap
import sys

import numpy as np
from exchanges import ATTRIBUTE, OLDER, SWAPPED, BySlot, Given, to_versioned
from hostile_producers import raising
from interoperability import Wrapper, ml_dtypes, optional
from made_producers import Legacy, Tabled, address_of, capsule, exchange_table, tabled_type

from fastexchange import from_dlpack

NAMELESS = [
    np.array([None, 1]), np.empty(0, object), np.array(["a"]), np.array([b"abc"]), np.zeros(2, "M8[s]"), np.zeros(2, "m8[s]"),
    np.zeros(2, "V5"), np.zeros(2, [("a", "i4"), ("b", "f4")]), np.zeros(2, [("a", "i4")]).view(np.recarray),
    np.zeros(2, np.longdouble), np.zeros(2, np.clongdouble), np.zeros(2, "(2,)i4, i4"), np.array(["a"], np.dtypes.StringDType()),
]  # fmt: skip
"""Their dtypes have no name in DLPack."""
OFF_GRID = np.zeros(4, np.dtype([("a", "u1"), ("b", "f8")]))["b"]
"""Its strides are no multiple of its item size."""
ARRAYS = [*NAMELESS, *[np.zeros(3, SWAPPED + name) for name in ("i2", "u8", "f4", "c16", "f2")],
          OFF_GRID, OFF_GRID[::-1], np.ndarray((2,), "f4", bytearray(20), strides=(5,))]  # fmt: skip
if ml_dtypes is not None and (swapped := np.dtype(ml_dtypes.bfloat16).newbyteorder(SWAPPED)).byteorder == SWAPPED:
    ARRAYS.append(np.zeros(3, swapped))
readonly = np.arange(3.0)
readonly.flags.writeable = False
READONLY = [readonly, b"abc", memoryview(b"abc"), memoryview(bytearray(9)).toreadonly(), Legacy(np.ones(3))]
_testbuffer = optional("_testbuffer")  # CPython's own tests come with it: buffers of any format and layout
FORMATS, POINTERS = ["this Python comes without _testbuffer"] * 2
if _testbuffer is not None:
    FORMATS = {text: memoryview(_testbuffer.ndarray([value] * 3, shape=[3], format=text)) for text, value in [
        (">i", 1), ("!h", 1), (">q", 1), (">d", 1), ("c", b"a"), ("2i", (1, 2)), ("ii", (1, 2)), ("ib", (1, 2)), ("3s", b"abc"),
        ("3p", b"ab"), ("x", ()), ("i3x", 1), ("P", 1), ("BB", (1, 2)), ("4B", (1, 2, 3, 4)), ("<ih", (1, 2)),
    ]}  # fmt: skip
    POINTERS = [memoryview(_testbuffer.ndarray([1] * 6, shape=[2, 3], format="i", flags=_testbuffer.ND_PIL))]
CLOSED = mmap.mmap(-1, 16)
CLOSED.close()


def buffer(give):
    """A buffer made in Python, of what `give` gives."""
    return [type("Buffer", (), {"__buffer__": give})()] if sys.version_info >= (3, 12) else "Python 3.12 has the first __buffer__"


def released(reader):
    """A memoryview that `reader` has read before it was released."""
    with memoryview(bytearray(b"abc")) as thing:
        reader(thing)
    return thing


def consumed():
    capsule = to_versioned(np.arange(4.0))
    from_dlpack(Given(capsule))
    return capsule


_FIELDS = {"_fields_": [("a", ctypes.c_int), ("b", ctypes.c_double)]}
_SWAPPED_INT, _SWAPPED = ((ctypes.c_int.__ctype_be__, ctypes.BigEndianStructure) if sys.byteorder == "little" else
                          (ctypes.c_int.__ctype_le__, ctypes.LittleEndianStructure))  # fmt: skip
STRUCTURES = [type("Pair", (ctypes.Structure,), {**_FIELDS}), type("Either", (ctypes.Union,), {**_FIELDS}),
              type("Packed", (ctypes.Structure,), {"_pack_": 1, "_layout_": "ms", **_FIELDS})]  # fmt: skip
ELEMENTS = [
    *STRUCTURES, _SWAPPED_INT, type("Swapped", (_SWAPPED,), {"_fields_": [("a", ctypes.c_int)]}), ctypes.c_char,
    ctypes.c_wchar, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.c_void_p, ctypes.py_object, ctypes.c_longdouble,
    ctypes.POINTER(ctypes.c_int), ctypes.CFUNCTYPE(None),
]  # fmt: skip
"""Types of ctypes whose arrays are not of native numbers."""


def ring(length: int):
    wrappers = [Wrapper(None) for _ in range(length)]
    for i in range(length):
        wrappers[i - 1].inner = wrappers[i]
    return wrappers[0]


def nested(wrapper):
    """So many that there is perhaps no end."""
    return functools.reduce(lambda inner, _: wrapper(inner), range(100), Tabled(np.arange(4.0)))


WRAPS = (Wrapper, BySlot, lambda x: Wrapper(BySlot(x)))


def raising_wrappers(error) -> list:
    raises = type("Raises", (), {ATTRIBUTE: property(raising(error))})()
    return [raises, *[wrap(raises) for wrap in WRAPS]]


EMPTY = BySlot(None)
delattr(EMPTY, ATTRIBUTE)
_OTHER, _Bare = capsule(exchange_table(), b"other"), type("Bare", (), {})
NO_INNER = (None, 3, 2.5, "text", [1.0], _Bare(), np.float64(1.0), Tabled, vars(Tabled)[ATTRIBUTE], _OTHER)
WITHOUT_TABLE = (
    _Bare, list, np.float64, bytearray, tabled_type("Lacking", managed_tensor_to_py_object_no_sync=None),
    tabled_type("Future", version=(2, 0)), type("Other", (), {ATTRIBUTE: _OTHER}),
    type("Integer", (), {ATTRIBUTE: address_of(exchange_table())}), type("NoMethod", (), {"__dlpack__": None}),
)
"""Types without an exchange table, or with one that cannot be used."""


def older_type(value, bases=Tabled.__bases__) -> type:
    """A type of tensors whose attribute of the older name is `value`."""
    return type("Older", bases, {OLDER: value})
