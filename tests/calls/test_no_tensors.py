"""What users pass as tensors and is none: the words say what it is, and what to pass instead."""

import collections

import numpy as np
import pytest
from frameworks import torch
from interoperability import jax
from oracle import type_and_message

from fastexchange import convert, explain, fast_args, from_dlpack

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args
def plain(x):
    return 1


@fast_args(out="x[n] -> y[n]")
def twice(x, y):
    for i in range(x.shape[0]):
        y[i] = 2 * x[i]


FUNCTIONS = (plain, lambda x: plain((x, 1)), plain.bind)
OF_ONE_TENSOR = (twice, from_dlpack, lambda x: convert(x, np.ndarray))


def said_by_all(thing, advice: str) -> None:
    is_several = "list(" in advice or "tuple(" in advice
    for function in (*FUNCTIONS, *OF_ONE_TENSOR):
        kind, message = type_and_message(function, thing)
        assert issubclass(kind, TypeError)
        assert ("pass its items one by one" if is_several and function in OF_ONE_TENSOR else advice) in message
    assert advice in str(explain(thing)) and advice in str(plain.explain(thing))


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_tracers_of_jax():
    x = jax.numpy.arange(3.0)
    for traced in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())):
        traced(lambda x: (said_by_all(x, "kernel(numpy.asarray(x))"), x)[1])(x)


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_the_line_for_jax_works():
    numpy, kernel = np, twice

    @jax.jit
    def function(x):
        return jax.pure_callback(lambda x: kernel(numpy.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    assert function(jax.numpy.arange(3.0)).tolist() == [1.0, 3.0, 5.0]


@needs_torch
def test_what_pytorch_gives():
    model = torch.nn.Linear(2, 2)
    for thing, advice in (
        (model.parameters(), "pass list(…) of it"), (model.named_parameters(), "pass list(…) of it"),
        (model.state_dict(), "list(….values())"), (model.state_dict().values(), "pass list(…) of it"),
        (model, "list(module.parameters())"), (torch.ones(2, 3).shape, "pass tuple(…) of it"),
    ):  # fmt: skip
        said_by_all(thing, advice)
    with torch.no_grad():
        assert plain(list(model.parameters())[:1]) == plain(tuple(torch.ones(2, 3).shape)) == 1


@pytest.mark.parametrize("module, make", [("pandas", lambda pd: [pd.Series([1.0]), pd.DataFrame({"a": [1.0]}), pd.Index([1.0])])])
def test_what_pandas_gives(module, make):
    for thing in make(pytest.importorskip(module)):
        said_by_all(thing, "pass its .to_numpy()")


def test_what_xarray_gives():
    """By the names alone, so that it need not be installed."""
    said_by_all(type("DataArray", (), {"__module__": "xarray.core.dataarray"})(), "pass its .data")


@pytest.mark.parametrize("thing", [map(int, [1]), range(3), collections.deque([1.0]), iter([1.0])])
def test_iterables(thing):
    said_by_all(thing, "pass list(…) of it")


def test_a_notation_without_out():
    for wrong in ("x[n] -> y[n]", ["x -> y"]):
        kind, message = type_and_message(fast_args, wrong)
        assert kind is TypeError and f"out={(wrong if isinstance(wrong, str) else wrong[0])!r}" in message


def test_a_type_is_explained_by_its_instances():
    for cls, path in ((np.ndarray, "ndarray"), (float, "scalar"), (np.float32, "scalar"), (tuple, "tuple")):
        found = explain(cls)
        assert (found.type, found.path) == (explain(cls(1) if path != "tuple" else ()).type, path)
        assert "its instances" in found.reasons[-1]
    assert "float32" in str(plain.explain(np.float32))  # here the class itself is the argument
    assert plain(np.float32) == 1
