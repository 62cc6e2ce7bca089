"""Files of machine code that packages carry for their own kernels: ``mypackage/_kernels/<ABI of Python>.<level>.code``.

``python -m fastexchange precompile mypackage --into mypackage`` writes them. A *level* is a set of processor features, such as
``x86-64-v3``: of the files for this Python, the one with the highest level is read whose features the processor has. What is in a
file is found by keys without paths, times and users. A file, like Python files beside it, may lie in a zip file.

Source of the levels: System V Application Binary Interface, AMD64 Architecture Processor Supplement, 3.1.1.
"""

import ast
import functools
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .disk_cache import NotBelieved, digest, framed, framed_key, unframed
from .log import say
from .numba_code import native_code_depends_on, processor, settings, this_processor
from .numba_internals import dumps
from .passing import reraise_passing
from .sources import source_stamp

__all__ = [
    "FOLDER", "LEVELS", "CodeFile", "FileEntries", "best_of", "code_file", "fitting_levels", "installed", "made_for",
    "name_of_file", "native_processor", "opened", "package_with_code", "why_not",
]  # fmt: skip

FOLDER = "_kernels"
_FORMAT = 3
"""Raised when the code of kernels gets to mean something else: see ``calls.shipped_kernels``."""
_V2 = "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"
_V3 = *_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"
_V4 = *_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"
LEVELS: dict[str, tuple[str, ...]] = {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2, "x86-64": (), "aarch64": ()}
"""From the highest down, and their features, by LLVM's names."""
_WHAT = (
    "the format of its file", "the ABI of Python", "the version of Numba", "the version of llvmlite",
    "the size of Numba's dispatcher", "the size of a tuple without items", "whether None is immortal", "the version of NumPy",
    "Numba's settings", "its level",
)  # fmt: skip
_VERSIONS_OF = {"the version of Numba": "Numba", "the version of llvmlite": "llvmlite", "the version of NumPy": "NumPy"}


def fitting_levels() -> list[str]:
    """The levels whose features the processor has, from the highest down.

    It does not have those that Numba was told to leave out, as by NUMBA_CPU_NAME=generic.
    """
    triple, _, features = processor()
    has = _has(features)
    machine = {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}.get(own := triple.partition("-")[0], own)
    return [name for name, wanted in LEVELS.items() if name.startswith(machine) and has.issuperset(wanted)]


def _has(features: str) -> set[str]:
    return {each[1:] for each in features.split(",") if each.startswith("+")}


def native_processor() -> tuple[str, str, str]:
    """The processor whose native code this process loads, and keeps what it makes for: LLVM's triple, a name and features.

    It is the one that this process runs on. Only where Numba was told to make code that might not run there, it is that one.
    """
    triple, name, features = processor()
    own_name, own_features = this_processor()
    has = _has(own_features)
    if name != own_name and has.issuperset(_has(features)) and (name == "generic" or has.issuperset(LEVELS.get(name, ("?",)))):
        return triple, own_name, own_features
    return triple, name, features


def made_for(level: str, abi: str = "") -> tuple:
    """What code for a level depends on besides its sources. `abi`: of the Python that it is for, if not of this one."""
    own, *packages = native_code_depends_on()
    numpy = ".".join(np.__version__.split(".")[:2])  # Numba's code differs by these only
    return _FORMAT, abi or own, *packages, numpy, settings(), level


def name_of_file(level: str, abi: str = "") -> str:
    """The name of the file for a level. `abi`: as for :func:`made_for`."""
    return f"{abi or native_code_depends_on()[0]}.{level}.code"


class FileEntries:
    """Entries in place of a ``disk_cache.CacheFolder``: by the digests of their keys, the key and the pickled value."""

    def __init__(self, entries: dict[str, tuple[str, bytes]] | None = None) -> None:
        self.entries: dict[str, tuple[str, bytes]] = entries or {}

    def load(self, name: str, key: str) -> Any:
        """Return the value of the entry with this key; None without one, or if it cannot be made here."""
        if not self.has(name, key):
            return None
        try:
            return pickle.loads(self.entries[digest(key)][1])
        except Exception as error:  # unpickling may raise anything, for example for a class that was removed
            reraise_passing(error)
            return None

    def has(self, name: str, key: str) -> bool:
        """Whether there is an entry with this key."""
        return self.entries.get(digest(key), ("", b""))[0] == key

    def save(self, name: str, key: str, value: Any) -> bool:
        """Keep an entry. Raises what pickling raises."""
        self.entries[digest(key)] = key, dumps(value)
        return True

    def keys(self) -> dict[str, str]:
        """The key of each entry, by its name."""
        return {name: key for name, (key, _) in self.entries.items()}

    def claim(self, name: str, key: str) -> None:
        """Return None: nobody else makes these entries."""


class MadeElsewhere(NotBelieved):
    """The file of a package is for another installation. `advice`: what the user can do."""

    advice = ""

    def __init__(self, package: str, what: str, there: Any, here: Any) -> None:
        if isinstance(there, list) and (changed := [each for each in zip(there, here, strict=False) if each[0] != each[1]]):
            ((name, there), (_, here)), *_ = changed
            what = f"numba.config.{name}"
            there, here = (re.sub(r"_OptLevel\((.*)\)", r"\1", value) for value in (there, here))
            if (variable := f"NUMBA_{name.removesuffix('_DEFAULT')}") in os.environ:
                what, self.advice = variable, f"unset {variable}"
        elif what in _VERSIONS_OF:
            self.advice = f"install {_VERSIONS_OF[what]} {there}, or build {package} with {here}"
        super().__init__(f"it was made for another installation: {what} is {there} there, {here} here")


