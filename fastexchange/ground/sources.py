"""What the modules of this package consist of, by which kept machine code is known to be theirs.

A module is known by the bytes of its source file. One that is installed as bytecode alone, without a source file, is known by its
code, whatever folder and line it was compiled from. Both may lie in a folder or in a zip file.
"""

import functools
import hashlib
import importlib
import marshal
import os
import pkgutil
import re
import time
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["ROOT", "code_digest", "digest_of", "is_known", "read", "source_files", "source_stamp"]

_PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[1]
_IMPORT = re.compile(r"\nfrom (\.+)([\w.]*) import (\([^)]*\)|[^\n]*)")
_NOT_A_NAME = re.compile(r"#.*| as \w+")
_NAME = re.compile(r"\w+")
_BEGAN = time.time()
_HEADER_BYTES = 16  # of a .pyc: magic number, flags, and the source's time and size or its digest


@functools.cache
def _files() -> dict[str, Path]:
    """The files of this package's modules, by the modules' names. An ``__init__.py`` has its package's name."""
    found: dict[str, Path] = {}
    for folder, names in _folders():
        package = ".".join((_PACKAGE, *folder.relative_to(ROOT).parts))
        for name in sorted(names, reverse=True):  # a source file is found after its .pyc, and takes its place
            stem, _, suffix = name.rpartition(".")
            if suffix in ("py", "pyc"):
                found[package if stem == "__init__" else f"{package}.{stem}"] = folder / name
    return found


def _folders():
    """Yield the package's folders, and the names of the files in each."""
    if ROOT.is_dir():
        for at, folders, names in os.walk(ROOT):
            folders[:] = set(folders) - {"__pycache__"}  # may hold thousands of cache entries
            yield Path(at), names
        return
    pending = [ROOT]  # in a zip file
    while pending:
        folder = pending.pop()
        modules = list(pkgutil.iter_modules([str(folder)]))
        pending += [folder / module.name for module in modules if module.ispkg]
        stems = ["__init__", *(module.name for module in modules if not module.ispkg)]
        yield folder, [f"{stem}{suffix}" for stem in stems for suffix in (".pyc", ".py") if _is_there(folder / f"{stem}{suffix}")]


def read(path: Path) -> bytes:
    """The bytes of a file of this package, also in a zip file. Raises OSError."""
    if ROOT.is_dir():
        return path.read_bytes()
    loader: Any = importlib.import_module(_PACKAGE).__spec__.loader  # type: ignore[union-attr]
    return loader.get_data(str(path))


def _is_there(path: Path) -> bool:
    try:
        return bool(read(path)) or True
    except OSError:
        return False


def _has_changed(path: Path) -> bool:
    try:
        return os.stat(path).st_ctime > _BEGAN
    except OSError:  # in a zip file
        return False


def is_known(module: str) -> bool:
    """Whether the code of a module of this package can be known."""
    return module in _files()


@functools.cache
def digest_of(module: str) -> tuple[str, bool]:
    """The digest of a module, and whether it is of its source file, not of its code. Raises OSError."""
    data, is_source = read(_files()[module]), _files()[module].suffix == ".py"
    return hashlib.sha256(data).hexdigest() if is_source else code_digest(marshal.loads(data[_HEADER_BYTES:])), is_source


def code_digest(code: CodeType) -> str:
    """A digest of what a code object does, without the file, the lines and the folder of which it was made."""
    return hashlib.sha256(repr(_described(code)).encode("utf-8", "surrogatepass")).hexdigest()


def _described(value: Any) -> Any:
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_name
        counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
        handlers = getattr(value, "co_exceptiontable", b"")  # from CPython 3.11 on
        return value.co_code, names, counts, handlers, _described(value.co_consts)
    if isinstance(value, (tuple, frozenset)):
        inside = list(map(_described, value))
        return type(value).__name__, inside if isinstance(value, tuple) else sorted(map(repr, inside))
    return type(value).__name__, repr(value)


@functools.cache
def _imports_of(module: str) -> frozenset[str]:
    """The modules of this package that a module imports at its own import; all, if there is no source file to read them in."""
    files = _files()
    if files[module].suffix != ".py":
        return frozenset(files)
    package = module.split(".") if files[module].name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for dots, path, names in _IMPORT.findall(read(files[module]).decode()):
        base = ".".join(package[: len(package) - len(dots) + 1] + ([path] if path else []))
        for name in _NAME.findall(_NOT_A_NAME.sub("", names)):
            submodule = f"{base}.{name}"
            found.add(submodule if submodule in files else base)
    return frozenset(found - {_PACKAGE})


def _modules_with(*given: str) -> set[str]:
    """Modules and all modules of this package that their imports import."""
    pending, modules = list(given), set(given)
    while pending:
        new = _imports_of(pending.pop()) - modules
        modules |= new
        pending += new
    return modules


def source_files(*modules: str) -> dict[str, Path]:
    """The files on which the machine code of modules of this package depends, by the names of their modules."""
    return {name: _files()[name] for name in _modules_with(*modules)}


@functools.cache
def source_stamp(*modules: str) -> str:
    """A digest of modules and of all that their imports import; "" if one is not known: nothing is cached on disk then.

    A file that has changed since this process imported the package is not what runs.
    """
    if not all(map(is_known, modules)):
        return ""
    told = [f"{name} {digest_of(name)[0]}" for name in sorted(_modules_with(*modules))]
    if any(map(_has_changed, source_files(*modules).values())):
        return ""
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
