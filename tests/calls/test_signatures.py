"""Many signatures on one kernel, explicit signatures, calls inside calls, threads."""

import ctypes
import gc
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from frameworks import FRAMEWORKS, torch
from interpreter import run_python
from made_producers import Dunder, Ledger, Tabled
from numba import float32, float64, int64
from oracle import numbas, type_and_message

from fastexchange import fast_args

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


# ---- many ----------------------------------------------------------------------------------------------------------


@fast_args
def ndim_and_size(x):
    return x.ndim, x.size, x.itemsize


def shapes_of_calls():
    """Arrays of more than 64 types: dtype x ndim x layout x readonly."""
    for dtype, ndim in itertools.product(["?", "i1", "i4", "i8", "u8", "f4", "f8", "c16"], [1, 2, 3]):
        whole = np.zeros((4,) * ndim, dtype)
        arrays = [whole, whole[..., ::2]]
        if ndim > 1:
            arrays.append(whole.T)
        if dtype in ("f4", "f8"):
            readonly = whole.copy()
            readonly.flags.writeable = False
            arrays.append(readonly)
        yield from arrays


@pytest.mark.slow
def test_more_than_64_signatures_each_found_again_natively():
    arrays = list(shapes_of_calls())
    want = [(array.ndim, array.size, array.itemsize) for array in arrays]
    assert [ndim_and_size(array) for array in arrays] == want
    stats = ndim_and_size.counts()
    assert stats.compiled == len(ndim_and_size.signatures) == len(arrays) > 64
    for order in (arrays, arrays[::-1], arrays[::7] + arrays[::3]):
        assert [ndim_and_size(array) for array in order] == [(a.ndim, a.size, a.itemsize) for a in order]
    again = ndim_and_size.counts()
    calls = 2 * len(arrays) + len(arrays[::7]) + len(arrays[::3])
    assert again == stats._replace(fast=stats.fast + calls)


def test_the_slow_path_runs_once_per_shape(framework):
    @fast_args
    def kernel(x, n):
        return n + x.size

    tensor = framework.tensor(np.ones(3))
    assert kernel(tensor, 0) == 3
    made = tensor.ledger.made if hasattr(tensor, "asked") else 0
    assert [kernel(tensor, n) for n in range(100)] == [n + 3 for n in range(100)]
    assert kernel.counts() == (100, 1, 1)
    if hasattr(tensor, "asked"):
        tensor.ledger.check(made + 100)


@pytest.mark.slow
@needs_torch
def test_tensors_of_many_types_find_what_arrays_compiled():
    for array in shapes_of_calls():
        ndim_and_size(array)
    known = list(ndim_and_size.signatures)
    for array in shapes_of_calls():
        if array.flags.writeable:
            assert ndim_and_size(torch.from_numpy(array)) == (array.ndim, array.size, array.itemsize)
    assert ndim_and_size.signatures == known


def test_signatures_compiled_by_the_dispatcher_are_used():
    kernel = fast_args(lambda x, y: x + y)
    numbas(kernel)(1, 2)
    numbas(kernel)(1.5, 2.5)
    assert kernel(1, 2) == 3 and kernel(1.5, 2.5) == 4.0
    assert len(kernel.signatures) == 2
    kernel.compile((float32, float32))
    assert kernel(np.float32(1), np.float32(2)) == 3.0
    assert len(kernel.signatures) == 3


def test_a_recompiled_dispatcher():
    def function(x):
        return x * 2

    kernel = fast_args(function)
    assert kernel(1) == kernel(1) == 2
    kernel.recompile()
    assert kernel(1) == kernel(1) == 2


# ---- explicit ------------------------------------------------------------------------------------------------------


def test_nothing_else_is_compiled():
    @fast_args("float64(float64, float64)")
    def add(x, y):
        return x + y

    for arguments in [(1, 2), (1.5, 2.5), (np.float32(1), 2), (True, np.int8(3)), (2**63, 1)]:
        got = add(*arguments)
        assert got == numbas(add)(*arguments) == add(*arguments) and type(got) is float
    assert add.signatures == [(float64, float64)]


def test_conversions_stay_native():
    @fast_args(["float64(float64, float64)"])
    def add(x, y):
        return x + y

    add(1, 2)
    before = add.counts()
    assert add(5, -7) == -2.0
    assert add.counts() == before._replace(fast=before.fast + 1)


