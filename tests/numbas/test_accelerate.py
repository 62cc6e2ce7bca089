"""``accelerate()``: what Numba's decorators make then is what Numba makes, but that it takes tensors and calls are cheaper."""

import enum
import functools
import gc
import pickle
import types as python_types
import warnings
import weakref

import numba
import numpy as np
import pytest
from children import accelerating
from forked import fork_python, needs_fork
from frameworks import torch
from llvmlite import ir
from made_producers import ONLY_NUMBA, Dunder
from numba.core import registry, target_extension, types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaWarning
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic, register_model, typeof_impl, unbox
from raising import check_raises

from fastexchange import FastKernel, accelerate, fast_args
from fastexchange.dispatch.boxing import is_plain
from fastexchange.ground.disk_cache import FOLDER


def both(function, *signature, **options):
    """Numba's dispatcher of a function, with options of ``numba.jit``, and the accelerated one."""
    plain = numba.jit(*signature, **options)(function)
    with accelerating():
        return plain, numba.jit(*signature, **options)(function)


def accelerated(function, *signature, **options):
    return both(function, *signature, **options)[1]


def add(x, y):
    return x + y


def total(x):
    return x.sum()


def unknown_name(x):
    return no_such_name  # noqa: F821


def outcome(kernel, args, kwargs):
    try:
        return kernel(*args, **kwargs)
    except Exception as error:
        return type(error), str(error).split()  # what Numba says a second time has another indentation


def tensor_of_ones():
    return torch.ones(3) if torch is not None else np.ones(3)


