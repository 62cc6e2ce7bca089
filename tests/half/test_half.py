"""bfloat16, float16 and float8 in kernels: every value is right, against an exact oracle, PyTorch and ml_dtypes."""

import functools
import math
import operator

import halves
import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import torch
from halves import FORMS, array, code_of, codes, edges, nearest, numbers, of_each, of_some, of_two, same, tensor
from interoperability import ml_dtypes
from interpreter import run_python

if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

from fastexchange import fast_args
from fastexchange.ground.half.elements import computed_as
from fastexchange.ground.half.formats import FORMATS

WAYS = {"vectorised": {}, "scalar": {}, "fastmath": {"fastmath": True}}
by_each_way = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NaN, to float64
of_each_wide = pytest.mark.parametrize("form", FORMS[:2], ids=str)


def quiet():
    """NumPy says nothing of overflow and NaN."""
    return np.errstate(all="ignore")


@functools.cache
def kernel_of(parameters, body, way="vectorised"):
    """A kernel with a body for each index `i`. ``scalar``: each index is read from memory, so that LLVM makes no vectors."""
    lines = "".join(f"  {line}\n" for line in body)
    if way == "scalar":
        source = f"def kernel({parameters}, follow):\n i = 0\n while i >= 0:\n{lines}  i = follow[i]"
    else:
        source = f"def kernel({parameters}):\n for i in range({parameters[0]}.size):\n{lines}"
    names = {"np": np, "math": math}
    exec(source, names)
    kernel = fast_args(numba.njit(error_model="numpy", **WAYS[way])(names["kernel"]))
    if way != "scalar":
        return kernel
    return lambda *arguments: kernel(*arguments, np.array([*range(1, len(arguments[0])), -1]))


def copying(way="vectorised"):
    return kernel_of("x, y", ("y[i] = x[i]",), way)


def made(form, kernel, *arguments):
    """The codes that a kernel writes into an array of the format, its last argument."""
    y = array(form, np.zeros(len(arguments[0])))
    kernel(*arguments, y)
    return code_of(y)


def equal(got, want):
    """Whether numbers are the same, with the signs of zeros, or both NaN."""
    return np.array_equal(got, want, equal_nan=True) and not ((np.signbit(got) != np.signbit(want)) & ~np.isnan(want)).any()


# ---- the formats ---------------------------------------------------------------------------------------------------


@of_each
def test_the_table_of_formats_says_the_same_as_the_oracle(form):
    ours = next(each for each in FORMATS if each.name == form.name)
    assert (ours.code, ours.bits) == form.dlpack and ours.fraction == form.fraction and ours.bias == form.bias
    found = np.array([ours.decode(code) for code in range(1 << form.bits)])
    assert equal(found, numbers(form))
    at_edges = edges(form)
    if form.bits == 16:
        at_edges = np.random.default_rng(1).choice(at_edges, 20_000)
    with quiet():
        assert [ours.encode(float(value)) for value in at_edges] == nearest(form, at_edges.astype(float)).tolist()


@of_each
def test_the_oracle_says_the_same_as_pytorch_and_ml_dtypes(form):
    given = edges(form)
    want = nearest(form, given)
    if halves.converts_as_pytorch(form):
        same(form, code_of(torch.from_numpy(given).to(form.torch)), want)
    with quiet():
        by_ml_dtypes = code_of(given.astype(form.dtype))
    saturated = np.abs(given) > 464 if form.special == "fn" else np.zeros(len(given), bool)
    assert halves.is_nan(form, by_ml_dtypes[saturated]).all() and (form.special != "fn" or saturated.any())
    same(form, by_ml_dtypes[~saturated], want[~saturated])
    if torch is not None:
        assert np.array_equal(tensor(form, codes(form)).float().numpy(), numbers(form), equal_nan=True)


# ---- load and store ------------------------------------------------------------------------------------------------


@of_each
@by_each_way
def test_every_code_is_read_as_its_number(form, way):
    """Bit by bit: signed zeros, subnormal numbers, and the payloads of NaN."""
    kernel, out = copying(way), np.empty(1 << form.bits, np.float32)
    for container in (array,) if torch is None else (array, tensor):
        out[:] = 0
        kernel(container(form, codes(form)), out)
        assert out.view(np.uint32).tolist() == halves.wide_bits(form).tolist()


