"""NumPy's functions of numbers and arrays of half precision, in kernels: each is right, or a TypingError says which is not."""

import random

import half_functions
import halves
import numba
import numpy as np
import pytest
from half_functions import numbers_in
from halves import BFLOAT16, FORMS, array, array_of, of_one, tensor, tensor_of
from interoperability import ml_dtypes
from numba import types
from numba.core.errors import TypingError

torch = pytest.importorskip("torch")
if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half  # noqa: E402
from fastexchange import fast_args  # noqa: E402

VALUES = [1.5, 0.5, 3.0, 2.0]


@pytest.mark.parametrize("name", [
    "of_random", "of_ranges", "of_arrays", "of_complex_parts", pytest.param("of_linear_algebra", marks=pytest.mark.slow),
])  # fmt: skip
@of_one
def test_functions_for_which_numba_has_no_code(form, name):
    x, function = array_of(form, *VALUES), getattr(half_functions, name)
    wanted = (numba.njit(function) if name == "of_random" else function)(x.astype(np.float32))
    assert np.allclose(numbers_in(fast_args(function)(x)), numbers_in(wanted), rtol=2 / (1 << form.fraction))


def in_place(x):
    np.random.shuffle(x[0])
    random.shuffle(x[1])
    x[2].sort()
    np.fill_diagonal(x[3].reshape(2, 2), x[3, 2])
    np.clip(x[4], 1, 2, out=x[4])


def test_functions_that_write_to_an_array_write_to_the_callers():
    kernel, x = fast_args(in_place), tensor_of(BFLOAT16, *VALUES * 5).view(5, 4)
    for _ in range(20):
        kernel(x)
        if all(row != VALUES for row in x[:2].tolist()):
            break
    assert [sorted(row) for row in x[:2].tolist()] == [sorted(VALUES)] * 2 and VALUES not in x[:2].tolist()
    assert x[2:].tolist() == [[0.5, 1.5, 2.0, 3.0], [3.0, 0.5, 3.0, 3.0], [1.5, 1.0, 2.0, 2.0]]


def sums(x):
    return (
        np.sum(x, dtype=np.float64), x.sum(dtype=np.float32), x.sum(dtype=half.bfloat16), np.sum(x, dtype=x.dtype),
        np.sum(x.astype(np.float32), dtype=half.float16), x.sum(dtype=None), x.sum(dtype=np.int64),
    )  # fmt: skip


def sums_of_an_axis(x):
    rows = x.reshape(2, 500)
    return (
        np.sum(rows, axis=1, dtype=np.float64), rows.sum(1, np.float64), rows.sum(dtype=np.float64, axis=1),
        x.cumsum(dtype=np.float64)[499:501], np.sum(rows, 1, half.bfloat16), x.cumsum(dtype=half.bfloat16)[499:501],
    )  # fmt: skip


def test_sums_with_dtype():
    """Of a thousand ones, each in the type that is asked for: bfloat16 would have lost count at 256."""
    x = tensor(BFLOAT16, [0x3F80] * 1000)
    assert [(got, type(got)) for got in fast_args(sums)(x)] == [(1000.0, float)] * 6 + [(1000, int)]
    found = fast_args(sums_of_an_axis)(x)
    assert [each.tolist() for each in found] == [[500, 500]] * 3 + [[500, 501]] + [[500, 500]] * 2
    assert [each.dtype for each in found] == [torch.float64] * 4 + [torch.bfloat16] * 2
    with pytest.raises(TypingError, match=r"compile array\(float64, 1d, C\)\.sum\(dtype=class\(bfloat16\)\) for"):
        fast_args(lambda x: x.sum(dtype=half.bfloat16))(np.ones(3))  # else LLVM's error


def ordered(x, edges):
    return (
        np.searchsorted(edges, x), np.searchsorted(edges, x, "right"), np.digitize(x, edges[:3]),
        np.searchsorted(edges, x[1]), np.searchsorted(edges, [x[0], x[1]]), np.argsort(x),
    )  # fmt: skip


