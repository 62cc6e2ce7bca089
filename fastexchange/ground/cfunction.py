"""Native functions as C functions, compiled once per machine: the cache in which their machine code lives.

An entry's key says all that its machine code depends on: the sources of the module that makes it and of all that this module
imports, because helpers are inlined across files; the versions and the build of Python, Numba, llvmlite and NumPy; and the
processor. A function's address is asked for when it is needed: importing this package compiles and loads nothing.
"""

import contextlib
import functools
import hashlib
import re
import uuid
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import config

from . import numba_internals
from .disk_cache import FOLDER, CacheFolder, user_cache
from .native import native_inline
from .numba_internals import global_compiler_lock

__all__ = ["CFunction", "CodeCache", "CodeUnit", "Part", "cfunction", "code_cache", "part"]

_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[1]
_IMPORT = re.compile(r"^from (\.+)([\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@functools.cache
def _file_of(module: str) -> Path | None:
    """The source file of a module of this package, None if there is none by that name."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def _imports_of(module: str) -> frozenset[str]:
    """The modules of this package that a module of it imports when it is imported itself."""
    file = _file_of(module)
    assert file is not None
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for dots, path, names in _IMPORT.findall(file.read_text()):
        base = package[: len(package) - len(dots) + 1] + (path.split(".") if path else [])
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", names)):
            submodule = ".".join([*base, name])
            found.add(submodule if _file_of(submodule) else ".".join(base))
    return frozenset(found - {_PACKAGE})


@functools.cache
def source_stamp(module: str) -> str:
    """A digest of the sources on which machine code depends that a module of this package makes."""
    pending, modules = [module], {module}
    while pending:
        new = _imports_of(pending.pop()) - modules
        modules |= new
        pending += new
    digest = hashlib.sha256()
    for each in sorted(modules):
        file = _file_of(each)
        assert file is not None
        source = file.read_bytes()
        digest.update(f"{each} {len(source)}\n".encode() + source)
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
        self.library, self.module = numba_internals.new_library(context, self.symbol)
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
        numba_internals.finish_library(self.library, self.module, self.linked, self.symbol)
        return self.library, self.symbol, extra


class CodeCache:
    """Machine code by key, on disk where a folder can be written, else in memory only.

    An entry is a symbol's name and its code library. Code is never freed while the process lives.
    """

    def __init__(self):
        self._libraries: dict[tuple, tuple[object, int, object]] = {}
        self.hits = 0
        self.misses = 0

    @functools.cached_property
    def folders(self) -> list[CacheFolder]:
        """Where machine code is looked for, in this order; it is kept in the last one, if that can be written.

        They are ``NUMBA_CACHE_DIR``, beside the package, and in the user's cache, up to the first that can be written: those
        before it may hold what another, root say, has compiled for all.
        """
        wanted = getattr(config, "CACHE_DIR", "")
        found = []
        for parent in filter(None, [Path(wanted) if wanted else None, _ROOT / "__pycache__", user_cache()]):
            found.append(CacheFolder(parent / FOLDER))
            if found[-1].is_writable:
                break
        return found

    @property
    def directory(self) -> str | None:
        """Where new machine code is kept, None where no folder can be written."""
        return str(self.folders[-1].path) if self.folders[-1].is_writable else None

    @global_compiler_lock
    def get(self, key: tuple, build, module: str, persist: bool = True):
        """The address of the function `key`, and the extra data stored with it.

        `build` is called without arguments when no machine code for the key is known; it returns
        ``(library, symbol, extra)``, the library finalised with its object code kept. `module`: the module of this package
        whose sources, with those of all that it imports, say what is built. With ``persist=False`` the code is for this
        process only: what the key's ``repr`` says does not identify it in another.
        """
        known = self._libraries.get(key)
        if known is None:
            full_key = self._full_key(key, module) if persist else ""
            known = (self._load(key, full_key) if persist else None) or self._build(key, full_key, build)
            self._libraries[key] = known
        return known[1:]

    def proved(self, name: str, module: str, test) -> str:
        """Why `test` says that native code is wrong, nothing if it says nothing: asked once per installation, as `module` is."""
        key = self._full_key((name,), module)
        if not any(folder.load(name, key) == "right" for folder in self.folders):
            try:
                why = test()
            except Exception as error:  # whatever a changed Numba raises
                why = f"{type(error).__name__}: {error}"
            if why:
                return why
            self.folders[-1].save(name, key, "right")
        return ""

    def _full_key(self, key: tuple, module: str) -> str:
        return repr((key, source_stamp(module), numba_internals.code_depends_on()))

    def _load(self, key: tuple, full_key: str):
        for folder in self.folders:
            stored = folder.load(_name_of(key), full_key)
            if stored is not None:
                state, symbol, extra = stored
                library = numba_internals.restored(state)
                self.hits += 1
                return library, library.get_pointer_to_function(symbol), extra
        return None

    def _build(self, key: tuple, full_key: str, build):
        with _jit_enabled():
            library, symbol, extra = build()
        self.misses += 1
        if full_key:  # where it cannot be kept, the code works all the same, in this process
            self.folders[-1].save(_name_of(key), full_key, (numba_internals.serialized(library), symbol, extra))
        return library, library.get_pointer_to_function(symbol), extra


def _name_of(key: tuple) -> str:
    """What people see of a key in the name of its entry's file."""
    return f"{key[1].rpartition('.')[2]}.{key[2]}" if key[0] == "function" else key[0]


code_cache = CodeCache()


class Part:
    """A native function to be compiled into functions that are put together at run time (``fast_entry.fast_entry``)."""

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
        convention = numba_internals.target_context().call_conv
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
            if numba_internals.failures():
                signature = self._result(*self._arguments)
                self._by_numba = numba.cfunc(signature, error_model="numpy")(self._python_function)
                self._address = self._by_numba.address
                return self._address
            module = self._python_function.__module__
            key = ("function", module, self._python_function.__qualname__)
            self._address = code_cache.get(key, self._compile, module, persist=module.startswith(f"{_PACKAGE}."))[0]
        return self._address

    def _compile(self):
        context = numba_internals.target_context()
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
