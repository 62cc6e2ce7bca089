"""What fails now and may succeed later is tried again: the next call is right, and later ones are native."""

import contextlib
import errno
import importlib
import itertools
import os
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from cache_entries import cache_entries
from forked import fork_python
from frameworks import torch
from interpreter import lines_said
from line_events import at_each_line
from numba.core.errors import TypingError
from oracle import references_kept
from raising import check_raises

from fastexchange import fast_args
from fastexchange.calls import dependencies
from fastexchange.ground import dtypes, numba_internals, readable
from fastexchange.ground.passing import Retries, may_pass

NO_MORE = [RecursionError("deep"), MemoryError(), OSError(errno.EMFILE, "too many open files"), OSError(errno.EAGAIN, "threads")]


def failing(function, error, times):
    """`function`, which fails so many times first."""

    def call(*args, **kwargs):
        nonlocal times
        if times:
            times -= 1
            raise error
        return function(*args, **kwargs)

    return call


def native_calls(kernel, *args, count=4) -> int:
    """How many of the next calls native code makes."""
    before = kernel.counts().fast
    for _ in range(count):
        kernel(*args)
    return kernel.counts().fast - before


X, dot = np.arange(3.0), lambda x, y: (x * y).sum()
NO_VERDICT = [*NO_MORE, RuntimeError("no compiled object yet"), PermissionError(errno.EACCES, "not yours")]


@pytest.mark.parametrize("error", NO_VERDICT, ids=repr)
def test_a_compilation_that_fails_now(error):
    kernel = fast_args(dot)
    kernel.compile = failing(kernel.compile, error, 1)  # the second compilation, of Numba's own dispatcher, succeeds
    assert kernel(X, X) == 5.0 and kernel.counts().compiled == 1
    said = kernel.explain(X, X)
    assert said.kind == "numba" and type(error).__name__ in str(said) and "tries again" in str(said)
    assert native_calls(kernel, X, X) == 3, "all but the first, which tries again"


@pytest.mark.parametrize("error", NO_MORE[:2], ids=repr)
def test_type_inference_of_half_precision_that_fails_now(error, monkeypatch):
    """It is no TypingError, which Numba's dispatcher would remember."""
    x, kernel = np.array([2.0], np.float16), fast_args(lambda x: x[0] + x[0])
    assert fast_args(lambda x: x[0])(x) == 2.0  # Numba knows such types from then on
    operations = sys.modules["fastexchange.ground.half.operations"]
    monkeypatch.setattr(operations._AsFloat32, "generic", failing(operations._AsFloat32.generic, error, 2))
    check_raises(type(error), None, kernel, x)
    assert [kernel(x) for _ in range(4)] == [4.0] * 4 and native_calls(kernel, x) == 4


def test_a_compilation_that_always_fails_costs_few_calls():
    kernel, tries = fast_args(dot), []
    kernel(X, X)
    kernel._forget()
    kernel._native.add = lambda *args: tries.append(1) or failing(None, MemoryError(), 1)()
    assert [kernel(X, X) for _ in range(1000)] == [5.0] * 1000 and len(tries) == 10


@pytest.mark.parametrize("error", NO_MORE, ids=repr)
def test_what_is_verified_is_not_decided_by_it(error, monkeypatch):
    """Numba's checks, PyTorch's, and whether a dtype has a Numba type: the error is raised, nothing is remembered."""
    fail, new = failing(None, error, -1), np.dtype([("once", "i4"), (type(error).__name__, "i4")])
    verified = [
        (numba_internals, "_checks", [fail], numba_internals.failures.__wrapped__),
        (dtypes.numba, "from_dtype", fail, lambda: dtypes.dtype_field(new)),
        (readable.os, "pipe", fail, lambda: readable.checked_address(id(new), 8)),
    ]
    if torch is not None:
        from fastexchange.torch import dispatch_table, modes, offsets

        verified += [(offsets.Guard, "_find_keys", fail, offsets.guard.__wrapped__)]
        verified += [(modes, "alone", fail, each.__wrapped__) for each in (modes.why_no_modes, modes.why_no_counts)]
        verified += [(dispatch_table, "alone", fail, dispatch_table.why_no_tables.__wrapped__)]
    for owner, name, value, function in verified:
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(owner, name, value)
            function()
    assert dtypes.dtype_field(new) is not None


def test_what_may_pass():
    assert all(map(may_pass, NO_MORE))
    assert not any(map(may_pass, [RuntimeError(), FileNotFoundError(errno.ENOENT, ""), TypeError(), KeyboardInterrupt()]))
    retries, tries = Retries(), []
    for occasion in range(40):
        if retries.is_due("key"):
            tries.append(occasion)
            retries.failed("key", MemoryError("none left"))
    assert tries == [0, 1, 3, 7, 15, 31] and retries.why("key") == "MemoryError: none left"
    retries.succeeded("key")
    assert retries.is_due("key") and retries.why("key") == "" and retries.is_due("another")


