"""Rows of ``perf/kernels.py``: an optimiser's step over many parameters, against PyTorch's optimiser.

Both sides are optimisers of the same parameters, which have gradients; a step is all that is timed.
"""

import torch
from kernel_row import Row

from kernels.adamw import AdamW


def _steps(data: str, shapes: list[tuple[int, ...]]):
    for way in ("foreach", "fused"):
        ours, theirs = ([torch.nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
        for param in ours + theirs:
            param.grad = torch.randn_like(param)
        optimisers = AdamW(ours), torch.optim.AdamW(theirs, **{way: True})
        yield Row("adamw_step", data, f"torch.optim.AdamW({way}=True)", *(each.step for each in optimisers))


def rows() -> list[Row]:
    """Many small parameters of one rank, and of two as in a model; few large ones."""
    torch.manual_seed(0)
    vectors, matrices = [(64,)] * 100, [(32, 32)] * 100
    return [
        *_steps("float32, 100 of (64,)", vectors),
        *_steps("float32, 100 of (32, 32)", matrices),
        *_steps("float32, 100 of each", [shape for pair in zip(vectors, matrices, strict=True) for shape in pair]),
        *_steps("float32, 8 of (1024, 1024)", [(1024, 1024)] * 8),
    ]
