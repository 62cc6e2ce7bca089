"""Outputs that are omitted: each kernel makes them, of the caller's framework, and what it writes into given ones is the same."""

import numpy as np
import pytest
from kernel_data import FRAMEWORKS, make, random, torch

from kernels.axpy import axpy
from kernels.cross_entropy import cross_entropy
from kernels.csr import csr_matvec
from kernels.distances import nearest, pairwise
from kernels.heat import heat_step
from kernels.histogram import histogram
from kernels.iir import sosfilt
from kernels.layer_norm import layer_norm
from kernels.log_softmax import log_softmax
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.sampling import sample
from kernels.scan import exclusive_scan
from kernels.segments import segment_max, segment_mean, segment_min, segment_sum
from kernels.softmax import softmax

F32, F64, I64 = np.float32, np.float64, np.int64
LINE, GRID, WEIGHT = random(9, F32), random((5, 7), F32), random(7, F32, seed=1)
OFFSETS, TARGET, TABLE = np.array([0, 2, 2, 5]), np.array([0, 6, -100, 3, 1]), random((4, 3), F32)
SOS = np.array([[1.0, 2, 1, 1, 0.5, 0.25], [1.0, 0, -1, 1, 0, 0.5]])
INDPTR, INDICES = np.array([0, 2, 5], np.int32), np.array([0, 6, 1, 2, 3], np.int32)

# a kernel, its inputs, and the shapes and dtypes of what it makes
MADE = {
    "axpy": (axpy, (2.5, LINE, LINE), [((9,), F32)]),
    "softmax": (softmax, (GRID,), [((5, 7), F32)]),
    "log_softmax": (log_softmax, (GRID,), [((5, 7), F32)]),
    "layer_norm": (layer_norm, (GRID, WEIGHT, WEIGHT, 1e-5), [((5, 7), F32)]),
    "rms_norm": (rms_norm, (GRID, WEIGHT, 1e-5), [((5, 7), F32)]),
    "rotary": (rotary, (random((2, 3, 4, 6), F32), TABLE, TABLE, 0, False), [((2, 3, 4, 6), F32)]),
    "cross_entropy": (cross_entropy, (GRID, TARGET, 0.1, -100), [((5,), F32)]),
    "sample": (sample, (GRID, 3, 0.5, 1.0, np.linspace(0, 0.9, 5)), [((5,), I64)]),
    "histogram": (histogram, (LINE, 4, -1.0, 1.0), [((4,), I64)]),
    "heat_step": (heat_step, (GRID, 0.2), [((5, 7), F32)]),
    "exclusive_scan": (exclusive_scan, (np.arange(6),), [((6,), I64)]),
    "segment_sum of a vector": (segment_sum, (LINE, OFFSETS), [((3,), F32)]),
    "segment_sum of a matrix": (segment_sum, (GRID, OFFSETS), [((3, 7), F32)]),
    "segment_mean": (segment_mean, (LINE, OFFSETS), [((3,), F32)]),
    "segment_max": (segment_max, (LINE, OFFSETS, -100), [((3,), F32)]),
    "segment_min": (segment_min, (LINE, OFFSETS, 100), [((3,), F32)]),
    "pairwise": (pairwise, (GRID, GRID[:3].copy()), [((5, 3), F32)]),
    "nearest": (nearest, (GRID, GRID[:3].copy(), 2), [((5, 2), F32), ((5, 2), I64)]),
    "sosfilt": (sosfilt, (SOS, random((3, 50), F32), None), [((3, 50), F32), ((2, 3, 2), F64)]),
    "csr_matvec": (csr_matvec, (INDPTR, INDICES, LINE[:5].copy(), WEIGHT), [((2,), F32)]),
}


def tensors(framework, args):
    return [make(framework, a) if isinstance(a, np.ndarray) else a for a in args]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_outputs_are_made(framework, case):
    kernel, args, expected = MADE[case]
    args = tensors(framework, args)
    given = [make(framework, np.zeros(shape, dtype)) for shape, dtype in expected]
    returned = as_tuple(kernel(*args, *given))
    assert len(returned) == len(given) and all(map(lambda a, b: a is b, returned, given))
    for made in (kernel(*args), kernel(*args, **{kernel.signature.split()[-1]: None} if False else {})):
        for result, output in zip(as_tuple(made), given, strict=True):
            assert type(result) is type(output) and result.shape == output.shape and result.dtype == output.dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(output))
