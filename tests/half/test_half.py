"""bfloat16, float16 and float8 in kernels: every value is right, against an exact oracle, PyTorch and ml_dtypes."""

import functools
import math
import operator

import halves
import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import is_exported, torch
from halves import BFLOAT16, FLOAT8, FORMS, array, code_of, codes, edges, nearest, numbers, of_each, of_one, same
from interoperability import ml_dtypes
from interpreter import FOR_TESTS, run_python
from numba.core.registry import cpu_target

if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

from fastexchange import fast_args
from fastexchange.ground.half.elements import TYPES, computed_as
from fastexchange.ground.half.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NaN, to float64
WAYS = {"vectorised": {}, "scalar": {}, "fastmath": {"fastmath": True}}


def by_way(*chosen):
    """All formats in each way, of which those not chosen wait for the night."""
    return pytest.mark.parametrize(("form", "way"), [
        pytest.param(form, way, id=f"{form}-{way}", marks=() if (form, way) in chosen else pytest.mark.nightly)
        for form in FORMS for way in WAYS
    ])  # fmt: skip


quiet = functools.partial(np.errstate, all="ignore")
"""NumPy says nothing of overflow and NaN."""


@functools.cache
def kernel_of(parameters, loops, way="vectorised"):
    """A kernel with a loop over an array for each statement. ``scalar``: memory has the next index, so LLVM makes no vectors."""
    source, follow = f"def kernel({parameters}, follow):\n", np.arange(1, 1_000_001)
    for over, statement in loops:
        if way == "scalar":
            source += f" i = 0\n while i < {over}.size:\n  {statement}\n  i = follow[i]\n"
        else:
            source += f" for i in range({over}.size):\n  {statement}\n"
    names = {"math": math}
    exec(source, names)
    kernel = fast_args(numba.njit(error_model="numpy", **WAYS[way])(names["kernel"]))
    return functools.partial(kernel, follow=follow)


def equal(got, want):
    """Whether numbers are the same, with the signs of zeros, or both NaN."""
    has_signs = (np.signbit(got) == np.signbit(want)) | np.isnan(want)
    return np.array_equal(got, want, equal_nan=True) and has_signs.all()


# ---- the formats ---------------------------------------------------------------------------------------------------
@of_each
def test_the_table_of_formats_says_the_same_as_the_oracle(form):
    ours = next(each for each in FORMATS if each.name == form.name)
    assert (ours.code, ours.bits) == form.dlpack and ours.fraction == form.fraction and ours.bias == form.bias
    assert equal(np.array([ours.decode(code) for code in range(1 << form.bits)]), numbers(form))
    at_edges = np.random.default_rng(1).permutation(edges(form))[:10_000]
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
    assert np.isnan(numbers(form)[by_ml_dtypes[saturated]]).all() and (form.special != "fn" or saturated.any())
    same(form, by_ml_dtypes[~saturated], want[~saturated])
    if torch is not None:
        assert np.array_equal(halves.tensor(form, codes(form)).float().numpy(), numbers(form), equal_nan=True)


# ---- load and store ------------------------------------------------------------------------------------------------
CONVERSIONS = (
    ("x", "read[i] = x[i]"), ("single", "stored[i] = single[i]"), ("double", "rounded[i] = double[i]"), ("x", "copied[i] = x[i]"),
    ("x", "other[i] = x[i]"),
)  # fmt: skip
convert = functools.partial(kernel_of, "x, read, single, stored, double, rounded, copied, other", CONVERSIONS)
by_conversion = by_way(*((form, "vectorised") for form in FORMS), *((form, way) for form in (BFLOAT16, FLOAT8) for way in WAYS))


def following(form):
    return FORMS[(FORMS.index(form) + 1) % len(FORMS)]


def converted(form, way, container=array, single=np.zeros(0, np.float32), double=np.zeros(0)):  # noqa: B008
    """What the kernel makes of all codes, of float32 and of float64; last, of the codes, in the next format of the table."""
    read = np.empty(1 << form.bits, np.float32)
    stored, rounded, copied = (container(form, np.zeros(count)) for count in (len(single), len(double), len(read)))
    other = container(following(form), np.zeros(len(read)))
    convert(way)(container(form, codes(form)), read, single, stored, double, rounded, copied, other)
    return read, *map(code_of, (stored, rounded, copied, other))


