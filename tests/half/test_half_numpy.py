"""NumPy's functions of arrays and numbers of half precision, in kernels: each is right, or a TypingError says which is not."""

import random

import numba
import numpy as np
import pytest
from half_functions import CALLS, WITHOUT_CODE_OF_NUMBAS, arguments, called, numbers_in, of_float32
from halves import BFLOAT16, BY_NAME, array, nearest, of_each, of_some, tensor, tensor_of
from interoperability import ml_dtypes
from numba import types
from numba.core.errors import TypingError

torch = pytest.importorskip("torch")
if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half  # noqa: E402
from fastexchange import fast_args  # noqa: E402

VALUES = [1.5, 0.5, 3.0, 2.0]


@pytest.mark.parametrize("name", WITHOUT_CODE_OF_NUMBAS)
@of_some
def test_functions_for_which_numba_has_no_code(form, name):
    x, function = array(form, nearest(form, np.array(VALUES))), WITHOUT_CODE_OF_NUMBAS[name]
    want = of_float32(function, x) if name == "random numbers" else function(x.astype(np.float32))
    assert np.allclose(numbers_in(fast_args(function)(x)), numbers_in(want), rtol=2 / (1 << form.fraction))


@numba.njit
def seed(number):
    np.random.seed(number)
    random.seed(number)


def in_place(x):
    np.random.shuffle(x[0])
    random.shuffle(x[1])
    x[2].sort()
    np.fill_diagonal(x[3].reshape(2, 2), x[3, 2])
    np.clip(x[4], 1, 2, out=x[4])


def test_functions_that_write_to_an_array_write_to_the_callers():
    kernel, x = fast_args(in_place), tensor_of(BFLOAT16, *VALUES * 5).view(5, 4)
    for number in range(9):
        seed(number)
        kernel(x)
        if all(row != VALUES for row in x[:2].tolist()):
            break
    assert [sorted(row) for row in x[:2].tolist()] == [sorted(VALUES)] * 2 and VALUES not in x[:2].tolist()
    assert x[2:].tolist() == [[0.5, 1.5, 2.0, 3.0], [3.0, 0.5, 3.0, 3.0], [1.5, 1.0, 2.0, 2.0]]


def sums(x):
    return (
        np.sum(x, dtype=np.float64), x.sum(dtype=np.float64), x.sum(dtype=np.float32), x.sum(dtype=half.bfloat16),
        np.sum(x, dtype=x.dtype), np.sum(x.astype(np.float32), dtype=half.float16), x.sum(dtype=None), x.sum(dtype=np.int64),
    )  # fmt: skip


def sums_of_an_axis(x):
    rows = x.reshape(2, 500)
    return (
        rows.sum(axis=1, dtype=np.float64), rows.sum(1, np.float64), rows.sum(dtype=np.float64, axis=1),
        x.cumsum(dtype=np.float64)[499:501], np.sum(rows, 1, half.bfloat16), x.cumsum(dtype=half.bfloat16)[499:501],
    )  # fmt: skip


def test_sums_with_dtype():
    """Of a thousand ones, each in the type that is asked for: bfloat16 would have lost count at 256."""
    x = tensor(BFLOAT16, [0x3F80] * 1000)
    assert [(got, type(got)) for got in fast_args(sums)(x)] == [(1000.0, float)] * 7 + [(1000, int)]
    found = fast_args(sums_of_an_axis)(x)
    assert [each.tolist() for each in found] == [[500, 500]] * 3 + [[500, 501]] + [[500, 500]] * 2
    assert [each.dtype for each in found] == [torch.float64] * 4 + [torch.bfloat16] * 2


def test_methods_with_what_numba_has_not_are_refused():
    for function in (lambda x: x.max(dtype=np.float64), lambda x: x.sum(initial=1), lambda x: x.sum(0, np.float64, 3)):
        with pytest.raises(TypingError, match=r"Numba cannot compile array\(bfloat16, 1d, C\)"):
            fast_args(function)(array(BFLOAT16, [0x3F80]))
    with pytest.raises(TypingError, match=r"compile array\(float64, 1d, C\)\.sum\(dtype=class\(bfloat16\)\) for"):
        fast_args(lambda x: x.sum(dtype=half.bfloat16))(np.ones(3))  # else LLVM's error


