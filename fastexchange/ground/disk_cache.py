"""Machine code on disk, with entries that are verified before they are used.

One entry is one file, named by a digest of its whole key. The file holds the key and a checksum. It is written to a temporary
name and renamed, so a reader sees all of it or nothing. There is no index. So concurrent writers, different versions that share a
folder, a full disk and a killed process cannot mix up entries.

Code is loaded only if no other user could have written it: folder and file belong to this user or to root, neither the group nor
others can write to them, and neither is a link. The folder is opened first and checked through its handle, and files are opened
relative to the handle, so nobody can replace the folder in between. If an entry fails a check, its code is compiled again.

Processes that miss the same entry at the same time make it once: :meth:`CacheFolder.claim`, :func:`claiming`.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, ParamSpec, TypeVar

try:
    import fcntl
except ImportError:  # Windows: every process makes the entries that it misses
    fcntl = None  # type: ignore[assignment]

from .numba_internals import dumps, global_compiler_lock

__all__ = [
    "FOLDER", "CacheContents", "CacheFolder", "Claim", "claiming", "digest", "framed", "framed_key", "unframed", "user_cache",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

FOLDER = "fastexchange"
"""The name of all folders with entries."""

MAX_AGE = 90 * 86400.0
"""Seconds after which an entry that no process has loaded is removed."""
MAX_ENTRIES, MAX_BYTES = 4000, 1 << 30
"""Beyond these limits the entries that were loaded longest ago are removed."""
_TOUCH_AFTER = 86400.0  # the load of an entry is noted at most this often
_TEMPORARY_AGE = 3600.0  # an older temporary file was abandoned by its process
CLAIM_WAITS = 120.0
"""Seconds for which a thread waits until another process has made an entry; then it makes it itself."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # between two looks at a claim

_MAGIC = b"fastexchange entry 1\n"
_SUFFIX, _TEMPORARY = ".entry", ".tmp"
_CLAIM = ".claim.tmp"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Windows lacks these flags, which refuse links and pipes that would block. It has no geteuid() to check owners either.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ |= getattr(os, "O_BINARY", 0)
_OPEN_CLAIM = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class NotBelieved(Exception):
    """A file or folder that failed a check. The message says why."""


class CacheContents(NamedTuple):
    """The content of a :class:`CacheFolder`."""

    entries: int
    """The number of valid entries."""
    size: int
    """Bytes of all files."""
    refused: list[str]
    """Files that failed a check, and why."""


