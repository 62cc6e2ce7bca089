"""``FASTEXCHANGE_DEBUG=1``: outputs that this package allocates are filled before a call, and what is left of it is reported.

Floats and complex numbers get a NaN whose bits no arithmetic makes, other types a pattern of bits. Bits are compared: other NaNs
are results.
"""

import contextlib
import ctypes
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..exchange.export import export_of
from ..ground.dlpack_types import DLDataType
from ..ground.dtype_registry import key_of
from ..interpreter import DISABLED
from ..producers.framework import framework_of

__all__ = ["fill", "is_debugging", "report"]

_NANS = {
    "float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": 0x7FDA5A5A, "float64": 0x7FFDA5A5A5A5A5A5,
    "complex64": 0x7FDA5A5A, "complex128": 0x7FFDA5A5A5A5A5A5,
    "float8_e5m2": 0x7D, "float8_e4m3fn": 0x7F, "float8_e5m2fnuz": 0x80, "float8_e4m3fnuz": 0x80,
}  # fmt: skip


def is_debugging() -> bool:
    """Whether the environment variable says so."""
    return os.environ.get("FASTEXCHANGE_DEBUG") == "1"


def fill(value) -> None:
    """Fill a new output, a tensor."""
    with _words_of(value) as (words, bits, _):
        words[...] = bits


def report(value, kernel: str, output: str) -> None:
    """Warn if elements of an output have the bits that :func:`fill` has given them."""
    with _words_of(value) as (words, bits, dtype):
        left = int((words == bits).all(axis=1).sum())
    if left:
        what = "NaN" if str(dtype) in _NANS else f"{bits:#x}"
        unless = "" if what == "NaN" and dtype.bits > 8 else f", unless {what} is what it writes"
        message = (
            f"{kernel}(): {left} of {len(words)} elements of its output {output!r} are still the {what} that "
            f"FASTEXCHANGE_DEBUG=1 has filled it with: the kernel does not write them, or computes with what was there "
            f"before{unless}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _memory_of(value) -> Iterator[tuple[DLDataType, int, bool, int]]:
    """Yield a tensor's element type, the number of elements, whether they are in C order, and the first one's address."""
    if DISABLED:
        array = value if isinstance(value, np.ndarray) else framework_of(value).as_numpy(value)
        yield DLDataType(*(key_of(array.dtype) or (0, 1))), array.size, array.flags.c_contiguous, array.ctypes.data
        return
    with export_of(value, "an output") as export:
        tensor = export.tensor
        count = math.prod(tensor.shape[i] for i in range(tensor.ndim))
        yield DLDataType(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes), count, export.is_in_c_order, export.data


@contextlib.contextmanager
def _words_of(value) -> Iterator[tuple[Any, int, DLDataType]]:
    """Yield a tensor's memory as an array with a row of words for each element, the bits of a filled word, and the element type.

    There are no rows for elements that are no whole words, and for memory that is not compact.
    """
    with _memory_of(value) as (dtype, count, is_in_c_order, address):
        size, left = divmod(dtype.bits * dtype.lanes, 8)
        if left or not is_in_c_order:
            count = 0
        bits = _NANS.get(str(dtype))
        width = min(size & -size, 8)
        if str(dtype).startswith("complex"):
            width = size // 2
        memory: Any = (ctypes.c_uint8 * (count * size)).from_address(address) if count else bytearray()
        words = np.frombuffer(memory, f"u{width or 1}").reshape(count, -1 if count else 1)
        yield words, (0x5A5A5A5A5A5A5A5A >> 64 - 8 * width) if bits is None else bits, dtype
