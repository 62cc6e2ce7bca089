"""C functions of native code, and the cache of their machine code.

A function is loaded when its address is first read: importing this package loads none. Its machine code is shipped with the
package (``shipped``). If that does not fit, the function is compiled once per machine, and cached on disk. The key of a cache
entry has everything on which its machine code depends: the sources of its module and of all modules that this imports, because
helpers are inlined across files; Python's ABI, the versions of Numba and llvmlite; and the processor.
"""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import config

from ..interpreter import DISABLED
from . import numba_code, numba_internals
from .disk_cache import FOLDER, CacheFolder, claiming, user_cache
from .log import say
from .native import native
from .numba_internals import global_compiler_lock
from .once import cached_property
from .package_code import native_processor, opened
from .passing import reraise_passing
from .shipped import shipped_code
from .sources import ROOT, is_known, source_stamp

__all__ = ["CFunction", "CodeCache", "CodeUnit", "Library", "cfunction", "code_cache"]

_PACKAGE = __name__.partition(".")[0]


@contextlib.contextmanager
def _own_settings():
    """Context manager: Numba's settings for users' functions, as ``NUMBA_DISABLE_JIT``, are not for native code.

    For the thread that holds the compiler's lock.
    """
    settings: Any = config
    own = {"DISABLE_JIT": 0, **numba_code.native_settings()}
    before = {name: getattr(settings, name) for name in own}
    try:
        vars(settings).update(own)
        yield
    finally:
        vars(settings).update(before)


class _Announced:
    """Context manager: after two seconds of compilation in a process, tell the user, once, what takes the time.

    For the thread that holds the compiler's lock.
    """

    _AFTER = 2.0

    def __init__(self):
        self._spent = 0.0
        self._depth = 0
        self._is_told = False

    def __enter__(self):
        self._depth += 1
        if self._depth == 1:
            self._began = time.monotonic()
            self._timer = threading.Timer(max(0.0, self._AFTER - self._spent), self._tell)
            self._timer.daemon = True
            if not self._is_told:
                with contextlib.suppress(RuntimeError):  # no more threads, or, from Python 3.12 on, none at shutdown
                    self._timer.start()

    def __exit__(self, *exception):
        self._depth -= 1
        if self._depth == 0:
            self._timer.cancel()
            self._spent += time.monotonic() - self._began

    def _tell(self):
        self._is_told = True
        why = shipped_code().why_not
        kept = "later processes load it" if code_cache.is_kept else f"each process compiles it again: {code_cache.why_not_kept}"
        text = f"fastexchange: compiling native code that is new on this machine; {kept} ({why})"
        if why and sys.stderr is not None:  # without `why` this process makes the code that is shipped
            with contextlib.suppress(Exception):  # a closed stderr
                print(text, file=sys.stderr, flush=True)


_announced = _Announced()


class CodeUnit:
    """An LLVM function under construction. Its symbol is unique in all processes."""

    def __init__(self, context, name: str, function_type, first: "CodeUnit | None" = None):
        """`first`: the unit in whose library the function belongs; None: it gets one of its own."""
        self.symbol = f"fastexchange.{name}.{numba_code.unique()}"
        if first is None:
            self.library, self.module = numba_code.new_library(context, self.symbol)
            self.linked: list = []
            """Libraries to link, whose functions may be inlined."""
        else:
            self.library, self.module, self.linked = first.library, first.module, first.linked
        self.function = ir.Function(self.module, function_type, self.symbol)
        # No vector registers for integers: a wide load of words that were stored one by one waits until these stores have left
        # the pipeline, 5 ns for each argument.
        self.function.attributes.add("noimplicitfloat")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))

    def stack_slot(self, llvm_type):
        """Reserve uninitialised memory on the stack. Returns a pointer to `llvm_type`.

        The instruction is placed at the very start of the function: after an inlined call it would no longer be in the first
        block, and the stack pointer would move at run time.
        """
        entry = self.builder.function.entry_basic_block
        with self.builder.goto_block(entry):
            self.builder.position_at_start(entry)
            return self.builder.alloca(llvm_type)

    def finish(self, extra=None, others: tuple["CodeUnit", ...] = ()):
        """Compile the library, which `others` are in, too. Returns ``(library, symbols, extra)`` for :meth:`CodeCache.get`."""
        symbols = (self.symbol, *(other.symbol for other in others))
        numba_code.finish_library(self.library, self.module, self.linked, symbols)
        return self.library, symbols, extra


