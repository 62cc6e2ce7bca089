"""The interoperability matrix: what goes in comes out, shared, copied or refused as the README says."""

import sys

import pytest

from interoperability import (  # isort: skip
    ALL_PRODUCERS, ALL_WAYS, BEGIN, END, LAYOUTS, PRODUCERS, README, WAYS, cases_in, outcome, table,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_tensor_goes_in(producer, way):
    """`outcome` compares the elements; here, that nothing is refused without a reason."""
    for layout in LAYOUTS:
        for dtype, readonly in cases_in(layout, way):
            found = outcome(producer, way, dtype, layout, readonly)
            assert found in (None, "zero-copy", "copy", "no elements"), (layout, dtype, readonly, found)


def test_the_table_in_the_readme_is_the_one_that_is_made():
    if sys.version_info[:2] != (3, 11) or len(PRODUCERS) + len(WAYS) != len(ALL_PRODUCERS) + len(ALL_WAYS):
        pytest.skip("the table is of Python 3.11 with all frameworks")
    assert table() == README.read_text().split(BEGIN)[1].split(END)[0], "python tests/interoperability.py --write"
