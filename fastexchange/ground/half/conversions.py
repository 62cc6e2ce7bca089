"""Machine code that converts a code of a format to float32 and back.

All of it is integer arithmetic and selections, of which LLVM makes vectors on any processor. LLVM's own conversion to bfloat
calls a function for each element, except where the processor has AVX512_BF16, whose instruction takes subnormal numbers for zero.
float16 has instructions on most processors (F16C, ARM); elsewhere it is converted as the formats of 8 bits are.

A NaN keeps its sign and the first bits of its payload. It becomes quiet, unless it is read as bfloat16, whose bits float32 has.
Where the format has one NaN, it becomes that one.
"""

from llvmlite import ir

from ..numba_internals import converts_float16
from .formats import Format, Specials

__all__ = ["narrow", "widen"]

_FLOAT, _HALF, _WORD = ir.FloatType(), ir.HalfType(), ir.IntType(32)


def _like(value, element):
    """The type of `value`, a number or a vector of numbers, with `element` as the type of its elements."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constants(value, element):
    """A function that makes constants like `value`, of the type `element`."""
    kind = _like(value, element)
    return lambda number: kind([element(number)] * kind.count if isinstance(kind, ir.VectorType) else number)


def widen(context, builder, code, form: Format):
    """Emit the float32 of a `code`, or of a vector of codes. It is exact."""
    word_type, float_type, word_of = _like(code, _WORD), _like(code, _FLOAT), _constants(code, _WORD)
    if form.name == "float16" and converts_float16(context):
        return builder.fpext(builder.bitcast(code, _like(code, _HALF)), float_type)
    word = builder.zext(code, word_type)
    if form.name == "bfloat16":
        return builder.bitcast(builder.shl(word, word_of(16)), float_type)
    sign = builder.shl(builder.and_(word, word_of(form.sign)), word_of(32 - form.bits))
    magnitude = builder.and_(word, word_of(form.sign - 1))
    fraction = builder.shl(magnitude, word_of(23 - form.fraction))
    normal = builder.add(fraction, word_of(127 - form.bias << 23))
    subnormal = builder.fmul(builder.sitofp(magnitude, float_type), _constants(code, _FLOAT)(form.quantum))
    is_subnormal = builder.icmp_unsigned("<", magnitude, word_of(1 << form.fraction))
    found = builder.select(is_subnormal, builder.bitcast(subnormal, word_type), normal)
    if form.specials is Specials.INFINITY_AND_NANS:
        is_nan = builder.icmp_unsigned(">", magnitude, word_of(form.infinity))
        special = builder.or_(fraction, builder.select(is_nan, word_of(0x7FC0_0000), word_of(0x7F80_0000)))
        found = builder.select(builder.icmp_unsigned("<", magnitude, word_of(form.infinity)), found, special)
    else:
        nan, of = (form.infinity, magnitude) if form.specials is Specials.ONE_NAN else (form.sign, word)
        found = builder.select(builder.icmp_unsigned("==", of, word_of(nan)), word_of(0x7FC0_0000), found)
    return builder.bitcast(builder.or_(sign, found), float_type)


def narrow(context, builder, value, form: Format):
    """Emit the code of a float32 `value`, rounded to nearest, ties to even: ``Format.encode``."""
    if form.name == "float16" and converts_float16(context):
        return builder.bitcast(builder.fptrunc(value, _HALF), ir.IntType(16))
    word = builder.bitcast(value, _WORD)
    magnitude = builder.and_(word, _WORD(0x7FFF_FFFF))
    if getattr(context, "fastmath", True):  # a comparison of floats would never find a NaN
        is_nan = builder.icmp_signed(">", magnitude, _WORD(0x7F80_0000))
    else:
        is_nan = builder.fcmp_unordered("uno", value, value)
    if form.name == "bfloat16":  # all but the width is as in float32
        quiet = builder.or_(builder.lshr(word, _WORD(16)), _WORD(0x40))
        return builder.trunc(builder.select(is_nan, quiet, _rounded(builder, word, 16)), ir.IntType(16))
    sign = builder.and_(builder.lshr(word, _WORD(32 - form.bits)), _WORD(form.sign))
    shift = 23 - form.fraction
    normal = builder.sub(_rounded(builder, magnitude, shift), _WORD(127 - form.bias << form.fraction))
    # The sum is rounded at the quantum, which is the last bit of this number.
    magic = _FLOAT(form.quantum * 2.0**23)
    subnormal = builder.sub(
        builder.bitcast(builder.fadd(builder.bitcast(magnitude, _FLOAT), magic), _WORD), builder.bitcast(magic, _WORD)
    )
    is_subnormal = builder.icmp_unsigned("<", magnitude, _WORD(128 - form.bias << 23))
    code = builder.select(is_subnormal, subnormal, normal)
    if form.specials is Specials.INFINITY_AND_NANS:
        quiet = builder.or_(builder.and_(builder.lshr(word, _WORD(shift)), _WORD(form.sign - 1)), _WORD(1 << form.fraction - 1))
        code = _at_most(builder, code, form.infinity)
        code = builder.or_(sign, builder.select(is_nan, quiet, code))
    elif form.specials is Specials.ONE_NAN:
        code = _at_most(builder, code, form.infinity - 1)
        code = builder.or_(sign, builder.select(is_nan, _WORD(form.infinity), code))
    else:
        code = _at_most(builder, code, form.sign)
        is_zero = builder.icmp_unsigned("==", code, _WORD(0))
        code = builder.or_(code, builder.select(is_zero, _WORD(0), sign))
    return builder.trunc(code, ir.IntType(form.bits))


def _rounded(builder, word, shift: int):
    """Emit ``word >> shift``, rounded to nearest, ties to even."""
    odd = builder.and_(builder.lshr(word, _WORD(shift)), _WORD(1))
    return builder.lshr(builder.add(word, builder.add(odd, _WORD((1 << shift - 1) - 1))), _WORD(shift))


def _at_most(builder, code, limit: int):
    return builder.select(builder.icmp_unsigned("<", code, _WORD(limit)), code, _WORD(limit))
