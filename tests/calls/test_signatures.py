"""Many signatures on one kernel, explicit signatures, calls inside calls, threads."""

import ctypes
import gc
import itertools

import numba
import numpy as np
import pytest
from cache_entries import cache_entries
from children import in_fork
from forked import needs_fork
from frameworks import FRAMEWORKS, each_mutable_framework, torch
from made_producers import Dunder, Ledger, Tabled
from numba import float64, int64
from oracle import new_kernel, numbas, type_and_message
from raising import check_raises
from ways import Acting

from fastexchange import fast_args
from fastexchange.dispatch import structs

MAKERS = pytest.mark.parametrize("make", [np.asarray] + ([torch.from_numpy] if torch else []), ids=lambda make: make.__module__)
shape_and_sum = numba.njit(lambda x, y: (x.flat[0] * x.size + y, x.ndim))
add_of_doubles = fast_args("float64(float64, float64)")(lambda x, y: x + y)
first_of_doubles = fast_args("float64(float64[::1])")(lambda x: x[0])


@pytest.mark.slow
def test_more_than_64_signatures_each_found_again_natively():
    kernel, arrays = fast_args(lambda x: x.ndim + 10 * x.itemsize + 1000 * x.size), []
    for dtype, ndim in itertools.product(["?", "i1", "i4", "i8", "u8", "f4", "f8", "c16"], [1, 2, 3]):
        whole, readonly = np.zeros((4,) * ndim, dtype), np.zeros((4,) * ndim, dtype)
        readonly.flags.writeable = False
        arrays += [whole, whole[..., ::2], *[whole.T] * (ndim > 1), *[readonly] * (dtype in ("f4", "f8"))]
    want = {id(array): kernel.py_func(array) for array in arrays}
    assert [kernel(array) for array in arrays] == list(want.values())
    stats, again = kernel.counts(), [*arrays, *arrays[::-1], *arrays[::7], *arrays[::3]]
    assert stats.compiled == len(kernel.signatures) == len(arrays) > 64
    assert [kernel(array) for array in again] == [want[id(array)] for array in again]
    assert kernel.counts() == stats._replace(fast=stats.fast + len(again))
    for array in arrays if torch is not None else ():
        assert not array.flags.writeable or kernel(torch.from_numpy(array)) == want[id(array)]
    assert len(kernel.signatures) == len(arrays)


# ---- explicit ------------------------------------------------------------------------------------------------------
def test_nothing_else_is_compiled_and_conversions_are_native():
    for arguments in [(1, 2), (1.5, 2.5), (np.float32(1), 2), (True, np.int8(3)), (2**63, 1)]:
        got = add_of_doubles(*arguments)
        before = add_of_doubles.counts()
        assert got == numbas(add_of_doubles)(*arguments) == add_of_doubles(*arguments) and type(got) is float
        assert add_of_doubles.counts() == before._replace(fast=before.fast + 1)
    assert add_of_doubles.signatures == [(float64, float64)]


def check_refused(kernel, *arguments, view=None):
    """What no declared signature takes: in our words, and then in those of Numba's dispatcher. `view`: what that gets."""
    for _ in range(2):
        kind, message = type_and_message(kernel, *arguments)
        numbas_kind, numbas_words = type_and_message(numbas(kernel), *(arguments if view is None else [view]))
        assert kind is numbas_kind is TypeError and message.endswith(numbas_words)
        assert message.startswith(f"{kernel.__qualname__}(") and "not one of the declared signatures" in message


def test_no_match_is_njits_error():
    for argument in ("text", None, (1.0,), np.ones(3)):
        check_refused(add_of_doubles, argument, 1.0)
    assert add_of_doubles(1.0, 2.0) == 3.0 and len(add_of_doubles.signatures) == 1
    kernel = fast_args(lambda x: x * 2)
    kernel(1)
    kernel.disable_compile()
    assert kernel(1) == kernel(2) - 2 == 2
    check_refused(kernel, "text")
    assert kernel.signatures == [(int64,)]


