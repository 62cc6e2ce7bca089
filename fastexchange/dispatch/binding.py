"""Positional, keyword and omitted arguments in the order of the kernel's parameters."""

from ..ground import cpython as c
from ..ground.native import load, native, store
from . import structs
from .frame import grow_frame

OB_SIZE, OB_ITEM = c.OB_SIZE, c.OB_ITEM


@native
def bind(context, frame, args, nargs, kwnames):
    """Put positional and keyword arguments in parameter order into ``frame.bound``. Returns a STATUS_*.

    1. Store positional arguments. 2. Find each keyword's parameter. 3. Store the defaults of omitted parameters.
    """
    count = context.parameter_count
    if count > frame.bound_capacity:
        return structs.STATUS_GROW
    if nargs > context.positional_count:
        return structs.STATUS_ARITY
    bound = frame.bound
    for i in range(nargs):
        store(bound + 8 * i, load(args + 8 * i))
    for i in range(nargs, count):
        store(bound + 8 * i, 0)
    keywords = load(kwnames + OB_SIZE) if kwnames != 0 else 0
    for k in range(keywords):
        name = load(kwnames + OB_ITEM + 8 * k)
        i = context.positional_only  # compare by identity first: CPython interns names in source code
        while i < count and load(context.names + 8 * i) != name:
            i += 1
        if i == count:  # a name that is not interned: from **mapping, for instance
            i = context.positional_only
            while i < count and c.PyUnicode_Compare(load(context.names + 8 * i), name) != 0:
                i += 1
        if i == count or load(bound + 8 * i) != 0:
            return structs.STATUS_ARITY
        store(bound + 8 * i, load(args + 8 * (nargs + k)))
    for i in range(nargs, count):
        if load(bound + 8 * i) == 0:
            default = load(context.defaults + 8 * i)
            if default == 0:
                return structs.STATUS_ARITY
            store(bound + 8 * i, default)
    return structs.STATUS_OK


@native
def bind_into(context, runtime, frame_address, args, nargs, kwnames):
    """:func:`bind`, in a larger frame if necessary. Returns (STATUS_*, frame)."""
    status = bind(context, structs.frame_at(frame_address), args, nargs, kwnames)
    if status == structs.STATUS_GROW:
        grown = grow_frame(runtime, frame_address, context.parameter_count)
        if grown == 0:
            return structs.STATUS_ERROR, frame_address
        frame_address = grown
        status = bind(context, structs.frame_at(frame_address), args, nargs, kwnames)
    return status, frame_address
