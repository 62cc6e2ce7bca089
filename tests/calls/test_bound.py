"""``kernel.bind``: the same launch again and again; what it holds, what it refuses, what becomes of changed tensors."""

import copy
import ctypes
import functools
import gc
import pickle
import sys
import threading
import weakref

import numba
import numpy as np
import pytest
from forked import fork_python
from frameworks import FRAMEWORKS, needs_torch, torch
from hostile_producers import hostile_type
from made_producers import Dunder, Ledger, Tabled
from numba.core.errors import TypingError
from oracle import references_kept, type_and_message

from fastexchange import BoundLaunch, fast_args

of_writeable = pytest.mark.parametrize("framework", [each for each in FRAMEWORKS if each.mutable], ids=str)
MANY = 100


@fast_args
def axpy(a, x, y=None):
    for i in range(x.shape[0]):
        y[i] += a * x[i]


@fast_args
def total(x):
    return x.sum()


@of_writeable
def test_a_launch_does_what_the_call_does(framework):
    x, y = np.arange(4.0), np.zeros(4)
    launch = axpy.bind(2.0, y=framework.tensor(y), x=framework.tensor(x))
    assert type(launch) is BoundLaunch and launch.kernel is axpy
    for times in range(1, MANY):
        assert launch() is None
        assert y.tolist() == (2 * times * x).tolist()
    assert launch.arguments[0] == 2.0


@functools.cache
def weighted_sum(count):
    """Of so many arguments: for Numba one function, compiled once for each type, under a new kernel for each framework."""
    names = [f"a{i}" for i in range(count)]
    body = " + ".join(f"{name}[0] * {i + 1}" for i, name in enumerate(names)) or "0.0"
    namespace: dict = {}
    exec(f"def kernel({', '.join(names)}): return {body}", namespace)
    return numba.njit(namespace["kernel"])


COUNTS = [(each, count) for each in FRAMEWORKS for count in (0, 1, 3)] + [(FRAMEWORKS[0], 70)]


@pytest.mark.parametrize(("framework", "count"), COUNTS, ids=str)
def test_any_number_of_tensors(framework, count):
    tensors = [framework.tensor(np.full(2, float(i))) for i in range(count)]
    kernel = fast_args(weighted_sum(count))
    launch = kernel.bind(*tensors)
    before, want = kernel.counts().fast, kernel(*tensors)
    assert [launch() for _ in range(3)] == [want] * 3
    assert kernel.counts().fast >= before + 3


def test_all_that_a_kernel_takes_natively():
    def kernel(flag, number, big, z, pair, nothing, array, other=3.5, *rest):
        return flag, number + array[0], big, z, pair[0] + pair[1][0], other, len(rest), rest[0][0]

    kernel = fast_args(kernel)
    arguments = (True, 7, 2**63, 1j, (1.5, np.ones(2)), None, np.arange(1, 3), 4.5, np.ones(1), np.ones(2))
    launch = kernel.bind(*arguments)
    assert launch() == launch() == kernel(*arguments)
    short = fast_args(lambda x, n=3: x[0] + n)
    assert short.bind(np.ones(2))() == 4.0 and short.bind(np.ones(2), n=5)() == 6.0


@needs_torch
def test_memory_lives_as_long_as_the_launch():
    tensor = torch.arange(1000.0)
    launch = total.bind(tensor)
    want, died = tensor.sum().item(), []
    weakref.finalize(tensor, died.append, True)
    del tensor
    gc.collect()
    junk = [torch.full((1000,), -1.0) for _ in range(100)]
    assert launch() == want and not died and len(junk) == 100
    del launch
    gc.collect()
    assert died


