"""Rows of ``perf/kernels.py``: the layers of neural networks, against PyTorch's operators."""

import torch
from kernel_row import Row

from kernels.layer_norm import layer_norm
from kernels.softmax import softmax

_SMALL, _LARGE = (8, 64), (2048, 1024)


def _of_rows(dtype, shape):
    name = f"{str(dtype).removeprefix('torch.')} {shape}"
    x, weight, bias = (torch.randn(size, dtype=dtype) for size in (shape, shape[1:], shape[1:]))
    out = torch.empty_like(x)
    functional = torch.nn.functional
    yield Row("softmax", name, "torch.softmax", lambda: softmax(x, out), lambda: torch.softmax(x, 1, out=out))
    yield Row(
        "layer_norm",
        name,
        "torch.native_layer_norm",
        lambda: layer_norm(x, weight, bias, out),
        lambda: functional.layer_norm(x, shape[1:], weight, bias),
    )


def rows() -> list[Row]:
    """A small and a large size of each kernel."""
    torch.manual_seed(0)
    return [row for shape in (_SMALL, _LARGE) for dtype in (torch.float32, torch.float64) for row in _of_rows(dtype, shape)]
