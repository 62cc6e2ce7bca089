"""The notebooks: each runs from top to bottom in a fresh kernel, and is stored as it ran, with its outputs."""

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastexchange.measuring.timing import Samples

*_, nbformat = (
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install '.[test]'")
    for needed in ("nbclient", "ipykernel", "matplotlib", "nbformat")
)
run, plt, colours = map(importlib.import_module, ("notebooks.run", "matplotlib.pyplot", "matplotlib.colors"))

NOTEBOOKS = run.paths()
# fewer rounds and kernels for a run whose numbers nobody reads
QUICK = {r"(ROUNDS = )\d+": r"\g<1>3", r"COUNTS = \(1, .*, 32\)": "COUNTS = (1, 3, 32)"}


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def kinds(cells) -> list:
    """Of each code cell: what kinds of outputs it has, apart from the line of a slow machine that compiles for two seconds."""
    begins = "fastexchange: compiling native code"
    outputs = [[each for each in cell.outputs if not each.get("text", "").startswith(begins)] for cell in cells]
    return [[(each.output_type, each.get("name"), sorted(each.get("data", ()))) for each in several] for several in outputs]


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem < "02" else pytest.mark.nightly) for path in NOTEBOOKS
])  # fmt: skip
def test_runs(path: Path):
    if path.stem == "08-jax":
        pytest.importorskip("jax")
    stored, executed = nbformat.read(path, as_version=4), run.executed(path, QUICK)  # raises if a cell does
    assert [cell.source for cell in executed.cells] == [cell.source for cell in stored.cells]
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    # a picture that cannot be drawn is no exception of its cell
    assert not [output.evalue for cell in cells for output in cell.outputs if output.output_type == "error"]
    # here is all that the stored outputs were made with, so that no cell leaves something out
    if all(map(importlib.util.find_spec, ("torch", "jax", "tvm_ffi"))) and shutil.which("cc") is not None:
        assert kinds(cells) == kinds(code_cells(path)), "stored outputs are of other cells: python notebooks/run.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran_and_clean(path: Path):
    """With nothing of the machine or the time that it ran on: running it again changes outputs and nothing else."""
    notebook, cells = nbformat.read(path, as_version=4), code_cells(path)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr", output
        # pictures, which are letters too, are left out
        texts = [data for kind, data in output.get("data", {}).items() if not kind.startswith("image/")]
        for text in [output.get("text", ""), *texts]:
            assert not re.search(r"(?<![\w.])/(root|tmp|home|work|opt|usr|Users|private)/|ipykernel_", text), text
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py"},
    }
    assert not any(cell.metadata for cell in notebook.cells) and len(NOTEBOOKS) == 8
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert path.read_text(encoding="utf-8") == run.text_of(notebook) and path.stat().st_size < 500_000


# ---- what is drawn, of made-up samples ---------------------------------------------------------------------------------
@pytest.fixture
def shared(monkeypatch):
    importlib.import_module("matplotlib").use("agg")
    monkeypatch.syspath_prepend(str(run.HERE))
    with plt.rc_context():
        yield importlib.import_module("shared")
        plt.close("all")


def samples(median: float, spread: float = 0.0) -> Samples:
    return Samples(median + spread * np.linspace(-1, 1, 5))


def after_cell(shared, stem: str, line: str, **names) -> dict:
    """The names of a notebook's cell, that with this line, when it has run with `names` alone."""
    (source,) = [cell.source for cell in code_cells(*run.paths([stem])) if line in cell.source]
    names |= {name: getattr(shared, name) for name in shared.__all__} | {"np": np, "plt": plt}
    exec(source, names)
    return names


def test_what_is_not_measurable_is_neither_written_nor_drawn(shared):
    lost = samples(-12.0, 900.0)
    assert shared.ratio(lost / samples(3)).startswith("not measurable here (spread ")
    assert shared.time_text(lost) == "not measurable here (spread 900 ns)" and np.isnan(shared.median(lost))
    assert shared.ratio(samples(1) / samples(2)) == "0.50 x" and shared.ratio(3.0) == "3.0 x"
    assert shared.time_text(samples(2500)) == "2.5 µs"
    _, axes = plt.subplots()
    rows = {"a": {"x": samples(5), "y": samples(-3, 40)}, "b": {"x": samples(5)}}
    assert shared.stacked(axes, rows, {"x": "red", "y": "blue"}) == ["x"] and len(axes.patches) == 1
    assert "not measurable here" in axes.texts[0].get_text() and axes.texts[1].get_text() == " 5 ns"


def test_hand_written_c_and_ours_are_bars_of_their_own(shared):
    """Each as long as it took, whichever is faster; the legend has the colours that there are, and no others."""
    spent, kinds = {"empty": samples(10.0)}, ["NumPy: ndarray", "PyTorch: c-exchange"]
    for kind, by_hand, ours in zip(kinds, (14.0, 137.0), (13.0, 143.0), strict=True):
        spent |= {(kind, "C limit"): samples(by_hand), (kind, "fastexchange"): samples(ours)}
    names = after_cell(shared, "02", "drawn = stacked(", limit=True, kinds=kinds, spent=spent)
    axes, labels = names["ax"], [label.get_text() for label in names["ax"].get_yticklabels()]
    ends = {labels[round(each.get_y() + each.get_height() / 2)]: each.get_x() + each.get_width() for each in axes.patches}
    bars = "NumPy, hand-written C", "NumPy, fastexchange", "PyTorch, hand-written C", "PyTorch, fastexchange"
    assert ends == dict(zip(bars, (14, 13, 137, 143), strict=True))
    (legend,) = names["figure"].legends
    drawn = {patch.get_facecolor() for patch in axes.patches}
    assert {handle.get_facecolor() for handle in legend.legend_handles} == drawn
    assert drawn == set(map(colours.to_rgba, (shared.GREY, shared.LIMIT, shared.OURS)))
    assert [text.get_text().strip() for text in axes.texts] == ["14 ns", "13 ns", "137 ns", "143 ns"]


def test_shares_of_what_is_not_measurable_are_no_numbers(shared):
    way = SimpleNamespace(label="x.numpy() in each call", overhead=samples(9))
    reports, times = {"k": SimpleNamespace(overhead=samples(-5, 90), alternatives=[way])}, {("k", 4, "ours"): samples(20)}
    given = {"VIEW": "{}.numpy()", "reports": reports, "times": times}
    share = after_cell(shared, "04", "def share(name, size, who)", **given)["share"]
    assert np.isnan(share("k", 4, "ours")) and np.isnan(share("k", 4, "views"))
    size_text = after_cell(shared, "04", "def size_text(", SIZES=[4, 16])["size_text"]
    assert size_text(None, [np.nan, 0.2], 0.1) == "not measurable here"
