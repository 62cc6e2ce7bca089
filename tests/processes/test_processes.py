"""Kernels in forked and spawned children, and at interpreter exit; all in child interpreters, whose crash is a result, too."""

import concurrent.futures
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
import types

import numpy as np
import pytest
from children import SECONDS, in_fork
from forked import Stage, needs_fork, stage_for_module
from frameworks import torch
from interpreter import run_python
from made_producers import Dunder, Legacy, Tabled
from numba.core.compiler_lock import global_compiler_lock
from oracle import type_and_message
from worker_kernels import call, part, refuses, scaled, total, unlocked_total

from fastexchange import convert, fast_args, from_dlpack, polyfill, register_dlpack_dtype, to_dlpack
from fastexchange.ground import once

START_METHODS = [method for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]


def check_everything():
    """Calls of every kind are right: known shapes, new ones, refusals, exceptions, kept arrays, conversions, a new kernel."""
    array = np.arange(4.0)
    tensors = [array, Dunder(array), Legacy(array), Tabled(array)]
    if torch is not None:
        tensors.append(convert(array, torch.Tensor))
        assert type(tensors[-1]) is torch.Tensor and tensors[-1].tolist() == array.tolist()
    for tensor in tensors:
        assert [total(tensor) for _ in range(4)] == [unlocked_total(tensor)] * 4 == [6.0] * 4
        assert from_dlpack(part(tensor)).tolist() == [1.0, 2.0, 3.0] and from_dlpack(tensor).tolist() == array.tolist()
        if hasattr(tensor, "ledger"):
            gc.collect()
            tensor.ledger.check(tensor.ledger.made)
    assert total(np.ones((2, 3), np.int16)) == 6.0
    assert scaled(2.0, array).tolist() == [1.0, 3.0, 5.0, 7.0] == scaled(x=array, factor=2.0).tolist()
    bad = -np.ones(1), Dunder(array, device_type=2), object()
    assert [type_and_message(refuses, each)[0] for each in bad] == [ValueError, BufferError, TypeError]
    assert fast_args(lambda x: x.size)(array) == 4


# ---- fork ------------------------------------------------------------------------------------------------------------
def fork_warm():
    check_everything()
    assert in_fork(lambda: [check_everything(), in_fork(check_everything)][1]) == 0
    check_everything()


def fork_cold():
    assert in_fork(check_everything) == 0
    check_everything()


def fork_in_the_middle():
    """Of a call, by a producer's ``__dlpack__``: the child calls kernels, or ends as the parent does and leaves the call."""
    codes, ends = [], []

    class Acts(Dunder):
        def __dlpack__(self, *, max_version=None):
            self.act()
            assert total(np.ones(2)) == 2.0
            return super().__dlpack__(max_version=max_version)

    tensor, returns = Acts(np.arange(4.0)), Acts(np.arange(4.0))
    tensor.act = lambda: codes or codes.append(0) or codes.append(in_fork(check_everything))
    assert total(tensor) == 6.0 and codes == [0, 0]
    tensor.ledger.check(tensor.ledger.made)
    returns.act = lambda: ends or ends.append(os.fork())
    right = total(returns) == total(returns) == 6.0 and returns.ledger.out == 0
    if ends[0] == 0:
        os._exit(0 if right else 1)
    assert right and os.waitpid(ends[0], 0)[1] == 0


def fork_with_live_exports():
    tensor = Dunder(np.arange(4.0))
    kept = [part(tensor), from_dlpack(tensor), to_dlpack(tensor, max_version=(1, 3))]

    def drop():
        assert tensor.ledger.out == 3 and kept[0].tolist() == [1.0, 2.0, 3.0]
        kept.clear()
        gc.collect()
        tensor.ledger.check(tensor.ledger.made)

    assert in_fork(drop) == 0
    drop()


def fork_while_others(work, times: int) -> None:
    """Fork again and again while two threads do `work`; each child does it, too, and ends.

    A lock that another thread holds when a process forks is held in the child for ever, unless somebody takes care.
    """
    work()
    sys.setswitchinterval(1e-6)
    stop, codes = threading.Event(), []

    def repeat():
        while not stop.is_set():
            work()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        others = [pool.submit(repeat) for _ in range(2)]
        while len(codes) < times and not any(codes):
            codes.append(in_fork(lambda: [signal.alarm(15), work(), work(), work()][1]))
        stop.set()
    assert [other.result() for other in others] == [None] * 2
    assert not any(codes), f"fork {len(codes)}: exit code {codes[-1]} (-14: stuck for ever)"


numbers = itertools.count(1)


def learn():
    assert total(type("Met", (Tabled,), {})(np.arange(4.0))) == 6.0


def compile_a_kernel():
    """One that only this call has: in the middle of it Numba's compiler lock is held, and now and then one of ours."""
    factor = next(numbers)
    assert fast_args(lambda x: x[0] * factor)(np.ones(3)) == factor