def user_cache() -> Path | None:
    """Return this platform's directory for a user's caches; None for a user without a home."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # XDG Base Directory Specification: ignore relative paths
            base = os.path.expanduser("~/.cache")
    return Path(base) if os.path.isabs(base) else None


def _why_not_trusted(status: os.stat_result) -> str:
    """Why another user may have written a file or folder; "" if nobody else can have."""
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
    """The entries in one folder. Only :meth:`contents` raises OSError; elsewhere an unreadable entry counts as missing."""

    def __init__(self, path: Path):
        self.path = path
        self.why_not_saved: Exception | None = None
        """Why :meth:`save` last returned False: OSError or NotBelieved for the folder, any other for the value."""
        self._is_pruned = False

    @property
    def why_not_trusted(self) -> str:
        """Why no entry of this folder is used; "" if entries are used, or if the folder does not exist."""
        try:
            return _why_not_trusted(os.lstat(self.path))
        except OSError:
            return ""

    @property
    def is_writable(self) -> bool:
        """Whether entries can be kept in this folder, which need not exist yet."""
        existing = self.path
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK) and not self.why_not_trusted

    @contextlib.contextmanager
    def _opened(self, is_trusted: bool = True) -> Iterator["_OpenFolder"]:
        """Hold the folder open. Raises OSError; NotBelieved if `is_trusted` and another user can write to the folder."""
        handle = os.open(self.path, _READ | os.O_DIRECTORY) if os.open in os.supports_dir_fd else None
        try:
            why = _why_not_trusted(os.stat(self.path if handle is None else handle))
            if is_trusted and why:
                raise NotBelieved(why)
            yield _OpenFolder(self.path, handle)
        finally:
            if handle is not None:
                os.close(handle)

    def load(self, name: str, key: str) -> Any:
        """Return the value of the entry with this key; None without a valid entry. `name`: a readable part of the file's name."""
        file = _file_of(name, key)
        try:
            with self._opened() as folder:
                value = folder.read(file, key)
                with contextlib.suppress(OSError):  # for example in a folder that belongs to root
                    folder.touch(file, _TOUCH_AFTER)
                return value
        except (OSError, NotBelieved):
            return None

    def has(self, name: str, key: str) -> bool:
        """Whether :meth:`load` would find an entry. Makes nothing of it, and does not mark it as used."""
        try:
            with self._opened() as folder:
                return folder.key(_file_of(name, key)) == key
        except (OSError, NotBelieved):
            return False

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry. Returns False after a failure, which leaves the folder's entries unchanged."""
        try:
            data = framed(key, value)
        except Exception as error:  # pickling may raise anything: then nothing is kept
            self.why_not_saved = _without_frames(error)
            return False
        try:
            self._make()
            with self._opened() as folder:
                folder.write(_file_of(name, key), data)
        except (OSError, NotBelieved) as error:
            self.why_not_saved = _without_frames(error)
            return False
        if not self._is_pruned:
            self._is_pruned = True
            self.prune()
        return True

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o755, exist_ok=True)

    def claim(self, name: str, key: str) -> "Claim | None":
        """Claim the making of a missing entry. Does not wait: see :func:`claiming`.

        Returns a claim: load the entry once more, and else make and save it; then release the claim. Or returns None: make the
        entry without one, because nothing can be kept in this folder, or because another process has claimed it and this thread
        cannot wait, or has waited.

        A claim is a lock on a file, which the system releases when the process ends, however it ends.
        """
        may_wait, _outermost.may_wait = _outermost.may_wait, False  # what is made from here on is a part of this entry
        claim, _outermost.claim = _outermost.claim, None
        if claim is not None and claim.is_for(self, _file_of(name, key)):
            return claim
        try:
            return self._claimed(name, key, waits=0.0)
        except Claimed:
            if may_wait:
                raise
            return None

    def _claimed(self, name: str, key: str, waits: float) -> "Claim | None":
        """Claim an entry, or wait at most `waits` seconds until another process has made it, or cannot keep it, or has ended.

        Raises :class:`Claimed` if it is still making the entry then. None: the entry is there, or no claim helps.
        """
        if fcntl is None:
            return None
        file = _file_of(name, key)
        deadline, pause = time.monotonic() + waits, _FIRST_PAUSE
        while True:
            handle = None
            try:
                self._make()
                with self._opened() as folder:
                    handle = os.open(folder._at(file + _CLAIM), _OPEN_CLAIM, 0o644, dir_fd=folder._handle)
                has_waited = False
                while not _is_locked(handle):
                    if time.monotonic() >= deadline:
                        raise Claimed(self, name, key)
                    time.sleep(pause)
                    pause, has_waited = min(2 * pause, _LONGEST_PAUSE), True
                    if os.path.lexists(self.path / file) and self.load(name, key) is not None:
                        return None
                if os.fstat(handle).st_size:
                    if has_waited:  # the other process could not keep the entry
                        return None
                    os.ftruncate(handle, 0)  # it was killed before it had removed the file
                with self._opened() as folder:
                    if folder.is_at(file + _CLAIM, handle):
                        claim = Claim(self, file, handle)
                        handle = None
                        return claim
                # Otherwise the other process has released its claim, and with it removed the file.
            except (OSError, NotBelieved):
                return None
            finally:
                if handle is not None:
                    os.close(handle)

    def prune(self) -> None:
        """Remove entries that no process has loaded for long, entries beyond the limits, and abandoned temporary files."""
        now = time.time()
        entries = []
        with contextlib.suppress(OSError, NotBelieved), self._opened() as folder:
            for file, status in folder.files():
                age = now - status.st_mtime
                if file.endswith(_TEMPORARY):
                    if abs(age) > _TEMPORARY_AGE:
                        folder.remove(file)
                elif age > MAX_AGE:
                    folder.remove(file)
                else:
                    if age < -_TOUCH_AFTER:  # in the future: a clock was or is wrong
                        with contextlib.suppress(OSError):
                            folder.touch(file)
                    entries.append((age, status.st_size, file))
            size = 0
            for count, (_, bytes_, file) in enumerate(sorted(entries)):
                size += bytes_
                if count >= MAX_ENTRIES or size > MAX_BYTES:
                    folder.remove(file)

    def contents(self) -> CacheContents:
        """Read all entries and return their number and size. Raises OSError for a folder that exists and cannot be read."""
        entries = size = 0
        refused = []
        if not os.path.lexists(self.path):
            return CacheContents(0, 0, [])
        with self._opened(is_trusted=False) as folder:
            for file, status in folder.files():
                size += status.st_size
                if file.endswith(_TEMPORARY):
                    continue
                try:
                    if not file.endswith(digest(folder.key(file)) + _SUFFIX):
                        raise NotBelieved("it is another entry")
                    entries += 1
                except (OSError, NotBelieved) as error:
                    refused.append(f"{file}: {error}")
        return CacheContents(entries, size, refused)

    def clear(self, name: str) -> None:
        """Remove all entries with this name."""
        with contextlib.suppress(OSError, NotBelieved), self._opened() as folder:
            for file, _ in folder.files():
                if file[: -len(_SUFFIX) - 2 * _DIGEST_BYTES - 1] == _shown(name):
                    folder.remove(file)


