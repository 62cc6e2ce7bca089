"""Kernels with ``cache=True``: a second process compiles nothing, and nobody gets another function's code."""

import importlib
import os
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from forked import fork_python
from interpreter import copy_native_code
from numba.core.errors import NumbaWarning

from fastexchange import fast_args
from fastexchange.calls.kernel_cache import Entries
from fastexchange.ground.cfunction import code_cache
from fastexchange.ground.disk_cache import CacheFolder


class Named(int):
    def __repr__(self):
        return "Named"


def test_a_signature_of_another_type_of_the_same_name(tmp_path):
    """Types are compared, not only their names. What changed while code was compiled is not kept. A claim is given back."""
    one, other, depends_on = ((), Named(1)), ((), Named(2)), ["a value"]
    entries = Entries(CacheFolder(tmp_path), "name", lambda code: code, lambda: tuple(depends_on))
    assert entries.load(one) is None
    entries.save(one, "one")
    assert not list(tmp_path.rglob("*.tmp")) and entries.load(one) == "one" and entries.load(other) is None
    entries.flush()
    depends_on.append("before")
    assert entries.load(one) is None
    depends_on[0] = "after"
    entries.save(one, "code")
    for depends_on[0] in ("after", "before"):
        assert entries.load(one) is None
    entries.save(one, "code")
    assert entries.load(one) == "code"
    entries.release(other)
    folder = CacheFolder(tmp_path)
    looks = iter([None])  # at first; then it is there: another process has saved it before this one's claim
    folder.load = lambda *given, load=folder.load: next(looks, load(*given))
    assert Entries(folder, "name", lambda code: code, lambda: tuple(depends_on)).load(one) == "code"
    assert not list(tmp_path.rglob("*.tmp"))


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import numba, numpy as np
from module_of_the_test import *
from fastexchange import fast_args
from fastexchange.ground.cfunction import code_cache
x, y = np.ones(3), np.zeros(3)
before = code_cache.misses
def called(kernel):
    y[:] = 0
    kernel(x, y)
    return int(y[0])
def hits(*kernels):
    return sum(sum(each.stats.cache_hits.values()) for each in kernels)
"""


def run(folder: Path, code: str, *arguments: str, **environment: str):
    return fork_python(RUN + dedent(code), str(folder), *arguments, **environment)


def words_of(*given: str, **environment: str) -> list[str]:
    return run(*given, **environment).stdout.split()


RESULTS = """
import collections
import numpy as np
from fastexchange import fast_args
from made_producers import Dunder

def cached(function, **options):
    return fast_args(cache=True, **options)(function)

@fast_args(cache=True, out="x[n] -> y[n]")
def doubled(x, y): y[:] = 2 * x

