"""NumPy's functions of numbers and arrays of half precision, in kernels: each is right, or a TypingError says which is not."""

import numba
import numpy as np
import pytest
from forked import fork_python
from halves import BFLOAT16, FORMS, array_of
from interoperability import ml_dtypes
from numba.core.errors import TypingError
from raising import check_raises
from scale_kernels import elementwise

if ml_dtypes is None:
    pytest.skip("ml_dtypes is not installed", allow_module_level=True)

import fastexchange.half as half
from fastexchange import fast_args

VALUES = [1.5, 0.5, 3.0, 2.0]
REFUSED = {
    "np.median(X)": lambda x: np.median(x), "np.argmax(X)": lambda x: np.argmax(x), "np.sort(X)": lambda x: np.sort(x),
    "np.nanmax(X)": lambda x: np.nanmax(x), "np.unique(X)": lambda x: np.unique(x), "np.dot(X, X)": lambda x: np.dot(x, x),
    "np.sum(X, dtype=class(float64))": lambda x: np.sum(x, dtype=np.float64), "np.linalg.norm(X)": lambda x: np.linalg.norm(x),
    "np.searchsorted(array(float64, 1d, C), bfloat16)": lambda x: np.searchsorted(np.ones(2), x[0]),
    "np.array(list(bfloat16)<iv=None>)": lambda x: np.array([x[0], x[1]]),
    "np.maximum(X, bfloat16)": lambda x: np.maximum(x, x[0]),
    "np.arange(int64, dtype=class(bfloat16))": lambda x: np.arange(3, dtype=half.bfloat16),
    "np.random.normal(bfloat16, int64)": lambda x: np.random.normal(x[0], 1),
    "X.argsort": lambda x: x.argsort(), "X.std": lambda x: x.std(), "operator.matmul(X, X)": lambda x: x @ x,
    "operator.lshift(bfloat16, int64)": lambda x: x[0] << 1, "operator.mod(bfloat16, unicode_type)": lambda x: x[0] % "a",
    "operator.getitem(X, bfloat16)": lambda x: x[x[0]], "np.empty(UniTuple(bfloat16 x 1))": lambda x: np.empty((x[0],)),
    "bfloat16.value": lambda x: x[0].value,
}  # fmt: skip
"""By what the error says: `X` stands for ``array(bfloat16, 1d, C)``."""


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_not_compiled_is_refused_by_name_with_advice(operation):
    """Numba would compile some of it, and not each right: ``np.argmax`` overlooks NaN."""
    kernel = fast_args(REFUSED[operation])
    for _ in range(2):
        raised = check_raises(TypingError, None, kernel, array_of(BFLOAT16, *VALUES))
        said = f"{kernel.__qualname__}(x: X): {operation}".replace("X", "array(bfloat16, 1d, C)")
        advice = "is not compiled for half precision; convert first: x.astype(np.float32), or np.float32(x) of a number"
        assert str(raised) == f"{said} {advice}"


def test_it_is_refused_in_plain_njit_and_in_functions_that_kernels_call():
    inner = numba.njit(lambda x: np.argmin(x))
    for function in (inner, fast_args(lambda x: inner(x))):
        error = TypeError if function is inner else TypingError
        check_raises((error,), r"np\.argmin\(array\(bfloat16, 1d, C\)\) is not", function, array_of(BFLOAT16, *VALUES))
    assert fast_args(lambda x: inner(x.astype(np.float32)))(array_of(BFLOAT16, *VALUES)) == np.argmin(VALUES)


def test_nothing_is_compiled_before_it_is_known_what_is_refused():
    fork_python("""
        import sys
        import numpy as np
        from fastexchange import fast_args
        x, kernel = np.ones(2, np.float16), fast_args(lambda x: np.argmax(x))
        sys.modules["fastexchange.ground.half.refusals"] = None  # as if its import failed
        for said in "halted", "np.argmax(array(float16, 1d, C)) is not compiled":
            try:
                kernel(x)
            except Exception as error:
                assert said in str(error), error
            else:
                raise AssertionError("it is compiled")
            sys.modules.pop("fastexchange.ground.half.refusals", None)
    """)


def numbers_in(result):
    if isinstance(result, (tuple, list)):
        return [number for each in result for number in numbers_in(each)]
    return np.asarray(result).astype(complex).ravel().tolist()