@of_each
@by_each_way
def test_a_store_rounds_to_nearest_and_ties_to_even(form, way):
    """At every boundary of rounding, 1 and 2 float32 beside it, at overflow, for subnormal numbers, and for NaN."""
    given = edges(form)
    kernel = copying(way)
    assert np.array_equal(made(form, kernel, given), nearest(form, given))
    random = np.random.default_rng(2).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    with quiet():
        assert np.array_equal(made(form, kernel, random), nearest(form, random))


@pytest.mark.nightly
@of_each
def test_every_float32_is_stored_as_pytorch_does(form):
    if not halves.converts_as_pytorch(form):
        pytest.skip("this PyTorch does not saturate")
    kernel = copying()
    for first in range(0, 1 << 32, 1 << 24):
        given = np.arange(first, first + (1 << 24), dtype=np.uint32).view(np.float32)
        same(form, made(form, kernel, given), code_of(torch.from_numpy(given).to(form.torch)))


@of_each
def test_float64_is_rounded_to_float32_first(form):
    """As PyTorch does."""
    wide = np.random.default_rng(3).normal(size=50_000) * np.exp2(np.random.default_rng(4).integers(-30, 20, 50_000))
    near = edges(form)[::7].astype(float)
    near = near[np.isfinite(near)]
    given = np.concatenate([wide, near, np.nextafter(near, np.inf), [1e300, -1e300, 5e-324]])
    got = made(form, copying(), given)
    with quiet():
        narrow = given.astype(np.float32)
    same(form, got, nearest(form, narrow))
    if halves.converts_as_pytorch(form):
        same(form, got, code_of(torch.from_numpy(given).to(form.torch)))


