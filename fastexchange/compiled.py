"""Native functions as C functions, compiled once per machine: the cache in which their machine code lives.

Its key is the source of the whole package, not of one file, because helpers are inlined across files; and the versions of
Numba, of Python and of NumPy, and the processor. A function's address is asked for when it is needed: importing this
package compiles and loads nothing.
"""

import contextlib
import functools
import hashlib
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import caching, config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from .native import native_inline

__all__ = ["CFunction", "CacheContents", "CodeCache", "CodeUnit", "Part", "cfunction", "code_cache", "part"]


def _find_locator():
    """Numba's choice of a writable cache directory for this file, None where there is none."""
    for locator_class in caching.CacheImpl._locator_classes:
        locator = locator_class.from_function(_find_locator, __file__)
        if locator is not None:
            return locator
    return None


def _cache_tag() -> str:
    """What the names of the cache's files begin with."""
    return f"fastexchange-{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"


def _source_stamp() -> str:
    """A digest of the package's source: helpers are inlined across files, so any change recompiles."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _jit_enabled():
    """``NUMBA_DISABLE_JIT`` is about users' functions; Numba, which needs its own compiled for ours, asks it each time."""
    settings: Any = config
    before, settings.DISABLE_JIT = settings.DISABLE_JIT, 0
    try:
        yield
    finally:
        settings.DISABLE_JIT = before


class CodeUnit:
    """One LLVM function under construction, in a code library of its own. Its symbol is unique, also across processes."""

    def __init__(self, context, name: str, function_type):
        self.symbol = f"fastexchange.{name}.{uuid.uuid4().hex}"
        self.library = context.codegen().create_library(self.symbol)
        self.library.enable_object_caching()  # before it is finalised
        self.module = self.library.create_ir_module(self.symbol)
        self.function = ir.Function(self.module, function_type, self.symbol)
        # No vector registers for integer work: a wide load of words that were stored one by one waits for all of those
        # stores to leave the pipeline, 5 ns for each argument.
        self.function.attributes.add("noimplicitfloat")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.linked: list = []
        """Libraries whose functions it calls, to be inlined from."""

    def stack_slot(self, llvm_type):
        """Uninitialised memory on the stack, a pointer to `llvm_type`.

        At the very start: whatever stands behind a call in the first block is no longer in it once the call is inlined, and
        the stack pointer moves while the function runs.
        """
        entry = self.builder.function.entry_basic_block
        with self.builder.goto_block(entry):
            self.builder.position_at_start(entry)
            return self.builder.alloca(llvm_type)

    def finish(self, extra=None):
        """Compile it. Returns ``(library, symbol, extra)``, what :meth:`CodeCache.get` stores."""
        self.library.add_ir_module(self.module)
        for library in self.linked:
            self.library.add_linking_library(library)
        self.library.finalize()
        return self.library, self.symbol, extra


class CacheContents(NamedTuple):
    """What a :class:`CodeCache` has on disk, for this interpreter."""

    entries: int
    """How many functions."""
    size: int
    """What their files and the index take, in bytes."""
    stale: int
    """Files of other versions of the package or of Numba, which are overwritten one by one."""
    damaged: str
    """Why the index cannot be read; nothing if it can. The next entry begins a new one."""


class CodeCache:
    """Machine code by key, on disk where a directory is writable, else in memory only.

    An entry is a symbol's name and its code library. Code is never freed while the process lives.
    """

    def __init__(self):
        self._libraries: dict[tuple, tuple[object, int, object]] = {}
        self.hits = 0
        self.misses = 0

    @functools.cached_property
    def directory(self) -> str | None:
        """Where the machine code is kept, None where no directory is writable."""
        locator = _find_locator()
        return locator.get_cache_path() if locator else None

    @functools.cached_property
    def _file(self):
        if self.directory is None:
            return None
        return caching.IndexDataCacheFile(self.directory, _cache_tag(), _source_stamp())

    def contents(self) -> CacheContents | None:
        """What is on disk; None where no directory is writable. Raises OSError for a directory that cannot be looked at."""
        if self.directory is None:
            return None
        damaged = ""
        try:
            named = set(self._file._load_index().values())
        except Exception as error:
            named, damaged = set(), f"{type(error).__name__}: {error}"
        files = list(Path(self.directory).glob(f"{_cache_tag()}.*"))
        entries = [path for path in files if path.name in named]
        stale = sum(path.suffix == ".nbc" for path in files) - len(entries)
        return CacheContents(len(entries), sum(path.stat().st_size for path in files), stale, damaged)

    @global_compiler_lock
    def get(self, key: tuple, build, persist: bool = True):
        """The address of the function `key`, and the extra data stored with it.

        `build` is called without arguments when no machine code for the key is known; it returns
        ``(library, symbol, extra)``, the library finalised with its object code kept. With ``persist=False`` the code is
        for this process only: what the key's ``repr`` says does not identify it in another.
        """
        known = self._libraries.get(key)
        if known is None:
            known = (self._load(key) if persist else None) or self._build(key, build, persist)
            self._libraries[key] = known
        return known[1:]

    def _full_key(self, key: tuple) -> tuple:
        codegen = cpu_target.target_context.codegen()
        debug = bool(config.DEBUG_JIT)  # type: ignore[attr-defined]  # Numba sets its settings at run time
        return (repr(key), codegen.magic_tuple(), sys.version_info[:3], np.__version__, debug)

    def _load(self, key: tuple):
        if self._file is None:
            return None
        try:
            stored = self._file.load(self._full_key(key))
            if stored is None:
                return None
            state, symbol, extra = stored
            library = cpu_target.target_context.codegen().unserialize_library(state)
            address = library.get_pointer_to_function(symbol)
        except Exception:  # a damaged or foreign file is no reason to fail: the cache begins anew
            self._forget_files()
            return None
        self.hits += 1
        return library, address, extra

    def _forget_files(self) -> None:
        try:
            self._file.flush()
        except OSError:
            pass

    def _build(self, key: tuple, build, persist: bool):
        with _jit_enabled():
            library, symbol, extra = build()
        self.misses += 1
        if persist and self._file is not None:
            try:
                self._file.save(self._full_key(key), (library.serialize_using_object_code(), symbol, extra))
            except Exception:  # a full or readonly disk, a damaged index: the code works all the same, in this process
                self._forget_files()
        return library, library.get_pointer_to_function(symbol), extra


