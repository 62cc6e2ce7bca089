"""Calls that only Numba's dispatcher can make: native code hands them to it, and Python has a part in the first ones only."""

import collections
import enum

import numba
import numpy as np
import pytest
from counting import end_of
from frameworks import needs_torch, torch
from numba import types
from numba.experimental import jitclass
from oracle import numbas, type_and_message

from fastexchange import fast_args
from fastexchange.calls.kernel import AcceleratedKernel, FastKernel

Pair, Colour = collections.namedtuple("Pair", ("x", "y")), enum.Enum("Colour", "RED")


@jitclass([("v", types.float64)])
class Box:
    def __init__(self, v):
        self.v = v


first, one = (lambda x, k=0: x[0]), (lambda x, k=0: 1)
OF_ITEMS = {
    "floats": [1.0, 2.0], "bools": [True], "ints": [2, 3], "complex": [1j], "strings": ["a", "b"],
    "NumPy's scalars": [np.float32(1)], "tuples": [(1, 2.0)],
}  # fmt: skip
ARGUMENTS = OF_ITEMS | {
    "named tuples": [Pair(1, 2.0)], "a tuple with a list": ([1.0], 2), "a named tuple with an enum": Pair(1, Colour.RED),
    "nested": (((1, Colour.RED), 2), 3), "a tuple with an array": (np.ones(2), Colour.RED), "a set": {1, 2},
    "an enum": Colour.RED, "a slice": slice(1, 2), "a date": np.datetime64("2020-01-01"), "a class": np.float32,
}  # fmt: skip
MADE = {"an instance of a jitclass": lambda: Box(1.0), "a typed list": lambda: numba.typed.List([1.0])}
ACCELERATED = ["floats", "a tuple with a list", "an enum", "a typed list"]


@pytest.fixture
def no_python(monkeypatch):
    """Returns a function after whose call the slow path fails."""
    return lambda: [monkeypatch.setattr(FastKernel, name, None) for name in ("_call_numba", "_call_slowly")]


@pytest.mark.parametrize(
    "cls, name", [(FastKernel, name) for name in (*ARGUMENTS, *MADE)] + [(AcceleratedKernel, name) for name in ACCELERATED]
)
def test_later_calls_run_no_python_of_ours(cls, name, no_python):
    kernel, value = cls(first if name in OF_ITEMS else one), MADE[name]() if name in MADE else ARGUMENTS[name]
    calls = [((value,), {}), ((), {"x": value})]
    if name in ACCELERATED:
        calls += [((value, 1), {}), ((value,), {"k": 2}), ((value, np.ones(2)), {})]
    for args, kwargs in calls:
        kernel(*args, **kwargs)
    no_python()
    for args, kwargs in calls + calls:
        assert kernel(*args, **kwargs) == numbas(kernel)(*args, **kwargs) == (value[0] if name in OF_ITEMS else 1)


def generates(x, k=0):  # a lambda that yields Numba compiles for Python 3.11 and older only
    yield x


def test_generators_star_args_and_native_calls_in_turn_with_numbas(no_python):
    generate, count, same = map(fast_args, (generates, lambda *args: len(args), lambda x: x))
    generate(1.0), generate(np.ones(2)), count([1.0], 2)
    for i in range(4):
        assert same(i) == i and same({i}) == {i}
    assert same.counts().fast >= 2
    no_python()
    assert list(generate(2.0)) == [2.0]
    (found,) = generate(np.ones(2))
    assert found.tolist() == [1, 1] and count([1.0], 2) == count([1.0], 2) == 2


@needs_torch
def test_what_a_list_holds_is_seen_in_each_call():
    kernel, tensor = fast_args(first), torch.ones(3)
    refused = ([1.0, tensor], [tensor, 1.0], [1.0, 2], [1.0, "a"], [], [2**70], [None, 1.0], [Colour.RED, 1])

    def outcome(kernel, value):
        kind, text = type_and_message(kernel, value)
        return kind, text.splitlines()[0]  # Numba repeats other lines in each call

    cold = [outcome(fast_args(first), value) for value in refused]
    for _ in range(3):
        assert kernel([1.0, 2.0]) == 1.0 and kernel([tensor, tensor]) is kernel((tensor, Colour.RED)) is tensor
        assert kernel([np.ones(1, np.float32), tensor]).tolist() == [1] and kernel([Colour.RED]) is Colour.RED
        assert [outcome(kernel, value) for value in refused] == cold


only_by_position = lambda x, /, k=0: 1  # noqa: E731
WRONG_CALLS = [
    lambda k: k([1.0], 1, 2), lambda k: k(), lambda k: k([1.0], z=1), lambda k: k([1.0], x=[1.0]), lambda k: k(k=[1.0]),
    lambda k: k(k=1), lambda k: k([1.0], [[1.0]]), lambda k: k(k=object(), x=[1.0]), lambda k: k(k=[1, "a"], x=[1.0]),
]  # fmt: skip


def test_wrong_calls_have_the_errors_of_the_first_one():
    for function in (first, only_by_position):
        kernel = fast_args(function)
        for number, call in enumerate(WRONG_CALLS):
            for _ in range(3):
                assert kernel([1.0]) == kernel([1.0], k={1}) == 1.0 and (function is not first or kernel(x=[1.0]) == 1.0)
            assert end_of(call, kernel) == end_of(call, fast_args(function)), number
