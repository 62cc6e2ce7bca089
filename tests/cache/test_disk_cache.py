"""Entries on disk prove what they are: whatever happens to the files, nobody gets another function's code."""

import ctypes
import functools
import itertools
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import numba
import numpy as np
import pytest
from children import in_fork
from forked import fork_python, needs_fork
from line_events import traced
from numba import types

from fastexchange.calls.carried_code import _InMemory
from fastexchange.ground import cfunction, disk_cache
from fastexchange.ground.disk_cache import CacheFolder, digest
from fastexchange.ground.native import native
from fastexchange.ground.sources import ROOT

VALUE = {"code": b"machine code" * 20, "symbol": "walk"}


@pytest.fixture
def entry(folder) -> Path:
    """The file of an entry with the key "key", whose value is :data:`VALUE`."""
    assert folder.save("name", "key", VALUE)
    return only(folder.path)


def only(path: Path) -> Path:
    (file,) = path.iterdir()
    return file


# ---- one entry, one file -----------------------------------------------------------------------------------------------
def test_entries_are_told_apart_by_their_whole_key_which_is_any_text(folder):
    long = [(f"same name{'n' * 300}", f"{'long ' * 20_000}{number}") for number in range(5)]
    keys = [("f", ""), ("<lambda>", "\n"), ("a/../../b", "ключ"), ("é", "\udc80 not a character"), *long]
    for number, key in enumerate(keys):
        assert folder.load(*key) is None and folder.save(*key, number)
    assert [folder.load(*key) for key in keys] == list(range(9)) and all(path.is_file() for path in folder.path.iterdir())
    assert folder.save(*keys[-2], "new") and folder.load(*keys[-2]) == "new"
    assert folder.contents() == (9, sum(path.stat().st_size for path in folder.path.iterdir()), [])


def test_what_cannot_be_pickled_or_whose_name_has_gone(folder, monkeypatch):
    assert not folder.save("name", "key", (each for each in ()))
    assert not folder.path.exists() or not list(folder.path.iterdir())
    assert folder.save("name", "key", stat.S_ISREG)
    monkeypatch.delattr("_stat.S_ISREG")
    assert folder.load("name", "key") is None
    monkeypatch.undo()
    assert folder.load("name", "key") is stat.S_ISREG


def test_the_keys_of_native_code_have_numbas_version(monkeypatch):
    keys = set()
    for version in ("0.0.1", "0.0.2"):
        monkeypatch.setattr(numba, "__version__", version)
        keys.add(cfunction.code_cache._full_key(("raise",), "fastexchange.dispatch.boxing"))
    assert len(keys) == 2


# ---- damage ------------------------------------------------------------------------------------------------------------
def test_damage_is_noticed(folder, entry):
    whole = entry.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:length] for length in range(len(whole))] + [whole + more for more in (b"\0", b"more", whole)]
    for data in damaged:
        entry.write_bytes(data)
        assert folder.load("name", "key") is None, data
    assert folder.contents().entries == 0 and "checksum" in folder.contents().refused[0]
    entry.write_bytes(whole)
    assert folder.load("name", "key") == VALUE
    entry.write_bytes(damaged[0])
    assert folder.save("name", "key", VALUE) and folder.load("name", "key") == VALUE


def test_files_that_changed_places_and_a_folder_that_vanishes(folder):
    for key in "ab":
        folder.save("name", key, key * 9)
    one, other = sorted(folder.path.iterdir())
    aside = folder.path / "aside"
    one.rename(aside), other.rename(one), aside.rename(other)
    assert folder.load("name", "a") is folder.load("name", "b") is None
    assert folder.contents().entries == 0 and ["another entry" in why for why in folder.contents().refused] == [True] * 2
    assert folder.save("name", "a", "aaa") and folder.load("name", "a") == "aaa"
    shutil.rmtree(folder.path)
    assert folder.load("name", "a") is None and folder.contents() == (0, 0, [])
    folder.prune()
    assert folder.save("name", "a", VALUE) and folder.load("name", "a") == VALUE


