"""An IIR filter, a cascade of second-order sections, along each channel of a signal.

Source: A. V. Oppenheim and R. W. Schafer, "Discrete-Time Signal Processing" (3rd ed., 2010), sections 6.3.2 (the
cascade) and 6.3.3 (the transposed direct form II). A section with the coefficients b0, b1, b2, 1, a1, a2 and the state
s, t makes of each sample x::

    y = b0 x + s,    s = b1 x - a1 y + t,    t = b2 x - a2 y

Each sample waits for the one before. So many channels are filtered side by side, in vectors; few are filtered one by
one, where the sections' waits overlap.

Tested in ``tests/programs/test_kernels_sums.py`` against ``scipy.signal.sosfilt``, which takes the same coefficients and states.
"""

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .overlap import apart, apart_or_same, injective, place

_WORTH_THREADS = 1 << 15  # samples times sections; with fewer, one thread is as fast
_LANES = 32  # channels side by side
_FEW = 4  # channels that are faster one by one than side by side
_BLOCK = 128  # samples of all lanes that go through all sections in the nearest cache


@njit
def _one_by_one(sos, x, state, out):
    """Filter one channel, through all sections sample by sample; `state` of shape (sections, 2) is carried on."""
    for i in range(x.shape[0]):
        value = np.float64(x[i])
        for k in range(sos.shape[0]):
            y = sos[k, 0] * value + state[k, 0]
            state[k, 0] = sos[k, 1] * value - sos[k, 4] * y + state[k, 1]
            state[k, 1] = sos[k, 2] * value - sos[k, 5] * y
            value = y
        out[i] = value


@njit
def _side_by_side(section, samples, state):
    """Send `samples` of shape (n, _LANES) through one section, in place; `state` of shape (2, _LANES) is carried on."""
    b0, b1, b2, a1, a2 = section[0], section[1], section[2], section[4], section[5]
    for i in range(samples.shape[0]):
        for c in range(_LANES):
            x = samples[i, c]
            y = b0 * x + state[0, c]
            state[0, c] = b1 * x - a1 * y + state[1, c]
            state[1, c] = b2 * x - a2 * y
            samples[i, c] = y


@njit
def _channels(sos, x, initial, out, final, first, last):
    """Filter the channels from `first` up to `last`, at most _LANES: what a thread does at a time."""
    sections, count = sos.shape[0], last - first
    state = np.zeros((sections, 2, _LANES))
    if initial is not None:
        for k in range(sections):
            for c in range(count):
                state[k, 0, c], state[k, 1, c] = initial[k, first + c, 0], initial[k, first + c, 1]
    if count <= _FEW:
        for c in range(count):
            _one_by_one(sos, x[first + c], state[:, :, c], out[first + c])
    else:
        samples = np.zeros((_BLOCK, _LANES))
        for start in range(0, x.shape[1], _BLOCK):
            length = min(_BLOCK, x.shape[1] - start)
            for c in range(count):
                for i in range(length):
                    samples[i, c] = x[first + c, start + i]
            for k in range(sections):
                _side_by_side(sos[k], samples[:length], state[k])
            for c in range(count):
                for i in range(length):
                    out[first + c, start + i] = samples[i, c]
    for k in range(sections):
        for c in range(count):
            final[k, first + c, 0], final[k, first + c, 1] = state[k, 0, c], state[k, 1, c]


@njit
def _in_float64(sos):
    coefficients = np.empty(sos.shape)
    for k in range(sos.shape[0]):
        for j in range(sos.shape[1]):
            coefficients[k, j] = sos[k, j]
    return coefficients


@njit
def _check(sos, x, initial, out, final):
    if sos.ndim != 2 or sos.shape[1] != 6:
        raise ValueError("sos: its shape must be (sections, 6)")
    for k in range(sos.shape[0]):
        if sos[k, 3] != 1:
            raise ValueError("sos: its fourth column must be 1")
    if x.shape != out.shape:
        raise ValueError("x: its shape must be that of out")
    channels, sections = out.shape[0], sos.shape[0]
    if final.shape != (sections, channels, 2):
        raise ValueError("final: its shape must be (sections, channels, 2)")
    if out.dtype.type(0.5) != 0.5:
        raise ValueError("out: its dtype must be floating")
    if final.dtype.type(0.5) != 0.5:
        raise ValueError("final: its dtype must be floating")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not injective(place(final)):
        raise ValueError("final: each element must have memory of its own")
    if not apart_or_same(place(x), place(out)):
        raise ValueError("out: overlaps x without being the same view")
    if not (apart(place(sos), place(out)) and apart(place(final), place(out))):
        raise ValueError("out: overlaps sos or final")
    if not (apart(place(sos), place(final)) and apart(place(x), place(final))):
        raise ValueError("final: overlaps sos or x")
    if initial is not None:
        if initial.shape != (sections, channels, 2):
            raise ValueError("initial: its shape must be (sections, channels, 2)")
        if not apart(place(initial), place(out)):
            raise ValueError("out: overlaps initial")
        if not apart_or_same(place(initial), place(final)):
            raise ValueError("final: overlaps initial without being the same view")


@fast_args(
    out="x[channels, samples], sos[sections, 6] -> out[channels, samples]: x, final[sections, channels, 2]: sos",
    parallel=True,
    cache=True,
)
def sosfilt(sos, x, initial, out, final):
    """Write the filtered `x` into `out`, and the state after the last sample into `final`.

    Parameters
    ----------
    sos : shape (sections, 6), real: b0, b1, b2, 1, a1, a2 of each section, as SciPy's filter designs return them.
    x : shape (channels, samples), any real dtype.
    initial : shape (sections, channels, 2), real: the states s and t before the first sample; None for zeros.
    out : shape (channels, samples), floating; made in the dtype of `x`. Written, in the unit of `x`.
    final : shape (sections, channels, 2), floating; made in the dtype of `sos`. Written: the `initial` of the call with
        the following samples.

    All arithmetic is in float64, rounded once, to the dtype of `out` or `final`.

    Aliasing: `out` may be `x`, and `final` may be `initial`; they must not overlap these otherwise, nor any other
    argument, each other or themselves.

    Raises ValueError if a shape, a coefficient, the dtype of `out` or `final` or an overlap breaks these rules.
    """
    if out.ndim != 2:
        raise ValueError("out: must have two dimensions")
    _check(sos, x, initial, out, final)
    channels, sections = out.shape[0], sos.shape[0]
    coefficients = _in_float64(sos)
    width = 1 if channels <= 2 * _FEW else _LANES
    groups = -(-channels // width)
    if groups == 1 or out.size * sections < _WORTH_THREADS:
        for g in range(groups):
            _channels(coefficients, x, initial, out, final, g * width, min((g + 1) * width, channels))
    else:
        for g in prange(groups):
            _channels(coefficients, x, initial, out, final, g * width, min((g + 1) * width, channels))
