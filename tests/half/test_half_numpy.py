"""NumPy's functions of arrays and numbers of half precision, in kernels: each is right, or a TypingError says which is not."""

import random

import numba
import numpy as np
import pytest
from half_functions import CALLS, WITHOUT_CODE_OF_NUMBAS, arguments, called, numbers_in, of_float32
from halves import BY_NAME, FORMS, array, nearest, tensor
from interoperability import ml_dtypes
from interpreter import run_python
from numba import types
from numba.core.errors import TypingError

torch = pytest.importorskip("torch")
if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half  # noqa: E402
from fastexchange import fast_args  # noqa: E402

BFLOAT16 = BY_NAME["bfloat16"]


@pytest.mark.parametrize("name", WITHOUT_CODE_OF_NUMBAS)
@pytest.mark.parametrize(
    "form", [each if each.name == "bfloat16" else pytest.param(each, marks=pytest.mark.nightly) for each in FORMS], ids=str
)
def test_functions_for_which_numba_has_no_code(form, name):
    x = array(form, nearest(form, np.array([1.5, 0.5, 3.0, 2.0])))
    function = WITHOUT_CODE_OF_NUMBAS[name]
    want = of_float32(function, x)
    assert np.allclose(numbers_in(fast_args(function)(x)), numbers_in(want), rtol=2 / (1 << form.fraction))


