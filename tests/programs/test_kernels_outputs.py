"""Outputs that are omitted: kernels make them in the framework of their data, equal to what they write into given ones."""

import pathlib
import subprocess
import sys

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


@pytest.mark.parametrize("case", MADE)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_outputs_are_made(framework, case):
    kernel, args, expected = MADE[case]
    args = tensors(framework, args)
    given = [make(framework, np.zeros(shape, dtype)) for shape, dtype in expected]
    written = kernel(*args, *given)
    for made in (kernel(*args), kernel(*args, *[None] * len(given))):
        made, back = (made, written) if len(given) > 1 else ((made,), (written,))
        for result, output, returned in zip(made, given, back, strict=True):
            assert returned is output
            assert type(result) is type(output) and result.shape == output.shape and result.dtype == output.dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(output))


def test_one_of_two_outputs_is_given():
    indices = np.empty((5, 2), np.int64)
    distances, same = nearest(GRID, GRID[:3].copy(), 2, indices=indices)
    assert same is indices and distances.shape == (5, 2) and distances.dtype == F32


@pytest.mark.skipif(torch is None, reason="needs PyTorch")
def test_they_are_of_the_framework_that_the_data_come_from():
    """Not of that which the coefficients, the offsets or the indices come from."""
    for result in (
        *sosfilt(SOS, torch.from_numpy(random((3, 50), F32)), None),
        csr_matvec(INDPTR, INDICES, torch.from_numpy(LINE[:5]), WEIGHT),
        segment_sum(torch.from_numpy(LINE), OFFSETS),
    ):
        assert type(result) is torch.Tensor


def test_layer_norm_has_a_default_for_eps():
    np.testing.assert_array_equal(layer_norm(GRID, WEIGHT, WEIGHT), layer_norm(GRID, WEIGHT, WEIGHT, 1e-5))


UNFIT = {
    "axpy": (axpy, (2.5, LINE, LINE[1:]), "argument 'y'"),
    "softmax": (softmax, (LINE,), "argument 'x'"),
    "log_softmax": (log_softmax, (LINE,), "argument 'x'"),
    "layer_norm": (layer_norm, (LINE, None, None), "argument 'x'"),
    "rms_norm": (rms_norm, (LINE, None, 0.1), "argument 'x'"),
    "rotary": (rotary, (GRID, TABLE, TABLE, 0, False), "argument 'x'"),
    "cross_entropy": (cross_entropy, (GRID, TARGET[1:], 0.1, -100), "argument 'target'"),
    "sample": (sample, (GRID, 3, 0.5, 1.0, np.zeros(4)), "argument 'u'"),
    "histogram": (histogram, (LINE, -1, -1.0, 1.0), "its output 'out' cannot be made"),
    "heat_step": (heat_step, (LINE, 0.2), "argument 'u'"),
    "exclusive_scan": (exclusive_scan, (GRID,), "argument 'x'"),
    "segment_sum": (segment_sum, (LINE, OFFSETS[:0]), "its output 'out' cannot be made"),
    "segment_max": (segment_max, (LINE, GRID, 0), "argument 'offsets'"),
    "pairwise": (pairwise, (GRID, TABLE), "argument 'y'"),
    "nearest": (nearest, (GRID, TABLE, 2), "argument 'y'"),
    "sosfilt": (sosfilt, (SOS[:, 1:], GRID, None), "argument 'sos'"),
    "csr_matvec": (csr_matvec, (INDPTR, INDICES[1:], LINE[:5], WEIGHT), "argument 'indices'"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shapes_of_which_no_output_follows(framework, case):
    kernel, args, message = UNFIT[case]
    with pytest.raises(ValueError, match=message):
        kernel(*tensors(framework, args))


def test_an_element_type_that_cannot_hold_the_result():
    """Then one that can is to be given."""
    with pytest.raises(ValueError, match=r"^out: its dtype must be floating"):
        softmax(np.ones((2, 3), np.int32))


# ---- the disk cache ----

SECOND_PROCESS = """
import sys
sys.path[:0] = ["tests/programs", "tests"]
import numpy as np
from test_kernels_outputs import MADE
from kernels.runs import run_length_decode, run_length_encode

for kernel, args, _ in MADE.values():
    kernel(*args)
run_length_decode(*run_length_encode(np.ones(4)))
for kernel in {kernel for kernel, *_ in MADE.values()} | {run_length_decode, run_length_encode}:
    stats = kernel.stats
    assert stats.cache_hits and not stats.cache_misses, (kernel, stats)
"""


def test_a_second_process_compiles_nothing():
    root = pathlib.Path(__file__).parents[2]
    for _ in range(2):  # the first run compiles what no earlier test did, and then fails
        done = subprocess.run([sys.executable, "-c", SECOND_PROCESS], cwd=root, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
