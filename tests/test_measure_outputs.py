"""``measure`` of kernels that declare their outputs."""

import numpy as np
import pytest

from fastexchange import fast_args, measure

pytestmark = pytest.mark.filterwarnings(r"ignore:measure\(\)")


@pytest.fixture(scope="module")
def doubled():
    @fast_args(out="x[n] -> y[n]")
    def doubled(x, y):
        for i in range(x.shape[0]):
            y[i] = 2 * x[i]

    return doubled


def measured(kernel, *args, **kwargs):
    return measure(kernel, *args, alternatives=False, rounds=3, **kwargs)


def test_an_output_that_is_given_is_an_argument(doubled):
    """And no result: what a call hands back is what it was given, and the kernel's own time is no part of that."""
    report = measured(doubled, np.ones(4), np.ones(4))
    assert [cost.name for cost in report.arguments] == ["x", "y"]
    assert report.result is None and report.keywords is None


def test_an_output_that_is_given_by_keyword(doubled):
    report = measured(doubled, np.ones(4), y=np.ones(4))
    assert [cost.name for cost in report.arguments] == ["x", "y"]
    assert report.result is None and report.keywords is not None


def test_an_output_that_is_allocated_is_the_result(doubled):
    report = measured(doubled, np.ones(4))
    assert [cost.name for cost in report.arguments] == ["x"]
    assert report.result is not None and report.keywords is None
