"""Entries on disk prove what they are: whatever happens to the files, nobody gets another function's code."""

import importlib
import os
import random
import signal
import stat
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from interpreter import run_python
from numba.core.errors import NumbaWarning

from fastexchange import fast_args
from fastexchange.ground import disk_cache
from fastexchange.ground.cfunction import code_cache
from fastexchange.ground.disk_cache import CacheFolder

VALUE = {"code": b"machine code" * 20, "symbol": "walk"}


@pytest.fixture
def folder(tmp_path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache")


@pytest.fixture
def entry(folder) -> Path:
    """The file of an entry with the key "key", whose value is :data:`VALUE`."""
    assert folder.save("name", "key", VALUE)
    return only(folder.path)


def only(path: Path) -> Path:
    (file,) = path.iterdir()
    return file


# ---- one entry, one file -----------------------------------------------------------------------------------------------


def test_entries_are_told_apart_by_their_whole_key(folder):
    keys = [f"{'long ' * 1000}{number}" for number in range(20)]
    for number, key in enumerate(keys):
        assert folder.load("same name", key) is None
        assert folder.save("same name", key, number)
    assert [folder.load("same name", key) for key in keys] == list(range(20))
    assert folder.save("same name", keys[3], "new") and folder.load("same name", keys[3]) == "new"
    assert folder.contents() == (20, folder.contents().size, [])


@pytest.mark.parametrize("key", ["", "\n", "ключ", "\udc80 not a character", "x" * 100_000])
@pytest.mark.parametrize("name", ["f", "<lambda>", "a/../../b", "é", "n" * 300])
def test_any_name_and_any_key(folder, name, key):
    assert folder.save(name, key, VALUE) and folder.load(name, key) == VALUE
    assert only(folder.path).parent == folder.path


def test_what_cannot_be_pickled_is_not_kept(folder):
    assert not folder.save("name", "key", (each for each in ()))
    assert not folder.path.exists() or not list(folder.path.iterdir())


def test_a_value_whose_class_has_gone_is_not_loaded(folder, monkeypatch):
    assert folder.save("name", "key", stat.S_ISREG)
    monkeypatch.delattr("_stat.S_ISREG")
    assert folder.load("name", "key") is None
    monkeypatch.undo()
    assert folder.load("name", "key") is stat.S_ISREG


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed(folder, entry):
    whole = entry.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        entry.write_bytes(damaged)
        assert folder.load("name", "key") is None, bit
    entry.write_bytes(whole)
    assert folder.load("name", "key") == VALUE


def test_every_truncation_and_every_addition_is_noticed(folder, entry):
    whole = entry.read_bytes()
    for length in range(len(whole)):
        entry.write_bytes(whole[:length])
        assert folder.load("name", "key") is None, length
    for more in (b"\0", b"more", whole):
        entry.write_bytes(whole + more)
        assert folder.load("name", "key") is None, more
    assert folder.contents()[0] == 0 and "checksum" in folder.contents().refused[0]
    assert folder.save("name", "key", VALUE) and folder.load("name", "key") == VALUE


def test_entries_whose_files_changed_places(folder):
    for key in "ab":
        folder.save("name", key, key * 9)
    one, other = sorted(folder.path.iterdir())
    aside = folder.path / "aside"
    one.rename(aside), other.rename(one), aside.rename(other)
    assert folder.load("name", "a") is None and folder.load("name", "b") is None
    assert folder.contents().entries == 0 and all("another entry" in why for why in folder.contents().refused)
    assert folder.save("name", "a", "aaa") and folder.load("name", "a") == "aaa"


@pytest.mark.slow
def test_bits_of_real_machine_code(tmp_path):
    """As whole processes see it: damaged entries are compiled anew, and nothing crashes."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    run_python(FUNCTIONS, "0", "6", **environment)
    entries = sorted((tmp_path / "fastexchange").iterdir())
    assert len(entries) == 6
    chosen = random.Random(1)
    for _ in range(3):
        for path in entries:
            data = bytearray(path.read_bytes())
            data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
            path.write_bytes(data)
        assert run_python(FUNCTIONS, "0", "6", **environment).stdout.split() == ["6", "0"]
        assert run_python(FUNCTIONS, "0", "6", **environment).stdout.split() == ["0", "6"]


# ---- processes that end at any moment, and at the same time ------------------------------------------------------------

FUNCTIONS = """
    import ctypes, sys
    from numba import types
    from fastexchange.ground import cfunction

    def times(factor):
        def function(number):
            return number * factor
        function.__module__, function.__qualname__ = "fastexchange.ground.native", f"times_{factor}"
        return cfunction.cfunction(types.int64, types.int64)(function)

    called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    for factor in range(int(sys.argv[1]), int(sys.argv[2])):
        assert called(times(factor).address)(7) == 7 * factor, factor
    print(cfunction.code_cache.misses, cfunction.code_cache.hits)
    """


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time(tmp_path):
    """Different functions, and half of them the same."""
    ranges = [(0, 20), (10, 30), (20, 40), (30, 50)]
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: run_python(FUNCTIONS, *map(str, each), **environment), ranges))
    assert run_python(FUNCTIONS, "0", "50", **environment).stdout.split() == ["0", "50"]
    assert CacheFolder(tmp_path / "fastexchange").contents()[0::2] == (50, [])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("is_new", [True, False])
def test_a_process_killed_at_any_line_of_saving(folder, is_new):
    """What was there before is there still, or the new entry is whole."""

    def killed_at(line: int) -> bool:
        child = os.fork()
        if child == 0:
            lines = 0

            def trace(frame, event, argument):
                nonlocal lines
                if frame.f_code.co_filename == disk_cache.__file__:
                    lines += event == "line"
                    if lines > line:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace

            sys.settrace(trace)
            CacheFolder(folder.path).save("name", "key", "new")
            os._exit(0)
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    for line in range(200):
        if not is_new:
            assert folder.save("name", "key", "old")
        ended = killed_at(line)
        found = CacheFolder(folder.path).load("name", "key")
        assert found in ("new", None if is_new else "old")
        if not ended:
            assert found == "new" and line > 20
            break
        for file in folder.path.glob("*"):
            if is_new or file.suffix == ".tmp":
                file.unlink()
    else:
        pytest.fail("it was killed at each of 200 lines")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 20, 60, 100, 250])
def test_a_disk_that_is_full(folder, limit, is_killed):
    """By the limit on a file's size: the writer is told, or killed in the middle."""
    import resource

    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
        os._exit(CacheFolder(folder.path).save("name", "key", VALUE))
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) if is_killed else os.WEXITSTATUS(status) == 0
    assert folder.load("name", "key") is None
    assert [path.suffix for path in folder.path.iterdir()] == [".tmp"] * is_killed
    assert folder.save("name", "key", VALUE) and folder.load("name", "key") == VALUE


