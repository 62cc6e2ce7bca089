"""Calls of operators of PyTorch: straight to the kernel if the tensors are plain and no mode is active.

If autograd alone has to see a call, it goes to the ``apply`` of the kernel's ``autograd.Function``. If a program has registered
an implementation for such calls (``torch.dispatch_table``), PyTorch's dispatcher makes them.
"""

from numba import types

from ..dispatch import structs
from ..dispatch.allocation import NO_MODE
from ..dispatch.python_calls import call_method
from ..dispatch.type_table import find
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, OB_SIZE, Py_TYPE
from ..ground.native import call_word, cstring, global_address, load, native, stack, store, struct_at
from .guard import guard_at, guard_of, is_odd, is_on_cpu, requires_grad_only
from .modes import count_write, has_counter, is_mode_active

CDEF = """
/* A kernel as an operator of PyTorch. */
typedef struct {
    int64_t runtime;            /* fx_runtime * */
    int64_t kernels[2];         /* PyObject *, the kernels, which make calls with plain tensors, on the CPU and on a GPU; or 0 */
    int64_t contexts[2];        /* fx_context *, of these */
    int64_t vectorcalls[2];     /* the addresses of the words with their vectorcallfunc */
    int64_t slow_name;          /* PyObject *, name of the method that makes other calls, by PyTorch's dispatcher */
    int64_t count;              /* how many arguments there are, without the outputs */
    int64_t names;              /* PyObject *[count], interned */
    int64_t kinds;              /* int64_t[count], the schema_type of what the kernel may get for the argument, as bits */
    int64_t tensor_type, parameter_type;        /* PyTypeObject *, torch.Tensor and torch.nn.Parameter */
    int64_t mutated;            /* int64_t[mutated_count], positions of the arguments that the kernel writes to */
    int64_t mutated_count;
    int64_t function;           /* PyObject *, makes calls that autograd alone has to see; 0: PyTorch's dispatcher does */
    int64_t rows;               /* int64_t[2 * row_count], words of its dispatch table: an address, and what has to be there */
    int64_t row_count;
} fx_operator;
"""

operator_at = struct_at("fx_operator")
KERNEL, FUNCTION = 1, 2
"""Bits: who may make a call, the kernel, the ``autograd.Function``. If neither, PyTorch's dispatcher does."""
CPU, GPU, UNKNOWN = 0, 1, 2


@native
def makers_with_tensor(context, operator, place, address, ob):
    """Who may make a call with the object `ob`, which has to be a tensor of PyTorch. `address`: of its type's entry, or 0.

    It is not of a subclass, of which PyTorch makes its results, too, and not odd, or odd because it requires grad; and it is
    where the call's kernel is, if there may be several.
    """
    if address == 0 or structs.kind_at(structs.entry_at(address).kind).schema_type != structs.SCHEMA_TENSOR:
        return 0
    if Py_TYPE(ob) != operator.tensor_type and Py_TYPE(ob) != operator.parameter_type:
        return 0
    guard = guard_of(context, structs.entry_at(address))
    if operator.kernels[GPU] != 0 and place_of(guard_at(guard), ob) != place:
        return 0
    if not is_odd(guard, ob):
        return KERNEL | FUNCTION
    return FUNCTION if requires_grad_only(guard, ob) else 0


@native
def place_of(guard, ob):
    """Where a tensor is: CPU, GPU, or UNKNOWN. An index of an ``fx_operator``'s kernels."""
    if guard.device == 0:
        return UNKNOWN
    return CPU if is_on_cpu(guard, ob) else GPU


@native
def place_of_call(operator, runtime, args, total):
    """Which of the kernels makes a call: that for the place of its first tensor. CPU, GPU, or UNKNOWN."""
    if operator.kernels[GPU] == 0:
        return CPU
    for i in range(total):
        ob = load(args + 8 * i)
        address = find(runtime, Py_TYPE(ob))
        if address != 0 and structs.kind_at(structs.entry_at(address).kind).schema_type == structs.SCHEMA_TENSOR:
            return place_of(guard_at(structs.entry_at(address).guard), ob)
    return CPU


@native
def fits_schema(ob):
    """Whether a Python int has at most 64 bits, as an int of a schema. The kernel would take larger ones as unsigned."""
    overflow = stack(1)
    store(overflow, 0)
    c.PyLong_AsLongLongAndOverflow(ob, overflow)
    return load(overflow) & 0xFFFFFFFF == 0


