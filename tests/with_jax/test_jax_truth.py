"""The truth table of JAX's arrays: it says what happens, and a kernel gets right elements or an exception."""

import pytest

pytest.importorskip("jax")

import truth_table as truth
from jax_truth import KERNELS, TABLE

pytestmark = pytest.mark.nightly


def test_a_kernel_gets_the_value_or_an_exception_and_the_committed_table_says_it():
    found = truth.outcomes(TABLE)
    ours = {(row, each.title): cells[each.title] for row, cells in found.items() for each in KERNELS}
    assert not {cell: outcome for cell, outcome in ours.items() if outcome.startswith("**")}
    assert {ours["plain", each.title] for each in KERNELS} == {truth.RIGHT}
    truth.check_committed(TABLE, found)
