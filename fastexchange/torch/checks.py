"""PyTorch: checks that its exchange functions, and sometimes its ``__dlpack__``, leave out.

PyTorch 2.13's ``dltensor_from_py_object_no_sync`` also exports tensors whose memory is not their value (lazily conjugated or
negated), without memory (fake, zero, wrapper tensors), or tracked by autograd. Native code finds these odd tensors
(``torch.offsets``). This module checks them again and raises the errors.
"""

import sys
from contextlib import nullcontext, suppress
from typing import Any, cast

from ..ground.dlpack import VERSION
from .odd_tensors import has_tangent, private, why_no_memory, without_subclasses
from .offsets import dtypes_not_exported, guard, is_narrow, keys_of

__all__ = [
    "call_dlpack", "check", "check_kind", "check_storage", "is_recorded", "is_tensor", "is_tensor_type", "narrow_elements",
    "overrides_functions",
]  # fmt: skip


def is_tensor_type(cls: type) -> bool:
    """Whether `cls` is a PyTorch tensor type. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    base = getattr(torch, "Tensor", None)
    return isinstance(base, type) and issubclass(cls, base)


def is_tensor(value) -> bool:
    """Whether `value` is a PyTorch tensor. Does not import PyTorch, and runs no code of the value's class."""
    return is_tensor_type(type(value))


def is_recorded(values) -> bool:
    """Whether autograd has to see a call with these values, of which some are tensors."""
    import torch

    return torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in values)


def overrides_functions(cls: type) -> bool:
    """Whether a tensor type overrides ``__torch_function__``, which may change the result of ``__dlpack__``."""
    import torch

    own = getattr(cls, "__torch_function__", None)
    inherited = (torch.Tensor.__torch_function__, private("_C._disabled_torch_function_impl"))
    return getattr(own, "__func__", own) not in [getattr(known, "__func__", known) for known in inherited]


def narrow_elements(tensor) -> str | None:
    """Return the name of a tensor's dtype if it is an integer of less than a byte, else None."""
    import torch

    with without_subclasses():
        dtype = cast(Any, torch.Tensor.dtype).__get__(tensor)
    return str(dtype).removeprefix("torch.") if is_narrow(dtype) else None


def check(tensor, allows_grad: bool = False, allows_bits: bool = False) -> None:
    """Raise BufferError for a tensor whose memory is not its value, or that autograd tracks while grad mode is on.

    `allows_grad`: do not check for autograd. `allows_bits`: allow integers of less than a byte. The tensor's own ``__dlpack__``
    checks everything else, and raises its own errors.
    """
    try:
        _check(tensor, allows_grad, allows_bits)
        return
    except Exception:
        why = why_no_memory(tensor)
        if why is None:
            raise
    raise BufferError(why)


def _check(tensor, allows_grad: bool, allows_bits: bool) -> None:
    import torch

    found = guard()
    with without_subclasses():  # a subclass's Python code may answer otherwise
        of: Any = torch.Tensor
        requires_grad, tensor_layout = of.requires_grad.__get__(tensor), of.layout.__get__(tensor)
        is_conjugated, is_negated = of.is_conj(tensor), of.is_neg(tensor)
    is_watched = requires_grad and torch.is_grad_enabled() and not allows_grad
    is_plain = found.knows_all and not keys_of(tensor) & found.native.odd_keys
    if is_plain or not found.knows_all:
        check_storage(tensor)
        if not allows_grad and has_tangent(tensor):
            raise BufferError(
                "it carries a tangent of forward-mode differentiation, which a kernel would lose; pass the primal that "
                "torch.autograd.forward_ad.unpack_dual() gives for it"
            )
    if not allows_bits and (name := narrow_elements(tensor)) is not None:
        whole = f"{name[:-1]}8"
        raise BufferError(f"its elements are {name}, and PyTorch exports them as {whole}; pass its view(torch.{whole})")
    check_kind(tensor)
    if is_plain and not is_watched:
        return
    if tensor_layout is not torch.strided:
        advice = "pass its to_dense()" if "sparse" in str(tensor_layout) else "its elements are no array with strides"
        raise BufferError(f"it has layout {tensor_layout}; {advice}")
    if is_conjugated:
        raise BufferError("it is lazily conjugated, its memory holds the conjugate; pass its resolve_conj()")
    if is_negated:
        raise BufferError("it is lazily negated, its memory holds the negative; pass its resolve_neg()")
    if is_watched:
        tensor.detach()  # a subclass may raise its own error
        raise BufferError(
            "it requires grad, and autograd would not see what is done with its memory; pass its detach(), or call within "
            "torch.no_grad(); a kernel can declare its gradient, fast_args(out=..., backward=...)"
        )
    keys, key = private("_C._dispatch_keys"), private("_C.DispatchKey.Python")
    is_known = keys is not None and key is not None
    if keys(tensor).has(key) if is_known else type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise BufferError(f"{type(tensor).__name__} defines __torch_dispatch__, so its memory need not be its value")
    call_dlpack(tensor.detach() if requires_grad else tensor)


def call_dlpack(tensor) -> None:
    """Call ``__dlpack__`` for the error that it may raise. PyTorch's takes `max_version` since version 2.9.

    On a GPU it refuses tensors of another device than the current one, and lets a stream wait unless that is -1.
    """
    import torch

    with without_subclasses():
        device = cast(Any, torch.Tensor.device).__get__(tensor)
    is_on_gpu = device.type == "cuda"
    told = {"stream": -1} if is_on_gpu else {}
    with torch.cuda.device(device) if is_on_gpu else nullcontext():
        with suppress(TypeError):
            tensor.__dlpack__(max_version=VERSION, **told)
            return
        tensor.__dlpack__(**told)


def check_kind(tensor) -> None:
    """Raise BufferError for a tensor of a dtype or device that PyTorch does not export.

    PyTorch is not asked: versions before 2.10 hold such a tensor for ever when they fail to export it.
    """
    import torch

    cls = type(tensor)
    if overrides_functions(cls) or cls.__dlpack__ is not torch.Tensor.__dlpack__:  # it may export what PyTorch does not
        return
    with without_subclasses():
        of: Any = torch.Tensor
        dtype, is_meta = of.dtype.__get__(tensor), of.is_meta.__get__(tensor)
    if is_meta or dtype in dtypes_not_exported():
        if why := why_no_memory(tensor):
            raise BufferError(why)
        name = str(dtype).removeprefix("torch.")
        raise BufferError(
            f"its elements are {name}, which this PyTorch cannot export; pass its view(torch.uint{8 * dtype.itemsize}), "
            "or convert it"
        )


def check_storage(tensor) -> None:
    """Raise BufferError for a tensor that is longer than its storage, after a ``resize_()`` of the storage."""
    try:
        with without_subclasses():
            size = tensor.untyped_storage().nbytes()
            last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = (tensor.storage_offset() + last + 1) * tensor.element_size()
            is_empty = not tensor.numel()
    except Exception:  # sparse, nested, fake …: their own __dlpack__ decides
        return
    if end > size and not is_empty:
        with suppress(RuntimeError):  # PyTorch's own error, before version 2.9
            call_dlpack(tensor.detach() if tensor.requires_grad else tensor)  # it may raise its own error
        raise BufferError(
            f"its storage has been freed or made smaller: it holds {size} bytes, and the tensor ends at byte {end}"
        )