def dtype_with(name: str) -> np.dtype:
    return np.dtype({"names": [name], "formats": ["u1"], "itemsize": 4})


registered = dtype_with("odd")


def change_tables():
    name = f"f{next(numbers)}"
    assert from_dlpack(np.zeros(2, dtype_with(name))[name]).size == 2
    register_dlpack_dtype((200, 32), registered)
    polyfill(np.ndarray)
    learn()


def begin():
    assert [fast_args(lambda x: x)._outputs for _ in range(100)] == [None] * 100


WHILE = {"learn": 12, "begin": 10, "compile_a_kernel": 4, "change_tables": 8}
"""How often a process forks while other threads do so."""


def fork_where_locks_are_held():
    """By the thread itself: they are its own in the child, too, and free when it has let go of them."""
    lock = once.forkable_lock()
    with lock, global_compiler_lock:
        code = in_fork(check_everything)
    assert code == 0 and not global_compiler_lock.is_locked()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.acquire, timeout=5).result()


def fork_that_the_holder_of_a_lock_waits_for():
    """It does not wait for ever, and gets the lock in the child, where nobody holds it."""
    once.FORK_WAITS = 0.1
    lock, free = once.forkable_lock(), once.forkable_lock()

    def in_the_child():
        assert lock.acquire(blocking=False) and free.acquire(blocking=False)
        check_everything()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.acquire).result() and in_fork(in_the_child) == 0
        assert not lock.acquire(blocking=False)  # the parent's holder still has it
        pool.submit(lock.release).result()
    assert lock.acquire(blocking=False)


def fork_while_another_imports():
    """A module of this package, as in a first call: its lock would be held in the child for ever."""
    name, begun, forking = "fastexchange.measuring.overhead", threading.Event(), threading.Event()

    def find_spec(module, path=None, target=None):
        """A finder that finds nothing, but takes as long as a fork does that does not wait."""
        if module == name:
            begun.set()
            forking.wait(SECONDS)
            time.sleep(0.3)

    assert name not in sys.modules
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))
    os.register_at_fork(before=forking.set)  # hooks run in reverse order: before the package's
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    assert begun.wait(SECONDS) and in_fork(lambda: importlib.import_module(name) and 0) == 0
    thread.join()


FORKS = {name: f"{name}()" for name in list(globals()) if name.startswith("fork_") and name != "fork_while_others"}
FORKS |= {f"fork while others {work}": f"fork_while_others({work}, {times})" for work, times in WHILE.items()}


# An interpreter that has called nothing yet. A collection in a child would copy all that it looks at.
forking = stage_for_module("from test_processes import *\ngc.collect(), gc.freeze()\n")


@needs_fork
@pytest.mark.parametrize("name", FORKS)
def test_fork(name, forking):
    forking.run(f"{FORKS[name]}\nos._exit(0)").check_silent()


# ---- multiprocessing -------------------------------------------------------------------------------------------------
def pools(method: str):
    context = multiprocessing.get_context(method)
    if method == "fork":
        check_everything()  # the children are forks of a process that has made calls
    fulls = [np.full, torch.full] if torch is not None and method == "fork" else [np.full]
    tensors, held = [full((3,), float(i)) for full in fulls for i in range(6)], (1, 2)
    closure = fast_args(lambda x: x.sum() + len(held))
    with concurrent.futures.ProcessPoolExecutor(2 if method == "fork" else 1, mp_context=context) as pool:
        assert list(pool.map(total, tensors)) == [3.0 * (i % 6) for i in range(len(tensors))]
        for kernel, want in ((total, 3.0), (unlocked_total, 3.0), (part, [1.0, 1.0]), (closure, 5.0)):
            for got, is_native, worker in pool.map(call, [kernel] * 3, [np.ones(3)] * 3):
                assert (got if isinstance(want, float) else got.tolist()) == want
                assert is_native and worker != os.getpid()
        said = [str(pool.submit(refuses, argument).exception()) for argument in (-np.ones(2), object())]
        assert "('negative', -1.0)" in said[0] and "'x' (position 0)" in said[1]
    assert pickle.loads(pickle.dumps(total)) is total


@pytest.mark.parametrize("method", [
    pytest.param(method, marks=pytest.mark.slow if method == "fork" else ()) for method in START_METHODS
])  # fmt: skip
def test_multiprocessing(method):
    run_python(f"import test_processes as t; t.pools({method!r})")