class CodeCache:
    """Machine code by key: shipped, on disk if a folder is writable, else in memory only.

    An entry is a code library with the symbols of its functions. Code is never freed.
    """

    def __init__(self):
        self._libraries: dict[tuple, tuple[object, tuple[int, ...], object]] = {}
        self.shipped = 0
        """How many libraries were loaded from the code that comes with this package, or with kernels of another."""
        self.hits = 0
        self.misses = 0
        self.make: Callable[[tuple, tuple[str, ...], Callable], tuple] | None = None
        """In a process that makes the code of a package: builds what goes with its kernels, and keeps it."""

    @cached_property
    def folders(self) -> list[CacheFolder]:
        """The folders from which machine code is loaded, in this order. The last one, if writable, gets new code.

        They are ``NUMBA_CACHE_DIR``, a folder beside the package, and one in the user's cache, up to the first writable one.
        Those before it may have code that another user, such as root, has compiled for all.
        """
        wanted = getattr(config, "CACHE_DIR", "")
        found = []
        for parent in filter(None, [Path(wanted) if wanted else None, ROOT / "__pycache__", user_cache()]):
            found.append(CacheFolder(parent / FOLDER))
            if found[-1].is_writable:
                break
        return found

    @property
    def directory(self) -> str | None:
        """The folder for new machine code; None if no folder is writable."""
        return str(self.folders[-1].path) if self.folders[-1].is_writable else None

    @property
    def is_kept(self) -> bool:
        """Whether later processes will find the machine code that this one makes."""
        return not self.why_not_kept

    @property
    def why_not_kept(self) -> str:
        """Why later processes will not find the machine code that this one makes; "" if they will."""
        if not is_known(__name__):
            return "this package is neither in a folder nor in a zip file, so nothing says which version code is of"
        if self.directory is not None:
            return ""
        refused = [f"{folder.path} is not used: {folder.why_not_trusted}" for folder in self.folders if folder.why_not_trusted]
        return "; ".join(refused) or "no folder for it can be written: set NUMBA_CACHE_DIR to one"

    def get(self, key: tuple, build, *modules: str, persist: bool = True):
        """Return the address of the function `key`, and the extra data stored with it: see :meth:`all_of`."""
        (address,), extra = self.all_of(key, build, *modules, persist=persist)
        return address, extra

    @global_compiler_lock
    def all_of(self, key: tuple, build, *modules: str, persist: bool = True):
        """Return the addresses of the functions of the library `key`, and the extra data stored with it.

        `build`: called without arguments if there is no machine code for the key; returns ``(library, symbols, extra)``, with a
        finalised library that has kept its object code. `modules`: those of this package whose sources, with those of their
        imports, determine the code. ``persist=False``: do not cache on disk, because the key's ``repr`` does not identify the
        code in another process.
        """
        known = self._libraries.get(key)
        if known is None:
            persist = persist and all(map(is_known, modules))  # else the key would not have its sources
            known = self._load_shipped(key) or self._load_of_packages(key, modules) if persist else None
            if known is None and persist and self.make is not None and key[0] != "function":
                known = self.make(key, modules, build)
            if known is None:
                full_key = self._full_key(key, *modules) if persist else ""
                known = self._loaded_or_built(key, full_key, build) if persist else self._build(key, "", build)[0]
            self._libraries[key] = known
        return known[1:]

    def proved(self, name: str, module: str, test) -> str:
        """Run `test` once per installation and version of `module`. Returns its message if native code is wrong, else ""."""
        if shipped_code().is_proved:
            return ""
        stamp = source_stamp(module)
        key = repr((name, stamp, numba_code.code_depends_on((native_processor(), numba_code.native_settings_left()))))
        if not (stamp and any(folder.load(name, key) == "right" for folder in self.folders)):
            try:
                why = test()
            except Exception as error:  # a changed Numba may raise any exception
                reraise_passing(error)
                why = f"{type(error).__name__}: {error}"
            if why:
                return why
            if stamp:
                self.folders[-1].save(name, key, "right")
        return ""

    def _full_key(self, key: tuple, *modules: str) -> str:
        depends_on = numba_code.native_code_depends_on(), native_processor(), numba_code.native_settings_left()
        return repr((key, source_stamp(*modules), depends_on))

    def _load_shipped(self, key: tuple):
        state = shipped_code().functions.get(key[1:] if key[0] == "function" else key)
        if state is None:
            return None
        library, addresses = numba_code.restored(state)
        self.shipped += 1
        say("native code %s: shipped with the package", _name_of(key))
        return library, addresses, None

    def _load_of_packages(self, key: tuple, modules: tuple[str, ...]):
        for file in opened:
            stored = file.load("", file.text(key, source_stamp(*modules)))
            if stored is not None:
                library, addresses = numba_code.restored(stored[0])
                self.shipped += 1
                say("native code %s: found in %s", _name_of(key), file.path)
                return library, addresses, stored[1]
        return None

    def _loaded_or_built(self, key: tuple, full_key: str, build):
        if (known := self._load(key, full_key)) is not None:
            return known
        claim = self.folders[-1].claim(_name_of(key), full_key)
        is_kept = False
        try:
            if claim is None or (known := self._load(key, full_key)) is None:
                known, is_kept = self._build(key, full_key, build)
            else:
                is_kept = True
            return known
        finally:
            if claim is not None:
                claim.release(is_kept)

    def _load(self, key: tuple, full_key: str):
        for folder in self.folders:
            stored = folder.load(_name_of(key), full_key)
            if stored is not None:
                state, extra = stored
                library, addresses = numba_code.restored(state)
                self.hits += 1
                say("native code %s: loaded from %s", _name_of(key), folder.path)
                return library, addresses, extra
        return None

    def _build(self, key: tuple, full_key: str, build):
        """Compile. Returns what :meth:`_load` returns, and whether it was kept on disk, which is not tried without `full_key`."""
        is_kept = False
        with _own_settings(), numba_code.number_names(None), _announced if key[0] == "function" else contextlib.nullcontext():
            library, symbols, extra = build()
        self.misses += 1
        say("native code %s: compiled", _name_of(key))
        if full_key:  # code that cannot be saved still works in this process
            with contextlib.suppress(RuntimeError):  # Ctrl-C in LLVM's callback: Numba has no copy of the code
                state = numba_code.serialized(library, symbols), extra
                is_kept = self.folders[-1].save(_name_of(key), full_key, state)
        return (library, tuple(map(library.get_pointer_to_function, symbols)), extra), is_kept


