"""What has to be refused: each line with ``# refused`` is an error for mypy and pyright, and no other line is."""

from typing import Any

import numpy as np
import torch

from fastexchange import convert, fast_args, from_dlpack, measure


@fast_args
def total(x: Any, n: int) -> float:
    return float(x[n])


@fast_args(fastmth=True)  # refused
def misspelled_option(x: Any) -> None: ...


@fast_args(grad="ignore")  # refused
def unknown_rule(x: Any) -> None: ...


@fast_args(out="x[n] -> y[n]")  # refused
def returns_what_it_declares(x: Any, y: Any) -> float:
    return 1.0


total(np.ones(3))  # refused
total(np.ones(3), 1, 2)  # refused
total(np.ones(3), m=1)  # refused
total(np.ones(3), "1")  # refused
text: str = total(np.ones(3), 1)  # refused
total.bind(np.ones(3))  # refused
total.explian(np.ones(3), 1)  # refused
total.bind(np.ones(3), 1).rebind(np.ones(3))  # refused
array: torch.Tensor = from_dlpack(torch.ones(3))  # refused
tensor: np.ndarray[Any, Any] = convert(np.ones(3), torch.Tensor)  # refused
convert(np.ones(3), "torch.Tensor")  # refused
from_dlpack(np.ones(3), copy="no")  # refused
measure(total.py_func, np.ones(3), 1)  # refused
fast_args(3)  # refused
