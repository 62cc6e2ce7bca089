"""What machine code depends on: told by value, the same in every process, or not at all."""

import builtins
import collections
import ctypes
import dis
import enum
import functools
import importlib
import inspect
import math
import os
import struct
import sys
import time
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from interpreter import run_python
from numba.core.typeconv.rules import default_casting_rules
from numba.extending import intrinsic, make_attribute_wrapper, models, overload, overload_attribute, register_model

from fastexchange import fast_args
from fastexchange.calls.dependencies import NotDescribable, dependencies, meaning_of, note_loaded
from fastexchange.calls.names_in_code import parts_of, steps, steps_by_dis
from fastexchange.ground.numba_extensions import conversions, extensions
from fastexchange.ground.numba_internals import is_known_file


def plain(x):
    return x + 1


Colour, Shade = enum.Enum("Colour", "RED BLUE"), enum.IntEnum("Shade", "DARK LIGHT")
Described = enum.Enum("Described", {"A": 1, "words": lambda self: "a"})
Point, Pair = collections.namedtuple("Point", "x y"), collections.namedtuple("Pair", "x y")
Table, Refusal = type("Table", (dict,), {}), type("Refusal", (Exception,), {})


def module(**attributes) -> types.ModuleType:
    made = types.ModuleType("module_of_the_test")
    vars(made).update(attributes)
    return made


def executed(source: str, *jitted: str, **names) -> dict:
    """The names that a source defines, in a namespace with further ones; of some functions, dispatchers of Numba's."""
    names["__name__"] = __name__
    exec(source, names)
    names.update({name: numba.njit(names[name]) for name in jitted})
    return names


def digest(value, code="value", **options):
    """Of a function that names `value`."""
    return dependencies(executed(f"def function(x):\n    return {code}", value=value)["function"], options)


def refused(words: str, *given) -> None:
    """What :func:`digest` is given cannot be described."""
    with pytest.raises(NotDescribable, match=words):
        digest(*given)


def closure(held):
    return lambda x: x + held


def nested(constant):
    return numba.njit(eval(f"lambda x: x + {constant}"))


def protecting(source: str):
    return executed(f"def protecting(x):\n {source}\n except Exception: return 5", plain=plain)["protecting"]


def nan(bits: int) -> float:
    """A NaN with a payload, or (beyond 51 bits) a sign."""
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | bits))[0]


Level, Height = (enum.Enum("Level", {"LOW": nan(bits)}) for bits in (0, 1))  # Height: as in another process


def with_constant(constant):
    """Code with a constant that this Python's compiler does not make; CPython 3.14's makes slices."""
    code = (lambda x: x[12345]).__code__
    return code.replace(co_consts=tuple(constant if each == 12345 else each for each in code.co_consts))


