"""Every kind of argument: the Numba type, the path and the result are those of plain ``@njit`` on the NumPy view."""

import array as stdlib_array
import collections
import enum
import itertools
import math
import sys
import warnings

import numba
import numpy as np
import pytest
from frameworks import NUMPY_DTYPES, torch, with_strides_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_producers import ONLY_NUMBA, Dunder, Tabled
from numpy.lib.stride_tricks import as_strided
from oracle import check_same_as_njit, numbas, references_kept, type_and_message

from fastexchange import fast_args

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@fast_args
def echo(x):
    return x


@fast_args
def echo_unsigned(x):
    """For ints beyond int64: plain Numba, once it has compiled for int64, takes no others."""
    return x


@fast_args
def look(x):
    """Everything that a kernel can see of an array's memory. (Where there is none, pointer and strides mean nothing.)"""
    if x.size == 0:
        return x.shape, x.shape, 0, x.size, x.itemsize, x.ndim
    return x.shape, x.strides, x.ctypes.data, x.size, x.itemsize, x.ndim


@fast_args
def ignore(x, y):
    return y


@fast_args
def total(x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


# ---- scalars -------------------------------------------------------------------------------------------------------

PYTHON_SCALARS = [
    0, 1, -1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1,
    True, False, None,
    0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan,
    0j, 1 - 2j, complex(math.inf, -0.0), complex(math.nan, 1.0),
]  # fmt: skip


def extremes(dtype: np.dtype) -> list:
    if dtype.kind == "b":
        return [np.True_, np.False_]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [dtype.type(info.min), dtype.type(info.max), dtype.type(1)]
    if dtype.kind == "c":
        return [dtype.type(complex(1.5, -2.5)), dtype.type(complex(math.inf, -0.0)), dtype.type(complex(math.nan, 0))]
    info = np.finfo(dtype)
    return [dtype.type(value) for value in (info.min, info.max, info.tiny, -0.0, math.inf, math.nan, 0.1)]


NUMPY_SCALARS = [value for name in NUMPY_DTYPES if name != "f2" for value in extremes(np.dtype(name))]
NUMPY_SCALARS += [np.longlong(-5), np.ulonglong(2**64 - 1), np.intc(-3), np.uintc(3)]


def described(value) -> str:
    return f"{type(value).__name__}-{value!r:.40}"


@pytest.mark.parametrize("value", PYTHON_SCALARS + NUMPY_SCALARS, ids=described)
def test_scalars(value):
    got = check_same_as_njit(echo if type(value) is not int or value < 2**63 else echo_unsigned, (value,))
    if isinstance(got, float) and got == 0:
        assert math.copysign(1, got) == math.copysign(1, value)


def test_float16_scalars():
    """Numba has none on a CPU; see test_half.py."""
    for _ in range(40):
        got = echo(np.float16(1.5))
        assert type(got) is float and got == 1.5 and ignore(np.float16(1.5), 1) == ignore(1.5, 1)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30, -(10**30)], ids=described)
def test_integers_too_large_for_numba(value):
    for position, arguments in enumerate([(value, 1), (1, value)]):
        for _ in range(2):
            kind, message = type_and_message(ignore, *arguments)
            assert kind is OverflowError
            assert f"position {position}" in message and "64 bits" in message
    assert ignore(2**63, 1) == 1 and ignore(1, 5) == 5
    assert echo(7) == 7 and echo(2**64 - 1) == 2**64 - 1


