"""Every kind of argument: the Numba type, the path and the result are those of plain ``@njit`` on the NumPy view."""

import array as stdlib_array
import collections
import enum
import math
import pickle
import sys
import types

import numba
import numpy as np
import pytest
from cache_entries import cache_entries
from counting import scene
from exchanges import Given
from frameworks import NUMPY_DTYPES
from interoperability import Wrapper
from made_producers import ONLY_NUMBA, Dunder
from numba import float64, int64
from numba.core.errors import TypingError
from numpy.lib.stride_tricks import as_strided
from oracle import check_same_as_njit, numbas, references_kept, type_and_message
from raising import check_raises
from test_numbas_calls import Box

from fastexchange import fast_args

DTYPES = [name for name in NUMPY_DTYPES if name != "f2"]
echo, ignore, total = fast_args(lambda x: x), fast_args(lambda x, y: y), fast_args(lambda x: x.sum())
between, gather = fast_args(lambda n, x, m: (m, x, n)), fast_args(lambda *values: values)
beside = fast_args(lambda thing, x: x[3] + x[3])


@fast_args
def look(x):
    """Everything that a kernel can see of an array's memory. (Where there is none, pointer and strides mean nothing.)"""
    if x.size == 0:
        return x.shape, x.shape, 0, x.size, x.itemsize, x.ndim
    return x.shape, x.strides, x.ctypes.data, x.size, x.itemsize, x.ndim


@fast_args
def swap_ends(x):
    x[0], x[-1] = x[-1], x[0]
    return x.strides, x.ctypes.data, x.itemsize


# ---- scalars -------------------------------------------------------------------------------------------------------
PYTHON_SCALARS = [
    0, 1, -1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, True, False, None,
    0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan, 0j, 1 - 2j, complex(math.inf, -0.0), complex(math.nan, 1.0),
]  # fmt: skip
EXTREMES = {
    "b": lambda _: (True, False), "i": lambda dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max, 1),
    "u": lambda dtype: (np.iinfo(dtype).max, 1),
    "f": lambda dtype: (np.finfo(dtype).min, np.finfo(dtype).max, np.finfo(dtype).tiny, -0.0, math.inf, math.nan, 0.1),
    "c": lambda _: (complex(1.5, -2.5), complex(math.inf, -0.0), complex(math.nan, 0)),
}  # fmt: skip
NUMPY_SCALARS = [dtype.type(value) for dtype in map(np.dtype, DTYPES) for value in EXTREMES[dtype.kind](dtype)]
NUMPY_SCALARS += [np.longlong(-5), np.ulonglong(2**64 - 1), np.intc(-3), np.uintc(3)]
echo_unsigned = fast_args(echo.py_func)  # plain Numba, once it has compiled for int64, takes no others


def test_scalars():
    for value in PYTHON_SCALARS + NUMPY_SCALARS:
        with scene(repr(value)):
            got = check_same_as_njit(echo if type(value) is not int or value < 2**63 else echo_unsigned, (value,))
            assert got or not isinstance(got, float) or math.copysign(1, got) == math.copysign(1, value)


def test_integers_of_either_sign_share_a_kernel_and_some_are_too_large_for_numba():
    for value in (2**64, -(2**63) - 1, 10**30) * 2:
        check_raises(OverflowError, "position 0.*64 bits", ignore, value, 1)
        check_raises(OverflowError, "position 1.*64 bits", ignore, 1, value)
    assert ignore(2**63, 1) == 1 and ignore(1, 5) == 5
    kernel = fast_args(echo.py_func)
    for value in (0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), (2**63, 1), (2**64 - 1, 1), (1, 1)) * 2:
        assert kernel(value) == value
    assert [str(each) for each in kernel.signatures if "Tuple" not in str(each)] == ["(int64,)", "(uint64,)"]
    assert len(kernel.signatures) == 4


SAMPLES = [1, 2.5, None, True, np.float32(3), (1, 2), np.ones(2), np.ones((2, 2), "i4")]