IN_PLACE = {
    "np.random.shuffle": lambda x: np.random.shuffle(x), "np.fill_diagonal": lambda x: np.fill_diagonal(x.reshape(2, 2), x[2]),
    "random.shuffle": lambda x: random.shuffle(x), "x.sort": lambda x: x.sort(), "np.clip": lambda x: np.clip(x, 1, 2, out=x),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_functions_that_write_to_an_array_write_to_the_callers(name):
    x = tensor(BFLOAT16, nearest(BFLOAT16, np.array([1.5, 0.5, 3.0, 2.0])))
    for seed in range(9):
        numba.njit(lambda seed: (np.random.seed(seed), random.seed(seed)))(seed)
        fast_args(IN_PLACE[name])(x)
        if x.tolist() != [1.5, 0.5, 3.0, 2.0]:
            return
    raise AssertionError("nothing was written")


SUMS = {
    "np.float64": (lambda x: np.sum(x, dtype=np.float64), 1000.0), "method": (lambda x: x.sum(dtype=np.float64), 1000.0),
    "np.float32": (lambda x: x.sum(dtype=np.float32), 1000.0), "np.int64": (lambda x: x.sum(dtype=np.int64), 1000),
    "a format": (lambda x: x.sum(dtype=half.bfloat16), 1000.0), "its own": (lambda x: np.sum(x, dtype=x.dtype), 1000.0),
    "a format, of float32": (lambda x: np.sum(x.astype(np.float32), dtype=half.float16), 1000.0),
    "None": (lambda x: x.sum(dtype=None), 1000.0),
    "axis": (lambda x: x.reshape(2, 500).sum(axis=1, dtype=np.float64), [500, 500]),
    "in order": (lambda x: x.reshape(2, 500).sum(1, np.float64), [500, 500]),
    "dtype first": (lambda x: x.reshape(2, 500).sum(dtype=np.float64, axis=1), [500, 500]),
    "axis and a format": (lambda x: np.sum(x.reshape(2, 500), 1, half.bfloat16), [500, 500]),
    "cumsum": (lambda x: x.cumsum(dtype=np.float64)[::500], [1, 501]),
    "cumsum of a format": (lambda x: x.cumsum(dtype=half.bfloat16)[::500], [1, 500]),
}  # fmt: skip
"""Sums of a thousand ones, each in the type that is asked for: bfloat16 would have lost count at 256."""


@pytest.mark.parametrize("name", SUMS)
def test_sums_with_dtype(name):
    function, want = SUMS[name]
    for x in (array(BFLOAT16, [0x3F80] * 1000), tensor(BFLOAT16, [0x3F80] * 1000)):
        got = fast_args(function)(x)
        assert (got.tolist() if hasattr(got, "tolist") else got) == want
        assert type(got) is type(want) or "float64" in str(got.dtype) or "format" in name


def test_methods_with_what_numba_has_not_are_refused():
    for function in (lambda x: x.max(dtype=np.float64), lambda x: x.sum(initial=1), lambda x: x.sum(0, np.float64, 3)):
        with pytest.raises(TypingError, match=r"Numba cannot compile array\(bfloat16, 1d, C\)"):
            fast_args(function)(array(BFLOAT16, [0x3F80]))
    with pytest.raises(TypingError, match=r"compile array\(float64, 1d, C\)\.sum\(dtype=class\(bfloat16\)\) for"):
        fast_args(lambda x: x.sum(dtype=half.bfloat16))(np.ones(3))  # else LLVM's error


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nan_is_the_last_of_an_order(form):
    """Also in functions in which Numba asks NumPy whether a dtype has NaN."""
    x, edges = (array(form, nearest(form, np.array(values))) for values in ([2.0, np.nan, -1.0, 0.5], [0.0, 1.0, 2.0, np.nan]))

    def kernel(x, edges):
        found = np.searchsorted(edges, x), np.searchsorted(edges, x, "right"), np.digitize(x, edges[:3])
        return *found, np.searchsorted(edges, x[1]), np.searchsorted(edges, [x[0], x[1]]), np.argsort(x)

    assert numbers_in(fast_args(kernel)(x, edges)) == numbers_in(of_float32(kernel, x, edges))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_limits(form):
    kind, dtype = getattr(half, form.name), form.dtype
    kernel = fast_args(lambda x: (np.finfo(x.dtype), np.finfo(kind), np.finfo(x[0])))
    want = np.finfo(dtype) if form.name == "float16" else ml_dtypes.finfo(dtype)
    for got in kernel(array(form, [0])):
        for name in set(got._fields) - {"resolution"}:  # ml_dtypes rounds it, differently
            assert getattr(got, name) == float(getattr(want, name)), name


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nan_to_num(form):
    """Of an array of the format one of the format; with ``copy=False`` in its place."""
    with np.errstate(all="ignore"):
        given = np.array([1, np.nan, np.inf, -np.inf]).astype(form.dtype)
    limit = float(ml_dtypes.finfo(form.dtype).max)
    want = np.nan_to_num(given.astype(float), nan=0.5, posinf=limit, neginf=-limit)
    got = fast_args(lambda x: np.nan_to_num(x, nan=0.5))(given)
    assert got.dtype == form.dtype and got.astype(float).tolist() == want.tolist() and np.isnan(given.astype(float)[1])
    fast_args(lambda x: np.nan_to_num(x, copy=False, nan=0.5))(given)
    assert given.astype(float).tolist() == want.tolist()


@pytest.mark.slow
def test_functions_without_ml_dtypes():
    run_python(
        """
        import sys
        sys.modules["ml_dtypes"] = None  # whatever is installed
        import numpy as np, torch
        from half_functions import WITHOUT_CODE_OF_NUMBAS, numbers_in, of_float32
        from fastexchange import fast_args
        x = torch.tensor([1.5, 0.5, 3.0, 2.0])
        for name, function in WITHOUT_CODE_OF_NUMBAS.items():
            want = numbers_in(of_float32(function, x.numpy()))
            for dtype in (torch.bfloat16, torch.float8_e5m2):
                if name != "x.imag":  # readonly, which PyTorch's tensors cannot be
                    got = numbers_in(fast_args(function)(x.to(dtype)))
                    assert np.allclose(got, want, rtol=0.01 if dtype == torch.bfloat16 else 0.3), (name, dtype, got, want)
        x = x.to(torch.bfloat16)
        assert fast_args(lambda x: np.finfo(x.dtype).max)(x) == torch.finfo(torch.bfloat16).max
        fast_args(lambda x: np.fill_diagonal(x.reshape(2, 2), x[2]))(x)
        assert x.tolist() == [3.0, 0.5, 3.0, 3.0]
        """
    )


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
    for kernel in (lambda x: function(x, x), lambda x: function(x[0], x[1]), lambda x: function(x, x[0])):
        want = numba.njit(kernel)(values)
        for got in (fast_args(kernel)(x), numba.njit(kernel)(x), fast_args(kernel)(single)):
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


@pytest.mark.slow
def test_what_needs_ml_dtypes_says_so():
    """Results of plain Numba would be bytes, and so would what NumPy passes to a function of ``vectorize``."""
    run_python(
        """
        import sys
        sys.modules["ml_dtypes"] = None  # whatever is installed
        import numba, numpy as np, torch
        import fastexchange.half as half
        from fastexchange import fast_args

        def refused(kinds, words, function, *arguments, times=3):
            for _ in range(times):
                try:
                    got = function(*arguments)
                except kinds as error:
                    assert words in str(error), error
                else:
                    raise AssertionError(got)

        def made(n):
            return np.full(n, 1.5, half.bfloat16)

        dispatcher, calls = numba.njit(made), []
        x = torch.ones(3, dtype=torch.bfloat16)
        assert fast_args(lambda x: dispatcher(2)[1] + x[0])(x) == 2.5  # as part of a kernel it computes
        for function in (made, lambda n: (made_(n), 1), lambda n: [made_(n)]):
            made_ = dispatcher
            refused(TypeError, "install ml_dtypes", numba.njit(function), 2)
        refused(BufferError, "ml_dtypes", fast_args(lambda x, part: x[part]), x, slice(0, 2))  # by Numba's own dispatcher
        refused(TypeError, "install ml_dtypes", fast_args(lambda part: dispatcher(2)[part]), slice(0, 2))
        assert numba.njit(lambda n: np.full(n, 1.5, half.float16))(2).dtype == np.float16
        assert numba.njit(lambda n: dispatcher(n)[0])(2) == 1.5

        function = numba.vectorize(lambda a, b: a * b + 1)
        assert fast_args(lambda x: function(x, x))(x).tolist() == [2.0, 2.0, 2.0]
        assert function(np.ones(3, np.float16), np.ones(3, np.float16)).tolist() == [2.0, 2.0, 2.0]
        rounding = numba.vectorize(lambda a: half.bfloat16(a))
        refused(TypeError, "install ml_dtypes", rounding, np.ones(3), times=1)
        refused(TypeError, "did not contain a loop", rounding, np.ones(3))  # says NumPy from then on
        """
    )
