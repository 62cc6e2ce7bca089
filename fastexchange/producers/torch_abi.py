"""PyTorch's stable C ABI: borrowed views of tensors, by C functions that PyTorch keeps for compiled models of older versions.

They tell of a tensor one fact at a time: its address, sizes, strides, dtype, device. PyTorch has them without an exchange table,
too (before version 2.10), and they take a third of the time of the table's function. A tensor is given to them by its handle, an
``at::Tensor *``: the address of the word in the Python object that points to the implementation.

Native code reads the addresses in a static struct, which it finds by its symbol's name.

Source: ``torch/csrc/inductor/aoti_torch/c/shim.h``.
"""

import ctypes

import llvmlite.binding
from numba import types

from .._abi import ffi
from ..ground import cpython as c
from ..ground.cfunction import cfunction
from ..ground.dlpack import DLDeviceType
from ..ground.dltensor import describe, dl_tensor_at
from ..ground.native import (
    address_of,
    call_int,
    cstring,
    global_address,
    load,
    native,
    offset_of,
    sizeof,
    stack,
    struct_at,
)
from ..ground.once import for_ever, once
from ..ground.passing import reraise_passing
from ..ground.readable import checked_address
from . import torch_samples as samples
from .torch_offsets import alone, c_function, guard

__all__ = ["borrow_function", "dltensor_from_py_object_no_sync", "is_borrow_function", "why_not"]

CDEF = """
/* PyTorch's C ABI. Each function takes a handle and the address of its result, and returns 0, or another number if it fails. */
typedef struct {
    int64_t data_ptr;           /* aoti_torch_get_data_ptr */
    int64_t dim;                /* aoti_torch_get_dim: int64_t */
    int64_t sizes;              /* aoti_torch_get_sizes: int64_t *, in the tensor */
    int64_t strides;            /* aoti_torch_get_strides: int64_t *, in the tensor */
    int64_t dtype;              /* aoti_torch_get_dtype: int32_t */
    int64_t device_type;        /* aoti_torch_get_device_type: int32_t, as `device` of an fx_guard */
    int64_t device_index;       /* aoti_torch_get_device_index: int32_t */
    int64_t handle;             /* `object` of the fx_guard */
    int64_t elements;           /* `elements` of the fx_guard */
    int64_t cuda;               /* DLPack's type of a GPU */
} fx_torch_abi;
/* What its functions tell of a tensor. */
typedef struct {
    int64_t data, dim, sizes, strides;
    int32_t dtype, device_type, device_index;
} fx_torch_told;
"""

_abi_at, told_at = struct_at("fx_torch_abi"), struct_at("fx_torch_told")
TOLD_WORDS = (sizeof("fx_torch_told") + 7) // 8
_DATA, _DIM, _SIZES, _STRIDES, _DTYPE, _DEVICE_TYPE, _DEVICE_INDEX = (
    offset_of("fx_torch_told", name) for name in ("data", "dim", "sizes", "strides", "dtype", "device_type", "device_index")
)


@native
def torch_abi():
    """The process's ``fx_torch_abi``, found by its symbol's name."""
    return _abi_at(global_address("fastexchange_torch_abi"))


@native
def ask(py_object, at):
    """Ask for all but the dtype and the device's index, and store what is told at `at`, an ``fx_torch_told``. 0: it is known."""
    abi = torch_abi()
    handle = py_object + abi.handle
    failed = call_int(abi.device_type, (handle, at + _DEVICE_TYPE)) | call_int(abi.dim, (handle, at + _DIM))
    failed |= call_int(abi.sizes, (handle, at + _SIZES)) | call_int(abi.strides, (handle, at + _STRIDES))
    return failed | call_int(abi.data_ptr, (handle, at + _DATA))


