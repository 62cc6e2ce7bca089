"""JAX's arrays in launches: native code exports them, and the launch is on the stream on which XLA computes.

JAX's C++ function behind ``__dlpack__`` lets that stream wait until an array is computed, and does not wait itself. What XLA does
with the array's memory later, on the same stream, comes behind the launch: also if the array is dropped at once, or donated.

The export is given back before the launch: the array is alive until then, and its memory is XLA's own matter afterwards. Of an
array that was exported so before, and is in C order, JAX gives the address, and shape and dtype are read in memory: its work is
before the launch on the stream already.

Tried with JAX 0.11. An array that it does not export so (on several devices, deleted, of elements without a DLPack type), and any
array where there are several GPUs, is exported by Python.
"""

import sys

import llvmlite.binding
from numba import types

from .._abi import ffi
from ..arguments import dunder
from ..arguments.tensors import exported
from ..cuda.array_interface import INTERFACE_BYTES, INTERFACE_EXTENTS, INTERFACE_OWNER, delete_interface
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.cpython import OB_ITEM, OB_SIZE
from ..ground.dlpack import CUDA
from ..ground.dltensor import (
    DL_TENSOR,
    INTERFACE_STREAM,
    MAX_NDIM,
    READONLY,
    delete_managed,
    dl_tensor_at,
    element_field,
    managed_at,
)
from ..ground.native import address_of, global_address, load, native, stack, store, struct_at
from ..ground.once import for_ever, once
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_New
from . import xla, xla_cuda
from .array_kind import cleared_error, element_of, is_in_c_order, is_known, jax_at, new_table, note_known
from .layout import array_type

__all__ = ["learn", "why_not"]

CDEF = """
/* How JAX's arrays on the only GPU are exported. */
typedef struct {
    int64_t function;           /* PyObject *: (array, stream=) -> a capsule */
    int64_t named;              /* PyObject *: {"stream": …} */
    int64_t stream;             /* CUstream, XLA's */
    int64_t deleter;            /* of the exports */
    int64_t number;             /* of the GPU */
    int64_t runtime;            /* fx_runtime * */
    int64_t arrays;             /* fx_jax *, whose known arrays are those that have been exported */
} fx_jax_device;
"""
jax_device_at = struct_at("fx_jax_device")
KIND = exported("jax", "JAX exports it for XLA's stream, without Python, in every launch")


@native
def new_export(state, ob, ndim, field, data):
    """A new export that holds the array `ob`, without its extents; 0 without memory. `field`: its dtype."""
    at = c.PyMem_RawMalloc(INTERFACE_BYTES) if ndim <= MAX_NDIM else 0
    if at == 0:
        return 0
    managed = managed_at(at)
    managed.version.major, managed.version.minor = 1, 0
    managed.manager_ctx, managed.deleter, managed.flags = 0, state.deleter, READONLY
    tensor = managed.dl_tensor
    tensor.data, tensor.byte_offset = data, 0
    tensor.device.device_type, tensor.device.device_id = CUDA, state.number
    tensor.ndim, tensor.shape, tensor.strides = ndim, at + INTERFACE_EXTENTS, 0
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = field & 0xFF, field >> 8, 1
    store(at + INTERFACE_STREAM, state.stream)
    store(at + INTERFACE_OWNER, ob)
    c.incref(ob)
    return at


@native
def export_known(state, ob):
    """An export of a known array; 0 for any other."""
    jax = jax_at(state.arrays)
    is_read, data = is_known(jax, ob)
    if not is_read:
        return 0
    key, _, shape = element_of(jax, structs.runtime_at(state.runtime), ob)
    ndim = load(shape + OB_SIZE) if key != 0 else MAX_NDIM + 1
    at = new_export(state, ob, ndim, key >> structs.DTYPE_SHIFT & structs.FIELD_MASK, data)
    if at != 0:
        for i in range(ndim):
            store(at + INTERFACE_EXTENTS + 8 * i, c.PyLong_AsSsize_t(load(shape + OB_ITEM + 8 * i)))
    return at