@each_mutable_framework
def test_arrays_to_layouts_that_take_them(framework):
    corner = fast_args(["float64(float64[:, :])", "float32(float32[:, ::1])"])(lambda x: x[-1, -1])
    for view in (np.ones((3, 4)), np.ones((3, 4)).T, np.ones((6, 8))[::2, ::2]):
        assert corner(framework.tensor(view)) == corner(framework.tensor(view)) == numbas(corner)(view) == 1.0
    assert corner.counts().fast == 3 and corner(framework.tensor(np.ones((3, 4), "f4"))) == 1.0
    assert len(corner.signatures) == 2
    strided = np.ones((6, 8), "f4")[:, ::2]
    check_refused(corner, framework.tensor(strided), view=strided)


def test_readonly_and_misaligned_arrays_where_others_are_declared():
    array, misaligned = np.ones(3), np.zeros(25, np.uint8)[1:].view("f8")
    array.flags.writeable = False
    check_refused(first_of_doubles, array)
    check_refused(first_of_doubles, Dunder(array), view=array)
    misaligned[:] = 5
    assert first_of_doubles(np.ones(3)) == 1.0
    assert first_of_doubles(misaligned) == first_of_doubles(misaligned) == numbas(first_of_doubles)(misaligned) == 5.0


def test_the_best_of_several_signatures_as_njit_takes_it():
    kernel = fast_args(["int64(int64)", "float64(float64)", "complex128(complex128)"])(lambda x: x * 2)
    for value in (1, 1.5, 2j, np.float32(3), np.int8(4), np.complex64(1j)):
        want = numbas(kernel)(value)
        assert kernel(value) == kernel(value) == want and type(kernel(value)) is type(want)
    for _ in range(2):  # Numba cannot decide what a bool is
        assert type_and_message(kernel, True) == type_and_message(numbas(kernel), True)
    assert len(kernel.signatures) == 3
    ambiguous = fast_args(["float64(float32, float64)", "float64(float64, float32)"])(lambda x, y: x + y)
    assert type_and_message(ambiguous, 1.0, 2.0) == type_and_message(numbas(ambiguous), 1.0, 2.0)
    assert ambiguous(np.float32(1), 2.0) == ambiguous(1.0, np.float32(2)) == 3.0
    weigh = fast_args("float64(UniTuple(float64, 2), Omitted(3))")(lambda pair, factor=3: (pair[0] + pair[1]) * factor)
    assert weigh((1.0, 2.0)) == weigh((1.0, 2.0)) == 9.0 and weigh.counts().fast == 1 and len(weigh.signatures) == 1


EXPLICIT = {
    "int64": [2**64 - 1, np.uint64(2**63), float("nan"), 1e300, 1.5, True, np.int8(-3), "3"],
    "uint8": [-1, 300, np.int8(-1), 7], "uint64": [-1, 2**63], "int32": [2**40], "boolean": [3, 0, 0.5, True],
    "float64": [np.float16(1.5), np.float32(0.1), 2**53 + 1, 2**63, True, 1j], "float32": [0.1, 2**40 + 1],
    "complex128": [3, 1.5], "complex64": [0.1j], "UniTuple(int64, 2)": [(1, 2), (1, 2.5)],
    "Tuple((uint8, float64))": [(-1, 2)], "optional(int64)": [1e300, None, 3],
}  # fmt: skip


@pytest.mark.parametrize("declared", EXPLICIT)
def test_explicit_signatures_check_values_as_njit_does(declared):
    plain, kernel = (jit(f"{declared}({declared})")(lambda x: x) for jit in (numba.njit, fast_args))
    for value in EXPLICIT[declared]:
        try:
            want = plain(value)
        except Exception as error:
            for _ in range(3):
                assert issubclass(type_and_message(kernel, value)[0], type(error)), value
        else:
            assert [(type(got), got) for got in (kernel(value) for _ in range(4))] == [(type(want), want)] * 4, value


@fast_args
def descend(x, n):
    x[abs(n)] = 1
    if n == 0:
        return 0
    if n == -20:
        raise ValueError("deep")
    with numba.objmode(below="int64"):
        below = descend(x, n - 1)
    return below + 1


