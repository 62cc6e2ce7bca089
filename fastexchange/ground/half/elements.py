"""Numba's types of the formats: values in registers are codes, and every use converts them to float32.

A type is also a function, in Python and in compiled code: ``bfloat16(x)`` rounds. In Python it returns a float.
"""

from typing import Any, cast

import numba
from llvmlite import ir
from numba.core import types
from numba.core.errors import NumbaNotImplementedError
from numba.extending import (
    NativeValue,
    box,
    lower_builtin,
    lower_cast,
    models,
    overload_method,
    register_model,
    typeof_impl,
    unbox,
)

from ..dtype_registry import dtype_of
from ..numba_internals import Conversion
from . import boxing
from .conversions import narrow, widen
from .formats import FORMATS, Format

__all__ = ["TYPES", "Half", "computed_as"]


class _Named(types.Float):
    """Stands for NumPy's dtype of this name, and for nothing else: no value has this type."""

    def __init__(self, name: str):
        types.Number.__init__(cast(Any, self), name=name)


_EnumMember: Any = types.IntEnumMember  # its annotations forbid the attributes of another type


class Half(_EnumMember, types.Hashable):
    """The type of numbers of a format. They become float32 where they are used.

    It is none of ``types.Number``: Numba asks NumPy what a variable is that holds an int here and a number there, and NumPy need
    not know the format; all that Numba does with numbers only is refused. It is one of ``types.IntEnumMember``, because
    ``np.float32(x)`` takes those, and because of them Numba asks `dtype` for NumPy's dtype.
    """

    def __init__(self, form: Format):
        types.Type.__init__(self, form.name)
        self.bitwidth = form.bits
        self.__doc__ = _doc_of(form)

    @property
    def key(self) -> str:
        return self.name

    @property
    def format(self) -> Format:
        """The format of that name."""
        return _FORMATS[self.name]

    @property
    def dtype(self):
        """What Numba converts to NumPy's dtype; under ``NUMBA_DISABLE_JIT`` that dtype, for ``np.empty(n, dtype=bfloat16)``."""
        found = dtype_of(self.format.code, self.format.bits)
        if numba.config.DISABLE_JIT and found is not None:
            return found
        if found is None and getattr(boxing, "is_of_bytes", False):
            return _Named(f"V{self.bitwidth // 8}")
        if found is None:
            raise NumbaNotImplementedError(
                f"NumPy has no dtype for {self}, of which an array has to be made; install ml_dtypes, which has one, or make an "
                "array of float32, .astype(np.float32)"
            )
        return _Named(self.name)

    def cast_python_value(self, value) -> float:
        """`value` as the nearest number of the format, a Python float."""
        return self.format.decode(self.format.encode(float(value)))

    def unify(self, typingctx, other):
        """The type of a variable that holds this type's numbers and others: the one that it has if these are float32."""
        if not isinstance(other, (types.Number, types.Boolean, Half)):
            return None
        return typingctx.unify_pairs(types.float32, types.float32 if isinstance(other, Half) else other)

    def can_convert_to(self, typingctx, other):
        """How good a conversion to `other` is, of those that compete: float32 is the best."""
        if isinstance(other, Half):
            return Conversion.unsafe
        if other in _WIDER:
            return _WIDER[other]
        return Conversion.unsafe if isinstance(other, (types.Integer, types.Float, types.Boolean)) else None

    def can_convert_from(self, typingctx, other):
        """A conversion from any other number loses digits."""
        return Conversion.unsafe if isinstance(other, (types.Integer, types.Float, types.Boolean)) else None


def _doc_of(form: Format) -> str:
    """What ``help`` says of the type."""
    exponent, largest = form.bits - 1 - form.fraction, form.decode(form.infinity - 1)
    return f"""The element type {form.name}: {form.bits} bits, {exponent} for the exponent, {form.fraction} for the fraction.

    Its largest number is {largest:.4g}, its smallest positive one {form.quantum:.4g}. The codes that are no numbers:
    {form.specials.value}.

    In a kernel it is a dtype, ``np.empty(n, {form.name})``, and a function that rounds a number to an element. Elements are
    computed with as float32. In Python it is a function that rounds a number, and returns a float.

    >>> {form.name}(3.14159)
    {form.decode(form.encode(3.14159))}
    """


_FORMATS = {form.name: form for form in FORMATS}
_WIDER = {
    types.float32: Conversion.promote, types.float64: Conversion.safe,
    types.complex64: Conversion.safe, types.complex128: Conversion.safe,
}  # fmt: skip
TYPES: dict[str, Half] = {form.name: Half(form) for form in FORMATS}


def computed_as(number: Any) -> Any:
    """The operand's type after promotion with a number of one of the formats: NumPy's promotion with float32.

    A literal int is float32. Types that are no numbers stay what they are.
    """
    if isinstance(number, (Half, types.IntegerLiteral, types.Boolean)):
        return types.float32
    if isinstance(number, types.Integer):
        return types.float32 if cast(Any, number).bitwidth <= 16 else types.float64
    return number


@register_model(Half)
class HalfModel(models.PrimitiveModel):
    """A code, in registers and in memory."""

    def __init__(self, dmm, fe_type: Half):
        super().__init__(dmm, fe_type, ir.IntType(fe_type.bitwidth))


# ---- conversions ---------------------------------------------------------------------------------------------------


@lower_cast(Half, types.Float)
@lower_cast(Half, types.Integer)
@lower_cast(Half, types.Complex)
def _to_number(context, builder, given, taken, value):
    return context.cast(builder, widen(context, builder, value, given.format), types.float32, taken)


@lower_cast(types.Float, Half)
@lower_cast(types.Integer, Half)
@lower_cast(types.Boolean, Half)
@lower_cast(types.IntegerLiteral, Half)
@lower_cast(types.BooleanLiteral, Half)
def _from_number(context, builder, given, taken, value):
    return narrow(context, builder, context.cast(builder, value, given, types.float32), taken.format)


@lower_cast(Half, Half)
def _from_half(context, builder, given, taken, value):
    if given == taken:
        return value
    return narrow(context, builder, widen(context, builder, value, given.format), taken.format)


@lower_cast(Half, types.Boolean)
@lower_builtin(bool, Half)
def _is_true(context, builder, *given):
    half, value = (given[0], given[2]) if len(given) == 3 else (given[0].args[0], given[1][0])
    wide = widen(context, builder, value, half.format)
    return builder.fcmp_unordered("!=", wide, ir.FloatType()(0))


@typeof_impl.register(Half)
def _class_of(half, _context):
    """The type of a type that a kernel names, as of ``np.float32``."""
    return types.NumberClass(half)


@overload_method(Half, "__hash__")
def _hash(x):
    return lambda x: hash(types.float32(x))


@box(Half)
def _box(half, value, c):
    """Return a Python float, as of every other type of Numba's that has no Python type of its own."""
    wide = c.context.cast(c.builder, value, half, types.float64)
    return c.pyapi.float_from_double(wide)


@unbox(Half)
def _unbox(half, ob, c):
    """Take what has ``__float__``: a scalar of NumPy or of ml_dtypes."""
    code = c.context.cast(c.builder, c.pyapi.float_as_double(ob), types.float64, half)
    return NativeValue(code, is_error=c.pyapi.c_api_error())
