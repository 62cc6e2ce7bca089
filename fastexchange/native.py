"""The dialect in which this package writes native code, and the cache in which its machine code lives.

Native functions here are Numba functions over addresses: an address is an ``intp``, a C struct at an address is a Numba
record derived from its cffi declaration (:func:`struct_at`), a function at an address is called with
:func:`call_int` or :func:`call_word`, and C functions of CPython are found by name (:func:`external`).

Two rules keep the compiled code cacheable: it holds no address of this process, and it captures no Python object.

A :class:`Library` compiles functions once per machine. Its key is the source of the whole package, not of one file,
because helpers are inlined across files; and the versions of Numba, of Python and of NumPy, and the processor.
"""

import functools
import hashlib
import sys
import uuid
from pathlib import Path

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import caching, cgutils, config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np import numpy_support

from ._abi import ffi

__all__ = [
    "WORDS", "CodeCache", "CodeUnit", "as_words", "call_int", "call_word", "cfunction", "cstring", "external",
    "global_address", "load", "native", "native_inline", "numpy_dtype", "offset_of", "sizeof", "stack", "static_array",
    "store", "struct_at",
]  # fmt: skip

native = functools.partial(
    numba.njit, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Decorator of a helper that native functions call: a function of its own in their machine code, for what is rare."""

native_inline = functools.partial(native, forceinline=True)
"""Decorator of a helper that becomes part of the native function that calls it, for what every call runs."""


# ---- C structs -----------------------------------------------------------------------------------------------------


def numpy_dtype(ctype) -> np.dtype:
    """The NumPy dtype of a cffi type: same size, same offsets, pointers as ``intp``."""
    if ctype.kind in ("pointer", "function"):
        return np.dtype(np.intp)
    if ctype.kind == "enum":
        return np.dtype(f"i{ffi.sizeof(ctype)}")
    if ctype.kind == "array":
        return np.dtype((numpy_dtype(ctype.item), (ctype.length,)))
    if ctype.kind == "struct":
        fields = dict(ctype.fields)
        return np.dtype(
            {
                "names": list(fields),
                "formats": [numpy_dtype(field.type) for field in fields.values()],
                "offsets": [field.offset for field in fields.values()],
                "itemsize": ffi.sizeof(ctype),
            },
            align=True,
        )
    is_signed = int(ffi.cast(ctype, -1)) < 0
    return np.dtype(f"{'i' if is_signed else 'u'}{ffi.sizeof(ctype)}")


def sizeof(name: str) -> int:
    """The size in bytes of the C type `name`."""
    return ffi.sizeof(name)


def offset_of(name: str, *path: str) -> int:
    """The offset in bytes of a field, for example ``offset_of("DLManagedTensorVersioned", "dl_tensor")``."""
    return ffi.offsetof(name, *path)


def struct_at(name: str):
    """A native function from an address to the C struct `name` there, a record whose fields can be read and set."""
    record = numpy_support.from_dtype(numpy_dtype(ffi.typeof(name)))

    @intrinsic
    def at(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.intp), codegen

    return at


# ---- memory and calls ----------------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, address):
    """The 8-byte word at `address`."""

    def codegen(context, builder, signature, args):
        word = context.get_value_type(types.intp)
        return builder.load(builder.inttoptr(args[0], word.as_pointer()))

    return types.intp(types.intp), codegen


@intrinsic
def store(typingctx, address, value):
    """Set the 8-byte word at `address`."""

    def codegen(context, builder, signature, args):
        word = context.get_value_type(types.intp)
        builder.store(args[1], builder.inttoptr(args[0], word.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


WORDS = types.CPointer(types.intp)
"""An array of words, for code whose words the compiler should be able to keep in registers: see :func:`put`."""


@intrinsic
def as_words(typingctx, address):
    """The words at `address`, as :data:`WORDS`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(WORDS))

    return WORDS(types.intp), codegen


@intrinsic
def put(typingctx, words, index, value):
    """Set a word of :data:`WORDS`."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(WORDS, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def stack(typingctx, words):
    """The address of `words` (a literal) uninitialised 8-byte words on the caller's stack."""
    count = words.literal_value

    def codegen(context, builder, signature, args):
        word = context.get_value_type(types.intp)
        with builder.goto_entry_block():
            slot = builder.alloca(ir.ArrayType(word, count))
        return builder.ptrtoint(slot, word)

    return types.intp(words), codegen


