"""Tuples in fast entries: each item is read by a part of its own, whatever its type is in this call."""

import collections
import itertools

import numpy as np
import pytest
from frameworks import needs_torch, torch
from made_producers import Ledger, tabled_type
from oracle import references_kept

from fastexchange import fast_args, from_dlpack

WARM = 60  # calls after which those of a kind have a fast entry
Pair = collections.namedtuple("Pair", "left right")


def cache_entries(kernel) -> int:
    """How many fast entries a kernel has."""
    return sum(v.compiled_for is not None for filed in kernel._native._overloads.values() for v in filed.cached)


@fast_args
def parts(pair, x):
    return pair[1][1:], x, pair[0]


def test_a_nest_gets_a_fast_entry(framework):
    x, y = framework.tensor(np.array([1.0, 2.0])), framework.tensor(np.array([10.0, 20.0]))
    kernel = fast_args(lambda tree: tree[0][0] + tree[1][1][0])
    assert [kernel((x, (2.5, y))) for _ in range(WARM)] == [11.0] * WARM
    assert cache_entries(kernel) == 1
    assert kernel((x, (7, y))) == kernel((y, (2.5, x))) == 11.0  # another signature, in between


def test_items_of_other_types_get_a_cache_entry_of_their_own():
    kernel = fast_args(lambda pair: pair[0][0] - pair[1][0])
    x, y = np.array([1.0]), np.array([5.0])
    of = [lambda array: array, tabled_type("Other")] + ([torch.from_numpy] if torch is not None else [])
    for left, right in list(itertools.product(of, of)) * WARM:
        assert kernel((left(x), right(y))) == -4.0
    assert len(kernel.signatures) == 1 and cache_entries(kernel) >= min(len(of) ** 2, 8) - 1


def test_lengths_named_tuples_and_lists():
    kernel = fast_args(lambda items: len(items))
    fields = fast_args(lambda pair, by: (pair.right[0] + by, pair.left))
    listed = fast_args(lambda pair, items: pair[0][0][0] + items[0][0])
    x, pair = np.ones(1), Pair(np.array([1.0]), np.array([2.0]))
    for _ in range(WARM):
        assert [kernel((x,) * length) for length in (0, 1, 2, 5)] == [0, 1, 2, 5]
        assert kernel(pair) == 2
        value, same = fields(pair, 0.5)
        assert value == 2.5 and same is pair.left
        assert listed(([x],), [x]) == listed(([x], x), [x]) == 2.0
    assert len(kernel.signatures) == 5 and cache_entries(fields) == 1


@needs_torch
def test_what_is_not_as_expected_is_refused():
    kernel, x = fast_args(lambda pair: pair[0][0] + pair[1][0]), torch.ones(2)
    assert [kernel((x, x)) for _ in range(WARM)] == [2.0] * WARM
    for bad in (torch.ones(2, requires_grad=True), torch.ones(2, device="meta")):
        with pytest.raises((BufferError, RuntimeError), match=r"argument 'pair' \(position 0\)"):
            kernel((x, bad))
    assert kernel((x, torch.ones(2, dtype=torch.int8))) == kernel((x, x)) == 2.0


def test_what_is_kept_of_a_tuple(framework):
    tensors = [framework.tensor(np.arange(3.0) + i) for i in range(3)]
    with references_kept(*tensors):
        for _ in range(WARM):
            view, x, one = parts((tensors[0], tensors[1]), tensors[2])
            assert x is tensors[2] and one is tensors[0]
            assert from_dlpack(view).tolist() == [2.0, 3.0]
        del view, x, one


def test_the_result_is_the_first_tensors_framework():
    cls = tabled_type("First")
    kernel = fast_args(lambda pair, x: x * 2)
    for _ in range(WARM):
        assert type(kernel((cls(np.ones(2), Ledger()), 1.0), np.ones(2))) is not np.ndarray
        assert type(kernel((np.ones(2), 1.0), cls(np.ones(2), Ledger()))) is np.ndarray
