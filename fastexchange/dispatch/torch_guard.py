"""Telling plain tensors from those whose memory is not their value, or that autograd watches, without asking.

Offsets and bits come from the framework's producer (``producers.torch_offsets``), which has verified them. Nothing here runs
foreign code, so a borrowed view stays what it was.
"""

from ..ground import cpython as c
from ..ground.native import call_int, load, native, native_inline
from . import structs


@native
def is_level_open(guard):
    """Whether a level of forward-mode differentiation is open: the tangents of a level end with it. Runs no Python code."""
    if guard.queries == 0:
        return True
    queries = structs.torch_queries_at(guard.queries)
    level = c.PyDict_GetItemWithError(queries.forward_names, queries.current_level)
    if level == 0:
        return True
    is_open = c.PyLong_AsSsize_t(level) >= 0
    if c.PyErr_Occurred() != 0:
        c.PyErr_Clear()
        return True
    return is_open


@native_inline
def has_tangent(guard, known):
    """Whether the tensor may be a dual number of forward-mode differentiation, which does not ask for grad mode."""
    return guard.tangent != 0 and load(known + guard.tangent) != 0 and is_level_open(guard)


@native
def is_watched(guard, known):
    """Whether autograd has to learn of what happens to the tensor of which it knows what lies at `known`."""
    if guard.is_grad_enabled == 0 or has_tangent(guard, known):
        return True
    watched = load(known + guard.requires_grad) & 0xFF | load(known + guard.grad_fn)
    if watched == 0 and load(known + guard.is_view) & 0xFF != 0:
        if load(known + guard.has_base) & 0xFF != 1:
            return True
        known = load(load(known + guard.base) + guard.autograd)
        if known != 0:
            if has_tangent(guard, known):
                return True
            watched = load(known + guard.requires_grad) & 0xFF | load(known + guard.grad_fn)
            watched |= load(known + guard.is_view) & 0xFF  # the base of a view is none itself
    return watched != 0 and call_int(guard.is_grad_enabled, ()) & 0xFF != 0


@native_inline
def is_odd_there(address, ob, object_, keys, odd_keys, element_type, odd_types, autograd):
    """:func:`is_odd` with the offsets that the ``fx_guard`` at `address` holds, for code that knows them when it is compiled."""
    implementation = load(ob + object_)
    if load(implementation + keys) & odd_keys | odd_types >> (load(implementation + element_type) & 63) & 1 != 0:
        return True
    if autograd == 0:
        return False
    known = load(implementation + autograd)
    return known != 0 and is_watched(structs.guard_at(address), known)


@native_inline
def is_odd(address, ob):
    """Whether the ``fx_guard`` at `address`, if any, says that the tensor `ob` is not to be taken for what it seems."""
    if address == 0:
        return False
    guard = structs.guard_at(address)
    return is_odd_there(
        address, ob, guard.object, guard.keys, guard.odd_keys, guard.element_type, guard.odd_types, guard.autograd
    )


@native_inline
def guard_of(context, entry):
    """The address of the ``fx_guard`` by which a kernel judges tensors of a type, or 0."""
    return entry.guard + context.guard_offset if entry.guard != 0 else 0


@native_inline
def is_short_there(ob, object_, storage, storage_data, storage_size, end):
    """Whether the tensor's storage has been freed, or made so small that it ends before the tensor does, at `end`.

    Its address need not be NULL then: a tensor with an offset has one all the same. Of a tensor that may show other memory
    than its own `end` is 0.
    """
    if storage == 0:
        return False
    at = load(load(ob + object_) + storage)
    start = load(at + storage_data)
    return start == 0 or (storage_size != 0 and end > start + load(at + storage_size))


@native_inline
def is_short(address, ob, end):
    """:func:`is_short_there` with the offsets of the ``fx_guard`` at `address`, if any."""
    if address == 0:
        return False
    guard = structs.guard_at(address)
    return is_short_there(ob, guard.object, guard.storage, guard.storage_data, guard.storage_size, end)