def _unpack(context, builder, signature, args):
    word = context.get_value_type(types.intp)
    values = []
    for ty, value in zip(signature.args[1].types, cgutils.unpack_tuple(builder, args[1]), strict=True):
        values.append(context.cast(builder, value, ty, types.intp))
    return word, values


@intrinsic
def call_int(typingctx, function, arguments):
    """Call the C function at address `function`, ``int (*)(word, ...)``, with a tuple of words."""

    def codegen(context, builder, signature, args):
        word, values = _unpack(context, builder, signature, args)
        pointer = ir.FunctionType(ir.IntType(32), [word] * len(values)).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(args[0], pointer), values), word)

    return types.intp(types.intp, arguments), codegen


@intrinsic
def call_word(typingctx, function, arguments):
    """Call the C function at address `function`, ``word (*)(word, ...)``, with a tuple of words.

    Also right for ``void`` functions; the result then means nothing.
    """

    def codegen(context, builder, signature, args):
        word, values = _unpack(context, builder, signature, args)
        pointer = ir.FunctionType(word, [word] * len(values)).as_pointer()
        return builder.call(builder.inttoptr(args[0], pointer), values)

    return types.intp(types.intp, arguments), codegen


def external(name: str, result, *arguments):
    """The C function `name`, resolved by name when machine code is linked: no address is baked into it."""
    return types.ExternalFunction(name, result(*arguments))


@intrinsic(prefer_literal=True)
def global_address(typingctx, name):
    """The address of the C global variable `name` (a literal), for example ``_Py_NoneStruct``."""
    symbol = name.literal_value

    def codegen(context, builder, signature, args):
        pointer = context.get_python_api(builder).get_c_object(symbol)
        return builder.ptrtoint(pointer, context.get_value_type(types.intp))

    return types.intp(name), codegen


@intrinsic(prefer_literal=True)
def static_array(typingctx, name, words):
    """The address of `words` (a literal) static 8-byte words of the compiled function, zero when the code is loaded."""
    symbol, count = f"fastexchange.{name.literal_value}", words.literal_value

    def codegen(context, builder, signature, args):
        word = context.get_value_type(types.intp)
        variable = builder.module.globals.get(symbol)
        if variable is None:
            variable = ir.GlobalVariable(builder.module, ir.ArrayType(word, count), symbol)
            variable.linkage = "internal"
            variable.initializer = ir.Constant(variable.value_type, None)
        return builder.ptrtoint(variable, word)

    return types.intp(name, words), codegen


@intrinsic(prefer_literal=True)
def cstring(typingctx, text):
    """The address of `text` (a literal) as a C string."""
    value = text.literal_value

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.insert_const_string(builder.module, value), context.get_value_type(types.intp))

    return types.intp(text), codegen


# ---- compiled once per machine -------------------------------------------------------------------------------------


def _find_locator():
    """Numba's choice of a writable cache directory for this file, None where there is none."""
    for locator_class in caching.CacheImpl._locator_classes:
        locator = locator_class.from_function(_find_locator, __file__)
        if locator is not None:
            return locator
    return None


def _source_stamp() -> str:
    """A digest of the package's source: helpers are inlined across files, so any change recompiles."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
        with self.builder.goto_block(self.function.entry_basic_block):
            self.builder.position_at_start(self.function.entry_basic_block)
            return self.builder.alloca(llvm_type)

    def finish(self, extra=None):
        """Compile it. Returns ``(library, symbol, extra)``, what :meth:`CodeCache.get` stores."""
        self.library.add_ir_module(self.module)
        for library in self.linked:
            self.library.add_linking_library(library)
        self.library.finalize()
        return self.library, self.symbol, extra


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
        tag = f"fastexchange-{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
        return caching.IndexDataCacheFile(self.directory, tag, _source_stamp())

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


class CFunction:
    """A C function written in this package's dialect: compiled, or loaded from the cache, when its address is asked for.

    Numba compiles the body. The C entry point around it is made here and not by ``numba.cfunc``, whose wrapper keeps the
    body from being inlined into it (1.5 ns a call) and prints exceptions that these functions never raise.
    """

    def __init__(self, python_function, result, arguments):
        self._python_function = python_function
        self._result, self._arguments = result, tuple(arguments)
        self.__name__ = python_function.__name__
        self.__doc__ = python_function.__doc__

    @functools.cached_property
    def address(self) -> int:
        """The address of the C function in this process. It holds for the life of the process."""
        key = ("function", self._python_function.__module__, self.__name__)
        return code_cache.get(key, self._compile)[0]

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
