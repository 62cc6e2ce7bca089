"""PyTorch: what its exchange functions do not check, and its ``__dlpack__`` does not always check either.

PyTorch 2.13's ``dltensor_from_py_object_no_sync`` hands out tensors whose memory is not their value (lazily conjugated or
negated), that have no memory (fake, zero, wrapper tensors) or that autograd watches. Asking PyTorch costs 20 to 50 ns a
question; the answers lie in memory, in the tensor's set of dispatch keys and in its autograd pointer. Where they lie is
found by experiment and verified on tensors of every kind; where that fails every tensor is asked (:func:`check`).
"""

import ctypes
import functools
import sys

__all__ = ["check", "guard", "is_tensor_type"]

_SCANNED_BYTES = 256  # of a tensor's C++ object, which is larger
_WORD = 8
_REQUIRES_GRAD = sys.intern("requires_grad")


def is_tensor_type(cls: type) -> bool:
    """Whether `cls` is a PyTorch tensor type. PyTorch is not imported for it."""
    torch = sys.modules.get("torch")
    base = getattr(torch, "Tensor", None)
    return isinstance(base, type) and issubclass(cls, base)


def check(tensor) -> None:
    """Raise BufferError for a tensor whose memory is not its value, or that autograd watches while grad mode is on.

    What else is unusual is left to the tensor's own ``__dlpack__``, which raises what it finds right.
    """
    import torch

    found = _layout()
    if found is not None and not tensor.requires_grad:
        if not _signed(torch._C._dispatch_keys(tensor).raw_repr()) & found["guard_mask"]:
            return
    if tensor.layout is not torch.strided:
        raise BufferError(f"it has layout {tensor.layout}; pass x.to_dense()")
    if tensor.is_conj():
        raise BufferError("it is lazily conjugated, its memory holds the conjugate; pass x.resolve_conj()")
    if tensor.is_neg():
        raise BufferError("it is lazily negated, its memory holds the negative; pass x.resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise BufferError("it requires grad, and autograd does not see what a kernel does; pass x.detach()")
    keys = torch._C._dispatch_keys(tensor)
    if keys.has(torch._C.DispatchKey.Python):
        raise BufferError(f"{type(tensor).__name__} defines __torch_dispatch__, so its memory need not be its value")
    tensor.detach().__dlpack__(max_version=(1, 3))


def guard() -> dict[str, int]:
    """The guard fields of ``fx_entry`` for a type of tensors; fields that flag every tensor if there is no other way.

    A tensor with an autograd pointer (a view has one, too) is asked for ``requires_grad``, which may run Python code (a
    subclass's ``__torch_function__``, a mode); so the call asks before it borrows any view, and takes an owning export.
    """
    found = _layout()
    if found is None:
        return {"guard_object": ctypes.sizeof(ctypes.c_ssize_t), "guard_word": 0, "guard_mask": -1}
    return {**found, "guard_name": id(_REQUIRES_GRAD)}


def is_verified() -> bool:
    """Whether the layout was found; if not, every tensor of every call is asked, slowly."""
    return _layout() is not None


@functools.cache
def _layout() -> dict[str, int] | None:
    try:
        return _find()
    except Exception:  # a PyTorch without these private functions
        return None


def _word(address: int) -> int:
    return ctypes.c_ssize_t.from_address(address).value


def _plain_tensors() -> list:
    import torch

    with torch.inference_mode():
        inference = torch.ones(3)
    return [
        torch.ones(3), torch.ones(2, 3), torch.empty(0), torch.ones(()), inference,
        torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.int8),
        torch.ones(2, dtype=torch.bfloat16),
    ]  # fmt: skip


def _views() -> list:
    import torch

    base = torch.arange(12.0).reshape(3, 4)
    return [base.t(), base[1:, ::2], base.detach(), base.view(-1), torch.tensor(1.0)]


def _watched_tensors() -> list:
    import torch

    leaf = torch.ones(3, requires_grad=True)
    return [leaf, leaf * 2, torch.nn.Parameter(torch.ones(2, 2))]


def _odd_tensors() -> list:
    import torch

    z = torch.ones(3, dtype=torch.complex64)
    return [
        z.conj(), z.conj().imag, torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), torch.ones(2, device="meta"),
        torch._efficientzerotensor((2,)), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]  # fmt: skip


def _find() -> dict[str, int] | None:
    """Find the three offsets and the mask, and see that they tell all plain tensors from all others."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototype features announce themselves
        plain, views, watched, odd = _plain_tensors(), _views(), _watched_tensors(), _odd_tensors()
    everything = plain + views + watched + odd
    in_object = [
        at
        for at in range(2 * _WORD, torch.Tensor.__basicsize__, _WORD)
        if all(_word(id(tensor) + at) == tensor._cdata for tensor in everything)
    ]
    keys = {id(tensor): _signed(torch._C._dispatch_keys(tensor).raw_repr()) for tensor in everything}
    in_tensor = [
        at for at in range(0, _SCANNED_BYTES, _WORD) if all(_word(t._cdata + at) == keys[id(t)] for t in everything)
    ]
    autograd = [
        at
        for at in range(_WORD, _SCANNED_BYTES, _WORD)
        if all(_word(t._cdata + at) == 0 for t in plain) and all(_word(t._cdata + at) != 0 for t in watched)
    ]
    if len(in_object) != 1 or len(in_tensor) != 1 or len(autograd) != 1:
        return None
    allowed = 0
    for tensor in plain + views + watched:
        allowed |= keys[id(tensor)]
    if any(keys[id(tensor)] & ~allowed == 0 for tensor in odd):
        return None
    return {
        "guard_object": in_object[0], "guard_word": in_tensor[0], "guard_mask": ~allowed, "guard_pointer": autograd[0],
    }  # fmt: skip


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
