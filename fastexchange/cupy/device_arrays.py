"""CuPy's arrays as arguments of launches, read in memory.

A launch means what it means with ``__cuda_array_interface__``, which says the same of an array, only later: the same strides,
the same stream, CuPy's current one, and the same place. Memory that CuPy has allocated is on the device that CuPy has noted. Of
other memory, managed, pinned or of another package, the driver tells.
"""

import llvmlite.binding

from .._abi import ffi
from ..arguments.kind import Kind, reader
from ..arguments.tensors import NO_FLAGS, note_stream, pack_found
from ..cuda import launch_structs
from ..cuda.array_interface import find_place
from ..dispatch import structs
from ..dispatch.pack import plain_field
from ..dispatch.reading import runtime_of
from ..ground import cpython as c
from ..ground.cpython import Py_TYPE, PyErr_Occurred
from ..ground.dlpack import CUDA, CUDA_HOST
from ..ground.dltensor import DL_TENSOR_WORDS, MAX_NDIM, SHIFTS, dl_tensor_at, is_empty
from ..ground.native import address_of, call_word, global_address, load, native, stack, store, struct_at
from ..ground.once import for_ever, once
from ..producers.ndarray import descr_at
from .array_fields import Fields, array_type, fields

__all__ = ["kind_of", "why_not"]

CDEF = """
/* Where CuPy's arrays have what is read in memory: see `cupy.array_fields`. */
typedef struct {
    int64_t shape, strides;     /* in an array: a pointer to the first extent, or stride in bytes, and one behind the last */
    int64_t is_in_c_order;      /* an int: its interface names no strides */
    int64_t dtype, data;        /* NumPy's dtype object, the MemoryPointer */
    int64_t pointer_type;       /* PyTypeObject * */
    int64_t address, device, memory;    /* in a MemoryPointer: of the first element; an int; the object that has the memory */
    int64_t pooled_type, chunk; /* PyTypeObject *, 0: unknown; in memory of a pool: the chunk that it is */
    int64_t chunk_type, chunk_memory;   /* PyTypeObject *; in a chunk: the memory of which it is a part */
    int64_t memory_type, async_type;    /* PyTypeObject *, memory that CuPy has allocated on a device */
    int64_t current_stream;     /* intptr_t (*)(void), the CUstream; GIL: held */
} fx_cupy;
"""

cupy_at = struct_at("fx_cupy")
_state = for_ever(ffi.new("fx_cupy *"))
llvmlite.binding.add_symbol("fastexchange_cupy", address_of(_state))


@native
def device_of(cupy, pointer):
    """The number of the device on which CuPy has allocated the memory of a ``MemoryPointer``; -1: only the driver knows."""
    memory = load(pointer + cupy.memory)
    if Py_TYPE(memory) == cupy.pooled_type:
        chunk = load(memory + cupy.chunk)
        if Py_TYPE(chunk) != cupy.chunk_type:
            return -1
        memory = load(chunk + cupy.chunk_memory)
    if Py_TYPE(memory) != cupy.memory_type and Py_TYPE(memory) != cupy.async_type:
        return -1
    return load(pointer + cupy.device) & 0xFFFFFFFF


@native
def note_current_stream(cupy, frame):
    """Note CuPy's current stream, which is asked for once in a launch. Returns whether CuPy has told it.

    In a thread's first call CuPy makes an object. No garbage is collected meanwhile, so no Python code runs.
    """
    if frame.array_stream == 0:
        is_collecting = c.PyGC_Disable()
        stream = call_word(cupy.current_stream, ())
        if is_collecting != 0:
            c.PyGC_Enable()
        if PyErr_Occurred() != 0:
            c.PyErr_Clear()  # Python code asks again
            return False
        frame.array_stream = launch_structs.LEGACY_STREAM if stream == 0 else stream
    note_stream(frame, frame.array_stream)
    return True


@reader
def read_cupy(ob, entry, frame_address, word, array):
    """An array of CuPy. What is not usual is read by Python code, as its interface says: ``STATUS_NUMBA``."""
    cupy = cupy_at(global_address("fastexchange_cupy"))
    frame = structs.frame_at(frame_address)
    pointer = load(ob + cupy.data)
    if Py_TYPE(pointer) != cupy.pointer_type:
        return -structs.STATUS_NUMBA
    runtime = runtime_of(frame_address)
    field = plain_field(runtime, descr_at(load(ob + cupy.dtype)))
    shape, given_strides = load(ob + cupy.shape), load(ob + cupy.strides)
    ndim = (load(ob + cupy.shape + 8) - shape) >> 3
    if field == 0 or ndim > MAX_NDIM:
        return -structs.STATUS_NUMBA
    view, strides = stack(DL_TENSOR_WORDS), stack(MAX_NDIM)
    tensor = dl_tensor_at(view)
    tensor.data, tensor.byte_offset, tensor.ndim = load(pointer + cupy.address), 0, ndim
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = field & 0xFF, field >> 8, 1
    tensor.shape, tensor.strides = view if ndim == 0 else shape, 0
    if load(ob + cupy.is_in_c_order) & 0xFFFFFFFF == 0:
        shift = SHIFTS[field >> 11]
        for i in range(ndim):
            stride = load(given_strides + 8 * i)
            store(strides + 8 * i, stride >> shift)
            if stride >> shift << shift != stride:
                return -structs.STATUS_NUMBA
        tensor.strides = strides
    device = device_of(cupy, pointer)
    tensor.device.device_type, tensor.device.device_id = CUDA, device
    if is_empty(tensor):
        tensor.data, tensor.device.device_type, tensor.device.device_id = 0, CUDA_HOST, 0
    elif tensor.data == 0 or (device < 0 and not find_place(launch_structs.cuda_at(runtime.cuda), tensor)):
        return -structs.STATUS_NUMBA
    if not note_current_stream(cupy, frame):
        return -structs.STATUS_NUMBA
    return pack_found(frame, entry, view, NO_FLAGS, ob + structs.ORIGIN_VIEW, word, array)


_ARRAY = Kind(
    "cupy", "it is read in memory, where the verified layout has it", structs.FORM_TENSOR, read_cupy,
    exports=structs.EXPORTS_NEVER,
)  # fmt: skip


@once
def _prepare() -> bool:
    found = fields()
    if isinstance(found, Fields):
        _state[0] = found._asdict()
    return isinstance(found, Fields)


def kind_of(cls: type) -> Kind | None:
    """The kind for launches of the instances of `cls`, an array with a usual interface; None if that has to be read."""
    return _ARRAY if cls is array_type() and _prepare() else None


def why_not(cls: type) -> str:
    """Why CuPy's arrays are not read in memory; "" if they are, and for other types."""
    found = fields() if cls is array_type() else ""
    return found if isinstance(found, str) else ""
