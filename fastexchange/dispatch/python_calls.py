"""Calls that native code leaves to Python: methods of the kernel, which also raise errors, and Numba's own dispatcher."""

from ..ground import cpython as c
from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE
from ..ground.native import call_word, global_address, load, native, stack, store
from ..producers.ndarray import descr_at, ndarray_at
from . import structs
from .pack import plain_field
from .type_table import find


@native
def call_method(name, callable_, args, nargsf, kwnames):
    """Call the kernel's method `name` with the call's arguments. Returns a new reference, or 0 with an exception set."""
    nargs = nargsf & c.NARGS_MASK
    if nargsf < 0:  # PY_VECTORCALL_ARGUMENTS_OFFSET: the word before the arguments may be used during the call
        saved = load(args - 8)
        store(args - 8, callable_)
        result = c.PyObject_VectorcallMethod(name, args - 8, nargs + 1, kwnames)
        store(args - 8, saved)
        return result
    total = nargs + (load(kwnames + OB_SIZE) if kwnames != 0 else 0)
    copy = c.PyMem_RawMalloc(8 * (total + 1))
    if copy == 0:
        c.PyErr_SetNone(global_address("PyExc_MemoryError"))
        return 0
    store(copy, callable_)
    for i in range(total):
        store(copy + 8 + 8 * i, load(args + 8 * i))
    result = c.PyObject_VectorcallMethod(name, copy, nargs + 1, kwnames)
    c.PyMem_RawFree(copy)
    return result


@native
def call_object(callable_, args, nargsf, kwnames):
    """Call an object of this package by its vectorcall with the call's arguments. Returns a new reference, or 0."""
    return call_word(load(callable_ + c.CALLABLE_VECTORCALL), (callable_, args, nargsf, kwnames))


@native
def refuse_launch(context, callable_, code):
    """Let Python raise the error of CUDA's driver for a launch. Returns 0."""
    arguments = stack(2)
    number = c.PyLong_FromSsize_t(code)
    if number == 0:
        return 0
    store(arguments, callable_)
    store(arguments + 8, number)
    result = c.PyObject_VectorcallMethod(context.driver_error_name, arguments, 2, 0)
    c.Py_DecRef(number)
    if result != 0:
        c.Py_DecRef(result)
    return 0


@native
def take_error(error):
    """Move the pending exception to the three words at `error`: type, value and traceback. Owns: the caller owns them."""
    c.save_error(error)
    c.PyErr_NormalizeException(error, error + 8, error + 16)
    if load(error + 16) != 0:
        c.PyException_SetTraceback(load(error + 8), load(error + 16))


@native
def drop_error(error):
    """Drop the references that :func:`take_error` has stored at `error`."""
    for i in range(3):
        if load(error + 8 * i) != 0:
            c.Py_DecRef(load(error + 8 * i))


@native
def refuse(context, callable_, position):
    """Let Python raise a producer's exception with the argument's name (``kernel._refused(position, exception)``). Returns 0."""
    error = stack(3)
    arguments = stack(3)
    take_error(error)
    index = c.PyLong_FromSsize_t(position)
    if index != 0:
        store(arguments, callable_)
        store(arguments + 8, index)
        store(arguments + 16, load(error + 8))
        result = c.PyObject_VectorcallMethod(context.refused_name, arguments, 3, 0)
        if result != 0:
            c.Py_DecRef(result)
        c.Py_DecRef(index)
    drop_error(error)
    return 0


@native
def is_numbas(context, runtime, args, nargs):
    """Whether Numba's dispatcher can make the call itself: it takes the arguments as they are, and its result is the result."""
    if context.returns_type != 0 or context.returns_position >= 0 or context.device_kernel != 0:
        return False
    if context.positional_count != context.parameter_count:  # Numba assigns the defaults of keyword-only parameters otherwise
        return False
    for i in range(nargs):
        ob = load(args + 8 * i)
        entry_address = find(runtime, Py_TYPE(ob))
        if entry_address == 0:
            return False
        entry = structs.entry_at(entry_address)
        kind = entry.kind
        if kind == structs.KIND_NUMBA:
            if entry.is_typed == 0:
                return False
        elif kind == structs.KIND_NDARRAY:
            if plain_field(runtime, descr_at(ndarray_at(ob).descr)) == 0:
                return False
        elif (
            not structs.is_scalar_kind(kind) and kind != structs.KIND_NONE and kind != structs.KIND_CONSTANT
            and kind != structs.KIND_STRING
        ):  # fmt: skip
            return False
    return True


@native
def call_numbas(context, runtime, callable_, args, nargs):
    """Make a call by Numba's dispatcher. ``kernel._failed(exception, arguments)`` raises its exceptions."""
    given = c.PyTuple_New(nargs)
    if given == 0:
        return 0
    for i in range(nargs):
        c.incref(load(args + 8 * i))
        store(given + OB_ITEM + 8 * i, load(args + 8 * i))
    context.numba_calls += 1
    result = call_word(runtime.numbas_call, (callable_, given, 0))
    if result == 0 and c.PyErr_Occurred() != 0:
        error = stack(3)
        arguments = stack(3)
        take_error(error)
        store(arguments, callable_)
        store(arguments + 8, load(error + 8))
        store(arguments + 16, given)
        result = c.PyObject_VectorcallMethod(context.failed_name, arguments, 3, 0)
        drop_error(error)
    c.Py_DecRef(given)
    return result
