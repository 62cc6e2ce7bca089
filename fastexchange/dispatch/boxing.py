"""Boxing: the machine code that converts kernels' results to Python objects, and their errors to exceptions.

Native code calls both by :func:`box_or_raise`.

A *box* converts results of one Numba return type. It is Numba's own boxing code with three changes: ``boxed_results`` boxes
arrays; constants are read from an array instead of being unserialized; references that Numba's code leaks are dropped.
"""

import enum
import functools

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.np.numpy_support import as_dtype

from ..ground.cfunction import CodeUnit, code_cache
from ..ground.cpython import new_none
from ..ground.disk_cache import claiming
from ..ground.dlpack import field_of_type
from ..ground.dtypes import FIRST_PARAMETRIC, dtype_field, lacks_dtype
from ..ground.half import boxing
from ..ground.native import call_word, load, native, offset_of
from ..ground.numba_internals import (
    EnvironmentManager,
    global_compiler_lock,
    initialize_runtime,
    leaves_of,
    set_exception,
    target_context,
    target_context_with_references,
)
from ..ground.passing import reraise_passing
from . import boxed_results
from .structs import RESULT_BYTES

_VOID_POINTER = ir.IntType(8).as_pointer()
_INT32, _WORD = ir.IntType(32), ir.IntType(64)
BOXES_NONE, BOXES_SCALARS, BOXES_ARRAYS = 0, 1, 2
"""What the boxing of a kernel's result needs: nothing; a box; a box and the call's frame."""


@native
def box_or_raise(context, overload, code, result, excinfo, is_boxed):
    """Box the result of a kernel by its return code. Returns a new reference, or 0 with the kernel's exception set."""
    if code == 0 and is_boxed:
        return call_word(overload.box, (result, overload.box_constants, 0))
    if code == 0 or code == -2:  # RETCODE_OK, RETCODE_NONE
        return new_none()
    call_word(context.raise_error, (code, load(excinfo)))
    return 0


class UnsupportedEntry(Exception):
    """A signature that only Numba's own dispatcher can call: an argument is wider than a word, or the result cannot be boxed."""


class _Constants(EnvironmentManager):
    """The Python objects that boxing code refers to: a list at compile time, an array of pointers at run time."""

    def __init__(self, pyapi, pointers):
        self.pyapi = pyapi
        self.pointers = pointers
        self.objects: list[object] = []
        self.enums: list[object] = []

    def add_const(self, const):
        for index, known in enumerate(self.objects):
            if known is const:
                return index
        self.objects.append(const)
        return len(self.objects) - 1

    def read_const(self, index):
        builder = self.pyapi.builder
        return builder.load(builder.gep(self.pointers, [ir.Constant(_INT32, index)]))


@claiming
@global_compiler_lock
def box(return_type) -> tuple[int, tuple]:
    """Return the address of ``PyObject *(*)(result, constants, frame)`` for a Numba return type, and the constant objects.

    The function consumes the native value. It returns a new reference, or NULL with an exception set. It reads `frame` only for
    a type that holds arrays (:func:`holds_array`). For ``none`` there is none: (0, ()).
    """
    if return_type == types.none:
        return 0, ()
    if _holds_buffer(return_type):  # Numba's boxer would set TypeError and leak the value
        raise UnsupportedEntry(f"a result of type {return_type}")
    if (size := _size_of_result(return_type)) > RESULT_BYTES:
        raise UnsupportedEntry(f"a result of {size} bytes")
    key = ("box", return_type)
    initialize_runtime()
    return code_cache.get(key, lambda: _build_box(return_type), __name__, persist=is_plain(return_type))


@functools.lru_cache(maxsize=256)
def _size_of_result(return_type) -> int:
    context = target_context()
    return context.get_abi_sizeof(context.call_conv.get_return_type(return_type).pointee)


def _holds_buffer(numba_type) -> bool:
    """Whether values of a type are or contain buffers other than arrays, such as a bytearray's. Numba cannot box these."""
    return any(isinstance(each, types.Buffer) and not isinstance(each, types.Array) for each in leaves_of(numba_type))


def holds_array(numba_type) -> bool:
    """Whether values of a type are or contain arrays."""
    return any(
        isinstance(each, types.Array) or (isinstance(each, (types.List, types.Set)) and holds_array(each.dtype))
        for each in leaves_of(numba_type)
    )


def is_plain(numba_type) -> bool:
    """Whether the type's name identifies it in every process. The name of a user's own type does not."""
    if not type(numba_type).__module__.startswith(("numba.core.types", "numba.np.types")):  # numba.tests has others so named
        return False
    if isinstance(numba_type, types.Optional):
        return is_plain(numba_type.type)
    if isinstance(numba_type, types.Array):
        return is_plain(numba_type.dtype)
    if isinstance(numba_type, (types.Tuple, types.UniTuple)):
        return all(map(is_plain, numba_type.types))
    plain = (types.NoneType, types.Number, types.Boolean, types.NPDatetime, types.NPTimedelta, types.UnicodeType)
    return isinstance(numba_type, plain)


def _new_reference(api, manager: _Constants, thing):
    """Emit a new reference to a constant: Numba's boxing code expects to own an object that it unserializes."""
    constant = manager.read_const(manager.add_const(thing))
    api.incref(constant)
    if isinstance(thing, enum.EnumMeta):
        manager.enums.append(constant)
    return constant


