"""Sums and other reductions of arrays of the formats, computed in float32, and what else arrays of them have of their own.

``sum``, ``mean``, ``max`` and ``min`` of all elements read them where they are.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import infer_getattr, intrinsic, overload, register_jitable

from ..numba_internals import AttributeTemplate, alloca_once, attribute_template, for_range_slice
from .conversions import widen
from .elements import Half

__all__ = ["has_half", "is_half_array", "wide"]

_LANES = 64
"""Elements that are added side by side. So a sum is the same on each processor, and more exact than one after the other."""
_INDEX, _WORD, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def is_half_array(numba_type: Any) -> bool:
    """Whether a type is an array of numbers of a format."""
    return isinstance(numba_type, types.Array) and isinstance(numba_type.dtype, Half)


def has_half(numba_type: Any) -> bool:
    """Whether a type is one of the formats' or an array of it."""
    numba_type = numba_type.type if isinstance(numba_type, types.Optional) else numba_type
    return isinstance(numba_type, Half) or is_half_array(numba_type)


def wide(x):
    """A number or an array of a format as float32; anything else as it is."""


@overload(wide)
def _typed_wide(x):
    if is_half_array(x):
        return lambda x: x.astype(np.float32)
    return (lambda x: np.float32(x)) if isinstance(x, Half) else lambda x: x


def _fold(start: float, function: str | None):
    """An intrinsic that folds a contiguous array by an intrinsic of LLVM's, which propagates NaN; None: by addition.

    `start`: the value of no element. The array's elements are of a format, or float32.
    """

    def combine(builder, a, b):
        if function is None:
            return builder.fadd(a, b)
        name = f"{function}.{f'v{a.type.count}' if isinstance(a.type, ir.VectorType) else ''}f32"
        found = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(a.type, [a.type] * 2), name)
        return builder.call(found, [a, b])

    def codegen(context, builder, sig, args):
        # 1. Vectors of 64 elements. 2. Those left over, one by one. 3. The lanes by halves.
        array = context.make_array(sig.args[0])(context, builder, args[0])
        element = sig.args[0].dtype
        codes = ir.VectorType(array.data.type.pointee, _LANES).as_pointer()

        def read(pointer):
            code = builder.load(pointer, align=element.bitwidth // 8)
            return widen(context, builder, code, element.format) if isinstance(element, Half) else code

        whole = builder.sub(array.nitems, builder.urem(array.nitems, _WORD(_LANES)))
        lanes = alloca_once(builder, ir.VectorType(_FLOAT, _LANES))
        builder.store(ir.Constant(lanes.type.pointee, [_FLOAT(start)] * _LANES), lanes)
        with for_range_slice(builder, _WORD(0), whole, _WORD(_LANES)) as (index, _):
            values = read(builder.bitcast(builder.gep(array.data, [index]), codes))
            builder.store(combine(builder, builder.load(lanes), values), lanes)
        rest = alloca_once(builder, _FLOAT)
        builder.store(_FLOAT(start), rest)
        with for_range_slice(builder, whole, array.nitems, _WORD(1)) as (index, _):
            builder.store(combine(builder, builder.load(rest), read(builder.gep(array.data, [index]))), rest)
        found, width = builder.load(lanes), _LANES
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(found, found, ir.Constant(ir.VectorType(_INDEX, width), [*range(first, first + width)]))
                for first in (0, width)
            )
            found = combine(builder, low, high)
        return combine(builder, builder.extract_element(found, _INDEX(0)), builder.load(rest))

    @intrinsic
    def fold(_typing_context, array):
        return types.float32(array), codegen

    return fold


@register_jitable
def _total(found, a):
    return found


@register_jitable
def _average(found, a):
    return np.float32(np.true_divide(np.float64(found), a.size))  # NaN for no element, as Numba's mean of other arrays


@register_jitable
def _extreme(found, a):
    if a.size == 0:
        raise ValueError("zero-size array to reduction operation maximum or minimum which has no identity")
    return found


def _line(a):
    """All elements in one dimension, side by side."""


