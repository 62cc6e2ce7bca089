"""A cache of Numba's in front of another: for code that comes with a pickle, or with a package."""

from types import FunctionType
from typing import Any

from numba.core import sigutils

from ..ground.numba_code import rebuilt
from ..ground.numba_internals import failures, use_cache
from .dependencies import note_loaded
from .kernel_cache import Entries

__all__ = ["CodeInFront", "in_front", "last_behind", "put_behind", "put_in_front"]


class CodeInFront:
    """What it does not find, `behind` may have, the cache that the kernel has otherwise; code is saved there.

    `keys`: where it finds code. `py_func`, `options`: the kernel's function, and with what ``numba.njit`` compiles it.
    """

    behind: Any = None

    def __init__(self, py_func: FunctionType, options: dict, keys: Entries | None = None) -> None:
        self._py_func, self._options, self._keys = py_func, options, keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def _key(self, given: tuple, codegen) -> tuple:
        """The key of the code for these argument types."""
        raise NotImplementedError

    def _loaded(self, given: tuple, compiled) -> None:
        """Note that this code has been loaded."""

    def load_overload(self, sig, target_context):
        """Return the code for a signature, or else what `behind` has."""
        if failures():
            return self.behind.load_overload(sig, target_context)
        given, result = sigutils.normalize_signature(sig)
        stored = self._keys.load(self._key(tuple(given), target_context.codegen())) if self._keys is not None else None
        if stored is not None and result in (None, stored[0].return_type):
            made = rebuilt(target_context, stored[1])
            self._loaded(tuple(given), made)
            note_loaded(self._py_func, self._keys.described, self._options)
            return made
        return self.behind.load_overload(sig, target_context)

    def has_code(self, signature: tuple, codegen) -> bool:
        """Whether :meth:`load_overload` would find code for these argument types."""
        behind = getattr(self.behind, "has_code", None)
        is_here = not failures() and self._keys is not None and self._keys.has(self._key(signature, codegen))
        return is_here or (behind is not None and behind(signature, codegen))


def put_in_front(kernel, cache: CodeInFront) -> None:
    """Let a kernel look for its code in a cache first, and then where it has looked before."""
    cache.behind = kernel._cache
    use_cache(kernel, cache)


def put_behind(kernel, cache: Any) -> None:
    """Let a kernel keep its code in a cache, and look there for what those in front do not have."""
    if (last := in_front(kernel)):
        last[-1].behind = cache
    else:
        use_cache(kernel, cache)


def in_front(kernel) -> list[CodeInFront]:
    """The caches in which a kernel looks for its code before it looks into the last one."""
    found, cache = [], kernel._cache
    while isinstance(cache, CodeInFront):
        found.append(cache)
        cache = cache.behind
    return found


def last_behind(kernel) -> Any:
    """The cache where a kernel keeps its code."""
    last = in_front(kernel)
    return last[-1].behind if last else kernel._cache
