"""*Trampolines*: machine code that calls a kernel, and does nothing else.

A kernel's arguments lie in 8-byte *words*, one for each leaf of Numba's argument list. A trampoline loads them and calls the
kernel by its address. It has LLVM types only, so one trampoline serves all kernels with the same list. It is cached on disk.

The calling convention is Numba's own (``numba.core.callconv.CPUCallConv``), from which the function type, the order of arguments,
the return codes and the error values are read.
"""

import functools

from llvmlite import ir

from ..ground.cfunction import CodeUnit, code_cache
from ..ground.disk_cache import claiming
from ..ground.numba_internals import (
    argument_leaves,
    argument_packer,
    global_compiler_lock,
    target_context,
    target_context_with_references,
)
from .boxing import UnsupportedEntry, is_plain

_VOID_POINTER = ir.IntType(8).as_pointer()
_INT32, _WORD = ir.IntType(32), ir.IntType(64)


def _as_word_sized(llvm_type):
    """The LLVM type that a trampoline loads: one type for all pointers, so that more signatures share a trampoline."""
    if isinstance(llvm_type, ir.PointerType):
        return _VOID_POINTER
    if isinstance(llvm_type, (ir.FloatType, ir.DoubleType, ir.HalfType)):
        return llvm_type
    if isinstance(llvm_type, ir.IntType) and llvm_type.width <= 64:
        return llvm_type
    raise UnsupportedEntry(f"an argument of LLVM type {llvm_type} is wider than a word")


def word_types_of(numba_types: tuple) -> list:
    """The LLVM types that are loaded from the words of values of these types. Raises UnsupportedEntry."""
    if all(map(is_plain, numba_types)):
        return _word_types_of_plain(numba_types)
    return [_as_word_sized(llvm_type) for llvm_type in argument_leaves(target_context(), numba_types)]


@functools.lru_cache(maxsize=256)  # of plain types: others would keep users' objects alive
def _word_types_of_plain(numba_types: tuple) -> list:
    return [_as_word_sized(llvm_type) for llvm_type in argument_leaves(target_context(), numba_types)]


@claiming
@global_compiler_lock
def trampoline(given: tuple, taken: tuple) -> int:
    """Return the address of ``int (*)(kernel, result, excinfo, words)`` for a kernel with argument types `taken`.

    `given`: the Numba types of the words. Values of other types than `taken` (an int for an explicit signature with float64) are
    cast as by Numba's dispatcher. The function returns Numba's return code.

    The caller clears the word at `excinfo`: the code of a ``try`` takes any other value for a raised exception. The function does
    not, because LLVM does not move the loads of words over a store, and would copy all words to the stack.
    """
    word_types = word_types_of(given)
    if given == taken:
        key: tuple = ("trampoline", tuple(map(str, word_types)))
    else:
        key = ("casting-trampoline", given, taken)
    build = functools.partial(_build_trampoline, word_types, given, taken)
    return code_cache.get(key, build, __name__, persist=given == taken or all(map(is_plain, given + taken)))[0]


def _build_trampoline(word_types, given, taken):
    context = target_context_with_references()
    unit = CodeUnit(context, "trampoline", ir.FunctionType(_INT32, [_VOID_POINTER] * 4))
    kernel, result, excinfo, words = unit.function.args
    builder = unit.builder
    words = builder.bitcast(words, _WORD.as_pointer())
    builder.ret(call_kernel(context, unit, kernel, [result, excinfo], words, word_types, given, taken))
    return unit.finish()


def call_kernel(context, unit, kernel, pointers, words, word_types, given, taken):
    """Emit the call of the kernel with the arguments in `words`, cast where `given` and `taken` differ. Returns its return code.

    `word_types`: of `given`, by :func:`word_types_of`. `pointers`: to the result, and to a word for the ``excinfo *``.
    """
    builder = unit.builder
    loaded = _load_words(builder, words, word_types)
    if given != taken:
        packer = argument_packer(context, given)
        loaded = [
            builder.bitcast(value, wanted) if isinstance(wanted, ir.PointerType) else value
            for value, wanted in zip(loaded, packer.argument_types, strict=True)
        ]
        values = packer.from_arguments(builder, loaded)
        values = [
            context.cast(builder, value, source, target) if source != target else value
            for value, source, target in zip(values, given, taken, strict=True)
        ]
        loaded = list(argument_packer(context, taken).as_arguments(builder, values))
    signature = ir.FunctionType(_INT32, [_VOID_POINTER, _VOID_POINTER, *(value.type for value in loaded)])
    return builder.call(builder.bitcast(kernel, signature.as_pointer()), [*pointers, *loaded])


def _load_words(builder, words, word_types):
    """Emit loads of the words, as values of these LLVM types. Returns the values."""
    loaded = []
    for index, llvm_type in enumerate(word_types):
        word = builder.gep(words, [_INT32(index)])
        loaded.append(builder.load(builder.bitcast(word, llvm_type.as_pointer())))
    return loaded
