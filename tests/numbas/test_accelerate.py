"""``accelerate()``: what Numba's decorators make then is what Numba makes, but that it takes tensors and calls are cheaper."""

import enum
import functools
import gc
import pickle
import warnings
import weakref

import numba
import numpy as np
import pytest
from forked import fork_python, needs_fork
from frameworks import torch
from llvmlite import ir
from made_producers import ONLY_NUMBA, Dunder
from numba.core import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaWarning
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic, overload, register_model, typeof_impl, unbox

from fastexchange import FastKernel, accelerate, decelerate, fast_args
from fastexchange.dispatch.boxing import is_plain
from fastexchange.ground.disk_cache import FOLDER


def both(function, *signature, **options):
    """Numba's dispatcher of a function, with options of ``numba.jit``, and the accelerated one."""
    plain = numba.jit(*signature, **options)(function)
    accelerate()
    try:
        return plain, numba.jit(*signature, **options)(function)
    finally:
        decelerate()


def add(x, y):
    return x + y


def unknown_name(x):
    return no_such_name  # noqa: F821


def outcome(kernel, args, kwargs):
    try:
        return kernel(*args, **kwargs)
    except Exception as error:
        return type(error), str(error).split()  # what Numba says a second time has another indentation


REFUSED = {
    "too many": (add, (1, 2, 3), {}),
    "too few": (add, (1,), {}),
    "unknown keyword": (add, (1,), {"z": 2}),
    "twice": (add, (1, 2), {"y": 2}),
    "too many, one with a default": (lambda x, y=2: x + y, (1, 2), {"y": 2}),
    "twice, before *args": (lambda x, *rest: x, (1, 2), {"x": 2}),
    "empty list": (lambda x: x, ([],), {}),
    "empty list in a tuple": (lambda x: x, ((1, []),), {}),
    "mixed list": (lambda x: x, ([1, "a"],), {}),
    "big int": (lambda x: x, (2**64,), {}),
    "long double": (lambda x: x, (np.longdouble(1),), {}),
    "array of objects": (lambda x: x, (np.array([None]),), {}),
    "masked array": (lambda x: x, (np.ma.masked_array([1]),), {}),
    "object": (lambda x: x, (object(),), {}),
    "does not compile": (unknown_name, (1,), {}),
    "no such operator": (add, (1, "a"), {}),
    "not one of the declared types": (add, (1j, 1j), {}),
    "keywords": (lambda x, **rest: x, (1,), {}),
}


@pytest.mark.filterwarnings("ignore:.*reflected list")
@pytest.mark.parametrize("name", REFUSED)
def test_what_numba_refuses_is_refused_in_its_words(name):
    function, args, kwargs = REFUSED[name]
    plain, accelerated = both(function, *["(intc, intc)"] * ("declared" in name))
    for _ in range(3):  # Numba says more each time
        expected = outcome(plain, args, kwargs)
        assert isinstance(expected, tuple) and issubclass(expected[0], Exception)
        assert outcome(accelerated, args, kwargs) == expected
    if name not in ("keywords", "big int", "mixed list", "not one of the declared types"):
        assert outcome(fast_args(function), args, kwargs) != expected, "fast_args names argument and kernel"


def test_exceptions_of_the_kernel_come_once():
    calls = []

    def note():
        calls.append(1)

    def fails(x):
        with numba.objmode():
            note()
        raise ValueError("own words")

    _, accelerated = both(fails)
    for count in (1, 2, 3):
        with pytest.raises(ValueError, match=r"^own words$"):
            accelerated(np.zeros(2))
        assert len(calls) == count


def test_a_tensor_is_refused_in_our_words():
    _, accelerated = both(unknown_name)
    with pytest.raises(numba.TypingError, match=r"unknown_name\(x: array"):
        accelerated(Dunder(np.zeros(2)))


def test_object_mode_is_numbas():
    _, accelerated = both(lambda x: (globals(), type(x).__name__), forceobj=True)
    assert type(accelerated) is CPUDispatcher
    for _ in range(3):
        assert accelerated(fast_args(add)) == (globals(), "FastKernel")


def test_decorators_make_what_is_accelerated_meanwhile():
    tensor = torch.ones(3) if torch is not None else np.ones(3)
    accelerate()
    accelerate()
    try:
        made = numba.njit(total), numba.jit(nogil=True)(total), numba.njit("float64(float64[:])")(total)
    finally:
        decelerate()
    for kernel in made:
        assert isinstance(kernel, FastKernel) and type(kernel) is type(made[0])
        assert kernel(np.ones(3)) == kernel(np.ones(3)) == 3.0
    assert [kernel(tensor) for kernel in made[:2] * 2] == [3.0] * 4
    assert type(numba.njit(total)) is CPUDispatcher