@each_mutable_framework
def test_a_kernel_that_calls_itself_through_python(framework):
    view = np.zeros(40)
    tensor = framework.tensor(view)
    for _ in range(2):
        view[:] = 0
        assert descend(tensor, 30) == 30 and view[:31].tolist() == [1.0] * 31 and view[31] == 0
    if hasattr(tensor, "ledger"):
        tensor.ledger.check(tensor.ledger.made)
    for _ in range(2):  # under plain Numba, too, what raises in object mode keeps its arrays
        assert type_and_message(descend, tensor, -10) == (ValueError, "deep")


def test_many_positional_arguments():
    gather, ledger = fast_args(lambda *arrays: len(arrays)), Ledger()
    for number, count in enumerate((64, 65), start=1):
        tensors = [FRAMEWORKS[i % len(FRAMEWORKS)].tensor(np.full(2, float(i))) for i in range(count)]
        assert gather(*tensors) == gather(*tensors) == count and gather.counts() == (number, number, number)
    tensors = [Dunder(np.ones(3), ledger) for _ in range(70)]
    assert [gather(*tensors) for _ in range(3)] == [70] * 3
    tensors[66].lies["lanes"] = 2
    assert [type_and_message(gather, *tensors)[0] for _ in range(2)] == [BufferError] * 2
    ledger.check(ledger.made)


@pytest.mark.slow
def test_three_hundred_parameters_some_with_defaults_and_a_tuple_of_hundreds():
    names = [f"p{i}" for i in range(290)] + [f"p{i}={i}" for i in range(290, 300)]
    kernel = fast_args(eval(f"lambda {', '.join(names)}: p0[0] + p150 + p289[0] + p299"))
    arguments = [np.full(2, 2.0), *[1.0] * 288, Tabled(np.full(2, 3.0))]
    keywords = dict(zip(names[100:290], arguments[100:], strict=True))
    for _ in range(2):
        assert kernel(*arguments) == kernel(*arguments[:100], **keywords) == 305.0
        assert kernel(*arguments[:100], **keywords, p299=1) == 7.0
    assert kernel.counts().fast >= 4
    last, values = fast_args(lambda values: values[299]), tuple(range(300))
    assert last(values) == last(values) == 299 and last(values[::-1]) == 0 and last.counts().fast == 2


# ---- cache entries -------------------------------------------------------------------------------------------------
def of_new_type(array):
    return array.view(type("New", (np.ndarray,), {}))


def test_types_that_die_make_room_for_others():
    kernel, known = fast_args(lambda x: x[0]), of_new_type(np.ones(3))
    assert fast_args(lambda x: x)(known) is known  # a new type would take the place of a dead one among the types, too
    for _ in range(2):
        dying = [of_new_type(np.ones(3)) for _ in range(structs.MAX_CACHED)]
        assert [kernel(each) for each in dying for _ in range(3)] == [1.0] * 3 * len(dying)
        del dying
        gc.collect()
    assert kernel(known) == 1.0
    assert len(cache_entries(kernel)) == structs.MAX_CACHED
    assert [id(type(known))] in [entry.types for entry in cache_entries(kernel)]


def test_an_entry_whose_types_have_died_is_filled_again_under_a_call_that_reads_it():
    """A producer's Python code takes the type from a neighbour, lets it die, and calls the kernel with another type."""
    kernel, acting, kept = fast_args(lambda x, y: x[0] + y[0]), Acting(np.ones(1)), type(of_new_type(np.ones(1)))
    array = of_new_type(np.ones(3))
    assert [kernel(array, acting) for _ in range(3)] == [2.0] * 3
    (before,) = cache_entries(kernel)

    def act():
        acting.act = None
        array.__class__ = kept
        gc.collect()
        assert cache_entries(kernel)[0].types[0] == 0
        other = of_new_type(np.full(3, 5.0))
        assert [kernel(other, acting) for _ in range(3)] == [6.0] * 3
        assert [entry.address for entry in cache_entries(kernel)] == [before.address]

    acting.act = act
    assert kernel(array, acting) == 2.0 and [kernel(array, acting) for _ in range(3)] == [2.0] * 3