x = np.arange(2.0)
Point = collections.namedtuple("Point", "x y")
point = cached(lambda x: Point(x[0], (x, 1)))
CALLS = [
    (scaled := cached(lambda x, factor=2.0: x.sum() * factor), (x,), 2.0), (scaled, (Dunder(x), 1), 1.0),
    (maybe := cached(lambda x, yes: x.sum() if yes else None), (x, 1), 1.0), (maybe, (x, 0), None),
    (made := cached(lambda x: x + 1), (x,), [1.0, 2.0]), (made, (x.astype("c8"),), [1.0, 2.0]),
    (made, (x.astype("f2"),), [1.0, 2.0]),
    (cached(lambda x: "text" * x.size), (x,), "texttext"), (cached(lambda xs: xs[0].sum()), ([x, x],), 1.0),
    (cached(lambda a, *rest: a + rest[0]), (1, 2.5), 3.5), (doubled, (x,), [0.0, 2.0]),
    (cached(lambda p: p.x.sum() + p.y, nogil=True), (Point(x, 2),), 3.0),
    (cached(lambda x: x[0], parallel=False, fastmath=True), (np.array(["2024-01-02"], "M8[D]"),), np.datetime64("2024-01-02")),
]
KERNELS = {point, *(kernel for kernel, _, _ in CALLS)}
"""


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_second_process_compiles_neither_kernels_nor_what_calls_them(tmp_path):
    """What is precompiled is all that calls of each want; calls write nothing. Another kernel shares what is common."""
    (tmp_path / "module_of_the_test.py").write_text(RESULTS)
    cache = tmp_path / "cache"
    if code_cache.directory is not None:  # it has most of what the first one needs
        copy_native_code(cache)
    code = """
        del code_cache.folders  # there is another now
        code_cache._libraries.clear()
        for kernel, arguments, expected in [*CALLS, (point, (x,), None)]:
            if arguments is CALLS[-1][1]:  # what makes dates, and a Point, whose class is its own, each process has for itself
                entries_made = code_cache.misses - before
            if sys.argv[2] == "precompile":
                kernel.precompile(arguments)
                assert not kernel.counts().fast + kernel.counts().slow
                continue
            results = [kernel(*arguments) for _ in range(4)]
            if kernel is point:
                assert all(type(got) is Point and got.x == 1.0 and got.y[0] is x and got.y[1] == 1 for got in results)
            else:
                assert all((got.tolist() if type(got) is np.ndarray else got) == expected for got in results), results[0]
        misses = sum(sum(each.stats.cache_misses.values()) for each in KERNELS)
        before = code_cache.misses
        if sys.argv[2] == "another":
            another = fast_args(lambda b, c, d: None)
            another(1.5, x, x), another(1.5, x, x)
        print(hits(*KERNELS), misses, entries_made, code_cache.misses - before)
        """
    found = {}
    for what, expected in (("precompile", ["0", "13"]), ("call", ["13", "0", "0"]), ("another", ["13", "0", "0"])):
        words = words_of(tmp_path, code, what, NUMBA_CACHE_DIR=str(cache))
        assert words[: len(expected)] == expected, what
        assert what != "call" or files(cache) == found, "it wrote to the cache"
        found = files(cache)
    assert int(words[-1]) <= 3, "more than the entry of this kernel was compiled"


MODULE = r'''
import math
import numba
from fastexchange import fast_args

LONG = "    s = 0.0\n    for i in range(x.shape[0]):\n"  # too long to be inlined
LONG += "".join(f"        if x[i] > {n}: s += math.sin(x[i] * {n}) + math.cos(s)\n" for n in range(2, 60))

def made(source):
    names = {"math": math, "numba": numba, "__name__": __name__}
    exec(compile(source, __file__, "exec"), names)
    return names["times"]

def scaled(factor, decorate):
    @decorate
    def times(x, y):
        for i in range(x.shape[0]):
            y[i] = x[i] * factor
    return times

def scaled_at_length(factor, decorate):
    source = f"def times(factor):\n def times(x, y):\n{LONG}        y[i] += s + x[i] * factor\n return times\n"
    return decorate(made(source)(factor))

def by_text(text, **options):
    return fast_args(cache=True, **options)(made(f"def times(x, y):\n    y[0] = {text}"))

def calling(factor):
    # what it calls is long, raises, and has a block of Python
    helper = numba.njit(made(f"""
def times(x):
{LONG}    s += x[0] * {factor}
    if s > 100:
        raise ValueError("{factor}", s)
    y = x.astype("f{4 if factor == '2' else 8}")
    with numba.objmode(seen="float64"):
        seen = y[1]
    return s + seen - 1
