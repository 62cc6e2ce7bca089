"""``kernel.precompile``: compiled without a call, kept for other processes, and the errors of the call."""

import numba
import numpy as np
import pytest
from children import accelerating
from numba import types
from numba.core.errors import TypingError
from oracle import type_and_message

from fastexchange import fast_args

CALLED: list = []
FLOATS = types.Array(types.float64, 1, "C")


def noting(x, factor=2.0):
    with numba.objmode():
        CALLED.append(1)
    return x.sum() * factor


def test_examples_are_compiled_and_not_called(framework):
    kernel = fast_args(noting)
    CALLED.clear()
    x = framework.tensor(np.arange(3.0))
    (taken,) = kernel.precompile((x,))
    assert CALLED == [] and kernel.counts() == (0, 0, 1) and kernel.signatures == [taken]
    assert taken[0].dtype == types.float64 and taken[1] == types.Omitted(2.0)
    assert kernel.precompile((x,), {"x": x}) == [taken, taken] and kernel.counts() == (0, 0, 1)
    for _ in range(4):
        assert kernel(x) == 6.0
    assert kernel.counts() == (4, 0, 1) and len(CALLED) == 4, "a call had to learn something"


@pytest.mark.parametrize("signature", [
    "float64(float64[::1], int64)", "(float64[::1], int64)", types.float64(FLOATS, types.int64), (FLOATS, types.int64),
])  # fmt: skip
def test_signatures(signature):
    kernel = fast_args(noting)
    assert kernel.precompile(signature, signature) == [(FLOATS, types.int64)] * 2
    assert kernel.counts().compiled == 1
    assert kernel(np.ones(2), 3) == 6.0 and kernel.counts().compiled == 1


@pytest.mark.parametrize(("function", "arguments", "expected"), [
    (lambda a, *rest: a + rest[1], (1, 2, 3.5), 4.5),
    (lambda a, *, b=2: a + b, (1,), 3),
    (lambda f, a: f(a), (fast_args(lambda x: x + 1), 2), 3),
    (lambda values: values[0], (numba.typed.List([1, 2]),), 1),
    (lambda values: values[0], ([3, 2],), 3),
    (lambda arrays: arrays[0].sum(), ([np.ones(2), np.ones(3)],), 2.0),
    (lambda x, axis: np.concatenate((x, x), axis), (np.ones((1, 1)), 0), [[1.0], [1.0]]),
    (lambda a: a, (2**63,), 2**63),
    (lambda x: x.sum(), (np.ones(3, np.float16),), 3.0),
])  # fmt: skip
def test_calls_that_numba_makes(function, arguments, expected):
    kernel = fast_args(function)
    (taken,) = kernel.precompile(arguments)
    before = kernel.counts().compiled
    assert taken in kernel.overloads and np.asarray(kernel(*arguments)).tolist() == expected
    assert kernel.counts().compiled == before


def test_no_several_and_declared_signatures():
    assert fast_args(lambda: 3).precompile(()) == [()]
    kernel = fast_args(lambda a, b: a + b)
    assert kernel.precompile() == []
    assert kernel.precompile((1, 2.0), "(int8, int8)", {"b": 1, "a": 2}) == [
        (types.int64, types.float64), (types.int8, types.int8), (types.int64, types.int64),
    ]  # fmt: skip
    kernel = fast_args("float64(float64[:], float64)")(lambda x, k: x.sum() * k)
    (declared,) = kernel.signatures
    assert kernel.precompile((np.ones(3), 2), "(float64[:], float64)", "(float64[::1], int64)") == [declared] * 3
    for call in ((np.ones(3, np.complex64), 2), "(complex64[:], float64)"):
        with pytest.raises(TypeError, match="not one of the declared signatures is for"):
            kernel.precompile(call)


def test_outputs_may_be_omitted_and_no_tensor_is_written_to():
    kernel, x = fast_args(lambda x, y: y.fill(0), out="x[n] -> y[n]"), np.ones(3)
    assert kernel.precompile((x,), {"x": x}, (x, x)) == [(FLOATS, FLOATS)] * 3 and x.tolist() == [1, 1, 1]
    kernel(x)
    assert kernel.counts() == (1, 0, 1)


@pytest.mark.parametrize(("call", "error", "text"), [
    (np.ones(3), TypeError, "into a tuple"),
    ({1: 2}, TypeError, "into a tuple"),
    ((np.ones(3), types.float64), TypeError, "types alone"),
    ((np.ones(3), 1, 2), TypeError, "positional arguments"),
    ({"y": 1}, TypeError, "'y'"),
    ((object(),), TypeError, "'x'"),
    ((np.ones(3, ">f8"),), BufferError, "'x'"),
    (("text",), TypingError, "sum"),
    ("(unicode_type, float64)", TypingError, "sum"),
    ("float64(", SyntaxError, "'(' was never closed"),
    ("float32(float64[:], float64)", TypeError, "it returns float64, not float32"),
])  # fmt: skip
def test_errors(call, error, text):
    kernel = fast_args(lambda x, factor=2.0: x.sum() * factor)
    with pytest.raises(error) as caught:
        kernel.precompile(call)
    assert text in str(caught.value)
    assert kernel.counts().compiled == ("returns" in text) and kernel.counts().fast == 0


def test_a_compilers_error_is_that_of_the_call():
    kernel = fast_args(lambda x: x.no_such_attribute)
    one, other = type_and_message(kernel.precompile, (np.ones(3),)), type_and_message(kernel, np.ones(3))
    assert one[0] is other[0] is TypingError and one[1].splitlines()[0] == other[1].splitlines()[0]
    assert "<lambda>(x: array(float64, 1d, C))" in one[1]


def test_accelerated_functions():
    with accelerating():
        kernel, boxed = numba.njit(lambda x: x.sum()), numba.jit(forceobj=True)(lambda x: x)
    assert kernel.precompile((np.ones(3),), "(float32[::1],)")[0] == (FLOATS,)
    assert kernel(np.ones(3)) == 3.0 and kernel.counts() == (1, 0, 2)
    assert not hasattr(boxed, "precompile"), "functions in object mode are Numba's own"
    with pytest.raises(TypingError, match="Cannot determine Numba type"):
        kernel.precompile((object(),))
