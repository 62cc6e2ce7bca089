"""``torch.vmap`` of kernels: a native loop over the batch (``dispatch.batches``).

It makes the calls with plain tensors on the CPU that nobody differentiates. For others, such as those of a ``vmap`` within
another one, ``library`` calls the operator for each item.
"""

import ctypes

from .._abi import ffi
from ..calls.precompile import compiled_natively
from ..dispatch import batches, structs
from ..ground.native import address_of
from ..ground.numba_internals import CPUDispatcher, compiles_as_numba
from ..ground.omitted import OMITTED
from ..producers.framework import framework_of_type
from .checks import is_recorded
from .odd_tensors import is_jit_tracing, is_wrapper
from .schema import Schema, fake_of

__all__ = ["call_mapped"]

_PASSED = bool, int, float


def call_mapped(kernel, schema: Schema, size: int, in_dims: tuple, args: tuple):
    """Call a kernel for each item of a batch. `in_dims`: for each argument the dimension with the items, or None.

    Returns the outputs, with the items in their first dimension; NotImplemented if native code does not make such calls. Raises
    what the kernel raises, and for items that do not fit.
    """
    import torch

    is_plain = isinstance(kernel, CPUDispatcher) and schema.outputs and not schema.mutated and compiles_as_numba(kernel)
    is_seen = is_jit_tracing() or torch.utils._python_dispatch._get_current_dispatch_mode() is not None or is_recorded(args)
    if not is_plain or not size or is_seen or not kernel._native.runtime.is_native:
        return NotImplemented
    framework = framework_of_type(torch.Tensor)
    operands, items = [], []
    for value, dim in zip(args, in_dims, strict=True):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and framework.is_read_in_memory(value):
            operands.append(value.unsqueeze(0).contiguous() if dim is None else value.movedim(dim, 0).contiguous())
            items.append(operands[-1][0])
        elif value is None or type(value) in _PASSED:
            items.append(value)
        else:
            return NotImplemented
    made = fake_of(kernel, schema)(*items)
    outputs = list(made) if isinstance(made, tuple) else [made]
    if is_wrapper(outputs[0]):  # another transform wraps what is allocated
        return NotImplemented
    bound = (*kernel._parameters.bind(*items)[: -len(outputs)], *outputs)
    report = compiled_natively(kernel, bound)
    native, keys = kernel._native, report.keys
    if report.status != structs.STATUS_UNKNOWN_SHAPE or native.native.needs_owning_exports or len(keys) != len(bound):
        return NotImplemented
    overload = native.overload_of(keys)
    if overload.box:
        return NotImplemented
    results = [each.new_empty((size, *each.shape)) for each in outputs]
    values = [_source(value) for value in bound[: -len(outputs)]] + [(batches.RESULT, (0, 0))] * len(outputs)
    sources, numbers = batches.sources_of(keys, values, outputs[0].dim(), len(outputs))
    batch = ffi.new("fx_batch *")
    kept = [ffi.new("int64_t[]", list(words)) for words in (keys, sources, numbers)]
    batch.keys, batch.sources, batch.numbers = map(address_of, kept)
    batch.key_count = len(keys)
    for name, tensors in (("operands", operands), ("results", results)):
        buffers = [_buffer(each) for each in tensors]
        pointers = ffi.new("intptr_t[]", [address_of(buffer) for buffer, _ in buffers])
        kept += [pointers, buffers]
        setattr(batch, name, address_of(pointers))
    _CALL(batches.call_items.address)(native.address, address_of(overload), address_of(batch))
    return results[0] if len(results) == 1 else tuple(results)


_CALL = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 3)


def _source(value):
    """Where a call has an argument from, as ``batches.sources_of`` takes it."""
    if value is None or value is OMITTED:
        return batches.NOWHERE, None
    return (batches.NUMBER, value) if type(value) in _PASSED else (batches.OPERAND, (0, 0))


def _buffer(tensor) -> tuple:
    """The ``fx_array_buffer *`` of a compact tensor, and what it points to."""
    dims = ffi.new("int64_t[]", list(tensor.shape) or [0])
    buffer = ffi.new("fx_array_buffer *")
    buffer.data, buffer.rank, buffer.dims = tensor.data_ptr(), tensor.dim(), address_of(dims)
    return buffer, dims
