"""Half precision where ml_dtypes is not installed: PyTorch's tensors need none, and what needs it says so."""

import numba
import numpy as np
import pytest
from forked import fork_python
from scale_kernels import elementwise

torch = pytest.importorskip("torch")

import fastexchange.half as half  # noqa: E402
from fastexchange import DLDataType, explain, fast_args, from_dlpack  # noqa: E402


# ---- what is checked, by processes without ml_dtypes ------------------------------------------------------------------
def refused(kinds, words, function, *arguments, times=3):
    for _ in range(times):
        with pytest.raises(kinds, match=words):
            function(*arguments)


def twice(x, text):
    return 2 * x[0], x, x[1:], x.copy(), np.full(2, 1.5, half.bfloat16), np.empty_like(x).size


def alike(x):
    y = np.empty(x.size, x.dtype)
    for i in numba.prange(x.size):
        y[i] = 2 * x[i]
    return y


def arguments_and_results():
    twice_njit = numba.njit(twice)
    alone, beside_text = fast_args(lambda x: twice_njit(x, 0)), fast_args(twice)
    calls = {"bfloat16": lambda x: alone(x), "float16": lambda x: beside_text(x, ""), "float8_e5m2": lambda x: alone(x)}
    asking = fast_args(lambda x: x[0], storage=True)
    for name in ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fnuz"):
        dtype = getattr(torch, name)
        x = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
        for _ in range(40 if name in calls else 0):
            number, same, tail, copied, made, size = calls[name](x)
            assert number == 2.0 and same is x and size == 3
            assert tail.dtype == dtype and tail.data_ptr() == x[1:].data_ptr() and tail.float().tolist() == [2.0, 3.0]
            assert copied.dtype == dtype and copied.float().tolist() == [1.0, 2.0, 3.0]
            assert made.dtype == torch.bfloat16 and made.float().tolist() == [1.5, 1.5]
        out = fast_args(out=f"x[n] -> y[n]: {name}")(elementwise("threefold(x, y)", "y[i] = 3 * x[i]"))(torch.ones(3))
        assert out.dtype == dtype and out.float().tolist() == [3.0, 3.0, 3.0]
        assert asking(x) > 50
    x = torch.ones(3, dtype=torch.bfloat16)
    assert torch.equal(fast_args(alike, parallel=True)(x), 2 * x)
    refused(numba.TypingError, r"operator\.lshift\(bfloat16, int64\) is not", fast_args(lambda x: x[0] << 1), x, times=1)
    nothing = r"array\(bfloat16, 1d, C\)\.nothing is not compiled"
    refused(numba.TypingError, nothing, fast_args(lambda x: x.nothing), x, times=1)
    refused(numba.TypingError, nothing, fast_args(lambda pair: pair[0].nothing), (x, 1), times=1)
    refused(BufferError, "ml_dtypes", fast_args(lambda x: np.ones(2, half.bfloat16)), np.ones(2))


def variables():
    from halves import BFLOAT16
    from test_half_variables import WRITTEN, check

    check(WRITTEN[:10], BFLOAT16)


def other_elements():
    """Those that no kernel computes with. (This way without compilation, too.)"""
    x = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu)
    for function, rest in ((lambda x: (x, x[1:]), ()), (lambda x, text: (x, x[1:]), ("",))):
        for storage in (False, True, False, True):
            kernel = fast_args(function, storage=storage)
            for _ in range(4 * storage):
                same, tail = kernel(x, *rest)
                assert same is x and tail.dtype == x.dtype and tail.tolist() == [2.0, 4.0]
            if not storage:
                refused(BufferError, r"^(?!.*ml_dtypes).*storage=True", kernel, x, *rest)
    assert "storage=True" in str(explain(x)) and "ml_dtypes" not in str(explain(x))
    for tensor in (x, torch.ones(3, dtype=torch.bfloat16)):
        refused(BufferError, "import ml_dtypes", from_dlpack, tensor)
    refused(ValueError, "bfloat16 has no NumPy dtype: a recent ml_dtypes has one; import it", DLDataType(4, 16).to_dtype)


def made(n):
    return np.full(n, 1.5, half.bfloat16)


def what_needs_ml_dtypes():
    """Numba's own code for a result, and NumPy's loops."""
    made_, x = numba.njit(made), torch.ones(3, dtype=torch.bfloat16)
    for function in (made, lambda n: (made_(n), 1), lambda n: [made_(n)]):
        refused(numba.TypingError, "install ml_dtypes", numba.njit(function), 2)
    assert fast_args(lambda x: np.full(2, 1.5, half.bfloat16)[1] + x[0])(x) == 2.5
    refused(BufferError, "ml_dtypes", fast_args(lambda x, part: x[part]), x, slice(0, 2))  # by Numba's own dispatcher
    assert numba.njit(lambda n: np.full(n, 1.5, half.float16))(2).dtype == np.float16
    assert numba.njit(lambda n: np.full(n, 1.5, half.bfloat16)[0])(2) == 1.5
    rounding = numba.vectorize(lambda a: half.bfloat16(a))
    refused(numba.TypingError, "ml_dtypes", rounding, np.ones(3), times=1)
    refused(TypeError, "did not contain a loop", rounding, np.ones(3))  # says NumPy from then on
    function = numba.vectorize(lambda a, b: a * b + 1)
    refused(numba.TypingError, "ml_dtypes|on the CPU", fast_args(lambda x: function(x, x)), x)
    refused(numba.TypingError, "Unsupported array dtype", function, np.ones(3, "V2"), np.ones(3, "V2"))


# ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("check", "environment"), [
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("arguments_and_results", "variables", "what_needs_ml_dtypes")),
    ("other_elements", {}), ("other_elements", {"NUMBA_DISABLE_JIT": "1"}),
], ids=str)  # fmt: skip
def test_without_ml_dtypes(check, environment):
    fork_python(f"""
        import sys
        sys.modules["ml_dtypes"] = None  # whatever is installed
        import test_half_without_ml_dtypes as tests
        tests.{check}()
    """, **environment)
