"""Kernels for CUDA: launches return nothing."""

import importlib
from typing import Any, cast

import torch

from fastexchange import BoundCudaLaunch, CudaError, CudaKernel, CudaLauncher, LaunchedKernel, fast_args


def launched(kernel: CudaKernel, x: torch.Tensor) -> None:
    launcher: CudaLauncher = kernel[128, (32, 4), torch.cuda.current_stream(), 1024]
    launcher(x, x.numel())
    kernel.forall(x.numel())(x)
    kernel.configure(128, 32)(x)
    bound: BoundCudaLaunch = launcher.bind(x, 3)
    bound()
    bound.rebind(x=x)()
    try:
        kernel[1, 1](x)
    except CudaError as error:
        print(error.code, error.name, error.is_sticky, launcher.configuration.grid, kernel.counts().slow)


cuda: Any = importlib.import_module("numba.cuda")  # it has no types of its own


def add_one(x: Any, n: int) -> None:
    i = cuda.grid(1)
    if i < n:
        x[i] += 1


def main() -> None:
    kernel = cast(CudaKernel, fast_args(cuda.jit(add_one), grad="allow"))
    launched(kernel, torch.ones(3, device="cuda"))
    returning = cast(LaunchedKernel, fast_args(cuda.jit(add_one), out="x[n] -> y[n]", launch=("n", 1), mutates="x"))
    print(returning(torch.ones(3)), returning.cuda_kernel, returning.as_torch_op("my::op").name)
