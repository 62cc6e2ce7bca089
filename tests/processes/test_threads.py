"""Threads: calls side by side, threads that change what calls rely on, and memory that a kernel without the GIL reads.

What may end in a crash, or changes the whole process, runs in child interpreters.
"""

import array as arrays
import functools
import gc
import mmap
import sys
import threading

import numba
import numpy as np
import pytest
from children import SECONDS, at_once
from counting import end_of, kept
from forked import fork_python, needs_fork, stage_for_module
from frameworks import needs_torch, torch
from line_events import at_each_line
from made_producers import Dunder, Ledger, Legacy, Tabled, tabled_type
from numba import types
from oracle import new_kernel, references_kept
from raising import check_raises

from fastexchange import fast_args, from_dlpack, polyfill, unpolyfill
from fastexchange.dispatch.runtime import runtime

Exported = tabled_type("Exported", dltensor_from_py_object_no_sync=None)
KINDS = Dunder, Legacy, Tabled, Exported
total, unlocked_total = fast_args(lambda x: x.sum()), fast_args(nogil=True)(lambda x: x.sum())
part = fast_args(lambda x: x[1:])


# ---- many threads, one kernel: calls of many signatures are made so in ``tests/calls/test_signatures.py`` ------------------
def calls(v: float, rounds: int) -> None:
    """A thread's, with tensors of its own. Everything is given back."""
    ledger, array = Ledger(), np.full(3, v)
    tensors = [array, *(kind(array, ledger) for kind in KINDS)]
    tensors += [torch.full((3,), v, dtype=torch.float64)] if torch is not None else []

    def once():
        for tensor in tensors:
            assert total(tensor) == total(x=tensor) == unlocked_total(tensor) == 3 * v
            assert from_dlpack(part(tensor)).tolist() == [v, v]
        check_raises(BufferError, r"'x' \(position 0\)", total, Dunder(array, ledger, lanes=2))

    once()
    with kept(*tensors):
        for _ in range(rounds):
            once()
    gc.collect()
    ledger.check(ledger.made)


def make() -> None:
    """Types and kernels."""
    ledger, array = Ledger(), np.full(2, 7.0)
    for base in (Dunder, Tabled, Exported):
        assert [total(type("Brief", (base,), {})(array, ledger)) for _ in range(10)] == [14.0] * 10
    assert total(array.view(type("Brief", (np.ndarray,), {}))) == 14.0
    for kernel in (fast_args(lambda x: x.size), fast_args(numba.njit(lambda x: x.size), grad="allow")):
        assert kernel(array) == kernel(Dunder(array)) == 2
    ledger.check(ledger.made)


def lend_and_take_back() -> None:
    polyfill(np.ndarray)
    assert total(np.ones(3)) == 3.0
    unpolyfill(np.ndarray)


def storm(rounds: int) -> None:
    """8 threads call two kernels; others change all that calls rely on."""
    calls(9.0, 1)
    before = len(runtime().entries)
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(1e-6)
    works = [functools.partial(calls, float(i + 1), rounds) for i in range(8)]
    at_once(*works, repeated=(make, lend_and_take_back, gc.collect))
    gc.collect()
    left = len(runtime().entries) - before
    assert left < 80, f"{left} types are still known"
    assert len(total.signatures) <= 8, "a signature was compiled for each thread"


@pytest.mark.slow
def test_threads_on_one_kernel_while_others_change_everything():
    fork_python("from test_threads import storm; storm(20)")


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("base", [Dunder, Tabled, np.ndarray], ids=lambda base: base.__name__)
def test_first_calls_at_once(base):
    array = np.arange(4.0)
    for options in ({}, {"nogil": True}):
        kernel = fast_args(lambda x: x.sum(), **options)
        for number in range(6):
            cls, ledger, results = type("Met", (base,), {}), Ledger(), []
            tensors = [array.view(cls) if base is np.ndarray else cls(array, ledger) for _ in range(6)]

            def call(tensor, kernel=kernel, results=results):
                results += [kernel(tensor), kernel(tensor)]

            at_once(*(functools.partial(call, tensor) for tensor in tensors))
            assert results == [6.0] * 12 and kernel.counts().compiled == 1, number
            ledger.check(ledger.made)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "step"), [(Dunder, 1), (Tabled, 2)], ids=["Dunder", "Tabled"])
def test_another_thread_calls_at_each_line_of_a_first_call(base, step):
    """What one thread is about to learn, another needs: it waits for a lock, or it learns that itself."""
    array, dispatcher = np.arange(4.0), numba.njit(lambda x: x.sum())

    def scene():
        gc.collect(0)
        kernel, tensor, results = new_kernel(dispatcher), type("Met", (base,), {})(array), []
        return (lambda: results.append(end_of(kernel, tensor))), results, tensor.ledger

    for _ in range(2):  # so that the lines that are met are those of each later scene
        scene()[0]()
    wrong, started = [], []
    for line, work_with, (call, results, ledger) in at_each_line(scene, step):
        thread = threading.Thread(target=lambda call=call: [call(), call()])
        work_with(lambda thread=thread: (thread.start(), thread.join(0.02)))  # it may wait for a lock that this thread holds
        started.append(thread.ident is not None)
        if started[-1]:
            thread.join(SECONDS)
        if results != [6.0] * (1 if thread.ident is None else 3):
            wrong.append(f"{line}: {results}")
        if not wrong:
            ledger.check(ledger.made)
    assert not wrong, "\n".join(wrong)
    assert sum(started) > 0.9 * len(started), f"{len(started) - sum(started)} lines were not come to again"