@pytest.mark.slow
def test_nan_is_the_last_of_an_order():
    """Also in functions in which Numba asks NumPy whether a dtype has NaN."""
    given = [np.array(values, np.float32) for values in ([2.0, np.nan, -1.0, 0.5], [0.0, 1.0, 2.0, np.nan])]
    found = fast_args(ordered)(*(array_of(BFLOAT16, *each) for each in given))
    assert numbers_in(found) == numbers_in(ordered(*given))


KINDS = tuple(getattr(half, form.name) for form in FORMS)
A, B, C, D, E, F = KINDS


def test_limits():
    @fast_args
    def kernel(x):
        return (
            np.finfo(A), np.finfo(B), np.finfo(C), np.finfo(D), np.finfo(E), np.finfo(F), np.finfo(x.dtype), np.finfo(x[0]),
        )  # fmt: skip

    for form, got in zip([*FORMS, BFLOAT16, BFLOAT16], kernel(array(BFLOAT16, [0])), strict=True):
        want = np.finfo(form.dtype) if form.name == "float16" else ml_dtypes.finfo(form.dtype)
        for name in set(got._fields) - {"resolution"}:  # ml_dtypes rounds it, differently
            assert getattr(got, name) == float(getattr(want, name)), (form, name)


@of_one
def test_nan_to_num(form):
    """It gives of an array of the format one of the format; with ``copy=False`` in its place."""

    def kernel(x):
        made = np.nan_to_num(x, nan=0.5)
        np.nan_to_num(x, copy=False, nan=0.5)
        return made

    with np.errstate(all="ignore"):
        given = np.array([1, np.nan, np.inf, -np.inf]).astype(form.dtype)
    limit = halves.numbers(form)[form.infinity - 1]
    wanted = np.nan_to_num(given.astype(float), nan=0.5, posinf=limit, neginf=-limit).tolist()
    made = fast_args(kernel)(given)
    assert made.dtype == form.dtype and made.astype(float).tolist() == given.astype(float).tolist() == wanted


# ---- all of NumPy's functions, at night ------------------------------------------------------------------------------

CALLS = (
    "f(x)", "f(e)", "f(X)", "f(x, y)", "f(e, e)", "f(x, 2)", "f(x, e)", "f(2, e)", "f((x, y))", "f([x, y])", "f(x, I)", "f(I, x)",
    "f(X, x)", "f(x > 1, x)", "f(e, e, 3)", "f(x, 0.5)", "f(x, y, x)", "f(x, x > 1, x)", "f(X, 1)", "f((2, 2), e)", "f(3, e)",
    "f([e, e])", "f([x > 1], [x])",
)  # fmt: skip
"""Ways to call a function `f` with arrays, numbers and what contains them. `x`, `y`, `X`: arrays; `e`: a number; `I`: indices."""
PARTS = 32
"""Each takes one to five minutes. All in one process take gigabytes, of what Numba compiles."""


def called(function, call):
    """A kernel that calls `function`."""
    names = {"f": function, "np": np}
    exec(f"def kernel(x, y, X, I):\n e = x[0]\n np.random.seed(1)\n return {call}\n", names)
    return names["kernel"]


def functions_of_numba():
    """By name, the functions of NumPy that Numba compiles."""
    places = {"np": np, "np.linalg": np.linalg, "np.fft": np.fft, "np.random": np.random}
    found = {f"{place}.{name}": getattr(module, name) for place, module in places.items() for name in dir(module)}
    context = numba.core.registry.cpu_target.typing_context
    context.refresh()
    for name, function in found.items():
        if callable(function) and not isinstance(function, type) and "empty" not in name and "frombuffer" not in name:
            try:
                context.resolve_value_type(function)
            except Exception:
                continue
            yield name, function


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_function_of_numpy_is_right_or_refused_by_a_typing_error(part):
    """In each way in which Numba can call it with float32: no error of LLVM's, no other number."""
    wrong, tried = [], 0
    x, square = (
        np.array(VALUES, np.float32),
        np.array([[2, 1, 0.5, 1], [1, 3, 0, 1], [0.5, 0, 4, 1], [1, 1, 1, 8]], np.float32),
    )
    wide = x, x[::-1].copy(), square, np.array([0, 1, 1, 2])
    narrow = [each.astype(ml_dtypes.bfloat16) if each.dtype == np.float32 else each for each in wide]
    for name, function in [*functions_of_numba()][part::PARTS]:
        for call in CALLS[:5] if isinstance(function, np.ufunc) else CALLS:
            try:
                want = numbers_in(numba.njit(called(function, call))(*wide))
            except Exception:
                continue
            tried += 1
            try:
                got = numbers_in(fast_args(called(function, call))(*narrow))
            except TypingError:
                continue
            except Exception as error:
                wrong.append((name, call, repr(error)[:200]))
                continue
            if not np.allclose(got, want, rtol=0.02, atol=0.01, equal_nan=True):
                wrong.append((name, call, got, want))
    assert not wrong and tried > 500 / PARTS / 3


