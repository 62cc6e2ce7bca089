"""The frameworks that the tests run over: those installed, and the producers made for the tests."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from made_producers import Dunder, Ignorant, Legacy, Tabled

try:
    import torch
except ImportError:
    torch = None
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

NUMPY_DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
"""Every plain dtype that NumPy and DLPack share."""


@dataclass(frozen=True)
class Framework:
    """A source of tensors. ``tensor`` makes one of a NumPy array, sharing its memory."""

    name: str
    tensor: Callable[[np.ndarray], Any]
    native: bool = True
    """Whether a repeated call runs no Python at all."""
    readonly: bool = True
    """Whether a readonly array stays readonly."""
    negative_strides: bool = True
    dtypes: tuple[str, ...] = NUMPY_DTYPES
    own_strides: bool = True
    """Whether the strides of dimensions of one element, which mean nothing, come through as the array has them."""

    mutable: bool = True
    """Whether a kernel may write: legacy capsules cannot say so, and are taken for readonly, as NumPy takes them."""

    def view(self, tensor, array):
        """`array`, which `tensor` shares, as a kernel sees it in `tensor`."""
        if not self.mutable:
            array = array.view()
            array.flags.writeable = False
        return array if self.own_strides else np.from_dlpack(tensor)

    def __str__(self):
        return self.name


FRAMEWORKS = [
    Framework("numpy", lambda array: array),
    Framework("exchange table", Tabled, readonly=False),
    Framework("__dlpack__", Dunder),
    Framework("legacy __dlpack__", Legacy, readonly=False, mutable=False),
    Framework("unversioned __dlpack__", Ignorant, readonly=False, mutable=False),
]
if torch is not None:
    FRAMEWORKS.append(Framework("torch", torch.from_numpy, readonly=False, negative_strides=False))
if tvm_ffi is not None:
    FRAMEWORKS.append(
        Framework("tvm_ffi", tvm_ffi.from_dlpack, readonly=False, negative_strides=False, own_strides=False)
    )
