"""Make the machine code of a package's kernels for one processor level: what ``precompile --into`` starts, once for each level.

Numba makes code for one processor in a process, so its settings say for which: see :func:`settings_for`. This process writes
files into a folder, one for each level: the code, and a report.
"""

import contextlib
import functools
import importlib.machinery
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from . import CommandError

__all__ = ["LEVELS_HERE", "levels_by_process", "run_make", "settings_for"]

_ABI = str(sysconfig.get_config_var("SOABI"))
_CROSS = {"aarch64": ("-x86_64-linux-", "-aarch64-linux-", "aarch64-unknown-linux-gnu")}
"""Levels of another platform, made where Python's ABI names this one: what it is called there; LLVM's name."""
LEVELS_HERE: tuple[str, ...] = ()
"""The levels for which code can be made on this platform. On Windows a Python has no name for its ABI, and so none."""
if _ABI == "None":
    pass
elif platform.machine() in ("x86_64", "AMD64"):
    LEVELS_HERE = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", *(each for each in _CROSS if _CROSS[each][0] in _ABI))
elif platform.machine() in ("aarch64", "arm64"):
    LEVELS_HERE = ("aarch64",)


def levels_by_process(levels: list[str]) -> list[list[str]]:
    """The levels of each process: those of another platform are made of the code for all processors of this one."""
    of_all = [level for level in levels if level in ("x86-64", "aarch64")]
    return [*([of_all] if of_all else []), *([level] for level in levels if level not in of_all)]


def settings_for(levels: list[str], folder: str) -> dict[str, str]:
    """The environment of the process for these levels: its code is the same on every machine. `folder`: for what it caches.

    Without levels: of one that makes native code for this machine.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "FASTEXCHANGE_"))}
    if not levels:
        return environment
    name = "generic" if levels[0] in ("x86-64", "aarch64") else levels[0]
    return environment | {
        "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": folder, "NUMBA_DISABLE_INTEL_SVML": "1",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip


class _Level:
    """The entries for one level, and how code is written for it."""

    def __init__(self, level: str) -> None:
        from ..ground.package_code import FileEntries

        here, there, triple = _CROSS.get(level, ("", "", ""))
        self.level, self.is_here = level, not (here and here in _ABI)
        self.abi, self._triple = (_ABI, "") if self.is_here else (_ABI.replace(here, there), triple)
        self.entries = FileEntries()
        self.report: list[tuple[str, str, int, str]] = []

    def serialized(self, library, symbols) -> Any:
        from ..ground import numba_code

        if self.is_here:
            return numba_code.serialized(library, symbols)
        return numba_code.serialized_for(self._triple, library, symbols)

    def reduced(self, compiled) -> Any:
        from ..ground import numba_code

        return numba_code.reduced(compiled) if self.is_here else numba_code.reduced_for(self._triple, compiled)


def _maker(package: str, levels: "list[_Level]"):
    """What keeps the code that this process compiles: ``calls.shipped_kernels.make_cache``, and ``code_cache.make``."""
    from ..calls import shipped_kernels
    from ..calls.code_in_front import CodeInFront
    from ..calls.kernel_cache import with_unique_symbols
    from ..ground.disk_cache import digest
    from ..ground.numba_code import number_names, why_not_kept
    from ..ground.numba_internals import compile_with, dumps, pipeline_of
    from ..ground.package_code import made_for
    from ..ground.sources import source_stamp

    class Collecting(CodeInFront):
        def __init__(self, kernel) -> None:
            options = kernel._compiled_with()
            super().__init__(kernel.py_func, options)
            keys_of = shipped_kernels.keys_of
            self._each = []
            for each in levels:
                its = functools.partial(made_for, each.level, each.abi)
                self._each.append((each, keys_of(self._py_func, options, each.entries, its, kernel._is_numbas)))
            self._begun: dict[tuple, tuple] = {}

        def load_overload(self, sig, target_context):
            texts = [keys.text(self._key_for(each, sig)) for each, keys in self._each]
            naming = contextlib.ExitStack()
            naming.enter_context(number_names(digest(texts[0] or "")[:24]))
            self._begun[_given(sig)] = texts, naming

        def save_overload(self, sig, data):
            texts, naming = self._begun.pop(_given(sig))
            naming.close()
            for (each, keys), text in zip(self._each, texts, strict=True):
                size, why = 0, why_not_kept(data)
                key = self._key_for(each, sig)
                if not why and (text is None or text != keys.text(key)):
                    why = str(keys.why_no_text(key)) if text is None else "a value that it names has changed meanwhile"
                if not why:
                    try:
                        made = dumps((key, (data.signature, each.reduced(data))))
                        if _OF_THIS_PROCESS.search(made) or os.path.abspath(package.partition(".")[0]).encode() in made:
                            why = "it has addresses or paths of this process, as generators and objmode blocks have"
                        else:
                            each.entries.entries[digest(text)] = text, made
                            size = len(made)
                    except Exception as error:  # pickling may raise any exception
                        why = f"it cannot be pickled: {type(error).__name__}: {error}"
                shown = ", ".join(map(str, data.signature.args))
                each.report.append((f"{self._py_func.__module__}:{self._py_func.__qualname__}", shown, size, why))

        def has_code(self, signature, codegen):
            return False

        @staticmethod
        def _key_for(each: _Level, sig) -> tuple:
            return _given(sig), each.level

    def make_cache(kernel):
        if not f"{kernel.py_func.__module__}.".startswith(f"{package}."):
            return None
        compile_with(kernel, with_unique_symbols(pipeline_of(kernel), kernel._is_numbas))
        return Collecting(kernel)

    def make(key: tuple, modules: tuple[str, ...], build):
        texts = [repr((key, source_stamp(*modules), made_for(each.level, each.abi))) for each in levels]
        with number_names(digest(texts[0])[:24]):
            library, symbols, extra = build()
        for each, text in zip(levels, texts, strict=True):
            each.entries.save("", text, (each.serialized(library, symbols), extra))
        return library, tuple(map(library.get_pointer_to_function, symbols)), extra

    return make_cache, make


def _given(sig) -> tuple:
    from numba.core import sigutils

    return tuple(sigutils.normalize_signature(sig)[0])


_OF_THIS_PROCESS = re.compile(rb"(?:(?<![0-9A-Za-z])|_20)0x[0-9a-f]{10,16}(?![0-9a-f])")
"""An address in a text, also in a symbol of Numba's, where a space is ``_20``; not a part of the names that are made here."""