@cfunction(types.int32, types.intp, types.intp)
def dltensor_from_py_object_no_sync(py_object, out):
    """Fill the DLTensor at `out` with a borrowed view of the PyTorch tensor `py_object`, which is not odd by its ``fx_guard``.

    A copy-on-write tensor gets memory of its own, as from PyTorch's own function.

    Returns: 0, or -1 with an exception set. Raises: RuntimeError, as PyTorch does, for a tensor whose memory it does not show,
    for a dtype that DLPack lacks, for a device that is neither the CPU nor a GPU. ``producers.torch.as_dlpack_raises`` knows the
    error to raise instead. GIL: held; no Python code runs.
    """
    abi = torch_abi()
    handle = py_object + abi.handle
    at = stack(TOLD_WORDS)
    told = told_at(at)
    failed = call_int(abi.dtype, (handle, at + _DTYPE)) | ask(py_object, at)
    device = 0
    if told.device_type != 0:
        failed |= call_int(abi.device_index, (handle, at + _DEVICE_INDEX))
        device = told.device_index
    field = load(abi.elements + 8 * types.intp(told.dtype)) if 0 <= told.dtype < 64 else 0
    if failed != 0 or not 0 <= told.device_type <= 1 or field == 0:
        c.PyErr_SetString(global_address("PyExc_RuntimeError"), cstring("PyTorch's C ABI shows no memory for DLPack"))
        return types.int32(-1)
    tensor = dl_tensor_at(out)
    describe(tensor, told.data, told.dim, field & 0xFFFF, told.sizes, told.strides)
    tensor.dtype.lanes = 1 + (field >> 16)
    if told.device_type != 0:
        tensor.device.device_type = types.int32(abi.cuda)
        tensor.device.device_id = types.int32(device)
    return types.int32(0)


# ---- in Python -----------------------------------------------------------------------------------------------------

_state = for_ever(ffi.new("fx_torch_abi *"))
llvmlite.binding.add_symbol("fastexchange_torch_abi", address_of(_state))

_FUNCTIONS = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")


def borrow_function() -> int:
    """Return the address of :func:`dltensor_from_py_object_no_sync`; 0 if this PyTorch has no such C ABI. Imports PyTorch."""
    return 0 if why_not() else dltensor_from_py_object_no_sync.address


def is_borrow_function(address: int) -> bool:
    """Whether `address` is what :func:`borrow_function` has returned."""
    return _state.handle != 0 and address == dltensor_from_py_object_no_sync.address


@once
def why_not() -> str:
    """Return why the C ABI cannot be used; "" if it can, because it tells of tensors of every kind what PyTorch tells."""
    import torch

    if not guard().knows_all:
        return "the layout of tensors is not verified"
    functions = {name: c_function(f"aoti_torch_get_{name}") for name in _FUNCTIONS}
    missing = [f"aoti_torch_get_{name}" for name, function in functions.items() if function is None]
    if missing:
        return f"this PyTorch lacks {', '.join(missing)}"
    for name, function in functions.items():
        setattr(_state, name, ctypes.cast(function, ctypes.c_void_p).value)
    native = guard().native
    _state.handle, _state.elements = native.object, native.elements
    _state.cuda = DLDeviceType.kDLROCM if torch.version.hip else DLDeviceType.kDLCUDA
    try:
        is_right = alone(lambda: all(map(_is_told, samples.strided_tensors())))
    except Exception as error:
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"
    return "" if is_right else "its answers differ from those of tensors' methods"


def _is_told(tensor) -> bool:
    """Whether the C ABI tells of a tensor on the CPU what its methods tell, or nothing if DLPack lacks the dtype."""
    borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(dltensor_from_py_object_no_sync.address)
    view = ffi.new("DLTensor *")
    try:
        borrow(tensor, address_of(view))
    except RuntimeError:
        return not samples.field_of(tensor.detach())
    dtype, device, count = view.dtype, view.device, tensor.dim()
    size = 8 * max(count, 1)
    try:
        shape, strides = (ffi.cast("int64_t *", checked_address(address_of(of), size)) for of in (view.shape, view.strides))
    except ValueError:
        return False
    return (
        (int(device.device_type), device.device_id) == (DLDeviceType.kDLCPU, 0) and view.ndim == count
        and samples.field_with_lanes(dtype) == samples.field_of(tensor.detach())
        and address_of(view.data) + view.byte_offset == tensor.data_ptr()
        and [shape[i] for i in range(count)] == [*tensor.size()] and [strides[i] for i in range(count)] == [*tensor.stride()]
    )  # fmt: skip
