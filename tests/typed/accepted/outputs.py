"""Declared outputs may be omitted, and gradients be kernels."""

from typing import Any

import numpy as np
import torch

from fastexchange import TorchOp, fast_args


@fast_args(out="x[n], grad_y[n] -> grad_x[n]")
def square_backward(x: Any, grad_y: Any, grad_x: Any) -> None:
    grad_x[:] = 2 * x * grad_y


@fast_args(out="x[n] -> y[n]", backward=square_backward)
def square(x: Any, y: Any) -> None:
    y[:] = x * x


y: torch.Tensor = square(torch.ones(3, requires_grad=True))
z: torch.Tensor = square(torch.ones(3), torch.empty(3))
array: np.ndarray[Any, np.dtype[np.float64]] = square(np.ones(3), y=None)
operator: TorchOp = square.as_torch_op("typed::square", backward=square_backward, replace=True)
y = operator(torch.ones(3))
print(y.sum(), square.out, square.bind(np.ones(3))())


@fast_args(mutates=["w"], grad="allow")
def step(w: torch.Tensor, grad: torch.Tensor, rate: float) -> None:
    w -= rate * grad


step(torch.ones(3), torch.ones(3), 0.1)