PAIRS = [
    # numbers, text, and what is like them, bit by bit
    (1, True), (1, 1.0), (0.0, -0.0), (nan(0), nan(1)), (nan(0), nan(1 << 63)), (complex(1, nan(0)), complex(1, nan(1))),
    (complex(0.0, 0.0), complex(0.0, -0.0)), ("a", "b"), ("a", b"a"), (None, ...), (slice(1, 2), slice(1, 2, 1)),
    (with_constant(slice(1, 3)), with_constant(slice(1, 4))),
    # NumPy's
    (True, np.True_), (np.float64(1), 1.0), (np.float32(1), np.float64(1)), (np.float32(1), np.float32(2)),
    (np.float64(nan(0)), np.float64(nan(1))), (np.datetime64(1, "D"), np.datetime64(1, "s")),
    (np.arange(3), np.array([0, 1, 3])), (np.zeros(2, "i8"), np.zeros(2, "f8")), (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.zeros((2, 3)), np.zeros((2, 3), order="F")), (np.zeros(1, [("a", "f4")]), np.zeros(1, [("b", "f4")])),
    (np.dtype("f4"), np.dtype("f8")), (np.sin, np.cos), (np.sum, np.prod),
    # containers
    ((1, 2), (1, 3)), ((1, (2, 3)), ((1, 2), 3)), ((1, 2), [1, 2]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}),
    (frozenset([nan(0)]), frozenset([nan(1)])), (Point(1, 2), Point(1, 3)), (Point, Pair),
    # objects by their names
    (Colour.RED, Colour.BLUE), (Colour, Shade), (math.sin, math.cos), (ValueError, TypeError), (Refusal, ValueError),
    (numba.objmode, numba.parallel_chunksize), (numba.float32, numba.float64), (numba.float32[:], numba.float32[::1]),
    # functions, by their code, options and values
    (nested(1), nested(2)), (fast_args(nested(1)), fast_args(nested(2))), (numba.njit(plain), numba.njit(fastmath=True)(plain)),
    [numba.njit(plain, locals={"y": each}) for each in (numba.float32, numba.float64)],
    [numba.njit(each)(eval("lambda x: x")) for each in ("int64(int64)", "float64(float64)")],
    (eval("lambda x, y: len(y)"), eval("lambda x, *y: len(y)")),
    (protecting("plain(x)\n try: plain(1.0)"), protecting("try: plain(x); plain(1.0)")),  # in their tables of exceptions
    (eval("lambda x=1: x"), eval("lambda x=2: x")), (eval("lambda *, x=1: x"), eval("lambda *, x=2: x")),
    (closure(1), closure(2)), (closure(nested(1)), closure(nested(2))),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_values_that_differ_have_different_digests(pair):
    one, other = pair
    assert digest(one) == digest(one) != digest(other)
    used = [digest(module(used=each), "value.used") for each in (one, one, other)]
    assert used[0] == used[1] != used[2]
    assert digest(module(used=one), "value.other") == digest(module(used=other), "value.other")
    assert len({digest(module(inner=module(used=each)), "value.inner.used") for each in pair}) == 2


@pytest.mark.parametrize("code", ["[value for _ in x]", "(lambda: value)()", "value + 1", "x if value else 0"])
def test_wherever_the_name_stands(code):
    """Beyond the 256th name instructions have a prefix."""
    many = " + ".join(f"x.a{i}" for i in range(300))
    for source in (code, f"{many} + {code}"):
        assert digest(1, source) != digest(2, source)
        modules = [module(used=each, inner=module(used=each)) for each in (1, 2)]
        for used in ("value.used", "value.inner.used"):
            assert len({digest(each, source.replace("value", used)) for each in modules}) == 2


def test_calls_are_followed():
    names = executed("def outer(x): return inner(x)\ndef inner(x): return x + LIMIT")
    found = []
    for names["LIMIT"] in (1, 2, 1):
        found.append(digest(numba.njit(names["outer"])))
    assert found[0] == found[2] != found[1]
    del names["LIMIT"]
    assert digest(numba.njit(names["outer"])) not in found
    names = executed("def f(x): return g(x)\ndef g(x): return f(x) + h.f(x)", "f", "g", h=module())
    names["h"].f, names["h"].self = names["f"].py_func, names["h"]
    held: list = [1]
    held.append(held)
    for each in (names["f"], held):
        assert digest(each) == digest(each)


def test_options_and_implementations_of_functions():
    assert len({dependencies(plain, options) for options in ({}, {"fastmath": True}, {"locals": {"x": numba.float32}})}) == 3

    def stubs():
        yield executed("def stub(x): pass")["stub"]
        for constant, options in ((1, {}), (2, {}), (1, {"error_model": "python"}), (1, {"error_model": "numpy"})):
            stub = executed("def stub(x): pass")["stub"]
            overload(stub, jit_options=options)(eval(f"lambda x: lambda x: x + {constant}"))
            yield stub
        for constant in (0, 1):
            yield intrinsic(eval(f"lambda typing, x: (x(x), lambda context, builder, signature, values: values[{constant}])"))

    found = [(digest(each), digest(each)) for each in stubs()]
    assert len(set(found)) == 7 and all(one == other for one, other in found)