def test_a_folder_that_vanishes(folder, entry):
    entry.unlink()
    folder.path.rmdir()
    assert folder.load("name", "key") is None and folder.contents() == (0, 0, [])
    folder.prune()
    assert folder.save("name", "key", VALUE) and folder.load("name", "key") == VALUE


# ---- who may have written it -----------------------------------------------------------------------------------------

needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this platform does not tell who owns a file")
needs_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give files away")


@needs_users
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o777])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_can_write_to_is_not_believed(folder, entry, what, mode):
    (entry if what == "file" else folder.path).chmod(mode | (0o111 if what == "folder" else 0))
    assert folder.load("name", "key") is None
    if what == "folder":
        assert "other users can write" in folder.why_not_trusted
        assert not folder.is_writable and not folder.save("name", "key", VALUE)
        folder.path.chmod(0o755)
    else:
        assert "other users can write" in folder.contents().refused[0]
        assert folder.save("name", "key", VALUE)
    assert folder.load("name", "key") == VALUE


@needs_root
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_another_user_owns_is_not_believed(folder, entry, what):
    os.chown(entry if what == "file" else folder.path, 12345, -1)
    assert folder.load("name", "key") is None
    if what == "folder":
        assert folder.why_not_trusted == "it belongs to user 12345, not to user 0" and not folder.is_writable
    else:
        assert "belongs to user 12345" in folder.contents().refused[0]