"""))
    return fast_args(cache=True)(lambda x: helper(x))

def calling_given(helper, decorate):
    @decorate
    def kernel(x, y): helper(x, y), helper(x[:0], y)
    return kernel

@numba.njit
def even(n): return True if n == 0 else odd(n - 1)
@numba.njit
def odd(n): return False if n == 0 else even(n - 1)
@fast_args(cache=True)
def parity(n): return even(n)
'''


@pytest.fixture
def module(tmp_path) -> Path:
    (tmp_path / "module_of_the_test.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(("make", "decorate"), [
    ("scaled", "fast_args(cache=True)"), ("scaled", "numba.njit(cache=True)"),
    pytest.param("scaled_at_length", "numba.njit(cache=True)", marks=pytest.mark.slow),
])  # fmt: skip
def test_namesakes_that_were_compiled_in_different_processes(module, make, decorate):
    """Numba gives them the same symbols, by which LLVM finds functions: ours are mended, of others one is called by Numba."""
    for factor in (2, 3):
        run(module, f"assert called({make}({factor}.0, {decorate})) == {factor}")
    code = f"""
        loaded = [{make}(factor, {decorate}) for factor in (2.0, 3.0)]
        for each in loaded:
            each(x, y)
        one, other = (each.overloads[each.signatures[0]].fndesc.llvm_func_name for each in loaded)
        is_numbas = one == other
        two, three = map(fast_args, loaded)
        assert {{(called(two), called(three)) for _ in range(4)}} == {{(2, 3)}} and three.counts().fast >= 3
        bound = []
        for each in (two, three):
            y[:] = 0
            each.bind(x, y)()
            bound.append(int(y[0]))
        print(hits(*loaded), is_numbas, *bound)
        if not is_numbas:
            both = numba.njit(lambda x, y, z: (two(x, y), three(x, z)))
            z = np.zeros(3)
            both(x, y, z)
            print(int(y[0]), int(z[0]))
        """
    is_numbas = decorate.startswith("numba")
    assert words_of(module, code) == (["2", "True", "2", "3"] if is_numbas else ["2", "False", "2", "3", "2", "3"])


@pytest.mark.slow
def test_functions_of_one_name_that_kernels_call(module):
    code = """
        for kernel in [calling(factor) for factor in sys.argv[2]]:
            print(kernel(x), *kernel.stats.cache_hits.values())
            try:
                kernel(x * 1000)
            except ValueError as raised:
                print(raised.args[0])
        """
    for factor in "624":  # the first compiles more, so that its functions have other numbers than those of the others
        assert words_of(module, code, factor) == [f"{factor}.0", factor]
    assert words_of(module, code, "242") == ["2.0", "1", "2", "4.0", "1", "4", "2.0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("decorate", ["fast_args(cache=True)", "fast_args"])
def test_functions_that_others_call_after_a_kernel(module, decorate):
    """LLVM changes what a function takes that nobody else can call; the linker does not ask whether anybody else can."""
    code = f"""
        helper = scaled_at_length(2.0, numba.njit)
        kernel = calling_given(helper, {decorate})
        print(*[called(kernel) for _ in range(3)])
        others = numba.njit(lambda x, y, z: (helper(x, y), helper(x, z)))
        z = np.zeros(3)
        print(called(lambda x, y: others(x, y, z)), int(z[0]), called(kernel))
        """
    assert words_of(module, code) == ["2"] * 6


def test_functions_that_call_one_another(module):
    """Numba finds addresses for such names when it compiles; what is loaded has none for them, and LLVM ends the process."""
    for _ in range(2):
        done = run(module, "print(parity(7), parity(8))")
        assert done.stdout.split() == ["False", "True"] and "calls itself through another function" in done.stderr


def test_constants_and_options_are_part_of_a_kernels_key(module):
    """Numba's own key has neither, so that it takes one for the other. With bounds checked, unchecked code is not good enough."""
    code = """
        kernels = [by_text("x[0] + 1"), by_text("x[0] + 2")]
        print(*map(called, kernels), hits(*kernels))
        called(by_text("x[0] * 0.1 + 0.2", locals={"y": numba.float64[::1]})), called(by_text("x[0] * 0.1 + 0.2"))
        for numba.config.BOUNDSCHECK, options in ((None, {}), (None, {"boundscheck": True}), (1, {}), (None, {})):
            kernel = by_text("x[7 + len(x)]", **options)
            try:
                kernel(x, y)
                print(hits(kernel))
            except IndexError:
                print("checked")
        """
    assert words_of(module, code) == ["2", "3", "0", "0", "checked", "checked", "1"]
    assert words_of(module, code) == ["2", "3", "2", "1", "checked", "checked", "1"]


