"""Kernels' machine code that comes with their package: see ``ground.package_code``.

A key has everything that the code of a kernel depends on, as that of ``cache=True``, but for paths, times and the processor's
name: the format of this package, Python's ABI, the versions of Numba, llvmlite and NumPy, Numba's settings, the level, the
function with its lines, all that it names, its options, its types. So code that does not fit is not found, and compiled.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..ground import package_code
from ..ground.numba_internals import failures
from ..ground.package_code import CodeFile, code_file, package_with_code, why_not
from .code_in_front import CodeInFront, in_front
from .dependencies import dependencies
from .kernel_cache import Entries

__all__ = ["ShippedKernels", "keys_of", "shipped_kernels", "shipped_with"]


def keys_of(
    py_func: FunctionType, options: dict, entries: package_code.FileEntries, made_for: Callable[[], tuple], is_numbas: bool
) -> Entries:
    """The keys of a function's code, compiled with these options of ``numba.njit``, among the entries of a file.

    `is_numbas`: it is compiled as by ``numba.njit``, and nothing is found out of what it writes to (``writes``).
    """
    code = py_func.__code__
    name = py_func.__module__, py_func.__qualname__, code.co_firstlineno, code.co_linetable
    depends_on = lambda: (made_for(), name, is_numbas, dependencies(py_func, options))  # noqa: E731
    return Entries(entries, "", py_func, depends_on, warns=False)


class ShippedKernels(CodeInFront):
    """The code of one kernel. Its package's file is read when it first compiles."""

    def __init__(self, py_func: FunctionType, options: dict, package: str, is_numbas: bool) -> None:
        super().__init__(py_func, options)
        self.package, self._is_numbas = package, is_numbas
        self.loaded: dict[tuple, CodeFile] = {}
        """Where the code of a signature was found, by its argument types."""
        self._is_open = False
        self._file: CodeFile | None = None

    @property
    def file(self) -> CodeFile | None:
        """The package's file; None if it has none for this process."""
        if not self._is_open and not failures():
            self._file = code_file(self.package)
            if self._file is not None:
                self._keys = keys_of(self._py_func, self._options, self._file, self._file.made_for, self._is_numbas)
            self._is_open = True
        return self._file

    @property
    def note(self) -> str:
        """Where the code is, and that none of it fits if so: one line for ``explain``."""
        where, fitting, rest = self._described()
        return where if fitting or not rest else f"{where}: {rest}"

    def __str__(self):
        where, fitting, rest = self._described()
        return "\n".join([where, *fitting, *([rest] if rest else [])])

    def _described(self) -> tuple[str, list[str], str]:
        """Where the code is, or why it is not used; the signatures whose code fits; what is to say of the rest."""
        file = self.file
        if file is None:
            return f"not used: {why_not.get(self.package) or 'native code is not used here'}", [], ""
        assert self._keys is not None
        texts = file.keys()
        fit = self._keys.that_fit(texts)
        signatures = [f"({', '.join(map(str, file.load('', texts[name])[0][0]))})" for name in fit]
        if others := sum(self._name in text for name, text in texts.items() if name not in fit):
            why = "the function, what it names, or what others have registered with Numba, is another here"
            return f"for {file.level}, in {file.path}", signatures, f"{others} that do not fit: {why}"
        return f"for {file.level}, in {file.path}", signatures, "" if signatures else "nothing of this kernel"

    @property
    def _name(self) -> str:
        """What the keys of a function of this name have."""
        return f"({self._py_func.__module__!r}, {self._py_func.__qualname__!r}, "

    def _key(self, given, codegen):
        assert self._file is not None
        return given, self._file.level

    def _loaded(self, given, compiled):
        assert self._file is not None
        self.loaded[given] = self._file

    def stored(self, given: tuple) -> Any:
        """The code of a signature that was found here, as ``numba_code.reduced`` makes it; None if it fits no more."""
        if given not in self.loaded or self._file is None or self._keys is None:
            return None
        text = self._keys.text((given, self._file.level))
        found = self._file.load("", text) if text is not None else None
        return found[1][1] if found is not None else None

    def load_overload(self, sig, target_context):
        self.file  # noqa: B018 - reads it
        return super().load_overload(sig, target_context)

    def has_code(self, signature, codegen):
        self.file  # noqa: B018 - reads it
        return super().has_code(signature, codegen)


def shipped_with(kernel) -> ShippedKernels | None:
    """Where a kernel finds the code that comes with its package; None if its package has no folder for code."""
    return next((each for each in in_front(kernel) if isinstance(each, ShippedKernels)), None)


make_cache: Callable[[Any], CodeInFront | None] | None = None
"""In a process that makes the code of a package: makes the caches of new kernels, which keep it."""


def shipped_kernels(kernel) -> CodeInFront | None:
    """Make the cache of a new kernel for code that comes with its package; None if its package has no folder for code."""
    if make_cache is not None:
        return make_cache(kernel)
    package = package_with_code(str(kernel.py_func.__module__))
    return ShippedKernels(kernel.py_func, kernel._compiled_with(), package, kernel._is_numbas) if package else None
