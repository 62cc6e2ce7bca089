"""Machine code on disk: entries that prove what they are, or are not believed.

One entry is one file, named by a digest of its whole key. The file holds the key and a checksum, and is written to a
temporary name and renamed, so that a reader sees all of it or nothing. There is no index: processes that write at the same
time, different versions that share a folder, a disk that fills up and a process that is killed cannot mix entries up.

Code is loaded only where no other user could have written it: folder and file belong to this user or to root, neither the
group nor others can write to them, and neither is a link. The folder is looked at and held open first, and names are looked up
in what is held, so that nobody puts another one in between. What fails any check is compiled anew.
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


def user_cache() -> Path | None:
    """Where this platform keeps a user's caches; None for a user without a home."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # which that variable's specification says to ignore
            base = os.path.expanduser("~/.cache")
    return Path(base) if os.path.isabs(base) else None


def _why_not_trusted(status: os.stat_result) -> str:
    """Why a file or folder may have been written by another user; nothing if it cannot."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if stat.S_ISLNK(status.st_mode):
        return "it is a link"
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
            return _why_not_trusted(os.lstat(self.path))
        except OSError:
            return ""

    @property
    def is_writable(self) -> bool:
        """Whether entries can be kept here, in a folder that is made where there is none yet."""
        existing = self.path
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK) and not self.why_not_trusted

    @contextlib.contextmanager
    def _held(self, is_trusted: bool = True) -> Iterator["_Held"]:
        """The folder, as it is now. Raises OSError, and NotBelieved if it must be trusted and is not."""
        handle = os.open(self.path, _READ | os.O_DIRECTORY) if os.open in os.supports_dir_fd else None
        try:
            why = _why_not_trusted(os.stat(self.path if handle is None else handle))
            if is_trusted and why:
                raise NotBelieved(why)
            yield _Held(self.path, handle)
        finally:
            if handle is not None:
                os.close(handle)

    def load(self, name: str, key: str) -> Any:
        """The value of the entry with this key, None if there is none that is believed. `name`: for people."""
        file = _file_of(name, key)
        try:
            with self._held() as held:
                stored, value = held.read(file)
                if stored != key:
                    raise NotBelieved("it is another entry")
                with contextlib.suppress(OSError):  # in a folder of root's, say
                    held.touch(file, _TOUCH_AFTER)
                return value
        except (OSError, NotBelieved):
            return None

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry. Returns whether that went well; if not, what was there before still is."""
        try:
            data = _framed(key, value)
        except Exception:  # whatever pickling raises: then the entry is this process's only
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o755, exist_ok=True)
            with self._held() as held:
                held.write(_file_of(name, key), data)
        except (OSError, NotBelieved):
            return False
        if not self._is_pruned:
            self._is_pruned = True
            self.prune()
        return True

    def prune(self) -> None:
        """Remove what no process has loaded for long, what is too much, and what was never finished."""
        now = time.time()
        entries = []
        with contextlib.suppress(OSError, NotBelieved), self._held() as held:
            for file, status in held.files():
                age = now - status.st_mtime
                if file.endswith(_TEMPORARY):
                    if abs(age) > _TEMPORARY_AGE:
                        held.remove(file)
                elif age > MAX_AGE:
                    held.remove(file)
                else:
                    if age < -_TOUCH_AFTER:  # a clock was wrong, then or now
                        with contextlib.suppress(OSError):
                            held.touch(file)
                    entries.append((age, status.st_size, file))
            size = 0
            for count, (_, bytes_, file) in enumerate(sorted(entries)):
                size += bytes_
                if count >= MAX_ENTRIES or size > MAX_BYTES:
                    held.remove(file)

    def contents(self) -> CacheContents:
        """What is here; each entry is read. Raises OSError for a folder that exists and cannot be looked at."""
        entries = size = 0
        refused = []
        if not os.path.lexists(self.path):
            return CacheContents(0, 0, [])
        with self._held(is_trusted=False) as held:
            for file, status in held.files():
                size += status.st_size
                if file.endswith(_TEMPORARY):
                    continue
                try:
                    key, _ = held.read(file, is_value_wanted=False)
                    if not file.endswith(_digest(key) + _SUFFIX):
                        raise NotBelieved("it is another entry")
                    entries += 1
                except (OSError, NotBelieved) as error:
                    refused.append(f"{file}: {error}")
        return CacheContents(entries, size, refused)

    def clear(self, name: str) -> None:
        """Remove all entries with this name."""
        with contextlib.suppress(OSError, NotBelieved), self._held() as held:
            for file, _ in held.files():
                if file[: -len(_SUFFIX) - 2 * _DIGEST_BYTES - 1] == _shown(name):
                    held.remove(file)


class _Held:
    """A folder that is held open, by a handle where the platform has such: whatever is put in its place, this is the one."""

    def __init__(self, path: Path, handle: int | None):
        self._path, self._handle = path, handle

    def _at(self, file: str) -> str:
        return file if self._handle is not None else os.fspath(self._path / file)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """What is this module's in the folder."""
        for file in sorted(os.listdir(self._path if self._handle is None else self._handle)):
            if file.endswith((_SUFFIX, _TEMPORARY)):
                with contextlib.suppress(OSError):
                    status = os.stat(self._at(file), dir_fd=self._handle, follow_symlinks=False)
                    yield file, status

    def read(self, file: str, is_value_wanted: bool = True) -> tuple[str, Any]:
        """The key and the value in an entry's file. Raises OSError or NotBelieved."""
        with open(os.open(self._at(file), _READ, dir_fd=self._handle), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotBelieved("it is no regular file")
            if why := _why_not_trusted(status):
                raise NotBelieved(why)
            if status.st_size > MAX_BYTES:
                raise NotBelieved(f"it has {status.st_size} bytes")
            return _unframed(stream.read(), is_value_wanted)

    def write(self, file: str, data: bytes) -> None:
        """Write all of a file or, raising OSError, nothing."""
        temporary = self._at(f"{file}.{os.getpid()}.{uuid.uuid4().hex[:16]}{_TEMPORARY}")
        handle = os.open(temporary, _CREATE, 0o644, dir_fd=self._handle)
        try:
            with open(handle, "wb") as stream:  # closing it may fail, too: a network's disk writes then
                stream.write(data)
            os.replace(temporary, self._at(file), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._handle)
            raise

    def touch(self, file: str, at_least: float = 0.0) -> None:
        """Note that a file is in use, unless that was noted within these seconds."""
        if abs(time.time() - os.stat(self._at(file), dir_fd=self._handle).st_mtime) > at_least:
            os.utime(self._at(file), dir_fd=self._handle)

    def remove(self, file: str) -> None:
        with contextlib.suppress(OSError):  # another process has done it, or it is not ours to remove
            os.unlink(self._at(file), dir_fd=self._handle)


def _file_of(name: str, key: str) -> str:
    """What the file of an entry is called."""
    return f"{_shown(name)}-{_digest(key)}{_SUFFIX}"


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


def _unframed(data: bytes, is_value_wanted: bool) -> tuple[str, Any]:
    """The key and the value in the bytes of an entry's file. Raises NotBelieved."""
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