# ---- processes that end at any moment, and at the same time ------------------------------------------------------------
def test_a_cache_directory_that_cannot_be_written(tmp_path, monkeypatch):
    """Under a plain file no directory can be made, not even by root: code is kept beside the package, or else not at all."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setattr(cfunction.config, "CACHE_DIR", str(blocker / "cache"))
    assert cfunction.CodeCache().directory == str(ROOT / "__pycache__" / "fastexchange")
    monkeypatch.setattr(cfunction, "ROOT", blocker)
    monkeypatch.setattr(cfunction, "user_cache", lambda: blocker)
    nowhere = cfunction.CodeCache()
    assert nowhere.directory is None and not nowhere.is_kept and nowhere.why_not_kept
    assert blocker.read_text() == ""


@needs_fork
@pytest.mark.parametrize(("before", "first"), [(None, 0), ("old", 2)])
def test_a_process_killed_at_any_line_of_saving(folder, before, first):
    """What was there before is there still, or the new entry is whole. Each of the two looks at every fourth line."""

    def save_until(line: int) -> None:
        lines = itertools.count()
        note = lambda place: next(lines) == line and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        traced(disk_cache.__file__, "line", note, lambda: CacheFolder(folder.path).save("name", "key", "new"))

    for line in range(first, 200, 4):
        assert before is None or folder.save("name", "key", before)
        was_killed = in_fork(functools.partial(save_until, line)) == -signal.SIGKILL
        found = CacheFolder(folder.path).load("name", "key")
        assert found in ("new", before)
        if not was_killed:
            break
        for file in folder.path.glob("*"):
            if before is None or file.suffix == ".tmp":
                file.unlink()
    assert not was_killed and found == "new" and line > 20


@needs_fork
@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("limit", [0, 60, 250])
def test_a_disk_that_is_full(folder, limit, is_killed):
    """By the limit on a file's size: the writer is told, or killed in the middle."""
    import resource

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
        return CacheFolder(folder.path).save("name", "key", VALUE)

    assert in_fork(save) == -signal.SIGXFSZ * is_killed
    assert folder.load("name", "key") is None
    assert [path.suffix for path in folder.path.iterdir()] == [".tmp"] * is_killed
    assert folder.save("name", "key", VALUE) and folder.load("name", "key") == VALUE


# ---- one type's name in two programs -------------------------------------------------------------------------------
MONEY = """
    import sys
    import numpy as np
    from numba import types
    from numba.extending import box, intrinsic, models, register_model
    from fastexchange import fast_args

    class Money(types.Opaque): pass
    register_model(Money)(models.OpaqueModel)
    amount = int(sys.argv[1])
    box(Money)(lambda typ, value, c: c.pyapi.long_from_longlong(c.context.get_constant(types.int64, amount)))
    money = intrinsic(lambda context, x: (Money("Money")(x), lambda context, *_: context.get_dummy_value()))
    paid = fast_args(lambda x: money(x[0]))
    print(paid(np.ones(3)), paid(np.ones(3)), paid.counts().fast)
"""


def test_results_of_types_of_users_are_made_by_this_process():
    for amount in "23":
        assert fork_python(MONEY, amount).stdout.split() == [amount, amount, "1"]


# ---- who may have written it -------------------------------------------------------------------------------------------
needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this platform does not tell who owns a file")
needs_root = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give files away")


@needs_users
def test_files_are_written_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        folder.save("name", "key", VALUE)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (only(folder.path), folder.path)] == [0o644, 0o755]


@needs_users
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize(("how", "why"), [
    pytest.param(0o020, "other users can write", id="a group can write"),
    pytest.param(0o002, "other users can write", id="everybody can write"),
    pytest.param("owner", "belongs to user 12345, not to user 0", marks=needs_root, id="another user's"),
])  # fmt: skip
def test_what_others_may_have_written_is_not_believed(folder, entry, what, how, why):
    path = entry if what == "file" else folder.path
    os.chown(path, 12345, -1) if how == "owner" else path.chmod(path.stat().st_mode | how)
    assert folder.load("name", "key") is None
    if what == "file":
        assert why in folder.contents().refused[0] and folder.save("name", "key", VALUE)
    else:
        assert why in folder.why_not_trusted and not folder.is_writable and not folder.save("name", "key", VALUE)
        path.chmod(0o755), os.chown(path, os.geteuid(), -1)
    assert folder.load("name", "key") == VALUE