RATE = 1


@pytest.fixture
def rated():
    """A new kernel that multiplies with a global variable, which is 1 until the test changes it."""
    return fast_args(lambda x, y=0: x[0] * RATE + y)


def test_after_recompiling_no_call_finds_the_old_code(rated, monkeypatch):
    calls = [(kind(np.ones(3)), y) for kind in (np.asarray, Dunder, Tabled, Exported) for y in (0, 0.0)]
    for rate in (1, 2, 3):
        monkeypatch.setitem(globals(), "RATE", rate)
        rated.recompile()
        for call in calls * 4:  # in turn: all have sites
            assert rated(*call) == rate, call


def test_a_call_while_the_kernel_forgets_its_overloads(rated, monkeypatch):
    """Another thread's call, between two steps of ``recompile()``: what it notes for the next call is forgotten, too."""
    array = np.ones(3)
    for _ in range(4):
        assert rated(array) == rated(array[::2]) == RATE  # in turn: both have a site
    sites = rated._native._sites

    class Interrupted:
        def __setitem__(self, index, value):
            rated(array)
            sites[index] = value

    monkeypatch.setattr(rated._native, "_sites", Interrupted())
    monkeypatch.setitem(globals(), "RATE", 2)
    rated.recompile()
    assert rated(array) == 2


def test_recompiling_while_a_tensor_is_released(rated, monkeypatch):
    class Owner(np.ndarray):
        def __del__(self):
            if RATE == 2:
                rated.recompile()

    class Owned:
        __dlpack_device__ = staticmethod(lambda: (1, 0))
        __dlpack__ = staticmethod(lambda **options: np.ones(3).view(Owner).__dlpack__(**options))

    for _ in range(4):
        assert rated(Owned()) == rated(np.ones(3)) == 1
    sites = rated._native._sites
    for site in range(len(sites)):  # as if other types had taken them: the next call looks for its entry
        sites[site] = 0
    monkeypatch.setitem(globals(), "RATE", 2)
    assert rated(Owned()) == 1  # and recompiles when it is released
    assert rated(Owned()) == 2


@needs_torch
@pytest.mark.usefixtures("switching")
def test_grad_mode_is_a_threads_own():
    """On every path, the cache entry's too: tensors that require grad are for threads that have switched grad mode off."""
    kernel = fast_args(lambda a, x: a + x.sum())
    weights, plain = torch.ones(3, requires_grad=True), torch.ones(3)
    view = weights[1:]

    def without(times):
        with torch.no_grad():
            for _ in range(times):
                assert kernel(1.0, weights) == 4.0 and kernel(1.0, plain) == 4.0 and kernel(1.0, view) == 3.0

    def within():
        for _ in range(300):
            check_raises(BufferError, "requires grad", kernel, 1.0, weights)
            check_raises(BufferError, "requires grad", kernel, 1.0, view)
            assert kernel(1.0, plain) == 4.0

    without(4)
    with references_kept(weights, view):
        at_once(*[functools.partial(without, 500), within] * 2)


# ---- kernels without the GIL -----------------------------------------------------------------------------------------
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
TURNS = 20_000  # of a millisecond, after which a kernel waits no longer


@numba.njit(nogil=True)
def wait_for_all(flags):
    """Until no flag is zero. Returns whether that was in time."""
    turns = 0
    while flags.min() == 0 and turns < TURNS:
        usleep(1000)
        turns += 1
    return turns < TURNS