@needs_torch
def test_what_becomes_of_a_tensor_that_is_changed():
    tensor = torch.arange(4.0)
    launch = total.bind(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(1000)
    assert launch() == 6.0
    tensor += 1
    assert launch() == 10.0
    tensor.requires_grad_()  # its state is looked at when it is bound
    assert launch() == 10.0
    with pytest.raises(BufferError, match="requires grad"):
        total.bind(tensor)


def test_a_bound_bytearray_does_not_grow():
    memory = bytearray(8)
    launch = fast_args(lambda x: len(x)).bind(memory)
    with pytest.raises(BufferError):
        memory.append(1)
    assert launch() == 8
    del launch
    memory.append(1)


first_and_second = fast_args(lambda x, y: x[0] + y[1])


@pytest.mark.parametrize("make", [Dunder, Tabled, hostile_type("OnlyExports", dltensor_from_py_object_no_sync=None)])
def test_each_tensor_is_exported_once_and_given_back_once(make):
    ledgers = [Ledger() for _ in range(3)]
    tensors = [make(np.arange(4.0), ledger) for ledger in ledgers]
    with references_kept(*tensors):
        launch = first_and_second.bind(tensors[0], tensors[1])
        made = [ledger.made for ledger in ledgers]
        assert all(ledger.out == 1 for ledger in ledgers[:2])
        assert [launch() for _ in range(MANY)] == [1.0] * MANY
        assert [ledger.made for ledger in ledgers] == made
        launch.rebind(y=tensors[2])
        assert launch() == 1.0
        ledgers[1].check(ledgers[1].made)
        del launch
        gc.collect()
    for ledger in ledgers:
        ledger.check(ledger.made)


# ---- results ---------------------------------------------------------------------------------------------------------

results = fast_args(lambda x, y: (x, y[1:], x + y, 3.5))


def test_results_are_those_of_the_call(framework):
    x, y = (framework.tensor(np.arange(4.0)) for _ in range(2))
    launch, want = results.bind(x, y), results(x, y)
    for _ in range(MANY):
        got = launch()
        assert [type(each) for each in got] == [type(each) for each in want] and got[3] == 3.5


tail = fast_args(lambda x, y: (x[1:], x, y[:1]), returns=np.ndarray)


@pytest.mark.parametrize("make", [np.asarray, Tabled, Dunder, *([torch.from_numpy] if torch is not None else [])])
def test_what_the_kernel_keeps_outlives_the_launch(make):
    array = np.arange(100.0)
    x = make(array)
    launch = tail.bind(x, np.arange(3.0))
    kept = [launch() for _ in range(MANY)]
    assert all(same is x for _, same, _ in kept)
    views = [view for view, *_ in kept]
    released = weakref.ref(launch._pinned)
    del launch, kept, x
    gc.collect()
    assert released() is not None and all(view.tolist() == array[1:].tolist() for view in views)
    del views
    gc.collect()
    assert released() is None


@needs_torch
def test_an_argument_that_is_other_memory_now_is_not_returned_as_if_it_were_the_same():
    tensor = torch.arange(4.0)
    launch = fast_args(lambda x: x).bind(tensor)
    assert launch() is tensor
    tensor.set_(torch.full((4,), 9.0))
    result = launch()
    assert result is not tensor and result.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_bind_that_a_producer_refuses_keeps_no_reference_to_none():
    class Raising(Dunder):
        def __dlpack__(self, **options):
            raise BufferError("not now")

    def refuse(times):
        for _ in range(times):
            with pytest.raises(BufferError, match="not now"):
                total.bind(Raising(np.ones(1)))
        return sys.getrefcount(None)

    assert abs(refuse(1) - refuse(1000)) < 500, "of 1000 refusals; other code uses it, too"


# ---- rebinding -------------------------------------------------------------------------------------------------------


@of_writeable
def test_rebind(framework):
    x, y, z = np.arange(4.0), np.zeros(4), np.zeros(4)
    launch = axpy.bind(1.0, framework.tensor(x), framework.tensor(y))
    launch()
    tensor = framework.tensor(z)
    assert launch.rebind(y=tensor, a=3.0) is launch
    launch()
    assert y.tolist() == x.tolist() and z.tolist() == (3 * x).tolist()
    assert launch.arguments[2] is tensor and launch.arguments[0] == 3.0


def readonly(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"y": np.zeros((4, 4))}, TypeError),
        ({"y": np.zeros(4, np.float32)}, TypeError),
        ({"y": np.zeros(8)[::2]}, TypeError),
        ({"x": 3.5}, TypingError),
        ({"b": np.zeros(4)}, TypeError),
        ({"a": "text"}, TypingError),
        ({"y": object()}, TypeError),
        ({"x": readonly(np.zeros(4))}, TypeError),
        ({"y": Tabled(np.zeros(4), data=0)}, BufferError),
    ],
)
def test_rebinding_that_is_refused_changes_nothing(wrong, error):
    y = np.zeros(4)
    launch = axpy.bind(1.0, np.arange(4.0), y)
    kind, message = type_and_message(launch.rebind, **wrong)
    assert issubclass(kind, error) and "axpy" in message, (kind, message)
    launch()
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_rebinding_nothing_reads_the_arguments_anew_and_refuses_another_signature():
    array = np.ones(3)
    launch = total.bind(array)
    array.__setstate__(np.full(5, 2.0).__reduce__()[2])
    assert launch.rebind() is launch and launch() == 10.0
    array.__setstate__(np.full(5, 3).__reduce__()[2])
    kind, message = type_and_message(launch.rebind)
    assert kind is TypeError and "another signature" in message
    assert launch() == total(array) == 15


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "disable_compile"])
def test_types_that_the_signatures_lack_have_the_error_of_the_call(is_declared):
    declared = ["float64(float64[::1])"] if is_declared else []
    kernel, ints = fast_args(*declared)(lambda x: x.sum()), np.ones(3, np.int64)
    launch = kernel.bind(np.ones(3))
    if not is_declared:
        kernel.disable_compile()
    for call in (lambda: kernel(ints), lambda: kernel.bind(ints), lambda: launch.rebind(x=ints)):
        kind, message = type_and_message(call)
        assert kind is TypeError and "they take (array(float64, 1d, C))" in message and "array(int64, 1d, C)" in message
    assert launch() == 3.0