@pytest.mark.parametrize("arguments", [("text", 1.0), (None, 1.0), ((1.0,), 1.0), (np.ones(3), 1.0)], ids=str)
def test_no_match_is_njits_error(arguments):
    @fast_args("float64(float64, float64)")
    def add(x, y):
        return x + y

    want = type_and_message(numbas(add), *arguments)
    assert want[0] is TypeError
    for _ in range(2):
        kind, message = type_and_message(add, *arguments)
        assert kind is want[0] and message.startswith("test_no_match") and message.endswith(want[1])
    assert add(1.0, 2.0) == 3.0
    assert len(add.signatures) == 1


def check_refused(kernel, value, as_numba_gets_it):
    """What no declared signature takes: in our words, and then in those of Numba's dispatcher."""
    kind, message = type_and_message(kernel, value)
    numbas_kind, numbas_words = type_and_message(numbas(kernel), as_numba_gets_it)
    assert kind is numbas_kind and message.endswith(numbas_words)
    assert message.startswith(f"{kernel.__qualname__}(") and "not one of the declared signatures" in message


def test_arrays_to_layouts_that_take_them(framework):
    if not framework.mutable:
        pytest.skip(f"{framework} is readonly, and the signatures are of mutable arrays")

    @fast_args(["float64(float64[:, :])", "float32(float32[:, ::1])"])
    def corner(x):
        return x[-1, -1]

    for view in (np.ones((3, 4)), np.ones((3, 4)).T, np.ones((6, 8))[::2, ::2]):
        assert corner(framework.tensor(view)) == corner(framework.tensor(view)) == numbas(corner)(view) == 1.0
    before = corner.counts().fast
    assert corner(framework.tensor(np.ones((3, 4)))) == 1.0
    assert corner.counts().fast == before + 1
    assert corner(framework.tensor(np.ones((3, 4), "f4"))) == 1.0
    assert len(corner.signatures) == 2
    strided = np.ones((6, 8), "f4")[:, ::2]
    check_refused(corner, framework.tensor(strided), strided)


def test_readonly_arrays_where_writeable_ones_are_declared():
    @fast_args("float64(float64[::1])")
    def first(x):
        return x[0]

    array = np.ones(3)
    array.flags.writeable = False
    for tensor in (array, Dunder(array)):
        check_refused(first, tensor, array)
    assert first(np.ones(3)) == 1.0


def test_misaligned_arrays_where_any_are_declared():
    @fast_args("float64(float64[::1])")
    def first(x):
        return x[0]

    array = np.zeros(25, np.uint8)[1:].view("f8")
    array[:] = 5
    assert first(array) == first(array) == numbas(first)(array) == 5.0


def test_the_best_of_several_signatures_as_njit_takes_it():
    @fast_args(["int64(int64)", "float64(float64)", "complex128(complex128)"])
    def double(x):
        return x * 2

    for value in (1, 1.5, 2j, np.float32(3), np.int8(4), np.complex64(1j)):
        want = numbas(double)(value)
        assert double(value) == double(value) == want and type(double(value)) is type(want)
    for _ in range(2):  # Numba cannot decide what a bool is
        assert type_and_message(double, True) == type_and_message(numbas(double), True)
    assert len(double.signatures) == 3


def test_ambiguous_signatures_as_njit_takes_them():
    @fast_args(["float64(float32, float64)", "float64(float64, float32)"])
    def add(x, y):
        return x + y

    want = type_and_message(numbas(add), 1.0, 2.0)
    assert type_and_message(add, 1.0, 2.0) == want
    assert add(np.float32(1), 2.0) == add(1.0, np.float32(2)) == 3.0


def test_explicit_signatures_with_tuples_and_defaults():
    @fast_args("float64(UniTuple(float64, 2), Omitted(3))")
    def weigh(pair, factor=3):
        return (pair[0] + pair[1]) * factor

    assert weigh((1.0, 2.0)) == weigh((1.0, 2.0)) == 9.0
    assert weigh.counts().fast == 1 and len(weigh.signatures) == 1


def test_a_dispatcher_that_may_no_longer_compile():
    kernel = fast_args(lambda x: x + 1)
    kernel(1)
    kernel.disable_compile()
    assert kernel(1) == kernel(2) - 1 == 2
    check_refused(kernel, "text", "text")
    assert kernel.signatures == [(int64,)]


# ---- calls inside calls --------------------------------------------------------------------------------------------


def test_recursion():
    @fast_args
    def fibonacci(n):
        if n < 2:
            return n
        return fibonacci(n - 1) + fibonacci(n - 2)

    assert fibonacci(20) == fibonacci(20) == 6765