def test_integers_of_either_sign_share_a_kernel():
    @fast_args
    def kernel(x):
        return x

    values = [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
    assert [kernel(value) for value in values] == [kernel(value) for value in values] == values
    assert sorted(map(str, kernel.signatures)) == ["(int64,)", "(uint64,)"]


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyText(str):
    pass


class WithIndex:
    def __index__(self):
        return 3

    __int__ = __index__

    def __float__(self):
        return 3.0


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize("value", [MyInt(5), MyFloat(2.5), MyText("abc")], ids=described)
def test_subclasses_of_python_scalars(value):
    try:
        want = numbas(ignore)(value, 1)
    except Exception as error:
        assert type_and_message(ignore, value, 1)[0] is type(error)
    else:
        assert want == 1
        check_same_as_njit(ignore, (value, 1), native=False)


def test_objects_that_convert_to_numbers_are_not_numbers():
    assert type_and_message(ignore, WithIndex(), 1)[0] is TypeError


# ---- what only Numba understands -----------------------------------------------------------------------------------


@numba.experimental.jitclass([("value", numba.float64)])
class Box:
    def __init__(self, value):
        self.value = value


def typed_dict():
    made = numba.typed.Dict.empty(numba.types.int64, numba.types.float64)
    made[1] = 2.0
    return made


@numba.njit
def jitted(x):
    return x + 1


@numba.vectorize
def vectorized(x):
    return x + 1


@numba.cfunc("float64(float64)")
def c_function(x):
    return x


NUMBA_ONLY = {
    "subclass of str": ONLY_NUMBA,
    "bytes": b"bytes",
    "bytearray": bytearray(b"bytes"),
    "memoryview": memoryview(b"bytes"),
    "array.array": stdlib_array.array("d", [1.0, 2.0]),
    "range": range(3, 30, 2),
    "slice": slice(1, 5),
    "slice with step": slice(1, 5, 2),
    "enum": Color.BLUE,
    "int enum": Level.HIGH,
    "datetime64": np.datetime64("2024-01-02T03:04:05"),
    "datetime64 of days": np.datetime64("2024-01-02"),
    "timedelta64": np.timedelta64(5, "s"),
    "NaT": np.datetime64("NaT", "ns"),
    "record": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0],
    "typed list": numba.typed.List([1.0, 2.0]),
    "typed list of arrays": numba.typed.List([np.ones(3), np.zeros(2)]),
    "typed dict": typed_dict(),
    "jitclass": Box(2.5),
    "list": [1.0, 2.0],
    "set": {1, 2},
    "list of arrays": [np.ones(3), np.zeros(3)],
    "generator": np.random.default_rng(3),
    "dtype": np.dtype("f4"),
    "number class": np.float32,
    "vectorize": vectorized,
    "cfunc": c_function,
    "Python function": abs,
    "module": math,
    "ellipsis": ...,
    "dict": {1: 2},
    "object": object(),
    "class": Color,
}


