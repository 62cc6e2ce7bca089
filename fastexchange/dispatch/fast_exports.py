"""The parts of a fast entry that make a call own the memory of its tensors: exports, and storages of PyTorch's tensors.

They run before the parts of ``fast_readers``, because they may run Python code.
"""

from numba import types

from ..ground import cpython as c
from ..ground.cfunction import part
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dltensor import DL_TENSOR, READONLY, dl_tensor_at, element_field, is_plain, managed_at
from ..ground.native import call_int, global_address, load, native, put, stack, store
from . import structs
from .fast_readers import AGREES, DIFFERS, FAILED, PART_SIGNATURE
from .frame import EXPORT_BYTES
from .pack import pack_tensor
from .torch_guard import is_of
from .torch_queries import is_movable, storage_of

_WORD = types.intp


@native
def note_export(frame, index, ob, managed, storage, state):
    """Make what the call owns the frame's last export, of number `index`."""
    export = structs.export_at(frame.exports + EXPORT_BYTES * index)
    export.object, export.managed, export.storage, export.state = ob, managed, storage, state
    export.is_given, export.is_interface = 0, 0
    frame.export_count = index + 1


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def hold_storage(ob, expected_address, frame_address, index):
    """Hold the storage of a PyTorch tensor, as the frame's export `index`. A garbage collection may run Python code."""
    expected = structs.expected_at(expected_address)
    frame = structs.frame_at(frame_address)
    if Py_TYPE(ob) != expected.type or index == frame.export_capacity:
        return DIFFERS
    storage = storage_of(structs.guard_at(expected.guard), ob)
    if storage == 0:
        return DIFFERS
    note_export(frame, index, ob, 0, storage, structs.HOLDS_STORAGE)
    return AGREES


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def take_export(ob, expected_address, frame_address, index):
    """Make an owning export of a tensor that is no PyTorch tensor, as the frame's export `index`. Python code may run.

    Returns: AGREES, DIFFERS, or FAILED with the producer's exception set.
    """
    expected = structs.expected_at(expected_address)
    frame = structs.frame_at(frame_address)
    if Py_TYPE(ob) != expected.type or index == frame.export_capacity:
        return DIFFERS
    is_buffer = expected.flags >> structs.CLASS_SHIFT - structs.FLAGS_SHIFT != 0
    out = stack(1)
    store(out, 0)
    failed = call_int(expected.borrow, (ob, out)) != 0
    if not failed and load(out) != 0:
        note_export(frame, index, ob, load(out), 0, structs.NEEDS_MANAGED)
    if PyErr_Occurred() != 0:
        # Numba may be able to read a buffer that DLPack cannot describe.
        is_for_numba = is_buffer and c.PyErr_ExceptionMatches(global_address("PyExc_BufferError")) != 0
        return DIFFERS if is_for_numba else FAILED
    return types.intp(not failed and load(out) != 0)


@part(_WORD(_WORD, _WORD, _WORD, _WORD))
def is_storage_kept(ob, expected_address, frame_address, index):
    """Whether the frame's export `index` holds the storage of the tensor `ob`, whose memory stays. Runs no Python code."""
    guard = structs.guard_at(structs.expected_at(expected_address).guard)
    storage = structs.export_at(structs.frame_at(frame_address).exports + EXPORT_BYTES * index).storage
    return types.intp(is_of(guard, storage, ob) and not is_movable(guard, storage))


@part(_WORD(*PART_SIGNATURE.args, _WORD, _WORD))
def read_export(ob, expected_address, array_address, words, ndim, frame_address, index):
    """A tensor, in the owning export that :data:`take_export` has made of it."""
    expected = structs.expected_at(expected_address)
    managed_address = structs.export_at(structs.frame_at(frame_address).exports + EXPORT_BYTES * index).managed
    managed = managed_at(managed_address)
    put(words, 0, structs.array_at(array_address).meminfo)
    if managed.version.major != 1:
        return DIFFERS
    tensor = dl_tensor_at(managed_address + DL_TENSOR)
    if not is_plain(tensor) or tensor.ndim != ndim or element_field(tensor) != expected.dtype:
        return DIFFERS
    flags, status = pack_tensor(tensor, ndim, expected.dtype, words)
    if managed.flags & READONLY == 0:
        flags |= structs.WRITEABLE
    return types.intp(status == structs.STATUS_OK and flags == expected.flags & structs.KEY_FLAGS)