def test_a_kernel_that_calls_itself_through_python(framework):
    if not framework.mutable:
        pytest.skip(f"{framework} is readonly")
    view = np.zeros(40)
    tensor = framework.tensor(view)
    for _ in range(2):
        view[:] = 0
        assert descend(tensor, 30) == 30
        assert view[:31].tolist() == [1.0] * 31 and view[31] == 0
    ledger = getattr(tensor, "ledger", None)
    if ledger is not None:
        ledger.check(ledger.made)


@fast_args
def descend(x, n):
    x[n] = 1
    if n == 0:
        return 0
    with numba.objmode(below="int64"):
        below = descend(x, n - 1)
    return below + 1


@fast_args
def dive(x, n):
    if n == 0:
        raise ValueError("deep")
    with numba.objmode(below="int64"):
        below = dive(x, n - 1)
    return below + 1


def test_an_exception_from_the_depth():
    ledger = Ledger()
    for _ in range(3):
        assert type_and_message(dive, Dunder(np.ones(3), ledger), 10) == (ValueError, "deep")


def test_different_kernels_inside_one_another():
    @fast_args
    def inner(x):
        return x.sum()

    @fast_args
    def outer(x):
        with numba.objmode(s="float64"):
            s = inner(x) + inner(x * 2)
        return s + inner(x)

    array = np.ones(3)
    assert outer(array) == outer(array) == outer(Tabled(array)) == outer(Dunder(array)) == 12.0


# ---- many arguments ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_many_positional_arguments(count):
    @fast_args
    def gather(*arrays):
        return len(arrays)

    tensors = [FRAMEWORKS[i % len(FRAMEWORKS)].tensor(np.full(2, float(i))) for i in range(count)]
    assert gather(*tensors) == gather(*tensors) == count
    assert gather.counts().fast == 1


def test_three_hundred_parameters():
    names = [sys.intern(f"p{i}") for i in range(300)]
    namespace: dict[str, object] = {}
    exec(f"def many({', '.join(names)}): return p0[0] + p150 + p299[0]", namespace)
    kernel = fast_args(namespace["many"])
    arguments: list[object] = [1.0] * 300
    arguments[0], arguments[299] = np.full(2, 2.0), Tabled(np.full(2, 3.0))
    assert kernel(*arguments) == kernel(*arguments) == 6.0
    keywords = dict(zip(names[100:], arguments[100:], strict=True))
    assert kernel(*arguments[:100], **keywords) == kernel(*arguments[:100], **keywords) == 6.0
    assert kernel.counts().fast >= 2


def test_a_tuple_of_hundreds():
    @fast_args
    def last(values):
        return values[299]

    values = tuple(range(300))
    assert last(values) == last(values) == 299
    assert last(values[::-1]) == 0
    assert last.counts().fast == 2


# ---- threads -------------------------------------------------------------------------------------------------------


def hammer(kernel, make_arguments, want, threads=8, calls=300):
    """Threads that call `kernel` at the same time, each with arguments of its own; what they got other than `want`."""
    barrier = threading.Barrier(threads)

    def work(index):
        arguments = make_arguments(index)
        barrier.wait()
        return [got for _ in range(calls) if (got := kernel(*arguments)) != want(index)]

    with ThreadPoolExecutor(threads) as pool:
        return [wrong for result in pool.map(work, range(threads)) for wrong in result]