@needs_root
@needs_fork
def test_root_compiles_for_all():
    """Others read what root has kept, keep theirs elsewhere, and root believes nothing of that."""
    # A folder of the test's own: other test runs that start meanwhile take others' access to pytest's away.
    with tempfile.TemporaryDirectory() as reachable:
        folder, theirs = CacheFolder(Path(reachable, "cache")), CacheFolder(Path(reachable, "theirs", "cache"))
        assert folder.save("name", "key", VALUE)
        Path(reachable).chmod(0o755)
        theirs.path.parent.mkdir()
        theirs.path.parent.chmod(0o777)

        def another_user():
            os.setgid(12345), os.setuid(12345)
            assert folder.load("name", "key") == VALUE and not folder.is_writable and not folder.save("name", "b", 1)
            assert theirs.is_writable and theirs.save("name", "key", "theirs") and theirs.load("name", "key") == "theirs"

        assert in_fork(another_user) == 0
        assert CacheFolder(theirs.path).load("name", "key") is None


@needs_users
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "folder is a link"])
def test_what_is_no_file_or_no_folder_is_not_believed(folder, entry, tmp_path, kind):
    """Whoever can write to the directory above could make a link, to any folder of this user's."""
    aside = tmp_path / "aside"
    (folder.path if "folder" in kind else entry).rename(aside)
    {
        "link": lambda: entry.symlink_to(aside), "pipe": lambda: os.mkfifo(entry), "directory": entry.mkdir,
        "folder is a link": lambda: folder.path.symlink_to(aside),
    }[kind]()  # fmt: skip
    assert folder.load("name", "key") is None
    assert folder.save("name", "key", VALUE) == (kind in ("link", "pipe"))
    if "folder" in kind:
        assert folder.why_not_trusted == "it is a link" and not folder.is_writable
        folder.clear("name")
        assert list(aside.iterdir()) == [aside / entry.name]


@needs_users
@pytest.mark.parametrize("act", [lambda folder: folder.load("name", "key"), lambda folder: folder.save("name", "key", "late")])
def test_a_folder_that_is_exchanged_after_the_look_at_it(folder, entry, tmp_path, monkeypatch, act):
    other, looked_at = CacheFolder(tmp_path / "other"), disk_cache._why_not_trusted
    assert other.save("name", "key", "other")

    def look(status):
        if stat.S_ISDIR(status.st_mode) and not (tmp_path / "aside").exists():
            folder.path.rename(tmp_path / "aside")
            other.path.rename(folder.path)
        return looked_at(status)

    with monkeypatch.context() as patched:
        patched.setattr(disk_cache, "_why_not_trusted", look)
        found = act(folder)
    assert found in (VALUE, True) and folder.load("name", "key") == "other"
    assert CacheFolder(tmp_path / "aside").load("name", "key") == (VALUE if found == VALUE else "late")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="these are the rules of the others")
def test_where_a_users_caches_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert disk_cache.user_cache() == tmp_path / ".cache"
    for wanted, expected in (("", ".cache"), ("not/absolute", ".cache"), (str(tmp_path / "caches"), "caches")):
        monkeypatch.setenv("XDG_CACHE_HOME", wanted)
        assert disk_cache.user_cache() == tmp_path / expected
    monkeypatch.delenv("XDG_CACHE_HOME"), monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom nobody knows
    assert disk_cache.user_cache() is None


# ---- it does not grow for ever -----------------------------------------------------------------------------------------
def make_older(path: Path, days: float) -> None:
    os.utime(path, (time.time() - 86400 * days,) * 2)


def test_what_nobody_loads_is_removed(folder):
    ages = {"new": 1, "old": 89, "older": 91, "of a wrong clock": -400, "loaded": 80}
    for name, days in ages.items():
        folder.save(name, name, name)
        make_older(next(folder.path.glob(f"{name.replace(' ', '_')}-*")), days)
    assert folder.load("loaded", "loaded") == "loaded"
    assert abs(next(folder.path.glob("loaded-*")).stat().st_mtime - time.time()) < 3600
    for days, name in ((0, "x.entry.1.tmp"), (1, "y.entry.2.tmp"), (9999, "notes.txt")):
        (folder.path / name).write_bytes(b"begun, or a stranger's")
        make_older(folder.path / name, days)
    folder.prune()
    assert [name for name in ages if folder.load(name, name) is None] == ["older"]
    assert {path.name for path in folder.path.iterdir() if path.suffix != ".entry"} == {"x.entry.1.tmp", "notes.txt"}
    assert all(abs(path.stat().st_mtime - time.time()) < 90 * 86400 for path in folder.path.glob("*.entry"))


def test_what_is_beyond_the_limit_is_not_read(folder, entry, monkeypatch):
    size = entry.stat().st_size
    monkeypatch.setattr(disk_cache, "MAX_BYTES", size - 1)
    assert folder.load("name", "key") is None and folder.contents().refused == [f"{entry.name}: it has {size} bytes"]


