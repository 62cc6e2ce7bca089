"""Processes that miss the same entry of the disk cache at once make it once, whatever happens to the one that makes it."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from children import in_fork
from forked import fork_python, needs_fork
from numba import TypingError

from fastexchange.ground import disk_cache
from fastexchange.ground.cfunction import code_cache
from fastexchange.ground.disk_cache import CacheFolder
from fastexchange.ground.numba_internals import global_compiler_lock

pytestmark = needs_fork


@contextlib.contextmanager
def holder(folder: CacheFolder):
    """Another process that holds the claim, until it gets the order to save the entry, to give up or to die."""
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        claim = folder.claim("name", "key")
        there.send(claim is not None)
        order = there.recv()
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        claim.release(order == "save" and folder.save("name", "key", "made"))
        os._exit(0)
    assert here.recv()
    try:
        yield here.send
    finally:
        here.send("die")
        os.waitpid(child, 0)


@contextlib.contextmanager
def soon(act):
    """Meanwhile, something is done by a signal's handler."""
    before = signal.signal(signal.SIGALRM, lambda *_: act())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def claim_of(folder: CacheFolder):
    """Claim an entry; wait if it is claimed."""
    return disk_cache.claiming(folder.claim)("name", "key")


def left(folder: CacheFolder) -> list[Path]:
    return list(folder.path.glob("*.tmp"))


def test_a_claim_leaves_no_file(folder, tmp_path):
    claim = claim_of(folder)
    (file,) = left(folder)
    assert folder.save("name", "key", 3)
    claim.release(True), claim.release(True)
    assert left(folder) == [] and folder.load("name", "key") == 3 and not disk_cache._claims
    assert folder.contents() == (1, sum(path.stat().st_size for path in folder.path.iterdir()), [])
    file.symlink_to(tmp_path / "target")
    assert claim_of(folder) is None and not (tmp_path / "target").exists()


def test_who_waits_loads_what_the_other_has_made(folder):
    with holder(folder) as order:
        folder.claim("name", "another").release(False), folder.claim("another", "key").release(False)
        order("save")
        claim = claim_of(folder)
        assert folder.load("name", "key") == "made"
        if claim is not None:
            claim.release(True)
    assert left(folder) == []


@pytest.mark.parametrize("order_first", [True, False])
def test_a_holder_that_is_killed(folder, order_first, monkeypatch):
    monkeypatch.setattr(disk_cache, "CLAIM_WAITS", 30.0)
    with holder(folder) as order:
        if order_first:
            order("die")
            time.sleep(0.05)
        with soon(lambda: order("die")):
            claim = claim_of(folder)
    assert claim is not None and folder.load("name", "key") is None and len(left(folder)) == 1
    claim.release(False)
    assert left(folder) == []


def test_what_could_not_be_kept_is_made_by_all_at_once(folder, monkeypatch):
    """Those who wait do not queue for a claim that helps nobody."""
    with holder(folder) as order:
        handle = os.open(left(folder)[0], os.O_RDWR)
        order("give up")
        while not disk_cache._is_locked(handle):
            time.sleep(0.01)
        assert os.fstat(handle).st_size
        os.close(handle)
    is_locked = disk_cache._is_locked
    with holder(folder) as order:

        def tried(handle) -> bool:
            monkeypatch.undo()
            is_own = is_locked(handle)
            order("give up")  # after the first try, of one who now waits
            return is_own

        monkeypatch.setattr(disk_cache, "_is_locked", tried)
        assert folder._claimed("name", "key", waits=30.0) is None, "it has queued"
    claim_of(folder).release(True)
    assert left(folder) == []


def test_a_file_that_is_removed_before_it_is_locked(folder, monkeypatch):
    """By the process that had the claim: a lock on it would be no claim, others could get one, too."""
    is_locked = disk_cache._is_locked

    def removed_first(handle) -> bool:
        monkeypatch.undo()
        left(folder)[0].unlink()
        return is_locked(handle)

    monkeypatch.setattr(disk_cache, "_is_locked", removed_first)
    claim = claim_of(folder)
    assert len(left(folder)) == 1 and disk_cache._is_locked is is_locked
    claim.release(True)
    assert left(folder) == []