# ---- many signatures in turn, and keywords: each call is made by the cache entry for its arguments -------------------
class Counted:
    """Counts the calls of a kernel that the general path makes."""

    def __init__(self, kernel):
        self.count = 0
        native = kernel._native.native
        function = ctypes.PYFUNCTYPE(*[ctypes.c_ssize_t] * 6)
        own = function(native.run)

        def counted(*arguments):
            self.count += 1
            return own(*arguments)

        self._kept = function(counted)
        native.run = ctypes.cast(self._kept, ctypes.c_void_p).value


def kernel_for_each_dtype(make, times: int):
    """A kernel that has had so many calls in a row with each of the values, and the values."""
    kernel, values = new_kernel(shape_and_sum), [make(np.ones((2,) * n, t)) for t in ("f4", "f8", "i4") for n in (1, 2, 3)]
    for value in values * times:
        for _ in range(3):
            kernel(value, 1)
    return kernel, values


def check_each(values, *calls):
    for value in values:
        for call in calls:
            assert call(value) == (2**value.ndim + 1, value.ndim)


@MAKERS
def test_signatures_in_turn(make):
    kernel, values = kernel_for_each_dtype(make, 3)
    counted = Counted(kernel)
    check_each(values * 10, lambda value: kernel(value, 1))
    assert counted.count <= 10 * len(values) // 2  # some share a site
    kernel.recompile()
    check_each(values * 3, lambda value: kernel(value, 1))


def test_a_site_with_an_entry_for_other_arguments():
    kernel, values = kernel_for_each_dtype(np.asarray, 1)
    sites = kernel._native._sites
    filled = [site for site in sites if site]
    for shift in range(1, 4):
        for index in range(len(sites)):
            sites[index] = filled[(index + shift) % len(filled)]
        check_each(values, lambda value: kernel(value, 1), lambda value: kernel(y=1, x=value))
        assert "y" in type_and_message(kernel, values[shift])[1]


@MAKERS
def test_keywords_are_cached_calls_too(make):
    kernel = fast_args(lambda x, y, z=3: x[0] + 10 * y[0] + 100 * z)
    x, y = make(np.ones(3)), make(np.full(2, 2.0))
    for _ in range(4):
        assert kernel(x, y, 1) == 121 and kernel(x, y) == 321
    counted = Counted(kernel)
    assert kernel(x, y, z=1) == kernel(z=1, y=y, x=x) == kernel(x, z=1, y=y) == kernel(**{"".join("y"): y, "z": 1, "x": x}) == 121
    assert counted.count == 0
    assert kernel(y=y, x=x) == 321  # an omitted default
    for bad in ({"x": x, "y": y, "w": 1}, {"x": x, "z": 1, "w": 1}):
        check_raises(TypeError, "w", kernel, **bad)
    check_raises(TypeError, "x", kernel, x, x=x, y=y)
    assert kernel(z=1, y=y, x=x) == 121


@needs_fork
def test_a_producer_that_calls_the_kernel_while_an_entry_is_tried_that_differs():
    """An entry is tried once for a call, whatever is called meanwhile. It was tried without end, until the stack was full."""
    total = fast_args(lambda x: x.flat[0] * x.size)
    array, double, single = np.ones((2, 2)), Acting(np.ones(3)), Acting(np.ones(3, "f4"))

    def in_the_child():
        assert [total(value) for value in (array, double, single) for _ in range(4)] == [4.0] * 4 + [3.0] * 8
        for _ in range(4):  # a type's site has its last entry: that for doubles
            assert total(double) == 3.0 and total(array) == 4.0
        nested = Acting(np.ones(3, "f4"))
        nested.act = lambda: total(array)
        assert total(nested) == 3.0 and len(nested.asked) <= 3

    assert in_fork(in_the_child) == 0


@fast_args
def total_said(x, y, said):
    if said is not None:
        print(said)  # runs Python code
    return x[0] + y[0]


def test_a_signature_that_needs_owning_exports_changes_the_calls_of_those_before_it(capsys):
    x, y = Dunder(np.ones(3)), Tabled(np.ones(3))
    for said in (None, None, 1, 1, None, None, None):
        before = len(x.asked)
        total_said(x, y, said)
    assert len(x.asked) - before == 1 and capsys.readouterr().out == "1\n1\n"
