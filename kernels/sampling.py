"""Drawing a token from each row of logits, from its k likeliest (top-k), its nucleus (top-p), or both.

Sources: A. Fan, M. Lewis and Y. Dauphin, "Hierarchical Neural Story Generation" (arXiv:1805.04833), section 5.4, for
top-k; A. Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751), section 3.1, equations 2
and 3, for the nucleus: the fewest of the likeliest tokens whose probabilities add up to at least p.

No row is sorted. If k is small, the k likeliest tokens so far are kept in order, and blocks of the row in which none is
likelier are passed over. Else the tokens are counted, and their weights summed, by how far their logits are below the
largest, in steps of 1/32; of the steps in which a limit falls, and of no other, the tokens are put into order.

Tested in ``tests/programs/test_kernels_nn.py`` against a sort of all tokens and a cumulative sum.
"""

import math

import numpy as np
from numba import njit, prange

from fastexchange import fast_args

from .exponential import exp
from .overlap import apart, injective, place
from .rows import largest

_WORTH_THREADS = 1 << 14  # logits; with fewer, a row at a time in this thread is as fast
_SMALL = 128  # the largest k whose tokens are kept in order
_BLOCK = 64  # logits that are looked at together
_STEPS = 1024  # of 1/32; the last holds all that is 32 or more below the largest: weights below 2e-14


@njit
def _step(below, scale):
    """The step of a token whose logit is `below` the largest; `scale`: the reciprocal of the temperature."""
    return np.intp(min(below * (32 * scale), _STEPS - 1.0))


@njit
def _members(x, top, scale, step):
    """The tokens of one step, by descending logit and, if equal, by index."""
    found = np.empty(x.shape[0], np.intp)
    count = 0
    for j in range(x.shape[0]):
        found[count] = j
        count += _step(top - x[j], scale) == step
    found = found[:count]
    return found[np.argsort(-x[found], kind="mergesort")]


@njit
def _walk(x, top, scale, counts, masses, tokens, reach, exceed):
    """Add up weights by descending logit: of `tokens` tokens, or until the sum is at least `reach` or above `exceed`.

    Returns the last token added that has any weight, how many were added, and their sum.
    """
    token, added, total = -1, 0, 0.0
    for step in range(_STEPS):
        sooner = added + counts[step] >= tokens or total + masses[step] >= reach or total + masses[step] > exceed
        if not sooner:
            added += counts[step]
            total += masses[step]
            continue
        for j in _members(x, top, scale, step):
            weight = math.exp((x[j] - top) * scale)
            added += 1
            total += weight
            if weight > 0:
                token = j
            if added == tokens or total >= reach or total > exceed:
                return token, added, total
    return token, added, total


@njit
def _sample_by_steps(x, top, k, p, scale, u):
    weights = np.empty(x.shape[0])
    for j in range(x.shape[0]):
        weights[j] = exp((x[j] - top) * scale)
    counts, masses = np.zeros(_STEPS, np.int64), np.zeros(_STEPS)
    for j in range(x.shape[0]):
        step = _step(top - x[j], scale)
        counts[step] += 1
        masses[step] += weights[j]
    everything = np.inf
    _, tokens, total = _walk(x, top, scale, counts, masses, k, everything, everything)
    if p < 1:
        _, tokens, total = _walk(x, top, scale, counts, masses, tokens, p * total, everything)
    token, _, _ = _walk(x, top, scale, counts, masses, tokens, everything, u * total)
    return token


@njit
def _likeliest(x, k):
    """The first `k` tokens by descending logit and, if equal, by index; and their logits."""
    tokens, logits = np.empty(k, np.intp), np.empty(k)
    held = 0
    for start in range(0, x.shape[0], _BLOCK):
        block = x[start : start + _BLOCK]
        if held == k and largest(block) <= logits[k - 1]:  # if equal, the one before it stays
            continue
        for j in range(block.shape[0]):
            if held == k:
                if block[j] <= logits[k - 1]:
                    continue
                held -= 1
            n = held
            while n > 0 and logits[n - 1] < block[j]:
                logits[n], tokens[n] = logits[n - 1], tokens[n - 1]
                n -= 1
            logits[n], tokens[n] = block[j], start + j
            held += 1
    return tokens, logits


@njit
def _sample_of_few(x, top, k, p, scale, u):
    tokens, logits = _likeliest(x, k)
    sums = np.empty(k)
    total = 0.0
    for n in range(k):
        total += math.exp((logits[n] - top) * scale)
        sums[n] = total
    if p < 1:
        n = 0
        while sums[n] < p * total:
            n += 1
        total = sums[n]
    n = 0
    while sums[n] <= u * total:
        n += 1
    return tokens[n]


@njit
def _sample_row(x, k, p, scale, u):
    """The token of one contiguous row in float64, or -1."""
    top = largest(x)
    nans = 0
    for j in range(x.shape[0]):
        nans += x[j] != x[j]
    if nans > 0 or not math.isfinite(top):
        return -1
    if k <= min(_SMALL, x.shape[0] // 4):
        return _sample_of_few(x, top, k, p, scale, u)
    return _sample_by_steps(x, top, k, p, scale, u)


@njit
def _in_float64(x):
    """A contiguous copy, so that all that follows is fast, and compiled once for all dtypes and layouts."""
    row = np.empty(x.shape[0])
    for j in range(x.shape[0]):
        row[j] = x[j]
    return row


@njit
def _check(logits, k, p, temperature, u, out):
    rows, vocabulary = logits.shape
    if vocabulary == 0:
        raise ValueError("logits: must have at least one column")
    if not k >= 1:
        raise ValueError("k: must be at least 1")
    if not (p > 0 and p <= 1):
        raise ValueError("p: must be above 0 and at most 1")
    if not (temperature > 1e-300 and temperature < np.inf):
        raise ValueError("temperature: must be above 1e-300 and finite")
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


@fast_args(out="logits[rows, vocabulary], u[rows] -> out[rows]: int64", parallel=True, cache=True)
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
    temperature : above 1e-300, finite.
    u : shape (rows,), floating, from 0 to below 1.
    out : shape (rows,), int64. Written. Where a row has a NaN, +inf or nothing above -inf, no token can be drawn: -1.

    All arithmetic is in float64; the order of the sums is not specified. A token with -inf is never drawn.

    Aliasing: `out` must not overlap `logits`, `u` or itself.

    Raises ValueError if a shape, a dtype, a number's range or an overlap breaks these rules.
    """
    if logits.ndim != 2:
        raise ValueError("logits: must have two dimensions")
    _check(logits, k, p, temperature, u, out)
    rows, vocabulary = logits.shape
    k, p, scale = min(np.int64(k), vocabulary), np.float64(p), 1.0 / temperature
    if rows * vocabulary < _WORTH_THREADS:
        for i in range(rows):
            out[i] = _sample_row(_in_float64(logits[i]), k, p, scale, np.float64(u[i]))
    else:
        for i in prange(rows):
            out[i] = _sample_row(_in_float64(logits[i]), k, p, scale, np.float64(u[i]))