def test_a_note_that_it_was_not_kept(folder, monkeypatch):
    """It needs no space. If its holder is killed, later processes claim all the same, and its file is removed some time."""

    for name, is_noted in (("write", True), ("ftruncate", False)):
        claim = claim_of(folder)
        handle = os.open(left(folder)[0], os.O_RDWR)
        monkeypatch.setattr(os, name, Mock(side_effect=OSError(28, "No space left on device")))
        claim.release(False)
        assert left(folder) == [], "without a note the file was not removed"
        assert os.fstat(handle).st_size or not is_noted
        os.close(handle)
    monkeypatch.undo()
    claim = claim_of(folder)
    (file,) = left(folder)
    claim.drop()
    file.write_text("not kept")
    claim = claim_of(folder)
    assert claim is not None and file.stat().st_size == 0
    claim.drop()
    os.utime(file, (1, 1))
    folder.prune()
    assert left(folder) == []


def test_waiting_has_a_limit_and_can_be_interrupted(folder, monkeypatch):
    with holder(folder), pytest.raises(KeyboardInterrupt), soon(lambda: signal.raise_signal(signal.SIGINT)):
        claim_of(folder)
    claim_of(folder).release(True)
    monkeypatch.setattr(disk_cache, "CLAIM_WAITS", 0.1)
    with holder(folder):
        assert claim_of(folder) is None and folder.save("name", "key", "made without a claim")


def test_within_a_compilation_nobody_waits(folder, monkeypatch):
    """Two processes could wait for each other, and all threads of both for them."""
    monkeypatch.setattr(disk_cache, "CLAIM_WAITS", 1000.0)

    @disk_cache.claiming
    def compiled():
        claim = folder.claim("name", "another")
        assert folder.claim("name", "key") is None
        claim.release(True)

    @disk_cache.claiming
    def compiled_without_a_claim():
        with global_compiler_lock:
            assert claim_of(folder) is folder.claim("name", "key") is None

    with holder(folder):
        with global_compiler_lock:
            assert claim_of(folder) is None
        compiled(), compiled_without_a_claim()


@contextlib.contextmanager
def waiting(folder: CacheFolder, got: list):
    """A thread that waits as for the code of a kernel."""
    tried = threading.Event()

    @disk_cache.claiming
    @global_compiler_lock
    def compiled():
        tried.set()
        got.append(folder.claim("name", "key"))

    thread = threading.Thread(target=compiled, daemon=True)
    thread.start()
    assert tried.wait(60)
    time.sleep(0.05)
    assert thread.is_alive() and not got
    yield
    thread.join(60)
    assert not thread.is_alive()


def test_who_waits_does_not_hold_numbas_lock_and_looks_for_the_entry(folder, monkeypatch):
    """Others compile meanwhile, and may make the entry without a claim, after their limit."""
    monkeypatch.setattr(disk_cache, "CLAIM_WAITS", 1000.0)
    got: list = []
    with holder(folder) as order, waiting(folder, got):
        assert global_compiler_lock._lock.acquire(timeout=20)
        global_compiler_lock._lock.release()
        assert in_fork(lambda: not global_compiler_lock._lock.acquire(timeout=10)) == 0
        order("die")
    got.pop().release(True)
    with holder(folder), waiting(folder, got):
        assert folder.save("name", "key", "made")
    assert got == [None] and folder.load("name", "key") == "made"


def test_a_claim_that_is_not_needed_any_more(folder):
    calls = []

    @disk_cache.claiming
    def compiled():
        calls.append(1)
        if len(calls) == 1:
            folder.claim("name", "key")

    with holder(folder) as order, soon(lambda: order("die")):
        compiled()
    assert len(calls) == 2 and left(folder) == [] and not disk_cache._claims


def test_a_forked_child_has_no_claim(folder):
    claim = claim_of(folder)
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        has_claims = bool(disk_cache._claims)
        claim.release(False)
        there.send(has_claims)
        there.recv()
        os._exit(0)
    assert here.poll(60) and not here.recv()
    assert len(left(folder)) == 1, "the child has released it"
    claim.release(False)
    again = claim_of(folder)
    assert again is not None, "the child has kept it"
    again.release(True)
    here.send("end")
    assert os.waitpid(child, 0)[1] == 0