@pytest.mark.filterwarnings("ignore::numba.NumbaPendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
@pytest.mark.parametrize("name", NUMBA_ONLY)
def test_what_only_numba_understands(name, framework):
    """Accepted where ``@njit`` accepts it, in a mix with tensors; TypeError where not, where an object is unknown to all."""
    value, view = NUMBA_ONLY[name], np.arange(4.0)
    tensor = framework.tensor(view)
    try:
        numbas(mixed)(value, view)
    except Exception as error:
        kind, message = type_and_message(mixed, value, tensor)
        assert kind is TypeError
        if (kind, message) == (type(error), str(error)):
            return  # Numba has a type for it but no value
        assert "'thing'" in message and "position 0" in message and type(value).__name__ in message
    else:
        assert check_same_as_njit(mixed, (value, tensor), (value, view), native=False) == 6.0


@fast_args
def mixed(thing, x):
    return x.sum()


@pytest.mark.parametrize("text", ["subclass of str", "enum", "int enum"])
def test_text_and_enums_come_back(text):
    check_same_as_njit(echo, (NUMBA_ONLY[text],), native=False)


TEXTS = {"empty": "", "ascii": "text", "latin-1": "tëxt", "two bytes": "tēxt", "four bytes": "t😀xt", "long": "text" * 10_000}


@pytest.mark.parametrize("name", TEXTS)
def test_strings(name, framework):
    """Their characters are read in place; a kernel may keep them."""
    text, view = TEXTS[name], np.arange(4.0)
    tensor = framework.tensor(view)
    with references_kept(*[text] * bool(text), tensor):  # the empty one is everywhere
        check_same_as_njit(echo, (text,))
        check_same_as_njit(mixed, (text, tensor), (text, view))
        check_same_as_njit(taken_apart, ((text, 1), text + "!", tensor), ((text, 1), text + "!", view))


@fast_args
def taken_apart(pair, other, x):
    text, _ = pair
    letters = {letter: hash(letter) for letter in text[:3] + other}
    return text + other, text[1:], text == other[:-1], len(letters), hash(text) == hash(other[:-1]), x.sum(), other


def test_strings_that_are_kept():
    """The kernel's list holds the object whose characters its items show."""

    @fast_args
    def put(x, text):
        container = numba.typed.List(["first"])
        container.append(text[1:])
        container.append(text)
        return container

    put(np.ones(2), "text")
    text = "".join(["long ", "text"])
    with references_kept(text):
        kept = [put(np.ones(2), text) for _ in range(40)]
        held = sys.getrefcount(text)
        assert all(list(container) == ["first", "ong text", "long text"] for container in kept)
        del kept
        assert held == sys.getrefcount(text) + 40
    assert put.counts().slow <= 2


def test_strings_of_bound_launches_and_of_other_signatures():
    @fast_args
    def count(x, text):
        return x.size + len(text)

    launch = count.bind(np.ones(3), "text")
    assert [launch() for _ in range(30)] == [7] * 30
    for text in ("a", "ä", "😀" * 3):
        for x in (np.ones(2), np.ones(2, "f4"), (1.0, 2.0)):
            if isinstance(x, tuple):
                with pytest.raises(numba.core.errors.TypingError):
                    count(x, text)
            else:
                assert [count(x, text=text) for _ in range(30)] == [2 + len(text)] * 30
    assert count(np.ones(2), ONLY_NUMBA) == 6


def test_strings_that_have_to_be_constants():
    @fast_args
    def chosen(x, name):
        return x.sum() if numba.literally(name) == "sum" else x.max()

    for _ in range(20):
        assert chosen(np.arange(3.0), "sum") == 3.0 and chosen(np.arange(3.0), "max") == 2.0


def test_typed_containers_are_the_same_object_to_the_kernel():
    @fast_args
    def append(values, x):
        values.append(x[0])
        return len(values)

    values = numba.typed.List([1.0])
    assert [append(values, np.array([2.0])), append(values, np.array([3.0]))] == [2, 3]
    assert list(values) == [1.0, 2.0, 3.0]


# ---- jitted functions ----------------------------------------------------------------------------------------------


@fast_args
def apply(function, x):
    return function(x) * 2


@numba.njit
def plus_one(x):
    return x + 1


@fast_args
def plus_two(x):
    return x + 2


def test_jitted_functions():
    assert check_same_as_njit(apply, (plus_one, 3)) == 8
    assert check_same_as_njit(apply, (plus_two, 3)) == 10
    assert [apply(plus_one, 3), apply(plus_two, 3), apply(numba.njit(plus_two.py_func), 3)] == [8, 10, 10]


def test_jitted_functions_made_in_a_loop():
    def make(n):
        return numba.njit(lambda x: x + n)

    kernel = fast_args(apply.py_func)
    for n in range(5):
        function = make(n)
        assert kernel(function, 1) == kernel(function, 1) == 2 * (1 + n)
    assert kernel.counts().fast == 5


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaExperimentalFeatureWarning")
def test_jitted_functions_in_tuples():
    @fast_args
    def both(functions, x):
        return functions[0](x) + functions[1](x)

    assert check_same_as_njit(both, ((plus_one, plus_two), 1)) == 5


def test_a_kernel_given_to_itself():
    @fast_args
    def kernel(function, n):
        return n + 1

    assert kernel(kernel, 1) == kernel(kernel, 1) == numbas(kernel)(kernel, 1) == 2
    assert kernel.counts().fast == 1


# ---- tuples --------------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "x y")
Empty = collections.namedtuple("Empty", "")
Other = collections.namedtuple("Point", "x y")


class Pair(tuple):
    __slots__ = ()


def nested(depth: int) -> tuple:
    value: tuple = (1, 2.5)
    for _ in range(depth):
        value = (value, 3)
    return value


TUPLES = [
    (), (1,), (1, 2), (1, 2.5), (1, 2.5, True, None, 3j), ((),), ((), ()), (((1,),),), (1, (2, (3, (4, 5.5))), 6),
    (np.float32(1.5), np.int8(3)), Point(1, 2.5), Point(Point(1, 2), (3, 4)), (Point(1, 2), 3), Empty(), (Empty(), 1),
    (None,), (True, False), tuple(range(50)), nested(7),
]  # fmt: skip


@pytest.mark.parametrize("value", TUPLES, ids=lambda value: repr(value)[:50])
def test_tuples(value):
    check_same_as_njit(echo, (value,))
    check_same_as_njit(ignore, (value, 5))
    check_same_as_njit(ignore, (5, value))


@pytest.mark.parametrize("value", [nested(8), nested(12), (ONLY_NUMBA, 1), (1, (ONLY_NUMBA, b"bytes")), (Level.LOW, 2)])
def test_tuples_that_may_leave_the_native_path(value):
    assert check_same_as_njit(ignore, (value, 5), native=False) == 5


def test_tuples_of_integers_beyond_int64():
    kernel = fast_args(echo.py_func)
    for value in [(2**63, 1), (2**64 - 1, 1)]:
        assert kernel(value) == kernel(value) == value
    assert kernel((1, 1)) == (1, 1)
    assert len(kernel.signatures) == 2


def test_a_subclass_of_tuple_is_refused_as_njit_refuses_it():
    assert type_and_message(numbas(ignore), Pair((1, 2)), 1)[0] is numba.core.errors.TypingError
    kind, message = type_and_message(ignore, Pair((1, 2)), 1)
    assert issubclass(kind, TypeError) and "Pair" in message


def test_subclasses_of_named_tuples():
    class Vector(Point):
        def length(self):
            return math.hypot(*self)

    got = check_same_as_njit(echo, (Vector(3, 4),))
    assert type(got) is Vector and got.length() == 5


def test_named_tuples_with_one_name_are_two_types():
    assert type(echo(Point(1, 2))) is Point
    assert type(echo(Other(1, 2))) is Other
    assert type(echo(Point(1, 2))) is Point


def test_tuples_with_tensors(framework):
    @fast_args
    def kernel(pair, named, nested, last):
        return pair[0].sum() + 10 * pair[1][0] + 100 * named.x[0] + 1000 * nested[1][0][0] + last

    views = [np.full(2, value) for value in (1.0, 2.0, 3.0, 4.0)]
    a, b, c, d = tensors = [framework.tensor(view) for view in views]
    a_view, b_view, c_view, d_view = map(framework.view, tensors, views)
    check_same_as_njit(
        kernel,
        ((a, b), Point(c, 1), (5, (d, None)), 1),
        ((a_view, b_view), Point(c_view, 1), (5, (d_view, None)), 1),
    )


def test_tuples_of_tensors_beside_what_only_numba_understands(framework):
    @fast_args
    def kernel(pair, named, text):
        return pair[0].sum() + named.y[1][0] + len(text)

    views = [np.full(2, value) for value in (1.0, 2.0)]
    a, b = map(framework.tensor, views)
    assert kernel((a, 1), Point(0, (None, b)), ONLY_NUMBA) == kernel((a, 1), Point(0, (None, b)), ONLY_NUMBA) == 8.0


def test_an_array_twice_in_a_call(framework):
    view = np.arange(4.0)
    tensor = framework.tensor(view)
    check_same_as_njit(ignore, (tensor, (tensor, 1)[1]), (view, 1))
    assert ignore((tensor, tensor), 3) == ignore((tensor, tensor), 3) == 3


# ---- arrays --------------------------------------------------------------------------------------------------------


def base(dtype, *shape) -> np.ndarray:
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


LAYOUTS = {
    "0-d": lambda dtype: base(dtype),
    "1-d": lambda dtype: base(dtype, 5),
    "1-d of one": lambda dtype: base(dtype, 1),
    "1-d strided": lambda dtype: base(dtype, 10)[1::3],
    "1-d empty": lambda dtype: base(dtype, 0),
    "1-d empty strided": lambda dtype: base(dtype, 10)[5:5:2],
    "2-d C": lambda dtype: base(dtype, 3, 4),
    "2-d F": lambda dtype: base(dtype, 3, 4).T,
    "2-d columns": lambda dtype: base(dtype, 3, 4)[:, 1:3],
    "2-d rows": lambda dtype: base(dtype, 6, 4)[1:4],
    "2-d every second row": lambda dtype: base(dtype, 6, 4)[::2],
    "2-d row": lambda dtype: base(dtype, 6, 4)[2:3],
    "2-d column": lambda dtype: base(dtype, 6, 4)[:, 2:3],
    "2-d one element": lambda dtype: base(dtype, 6, 4)[2:3, 1:2],
    "2-d no rows": lambda dtype: base(dtype, 0, 4),
    "2-d no columns": lambda dtype: base(dtype, 4, 0),
    "2-d no columns strided": lambda dtype: base(dtype, 4, 6)[::2, 3:3],
    "3-d C": lambda dtype: base(dtype, 2, 3, 4),
    "3-d F": lambda dtype: base(dtype, 2, 3, 4).T,
    "3-d permuted": lambda dtype: base(dtype, 2, 3, 4).transpose(1, 0, 2),
    "3-d unit dimension": lambda dtype: base(dtype, 2, 3, 4)[:, 1:2, :],
    "3-d unit dimensions": lambda dtype: base(dtype, 1, 3, 1),
    "3-d new axis": lambda dtype: base(dtype, 3, 4)[:, None, :],
    "3-d empty in the middle": lambda dtype: base(dtype, 2, 0, 4),
    "zero strides": lambda dtype: as_strided(base(dtype, 5), (3, 5), (0, np.dtype(dtype).itemsize)),
    "all strides zero": lambda dtype: as_strided(base(dtype, 1), (3, 4), (0, 0)),
    "overlapping": lambda dtype: as_strided(base(dtype, 8), (4, 3), (np.dtype(dtype).itemsize,) * 2),
    "odd stride of a unit dimension": lambda dtype: as_strided(
        base(dtype, 8), (1, 4), (8 * 1000, np.dtype(dtype).itemsize)
    ),
    "offset": lambda dtype: base(dtype, 10)[3:],
    "5-d": lambda dtype: base(dtype, 2, 1, 3, 1, 2),
    "6-d": lambda dtype: base(dtype, 2, 1, 2, 1, 2, 2),
    "7-d F": lambda dtype: base(dtype, 1, 2, 1, 2, 1, 2, 2).T,
    "8-d strided": lambda dtype: base(dtype, 2, 2, 2, 2, 2, 2, 2, 4)[..., ::2],
    "12-d": lambda dtype: base(dtype, *(1, 2) * 6),
}
NEGATIVE_LAYOUTS = {
    "1-d reversed": lambda dtype: base(dtype, 5)[::-1],
    "1-d of one reversed": lambda dtype: base(dtype, 1)[::-1],
    "2-d rows reversed": lambda dtype: base(dtype, 3, 4)[::-1],
    "2-d both reversed": lambda dtype: base(dtype, 3, 4)[::-1, ::-1],
    "3-d partly reversed": lambda dtype: base(dtype, 2, 3, 4)[:, ::-2, ::-1],
    "2-d unit row reversed": lambda dtype: base(dtype, 3, 4)[1:2, ::-1],
}


def check_array(kernel, tensor, view, native=True):
    """`kernel` sees in `tensor` what ``@njit`` sees in `view`, and takes it for what it is."""
    if view.flags.aligned:
        check_same_as_njit(kernel, (tensor,), (view,), native)
    else:  # numba.typeof takes every array for aligned
        assert [kernel(tensor), kernel(tensor)] == [numbas(kernel)(view)] * 2
    expected = numba.typeof(view)
    if not view.flags.aligned:
        expected = numba.types.Array(
            expected.dtype, expected.ndim, expected.layout, not expected.mutable, aligned=False
        )
    assert (expected,) in kernel.signatures


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, framework):
    array = LAYOUTS[layout]("f4")
    tensor = framework.tensor(array)
    check_array(look, tensor, framework.view(tensor, array))


