"""The truth table of PyTorch's tensors: it says what happens, and a kernel gets right elements or an exception."""


import pytest

torch = pytest.importorskip("torch")

import truth_table as truth  # noqa: E402
from frameworks import has_versioned_capsules  # noqa: E402
from nights import at_night  # noqa: E402
from torch_operators import UNKNOWN, WITHOUT_TABLE  # noqa: E402
from torch_truth import COLUMNS, ROWS, TABLE  # noqa: E402

pytestmark = pytest.mark.slow
OURS = [truth.DLPACK, truth.FAST_ARGS]
TITLES = [row.title for row in ROWS]
OF_ITS_INSIDES = ("nested, strided", "inside `torch.vmap`", "inside `torch.func.jvp`")
"""Tensors for which PyTorch's ``__dlpack__`` fails in its insides, by a RuntimeError, and a kernel says what they are."""


SHOWN_BY = {WITHOUT_TABLE: "'to_dlpack' in str(fastexchange.explain(torch.ones(3)))", UNKNOWN: "not offsets.guard().knows_views"}
"""Changes of a process, and what is true after them."""


def in_a_process_after(change: str) -> dict[str, str]:
    """What a kernel does there, by row."""
    ours = COLUMNS.index(truth.FAST_ARGS)
    shown = f"import fastexchange, torch\nfrom fastexchange.torch import offsets\nassert {SHOWN_BY[change]}\n"
    with truth.stage_of(TABLE, change + shown) as stage:
        return {row.title: truth.filled(stage, [(number, ours)])[0] for number, row in enumerate(ROWS)}


SHORT, WHOLE = (OURS, [WITHOUT_TABLE]), ([], [*SHOWN_BY])


@pytest.mark.parametrize("asked", at_night([SHORT, WHOLE], SHORT), ids=["ours", "all"])
def test_a_kernel_gets_the_value_or_an_exception_the_same_as_dlpack(asked):
    """And the same on every path: where paths differ, a cell says so, in bold as all that is bad. So does the committed table."""
    columns, changes = asked
    found = truth.outcomes(TABLE, columns)
    for row in ROWS:
        by_dlpack, ours = found[row.title][truth.DLPACK.title], found[row.title][truth.FAST_ARGS.title]
        assert not ours.startswith("**"), (row.title, ours)
        if row.title in OF_ITS_INSIDES:
            assert (by_dlpack, ours) == ("refused (RuntimeError)", "refused (BufferError)"), row.title
        elif by_dlpack.startswith("refused") and ours.startswith("refused") and row.needs is None:  # those NumPy itself refuses
            before = [] if has_versioned_capsules() else ["refused (BufferError)"]  # where all of PyTorch's are RuntimeErrors
            assert ours in (by_dlpack, *before), row.title
    for change in changes:
        assert in_a_process_after(change) == {title: found[title][truth.FAST_ARGS.title] for title in TITLES}, change
    truth.check_committed(TABLE, found)