same, before_more = (lambda x: x), (lambda x, *rest: x)
REFUSED = {
    "too many": (add, (1, 2, 3), {}), "too few": (add, (1,), {}), "unknown keyword": (add, (1,), {"z": 2}),
    "twice": (add, (1, 2), {"y": 2}), "too many, one with a default": (lambda x, y=2: x + y, (1, 2), {"y": 2}),
    "twice, before *args": (before_more, (1, 2), {"x": 2}), "keywords": (lambda x, **rest: x, (1,), {}),
    "empty list": (same, ([],), {}), "empty list in a tuple": (same, ((1, []),), {}), "mixed list": (same, ([1, "a"],), {}),
    "big int": (same, (2**64,), {}), "long double": (same, (np.longdouble(1),), {}), "object": (same, (object(),), {}),
    "array of objects": (same, (np.array([None]),), {}), "masked array": (same, (np.ma.masked_array([1]),), {}),
    "does not compile": (unknown_name, (1,), {}), "no such operator": (add, (1, "a"), {}),
    "not one of the declared types": (add, (1j, 1j), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_numba_refuses_is_refused_in_its_words(name):
    function, args, kwargs = REFUSED[name]
    plain, kernel = both(function, *["(intc, intc)"] * ("declared" in name))
    for _ in range(3):  # Numba says more each time
        expected = outcome(plain, args, kwargs)
        assert isinstance(expected, tuple) and issubclass(expected[0], Exception)
        assert outcome(kernel, args, kwargs) == expected
    if name not in ("keywords", "big int", "mixed list", "not one of the declared types"):
        assert outcome(fast_args(function), args, kwargs) != expected, "fast_args names argument and kernel"


def test_other_errors():
    calls: list[int] = []

    def fails(x):
        with numba.objmode():
            calls.append(1)
        raise ValueError("own words")

    kernel = accelerated(fails)
    for count in (1, 2, 3):
        check_raises(ValueError, r"^own words$", kernel, np.zeros(2))
        assert len(calls) == count
    check_raises(numba.TypingError, r"unknown_name\(x: array", accelerated(unknown_name), Dunder(np.zeros(2)))
    in_object_mode = accelerated(lambda x: (globals(), type(x).__name__), forceobj=True)
    assert type(in_object_mode) is CPUDispatcher
    assert [in_object_mode(fast_args(add)) for _ in range(3)] == [(globals(), "FastKernel")] * 3


def test_the_functions_of_named_packages():
    def made_in(module: str):
        function = python_types.FunctionType(total.__code__, {"__name__": module}, "total")
        function.__module__ = module
        return numba.njit(function)

    with accelerating("ours", "theirs.kernels"):
        assert all(isinstance(made_in(name), FastKernel) for name in ("ours", "ours.deep.inside", "theirs.kernels.sums"))
        others = {type(made_in(name)) for name in ("theirs", "theirs.kernels2", "ours2", "__main__")}
        assert others == {CPUDispatcher} == {registry.CPUDispatcher}
        accelerate("more")
        assert isinstance(made_in("more"), FastKernel) and isinstance(made_in("ours"), FastKernel)
        assert made_in("ours")(tensor_of_ones()) == 3.0
        received = pickle.loads(pickle.dumps(made_in("ours")))
        with accelerating():
            assert isinstance(made_in("theirs"), FastKernel)
            accelerate("ours")
            assert isinstance(made_in("theirs"), FastKernel) and registry.CPUDispatcher is not CPUDispatcher
    assert type(made_in("ours")) is CPUDispatcher and isinstance(received, FastKernel)
    for name, error in ((3, TypeError), ("my-package", ValueError), ("", ValueError), ("a..b", ValueError)):
        check_raises(error, r"accelerate\(\)", accelerate, name)


def test_a_first_calls_result_is_its_callers_alone_and_a_kernel_that_nobody_holds_is_gone():
    """Without a collection. Numba may keep frames of a compilation, which hold those around it until the next one."""
    gc.collect()
    gc.disable()
    try:
        kernel = accelerated(lambda x, y: x @ y)
        made = weakref.ref(kernel(np.ones((2, 3)), np.ones(3)))
        assert made() is None
        for argument in (1, np.ones(2)):
            dispatchers = both(lambda x: helper(x) + 1)
            for each in dispatchers:
                for _ in range(4):
                    each(argument)
            gone = [weakref.ref(each) for each in dispatchers]
            del dispatchers, each
            assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


@numba.njit
def helper(x):
    return x


def test_what_numba_takes_by_position_and_by_name():
    """It does not know of keyword-only and positional-only parameters, and takes the default of one for that of another."""
    by_kind, with_defaults = (lambda x, /, y, *, z: (x, y, z)), (lambda x, y=None, *, z=3: (x, y, z))
    (plain, kernel), named = both(by_kind), {"x": 1, "y": 2, "z": 3}
    for args, kwargs in (((1, 2, 3), {}), ((), named), ((1, 2), {"z": 3}), ((1,), {"y": True, "z": 2.5}), ((1, 2, 3, 4), {})):
        for _ in range(3):
            assert outcome(kernel, args, kwargs) == outcome(plain, args, kwargs)
    assert outcome(kernel, (), named) == (1, 2, 3) and outcome(fast_args(by_kind), (1, 2, 3), {})[0] is TypeError
    for kernel in (fast_args(with_defaults), accelerated(with_defaults)):
        for x in (1, ONLY_NUMBA):  # native code makes the first, Numba's dispatcher the second
            for _ in range(3):
                assert kernel(x) == (x, None, 3) and kernel(x, 2) == (x, 2, 3)
                assert kernel(x, z=5) == (x, None, 5) and kernel(x, 2, z=(1, 2)) == (x, 2, (1, 2))


def test_arrays_in_objects_that_are_no_containers():
    """They are what Numba's boxing code of the object makes of them, whatever else is in the result, and whose it is."""
    x = np.array([1.0, 2.0])
    for function in (lambda x: (np.polynomial.Polynomial(x),), lambda x: (x + 1, np.polynomial.Polynomial(x))):
        plain, kernel = both(function)
        for _ in range(3):
            assert repr(kernel(x)) == repr(plain(x)) and repr(kernel(Dunder(x))[-1]) == repr(plain(x)[-1])
    assert repr(accelerated(lambda x: np.polynomial.Polynomial(x))(x)) == repr(plain(x)[1])


def test_boxes_of_others_types_are_not_kept_on_disk():
    plain, Other = types.Array(types.int64, 1, "C"), type("Other", (types.Array,), {})
    assert is_plain(plain) and is_plain(types.Tuple([plain, types.int64]))
    for Other.__module__ in (__name__, "numba.tests.somewhere"):
        other = Other(types.int64, 1, "C")
        assert not is_plain(other) and not is_plain(types.Tuple([other, types.int64]))


def test_jitted_functions_in_a_tuple():
    """Numba makes functions by address of them if they have one signature, which native code does not read."""
    one, two = (accelerated(function, "int64(int64)") for function in (lambda x: x + 1, lambda x: x + 2))
    applied = accelerated(lambda functions, x: functions[1](functions[0](x)))
    picked = accelerated(lambda functions, i: functions[i](123))
    of_tensors = fast_args(lambda functions, x: functions[0](len(x)))
    for _ in range(3):
        assert applied((one, two), 0) == 3 and applied((one, one), 0) == 2
        assert [picked((one, two), i) for i in range(2)] == [124, 125]
        assert of_tensors((one, two), np.zeros(3)) == of_tensors((one, two), Dunder(np.zeros(3))) == 4


Level = enum.Enum("Level", {"LOW": 1, "words": lambda self: "low"})


def above(x):
    return x + Level.LOW.value


def test_code_that_is_kept_by_numba_alone_is_no_warning(cache):
    """Libraries are imported with warnings as errors, too."""
    with pytest.warns(NumbaWarning, match="above is compiled by each process"):
        assert fast_args(cache=True)(above)(1) == 2
    assert not list(cache.rglob("*.entry"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in both(above, "int64(int64)", cache=True):
            assert kernel(1) == 2


def test_a_folder_that_others_can_write_to(cache):
    """A kernel warns, and is compiled by each process; the code of what is accelerated is kept in Numba's files, not in ours."""
    assert accelerated(add, cache=True)(1, 2) == 3
    (folder,) = cache.rglob(FOLDER)
    folder.chmod(0o777)
    before = {*folder.iterdir()}
    with pytest.warns(RuntimeWarning, match="other users can write"):
        assert fast_args(cache=True)(add)(1.5, 2) == 3.5 and {*folder.iterdir()} == before
    for hits in (0, 1):
        kernel = accelerated(add, cache=True)
        assert [kernel(x, 2) for x in (1, 2)] == [3, 4] and sum(kernel.stats.cache_hits.values()) == hits


def test_code_of_functions_whose_variables_have_types_is_kept(cache):
    """Numba adds to the types it was given, while it compiles."""

    def in_steps(x):
        y = x + 1
        y = y * 2
        return y + y

    for hits in (0, 1):
        for kernel in both(in_steps, cache=True, locals={"y": types.float32}):
            assert kernel(1) == 8.0 and sum(kernel.stats.cache_hits.values()) == hits


def test_the_class_is_the_one_that_programs_find():
    plain, function = both(add)
    with accelerating():
        found = registry.CPUDispatcher
        assert type(function) is found and type(numba.jit(add)) is found
        assert isinstance(plain, found) and issubclass(CPUDispatcher, found)
        assert not isinstance(add, found) and not isinstance(FastKernel, found)

        class Own(found):
            pass

        assert not isinstance(function, Own) and isinstance(Own(add), found) and Own(add)(1, 2) == 3
    assert registry.CPUDispatcher is target_extension.CPUDispatcher is CPUDispatcher
    assert str(type(function)) == str(type(plain)) and type(function).__name__ == "CPUDispatcher"
    assert str(function) == str(plain) and repr(function) == repr(plain)
    assert isinstance(function, CPUDispatcher) and isinstance(function, FastKernel)
    for kernel in (plain, function, fast_args(add)):
        assert not np.iterable(kernel)


OF_ANOTHER = "import pickle, fastexchange; {}; k = pickle.loads({!r}); print(k(1, 2), *(c.__name__ for c in type(k).__mro__[:2]))"


@pytest.mark.slow
def test_functions_are_pickled_accelerated_or_not():
    plain, function = both(add)
    pickled, before = pickle.dumps(function), pickle.dumps(plain)
    assert pickle.loads(pickled) is function
    with accelerating():
        meanwhile = pickle.dumps(plain)
        assert pickle.loads(before) is pickle.loads(meanwhile) is plain
        in_object_mode = numba.jit(forceobj=True)(add)
        assert pickle.loads(pickle.dumps(in_object_mode)) is in_object_mode
        assert pickle.loads(pickle.dumps(CPUDispatcher)) is CPUDispatcher
    assert pickle.dumps(plain) == before
    for sent, first, base in (
        (pickled, "pass", "FastKernel"), (before, "fastexchange.accelerate()", "FastKernel"),
        (meanwhile, "fastexchange.accelerate()", "Dispatcher"), (meanwhile, "fastexchange.decelerate()", "Dispatcher"),
    ):  # fmt: skip
        assert fork_python(OF_ANOTHER.format(first, sent)).stdout.split() == ["3", "CPUDispatcher", base]


def noting(original, seen: list):
    """A function in place of another, which it calls."""
    return lambda self, *args, **kwargs: seen.append(args) or original(self, *args, **kwargs)


def test_a_call_in_the_place_of_numbas_is_made(monkeypatch):
    """Or in that of the class which programs find."""
    seen: list = []
    with monkeypatch.context() as patched:
        patched.setattr(CPUDispatcher, "__call__", noting(CPUDispatcher.__call__, seen), raising=False)
        function = accelerated(add)
        assert [function(1, 2), function(1, 2), function(x=1, y=2)] == [3] * 3 and seen == [(1, 2), (1, 2), ()]
    assert function(1, 2) == 3 and function(1, 2) == 3 and len(seen) == 3
    function = accelerated(add)
    with monkeypatch.context() as patched:
        patched.setattr(type(function), "__call__", noting(type(function).__call__, seen))
        assert [function(1, 2) for _ in range(3)] == [3] * 3 and len(seen) == 6 and function.counts().fast == 2
    function, x = accelerated(total), np.arange(4.0)
    assert [function(x), function(x)] == [6.0] * 2 and len(seen) == 6 and function.counts().fast == 1


@pytest.mark.parametrize("where", ["class", "instance"])
def test_what_is_in_the_place_of_numbas_compiling_is_asked(monkeypatch, where):
    seen: list = []
    function, compile_for_args = accelerated(total), noting(Dispatcher._compile_for_args, seen)
    if where == "class":
        monkeypatch.setattr(Dispatcher, "_compile_for_args", compile_for_args)
    else:
        function._compile_for_args = functools.partial(compile_for_args, function)
    x = np.arange(4.0)
    assert [function(x), function(x), function(x.astype(np.float32))] == [6.0] * 3
    assert [len(args) for args in seen] == [1, 1] and function(tensor_of_ones()) == 3.0
    check_raises(numba.TypingError, None, function, "no array")


PATCHED = """
    import numba, numpy as np
    from numba.core import registry
    numbas = registry.CPUDispatcher
    import fastexchange
    from fastexchange.ground.cfunction import code_cache
    del code_cache.folders
    fastexchange.accelerate()
    def patch(cls, seen, compile):
        cls.compile = lambda self, sig: seen.append(self.py_func.__name__) or compile(self, sig)
    found = [], []
    for cls, seen in zip((numbas, registry.CPUDispatcher), found):
        patch(cls, seen, cls.compile)
    @numba.njit
    def add(x, y): return x[0] + y
    for _ in range(4):
        add(np.ones(2), 1), add((1.0, 2), 2.0), add([1.0], 1)
    print(*found, add.counts().fast > 4, code_cache.misses > 3, sep=";")
"""


@needs_fork
def test_who_patches_compile_sees_what_the_program_compiles(tmp_path):
    """With nothing in the cache: not the package's own functions, nor Numba's overloads that they would call."""
    printed = fork_python(PATCHED, NUMBA_CACHE_DIR=str(tmp_path)).stdout.strip()
    assert printed == f"{['add'] * 3};{['add'] * 3};True;True"


Celsius = type("Celsius", (Dunder,), {"number": 20.5})
"""A tensor to DLPack, a number of degrees to Numba."""
Readings = type("Readings", (np.ndarray,), {"number": property(lambda self: float(self.size))})
"""An array to NumPy, the number of its elements to Numba."""
_NumberType = type("_NumberType", (types.Type,), {})
for _cls in (Celsius, Readings):
    typeof_impl.register(_cls)(lambda value, context, name=_cls.__name__: _NumberType(name))
register_model(_NumberType)(lambda manager, numba_type: PrimitiveModel(manager, numba_type, ir.DoubleType()))


@unbox(_NumberType)
def _unbox_number(numba_type, value, c):
    number = c.pyapi.object_getattr_string(value, "number")
    native = c.unbox(types.float64, number)
    c.pyapi.decref(number)
    return native


@intrinsic
def number_of(context, value):
    return types.float64(value), lambda context, builder, signature, arguments: arguments[0]


# An array of a kind that no other test has: Numba knows arrays by dtype, rank and order, and remembers what the first one was.
@pytest.mark.parametrize("value", [Celsius(np.arange(3.0)), np.zeros((1, 2, 3, 1, 1), np.uint16, order="F").view(Readings)])
def test_a_type_of_its_own_is_what_numba_reads(value):
    number_in = lambda x: number_of(x)  # noqa: E731
    for kernel in (*both(number_in), fast_args(number_in)):
        assert [kernel(value), kernel(value), kernel(x=value)] == [value.number] * 3
    assert "extension of Numba" in str(fast_args(number_in).explain(value))