def _name_of(key: tuple) -> str:
    """A readable name for a key, for the name of its entry's file."""
    return f"{key[1].rpartition('.')[2]}.{key[2]}" if key[0] == "function" else key[0]


code_cache = CodeCache()


class Library(list):
    """C functions whose code lies together, compiled or loaded at once: if not said otherwise, those of a module.

    LLVM puts each library on pages of its own: functions of a call that all begin a page would displace each other in the
    processor's cache. And what loading takes is a matter of libraries, not of functions.
    """

    def __init__(self, *modules: str):
        """`modules`: those whose import defines all functions that are not defined beside the library."""
        self._modules = modules

    def complete(self) -> "list[CFunction]":
        """All functions, in an order that does not depend on that of imports: code on disk has it."""
        for module in self._modules:
            importlib.import_module(module)
        return sorted(self, key=lambda function: tuple(map(str, function.key)))


class CFunction:
    """A C function in this package's dialect. It is compiled, or loaded from the cache, when its address is first read.

    Numba compiles the body. The C entry point is made here, not by ``numba.cfunc``, whose wrapper prevents inlining of the body
    (1.5 ns a call) and prints exceptions, which these functions never raise.
    """

    def __init__(self, python_function, result, arguments, together: Library, constants=()):
        self._python_function = python_function
        self._result, self._arguments = result, tuple(arguments)
        self._address = 0
        self._together = together
        together.append(self)
        self.key = python_function.__module__, python_function.__qualname__, *constants
        self.__name__ = python_function.__name__
        self.__doc__ = python_function.__doc__

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its library's functions. :meth:`compile` of that one compiles all."""
        return self is self._together.complete()[0]

    @property
    def library_key(self) -> tuple:
        """What stands for its library: the keys of all functions, in their order."""
        together = self._together.complete()
        return self.key if len(together) == 1 else (*together[0].key, *(function.key for function in together))

    @property
    def modules(self) -> list[str]:
        """The modules that have functions of its library."""
        return sorted({function.key[0] for function in self._together.complete()})

    @property
    def address(self) -> int:
        """The address of the C function in this process. It never changes."""
        if not self._address:
            if DISABLED:
                raise RuntimeError(f"FASTEXCHANGE_DISABLE is set, and this needs native code ({self.__name__})")
            if numba_internals.failures():
                signature = self._result(*self._arguments)
                self._by_numba = numba.cfunc(signature, error_model="numpy")(self._python_function)
                self._address = self._by_numba.address or 0
                return self._address
            together = self._together.complete()
            numba_internals.initialize_runtime()  # LLVM ends the process if it does not find a function of Numba's runtime
            first = together[0]
            get = claiming(code_cache.all_of)
            key = ("function", *self.library_key)
            persist = first.key[0].startswith(f"{_PACKAGE}.")
            addresses, _ = get(key, first.compile, *self.modules, persist=persist)
            for function, found in zip(together, addresses, strict=True):
                function._address = found
        return self._address

    def compile(self):
        """Compile the library that the function is the first of. Returns ``(library, symbols, None)``."""
        units: list[CodeUnit] = []
        for function in self._together.complete():
            units.append(function._unit(units[0] if units else None))
        return units[0].finish(None, tuple(units[1:]))

    def _unit(self, first: CodeUnit | None) -> CodeUnit:
        context = numba_internals.target_context()
        c_result = ir.VoidType() if self._result == types.void else context.get_value_type(self._result)
        c_type = ir.FunctionType(c_result, [context.get_value_type(t) for t in self._arguments])
        unit = CodeUnit(context, f"function.{self.__name__}", c_type, first)
        signature = self._result(*self._arguments)
        with _own_settings(), _announced:
            body = native(self._python_function).dispatcher
            body.compile(signature)
        compiled = body.overloads[signature.args]
        unit.linked.append(compiled.library)
        callee_type = context.call_conv.get_function_type(self._result, self._arguments)
        callee = ir.Function(unit.module, callee_type, compiled.fndesc.llvm_func_name)
        # As call_conv.call_function, but nothing is done with the return code.
        slots = [unit.stack_slot(pointer.pointee) for pointer in callee_type.args[:2]]
        unit.builder.call(callee, [*slots, *unit.function.args])
        if self._result == types.void:
            unit.builder.ret_void()
        else:
            unit.builder.ret(unit.builder.load(slots[0]))
        return unit


def _library_of(python_function) -> Library:
    """That of the function's module; one of its own for a function that comes when that has been loaded, or may."""
    if "<locals>" in python_function.__qualname__:
        return Library()
    of_module = python_function.__globals__.setdefault("_functions_together", Library())
    return of_module if not any(each._address for each in of_module) else Library()


def cfunction(result, *arguments, together: Library | None = None, constants: tuple = ()):
    """Decorator: a C function with this signature (Numba types), compiled on first use and cached on disk.

    `together`: the library to which the function is added; None: that of its module, or one of its own for a function that
    another function makes, perhaps later. `constants`: what the function's closure has, on which its machine code depends
    besides the sources.
    """

    def decorated(python_function):
        library = _library_of(python_function) if together is None else together
        return CFunction(python_function, result, arguments, library, constants)

    return decorated
