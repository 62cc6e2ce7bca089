"""What counts as a tensor where the type alone does not say it; for what is none, the words say what to pass instead."""

import array
import collections
import contextlib
import ctypes
import decimal
import itertools
import re
import types

import numba
import numpy as np
import pytest
from frameworks import needs_torch, torch
from interoperability import jax
from made_producers import Dunder
from oracle import type_and_message
from raising import check_raises

from fastexchange import convert, explain, fast_args, from_dlpack, to_dlpack

first, second_of_first, plain = fast_args(lambda x: x[0]), fast_args(lambda x: x[0][1]), fast_args(lambda x: 1)


@fast_args(out="x[n] -> y[n]")
def twice(x, y):
    y[:] = 2 * x


CONVERTED = lambda x: convert(x, np.ndarray)  # noqa: E731
FUNCTIONS, OF_ONE_TENSOR = (plain, lambda x: plain((x, 1)), lambda x: plain.bind(x)()), (twice, from_dlpack, CONVERTED)


def said_by_all(thing, advice: str, functions=(*FUNCTIONS, *OF_ONE_TENSOR)) -> None:
    """`advice`: with ``{}`` for the argument's expression."""
    is_several = "list(" in advice or "tuple(" in advice
    names = {FUNCTIONS[1]: "x[0]"}
    for function in functions:
        kind, message = type_and_message(function, thing)
        assert issubclass(kind, TypeError)
        said = "numpy.array(list(x))" if is_several and function in OF_ONE_TENSOR else advice.format(names.get(function, "x"))
        assert said in message
    assert advice.format("obj") in str(explain(thing))
    assert plain not in functions or advice.format("x") in str(plain.explain(thing))


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_tracers_of_jax():
    x, numpy, kernel = jax.numpy.arange(3.0), np, twice

    def check(x):
        said_by_all(x, "kernel(numpy.asarray(x))", OF_ONE_TENSOR[1:])  # a kernel with outputs takes it
        for function in FUNCTIONS:
            assert "jax.pure_callback(" in type_and_message(function, x)[1]
        return x

    for traced in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())):
        traced(check)(x)

    @jax.jit
    def advised(x):
        return jax.pure_callback(lambda x: kernel(numpy.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    assert advised(x).tolist() == [1.0, 3.0, 5.0]


def things_that_are_none():
    yield from ((thing, "pass list({})") for thing in (map(int, [1]), range(3), collections.deque([1.0]), iter([1.0])))
    xarrays = type("DataArray", (), {"__module__": "xarray.core.dataarray"})  # by the names alone: it need not be installed
    yield xarrays(), "pass its .data"
    if torch is not None:
        model = torch.nn.Linear(2, 2)
        yield from ((thing, "pass list({})") for thing in (model.parameters(), model.named_parameters()))
        yield from [(model.state_dict(), "pass list({}.values())"), (model.state_dict().values(), "pass list({})")]
        yield from [(model, "list({}.parameters())"), (torch.ones(2, 3).shape, "pass tuple({})")]
    with contextlib.suppress(ImportError):
        import pandas

        for thing in (pandas.Series([1.0]), pandas.DataFrame({"a": [1.0]}), pandas.Index([1.0])):
            yield thing, "pass its .to_numpy()"


def test_what_is_none_and_what_to_pass_instead():
    for thing, advice in things_that_are_none():
        said_by_all(thing, advice)
    for wrong in ("x[n] -> y[n]", ["x -> y"]):  # a notation without out=
        kind, message = type_and_message(fast_args, wrong)
        assert kind is TypeError and f"out={(wrong if isinstance(wrong, str) else wrong[0])!r}" in message
    if torch is not None:
        with torch.no_grad():
            assert plain(list(torch.nn.Linear(2, 2).parameters())[:1]) == plain(tuple(torch.ones(2, 3).shape)) == 1


def test_a_format_that_is_refused_is_named():
    letters, struct = array.array("u", "ab"), type("Struct", (ctypes.Structure,), {"_fields_": (("a", ctypes.c_int32),)})
    formats = {f"'{memoryview(letters).format}', items of {letters.itemsize} bytes": letters}
    formats |= {"'<c', items of 1 bytes": (ctypes.c_char * 3)(), "'T{<i:a:}', items of 4 bytes": struct()}
    subjects = {from_dlpack: r"from_dlpack\(\): an? ", to_dlpack: r"to_dlpack\(\): an? ", first: r"'x' \(position 0\)"}
    for (text, thing), (function, subject) in itertools.product(formats.items(), subjects.items()):
        kind, message = type_and_message(function, thing)
        assert kind is BufferError and text in message and re.search(subject, message)


def test_numpys_scalars_and_subclasses_are_converted_if_dlpack_has_a_type_for_them():
    for scalar in (np.float64(1.5), np.int8(3), np.bool_(True), np.complex64(1j), np.float16(2)):
        made = from_dlpack(scalar)
        assert made.shape == () and made.dtype == scalar.dtype and made == scalar and not made.flags.writeable
        assert from_dlpack(convert(scalar, np.ndarray)) == scalar
        to_dlpack(scalar, max_version=(1, 0))
    given = np.ones(3).view(type("Numbas", (np.ndarray,), {"__numba_array_subtype_dispatch__": True}))
    assert np.shares_memory(from_dlpack(given), given) and convert(given, np.ndarray) is given
    for scalar in (np.datetime64(1, "s"), np.str_("a"), np.longdouble(1)):
        check_raises(BufferError, re.escape(repr(scalar.dtype)), from_dlpack, scalar)
    for function in (from_dlpack, to_dlpack, CONVERTED):
        check_raises(TypeError, r"filled\(\)", function, np.ma.ones(3))


def proxy(target):
    """An object that forwards all attributes."""
    return type("Proxy", (), {"__getattr__": lambda self, name: getattr(target, name)})()


def test_an_object_may_have_the_methods_that_its_class_lacks():
    target = np.arange(3.0)
    own = types.SimpleNamespace(__dlpack__=target.__dlpack__, __dlpack_device__=target.__dlpack_device__)
    for thing in [own, proxy(target)] * 3:
        assert np.shares_memory(from_dlpack(thing), target) and explain(thing).path == "dunder"
        assert first(thing) == 0.0 and second_of_first((thing,)) == 1.0
    for thing in (types.SimpleNamespace(), proxy(Dunder)):  # a class: no methods of its own
        for function in (from_dlpack, first):
            assert issubclass(type_and_message(function, thing)[0], TypeError)


@needs_torch
def test_a_dtype_of_another_framework():
    check_raises(TypeError, "torch.dtype; pass 'float32'$", from_dlpack, torch.ones(2), dtype=torch.float32)
    said = r"from_dlpack\(\): dtype is what numpy.dtype takes, not 'nothing'"
    check_raises(TypeError, said, from_dlpack, np.ones(2), dtype="nothing")


def test_explain_says_that_no_call_takes_it_and_of_a_type_what_its_instances_take():
    """Numba has no type for some objects, and takes others."""
    said = "Numba has no type for it: the call raises TypeError"
    kernel = fast_args(lambda x: x)
    assert said in str(explain(decimal.Decimal(1))) and type_and_message(kernel, decimal.Decimal(1))[0] is TypeError
    taken = numba.typed.List([1])
    assert explain(taken).path == "numba" and said not in str(explain(taken)) and list(kernel(taken)) == [1]
    for instance, path in ((np.ones(1), "ndarray"), (1.0, "scalar"), (np.float32(1), "scalar"), ((), "tuple")):
        found = explain(type(instance))
        assert (found.type, found.path) == (explain(instance).type, path) and "its instances" in found.reasons[-1]
    assert "float32" in str(kernel.explain(np.float32)) and plain(np.float32) == 1  # the class itself is the argument