UNTOLD = [
    object(), plain.__get__(1), np.array([object()]), type("Class", (), {}), type("Error", (Exception,), {}),
    collections.namedtuple("Nowhere", "x")(1), Described, Described.A, [object()], Table(), module(), (math, module()), (1, math),
    numba.vectorize(lambda x: x + 1),
]  # fmt: skip


@pytest.mark.parametrize("value", UNTOLD, ids=range(len(UNTOLD)))
def test_what_cannot_be_described(value):
    refused("'value', named by function, is ", value)
    used = "value.used" if not isinstance(value, types.ModuleType) else "len(value.used)"
    refused("'used' of module module_of_the_test is ", module(used=value), used)
    refused(r"'held', named by closure.<locals>.<lambda>, is ", closure(value))


def late(x):
    from math import pi

    return pi


def typed_by_hand(x):
    pass


numba.extending.type_callable(typed_by_hand)(lambda context: lambda x: numba.float64)
Other = type("Other", (numba.core.compiler.Compiler,), {})


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(name)


NOR_THESE = {
    "a function that imports": (late, "value", "imports 'math'"),
    "a function that is typed by hand": (typed_by_hand, "value", "'value', named by function, is a function"),
    "a compiler of one's own": (numba.njit(pipeline_class=Other)(plain), "value", "is compiled by '.*Other'"),
    "a module whose attributes fail": (Lazy("lazy"), "value.used", "ImportError: used"),
    "a class of another's name": (type("Refusal", (Exception,), {"__module__": __name__}), "value", "'Refusal'"),
    "a script's class": (type("Refusal", (Exception,), {"__module__": "__main__"}), "value", "'Refusal'"),
    "deep tuples": (functools.reduce(lambda deep, _: (deep,), range(10_000), ()), "value", "RecursionError"),
}


@pytest.mark.parametrize("what", NOR_THESE)
def test_what_else_cannot_be_described(what):
    value, code, words = NOR_THESE[what]
    refused(words, value, code)


@pytest.mark.parametrize("code", ["getattr(value, 's')", "len(value)", "[m.s for m in (value,)]", "(lambda m: m.s)(value)"])
def test_modules_whose_attributes_are_not_read_by_name(code):
    """Anybody may have put some there, in NumPy, too."""
    for each in (np, math, numba, module()):
        refused("'value', named by function, is a module, and used as a value", each, code)


def test_classes_as_arguments(monkeypatch):
    """Code that makes a named tuple, or reads a member of an enumeration, has its fields or values, bit by bit."""
    found = []
    for each in (Level, Height):
        monkeypatch.setitem(globals(), "Level", each)
        found += [digest(each), digest(each.LOW), *(repr(meaning_of((numba.typeof(given),))) for given in (each, each.LOW))]
    assert len({*found[:2], *found[4:6]}) == 4 and len({*found[2:4], *found[6:]}) == 2
    classes = [collections.namedtuple("Pair", fields) for fields in ("x y", "y x")]
    classes += [enum.IntEnum("Shade", members) for members in ("DARK LIGHT", "LIGHT DARK")]
    found = []
    for each in classes:
        monkeypatch.setitem(globals(), each.__name__, each)
        found.append(repr(meaning_of((numba.typeof(each),))))
    assert len(set(found)) == 4 and "None" not in found


@pytest.mark.parametrize("where", ["__main__", "nowhere_of_the_test", __name__])
def test_classes_that_another_process_makes_anew(where):
    """Their types are never equal to those of an entry: it would be written, and never loaded."""
    point = collections.namedtuple("Nowhere", "x y", module=where)
    level = enum.Enum("Nowhere", "LOW HIGH", module=where)
    for value in (point(1, 2), (1, point(1, 2)), point(1, point(1, 2)), level.LOW, level):
        assert meaning_of((numba.typeof(value),)) is None
    assert meaning_of((numba.typeof((Point(1, 2), Colour.RED)),)) is not None


