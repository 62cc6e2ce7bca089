"""The package's own machine code on disk: importing does nothing, nothing is believed unread."""

import ctypes
import sys
import threading
import zlib
from typing import Any

import numba
import numpy as np
import pytest
from interpreter import run_python
from numba import types

from fastexchange.calls.carried_code import _InMemory
from fastexchange.ground.cfunction import _Announced, cfunction
from fastexchange.ground.disk_cache import CacheFolder, digest
from fastexchange.ground.native import native


def test_nothing_is_compiled_or_loaded_at_import(tmp_path):
    done = run_python(
        """
        import sys
        import fastexchange
        from fastexchange import FastKernel, fast_args
        assert not {"torch", "tvm_ffi", "cffi"} & {*sys.modules}, sys.modules
        from fastexchange.ground.numba_extensions import conversions, extensions
        assert (extensions(), conversions(), "numba.np.arraymath" in sys.modules) == ({}, [], False)
        cache = getattr(sys.modules.get("fastexchange.ground.cfunction"), "code_cache", None)
        print((cache.misses, cache.hits) if cache else (0, 0))
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert done.stdout == "(0, 0)\n" and not list(tmp_path.iterdir())


UNPICKLED: list[str] = []


def note(what: str) -> None:
    UNPICKLED.append(what)


class Noted:
    def __reduce__(self):
        return note, ("value",)


@pytest.mark.parametrize("kept_in", ["folder", "memory"])
def test_nothing_is_unpickled_before_its_key_and_checksum_are_right(kept_in, tmp_path):
    folder: Any = CacheFolder(tmp_path / "folder") if kept_in == "folder" else _InMemory()
    assert all(folder.save("name", key, Noted()) for key in ("one", "other", "third"))
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


def test_numba_disable_jit_is_not_about_our_own_code(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)

    @native
    def is_close(number):
        return np.isclose(number, 4.0)  # Numba's own, in Python, to be compiled with it

    def asked(number):
        return types.intp(is_close(types.float64(number)))

    called = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(cfunction(types.intp, types.intp)(asked).address)
    assert [called(3), called(4)] == [0, 1] and numba.config.DISABLE_JIT == 1


def test_where_it_cannot_be_announced_that_native_code_is_compiled(monkeypatch, capsys):
    """Python 3.12 starts no thread at shutdown, when ``atexit`` may call a kernel first; ``print(file=None)`` is to stdout."""

    def start(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    announced = _Announced()
    for _ in range(2):
        with announced:
            pass
    monkeypatch.setattr(sys, "stderr", None)
    _Announced()._tell()
    assert capsys.readouterr().out == ""
