"""The frameworks that the tests run over: those installed, and the producers made for the tests."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from made_producers import Dunder, Ignorant, Legacy, Tabled

from fastexchange import from_dlpack
from fastexchange.dispatch import structs
from fastexchange.exchange.export import known

try:
    import torch
except ImportError:
    torch = None
else:
    known(torch.Tensor)  # now, because tvm-ffi gives older versions of PyTorch an exchange table, which they have not
try:
    import tvm_ffi
except ImportError:
    tvm_ffi = None
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants ccache
        import paddle
    paddle.disable_signal_handler()  # its own, of crashes
except ImportError:
    paddle = None
try:
    from cuda.core.utils import StridedMemoryView
except ImportError:
    StridedMemoryView = None

numpys_reader = np.from_dlpack if np.from_dlpack(np.ones(1)).flags.writeable else from_dlpack
"""NumPy's own, for what it makes of an export; ours with NumPy 2.1, whose views are all readonly."""
NUMPY_DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
"""Every plain dtype that NumPy and DLPack share."""


@dataclass(frozen=True)
class Framework:
    """A source of tensors. ``tensor`` makes one of a NumPy array, sharing its memory."""

    name: str
    tensor: Callable[[np.ndarray], Any]
    readonly: bool = True
    """Whether a readonly array stays readonly."""
    negative_strides: bool = True
    own_strides: bool = True
    """Whether the strides of dimensions of one element, which mean nothing, come through as the array has them."""

    mutable: bool = True
    """Whether a kernel may write: legacy capsules cannot say so, and are taken for readonly, as NumPy takes them."""

    def view(self, tensor, array):
        """`array`, which `tensor` shares, as a kernel sees it in `tensor`."""
        if not self.mutable:
            array = array.view()
            array.flags.writeable = False
        return array if self.own_strides else with_strides_of(tensor, array)

    def __str__(self):
        return self.name


def with_strides_of(tensor, array):
    """`array`, which `tensor` shares, with the strides that `tensor` is exported with."""
    if torch is not None and isinstance(tensor, torch.Tensor) and is_borrowed():
        strides = tuple(step * array.itemsize for step in tensor.stride())  # PyTorch before 2.9 exports others for extents of 1
    else:
        strides = np.from_dlpack(tensor).strides
    return np.lib.stride_tricks.as_strided(array, strides=strides, writeable=array.flags.writeable)


def is_borrowed() -> bool:
    """Whether native code borrows views of PyTorch's tensors: from memory or by the exchange table."""
    return torch is not None and known(torch.Tensor)["kind"].exports == structs.EXPORTS_IF_OWNING


def has_table() -> bool:
    """Whether PyTorch's tensors were found to have an exchange table: what they get later (from tvm-ffi) does not count."""
    return torch is not None and bool(known(torch.Tensor).get("to_object"))


def has_versioned_capsules() -> bool:
    """Whether PyTorch's ``__dlpack__`` takes `max_version` and makes capsules that can say what is readonly."""
    try:
        return torch is not None and "dltensor_versioned" in repr(torch.empty(0).__dlpack__(max_version=(1, 0)))
    except TypeError:
        return False


def takes_copy() -> bool:
    """Whether PyTorch's ``from_dlpack`` takes `copy`, and asks for capsules that can say what is readonly."""
    return torch is not None and "copy" in inspect.signature(torch.from_dlpack).parameters


def is_exported(dtype) -> bool:
    """Whether this PyTorch exports tensors of this dtype."""
    try:
        torch.empty(0, dtype=dtype).__dlpack__()
    except (BufferError, RuntimeError):
        return False
    return True


FRAMEWORKS = [
    Framework("numpy", lambda array: array),
    Framework("exchange table", Tabled, readonly=False),
    Framework("__dlpack__", Dunder),
    Framework("legacy __dlpack__", Legacy, readonly=False, mutable=False),
    Framework("unversioned __dlpack__", Ignorant, readonly=False, mutable=False),
]
if torch is not None:
    _strange = torch.empty_strided((1, 2), (77, 1))  # before version 2.9 strides of dimensions of one element are exported as 1
    _own_strides = np.from_dlpack(_strange).strides == _strange.numpy().strides
    FRAMEWORKS.append(Framework("torch", torch.from_numpy, readonly=False, negative_strides=False, own_strides=_own_strides))
if tvm_ffi is not None:
    FRAMEWORKS.append(Framework("tvm_ffi", tvm_ffi.from_dlpack, readonly=False, negative_strides=False, own_strides=False))
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
each_mutable_framework = pytest.mark.parametrize("framework", [each for each in FRAMEWORKS if each.mutable], ids=str)
"""Those whose tensors a kernel may write to."""


def jax_with_64_bits(is_wide: bool = True):
    """Context manager: whether JAX has numbers of 64 bits. Before version 0.8 it has it elsewhere."""
    import jax

    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(is_wide)
