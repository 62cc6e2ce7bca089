"""Rows of ``perf/kernels.py``: the layers of neural networks, against PyTorch's operators.

Where PyTorch has no operator (rotary embedding, sampling), the other side is the formula in its tensor operations.
"""

import torch
from kernel_row import Row
from torch.nn import functional

from kernels.cross_entropy import cross_entropy
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.sampling import sample
from kernels.softmax import softmax


def _name(dtype, shape):
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _matrices(dtype, shape):
    """Both sides write into a given tensor where PyTorch's operator can, and make a new one where it cannot."""
    name, size = _name(dtype, shape), shape[1:]
    x, weight, bias = torch.randn(shape, dtype=dtype), torch.rand(size, dtype=dtype), torch.randn(size, dtype=dtype)
    out = torch.empty_like(x)
    eps = torch.finfo(dtype).eps
    yield Row("softmax", name, "torch.softmax", lambda: softmax(x, out), lambda: torch.softmax(x, 1, out=out))
    yield Row(
        "log_softmax",
        name,
        "torch.log_softmax",
        lambda: log_softmax(x, out),
        lambda: torch.log_softmax(x, 1, out=out),
    )
    yield Row(
        "layer_norm",
        name,
        "functional.layer_norm",
        lambda: layer_norm(x, weight, bias),
        lambda: functional.layer_norm(x, size, weight, bias),
    )
    yield Row(
        "rms_norm",
        name,
        "functional.rms_norm",
        lambda: rms_norm(x, weight, eps),
        lambda: functional.rms_norm(x, size, weight, eps),
    )


def _rotated(x, cos, sin):
    """The halves of each head turned; cos and sin hold each angle twice."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _rotary(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    positions, pairs = shape[2], shape[3] // 2
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    cos2, sin2 = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)
    yield Row(
        "rotary",
        _name(dtype, shape),
        "x * cos + rotate_half(x) * sin",
        lambda: rotary(x, cos, sin, 0, False),
        lambda: _rotated(x, cos2, sin2),
    )


def _cross_entropy(dtype, shape, smoothing):
    logits, target = torch.randn(shape, dtype=dtype), torch.randint(shape[1], shape[:1])
    yield Row(
        "cross_entropy",
        f"{_name(dtype, shape)}, smoothing {smoothing}",
        "functional.cross_entropy",
        lambda: cross_entropy(logits, target, smoothing, -100),
        lambda: functional.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing),
    )


def _drawn(values, index, u):
    """The index under each number `u` of the rows' weights, which descend."""
    sums = values.cumsum(1)
    at = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True).clamp_(max=values.shape[1] - 1)
    return index.gather(1, at)[:, 0]


def _top_k(logits, k, temperature, u):
    values, index = logits.topk(k)
    return _drawn(torch.softmax(values / temperature, 1), index, u)


def _top_p(logits, p, temperature, u):
    values, index = torch.softmax(logits / temperature, 1).sort(descending=True, stable=True)
    values[values.cumsum(1) - values >= p] = 0
    return _drawn(values, index, u)


def _sampling(dtype, shape):
    logits, u = 3 * torch.randn(shape, dtype=dtype), torch.rand(shape[0], dtype=dtype)
    name, k, p = _name(dtype, shape), 50, 0.9
    yield Row(
        "sample",
        f"{name}, top-k {k}",
        "topk, softmax, cumsum, searchsorted",
        lambda: sample(logits, k, 1.0, 0.8, u),
        lambda: _top_k(logits, k, 0.8, u),
    )
    yield Row(
        "sample",
        f"{name}, top-p {p}",
        "softmax, sort, cumsum, searchsorted",
        lambda: sample(logits, shape[1], p, 0.8, u),
        lambda: _top_p(logits, p, 0.8, u),
    )


def rows() -> list[Row]:
    """A small and a large size of each kernel."""
    torch.manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.float64):
        for shape in ((8, 64), (2048, 1024)):
            found += _matrices(dtype, shape)
        for shape in ((1, 8, 1, 64), (2, 16, 512, 128)):
            found += _rotary(dtype, shape)
        for shape, smoothing in (((8, 10), 0.0), ((256, 32000), 0.0), ((256, 32000), 0.1)):
            found += _cross_entropy(dtype, shape, smoothing)
    for shape in ((1, 1000), (8, 50000)):
        found += _sampling(torch.float32, shape)
    return sorted(found, key=lambda row: row.kernel)
