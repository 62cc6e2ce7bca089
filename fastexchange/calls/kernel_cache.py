"""The disk cache of kernels with ``cache=True``: Numba's cache, with files that identify their content.

Three faults of Numba's own cache are mended:

1. It has one index per function, which processes change without a lock, and data files without a key. Here each entry is one
   file of ``ground.disk_cache``, which has its key.
2. Its key has the function's bytecode, but not its constants, options and globals. Here the key has them (``dependencies``).
3. Its symbols are unique in one process only. If two processes compile functions of the same name, a third process that loads
   both calls one for the other. Here symbols are unique everywhere, or not visible outside of their library.

The directory, the content of an entry, and how code is made of it, are Numba's.
"""

import functools
import os
import types as python_types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.errors import NumbaWarning

from ..ground.disk_cache import FOLDER, CacheFolder, NotBelieved
from ..ground.numba_code import (
    bind_globals,
    calls_itself_through_another,
    code_depends_on,
    processor_of,
    rebuilt,
    reduced,
    sealed_library,
    unique,
)
from ..ground.numba_internals import FunctionCache, failures
from ..ground.passing import reraise_passing
from ..ground.sources import source_stamp
from ..interpreter import DISABLED
from ..version import __version__
from .dependencies import NotDescribable, dependencies, meaning_of, note_loaded
from .writes import add_pass

__all__ = ["Entries", "KernelCache", "made_by", "with_unique_symbols"]


_HALF = f"{__name__.partition('.')[0]}.ground.half.known"
"""Numba compiles what this module teaches it into users' kernels. It is not imported for kernels without such types."""


def made_by() -> str:
    """A digest of this package's sources that a kernel's machine code depends on."""
    return source_stamp(__name__) + source_stamp(_HALF) or __version__


_told: set[Path] = set()
"""Folders of which users know that they keep no code any more."""


class Entries:
    """Takes the place of ``numba.core.caching.IndexDataCacheFile``; there is no index.

    `folder`: a ``CacheFolder``, or what stands for one. `depends_on`: returns what all code of the function depends on, last what
    :func:`dependencies` says.
    """

    described = ""
    """What :func:`dependencies` has said last."""

    def __init__(
        self, folder: Any, name: str, function: python_types.FunctionType, depends_on: Callable[[], tuple], warns=True
    ):
        self._folder, self._name, self._function, self._depends_on, self._warns = folder, name, function, depends_on, warns
        self._missed: dict = {}  # by key: its text, while the code is being compiled
        self._not_described: dict = {}  # by key: why it has no text
        self._claims: dict = {}  # by key: this process's claim to compile for it

    def text(self, key) -> str | None:
        """Everything that the code of this signature depends on now; None if it cannot be described."""
        meaning = meaning_of(key[0])
        if meaning is None:
            self._not_described[key] = "a type of its signature, or a class in one, is not found by its name in another process"
            return None
        try:
            depends_on = self._depends_on()
            *_, self.described = depends_on
            return repr((depends_on, key, meaning))
        except NotDescribable as error:
            self._not_described[key] = str(error)  # its cause has frames, and these a call's arguments
            return None

    def that_do_not_fit(self, texts: dict[str, str], processor: tuple) -> list[str]:
        """The names of those texts, by names, that :meth:`text` returns for no signature now."""
        fit = {name for name in self.that_fit(texts) if f"{processor!r}" in texts[name]}
        return [name for name in texts if name not in fit]

    def that_fit(self, texts: dict[str, str]) -> list[str]:
        """The names of those texts, by names, that :meth:`text` returns for some signature now."""
        try:
            start = f"({self._depends_on()!r}, "
        except NotDescribable:
            return []
        return [name for name, text in texts.items() if text.startswith(start)]

    def why_no_text(self, key) -> object:
        """Why :meth:`text` has returned None for this key."""
        return self._not_described.pop(key, "it has no key")

    def warn(self, why: object) -> None:
        """Warn, with the function's place in the source, why its code is not cached."""
        if self._warns:
            self._warn(f"fast_args(cache=True): {self._function.__qualname__} is compiled by each process: {why}")

    def _warn(self, message: str) -> None:
        code = self._function.__code__
        warnings.warn_explicit(message, NumbaWarning, code.co_filename, code.co_firstlineno)

    def warn_of_folder(self, why: object) -> None:
        """Warn, once for all functions, that the folder no longer keeps code."""
        if self._folder.path not in _told:
            _told.add(self._folder.path)
            message = f"compiled code can no longer be kept in {self._folder.path}, and each process compiles it again: {why}"
            self._warn(message)

    def load(self, key):
        """Return the data saved with this key. None: compile, and then :meth:`release` the key.

        Raises what :func:`disk_cache.claiming` waits for, if another process is compiling for this key.
        """
        self._not_described.pop(key, None)
        text = self.text(key)
        if text is None:
            self._missed[key] = None
            return None
        stored = self._folder.load(self._name, text)
        if stored is None and key not in self._claims:
            claim = self._folder.claim(self._name, text)
            if claim is not None:
                self._claims[key] = claim
                stored = self._folder.load(self._name, text)
        if stored is not None and stored[0] == key:
            self.release(key, is_kept=True)
            return stored[1]
        self._missed[key] = text
        return None

    def release(self, key, is_kept: bool = False) -> None:
        """Let other processes compile for this key, or load its code. Does nothing without a claim."""
        if self._claims and (claim := self._claims.pop(key, None)) is not None:  # a key that is no signature has no hash
            claim.release(is_kept)

    def save(self, key, data) -> None:
        """Save compiled code, unless a value that it depends on has changed meanwhile. Numba calls this if it can be cached."""
        text = self._missed.pop(key, None)
        if text is not None and text == self.text(key):
            is_kept = self._folder.save(self._name, text, (key, data))
            self.release(key, is_kept)
            why = self._folder.why_not_saved
            if not is_kept and isinstance(why, (OSError, NotBelieved)):
                self.warn_of_folder(why)
            elif not is_kept:
                self.warn(why)
        elif key in self._not_described:
            self.warn(self._not_described.pop(key))

    def stored(self, key) -> Any:
        """The data that another process would find for this key, or None."""
        text = self.text(key)
        found = self._folder.load(self._name, text) if text is not None else None
        return found[1] if found is not None and found[0] == key else None

    def has(self, key) -> bool:
        """Whether :meth:`load` would find data for this key."""
        text = self.text(key)
        self._not_described.pop(key, None)
        return text is not None and self._folder.has(self._name, text)

    def flush(self) -> None:
        """Remove the entries of this function."""
        self._folder.clear(self._name)