code_cache = CodeCache()


class Part:
    """A native function to be compiled into functions that are put together at run time (``entry.fast_entry``)."""

    def __init__(self, python_function, signature):
        self._python_function = python_function
        self._signature = signature
        self.__name__ = python_function.__name__
        self.__doc__ = python_function.__doc__

    @functools.cached_property
    def _compiled(self):
        body = native_inline(self._python_function)
        body.compile(self._signature)
        return body.overloads[self._signature.args]

    def call(self, unit: CodeUnit, values: list):
        """Emit a call of it, with LLVM values, into `unit`. Returns the result, an LLVM value."""
        convention = cpu_target.target_context.call_conv
        name = self._compiled.fndesc.llvm_func_name
        callee = unit.module.globals.get(name)
        if callee is None:
            unit.linked.append(self._compiled.library)
            callee_type = convention.get_function_type(self._signature.return_type, self._signature.args)
            callee = ir.Function(unit.module, callee_type, name)
        # As convention.call_function does it, but with the stack slots where they cost nothing.
        slots = [unit.stack_slot(pointer.pointee) for pointer in callee.function_type.args[:2]]
        unit.builder.call(callee, [*slots, *values])
        return None if self._signature.return_type == types.void else unit.builder.load(slots[0])


def part(signature):
    """Decorator: a :class:`Part` with this Numba signature."""
    return lambda python_function: Part(python_function, signature)


def _called_by(library) -> Iterator[str | None]:
    """The names of what a kernel, and what is compiled into it, calls; None for a call through a pointer.

    Without Numba's wrappers around kernels, which run before and after them, and without what counts references.
    """
    for function in library._get_module_for_linking().functions:
        if function.is_declaration or function.name.startswith(("_ZN7cpython", "cfunc.", "NRT_")):
            continue
        for callee in re.findall(r"^[^;\n]*?\b(?:call|invoke)\b[^@%\n]*(@\"?[\w.$]+|%|$)", str(function), re.MULTILINE):
            yield callee.lstrip('@"') if callee.startswith("@") else None


_RUN_PYTHON = ("PyObject_Call", "PySys_FormatStdout", "PyEval_SaveThread")


def may_run_python(library) -> bool:
    """Whether Python code may run while the machine code of a kernel, and of what it calls, does.

    It runs some itself (an ``objmode`` block, ``print``, a callback), or lets other threads do so: a parallel loop gives up the
    GIL for as long as it takes. Where the code cannot be looked at, it may; and so may a function behind a pointer (ctypes, cffi,
    Numba's first-class functions).
    """
    try:
        return any(name is None or name.startswith(_RUN_PYTHON) for name in _called_by(library))
    except Exception:
        return True


def can_be_linked(library) -> bool:
    """Whether a kernel can be made part of other code: it was not loaded from a cache, and no Python code runs with it."""
    try:
        library._get_module_for_linking()
    except Exception:
        return False
    return not may_run_python(library)


def may_keep_arguments(library) -> bool:
    """Whether a kernel may still hold arrays of its arguments when it has returned: it takes references, or calls the unknown."""
    takes = ("NRT_incref", "NRT_adapt", "NRT_MemInfo_acquire", "Py")
    return any(name is None or name.startswith(takes) for name in _called_by(library))


class CFunction:
    """A C function written in this package's dialect: compiled, or loaded from the cache, when its address is asked for.

    Numba compiles the body. The C entry point around it is made here and not by ``numba.cfunc``, whose wrapper keeps the
    body from being inlined into it (1.5 ns a call) and prints exceptions that these functions never raise.
    """

    def __init__(self, python_function, result, arguments):
        self._python_function = python_function
        self._result, self._arguments = result, tuple(arguments)
        self._address = 0
        self.__name__ = python_function.__name__
        self.__doc__ = python_function.__doc__

    @property
    def address(self) -> int:
        """The address of the C function in this process. It holds for the life of the process."""
        # No cached_property: before Python 3.12 that has a lock of its own, which a fork may leave held in the child.
        if not self._address:
            key = ("function", self._python_function.__module__, self.__name__)
            self._address = code_cache.get(key, self._compile)[0]
        return self._address

    def _compile(self):
        context = cpu_target.target_context
        c_result = ir.VoidType() if self._result == types.void else context.get_value_type(self._result)
        c_type = ir.FunctionType(c_result, [context.get_value_type(t) for t in self._arguments])
        unit = CodeUnit(context, f"function.{self.__name__}", c_type)
        value = Part(self._python_function, self._result(*self._arguments)).call(unit, list(unit.function.args))
        if self._result == types.void:
            unit.builder.ret_void()
        else:
            unit.builder.ret(value)
        return unit.finish()


def cfunction(result, *arguments):
    """Decorator: a C function with this signature (Numba types), compiled on first use and cached on disk."""
    return lambda python_function: CFunction(python_function, result, arguments)