@pytest.mark.parametrize("layout", NEGATIVE_LAYOUTS)
def test_negative_strides(layout, framework):
    if not framework.negative_strides:
        pytest.skip(f"{framework} has no negative strides")
    view = NEGATIVE_LAYOUTS[layout]("f4")
    tensor = framework.tensor(view)
    check_array(look, tensor, framework.view(tensor, view))


@pytest.mark.parametrize("dtype", [name for name in NUMPY_DTYPES if name != "f2"])
def test_dtypes(dtype, framework):
    if dtype not in framework.dtypes:
        pytest.skip(f"{framework} has no {dtype}")
    view = base(dtype, 7)
    tensor = framework.tensor(view)
    check_array(look, tensor, framework.view(tensor, view))


def test_float16(framework):
    """Numba has no arithmetic for float16 on a CPU, nor an item size; ``fastexchange.half`` lets it."""
    view = base("f2", 7)
    tensor = framework.tensor(view)
    check_array(look, tensor, framework.view(tensor, view))
    check_same_as_njit(ignore, (tensor, 1), (view, 1))


@pytest.mark.parametrize("dtype", [name for name in NUMPY_DTYPES if name != "f2"])
def test_elements_are_read_and_written(dtype, framework):
    if not framework.mutable:
        pytest.skip(f"{framework} is readonly")
    view = base(dtype, 6)
    swap_ends(framework.tensor(view))
    want = base(dtype, 6)
    want[0], want[-1] = want[-1], want[0]
    assert np.array_equal(view, want)


