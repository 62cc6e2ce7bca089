"""The IIR filter, against SciPy's."""

import math

import numpy as np
import pytest
from kernel_data import blank, call, check, contiguous, random, strided, that_fit, transposed
from scipy import signal

from kernels.iir import sosfilt

SECTIONS = signal.butter(6, 0.2, output="sos")
EXTENTS = [(0, 5), (1, 0), (40, 0), (1, 1), (1, 9), (3, 257), (5, 128), (8, 300), (9, 129), (36, 700), (37, 127)]
"""Few channels, which are filtered one by one, and many, side by side; one group of them, several, in several threads."""


@pytest.mark.parametrize("dtype, layout, state_dtype", [
    (np.float64, contiguous, np.float64), (np.float64, strided, np.float64), (np.float32, contiguous, np.float64),
    (np.int16, transposed, np.float32),
])  # fmt: skip
def test_sosfilt(dtype, layout, state_dtype):
    for channels, samples in that_fit(layout, EXTENTS):
        x, initial = layout(random((channels, samples), dtype)), random((3, channels, 2), np.float64, seed=1)
        outputs = blank((channels, samples), np.float64, layout), blank((3, channels, 2), state_dtype, layout)
        out, final = call(sosfilt, SECTIONS, x, initial, *outputs, written=(-2, -1))
        expected = signal.sosfilt(SECTIONS, x, zi=initial) if x.size else (out, initial)
        check(out, expected[0], scale=10)
        check(final, expected[1], scale=10)


def test_sosfilt_in_parts():
    """The same samples in three calls, each with the state of the one before, in place, are filtered as in one."""
    for channels in [2, 20]:
        x, state = random((channels, 600), np.float64), np.zeros((3, channels, 2))
        expected = signal.sosfilt(SECTIONS, x)
        for first, last in [(0, 10), (10, 250), (250, 600)]:
            part = x[:, first:last]
            sosfilt(SECTIONS, part, state, part, state)
        check(x, expected)


def test_sosfilt_without_sections_copies():
    x = random((2, 9), np.float32)
    out, _ = sosfilt(np.zeros((0, 6)), x, None)
    np.testing.assert_array_equal(out, x)


def test_sosfilt_of_nan_and_infinities():
    """They stay in their channel, where they are at all samples that follow, and do not come into its neighbours."""
    for channels in [3, 20]:
        x = random((channels, 50), np.float32)
        x[1, 7], x[2, 7] = math.nan, math.inf
        outputs = blank((channels, 50), np.float32), blank((3, channels, 2), np.float64)
        out, _ = call(sosfilt, SECTIONS, x, None, *outputs, written=(-2, -1))
        check(out, signal.sosfilt(SECTIONS, x.astype(np.float64)))
        assert np.isnan(out[1, 7:]).all() and np.isfinite(out[0]).all() and np.isfinite(out[3:]).all()