@by_conversion
def test_every_code_is_read_as_its_number(form, way):
    """Bit by bit: signed zeros, subnormal numbers, and the payloads of NaN. Also as every other format."""
    can_be_tensors = torch is not None and is_exported(form.torch) and is_exported(following(form).torch)
    for container in (array, halves.tensor) if can_be_tensors else (array,):
        read, _, _, copied, other = converted(form, way, container)
        assert read.view(np.uint32).tolist() == halves.wide_bits(form).tolist()
        assert np.array_equal(copied, codes(form))
        if way != "fastmath":
            same(following(form), other, nearest(following(form), numbers(form)))


@by_conversion
def test_a_store_rounds_to_nearest_and_ties_to_even(form, way):
    """At every boundary of rounding, 1 and 2 float32 beside it, at overflow, for subnormal numbers, and for NaN."""
    random = np.random.default_rng(2).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    given = np.concatenate([edges(form), random])
    with quiet():
        assert np.array_equal(converted(form, way, single=given)[1], nearest(form, given))


@pytest.mark.nightly
@of_each
def test_every_float32_is_stored_as_pytorch_does(form):
    if not halves.converts_as_pytorch(form):
        pytest.skip("this PyTorch does not saturate")
    for first in range(0, 1 << 32, 1 << 19):
        given = np.arange(first, first + (1 << 19), dtype=np.uint32).view(np.float32)
        same(form, converted(form, "vectorised", single=given)[1], code_of(torch.from_numpy(given).to(form.torch)))


@of_each
def test_float64_is_rounded_to_float32_first(form):
    wide = np.random.default_rng(3).normal(size=50_000) * np.exp2(np.random.default_rng(4).integers(-30, 20, 50_000))
    near = edges(form)[::7].astype(float)
    near = near[np.isfinite(near)]
    given = np.concatenate([wide, near, np.nextafter(near, np.inf), [1e300, -1e300, 5e-324]])
    with quiet():
        got, narrow = converted(form, "vectorised", double=given)[2], given.astype(np.float32)
    same(form, got, nearest(form, narrow))
    if halves.converts_as_pytorch(form):
        same(form, got, code_of(torch.from_numpy(given).to(form.torch)))


def test_loops_are_vectors():
    """Else ``vectorised`` and ``scalar`` would test the same code."""
    for way in WAYS:
        converted(BFLOAT16, way)
        found = convert(way).func.inspect_llvm().items()
        code = next(code for types, code in found if types[0].dtype.name == "bfloat16")
        assert ("x i16>" in code) is (way != "scalar"), way


INTEGERS = "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"


