"""``sample`` against its definition: a sort of all tokens, a cumulative sum, a search. In PyTorch; without it, in NumPy."""

import itertools
import math

import numpy as np
import pytest
from kernel_data import FRAMEWORKS, blank, check_refused, contiguous, make, random, strided, that_fit, torch, transposed

from kernels.sampling import sample

INF, NAN = math.inf, math.nan
CASES = [(np.float32, contiguous), (np.float64, strided), (np.int32, transposed)]


def oracle(logits, k, p, temperature, u):
    if torch is not None:
        logits = torch.from_numpy(logits.astype(np.float64))
        order = logits.argsort(dim=1, descending=True, stable=True)
        weights = torch.softmax(logits.gather(1, order) / temperature, 1)
        weights[:, k:] = 0
        if p < 1:
            weights[weights.cumsum(1) - weights >= p * weights.sum(1, keepdim=True)] = 0
        sums = weights.cumsum(1)
        at = torch.searchsorted(sums, torch.from_numpy(u.astype(np.float64))[:, None] * sums[:, -1:], right=True)
        return order.gather(1, at)[:, 0].numpy()
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


def drawn(framework, logits, k, p, temperature, u, layout=contiguous):
    out = blank(logits.shape[0], np.int64, layout)
    given = [make(framework, a) for a in (logits, u, out)]
    sample(given[0], k, p, temperature, *given[1:])
    return out


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sample(framework, dtype, layout):
    for rows, vocabulary in that_fit(layout, [(0, 5), (1, 1), (3, 2), (7, 65), (50, 700), (3, 5003)]):
        logits = layout(random((rows, vocabulary), dtype))
        u = layout(np.random.default_rng(1).random(rows))
        for k, p in itertools.product([1, 3, 100, 500, 10**6], [0.001, 0.6, 1.0]):
            temperature = 0.5 if k == 3 else 2.0
            got = drawn(framework, logits, k, p, temperature, u, contiguous if layout is transposed else layout)
            np.testing.assert_array_equal(got, oracle(logits, k, p, temperature, u), f"{vocabulary} {k} {p}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sample_orders_equal_logits_by_index(framework):
    u = np.arange(16) / 16
    for vocabulary, likely in [(16, np.arange(16)), (1000, np.arange(5, 1000, 60)[:16])]:
        logits = np.full((16, vocabulary), -INF, np.float32)
        logits[:, likely] = 2.0
        for k, p, kept in [
            (16, 1.0, 16),
            (1000, 1.0, 16),
            (16, 0.5, 8),
            (4, 1.0, 4),
            (8, 0.5, 4),
            (1000, 0.25, 4),
            (1, 1.0, 1),
        ]:
            got = drawn(framework, logits, k, p, 1.0, u)
            np.testing.assert_array_equal(got, likely[np.arange(16) * kept // 16], f"{vocabulary} {k} {p}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sample_of_sorted_rows(framework):
    """Ascending, each token displaces one of the k; descending, none does. Spread wide, most are in the last step."""
    rows = [np.linspace(-5, 5, 3001), np.linspace(5, -5, 3001), np.linspace(-500, 500, 3001), np.zeros(3001)]
    logits, u = np.array(rows, np.float32), np.array([0.1, 0.5, 0.9, 0.99])
    for k, p in itertools.product([5, 128, 129, 2999, 3001], [0.3, 1.0]):
        np.testing.assert_array_equal(drawn(framework, logits, k, p, 1.0, u), oracle(logits, k, p, 1.0, u))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_tokens_are_drawn_as_often_as_they_are_probable(framework):
    logits = np.tile(np.log(np.array([1.0, 4.0, 2.0, 3.0], np.float32)), (10_000, 1))
    u = (np.arange(10_000) + 0.5) / 10_000
    for k, p, weights in [
        (4, 1.0, [1, 4, 2, 3]),
        (3, 1.0, [0, 4, 2, 3]),
        (4, 0.65, [0, 4, 0, 3]),
        (2, 0.5, [0, 1, 0, 0]),
    ]:
        counts = np.bincount(drawn(framework, logits, k, p, 1.0, u), minlength=4)
        np.testing.assert_allclose(counts, 10_000 * np.array(weights) / sum(weights), atol=1.01)


@pytest.mark.parametrize("vocabulary", [3, 1000])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_without_a_distribution(framework, vocabulary):
    logits = np.full((7, vocabulary), -INF, np.float32)
    logits[:, 2] = [1, NAN, -NAN, INF, -INF, 1, 3e38]
    logits[0, 1] = NAN
    logits[1:3, 0] = 5
    logits[6, 0] = -3e38
    for k, p in [(1, 1.0), (1000, 1.0), (2, 0.5), (1000, 0.5)]:
        for u in (0.0, 0.5, np.nextafter(1.0, 0.0)):
            got = drawn(framework, logits, k, p, 1.0, np.full(7, u))
            np.testing.assert_array_equal(got, [-1, -1, -1, -1, -1, 2, 2])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_largest_u_draws_the_last_token_kept(framework):
    logits = random((200, 300), np.float32)
    order = np.argsort(-logits, axis=1, kind="stable")
    u = np.full(200, np.nextafter(1.0, 0.0))
    for k in (1, 60, 128, 299, 300):
        np.testing.assert_array_equal(drawn(framework, logits, k, 1.0, 1.0, u), order[:, k - 1])


def given(logits=(2, 5), k=3, p=0.5, temperature=1.0, u=2, out=2, dtype=np.int64):
    u = np.zeros(u) if isinstance(u, int) else np.array(u)
    return np.zeros(logits, np.float32), k, p, temperature, u, np.full(out, 7, dtype)


REFUSED = {
    "no tokens": (given(logits=(2, 0)), "logits: "),
    "k": (given(k=0), "k: "),
    "p zero": (given(p=0.0), "p: "),
    "p above 1": (given(p=1.01), "p: "),
    "p NaN": (given(p=NAN), "p: "),
    "temperature zero": (given(temperature=0.0), "temperature: "),
    "temperature negative": (given(temperature=-1.0), "temperature: "),
    "temperature infinite": (given(temperature=INF), "temperature: "),
    "temperature NaN": (given(temperature=NAN), "temperature: "),
    "u long": (given(u=3), "u: its shape"),
    "u one": (given(u=(0.5, 1.0)), "u: must be"),
    "u negative": (given(u=(-0.1, 0.5)), "u: must be"),
    "u NaN": (given(u=(0.5, NAN)), "u: must be"),
    "out long": (given(out=3), "out: its shape"),
    "out narrow": (given(dtype=np.int32), "out: its dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused(framework, case):
    args, message = REFUSED[case]
    check_refused(framework, sample, args, message)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_overlaps_are_refused(framework):
    memory = random(64, np.float32)
    numbers, ints = memory[16:24].view(np.float64), memory.view(np.int64)
    numbers[:] = 0.5
    before = memory.copy()
    logits, u, own = (
        make(framework, memory[:16].reshape(4, 4)),
        make(framework, numbers),
        make(framework, np.full(4, 0.5)),
    )
    for given_u, out in [(own, ints[2:6]), (u, ints[9:13])]:
        with pytest.raises(ValueError, match=r"^out: overlaps"):
            sample(logits, 2, 0.5, 1.0, given_u, make(framework, out))
        np.testing.assert_array_equal(memory, before)
    sample(logits, 2, 0.5, 1.0, u, make(framework, ints[12:16]))


@pytest.mark.skipif(torch is None, reason="NumPy's expanded arrays are readonly")
def test_an_expanded_output_is_refused():
    u, out = torch.zeros(18, dtype=torch.float64)[::3], torch.zeros(1, dtype=torch.int64).expand(6)
    with pytest.raises(ValueError, match=r"^out: each element"):
        sample(torch.zeros(6, 10, dtype=torch.float64)[:, ::2], 2, 0.5, 1.0, u, out)
    assert out[0] == 0
