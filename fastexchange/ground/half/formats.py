"""The formats of 8 and 16 bits as a table, and a number's bits in them.

Sources: IEEE 754-2008 (float16); bfloat16 as in Intel's document 338302; OFP8, revision 1.0 (float8_e4m3fn, float8_e5m2);
Noune et al., 2022, https://arxiv.org/abs/2206.02915 (the fnuz formats). DLPack 1.3 has a type code for each.
"""

import math
import struct
from enum import Enum
from typing import NamedTuple

from ..dlpack import DLDataTypeCode

__all__ = ["FORMATS", "FORMAT_KEYS", "Format", "Specials"]


class Specials(Enum):
    """What the codes stand for that are no numbers."""

    INFINITY_AND_NANS = "all ones in the exponent: an infinity or, with a fraction, NaNs, as in IEEE 754"
    ONE_NAN = "all ones in exponent and fraction: NaN; there is no infinity (fn): what is too large becomes the largest number"
    NAN_FOR_MINUS_ZERO = "the code of minus zero: NaN; there is neither an infinity nor a minus zero (fnuz)"


class Format(NamedTuple):
    """A floating-point format: a sign, an exponent, a fraction without its leading one."""

    name: str
    """As ``numpy.dtype`` and PyTorch name it."""
    code: int
    """DLPack's type code."""
    bits: int
    fraction: int
    """Bits of the fraction."""
    bias: int
    """Of the exponent."""
    specials: Specials

    @property
    def sign(self) -> int:
        """The code of the sign bit alone."""
        return 1 << self.bits - 1

    @property
    def infinity(self) -> int:
        """The first code without sign that is no finite number."""
        if self.specials is Specials.INFINITY_AND_NANS:
            return self.sign - (1 << self.fraction)
        return self.sign - (self.specials is Specials.ONE_NAN)

    def encode(self, value: float) -> int:
        """The code of the number nearest to `value`, of two the even one: the rule of a store.

        `value` is first rounded to float32, as PyTorch does. What is too large becomes an infinity; where there is none, the
        largest number (``Specials.ONE_NAN``) or NaN. So it is in PyTorch 2.13; ml_dtypes makes NaN of it in both cases.
        """
        (word,) = struct.unpack("<I", struct.pack("<f", _as_float32(value)))
        sign, magnitude = word >> 31 << self.bits - 1, word & 0x7FFF_FFFF
        if magnitude > 0x7F80_0000:
            return self._nan(sign, magnitude)
        smallest_normal = 128 - self.bias << 23
        if magnitude < smallest_normal:
            code = round(struct.unpack("<f", struct.pack("<I", magnitude))[0] / self.quantum)  # ties to even
        else:
            shift = 23 - self.fraction
            code = (magnitude + (1 << shift - 1) - 1 + (magnitude >> shift & 1) >> shift) - (127 - self.bias << self.fraction)
        if code >= self.infinity:
            if self.specials is Specials.NAN_FOR_MINUS_ZERO:
                return self.sign
            return sign | self.infinity - (self.specials is Specials.ONE_NAN)
        return sign | code if code or self.specials is not Specials.NAN_FOR_MINUS_ZERO else 0

    def decode(self, code: int) -> float:
        """The number of a code."""
        magnitude = code & self.sign - 1
        if (self.specials is Specials.NAN_FOR_MINUS_ZERO and code == self.sign) or magnitude > self.infinity:
            return math.nan
        if magnitude == self.infinity:
            value = math.inf if self.specials is Specials.INFINITY_AND_NANS else math.nan
        elif magnitude >> self.fraction:
            one = 1 << self.fraction
            value = math.ldexp(magnitude % one + one, (magnitude >> self.fraction) - self.bias - self.fraction)
        else:
            value = magnitude * self.quantum
        return -value if code & self.sign else value

    @property
    def quantum(self) -> float:
        """The smallest positive number, of which the subnormal ones are multiples."""
        return math.ldexp(1.0, 1 - self.bias - self.fraction)

    def _nan(self, sign: int, magnitude: int) -> int:
        """A NaN with the sign and the first bits of the payload of one in float32, quiet; the only NaN where there is one."""
        if self.specials is Specials.INFINITY_AND_NANS:
            return sign | magnitude >> 23 - self.fraction & self.sign - 1 | 1 << self.fraction - 1
        return sign | self.infinity if self.specials is Specials.ONE_NAN else self.sign


def _as_float32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


_SPECIALS, _ONE_NAN, _UNSIGNED_ZERO = Specials
FORMATS = tuple(
    Format(name, int(code), bits, fraction, bias, specials)
    for name, code, bits, fraction, bias, specials in (
        ("bfloat16", DLDataTypeCode.kDLBfloat, 16, 7, 127, _SPECIALS),
        ("float16", DLDataTypeCode.kDLFloat, 16, 10, 15, _SPECIALS),
        ("float8_e5m2", DLDataTypeCode.kDLFloat8_e5m2, 8, 2, 15, _SPECIALS),
        ("float8_e4m3fn", DLDataTypeCode.kDLFloat8_e4m3fn, 8, 3, 7, _ONE_NAN),
        ("float8_e5m2fnuz", DLDataTypeCode.kDLFloat8_e5m2fnuz, 8, 2, 16, _UNSIGNED_ZERO),
        ("float8_e4m3fnuz", DLDataTypeCode.kDLFloat8_e4m3fnuz, 8, 3, 8, _UNSIGNED_ZERO),
    )
)
FORMAT_KEYS = frozenset((form.code, form.bits) for form in FORMATS)
"""DLPack's types that kernels compute with by this package."""