def test_folders_in_which_nothing_can_be_claimed(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert CacheFolder(tmp_path / "file" / "cache").claim("name", "key") is None
    shared = CacheFolder(tmp_path / "shared")
    shared.path.mkdir()
    shared.path.chmod(0o777)
    assert claim_of(shared) is None and list(shared.path.iterdir()) == []
    for vanish in (shutil.rmtree, lambda path: path.rename(tmp_path / "gone")):
        claim = claim_of(folder)
        vanish(folder.path)
        claim.release(vanish is not shutil.rmtree)
    assert not folder.path.exists()

    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(37, "No locks available")))
    assert claim_of(folder) is None and not disk_cache._claims
    monkeypatch.setattr(disk_cache, "fcntl", None)
    assert claim_of(folder) is None


# ---- whole processes ---------------------------------------------------------------------------------------------------
KERNELS = """
from numba import types
from fastexchange import fast_args
from fastexchange.ground import cfunction

@fast_args(cache=True)
def inner(x): return x.sum()
@fast_args(cache=True)
def outer(x): return inner(x) * 2
@fast_args(cache=True)
def fails(x): return x.no_such_attribute

def times(factor):
    # a function of the package
    function = lambda number: number * factor
    function.__module__, function.__qualname__ = "fastexchange.ground.native", f"times_{factor}"
    return cfunction.cfunction(types.int64, types.int64)(function)
"""


def call_everything(start, removed: str) -> tuple[int, ...]:
    """What a process compiles of two kernels and of the package. One of the processes removes a folder meanwhile."""
    import kernels_of_the_test as kernels

    before = code_cache.misses
    if start[0].wait(60) == 0 and removed:
        while not any(".claim.tmp" in str(files) for _, _, files in os.walk(removed)):
            time.sleep(0.001)
        shutil.rmtree(removed, ignore_errors=True)
    assert kernels.outer(np.arange(3.0)) == 6.0
    with pytest.raises(TypingError):
        kernels.fails(1.0)
    assert all(kernels.times(factor).address for factor in range(6))
    misses = (sum(kernel.stats.cache_misses.values()) for kernel in (kernels.outer, kernels.inner))
    return *misses, code_cache.misses - before


STORM = """
    import concurrent.futures, functools, multiprocessing, sys
    sys.path.insert(0, sys.argv[1])
    from test_claims import call_everything, code_cache
    del code_cache.folders  # there is another now, an empty one
    code_cache._libraries.clear()
    def work(removed):
        return call_everything(start, removed)
    context = multiprocessing.get_context("fork")
    start = [context.Barrier(4)]
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=context) as pool:
        print(*map(sum, zip(*pool.map(work, sys.argv[2:] * 4))))
    """


def storm(folder: Path, removed: str = "") -> list[int]:
    """How often outer(), inner() and functions of the package are compiled by four processes, with an empty cache."""
    (folder / "kernels_of_the_test.py").write_text(KERNELS)
    return [int(each) for each in fork_python(STORM, str(folder), removed, NUMBA_CACHE_DIR=str(folder / "cache")).stdout.split()]


@pytest.mark.slow
def test_processes_compile_each_kernel_once(tmp_path):
    outer, inner, native = storm(tmp_path)
    assert (outer, inner) == (1, 1)
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(path.suffix == ".entry" for path in entries), "claims are left"
    own = [path for path in entries if not path.name.startswith(("kernels_of_the_test", "self_test"))]
    assert 6 < native <= len(own), "a function was compiled by several"


def test_a_folder_that_vanishes_while_processes_compile(tmp_path):
    """Those that hold claims in it, and those that wait, go on; later ones keep their code where it was."""
    cache = str(tmp_path / "cache")
    assert storm(tmp_path, cache)[0] >= 1
    code = "import sys; sys.path.insert(0, sys.argv[1]); import numpy as np; from kernels_of_the_test import outer; "
    code += "print(outer(np.arange(3.0)), sum(outer.stats.cache_misses.values()))"
    later = [fork_python(code, str(tmp_path), NUMBA_CACHE_DIR=cache).stdout.split() for _ in range(2)]
    assert later[0] in (["6.0", "1"], ["6.0", "0"]) and later[1] == ["6.0", "0"]