@pytest.mark.parametrize("first", [0, 3, 5, 7])
def test_each_kind_beside_each_other_in_every_order(first):
    others = SAMPLES[:first] + SAMPLES[first + 1 :]
    check_same_as_njit(gather, tuple(value for other in others for value in (SAMPLES[first], other)))


# ---- what only Numba understands -----------------------------------------------------------------------------------
Color, Level = enum.Enum("Color", "RED BLUE"), enum.IntEnum("Level", "LOW HIGH")
PLAIN = [
    ONLY_NUMBA, b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), stdlib_array.array("d", [1.0, 2.0]),
    [1.0, 2.0], {1, 2}, [np.ones(3), np.zeros(3)], range(3, 30, 2), slice(1, 5), slice(1, 5, 2), ..., Color.BLUE, Level.HIGH,
    np.datetime64("2024-01-02T03:04:05"), np.datetime64("2024-01-02"), np.timedelta64(5, "s"), np.datetime64("NaT", "ns"),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0], np.dtype("f4"), np.float32, np.random.default_rng(3),
    numba.vectorize(lambda x: x + 1), numba.cfunc("float64(float64)")(lambda x: x), abs, math, {1: 2}, object(), Color,
    *(type(f"My{base.__name__}", (base,), {})(value) for base, value in ((int, 5), (float, 2.5), (str, "abc"))),
    type("WithIndex", (), dict.fromkeys(("__index__", "__int__", "__float__"), lambda self: 3))(),
]  # fmt: skip
MADE_BY_NUMBA = [
    lambda: numba.typed.List([1.0, 2.0]), lambda: numba.typed.List([np.ones(3), np.zeros(2)]), lambda: Box(2.5),
    lambda: numba.typed.Dict.empty(int64, float64),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
@pytest.mark.parametrize("value", [*PLAIN, *MADE_BY_NUMBA], ids=lambda value: type(value).__name__)
def test_what_only_numba_understands(value):
    """Accepted where ``@njit`` accepts it, in a mix with tensors; TypeError where not, where an object is unknown to all."""
    value, view = value() if type(value) is types.FunctionType else value, np.arange(4.0)
    tensor = Dunder(view)
    try:
        numbas(beside)(value, view)
    except Exception as error:
        kind, message = type_and_message(beside, value, tensor)
        assert kind is TypeError
        if (kind, message) != (type(error), str(error)):  # Numba may have a type for it but no value
            assert "'thing'" in message and "position 0" in message and type(value).__name__ in message
    else:
        assert check_same_as_njit(beside, (value, tensor), (value, view), native=False) == 6.0


# ---- strings -------------------------------------------------------------------------------------------------------
TEXTS = ["", "text", "tëxt", "tēxt", "t😀xt", "text" * 10_000]


@fast_args
def taken_apart(pair, other, x):
    text, codes = pair
    for each in text:
        codes += ord(each)
    return codes, hash(text), len(other), x[0], other


@pytest.mark.parametrize("make", [np.asarray, Dunder])
def test_strings(make):
    view = np.arange(4.0)
    for text in TEXTS:
        tensor = make(view)
        with scene(text[:9]), references_kept(*[text] * bool(text), tensor):  # the empty one is everywhere
            check_same_as_njit(echo, (text,))
            check_same_as_njit(beside, (text, tensor), (text, view))
            check_same_as_njit(taken_apart, ((text, 1), text + "!", tensor), ((text, 1), text + "!", view))


def test_strings_that_are_kept_or_have_to_be_constants():
    put = fast_args(lambda x, text: numba.typed.List(["first", text[1:], text]))
    chosen = fast_args(lambda x, name: x.sum() if numba.literally(name) == "sum" else x.max())
    put(np.ones(2), text := "".join(["long ", "text"]))
    with references_kept(text):
        kept = [put(np.ones(2), text) for _ in range(4)]
        held = sys.getrefcount(text)
        assert all(list(container) == ["first", "ong text", "long text"] for container in kept)
        del kept
        assert held == sys.getrefcount(text) + 4
    assert put.counts().slow <= 2
    for _ in range(4):
        assert chosen(np.arange(3.0), "sum") == 3.0 and chosen(np.arange(3.0), "max") == 2.0


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaExperimentalFeatureWarning")
def test_jitted_functions():
    apply = fast_args(lambda function, x: function(x) * 2)
    apply_both = fast_args(lambda functions, x: functions[0](x) + functions[1](x))
    plus_one, plus_two = numba.njit(lambda x: x + 1), fast_args(lambda x: x + 2)
    assert check_same_as_njit(apply, (plus_one, 3)) == 8 and check_same_as_njit(apply, (plus_two, 3)) == 10
    assert [apply(plus_one, 3), apply(plus_two, 3), apply(numba.njit(plus_two.py_func), 3)] == [8, 10, 10]
    assert check_same_as_njit(apply_both, ((plus_one, plus_two), 1)) == 5
    before = apply.counts().fast
    for n, function in enumerate([numba.njit(lambda x, n=n: x + n) for n in range(2)]):
        assert apply(function, 1) == apply(function, 1) == 2 * (1 + n)
    assert apply.counts().fast == before + 2
    itself = fast_args(lambda function, n: n + 1)
    assert itself(itself, 1) == itself(itself, 1) == numbas(itself)(itself, 1) == 2 and itself.counts().fast == 1


# ---- tuples --------------------------------------------------------------------------------------------------------
Point, Other, Empty = (collections.namedtuple(*row) for row in (("Point", "x y"), ("Point", "x y"), ("Empty", "")))
Vector = type("Vector", (Point,), {"length": lambda self: math.hypot(*self)})


def nested(depth: int) -> tuple:
    return (nested(depth - 1), 3) if depth else (1, 2.5)


TUPLES = [
    (), (1,), (1, 2.5, True, None, 3j), ((),), ((), ()), (((1,),),), (1, (2, (3, (4, 5.5))), 6), (np.float32(1.5), np.int8(3)),
    Point(1, 2.5), Point(Point(1, 2), (3, 4)), (Point(1, 2), 3), Vector(3, 4), Empty(), (Empty(), 1), (None,), (True, False),
    tuple(range(50)), nested(7),
]  # fmt: skip


@pytest.mark.parametrize("value", TUPLES, ids=lambda value: repr(value)[:50])
def test_tuples(value):
    check_same_as_njit(between, (5, value, 7.5))


def test_tuples_that_may_leave_the_native_path_or_have_a_type_of_their_own():
    for value in (nested(8), nested(12), (1, (ONLY_NUMBA, b"bytes")), (Level.LOW, 2)):
        assert check_same_as_njit(ignore, (value, 5), native=False) == 5
    pair = type("Pair", (tuple,), {"__slots__": ()})((1, 2))
    assert type_and_message(numbas(ignore), pair, 1)[0] is TypingError
    kind, message = type_and_message(ignore, pair, 1)
    assert issubclass(kind, TypeError) and "Pair" in message
    for cls in (Point, Other, Point, Vector):  # with one name
        assert type(echo(cls(1, 2))) is cls
    assert echo(Vector(3, 4)).length() == 5


sum_of_nest = fast_args(lambda pair, named, nested, last: (
    pair[0].sum() + 10 * pair[1][0] + 100 * named.x[0] + 1000 * nested[1][0][0] + last
))  # fmt: skip
sum_beside_text = fast_args(lambda pair, named, text: pair[0].sum() + named.y[1][0] + len(text))


def test_tuples_with_tensors(framework):
    views = [np.full(2, value) for value in (1.0, 2.0, 3.0, 4.0)]
    a, b, c, d = tensors = [framework.tensor(view) for view in views]
    va, vb, vc, vd = map(framework.view, tensors, views)
    check_same_as_njit(sum_of_nest, ((a, b), Point(c, 1), (5, (d, None)), 1), ((va, vb), Point(vc, 1), (5, (vd, None)), 1))
    for _ in range(2):  # beside what only Numba understands
        assert sum_beside_text((a, 1), Point(0, (None, b)), ONLY_NUMBA) == 8.0
    assert ignore((a, a), 3) == ignore((a, a), 3) == 3


# ---- arrays --------------------------------------------------------------------------------------------------------
def grid(*shape) -> np.ndarray:
    return np.arange(math.prod(shape), dtype="f4").reshape(shape)


def misaligned(dtype: str, offset: int) -> np.ndarray:
    array = np.zeros(4 * np.dtype(dtype).itemsize + offset, np.uint8)[offset:].view(dtype)
    array[:] = range(4)
    return array


LAYOUTS = [
    grid(), grid(5), grid(1), grid(10)[1::3], grid(10)[3:], grid(0), grid(10)[5:5:2], grid(3, 4), grid(3, 4).T,
    grid(3, 4)[:, 1:3], grid(6, 4)[1:4], grid(6, 4)[::2], grid(6, 4)[2:3], grid(6, 4)[:, 2:3], grid(6, 4)[2:3, 1:2],
    grid(0, 4), grid(4, 0), grid(4, 6)[::2, 3:3], grid(2, 3, 4), grid(2, 3, 4).T, grid(2, 3, 4).transpose(1, 0, 2),
    grid(2, 3, 4)[:, 1:2], grid(1, 3, 1), grid(3, 4)[:, None], grid(2, 0, 4), grid(2, 1, 3, 1, 2),
    grid(1, 2, 1, 2, 1, 2, 2).T, grid(2, 2, 2, 2, 2, 2, 2, 4)[..., ::2], grid(*(1, 2) * 6),
    grid(5)[::-1], grid(1)[::-1], grid(3, 4)[::-1], grid(3, 4)[::-1, ::-1], grid(2, 3, 4)[:, ::-2, ::-1], grid(3, 4)[1:2, ::-1],
    as_strided(grid(5), (3, 5), (0, 4)), as_strided(grid(1), (3, 4), (0, 0)),  # broadcast
    as_strided(grid(8), (4, 3), (4, 4)), as_strided(grid(8), (1, 4), (8000, 4)),  # overlapping; a unit dimension's odd stride
    misaligned("i2", 1), misaligned("f4", 1), misaligned("f8", 1), misaligned("c16", 1),
    misaligned("c16", 8),  # complex numbers are aligned as their parts are
]  # fmt: skip


def check_array(kernel, tensor, view):
    """`kernel` sees in `tensor` what ``@njit`` sees in `view`, and takes it for what it is."""
    expected = numba.typeof(view)
    if view.flags.aligned:
        check_same_as_njit(kernel, (tensor,), (view,))
    else:  # numba.typeof takes every array for aligned
        assert [kernel(tensor), kernel(tensor)] == [numbas(kernel)(view)] * 2
        expected = numba.types.Array(expected.dtype, expected.ndim, expected.layout, not expected.mutable, aligned=False)
    assert (expected,) in kernel.signatures


def test_layouts(framework):
    for array in LAYOUTS:
        if min(array.strides, default=0) >= 0 or framework.negative_strides:
            tensor = framework.tensor(array)
            with scene(array.dtype, array.shape, array.strides):
                check_array(look, tensor, framework.view(tensor, array))
                assert array.dtype != "f8" or total(tensor) == 6.0


def test_dtypes_are_read_and_written(framework):
    for dtype in DTYPES:
        view, before, swapped = (np.arange(7).astype(dtype) for _ in range(3))
        swapped[[0, -1]] = swapped[[-1, 0]]
        tensor = framework.tensor(view)
        with scene(dtype):
            check_array(swap_ends if framework.mutable else look, tensor, framework.view(tensor, view))  # three calls
            assert framework.mutable or dtype != "f4" or type_and_message(swap_ends, tensor)[0] is TypingError
            assert np.array_equal(view, swapped if framework.mutable else before)


def test_a_dtype_object_that_dies_with_its_array():
    """As that of an unpickled array: a row must not compare with its address, which another may get."""
    kernel, first = fast_args(lambda x: x[0]), fast_args(lambda x: x[0])
    for dtype in 10 * ("f8", "f4", "i8", "f8"):
        assert kernel(pickle.loads(pickle.dumps(np.ones(3, dtype)))) == 1  # it is gone before the next one is made
    array = pickle.loads(pickle.dumps(np.ones(3)))
    assert array.dtype is not np.dtype("f8") and {first(array) for _ in range(3)} == {1.0}
    assert [row.expected[0] != id(array.dtype) for entry in cache_entries(first) for row in entry.rows] == [True]


def test_readonly(framework, tmp_path):
    if not framework.readonly:
        pytest.skip(f"{framework} cannot say readonly, or says nothing else")
    for view in (grid(3, 4), np.memmap(tmp_path / "memory", "f8", "w+", shape=(6,))):
        view.flags.writeable = False
        of_a_library = Given(lambda max_version, view=view, **_: view.__dlpack__(max_version=max_version))
        for tensor in (framework.tensor(view), Wrapper(framework.tensor(view)), of_a_library):
            check_array(look, tensor, view)
            assert type_and_message(swap_ends, tensor)[0] is TypingError


# ---- arrays that only NumPy has ------------------------------------------------------------------------------------
PARAMETRIC = [
    np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")]), np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(3, [("a", "i1"), ("b", [("c", "f8"), ("d", "i2", (2, 3))])]), np.array([b"abc", b"d"], "S3"),
    np.zeros(3, [("a", "i4"), ("b", "f8")]).view(np.recarray), np.array(["abc", "d"], "U5"), np.array([5, -7], "m8[s]"),
    np.array(["2024-01-02", "NaT"], "M8[ns]"), np.array(["2024-01-02", "NaT"], "M8[D]"),
]  # fmt: skip


@pytest.mark.parametrize("array", PARAMETRIC, ids=lambda array: f"{type(array).__name__} of {array.dtype}")
def test_parametric_dtypes(array):
    fields = array.dtype.names or () if type(array) is np.ndarray else ()  # they may be misaligned views
    for each in (array, np.concatenate([array, array])[::2], *(array[name] for name in fields)):
        check_array(look, each, each)


def test_parametric_dtypes_are_told_apart_and_equal_ones_share_a_kernel():
    kernel = fast_args(lambda x: x[0])
    for array in [np.array([7], f"m8[{unit}]") for unit in ("s", "D")] * 2:
        assert kernel(array) == array[0] and kernel(array).dtype == array.dtype
    for value in range(4):
        assert kernel(np.array([(value, 2.0)], np.dtype([("a", "i4"), ("b", "f8")]))).item() == (value, 2.0)
    assert len(kernel.signatures) == 3


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_of_ndarray(tmp_path):
    converting = {"__array_finalize__": lambda self, obj: setattr(self, "info", getattr(obj, "info", None))}
    for array in (
        *(np.arange(6.0).view(type("Subclass", (np.ndarray,), members)) for members in ({}, converting)),
        np.memmap(tmp_path / "memory", "f8", "w+", shape=(6,)), np.zeros(3, [("a", "f8")]).view(np.recarray).a,
        np.asmatrix(np.arange(6.0).reshape(2, 3)),
    ):  # fmt: skip
        view = array.view(np.ndarray)
        check_same_as_njit(look, (array,), (view,))
        assert total(array) == numbas(total)(array) == view.sum()


def test_dtypes_that_numba_does_not_have():
    for dtype in ["O", "g", "G", "V5"] + ["T"] * hasattr(np.dtypes, "StringDType"):
        array = np.zeros(3, dtype)
        try:
            numbas(ignore)(array, 1)
        except Exception:
            check_raises((TypeError, numba.core.errors.NumbaError, BufferError, NotImplementedError), None, ignore, array, 1)
        else:
            check_same_as_njit(ignore, (array, 1), native=False)
        assert ignore(np.ones(3), 2) == 2