@overload(_line)
def _typed_line(a):
    if a.layout == "A":
        return lambda a: a.copy().reshape(a.size)
    return (lambda a: a.T.reshape(a.size)) if a.layout == "F" else lambda a: a.reshape(a.size)


_BLOCK = 1 << 14
"""Elements that are folded at once. So a result depends neither on ``parallel=True`` nor on the number of threads."""


def _folding(fold, finish):
    """What a function of all elements is compiled to. `finish`: makes the result of what is folded, and of the array."""

    def implementation(a):
        line = _line(a)
        count = (line.size + _BLOCK - 1) // _BLOCK
        if count < 2:
            found = fold(line)
        else:
            parts = np.empty(count, np.float32)
            numba.parfors.parfor.init_prange()
            for i in numba.parfors.parfor.internal_prange(count):
                parts[i] = fold(line[i * _BLOCK : (i + 1) * _BLOCK])
            found = fold(parts)
        return finish(found, a)

    return implementation


def _of_half_arrays(attribute: str, is_method: bool):
    """Decorator like ``overload_method`` or ``overload_attribute`` of arrays, which leaves all other arrays to Numba.

    The code is compiled into the caller's, before ``parallel=True`` puts code of its own in place of what it knows by name.
    """

    def register(function):
        template = attribute_template(types.Array, attribute, function, is_method)

        class OfHalfArrays(template):
            def _init_once(self):
                pass  # it would register code for all arrays

            def _resolve(self, value, attr):
                found: Any = super()._resolve(value, attr) if is_half_array(value) else None
                if not isinstance(found, types.BoundFunction):
                    return found
                key = {"key": f"{attr} of arrays of a format"}  # Numba's own code has another
                return types.BoundFunction(type(attr, (found.template,), key), value)

        infer_getattr(OfHalfArrays)
        overload(function, inline="always", target="cpu")(function)
        return function

    return register


def _reduction(function, implementation) -> None:
    """Let Numba compile a function of NumPy, and the method of that name, of all elements of an array."""

    @overload(function, inline="always", target="cpu")
    @_of_half_arrays(function.__name__, is_method=True)
    def _(a):
        return implementation if is_half_array(a) else None


_sum, _max, _min = _fold(0.0, None), _fold(-np.inf, "llvm.maximum"), _fold(np.inf, "llvm.minimum")
_reduction(np.sum, _folding(_sum, _total))
_reduction(np.mean, _folding(_sum, _average))
_reduction(np.max, _folding(_max, _extreme))
_reduction(np.min, _folding(_min, _extreme))


def _filled(function, value) -> None:
    """Let Numba compile ``np.zeros`` or ``np.ones``: parallel kernels would look for a dtype of NumPy's."""

    @overload(function, inline="always", target="cpu")
    def _(shape, dtype=float):
        if isinstance(dtype, types.DTypeSpec) and isinstance(dtype.dtype, Half):
            return lambda shape, dtype=float: np.full(shape, value, dtype)
        return None


_filled(np.zeros, 0)
_filled(np.ones, 1)


@overload(np.where, target="cpu")
def _where(condition, x, y):
    """Numba's own would promote as NumPy does, which may have no dtype."""
    if not (has_half(x) or has_half(y)):
        return None
    kinds = {each.dtype if isinstance(each, types.Array) else each for each in (x, y)}
    if len(kinds) == 1:
        half = kinds.pop()
        return lambda condition, x, y: np.where(condition, wide(x), wide(y)).astype(half)
    return lambda condition, x, y: np.where(condition, wide(x), wide(y))


@infer_getattr
class _Kind(AttributeTemplate):
    key = types.DType
    metadata = {"target": "cpu"}  # noqa: RUF012 (as Numba's templates have it)

    def resolve_kind(self, dtype):
        return types.StringLiteral("f") if isinstance(dtype.dtype, Half) else None


@intrinsic
def _dtype_of(_typing_context, a):
    return types.DType(a.dtype)(a), lambda context, *_: context.get_dummy_value()


@_of_half_arrays("dtype", is_method=False)
def _dtype(a):
    """In parallel kernels too, in which Numba would ask NumPy for the dtype of that name."""
    return lambda a: _dtype_of(a)
