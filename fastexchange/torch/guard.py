"""Guards: find *odd* PyTorch tensors, whose memory is not their value or which autograd tracks, by reading their fields.

Offsets and bits come from ``torch.offsets``, which has verified them. Nothing here runs Python code, so borrowed
views stay valid.
"""

from collections import namedtuple

from ..ground import cpython as c
from ..ground.dlpack import CPU
from ..ground.dltensor import View
from ..ground.native import call_int, load, native, sizeof, struct_at, unlikely

Offsets = namedtuple(
    "Offsets",
    "object keys element_type autograd storage storage_data storage_size ndim sizes strides inline_ndim storage_offset"
    " device storage_checked tangent requires_grad grad_fn is_view has_base base",
)
"""Fields of an ``fx_guard`` as compile-time constants."""

OFFSETS = Offsets._fields
GUARD_SIZE = sizeof("fx_guard")
guard_at = struct_at("fx_guard")
queries_at = struct_at("fx_torch_queries")
_LARGEST = 2**63 - 1


@native
def is_level_open(guard):
    """Whether a level of forward-mode differentiation is open; tangents exist only within a level. GIL: held; no Python runs."""
    if guard.queries == 0:
        return True
    queries = queries_at(guard.queries)
    level = c.PyDict_GetItemWithError(queries.forward_names, queries.current_level)
    if level == 0:
        return True
    is_open = c.PyLong_AsSsize_t(level) >= 0
    if c.PyErr_Occurred() != 0:
        c.PyErr_Clear()
        return True
    return is_open


@native
def has_tangent(guard, known):
    """Whether the tensor may have a tangent. Forward-mode differentiation does not depend on grad mode."""
    return guard.tangent != 0 and load(known + guard.tangent) != 0 and is_level_open(guard)


@native
def is_watched(guard, known):
    """Whether autograd tracks the tensor with the autograd metadata at `known`."""
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
            watched |= load(known + guard.is_view) & 0xFF  # the base of a view is never a view: else the offsets are wrong
    return watched != 0 and call_int(guard.is_grad_enabled, ()) & 0xFF != 0


@native
def is_surely_unwatched(offsets, known):
    """Whether :func:`is_watched` is False whether grad mode is on or off. Calls nothing."""
    watched = load(known + offsets.requires_grad) & 0xFF | load(known + offsets.grad_fn) | load(known + offsets.tangent)
    if watched == 0 and load(known + offsets.is_view) & 0xFF != 0:
        if load(known + offsets.has_base) & 0xFF != 1:
            return False
        base = load(load(known + offsets.base) + offsets.autograd)
        if base != 0:
            watched = load(base + offsets.requires_grad) & 0xFF | load(base + offsets.grad_fn) | load(base + offsets.tangent)
            watched |= load(base + offsets.is_view) & 0xFF
    return watched == 0


@native
def is_unusual(offsets, implementation):
    """Whether the keys or the dtype of a tensor make it odd, whatever autograd does."""
    number = load(implementation + offsets.element_type) & 63
    return load(implementation + offsets.keys) & offsets.odd_keys | offsets.odd_types >> number & 1 != 0


@native
def is_odd_by(offsets, address, ob):
    """:func:`is_odd` with the fields of the ``fx_guard`` at `address` in `offsets`: that guard, or :data:`Offsets`."""
    implementation = load(ob + offsets.object)
    if is_unusual(offsets, implementation):
        return True
    if offsets.autograd == 0:
        return False
    known = load(implementation + offsets.autograd)
    return unlikely(known != 0) and is_watched(guard_at(address), known)


@native
def requires_grad_only(address, ob):
    """Whether an odd tensor is odd because it requires grad, and for no other reason. False if that is unknown."""
    guard = guard_at(address)
    if guard.autograd == 0 or guard.is_grad_enabled == 0 or guard.tangent == 0:
        return False
    return not is_unusual(guard, load(ob + guard.object)) and not is_level_open(guard)


@native
def is_odd(address, ob):
    """Whether the tensor `ob` is odd by the ``fx_guard`` at `address`; False for address 0."""
    if address == 0:
        return False
    return is_odd_by(guard_at(address), address, ob)


