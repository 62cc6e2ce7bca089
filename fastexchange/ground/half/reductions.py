"""Sums and other reductions of arrays of the formats, computed in float32.

``sum``, ``mean``, ``max`` and ``min`` of all elements read them where they are. Other functions get a copy in float32.
"""

import inspect
import operator
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import infer_getattr, intrinsic, lower_builtin, overload, overload_method, register_jitable

from ..numba_changes import set_parallel
from ..numba_internals import AbstractTemplate, AttributeTemplate, alloca_once, for_range_slice, signature
from .conversions import widen
from .elements import Half

__all__ = ["contains_half", "is_half_array", "wide"]

_LANES = 64
"""Elements that are added side by side. So a sum is the same on each processor, and more exact than one after the other."""
_INDEX, _WORD, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def is_half_array(numba_type: Any) -> bool:
    """Whether a type is an array of numbers of a format."""
    return isinstance(numba_type, types.Array) and isinstance(numba_type.dtype, Half)


def contains_half(numba_type: Any, with_dtypes: bool = False) -> bool:
    """Whether a type is of numbers of a format, or an array, a tuple or a list that contains some.

    `with_dtypes`: also what stands for the type itself, as in ``np.empty(n, dtype=bfloat16)``.
    """
    if with_dtypes and isinstance(numba_type, types.DTypeSpec):
        return isinstance(cast(Any, numba_type).dtype, Half)
    if isinstance(numba_type, types.BaseTuple):
        return any(contains_half(each, with_dtypes) for each in cast(Any, numba_type).types)
    if isinstance(numba_type, (types.List, types.Optional)):
        return contains_half(numba_type.dtype if isinstance(numba_type, types.List) else numba_type.type)
    return isinstance(numba_type, Half) or is_half_array(numba_type)


def wide(x):
    """Numbers or arrays of a format as float32, also those in a tuple or a list; anything else as it is."""


@overload(wide)
def _typed_wide(x):
    if isinstance(x, types.List) and contains_half(x.dtype):
        return lambda x: [wide(each) for each in x]
    if isinstance(x, types.BaseTuple) and contains_half(x):
        made: dict[str, Any] = {}
        exec(f"def each(x): return ({' '.join(f'wide(x[{i}]),' for i in range(len(x)))})", {"wide": wide}, made)
        return made["each"]
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


_sum, _max, _min = _fold(0.0, None), _fold(-np.inf, "llvm.maximum"), _fold(np.inf, "llvm.minimum")
_WHOLE: dict[Any, tuple] = {np.sum: (_sum, _total), np.mean: (_sum, _average), np.max: (_max, _extreme), np.min: (_min, _extreme)}
"""By functions of NumPy: what folds all elements of an array, and what makes the result of that and of the array."""


def _contiguous(a):
    """An array, or its copy if its elements do not lie side by side."""


@overload(_contiguous)
def _typed_contiguous(a):
    return (lambda a: a.copy()) if a.layout == "A" else lambda a: a


def _is_given(parameter) -> bool:
    """Whether a call has an argument for a parameter of which ``None`` is the default."""
    return not (parameter is None or isinstance(parameter, (types.NoneType, types.Omitted)))


def _reduction(function) -> None:
    """Let Numba compile `function` of NumPy."""

    @overload(function, target="cpu", prefer_literal=True)
    def _(a, axis=None):
        if not is_half_array(a):
            return None
        if _is_given(axis):
            return lambda a, axis=None: function(a.astype(np.float32), axis)
        if function not in _WHOLE:
            return lambda a, axis=None: function(a.astype(np.float32))
        fold, finish = _WHOLE[function]
        return lambda a, axis=None: finish(fold(_contiguous(a)), a)


def _reduction_with_dtype(function) -> None:
    """Let Numba compile calls of `function` with ``dtype``: elements are converted; what is of a format is rounded once."""

    @overload(function, target="cpu", prefer_literal=True)
    def _(a, axis=None, dtype=None):
        if not _is_given(dtype) or not isinstance(a, types.Array):
            return None
        if isinstance(dtype.dtype, Half):
            half = dtype.dtype
            return lambda a, axis=None, dtype=None: _rounded(function(wide(a), axis), half)
        if not is_half_array(a):
            return None
        if dtype.dtype == types.float32:
            return lambda a, axis=None, dtype=None: function(a, axis)
        return lambda a, axis=None, dtype=None: function(a.astype(dtype), axis)


def _rounded(found, half):
    """A number or an array, of a format."""


@overload(_rounded)
def _typed_rounded(found, half):
    return (lambda found, half: found.astype(half)) if isinstance(found, types.Array) else lambda found, half: half(found)


_BLOCK = 1 << 14
"""Elements that one thread folds with ``parallel=True``. So a result does not depend on the number of threads."""


_FUNCTIONS = list(_WHOLE)