def ordered(x, edges):
    return (
        np.searchsorted(edges, x), np.searchsorted(edges, x, "right"), np.digitize(x, edges[:3]), np.searchsorted(edges, x[1]),
        np.searchsorted(edges, [x[0], x[1]]), np.argsort(x),
    )  # fmt: skip


@pytest.mark.slow
@of_some
def test_nan_is_the_last_of_an_order(form):
    """Also in functions in which Numba asks NumPy whether a dtype has NaN."""
    given = [array(form, nearest(form, np.array(values))) for values in ([2.0, np.nan, -1.0, 0.5], [0.0, 1.0, 2.0, np.nan])]
    wanted = ordered(*(each.astype(np.float32) for each in given))
    assert numbers_in(fast_args(ordered)(*given)) == numbers_in(wanted)


@of_each
def test_limits(form):
    """``nan_to_num`` gives of an array of the format one of the format; with ``copy=False`` in its place."""
    kind, dtype = getattr(half, form.name), form.dtype

    def kernel(x):
        made = np.nan_to_num(x, nan=0.5)
        np.nan_to_num(x, copy=False, nan=0.5)
        return np.finfo(x.dtype), np.finfo(kind), np.finfo(x[0]), made

    with np.errstate(all="ignore"):
        given = np.array([1, np.nan, np.inf, -np.inf]).astype(dtype)
    want = np.finfo(dtype) if form.name == "float16" else ml_dtypes.finfo(dtype)
    limit = float(want.max)
    numbers = np.nan_to_num(given.astype(float), nan=0.5, posinf=limit, neginf=-limit).tolist()
    *limits, made = fast_args(kernel)(given)
    for got in limits:
        for name in set(got._fields) - {"resolution"}:  # ml_dtypes rounds it, differently
            assert getattr(got, name) == float(getattr(want, name)), name
    assert made.dtype == dtype and made.astype(float).tolist() == given.astype(float).tolist() == numbers


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


PARTS = 32
"""Each takes one to five minutes. All in one process take gigabytes, of what Numba compiles."""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_function_of_numpy_is_right_or_refused_by_a_typing_error(part):
    """In each way in which Numba can call it with float32: no error of LLVM's, no other number."""
    wrong, tried = [], 0
    wide = arguments()
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


# ---- numba.vectorize, and results that NumPy cannot have ---------------------------------------------------------------

VECTORISED = {
    "float32": ["float32(float32, float32)"], "float64": ["float64(float64, float64)"], "dynamic": [],
    "both": ["float64(float64, float64)", "float32(float32, float32)"],
}  # fmt: skip


@pytest.mark.parametrize("declared", VECTORISED)
def test_functions_of_vectorize_get_float32(declared):
    """Also those with declared signatures; a kernel's call leaves no loop behind that NumPy would take for another type."""
    function = numba.vectorize(VECTORISED[declared])(lambda a, b: a * b + 1)
    values = np.array([1.5, 2.0, 3.0], np.float32)
    x, single = array(BFLOAT16, nearest(BFLOAT16, values)), values.astype(np.float16)

    def kernel(x):
        return function(x, x), function(x[0], x[1]), function(x, x[0])

    wanted = numba.njit(kernel)(values)
    for found in (fast_args(kernel)(x), numba.njit(kernel)(x), fast_args(kernel)(single)):
        for got, want in zip(found, wanted, strict=True):
            assert np.array_equal(got, want) and np.asarray(got).dtype == np.asarray(want).dtype
    assert np.array_equal(function(single, single), values * values + 1) and np.array_equal(function(x, x), values * values + 1)


def test_functions_of_vectorize_return_half_precision():
    function = numba.vectorize(lambda a: half.bfloat16(a))
    assert fast_args(lambda x: function(x))(np.full(2, 3.14159)).dtype == ml_dtypes.bfloat16
    assert function(np.full(2, 3.14159)).tolist() == [3.140625] * 2


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_loops_that_are_declared_for_half_precision_come_first(name):
    """In kernels as in Python. What has none of them is not taken."""
    form, kind = BY_NAME[name], getattr(half, name)
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

    x = array(form, nearest(form, np.array([1.5, 2.0])))
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