@fast_args
def swap_ends(x):
    first = x[0]
    x[0] = x[-1]
    x[-1] = first


@pytest.mark.parametrize("layout", ["2-d F", "3-d permuted", "2-d columns", "zero strides", "8-d strided", "0-d"])
def test_elements_are_read_in_order(layout, framework):
    view = LAYOUTS[layout]("f8")
    assert check_same_as_njit(total, (framework.tensor(view),), (view,)) == view.sum()


def test_readonly(framework):
    view = base("f4", 3, 4)
    view.flags.writeable = False
    if not framework.readonly:
        pytest.skip(f"{framework} cannot say readonly")
    check_array(look, framework.tensor(view), view)
    assert not look.signatures[-1][0].mutable or any(not signature[0].mutable for signature in look.signatures)
    kind, _ = type_and_message(swap_ends, framework.tensor(base_readonly()))
    assert issubclass(kind, numba.core.errors.TypingError)


def base_readonly() -> np.ndarray:
    view = base("f4", 5)
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("dtype", ["i2", "f4", "f8", "c8", "c16"])
def test_misaligned(dtype, framework):
    itemsize = np.dtype(dtype).itemsize
    view = np.zeros(4 * itemsize + 1, np.uint8)[1:].view(dtype)
    view[:] = range(4)
    assert not view.flags.aligned
    check_array(look, framework.tensor(view), view)
    if np.dtype(dtype).kind == "f":
        assert total(framework.tensor(view)) == 6.0