def test_recompiling_leaves_the_launch_as_it_is_and_rebinding_says_so():
    kernel = fast_args(lambda x: x.sum())
    launch = kernel.bind(np.ones(3))
    kernel.recompile()
    kind, message = type_and_message(launch.rebind, x=np.zeros(3))
    assert kind is TypeError and "recompile()" in message and "signature" not in message
    kind, message = type_and_message(launch.rebind, x=np.zeros(3, int))
    assert kind is TypeError and "instead of (Array(float64, 1, 'C', False, aligned=True),)" in message
    assert launch() == kernel(np.ones(3)) == 3.0


def test_two_rebindings_at_a_time_are_both_done():
    class Rebinds(Dunder):
        def __dlpack__(self, *, max_version=None):
            if launch.arguments[2] is ys[0]:
                launch.rebind(y=ys[1])
            return super().__dlpack__(max_version=max_version)

    ys = [np.zeros(4), np.zeros(4)]
    launch = axpy.bind(1.0, Dunder(np.zeros(4)), ys[0])
    tensor = Rebinds(np.arange(4.0))
    launch.rebind(x=tensor)
    assert launch.arguments[1] is tensor and launch.arguments[2] is ys[1]
    launch()
    assert ys[0].tolist() == [0.0] * 4 and ys[1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (tensor.ledger.made, tensor.ledger.out) == (2, 1)


# ---- where nothing is native -----------------------------------------------------------------------------------------


def test_a_launch_of_an_interpreted_kernel():
    fork_python(
        """
        import numpy as np
        from fastexchange import BoundLaunch, fast_args

        @fast_args
        def axpy(a, x, y, *, plus=1.0):
            y[:] += a * x + plus
            return y

        @fast_args(out="x[n] -> y[n]")
        def doubled(x, y):
            y[:] = 2 * x

        @fast_args
        def count(x, *rest):
            return x.sum() + len(rest)

        x, y = np.arange(3.0), np.zeros(3)
        launch = axpy.bind(2.0, y=y, x=x)
        assert isinstance(launch, BoundLaunch) and launch.kernel is axpy and launch() is y and y.tolist() == [1.0, 3.0, 5.0]
        x += 1
        assert launch.rebind(a=0.0, plus=0.5) is launch and launch().tolist() == [1.5, 3.5, 5.5]
        assert axpy.bind(1.0, x, np.zeros(3), plus=0.0)().tolist() == [1.0, 2.0, 3.0]
        made = doubled.bind(x)
        assert made() is made() is made.arguments[1] and made().tolist() == [2.0, 4.0, 6.0]
        assert made.rebind(x=np.ones(2), y=None)().tolist() == [2.0, 2.0]
        assert count.bind(x, 1, 2).rebind(x=np.ones(4))() == 6.0
        for wrong in (lambda: launch(1), lambda: launch.rebind(b=1), lambda: axpy.bind(1.0)):
            try:
                wrong()
            except TypeError:
                continue
            raise AssertionError("no TypeError")
        """,
        NUMBA_DISABLE_JIT="1",
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((1.0,), TypeError, "missing 1 required positional argument"),
        ((1.0, 2.0, 3.0, 4.0), TypeError, "positional"),
        ((1.0, np.ones(3), slice(1)), TypeError, "cannot be bound"),
        ((1.0, object(), np.ones(3)), TypeError, "'x' (position 1)"),
        ((1.0, Tabled(np.ones(3), device_type=2), np.ones(3)), BufferError, "'x' (position 1)"),
        ((2**70, np.ones(3), np.ones(3)), OverflowError, "does not fit into 64 bits"),
        ((1.0, np.ones(3, "V2"), np.ones(3)), BufferError, "'x' (position 1)"),
        ((np.longdouble(1), np.ones(3), np.ones(3)), TypeError, "'a' (position 0)"),
        ((1.0, np.ones(3), None), TypingError, "axpy"),
    ],
)
def test_what_cannot_be_bound(arguments, error, words):
    kind, message = type_and_message(axpy.bind, *arguments)
    assert kind is error and words in message, (kind, message)