@of_some
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_integers_and_bools(form, dtype):
    """They become float32 first; an integer made of a number is cut."""
    ends, random = np.iinfo(dtype), np.random.default_rng(5)
    near = np.arange(max(ends.min, -300), min(ends.max, 300), dtype=dtype)
    others = np.array([ends.min, ends.max, ends.max - 1, ends.max // 3], dtype)
    given = np.concatenate([near, others, random.integers(ends.min, ends.max, 2000, dtype)])
    same(form, made(form, copying(), given), nearest(form, given.astype(np.float32)))
    fits = (numbers(form) > float(ends.min)) & (numbers(form) < float(ends.max))
    out = np.zeros(fits.sum(), dtype)
    copying()(array(form, codes(form)[fits]), out)
    assert np.array_equal(out, np.trunc(numbers(form)[fits]).astype(dtype))


def as_other_types(x, given, truth, stored, copied, wide, pairs, whole, of_truth):
    for i in range(x.size):
        truth[i] = 1 if x[i] else 0
        stored[i] = x[i]
        wide[i] = x[i]
        pairs[i] = complex(x[i])
        whole[i] = int(x[i]) if abs(x[i]) < 2.0**62 else 0
        of_truth[i] = given[i]
    copied[:] = x.astype(np.bool_)


@of_two
def test_bools_floats_and_complex_numbers_of_elements(form):
    value, count = numbers(form), 1 << form.bits
    outs = [np.zeros(count, dtype) for dtype in ("?", "?", "?", "f8", "c16", "i8")]
    of_truth, given = array(form, np.zeros(count)), value > 0
    fast_args(as_other_types)(array(form, codes(form)), given, *outs, of_truth)
    *truths, wide, pairs, whole = outs
    for truth in truths:
        assert np.array_equal(truth, value.astype(bool))  # minus zero is False, NaN is True
    assert equal(wide, value) and np.array_equal(pairs.real, value, equal_nan=True) and not pairs.imag.any()
    assert np.array_equal(whole, np.trunc(np.where(np.abs(value) < 2**62, value, 0)).astype(np.int64))
    same(form, code_of(of_truth), nearest(form, given.astype(float)))


@of_each
def test_every_format_becomes_every_other(form):
    names, given = "abcdef", array(form, codes(form))
    outs = [array(other, np.zeros(len(given))) for other in FORMS]
    kernel_of("x, " + ", ".join(names), tuple(f"{name}[i] = x[i]" for name in names))(given, *outs)
    for other, out in zip(FORMS, outs, strict=True):
        if form is other:
            assert np.array_equal(code_of(out), codes(form))  # bit by bit, also NaN
        else:
            same(other, code_of(out), nearest(other, numbers(form)))


def test_loops_are_vectors():
    """Else ``vectorised`` and ``scalar`` would test the same code."""
    for way in WAYS:
        kernel = copying(way)
        kernel(array(halves.BFLOAT16, np.zeros(3)), np.ones(3, np.float32))
        found = kernel.__closure__[0].cell_contents if way == "scalar" else kernel
        code = next(code for types, code in found.inspect_llvm().items() if types[0].dtype.name == "bfloat16")
        assert ("x i16>" in code) is (way != "scalar"), way


# ---- operators -----------------------------------------------------------------------------------------------------


ARITHMETIC = ("p[i] = x[i] + y[i]", "q[i] = x[i] - y[i]", "r[i] = x[i] * y[i]", "s[i] = x[i] / y[i]")
COMPARISONS = tuple(f"out[i] |= (x[i] {sign} y[i]) << {bit}" for bit, sign in enumerate(["<", "<=", "==", "!=", ">=", ">"]))
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv]


def check_arithmetic(form, x, y, way):
    """``x`` and ``y``: codes."""
    a, b = array(form, x), array(form, y)
    outs = [array(form, np.zeros(len(x))) for _ in OPERATORS]
    kernel_of("x, y, p, q, r, s", ARITHMETIC, way)(a, b, *outs)
    wide_a, wide_b = numbers(form)[x], numbers(form)[y]
    for function, out in zip(OPERATORS, outs, strict=True):
        with quiet():
            single, got = function(wide_a.astype(np.float32), wide_b.astype(np.float32)), code_of(out)
            want = nearest(form, single)
        if way != "fastmath":
            same(form, got, want)
            if form.bits == 16 and torch is not None:
                same(form, got, code_of(function(tensor(form, x), tensor(form, y))))
        elif function is not operator.truediv:  # of which a reciprocal may be taken
            keep = np.isfinite(wide_a) & np.isfinite(wide_b) & np.isfinite(single)
            got, want = (np.where(numbers(form)[code] == 0, 0, code) for code in (got, want))  # signs of zeros may differ
            same(form, got[keep], want[keep])
    if way != "fastmath":
        out = np.zeros(len(x), np.int64)
        kernel_of("x, y, out", COMPARISONS, way)(a, b, out)
        want = [wide_a < wide_b, wide_a <= wide_b, wide_a == wide_b, wide_a != wide_b, wide_a >= wide_b, wide_a > wide_b]
        assert np.array_equal(out, sum(each.astype(np.int64) << bit for bit, each in enumerate(want)))


@pytest.mark.parametrize("form", FORMS[2:], ids=str)
def test_operators_of_all_pairs_of_float8(form):
    x, y = np.meshgrid(codes(form), codes(form))
    for way in WAYS if form.name == "float8_e4m3fn" else ["vectorised"]:
        check_arithmetic(form, x.ravel(), y.ravel(), way)


def pairs(form, count, seed):
    """Half of them of all codes, half of numbers that are near each other, so that sums are rounded."""
    random = np.random.default_rng(seed)
    x = random.integers(0, 1 << form.bits, count).astype(form.word)
    y = random.integers(0, 1 << form.bits, count).astype(form.word)
    near = x[: count // 2] + random.integers(-(3 << form.fraction), 3 << form.fraction, count // 2).astype(form.word)
    y[: count // 2] = near
    return x, y


@of_each_wide
@by_each_way
def test_operators_of_a_million_pairs(form, way):
    check_arithmetic(form, *pairs(form, 1_000_000, 6), way)


@pytest.mark.nightly
@of_each_wide
@by_each_way
def test_operators_of_a_hundred_million_pairs(form, way):
    for seed in range(100):
        check_arithmetic(form, *pairs(form, 1_000_000, 100 + seed), way)


@of_two
@by_each_way
def test_products_that_are_added(form, way):
    """Two operations of float32 and one rounding. With fastmath they may be one operation."""
    random = np.random.default_rng(7)
    x, y, z = (random.integers(0, 1 << form.bits, 200_000).astype(form.word) for _ in range(3))
    wide = [numbers(form)[code] for code in (x, y, z)]
    narrow = [value.astype(np.float32) for value in wide]
    got = made(form, kernel_of("x, y, z, out", ("out[i] = x[i] * y[i] + z[i]",), way), *(array(form, code) for code in (x, y, z)))
    with quiet():
        single = narrow[0] * narrow[1] + narrow[2]
        want = nearest(form, single)
        fused = nearest(form, (wide[0] * wide[1] + wide[2]).astype(np.float32))
        known = np.isfinite(single) & np.isfinite(narrow[0] * narrow[1]) & (numbers(form)[want] != 0)
    if way != "fastmath":
        return same(form, got, want)
    assert ((got == want) | (got == fused))[known].all()
    return None


# ---- functions -----------------------------------------------------------------------------------------------------

_MATH = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "degrees", "erf", "erfc", "exp", "expm1",
    "fabs", "floor", "gamma", "isfinite", "isinf", "isnan", "lgamma", "log", "log10", "log1p", "radians", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_NUMPY = (
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "cbrt", "ceil", "cos", "cosh", "deg2rad",
    "degrees", "exp", "exp2", "expm1", "fabs", "floor", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2",
    "negative", "positive", "rad2deg", "radians", "reciprocal", "rint", "sign", "signbit", "sin", "sinh", "sqrt",
    "square", "tan", "tanh", "trunc",
)  # fmt: skip
UNARY = {f"math.{name}": getattr(math, name) for name in _MATH} | {f"np.{name}": getattr(np, name) for name in _NUMPY}
UNARY |= {"abs": abs, "-": operator.neg, "+": operator.pos, "float": float, "np.float32": np.float32, "np.float64": np.float64}
DOMAIN = {"math.ceil", "math.floor", "math.trunc"}
"""Functions that return an integer: only of numbers that have one."""


def calling(functions, arguments="x"):
    """A kernel that writes each function of each element, or of each pair, into a row."""
    made = {f"f{i}": function for i, function in enumerate(functions)}
    given = ", ".join(f"{argument}[i]" for argument in arguments)
    lines = [f"  out[{i}, i] = f{i}({given})" for i in range(len(functions))]
    exec("\n".join([f"def kernel({', '.join(arguments)}, out):", " for i in range(x.size):", *lines]), made)
    return fast_args(numba.njit(error_model="numpy")(made["kernel"]))


@of_some
@pytest.mark.parametrize("kind", ["math", "np", "other"])
def test_unary_functions_of_every_code_are_those_of_float32(form, kind):
    names = [name for name in UNARY if name.partition(".")[0] == kind or (kind == "other" and "." not in name)]
    for only_small in (False, True):
        chosen = [name for name in names if (name in DOMAIN) is only_small]
        if not chosen:
            continue
        all_codes = codes(form)
        if only_small:
            all_codes = all_codes[np.abs(numbers(form)) < 2**62]
        kernel = calling([UNARY[name] for name in chosen])
        got, want = np.zeros((2, len(chosen), len(all_codes)))
        with quiet():
            wide = halves.wide_bits(form).view(np.float32)[all_codes]
            kernel(array(form, all_codes), got)
            kernel(wide, want)
        for name, ours, theirs in zip(chosen, got, want, strict=True):
            equal = (ours.view(np.int64) == theirs.view(np.int64)) | (np.isnan(ours) & np.isnan(theirs))
            where = np.flatnonzero(~equal)[:4]
            assert equal.all(), (name, [(hex(all_codes[i]), wide[i], ours[i], theirs[i]) for i in where])


BINARY = {
    "math.atan2": math.atan2, "math.copysign": math.copysign, "math.hypot": math.hypot, "max": max,
    "math.pow": math.pow, "min": min, "np.arctan2": np.arctan2, "np.copysign": np.copysign, "np.fmax": np.fmax,
    "np.fmin": np.fmin, "np.fmod": np.fmod,
    "np.hypot": np.hypot, "np.logaddexp": np.logaddexp, "np.maximum": np.maximum, "np.minimum": np.minimum,
    "np.power": np.power, "np.remainder": np.remainder, "%": operator.mod, "**": operator.pow, "//": operator.floordiv,
}  # fmt: skip


@of_some
def test_functions_of_two_are_those_of_float32(form):
    kernel = calling(BINARY.values(), "xy")
    random = np.random.default_rng(8)
    x, y = (random.integers(0, 1 << form.bits, 20_000).astype(form.word) for _ in range(2))
    got, want = np.zeros((2, len(BINARY), len(x)))
    kernel(array(form, x), array(form, y), got)
    wide = halves.wide_bits(form).view(np.float32)
    kernel(wide[x], wide[y], want)
    for name, ours, theirs in zip(BINARY, got, want, strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True), name


# ---- promotion -----------------------------------------------------------------------------------------------------

PROMOTED = {
    "?": "f4", "i1": "f4", "u1": "f4", "i2": "f4", "u2": "f4", "i4": "f8", "u4": "f8", "i8": "f8", "u8": "f8", "f4": "f4",
    "f8": "f8", "c8": "c8", "c16": "c16",
}  # fmt: skip
"""By the other operand: the type of the result. It is NumPy's, of float32 and that operand."""


def product_and_one_of_elements(x, y):
    return x * y, np.array([x[0] * y[0]])


@pytest.mark.parametrize("other", PROMOTED)
def test_promotion(other):
    assert np.result_type("f4", other) == PROMOTED[other]
    found = computed_as(numba.from_dtype(np.dtype(other)))
    assert np.result_type("f4", str(found)) == PROMOTED[other]
    x, y = array(halves.BFLOAT16, [0x3FC0] * 2), np.ones(2, other)
    for given in ((x, y), (y, x)):
        product, of_elements = product_and_one(*given)
        assert product.dtype == of_elements.dtype == PROMOTED[other] and of_elements[0] == 1.5


product_and_one = fast_args(product_and_one_of_elements)


def test_promotion_of_literals_formats_and_python_numbers():
    x = array(halves.BFLOAT16, [0x3FC0] * 2)
    for other in FORMS:
        assert product_and_one(x, array(other, [0, 0]))[1].dtype == np.float32
    beside = fast_args(lambda x, n: np.array([n * x[0]]))
    assert fast_args(lambda x: np.array([2 * x[0]]))(x).dtype == np.float32  # a literal int
    assert fast_args(lambda x: np.array([2.0 * x[0]]))(x).dtype == np.float64  # Numba's float literals are float64
    assert [beside(x, n).dtype for n in (2, 2.0, np.float32(2))] == [np.float64, np.float64, np.float32]


def test_a_numpy_whose_functions_name_no_module():
    """As before NumPy 2.2. What Numba's decorator of types asks for is not needed."""
    fork_python("""
        import numpy as np
        from numba.core.typing import templates
        own = templates.infer_global
        def infer_global(value=None, typing=None, **options):
            if typing is None and isinstance(value, np.ufunc):
                raise AttributeError("'numpy.ufunc' object has no attribute '__module__'")
            return own(value, typing, **options)
        templates.infer_global = infer_global

        import ml_dtypes
        from fastexchange import fast_args
        x = np.arange(4).astype(ml_dtypes.bfloat16)
        assert fast_args(lambda x: np.add(x, x).sum())(x) == 12.0
    """)


# ---- other processors ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_processor_without_f16c():
    """float16 is converted in integers there."""
    run_python(
        """
        import pytest
        from fastexchange.ground.numba_internals import converts_float16
        from numba.core.registry import cpu_target
        assert not converts_float16(cpu_target.target_context)
        tests = "read_as_its_number or a_store_rounds or float64_is or (a_million and scalar) or products_that"
        raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "tests/half/test_half.py", "-k", tests]))
        """,
        NUMBA_CPU_NAME="generic",
        NUMBA_CPU_FEATURES="",
    )
