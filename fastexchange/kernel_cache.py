"""The disk cache of kernels with ``cache=True``: Numba's, with files that prove what they are.

Numba keeps one index for each function, which processes read, change and write without a lock, and data files that say nothing
of themselves; its key has the function's bytecode, but neither its constants nor its options; and its symbols are unique in
one process only, so that two functions of the same name that were compiled in two processes take each other's place in a
third that loads both. Here an entry is a file of ``disk_cache``, its key has all that, and symbols are unique everywhere.

Which directory it is, what makes an entry and what makes a function of it again, stay Numba's.
"""

import functools
import types as python_types
import uuid
from pathlib import Path
from typing import Any, cast

from numba.core import types

from .disk_cache import FOLDER, CacheFolder
from .numba_internals import FunctionCache, code_depends_on

__all__ = ["KernelCache", "with_unique_symbols"]


class _Entries:
    """What :class:`numba.core.caching.IndexDataCacheFile` is to a cache, without an index."""

    def __init__(self, folder: CacheFolder, name: str, depends_on: tuple):
        self._folder, self._name, self._depends_on = folder, name, depends_on

    def _text(self, key) -> str:
        return repr((self._depends_on, key))

    def load(self, key):
        """What was saved with this key, or None."""
        meaning = _meaning_of(key[0])
        if meaning is None:
            return None
        stored = self._folder.load(self._name, self._text((key, meaning)))
        return stored[1] if stored is not None and stored[0] == key else None

    def save(self, key, data) -> None:
        meaning = _meaning_of(key[0])
        if meaning is not None:
            self._folder.save(self._name, self._text((key, meaning)), (key, data))

    def flush(self) -> None:
        """Forget all signatures of this function."""
        self._folder.clear(self._name)


class KernelCache(FunctionCache):
    """Numba's cache of a function, compiled with these options of ``numba.njit``.

    Raises RuntimeError where there is no directory for it, or none to be trusted.
    """

    def __init__(self, py_func, options: dict):
        super().__init__(py_func)
        folder = CacheFolder(Path(self.cache_path) / FOLDER)
        if why := folder.why_not_trusted:
            raise RuntimeError(f"cannot cache function {py_func.__qualname__!r} in {folder.path}: {why}")
        stamp = self._impl.locator.get_source_stamp()
        depends_on = (code_depends_on(), stamp, _described(py_func.__code__), sorted(options.items()))
        self._cache_file = _Entries(folder, self._impl.filename_base, depends_on)


def _meaning_of(signature) -> list | None:
    """What types that a user has defined are in this process: their names need not mean the same in another.

    None where nothing says it: of a jitclass, of another function, of a type of somebody else's package.
    """
    if isinstance(signature, str):  # which can only name Numba's own
        return []
    found: list = []
    for numba_type in getattr(signature, "args", signature):
        if type(numba_type).__module__.partition(".")[0] != "numba" or isinstance(numba_type, _UNTOLD):
            return None
        if isinstance(numba_type, types.BaseNamedTuple):
            found.append(cast(Any, numba_type).fields)
        if isinstance(numba_type, types.EnumMember):
            found.append([(member.name, repr(member.value)) for member in cast(Any, numba_type.instance_class)])
        inner = [getattr(numba_type, name, None) for name in ("dtype", "type", "key_type", "value_type", "yield_type")]
        inner += getattr(numba_type, "types", ())
        inside = _meaning_of(tuple(each for each in inner if isinstance(each, types.Type) and each is not numba_type))
        if inside is None:
            return None
        found.append(inside)
    return found


_UNTOLD = (types.ClassType, types.ClassInstanceType, types.Dispatcher, types.DeferredType, types.FunctionType)


def _described(code: python_types.CodeType) -> tuple:
    """All of a function's code that its machine code depends on, in words that are the same in every process."""
    constants = tuple(_described(each) if isinstance(each, python_types.CodeType) else repr(each) for each in code.co_consts)
    return code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars


@functools.cache
def with_unique_symbols(pipeline: type) -> type:
    """A compiler like `pipeline`, a ``numba.core.compiler.CompilerBase``, of functions whose symbols no other process uses.

    Numba counts functions from 1 in every process, and their numbers are what tells symbols of the same name apart.
    """

    class UniqueSymbols(pipeline):
        def define_pipelines(self):
            identity = self.state.func_id
            if not hasattr(identity, "fastexchange_id"):
                identity.fastexchange_id = identity.unique_id = f"{identity.unique_id}x{uuid.uuid4().hex}"
                identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
            return super().define_pipelines()

    return UniqueSymbols
