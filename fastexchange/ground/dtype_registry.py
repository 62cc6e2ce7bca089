"""The map between DLPack's ``(code, bits)`` and NumPy's dtypes: NumPy's own types, and registered ones.

Export looks dtypes up by equality (:func:`key_of`). Import returns the registered object itself (:func:`dtype_of`). The two
directions are registered separately, by the rules of NumPy 2.5, with any NumPy. NumPy's own types come first in both directions.

Three sources fill the tables, the last two when a lookup fails: :func:`register_dlpack_dtype`; ml_dtypes, once it has been
imported; and NumPy's own registry (2.5), which cannot be read but by exporting and importing empty arrays.

ml_dtypes keeps its types of less than a byte (int4, float6_e2m3fn, float4_e2m1fn and their like) one in a byte. They are not
in these tables: ``(code, 8)`` would be another type, and ``(code, 4)`` says *packed* unless the tensor carries
``DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED`` (DLPack 1.3), which a borrowed view cannot carry and consumers overlook. So they
are neither exported nor imported; a kernel that asks for bits gets those bytes (``ground.dtypes.storage_of``).
"""

import operator
import re
import sys

import numpy as np

from .._abi import ffi
from .dlpack import VERSION, DLDataTypeCode, DLDeviceType
from .once import forkable_lock
from .pythonapi import PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from .safe_repr import shown

__all__ = [
    "dtype_in",
    "dtype_of",
    "key_of",
    "padded_key_of",
    "register_dlpack_dtype",
]

Key = tuple[int, int]

MAX_BITS = 255  # ``DLDataType.bits`` is a uint8_t

_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"
_CODES = {
    "i": DLDataTypeCode.kDLInt,
    "u": DLDataTypeCode.kDLUInt,
    "f": DLDataTypeCode.kDLFloat,
    "c": DLDataTypeCode.kDLComplex,
    "b": DLDataTypeCode.kDLBool,
}


def _key(dtype: np.dtype) -> Key:
    return int(_CODES[dtype.kind]), 8 * dtype.itemsize


