"""``kernel.precompile``: compiled without a call, kept for other processes, and the errors of the call."""

import numba
import numpy as np
import pytest
from numba import types
from numba.core.errors import TypingError

from fastexchange import accelerate, decelerate, fast_args

CALLED = []


def note(x):
    CALLED.append(x)


def noting():
    def kernel(x, factor=2.0):
        with numba.objmode():
            note(1)
        return x.sum() * factor

    return fast_args(kernel)


FLOATS = types.Array(types.float64, 1, "C")


def test_examples_are_compiled_and_not_called(framework):
    kernel = noting()
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
    kernel = noting()
    assert kernel.precompile(signature, signature) == [(FLOATS, types.int64)] * 2
    assert kernel.counts().compiled == 1
    assert kernel(np.ones(2), 3) == 6.0 and kernel.counts().compiled == 1


def test_calls_that_numba_makes():
    """First-class functions, ``*args``, keyword-only parameters, literals, typed containers, other kernels, half precision."""
    inner = fast_args(lambda x: x + 1)

    def literal(x, axis):
        return np.concatenate((x, x), axis)

    cases = [
        (fast_args(lambda a, *rest: a + rest[1]), (1, 2, 3.5), 4.5),
        (fast_args(lambda a, *, b=2: a + b), (1,), 3),
        (fast_args(lambda f, a: f(a)), (inner, 2), 3),
        (fast_args(lambda values: values[0]), (numba.typed.List([1, 2]),), 1),
        (fast_args(lambda values: values[0]), ([3, 2],), 3),
        (fast_args(lambda arrays: arrays[0].sum()), ([np.ones(2), np.ones(3)],), 2.0),
        (fast_args(literal), (np.ones((1, 1)), 0), [[1.0], [1.0]]),
        (fast_args(lambda a: a), (2**63,), 2**63),
        (fast_args(lambda x: x.sum()), (np.ones(3, np.float16),), 3.0),
    ]
    for kernel, arguments, expected in cases:
        (taken,) = kernel.precompile(arguments)
        assert taken in kernel.overloads, arguments
        before = kernel.counts().compiled
        assert np.asarray(kernel(*arguments)).tolist() == expected
        assert kernel.counts().compiled == before, arguments


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
    ("float64(", Exception, ""),
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
    messages = []
    for attempt in (lambda: kernel.precompile((np.ones(3),)), lambda: kernel(np.ones(3))):
        with pytest.raises(TypingError) as caught:
            attempt()
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1] and "<lambda>(x: array(float64, 1d, C))" in messages[0]


def test_accelerated_functions():
    accelerate()
    try:
        kernel = numba.njit(lambda x: x.sum())
        boxed = numba.jit(forceobj=True)(lambda x: x)
    finally:
        decelerate()
    assert kernel.precompile((np.ones(3),), "(float32[::1],)")[0] == (FLOATS,)
    assert kernel(np.ones(3)) == 3.0 and kernel.counts() == (1, 0, 2)
    assert not hasattr(boxed, "precompile"), "functions in object mode are Numba's own"
    with pytest.raises(TypingError, match="Cannot determine Numba type"):
        kernel.precompile((object(),))