def test_it_looks_like_numbas():
    plain, accelerated = both(add)
    assert isinstance(accelerated, FastKernel) and repr(accelerated) == repr(plain)
    assert outcome(pickle.loads(pickle.dumps(accelerated)), (1,), {}) == outcome(plain, (1,), {})


def test_a_first_calls_result_is_its_callers_alone():
    """Numba may keep frames of a compilation, which hold those around it until the next collection."""
    _, accelerated = both(lambda x, y: x @ y)
    gc.disable()
    try:
        made = weakref.ref(accelerated(np.ones((2, 3)), np.ones(3)))
        assert made() is None
    finally:
        gc.enable()


def test_what_numba_takes_by_position_and_by_name():
    """It does not know of keyword-only and positional-only parameters; a call is made once."""

    def by_kind(x, /, y, *, z):
        return x, y, z

    plain, accelerated = both(by_kind)
    named = {"x": 1, "y": 2, "z": 3}
    for args, kwargs in (((1, 2, 3), {}), ((), named), ((1, 2), {"z": 3}), ((1,), {"y": True, "z": 2.5}), ((1, 2, 3, 4), {})):
        for _ in range(3):
            assert outcome(accelerated, args, kwargs) == outcome(plain, args, kwargs)
    assert outcome(accelerated, (), named) == (1, 2, 3)
    assert outcome(fast_args(by_kind), (1, 2, 3), {})[0] is TypeError


def test_defaults_of_keyword_only_parameters():
    """Whoever makes the call; Numba itself takes the default of y for that of z."""

    def with_defaults(x, y=None, *, z=3):
        return x, y, z

    for kernel in (fast_args(with_defaults), both(with_defaults)[1]):
        for x in (1, ONLY_NUMBA):  # native code makes the first, Numba's dispatcher the second
            for _ in range(3):
                assert kernel(x) == (x, None, 3) and kernel(x, 2) == (x, 2, 3)
                assert kernel(x, z=5) == (x, None, 5) and kernel(x, 2, z=(1, 2)) == (x, 2, (1, 2))


def test_it_is_not_iterable():
    for kernel in (*both(add), fast_args(add)):
        assert not np.iterable(kernel)
        with pytest.raises(TypeError, match="not iterable"):
            iter(kernel)


def test_a_kernel_that_nobody_holds_is_gone():
    """As Numba's is, without a collection."""
    gc.collect()
    gc.disable()
    try:
        for argument in (1, np.ones(2)):
            dispatchers = both(lambda x: helper(x) + 1)
            for each in dispatchers:
                for _ in range(40):
                    each(argument)
            gone = [weakref.ref(each) for each in dispatchers]
            del dispatchers, each
            assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


@numba.njit
def helper(x):
    return x


def test_boxes_of_others_types_are_not_kept_on_disk():
    class Other(types.Array):
        pass

    plain = types.Array(types.int64, 1, "C")
    other = Other(types.int64, 1, "C")
    assert is_plain(plain) and is_plain(types.Tuple([plain, types.int64]))
    for module in (__name__, "numba.tests.somewhere"):
        Other.__module__ = module
        assert not is_plain(other) and not is_plain(types.Tuple([other, types.int64]))


def test_arrays_in_objects_that_are_no_containers():
    """They are what Numba's boxing code of the object makes of them, whatever else is in the result, and whose it is."""

    def fitted(x):
        return np.polynomial.Polynomial(x)

    def both_of(x):
        return x + 1, np.polynomial.Polynomial(x)

    for function in (fitted, both_of):
        plain, accelerated = both(function)
        x = np.array([1.0, 2.0])
        for _ in range(3):
            expected, made = plain(x), accelerated(x)
            assert repr(made) == repr(expected)
            made = accelerated(Dunder(x))
            assert repr(made if function is fitted else made[1]) == repr(expected if function is fitted else expected[1])


def test_jitted_functions_in_a_tuple():
    """Numba makes functions by address of them if they have one signature, which native code does not read."""

    def apply(functions, x):
        for function in functions:
            x = function(x)
        return x

    def pick(functions, i):
        return functions[i](123)

    one, two = (both(function, "int64(int64)")[1] for function in (lambda x: x + 1, lambda x: x + 2))
    _, applied = both(apply)
    _, picked = both(pick)
    of_tensors = fast_args(lambda functions, x: functions[0](len(x)))
    for _ in range(3):
        assert applied((one, two), 0) == 3
        assert applied((one, one), 0) == 2
        assert [picked((one, two), i) for i in range(2)] == [124, 125]
        assert of_tensors((one, two), np.zeros(3)) == of_tensors((one, two), Dunder(np.zeros(3))) == 4


