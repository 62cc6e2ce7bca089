"""DLPack's small structs as Python values: a device, an element type, a version.

Each is a tuple with named fields: immutable, hashable, ordered, and equal to the plain tuple of its fields. So it can be used as
the tuple of ``__dlpack_device__``, ``dl_device=`` or ``max_version=``. Values that do not fit the C struct are refused. Device
types and type codes without a name in DLPack 1.3 stay plain ints.

Source: https://dmlc.github.io/dlpack/latest/c_api.html, version 1.3, ``DLDevice``, ``DLDataType``, ``DLPackVersion``.
"""

import operator
import re
from enum import IntEnum
from typing import Any, ClassVar, SupportsIndex

import numpy as np
import numpy.typing as npt

from . import dtype_registry
from .dlpack import DLDataTypeCode, DLDeviceType

__all__ = ["DLDataType", "DLDevice", "DLPackVersion"]


class _Value(tuple[int, ...]):
    """A tuple of ints with named fields, ``__match_args__``."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __getnewargs__(self) -> tuple[Any, ...]:  # for pickle and copy: tuple's own would pass one argument
        return tuple(self)

    def __repr__(self) -> str:
        values = (f"{type(v).__name__}.{v.name}" if isinstance(v, IntEnum) else str(v) for v in self)
        fields = ", ".join(f"{name}={value}" for name, value in zip(self.__match_args__, values, strict=True))
        return f"{type(self).__name__}({fields})"


def _integer(cls: type, name: str, value: SupportsIndex, smallest: int, largest: int) -> int:
    """Return `value` as an int that fits its field of the C struct. Raises TypeError or ValueError otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{cls.__name__}: {name} must be an int, not {type(value).__name__}") from None
    if not smallest <= number <= largest:
        raise ValueError(f"{cls.__name__}: {name} must be in {smallest}..{largest}, not {number}")
    return number


class DLDevice(_Value):
    """Where a tensor's memory lives: a device type and an index (DLPack 1.3, ``DLDevice``).

    Equal to what ``__dlpack_device__`` returns:

    >>> import numpy as np
    >>> DLDevice(*np.ones(3).__dlpack_device__())
    DLDevice(device_type=DLDeviceType.kDLCPU, device_id=0)
    >>> DLDevice(DLDeviceType.kDLCUDA, 1) == (2, 1)
    True
    >>> print(DLDevice(2, 1))
    cuda:1
    """

    __slots__ = ()
    __match_args__ = ("device_type", "device_id")

    def __new__(cls, device_type: SupportsIndex, device_id: SupportsIndex = 0) -> "DLDevice":
        kind = _integer(cls, "device_type", device_type, 0, 2**31 - 1)
        index = _integer(cls, "device_id", device_id, 0, 2**31 - 1)
        return tuple.__new__(cls, (_DEVICE_TYPES.get(kind, kind), index))

    @property
    def device_type(self) -> int:
        """A ``DLDeviceType``; a plain int if DLPack 1.3 has no name for it."""
        return self[0]

    @property
    def device_id(self) -> int:
        """The device's index; 0 for memory that is not bound to a device."""
        return self[1]

    def __str__(self) -> str:
        """``cpu:0``, ``cuda_host:0``; ``device99:0`` for a type that DLPack 1.3 does not name."""
        return f"{_DEVICE_NAMES.get(self[0], f'device{self[0]}')}:{self[1]}"


class DLDataType(_Value):
    """The type of a tensor's elements: kind, width in bits, lanes (DLPack 1.3, ``DLDataType``).

    >>> DLDataType.from_dtype("float32")
    DLDataType(code=DLDataTypeCode.kDLFloat, bits=32, lanes=1)
    >>> print(DLDataType(DLDataTypeCode.kDLFloat, 32, lanes=4))
    float32x4
    >>> DLDataType.from_str("complex64").to_dtype()
    dtype('complex64')
    """

    __slots__ = ()
    __match_args__ = ("code", "bits", "lanes")

    def __new__(cls, code: SupportsIndex, bits: SupportsIndex, lanes: SupportsIndex = 1) -> "DLDataType":
        kind = _integer(cls, "code", code, 0, 255)
        width = _integer(cls, "bits", bits, 1, 255)
        return tuple.__new__(cls, (_TYPE_CODES.get(kind, kind), width, _integer(cls, "lanes", lanes, 1, 65535)))

    @property
    def code(self) -> int:
        """A ``DLDataTypeCode``; a plain int if DLPack 1.3 has no name for it."""
        return self[0]

    @property
    def bits(self) -> int:
        """The width of one lane, in bits."""
        return self[1]

    @property
    def lanes(self) -> int:
        """The number of values in one element: 1, except for vector types."""
        return self[2]

    def __str__(self) -> str:
        """``float32``, ``bool``, ``bfloat16``, ``float8_e4m3fn``, ``float32x4``; otherwise ``code100:16``.

        Each type has a different text, which :meth:`from_str` reads.
        """
        code, bits, lanes = self
        name = _NAMES.get((code, bits))
        if name is None:
            name = f"{_KINDS[code]}{bits}" if code in _KINDS else f"code{int(code)}:{bits}"
        return name if lanes == 1 else f"{name}x{lanes}"

    @classmethod
    def from_str(cls, text: str) -> "DLDataType":
        """The type whose ``str`` is `text`. Raises ValueError for any other text."""
        if not isinstance(text, str):
            raise TypeError(f"DLDataType.from_str: text must be a str, not {type(text).__name__}")
        match = re.fullmatch(_SPELLING, text)
        if match is None:
            raise ValueError(
                f"DLDataType.from_str: {text!r} names no DLPack type; write it like 'float32', 'uint8', 'bool', "
                "'bfloat16', 'float8_e4m3fn' or 'float32x4'"
            )
        name, kind, code, bits, lanes = match.group("name", "kind", "code", "bits", "lanes")
        if name is not None:
            return cls(*_KEYS[name], int(lanes or 1))
        return cls(_CODES[kind] if code is None else int(code), int(bits), int(lanes or 1))

    @classmethod
    def from_dtype(cls, dtype: npt.DTypeLike) -> "DLDataType":
        """The type by which an array of this dtype is exported. `dtype`: any argument of ``np.dtype``.

        Knows ml_dtypes' types and registered ones (:func:`~fastexchange.register_dlpack_dtype`). Raises TypeError for a dtype
        without a DLPack type.
        """
        asked = np.dtype(dtype)
        key = dtype_registry.key_of(asked)
        if key is None:
            raise TypeError(f"DLDataType.from_dtype: {asked!r} has no DLPack type: {why_not_exported(asked)}")
        return cls(*key)

    def to_dtype(self) -> np.dtype:
        """The NumPy dtype of such elements, in this machine's byte order.

        Raises ValueError if NumPy has none: vector types, packed types of less than a byte, unregistered types.
        """
        dtype = dtype_registry.dtype_of(self.code, self.bits) if self.lanes == 1 else None
        if dtype is None:
            raise ValueError(f"DLDataType.to_dtype: {self} has no NumPy dtype: {self._why_not_imported()}")
        return dtype

    def _why_not_imported(self) -> str:
        """Why there is no NumPy dtype, with advice."""
        code, bits, lanes = self
        if lanes != 1:
            one = DLDataType(code, bits)
            return f"an element has {lanes} lanes; take that of {one} and a last dimension of {lanes}"
        if bits % 8:
            return f"NumPy cannot address packed elements of {bits} bits; unpack them first"
        if (code, bits) in dtype_registry.ML_DTYPES.values():
            return "a recent ml_dtypes has one; import it"
        return f"register one with register_dlpack_dtype(({int(code)}, {bits}), dtype)"


