"""New tensors of PyTorch as PyTorch makes them: by its C ABI, and its function that makes Python objects of them.

A tensor that an exchange table's allocator makes is another one's memory to PyTorch: it is not ``record_stream``'s.

Source: ``torch/csrc/inductor/aoti_torch/c/shim.h``, ``torch/csrc/autograd/python_variable.h``.
"""

import ctypes

from numba import types

from .._abi import ffi
from ..arguments.discovery import learn_type
from ..dispatch import structs
from ..dispatch.runtime import runtime
from ..ground.cfunction import cfunction
from ..ground.dlpack import CPU
from ..ground.dltensor import MAX_NDIM, dl_tensor_at, packed_strides
from ..ground.native import address_of, call_int, call_word, load, stack
from ..ground.once import once
from ..ground.passing import reraise_passing
from .boxed_kernel import TORCH_NUMBERS
from .guard import guard_at
from .offsets import alone, c_function, guard

__all__ = ["learn_to_make", "make_tensor", "why_not_made"]

_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"
"""``PyObject *THPVariable_Wrap(const TensorBase &)``; before PyTorch 2.9 of a value, which C++ passes by its address, too."""


@cfunction(types.intp, types.intp, types.intp)
def make_tensor(entry, prototype):
    """``fx_entry.make``: by PyTorch's allocator, on the device's current stream.

    Returns: a new reference; 0, without an exception, if PyTorch cannot make it. GIL: held; may run Python code.
    """
    guard = guard_at(structs.entry_at(entry).guard)
    tensor = dl_tensor_at(prototype)
    ndim = types.intp(tensor.ndim)
    if ndim > MAX_NDIM:
        return 0
    field = types.intp(tensor.dtype.code) | types.intp(tensor.dtype.bits) << 8
    number = 0
    while number < TORCH_NUMBERS and load(guard.elements + 8 * number) != field:
        number += 1
    if number == TORCH_NUMBERS:
        return 0
    strides = stack(MAX_NDIM)
    handle = stack(1)
    packed_strides(ndim, tensor.shape, strides)
    device = types.intp(tensor.device.device_type)
    kind, index = (0, 0) if device == CPU else (1, types.intp(tensor.device.device_id))
    if call_int(guard.empty_strided, (ndim, tensor.shape, strides, number, kind, index, handle)) != 0:
        return 0
    made = call_word(guard.wrap, (load(handle),))
    call_int(guard.delete_tensor, (load(handle),))
    return made


def learn_to_make() -> None:
    """Let native code make tensors on a device by :data:`make_tensor`, if those that it makes on the CPU are right."""
    import torch

    if not why_not_made():
        for each in (torch.Tensor, torch.nn.Parameter):
            learn_type(each)
            runtime().entries.update(each, make=make_tensor.address)


@once
def why_not_made() -> str:
    """Why native code does not let PyTorch make tensors; "" if it does. Imports PyTorch."""
    functions = {
        "empty_strided": c_function("aoti_torch_empty_strided"),
        "delete_tensor": c_function("aoti_torch_delete_tensor_object"),
        "wrap": next((found for name in _WRAP if (found := c_function(name, "torch_python")) is not None), None),
    }
    if None in functions.values() or not guard().knows_all:
        return "the layout of tensors is not verified, or this PyTorch lacks a function"
    guard().set_all(**{name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in functions.items()})
    try:
        return "" if alone(_makes_tensors) else "the tensors that it makes are not as expected"
    except Exception as error:  # a PyTorch with other functions of these names
        reraise_passing(error)
        return f"{type(error).__name__}: {error}"


def _makes_tensors() -> bool:
    """Whether tensors on the CPU that native code makes are as PyTorch's own."""
    import torch

    entry, prototype = ffi.new("fx_entry *"), ffi.new("DLTensor *")
    entry.guard = address_of(guard().native)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)(make_tensor.address)
    prototype.device.device_type, prototype.dtype.lanes = CPU, 1
    for dtype, code, bits in ((torch.float32, 2, 32), (torch.int64, 0, 64), (torch.complex64, 5, 64), (torch.bool, 6, 8)):
        prototype.dtype.code, prototype.dtype.bits = code, bits
        for shape in (), (0,), (3,), (2, 0, 3), (2, 3, 4, 5, 6, 7):
            extents = ffi.new("int64_t[]", shape or (0,))
            prototype.ndim, prototype.shape = len(shape), extents
            made, wanted = make(address_of(entry), address_of(prototype)), torch.empty(shape, dtype=dtype)
            if type(made) is not torch.Tensor or (made.shape, made.dtype, made.device) != (wanted.shape, dtype, wanted.device):
                return False
            if made.stride() != wanted.stride() or made.requires_grad or not made.untyped_storage().resizable():
                return False
    return True