USER = """
import collections, enum, numba
from fastexchange import fast_args
from helper_of_the_test import calls

LIMIT = 1
Point, Colour = collections.namedtuple("Point", "a b"), enum.Enum("Colour", {{"red": 1}})

@numba.experimental.jitclass([("number", numba.float64)])
class Holder:
    def __init__(self, number): self.number = number
    def get(self): return self.number

@fast_args(cache=True)
def used(x, y=0): return {}
"""
HELPER = """
import numba
DEEP = 1
@numba.njit
def inner(x): return x.sum() + DEEP
@numba.njit
def calls(x): return inner(x)
"""
CHANGES = {
    "its own code": ("x.sum() - 1", "used(x)", "x.sum() - 1", "x.sum() - 0", "2.0 0 2.0 1 3.0 0"),
    "a global": ("x[0] + LIMIT", "used(x)", "LIMIT = 1", "LIMIT = 2", "2.0 0 2.0 1 3.0 0"),
    "what another module calls": ("calls(x) - 2", "used(x)", "x.sum() + DEEP", "x.sum() + 1 + DEEP", "2.0 0 2.0 1 3.0 0"),
    "fields of a named tuple": ("y.a - y.b", "used(x, Point(a=5, b=2))", '"a b"', '"b a"', "3 0 3 1 3 0"),
    "an enumeration": ("y.value + x[0]", "used(x, Colour.red)", '"red": 1', '"red": 2', "2.0 0 2.0 1 3.0 0"),
    "a jitclass": ("y.get()", "used(x, Holder(7.0))", "self.number\n\n", "-self.number\n\n", "7.0 0 7.0 0 -7.0 0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_kernel_names_is_part_of_its_key(tmp_path, change):
    """Types of users mean what they mean in this process. The kernel's file has the size and the time that it had."""
    expression, call, before, after, expected = CHANGES[change]
    sources, found = {"module_of_the_test": USER.format(expression), "helper_of_the_test": HELPER}, []
    assert before in "".join(sources.values())
    for text in (before, before, after):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source.replace(before, text))
            os.utime(tmp_path / f"{name}.py", (1e9, 1e9))
        found += words_of(tmp_path, f"print({call}, hits(used))")
    assert " ".join(found) == expected


def imported_anew(name: str):
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_a_loaded_function_whose_global_has_changed_since(tmp_path, monkeypatch):
    """What calls it is compiled with its code of before, and is not kept as if it were compiled with that of now."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "from fastexchange import fast_args\nLIMIT = 1\n@fast_args(cache=True)\ndef inner(x): return x + LIMIT\n"
    text += "@fast_args(cache=True)\ndef outer(x): return inner(x)\n"
    (tmp_path / "outer_of_the_test.py").write_text(text)
    assert imported_anew("outer_of_the_test").inner(1.0) == 2.0
    module = imported_anew("outer_of_the_test")
    assert module.inner(1.0) == 2.0 and list(module.inner.stats.cache_hits.values()) == [1]
    module.LIMIT = 2
    with pytest.warns(NumbaWarning, match="each process: 'inner', named by outer, has been compiled already"):
        assert module.outer(1.0) == 2.0
    module = imported_anew("outer_of_the_test")
    module.LIMIT = 2
    assert module.outer(1.0) == 3.0


def test_a_kernel_with_a_cache_forgets_its_entries(module, monkeypatch):
    """``recompile`` is Numba's: it flushes the cache and compiles anew."""
    monkeypatch.syspath_prepend(module)
    kernel, y = imported_anew("module_of_the_test").scaled(2.0, fast_args(cache=True)), np.zeros(3)
    kernel(np.ones(3), y)
    before = set(module.rglob("*.entry"))
    kernel.recompile()
    kernel(np.ones(3), y)
    assert before and not kernel.stats.cache_hits and y.tolist() == [2.0] * 3 and len(set(module.rglob("*.entry"))) == len(before)


def test_a_kernel_that_belongs_to_no_file_is_not_kept():
    """``njit(cache=True)`` raises where nothing can be written; a kernel warns, and runs."""
    names = {"fast_args": fast_args}
    with pytest.warns(RuntimeWarning, match="kernel: its function is in no file") as told:
        exec(compile("\n@fast_args(cache=True)\ndef kernel(x):\n    return x + 1\n", "<made up>", "exec"), names)
    assert (told[0].filename, told[0].lineno) == ("<made up>", 2) and names["kernel"](1) == 2


@pytest.mark.parametrize("is_kept", [False, True])
def test_code_that_is_at_hand_is_explained(cache, is_kept):
    arguments = np.ones(3), 2

    def product(x, y):
        return x * y

    def how(kernel) -> str:
        return kernel.explain(*arguments).outcome.removeprefix("new: the next such call ").removesuffix(" it")

    first, precompiled = fast_args(product, cache=is_kept), fast_args(product)
    precompiled.precompile("(float64[::1], int64)")
    assert [how(first), how(precompiled)] == ["compiles", "finds compiled code, and takes"]
    first(*arguments)
    assert first.explain(*arguments).kind == "native"
    second = fast_args(product, cache=is_kept)
    assert how(second) == ("loads" if is_kept else "compiles") and second.explain(*arguments).kind == "new"
    assert not second.overloads and not second.stats.cache_hits and not second.stats.cache_misses
    second(*arguments)
    assert sum(second.stats.cache_hits.values()) == is_kept
    for file in files(cache):
        file.write_bytes(file.read_bytes()[:-1])  # is not believed
    assert how(fast_args(product, cache=is_kept)) == "compiles"
