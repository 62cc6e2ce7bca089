"""What the readers of all kinds of arguments use: of which call, by which flags, into which frame they read."""

from numba import types

from ..ground.dlpack import CPU
from ..ground.native import native, store
from . import structs

FLAG_ASKED = 1  # the slow path has checked all tensors by their frameworks: a tensor that is still odd is refused
DRY_RUN = 2  # stop before the kernel: only read the keys
FLAG_PREPARED = 4  # what values need before their reading has been tried in this call: see `Kind.prepare`
FLAG_MEMORY = 8  # read tensors in memory only: they are no Python objects
FLAG_OWNING = 16  # take owning exports of all tensors: the producer of one has refused a view


@native
def begin_reading(context_address, frame, flags):
    """Note in a frame for which kernel, and by which FLAG_*, its readers read."""
    context = structs.context_at(context_address)
    frame.context, frame.flags, frame.exports_used = context_address, flags, 0
    frame.is_owning = is_owning(context, flags)
    if context.device_type != CPU:
        frame.device, frame.managed_device = -1, -1
        frame.stream, frame.other_stream = 0, 0
        frame.own_stream, frame.own_streams_differ, frame.array_stream = 0, 0, 0


@native
def is_owning(context, flags):
    """Whether a call needs owning exports of all its tensors: not if they are only read in memory, where the caller owns them."""
    return types.intp((context.needs_owning_exports != 0 or flags & FLAG_OWNING != 0) and flags & FLAG_MEMORY == 0)


@native
def runtime_of(frame_address):
    """The runtime of the kernel for which a frame is read."""
    return structs.runtime_at(structs.context_at(structs.frame_at(frame_address).context).runtime)


@native
def note_array(array_address, origin, word):
    """Note an array's origin, which owns its memory, and store its memory block at `word`."""
    array = structs.array_at(array_address)
    array.origin = origin
    store(word, array.meminfo)


@native
def has_no_room(frame, word, size):
    """Whether a value of so many words does not fit into the frame."""
    return word + 8 * size > frame.words_limit