@needs_root
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_root_compiles_for_all():
    """Others read what root has kept, keep theirs elsewhere, and root believes nothing of that."""
    # A folder of the test's own: other test runs that start meanwhile take others' access to pytest's away.
    with tempfile.TemporaryDirectory() as reachable:
        folder, theirs = CacheFolder(Path(reachable, "cache")), CacheFolder(Path(reachable, "theirs", "cache"))
        assert folder.save("name", "key", VALUE)
        Path(reachable).chmod(0o755)
        theirs.path.parent.mkdir()
        theirs.path.parent.chmod(0o777)
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                os.setgid(12345), os.setuid(12345)
                is_right = folder.load("name", "key") == VALUE and not folder.is_writable and not folder.save("name", "b", 1)
                is_right &= theirs.is_writable and theirs.save("name", "key", "theirs") and theirs.load("name", "key") == "theirs"
            finally:
                os._exit(not is_right)
        assert os.waitpid(child, 0)[1] == 0
        assert CacheFolder(theirs.path).load("name", "key") is None


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_not_believed(folder, entry, tmp_path, kind):
    aside = tmp_path / "aside"
    entry.rename(aside)
    {"link": lambda: entry.symlink_to(aside), "pipe": lambda: os.mkfifo(entry), "directory": entry.mkdir}[kind]()
    assert folder.load("name", "key") is None
    assert folder.save("name", "key", VALUE) == (kind != "directory")


@needs_users
def test_a_folder_that_is_a_link_is_not_believed(folder, entry, tmp_path):
    """Whoever can write to the directory above could make it, to any folder of this user's."""
    folder.path.rename(tmp_path / "aside")
    folder.path.symlink_to(tmp_path / "aside")
    assert folder.why_not_trusted == "it is a link" and not folder.is_writable
    assert folder.load("name", "key") is None and not folder.save("name", "other key", VALUE)
    folder.clear("name")
    assert list((tmp_path / "aside").iterdir()) == [tmp_path / "aside" / entry.name]


@needs_users
@pytest.mark.parametrize("act", [lambda folder: folder.load("name", "key"), lambda folder: folder.save("name", "key", "late")])
def test_a_folder_that_is_exchanged_after_the_look_at_it(folder, entry, tmp_path, monkeypatch, act):
    """What was looked at is what is used."""
    other = CacheFolder(tmp_path / "other")
    assert other.save("name", "key", "other")
    looked_at = disk_cache._why_not_trusted

    def look(status):
        why = looked_at(status)
        if stat.S_ISDIR(status.st_mode) and not (tmp_path / "aside").exists():
            folder.path.rename(tmp_path / "aside")
            other.path.rename(folder.path)
        return why

    with monkeypatch.context() as patched:
        patched.setattr(disk_cache, "_why_not_trusted", look)
        found = act(folder)
    assert found in (VALUE, True) and folder.load("name", "key") == "other"
    assert CacheFolder(tmp_path / "aside").load("name", "key") == (VALUE if found == VALUE else "late")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="these are the rules of the others")
def test_where_a_users_caches_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for wanted in (None, "", "not/absolute"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False) if wanted is None else monkeypatch.setenv("XDG_CACHE_HOME", wanted)
        assert disk_cache.user_cache() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert disk_cache.user_cache() == tmp_path / "caches"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom nobody knows
    assert disk_cache.user_cache() is None