def _without_frames(error: Exception) -> Exception:
    """`error`, to be kept: without what led to it, whose frames have a call's arguments."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _is_locked(handle: int) -> bool:
    """Lock an open file for this process, if no other has locked it. Raises OSError where files cannot be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


_claims: "set[Claim]" = set()
"""The claims that this process holds."""


class Claim:
    """The right of this process to make the entry in `file`. `handle`: of the locked file beside it, owned."""

    def __init__(self, folder: CacheFolder, file: str, handle: int):
        self._folder, self._file, self._handle = folder, file, handle
        _claims.add(self)

    def is_for(self, folder: CacheFolder, file: str) -> bool:
        """Whether it is the claim to this entry, and still held."""
        return self in _claims and (self._folder.path, self._file) == (folder.path, file)

    def release(self, is_kept: bool) -> None:
        """Wake the waiters. They load the entry, or all make it if none was kept."""
        if self not in _claims:
            return
        try:
            if not is_kept:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, 1)  # a size, which a full disk has room for
            with contextlib.suppress(OSError, NotBelieved), self._folder._opened() as folder:
                if folder.is_at(self._file + _CLAIM, self._handle):
                    folder.remove(self._file + _CLAIM)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file. The lock ends with the last process that has it open."""
        _claims.discard(self)
        os.close(self._handle)


class Claimed(Exception):
    """Another process is making the entry."""

    def __init__(self, folder: CacheFolder, name: str, key: str):
        super().__init__(name)
        self.entry = folder, name, key


class _Outermost(threading.local):
    """Per-thread state of :func:`claiming`."""

    may_wait = False
    claim: Claim | None = None  # to the entry that it has waited for


_outermost = _Outermost()


def claiming(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function that takes Numba's compiler lock and may claim an entry: it waits for others without the lock.

    With the lock all threads that compile would wait, too, and a child that is forked meanwhile could never compile. So a claim
    that another process holds ends the call by :class:`Claimed`; after the wait, of at most :data:`CLAIM_WAITS`, the call is made
    again. A compilation within another one, for which its thread holds the lock, does not wait: it makes what it misses itself.
    So a holder never waits: there is no deadlock.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if global_compiler_lock.is_locked():
            _outermost.may_wait = False
            return function(*args, **kwargs)
        _outermost.may_wait = True
        try:
            try:
                return function(*args, **kwargs)
            except Claimed as claimed:
                folder, name, key = claimed.entry
            with contextlib.suppress(Claimed):
                _outermost.claim = folder._claimed(name, key, CLAIM_WAITS)
            return function(*args, **kwargs)
        finally:
            unused, _outermost.claim, _outermost.may_wait = _outermost.claim, None, False
            if unused is not None:
                unused.release(is_kept=True)

    return call


def _drop_claims() -> None:
    """In a forked child: the claims are its parent's."""
    for claim in list(_claims):
        claim.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_claims)


