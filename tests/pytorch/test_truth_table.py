"""The truth table of PyTorch's tensors: it says what happens, and a kernel gets right elements or an exception."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import truth_table as table  # noqa: E402
from forked import Stage  # noqa: E402
from truth_table import COLUMNS, NO_TENSOR, ROWS, Column, Row, Seen  # noqa: E402

pytestmark = pytest.mark.slow
TITLES = [row.title for row in ROWS]
OF_ITS_INSIDES = ("nested, strided", "inside `torch.vmap`", "inside `torch.func.jvp`")
"""Tensors for which PyTorch's ``__dlpack__`` fails in its insides, by a RuntimeError, and a kernel says what they are."""
DLPACK, TABLE, *_, OURS = [column.title for column in COLUMNS]


@pytest.fixture(scope="module")
def found():
    return table.outcomes()


@pytest.mark.parametrize("row", ROWS, ids=TITLES)
def test_a_kernel_gets_the_value_or_an_exception_the_same_as_dlpack(found, row):
    """And the same on every path: where paths differ, the cell says it, in bold as all that is bad."""
    by_dlpack, ours = found[row.title][DLPACK], found[row.title][OURS]
    assert not ours.startswith("**"), ours
    if row.title in OF_ITS_INSIDES:
        assert (by_dlpack, ours) == ("refused (RuntimeError)", "refused (BufferError)")
    elif by_dlpack.startswith("refused") and ours.startswith("refused") and row.needs is None:  # those NumPy itself refuses
        assert ours == by_dlpack


def test_the_committed_table_is_the_one_that_is_made(found):
    said = table.committed()
    in_both = [column.title for column in COLUMNS if column.why_not is None and column.title in next(iter(said.values()))]
    if TABLE not in in_both:
        pytest.skip("the table is of another version of PyTorch")
    rows = [title for title in TITLES if title in said]
    assert len(said) == len(TITLES), "python tests/truth_table.py --write"
    assert {row.title for row in ROWS if row.needs is None} <= {*rows}, "python tests/truth_table.py --write"
    differing = {
        (row, column): {"said": said[row][column], "found": found[row][column]}
        for row in rows
        for column in in_both
        if said[row][column] not in (NO_TENSOR, found[row][column])  # pinned memory can be made elsewhere
    }
    assert not differing, "python tests/truth_table.py --write"


JUDGED = {
    Seen(64, (1.0,), False): table.RIGHT, Seen(64, (7,), True): table.AS_BITS, Seen(128, (1.0,), False): table.COPIES,
    Seen(64, (2.0,), False): table.WRONG, Seen(64, (7,), False): table.WRONG, Seen(128, (7,), True): table.COPIES,
}  # fmt: skip


def test_what_is_seen_is_judged():
    plain, watched = (Row("", lambda look: None, None, is_watched=is_watched) for is_watched in (False, True))
    for seen, outcome in JUDGED.items():
        assert table.judge(plain, lambda _: seen, None, 64, (1.0,), (7,)) == outcome  # noqa: B023
        assert table.judge(plain, lambda _: seen, None, 64, None, None) == table.WRONG  # noqa: B023
        lost = table.judge(watched, lambda _: seen, None, 64, (1.0,), (7,))  # noqa: B023
        assert lost == (table.WRONG if outcome == table.WRONG else table.LOST)


def use_those_that_die_or_hang():
    table.ROWS = [Row("one", lambda look: look(None), lambda tensor: [1.0])]
    raising, dying, hanging = {}.pop, lambda _: os.kill(os.getpid(), signal.SIGSEGV), lambda _: time.sleep(600)
    table.COLUMNS = [Column("", (each,)) for each in (raising, dying, dying, raising, hanging, raising)]


def test_processes_that_die_or_hang_take_no_other_cell_along(monkeypatch):
    monkeypatch.setattr(table, "SECONDS", 3)
    stage = Stage("import truth_table, test_truth_table as tests\ntests.use_those_that_die_or_hang()\n")
    no, dead, late = "refused (KeyError)", table.CRASH, table.HANGS
    assert table.filled(stage, 0, [*range(6)]) == [no, dead, dead, no, late, no]
    stage.close()


WITHOUT_TABLE = """
import torch, truth_table
from fastexchange import explain
for name in {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"} & {*vars(torch.Tensor)}:
    delattr(torch.Tensor, name)
assert "to_dlpack" in str(explain(torch.ones(3)))
truth_table.prepare()
"""


def test_a_kernel_gets_the_same_without_an_exchange_table(found):
    stage = Stage(WITHOUT_TABLE)
    ours = next(number for number, column in enumerate(COLUMNS) if column.title == OURS)
    said = {row.title: table.filled(stage, number, [ours])[0] for number, row in enumerate(ROWS)}
    stage.close()
    assert said == {title: found[title][OURS] for title in TITLES}