def test_names_that_builtins_has(monkeypatch):
    name, found = "value_of_the_test", []
    for value in (1, 2, numba.njit(plain), len):
        monkeypatch.setattr(builtins, name, value, raising=False)
        found.append(digest(0, name))
    monkeypatch.setattr(builtins, name, object())
    refused("'value_of_the_test', named by function, is an object", 0, name)
    monkeypatch.delattr(builtins, name)
    found.append(digest(0, name))
    assert len(set(found)) == 5
    monkeypatch.setattr(builtins, name, 1, raising=False)
    inner = executed("def inner(x): return x + value_of_the_test", "inner")["inner"]
    assert inner(1) == 2 and digest(inner)
    monkeypatch.setattr(builtins, name, 2)
    refused("compiled already", inner)


def test_what_somebody_has_put_into_numpy(monkeypatch):
    """With the names of what it replaces, too."""
    found = []
    for constant in (1, 2):
        names = executed(f"@functools.wraps(np.sum)\ndef own(x): return x + {constant}", functools=functools, np=np)
        for own in (names["own"], numba.njit(names["own"])):
            monkeypatch.setattr(np, "sum", own)
            found.append(digest(np, "value.sum(x)"))
            monkeypatch.undo()
    assert len(set(found)) == 4
    own = executed("def own(x): return held", "own", held=object())["own"]
    for each in (ctypes.CFUNCTYPE(ctypes.c_double)(abs), own, [object()]):
        monkeypatch.setattr(np, "own", each, raising=False)
        refused("own", np, "value.own(x)")


LIBRARY = os.path.dirname(os.__file__)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "", os.path.join("site-packages", "json")])
def test_others_files_in_pythons_library(folder, monkeypatch):
    """The base's packages, in a virtual environment with them; what lies beside Python's own; a ``.pth`` file's folder."""
    found = []
    for constant in ("2.0", "50.0"):
        made = types.ModuleType("helper_of_the_test")
        made.__file__ = os.path.join(LIBRARY, folder, "helper_of_the_test.py")
        exec(compile(f"def scale(x): return x * {constant}\nLIMIT = {constant}", made.__file__, "exec"), vars(made))
        made.scale = numba.njit(made.scale)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        found += [digest(made, "value.scale(x)"), digest(made.scale), digest(made, "value.LIMIT")]
    assert len(set(found)) == 6
    refused("'value', named by function", type("Class", (), {"__module__": made.__name__}))


def test_pythons_own_files(tmp_path, monkeypatch):
    for module in (math, enum, os, importlib, sys.modules["json.decoder"], sys.modules["ctypes"]):
        file = getattr(module, "__file__", None)
        assert file is None or is_known_file(file), file
    assert is_known_file(os.path.join.__code__.co_filename)  # a frozen one, from Python 3.11 on
    others = ["<stdin>", "<frozen mine>", "enum.py", os.path.join(LIBRARY, "sitecustomize.py"), str(tmp_path / "wave.py")]
    assert not any(map(is_known_file, others))
    made = types.ModuleType("wave")  # called as one of Python's
    made.__file__ = others[-1]
    monkeypatch.setitem(sys.modules, "wave", made)
    assert len({digest(made, "value.LIMIT") for made.LIMIT in (1, 2)}) == 2


def test_functions_compiled_with_what_was_there():
    """Their machine code is part of what calls them, and does not change with the values that they name."""
    names = executed("def inner(x): return x + LIMIT\ndef outer(x): return inner(x)", "inner", "outer", LIMIT=1)
    before = digest(names["outer"])
    assert names["inner"](1.0) == 2.0 and digest(names["outer"]) == before
    names["LIMIT"] = 2
    refused("'inner', named by outer, has been compiled already", names["outer"])
    names["inner"].recompile()  # but not what the old code is part of
    assert names["inner"](1.0) == 3.0
    for names["LIMIT"] in (1, 2):
        refused("has been compiled already", names["outer"])
    for source in ("inner(x)", "held[0](x)"):  # with others of the same name
        names = executed(f"def outer(x): return {source}", "outer", inner=nested(1), held=(nested(1),))
        assert names["outer"](1.0) == 2.0 and digest(names["outer"])
        names["inner"], names["held"] = nested(2), (nested(2),)
        refused("has been compiled already", names["outer"])


