"""``torch.vmap`` of kernels: a native loop over the batch (``dispatch.batches``).

It makes the calls with plain tensors on the CPU that nobody differentiates. Within several calls of ``vmap`` one loop goes over
all batches. For other calls ``library`` calls the operator for each item.
"""

import ctypes

from .._abi import ffi
from ..calls.compile_ahead import compiled_natively
from ..dispatch import batches
from ..ground.native import address_of
from ..ground.numba_internals import CPUDispatcher, compiles_as_numba
from ..ground.omitted import OMITTED
from ..producers.framework import framework_of_type
from .checks import is_recorded
from .odd_tensors import is_jit_tracing, is_wrapper, private
from .schema import Schema, fake_of

__all__ = ["call_mapped"]

_PASSED = bool, int, float


def call_mapped(kernel, schema: Schema, in_dims: tuple, args: tuple):
    """Call a kernel for each item of a batch. `in_dims`: for each argument the dimension with the items, or None.

    Returns the outputs, with the items in their first dimension; NotImplemented if native code does not make such calls. Raises
    what the kernel raises, and for items that do not fit.
    """
    import torch

    is_plain = isinstance(kernel, CPUDispatcher) and schema.outputs and not schema.mutated and compiles_as_numba(kernel)
    is_seen = is_jit_tracing() or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    if not is_plain or is_seen or not kernel._native.runtime.is_native:
        return NotImplemented
    operands = [_by_item(value, dim) for value, dim in zip(args, in_dims, strict=True) if _is_tensor(torch, value)]
    operands, levels = _without_batches(operands)
    sizes = torch.broadcast_shapes(*(each.shape[: len(levels) + 1] for each in operands))
    framework = framework_of_type(torch.Tensor)
    if 0 in sizes or is_recorded(operands) or not all(map(framework.is_read_in_memory, operands)):
        return NotImplemented
    operands = [each.contiguous() for each in operands]
    firsts = (each[(0,) * len(sizes)] for each in operands)
    items = [next(firsts) if _is_tensor(torch, value) else value for value in args]
    if not all(_is_tensor(torch, each) or each is None or type(each) in _PASSED for each in items):
        return NotImplemented
    made = fake_of(kernel, schema)(*items)
    outputs = list(made) if isinstance(made, tuple) else [made]
    if is_wrapper(outputs[0]):  # another transform wraps what is allocated
        return NotImplemented
    bound = (*kernel._parameters.bind(*items)[: -len(outputs)], *outputs)
    report = compiled_natively(kernel, bound)
    native, keys, overload = kernel._native, report.keys, report.overload
    if overload is None or overload.native.box or native.native.needs_owning_exports or len(keys) != len(bound):
        return NotImplemented
    results = [each.new_empty((*sizes, *each.shape)) for each in outputs]
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
    _CALL(batches.call_items.address)(native.address, address_of(overload.native), address_of(batch))
    for level in reversed(levels):
        results = [private("_C._functorch._add_batch_dim")(each, 0, level) for each in results]
    return results[0] if len(results) == 1 else tuple(results)


def _is_tensor(torch, value) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _by_item(tensor, dim: int | None):
    """A tensor with the items of a batch in its first dimension; one for all of them if `dim` is None."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def _without_batches(tensors: list) -> tuple[list, list[int]]:
    """The tensors that others stand for in calls of ``vmap`` around this one, each with all batches in its first dimensions.

    Returns also the levels of these calls in PyTorch, the innermost first. A tensor of another transform stays what it is.
    """
    names = "is_batchedtensor", "maybe_get_level", "maybe_get_bdim", "get_unwrapped", "_add_batch_dim"
    is_batched, level_of, dim_of, unwrapped, _ = found = [private(f"_C._functorch.{name}") for name in names]
    levels: list[int] = []
    while None not in found and any(map(is_batched, tensors)):
        levels.append(max(level_of(each) for each in tensors if is_batched(each)))
        tensors = [
            _by_item(unwrapped(each), dim_of(each)) if is_batched(each) and level_of(each) == levels[-1] else _by_item(each, None)
            for each in tensors
        ]
    return tensors, levels


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