def test_complex_is_aligned_as_its_parts_are(framework):
    view = np.zeros(5 * 16, np.uint8)[8:-8].view("c16")
    check_array(look, framework.tensor(view), view)


def test_kernels_write_through(framework):
    @fast_args
    def fill(x, value):
        for i in range(x.shape[0]):
            x[i] = value

    view = np.zeros(9)
    if not framework.mutable:
        assert type_and_message(fill, framework.tensor(view), 5)[0] is numba.core.errors.TypingError
        assert not view.any()
        return
    fill(framework.tensor(view[1::2]), 5)
    fill(framework.tensor(view[1::2]), 7)
    assert view.tolist() == [0, 7, 0, 7, 0, 7, 0, 7, 0]


# ---- arrays that only NumPy has ------------------------------------------------------------------------------------

PARAMETRIC = {
    "structured": np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")]),
    "aligned structured": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "nested structured": np.zeros(3, [("a", "i1"), ("b", [("c", "f8"), ("d", "i2", (2, 3))])]),
    "record": np.zeros(3, [("a", "i4"), ("b", "f8")]).view(np.recarray),
    "datetime64[ns]": np.array(["2024-01-02", "NaT"], "M8[ns]"),
    "datetime64[D]": np.array(["2024-01-02", "NaT"], "M8[D]"),
    "timedelta64[s]": np.array([5, -7], "m8[s]"),
    "text": np.array(["abc", "d"], "U5"),
    "bytes": np.array([b"abc", b"d"], "S3"),
}


@pytest.mark.parametrize("name", PARAMETRIC)
def test_parametric_dtypes(name):
    array = PARAMETRIC[name]
    check_array(look, array, array)
    strided = np.concatenate([array, array])[::2]
    check_array(look, strided, strided)


def test_parametric_dtypes_are_told_apart():
    @fast_args
    def kernel(x):
        return x[0]

    arrays = [np.array([7], f"m8[{unit}]") for unit in ("s", "ms", "D", "ns")]
    for array in arrays * 2:
        assert kernel(array) == array[0]
        assert kernel(array).dtype == array.dtype
    assert len(kernel.signatures) == 4


def test_equal_dtypes_that_are_different_objects_share_a_kernel():
    @fast_args
    def kernel(x):
        return x[0].a

    for value in range(20):
        array = np.array([(value, 2.0)], np.dtype([("a", "i4"), ("b", "f8")]))
        assert kernel(array) == value
    assert len(kernel.signatures) == 1


def test_fields_of_structured_arrays_are_misaligned_views():
    array = np.zeros(4, [("a", "i1"), ("b", "f8"), ("c", "f4")])
    for name in array.dtype.names:
        check_array(look, array[name], array[name])


