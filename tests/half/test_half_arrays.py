"""Arrays of bfloat16, float16 and float8 in kernels: from every framework, what Numba can do with them, results, and refusals."""

import math
import operator

import numba
import numpy as np
import pytest
from frameworks import paddle, tvm_ffi
from halves import BY_NAME, CALLS, FORMS, MOST_OF_ONE, array, code_of, codes, nearest, numbers, same, tensor
from interoperability import jax, ml_dtypes
from interpreter import run_python
from made_producers import Dunder, Tabled
from numba import types
from numba.core.errors import TypingError
from ways import WAYS, total

torch = pytest.importorskip("torch")
if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half  # noqa: E402
from fastexchange import convert, explain, fast_args, from_dlpack  # noqa: E402
from fastexchange.calls import kernel_cache  # noqa: E402

of_each = pytest.mark.parametrize("form", FORMS, ids=str)
some_forms = pytest.mark.parametrize("form", MOST_OF_ONE, ids=str)
BFLOAT16 = BY_NAME["bfloat16"]


def ones(form, *values):
    """An array of these numbers, or of 1, 2, 3."""
    return array(form, nearest(form, np.array(values or (1.0, 2.0, 3.0))))


MAKERS = {
    "numpy": lambda form: ones(form),
    "torch": lambda form: torch.tensor([1.0, 2.0, 3.0]).to(form.torch),
    "jax": lambda form: jax.numpy.array([1.0, 2.0, 3.0], form.dtype),
    "tvm_ffi": lambda form: convert(ones(form), tvm_ffi.Tensor),
    "paddle": lambda form: paddle.to_tensor([1.0, 2.0, 3.0]).astype(form.name),
    "only __dlpack__": lambda form: Dunder(code_of(ones(form)), code=form.dlpack[0]),
    "exchange table": lambda form: Tabled(code_of(ones(form)), code=form.dlpack[0]),
}
NEEDED = {"jax": jax, "tvm_ffi": tvm_ffi, "paddle": paddle}
of_each_framework = pytest.mark.parametrize("framework", [name for name in MAKERS if NEEDED.get(name, name) is not None])


def make(framework, form):
    """A tensor of 1, 2, 3."""
    if framework == "paddle" and form.name not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        pytest.skip("paddle has no such tensors")
    return MAKERS[framework](form)


# ---- from every framework ------------------------------------------------------------------------------------------


@of_each_framework
@of_each
def test_a_kernel_computes_with_tensors_of_every_framework(framework, form):
    x = make(framework, form)
    kernel = fast_args(total)
    assert [kernel(x) for _ in range(CALLS)] == [6.0] * CALLS and type(kernel(x)) is float
    assert [str(signature[0].dtype) for signature in kernel.signatures] == [form.name]
    assert "refused" not in str(kernel.explain(x)) and "storage" not in str(kernel.explain(x))
    assert not [reason for reason in explain(x).reasons if "compute" in reason or "storage" in reason]