@native
def makers_with(context, runtime, operator, place, position, ob):
    """Who may make a call with this argument: a tensor, a list of tensors, a scalar, or None, as in the schema.

    PyTorch's dispatcher converts others, or refuses them.
    """
    address = find(runtime, Py_TYPE(ob))
    if address == 0:
        return 0
    schema_type = structs.kind_at(structs.entry_at(address).kind).schema_type
    if load(operator.kinds + 8 * position) & schema_type == 0:
        return 0
    if schema_type == structs.SCHEMA_TENSORS:
        makers = KERNEL
        for i in range(c.PyList_Size(ob)):
            item = c.PyList_GetItem(ob, i)
            makers &= makers_with_tensor(context, operator, place, find(runtime, Py_TYPE(item)), item)
        return makers
    if schema_type == structs.SCHEMA_INT and not fits_schema(ob):
        return 0
    return (
        makers_with_tensor(context, operator, place, address, ob)
        if schema_type == structs.SCHEMA_TENSOR
        else KERNEL | FUNCTION
    )


@native
def position_of(operator, name):
    """The position of the argument with this interned name; -1: there is none."""
    for i in range(operator.count):
        if load(operator.names + 8 * i) == name:
            return i
    return -1


@native
def call_function(function, args, nargs):
    """Call a function of PyTorch's with a tuple of the arguments. Returns a new reference, or 0 with an exception set."""
    given = c.PyTuple_New(nargs)
    if given == 0:
        return 0
    for i in range(nargs):
        c.incref(load(args + 8 * i))
        store(given + c.OB_ITEM + 8 * i, load(args + 8 * i))
    result = c.PyObject_Call(function, given, 0)
    c.Py_DecRef(given)
    return result


@native
def is_registered_only(operator):
    """Whether PyTorch's dispatcher would come to what this package has registered for the operator, and to nothing else."""
    differences = 0
    for i in range(operator.row_count):
        differences |= load(load(operator.rows + 16 * i)) ^ load(operator.rows + 16 * i + 8)
    return differences == 0


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_operator(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of an operator.

    1. Find the kernel. 2. Find out who may make the call. 3. Let others than the kernel make it. 4. Count its writes, for
    autograd. 5. Call it.
    """
    operator = operator_at(load(callable_ + CALLABLE_CONTEXT))
    runtime = structs.runtime_at(operator.runtime)
    nargs = nargsf & c.NARGS_MASK
    total = nargs + (load(kwnames + OB_SIZE) if kwnames != 0 else 0)
    place = place_of_call(operator, runtime, args, total)
    if place == UNKNOWN or operator.kernels[place] == 0:
        return call_method(operator.slow_name, callable_, args, nargsf, kwnames)
    context = structs.context_at(operator.contexts[place])
    makers = KERNEL | FUNCTION
    if is_mode_active(True) or not is_registered_only(operator) or nargs > operator.count:
        makers = 0
    if kwnames != 0 and operator.mutated_count != 0:
        makers = 0
    for i in range(total):
        if makers != 0:
            position = i if i < nargs else position_of(operator, load(kwnames + c.OB_ITEM + 8 * (i - nargs)))
            makers &= makers_with(context, runtime, operator, place, position, load(args + 8 * i)) if position >= 0 else 0
    for i in range(operator.mutated_count):
        position = load(operator.mutated + 8 * i)
        if makers != 0:
            ob = load(args + 8 * position)
            who = makers_with_tensor(context, operator, place, find(runtime, Py_TYPE(ob)), ob) if position < nargs else 0
            makers &= who & KERNEL
            makers = makers if makers != 0 and has_counter(ob) else 0
    is_whole = nargs == operator.count and kwnames == 0
    if makers == FUNCTION and operator.function != 0 and is_whole:
        return call_function(operator.function, args, nargs)
    if makers & KERNEL == 0:
        return call_method(operator.slow_name, callable_, args, nargsf, kwnames)
    for i in range(operator.mutated_count):
        count_write(load(args + 8 * load(operator.mutated + 8 * i)))
    nargsf |= NO_MODE if context.output_count != 0 else 0
    kernel = operator.kernels[place]
    result = call_word(load(operator.vectorcalls[place]), (kernel, args, nargsf, kwnames))
    if context.output_count == 0 and result != 0 and result != global_address("_Py_NoneStruct"):
        c.Py_DecRef(result)
        message = cstring("an operator whose kernel declares no outputs, fast_args(out=...), has to return None")
        c.PyErr_SetString(global_address("PyExc_TypeError"), message)
        return 0
    return result
