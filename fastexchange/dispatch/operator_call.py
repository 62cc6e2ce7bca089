"""Calls of operators of PyTorch: straight to the kernel if the tensors are plain and no mode is active."""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, KERNEL_CONTEXT, OB_SIZE, Py_TYPE
from ..ground.native import call_word, cstring, global_address, load, native
from ..producers.torch_modes import count_write, has_counter, is_mode_active
from . import structs
from .python_calls import call_method
from .torch_guard import guard_of, is_odd
from .type_table import find

KERNEL_VECTORCALL = KERNEL_CONTEXT - (CALLABLE_CONTEXT - c.CALLABLE_VECTORCALL)


@native
def is_plain_tensor(context, runtime, operator, ob):
    """Whether `ob` is a tensor of PyTorch that is not odd, and not of a subclass, of which PyTorch makes its results, too."""
    address = find(runtime, Py_TYPE(ob))
    if address == 0 or structs.entry_at(address).kind != structs.KIND_EXCHANGE or structs.entry_at(address).guard == 0:
        return False
    if Py_TYPE(ob) != operator.tensor_type and Py_TYPE(ob) != operator.parameter_type:
        return False
    return not is_odd(guard_of(context, structs.entry_at(address)), ob)


@native
def is_for_kernel(context, runtime, operator, position, ob):
    """Whether the kernel may make a call with this argument: a plain tensor, a list of such, a scalar, or None, as in the schema.

    PyTorch's dispatcher converts others, or refuses them.
    """
    address = find(runtime, Py_TYPE(ob))
    if address == 0:
        return False
    kind = structs.entry_at(address).kind
    if load(operator.kinds + 8 * position) >> kind & 1 == 0:
        return False
    if kind == structs.KIND_LIST:
        are_plain = True
        for i in range(c.PyList_Size(ob)):
            are_plain = are_plain and is_plain_tensor(context, runtime, operator, c.PyList_GetItem(ob, i))
        return are_plain
    return kind != structs.KIND_EXCHANGE or is_plain_tensor(context, runtime, operator, ob)


@native
def position_of(operator, name):
    """The position of the argument with this interned name; -1: there is none."""
    for i in range(operator.count):
        if load(operator.names + 8 * i) == name:
            return i
    return -1


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_operator(callable_, args, nargsf, kwnames):
    """``vectorcallfunc`` of an operator.

    1. Find out whether the kernel may make the call. 2. Count its writes, for autograd. 3. Call it.
    """
    operator = structs.operator_at(load(callable_ + CALLABLE_CONTEXT))
    context = structs.context_at(load(operator.kernel + KERNEL_CONTEXT))
    runtime = structs.runtime_at(context.runtime)
    nargs = nargsf & c.NARGS_MASK
    total = nargs + (load(kwnames + OB_SIZE) if kwnames != 0 else 0)
    is_kernels = not is_mode_active(True) and nargs <= operator.count and (kwnames == 0 or operator.mutated_count == 0)
    for i in range(total):
        if is_kernels:
            position = i if i < nargs else position_of(operator, load(kwnames + c.OB_ITEM + 8 * (i - nargs)))
            is_kernels = position >= 0 and is_for_kernel(context, runtime, operator, position, load(args + 8 * i))
    for i in range(operator.mutated_count):
        position = load(operator.mutated + 8 * i)
        is_kernels = is_kernels and position < nargs
        if is_kernels:
            ob = load(args + 8 * position)
            is_kernels = is_plain_tensor(context, runtime, operator, ob) and has_counter(ob)
    if not is_kernels:
        return call_method(operator.slow_name, callable_, args, nargsf, kwnames)
    for i in range(operator.mutated_count):
        count_write(load(args + 8 * load(operator.mutated + 8 * i)))
    result = call_word(load(operator.kernel + KERNEL_VECTORCALL), (operator.kernel, args, nargsf, kwnames))
    if context.output_count == 0 and result != 0 and result != global_address("_Py_NoneStruct"):
        c.Py_DecRef(result)
        message = cstring("an operator whose kernel declares no outputs, fast_args(out=...), has to return None")
        c.PyErr_SetString(global_address("PyExc_TypeError"), message)
        return 0
    return result