class KernelCache(FunctionCache):
    """Numba's cache of a function that is compiled with these options of ``numba.njit``.

    `warns`: whether to warn about code that Numba's own cache would keep, and this one does not. Not for Numba's functions:
    nothing is found out of what they write to (``writes``), so their code is no other kernel's.

    Raises RuntimeError if there is no writable directory, or if it is not safe.
    """

    def __init__(self, py_func, options: dict, warns: bool):
        try:
            super().__init__(py_func)
        except RuntimeError as error:  # of Numba, which has found no folder
            reraise_passing(error)
            if not os.path.exists(py_func.__code__.co_filename):
                raise RuntimeError("its function is in no file") from error
            raise RuntimeError("no folder can be written: set NUMBA_CACHE_DIR") from error
        self._options = options
        folder = CacheFolder(Path(self.cache_path) / FOLDER)
        if why := folder.why_not_trusted:
            raise RuntimeError(f"code cannot be kept in {folder.path}: {why}")
        stamp = self._impl.locator.get_source_stamp()
        self._impl.reduce, self._impl.rebuild = reduced, rebuilt
        own = made_by()
        depends_on = lambda: (own, warns, code_depends_on(), stamp, dependencies(py_func, options))  # noqa: E731
        self._cache_file = Entries(folder, self._impl.filename_base, py_func, depends_on, warns)

    def load_overload(self, sig, target_context):
        found = None
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)  # Numba's load_overload would first load all of its compiler
        if found is not None:
            note_loaded(self._py_func, self._cache_file.described, self._options)
        return found

    def save_overload(self, sig, data):
        if calls_itself_through_another(data.library):
            self._cache_file.warn("it calls itself through another function, or with other types")
            return
        try:
            super().save_overload(sig, data)
        except (OSError, RuntimeError) as error:  # Numba makes the folder; LLVM's callback, if interrupted, has lost the code
            self._cache_file.warn_of_folder(error)

    def release(self, sig, codegen) -> None:
        """Call this when the compilation has ended, also if it has failed."""
        self._cache_file.release(self._index_key(sig, codegen))

    def stored(self, signature: tuple, codegen) -> Any:
        """The code that another process would find for these argument types, as Numba stores it, or None."""
        return self._cache_file.stored(self._index_key(signature, codegen))

    def has_code(self, signature: tuple, codegen) -> bool:
        """Whether a call with these argument types would find its code here."""
        return self._cache_file.has(self._index_key(signature, codegen))

    def _index_key(self, sig, codegen):
        return sig, processor_of(codegen)


@functools.cache
def with_unique_symbols(pipeline: type, is_numbas: bool = False) -> type:
    """Derive a compiler from `pipeline`, a ``numba.core.compiler.CompilerBase``, whose symbols no other process uses.

    Numba numbers functions from 1 in every process, and only these numbers distinguish symbols of the same name. Unless
    `is_numbas`, it also looks at what the code writes to (``writes``).
    """

    class UniqueSymbols(pipeline):
        fastexchange_of = pipeline

        def define_pipelines(self):
            if failures():
                managers = super().define_pipelines()
                if DISABLED and not is_numbas:  # this Numba is not known to be another one
                    if self.state.library is None:  # the pass leaves there what it finds
                        self.state.library = self.state.targetctx.codegen().create_library(self.state.func_id.func_qualname)
                        self.state.library.enable_object_caching()
                    for manager in managers:
                        add_pass(manager)
                return managers
            state = self.state
            bind_globals(state.lifted)
            identity = state.func_id
            if not hasattr(identity, "fastexchange_id"):
                identity.fastexchange_id = identity.unique_id = f"{identity.unique_id}x{unique()}"
                identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
            if state.library is None:
                state.library = sealed_library(state.targetctx, identity.func_qualname)
            managers = super().define_pipelines()
            for manager in () if is_numbas else managers:
                add_pass(manager)
            return managers

    return UniqueSymbols