@native
def guard_of(context, entry):
    """The address of the ``fx_guard`` for an entry's type and what a kernel allows; 0 for other types than PyTorch's."""
    return entry.guard + GUARD_SIZE * context.allows if entry.guard != 0 else 0


@native
def end_of_storage(offsets, ob):
    """The address behind the storage of a tensor: 0 if it has been freed, the largest address if its size is unknown."""
    at = load(load(ob + offsets.object) + offsets.storage)
    start = load(at + offsets.storage_data)
    if start == 0:
        return 0
    return start + load(at + offsets.storage_size) if offsets.storage_size != 0 else _LARGEST


@native
def is_short_by(offsets, ob, end):
    """Whether the tensor's storage has been freed, or ends before `end`, where the tensor ends.

    The tensor's own address does not tell: with an offset it is not NULL. `end` is 0 for a tensor that may show other memory
    than its storage's.
    """
    if offsets.storage == 0:
        return False
    limit = end_of_storage(offsets, ob)
    return limit == 0 or end > limit


@native
def is_short(address, ob, end):
    """:func:`is_short_by` the ``fx_guard`` at `address`; False for address 0."""
    return address != 0 and is_short_by(guard_at(address), ob, end)


@native
def is_of(guard, storage, ob):
    """Whether a storage object is still the storage of the tensor `ob`; True if that cannot be read in memory."""
    if storage == 0 or guard.storage_object == 0:
        return True
    return load(load(ob + guard.object) + guard.storage) == load(storage + guard.storage_object)


@native
def is_in_memory(offsets, ob):
    """Whether the view of a tensor that is not odd may be read in memory.

    Not if no tensor's may be, nor if PyTorch checks each access to this one's memory, as to a copy-on-write one's.
    """
    if offsets.ndim == 0:
        return False
    storage = load(load(ob + offsets.object) + offsets.storage)
    return load(storage + offsets.storage_checked) & 0xFF == 0


@native
def number_in_memory(offsets, ob):
    """The number of a tensor's dtype."""
    return load(load(ob + offsets.object) + offsets.element_type) & 63


@native
def field_in_memory(offsets, address, ob):
    """An item of ``elements`` of an ``fx_guard``: the field of a tensor's dtype, and more if it has lanes; 0 if it is unknown."""
    return load(guard_at(address).elements + 8 * number_in_memory(offsets, ob))


@native
def is_on_cpu(offsets, ob):
    """Whether a tensor is on the CPU."""
    return load(load(ob + offsets.object) + offsets.device) & 0xFF == 0


@native
def device_in_memory(offsets, address, ob):
    """The device of a tensor: DLPack's type and, from bit 8 on, the number; 0 if it is unknown."""
    device = load(load(ob + offsets.object) + offsets.device) & 0xFFFF
    if device & 0xFF == 0:
        return CPU
    cuda = guard_at(address).cuda
    return device & 0xFF00 | cuda if device & 0xFF == 1 and cuda != 0 else 0


@native
def torch_device_in_memory(offsets, ob):
    """PyTorch's type of a tensor's device, and its index."""
    device = load(load(ob + offsets.object) + offsets.device)
    return device & 0xFF, device >> 8 & 0xFF


@native
def rank_in_memory(offsets, ob):
    """The number of dimensions of a tensor."""
    return load(load(ob + offsets.object) + offsets.ndim)


@native
def shape_in_memory(offsets, address, ob):
    """The number of dimensions of a tensor that :func:`is_in_memory`, its :func:`field_in_memory`, where its extents are."""
    ndim = rank_in_memory(offsets, ob)
    return ndim, field_in_memory(offsets, address, ob), view_in_memory(offsets, ob, ndim, 1).shape


@native
def view_in_memory(offsets, ob, count, itemsize):
    """The :data:`View` of a tensor that :func:`is_in_memory`, with `count` dimensions and elements of `itemsize` bytes.

    PyTorch exports NULL for a tensor without elements; this view has an address.
    """
    implementation = load(ob + offsets.object)
    sizes = implementation + offsets.sizes
    strides = implementation + offsets.strides
    if count > offsets.inline_ndim:
        sizes = load(sizes)
        strides = sizes + 8 * count
    start = load(load(implementation + offsets.storage) + offsets.storage_data)
    return View(start + load(implementation + offsets.storage_offset) * itemsize, 0, count, sizes, strides)