# ---- exit ------------------------------------------------------------------------------------------------------------
PRELUDE = """
import atexit, builtins, gc, os, sys, threading, time
import numba
import numpy as np
from fastexchange import convert, fast_args, from_dlpack, polyfill, to_dlpack
from made_producers import Dunder, Legacy, Tabled
from worker_kernels import part, total
try:
    import torch
except ImportError:
    torch = None
array = np.arange(4.0)

def tensors():
    made = [np.arange(4.0), Dunder(array), Legacy(array), Tabled(array)]
    return made if torch is None else [*made, torch.arange(4.0)]

@fast_args(nogil=True)
def long_total(x):
    s = 0.0
    for i in range(20_000):
        for value in x.flat:
            s += value
    return s

def kept_of_all_kinds():
    kept = []
    for tensor in tensors():
        kept += [part(tensor), from_dlpack(tensor), to_dlpack(tensor, max_version=(1, 3)), from_dlpack(part(tensor))]
        kept.append(np.from_dlpack(from_dlpack(tensor)))
    for tensor in (array, torch.ones(3), bytearray(b"abc")) if torch is not None else ():
        kept += [convert(tensor, torch.Tensor), torch.from_dlpack(to_dlpack(tensor, max_version=(1, 3)))]
    return kept

def in_thread(work, times, daemon=False):
    threading.Thread(target=lambda: [work() for _ in range(times)], daemon=daemon).start()

Does = type("Does", (Dunder,), {"__dlpack__": lambda self, *, max_version=None: act()})
"""

EXITS = {
    "kernels and results alive everywhere": """
        kernels = [total, part, fast_args(lambda x: x.size)]
        builtins.kernels, np.kernel, sys.kernel = kernels, part, fast_args(total, grad="allow")
        total.itself, part.other = total, total
        keep = fast_args(lambda container, x: container.append(x))
        typed_list = np.typed_list = numba.typed.List.empty_list(numba.float64[::1])
        for tensor in (np.arange(4.0), Tabled(array), Dunder(array)):
            keep(typed_list, tensor)
        polyfill(np.ndarray)
        kept = kept_of_all_kinds()
        kept.append(kept)
        builtins.kept, np.kept, sys.kept = kept, kept_of_all_kinds(), kept_of_all_kinds()
        """,
    "in atexit handlers": """
        @atexit.register
        def last():
            assert [total(tensor) for tensor in tensors()][:4] == [6.0] * 4
            assert fast_args(lambda x: x.size)(array) == 4
            np.kept = kept_of_all_kinds()
        """,
    "in finalisers": """
        class Late:
            def __del__(self, total=total, from_dlpack=from_dlpack, array=array):
                assert total(array) == 6.0
                from_dlpack(array)

        Late()  # what the calls need has been learnt: nothing can be imported in the end
        late, builtins.late, np.late = Late(), Late(), Late()
        """,
    "daemon threads that are still calling and converting": """
        # No tensors of PyTorch, which ends the process when a daemon thread drops one of them now.
        part = fast_args(returns=np.ndarray)(lambda x: x[1:])
        for x in tensors():
            in_thread(lambda x=x: (total(x), part(x)), 10**9, daemon=True)
            in_thread(lambda x=x: long_total(x), 10**9, daemon=True)
            in_thread(lambda x=x: (from_dlpack(x), to_dlpack(x, max_version=(1, 3)), from_dlpack(part(x))), 10**9, daemon=True)
        time.sleep(0.1)
        """,
    "threads that end after the main thread": """
        for _ in range(4):
            in_thread(lambda: [(total(x), long_total(x), part(x), from_dlpack(x)) for x in tensors()], 20)
        """,
    "SystemExit in a producer": """
        act, both = lambda: sys.exit(7), fast_args(lambda x, y: x[0] + y[0])
        both(Dunder(array), Does(array))
        """,
    "leaving at once from a kernel's call": """
        # While another thread is in a kernel: nothing is waited for.
        act = lambda: os._exit(5)
        in_thread(lambda: long_total(array), 10_000)
        part(Does(array))
        """,
}
CODES = {"SystemExit in a producer": 7, "leaving at once from a kernel's call": 5}


# What the programs share has been compiled, and used once.
exiting = stage_for_module(f"{PRELUDE}[(total(tensor), long_total(tensor)) for tensor in tensors()]\nkept_of_all_kinds()\n")


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("name", EXITS)
def test_exit(name, exiting):
    assert exiting.run(EXITS[name]) == (CODES.get(name, 0), "", "")


def test_exit_of_a_program_that_was_not_forked():
    """Without PyTorch, which takes seconds to begin."""
    prelude = PRELUDE.replace("    import torch\n", "    raise ImportError\n")
    done = run_python(prelude + textwrap.dedent(EXITS["kernels and results alive everywhere"]))
    assert (done.stdout, done.stderr) == ("", "")


@needs_fork
def test_each_forked_program_runs_once(tmp_path):
    noted = tmp_path / "noted"
    code = f"import os\nprint(os.getpid(), file=open({str(noted)!r}, 'a'))"
    with Stage("") as stage:
        assert [stage.run(code) for _ in range(2)] == [(0, "", "")] * 2
    assert len(noted.read_text().split()) == 2
