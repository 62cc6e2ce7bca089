"""PyTorch tensors of every kind, on which the layout of tensors is tried: plain ones, views, odd ones, each dtype.

The functions import PyTorch. They are called in a thread without modes.
"""

import contextlib

import numpy as np

from .._abi import ffi
from ..ground.dlpack import field_of_type
from ..ground.passing import reraise_passing
from ..ground.pythonapi import PyCapsule_GetPointer

__all__ = [
    "differentiated_in_place", "dtypes", "dual", "field_of", "field_with_lanes", "made_by", "odd_tensors", "plain_tensors",
    "strided_tensors", "tensors_of", "unusual", "views", "watched_in_place", "watched_tensors", "without_memory",
]  # fmt: skip


def field_with_lanes(dtype) -> int:
    """The dtype field of a ``DLDataType``, with the number of further lanes above it."""
    return field_of_type(dtype.code, dtype.bits) | dtype.lanes - 1 << 16


def field_of(tensor) -> int:
    """Return the :func:`field_with_lanes` of a tensor's export; 0 if it has none."""
    try:
        capsule = tensor.__dlpack__()
        dtype = ffi.cast("DLManagedTensor *", PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor.dtype
    except Exception as error:  # a dtype that DLPack lacks
        reraise_passing(error)
        return 0
    return field_with_lanes(dtype)


def dtypes() -> set:
    import torch

    return {each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def tensors_of(dtype) -> list:
    """Return some tensors of this dtype; fewer, or none, if ``torch.empty`` fails for it."""
    import torch

    return made_by(
        lambda: torch.empty(2, dtype=dtype, device="cpu"),
        lambda: torch.empty((3, 1000), dtype=dtype, device="cpu"),
        lambda: torch.empty((), dtype=dtype, device="cpu"),
    )


def plain_tensors() -> list:
    import torch

    with torch.inference_mode():
        inference = torch.ones(3)
    return [
        torch.ones(3, dtype=torch.float32), torch.ones(2, 3, dtype=torch.float64), torch.empty(0), torch.ones(()), inference,
        torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.int8),
        torch.ones(2, dtype=torch.bfloat16),
    ]  # fmt: skip


def views() -> list:
    import torch

    base, written, weights = torch.ones(12), torch.ones(2, 3), torch.ones(3, requires_grad=True)
    row = written[0]
    written.mul_(weights)  # from here on `row`, a view of `written`, requires grad
    table = torch.ones(3, 4, dtype=torch.int16)
    return [base[1:], base.view(3, 4), base.reshape(3, 4).t(), base[::2].view(2, 3), table.t(), table[0], row]


def unusual() -> list:
    """Return tensors with every number of dimensions, without elements, with strides of 0, in others' memory."""
    import torch

    shapes = [(17,), (19, 23), (3, 29, 5), (7, 1, 31, 2), (2, 3, 2, 37, 3), (3, 2, 2, 2, 2, 41), (2,) * 7, (1, 2) * 4]
    dense = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
    return [
        *dense, *(tensor.transpose(0, -1)[1:] for tensor in dense), torch.ones(1, 3).expand(4, 3), torch.empty(0, 3)[:, 1:],
        torch.ones(5)[5:], torch.from_numpy(np.arange(6.0)[2:]), torch.ones(3, 4)[1, 2], torch.ones(2).share_memory_(),
        torch.ones(4).view(2, 2, 1, 1, 1, 1, 1),
    ]  # fmt: skip


def strided_tensors() -> list:
    """Return tensors of every dtype, shape and kind whose memory is their value, with and without autograd."""
    made = [tensor for dtype in dtypes() for tensor in tensors_of(dtype)]
    return [*plain_tensors(), *views(), *watched_tensors(), *unusual(), *made]


def without_memory(device: str):
    """Return a tensor that says that it is on `device`, which need not exist."""
    import torch

    class Tensor(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    return torch.Tensor._make_wrapper_subclass(Tensor, (2,), device=torch.device(device))


def watched_tensors() -> list:
    import torch

    leaf = torch.ones(3, dtype=torch.float32, requires_grad=True)
    return [leaf, torch.nn.Parameter(torch.ones(2, 2)), leaf * 2, leaf.sum(), leaf[1:], (leaf * 2)[1:]]


def watched_in_place(tensor) -> None:
    import torch

    tensor.mul_(torch.ones(1, requires_grad=True))


def differentiated_in_place(tensor) -> None:
    import torch
    from torch.autograd import forward_ad

    with contextlib.nullcontext() if forward_ad._current_level >= 0 else forward_ad.dual_level():  # no levels within levels
        one = torch.ones(1, dtype=torch.float32)
        tensor.add_(make_dual(one, one))  # mul_() would import torch._dynamo, which is slow


def make_dual(tensor, tangent):
    """``forward_ad.make_dual()`` without what that compiles first for other functions' derivatives: a tenth of a second."""
    import torch
    from torch.autograd import forward_ad

    try:
        return torch._VF._make_dual(tensor, tangent, level=forward_ad._current_level)
    except Exception:  # a PyTorch in which this private function is another, or not there
        return forward_ad.make_dual(tensor, tangent)


def dual():
    import torch

    dual = torch.ones(3, dtype=torch.float32)
    differentiated_in_place(dual)
    return dual


def odd_tensors() -> list:
    import torch

    z = torch.ones(3, dtype=torch.complex64)
    x = torch.ones(2, 2, dtype=torch.float32)
    needed = [z.conj(), z.conj().imag, x.to_sparse(), x.to_sparse_csr(), torch.ones(2, device="meta")]
    return needed + made_by(
        lambda: torch._efficientzerotensor((2,)),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([x[0], x[1, :1]]),
    )


def made_by(*makers) -> list:
    """Call all `makers` and return the tensors. A failed call is skipped: PyTorch's versions have different kinds of tensors."""
    made = []
    for make in makers:
        try:
            made.append(make())
        except Exception as error:
            reraise_passing(error)
    return made
