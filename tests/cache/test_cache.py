"""Machine code on disk: a second process compiles nothing, importing does nothing. ``test_disk_cache`` has what goes wrong."""

import ctypes
import os
import shutil
import sys
import textwrap
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from interpreter import run_python
from numba import types

from fastexchange.calls.carried_code import _InMemory
from fastexchange.ground.cfunction import _Announced, cfunction, code_cache
from fastexchange.ground.disk_cache import CacheFolder, digest
from fastexchange.ground.native import native

PROGRAM = """
    import numpy as np
    import fastexchange
    from fastexchange import fast_args
    from fastexchange.ground import cfunction
    from made_producers import Dunder, Legacy, Tabled

    @fast_args
    def axpy(a, x, y, out=None):
        for i in range(x.shape[0]):
            y[i] += a * x[i]
        return y

    @fast_args
    def pair(t, flag=True):
        return t[0].sum(), (t[1], flag)

    x = np.arange(3.0)
    for kind in (np.asarray, Tabled, Dunder, Legacy):
        for _ in range(3):
            got = axpy(2.0, kind(x), np.ones(3))
            assert got.tolist() == [1.0, 3.0, 5.0], got
            got = pair((kind(x), 2))
            assert got == (3.0, (2, True)), got
    assert axpy.counts().fast + axpy.counts().slow == 12
    try:
        axpy(2.0, np.arange(3.0), np.zeros(2, "f4")[:0])
    except Exception:
        pass
    print(cfunction.code_cache.misses, cfunction.code_cache.hits)
    """

FUNCTIONS = """
    import ctypes
    from numba import types
    from fastexchange.ground import cfunction
    from fastexchange.dispatch.frame import release_both
    from fastexchange.dispatch.results import delete_result

    def times(factor):
        def function(number):
            return number * factor
        function.__module__, function.__qualname__ = "fastexchange.ground.native", f"times_{factor}"
        return cfunction.cfunction(types.int64, types.int64)(function)

    made = [times(factor) for factor in range(6)]
    called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    assert [called(function.address)(7) for function in made] == [0, 7, 14, 21, 28, 35]
    assert release_both.address and delete_result.address
    print(cfunction.code_cache.misses, cfunction.code_cache.hits)
    """
"""As :data:`PROGRAM`, all through the same cache, and compiled in a second instead of twenty: for tests that compile it anew."""


def misses_and_hits(done) -> tuple[int, int]:
    misses, hits = done.stdout.split()[-2:]
    return int(misses), int(hits)


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A cache directory with all that :data:`PROGRAM` needs. This process's own has most of it."""
    directory = tmp_path_factory.mktemp("cache")
    where = "from fastexchange.ground.cfunction import code_cache; print(code_cache.directory)"
    inner = Path(run_python(where, NUMBA_CACHE_DIR=str(directory)).stdout.strip())
    assert inner.is_relative_to(directory)
    if code_cache.directory is not None:
        inner.mkdir(mode=0o755, parents=True)
        for path in Path(code_cache.directory).glob("*.entry"):
            shutil.copy2(path, inner)
    run_python(PROGRAM, NUMBA_CACHE_DIR=str(directory))
    return directory


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    """A cache directory that two processes have filled at the same time."""
    directory = tmp_path_factory.mktemp("functions")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_python, FUNCTIONS, NUMBA_CACHE_DIR=str(directory)) for _ in range(2)]
        found = [misses_and_hits(run.result()) for run in runs]
    assert [misses + hits for misses, hits in found] == [8, 8] and sum(misses for misses, _ in found) == 8, found
    return directory


@pytest.fixture
def copied(warm, tmp_path) -> Path:
    """A copy of the warm cache directory, to be written to and damaged."""
    return Path(shutil.copytree(warm, tmp_path / "cache"))


@pytest.fixture
def copied_functions(functions, tmp_path) -> Path:
    """The same of what :data:`FUNCTIONS` needs."""
    return Path(shutil.copytree(functions, tmp_path / "functions"))


UNPICKLED: list[str] = []


def note(what: str) -> None:
    UNPICKLED.append(what)


class Noted:
    """What notes that it is unpickled."""

    def __reduce__(self):
        return note, ("value",)


