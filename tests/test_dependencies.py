"""What machine code depends on: told by value, the same in every process, or not at all."""

import collections
import enum
import math
import types

import numba
import numpy as np
import pytest
from interpreter import run_python
from numba.extending import intrinsic, overload

from fastexchange import fast_args
from fastexchange.dependencies import Untold, dependencies


def plain(x):
    return x + 1


class Colour(enum.Enum):
    RED = 1


class Shade(enum.IntEnum):
    DARK = 1


Point = collections.namedtuple("Point", "x y")


def module(**attributes) -> types.ModuleType:
    made = types.ModuleType("module_of_the_test")
    vars(made).update(attributes)
    return made


def digest(value, code="value", **options):
    """Of a function that names `value`."""
    namespace = {"value": value, "__name__": __name__}
    exec(f"def function(x):\n    return {code}", namespace)
    return dependencies(namespace["function"], options)


def closure(held):
    return lambda x: x + held


def nested(constant):
    return numba.njit(eval(f"lambda x: x + {constant}"))


PAIRS = {
    "int": (1, 2),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "text": ("a", "b"),
    "text and bytes": ("a", b"a"),
    "none": (None, ...),
    "numpy scalars": (np.float32(1), np.float64(1)),
    "values of scalars": (np.float32(1), np.float32(2)),
    "days": (np.datetime64(1, "D"), np.datetime64(1, "s")),
    "arrays": (np.arange(3), np.array([0, 1, 3])),
    "types of arrays": (np.zeros(2, "i8"), np.zeros(2, "f8")),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "orders": (np.zeros((2, 3)), np.zeros((2, 3), order="F")),
    "records": (np.zeros(1, [("a", "f4")]), np.zeros(1, [("b", "f4")])),
    "tuples": ((1, 2), (1, 3)),
    "nested tuples": ((1, (2, 3)), ((1, 2), 3)),
    "tuple and list": ((1, 2), [1, 2]),
    "dictionaries": ({"a": 1}, {"a": 2}),
    "sets": ({1, 2}, {1, 3}),
    "named tuples": (Point(1, 2), Point(1, 3)),
    "classes of named tuples": (Point, collections.namedtuple("Point", "x z")),
    "members": (Colour.RED, enum.Enum("Colour", {"RED": 2}).RED),
    "enumerations": (Colour, enum.Enum("Colour", {"RED": 2})),
    "integer members": (Shade.DARK, enum.IntEnum("Shade", {"DARK": 2}).DARK),
    "types of Numba": (numba.float32, numba.float64),
    "arrays of Numba": (numba.float32[:], numba.float32[::1]),
    "dtypes": (np.dtype("f4"), np.dtype("f8")),
    "builtins": (math.sin, math.cos),
    "ufuncs": (np.sin, np.cos),
    "functions of NumPy": (np.sum, np.prod),
    "exceptions": (ValueError, TypeError),
    "dispatchers": (nested(1), nested(2)),
    "options of dispatchers": (numba.njit(plain), numba.njit(fastmath=True)(plain)),
    "kernels": (fast_args(nested(1)), fast_args(nested(2))),
    "ufuncs of Numba": (numba.vectorize(lambda x: x + 1), numba.vectorize(lambda x: x + 2)),
    "defaults": (eval("lambda x=1: x"), eval("lambda x=2: x")),
    "keyword defaults": (eval("lambda *, x=1: x"), eval("lambda *, x=2: x")),
    "closures": (closure(1), closure(2)),
    "closures over dispatchers": (closure(nested(1)), closure(nested(2))),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_values_are_told_apart(pair):
    one, other = PAIRS[pair]
    assert digest(one) == digest(one) != digest(other)


@pytest.mark.parametrize("pair", PAIRS)
def test_attributes_of_modules(pair):
    pair = one, other = PAIRS[pair]
    assert digest(module(used=one), "value.used") == digest(module(used=one), "value.used")
    assert digest(module(used=one), "value.used") != digest(module(used=other), "value.used")
    assert digest(module(used=one), "value.other") == digest(module(used=other), "value.other")
    inner = [digest(module(inner=module(used=each)), "value.inner.used") for each in pair]
    assert inner[0] != inner[1]


@pytest.mark.parametrize("code", ["[value for _ in x]", "(lambda: value)()", "value.used + 1", "x if value else 0"])
def test_wherever_the_name_stands(code):
    assert digest(module(used=1), code) != digest(2, code)


def test_calls_are_followed():
    names = {"__name__": __name__}
    exec("def outer(x): return inner(x)\ndef inner(x): return x + LIMIT", names)
    found = []
    for limit in (1, 2, 1):
        names["LIMIT"] = limit
        found.append(digest(numba.njit(names["outer"])))
    assert found[0] == found[2] != found[1]
    del names["LIMIT"]
    assert digest(numba.njit(names["outer"])) not in found


def test_what_calls_itself_and_what_holds_itself():
    names: dict = {"__name__": __name__}
    exec("def f(x): return g(x)\ndef g(x): return f(x) + h.f(x)", names)
    names["h"] = module(f=names["f"])
    names["h"].self = names["h"]
    names["f"], names["g"] = numba.njit(names["f"]), numba.njit(names["g"])
    assert digest(names["f"]) == digest(names["f"])
    held: list = [1]
    held.append(held)
    assert digest(held) == digest(held)


def test_implementations_of_functions():
    def stub(x):
        pass

    def by_one(x):
        return lambda x: x + 1

    before = digest(stub)
    overload(stub)(by_one)
    assert digest(stub) == digest(stub) != before

    def typed(constant):
        def definition(typingctx, x):
            return x(x), lambda context, builder, signature, values: values[constant]

        return intrinsic(definition)

    assert digest(typed(0)) != digest(typed(1))


def test_options():
    assert len({dependencies(plain, options) for options in ({}, {"fastmath": True}, {"locals": {"x": numba.float32}})}) == 3


@pytest.mark.parametrize("value", [object(), plain.__get__(1), np.array([object()]), type("Class", (), {}), [object()]], ids=type)
def test_what_cannot_be_told(value):
    with pytest.raises(Untold, match="'value', a global of function, is "):
        digest(value)
    with pytest.raises(Untold, match="'used' of module module_of_the_test is "):
        digest(module(used=value), "value.used")
    with pytest.raises(Untold, match=r"'held', a variable of closure.<locals>.<lambda>, is "):
        digest(closure(value))


def test_lists_inside_one_another():
    deep: list = []
    for _ in range(100000):
        deep = [deep]
    with pytest.raises(Untold, match="RecursionError"):
        digest(deep)


def test_a_module_whose_attributes_fail():
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError(name)

    assert digest(Lazy("lazy"), "value.used") == digest(Lazy("lazy"), "value.used")


def test_the_same_in_every_process():
    """But for what lies at an address, or depends on the order of a set of strings."""
    program = """
    from test_dependencies import *
    print(*[digest(each) for pair in PAIRS.values() for each in pair], digest({"a", "b", "c"}), digest(1, "x in {'a', 'b', 'c'}"))
    """
    first, second = (run_python(program, PYTHONHASHSEED=seed).stdout.split() for seed in "12")
    assert first == second and len(first) == 2 * len(PAIRS) + 2
