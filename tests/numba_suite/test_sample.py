"""A sample of Numba's own tests with ``njit`` and ``jit`` accelerated. All of them run with ``bash .ci/nightly numba-suite``."""

import pytest
from suite import compare, listed, modules

SHARE = 100  # of each module one test of so many, at least one
LIMIT = 60  # seconds
SLOW = ("test_heapq", "test_parfors", "test_polynomial", "test_np_functions", "test_stencils", "test_linalg", "test_sets")
MODULES = [name for name in modules() if name.rpartition(".")[2] not in SLOW][::12]


@pytest.mark.slow
def test_what_numba_tests_is_the_same_accelerated():
    made = compare(MODULES, share=SHARE, limit=LIMIT)
    print(made.counts())
    known = listed()
    new = {test: outcome.why for test, outcome in made.different.items() if test not in known}
    assert not new, "\n\n".join(f"{test}\n{why}" for test, why in new.items())
    assert len(made.outcomes) > len(MODULES) / 2


def test_the_list_of_differences_is_read():
    known = listed()
    assert known and all(test.startswith("numba.tests.") and reason for test, reason in known.items())
