"""Tensors of one type from those of another."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

import fastexchange
from fastexchange import DLDataType, DLDeviceType, DLPackVersion, convert, exchange_api, from_dlpack, to_dlpack

tensor: torch.Tensor = convert(np.arange(3.0), torch.Tensor)
array: npt.NDArray[Any] = from_dlpack(tensor, dtype=np.float64, device="cpu", copy=True)
array = convert(memoryview(b"abc"), np.ndarray)
capsule = to_dlpack(array, max_version=(1, 0))
element: np.dtype[Any] = DLDataType.from_dtype(np.float32).to_dtype()
print(DLDataType(2, 32).bits, int(DLDeviceType.kDLCPU), DLPackVersion(1, 3).minor, exchange_api(np.ndarray), capsule)


class Tensor:
    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        return to_dlpack(array, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


fastexchange.polyfill(Tensor)
fastexchange.unpolyfill(Tensor)
fastexchange.register_dlpack_dtype((4, 16), np.dtype(ml_dtypes.bfloat16))


@fastexchange.fast_args
def halves(x: Any) -> Any:
    return fastexchange.bfloat16(x[0])


print(halves(torch.ones(2, dtype=torch.bfloat16)))