class DLPackVersion(_Value):
    """A version of DLPack's ABI (DLPack 1.3, ``DLPackVersion``); ordered as versions are.

    >>> DLPackVersion(1, 10) > DLPackVersion(1, 3) > (1, 0)
    True
    >>> print(DLPackVersion(1, 3))
    1.3
    """

    __slots__ = ()
    __match_args__ = ("major", "minor")

    def __new__(cls, major: SupportsIndex, minor: SupportsIndex) -> "DLPackVersion":
        largest = 2**32 - 1
        return tuple.__new__(cls, (_integer(cls, "major", major, 0, largest), _integer(cls, "minor", minor, 0, largest)))

    @property
    def major(self) -> int:
        """Structs of another major version have another layout."""
        return self[0]

    @property
    def minor(self) -> int:
        """A newer minor version has more names, with the same layout."""
        return self[1]

    def __str__(self) -> str:
        return f"{self[0]}.{self[1]}"


def why_not_exported(dtype: np.dtype) -> str:
    """Why a dtype has no DLPack type, with advice."""
    if dtype.subdtype is not None:
        return f"it is a sub-array, whose dimensions belong into the tensor's shape; ask for {dtype.base!r}"
    if not dtype.isnative:
        return f"it is not in this machine's byte order; convert the array to {dtype.newbyteorder('=')!r}"
    padded = dtype_registry.padded_key_of(dtype)
    if padded is not None:
        return (
            f"it keeps one element of {padded[1]} bits in a byte, and DLPack's {DLDataType(*padded)} is packed unless the "
            "tensor is flagged as padded; convert the array to a wider type"
        )
    if dtype.hasobject or dtype.kind in "fc" or not 0 < 8 * dtype.itemsize <= dtype_registry.MAX_BITS:
        return "convert the array to another dtype"
    return f"convert the array, or register a type with register_dlpack_dtype((code, {8 * dtype.itemsize}), dtype)"


# ---- names ---------------------------------------------------------------------------------------------------------

_DEVICE_TYPES: dict[int, int] = {int(device): device for device in DLDeviceType}
_TYPE_CODES: dict[int, int] = {int(code): code for code in DLDataTypeCode}

_DEVICE_NAMES = {device: re.sub("(Host|Managed|Dev)$", r"_\1", device.name[3:]).lower() for device in DLDeviceType}

_KINDS = {
    DLDataTypeCode.kDLInt: "int",
    DLDataTypeCode.kDLUInt: "uint",
    DLDataTypeCode.kDLFloat: "float",
    DLDataTypeCode.kDLOpaqueHandle: "handle",
    DLDataTypeCode.kDLBfloat: "bfloat",
    DLDataTypeCode.kDLComplex: "complex",
    DLDataTypeCode.kDLBool: "bool",
}
_CODES = {kind: code for code, kind in _KINDS.items()}

_KEYS = {"bool": (int(DLDataTypeCode.kDLBool), 8)} | {
    name: key for name, key in (dtype_registry.ML_DTYPES | dtype_registry.ML_DTYPES_PADDED).items() if key[0] not in _KINDS
}
_NAMES = {key: name for name, key in _KEYS.items()}

_SPELLING = (  # compiled on first use
    rf"(?:(?P<name>{'|'.join(_KEYS)})|(?:(?P<kind>{'|'.join(_CODES)})|code(?P<code>0|[1-9][0-9]*):)(?P<bits>[1-9][0-9]*))"
    r"(?:x(?P<lanes>[1-9][0-9]*))?"
)