# ---- all of NumPy's functions, at night ------------------------------------------------------------------------------
CALLS = (
    "f(x)", "f(e)", "f(X)", "f(x, y)", "f(e, e)", "f(x, 2)", "f(x, e)", "f(2, e)", "f((x, y))", "f([x, y])", "f(x, I)", "f(I, x)",
    "f(X, x)", "f(x > 1, x)", "f(e, e, 3)", "f(x, 0.5)", "f(x, y, x)", "f(x, x > 1, x)", "f(X, 1)", "f((2, 2), e)", "f(3, e)",
    "f([e, e])", "f([x > 1], [x])",
)  # fmt: skip
"""Ways to call a function `f` with arrays, numbers and what contains them. `x`, `y`, `X`: arrays; `e`: a number; `I`: indices."""
PARTS = 8
"""What they compile takes gigabytes if it is all in one process."""


def called(function, call):
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


def arguments(values, dtype):
    """`x`, `y`, `X` and `I` of CALLS."""
    square = np.array([[2, 1, 0.5, 1], [1, 3, 0, 1], [0.5, 0, 4, 1], [1, 1, 1, 8]], dtype)
    x = np.array(values, np.float32).astype(dtype)
    square[0] = x
    return x, x[::-1].copy(), square, np.array([0, 1, 1, 2])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_function_of_numpy_is_right_or_refused_by_a_typing_error(part):
    """In each way in which Numba can call it with float32, also of NaN and infinities: no error of LLVM's, no other number."""
    wrong, taken = [], 0
    for name, function in [*functions_of_numba()][part::PARTS]:
        for call in CALLS[:5] if isinstance(function, np.ufunc) else CALLS:
            kernel, reference = fast_args(called(function, call)), numba.njit(called(function, call))
            try:
                kernel(*arguments(VALUES, ml_dtypes.bfloat16))
            except TypingError:
                continue
            except Exception as error:
                found = error
            else:
                found = None
            try:
                reference(*arguments(VALUES, np.float32))
            except Exception:
                continue
            taken += 1
            for values in (VALUES, [1.5, np.nan, 3.0, -2.0], [-1.5, np.inf, -0.0, -np.inf]) if found is None else ():
                results = [f(*arguments(values, d)) for f, d in ((kernel, ml_dtypes.bfloat16), (reference, np.float32))]
                got, want = map(numbers_in, results)
                if len(got) != len(want) or not np.allclose(got, want, rtol=0.02, atol=0.01, equal_nan=True):
                    wrong.append((name, call, got, want))
            if found is not None:
                wrong.append((name, call, repr(found)[:200]))
    assert not wrong and taken > 100 / PARTS / 3


# ---- numba.vectorize -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_loops_that_are_declared_for_half_precision(form):
    """NumPy calls them, with arrays. In kernels Numba finds no loop for such elements, and says so."""
    kind = getattr(half, form.name)
    function = numba.vectorize([kind(kind, numba.float32), numba.float64(numba.float64, numba.float64)])(lambda a, b: a * b)
    signatures = [(kind[:], kind, kind[:])]
    scaled = numba.guvectorize(signatures, "(n),()->(n)")(elementwise("scaled(a, b, out)", "out[i] = a[i] * b"))
    x = array_of(form, 1.5, 2.0)
    products, squares = function(x, np.float32(1.001)), scaled(x, x[0])
    assert products.dtype == squares.dtype == form.dtype and squares.tolist() == [2.25, 3.0]
    assert np.array_equal(products, (x.astype(np.float32) * np.float32(1.001)).astype(form.dtype))
    assert numba.njit(lambda x: function(x, x))(np.full(2, 1.1)).tolist() == [1.1 * 1.1] * 2
    assert fast_args(lambda x: function(x.astype(np.float32), x[0] + 0))(x).tolist() == [2.25, 3.0]
    for call in (lambda x: function(x, x), lambda x: scaled(x, x[0], x)):
        check_raises(TypingError, r"x\.astype\(np\.float32\)|on the CPU", fast_args(call), x)


def test_functions_of_vectorize_return_half_precision():
    assert numba.vectorize(lambda a: half.bfloat16(a))(np.full(2, 3.14159)).tolist() == [3.140625] * 2