BUILT_IN_DTYPES: dict[Key, np.dtype] = {
    _key(np.dtype(name)): np.dtype(name)
    for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
# By type number (``dtype.num``), as NumPy itself decides. None for a long double wider than a double, which NumPy never exports.
_BUILT_IN_KEYS: dict[int, Key | None] = {
    dtype.num: _key(dtype) if _key(dtype) in BUILT_IN_DTYPES else None for dtype in map(np.dtype, "?bBhHiIlLqQefdgFDG")
}

_lock = forkable_lock()  # held to change the tables below; a successful lookup needs no lock
_exports: dict[np.dtype, Key] = {}
_imports: dict[Key, np.dtype] = {}


def register_dlpack_dtype(key: tuple[int, int], dtype: np.dtype, /) -> None:
    """Register `dtype` for export as the type `key`, and for import of tensors of that type.

    `key` is DLPack's ``(code, bits)`` of one lane. The rules are those of ``numpy.dtypes.register_dlpack_dtype`` (NumPy 2.5),
    which is called if it exists, so that ``np.from_dlpack`` knows the type, too:

    - the code is in 0..255 and the bits are 8 times the item size, at most 255;
    - NumPy's own types keep their meaning in both directions, whatever is registered for them;
    - an export is found by equality and stays: another key for an equal dtype raises ValueError, and changes nothing;
    - an import returns that very object and stays: another dtype for the same key, even an equal one, raises ValueError. The
      *export* of the new dtype is registered all the same, so a package may ignore that error if the two mean the same;
    - the same registration may be repeated. Any thread may register.

    The caller is responsible for the meaning of the bits. A dtype without size, which NumPy accepts (and then crashes on export),
    is refused here. ml_dtypes' types need no registration.

    >>> import numpy as np
    >>> register_dlpack_dtype((200, 24), np.dtype("V3"))
    """
    checked = _checked(key, dtype)
    with _lock:
        _learn_ml_dtypes()
        refusal = _register(checked, dtype)
    if refusal is not None:
        raise ValueError(f"register_dlpack_dtype: {refusal}")


def key_of(dtype: np.dtype) -> Key | None:
    """The ``(code, bits)`` for the export of `dtype`, or None: not registered, or in foreign byte order.

    The bits are always 8 times the item size.
    """
    if dtype.byteorder == _FOREIGN_ORDER:
        return None
    number = dtype.num
    if number in _BUILT_IN_KEYS:
        return _BUILT_IN_KEYS[number]
    key = _exports.get(dtype)
    if key is None:
        with _lock:
            _learn_ml_dtypes()
            key = _known_key(dtype)
    return key


def dtype_of(code: int, bits: int) -> np.dtype | None:
    """The dtype for the import of this type with one lane, or None if none is registered.

    Its item size is always ``bits / 8``. A type of less than a byte has none: its elements are packed.
    """
    key = (code, bits)
    dtype = BUILT_IN_DTYPES.get(key)
    if dtype is None:
        dtype = _imports.get(key)
    if dtype is None:
        with _lock:
            _learn_ml_dtypes()
            dtype = _known_dtype(key)
    return dtype


# ---- the tables; the lock is held ----------------------------------------------------------------------------------


def _checked(key: tuple[int, int], dtype: np.dtype) -> Key:
    if not isinstance(key, tuple | list) or len(key) != 2:
        raise TypeError(f"register_dlpack_dtype: argument 1, key, must be a tuple (code, bits), not {shown(key)}")
    try:
        code, bits = operator.index(key[0]), operator.index(key[1])
    except TypeError:
        raise TypeError(f"register_dlpack_dtype: argument 1, key, must hold two ints, not {shown(key)}") from None
    if not isinstance(dtype, np.dtype):
        what = shown(dtype)
        raise TypeError(f"register_dlpack_dtype: argument 2, dtype, must be a numpy.dtype, not {what}; call np.dtype on it")
    if not 0 <= code <= 255:
        raise ValueError(f"register_dlpack_dtype: argument 1, key: a DLPack type code is in 0..255, not {code}")
    width = 8 * dtype.itemsize
    if not 0 < width <= MAX_BITS:
        raise ValueError(f"register_dlpack_dtype: argument 2, dtype: {dtype!r} has {width} bits; DLPack has room for 1..255")
    if bits != width:
        raise ValueError(f"register_dlpack_dtype: argument 1, key: its bits must be the {width} of {dtype!r}, not {bits}")
    return code, bits


def _register(key: Key, dtype: np.dtype) -> str | None:
    """Register both directions, here and in NumPy, as far as possible. Returns why not all of it was possible, or None."""
    exported = _known_key(dtype)
    if exported is not None and exported != key:
        return f"{dtype!r} is exported as {exported} already, so not as {key}; an export cannot be changed"
    imported = _known_dtype(key)
    accepted = _register_with_numpy(key, dtype)
    if not accepted and (imported is None or imported is dtype):
        # Only where one of NumPy's own types hides its registry's content, so that a lookup could not show it.
        return f"NumPy's own registry holds something else for {key} or for {dtype!r}"
    _exports.setdefault(dtype, key)
    _imports.setdefault(key, dtype)
    if imported is None or imported is dtype:
        return None
    which = "an equal dtype, but another object" if imported == dtype else repr(imported)
    return f"{key} is imported as {which} already, so not as {dtype!r}; that is exported as {key} nevertheless"


def _known_key(dtype: np.dtype) -> Key | None:
    """The registered key of a dtype, here or in NumPy."""
    key = _exports.get(dtype)
    if key is None and (key := _ask_numpy_for_key(dtype)) is not None:
        _exports[dtype] = key
    return key


def _known_dtype(key: Key) -> np.dtype | None:
    """The registered dtype of a key, here or in NumPy."""
    dtype = _imports.get(key)
    if dtype is None and (dtype := _ask_numpy_for_dtype(key)) is not None:
        _imports[key] = dtype
    return dtype


# ---- ml_dtypes -----------------------------------------------------------------------------------------------------

_NARROW_FLOATS = {
    code.name[3:].lower(): (int(code), int(match[1]))
    for code in DLDataTypeCode
    if (match := re.match("kDLFloat([0-9]+)_", code.name))
}

ML_DTYPES: dict[str, Key] = {
    "bfloat16": (int(DLDataTypeCode.kDLBfloat), 16),
    "complex32": (int(DLDataTypeCode.kDLComplex), 32),  # two float16, as DLPack lays out complex numbers
    **{name: key for name, key in _NARROW_FLOATS.items() if key[1] == 8},
}
"""ml_dtypes' types of whole bytes, by name. (Its bcomplex32 has no code in DLPack 1.3.)"""

ML_DTYPES_PADDED: dict[str, Key] = {
    **{f"int{bits}": (int(DLDataTypeCode.kDLInt), bits) for bits in (1, 2, 4)},
    **{f"uint{bits}": (int(DLDataTypeCode.kDLUInt), bits) for bits in (1, 2, 4)},
    **{name: key for name, key in _NARROW_FLOATS.items() if key[1] < 8},
}
"""ml_dtypes' types of less than a byte, which it keeps one in a byte, in the low bits."""

_to_learn = dict(ML_DTYPES)


def _ml_dtype(name: str) -> np.dtype | None:
    """ml_dtypes' dtype of that name; None if ml_dtypes has not been imported, not completely, or is too old."""
    scalar = getattr(sys.modules.get("ml_dtypes"), name, None)
    if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
        return None
    dtype = np.dtype(scalar)
    return dtype if dtype.type is scalar else None


def _learn_ml_dtypes() -> None:
    """Register the dtypes of ml_dtypes. Earlier registrations of a key or a dtype take precedence."""
    if _to_learn and "ml_dtypes" in sys.modules:
        for name, key in list(_to_learn.items()):
            dtype = _ml_dtype(name)
            if dtype is not None and 8 * dtype.itemsize == key[1]:
                _register(key, dtype)
                _to_learn.pop(name, None)


def padded_key_of(dtype: np.dtype) -> Key | None:
    """The ``(code, bits)`` of ml_dtypes' types of less than a byte, kept one in a byte; None for any other dtype."""
    name = dtype.type.__name__
    key = ML_DTYPES_PADDED.get(name)
    return key if key is not None and _ml_dtype(name) == dtype else None


# ---- NumPy's own registry (2.5) ------------------------------------------------------------------------------------

_numpy_register = getattr(np.dtypes, "register_dlpack_dtype", None)

_VERSIONED = b"dltensor_versioned"


def _register_with_numpy(key: Key, dtype: np.dtype) -> bool:
    """Whether NumPy has both directions after this, or has no registry."""
    if _numpy_register is not None:
        try:
            _numpy_register(key, dtype)
        except ValueError:
            return False
    return True


def _ask_numpy_for_key(dtype: np.dtype) -> Key | None:
    """The key by which NumPy exports a registered dtype, or None."""
    # NumPy would divide by an item size of 0.
    if _numpy_register is None or dtype.num in _BUILT_IN_KEYS or not 0 < 8 * dtype.itemsize <= MAX_BITS:
        return None
    array = np.empty(0, dtype)
    if array.dtype != dtype:  # NumPy turns a sub-array dtype into dimensions
        return None
    try:
        capsule = array.__dlpack__(max_version=VERSION)
    except BufferError:
        return None
    told = dtype_in(capsule)
    return told.code, told.bits


def dtype_in(capsule):
    """The ``DLDataType`` in an unconsumed capsule, valid while that lives; None for any other object."""
    for name, struct in ((_VERSIONED, "DLManagedTensorVersioned *"), (b"dltensor", "DLManagedTensor *")):
        if type(capsule).__name__ == "PyCapsule" and PyCapsule_IsValid(capsule, name):
            return ffi.cast(struct, PyCapsule_GetPointer(capsule, name)).dl_tensor.dtype
    return None


def _ask_numpy_for_dtype(key: Key) -> np.dtype | None:
    """The dtype as which NumPy imports a registered type, or None."""
    code, bits = key
    if _numpy_register is None or key in BUILT_IN_DTYPES or not (0 <= code <= 255 and 0 < bits <= MAX_BITS and bits % 8 == 0):
        return None
    try:
        return np.from_dlpack(_Empty(code, bits)).dtype
    except BufferError:
        return None


class _Empty:
    """A producer of an empty tensor. It has to outlive the array that NumPy makes of it."""

    def __init__(self, code: int, bits: int):
        self._extents = extents = ffi.new("int64_t[2]", [0, 1])  # shape and strides
        self._managed = managed = ffi.new("DLManagedTensorVersioned *")
        managed.version.major, managed.version.minor = VERSION
        tensor = managed.dl_tensor
        tensor.data, tensor.ndim, tensor.shape, tensor.strides = extents, 1, extents, extents + 1
        tensor.device.device_type = DLDeviceType.kDLCPU
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1

    def __dlpack__(self, **options):
        return PyCapsule_New(int(ffi.cast("uintptr_t", self._managed)), _VERSIONED, None)

    def __dlpack_device__(self):
        return int(DLDeviceType.kDLCPU), 0