@of_each_framework
@pytest.mark.parametrize("form", [FORMS[0], pytest.param(FORMS[3], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_on_every_path_numbers_or_bits(framework, form, way):
    function, call = WAYS[way]
    x, bits = make(framework, form), int(nearest(form, np.array([1.0, 2.0, 3.0])).astype(int).sum())
    for options in ({}, {"nogil": True}):
        kernel, asking = fast_args(function, **options), fast_args(function, storage=True, **options)
        for _ in range(CALLS):
            assert (call(kernel, x), call(asking, x)) == (6.0, bits)


@of_each
def test_kernels_of_one_dispatcher_share_no_answer(form):
    dispatcher, x = numba.njit(total), tensor(form, nearest(form, np.array([1.0, 2.0])))
    for first in (True, False):
        kernels = {storage: fast_args(dispatcher, storage=storage) for storage in (False, True)}
        for storage in (first, not first):
            want = int(code_of(x).astype(int).sum()) if storage else 3.0
            assert [kernels[storage](x) for _ in range(CALLS)] == [want] * CALLS


@pytest.mark.slow
def test_without_ml_dtypes():
    """PyTorch's tensors need none: not as arguments, nor as results."""
    run_python(WITHOUT_ML_DTYPES)


WITHOUT_ML_DTYPES = """
    import sys
    sys.modules["ml_dtypes"] = None  # whatever is installed
    import numba, numpy as np, torch
    import fastexchange.half as half
    from fastexchange import fast_args

    def fill(x, y):
        for i in range(x.size):
            y[i] = 3 * x[i]

    @numba.njit
    def twice_njit(x, text):
        return 2 * x[0], x, x[1:], x.copy(), np.full(2, 1.5, half.bfloat16), np.empty_like(x).size

    def twice(x, text):
        return 2 * x[0], x, x[1:], x.copy(), np.full(2, 1.5, half.bfloat16), np.empty_like(x).size

    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        dtype = getattr(torch, name)
        x = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
        for kernel, arguments in ((fast_args(lambda x: twice_njit(x, 0)), (x,)), (fast_args(twice), (x, ""))):
            for _ in range(40):
                number, same, tail, copied, made, size = kernel(*arguments)
                assert number == 2.0 and same is x and size == 3
                assert tail.dtype == dtype and tail.data_ptr() == x[1:].data_ptr() and tail.float().tolist() == [2.0, 3.0]
                assert copied.dtype == dtype and copied.float().tolist() == [1.0, 2.0, 3.0]
                assert made.dtype == torch.bfloat16 and made.float().tolist() == [1.5, 1.5]
        out = fast_args(out=f"x[n] -> y[n]: {name}")(fill)(torch.ones(3))
        assert out.dtype == dtype and out.float().tolist() == [3.0, 3.0, 3.0]
        assert fast_args(lambda x: x[0], storage=True)(x) > 50
    def alike(x):
        y = np.empty(x.size, x.dtype)
        for i in numba.prange(x.size):
            y[i] = 2 * x[i]
        return y

    x = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal(fast_args(alike, parallel=True)(x), 2 * x)
    for function in (lambda x: x[0] << 1, lambda x: x.nothing, lambda pair: pair[0].nothing):
        try:
            fast_args(function)((x, 1) if "pair" in function.__code__.co_varnames else x)
        except numba.TypingError as error:
            line = str(error).splitlines()[0]
            assert "compile bfloat16 << int64 for" in line or "compile array(bfloat16, 1d, C).nothing for" in line, error
        else:
            raise AssertionError("compiled")
    try:
        fast_args(lambda x: np.ones(2, half.bfloat16))(np.ones(2))
    except BufferError as error:
        assert "ml_dtypes" in str(error), error
    else:
        raise AssertionError("not refused")
"""


# ---- scalars -------------------------------------------------------------------------------------------------------


def echo(x):
    return x


@of_each
def test_scalars_are_taken_and_become_floats(form):
    kernel, twice = fast_args(echo), fast_args(lambda x: x + x)
    scalar = form.dtype.type(1.5)
    for _ in range(CALLS):
        assert (type(kernel(scalar)), kernel(scalar), twice(scalar)) == (float, 1.5, 3.0)
    assert [str(signature[0]) for signature in kernel.signatures] == [form.name]
    for code in codes(form)[:: max(1, 1 << form.bits - 8)]:
        scalar = array(form, [code])[0]
        got = kernel(scalar)
        assert got == numbers(form)[code] or (math.isnan(got) and math.isnan(numbers(form)[code]))


def test_pythons_numbers_keep_their_types():
    kernel = fast_args(lambda a, x: a)
    x = ones(BFLOAT16)
    assert kernel(1.1, x) == 1.1 and kernel(2**53 + 1, x) == 2**53 + 1 and kernel(np.float32(1.1), x) == np.float32(1.1)
    assert [signature[0] for signature in kernel.signatures] == [types.float64, types.int64, types.float32]


@of_each
def test_a_type_rounds_in_python_and_in_kernels(form):
    kind = getattr(half, form.name)
    kernel = fast_args(lambda x: kind(x))
    with np.errstate(all="ignore"):
        for value in (1.1, -0.3, 0.0, -0.0, 1e9, math.inf, -math.inf, math.nan, 5e-324, 3, True):
            want = float(numbers(form)[nearest(form, np.array(np.float32(value)))])
            for got in (kind(value), kernel(value)):
                assert type(got) is float
                assert (got == want and math.copysign(1, got) == math.copysign(1, want)) or (math.isnan(got) and math.isnan(want))


CONSTANT = half.bfloat16(3.14159)
TABLE = np.array([1.5, 2.5], ml_dtypes.bfloat16)
HALVES = np.array([1.5, 2.5], np.float16)


def test_constants():
    assert fast_args(lambda x: x[0] * CONSTANT)(ones(BFLOAT16)) == 3.140625
    assert fast_args(lambda x: x[0] * HALVES[1])(ones(BFLOAT16)) == 2.5


LARGE = np.full(600_000, 2.5, ml_dtypes.bfloat16)  # so large that Numba does not copy it


def test_constant_arrays_of_ml_dtypes():
    assert fast_args(lambda x: x[0] * TABLE[1])(ones(BFLOAT16)) == 2.5
    assert fast_args(lambda x: x[0] * TABLE[::-1][0] * TABLE.size)(ones(BFLOAT16)) == 5.0
    assert fast_args(lambda x: x[0] * LARGE[599_999])(ones(BFLOAT16)) == 2.5
    kernel = fast_args(lambda: (TABLE, LARGE))
    for _ in range(CALLS):
        small, large = kernel()
        assert small.dtype == large.dtype == ml_dtypes.bfloat16 and small.tolist() == TABLE.tolist()
        assert large[599_999] == 2.5 and np.shares_memory(large, LARGE)


# ---- what a kernel can do with an array ----------------------------------------------------------------------------


def _unify(x):
    y = x[0, 1]
    if x[0, 2] > 1:
        y = 7
    return y


OPERATIONS = {
    "slice": (lambda x: x[1:, ::2], [[3, 5]]),
    "transposed": (lambda x: x.T, [[0, 3], [1, 4], [2, 5]]),
    "copy": (lambda x: x.copy(), [[0, 1, 2], [3, 4, 5]]),
    "reshape": (lambda x: x.reshape(6), [0, 1, 2, 3, 4, 5]),
    "ravel": (lambda x: x.ravel(), [0, 1, 2, 3, 4, 5]),
    "sort": (lambda x: np.sort(x[::-1].ravel()), [0, 1, 2, 3, 4, 5]),
    "concatenate": (lambda x: np.concatenate((x, x)), [[0, 1, 2], [3, 4, 5]] * 2),
    "where": (lambda x: np.where(x > 3, x, x[::-1]), [[3, 4, 5], [0, 4, 5]]),
    "zeros_like": (lambda x: np.zeros_like(x), [[0, 0, 0], [0, 0, 0]]),
    "full_like": (lambda x: np.full_like(x, 2), [[2, 2, 2]] * 2),
    "zeros of its dtype": (lambda x: np.zeros(2, x.dtype), [0, 0]),
    "ones of its dtype": (lambda x: np.ones(2, x.dtype), [1, 1]),
    "full of its dtype": (lambda x: np.full(2, 1.5, x.dtype), [1.5, 1.5]),
    "astype itself": (lambda x: x.astype(np.float32).astype(x.dtype), [[0, 1, 2], [3, 4, 5]]),
    "boolean index": (lambda x: x[0][x[0] > 0], [1, 2]),
    "fancy index": (lambda x: x[np.array([1, 0])], [[3, 4, 5], [0, 1, 2]]),
}  # fmt: skip
"""Results of the array's dtype."""
WIDE = {
    "astype": (lambda x: x.astype(np.float32), "f4"), "astype float64": (lambda x: x.astype(np.float64), "f8"),
    "times 2": (lambda x: 2 * x, "f4"), "plus itself": (lambda x: x + x, "f4"), "minus": (lambda x: -x, "f4"),
    "compared": (lambda x: x > 2, "?"), "sqrt": (lambda x: np.sqrt(x), "f4"), "with float64": (lambda x: x * np.ones(3), "f8"),
    "isnan": (lambda x: np.isnan(x), "?"), "sum of axis 0": (lambda x: x.sum(axis=0), "f4"),
    "cumsum": (lambda x: x.cumsum(), "f4"), "outer": (lambda x: np.outer(x[0], x[1]), "f4"), "exp": (lambda x: np.exp(x), "f4"),
    "dot": (lambda x: np.dot(x, x.T), "f4"),
}  # fmt: skip
"""Results as NumPy has them of float32."""
SCALAR = {
    "sum": (lambda x: x.sum(), 15),
    "np.sum": (lambda x: np.sum(x), 15),
    "max": (lambda x: x.max(), 5),
    "min": (lambda x: x.min(), 0),
    "mean": (lambda x: x.mean(), 2.5),
    "prod": (lambda x: x[1:].prod(), 60),
    "argmax": (lambda x: x.argmax(), 5),
    "var": (lambda x: x.var(), 35 / 12),
    "median": (lambda x: np.median(x), 2.5),
    "sum of a view": (lambda x: x[:, ::2].sum(), 10),
    "max of a view": (lambda x: x.T[1:].max(), 5),
    "np.float32": (lambda x: np.float32(x[0, 1]), 1),
    "abs": (lambda x: abs(-x[0, 1]), 1),
    "min of elements": (lambda x: min(x[0, 1], x[1, 1]), 1),
    "max with a number": (lambda x: max(x[0, 1], 2), 2),
    "round": (lambda x: round(x[0, 1] * 1.26, 1), 1.3),
    "round to a whole": (lambda x: round(x[0, 1] + 0.7), 2),
    "unified": (_unify, 7),
    "int": (lambda x: int(x[1, 2]), 5),
    "float": (lambda x: float(x[1, 2]), 5),
    "remainder": (lambda x: x[1, 2] % 3, 2),
    "floor division": (lambda x: x[1, 2] // 2, 2),
    "power": (lambda x: x[0, 2] ** 2, 4),
    "isnan": (lambda x: math.isnan(x[0, 1]), False),
    "conditional": (lambda x: 1 if x[0, 1] else 0, 1),
    "not": (lambda x: not x[0, 0], True),
    "and": (lambda x: x[0, 1] and x[0, 2], 2),
    "comparison of a chain": (lambda x: x[0, 0] < x[0, 1] < x[0, 2], True),
    "flat": (lambda x: sum(list(x.flat)), 15),
    "iteration": (lambda x: sum([v for row in x for v in row]), 15),
    "zip": (lambda x: sum([a * b for a, b in zip(x[0], x[1])]), 14),  # noqa: B905 (Numba has no strict)
    "enumerate": (lambda x: sum([i * v for i, v in enumerate(x[0])]), 5),
    "itemsize": (lambda x: x.itemsize * 1000 // x.nbytes, 166),
    "divmod": (lambda x: divmod(x[1, 2], 2)[1], 1),
    "complex": (lambda x: (x[0, 1] * 1j).imag, 1),
    "any": (lambda x: np.any(x > 4), True),
}  # fmt: skip


def small(form, framework="numpy"):
    code = nearest(form, np.arange(6.0)).reshape(2, 3)
    return array(form, code) if framework == "numpy" else tensor(form, code)


@some_forms
@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_of_the_same_elements(form, name):
    function, want = OPERATIONS[name]
    kernel = fast_args(function)
    got = kernel(small(form))
    assert got.dtype == form.dtype and got.astype(float).tolist() == want
    got = kernel(small(form, "torch"))
    assert got.dtype == form.torch and got.float().tolist() == want


@some_forms
@pytest.mark.parametrize("name", WIDE)
def test_arrays_of_what_numpy_promotes_to(form, name):
    function, dtype = WIDE[name]
    got = fast_args(function)(small(form))
    with np.errstate(all="ignore"):
        want = function(small(form).astype(np.float32))
    assert got.dtype == dtype and np.allclose(got, want, equal_nan=True, rtol=1e-6)


@some_forms
@pytest.mark.parametrize("name", SCALAR)
def test_numbers_of_arrays(form, name):
    function, want = SCALAR[name]
    got = fast_args(function)(small(form))
    assert got == pytest.approx(want, rel=1e-6) and type(got) is type(numba.njit(function)(small(form).astype(np.float32)))


def assigned(a, x, b, y):
    y[:] = a * x + b


def in_place(x):
    x += 1
    x *= 2
    np.add(x, x, x)
    x[0] -= 1
    x[1:] /= 2


@some_forms
def test_whole_array_arithmetic(form):
    x, y = small(form), small(form) * 0
    fast_args(assigned)(2, x, np.float32(0), y)
    assert y.astype(float).tolist() == [[0, 2, 4], [6, 8, 10]]
    x = ones(form)
    fast_args(in_place)(x)
    assert x.astype(float).tolist() == [7, 6, 8]


IN_PLACE = {
    "+=": lambda x: operator.iadd(x, 2), "-=": lambda x: operator.isub(x, 2), "*=": lambda x: operator.imul(x, 2),
    "/=": lambda x: operator.itruediv(x, 2), "//=": lambda x: operator.ifloordiv(x, 2), "**=": lambda x: operator.ipow(x, 2),
    "np.subtract": lambda x: np.subtract(x, 2, x), "np.multiply": lambda x: np.multiply(x, x, x),
    "np.sqrt": lambda x: np.sqrt(x, x),
    "np.negative": lambda x: np.negative(x, x), "np.maximum": lambda x: np.maximum(x, 2, x),
}  # fmt: skip


@some_forms
def test_each_operation_in_place_is_its_own(form):
    """All in one process: Numba once took each for the first that was compiled."""
    for name, function in IN_PLACE.items():
        x, wide = ones(form), ones(form).astype(np.float32)
        kernel = numba.njit(function)
        kernel(x)
        function(wide)
        assert np.array_equal(code_of(x), nearest(form, wide)), name


def reductions(x):
    return x.sum(), x.max(), x.min(), x.mean()


@some_forms
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_reductions(form, count):
    """Sums are of float32 side by side: of few bits here, so they are exact. NaN as in NumPy."""
    whole = np.random.default_rng(9).integers(0, 4, count).astype(float)
    kernel = fast_args(reductions)
    for view in (array(form, nearest(form, whole)), array(form, nearest(form, np.repeat(whole, 2)))[::2]):
        assert kernel(view) == (whole.sum(), whole.max(), whole.min(), np.float32(whole.mean()))
    whole[count // 2] = math.nan
    found = kernel(array(form, nearest(form, whole)))
    assert all(map(math.isnan, found))


@some_forms
def test_reductions_of_nothing(form):
    empty = array(form, [])
    assert fast_args(lambda x: x.sum())(empty) == 0.0
    for function in (lambda x: x.max(), lambda x: x.min()):
        with pytest.raises(ValueError, match="zero-size array"):
            fast_args(function)(empty)


# ---- tuples, lists, records ----------------------------------------------------------------------------------------


def test_tuples_and_lists():
    x = ones(BFLOAT16)
    assert fast_args(lambda x: (x[0], (x[1], 1)))(x) == (1.0, (2.0, 1))
    assert fast_args(lambda x: [x[0], x[1]])(x) == [1.0, 2.0]
    first, (second, number) = fast_args(lambda pair: (pair[0][1:], (pair[1], 2)))((x, tensor(BFLOAT16, code_of(x))))
    assert type(first) is type(x) and isinstance(second, torch.Tensor) and number == 2


@pytest.mark.parametrize("field", ["f2", ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_records(field):
    x = np.array([(1.5, 2), (2.5, 3)], [("a", field), ("b", "i4")])
    assert fast_args(lambda x: x[1].a * x[1].b)(x) == 7.5

    def write(x):
        x[0].a = 3.14159

    fast_args(write)(x)
    assert float(x["a"][0]) == float(np.array(3.14159, field))


# ---- results -------------------------------------------------------------------------------------------------------


@of_each
@pytest.mark.parametrize("framework", ["numpy", "torch", "tvm_ffi", "jax"])
def test_results_are_the_callers_tensors(form, framework):
    if NEEDED.get(framework, framework) is None:
        pytest.skip("not installed")
    x = make(framework, form)
    kernel = fast_args(lambda x: (x, x[1:], x.copy(), x[0]))
    for _ in range(CALLS):
        same_one, tail, copied, number = kernel(x)
        assert same_one is x and type(tail) is type(copied) is type(x) and number == 1.0 and type(number) is float
        for got, want in ((tail, [2.0, 3.0]), (copied, [1.0, 2.0, 3.0])):
            view = from_dlpack(got)
            assert view.dtype == form.dtype and view.astype(float).tolist() == want
    if framework != "jax":  # which copies what is not aligned
        assert from_dlpack(tail).ctypes.data == from_dlpack(x).ctypes.data + form.bits // 8


@some_forms
def test_declared_outputs(form):
    def scaled(x, y):
        for i in range(x.size):
            y[i] = 1.1 * x[i]

    want = numbers(form)[nearest(form, np.float32(1.1) * np.ones(3))].tolist()
    kernel = fast_args(out=f"x[n] -> y[n]: {form.name}")(scaled)
    for x in (np.ones(3), torch.ones(3), tensor(form, nearest(form, np.ones(3)))):
        for _ in range(CALLS):
            y = kernel(x)
            assert type(y) is type(x) and y.dtype == (form.dtype if type(x) is np.ndarray else form.torch)
            assert (y.astype(float) if type(x) is np.ndarray else y.float()).tolist() == want
    same_type = fast_args(out="x[n] -> y[n]")(scaled)
    assert same_type(torch.ones(3).to(form.torch)).dtype == form.torch and same_type(ones(form)).dtype == form.dtype


def test_a_view_of_other_elements_has_those():
    """``x.view(np.uint16)`` is an array of integers also where it shows an argument's memory."""
    for x in (ones(BFLOAT16), tensor(BFLOAT16, nearest(BFLOAT16, np.array([1.0, 2.0, 3.0])))):
        kernel = fast_args(lambda x: (x.view(np.uint16), x[1:], x))
        for _ in range(CALLS):
            got, part, same_one = kernel(x)
            assert str(got.dtype).endswith("uint16") and got.tolist() == [0x3F80, 0x4000, 0x4040]
            assert part.dtype == x.dtype and part.tolist() == [2.0, 3.0] and same_one is x


# ---- options -------------------------------------------------------------------------------------------------------


def axpy(a, x, y):
    for i in numba.prange(x.size):
        y[i] = a * x[i] + y[i]


@some_forms
@pytest.mark.parametrize(
    "options", [{"fastmath": True}, {"boundscheck": True}, {"nogil": True}, {"parallel": True}, {"error_model": "numpy"}], ids=str
)
def test_options(form, options):
    kernel = fast_args(numba.njit(**options)(axpy))
    code = nearest(form, np.random.default_rng(10).integers(0, 4, 1000).astype(float))
    x, y = tensor(form, code), tensor(form, code[::-1].copy())
    want = nearest(form, 2 * numbers(form)[code] + numbers(form)[code[::-1]])
    kernel(2, x, y)
    same(form, code_of(y), want)


def sums(x):
    return x.sum(), np.mean(x), x.max(), np.min(x), x.std(), x.argmax()


@pytest.mark.parametrize("count", [1, 63, 16384, 50_001])
def test_reductions_in_parallel(count):
    """Loops of several threads: Numba's own would add one number after the other, and know no maximum."""
    values = np.random.default_rng(11).normal(size=count)
    x = tensor(BFLOAT16, nearest(BFLOAT16, values))
    parallel, plain = fast_args(sums, parallel=True), fast_args(sums)
    assert parallel(x) == pytest.approx(plain(x), rel=1e-5, abs=1e-6)
    for reshaped in (x.view(-1, 1), x.view(1, -1).T, x[::2]):
        assert parallel(reshaped) == pytest.approx(plain(reshaped), rel=1e-5, abs=1e-6)
    x[count // 2] = math.nan
    assert all(map(math.isnan, parallel(x)[:4]))


def test_reductions_in_parallel_do_not_depend_on_the_number_of_threads():
    x = tensor(BFLOAT16, nearest(BFLOAT16, np.random.default_rng(12).normal(size=100_000)))
    kernel = fast_args(lambda x: x.sum(), parallel=True)
    found = set()
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        numba.set_num_threads(threads)
        found.add(kernel(x))
    assert len(found) == 1


def test_parallel_kernels():
    """What Numba's parallel passes make of arrays: loops over whole arrays, ``x.dtype``, sums of threads, nothing of nothing."""

    def made(x):
        y, total = np.empty(x.size, x.dtype), np.float32(0)
        for i in numba.prange(x.size):
            y[i] = 2 * x[i]
            total += x[i]
        z = np.zeros_like(x)
        z[:] = x * x + 1
        return y, total, z, np.dot(x, x), np.ones_like(x).sum(), np.exp(x[:1])

    x = tensor(BFLOAT16, nearest(BFLOAT16, np.arange(8.0)))
    y, total, z, dot, ones_, exponential = fast_args(made, parallel=True)(x)
    assert y.dtype == z.dtype == x.dtype and y.tolist() == (2 * x).tolist() and z.tolist() == (x * x + 1).tolist()
    assert (total, dot, ones_, exponential.tolist()) == (28, 140, 8, [1.0])
    with pytest.raises(ValueError, match="zero-size array"):
        fast_args(lambda x: x.max(), parallel=True)(x[:0])
    plain = fast_args(sums, parallel=True)(np.arange(5.0))  # Numba's own loops
    assert plain[:4] == (10, 2, 4, 0)


def masked(x):
    y = np.zeros(x.shape, x.dtype)
    y[x > 0] = x[x > 0]
    return y


def subtracted(x):
    x = x.copy()
    x -= x[1]
    return x


def counted(x):
    found = set()
    for each in x:
        found.add(each)
    return len(found)


vectorised = numba.vectorize(lambda a, b: a * b + 1)
AS_WIDE = {
    "element * array": lambda x: x[0] * x, "array > element": lambda x: x > x[0], "array -= element": subtracted,
    "np.maximum of an element": lambda x: np.maximum(x, x[0]), "element + complex": lambda x: x[0] + np.ones(4, np.complex64),
    "np.where": lambda x: np.where(x > 0, x, x), "np.where with an int": lambda x: np.where(x > 0, x, 0),
    "np.round": lambda x: np.round(x), "np.round of an element": lambda x: np.round(x[1]), "np.around": lambda x: np.around(x, 1),
    "max of a tuple": lambda x: max((x[0], x[1])), "tuples are equal": lambda x: (x[0], 1) == (x[0], 1),
    "a tuple is less": lambda x: (x[0], 1) < (x[1], 2), "lists are equal": lambda x: [x[0]] == [x[0]], "a set": counted,
    "is": lambda x: x[0] is x[0], "in": lambda x: 3.0 in x, "np.divmod": lambda x: np.divmod(x, x + 5),
    "max of all": lambda x: max(x),
    "np.array": lambda x: np.array([x[0], x[1]]), "masked": masked, "mean of nothing": lambda x: np.isnan(x[:0].mean()),
    "no dimension": lambda x: x.reshape(2, 2).sum() + np.exp(np.asarray(x[2])), "vectorize": lambda x: vectorised(x, x),
    "vectorize of elements": lambda x: vectorised(x[0], x[1]), "np.unique": lambda x: np.unique(x),
}  # fmt: skip


def _plain(result):
    if isinstance(result, tuple):
        return tuple(map(_plain, result))
    return result.tolist() if hasattr(result, "tolist") else result


@pytest.mark.parametrize("name", AS_WIDE)
@pytest.mark.parametrize("is_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPerformanceWarning")
def test_functions_do_what_they_do_with_float32(name, is_parallel):
    function = AS_WIDE[name]
    x = tensor(BFLOAT16, nearest(BFLOAT16, np.array([3.0, -1.5, 0.0, 2.25])))
    want = _plain(fast_args(function)(x.float()))
    assert _plain(fast_args(function, parallel=is_parallel)(x)) == want


def test_arrays_of_no_dimension():
    x = tensor(BFLOAT16, nearest(BFLOAT16, np.array([2.5])))[0]

    def made(x, y):
        y += 1
        return x + 1, x * x, np.negative(x), x > 1, x.sum()

    y = x.clone()
    assert _plain(fast_args(made)(x, y)) == (3.5, 6.25, -2.5, True, 2.5) and y == 3.5


def test_boundscheck_raises():
    with pytest.raises(IndexError):
        fast_args(lambda x, i: x[i], boundscheck=True)(ones(BFLOAT16), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_second_process_compiles_nothing(tmp_path, name):
    module = tmp_path / "cached_half.py"
    module.write_text(
        "import torch\nimport fastexchange.half as half\nfrom fastexchange import fast_args\n\n"
        "@fast_args(cache=True)\ndef twice(x):\n    return 2 * half.bfloat16(x[0]), x.copy()\n"
        f"\nx = torch.ones(3).to(torch.{name})\nfor _ in range(40):\n    number, copied = twice(x)\n"
        f"assert number == 2.0 and copied.dtype == torch.{name}\nstats = twice.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    said = [run_python("import cached_half", **environment).stdout.split() for _ in range(2)]
    assert said == [["0", "1"], ["1", "0"]]


def test_a_cached_kernel_is_compiled_anew_when_a_conversion_changes(tmp_path, monkeypatch):
    """Its code has the conversions in it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kept = kernel_cache.source_stamp
    hits = []
    for changed in ("", "", "changed"):
        stamp = lambda module, changed=changed: kept(module) + changed * module.endswith("half.known")  # noqa: E731
        monkeypatch.setattr(kernel_cache, "source_stamp", stamp)
        kernel = fast_args(total, cache=True)
        assert kernel(ones(BFLOAT16)) == 6.0
        hits.append(sum(kernel.stats.cache_hits.values()))
    assert hits == [0, 1, 0]


# ---- plain Numba ---------------------------------------------------------------------------------------------------


@of_each
def test_plain_njit(form):
    @numba.njit
    def twice(x):
        for i in range(x.size):
            x[i] = 2 * x[i]
        return x, x[0], x.copy()

    x = ones(form)
    same_one, number, copied = twice(x)
    assert same_one is x and number == 2.0 and type(number) is float and copied.dtype == form.dtype
    assert x.astype(float).tolist() == [2, 4, 6] and numba.typeof(x).dtype == getattr(half, form.name)
    assert numba.njit(lambda a: a + 1)(form.dtype.type(1.5)) == 2.5
    assert numba.njit(lambda: np.full(2, 1.5, half.bfloat16))().dtype == ml_dtypes.bfloat16


@pytest.mark.slow
def test_plain_njit_in_a_fresh_process():
    run_python(
        """
        import numba, numpy as np
        try:
            numba.njit(lambda x: x[0])(np.ones(2, np.float16))
        except NotImplementedError:
            pass
        else:
            raise AssertionError("Numba has learned float16")
        import fastexchange.half, ml_dtypes
        for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
            assert numba.njit(lambda x: x[0] + x[1])(np.ones(2, dtype)) == 2.0
        """
    )


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_declared_signatures(name):
    kind = getattr(half, name)
    for signature in (types.float32(kind[:]), f"float32({name}[:])", [f"({name}[:],)"]):
        kernel = fast_args(signature)(lambda x: x[0] + x[1])
        for _ in range(CALLS):
            assert kernel(ones(BY_NAME[name])) == 3.0
        with pytest.raises(TypeError, match="not one of the declared signatures"):
            kernel(np.ones(2))
    for signature in (kind(types.float32), f"{name}(float32)"):
        assert fast_args(signature)(lambda x: x)(np.float32(1.0001)) == 1.0


@pytest.mark.parametrize(
    "signature",
    [
        types.float32(types.float16[::1]), (types.Tuple((types.float16[:], types.int64)),), "(Tuple((float16[:], int64)),)",
        (types.Optional(types.float16[:]),),
    ],
    ids=str,
)  # fmt: skip
def test_numbas_float16_in_a_signature_is_the_packages(signature):
    def first(x):
        return x[0]

    kernel = fast_args(signature)(first)
    inside = str(kernel.signatures[0])
    assert "float16" in inside
    given = np.ones(2, np.float16)
    got = kernel((given, 1)) if "Tuple" in inside else kernel(given)
    assert np.all(got == 1.0)


# ---- bad input -----------------------------------------------------------------------------------------------------


@numba.njit
def _masked(x):
    return x[0] & 1


def _shifted_in_place(x):
    x <<= 1


def _stored(x):
    x[0] = "a"


@numba.njit
def _stored_at(x, i, value):
    x[i] = value


HAVE_NOT = {
    "bfloat16 << int64": lambda x: x[0] << 1, "bfloat16 & bfloat16": lambda x: x[0] & x[1], "~bfloat16": lambda x: ~x[0],
    "matmul(bfloat16, bfloat16)": lambda x: x[0] @ x[1], "array(bfloat16, 1d, C) << int64": lambda x: x << 1,
    "array(bfloat16, 1d, C) <<= int64": _shifted_in_place, "bfloat16 % unicode_type": lambda x: x[0] % "a",
    "unicode_type in bfloat16": lambda x: "a" in x[0], "gcd(bfloat16, int64)": lambda x: np.gcd(x[0], 3),
    "bfloat16 & int64": lambda x: np.sum(x) + _masked(x), "det(bfloat16)": lambda x: np.linalg.det(x[0]),
    "bfloat16.real_part": lambda x: x[0].real_part, "array(bfloat16, 1d, C).take(unicode_type)": lambda x: x.take("a"),
    "array(bfloat16, 1d, C).sum(where=bool)": lambda x: x.sum(where=True), "getitem(bfloat16, int64)": lambda x: x[0][0],
    "bfloat16(int64)": lambda x: x[0](1), "array(bfloat16, 1d, C)[int64] = unicode_type": _stored,
    "array(bool, 1d, C)[int64] = array(bfloat16, 1d, C)": lambda x: _stored_at(x > 0, 0, x),
}  # fmt: skip


@pytest.mark.parametrize("operation", HAVE_NOT)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_operations_that_numbers_have_not(operation, framework):
    kernel = fast_args(HAVE_NOT[operation])
    for _ in range(2):  # Numba keeps the exception
        with pytest.raises(TypingError) as raised:
            kernel(make(framework, BFLOAT16))
        line, _, numbas = str(raised.value).partition("\n")
        called = f"{kernel.__qualname__}(x: array(bfloat16, 1d, C))"
        assert line == f"{called}: Numba cannot compile {operation} for these argument types. It says:" and numbas


def test_an_error_without_half_precision_is_numbas():
    """Of an operation of other types Numba's own text tells, also in a kernel with such arrays."""
    with pytest.raises(TypingError, match=r"Numba cannot compile the kernel for"):
        fast_args(lambda x: x[0] * len(1.0))(ones(BFLOAT16))


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e3m4", "float8_e4m3", "int4", "uint2", "float4_e2m1fn"])
def test_what_is_refused_still(name):
    x = np.ones(3, getattr(ml_dtypes, name))
    for function, call in WAYS.values():
        with pytest.raises(BufferError, match=rf"its elements, {name}.*fast_args\(storage=True\)"):
            call(fast_args(function), x)


PACKED = {"float4_e2m1fn": (17, 4), "float6_e2m3fn": (15, 6), "float6_e3m2fn": (16, 6), "int4": (0, 4)}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("producer", [Dunder, Tabled])
def test_packed_numbers_are_refused_with_advice_that_helps(name, lanes, producer):
    """Also with ``storage=True``, which the message does not recommend. The bytes are taken."""
    code, bits = PACKED[name]
    for storage in (False, True):
        with pytest.raises(BufferError, match=rf"of {bits} bits.*packed in bytes.*pass the bytes, as uint8") as raised:
            fast_args(total, storage=storage)(producer(np.ones(3, np.uint8), code=code, bits=bits, lanes=lanes))
        assert "storage" not in str(raised.value) and "import ml_dtypes" not in str(raised.value)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no packed numbers")
def test_packed_numbers_of_pytorch():
    x = torch.ones(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for storage in (False, True):
        kernel = fast_args(total, storage=storage)
        with pytest.raises(BufferError, match=r"packed in bytes.*\.view\(torch\.uint8\)"):
            kernel(x)
        assert kernel(x.view(torch.uint8)) == 3


def test_vectors_of_halves_are_refused_without_advice_about_ml_dtypes():
    with pytest.raises(BufferError, match="16 bits in 2 lanes has no NumPy dtype; convert it first"):
        fast_args(total)(Dunder(np.ones(3, np.uint16), code=4, bits=16, lanes=2))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_halves_are_refused():
    with pytest.raises(BufferError, match=r"its elements, complex32.*fast_args\(storage=True\)"):
        fast_args(total)(torch.ones(3, dtype=torch.complex32))


def test_a_swapped_byte_order_is_refused():
    with pytest.raises(BufferError):
        fast_args(total)(np.ones(3, ">f2"))