def test_functions_that_are_compiled_into_others_alone():
    """Of what is inlined Numba tells nobody, nor of what lies in code that has been loaded."""
    source = "def inner(x): return x + LIMIT\ndef outer(x): return inner(x)\ndef loaded(x): return inner(x)"
    names = executed(source, "outer", "loaded", LIMIT=1)
    inner = names["inner"] = numba.njit(inline="always")(names["inner"])
    outer, loaded = names["outer"], names["loaded"]
    assert outer(1.0) == 2.0
    note_loaded(loaded.py_func, dependencies(loaded.py_func, {}), {})
    names["LIMIT"] = 2
    for _ in range(2):
        for each in (outer, loaded):
            refused(r"'(inner|value)', named by .*, has been compiled already", each)
        assert inner(1.0) == 3.0


def test_implementations_that_have_been_compiled(monkeypatch):
    source = "def stub(x): pass\n@overload(stub)\ndef ours(x): return lambda x: x + LIMIT\ndef outer(x): return stub(x)"
    names = executed(source, "outer", LIMIT=1, overload=overload)
    assert names["outer"](1.0) == 2.0 and digest(names["stub"]) != digest(names["outer"])
    monkeypatch.setitem(names, "LIMIT", 2)  # Numba does not forget the overload, so nothing could be told from now on
    refused("an implementation of ours has been compiled", names["stub"])
    refused("compiled already", names["outer"])


@pytest.mark.parametrize(("module", "name"), [(time, "timezone"), (np, "of_the_test"), (numba.config, "NUMBA_NUM_THREADS")])
def test_values_in_modules_whose_versions_are_known(monkeypatch, module, name):
    """A user, the environment and the clock set some of them."""
    found = set()
    for value in (1, 2):
        monkeypatch.setattr(module, name, value, raising=False)
        found.add(digest(module, f"value.{name}"))
    assert len(found) == 2
    assert digest(np, "value.random.rand()") == digest(np, "value.random.rand()")


def test_functions_that_numba_has_loaded(tmp_path, monkeypatch):
    """Their code is that of a call of them, too: Numba's cache says what it is worth."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loaded_by_the_test.py").write_text("import numba\n@numba.njit(cache=True)\ndef inner(x): return x + 1\n")
    found = []
    for _ in range(2):
        sys.modules.pop("loaded_by_the_test", None)
        inner = importlib.import_module("loaded_by_the_test").inner
        assert inner(1.0) == 2.0
        found.append((digest(inner), sum(inner.stats.cache_hits.values())))
    assert found == [(found[0][0], 0), (found[0][0], 1)]


def test_numbas_own_of_numpy_is_no_addition_of_others():
    """There are hundreds, and each kernel that is kept looks at all additions."""
    parts = [part for registered in extensions().values() for item in registered for part in item]
    files = {part.__code__.co_filename for part in parts if isinstance(part, types.FunctionType)}
    assert files and not any(is_known_file(file) for file in files)
    assert is_known_file(np.__file__) and not is_known_file(pytest.__file__)


def test_what_others_have_added_that_cannot_be_told(monkeypatch):
    """It is named; and once it has been compiled, too, or nothing could be kept from then on, of whatever function."""
    pointer = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(abs)
    source = "def inner(x): return pointer(x) + LIMIT\ndef stub(x): pass\ndef ours(x): return inner.__wrapped__"
    names = executed(source, "inner", pointer=pointer, LIMIT=1)
    inner = names["inner"]
    overload(names["stub"])(names["ours"])
    before = digest(1)
    assert inner(-1.0) == 2.0 and digest(1) == before
    monkeypatch.setitem(names, "LIMIT", 2)
    refused("'inner', named by ours, has been compiled already", 1)


def test_it_takes_no_longer_than_there_are_names():
    modules = [module() for _ in range(40)]
    for i, each in enumerate(modules):
        vars(each).update({f"m{j}": other for j, other in enumerate(modules)}, value=i)
    nested: tuple = ()
    for _ in range(60):
        nested = (nested, nested)
    code = " + ".join(f"value.m{i}.m{i + 1}.value" for i in range(39)) + " + len(value.nested)"
    modules[0].nested = nested
    assert digest(modules[0], code) == digest(modules[0], code)  # or it never ends


@pytest.mark.slow
def test_the_same_in_every_process():
    """But for what lies at an address, or depends on the order of a set of strings."""
    program = """
    from test_dependencies import *
    print(*[digest(each) for pair in PAIRS for each in pair], digest({"a", "b", "c"}), digest(1, "x in {'a', 'b', 'c'}"))
    """
    first, second = (run_python(program, PYTHONHASHSEED=seed).stdout.split() for seed in "12")
    assert first == second and len(first) == 2 * len(PAIRS) + 2


# ---- what others have registered with Numba is in every key: compiled code uses it without a name ----------------------
TYPE = """
import sys
from numba import extending, types
from numba.core import imputils, rewrites
from numba.core.registry import cpu_target
from numba.core.typing import templates
from numba.extending import register_model

