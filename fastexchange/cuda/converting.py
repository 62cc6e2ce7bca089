"""Conversions of arguments' words to the types of a declared signature, and the native code for them.

A declared signature (``cuda.jit("void(int8, ...)")``) may have other number types than the arguments of a launch. Only
conversions that keep the value are made: a float never becomes an integer, and an integer must fit.
"""

from typing import Any

from numba import types

from ..dispatch.structs import ARRAY_HEAD_WORDS
from ..ground.native import bits_of, float_of, load, native, store
from . import launch_structs

__all__ = ["Unconvertible", "conversions", "convert", "convert_words", "words_of", "words_of_all"]


class Unconvertible(Exception):
    """An argument does not fit a declared signature. `index`: of its word; `given`, `taken`: the types."""

    def __init__(self, index: int, given, taken):
        super().__init__(index, given, taken)
        self.index, self.given, self.taken = index, given, taken


def words_of(numba_type) -> int:
    """The number of words of a leaf. The type may be a package's that Numba has not for the CPU, such as float16."""
    name = type(numba_type).__name__
    return ARRAY_HEAD_WORDS + 2 * numba_type.ndim if name == "Array" else 2 if name == "Complex" else 1


def conversions(given: tuple, taken: tuple) -> list[int] | None:
    """Return the conversions of words from the types `given` to the types `taken` of a compiled kernel.

    Returns None if native code has no such conversion. Raises Unconvertible if the value could change.
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
    """The number of words of arguments of these types."""
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
    if source is None or target is None or type(taken).__name__ == "Boolean" or source[0] == launch_structs.FLOAT != target[0]:
        raise Unconvertible(word, given, taken)
    return launch_structs.conversion(word, source, target)


def _number(numba_type) -> tuple[int, int] | None:
    """(kind, bits) of any package's number type; None for any other type."""
    name = type(numba_type).__name__
    if name == "Integer":
        return (launch_structs.SIGNED if numba_type.signed else launch_structs.UNSIGNED), numba_type.bitwidth
    if name == "Boolean":
        return launch_structs.UNSIGNED, 8
    return (launch_structs.FLOAT, numba_type.bitwidth) if name == "Float" else None


# ---- native code -----------------------------------------------------------------------------------------------------


@native
def is_in_range(value, is_big, kind, bits):
    """Whether a word fits an integer parameter of `kind` and `bits`. `is_big`: the word is a uint64."""
    if kind == launch_structs.UNSIGNED:
        if bits == 64:
            return is_big or value >= 0
        return value >= 0 and value >> bits == 0
    if is_big and value < 0:
        return False
    return bits == 64 or (value >= -(1 << (bits - 1)) and value < 1 << (bits - 1))


@native
def double_of_half(half):
    """The float64 with the value of a float16, given by its bits."""
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
    """The bits of a float64 rounded to float16, to nearest, ties to even."""
    bits = bits_of(number)
    sign = bits >> 48 & 0x8000
    bits &= 0x7FFFFFFFFFFFFFFF
    if bits > 0x7FF << 52:  # NaN
        return sign | 0x7E00 | bits >> 42 & 0x1FF
    exponent = (bits >> 52) - 1023
    if exponent > 15:
        return sign | 0x7C00
    if exponent < -25:
        return sign
    shift = 42
    if exponent < -14:  # subnormal: without the implied leading 1
        bits = bits & (1 << 52) - 1 | 1 << 52
        shift = 28 - exponent
    else:
        bits -= 1008 << 52
    half = bits >> shift
    rest, middle = bits & (1 << shift) - 1, 1 << (shift - 1)
    return sign | half + types.intp(rest > middle or (rest == middle and half & 1 != 0))


@native
def convert(at, code):
    """Convert the word at `at`. Returns False if the number does not fit the parameter."""
    given, given_bits = code >> launch_structs.FROM_KIND_SHIFT & 15, code >> launch_structs.FROM_BITS_SHIFT & 255
    taken, taken_bits = code >> launch_structs.TO_KIND_SHIFT & 15, code >> launch_structs.TO_BITS_SHIFT & 255
    word = load(at)
    if given == launch_structs.FLOAT:
        if given_bits == 16:
            number = double_of_half(word)
        else:
            number = float_of(word, 64) if given_bits == 64 else types.float64(float_of(word, 32))
    else:
        if given_bits < 64:  # extend the word: only its low bits have been loaded
            word <<= 64 - given_bits
            mask = -1 if given == launch_structs.SIGNED else (1 << given_bits) - 1
            word = word >> (64 - given_bits) & mask
        if taken != launch_structs.FLOAT:
            store(at, word)
            return is_in_range(word, given == launch_structs.UNSIGNED and given_bits == 64, taken, taken_bits)
        number = types.float64(types.uint64(word)) if given == launch_structs.UNSIGNED else types.float64(word)
    if taken_bits == 16:
        store(at, half_of_double(number))
    else:
        store(at, bits_of(number) if taken_bits == 64 else bits_of(types.float32(number)))
    return True


@native
def convert_words(words, launchable):
    """Convert the words of a call to the types of a declared signature. Returns False if a number does not fit."""
    for i in range(launchable.conversion_count):
        code = load(launchable.conversions + 8 * i)
        if not convert(words + 8 * (code & 0xFFFFFF), code):
            return False
    return True
