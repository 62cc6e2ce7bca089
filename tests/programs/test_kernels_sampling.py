"""``sample`` against its definition: a sort of all tokens, a cumulative sum, a search."""

import itertools
import math

import numpy as np
import pytest
from kernel_data import blank, call, contiguous, random, strided, that_fit, transposed

from kernels.sampling import sample

INF, NAN, LAST = math.inf, math.nan, np.nextafter(1.0, 0.0)


def oracle(logits, k, p, temperature, u):
    tokens = []
    for row, number in zip(logits.astype(np.float64), u, strict=True):
        order = np.argsort(-row, kind="stable")
        weights = np.exp((row[order] - row.max()) / temperature)
        weights[k:] = 0
        if p < 1:
            weights[np.cumsum(weights) - weights >= p * weights.sum()] = 0
        sums = np.cumsum(weights)
        tokens.append(order[np.searchsorted(sums, number * sums[-1], side="right")])
    return np.array(tokens, np.int64)


def check_drawn(logits, k, p, temperature, u, layout=contiguous):
    got = call(sample, logits, k, p, temperature, u, blank(len(logits), np.int64, layout))
    np.testing.assert_array_equal(got, oracle(logits, k, p, temperature, u), f"{logits.shape[1]} {k} {p}")


@pytest.mark.parametrize(("dtype", "layout"), [(np.float32, contiguous), (np.float64, strided), (np.int32, transposed)])
def test_sample(dtype, layout):
    for rows, vocabulary in that_fit(layout, [(0, 5), (1, 1), (3, 2), (7, 65), (50, 700), (3, 5003)]):
        logits = layout(random((rows, vocabulary), dtype))
        u = layout(np.random.default_rng(1).random(rows))
        for k, p in itertools.product([1, 3, 100, 500, 10**6], [0.001, 0.6, 1.0]):
            temperature = 0.5 if k == 3 else 2.0
            check_drawn(logits, k, p, temperature, u, contiguous if layout is transposed else layout)


@pytest.mark.parametrize(("vocabulary", "likely"), [(16, np.arange(16)), (1000, np.arange(5, 1000, 60)[:16])])
def test_equal_logits_are_ordered_by_index(vocabulary, likely):
    logits = np.full((16, vocabulary), -INF, np.float32)
    logits[:, likely] = 2.0
    for k, p in [(16, 1.0), (1000, 1.0), (16, 0.5), (4, 1.0), (8, 0.5), (1000, 0.25), (1, 1.0)]:
        check_drawn(logits, k, p, 1.0, np.arange(16) / 16)


def test_sample_of_sorted_rows():
    """Ascending, each token displaces one of the k; descending, none does. Spread wide, most are in the last step."""
    rows = [np.linspace(-5, 5, 3001), np.linspace(5, -5, 3001), np.linspace(-500, 500, 3001), np.zeros(3001)]
    for k, p in itertools.product([5, 128, 129, 2999, 3001], [0.3, 1.0]):
        check_drawn(np.array(rows, np.float32), k, p, 1.0, np.array([0.1, 0.5, 0.9, 0.99]))


@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_rows_without_a_distribution(vocabulary):
    logits = np.full((7, vocabulary), -INF, np.float32)
    logits[:, 2] = [1, NAN, -NAN, INF, -INF, 1, 3e38]
    logits[0, 1] = NAN
    logits[1:3, 0] = 5
    logits[6, 0] = -3e38
    for k, p in [(1, 1.0), (1000, 1.0), (2, 0.5), (1000, 0.5)]:
        for u in (0.0, 0.5, LAST):
            np.testing.assert_array_equal(sample(logits, k, p, 1.0, np.full(7, u)), [-1, -1, -1, -1, -1, 2, 2])


def test_the_largest_u_draws_the_last_token_kept():
    logits = random((200, 300), np.float32)
    order = np.argsort(-logits, axis=1, kind="stable")
    for k in (1, 60, 128, 299, 300):
        np.testing.assert_array_equal(sample(logits, k, 1.0, 1.0, np.full(200, LAST)), order[:, k - 1])
