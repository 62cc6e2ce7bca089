"""The disk cache of kernels with ``cache=True``: Numba's, with files that prove what they are.

Numba keeps one index for each function, which processes read, change and write without a lock, and data files that say nothing
of themselves; its key has the function's bytecode, but neither its constants nor its options nor what its globals are; and its
symbols are unique in one process only, so that two functions of the same name that were compiled in two processes take each
other's place in a third that loads both. Here an entry is a file of ``ground.disk_cache``, its key has all that, and a kernel's
symbols are unique everywhere or cannot be seen from outside.

Which directory it is, what makes an entry and what makes a function of it again, stay Numba's.
"""

import functools
import types as python_types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

from numba.core.errors import NumbaWarning

from ..ground.cfunction import source_stamp
from ..ground.disk_cache import FOLDER, CacheFolder
from ..ground.numba_internals import FunctionCache, calls_itself_through_another, code_depends_on, sealed_library
from .dependencies import Untold, dependencies, meaning_of, note_loaded

__all__ = ["KernelCache", "with_unique_symbols"]


class _Entries:
    """What :class:`numba.core.caching.IndexDataCacheFile` is to a cache, without an index."""

    def __init__(
        self, folder: CacheFolder, name: str, function: python_types.FunctionType, depends_on: Callable[[], tuple], warns=True
    ):
        self._folder, self._name, self._function, self._depends_on, self._warns = folder, name, function, depends_on, warns
        self._missed: dict = {}  # the keys' texts, since when code is being compiled
        self._untold: dict = {}  # why there is no text, by key

    def _text(self, key) -> str | None:
        """All that the code of this signature depends on as things stand, None if that cannot be told."""
        meaning = meaning_of(key[0])
        if meaning is None:
            return None
        try:
            return repr((self._depends_on(), key, meaning))
        except Untold as error:
            self._untold[key] = error.with_traceback(None)
            return None

    def warn(self, why: object) -> None:
        """Say, at the function, why its code is not kept."""
        if not self._warns:
            return
        code = self._function.__code__
        message = f"fast_args(cache=True): {self._function.__qualname__} is compiled by each process: {why}"
        warnings.warn_explicit(message, NumbaWarning, code.co_filename, code.co_firstlineno)

    def load(self, key):
        """What was saved with this key, or None."""
        self._untold.pop(key, None)
        text = self._text(key)
        stored = self._folder.load(self._name, text) if text is not None else None
        if stored is not None and stored[0] == key:
            return stored[1]
        self._missed[key] = text
        return None

    def save(self, key, data) -> None:
        """Keep what was compiled, unless what it depends on has changed meanwhile. Not called for what Numba does not keep."""
        text = self._missed.pop(key, None)
        if text is not None and text == self._text(key):
            self._folder.save(self._name, text, (key, data))
        elif key in self._untold:
            self.warn(self._untold.pop(key))

    def flush(self) -> None:
        """Forget all signatures of this function."""
        self._folder.clear(self._name)


class KernelCache(FunctionCache):
    """Numba's cache of a function, compiled with these options of ``numba.njit``.

    `warns`: whether it says of code why that is not kept, which Numba, whose cache keeps more, has no words for.

    Raises RuntimeError where there is no directory for it, or none to be trusted.
    """

    def __init__(self, py_func, options: dict, warns: bool):
        super().__init__(py_func)
        folder = CacheFolder(Path(self.cache_path) / FOLDER)
        if why := folder.why_not_trusted:
            raise RuntimeError(f"cannot cache function {py_func.__qualname__!r} in {folder.path}: {why}")
        stamp = self._impl.locator.get_source_stamp()
        depends_on = lambda: (source_stamp(__name__), code_depends_on(), stamp, dependencies(py_func, options))  # noqa: E731
        self._cache_file = _Entries(folder, self._impl.filename_base, py_func, depends_on, warns)

    def load_overload(self, sig, target_context):
        found = super().load_overload(sig, target_context)
        if found is not None:
            note_loaded(self._py_func)
        return found

    def save_overload(self, sig, data):
        if calls_itself_through_another(data.library):
            self._cache_file.warn("it calls itself through another function, or with other types")
        else:
            super().save_overload(sig, data)

    def _index_key(self, sig, codegen):
        return sig, codegen.magic_tuple()


@functools.cache
def with_unique_symbols(pipeline: type) -> type:
    """A compiler like `pipeline`, a ``numba.core.compiler.CompilerBase``, of functions whose symbols no other process uses.

    Numba counts functions from 1 in every process, and their numbers are what tells symbols of the same name apart.
    """

    class UniqueSymbols(pipeline):
        fastexchange_of = pipeline

        def define_pipelines(self):
            state = self.state
            identity = state.func_id
            if not hasattr(identity, "fastexchange_id"):
                identity.fastexchange_id = identity.unique_id = f"{identity.unique_id}x{uuid.uuid4().hex}"
                identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
            if state.library is None:
                state.library = sealed_library(state.targetctx, identity.func_qualname)
            return super().define_pipelines()

    return UniqueSymbols
