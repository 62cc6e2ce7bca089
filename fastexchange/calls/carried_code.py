"""Pickled kernels carry their machine code: the entries of ``cache=True``, in a pickle instead of files.

The receiver looks for an entry before it compiles, with a key that it makes itself. So it finds only code for the same function,
values, options and types, that was made with the same versions for the same processor. Any other code it leaves alone, and
compiles. Entries are unpickled when a call needs them, not before.
"""

import zlib
from collections.abc import Callable
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from ..ground.disk_cache import NotBelieved, digest, framed, framed_key, unframed
from ..ground.numba_code import code_depends_on, processor_of, reduced, why_not_kept
from ..ground.numba_extensions import extensions
from ..ground.numba_internals import global_compiler_lock, overloads_of
from ..ground.safe_repr import one_line
from .code_in_front import CodeInFront
from .dependencies import dependencies, has_current_code
from .kernel_cache import Entries, made_by
from .shipped_kernels import shipped_with

__all__ = ["CarriedCode", "Content"]

MOST_BYTES = 512 << 10
"""Compressed bytes of machine code that the pickle of a kernel carries at most. Code beyond is left out."""


_SHOWN = 3  # signatures without their code, of those for one reason


class Content(NamedTuple):
    """What the pickle of a kernel carries."""

    signatures: int
    """The number of signatures whose machine code it carries. Those that came with a pickle count."""
    size: int
    """Bytes of this code, compressed."""
    left_out: dict[tuple, str]
    """The compiled signatures whose code it does not carry, and why."""
    unused: int = 0
    """Signatures whose code came with a pickle, and does not fit this process."""
    beside: tuple[str, ...] = ()
    """Imported modules that extend Numba: the code is for processes that have imported them, too."""

    def __str__(self):
        carried = f"the machine code of {_signatures(self.signatures)}, {self.size} bytes"
        if self.beside:
            carried += f", for processes that have imported {', '.join(self.beside)}, too (they extend Numba)"
        lines = [carried if self.signatures else "no machine code"]
        for why in dict.fromkeys(self.left_out.values()):
            those = [f"({', '.join(map(str, given))})" for given, its in self.left_out.items() if its == why]
            more = f" and {len(those) - _SHOWN} more" * (len(those) > _SHOWN)
            lines.append(f"not that of {', '.join(those[:_SHOWN])}{more}: {why}")
        if self.unused:
            others = "it was made for another processor, version, value, or library that extends Numba"
            lines.append(f"what came for {_signatures(self.unused)} is not used here: {others}")
        return "; ".join(lines)


def _signatures(count: int) -> str:
    return f"{count} signature{'s' * (count != 1)}"


class _InMemory:
    """Entries in place of a ``disk_cache.CacheFolder``: compressed, by the digests of their keys."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self._read_keys: dict[str, tuple[bytes, str]] = {}  # by name: the entry, and its key

    def load(self, name: str, key: str) -> Any:
        """Return the value of the entry with this key; None without a valid entry."""
        return self._read(self.entries.get(digest(key)), lambda data: unframed(data, key))

    def has(self, name: str, key: str) -> bool:
        """Whether :meth:`load` would find an entry."""
        return self._read(self.entries.get(digest(key)), framed_key) == key

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry. Raises what pickling raises."""
        self.entries[digest(key)] = zlib.compress(framed(key, value))
        return True

    def keys(self) -> dict[str, str]:
        """The key of each entry, by its name; "" for what is no entry."""
        known, none = self._read_keys, (None, "")
        self._read_keys = {
            name: read if (read := known.get(name, none))[0] is data else (data, self._read(data, framed_key) or "")
            for name, data in list(self.entries.items())
        }
        return {name: key for name, (_, key) in self._read_keys.items()}

    @staticmethod
    def _read(data: Any, read: Callable[[bytes], Any]) -> Any:
        try:
            return read(zlib.decompress(data))
        except (NotBelieved, zlib.error, TypeError):  # TypeError: not bytes, or None
            return None

    def claim(self, name: str, key: str) -> None:
        """Return None: nobody else makes these entries."""