class Subclass(np.ndarray):
    pass


class Converting(np.ndarray):
    def __array_finalize__(self, obj):
        self.info = getattr(obj, "info", None)


def ndarray_subclasses(tmp_path):
    yield np.arange(6.0).view(Subclass)
    yield np.arange(6.0).view(Converting)
    yield np.memmap(tmp_path / "memory", "f8", "w+", shape=(6,))
    yield np.zeros(3, [("a", "f8")]).view(np.recarray).a
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield np.asmatrix(np.arange(6.0).reshape(2, 3))


def test_subclasses_of_ndarray(tmp_path):
    for array in ndarray_subclasses(tmp_path):
        view = array.view(np.ndarray)
        check_same_as_njit(look, (array,), (view,))
        assert total(array) == numbas(total)(array) == view.sum()


def test_a_readonly_memmap(tmp_path):
    np.arange(6.0).tofile(tmp_path / "memory")
    array = np.memmap(tmp_path / "memory", "f8", "r")
    check_array(look, array, array)
    assert total(array) == total(array) == 15.0


def test_masked_arrays_are_refused_as_njit_refuses_them():
    """By a kernel that has not compiled for their data yet; one that has is let in by Numba itself."""
    array = np.ma.masked_array(np.arange(3.0), [False, True, False])
    by_njit, ours = (
        type_and_message(numba.njit(total.py_func), array),
        type_and_message(fast_args(total.py_func), array),
    )
    assert issubclass(ours[0], (by_njit[0], TypeError))
    assert "MaskedArray" in ours[1]


@pytest.mark.parametrize("dtype", ["O", "g", "G", "V5", "T"])
def test_dtypes_that_numba_does_not_have(dtype):
    try:
        array = np.zeros(3, dtype)
    except TypeError:
        pytest.skip(f"this NumPy has no dtype {dtype}")
    try:
        numbas(ignore)(array, 1)
    except Exception:
        kind, _ = type_and_message(ignore, array, 1)
        assert issubclass(kind, (TypeError, numba.core.errors.NumbaError, BufferError, NotImplementedError)), kind
    else:
        check_same_as_njit(ignore, (array, 1), native=False)
    assert ignore(np.ones(3), 2) == 2


def test_arrays_of_many_dimensions():
    array = np.zeros((1,) * 30 + (2, 3))
    assert check_same_as_njit(ignore, (array, 3)) == 3


# ---- PyTorch -------------------------------------------------------------------------------------------------------


def torch_views():
    base_tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    yield "transposed", base_tensor.transpose(0, 2)
    yield "permuted", base_tensor.permute(1, 0, 2)
    yield "expanded", torch.ones(3, 1).expand(3, 4)
    yield "expanded scalar", torch.tensor(2.5).expand(3, 4)
    yield "empty", torch.empty(0)
    yield "empty 2-d", torch.empty(3, 0)
    yield "empty slice", base_tensor[:, 1:1]
    yield "0-d", torch.tensor(2.5)
    yield "element", base_tensor[1, 2, 3]
    yield "slice", base_tensor[:, :, 1:3]
    yield "step", base_tensor[:, ::2, ::3]
    yield "as_strided", base_tensor.as_strided((3, 3), (1, 1), 2)
    yield "unfold", torch.arange(10.0).unfold(0, 3, 2)
    yield "channels last", torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "unsqueezed", base_tensor.unsqueeze(1)
    yield "diagonal", base_tensor[0, :, :3].diagonal()
    yield "narrow", torch.arange(10.0)[4:]
    yield "real part", torch.ones(4, dtype=torch.complex64).real
    yield "imaginary part", torch.ones(4, dtype=torch.complex64).imag
    yield "as complex", torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    yield "bool", base_tensor > 5
    yield "view of dtype", torch.arange(4, dtype=torch.int64).view(torch.int16)
    yield "parameter", torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    yield "buffer", torch.nn.Buffer(torch.arange(3.0))
    yield "inference", inference_tensor()
    yield "9-d", torch.zeros(1, 2, 1, 2, 1, 2, 1, 2, 1)
    yield "subclass", torch.arange(3.0).as_subclass(type("Mine", (torch.Tensor,), {}))
    yield "shared memory", torch.arange(3.0).share_memory_()
    yield "storage offset of bytes", torch.arange(9, dtype=torch.uint8)[1:]