class CodeFile(FileEntries):
    """The content of a file."""

    def __init__(self, path: Path, level: str, entries: dict[str, tuple[str, bytes]]) -> None:
        super().__init__(entries)
        self.path, self.level = path, level

    def made_for(self) -> tuple:
        """What its code has to be made for now: a program may change Numba's settings."""
        return made_for(self.level)

    def text(self, key: tuple, stamp: str) -> str:
        """The key of native code that goes with kernels, made from sources with this stamp."""
        return repr((key, stamp, self.made_for()))

    @staticmethod
    def packed(entries: dict[str, tuple[str, bytes]], package: str, level: str, abi: str) -> bytes:
        """The bytes of a package's file, with code that was made in this process."""
        return framed(repr((*made_for(level, abi), _half(), package)), dict(sorted(entries.items())))

    @classmethod
    def unpacked(cls, path: Path, package: str, level: str, data: bytes) -> "CodeFile":
        """Read the bytes of a package's file. Raises NotBelieved, with the reason, if the code is not for this process."""
        found = framed_key(data)
        try:
            *given, half, owner = ast.literal_eval(found)
            differences = [each for each in zip(_WHAT, given, made_for(level), strict=True) if each[1] != each[2]]
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise NotBelieved("it has the format of another version of fastexchange") from None
        for what, there, here in differences:
            raise MadeElsewhere(package, what, there, here)
        if owner != package:
            raise NotBelieved(f"it is of the package {owner}")
        if half and half != source_stamp(_HALF):
            raise NotBelieved("it was made with another version of fastexchange's half precision")
        entries = unframed(data, found)
        if not isinstance(entries, dict):
            raise NotBelieved("it has no entries")
        return cls(path, level, entries)


_HALF = f"{__name__.rpartition('.')[0]}.half.known"


def _half() -> str:
    """A digest of what code may have of this package, half precision, if this process has loaded that; else ""."""
    return source_stamp(_HALF) if _HALF in sys.modules else ""


why_not: dict[str, str] = {}
"""By package, why the best code in its folder is not used; "" if it is. Of packages whose kernels have been called."""
opened: list[CodeFile] = []
"""The files that this process has read."""


_with_code: dict[str, str | None] = {}


def package_with_code(module: str) -> str | None:
    """The package, of those that a module lies in, that has a folder for code: the innermost. Reads nothing of it."""
    if module not in _with_code:
        parts = module.split(".")
        names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        found = next((name for name in names if any(_exists(name, folder) for folder in _folders_of(name))), None)
        if found is None and names[-1] not in sys.modules:  # of a pickle: it may be imported later
            return None
        _with_code[module] = found
    return _with_code[module]


def _folders_of(package: str) -> list[Path]:
    """Where a package may have code. Empty for a module that is no package."""
    return [Path(str(each), FOLDER) for each in getattr(sys.modules.get(package), "__path__", ())]


def _exists(package: str, folder: Path) -> bool:
    if os.path.isdir(folder.parent):
        return os.path.isdir(folder)
    return any(_content(package, folder / name_of_file(level)) is not None for level in LEVELS)  # in a zip file


def _content(package: str, path: Path) -> bytes | None:
    """The bytes of a file of a package; None without one. Raises OSError if it cannot be read."""
    if os.path.isdir(path.parent):
        return path.read_bytes() if os.path.lexists(path) else None
    loader: Any = getattr(getattr(sys.modules.get(package), "__spec__", None), "loader", None)
    try:
        return loader.get_data(str(path))
    except (OSError, AttributeError):
        return None


def best_of(package: str, folders: list[Path]) -> tuple[CodeFile | None, str, str]:
    """Read the file for this process in the folders of a package.

    Returns it, why it, or a better one, is not used, and what the user can do, if that is known.
    """
    why = advice = ""
    for level in fitting_levels():
        for folder in folders:
            path = folder / name_of_file(level)
            try:
                if (data := _content(package, path)) is not None:
                    return CodeFile.unpacked(path, package, level, data), why, advice
            except (OSError, NotBelieved) as error:
                reraise_passing(error.__cause__ or error)
                if not why:
                    why, advice = f"that for {level}: {error} ({path})", getattr(error, "advice", "")
    if not why:
        why = f"there is none for {native_code_depends_on()[0]} and {', '.join(fitting_levels()) or 'this processor'}"
        advice = "unset NUMBA_CPU_NAME" if "NUMBA_CPU_NAME" in os.environ else ""
    return None, why, advice


@functools.cache
def code_file(package: str) -> CodeFile | None:
    """The code of a package for this process; None without any: :data:`why_not` says why."""
    found, why_not[package], _ = best_of(package, _folders_of(package))
    if found is not None:
        opened.append(found)
    if why_not[package]:
        say("package %s: machine code is not used: %s", package, why_not[package])
    return found


def installed() -> dict[str, list[Path]]:
    """The folders for code of the packages on ``sys.path``, by the packages' names. Imports none of them."""
    found: dict[str, list[Path]] = {}
    for path in map(Path, dict.fromkeys(sys.path)):
        for folder in [*path.glob(f"*/{FOLDER}"), *path.glob(f"*/*/{FOLDER}")]:
            if (folder.parent / "__init__.py").exists() and any(folder.glob("*.code")):
                found.setdefault(".".join(folder.parent.relative_to(path).parts), []).append(folder)
    return found
