"""Series in time, by plain ``numba.njit``: windows, filters, paths."""

import math

import numba
import numpy as np


@numba.njit
def moving_average(x, window):
    out = np.empty(x.size - window + 1)
    s = x[:window].sum()
    out[0] = s / window
    for i in range(1, out.size):
        s += x[i + window - 1] - x[i - 1]
        out[i] = s / window
    return out


@numba.njit
def moving_largest(x, window):
    out = np.empty(x.size - window + 1, x.dtype)
    for i in range(out.size):
        out[i] = x[i : i + window].max()
    return out


@numba.njit
def smoothed(x, alpha):
    out = np.empty_like(x)
    out[0] = x[0]
    for i in range(1, x.size):
        out[i] = alpha * x[i] + (1 - alpha) * out[i - 1]
    return out


@numba.njit
def convolved(x, weights):
    out = np.zeros(x.size + weights.size - 1)
    for i in range(x.size):
        for j in range(weights.size):
            out[i + j] += x[i] * weights[j]
    return out


@numba.njit
def autocorrelation(x, lag):
    centred = x - x.mean()
    return (centred[lag:] * centred[: x.size - lag]).sum() / (centred * centred).sum()


@numba.njit
def zero_crossings(x):
    count = 0
    for i in range(1, x.size):
        count += (x[i] >= 0) != (x[i - 1] >= 0)
    return count


@numba.njit
def peaks(x):
    """The indices of what is larger than its neighbours."""
    found = [0 for _ in range(0)]
    for i in range(1, x.size - 1):
        if x[i - 1] < x[i] > x[i + 1]:
            found.append(i)
    return np.array(found, np.int64)


@numba.njit
def deepest_fall(x):
    """From a peak, and where it ends."""
    peak, worst, at = x[0], 0.0, 0
    for i in range(x.size):
        peak = max(peak, x[i])
        if peak - x[i] > worst:
            worst, at = peak - x[i], i
    return worst, at


@numba.njit
def oscillator(position, speed, step, n):
    """A path of the harmonic oscillator: Störmer and Verlet."""
    path = np.empty((n, 2))
    for i in range(n):
        speed -= 0.5 * step * position
        position += step * speed
        speed -= 0.5 * step * position
        path[i] = position, speed
    return path


@numba.njit
def logistic_map(x, r, n):
    for _ in range(n):
        x = r * x * (1 - x)
    return x


@numba.njit
def interpolated(x, y, at):
    """Linearly, `x` rising."""
    i = 1
    while i < x.size - 1 and x[i] < at:
        i += 1
    return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])


@numba.njit
def spectrum(x):
    """The power of each frequency, by the definition."""
    out = np.empty(x.size // 2 + 1)
    for k in range(out.size):
        s = 0j
        for i in range(x.size):
            angle = -2 * math.pi * k * i / x.size
            s += x[i] * complex(math.cos(angle), math.sin(angle))
        out[k] = abs(s) ** 2
    return out


def __precompile__():
    x, t = np.sin(np.arange(60.0) / 3), np.arange(60.0)
    return [
        (moving_average, (x, 5)), (moving_largest, (x, 5)), (smoothed, (x, 0.3)), (convolved, (x, np.array([0.25, 0.5, 0.25]))),
        (autocorrelation, (x, 4)), (zero_crossings, (x,)), (peaks, (x,)), (deepest_fall, (x,)), (oscillator, (1.0, 0.0, 0.1, 30)),
        (logistic_map, (0.4, 3.7, 50)), (interpolated, (t, x, 7.25)), (spectrum, (x,)),
    ]
