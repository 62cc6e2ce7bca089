"""Calls of operators of PyTorch: straight to the kernel if the tensors are plain and no mode is active."""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT, KERNEL_CONTEXT, OB_SIZE, Py_TYPE
from ..ground.native import call_word, load, native
from ..producers.torch_modes import count_write, has_counter, is_mode_active
from . import structs
from .python_calls import call_method
from .torch_guard import guard_of, is_odd
from .type_table import find

KERNEL_VECTORCALL = KERNEL_CONTEXT - (CALLABLE_CONTEXT - c.CALLABLE_VECTORCALL)


@native
def is_plain_tensor(context, runtime, ob):
    """Whether `ob` is a tensor of PyTorch that is not odd."""
    address = find(runtime, Py_TYPE(ob))
    if address == 0 or structs.entry_at(address).kind != structs.KIND_EXCHANGE or structs.entry_at(address).guard == 0:
        return False
    return not is_odd(guard_of(context, structs.entry_at(address)), ob)


@native
def is_for_kernel(context, runtime, ob):
    """Whether the kernel may make a call with this argument: a plain tensor, a list of such, a scalar, or None."""
    address = find(runtime, Py_TYPE(ob))
    if address == 0:
        return False
    kind = structs.entry_at(address).kind
    if kind == structs.KIND_LIST:
        are_plain = True
        for i in range(c.PyList_Size(ob)):
            are_plain = are_plain and is_plain_tensor(context, runtime, c.PyList_GetItem(ob, i))
        return are_plain
    if kind == structs.KIND_EXCHANGE:
        return is_plain_tensor(context, runtime, ob)
    return kind == structs.KIND_NONE or (structs.KIND_FLOAT <= kind and kind <= structs.KIND_BOOL)


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
    is_kernels = not is_mode_active(True) and (kwnames == 0 or operator.mutated_count == 0)
    for i in range(total):
        is_kernels = is_kernels and is_for_kernel(context, runtime, load(args + 8 * i))
    for i in range(operator.mutated_count):
        position = load(operator.mutated + 8 * i)
        is_kernels = is_kernels and position < nargs
        if is_kernels:
            ob = load(args + 8 * position)
            is_kernels = is_plain_tensor(context, runtime, ob) and has_counter(ob)
    if not is_kernels:
        return call_method(operator.slow_name, callable_, args, nargsf, kwnames)
    for i in range(operator.mutated_count):
        count_write(load(args + 8 * load(operator.mutated + 8 * i)))
    return call_word(load(operator.kernel + KERNEL_VECTORCALL), (operator.kernel, args, nargsf, kwnames))
