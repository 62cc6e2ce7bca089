"""The vectorcall of bound launches: the call of their kernel, or launcher, with the arguments that they keep."""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import CALLABLE_CONTEXT
from ..ground.native import load
from . import structs
from .frame import drop
from .python_calls import call_method


@cfunction(types.intp, types.intp, types.intp, types.intp, types.intp)
def vectorcall_bound(callable_, args, nargsf, kwnames):
    """Make the call. With arguments of its own it goes to the launch's method ``_refuse``, which raises TypeError."""
    bound = structs.bound_at(load(callable_ + CALLABLE_CONTEXT))
    if nargsf & c.NARGS_MASK != 0 or kwnames != 0:
        return call_method(bound.refuse_name, callable_, args, nargsf, kwnames)
    arguments = bound.arguments
    c.incref(arguments)  # another thread, or the kernel, may replace them meanwhile
    result = c.PyObject_VectorcallDict(bound.callable, bound.args, bound.nargs, bound.kwargs)
    drop(arguments)
    return result