@pytest.fixture
def quick_switches():
    """Threads change places often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_switches")
def test_threads_on_one_kernel(framework):
    @fast_args
    def total(x):
        s = 0.0
        for value in x.flat:
            s += value
        return s

    dtypes = ["f4", "f8", "i4", "i8"]
    views = [np.full(10 + i, i, dtypes[i % 4]) for i in range(8)]
    assert hammer(total, lambda i: (framework.tensor(views[i]),), lambda i: views[i].sum()) == []


@pytest.mark.usefixtures("quick_switches")
def test_threads_on_a_kernel_without_the_gil(framework):
    @fast_args(nogil=True)
    def total(x, y):
        s = 0.0
        for i in range(x.size):
            s += x[i] * y[0]
        return s

    views = [np.full(1000 + i, float(i)) for i in range(8)]
    wrong = hammer(
        total, lambda i: (framework.tensor(views[i]), framework.tensor(views[i])), lambda i: i * i * (1000.0 + i)
    )
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures("quick_switches")
def test_threads_that_compile_at_the_same_time():
    kernels = [fast_args(lambda x, n=i: x.sum() + n) for i in range(4)]

    def both(x):
        return sum(kernel(x) for kernel in kernels)

    views = [np.ones((2,) * (i % 3 + 1), ["f4", "f8"][i % 2]) for i in range(8)]
    assert hammer(both, lambda i: (views[i],), lambda i: 4 * views[i].sum() + 6, calls=20) == []


@pytest.mark.usefixtures("quick_switches")
def test_threads_and_kernels_that_come_and_go():
    ledger = Ledger()

    @fast_args
    def total(x):
        return x.sum()

    def make_and_drop(array):
        kernel = fast_args(numba.njit(lambda x: x.size))
        new_type = type("New", (Tabled,), {})
        return total(array) + total(Dunder(array, ledger)) + kernel(3 * array) + total(new_type(array))

    assert hammer(make_and_drop, lambda i: (np.ones(3),), lambda i: 12.0, threads=4, calls=4) == []
    ledger.check(ledger.made)


def test_nogil_lets_other_threads_run():
    usleep = ctypes.CDLL(None).usleep
    usleep.argtypes, usleep.restype = [ctypes.c_uint], ctypes.c_int

    @fast_args(nogil=True)
    def wait(flag):
        turns = 0
        while flag[0] == 0 and turns < 20_000:
            usleep(1000)
            turns += 1
        return flag[0]

    flag = np.ones(1, np.int64)
    wait(flag)
    flag[0] = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, flag)
        flag[0] = 7
        assert waiting.result() == 7


def test_nogil_kernels_hold_owning_exports():
    @fast_args(nogil=True)
    def total(x):
        return x.sum()

    tensor = Tabled(np.ones(3))
    total(tensor)
    before = tensor.ledger.made
    for _ in range(3):
        assert total(tensor) == 3.0
    assert tensor.borrows == 0 and tensor.ledger.made == before + 3
    tensor.ledger.check(tensor.ledger.made)


@needs_torch
def test_nogil_with_torch():
    @fast_args(nogil=True)
    def add_one(x):
        for i in range(x.size):
            x[i] += 1
        return x[0]

    tensor = torch.zeros(5)
    assert [add_one(tensor) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert tensor.tolist() == [3.0] * 5
    assert add_one.counts().fast == 2


def test_exceptions_from_kernels_without_the_gil(framework):
    @fast_args(nogil=True)
    def fails(x):
        if x[0] == 1:
            raise ValueError("no", 3)
        return x[0]

    tensor = framework.tensor(np.ones(3))
    for _ in range(3):
        assert type_and_message(fails, tensor) == (ValueError, "('no', 3)")
    assert fails(framework.tensor(np.zeros(3))) == 0.0
    ledger = getattr(tensor, "ledger", None)
    if ledger is not None:
        ledger.check(ledger.made)


def test_parallel(framework):
    if not framework.mutable:
        pytest.skip(f"{framework} is readonly")

    @fast_args(parallel=True)
    def scale(x, factor, out):
        for i in numba.prange(x.size):
            out[i] = x[i] * factor
        return out.sum()

    view, out = np.arange(1000.0), np.zeros(1000)
    for factor in (1.0, 2.0, 3.0):
        assert scale(framework.tensor(view), factor, framework.tensor(out)) == factor * view.sum()
    assert scale.counts().fast == 2


def test_threads_at_exit():
    """Daemon threads that still call kernels when the interpreter goes."""
    run_python(
        """
        import threading
        import numpy as np
        from fastexchange import fast_args
        from made_producers import Tabled

        @fast_args
        def total(x):
            return x.sum()

        total(np.ones(3)), total(Tabled(np.ones(3)))

        def work():
            while True:
                total(np.ones(3))

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        """
    )


def test_a_fast_entry_that_cannot_be_compiled_is_reported_once(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such instruction")

    kernel = fast_args(lambda x: x[0])
    array = np.ones(1, np.float32)
    monkeypatch.setattr("fastexchange.dispatch.fast_entry.fast_entry", broken)
    with pytest.warns(RuntimeWarning, match="no such instruction") as caught:
        assert [kernel(array) for _ in range(100)] == [1.0] * 100
    assert len(caught) == 1
    monkeypatch.undo()
    assert kernel(array) == 1.0
    assert kernel.counts().fast >= 99


EXPLICIT = [
    ("int64(int64)", 2**64 - 1), ("int64(int64)", np.uint64(2**63)), ("int64(int64)", float("nan")), ("int64(int64)", 1e300),
    ("int64(int64)", 1.5), ("int64(int64)", True), ("int64(int64)", np.int8(-3)), ("uint8(uint8)", -1), ("uint8(uint8)", 300),
    ("uint8(uint8)", np.int8(-1)), ("uint8(uint8)", 7), ("uint64(uint64)", -1), ("uint64(uint64)", 2**63),
    ("int32(int32)", 2**40), ("boolean(boolean)", 3),
    ("boolean(boolean)", 0), ("boolean(boolean)", 0.5), ("boolean(boolean)", True),
    ("float64(float64)", np.float16(1.5)), ("float64(float64)", np.float32(0.1)), ("float64(float64)", 2**53 + 1),
    ("float64(float64)", 2**63), ("float32(float32)", 0.1), ("float32(float32)", 2**40 + 1), ("float64(float64)", True),
    ("complex128(complex128)", 3), ("complex128(complex128)", 1.5), ("complex64(complex64)", 0.1j), ("float64(float64)", 1j),
    ("UniTuple(int64, 2)(UniTuple(int64, 2))", (1, 2)), ("UniTuple(int64, 2)(UniTuple(int64, 2))", (1, 2.5)),
    ("Tuple((uint8, float64))(Tuple((uint8, float64)))", (-1, 2)), ("optional(int64)(optional(int64))", 1e300),
    ("optional(int64)(optional(int64))", None), ("optional(int64)(optional(int64))", 3), ("int64(int64)", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("signature", "value"), EXPLICIT, ids=[f"{s} {v!r}" for s, v in EXPLICIT])
def test_explicit_signatures_check_values_as_njit_does(signature, value):
    def same(x):
        return x

    plain, kernel = numba.njit(signature)(same), fast_args(signature)(same)
    try:
        want = plain(value)
    except Exception as error:
        for _ in range(3):
            with pytest.raises(type(error)):
                kernel(value)
    else:
        for _ in range(40):
            got = kernel(value)
            assert (type(got), got) == (type(want), want)


def test_types_that_die_make_room_for_others():
    @fast_args
    def first(x):
        return x[0]

    def takes(cls, calls=60):
        array = np.ones(3).view(cls)
        assert [first(array) for _ in range(calls)] == [1.0] * calls

    for _ in range(40):
        takes(type("Dies", (np.ndarray,), {}))
        gc.collect()
    (filed,) = first._native._overloads.values()
    assert len(filed.cached) <= 8
    cls = type("Lives", (np.ndarray,), {})
    takes(cls)
    assert any(record.type == id(cls) for entry in filed.cached for record in entry.expected)


def test_an_entry_whose_types_have_died_is_filled_again_under_calls_that_read_it(monkeypatch):
    """A call by the entry may be in progress and read it after its kernel. Ctrl-C, too, leaves all but the types as it was."""

    @fast_args
    def first(x, y):
        return x[0] + len(y)

    def takes(cls):
        array = np.ones(3).view(cls)
        assert [first(array, (array, 1)) for _ in range(60)] == [3.0] * 60

    def records(entry):
        return [(record.items, record.origin, record.flags) for record in entry.expected]

    takes(type("Dies", (np.ndarray,), {}))
    gc.collect()
    (filed,) = first._native._overloads.values()
    (entry,) = filed.cached
    before, held, seen = records(entry), list(entry.held), []
    assert entry.is_dead() and held and {origin for _, origin, _ in before} == {0, -1}
    describe = first._native._describe

    def interrupted(*arguments):
        seen.append(records(entry))
        describe(*arguments)
        seen.append(records(entry))
        if len(seen) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(first._native, "_describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        takes(type("Interrupts", (np.ndarray,), {}))
    assert entry.is_dead() and entry.held[: len(held)] == held
    cls = type("Lives", (np.ndarray,), {})
    takes(cls)
    assert len(seen) > 6 and all(each == before for each in seen)
    assert filed.cached == [entry] and not entry.is_dead() and len(entry.held) == len(held)


# ---- many signatures in turn, and keywords: each call is made by the fast entry for its arguments -------------------


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


def _described(x, y):
    return x.sum() + y, x.ndim


def _of_each_dtype(make):
    return [make(np.ones((2,) * rank, dtype)) for dtype in ("f4", "f8", "i4", "i8") for rank in (1, 2, 3)]


@pytest.mark.parametrize("make", [np.asarray] + ([torch.from_numpy] if torch else []), ids=lambda make: make.__module__)
def test_signatures_in_turn(make):
    kernel = fast_args(_described)
    values = _of_each_dtype(make)
    for _ in range(3):
        for value in values:
            for _ in range(30):
                kernel(value, 1)
    counted = Counted(kernel)
    for _ in range(10):
        for value in values:
            assert kernel(value, 1) == (2**value.ndim + 1, value.ndim)
    assert counted.count <= 10 * len(values) // 2  # some share a site
    kernel.recompile()
    for _ in range(3):
        for value in values:
            assert kernel(value, 1) == (2**value.ndim + 1, value.ndim)


def test_a_site_with_an_entry_for_other_arguments():
    """Whatever is found there is compared with the arguments."""
    kernel = fast_args(_described)
    values = _of_each_dtype(np.asarray)
    for value in values:
        for _ in range(30):
            kernel(value, 1)
    sites = kernel._native._sites
    filled = [site for site in sites if site]
    for shift in range(1, 4):
        for index in range(len(sites)):
            sites[index] = filled[(index + shift) % len(filled)]
        for value in values:
            assert kernel(value, 1) == (2**value.ndim + 1, value.ndim)
            assert kernel(y=1, x=value) == (2**value.ndim + 1, value.ndim)
            with pytest.raises(TypeError, match="y"):
                kernel(value)


@pytest.mark.parametrize("make", [np.asarray] + ([torch.from_numpy] if torch else []), ids=lambda make: make.__module__)
def test_keywords_take_the_fast_entry(make):
    @fast_args
    def kernel(x, y, z=3):
        return x[0] + 10 * y[0] + 100 * z

    x, y = make(np.ones(3)), make(np.full(2, 2.0))
    for _ in range(30):
        assert kernel(x, y, 1) == 121 and kernel(x, y) == 321
    counted = Counted(kernel)
    assert kernel(x, y, z=1) == kernel(z=1, y=y, x=x) == kernel(x, z=1, y=y) == kernel(**{"".join("y"): y, "z": 1, "x": x}) == 121
    assert counted.count == 0
    assert kernel(y=y, x=x) == 321  # an omitted default
    for bad in ({"x": x, "y": y, "w": 1}, {"x": x, "z": 1, "w": 1}):
        with pytest.raises(TypeError, match="w"):
            kernel(**bad)
    with pytest.raises(TypeError, match="x"):
        kernel(x, x=x, y=y)
    assert kernel(z=1, y=y, x=x) == 121


def test_a_kernel_that_is_called_again_within_a_call_that_tries_an_entry():
    values = [np.ones(2, dtype) for dtype in ("f4", "f8", "i4")]

    @fast_args
    def kernel(x, depth):
        with numba.objmode(found="float64"):
            found = float(kernel(values[depth % 3], depth - 1)) if depth else 0.0
        return x[0] + found

    for _ in range(40):
        for value in values:
            assert kernel(value, 3) == 4.0


def test_a_producer_that_calls_the_kernel_while_an_entry_is_tried_that_differs():
    """An entry is tried once for a call, whatever is called meanwhile. It was tried without end, until the stack was full."""
    run_python(
        """
        import numpy as np
        from fastexchange import fast_args

        class Tensor:
            def __init__(self, array, nested=lambda: None):
                self.array, self.nested, self.exports = array, nested, 0

            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **options):
                self.exports += 1
                self.nested()
                return self.array.__dlpack__(**options)

        @fast_args
        def total(x):
            return x.sum()

        array, double, single = np.ones((2, 2)), Tensor(np.ones(3)), Tensor(np.ones(3, "f4"))
        for value in (array, double, single):
            for _ in range(60):
                total(value)
        for _ in range(60):  # a type's site has its last entry: that for doubles
            assert total(double) == 3.0 and total(array) == 4.0
        nested = Tensor(np.ones(3, "f4"), lambda: total(array))
        assert total(nested) == 3.0
        assert nested.exports <= 3
        """
    )


def test_threads_with_signatures_in_turn():
    kernel = fast_args(nogil=True)(_described)
    plain = fast_args(_described)
    values = _of_each_dtype(np.asarray)

    def work(seed):
        for number in range(400):
            value = values[(number * 7 + seed) % len(values)]
            for each in (kernel, plain):
                assert each(value, y=1) == each(value, 1) == (2**value.ndim + 1, value.ndim)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