class Kind(types.Type):
    def __init__(self): super().__init__("kind of the test")
class Object: pass
LIMIT = 1
"""
REGISTERED = {
    "a getattr": "@imputils.lower_getattr(types.Array, 'zork')\ndef lowered(context, builder, typ, value): return LIMIT",
    "any getattr": "@imputils.lower_getattr_generic(Kind)\ndef lowered(context, builder, typ, value, attr): return LIMIT",
    "a setattr": "@imputils.lower_setattr(Kind, 'zork')\ndef lowered(context, builder, sig, args): return LIMIT",
    "a cast": "@imputils.lower_cast(Kind, types.Array)\ndef lowered(context, builder, fromty, toty, val): return LIMIT",
    "a constant": "@imputils.lower_constant(Kind)\ndef lowered(context, builder, ty, pyval): return LIMIT",
    "a function": "@imputils.lower_builtin('zork', Kind)\ndef lowered(context, builder, sig, args): return LIMIT",
    "a box": "@extending.box(Kind)\ndef boxed(typ, val, c): return LIMIT",
    "an unbox": "@extending.unbox(Kind)\ndef unboxed(typ, obj, c): return LIMIT",
    "a reflector": "@extending.reflect(Kind)\ndef reflected(typ, val, c): return LIMIT",
    "a model": "@extending.register_model(Kind)\nclass Model(extending.models.OpaqueModel):\n  def size(self): return LIMIT",
    "a type": "Kind.can_convert_to = lambda *given: LIMIT\nregister_model(Kind)(extending.models.OpaqueModel)",
    "a property of a type": "Kind.key = property(lambda self: LIMIT)\nregister_model(Kind)(extending.models.OpaqueModel)",
    "a type of values": "@extending.typeof_impl.register(Object)\ndef typed(value, context): return LIMIT",
    "a type of Python": "@extending.as_numba_type.register\ndef typed(given): return Kind() if LIMIT is given else None",
    "an attribute": "@templates.infer_getattr\nclass Zork(templates.AttributeTemplate):\n  key = Kind\n"
    "  def resolve_zork(self, typ): return LIMIT",
    "a base class": "class Base(templates.AttributeTemplate):\n  key = Kind\n  def resolve_zork(self, typ): return LIMIT\n"
    "templates.infer_getattr(type('Zork', (Base,), {'__module__': 'numba.nowhere'}))",
    "a global": "def stub(x): pass\nsys.modules[__name__].stub = stub\n@templates.infer_global(stub)\n"
    "class Zork(templates.AbstractTemplate):\n  def generic(self, args, kws): return LIMIT",
    "an overloaded attribute": "@extending.overload_attribute(Kind, 'zork')\ndef zork(x): return lambda x: LIMIT",
    "an overloaded method": "@extending.overload_method(types.Float, 'zork')\ndef zork(x): return lambda x: x + LIMIT",
    "an intrinsic": "@extending.intrinsic\ndef zork(context, x): return LIMIT",
    "a rewrite": "@rewrites.register_rewrite('before-inference')\nclass Zork(rewrites.Rewrite):\n"
    "  def match(self, *given): return not LIMIT",
    "a registry of one's own": "mine = imputils.Registry('mine')\n@mine.lower('zork', Kind)\n"
    "def lowered(context, builder, sig, args): return LIMIT\ncpu_target.target_context.install_registry(mine)",
}


@pytest.mark.parametrize("what", REGISTERED)
def test_what_is_registered(what, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"extension_{list(REGISTERED).index(what)}_of_the_test"
    (tmp_path / f"{name}.py").write_text(TYPE + REGISTERED[what])
    importlib.invalidate_caches()
    before, module = digest(1), importlib.import_module(name)
    found = [digest(1) for module.LIMIT in (1, 2, 1)]
    assert name in extensions() and before not in found and found[0] == found[2] != found[1]


def test_an_object_whose_attributes_an_extension_reads(tmp_path, monkeypatch):
    """It is described by them, though no key describes the object."""
    monkeypatch.syspath_prepend(tmp_path)
    settings = "LIMITS, OTHERS = Object(), Object()\nLIMITS.first, LIMITS.second = 1, OTHERS\nOTHERS.third = 1\n"
    read = "def zork(x):\n  found = LIMITS.first + LIMITS.second.third\n  return lambda x: x + found\n"
    text = f"{TYPE}{settings}@extending.overload_method(types.Integer, 'zork')\n{read}"
    (tmp_path / "extension_with_an_object_of_the_test.py").write_text(text)
    module = importlib.import_module("extension_with_an_object_of_the_test")
    found = [digest(1)]
    for thing, name in ((module.LIMITS, "first"), (module.OTHERS, "third")):
        setattr(thing, name, 2)
        found.append(digest(1))
        setattr(thing, name, 1)
    assert len({*found}) == 3 and digest(1) == found[0]


def test_wrappers_of_attributes_and_conversions():
    """The type of one module, the names in another: the functions are Numba's."""

    Kind = type("Kind", (numba.types.Opaque,), {"__module__": __name__})
    register_model(Kind)(models.OpaqueModel)
    make_attribute_wrapper(Kind, "field of the test", "attribute of the test")
    parts = [part for item in extensions()[__name__] for part in item]
    assert "field of the test" in parts and "attribute of the test" in parts
    before, conversions_before = digest(1), conversions()
    default_casting_rules.safe(Kind("kind of the test"), numba.types.float16)
    try:
        assert digest(1) != before and conversions() != conversions_before
    finally:
        default_casting_rules._tg._forwards.pop(Kind("kind of the test"))
    assert digest(1) == before and conversions() == conversions_before