@of_one
def test_integers_and_bools(form):
    """They become float32 first; an integer made of a number is cut."""
    names = ", ".join(f"{name}_{dtype}" for dtype in INTEGERS for name in ("given", "made", "fits", "cut"))
    loops = [(f"given_{dtype}", f"made_{dtype}[i] = given_{dtype}[i]") for dtype in INTEGERS]
    loops += [(f"fits_{dtype}", f"cut_{dtype}[i] = fits_{dtype}[i]") for dtype in INTEGERS]
    value, random, arguments = numbers(form), np.random.default_rng(5), []
    for dtype in INTEGERS:
        ends = np.iinfo(dtype)
        near = np.arange(max(ends.min, -300), min(ends.max, 300), dtype=dtype)
        others = np.array([ends.min, ends.max, ends.max - 1, ends.max // 3], dtype)
        given = np.concatenate([near, others, random.integers(ends.min, ends.max, 2000, dtype)])
        fits = codes(form)[(value > float(ends.min)) & (value < float(ends.max))]
        arguments += [given, array(form, np.zeros(len(given))), array(form, fits), np.zeros(len(fits), dtype)]
    kernel_of(names, tuple(loops), "scalar")(*arguments)
    for given, made, fits, cut in zip(*(arguments[place::4] for place in range(4)), strict=True):
        same(form, code_of(made), nearest(form, given.astype(np.float32)))
        assert np.array_equal(cut, np.trunc(value[code_of(fits)]).astype(cut.dtype))


@fast_args
def as_other_types(x, truth, stored, copied, wide, pairs, whole, of_truth):
    for i in range(x.size):
        truth[i] = 1 if x[i] else 0
        stored[i] = x[i]
        wide[i] = x[i]
        pairs[i] = complex(x[i])
        whole[i] = int(x[i]) if abs(x[i]) < 2.0**62 else 0
        of_truth[i] = stored[i]
    copied[:] = x.astype(np.bool_)


@of_one
def test_bools_floats_and_complex_numbers_of_elements(form):
    value, count = numbers(form), 1 << form.bits
    *truths, wide, pairs, whole = (np.zeros(count, dtype) for dtype in ("?", "?", "?", "f8", "c16", "i8"))
    of_truth, is_true = array(form, np.zeros(count)), value.astype(bool)  # minus zero is False, NaN is True
    as_other_types(array(form, codes(form)), *truths, wide, pairs, whole, of_truth)
    assert all(np.array_equal(truth, is_true) for truth in truths)
    assert equal(wide, value) and np.array_equal(pairs.real, value, equal_nan=True) and not pairs.imag.any()
    assert np.array_equal(whole, np.trunc(np.where(np.abs(value) < 2**62, value, 0)).astype(np.int64))
    same(form, code_of(of_truth), nearest(form, is_true.astype(float)))


# ---- operators -----------------------------------------------------------------------------------------------------
COMPARED = [operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]
OPERATORS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"}
COMPUTED = (
    *(("x", f"{operation.__name__}[i] = x[i] {sign} y[i]") for operation, sign in OPERATORS.items()),
    ("x", "fused[i] = x[i] * y[i] + z[i]"),
    *(("x", f"out[i] |= (x[i] {sign} y[i]) << {bit}") for bit, sign in enumerate(["<", "<=", "==", "!=", ">=", ">"])),
)
compute = functools.partial(kernel_of, "x, y, z, add, sub, mul, truediv, fused, out", COMPUTED)


@by_way((BFLOAT16, "vectorised"), (BFLOAT16, "fastmath"), (FLOAT8, "vectorised"))
def test_operators(form, way):
    """Of all pairs of 8 bits; of 16 bits, half are any numbers, half near each other, so that sums are rounded."""
    random, count = np.random.default_rng(6), 200_000
    if form.bits == 8:
        x, y = (each.ravel() for each in np.meshgrid(codes(form), codes(form)))
    else:
        x, y = (random.integers(0, 1 << form.bits, count).astype(form.word) for _ in "xy")
        y[::2] = x[::2] + random.integers(-(3 << form.fraction), 3 << form.fraction, count // 2).astype(form.word)
    z = random.permutation(x)
    outs, compared = [array(form, np.zeros(len(x))) for _ in range(5)], np.zeros(len(x), np.int64)
    compute(way)(*(array(form, code) for code in (x, y, z)), *outs, compared)
    wide = [numbers(form)[code] for code in (x, y, z)]
    a, b, c = (each.astype(np.float32) for each in wide)
    *results, fused = map(code_of, outs)
    for function, got in zip(OPERATORS, results, strict=True):
        with quiet():
            single = function(a, b)
            want = nearest(form, single)
        if way != "fastmath":
            same(form, got, want)
            if form.bits == 16 and torch is not None:
                same(form, got, code_of(function(halves.tensor(form, x), halves.tensor(form, y))))
        elif function is not operator.truediv:  # of which a reciprocal may be taken
            keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(single)
            got, want = (np.where(numbers(form)[code] == 0, 0, code) for code in (got, want))  # signs of zeros may differ
            same(form, got[keep], want[keep])
    with quiet():  # two operations of float32 and one rounding; with fastmath they may be one operation
        single = a * b + c
        want, as_one = nearest(form, single), nearest(form, (wide[0] * wide[1] + wide[2]).astype(np.float32))
        known = np.isfinite(single) & np.isfinite(a * b) & (numbers(form)[want] != 0)
    if way == "fastmath":
        assert ((fused == want) | (fused == as_one))[known].all()
    else:
        same(form, fused, want)
        assert np.array_equal(compared, sum(sign(a, b).astype(np.int64) << bit for bit, sign in enumerate(COMPARED)))


# ---- functions -----------------------------------------------------------------------------------------------------
SOME = math.sqrt, math.floor, math.isnan, np.exp, np.sign, abs, operator.neg, float, math.atan2, max, np.fmod, operator.pow
OTHERS = abs, max, min, float, np.float32, operator.neg, operator.pos, operator.mod, operator.pow, operator.floordiv


@functools.cache
def arity(function):
    """How many float32 Numba's function takes, of one or two; 0: another number."""
    for count in (1, 2):
        try:
            found = cpu_target.typing_context.resolve_function_type(function, (numba.float32,) * count, {})
        except Exception:
            continue
        if isinstance(getattr(found, "return_type", None), (numba.types.Number, numba.types.Boolean)):
            return count
    return 0


@functools.cache
def calling(chosen):
    """A kernel that writes each function, of each element or of each pair, into a row."""
    functions, lines = {}, []
    for row, function in enumerate(chosen):
        functions[f"f{row}"] = function
        call = f"f{row}(x[i])" if arity(function) == 1 else f"f{row}(x[i], y[i])"
        makes_integer = function in (math.ceil, math.floor, math.trunc)
        lines.append(f"  out[{row}, i] = {call}" + " if abs(x[i]) < 2.0**62 else 0.0" * makes_integer)
    exec("\n".join(["def kernel(x, y, out):", " for i in range(x.size):", *lines]), functions)
    return fast_args(numba.njit(error_model="numpy")(functions["kernel"]))


def check_functions(form, chosen):
    """Of every code, and of as many pairs."""
    x, kernel = codes(form), calling(chosen)
    y = np.random.default_rng(8).permutation(x)
    got, want = np.zeros((2, len(chosen), len(x)))
    wide = halves.wide_bits(form).view(np.float32)
    with quiet():
        kernel(array(form, x), array(form, y), got)
        kernel(wide[x], wide[y], want)
    for function, ours, theirs in zip(chosen, got, want, strict=True):
        assert equal(ours, theirs), function


def test_some_functions_are_those_of_float32():
    check_functions(BFLOAT16, SOME)


@pytest.mark.slow
@of_one
@pytest.mark.parametrize("module", [math, np], ids=["math", "numpy"])
def test_functions_are_those_of_float32(form, module):
    cpu_target.typing_context.refresh()
    functions = [each for each in vars(module).values() if callable(each) and (module is math or isinstance(each, np.ufunc))]
    chosen = tuple(each for each in dict.fromkeys([*functions, *OTHERS]) if arity(each))
    assert len(chosen) > 40
    check_functions(form, chosen)


# ---- promotion -----------------------------------------------------------------------------------------------------
PROMOTED = {
    "?": "f4", "i1": "f4", "u1": "f4", "i2": "f4", "u2": "f4", "i4": "f8", "u4": "f8", "i8": "f8", "u8": "f8", "f4": "f4",
    "f8": "f8", "c8": "c8", "c16": "c16",
}  # fmt: skip
"""By the other operand: the type of the result. It is NumPy's, of float32 and that operand."""


def type_of_product(*operands):
    cpu_target.typing_context.refresh()
    return cpu_target.typing_context.resolve_function_type(operator.mul, operands, {}).return_type


@of_each
def test_promotion(form):
    half = TYPES[form.name]
    for other, promoted in PROMOTED.items():
        kind, want = (numba.from_dtype(np.dtype(each)) for each in (other, promoted))
        assert np.result_type("f4", other) == promoted and np.result_type("f4", str(computed_as(kind))) == promoted
        for operands in ((half, kind), (kind, half)):
            assert type_of_product(*operands) == want
            assert type_of_product(*(each[::1] for each in operands)) == want[::1]
    assert {type_of_product(half, other) for other in TYPES.values()} == {numba.float32}


def test_promotion_of_what_kernels_return():
    def products(x, small, large, pair):
        made = x * small, large * x, x * pair, x * x
        return *made, np.array([2 * x[0]]), np.array([2.0 * x[0]]), np.array([large[0] * x[0]])

    others = [np.ones(2, dtype) for dtype in ("i2", "i8", "c8")]
    found = fast_args(products)(array(BFLOAT16, [0x3FC0] * 2), *others)
    assert [each.dtype for each in found] == ["f4", "f8", "c8", "f4", "f4", "f8", "f8"]  # Numba's float literals are float64
    assert [each[0] for each in found] == [1.5, 1.5, 1.5, 2.25, 3.0, 3.0, 1.5]


# ---- other processors, and versions of NumPy -----------------------------------------------------------------------
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


@pytest.mark.nightly
def test_a_processor_without_f16c():
    """float16 is converted in integers there."""
    run_python("""
        import pytest
        from fastexchange.ground.numba_internals import converts_float16
        from numba.core.registry import cpu_target
        assert not converts_float16(cpu_target.target_context)
        tests = "float16 and (read_as_its_number or a_store_rounds or float64_is or test_operators)"
        raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "", "tests/half/test_half.py", "-k", tests]))
    """, seconds=FOR_TESTS, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
