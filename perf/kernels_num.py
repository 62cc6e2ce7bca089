"""Numerical kernels against the operators of PyTorch and SciPy: scans, segments, distances, filters, runs, sparse, grids."""

from functools import partial

import numpy as np
import scipy.signal
import scipy.sparse
import torch
from kernel_row import Row

from kernels.axpy import axpy
from kernels.csr import csr_matvec
from kernels.distances import nearest, pairwise
from kernels.heat import heat_step
from kernels.histogram import histogram
from kernels.iir import sosfilt
from kernels.runs import run_length_decode, run_length_encode
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum


def _uniform(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _name(tensor: torch.Tensor, more: str = "") -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{more}"


def _vectors():
    for size in (1000, 1_000_000):
        x, y = _uniform(size), _uniform(size, seed=1)
        out = torch.empty_like(x)
        add = partial(torch.add, y, x, alpha=2.5, out=out)
        yield Row("axpy", _name(x), "torch.add(alpha=, out=)", partial(axpy, 2.5, x, y, out), add)
    for size in (1000, 1_000_000):
        for x in (_uniform(size), _uniform(size, dtype=torch.float64), (100 * _uniform(size)).to(torch.int64)):
            out = torch.empty_like(x)
            total = partial(torch.cumsum, x, 0, out=out)
            yield Row("exclusive_scan", _name(x), "torch.cumsum(out=)", partial(exclusive_scan, x, out), total)
    for size in (1000, 1_000_000):
        x, counts = _uniform(size), torch.empty(100, dtype=torch.int64)
        floating = torch.empty(100)
        theirs = partial(torch.histc, x, 100, 0.0, 1.0, out=floating)
        yield Row("histogram", _name(x, ", 100 bins"), "torch.histc(out=)", partial(histogram, x, 100, 0.0, 1.0, counts), theirs)
        theirs = partial(np.histogram, x.numpy(), 100, (0.0, 1.0))
        yield Row("histogram", _name(x, ", 100 bins"), "np.histogram", partial(histogram, x, 100, 0.0, 1.0, counts), theirs)


def _segments():
    kernels = {"sum": (segment_sum, ()), "mean": (segment_mean, ()), "max": (segment_max, (-np.inf,))}
    kernels["min"] = (segment_min, (np.inf,))
    for shape, segments in (((1000,), 100), ((1_000_000,), 1000), ((1_000_000,), 100_000), ((16384, 64), 1024)):
        x = _uniform(*shape)
        inner = torch.sort(torch.randint(shape[0], (segments - 1,), generator=torch.Generator().manual_seed(1))).values
        offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([shape[0]])])
        for name, (kernel, initial) in kernels.items():
            ours = partial(kernel, x, offsets, *initial)
            theirs = partial(torch.segment_reduce, x, name, offsets=offsets, unsafe=True)
            yield Row(f"segment_{name}", _name(x, f", {segments} segments"), "torch.segment_reduce", ours, theirs)


def _distances():
    for n, m, columns in ((20, 20, 8), (1000, 1000, 3), (1000, 1000, 64), (1000, 1000, 256)):
        x, y = _uniform(n, columns), _uniform(m, columns, seed=1)
        data, ours = f"{_name(x)} and {tuple(y.shape)}", partial(pairwise, x, y)
        yield Row("pairwise", data, "torch.cdist", ours, partial(torch.cdist, x, y))
        exact = partial(torch.cdist, x, y, compute_mode="donot_use_mm_for_euclid_dist")
        yield Row("pairwise", data, "torch.cdist, no matrix product", ours, exact)
    for n, m, columns, k in ((20, 20, 8, 3), (1000, 10_000, 3, 8), (1000, 1000, 64, 8)):
        x, y = _uniform(n, columns), _uniform(m, columns, seed=1)
        ours = partial(nearest, x, y, k)
        data = f"{_name(x)} and {tuple(y.shape)}, {k}"
        yield Row("nearest", data, "torch.cdist, topk", ours, lambda x=x, y=y, k=k: torch.cdist(x, y).topk(k, largest=False))


def _filters():
    sos = scipy.signal.butter(8, 0.1, output="sos")
    for channels, samples in ((1, 500), (1, 100_000), (64, 10_000)):
        x = np.random.default_rng(0).standard_normal((channels, samples))
        state = np.zeros((4, channels, 2))
        ours = partial(sosfilt, sos, x, state)
        theirs = partial(scipy.signal.sosfilt, sos, x, zi=state)
        yield Row("sosfilt", f"float64 {x.shape}, 4 sections", "scipy.signal.sosfilt", ours, theirs)


def _runs():
    for size, length in ((1000, 10), (1_000_000, 2), (1_000_000, 10), (1_000_000, 100)):
        starts = np.random.default_rng(0).random(size) < 1 / length
        x = torch.from_numpy(np.cumsum(starts))
        values, counts = torch.unique_consecutive(x, return_counts=True)
        data = f"int64 ({size},), runs of {length}"
        theirs = partial(torch.unique_consecutive, x, return_counts=True)
        yield Row("run_length_encode", data, "torch.unique_consecutive", partial(run_length_encode, x), theirs)
        theirs = partial(torch.repeat_interleave, values, counts)
        yield Row("run_length_decode", data, "torch.repeat_interleave", partial(run_length_decode, values, counts), theirs)


def _sparse():
    for size, a_row, dtype in ((100, 5, np.float64), (20_000, 50, np.float32), (200_000, 5, np.float64)):
        generator = np.random.default_rng(0)
        matrix = scipy.sparse.random_array((size, size), density=a_row / size, format="csr", rng=generator).astype(dtype)
        x = generator.random(size).astype(dtype)
        data = f"{np.dtype(dtype)} {matrix.shape}, {a_row} a row, {matrix.indices.dtype} indices"
        ours = partial(csr_matvec, matrix.indptr, matrix.indices, matrix.data, x)
        yield Row("csr_matvec", data, "scipy.sparse @", ours, partial(matrix.__matmul__, x))
        parts = [torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data)]
        theirs = torch.sparse_csr_tensor(*parts, matrix.shape)
        yield Row("csr_matvec", data, "torch.sparse_csr @", ours, partial(theirs.__matmul__, torch.from_numpy(x)))


def _grids():
    stencil = torch.tensor([[0, 0.2, 0], [0.2, 0.2, 0.2], [0, 0.2, 0]])[None, None]

    def slices(u, out):
        inner = u[1:-1, 1:-1]
        out.copy_(u)
        out[1:-1, 1:-1].add_(u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * inner, alpha=0.2)

    for size in (32, 1000):
        u = _uniform(size, size)
        out = torch.empty_like(u)
        theirs = partial(torch.nn.functional.conv2d, u[None, None], stencil)
        yield Row("heat_step", _name(u), "torch conv2d", partial(heat_step, u, 0.2), theirs)
        yield Row("heat_step", _name(u), "torch, slices", partial(heat_step, u, 0.2, out), partial(slices, u, out))


def rows() -> list[Row]:
    """A small and a large size of each kernel; more where the operator's way depends on the data."""
    return [row for group in (_vectors, _segments, _distances, _filters, _runs, _sparse, _grids) for row in group()]
