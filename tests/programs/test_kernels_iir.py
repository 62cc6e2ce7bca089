"""The IIR filter, against SciPy and against the formula sample by sample."""

import math

import numpy as np
import pytest
from kernel_data import (
    FRAMEWORKS,
    MIXED,
    blank,
    check,
    check_refused,
    contiguous,
    make,
    random,
    strided,
    that_fit,
    torch,
    transposed,
    zeros,
)
from scipy import signal

from kernels.iir import sosfilt

SECTIONS = signal.butter(6, 0.2, output="sos")


def final_of(sos, channels, dtype=np.float64):
    return blank((len(sos), channels, 2), dtype)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(np.float64, contiguous), (np.float64, strided), (np.float32, contiguous), (np.int16, transposed)],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sosfilt(framework, dtype, layout):
    """Few channels, which are filtered one by one, and many, side by side; one group of them, several, in several threads."""
    shapes = [(0, 5), (1, 0), (40, 0), (1, 1), (1, 9), (3, 257), (5, 128), (8, 300), (9, 129), (36, 700), (37, 127)]
    for channels, samples in that_fit(layout, shapes):
        x, out = layout(random((channels, samples), dtype)), blank((channels, samples), np.float64, layout)
        final_dtype = np.float32 if dtype is np.int16 else np.float64
        initial, final = random((3, channels, 2), np.float64, seed=1), layout(final_of(SECTIONS, channels, final_dtype))
        arguments = [make(framework, a) for a in (SECTIONS, x, initial, out, final)]
        sosfilt(*arguments)
        if channels and samples:
            expected, state = signal.sosfilt(SECTIONS, x.astype(np.float64), zi=initial)
            check(out, expected, scale=10)
            check(final, state.astype(final_dtype), scale=10)
        else:
            np.testing.assert_array_equal(final, initial.astype(final_dtype))


@pytest.mark.parametrize("frameworks", MIXED)
def test_sosfilt_begins_with_zeros(frameworks):
    for channels in [2, 20]:
        x, out = random((channels, 500), np.float32), blank((channels, 500), np.float32)
        final = final_of(SECTIONS, channels)
        sosfilt(SECTIONS, make(frameworks[0], x), None, make(frameworks[1], out), make(frameworks[0], final))
        expected, state = signal.sosfilt(SECTIONS, x.astype(np.float64), zi=np.zeros((3, channels, 2)))
        check(out, expected.astype(np.float32))
        check(final, state)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sosfilt_in_place_and_in_parts(framework):
    """The same samples in three calls, in place, each with the state of the one before, are filtered as in one."""
    for channels in [2, 20]:
        x = random((channels, 600), np.float64)
        expected = signal.sosfilt(SECTIONS, x)
        state = make(framework, np.zeros((3, channels, 2)))
        for first, last in [(0, 10), (10, 250), (250, 600)]:
            part = make(framework, x[:, first:last])
            sosfilt(SECTIONS, part, state, part, state)
        check(x, expected)


def test_sosfilt_without_sections_copies():
    x, out = random((2, 9), np.float32), blank((2, 9), np.float32)
    sosfilt(zeros(0, 6), x, None, out, zeros(0, 2, 2))
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sosfilt_of_nan_and_infinities(framework):
    """They stay in their channel, where they are at all samples that follow, and do not come into its neighbours."""
    for channels in [3, 20]:
        x, out = random((channels, 50), np.float32), blank((channels, 50), np.float32)
        x[1, 7], x[2, 7] = math.nan, math.inf
        expected = signal.sosfilt(SECTIONS, x.astype(np.float64)).astype(np.float32)
        final = final_of(SECTIONS, channels)
        sosfilt(SECTIONS, make(framework, x), None, make(framework, out), make(framework, final))
        check(out, expected)
        assert np.isnan(out[1, 7:]).all() and np.isfinite(out[0]).all() and np.isfinite(out[3:]).all()


X, STATE, OUT = zeros(2, 9), zeros(3, 2, 2), blank((2, 9), np.float64)
FINAL = blank((3, 2, 2), np.float64)
UNSCALED = SECTIONS * 2
REFUSED = {
    "five columns": ((SECTIONS[:, 1:], X, STATE, OUT, FINAL), "sos: its shape"),
    "unscaled": ((UNSCALED, X, STATE, OUT, FINAL), "sos: its fourth"),
    "x shorter": ((SECTIONS, X[:, 1:], STATE, OUT, FINAL), "x: its shape"),
    "final channels": ((SECTIONS, X, STATE, OUT, zeros(3, 1, 2)), "final: its shape"),
    "final sections": ((SECTIONS, X, STATE, OUT, zeros(2, 2, 2)), "final: its shape"),
    "initial channels": ((SECTIONS, X, zeros(3, 3, 2), OUT, FINAL), "initial: its shape"),
    "integer out": ((SECTIONS, X, STATE, zeros(2, 9, dtype=np.int64), FINAL), "out: its dtype"),
    "integer final": ((SECTIONS, X, STATE, OUT, zeros(3, 2, 2, dtype=np.int64)), "final: its dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework, case):
    args, message = REFUSED[case]
    check_refused(framework, sosfilt, args, message, compiled=case != "integer final")  # "integer out" is


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    def of(array, *shape, start=0):
        return make(framework, array[start : start + math.prod(shape)].reshape(shape))

    memory = random(300, np.float64)
    sos, x, state = of(SECTIONS.ravel().copy(), 3, 6), of(zeros(18), 2, 9), of(zeros(12), 3, 2, 2)
    scaled = memory.copy()
    scaled[:18] = SECTIONS.ravel()
    out, final = of(memory, 2, 9, start=100), of(memory, 3, 2, 2, start=200)
    for args, message in [
        ((sos, of(memory, 2, 9, start=101), state, out, final), "out: overlaps x without"),
        ((of(scaled, 3, 6), x, state, of(scaled, 2, 9, start=9), final), "out: overlaps sos or final"),
        ((sos, x, state, out, of(memory, 3, 2, 2, start=110)), "out: overlaps sos or final"),
        ((of(scaled, 3, 6), x, state, out, of(scaled, 3, 2, 2, start=9)), "final: overlaps sos or x"),
        ((sos, of(memory, 2, 9), state, out, of(memory, 3, 2, 2, start=9)), "final: overlaps sos or x"),
        ((sos, x, of(memory, 3, 2, 2, start=110), out, final), "out: overlaps initial"),
        ((sos, x, of(memory, 3, 2, 2, start=201), out, final), "final: overlaps initial without"),
    ]:
        before = memory.copy(), scaled.copy()
        with pytest.raises(ValueError, match="^" + message):
            sosfilt(*args)
        np.testing.assert_array_equal((memory, scaled), before)
    if framework == "torch":
        one, wide = torch.zeros(1, dtype=torch.float64), torch.zeros((3, 2, 20), dtype=torch.float64)
        x, out, final = wide[0, :, ::2][:, :9], wide[1, :, ::2][:, :9], wide[..., 12:16:2]
        with pytest.raises(ValueError, match=r"^out: each element"):
            sosfilt(sos, x, state, one.expand(2, 9), final)
        with pytest.raises(ValueError, match=r"^final: each element"):
            sosfilt(sos, x, state, out, one.expand(3, 2, 2))
        assert not wide.any() and not one.any()