@pytest.mark.parametrize("kept_in", ["folder", "memory"])
def test_nothing_is_unpickled_before_its_key_and_checksum_are_right(kept_in, tmp_path):
    folder: Any = CacheFolder(tmp_path / "folder") if kept_in == "folder" else _InMemory()
    assert folder.save("name", "one", Noted()) and folder.save("name", "other", Noted()) and folder.save("name", "third", Noted())
    if kept_in == "folder":
        one, other, third = (tmp_path / "folder" / f"name-{digest(key)}.entry" for key in ("one", "other", "third"))
        one.replace(other)
        third.write_bytes(third.read_bytes()[:-1] + b"!")
        assert (folder.contents().entries, len(folder.contents().refused)) == (0, 2)
    else:
        folder.entries[digest("other")] = folder.entries[digest("one")]
        third = zlib.decompress(folder.entries[digest("third")])
        folder.entries[digest("third")] = zlib.compress(third[:-1] + b"!")
        assert sorted(folder.keys().values()) == ["", "one", "one"]
    UNPICKLED.clear()
    assert folder.load("name", "other") is None and folder.load("name", "third") is None and not UNPICKLED
    assert folder.save("name", "one", Noted()) and folder.load("name", "one") is None and UNPICKLED == ["value"]


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "program"), [("warm", PROGRAM), ("functions", FUNCTIONS)], ids=["program", "functions"])
def test_a_second_process_compiles_nothing(request, name, program):
    directory = request.getfixturevalue(name)
    before = [(path, path.stat().st_mtime_ns) for path in files(directory)]
    misses, hits = misses_and_hits(run_python(program, NUMBA_CACHE_DIR=str(directory)))
    assert misses == 0 and hits > 0
    assert [(path, path.stat().st_mtime_ns) for path in files(directory)] == before, "it wrote to the cache"


@pytest.mark.slow
def test_another_program_shares_what_is_common(copied):
    misses, _ = misses_and_hits(
        run_python(
            """
            import numpy as np
            from fastexchange import fast_args
            from fastexchange.ground import cfunction

            @fast_args
            def another_kernel(b, c, d):
                return None

            for _ in range(2):
                another_kernel(1.5, np.ones(3), np.ones(3))
            print(cfunction.code_cache.misses, cfunction.code_cache.hits)
            """,
            NUMBA_CACHE_DIR=str(copied),
        )
    )
    assert misses <= 3, "more than the entry of this kernel was compiled"


