"""PyTorch's tensors whose memory is not their value, or not there. None without PyTorch."""

import warnings

from frameworks import torch


def _tensors():
    z = torch.ones(3, dtype=torch.complex64) * 1j
    yield "conjugated", z.conj()
    yield "negated", z.conj().imag
    yield "sparse", torch.eye(2).to_sparse()
    yield "csr", torch.eye(2).to_sparse_csr()
    yield "meta", torch.ones(2, device="meta")
    yield "zero", torch._efficientzerotensor((2,))
    yield "requires grad", torch.ones(2, requires_grad=True)
    yield "non-leaf", torch.ones(2, requires_grad=True) * 2
    yield "view of one that requires grad", torch.ones(2, 2, requires_grad=True).t()
    yield "quantised", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    yield "freed storage", freed
    viewed = torch.ones(1024)
    view = viewed[512:]
    viewed.untyped_storage().resize_(0)
    yield "view of a freed storage", view
    from torch._subclasses.fake_tensor import FakeTensorMode

    yield "fake", FakeTensorMode().from_tensor(torch.ones(3))


ODD = {}
if torch is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ODD = dict(_tensors())
