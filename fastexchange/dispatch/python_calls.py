"""Calls that native code leaves to Python: methods of the kernel, which also raise errors, and Numba's own dispatcher."""

from ..ground import cpython as c
from ..ground.cpython import OB_ITEM, OB_SIZE, Py_TYPE
from ..ground.native import call_word, global_address, load, native, stack, store
from ..producers.ndarray import descr_at, ndarray_at
from . import structs
from .pack import plain_field
from .type_table import find

CANNOT, CAN, MUST = 0, 1, 2
ITEMS_BYTES = 24
ITEMS_WORDS = ITEMS_BYTES // 8 * structs.MAX_TUPLE_DEPTH


@native
def count_of(kwnames):
    """The number of a call's keyword arguments, whose values follow the positional ones."""
    return load(kwnames + OB_SIZE) if kwnames != 0 else 0


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
    total = nargs + count_of(kwnames)
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
def leave_failure():
    """Clear the exception that no caller can get. Ctrl-C comes again when Python code runs."""
    if c.PyErr_ExceptionMatches(global_address("PyExc_KeyboardInterrupt")) != 0:
        c.PyErr_SetInterrupt()
    c.PyErr_Clear()


@native
def take_error_in_list():
    """Clear the pending exception. Returns a new list of it, so that no frame keeps it: a cycle; 0 with MemoryError set."""
    error = stack(3)
    take_error(error)
    made = c.PyList_New(1)
    if made != 0:
        c.incref(load(error + 8))
        c.PyList_SetItem(made, 0, load(error + 8))
    drop_error(error)
    return made


@native
def refuse(context, callable_, position):
    """Raise a producer's exception with the argument's name by Python: ``kernel._refused(position, [exception])``. Returns 0."""
    arguments = stack(3)
    errors = take_error_in_list()
    index = c.PyLong_FromSsize_t(position)
    if errors != 0 and index != 0:
        store(arguments, callable_)
        store(arguments + 8, index)
        store(arguments + 16, errors)
        result = c.PyObject_VectorcallMethod(context.refused_name, arguments, 3, 0)
        if result != 0:
            c.Py_DecRef(result)
    if index != 0:
        c.Py_DecRef(index)
    if errors != 0:
        c.Py_DecRef(errors)
    return 0


@native
def numbas_part(context, runtime, args, nargs):
    """The part of Numba's dispatcher in a call.

    Returns: CANNOT; CAN, it takes the arguments as they are, and its result is the result; MUST, it alone can, because of a type.

    Items of tuples are looked at as arguments are. Of a list only the first item is: it tells Numba the list's type, and Numba
    refuses other items while it unboxes the list.
    """
    part = CAN if context.is_generator == 0 else MUST
    if context.returns_type != 0 or context.returns_position >= 0 or context.device_kernel != 0:
        return CANNOT
    if context.positional_count != context.parameter_count:  # Numba assigns the defaults of keyword-only parameters otherwise
        return CANNOT
    pending = stack(ITEMS_WORDS)  # of each level the parent's remaining items, and room for a list's first item
    depth = 0
    items = args
    left = nargs
    is_in_list = False
    while True:
        if left == 0:
            if depth == 0:
                return part
            depth -= 1
            items = load(pending + ITEMS_BYTES * depth)
            left = load(pending + ITEMS_BYTES * depth + 8)
            is_in_list = False
            continue
        ob = load(items)
        items += 8
        left -= 1
        entry_address = find(runtime, Py_TYPE(ob))
        if entry_address == 0:
            return CANNOT
        entry = structs.entry_at(entry_address)
        form = structs.kind_at(entry.kind).form
        if form == structs.FORM_OTHER:
            if entry.is_typed == 0:
                return CANNOT
            part = MUST
        elif form == structs.FORM_ARRAY:
            if is_in_list or plain_field(runtime, descr_at(ndarray_at(ob).descr)) == 0:  # other items may be tensors
                return CANNOT
        elif form == structs.FORM_TUPLE or form == structs.FORM_LIST:
            level = pending + ITEMS_BYTES * depth
            if depth == structs.MAX_TUPLE_DEPTH:
                return CANNOT
            store(level, items)
            store(level + 8, left)
            depth += 1
            if form == structs.FORM_LIST:
                if is_in_list or c.PyList_Size(ob) <= 0:
                    return CANNOT
                part = MUST
                is_in_list = True
                store(level + 16, c.PyList_GetItem(ob, 0))
                items = level + 16
                left = 1
            else:
                is_in_list = False
                items = ob + OB_ITEM
                left = load(ob + OB_SIZE)
        elif form != structs.FORM_PLAIN:
            return CANNOT


@native
def named_arguments(args, nargs, kwnames):
    """Make a dict of a call's keyword arguments. Returns a new reference, or 0 with an exception set."""
    named = c.PyDict_New()
    for i in range(count_of(kwnames)):
        if named != 0 and c.PyDict_SetItem(named, load(kwnames + OB_ITEM + 8 * i), load(args + 8 * (nargs + i))) != 0:
            c.Py_DecRef(named)
            named = 0
    return named


@native
def call_numbas(context, runtime, callable_, args, nargs, kwnames):
    """Make a call by Numba's dispatcher. ``kernel._failed([exception], positional, named)`` raises its exceptions."""
    given = c.PyTuple_New(nargs)
    if given == 0:
        return 0
    named = 0
    if kwnames != 0:
        named = named_arguments(args, nargs, kwnames)
        if named == 0:
            c.Py_DecRef(given)
            return 0
    for i in range(nargs):
        c.incref(load(args + 8 * i))
        store(given + OB_ITEM + 8 * i, load(args + 8 * i))
    context.numba_calls += 1
    result = call_word(runtime.numbas_call, (callable_, given, named))
    if result == 0 and c.PyErr_Occurred() != 0:
        arguments = stack(4)
        errors = take_error_in_list()
        if errors != 0:
            store(arguments, callable_)
            store(arguments + 8, errors)
            store(arguments + 16, given)
            store(arguments + 24, named if named != 0 else global_address("_Py_NoneStruct"))
            result = c.PyObject_VectorcallMethod(context.failed_name, arguments, 4, 0)
            c.Py_DecRef(errors)
    c.Py_DecRef(given)
    if named != 0:
        c.Py_DecRef(named)
    return result