def test_a_launch_takes_no_arguments():
    launch = total.bind(np.ones(3))
    for call in (lambda: launch(1), lambda: launch(x=np.ones(3)), lambda: launch(*[1, 2])):
        kind, message = type_and_message(call)
        assert kind is TypeError and "takes no arguments" in message and "rebind" in message
    assert launch() == 3.0
    for make in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            make(launch)
    assert "total" in repr(launch) and "ndarray" in repr(launch)


def test_an_exception_in_the_kernel():
    @fast_args
    def fails(x):
        if x[0] > 0:
            raise ValueError("from the kernel", 3)
        return x[0]

    x = np.zeros(1)
    launch = fails.bind(x)
    with references_kept(x, launch):
        for _ in range(MANY):
            x[0] = 1
            with pytest.raises(ValueError, match="from the kernel"):
                launch()
            x[0] = 0
            assert launch() == 0.0


def test_a_call_within_itself_has_keyword_only_parameters_and_defaults_too():
    def kernel(x, *, by, plus=1.0):
        with numba.objmode():
            once_more()
        return x.sum() * by + plus

    depth, got = [3], []

    def once_more():
        depth[0] -= 1
        if depth[0]:
            got.append(launch())

    kernel.__globals__["once_more"] = once_more
    launch = fast_args(kernel).bind(np.ones(3), by=2.0)
    assert launch() == 7.0 and got == [7.0] * 2


def test_a_launch_from_many_threads():
    slow, results = fast_args(total.py_func, nogil=True).bind(np.ones(100_000)), []
    threads = [threading.Thread(target=lambda: results.extend(slow() for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [100_000.0] * 200


def test_rebinding_while_a_call_runs_in_another_thread():
    """It begins after ``rebind`` has, while that asks the new argument's producer: what it reads must not be let go."""
    usleep = ctypes.CDLL(None).usleep
    usleep.argtypes, usleep.restype = [ctypes.c_uint32], ctypes.c_int

    @fast_args(nogil=True)
    def slow(x, state):
        before = x[0]
        if state[0] == 1:
            state[0] = 2
            while state[0] == 2:
                usleep(1000)
        return before, x[0]

    class Late(Dunder):
        def __dlpack__(self, *, max_version=None):
            thread.start()
            while state[0] != 2:  # until it runs
                usleep(1000)
            return super().__dlpack__(max_version=max_version)

    ledgers, state = (Ledger(), Ledger()), np.zeros(1)
    slow(Dunder(np.ones(2)), state)
    launch, results = slow.bind(Dunder(np.full(2, 5.0), ledgers[0]), state), []
    state[0] = 1
    thread = threading.Thread(target=lambda: results.append(launch()))
    kind, message = type_and_message(launch.rebind, x=Late(np.full(2, 6.0), ledgers[1]))
    assert kind is RuntimeError and "running" in message
    assert ledgers[0].out == 1
    state[0] = 3
    thread.join()
    assert results == [(5.0, 5.0)] and launch() == (5.0, 5.0)
    gc.collect()
    ledgers[1].check(1)
    launch.rebind(x=Dunder(np.full(2, 7.0)))
    assert launch() == (7.0, 7.0)
    ledgers[0].check(ledgers[0].made)