@needs_users
def test_files_are_written_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        folder.save("name", "key", VALUE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(only(folder.path).stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755


# ---- it does not grow for ever -----------------------------------------------------------------------------------------


def test_what_nobody_loads_is_removed(folder, entry):
    now = time.time()
    for days, name in ((1, "new"), (89, "old"), (91, "older"), (-400, "of a wrong clock")):
        folder.save(name, name, name)
        file = next(path for path in folder.path.iterdir() if path.name.startswith(f"{name.replace(' ', '_')}-"))
        os.utime(file, (now - 86400 * days,) * 2)
    (folder.path / "x.entry.1.tmp").write_bytes(b"begun")
    (folder.path / "y.entry.2.tmp").write_bytes(b"begun long ago")
    os.utime(folder.path / "y.entry.2.tmp", (now - 86400,) * 2)
    (folder.path / "notes.txt").write_text("a stranger's")
    os.utime(folder.path / "notes.txt", (0, 0))
    folder.prune()
    assert [folder.load(name, name) for name in ("new", "old", "older", "of a wrong clock")] == [
        "new", "old", None, "of a wrong clock"
    ]  # fmt: skip
    assert (folder.path / "x.entry.1.tmp").exists() and not (folder.path / "y.entry.2.tmp").exists()
    assert (folder.path / "notes.txt").exists()
    assert all(abs(path.stat().st_mtime - now) < 90 * 86400 for path in folder.path.glob("*.entry"))


def test_loading_keeps_an_entry(folder, entry):
    os.utime(entry, (time.time() - 80 * 86400,) * 2)
    assert folder.load("name", "key") == VALUE
    assert abs(entry.stat().st_mtime - time.time()) < 3600


@pytest.mark.parametrize("limit", ["MAX_ENTRIES", "MAX_BYTES"])
def test_the_oldest_go_first(folder, monkeypatch, limit):
    now = time.time()
    for number in range(10):
        folder.save("name", str(number), number)
        os.utime(next(p for p in folder.path.iterdir() if disk_cache.digest(str(number)) in p.name), (now - 60 * number,) * 2)
    size = only_size = max(path.stat().st_size for path in folder.path.iterdir())
    monkeypatch.setattr(disk_cache, limit, 4 if limit == "MAX_ENTRIES" else 4 * size + only_size // 2)
    CacheFolder(folder.path).prune()
    assert [folder.load("name", str(number)) for number in range(10)] == [0, 1, 2, 3] + [None] * 6


# ---- kernels with cache=True -------------------------------------------------------------------------------------------

MODULE = r'''
import numba
from fastexchange import fast_args

def scaled(factor, decorate):
    def times(x, y):
        for i in range(x.shape[0]):
            y[i] = x[i] * factor
    return decorate(times)

def scaled_at_length(factor, decorate):
    """Too long to be inlined."""
    namespace = {"math": __import__("math"), "__name__": __name__}
    step = "            if x[i] > {0}: y[i] += math.sin(x[i] * {0}) + math.cos(y[i])\n"
    steps = "".join(map(step.format, range(2, 60)))
    body = f"    def times(x, y):\n        for i in range(x.shape[0]):\n{steps}            y[i] += x[i] * factor\n"
    exec(compile(f"def scaled(factor):\n{body}    return times\n", __file__, "exec"), namespace)
    return decorate(namespace["scaled"](factor))

def by_text(text, **options):
    namespace = {"__name__": __name__}
    exec(compile(f"def times(x, y):\n    y[0] = {text}", __file__, "exec"), namespace)
    return fast_args(cache=True, **options)(namespace["times"])
'''
RUN = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numba, numpy as np
    import module_of_the_test as module
    from fastexchange import fast_args
    x, y = np.ones(3), np.zeros(3)
    def called(kernel):
        y[:] = 0
        kernel(x, y)
        return y[0]
    """


@pytest.fixture
def module(tmp_path) -> Path:
    (tmp_path / "module_of_the_test.py").write_text(MODULE)
    return tmp_path


def run(module: Path, code: str) -> list[str]:
    return run_python(RUN + code, str(module)).stdout.split()


@pytest.mark.slow
def test_closures_of_one_name_that_were_compiled_in_different_processes(module):
    """Numba gives them the same symbols, and LLVM finds functions by their symbols."""
    for factor in (2, 3):
        run(module, f"""
    assert called(module.scaled({factor}.0, fast_args(cache=True))) == {factor}
        """)
    found = run(module, """
    two, three = [module.scaled(factor, fast_args(cache=True)) for factor in (2.0, 3.0)]
    two(x, y), three(x, y)
    print(*[sum(each.stats.cache_hits.values()) for each in (two, three)])
    for _ in range(30):
        print(int(called(two)), int(called(three)))
    for kernel in (two, three):
        y[:] = 0
        kernel.bind(x, y)()
        print(int(y[0]))
    @numba.njit
    def both(x, y, z):
        two(x, y), three(x, z)
    z = np.zeros(3)
    both(x, y, z)
    print(int(y[0]), int(z[0]))
        """)  # fmt: skip
    assert found == ["1", "1"] + ["2", "3"] * 30 + ["2", "3"] + ["2", "3"]


@pytest.mark.slow
def test_dispatchers_of_one_name_that_were_compiled_in_different_processes(module):
    """Of dispatchers that users made, symbols are Numba's: the one whose symbols lead to another is called by Numba."""
    for factor in (2, 3):
        run(module, f"""
    assert called(module.scaled({factor}.0, numba.njit(cache=True))) == {factor}
        """)
    found = run(module, """
    two, three = [module.scaled(factor, numba.njit(cache=True)) for factor in (2.0, 3.0)]
    two(x, y), three(x, y)
    assert two.overloads[two.signatures[0]].fndesc.llvm_func_name == three.overloads[three.signatures[0]].fndesc.llvm_func_name
    two, three = fast_args(two), fast_args(three)
    for _ in range(30):
        print(int(called(two)), int(called(three)))
    print(three.counts().fast)
    three.bind(x, y)()
    print(int(y[0]))
        """)  # fmt: skip
    assert found == ["2", "3"] * 30 + ["29", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("make", ["scaled", "scaled_at_length"])
def test_launches_bound_to_kernels_of_one_name(module, make):
    for factor in (2, 3):
        run(module, f"""
    assert called(module.{make}({factor}.0, numba.njit(cache=True))) == {factor}
        """)
    found = run(module, f"""
    for factor in (2.0, 3.0):
        kernel = fast_args(module.{make}(factor, numba.njit(cache=True)))
        kernel(x, y)
        y[:] = 0
        kernel.bind(x, y)()
        print(int(y[0]))
        """)  # fmt: skip
    assert found == ["2", "3"]


@pytest.mark.slow
def test_constants_and_options_are_part_of_a_kernels_key(module):
    """Numba's own key has neither, so that it takes one for the other."""
    code = """
    kernels = [module.by_text("x[0] + 1"), module.by_text("x[0] + 2")]
    print(*[int(called(kernel)) for kernel in kernels], sum(sum(each.stats.cache_hits.values()) for each in kernels))
    import numba
    single = module.by_text("x[0] * 0.1 + 0.2", locals={"y": numba.float64[::1]})
    called(single), called(module.by_text("x[0] * 0.1 + 0.2"))
    unchecked, checked = module.by_text("x[7 + len(x)]"), module.by_text("x[7 + len(x)]", boundscheck=True)
    called(unchecked)
    try:
        called(checked)
    except IndexError:
        print("checked")
        """
    assert run(module, code) == ["2", "3", "0", "checked"]
    assert run(module, code) == ["2", "3", "2", "checked"]


USER = """
import numpy as np
from fastexchange import fast_args
import helper_of_the_test as helper
from helper_of_the_test import calls

LIMIT, TABLE = 1, np.arange(3.0) * 1

@fast_args(cache=True)
def used(x): return {}
"""
HELPER = """
import numba
DEEP = 1
@numba.njit
def inner(x): return x.sum() + DEEP
@numba.njit
def calls(x): return inner(x)
"""
CHANGES = {
    "a global": ("x[0] + LIMIT", "LIMIT, TABLE = 1", "LIMIT, TABLE = 2"),
    "an array": ("x[0] + TABLE[1]", "np.arange(3.0) * 1", "np.arange(3.0) * 2"),
    "another module's constant": ("x[0] + helper.DEEP", "DEEP = 1", "DEEP = 2"),
    "what a function of another module calls": ("calls(x) - 2", "x.sum() + DEEP", "x.sum() + DEEP + 1"),
    "an attribute of another module": ("helper.calls(x) - 2", "DEEP = 1", "DEEP = 2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_kernel_names_is_part_of_its_key(tmp_path, monkeypatch, change):
    """Its own file has the size and the time that it had."""
    expression, before, after = CHANGES[change]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = "program_of_the_test", "helper_of_the_test"

    def called_with(text: str) -> tuple[float, int]:
        for name, source in zip(names, (USER.format(expression), HELPER), strict=True):
            file = tmp_path / f"{name}.py"
            file.write_text(source.replace(before, text))
            os.utime(file, (1e9, 1e9))
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        kernel = importlib.import_module(names[0]).used
        return kernel(np.ones(3)), sum(kernel.stats.cache_hits.values())

    assert [called_with(text) for text in (before, before, after, after)] == [(2.0, 0), (2.0, 1), (3.0, 0), (3.0, 1)]


def test_a_kernel_that_names_what_cannot_be_told(module):
    """It is compiled by each process, which is said."""
    code = r"""
    class Level:
        def __init__(self, number): self.number = number
    from numba.extending import typeof_impl, register_model, models, overload_attribute
    from numba.core.imputils import lower_constant
    from numba import types
    class LevelType(types.Type):
        def __init__(self, number):
            self.number = number
            super().__init__(f"Level({number})")
    register_model(LevelType)(models.OpaqueModel)
    typeof_impl.register(Level)(lambda value, context: LevelType(value.number))
    lower_constant(LevelType)(lambda context, builder, kind, value: context.get_dummy_value())
    @overload_attribute(LevelType, "number")
    def number(level):
        constant = level.number
        return lambda level: constant
    for level in (1, 2):
        namespace = {"LEVEL": Level(level), "__name__": "__main__"}
        exec(compile("def used(x): return x[0] + LEVEL.number", module.__file__, "exec"), namespace)
        print(fast_args(cache=True)(namespace["used"])(x))
    """
    done = run_python(RUN + code, str(module))
    assert done.stdout.split() == ["2.0", "3.0"]
    assert "used is compiled by each process: 'LEVEL', named by used, is a 'Level'" in done.stderr
    assert not list(module.rglob("*used-*.entry"))


def test_a_loaded_function_whose_global_has_changed_since(tmp_path, monkeypatch):
    """What calls it is compiled with its code of before, and is not kept as if it were compiled with that of now."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outer_of_the_test.py").write_text(
        "from fastexchange import fast_args\nLIMIT = 1\n"
        "@fast_args(cache=True)\ndef inner(x): return x + LIMIT\n"
        "@fast_args(cache=True)\ndef outer(x): return inner(x)\n"
    )

    def fresh():
        sys.modules.pop("outer_of_the_test", None)
        return importlib.import_module("outer_of_the_test")

    assert fresh().inner(1.0) == 2.0
    module = fresh()
    assert module.inner(1.0) == 2.0 and list(module.inner.stats.cache_hits.values()) == [1]
    module.LIMIT = 2
    with pytest.warns(NumbaWarning, match="each process: 'inner', named by outer, has been compiled already"):
        assert module.outer(1.0) == 2.0
    module = fresh()
    module.LIMIT = 2
    assert module.outer(1.0) == 3.0


@pytest.mark.slow
def test_functions_that_call_one_another(module):
    """Numba finds addresses for such names when it compiles; what is loaded has none for them, and LLVM ends the process."""
    program = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from recursive_of_the_test import parity
    print(parity(7), parity(8))
    """
    (module / "recursive_of_the_test.py").write_text(
        "import numba\nfrom fastexchange import fast_args\n"
        "@numba.njit\ndef even(n): return True if n == 0 else odd(n - 1)\n"
        "@numba.njit\ndef odd(n): return False if n == 0 else even(n - 1)\n"
        "@fast_args(cache=True)\ndef parity(n): return even(n)\n"
    )
    for _ in range(2):
        done = run_python(program, str(module))
        assert done.stdout.split() == ["False", "True"] and "calls itself through another function" in done.stderr


NAMESAKES = r"""
import math
def calling(factor):
    namespace = {"math": math, "numba": numba, "__name__": __name__}
    steps = "".join(f"    if x[0] > {i}: s += math.sin(x[0] * {i})\n" for i in range(2, 60))
    exec(f'''
def helper(x):
    s = x[0] * {factor}
{steps}
    if s > 100:
        raise ValueError("{factor}", s)
    y = x.astype("f{4 if factor == '2' else 8}")
    with numba.objmode(seen="float64"):
        seen = y[1]
    return s + seen - 1
''', namespace)
    helper = numba.njit(namespace["helper"])
    return fast_args(cache=True)(lambda x: helper(x))
"""


@pytest.mark.slow
def test_functions_of_one_name_that_kernels_call(module):
    """They are too long to be part of the kernels' own code, and Numba gives them, and their objects, the same symbols."""
    (module / "module_of_the_test.py").write_text(MODULE + NAMESAKES)
    code = """
    kernels = [module.calling(factor) for factor in sys.argv[2]]
    for kernel in kernels:
        print(kernel(x), *kernel.stats.cache_hits.values())
        try:
            kernel(x * 1000)
        except ValueError as raised:
            print(raised.args[0])
    """
    for factor in "624":  # the first compiles more, so that its functions have other numbers than those of the others
        assert run_python(RUN + code, str(module), factor).stdout.split() == [f"{factor}.0", factor]
    assert run_python(RUN + code, str(module), "242").stdout.split() == ["2.0", "1", "2", "4.0", "1", "4", "2.0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("decorate", ["fast_args(cache=True)", "fast_args"])
def test_functions_that_others_call_after_a_kernel(module, decorate):
    """LLVM changes what a function takes that nobody else can call; the linker does not ask whether anybody else can."""
    with (module / "module_of_the_test.py").open("a") as file:
        kernel = f"    @{decorate}\n    def kernel(x, y): helper(x, y), helper(x[:0], y)\n"
        file.write(f"\n\ndef calling(helper):\n{kernel}    return kernel\n")
    code = """
    helper = module.scaled_at_length(2.0, numba.njit)
    kernel = module.calling(helper)
    for _ in range(3):
        print(called(kernel))
    @numba.njit
    def others(x, y, z):
        helper(x, y), helper(x, z)
    z = np.zeros(3)
    print(called(lambda x, y: others(x, y, z)), z[0], called(kernel))
    """
    assert run(module, code) == ["2.0"] * 6


@needs_users
def test_kernels_are_not_kept_where_others_can_write(module):
    folder = module / "__pycache__" / "fastexchange"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = run_python(RUN + "\n    print(called(module.scaled(2.0, fast_args(cache=True))))", str(module), NUMBA_CACHE_DIR="")
    assert done.stdout.split() == ["2.0"] and "other users can write" in done.stderr
    assert not list(folder.iterdir())


def test_a_signature_of_another_type_of_the_same_name(folder):
    """Types are compared, not only their names."""
    from fastexchange.calls.kernel_cache import Entries

    class Named:
        def __init__(self, number):
            self.number = number

        def __repr__(self):
            return "Named"

        def __eq__(self, other):
            return self.number == other.number

        def __hash__(self):
            return 0

        def __reduce__(self):
            return Number, (self.number,)

    entries = Entries(folder, "name", only, lambda: ())
    assert entries.load(((), Named(1))) is None
    entries.save(((), Named(1)), "one")
    assert entries.load(((), Named(1))) == "one" and entries.load(((), Named(2))) is None
    entries.flush()
    assert entries.load(((), Named(1))) is None
    for number in (1, 2):
        entries.release(((), Named(number)))


def test_what_changed_while_code_was_compiled_is_not_kept(folder):
    from fastexchange.calls.kernel_cache import Entries

    depends_on = ["before"]
    entries = Entries(folder, "name", only, lambda: tuple(depends_on))
    for changed in ("after", "before"):
        assert entries.load(((), 1)) is None
        depends_on.append(changed)
        entries.save(((), 1), "code")
    assert entries.load(((), 1)) is None
    entries.save(((), 1), "code")
    assert entries.load(((), 1)) == "code"


class Number:
    """What a ``Named`` is when it has been on disk."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return self.number == other.number


def test_versions_share_a_folder(folder, monkeypatch):
    """Each finds its own entries, and nobody else's."""
    cache = type(code_cache)()
    monkeypatch.setattr(cache, "folders", [folder], raising=False)
    monkeypatch.setattr("fastexchange.ground.cfunction.numba.__version__", "0.0.1")
    old = cache._full_key(("raise",), "fastexchange.dispatch.boxing")
    monkeypatch.undo()
    new = cache._full_key(("raise",), "fastexchange.dispatch.boxing")
    assert old != new
    folder.save("raise", old, "old"), folder.save("raise", new, "new")
    assert folder.load("raise", old) == "old" and folder.load("raise", new) == "new"


TYPES = """
import collections, enum, sys
import numba
from fastexchange import fast_args

reverse = sys.argv[2] == "reversed"
Point = collections.namedtuple("Point", ["b", "a"] if reverse else ["a", "b"])
Colour = enum.Enum("Colour", {"red": 2 if reverse else 1})

@numba.experimental.jitclass([("number", numba.float64)])
class Holder:
    def __init__(self, number):
        self.number = number
    def get(self):
        return self.number * (-1 if reverse else 1)

@fast_args(cache=True)
def difference(x, p):
    return p.a - p.b + x[0]

@fast_args(cache=True)
def value(x, colour):
    return colour.value + x[0]

@fast_args(cache=True)
def held(x, holder):
    return holder.get() + x[0]
"""


@pytest.mark.slow
def test_types_of_users_mean_what_they_mean_in_this_process(tmp_path):
    """A named tuple with other fields, an enumeration with other values, a jitclass with another method: by the same names."""
    (tmp_path / "types_of_the_test.py").write_text(TYPES)
    code = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from types_of_the_test import *
    x = np.zeros(3)
    print(difference(x, Point(a=5, b=2)), value(x, Colour.red), held(x, Holder(7.0)))
    print(*[sum(each.stats.cache_hits.values()) for each in (difference, value, held)])
    """
    for hits in ("0 0 0", "1 1 0"):
        assert run_python(code, str(tmp_path), "").stdout.splitlines() == ["3.0 1.0 7.0", hits]
        assert run_python(code, str(tmp_path), "reversed").stdout.splitlines() == ["3.0 2.0 -7.0", hits]


EXTENSION = """
    import sys
    import numba, numpy as np
    from numba import types
    from numba.extending import NativeValue, box, models, register_model, type_callable, lower_builtin, typeof_impl
    from fastexchange import fast_args
    from fastexchange.ground import cfunction

    class Money(types.Number):
        def __init__(self):
            super().__init__(name="Money")

    money = Money()
    register_model(Money)(models.FloatModel if hasattr(models, "FloatModel") else models.PrimitiveModel)

    def as_money(x):
        pass

    @type_callable(as_money)
    def typed(context):
        return lambda x: money

    @register_model(Money)
    class Model(models.PrimitiveModel):
        def __init__(self, manager, of):
            super().__init__(manager, of, models.ir.DoubleType())

    @lower_builtin(as_money, types.float64)
    def lowered(context, builder, signature, values):
        return values[0]

    @box(Money)
    def boxed(of, value, c):
        return c.pyapi.float_from_double(c.builder.fmul(value, value.type(float(sys.argv[1]))))

    @fast_args
    def paid(x):
        return as_money(x[0])

    print(paid(np.ones(3)), paid(np.ones(3)))
    """


@pytest.mark.slow
def test_results_of_types_of_users_are_made_by_this_process():
    """Types of one name, in two programs, with another way to Python each."""
    for factor in ("2.0", "3.0"):
        assert run_python(EXTENSION, factor).stdout.split() == [factor] * 2


def test_settings_of_numba_are_part_of_a_kernels_key(module):
    """With bounds checked, what was compiled without is not good enough."""
    code = """
    for numba.config.BOUNDSCHECK, options in ((None, {"boundscheck": True}), (None, {}), (1, {}), (None, {})):
        kernel = module.by_text("x[7 + len(x)]", **options)
        try:
            called(kernel)
            print(*kernel.stats.cache_hits.values())
        except IndexError:
            print("checked")
    """
    assert run(module, code) == ["checked", "checked", "1"]


def test_a_kernel_with_a_cache_forgets_its_entries(tmp_path, monkeypatch):
    """``recompile`` is Numba's: it flushes the cache and compiles anew."""
    (tmp_path / "module_of_the_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_the_test

    kernel = module_of_the_test.scaled(2.0, fast_args(cache=True))
    y = np.zeros(3)
    kernel(np.ones(3), y)
    before = set(tmp_path.rglob("*.entry"))
    kernel.recompile()
    kernel(np.ones(3), y)
    assert before and y.tolist() == [2.0] * 3 and len(set(tmp_path.rglob("*.entry"))) == len(before)