def _in_parallel(function):
    """What a parallel kernel has in place of `function`, for an array without ``axis``; None: what every other kernel has.

    Numba compiles it into the kernel, where it finds nothing but modules, constants and methods.
    """
    if function not in _WHOLE:
        return None
    which = _FUNCTIONS.index(function)

    def fold_blocks(a):
        line = a._line()
        found = np.empty((a.size + _BLOCK - 1) // _BLOCK, np.float32)
        numba.parfors.parfor.init_prange()
        for i in numba.parfors.parfor.internal_prange(found.size):
            found[i] = line._fold_block(i, which)
        return a._finish(found, which)

    return fold_blocks


@overload_method(types.Array, "_line")
def _line(a):
    """All elements in one dimension."""
    if not is_half_array(a):
        return None
    return (lambda a: a.T.reshape(a.size)) if a.layout == "F" else lambda a: _contiguous(a).reshape(a.size)


@overload_method(types.Array, "_fold_block", prefer_literal=True)
def _fold_block(a, i, which):
    """The result of one block of a line. `which`: a function's number."""
    if not is_half_array(a):
        return None
    fold, _ = _WHOLE[_FUNCTIONS[which.literal_value]]
    return lambda a, i, which: fold(a[i * _BLOCK : (i + 1) * _BLOCK])


@overload_method(types.Array, "_finish", prefer_literal=True)
def _finish(a, found, which):
    """The result of an array, from those of its blocks."""
    if not is_half_array(a):
        return None
    fold, finish = _WHOLE[_FUNCTIONS[which.literal_value]]
    return lambda a, found, which: finish(fold(found), a)


for _function in (
    *_WHOLE, np.prod, np.var, np.std, np.argmax, np.argmin, np.cumsum, np.cumprod, np.ptp, np.median, np.nansum, np.nanprod,
    np.nanmean, np.nanmax, np.nanmin, np.nanvar, np.nanstd, np.nanmedian,
):  # fmt: skip
    _reduction(_function)
    set_parallel(_function, is_half_array, _in_parallel)
for _function in (np.sum, np.cumsum):
    _reduction_with_dtype(_function)

_METHODS = {
    "sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod, "var": np.var, "std": np.std,
    "argmax": np.argmax, "argmin": np.argmin, "cumsum": np.cumsum, "cumprod": np.cumprod, "ptp": np.ptp,
}  # fmt: skip


_METHOD = "method of an array of a format"


@infer_getattr
class _Methods(AttributeTemplate):
    """Methods of arrays of the formats, which are the functions of that name."""

    key = types.Array
    metadata = {"target": "cpu"}  # noqa: RUF012 (as Numba's templates have it)

    def generic_resolve(self, value, attr):
        if attr not in _METHODS or not is_half_array(value):
            return None
        function = _METHODS[attr]

        class Method(AbstractTemplate):
            key = _METHOD, attr

            def generic(self, args, kws):
                given = dict(zip(("axis", "dtype"), args, strict=False)) | kws
                if len(given) < len(args) + len(kws) or set(given) > {"axis", "dtype"}:
                    return None
                found = self.context.resolve_function_type(function, (self.this,), given)
                if found is None:
                    return None
                given = {name: taken for name, taken in zip(("a", "axis", "dtype"), found.args, strict=False) if name in given}
                made = signature(found.return_type, *given.values(), recvr=self.this)
                return made.replace(pysig=_PYTHON_SIGNATURES[tuple(given)])

        return types.BoundFunction(Method, value)


_PYTHON_SIGNATURES = {
    tuple(inspect.signature(function).parameters): inspect.signature(function)
    for function in (lambda: None, lambda axis: None, lambda dtype: None, lambda axis, dtype: None)
}


def _lower_method(name: str) -> None:
    function = _METHODS[name]

    @lower_builtin((_METHOD, name), types.Array)
    @lower_builtin((_METHOD, name), types.Array, types.Any)
    @lower_builtin((_METHOD, name), types.Array, types.Any, types.Any)
    def _(context, builder, sig, args):
        if len(args) == 1:
            body: Any = lambda a: function(a)  # noqa: E731
        elif len(args) == 3:
            body = lambda a, axis, dtype: function(a, axis, dtype)  # noqa: E731
        elif isinstance(sig.args[1], types.DTypeSpec):
            body = lambda a, dtype: function(a, dtype=dtype)  # noqa: E731
        else:
            body = lambda a, axis: function(a, axis)  # noqa: E731
        return context.compile_internal(builder, body, sig, args)


for _name in _METHODS:
    _lower_method(_name)


def _product(function) -> None:
    """Let Numba compile a product of two arrays."""

    @overload(function, target="cpu")
    def _(a, b):
        return (lambda a, b: function(wide(a), wide(b))) if is_half_array(a) or is_half_array(b) else None


for _function in (np.dot, np.vdot, np.outer, np.kron, operator.matmul):
    _product(_function)


@overload(np.where, target="cpu")
def _where(condition, x, y):
    if not (is_half_array(x) or is_half_array(y)):
        return None
    if getattr(x, "dtype", x) == getattr(y, "dtype", y):
        kind = getattr(x, "dtype", x)
        return lambda condition, x, y: np.where(condition, wide(x), wide(y)).astype(kind)
    return lambda condition, x, y: np.where(condition, wide(x), wide(y))


@overload(np.searchsorted, target="cpu", prefer_literal=True)
def _searchsorted(a, v, side="left"):
    if not contains_half(v):
        return None
    return lambda a, v, side="left": np.searchsorted(a, wide(v), side)  # Numba asks NumPy whether the dtype has NaN


@overload(np.fill_diagonal, target="cpu")
def _fill_diagonal(a, val, wrap=False):
    if not isinstance(val, Half):
        return None
    return lambda a, val, wrap=False: np.fill_diagonal(a, wide(val), wrap)  # Numba asks NumPy for its dtype, if it has one


def _rounding(function) -> None:
    """Let Numba compile a rounding to decimals."""

    @overload(function, target="cpu")
    def _(a, decimals=0, out=None):
        if not (is_half_array(a) or isinstance(a, Half)):
            return None
        if isinstance(out, (types.NoneType, types.Omitted)) or out is None:
            return lambda a, decimals=0, out=None: function(wide(a), decimals)

        def rounded(a, decimals=0, out=None):
            out[...] = function(wide(a), decimals)
            return out

        return rounded


for _function in (np.round, np.around):
    _rounding(_function)