# ---- numba.vectorize -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("declared", "result"), [
    ([], "f4"), (["float64(float64, float64)"], "f8"), (["float64(float64, float64)", "float32(float32, float32)"], "f8"),
], ids=["none", "float64", "both"])  # fmt: skip
def test_functions_of_vectorize_get_float32(declared, result):
    """Whatever is declared. A kernel's call leaves no loop behind that NumPy would take for another type."""
    function = numba.vectorize(declared)(lambda a, b: a * b + b)
    values = np.array([1.5, 2.0, 3.0], np.float32)
    x, single = array_of(BFLOAT16, *values), values.astype(np.float16)
    kernel = fast_args(lambda x: (function(x, x), function(x, x[0]), function(x[0], x[1])))
    for given in (x, single):
        squares, products, number = kernel(given)
        assert np.array_equal(squares, values * values + values) and np.array_equal(products, values * 1.5 + 1.5)
        assert squares.dtype == products.dtype == result and number == 5.0
        assert np.array_equal(function(given, given), values * values + values)


def test_functions_of_vectorize_return_half_precision():
    function = numba.vectorize(lambda a: half.bfloat16(a))
    assert fast_args(lambda x: function(x))(np.full(2, 3.14159)).dtype == ml_dtypes.bfloat16
    assert function(np.full(2, 3.14159)).tolist() == [3.140625] * 2


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_loops_that_are_declared_for_half_precision_come_first(form):
    """In kernels as in Python. What has none of them is not taken."""
    kind = getattr(half, form.name)
    declared = [kind(kind, types.float32), types.float64(types.float64, types.float64)]
    function = numba.vectorize(declared)(lambda a, b: a * b)
    alone = numba.vectorize([kind(kind)])(lambda a: 2 * a)

    @numba.guvectorize([(kind[:], kind, kind[:])], "(n),()->(n)")
    def scaled(a, b, out):
        for i in range(a.size):
            out[i] = a[i] * b

    def kernel(x):
        out = np.empty_like(x)
        scaled(x, x[0], out)
        return out, function(x, np.float32(1.001)), alone(x), function(x[0], np.float32(1.001)), alone(x[0])

    x = array_of(form, 1.5, 2.0)
    squares, product, doubles, *elements = fast_args(kernel)(x)
    assert squares.dtype == product.dtype == doubles.dtype == form.dtype
    assert squares.tolist() == [2.25, 3.0] and doubles.tolist() == [3.0, 4.0] and elements == [product[0], 3.0]
    assert np.array_equal(product, function(x, np.float32(1.001))) and np.array_equal(squares, scaled(x, x[0]))
    assert numba.njit(lambda x: function(x, x))(np.full(2, 1.1)).tolist() == [1.1 * 1.1] * 2
    with pytest.raises(TypingError, match="cannot call"):
        numba.njit(lambda x: alone(x))(np.ones(2, np.float32))


def test_functions_of_guvectorize_are_refused_by_name():
    @numba.guvectorize(["void(float32[:], float32[:])"], "(n)->(n)")
    def twice(a, b):
        for i in range(a.size):
            b[i] = 2 * a[i]

    def kernel(x):
        y = np.empty(x.size, np.float32)
        twice(x, y)
        return y

    with pytest.raises(TypingError, match=r"compile twice\(array\(bfloat16, 1d, C\), array\(float32, 1d, C\)\) for"):
        fast_args(kernel)(array(BFLOAT16, [0]))