def inference_tensor():
    with torch.inference_mode():
        return torch.arange(3.0)


@needs_torch
def test_torch_views():
    for name, tensor in torch_views():
        plain = tensor.as_subclass(torch.Tensor)
        try:
            check_array(look, tensor, with_strides_of(plain, plain.numpy()))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@needs_torch
@pytest.mark.parametrize("name", [np.dtype(name).name for name in NUMPY_DTYPES if name != "f2"])
def test_torch_dtypes(name):
    tensor = torch.zeros(3, 2, dtype=getattr(torch, name))
    check_array(look, tensor, tensor.numpy())
    check_array(look, tensor.T, tensor.T.numpy())


@needs_torch
def test_torch_scalars_are_arrays_without_dimensions():
    assert total(torch.tensor(2.5)) == 2.5
    assert (numba.types.Array(numba.float32, 0, "C"),) in total.signatures


@needs_torch
def test_frameworks_mix_in_one_call():
    @fast_args
    def saxpy(a, x, y, out):
        for i in range(x.shape[0]):
            out[i] = a * x[i] + y[i]

    out = torch.empty(8)
    for _ in range(2):
        saxpy(2.0, torch.arange(8.0), np.ones(8, np.float32), out=out)
    assert out.tolist() == [2.0 * i + 1 for i in range(8)]
    assert saxpy.counts()[:2] == (1, 1)
    saxpy(2.0, np.arange(8, dtype=np.float32), torch.ones(8), out.numpy())
    assert saxpy.counts()[:2] == (2, 1), "the same types from other frameworks are the same call"


# ---- random arrays -------------------------------------------------------------------------------------------------


@st.composite
def arrays(draw, negative_strides: bool = True):
    """An array of random dtype, shape, layout, offset and writeability, cut out of a larger one."""
    dtype = np.dtype(draw(st.sampled_from(["?", "i4", "f4", "f8", "c16"])))
    ndim = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    array = np.arange(math.prod(shape) + 3).astype(dtype)[draw(st.integers(0, 3)) :][: math.prod(shape)].reshape(shape)
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(ndim))))
    if draw(st.booleans()):
        steps = st.sampled_from([1, 1, 2, 3] + [-1, -2] * negative_strides)
        cuts = [
            slice(None, None, draw(steps)) if draw(st.booleans()) else slice(draw(st.integers(0, 3)), None)
            for _ in shape
        ]
        array = array[(*cuts, ...)]
    if draw(st.booleans()) and 0 < array.ndim < 5:
        axis = draw(st.integers(0, array.ndim - 1))
        array = as_strided(
            array, array.shape[:axis] + (2,) + array.shape[axis:], array.strides[:axis] + (0,) + array.strides[axis:]
        )
    if draw(st.integers(0, 3)) == 0:
        array = array.view()
        array.flags.writeable = False
    return array


quick = settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@quick
@given(arrays())
def test_random_numpy_arrays(array):
    check_array(look, array, array)


@pytest.mark.slow
@quick
@given(arrays())
def test_random_arrays_of_dunder_producers(array):
    check_array(look, Dunder(array), array)


@pytest.mark.slow
@quick
@given(arrays())
def test_random_arrays_of_exchange_tables(array):
    view = array if array.flags.writeable else array.copy()
    check_array(look, Tabled(view), view)


@needs_torch
@quick
@given(arrays(negative_strides=False))
def test_random_torch_tensors(array):
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    check_array(look, tensor, with_strides_of(tensor, tensor.numpy()))


@quick
@given(st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.none(), st.complex_numbers()))
def test_random_scalars(value):
    """What goes in comes out, of the type that ``numba.typeof`` gives; or OverflowError where that has none."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        assert type_and_message(echo, value)[0] is OverflowError
        return
    got = echo(value)
    assert (numba.typeof(value),) in echo.signatures
    assert type(got) is type(value) and (got == value or got != got)


SAMPLES = [1, 2.5, None, True, np.float32(3), (1, 2), np.ones(2), np.ones((2, 2), "i4")]


@pytest.mark.parametrize("pair", list(itertools.permutations(range(len(SAMPLES)), 2)), ids=str)
def test_kinds_in_every_order(pair):
    first, second = SAMPLES[pair[0]], SAMPLES[pair[1]]
    check_same_as_njit(ignore, (first, second))
