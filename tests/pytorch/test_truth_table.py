"""The truth table of PyTorch's tensors: it says what happens, and a kernel gets right elements or an exception."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import truth_table as truth  # noqa: E402
from forked import Stage  # noqa: E402
from nights import at_night  # noqa: E402
from torch_truth import COLUMNS, ROWS, TABLE  # noqa: E402
from truth_table import Column, Row, Seen, Table  # noqa: E402

pytestmark = pytest.mark.slow
OURS = [truth.DLPACK, truth.FAST_ARGS]
TITLES = [row.title for row in ROWS]
OF_ITS_INSIDES = ("nested, strided", "inside `torch.vmap`", "inside `torch.func.jvp`")
"""Tensors for which PyTorch's ``__dlpack__`` fails in its insides, by a RuntimeError, and a kernel says what they are."""


WITHOUT_TABLE = """
import torch
from fastexchange import explain
for name in {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"} & {*vars(torch.Tensor)}:
    delattr(torch.Tensor, name)
assert "to_dlpack" in str(explain(torch.ones(3)))
"""


def without_an_exchange_table() -> dict[str, str]:
    """What a kernel does then, by row."""
    stage = truth.stage_of(TABLE, WITHOUT_TABLE)
    ours = COLUMNS.index(truth.FAST_ARGS)
    said = {row.title: truth.filled(stage, [(number, ours)])[0] for number, row in enumerate(ROWS)}
    stage.close()
    return said


@pytest.mark.parametrize("columns", at_night([OURS, []], OURS), ids=["ours", "all"])
def test_a_kernel_gets_the_value_or_an_exception_the_same_as_dlpack(columns):
    """And the same on every path: where paths differ, a cell says so, in bold as all that is bad. So does the committed table."""
    found = truth.outcomes(TABLE, columns)
    for row in ROWS:
        by_dlpack, ours = found[row.title][truth.DLPACK.title], found[row.title][truth.FAST_ARGS.title]
        assert not ours.startswith("**"), (row.title, ours)
        if row.title in OF_ITS_INSIDES:
            assert (by_dlpack, ours) == ("refused (RuntimeError)", "refused (BufferError)"), row.title
        elif by_dlpack.startswith("refused") and ours.startswith("refused") and row.needs is None:  # those NumPy itself refuses
            assert ours == by_dlpack, row.title
    assert without_an_exchange_table() == {title: found[title][truth.FAST_ARGS.title] for title in TITLES}
    truth.check_committed(TABLE, found)


JUDGED = {
    Seen(64, (1.0,), False): truth.RIGHT, Seen(64, (7,), True): truth.AS_BITS, Seen(128, (1.0,), False): truth.COPIES,
    Seen(64, (2.0,), False): truth.WRONG, Seen(64, (7,), False): truth.WRONG, Seen(128, (7,), True): truth.COPIES,
}  # fmt: skip


def test_what_is_seen_is_judged():
    plain, watched = (Row("", lambda look: None, None, is_watched=is_watched) for is_watched in (False, True))
    for seen, outcome in JUDGED.items():
        assert truth.judge(plain, lambda _: seen, None, 64, (1.0,), (7,)) == outcome  # noqa: B023
        assert truth.judge(plain, lambda _: seen, None, 64, None, None) == truth.WRONG  # noqa: B023
        lost = truth.judge(watched, lambda _: seen, None, 64, (1.0,), (7,))  # noqa: B023
        assert lost == (truth.WRONG if outcome == truth.WRONG else truth.LOST)


_raising, _dying, _hanging = {}.pop, lambda _: os.kill(os.getpid(), signal.SIGSEGV), lambda _: time.sleep(600)
_ENDS = [Column("", (each,)) for each in (_raising, _dying, _dying, _raising, _hanging, _raising)]
DEADLY = Table("", "", [Row("one", lambda look: look(None), lambda tensor: [1.0])], _ENDS, lambda tensor: None)


def test_processes_that_die_or_hang_take_no_other_cell_along(monkeypatch):
    monkeypatch.setattr(truth, "SECONDS", 3)
    stage = Stage("from truth_table import fill\nfrom test_truth_table import DEADLY as TABLE\n")
    no, dead, late = "refused (KeyError)", truth.CRASH, truth.HANGS
    assert truth.filled(stage, [(0, column) for column in range(6)]) == [no, dead, dead, no, late, no]
    stage.close()