class _Named(importlib.machinery.SourceFileLoader):
    """Loads a module whose code has a path from the folder of its package: what Numba compiles in of it is equal everywhere."""

    fastexchange_root = ""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), os.path.relpath(path, self.fastexchange_root))


class _Finder:
    """Finds the modules of a package."""

    def __init__(self, package: str) -> None:
        self._package = package.partition(".")[0]

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != self._package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            root = Path(spec.loader.path).parents[name.count(".") + (spec.submodule_search_locations is not None)]
            if name == self._package:
                os.chdir(root)  # Numba looks for a function's file
            spec.loader = _Named(spec.loader.name, spec.loader.path)
            spec.loader.fastexchange_root = str(root)
        return spec


def run_make(levels: list[str], folder: str, package: str, targets: list[str], native: str | None) -> int:
    """Compile what the targets name, and write the code of the package's kernels and a report for each level.

    `native`: the folder for native code of this package that is not shipped. Without targets: compiles that, and nothing else.
    (What is compiled before in a process changes the names that Numba gives to what is compiled later.)
    """
    from .. import accelerate
    from ..calls import shipped_kernels
    from ..calls.kernel import FastKernel
    from ..dispatch.runtime import runtime
    from ..ground.cfunction import code_cache
    from ..ground.disk_cache import CacheFolder
    from ..ground.numba_code import number_names
    from ..ground.package_code import CodeFile, name_of_file
    from ..ground.safe_repr import one_line
    from .native_code import native_code
    from .targets import work_of

    if native is not None:
        code_cache.folders = [CacheFolder(Path(native))]
    if not targets:
        for function in native_code():
            function.address  # noqa: B018 - reading it loads or compiles the function
        return 0 if runtime().is_native else 1
    each_level = [_Level(level) for level in levels]
    sys.meta_path.insert(0, _Finder(package))
    accelerate(package)  # its functions of plain njit, too: processes that do so find their code
    shipped_kernels.make_cache, code_cache.make = _maker(package, each_level)
    failed: list[tuple[str, str, int, str]] = []
    with warnings.catch_warnings(), number_names(package):
        warnings.simplefilter("ignore")  # the processes of all levels would say the same
        for name, kernel, call in [each for target in targets for each in work_of(target, may_be_empty=True)]:
            if not isinstance(kernel, FastKernel):
                failed.append((name, "", 0, "kernels for CUDA are compiled on their device, by their own package"))
                continue
            if not f"{kernel.py_func.__module__}.".startswith(f"{package}."):
                failed.append((name, "", 0, f"it is a function of {kernel.py_func.__module__}, not of {package}"))
                continue
            try:
                kernel.precompile(call)
            except Exception as error:
                failed.append((name, str(call) if isinstance(call, str) else "", 0, f"not compiled: {one_line(error)}"))
    for each in each_level:
        data = CodeFile.packed(each.entries.entries, package, each.level, each.abi)
        Path(folder, name_of_file(each.level, each.abi)).write_bytes(data)
        Path(folder, f"{each.level}.json").write_text(json.dumps([*each.report, *failed]))
    return 0


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    try:
        sys.exit(run_make(**asked))
    except CommandError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
