"""Rows of ``perf/kernels.py``: bfloat16 and float16, against PyTorch's operators for them and against the same kernel in float32.

The first kernels here are loops as a user writes them; with more than one thread they are parallel loops. The others are those of
``kernels/``.
"""

from functools import partial

import numba
import numpy as np
import torch
from kernel_row import Row
from torch.nn import functional

from fastexchange import fast_args
from kernels.adamw import AdamW
from kernels.cross_entropy import cross_entropy
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.softmax import softmax

_FLOAT32 = "the same kernel, float32"


def _mul(x, y, out):
    for i in numba.prange(out.shape[0]):
        out[i] = x[i] * y[i]


def _axpy(a, x, y, out):
    factor = np.float32(a)
    for i in numba.prange(out.shape[0]):
        out[i] = factor * x[i] + y[i]


def _scale_and_add(a, b, x, out):
    factor, more = np.float32(a), np.float32(b)
    for i in numba.prange(out.shape[0]):
        out[i] = factor * x[i] + more


def _sum(x):
    return x.sum()


def _nothing(x, y, out):
    pass


def _name(dtype, *shape):
    return f"{str(dtype).removeprefix('torch.')} {shape if len(shape) > 1 else shape[0]}"


def _vectors(dtype, size, than_pytorch, than_float32, is_parallel):
    """`than_pytorch`, `than_float32`: how many times faster the kernels must be; None: no such promise."""
    mul, axpy, scale, total = (fast_args(f, parallel=is_parallel) for f in (_mul, _axpy, _scale_and_add, _sum))
    x, y = torch.randn(size), torch.randn(size)
    narrow, wide = (x.to(dtype), y.to(dtype), torch.empty_like(x, dtype=dtype)), (x, y, torch.empty_like(x))
    operators = {
        "mul": ("torch.mul(out=)", lambda x, y, out: lambda: mul(x, y, out), lambda x, y, out: torch.mul(x, y, out=out)),
        "axpy": (
            "torch.add(alpha=, out=)",
            lambda x, y, out: lambda: axpy(2.5, x, y, out),
            lambda x, y, out: torch.add(y, x, alpha=2.5, out=out),
        ),
        "a * x + b": (
            "torch.mul(out=), add_",
            lambda x, y, out: lambda: scale(2.5, 0.5, x, out),
            lambda x, y, out: torch.mul(x, 2.5, out=out).add_(0.5),
        ),
        "sum": ("torch.sum", lambda x, y, out: lambda: total(x), lambda x, y, out: torch.sum(x)),
    }
    for kernel, (operator, ours, theirs) in operators.items():
        name = _name(dtype, size)
        yield Row(kernel, name, operator, ours(*narrow), lambda theirs=theirs: theirs(*narrow), than_pytorch)
        if than_float32:
            yield Row(kernel, name, _FLOAT32, ours(*narrow), ours(*wide), than_float32)


def _rows(dtype, promised):
    rows, columns = shape = 2048, 1024
    x, weight, bias = (torch.randn(size).to(dtype) for size in (shape, columns, columns))
    out, target, name = torch.empty_like(x), torch.randint(columns, (rows,)), _name(dtype, *shape)
    for kernel, operator, ours, theirs, must_be in (
        ("softmax", "torch.softmax", lambda: softmax(x, out), lambda: torch.softmax(x, 1, out=out), promised),
        ("log_softmax", "torch.log_softmax", lambda: log_softmax(x, out), lambda: torch.log_softmax(x, 1, out=out), None),
        (
            "layer_norm",
            "functional.layer_norm",
            lambda: layer_norm(x, weight, bias),
            lambda: functional.layer_norm(x, (columns,), weight, bias),
            promised,
        ),
        (
            "rms_norm",
            "functional.rms_norm",
            lambda: rms_norm(x, weight, 1e-5),
            lambda: functional.rms_norm(x, (columns,), weight, 1e-5),
            promised,
        ),
        (
            "cross_entropy",
            "functional.cross_entropy",
            lambda: cross_entropy(x, target, 0.0, -100),
            lambda: functional.cross_entropy(x, target, reduction="none"),
            promised,
        ),
    ):
        yield Row(kernel, name, operator, ours, theirs, must_be)


def _rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _model(dtype):
    """What has no promise: rotary embedding, and an optimiser's step."""
    x, angle = torch.randn(2, 16, 512, 128).to(dtype), torch.randn(512, 64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    cos2, sin2 = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    yield Row(
        "rotary",
        _name(dtype, *x.shape),
        "x * cos + rotate_half(x) * sin",
        lambda: rotary(x, cos, sin, 0, False),
        lambda: _rotated(x, cos2, sin2),
    )
    lists = [[torch.nn.Parameter(torch.randn(1024, 1024).to(dtype)) for _ in range(8)] for _ in range(3)]
    for params in lists:
        for param in params:
            param.grad = torch.randn_like(param)
    name, theirs = f"{_name(dtype, 1024, 1024)}, 8 of them", "torch.optim.AdamW(fused=True)"
    optimisers = [AdamW(lists[0]), AdamW(lists[1], seed=1), torch.optim.AdamW(lists[2], fused=True)]
    yield Row("adamw_step", name, theirs, optimisers[0].step, optimisers[2].step)
    yield Row("adamw_step, stochastic", name, theirs, optimisers[1].step, optimisers[2].step)


def rows() -> list[Row]:
    torch.manual_seed(0)
    bfloat16, float16, is_parallel = torch.bfloat16, torch.float16, numba.get_num_threads() > 1
    nothing = fast_args(_nothing)
    few = {dtype: [torch.ones(1, dtype=dtype) for _ in range(3)] for dtype in (torch.float32, bfloat16, float16)}
    wide = partial(nothing, *few[torch.float32])
    return [
        *_vectors(bfloat16, 4096, 3, None, False),
        *_vectors(float16, 4096, 3, None, False),
        *_vectors(bfloat16, 1_000_000, 1.4, 1.4, is_parallel),
        *_vectors(float16, 1_000_000, 1.0, None, is_parallel),
        *_vectors(float16, 10_000_000, 1.0, 1.3, is_parallel),
        *_rows(bfloat16, 1.2),
        *_rows(float16, None),
        *_model(bfloat16),
        *(Row("a call", _name(dtype, 1), _FLOAT32, partial(nothing, *few[dtype]), wide, 0.95) for dtype in (bfloat16, float16)),
    ]
