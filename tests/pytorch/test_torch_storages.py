"""Storages of PyTorch's tensors: what a kernel reads is held, whatever other threads, hooks and modes do meanwhile."""

import collections
import contextlib
import ctypes
import enum
import gc
import sys
import threading
import time

import numba
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from frameworks import has_table, is_borrowed  # noqa: E402
from made_producers import ONLY_NUMBA, Dunder, Ledger, Legacy  # noqa: E402
from oracle import references_kept  # noqa: E402
from raising import check_raises  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from ways import mode_of  # noqa: E402

import fastexchange  # noqa: E402
from fastexchange import fast_args  # noqa: E402
from fastexchange.torch import offsets as producer  # noqa: E402

Pair, Answer = collections.namedtuple("Pair", "first second"), enum.Enum("Answer", "YES")
total = fast_args(lambda x: x.sum())
silent = fast_args(lambda x: x.sum(), nogil=True)
size_of = fast_args(lambda x: x.size, nogil=True)


def test_python_code_of_a_mode_runs_before_any_view_is_borrowed():
    kernel = fast_args(lambda a, b: (b[0] + b[1], a.sum()))
    a, b = torch.ones(1 << 16, dtype=torch.float64), torch.ones(8, dtype=torch.float64)[2:]
    for _ in range(4):
        kernel(a, b)
    with mode_of(TorchFunctionMode, lambda function, args: a.untyped_storage().resize_(0)):
        if producer.guard().knows_all and is_borrowed():  # PyTorch is asked nothing, so nothing is freed
            assert kernel(a, b) == (2.0, 1 << 16)
        else:
            check_raises(BufferError, "'a'", kernel, a, b)
        check_raises(BufferError, r"requires grad|NULL|freed|storage", kernel, a, b.clone().requires_grad_())


def test_kernels_without_the_gil_forbid_resizing_as_numpy_does():
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(6)[3:], torch.ones(3).t()):
        kernel = fast_args(nogil=True, storage=True)(lambda x: x.size)
        assert "new" in str(kernel.explain(tensor)) and tensor.untyped_storage().resizable()
        assert [kernel(tensor) for _ in range(4)] == [3] * 4
        assert kernel.counts().fast >= 3
        check_raises(RuntimeError, "not resizable", tensor.untyped_storage().resize_, 0)
        assert kernel(tensor) == 3
    literal = fast_args(nogil=True)(lambda x, name: x.size)  # text: Numba's own dispatcher makes the call
    tensor = torch.ones(3)
    assert "Numba's own" in str(literal.explain(tensor, ONLY_NUMBA)) and tensor.untyped_storage().resizable()  # it was no call
    assert literal(tensor, ONLY_NUMBA) == 3 and not tensor.untyped_storage().resizable()


first_by_size = numba.njit(lambda x: x.flat[0] * x.size)
HOLDING = [
    (lambda x, y: (x, first_by_size(x)), lambda x: x), (lambda x, y: (x[0], first_by_size(x[0])), lambda x: (x, 1.0)),
    (lambda x, y: (x[79], first_by_size(x[79])), lambda x: (x,) * 80),  # more than looks
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("function", "give"), HOLDING)
def test_cached_calls_without_the_gil_hold_storages_and_give_them_back(function, give):
    kernel, x, y = fast_args(function, nogil=True), torch.ones(3), torch.ones(3, 2).t()
    things = (x, y, *(tensor.untyped_storage() for tensor in (x, y)))
    results = [kernel(give(x), y) for _ in range(4)]
    assert all(back is x and total == 3.0 for back, total in results)
    del results
    with references_kept(*things):
        for _ in range(4):
            kernel(give(x), y)
        check_raises(TypeError, None, kernel, give(x), y, 1)
        assert kernel(give(y), y)[1] == 6.0 and kernel(give(x.double()), y)[1] == 3.0  # what differs is released, too