@pytest.mark.parametrize("limit", ["MAX_ENTRIES", "MAX_BYTES"])
def test_the_oldest_go_first(folder, monkeypatch, limit):
    for number in range(10):
        folder.save("name", str(number), number)
        make_older(next(folder.path.glob(f"*{digest(str(number))}*")), number / 1440)
    size = max(path.stat().st_size for path in folder.path.iterdir())
    monkeypatch.setattr(disk_cache, limit, 4 if limit == "MAX_ENTRIES" else 4 * size + size // 2)
    CacheFolder(folder.path).prune()
    assert [folder.load("name", str(number)) for number in range(10)] == [0, 1, 2, 3] + [None] * 6


def test_functions_of_a_library_are_in_one_order_whatever_is_imported_first():
    """Machine code on disk has them in that order: a process with another would call one for another."""

    def keys(names: str) -> list[tuple]:
        library = cfunction.Library()
        for name in names:
            function = FunctionType((lambda: 0).__code__, {}, name)
            function.__qualname__, function.__module__ = name, __name__
            cfunction.cfunction(types.intp, together=library)(function)
        return [library[-1].library_key, *(each.key for each in library.complete())]

    assert keys("abc") == keys("cab") and len({*keys("abc")}) == 4


def test_a_function_that_comes_after_its_modules_library_has_one_of_its_own():
    """Those that are loaded keep their addresses."""
    module = {"types": types, "cfunction": cfunction.cfunction, "__name__": "its_module"}
    define = "@cfunction(types.intp, types.intp)\ndef {0}(x):\n    return x + {1}"
    exec("\n".join([define.format("one", 1), define.format("two", 2)]), module)
    before = [module[name].address for name in ("one", "two")]
    exec(define.format("three", 3), module)
    together = [[each.__name__ for each in module[name]._together] for name in ("one", "two", "three")]
    assert together == [["one", "two"], ["one", "two"], ["three"]]
    called = [ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(module[name].address)(4) for name in ("one", "two", "three")]
    assert called == [5, 6, 7] and [module[name].address for name in ("one", "two")] == before


# ---- what is in it, and how it is made ------------------------------------------------------------------------------
UNPICKLED: list[str] = []


def unpickled() -> None:
    UNPICKLED.append("value")


class Noted:
    __reduce__ = lambda self: (unpickled, ())  # noqa: E731


@pytest.mark.parametrize("kept_in", ["folder", "memory"])
def test_nothing_is_unpickled_before_its_key_and_checksum_are_right(kept_in, tmp_path):
    folder: Any = CacheFolder(tmp_path / "folder") if kept_in == "folder" else _InMemory()
    assert all(folder.save("name", key, Noted()) for key in ("one", "other", "third"))
    if kept_in == "folder":
        one, other, third = (tmp_path / "folder" / f"name-{digest(key)}.entry" for key in ("one", "other", "third"))
        one.replace(other)
        third.write_bytes(third.read_bytes()[:-1] + b"!")
    else:
        folder.entries[digest("other")] = folder.entries[digest("one")]
        third = zlib.decompress(folder.entries[digest("third")])
        folder.entries[digest("third")] = zlib.compress(third[:-1] + b"!")
        assert sorted(folder.keys().values()) == ["", "one", "one"]
    UNPICKLED.clear()
    assert folder.load("name", "other") is None and folder.load("name", "third") is None and not UNPICKLED
    assert folder.save("name", "one", Noted()) and folder.load("name", "one") is None and UNPICKLED == ["value"]


def test_numba_disable_jit_is_not_about_our_own_code(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)

    @native
    def is_close(number):
        return np.isclose(number, 4.0)  # Numba's own, in Python, to be compiled with it

    def asked(number):
        return types.intp(is_close(types.float64(number)))

    called = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(cfunction.cfunction(types.intp, types.intp)(asked).address)
    assert [called(3), called(4)] == [0, 1] and numba.config.DISABLE_JIT == 1


def test_where_it_cannot_be_announced_that_native_code_is_compiled(monkeypatch, capsys):
    """Python 3.12 starts no thread at shutdown, when ``atexit`` may call a kernel first; ``print(file=None)`` is to stdout."""

    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't create new thread at shutdown")))
    announced = cfunction._Announced()
    for _ in range(2):
        with announced:
            pass
    monkeypatch.setattr(sys, "stderr", None)
    cfunction._Announced()._tell()
    assert capsys.readouterr().out == ""