@fast_args(nogil=True)
def meet(flags, x):
    """Look at `x`, tell the others by ``flags[0]``, wait for ``flags[1]``, look again."""
    before = x[0] + x[len(x) // 2]
    flags[0] = 1
    in_time = wait_for_all(flags)
    return before, x[0] + x[len(x) // 2], in_time


def meanwhile(box: list, action, word: str = "") -> None:
    """While a kernel reads ``box[0]``, this thread does ``action(box)``, and makes and frees much memory besides.

    The kernel sees the same before and after. With a `word` the action is refused, in a message that has it.
    """
    flags, results = np.zeros(2, np.int64), []
    thread = threading.Thread(target=lambda: results.append(meet(flags, box[0])))
    thread.start()
    while flags[0] == 0 and thread.is_alive():
        thread.join(0.001)
    try:
        check_raises((Exception,), word, action, box) if word else action(box)
        gc.collect()
        for _ in range(3):
            np.full(SIZE, 3.0), bytearray(SIZE), torch is not None and torch.full((SIZE,), 3.0)
    finally:
        flags[1] = 1
        thread.join(SECONDS)
    assert results == [(2.0, 2.0, True)], results


SIZE = 1 << 18
"""Elements of memory that the allocator gives back to the system (see ``MAPPED``): to read it after it was freed is a crash."""
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets glibc map each larger block on its own, whatever has been freed before."""


def mapped(size: int):
    made = mmap.mmap(-1, size)
    made[:] = b"\1" * size
    return made


MAKERS = {
    "numpy": np.ones, "mmap": mapped, "array": lambda size: arrays.array("d", [1.0]) * size,
    "bytearray": lambda size: bytearray(b"\1") * size, "memoryview": lambda size: memoryview(bytearray(b"\1") * size),
    **{kind.__name__: lambda size, kind=kind: kind(np.ones(size)) for kind in KINDS},
}  # fmt: skip
IS_DONE = {
    "numpy": {"box[0].resize(2 * SIZE)": "resize"},
    "bytearray": {"box[0].extend(bytes(SIZE))": "re-sized"}, "array": {"box[0].pop()": "exporting buffers"},
    "mmap": {"box[0].close()": "exported pointers", "box[0].resize(2 * SIZE)": "buffers exported"},
    "memoryview": {"box[0].release()": "exported buffer", "box[0].obj.clear()": "re-sized"},
}
"""By a kind of memory: what is done to it while a kernel reads it, and words of the message if that is refused."""
if torch is not None:
    MAKERS["torch"] = torch.ones
    IS_DONE["torch"] = {
        "box[0].set_(torch.zeros(3))": "", "box[0].set_()": "",
        "setattr(box[0], 'data', torch.zeros(3))": "", "box[0].resize_(3)": "", "box[0].t_()": "",
        # as not once it has been seen through .numpy(), and as a bytearray is not
        "box[0].resize_(2 * SIZE)": "resizable", "box[0].untyped_storage().resize_(0)": "resizable",
    }  # fmt: skip
MEANWHILE = {
    f"{kind}, {act}": (kind, act, word)
    for kind in MAKERS for act, word in {"box.clear()": "", **IS_DONE.get(kind, {})}.items()
}  # fmt: skip


meeting = stage_for_module("""
    import os, warnings
    from test_threads import *
    for make in MAKERS.values():
        meet(np.ones(2, np.int64), make(SIZE))
    del make
    gc.collect(), gc.freeze()  # a collection in a child would copy all that it looks at
    warnings.simplefilter("ignore")  # of PyTorch, that out= resizes
""", **MAPPED)  # fmt: skip


@needs_fork
@pytest.mark.parametrize("name", MEANWHILE)
def test_memory_that_a_kernel_without_the_gil_reads(name, meeting):
    """Something happens to it meanwhile."""
    kind, act, word = MEANWHILE[name]
    meeting.run(f"meanwhile([MAKERS[{kind!r}](SIZE)], lambda box: {act}, {word!r})\nos._exit(0)").check_silent()


def test_a_jax_array_deleted_while_a_kernel_reads_it():
    array = pytest.importorskip("jax").numpy.ones(SIZE)
    meanwhile([array], lambda box: box[0].delete())
    assert array.is_deleted()


def test_many_kernels_without_the_gil_at_once():
    """Each call has working memory of its own; all of them are inside the kernel at the same time."""

    @fast_args(nogil=True)
    def gather(arrived, x, y):
        arrived[int(x[0])] = 1
        wait_for_all(arrived)
        return x[0] + y[0], x[1:], arrived.sum()

    ledger, arrived, results = Ledger(), np.zeros(24, np.int64), {}
    gather(np.ones(1, np.int64), Dunder(np.zeros(2), ledger), np.ones(2))

    def work(i):
        results[i] = gather(arrived, Dunder(np.full(2, float(i)), ledger), np.ones(2))

    at_once(*[functools.partial(work, i) for i in range(24)])
    for i, (both, tail, together) in results.items():
        assert (both, tail.tolist(), together) == (i + 1.0, [float(i)], 24)
    del tail
    assert ledger.out == 24
    results.clear()
    gc.collect()
    ledger.check(ledger.made)


keep = fast_args(lambda container, x: container.append(x))


@fast_args(nogil=True)
def drop_all(container):
    s = 0.0
    while len(container):
        s += container.pop()[0]
    return s


@pytest.mark.parametrize("kind", [Dunder, Tabled, Exported], ids=lambda kind: kind.__name__)
def test_deleters_called_where_the_gil_is_not_held(kind):
    """A kernel without the GIL drops the last holder of an export: the deleter, which may be Python, gets the GIL."""
    ledgers, lists, sums = [Ledger() for _ in range(4)], [], []
    for ledger in ledgers:
        container = numba.typed.List.empty_list(numba.float64[::1])
        for i in range(30):
            keep(container, kind(np.full(3, float(i)), ledger))
        assert ledger.out == 30
        lists.append(container)
    at_once(*(lambda container=container: sums.append(drop_all(container)) for container in lists))
    assert sums == [435.0] * 4
    for ledger in ledgers:
        ledger.check(ledger.made)
