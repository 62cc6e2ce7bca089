"""The interoperability matrix: what goes in comes out, shared, copied or refused as the README says."""

import sys

import pytest
from interoperability import BEGIN, DTYPES, END, LAYOUTS, PRODUCERS, README, WAYS, Way, outcome, table

INSTALLED = [(producer, way) for producer in PRODUCERS for way in WAYS if producer.is_installed and way.is_installed]

IS_TABLE_MADE_HERE = sys.version_info[:2] == (3, 11) and all(side.is_installed for side in (*PRODUCERS, *WAYS))


def dtypes_in(layout: str, way: Way) -> tuple[str, ...]:
    """All of them; for kernels, where the table is not made anyhow, all in one layout and two or three in each of the others.

    A kernel is compiled for each pair, and dtype and layout reach it separately.
    """
    if IS_TABLE_MADE_HERE or way.name != "kernel" or layout == "1-d":
        return DTYPES
    return DTYPES[list(LAYOUTS).index(layout) % 7 :: 7]


@pytest.mark.slow
@pytest.mark.parametrize(("producer", "way"), INSTALLED, ids=lambda side: side.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_goes_in(producer, way, layout):
    """`outcome` compares the elements; here, that nothing is refused without a reason."""
    for dtype in dtypes_in(layout, way):
        for readonly in (False, True):
            found = outcome(producer, way, dtype, layout, readonly)
            assert found in (None, "zero-copy", "copy", "no elements"), (dtype, readonly, found)


@pytest.mark.slow
def test_the_table_in_the_readme_is_the_one_that_is_made():
    if not IS_TABLE_MADE_HERE:
        pytest.skip("the table is of Python 3.11 with all frameworks")
    assert table() == README.read_text().split(BEGIN)[1].split(END)[0], "python tests/interoperability.py --write"
