"""``FASTEXCHANGE_DEBUG=1``: what of an allocated output a kernel has not written."""

import warnings

import numpy as np
import pytest
from frameworks import needs_torch, torch
from interoperability import jax

from fastexchange import fast_args

TYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
HALVES = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"]
MAKERS = [np.asarray, *([torch.from_numpy] if torch is not None else []), *([jax.numpy.asarray] if jax is not None else [])]


@fast_args(out="x[n] -> y[n]")
def first(x, y):
    y[0] = x[0]


@pytest.fixture(autouse=True)
def debugging(monkeypatch):
    monkeypatch.setenv("FASTEXCHANGE_DEBUG", "1")


def warnings_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message).rpartition("<locals>.")[2] for each in caught]


@pytest.mark.parametrize("dtype", TYPES + HALVES * (torch is not None))
def test_what_is_left_is_counted(dtype):
    @fast_args(out=f"x[n] -> y[n, 2]: {dtype}, z[n]: {dtype}")
    def partly(x, y, z):
        for i in range(x.shape[0]):
            z[i] = 1
            if i:
                y[i, 0] = y[i, 1] = 1

    for make in [torch.from_numpy] if dtype in HALVES else MAKERS if dtype == "float32" else MAKERS[:2]:
        for _ in range(3):
            (message,) = warnings_of(lambda: partly(make(np.ones(3, np.float32))))  # noqa: B023
            assert "partly(): 2 of 6 elements of its output 'y' are still the " in message
            assert ("NaN" in message) == ("float" in dtype or "complex" in dtype)


def test_results_that_are_nan_and_given_outputs_are_not_reported():
    @fast_args(out="x[n] -> y[n], z[n]: int32")
    def kernel(x, y, z):
        for i in range(x.size):
            y[i] = x[i] - x[i]
        z[0] = 1

    infinite = np.full(3, np.inf, np.float32)
    assert warnings_of(lambda: kernel(infinite, None, np.zeros(3, np.int32))) == []
    assert [each.partition(" of ")[0] for each in warnings_of(lambda: kernel(infinite))] == ["kernel(): 2"]
    assert warnings_of(lambda: kernel(infinite[:0])) == []


def test_an_output_that_accumulates_into_what_was_there():
    @fast_args(out="x[n] -> y[]")
    def total(x, y):
        for i in range(x.shape[0]):
            y[()] += x[i]

    (message,) = warnings_of(lambda: total(np.ones(3)))
    assert message.startswith("total(): 1 of 1 elements of its output 'y' are still the NaN")
    assert np.isnan(total.bind(np.ones(3))())


@needs_torch
def test_operators():
    for call in (first.as_torch_op("fx_test_filled::first"), lambda x: torch.ops.fx_test_filled.first(x)):
        (message,) = warnings_of(lambda: call(torch.ones(3)))  # noqa: B023
        assert message.startswith("first(): 2 of 3 elements")


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_in_a_function_that_jax_compiles():
    """Python makes the call then."""
    x = jax.numpy.ones(3)
    (message,) = set(warnings_of(lambda: jax.jit(lambda x: first(x) + 1)(x).block_until_ready()))
    assert "first(): 2 of 3 elements of its output 'y' are still the NaN" in message
    seen = []
    jax.jit(lambda x: seen.append(first.explain(x)) or x)(x)
    assert "FASTEXCHANGE_DEBUG" in str(seen[0])
