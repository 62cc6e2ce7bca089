"""Drawing a token from each row of logits, from its k likeliest (top-k), its nucleus (top-p), or both.

Sources: A. Fan, M. Lewis and Y. Dauphin, "Hierarchical Neural Story Generation" (arXiv:1805.04833), section 5.4, for
top-k; A. Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751), section 3.1, equations 2
and 3, for the nucleus: the fewest of the likeliest tokens whose probabilities add up to at least p.

No row is sorted. Its tokens are counted, and their weights summed, by how far their logits are below the largest, in steps
of 1/32; of the steps in which a limit falls, and of no other, the tokens are put into order.

Tested in ``tests/test_kernels_sampling.py`` against a sort of all tokens and a cumulative sum.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .exponential import exp
from .overlap import apart, injective, place
from .rows import largest

_WORTH_THREADS = 1 << 14  # logits; with fewer, a row at a time in this thread is as fast
_STEPS_PER_UNIT = 32.0
_STEPS = 1024  # the last holds all that is 32 units or more below the largest: weights below 2e-14


@njit(cache=True)
def _step(depth):
    """The step in which a token is whose logit over temperature is `depth` below the largest."""
    return np.intp(min(depth * _STEPS_PER_UNIT, _STEPS - 1.0))


@njit(cache=True)
def _members(depths, step):
    """The tokens of one step, by descending probability and, if equal, by index."""
    found = np.empty(depths.shape[0], np.intp)
    count = 0
    for j in range(depths.shape[0]):
        found[count] = j
        count += _step(depths[j]) == step
    found = found[:count]
    return found[np.argsort(depths[found], kind="mergesort")]


@njit(cache=True)
def _walk(depths, counts, masses, tokens, reach, exceed):
    """Add up weights by descending probability: of `tokens` tokens, or until the sum is at least `reach` or above `exceed`.

    Returns the last token added that has any weight, how many were added, and their sum.
    """
    token, added, total = -1, 0, 0.0
    for step in range(_STEPS):
        if added + counts[step] < tokens and total + masses[step] < reach and total + masses[step] <= exceed:
            added += counts[step]
            total += masses[step]
            continue
        for j in _members(depths, step):
            weight = math.exp(-depths[j])
            added += 1
            total += weight
            if weight > 0:
                token = j
            if added >= tokens or total >= reach or total > exceed:
                return token, added, total
    return token, added, total


@njit(cache=True, error_model="numpy")
def _sample_row(x, k, p, temperature, u):
    top = np.float64(largest(x))
    depths = np.empty(x.shape[0])
    weights = np.empty(x.shape[0])
    for j in range(x.shape[0]):
        depths[j] = (top - x[j]) / temperature
    sound = True
    for j in range(x.shape[0]):
        weights[j] = exp(-depths[j])
        sound &= depths[j] >= 0
    if not (sound and math.isfinite(top)):
        return -1
    counts, masses = np.zeros(_STEPS, np.int64), np.zeros(_STEPS)
    for j in range(x.shape[0]):
        step = _step(depths[j])
        counts[step] += 1
        masses[step] += weights[j]
    everything = np.inf
    _, tokens, total = _walk(depths, counts, masses, k, everything, everything)
    if p < 1:
        _, tokens, total = _walk(depths, counts, masses, tokens, p * total, everything)
    token, _, _ = _walk(depths, counts, masses, tokens, everything, u * total)
    return token


@fast_args(parallel=True, cache=True, error_model="numpy")
def sample(logits, k, p, temperature, u, out):
    """Write a token for each row of `logits` into `out`.

    A token's weight is ``exp(logit / temperature)``. In the order of descending logits, equal ones by index, the first `k`
    tokens are kept, and of these the fewest whose weights add up to at least `p` of their sum. From what is kept, the
    first token is taken up to which the weights add up to more than `u` of their sum. So uniformly distributed `u` draw
    each token kept with a probability proportional to its weight, and equal `u` draw equal tokens.

    Parameters
    ----------
    logits : shape (rows, vocabulary), any real dtype.
    k : at least 1; as many as the vocabulary has, or more, for all.
    p : above 0, at most 1; 1 for all.
    temperature : above 0.
    u : shape (rows,), floating, from 0 to below 1.
    out : shape (rows,), int64. Written. Where a row has a NaN, +inf or nothing above -inf, no token can be drawn: -1.

    All arithmetic is in float64; the order of the sums is not specified. A token with -inf is never drawn.

    Aliasing: `out` must not overlap `logits`, `u` or itself.

    Raises ValueError if a shape, a dtype, a number's range or an overlap breaks these rules.
    """
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError("logits: must have two dimensions and at least one column")
    rows, vocabulary = logits.shape
    if not k >= 1:
        raise ValueError("k: must be at least 1")
    if not (p > 0 and p <= 1):
        raise ValueError("p: must be above 0 and at most 1")
    if not (temperature > 0 and temperature < np.inf):
        raise ValueError("temperature: must be above 0 and finite")
    if u.shape != (rows,):
        raise ValueError("u: its shape must be (rows,)")
    if out.shape != (rows,):
        raise ValueError("out: its shape must be (rows,)")
    if out.dtype.kind != "i" or out.itemsize != 8:
        raise ValueError("out: its dtype must be int64")
    if not injective(place(out)):
        raise ValueError("out: each element must have memory of its own")
    if not (apart(place(logits), place(out)) and apart(place(u), place(out))):
        raise ValueError("out: overlaps logits or u")
    for i in range(rows):
        if not (u[i] >= 0 and u[i] < 1):
            raise ValueError("u: must be from 0 to below 1")
    tokens = min(k, vocabulary)
    if rows * vocabulary < _WORTH_THREADS:
        for i in range(rows):
            out[i] = _sample_row(logits[i], tokens, p, temperature, u[i])
    else:
        for i in prange(rows):
            out[i] = _sample_row(logits[i], tokens, p, temperature, u[i])