def register_what_numba_does():
    """What an intrinsic returns, what calls an overloaded attribute, a jitclass's type: keys before and after are the same."""
    Kind = type("Kind", (numba.types.Opaque,), {})
    register_model(Kind)(models.OpaqueModel)
    overload_attribute(Kind, "zork")(lambda x: lambda x: 40)

    @intrinsic
    def new(_typing_context):
        return Kind("kind with an attribute of the test")(), lambda context, *_: context.get_dummy_value()

    before = digest(1)
    assert numba.njit(lambda: new().zork)() == 40

    @numba.experimental.jitclass([("x", numba.types.int64)])
    class Made:
        def __init__(self):
            pass

    assert isinstance(Made, type) and digest(1) == before


def test_what_numba_registers_when_it_first_compiles():
    """In a process of its own: what other tests have compiled is registered by then."""
    run_python("from test_dependencies import *; register_what_numba_does()")


def test_names_in_bytecode_are_those_that_dis_finds():
    """Python is asked by ``dis``, which takes longer, only where it numbers names as none did so far: CPython 3.15."""
    of_python = [compile(Path(module.__file__).read_text("utf-8"), "", "exec") for module in (dis, enum, functools, inspect)]
    parts = [part for code in of_python for part in parts_of(code)]
    assert len(parts) > 200 and [[*steps(part)] for part in parts] == [[*steps_by_dis(part)] for part in parts]