class CarriedCode(CodeInFront):
    """The machine code that was received with the pickle of a kernel, and is sent on with its next pickle.

    In a process that has received code this is also the kernel's cache.
    """

    def __init__(self, py_func: FunctionType, options: dict):
        code = py_func.__code__
        place = code.co_firstlineno, code.co_linetable  # exceptions have the lines of the source
        depends_on = lambda: (made_by(), code_depends_on(), place, dependencies(py_func, options))  # noqa: E731
        self._entries = _InMemory()
        self._keys: Entries = Entries(self._entries, "", py_func, depends_on, warns=False)
        super().__init__(py_func, options, self._keys)
        self._packed: dict[tuple, Any] = {}  # by argument types: the compile result, whose code is carried or cannot be
        self._seen: list[Any] = []  # the compile results of the last pickle
        self._named: dict[str, tuple] = {}  # by the name of an entry that was made here: the argument types
        self._left_out: dict[tuple, str] = {}
        self._unused = 0

    # ---- the sender --------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[str, bytes]:
        """The entries for a pickle."""
        return dict(self._entries.entries)

    def add(self, entries: Any) -> None:
        """Take the entries of a pickle."""
        if isinstance(entries, dict):
            self._entries.entries.update(entries)

    def has(self, names: tuple[str, ...]) -> bool:
        """Whether the entries with these names are there."""
        return all(name in self._entries.entries for name in names)

    def content(self, kernel) -> Content:
        """What a pickle of the kernel carries now."""
        self.pack(kernel, is_all_checked=True)
        entries = self._entries
        beside = tuple(sorted(extensions())) if entries.entries else ()
        return Content(len(entries.entries), self._size, dict(self._left_out), self._unused, beside)

    def pack(self, kernel, is_all_checked: bool = False) -> None:
        """Make entries of the code that the kernel has compiled, or loaded from disk, since the last time.

        Before, entries that do not fit this process any more, or never did, are removed. A pickle that has one, as a value has
        changed since, is right all the same: the receivers, which get the new value, do not find it.
        """
        compiled_now = overloads_of(kernel)
        seen = [compiled for _, compiled in compiled_now]
        if not is_all_checked and len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return
        self._seen = []  # Ctrl-C may come between any two statements
        with global_compiler_lock:
            self._remove_what_does_not_fit(processor_of(kernel.targetctx.codegen()))
        for given, compiled in compiled_now:
            if self._packed.get(given) is not compiled:
                with global_compiler_lock:  # as for all calls of LLVM
                    self._left_out.pop(given, None)
                    if why := self._why_not_packed(kernel, given, compiled):
                        self._left_out[given] = why
                    self._packed[given] = compiled
        self._seen = seen

    @property
    def _size(self) -> int:
        return sum(map(len, self._entries.entries.values()))

    def _save(self, text: str, value: Any) -> bool:
        """Keep an entry, if there is room. Raises what pickling raises."""
        self._entries.save("", text, value)
        if is_too_much := self._size > MOST_BYTES:
            del self._entries.entries[digest(text)]
        return not is_too_much

    def _remove_what_does_not_fit(self, processor: tuple) -> None:
        for name in self._keys.that_do_not_fit(self._entries.keys(), processor):
            del self._entries.entries[name]
            if (given := self._named.pop(name, None)) is None:
                self._unused += 1
            else:
                self._packed.pop(given, None)

    def _why_not_packed(self, kernel, given: tuple, compiled) -> str:
        """Make an entry of compiled code. Return "", or why there is none."""
        key = self._key(given, kernel.targetctx.codegen())
        try:
            text = self._keys.text(key)
            if text is None:
                return f"{self._keys.why_no_text(key)}"
            if not has_current_code(self._py_func):
                return "it was compiled with other values of what the kernel names, here or before"
            kept = why_not_kept(compiled)
            data = reduced(compiled) if not kept else None
            if data is None and (shipped := shipped_with(kernel)) is not None:
                data = shipped.stored(given)
            data = kernel._stored_on_disk(given) if data is None else data
            if data is None:
                return kept
            is_added = self._save(text, (key, (compiled.signature, data)))
        except Exception as error:  # pickling may raise any exception
            return f"it cannot be pickled: {one_line(error)}"
        if is_added:
            self._named[digest(text)] = given
        return "" if is_added else f"all code would be more than {MOST_BYTES} bytes"

    # ---- the receiver --------------------------------------------------------------------------------------------------

    def _key(self, given, codegen):
        return given, processor_of(codegen)

    def _loaded(self, given, compiled):
        self._packed[given] = compiled
