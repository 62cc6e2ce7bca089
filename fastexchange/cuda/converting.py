"""From arguments' words to those of a declared signature: which conversions there are, and native code that makes them.

A signature that is declared (``cuda.jit("void(int8, ...)")``) may have other numbers than a launch gives. What a number
cannot become without being changed is refused: a float no integer, an integer none that does not hold it.
"""

from typing import Any

from numba import types

from ..dispatch.structs import ARRAY_HEAD_WORDS
from ..ground.native import bits_of, float_of, load, native, store
from . import structs

__all__ = ["Unconvertible", "conversions", "convert", "convert_words", "words_of", "words_of_all"]


class Unconvertible(Exception):
    """An argument that has no place in a declared signature. `index`: of its word; `given`, `taken`: the types."""

    def __init__(self, index: int, given, taken):
        super().__init__(index, given, taken)
        self.index, self.given, self.taken = index, given, taken


def words_of(numba_type) -> int:
    """How many words a leaf of this type has, a type of Numba's or of a package's: the CPU has no float16, say."""
    name = type(numba_type).__name__
    return ARRAY_HEAD_WORDS + 2 * numba_type.ndim if name == "Array" else 2 if name == "Complex" else 1


def conversions(given: tuple, taken: tuple) -> list[int] | None:
    """The conversions from words for arguments of the types `given` to those that a kernel compiled for `taken` has.

    None for those that native code does not make. Raises Unconvertible for those that nobody should.
    """
    codes: list[int] = []
    word = 0
    for source, target in zip(leaves(given), leaves(taken), strict=True):
        kind = type(target).__name__
        if str(source) != str(target) and kind != "Array":
            code = _conversion(word, source, target)
            if code is None:
                return None
            codes.append(code)
        word += words_of(source)
    return codes


def words_of_all(types: tuple) -> int:
    """How many words arguments of these types have."""
    return sum(map(words_of, leaves(types)))


def leaves(types: tuple) -> list[Any]:
    found: list[Any] = []
    for each in types:
        found += leaves(tuple(each)) if hasattr(each, "__len__") and hasattr(each, "types") else [each]
    return found


def _conversion(word: int, given, taken) -> int | None:
    source, target = _number(given), _number(taken)
    if type(taken).__name__ == "Complex" and type(given).__name__ in ("Float", "Integer", "Complex"):
        return None
    if source is None or target is None or type(taken).__name__ == "Boolean" or source[0] == structs.FLOAT != target[0]:
        raise Unconvertible(word, given, taken)
    return structs.conversion(word, source, target)


def _number(numba_type) -> tuple[int, int] | None:
    """(kind, bits) of a type of numbers, of whichever package; None for anything else."""
    name = type(numba_type).__name__
    if name == "Integer":
        return (structs.SIGNED if numba_type.signed else structs.UNSIGNED), numba_type.bitwidth
    if name == "Boolean":
        return structs.UNSIGNED, 8
    return (structs.FLOAT, numba_type.bitwidth) if name == "Float" else None


# ---- native code -----------------------------------------------------------------------------------------------------


@native
def is_in_range(value, is_big, kind, bits):
    """Whether an integer parameter of `kind` and so many `bits` holds a word; `is_big`: the word is a uint64."""
    if kind == structs.UNSIGNED:
        if bits == 64:
            return is_big or value >= 0
        return value >= 0 and value >> bits == 0
    if is_big and value < 0:
        return False
    return bits == 64 or (value >= -(1 << (bits - 1)) and value < 1 << (bits - 1))


@native
def double_of_half(half):
    """The float64 that the float16 with these bits is."""
    exponent, fraction = half >> 10 & 31, half & 1023
    if exponent == 0:
        bits = bits_of(types.float64(fraction) * 2.0**-24)
    elif exponent == 31:
        bits = 0x7FF << 52 | fraction << 42
    else:
        bits = (exponent + 1008) << 52 | fraction << 42
    return float_of(bits | (half >> 15 & 1) << 63, 64)


@native
def half_of_double(number):
    """The bits of the float16 that is next to a float64, that with an even last bit of two as near."""
    bits = bits_of(number)
    sign = bits >> 48 & 0x8000
    bits &= 0x7FFFFFFFFFFFFFFF
    if bits > 0x7FF << 52:  # no number
        return sign | 0x7E00 | bits >> 42 & 0x1FF
    exponent = (bits >> 52) - 1023
    if exponent > 15:
        return sign | 0x7C00
    if exponent < -25:
        return sign
    shift = 42
    if exponent < -14:  # a small one, whose leading 1 is not implied
        bits = bits & (1 << 52) - 1 | 1 << 52
        shift = 28 - exponent
    else:
        bits -= 1008 << 52
    half = bits >> shift
    rest, middle = bits & (1 << shift) - 1, 1 << (shift - 1)
    return sign | half + types.intp(rest > middle or (rest == middle and half & 1 != 0))


@native
def convert(at, code):
    """Make of the word at `at` what a conversion says. False for a number that the parameter cannot hold."""
    given, given_bits = code >> structs.FROM_KIND_SHIFT & 15, code >> structs.FROM_BITS_SHIFT & 255
    taken, taken_bits = code >> structs.TO_KIND_SHIFT & 15, code >> structs.TO_BITS_SHIFT & 255
    word = load(at)
    if given == structs.FLOAT:
        if given_bits == 16:
            number = double_of_half(word)
        else:
            number = float_of(word, 64) if given_bits == 64 else types.float64(float_of(word, 32))
    else:
        if given_bits < 64:  # the word was loaded from less memory than it has
            word <<= 64 - given_bits
            word = word >> (64 - given_bits) if given == structs.SIGNED else (word >> (64 - given_bits)) & ((1 << given_bits) - 1)
        if taken != structs.FLOAT:
            store(at, word)
            return is_in_range(word, given == structs.UNSIGNED and given_bits == 64, taken, taken_bits)
        number = types.float64(types.uint64(word)) if given == structs.UNSIGNED else types.float64(word)
    if taken_bits == 16:
        store(at, half_of_double(number))
    else:
        store(at, bits_of(number) if taken_bits == 64 else bits_of(types.float32(number)))
    return True


@native
def convert_words(frame, overload):
    """Make of the words in a frame what a declared signature has there.

    False for a number that a parameter cannot hold.
    """
    for i in range(overload.conversion_count):
        code = load(overload.conversions + 8 * i)
        if not convert(frame.words + 8 * (code & 0xFFFFFF), code):
            return False
    return True
