"""Kernels for the CPU: parameters and results are the function's own."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import fastexchange
from fastexchange import BoundLaunch, FastKernel, fast_args


@fast_args
def total(x: Any) -> float:
    return float(x.sum())


@fast_args(fastmath=True, nogil=True, cache=True, error_model="numpy", returns=torch.Tensor)
def scaled(x: Any, by: float = 2.0) -> Any:
    return x * by


@fast_args("float64(float64[::1])")
def declared(x: npt.NDArray[np.float64]) -> float:
    return float(x[0])


class Layer:
    @staticmethod
    @fast_args
    def step(weights: Any, rate: float) -> None:
        weights[0] -= rate

    def train(self, weights: torch.Tensor) -> None:
        self.step(weights, 0.1)


number: float = total(torch.arange(3.0))
number = total(np.arange(3.0)) + total(x=np.ones(2))
tensor: torch.Tensor = scaled(torch.ones(3), by=3.0)
number = declared(np.ones(3))
Layer().train(torch.ones(3))

kernel: FastKernel[..., float] = total
launch: BoundLaunch[float] = total.bind(np.ones(3))
number = launch() + launch.rebind(x=np.ones(4))()
print(total.explain(np.ones(3)).outcome, total.counts().fast, total.signatures, total.__name__, total.py_func([1.0]))
total.precompile("float64(float64[::1])", (np.ones(3),), {"x": np.ones(3)})
report = fastexchange.measure(total, np.ones(3), alternatives=False, rounds=1)
print(report.headline, report.overhead.median, [part.label for part in report.parts], report.to_dict()["kernel"])
print(fastexchange.explain(np.ndarray).path)
