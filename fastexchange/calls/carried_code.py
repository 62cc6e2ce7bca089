"""Pickled kernels carry their machine code: the entries of ``cache=True``, in a pickle instead of files.

The receiver looks for an entry before it compiles, with a key that it makes itself. So it finds only code for the same function,
values, options and types, that was made with the same versions for the same processor. Any other code it leaves alone, and
compiles. Entries are unpickled when a call needs them, not before.
"""

import zlib
from types import FunctionType
from typing import Any, NamedTuple

from numba.core import sigutils

from ..ground.disk_cache import NotBelieved, digest, framed, unframed
from ..ground.numba_code import code_depends_on, processor_of, rebuilt, reduced, why_not_kept
from ..ground.numba_internals import failures, global_compiler_lock
from .dependencies import dependencies, has_current_code, note_loaded
from .kernel_cache import Entries, made_by

__all__ = ["CarriedCode", "Content"]

MOST_BYTES = 512 << 10
"""Compressed bytes of machine code that the pickle of a kernel carries at most. Code beyond is left out."""


class Content(NamedTuple):
    """What the pickle of a kernel carries."""

    signatures: int
    """The number of signatures whose machine code it carries. Those that came with a pickle count."""
    size: int
    """Bytes of this code, compressed."""
    left_out: dict[tuple, str]
    """The compiled signatures whose code it does not carry, and why."""

    def __str__(self):
        carried = f"the machine code of {self.signatures} signature{'s' * (self.signatures != 1)}, {self.size} bytes"
        lines = [carried if self.signatures else "no machine code"]
        for signature, why in self.left_out.items():
            lines.append(f"not that of ({', '.join(map(str, signature))}): {why}")
        return "; ".join(lines)


class _InMemory:
    """Entries in the place of a ``CacheFolder``: compressed, by the digests of their keys."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    @property
    def size(self) -> int:
        return sum(map(len, self.entries.values()))

    def load(self, name: str, key: str) -> Any:
        """Return the value of the entry with this key; None without a valid entry."""
        data = self.entries.get(digest(key))
        if data is None:
            return None
        try:
            stored, value = unframed(zlib.decompress(data), is_value_wanted=True)
        except (NotBelieved, zlib.error, TypeError):  # TypeError: not bytes
            return None
        return value if stored == key else None

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry, if there is room. Raises what pickling raises."""
        data = zlib.compress(framed(key, value))
        if self.size + len(data) > MOST_BYTES:
            return False
        self.entries[digest(key)] = data
        return True

    def claim(self, name: str, key: str) -> None:
        """Return None: nobody else makes these entries."""


class CarriedCode:
    """The machine code that came with the pickle of a kernel, and that goes with its next.

    In a process that has received code this is also the kernel's cache: what it does not find, `behind` may have, the cache that
    the kernel has otherwise.
    """

    def __init__(self, py_func: FunctionType, options: dict):
        code = py_func.__code__
        place = code.co_firstlineno, code.co_linetable  # exceptions have the lines of the source
        depends_on = lambda: (made_by(), code_depends_on(), place, dependencies(py_func, options))  # noqa: E731
        self._entries = _InMemory()
        self._keys = Entries(self._entries, "", py_func, depends_on, warns=False)
        self._py_func = py_func
        self._packed: dict[tuple, Any] = {}  # by argument types: the compile result, whose code is carried or cannot be
        self._left_out: dict[tuple, str] = {}
        self.behind: Any = None

    def __getattr__(self, name):
        return getattr(self.behind, name)

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

    def content(self) -> Content:
        return Content(len(self._entries.entries), self._entries.size, dict(self._left_out))

    def pack(self, kernel) -> None:
        """Make entries of the code that the kernel has compiled, or loaded from disk, since the last time.

        The code of a signature is looked at once, with the values that its function's names have then. If they change later, the
        receivers of the next pickles, which have the new values, do not find it.
        """
        for given, compiled in list(kernel.overloads.items()):
            if self._packed.get(given) is not compiled:
                with global_compiler_lock:  # as for all calls of LLVM
                    self._left_out.pop(given, None)
                    if why := self._why_not_packed(kernel, given, compiled):
                        self._left_out[given] = why
                    self._packed[given] = compiled

    def _why_not_packed(self, kernel, given: tuple, compiled) -> str:
        """Make an entry of compiled code. Return "", or why there is none."""
        key = given, processor_of(kernel.targetctx.codegen())
        try:
            if not has_current_code(self._py_func):
                return "what the kernel names has, or may have, other values than when it was compiled"
            text = self._keys.text(key)
            if text is None:
                return f"{self._keys.why_no_text(key)}"
            kept = why_not_kept(compiled)
            data = reduced(compiled) if not kept else kernel._stored_on_disk(given)
            if data is None:
                return kept
            is_added = self._entries.save("", text, (key, (compiled.signature, data)))
        except Exception as error:  # pickling may raise any exception
            return f"it cannot be pickled: {type(error).__name__}: {error}"
        return "" if is_added else f"all code would be more than {MOST_BYTES} bytes"

    # ---- the receiver, as a cache of Numba's ---------------------------------------------------------------------------

    def load_overload(self, sig, target_context):
        """Return the code for a signature, or else what `behind` has."""
        if failures():
            return self.behind.load_overload(sig, target_context)
        given, result = sigutils.normalize_signature(sig)
        stored = self._keys.load((tuple(given), processor_of(target_context.codegen())))
        if stored is not None and result in (None, stored[0].return_type):
            made = rebuilt(target_context, stored[1])
            self._packed[tuple(given)] = made
            note_loaded(self._py_func)
            return made
        return self.behind.load_overload(sig, target_context)