@pytest.mark.slow
def test_at_each_line_of_a_first_call():
    """Whatever line of the package fails: the calls after it are right and native, with a cache entry, and nothing leaks."""
    fast_args(dot)(X, X)

    def scene():
        kernel, x = fast_args(lambda x, y: x[0] + y[1]), np.arange(3.0)
        return (lambda: kernel(x, x)), kernel, x

    errors, tried, raised = itertools.cycle((RecursionError, MemoryError)), 0, 0

    def fail():
        nonlocal raised
        raised += 1
        raise next(errors)("made")

    for number, (name, work_with, (_, kernel, x)) in enumerate(at_each_line(scene)):
        decides = name.startswith(("calls/resolve", "dispatch/overloads", "dispatch/signature", "calls/kernel"))
        if number % (5 if decides else 35) == 0:
            tried += 1
            with contextlib.suppress(RecursionError, MemoryError):
                work_with(fail)
            assert [kernel(x, x) for _ in range(4)] == [1.0] * 4, name
            assert native_calls(kernel, x, x) == 4 and cache_entries(kernel) and kernel.bind(x, x)() == 1.0, name
    assert number > 300 and raised > 0.9 * tried, "lines were not come to again"


CACHED = """
from fastexchange import fast_args
inner = fast_args(lambda x: x.sum(), cache=True)
outer = fast_args(lambda x: inner(x) + 1.0, cache=True)

@fast_args(cache=True)
def first(x):
    return x[0]
"""
CALLED = """
    import os, sys, warnings
    import numpy as np
    sys.path.insert(0, folder := sys.argv[1])
    warnings.simplefilter("always")
    import program
    x = np.arange(3.0)
    loaded = program.fast_args(lambda x: x[0] + 1.0)  # another user may be unable to read the modules
    assert [loaded(x) for _ in range(4)] == [1.0] * 4 and loaded.bind(x)() == 1.0
    {change}
    for kernel, wanted in ((program.outer, 4.0), (program.first, 0.0)):
        assert [kernel(x) for _ in range(4)] == [wanted] * 4
        assert kernel.counts().fast == 3, kernel.counts()
        assert kernel.bind(x)() == wanted
"""
CHANGES = {
    "rights are dropped": "os.setgroups([]); os.setgid(65534); os.setuid(65534)",
    "out of inodes": "os.system(f'cd {folder}; i=0; while touch f$i 2>/dev/null; do i=$((i+1)); done')",
    "a full disk": "os.system(f'cat /dev/zero > {folder}/zeros 2>/dev/null')",
    "readonly": "assert os.system(f'mount -o remount,ro {folder}') == 0",
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs rights that can be dropped")
@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_that_keeps_nothing_any_more(what, tmp_path):
    """After decoration: kernels work natively, and one warning tells for all of them."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    is_mounted, options = what != "rights are dropped", "size=256k" if what == "a full disk" else "nr_inodes=24"
    if is_mounted and os.system(f"mount -t tmpfs -o {options} none {tmp_path} 2>/dev/null"):
        pytest.skip("needs the right to mount")
    try:
        (tmp_path / "program.py").write_text(CACHED)
        done = fork_python(CALLED.format(change=CHANGES[what]), str(tmp_path), NUMBA_CACHE_DIR="")
    finally:
        if is_mounted:
            os.system(f"umount {tmp_path}")
    told = [line for line in lines_said(done.stderr) if "Warning" in line]
    assert len(told) == 1 and "can no longer be kept in" in told[0] and str(tmp_path) in told[0], done.stderr


def test_what_cannot_be_described_now_keeps_no_arguments(tmp_path, monkeypatch):
    """The reason, which is kept for a warning, has lost the frames of the call."""
    (tmp_path / "program_of_no_stack.py").write_text(CACHED.replace("x[0]", "x.nothing"))
    monkeypatch.syspath_prepend(tmp_path)
    kernel, x = importlib.import_module("program_of_no_stack").first, np.arange(3.0)
    monkeypatch.setattr(dependencies._Describer, "describe", describe := Mock(side_effect=RecursionError))
    with references_kept(x), contextlib.suppress(TypingError):
        kernel(x)
    assert describe.called


CODE_LOST = """
    import pickle, sys
    import numpy as np
    from numba.core.registry import cpu_target
    engine = cpu_target.target_context.codegen()._engine._ee
    hands_over, lost = engine._object_cache_getbuffer, []
    def interrupted(module):
        code = hands_over(module)
        if code is not None and any(name in module.name for name in sys.argv[2:]):
            lost.append(module.name)
            raise KeyboardInterrupt  # in llvmlite's callback: ctypes ignores it
        return code
    engine._object_cache_getbuffer = interrupted
    sys.path.insert(0, sys.argv[1])
    import program
    x, kernel = np.arange(3.0), program.first
    if "of a pickle" in sys.argv:
        kernel = pickle.loads(open(f"{sys.argv[1]}/kernel", "rb").read())
    assert [kernel(x) for _ in range(4)] == [0.0] * 4
    print(len(lost) > 0, kernel.stats.cache_hits.total(), kernel.counts().fast)
    if len(sys.argv) == 2:
        open(f"{sys.argv[1]}/kernel", "wb").write(pickle.dumps(kernel))
"""


@pytest.fixture
def folder(tmp_path):
    """With a kernel in the cache, and in a pickle."""
    (tmp_path / "program.py").write_text(CACHED)
    fork_python(CODE_LOST, str(tmp_path))
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["first"], ["first", "of a pickle"], ["function.vectorcall"]])
def test_machine_code_is_loaded_without_a_callback(names, folder):
    """LLVM has it at once. (Numba hands it over in a callback of llvmlite's, whose exceptions, as of Ctrl-C, are lost.)"""
    assert fork_python(CODE_LOST, folder, *names).stdout == "False 1 3\n"
