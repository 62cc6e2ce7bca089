"""Machine code on disk: entries that prove what they are, or are not believed.

One entry is one file, named by a digest of its whole key. The file holds the key and a checksum, and is written to a
temporary name and renamed, so that a reader sees all of it or nothing. There is no index: processes that write at the same
time, different versions that share a folder, a disk that fills up and a process that is killed cannot mix entries up.

Code is loaded only where no other user could have written it: folder and file belong to this user or to root, and neither
the group nor others can write to them. What fails any check is compiled anew.
"""

import contextlib
import hashlib
import os
import pickle
import re
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .numba_internals import dumps

__all__ = ["FOLDER", "CacheContents", "CacheFolder", "user_cache"]

FOLDER = "fastexchange"
"""What the folders with entries are called, in whichever directory they lie."""

MAX_AGE = 90 * 86400.0
"""Seconds after which an entry that no process has loaded is removed."""
MAX_ENTRIES, MAX_BYTES = 4000, 1 << 30
"""A folder with more than that loses the entries that have not been loaded for longest."""
_TOUCH_AFTER = 86400.0  # so seldom is it noted that an entry was loaded
_TEMPORARY_AGE = 3600.0  # of a file that a process began to write and never renamed

_MAGIC = b"fastexchange entry 1\n"
_SUFFIX, _TEMPORARY = ".entry", ".tmp"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Absent on Windows: links, and pipes that would block. There, who owns a file cannot be told either.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ |= getattr(os, "O_BINARY", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class NotBelieved(Exception):
    """A file that is not the entry which its name promises. The message says why."""


class CacheContents(NamedTuple):
    """What a :class:`CacheFolder` holds."""

    entries: int
    """How many entries are whole."""
    size: int
    """Bytes of all of its files."""
    refused: list[str]
    """Files that are not believed, and why."""


def user_cache() -> Path:
    """Where this platform keeps a user's caches."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base)


def _why_not_trusted(status: os.stat_result) -> str:
    """Why a file or folder may have been written by another user; nothing if it cannot."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


class CacheFolder:
    """The entries in one folder. Nothing here raises OSError, but for :meth:`contents`: what cannot be read is not there."""

    def __init__(self, path: Path):
        self.path = path
        self._is_pruned = False

    @property
    def why_not_trusted(self) -> str:
        """Why no entry of this folder is believed; nothing if entries are, or if there is no folder yet."""
        try:
            return _why_not_trusted(os.stat(self.path))
        except OSError:
            return ""

    @property
    def is_writable(self) -> bool:
        """Whether entries can be kept here, in a folder that is made where there is none yet."""
        existing = self.path
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK) and not self.why_not_trusted

    def load(self, name: str, key: str) -> Any:
        """The value of the entry with this key, None if there is none that is believed. `name`: for people."""
        path = self._path(name, key)
        try:
            if self.why_not_trusted:
                return None
            stored, value = _read(path, MAX_BYTES)
            if stored != key:
                raise NotBelieved("it is another entry")
        except (OSError, NotBelieved):
            return None
        with contextlib.suppress(OSError):  # in a folder of root's, say
            if abs(time.time() - os.stat(path).st_mtime) > _TOUCH_AFTER:
                os.utime(path)
        return value

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry. Returns whether that went well; if not, what was there before still is."""
        try:
            data = _framed(key, value)
        except Exception:  # whatever pickling raises: then the entry is this process's only
            return False
        path = self._path(name, key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:16]}{_TEMPORARY}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o755, exist_ok=True)
            if self.why_not_trusted:
                return False
            file = os.open(temporary, _CREATE, 0o644)
            try:
                with open(file, "wb") as stream:  # closing it may fail, too: a network's disk writes then
                    stream.write(data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError:
            return False
        if not self._is_pruned:
            self._is_pruned = True
            self.prune()
        return True

    def prune(self) -> None:
        """Remove what no process has loaded for long, what is too much, and what was never finished."""
        now = time.time()
        entries = []
        for path, status in self._files():
            age = now - status.st_mtime
            if path.name.endswith(_TEMPORARY):
                if abs(age) > _TEMPORARY_AGE:
                    _remove(path)
            elif age > MAX_AGE:
                _remove(path)
            else:
                if age < -_TOUCH_AFTER:  # a clock was wrong, then or now
                    with contextlib.suppress(OSError):
                        os.utime(path)
                entries.append((age, status.st_size, path))
        size = 0
        for count, (_, bytes_, path) in enumerate(sorted(entries)):
            size += bytes_
            if count >= MAX_ENTRIES or size > MAX_BYTES:
                _remove(path)

    def contents(self) -> CacheContents:
        """What is here; each entry is read. Raises OSError for a folder that exists and cannot be looked at."""
        if not self.path.exists():
            return CacheContents(0, 0, [])
        os.listdir(self.path)
        entries = size = 0
        refused = []
        for path, status in self._files():
            size += status.st_size
            if path.name.endswith(_TEMPORARY):
                continue
            try:
                key, _ = _read(path, MAX_BYTES, is_value_wanted=False)
                if not path.name.endswith(_digest(key) + _SUFFIX):
                    raise NotBelieved("it is another entry")
                entries += 1
            except (OSError, NotBelieved) as error:
                refused.append(f"{path.name}: {error}")
        return CacheContents(entries, size, refused)

    def clear(self, name: str) -> None:
        """Remove all entries with this name."""
        for path, _ in self._files():
            if path.name[: -len(_SUFFIX) - 2 * _DIGEST_BYTES - 1] == _shown(name):
                _remove(path)

    def _path(self, name: str, key: str) -> Path:
        return self.path / f"{_shown(name)}-{_digest(key)}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """What is this module's in the folder."""
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return
        for name in names:
            if name.endswith((_SUFFIX, _TEMPORARY)):
                with contextlib.suppress(OSError):
                    yield self.path / name, os.lstat(self.path / name)


def _shown(name: str) -> str:
    """A name as a file's name has it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:80]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _framed(key: str, value: Any) -> bytes:
    """The bytes of an entry's file: what it is, a checksum of what follows, the length of the key, the key, the value."""
    encoded = key.encode("utf-8", "surrogatepass")
    rest = len(encoded).to_bytes(8, "little") + encoded + dumps(value)
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def _read(path: Path, limit: int, is_value_wanted: bool = True) -> tuple[str, Any]:
    """The key and the value in an entry's file. Raises OSError or NotBelieved."""
    file = os.open(path, _READ)
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise NotBelieved("it is no regular file")
        if why := _why_not_trusted(status):
            raise NotBelieved(why)
        if status.st_size > limit:
            raise NotBelieved(f"it has {status.st_size} bytes")
        data = stream.read()
    start = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise NotBelieved("it does not begin as an entry does")
    rest = memoryview(data)[start:]
    if hashlib.sha256(rest).digest() != data[len(_MAGIC) : start]:
        raise NotBelieved("its checksum is wrong: it is damaged, or not whole")
    length = int.from_bytes(rest[:8], "little")
    key = bytes(rest[8 : 8 + length]).decode("utf-8", "surrogatepass")
    if not is_value_wanted:
        return key, None
    try:
        return key, pickle.loads(rest[8 + length :])
    except Exception as error:  # whatever unpickling raises: a class that is no longer there, say
        raise NotBelieved(f"its value cannot be made again: {type(error).__name__}: {error}") from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process has done it, or it is not ours to remove
        os.unlink(path)