def test_nothing_is_compiled_or_loaded_at_import(tmp_path):
    done = run_python(
        """
        import sys
        import fastexchange
        from fastexchange import FastKernel, fast_args
        assert "torch" not in sys.modules and "tvm_ffi" not in sys.modules and "cffi" not in sys.modules
        module = sys.modules.get("fastexchange.ground.cfunction")
        cache = getattr(module, "code_cache", None)
        print(*((cache.misses, cache.hits) if cache else (0, 0)))
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert misses_and_hits(done) == (0, 0)
    assert files(tmp_path) == []


@pytest.mark.slow
def test_a_cache_directory_that_cannot_be_written(tmp_path):
    """Under a plain file no directory can be made, not even by root."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    nowhere = {"NUMBA_CACHE_DIR": str(blocker / "cache"), "XDG_CACHE_HOME": str(blocker), "HOME": str(blocker)}
    assert misses_and_hits(run_python(PROGRAM, **nowhere))[0] >= 0  # it may be kept beside the package
    not_there_either = f"""
        from pathlib import Path
        from fastexchange.ground import cfunction
        cfunction.ROOT = Path({str(blocker)!r})
        cfunction.source_stamp = lambda module: "made up"
        """
    for _ in range(2):
        assert misses_and_hits(run_python(textwrap.dedent(not_there_either) + textwrap.dedent(FUNCTIONS), **nowhere)) == (8, 0)
    assert blocker.read_text() == ""


def test_a_kernel_with_cache_where_nothing_can_be_written(tmp_path):
    """``njit(cache=True)`` raises there; a kernel warns, and runs."""
    done = run_python(
        """
        import sys, warnings
        namespace = {}
        source = "from fastexchange import fast_args\\n@fast_args(cache=True)\\ndef kernel(x):\\n    return x + 1\\n"
        exec(compile(source, "<made up>", "exec"), namespace)
        print(namespace["kernel"](1))
        """,
        PYTHONWARNINGS="always",
    )
    assert done.stdout.split() == ["2"]
    assert "RuntimeWarning" in done.stderr and "cannot cache" in done.stderr


KERNEL_FILE = """
import numpy as np
from fastexchange import fast_args

@fast_args(cache=True)
def cached(x, factor=2.0):
    return x.sum() * factor

@fast_args(cache=True, parallel=False, fastmath=True)
def cached_too(x):
    return x[0]
"""

USER = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import kernels_of_the_test as k
    from fastexchange.ground import cfunction

    for _ in range(2):
        assert k.cached(np.arange(3.0)) == 6.0
        assert k.cached_too(np.arange(3.0)) == 0.0
    stats = k.cached.stats
    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
    print(k.cached.counts().fast)
    print(cfunction.code_cache.misses, cfunction.code_cache.hits)
    """


@pytest.mark.slow
def test_cache_true_hits_numbas_cache(copied, tmp_path):
    (tmp_path / "kernels_of_the_test.py").write_text(KERNEL_FILE)
    environment = {"NUMBA_CACHE_DIR": str(copied)}
    first = run_python(USER, str(tmp_path), **environment).stdout.split()
    assert first[:3] == ["0", "1", "1"]
    for _ in range(2):
        second = run_python(USER, str(tmp_path), **environment).stdout.split()
        assert second[:3] == ["1", "0", "1"], "a second process compiled the kernel"
        assert second[3] == "0", "a second process compiled its entry"


@pytest.mark.slow
def test_cached_kernels_are_beside_their_file_by_default(tmp_path):
    (tmp_path / "kernels_of_the_test.py").write_text(KERNEL_FILE)
    run_python(USER, str(tmp_path), NUMBA_CACHE_DIR="")
    (entry,) = tmp_path.rglob("kernels_of_the_test.cached-*.entry")
    assert entry.parent == tmp_path / "__pycache__" / "fastexchange"
    assert run_python(USER, str(tmp_path), NUMBA_CACHE_DIR="").stdout.split()[:2] == ["1", "0"]


@pytest.mark.slow
def test_a_changed_kernel_is_compiled_anew(copied, tmp_path):
    source = tmp_path / "kernels_of_the_test.py"
    source.write_text(KERNEL_FILE)
    environment = {"NUMBA_CACHE_DIR": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
    run_python(USER, str(tmp_path), **environment)
    source.write_text(KERNEL_FILE.replace("x.sum() * factor", "x.sum() * factor + 1"))
    os.utime(source, (1, 1))
    done = run_python(USER.replace("== 6.0", "== 7.0"), str(tmp_path), **environment)
    assert done.stdout.split()[:2] == ["0", "1"]


@pytest.mark.slow
def test_cached_kernels_with_every_kind_of_result(copied, tmp_path):
    """What boxing needs must survive the way to the disk."""
    (tmp_path / "results_of_the_test.py").write_text(
        """
import numpy as np
import collections
from fastexchange import fast_args

Point = collections.namedtuple("Point", "x y")

@fast_args(cache=True)
def point(x): return Point(x[0], (x, 1))

@fast_args(cache=True)
def text(x): return "text" * x.size

@fast_args(cache=True)
def nothing(x): return None

@fast_args(cache=True)
def maybe(x, yes): return x.sum() if yes else None

@fast_args(cache=True)
def item(x): return x[0]

@fast_args(cache=True)
def made(x): return x + 1
"""
    )
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import numpy as np
        import results_of_the_test as r
        x = np.arange(2.0)
        for _ in range(3):
            got = r.point(x)
            assert type(got) is r.Point and got.x == 0.0 and got.y[0] is x and got.y[1] == 1
            assert r.text(x) == "texttext"
            assert r.nothing(x) is None
            assert r.maybe(x, True) == 1.0 and r.maybe(x, False) is None
            assert r.item(np.array(["2024-01-02"], "M8[D]")) == np.datetime64("2024-01-02")
            assert r.item(np.ones(2, "M8[s]")).dtype == np.dtype("M8[s]")
            assert r.item(np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])).b == 2.0
            assert r.made(x).tolist() == [1.0, 2.0] and r.made(x.astype("c8")).dtype == np.complex64
        print("right")
        """
    for _ in range(2):
        assert run_python(code, str(tmp_path), NUMBA_CACHE_DIR=str(copied)).stdout.split() == ["right"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_kernels_work_in_forked_children():
    run_python(
        """
        import os
        import numpy as np
        from fastexchange import fast_args

        @fast_args
        def total(x):
            return x.sum()

        total(np.ones(3))
        child = os.fork()
        if child == 0:
            right = total(np.ones(3)) == 3.0 and total(np.ones(3, "f4")) == 3.0 and total(np.ones((2, 2))) == 4.0
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert total(np.ones(4)) == 4.0
        """
    )


def test_numba_disable_jit_is_not_about_our_own_code(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)

    @native
    def is_close(number):
        return np.isclose(number, 4.0)  # Numba's own, in Python, to be compiled with it

    def asked(number):
        return types.intp(is_close(types.float64(number)))

    address = cfunction(types.intp, types.intp)(asked).address
    called = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(address)
    assert [called(3), called(4)] == [0, 1]
    assert numba.config.DISABLE_JIT == 1


def test_native_code_is_compiled_without_a_thread_to_announce_it(monkeypatch):
    """Python 3.12 starts no thread at shutdown: a kernel that ``atexit`` calls for the first time."""

    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    announced = _Announced()
    for _ in range(2):
        with announced:
            pass


def test_without_stderr_nothing_is_announced(monkeypatch, capsys):
    """And nothing is printed to stdout, which ``print(file=None)`` would do."""
    monkeypatch.setattr(sys, "stderr", None)
    _Announced()._tell()
    assert capsys.readouterr().out == ""