class _OpenFolder:
    """A folder that is held open, by a handle if the platform supports that: replacing its path does not affect the handle."""

    def __init__(self, path: Path, handle: int | None):
        self._path, self._handle = path, handle

    def _at(self, file: str) -> str:
        return file if self._handle is not None else os.fspath(self._path / file)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names and status of entries and temporary files."""
        for file in sorted(os.listdir(self._path if self._handle is None else self._handle)):
            if file.endswith((_SUFFIX, _TEMPORARY)):
                with contextlib.suppress(OSError):
                    status = os.stat(self._at(file), dir_fd=self._handle, follow_symlinks=False)
                    yield file, status

    def read(self, file: str, key: str) -> Any:
        """Return the value in the file of the entry with this key. Raises OSError or NotBelieved."""
        return unframed(self._content(file), key)

    def key(self, file: str) -> str:
        """Return the key in an entry's file. Raises OSError or NotBelieved."""
        return framed_key(self._content(file))

    def _open(self, at: str, mode: str, flags: int) -> IO[Any]:
        """Open a file. If it turns out to be a folder, it is closed, too: a descriptor that `open` is given would not be."""
        return open(at, mode, opener=lambda path, _: os.open(path, flags, 0o644, dir_fd=self._handle))

    def _content(self, file: str) -> bytes:
        with self._open(self._at(file), "rb", _READ) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotBelieved("it is no regular file")
            if why := _why_not_trusted(status):
                raise NotBelieved(why)
            if status.st_size > MAX_BYTES:
                raise NotBelieved(f"it has {status.st_size} bytes")
            return stream.read()

    def write(self, file: str, data: bytes) -> None:
        """Write all of a file or, raising OSError, nothing."""
        temporary = self._at(f"{file}.{os.getpid()}.{uuid.uuid4().hex[:16]}{_TEMPORARY}")
        try:
            with self._open(temporary, "wb", _CREATE) as stream:  # closing may fail, too: network disks write then
                stream.write(data)
            os.replace(temporary, self._at(file), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._handle)
            raise

    def touch(self, file: str, at_least: float = 0.0) -> None:
        """Set a file's time to now, unless that was done within the last `at_least` seconds."""
        if abs(time.time() - os.stat(self._at(file), dir_fd=self._handle).st_mtime) > at_least:
            os.utime(self._at(file), dir_fd=self._handle)

    def is_at(self, file: str, handle: int) -> bool:
        """Whether the open file `handle` is the one with this name."""
        try:
            found = os.stat(self._at(file), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(handle))

    def remove(self, file: str) -> None:
        with contextlib.suppress(OSError):  # another process removed the file, or this user may not
            os.unlink(self._at(file), dir_fd=self._handle)


def _file_of(name: str, key: str) -> str:
    """Return the name of an entry's file."""
    return f"{_shown(name)}-{digest(key)}{_SUFFIX}"


def _shown(name: str) -> str:
    """Return the part of a file's name that is for people."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:80]


def digest(key: str) -> str:
    """Return the digest of an entry's key, by which it is found."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def framed(key: str, value: Any) -> bytes:
    """Return the bytes of an entry's file: magic, checksum of the rest, length of the key, key, value."""
    encoded = key.encode("utf-8", "surrogatepass")
    rest = len(encoded).to_bytes(8, "little") + encoded + dumps(value)
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def framed_key(data: bytes) -> str:
    """Return the key in the bytes of an entry's file, if their checksum is right. Raises NotBelieved."""
    return _checked(data)[0]


def unframed(data: bytes, wanted: str | None) -> Any:
    """Return the value in the bytes of an entry's file, if their checksum is right and their key is `wanted` (None: any key).

    Nothing of it is unpickled before. Raises NotBelieved.
    """
    key, value = _checked(data)
    if wanted not in (None, key):
        raise NotBelieved("it is another entry")
    try:
        return pickle.loads(value)
    except Exception as error:  # unpickling may raise anything, for example for a class that was removed
        raise NotBelieved(f"its value cannot be made again: {type(error).__name__}: {error}") from error


def _checked(data: bytes) -> tuple[str, memoryview]:
    """The key, and the value as it is pickled."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise NotBelieved("it does not begin as an entry does")
    rest = memoryview(data)[start:]
    if hashlib.sha256(rest).digest() != data[len(_MAGIC) : start]:
        raise NotBelieved("its checksum is wrong: it is damaged, or not whole")
    length = int.from_bytes(rest[:8], "little")
    try:
        return bytes(rest[8 : 8 + length]).decode("utf-8", "surrogatepass"), rest[8 + length :]
    except UnicodeDecodeError:
        raise NotBelieved("its key is no text") from None