class Level(enum.Enum):
    LOW = 1

    def words(self):
        return "low"


def above(x):
    return x + Level.LOW.value


def test_code_that_is_kept_by_numba_alone_is_no_warning(tmp_path, monkeypatch):
    """Libraries are imported with warnings as errors, too."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with pytest.warns(NumbaWarning, match="above is compiled by each process"):
        assert fast_args(cache=True)(above)(1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in both(above, "int64(int64)", cache=True):
            assert kernel(1) == 2


def test_a_folder_that_others_can_write_to(tmp_path, monkeypatch):
    """Code is kept in Numba's files then, not in ours."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    _, accelerated = both(add, cache=True)
    assert accelerated(1, 2) == 3
    (folder,) = tmp_path.rglob(FOLDER)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users can write"):
        fast_args(cache=True)(add)
    for hits in (0, 1):
        _, accelerated = both(add, cache=True)
        assert [accelerated(x, 2) for x in (1, 2)] == [3, 4] and sum(accelerated.stats.cache_hits.values()) == hits


def test_code_of_functions_whose_variables_have_types_is_kept(tmp_path, monkeypatch):
    """Numba adds to the types it was given, while it compiles."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def in_steps(x):
        y = x + 1
        y = y * 2
        return y + y

    for hits in (0, 1):
        for kernel in both(in_steps, cache=True, locals={"y": types.float32}):
            assert kernel(1) == 8.0 and sum(kernel.stats.cache_hits.values()) == hits


# ---- programs that ask for Numba's class, or patch it ----------------------------------------------------------------------


def total(x):
    return x.sum()


def test_the_class_is_the_one_that_programs_find():
    from numba.core import registry, target_extension

    plain, function = both(add)
    accelerate()
    try:
        found = registry.CPUDispatcher
        assert type(function) is found and type(numba.jit(add)) is found
        assert isinstance(plain, found) and issubclass(CPUDispatcher, found)
        assert not isinstance(add, found) and not isinstance(FastKernel, found)

        class Own(found):
            pass

        assert not isinstance(function, Own) and isinstance(Own(add), found) and Own(add)(1, 2) == 3
    finally:
        decelerate()
    assert registry.CPUDispatcher is target_extension.CPUDispatcher is CPUDispatcher
    assert str(type(function)) == str(type(plain)) and type(function).__name__ == "CPUDispatcher"
    assert str(function) == str(plain) and repr(function) == repr(plain)
    assert isinstance(function, CPUDispatcher) and isinstance(function, FastKernel)


OF_ANOTHER = "import pickle, fastexchange; {}; k = pickle.loads({!r}); print(k(1, 2), *(c.__name__ for c in type(k).__mro__[:2]))"


@pytest.mark.slow
def test_functions_are_pickled_accelerated_or_not():
    plain, function = both(add)
    pickled, before = pickle.dumps(function), pickle.dumps(plain)
    assert pickle.loads(pickled) is function
    accelerate()
    try:
        meanwhile = pickle.dumps(plain)
        assert pickle.loads(before) is pickle.loads(meanwhile) is plain
        in_object_mode = numba.jit(forceobj=True)(add)
        assert pickle.loads(pickle.dumps(in_object_mode)) is in_object_mode
        assert pickle.loads(pickle.dumps(CPUDispatcher)) is CPUDispatcher
    finally:
        decelerate()
    assert pickle.dumps(plain) == before
    for sent, first, base in (
        (pickled, "pass", "FastKernel"), (before, "fastexchange.accelerate()", "FastKernel"),
        (meanwhile, "fastexchange.accelerate()", "Dispatcher"), (meanwhile, "fastexchange.decelerate()", "Dispatcher"),
    ):  # fmt: skip
        assert fork_python(OF_ANOTHER.format(first, sent)).stdout.split() == ["3", "CPUDispatcher", base]


def noting(original, seen: list):
    """A function in the place of another, which it calls."""

    def call(self, *args, **kwargs):
        seen.append(args)
        return original(self, *args, **kwargs)

    return call


def test_a_call_in_the_place_of_numbas_is_made(monkeypatch):
    seen = []
    monkeypatch.setattr(CPUDispatcher, "__call__", noting(CPUDispatcher.__call__, seen), raising=False)
    _, function = both(add)
    assert [function(1, 2), function(1, 2), function(x=1, y=2)] == [3] * 3
    assert seen == [(1, 2), (1, 2), ()]
    monkeypatch.undo()
    assert function(1, 2) == 3 and function(1, 2) == 3 and len(seen) == 3


def test_a_call_in_the_place_of_the_found_class_is_made(monkeypatch):
    seen = []
    _, function = both(add)
    monkeypatch.setattr(type(function), "__call__", noting(type(function).__call__, seen))
    assert [function(1, 2), function(1, 2), function(1, 2)] == [3] * 3
    assert len(seen) == 3 and function.counts().fast == 2
    monkeypatch.undo()
    _, function = both(total)
    x = np.arange(4.0)
    assert [function(x), function(x)] == [6.0] * 2 and len(seen) == 3 and function.counts().fast == 1


@pytest.mark.parametrize("where", ["class", "instance"])
def test_what_is_in_the_place_of_numbas_compiling_is_asked(monkeypatch, where):
    seen = []
    _, function = both(total)
    compile_for_args = noting(Dispatcher._compile_for_args, seen)
    if where == "class":
        monkeypatch.setattr(Dispatcher, "_compile_for_args", compile_for_args)
    else:
        function._compile_for_args = functools.partial(compile_for_args, function)
    x = np.arange(4.0)
    assert [function(x), function(x), function(x.astype(np.float32))] == [6.0] * 3
    assert [len(args) for args in seen] == [1, 1]
    if torch is not None:
        assert function(torch.arange(3.0)) == 3.0
    with pytest.raises(numba.TypingError):
        function("no array")


# ---- classes with a Numba type of their own --------------------------------------------------------------------------------


class Celsius(Dunder):
    """A tensor to DLPack, a number of degrees to Numba."""

    number = 20.5


class Readings(np.ndarray):
    """An array to NumPy, the number of its elements to Numba."""

    number = property(lambda self: self.size)


class _NumberType(types.Type):
    def __init__(self, cls: type, of: types.Number):
        self.of = of
        super().__init__(name=cls.__name__)


for _cls, _type in ((Celsius, _NumberType(Celsius, types.float64)), (Readings, _NumberType(Readings, types.int64))):
    typeof_impl.register(_cls)(lambda value, context, numba_type=_type: numba_type)


@register_model(_NumberType)
class _NumberModel(PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, ir.IntType(64) if numba_type.of == types.int64 else ir.DoubleType())


@unbox(_NumberType)
def _unbox_number(numba_type, value, c):
    number = c.pyapi.object_getattr_string(value, "number")
    native = c.unbox(numba_type.of, number)
    c.pyapi.decref(number)
    return native


def number_of(value):
    """The number in it."""


@overload(number_of)
def _number_of(value):
    return lambda value: _native_number(value)


@intrinsic
def _native_number(context, value):
    return value.of(value), lambda context, builder, signature, arguments: arguments[0]


def number_in(x):
    return number_of(x)


# An array of a kind that no other test has: Numba knows arrays by dtype, rank and order, and remembers what the first one was.
@pytest.mark.parametrize("value", [Celsius(np.arange(3.0)), np.zeros((1, 2, 3, 1, 1), np.uint16, order="F").view(Readings)])
def test_a_type_of_its_own_is_what_numba_reads(value):
    for kernel in (*both(number_in), fast_args(number_in)):
        assert [kernel(value), kernel(value), kernel(x=value)] == [value.number] * 3
    assert "extension of Numba" in str(fast_args(number_in).explain(value))


@needs_fork
def test_who_patches_compile_sees_what_the_program_compiles(tmp_path):
    """With nothing in the cache: not the package's own functions, nor Numba's overloads that they would call."""
    program = """
        import numba, numpy as np
        from numba.core import registry
        numbas = registry.CPUDispatcher
        import fastexchange
        from fastexchange.ground.cfunction import code_cache
        del code_cache.folders
        fastexchange.accelerate()
        def patch(cls, seen):
            compile = cls.compile
            def patched(self, sig):
                seen.append(self.py_func.__name__)
                return compile(self, sig)
            cls.compile = patched
        found = [], []
        for each in zip((numbas, registry.CPUDispatcher), found):
            patch(*each)
        @numba.njit
        def add(x, y):
            return x[0] + y
        for _ in range(40):
            add(np.ones(2), 1), add((1.0, 2), 2.0), add([1.0], 1)
        print(*found, add.counts().fast > 40, code_cache.misses > 3, sep=";")
    """
    printed = fork_python(program, NUMBA_CACHE_DIR=str(tmp_path)).stdout.strip()
    assert printed == f"{['add'] * 3};{['add'] * 3};True;True"