def test_a_storage_that_changes_while_others_are_held_is_not_read():
    both = fast_args(lambda a, b: a.sum() + b.sum(), nogil=True)
    a, b = torch.ones(1 << 16, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    for _ in range(4):
        assert both(a, b) == (1 << 16) + 8.0

    def set_other(function, args):
        if args and args[0] is b and a.numel() > 3:
            a.set_(torch.full((3,), 2.0, dtype=torch.float64))

    with mode_of(TorchFunctionMode, set_other):
        assert both(a, b) == 6.0 + 8.0
    assert both(a, b) == 6.0 + 8.0


def test_without_the_byte_that_says_what_can_be_resized_pytorch_is_asked():
    guard = producer.guard()
    if not guard.native.storage_movable:
        pytest.skip("the byte is not found")
    for _ in range(4):
        assert size_of(torch.ones(3)) == 3
    with pytest.MonkeyPatch.context() as patch:
        for number in range(producer.GUARDS):
            patch.setattr(guard._guards[number], "storage_movable", 0)
        tensor = torch.ones(3)
        assert size_of(tensor) == 3 and not tensor.untyped_storage().resizable()
        assert size_of(tensor) == 3


hook = None  # what a kernel calls


def call_hook():
    with contextlib.suppress(RuntimeError):  # not resizable
        hook()


def total_after_hook(x):
    with numba.objmode():
        call_hook()
    return x.sum()


@ctypes.CFUNCTYPE(ctypes.c_int)
def call_back():
    call_hook()
    return len([torch.full((1 << 20,), 7.0) for _ in range(3)])


inner = numba.njit(total_after_hook)
KERNELS = {
    "that run Python": fast_args(total_after_hook), "that call a function that does": fast_args(lambda x: inner(x)),
    "that call back": fast_args(lambda x: call_back() * 0 + x.sum()),
}  # fmt: skip
ACTS = {
    "set_": lambda tensor: tensor.set_(torch.zeros(1)), "data": lambda tensor: setattr(tensor, "data", torch.zeros(1)),
    "resize_": lambda tensor: tensor.untyped_storage().resize_(0),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_let_python_run_hold_what_they_read(act, kernel, monkeypatch):
    for _ in range(3):
        tensor = torch.ones(1 << 20)
        monkeypatch.setitem(globals(), "hook", lambda tensor=tensor: ACTS[act](tensor))
        assert KERNELS[kernel](tensor) == 1 << 20
    assert total(torch.ones(3)) == 3.0 and not total._native.native.needs_owning_exports


def test_what_a_kernel_without_the_gil_returns_holds_the_storage():
    tensor = torch.arange(1000.0)
    kept, storage = fast_args(nogil=True)(lambda x: x[1:])(tensor), tensor.untyped_storage()
    tensor.set_(torch.zeros(3))
    before = sys.getrefcount(storage)
    assert kept[0] == 1.0 and kept[-1] == 999.0
    del kept
    assert sys.getrefcount(storage) == before - 1


@pytest.mark.parametrize("options", [{}, {"nogil": True}], ids=["", "nogil"])
def test_an_exception_survives_the_end_of_a_storage_that_only_the_call_still_held(options, monkeypatch):
    """The deleter of the storage's memory is Python, and must not see the kernel's exception."""

    @fast_args(**options)
    def fails(x):
        with numba.objmode():
            call_hook()
        raise ValueError("from the kernel")

    for _ in range(3):
        ledger = Ledger()
        tensor = torch.from_dlpack((Dunder if has_table() else Legacy)(np.full(3, 5.0), ledger))
        monkeypatch.setitem(globals(), "hook", lambda tensor=tensor: tensor.set_(torch.zeros(1, dtype=torch.float64)))
        check_raises(ValueError, "from the kernel", fails, tensor)
        monkeypatch.undo()
        del tensor
        gc.collect()
        ledger.check(1)


@fast_args(parallel=True)
def mean_of_sums(x, is_inside, may_end):
    """The last sum begins after `may_end` is set. NaN if that is not set within 300,000 of them."""
    is_inside[0], s, count, is_last = 1, 0.0, 0, 0
    while is_last == 0 and count < 300_000:
        is_last, count = may_end[0], count + 1
        for i in numba.prange(x.shape[0]):
            s += x[i]
    return s / count if is_last else np.nan


@pytest.mark.slow
@pytest.mark.parametrize("act", ["set_", "resize_"])
def test_parallel_loops_hold_what_they_read(act):
    """Numba gives up the GIL for as long as one takes."""
    tensor, is_inside, may_end, junk = torch.ones(100_000), np.zeros(1), np.ones(1), []
    assert mean_of_sums(torch.ones(3), is_inside, may_end) == 3.0
    is_inside[0] = may_end[0] = 0

    def meanwhile():
        while not is_inside[0]:
            time.sleep(0.001)
        with contextlib.suppress(RuntimeError):  # not resizable
            ACTS[act](tensor)
        junk.extend(torch.full((100_000,), 7.0) for _ in range(20))
        may_end[0] = 1

    other = threading.Thread(target=meanwhile, daemon=True)
    other.start()
    assert mean_of_sums(tensor, is_inside, may_end) == 100_000.0
    other.join()


def test_results_that_python_helps_to_box_hold_nothing():
    """It is after the kernel has run: tensors stay resizable, and calls fast."""
    for function in (lambda x: Pair(1.0, 2.0), lambda x: Answer.YES, lambda x: [1.0, 2.0]):
        kernel, tensors = fast_args(function), [torch.ones(3) for _ in range(4)]
        for tensor in tensors:
            kernel(tensor)
        assert all(tensor.untyped_storage().resizable() for tensor in tensors) and kernel.counts().slow <= 2


def test_an_argument_in_a_result_has_an_owner_before_python_runs():
    """A named tuple's class is called for the result: here it lets the tensor go whose memory another part of that shows."""
    tensor = None

    def new(cls, *items):
        tensor.set_(torch.zeros(1))
        new.junk = [torch.full((1000,), 7.0) for _ in range(20)]
        return tuple.__new__(cls, items)

    Made = collections.namedtuple("Made", "a")
    kernel = fast_args(lambda x: (Made(1.0), x[1:]))
    assert kernel(torch.ones(3))[0] == (1.0,)
    Made.__new__ = new
    for _ in range(40):
        tensor = torch.ones(1000)
        assert kernel(tensor)[1].tolist() == [1.0] * 999


def test_modes_of_the_caller_do_not_see_what_holds_a_storage():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Swallows(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return args[0] if "set_" in str(function) else function(*args, **(kwargs or {}))

    # Without a table, __dlpack__ makes a view of the tensor, which this mode refuses.
    fake = [FakeTensorMode] if has_table() else []
    for each in (*fake, Swallows, lambda: torch.device("meta")):
        tensor = torch.ones(3)
        with each():
            assert size_of(tensor) == 3
        assert not tensor.untyped_storage().resizable()


def test_a_freed_storage_is_refused_with_the_same_words_everywhere():
    cut = torch.ones(8)
    cut.untyped_storage().resize_(8)
    for way in (total, silent, fastexchange.from_dlpack, fastexchange.to_dlpack) * 3:
        check_raises(BufferError, "storage has been freed or made smaller", way, cut)
