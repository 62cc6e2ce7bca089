"""The dialect in which this package writes native code.

Native functions here are Numba functions over addresses: an address is an ``intp``, a C struct at an address is a Numba
record derived from its cffi declaration (:func:`struct_at`), a function at an address is called with
:func:`call_int` or :func:`call_word`, and C functions of CPython are found by name (:func:`external`).

Two rules keep the compiled code cacheable (``ground.cfunction``): it holds no address of this process, and it captures no Python
object.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from .._abi import ffi
from .numba_code import helper_compiler
from .numba_internals import HelperDispatcher
from .once import cached_property

__all__ = [
    "WORDS", "address_of", "as_words", "atomic_add", "bits_of", "call_int", "call_word", "cstring", "external", "float_of",
    "global_address", "larger", "load", "native", "numpy_dtype", "offset_of", "put", "sizeof", "smaller", "stack", "static_array",
    "store", "struct_at", "unlikely",
]  # fmt: skip


class native:
    """Decorator of a helper of native functions, which is inlined into the C functions that call it.

    It works as ``numba.njit``, but also under ``NUMBA_DISABLE_JIT``, which is for users' functions, and makes Numba's dispatcher
    only when a function that names the helper is compiled.
    """

    def __init__(self, function):
        self.py_func = function

    @cached_property
    def dispatcher(self) -> HelperDispatcher:
        """Numba's dispatcher of the helper."""
        options = {
            "nopython": True, "error_model": "numpy", "boundscheck": False, "forceinline": True,
            "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
        }  # fmt: skip
        return HelperDispatcher(py_func=self.py_func, targetoptions=options, pipeline_class=helper_compiler())

    @property
    def _numba_type_(self):  # Numba's protocol for objects that compiled functions name
        return self.dispatcher._numba_type_


@native
def smaller(a, b):
    """The smaller of two words. ``min`` is an overload of Numba's, and a program that patches dispatchers sees it compiled."""
    return a if a < b else b


@native
def larger(a, b):
    """The larger of two words."""
    return a if a > b else b


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


def address_of(cdata) -> int:
    """The address that a cffi pointer or array holds."""
    return int(ffi.cast("intptr_t", cdata))


def sizeof(name: str) -> int:
    """The size in bytes of the C type `name`."""
    return ffi.sizeof(name)


def offset_of(name: str, *path: str) -> int:
    """The offset in bytes of a field, for example ``offset_of("DLManagedTensorVersioned", "dl_tensor")``."""
    return ffi.offsetof(name, *path)


@functools.cache
def _record_of(name: str):
    return numpy_support.from_dtype(numpy_dtype(ffi.typeof(name)))


def struct_at(name: str):
    """A native function from an address to the C struct `name` there, a record whose fields can be read and set."""

    @intrinsic
    def at(typingctx, address):
        record = _record_of(name)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.intp), codegen

    return at


@intrinsic
def unlikely(typingctx, flag):
    """The truth value `flag`, which is rarely true: code behind it does not take registers from other code."""

    def codegen(context, builder, signature, args):
        bit = ir.IntType(1)
        expect = builder.module.declare_intrinsic("llvm.expect", [bit], ir.FunctionType(bit, [bit, bit]))
        return builder.call(expect, [args[0], bit(0)])

    return types.boolean(types.boolean), codegen


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


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to the 8-byte word at `address` atomically, or to the 4-byte one if `value` is an int32."""
    number = types.int32 if value == types.int32 else types.intp

    def codegen(context, builder, signature, args):
        word = context.get_value_type(number)
        builder.atomic_rmw("add", builder.inttoptr(args[0], word.as_pointer()), args[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.intp, number), codegen


WORDS = types.CPointer(types.intp)
"""An array of words that the compiler can keep in registers: see :func:`put`."""


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


@intrinsic(prefer_literal=True)
def float_of(typingctx, word, bits):
    """The floating-point number in the lowest `bits` (a literal, 32 or 64) of a word."""
    result = types.float64 if bits.literal_value == 64 else types.float32

    def codegen(context, builder, signature, args):
        integer = builder.trunc(args[0], ir.IntType(32)) if result is types.float32 else args[0]
        return builder.bitcast(integer, context.get_value_type(result))

    return result(types.intp, bits), codegen


@intrinsic
def bits_of(typingctx, number):
    """The bits of a floating-point number, as a word."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(number.bitwidth)), context.get_value_type(types.intp))

    return types.intp(number), codegen


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

    Also for ``void`` functions, whose result is undefined.
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
        variable = builder.module.globals.get(symbol) or ir.GlobalVariable(builder.module, ir.IntType(8), symbol)
        return builder.ptrtoint(variable, context.get_value_type(types.intp))

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