def _box_array(unit, api, manager: _Constants, frame, adapt, array_type, array, dtype):
    """Emit the boxing of an array in a result.

    1. Call ``boxed_results.box_array``, which boxes arguments and PyTorch's tensors.
    2. If it returns BY_NUMBA, make an ndarray by Numba's own `adapt`, and pass it to ``boxed_results.finish_array``.
    """
    builder = unit.builder
    slot = unit.stack_slot(array.type)
    builder.store(array, slot)
    element = array_type.dtype
    half = getattr(element, "format", None)  # a type of `half`
    field = field_of_type(half.code, half.bits) if half else dtype_field(as_dtype(element)) or 0
    if array_type.box_type is not np.ndarray or field >= FIRST_PARAMETRIC:
        field = 0
    shape_and_type = [_WORD(array_type.ndim), _WORD(field), _WORD(int(array_type.mutable))]
    made = _call_result_function(unit, "box_array", [frame, builder.ptrtoint(slot, _WORD), *shape_and_type])
    object_slot = unit.stack_slot(_WORD)
    builder.store(made, object_slot)
    with builder.if_then(builder.icmp_signed("==", made, _WORD(boxed_results.BY_NUMBA))):
        adapted = _adapted(api, manager, adapt, array_type, array, dtype)
        if lacks_dtype(element):  # the ndarray has only bytes
            elements = builder.inttoptr(builder.add(frame, _WORD(offset_of("fx_frame", "elements"))), _WORD.as_pointer())
            builder.store(_WORD(field), elements)
        finished = _call_result_function(unit, "finish_array", [frame, builder.ptrtoint(adapted, _WORD)])
        builder.store(finished, object_slot)
    return builder.inttoptr(builder.load(object_slot), api.pyobj)


def _adapted(api, manager: _Constants, adapt, array_type, array, dtype):
    """Emit Numba's own `adapt`, which makes an ndarray."""
    made = adapt(array_type, array, dtype)
    api.decref(manager.read_const(manager.add_const(array_type.box_type)))  # Numba leaks this reference
    return made


def _call_result_function(unit, name: str, values: list):
    """Emit a call of a function of ``dispatch.boxed_results``, through the field `name` of the ``fx_runtime``."""
    builder = unit.builder

    def load(address, struct: str, field: str):
        return builder.load(builder.inttoptr(builder.add(address, _WORD(offset_of(struct, field))), _WORD.as_pointer()))

    address = load(load(load(values[0], "fx_frame", "context"), "fx_context", "runtime"), "fx_runtime", name)
    function_type = ir.FunctionType(_WORD, [_WORD] * len(values))
    return builder.call(builder.inttoptr(address, function_type.as_pointer()), values)


def _build_box(return_type):
    context = target_context_with_references()
    unit = CodeUnit(context, "box", ir.FunctionType(_VOID_POINTER, [_VOID_POINTER, _VOID_POINTER.as_pointer(), _WORD]))
    result, constants, frame = unit.function.args
    builder = unit.builder
    api = context.get_python_api(builder)
    manager = _Constants(api, constants)
    # Numba would unserialize a result's type by Python code in each call: a signal handler could run there and raise, and the
    # boxer would leak the value.
    api.serialize_object = lambda thing: thing
    api.unserialize = lambda thing: _new_reference(api, manager, thing)
    call = api.call_function_objargs

    def call_and_release(callee, arguments):  # Numba's boxing of enum members leaks the callee and the arguments
        made = call(callee, arguments)
        for given in (callee, *arguments) if callee in manager.enums else ():
            api.decref(given)
        return made

    api.call_function_objargs = call_and_release
    adapt, box_value = api.nrt_adapt_ndarray_to_python, api.from_native_value
    within: list[object] = []  # the types that enclose the value being boxed, its own included

    def box_part(numba_type, value, env_manager=None):
        within.append(numba_type)
        made = box_value(numba_type, value, env_manager)
        within.pop()
        return made

    def box_array(array_type, array, dtype):
        if all(map(holds_array, within)):
            return _box_array(unit, api, manager, frame, adapt, array_type, array, dtype)
        return _adapted(api, manager, adapt, array_type, array, dtype)  # the enclosing type's own boxer expects an ndarray

    api.from_native_value, api.nrt_adapt_ndarray_to_python = box_part, box_array
    pointer = builder.bitcast(result, context.call_conv.get_return_type(return_type))
    with context.push_code_library(unit.library):
        value = context.get_returned_value(builder, return_type, builder.load(pointer))
        boxed_type = return_type.type if isinstance(return_type, types.Optional) else return_type
        boxing.is_of_bytes = True
        try:
            builder.ret(api.from_native_return(boxed_type, value, manager))
        except Exception as error:  # Numba's boxers raise any exception for a type that they cannot box outside of a kernel
            reraise_passing(error)
            raise UnsupportedEntry(f"a result of type {return_type}: {error}") from error
        finally:
            boxing.is_of_bytes = False
    return unit.finish(tuple(manager.objects))


@claiming
@global_compiler_lock
def raise_error() -> int:
    """Return the address of ``void (*)(code, excinfo)``, which sets the Python exception of a kernel's return code."""
    initialize_runtime()
    return code_cache.get(RAISE, build_raise_error, __name__)[0]


RAISE = ("raise",)
"""The key of its code."""


def build_raise_error():
    """Compile :func:`raise_error`."""
    context = target_context_with_references()
    unit = CodeUnit(context, "raise", ir.FunctionType(ir.VoidType(), [_WORD, _VOID_POINTER]))
    code, excinfo = unit.function.args
    builder = unit.builder
    with context.push_code_library(unit.library):
        set_exception(context, builder, code, excinfo)
    builder.ret_void()
    return unit.finish()