@native
def copy_export(theirs, state, ob):
    """A copy of an export that outlives it; 0 without memory, or if it is on another device. Makes the array known."""
    given = dl_tensor_at(theirs + DL_TENSOR)
    if given.device.device_type != CUDA or given.device.device_id != state.number or given.dtype.lanes != 1:
        return 0
    data = given.data + types.intp(given.byte_offset)
    at = new_export(state, ob, given.ndim, element_field(given), data)
    if at == 0:
        return 0
    tensor = managed_at(at).dl_tensor
    if given.strides != 0:
        tensor.strides = at + INTERFACE_EXTENTS + 8 * MAX_NDIM
    for i in range(given.ndim):
        store(tensor.shape + 8 * i, load(given.shape + 8 * i))
        if given.strides != 0:
            store(tensor.strides + 8 * i, load(given.strides + 8 * i))
    if is_in_c_order(given):
        note_known(jax_at(state.arrays), ob, data)
    return at


@cfunction(types.int32, types.intp, types.intp)
def managed_tensor_of_device_memory(ob, out):
    """``fx_entry.interface``: fill the pointer at `out` with an owning export of the array `ob`, ordered by XLA's stream.

    Returns: 0, or -1 for an array that Python has to export.
    Raises: only exceptions that are no ``Exception``. GIL: held; released while JAX waits until it has enqueued the array's work.
    """
    state = jax_device_at(global_address("fastexchange_jax_device"))
    known = export_known(state, ob)
    if known != 0:
        store(out, known)
        return types.int32(0)
    arguments, theirs = stack(1), stack(1)
    store(arguments, ob)
    store(theirs, 0)
    capsule = c.PyObject_VectorcallDict(state.function, arguments, 1, state.named)
    made = 0
    if capsule != 0 and dunder.take(capsule, theirs) == 0:
        made = copy_export(load(theirs), state, ob)
        delete_managed(load(theirs))
    if made == 0:
        cleared_error()
        return types.int32(-1)
    store(out, made)
    return types.int32(0)


# ---- in Python -------------------------------------------------------------------------------------------------------------

state = for_ever(ffi.new("fx_jax_device *"))
llvmlite.binding.add_symbol("fastexchange_jax_device", address_of(state))


def learn(cls: type) -> None:
    """Let native code export arrays of JAX in launches, if `cls` is their type."""
    if cls is array_type() and not runtime().entries.fields(cls).get("interface") and not why_not():
        runtime().entries.update(cls, interface=managed_tensor_of_device_memory.address, device_kind=KIND)


_ASKING = "fastexchange_stream"
"""The name of a handler for XLA."""


@once
def why_not() -> str:
    """Why native code does not export JAX's arrays; "" if it does. Imports JAX."""
    try:
        return _prepare()
    except Exception as error:  # a JAX with other private functions
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"


def _prepare() -> str:
    import jax

    devices = jax.local_devices(backend="cuda")
    if len(devices) != 1:
        return "there are several GPUs"
    function = getattr(sys.modules.get("jaxlib._jax"), "buffer_to_dlpack_managed_tensor", None)
    if function is None:
        return "this JAX has no function buffer_to_dlpack_managed_tensor"
    stream = _stream_of(devices[0])
    if not stream:
        return "XLA names no stream"
    state.function, state.named = id(for_ever(function)), id(for_ever({"stream": stream}))
    state.stream, state.deleter, state.number = stream, delete_interface.address, devices[0].local_hardware_id
    state.runtime, state.arrays = runtime().address, address_of(new_table())
    return ""


def _stream_of(device) -> int:
    """The ``CUstream`` on which XLA computes on a GPU of JAX's; 0 if there is none."""
    import jax

    with jax.ensure_compile_time_eval(), jax.default_device(device):
        jax.ffi.register_ffi_target(_ASKING, PyCapsule_New(xla_cuda.tell_stream.address, None, None), platform="CUDA")
        call = jax.ffi.ffi_call(_ASKING, jax.ShapeDtypeStruct((1,), "uint8"), has_side_effect=True)
        jax.jit(call)().block_until_ready()
    return xla.state.stream
