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

for _needed in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(_needed, reason=f"{_needed} is not installed: pip install '.[test]'")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install '.[test]'")
run = importlib.import_module("notebooks.run")

NOTEBOOKS = run.paths()
SMALL = 1_000_000  # bytes of all notebooks together

QUICK = {
    r"(ROUNDS = )\d+": r"\g<1>3",
    r"COUNTS = \(1, .*, 32\)": "COUNTS = (1, 3, 32)",
}
"""Fewer rounds and kernels for a run whose numbers nobody reads."""

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kinds(notebook) -> list:
    """Of each code cell: what kinds of outputs it has, apart from the line of a slow machine that compiles for two seconds."""
    return [
        [
            (output.output_type, output.get("name"), sorted(output.get("data", ())))
            for output in cell.outputs
            if not output.get("text", "").startswith("fastexchange: compiling native code")
        ]
        for cell in _code_cells(notebook)
    ]


def _texts(output):
    """The text in an output; pictures, which are letters too, are left out."""
    yield output.get("text", "")
    yield from (data for kind, data in output.get("data", {}).items() if not kind.startswith("image/"))


def _is_like_the_stored_ones_machine() -> bool:
    """Whether here is all that the stored outputs were made with, so that no cell leaves something out."""
    modules = ("torch", "jax", "tvm_ffi")
    return all(importlib.util.find_spec(name) for name in modules) and shutil.which("cc") is not None


def test_there_are_some():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]


@notebooks
def test_runs(path: Path):
    stored = nbformat.read(path, as_version=4)
    executed = run.executed(path, QUICK)  # raises if a cell does
    assert [cell.source for cell in executed.cells] == [cell.source for cell in stored.cells]
    outputs = [output for cell in _code_cells(executed) for output in cell.outputs]
    # A picture that cannot be drawn is no exception of its cell.
    assert not [output.evalue for output in outputs if output.output_type == "error"]
    if _is_like_the_stored_ones_machine():
        assert _kinds(executed) == _kinds(stored), "stored outputs are of other cells: python notebooks/run.py"


@notebooks
def test_is_stored_as_it_ran(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = _code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            for text in _texts(output):
                assert not re.search(r"(?<![\w.])/(root|tmp|home|work|opt|usr|Users|private)/", text), text
                assert "ipykernel_" not in text


@notebooks
def test_is_stored_clean(path: Path):
    """Nothing of the machine or the time that it ran on, so that running it again changes outputs and nothing else."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py"},
    }
    assert not any(cell.metadata for cell in notebook.cells)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert path.read_text(encoding="utf-8") == run.text_of(notebook)


def test_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < SMALL


# ---- what is drawn, of made-up samples ---------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch):
    """What the notebooks share, as a module."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    monkeypatch.syspath_prepend(str(run.HERE))
    with matplotlib.rc_context():
        yield importlib.import_module("shared")
        importlib.import_module("matplotlib.pyplot").close("all")


def samples(median: float, spread: float = 0.0) -> Samples:
    return Samples(np.array([median - spread, median - spread / 2, median, median + spread / 2, median + spread]))


def source(stem: str, line: str) -> str:
    """The cell of a notebook that has this line."""
    (path,) = run.paths([stem])
    cells = [cell.source for cell in _code_cells(nbformat.read(path, as_version=4))]
    (found,) = [text for text in cells if line in text]
    return found


def test_what_is_not_measurable_is_neither_written_nor_drawn(shared):
    lost = samples(-12.0, 900.0)
    assert shared.ratio(lost / samples(3)).startswith("not measurable here (spread ")
    assert shared.time_text(lost) == "not measurable here (spread 900 ns)" and np.isnan(shared.median(lost))
    assert shared.ratio(samples(1) / samples(2)) == "0.50 x" and shared.ratio(3.0) == "3.0 x"
    assert shared.time_text(samples(2500)) == "2.5 µs"


def test_hand_written_c_and_ours_are_bars_of_their_own(shared):
    """Each as long as it took, whichever is faster; the legend has the colours that there are, and no others."""
    spent = {"empty": samples(10.0)}
    for kind, by_hand, ours in (("NumPy: ndarray", 14.0, 13.0), ("PyTorch: c-exchange", 137.0, 143.0)):
        spent |= {(kind, "C limit"): samples(by_hand), (kind, "fastexchange"): samples(ours)}
    plt = importlib.import_module("matplotlib.pyplot")
    kinds = ["NumPy: ndarray", "PyTorch: c-exchange"]
    names = {name: getattr(shared, name) for name in shared.__all__} | {"limit": True, "kinds": kinds, "spent": spent, "plt": plt}
    exec(source("02", "drawn = stacked("), names)
    axes = names["ax"]
    ends = {}
    for patch in axes.patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        ends[axes.get_yticklabels()[row].get_text()] = patch.get_x() + patch.get_width()
    assert ends == {
        "NumPy, hand-written C": 14, "NumPy, fastexchange": 13, "PyTorch, hand-written C": 137, "PyTorch, fastexchange": 143,
    }  # fmt: skip
    (legend,) = names["figure"].legends
    to_rgba = importlib.import_module("matplotlib.colors").to_rgba
    drawn = {patch.get_facecolor() for patch in axes.patches}
    assert {handle.get_facecolor() for handle in legend.legend_handles} == drawn
    assert drawn == {to_rgba(shared.GREY), to_rgba(shared.LIMIT), to_rgba(shared.OURS)}
    assert [text.get_text().strip() for text in axes.texts] == ["14 ns", "13 ns", "137 ns", "143 ns"]


def test_a_bar_that_is_not_measurable_is_words(shared):
    plt = importlib.import_module("matplotlib.pyplot")
    _, axes = plt.subplots()
    rows = {"a": {"x": samples(5), "y": samples(-3, 40)}, "b": {"x": samples(5)}}
    drawn = shared.stacked(axes, rows, {"x": "red", "y": "blue"})
    assert drawn == ["x"] and len(axes.patches) == 1
    assert "not measurable here" in axes.texts[0].get_text() and axes.texts[1].get_text() == " 5 ns"


def test_results_are_drawn_with_their_own_times(shared):
    results = ["no result", "the argument", "a view of it", "a new array", "a declared output"]
    ns = {what: samples(10.0 * (i + 1)) for i, what in enumerate([*results, "its empty_like(x)"])}
    ns["the argument"] = samples(-3, 90)
    times = {("NumPy", what): value for what, value in ns.items()}
    plt = importlib.import_module("matplotlib.pyplot")
    names = {name: getattr(shared, name) for name in shared.__all__} | {"np": np, "plt": plt}
    names |= {"RESULTS": dict.fromkeys(results), "frameworks": {"NumPy": None}, "times": times}
    exec(source("05", 'rows = [*RESULTS, "its empty_like(x)"]'), names)
    axes = names["axes"][0, 0]
    shown = [text.get_text().strip() for text in axes.texts]
    assert shown == ["10 ns", "not measurable here (spread 90 ns)", "30 ns", "40 ns", "50 ns", "60 ns"]
    assert [patch.get_width() for patch in axes.patches if patch.get_width() == patch.get_width()] == [10, 30, 40, 50, 60]


def test_shares_of_what_is_not_measurable_are_no_numbers(shared):
    way = SimpleNamespace(label="x.numpy() in each call", overhead=samples(9))
    report = SimpleNamespace(overhead=samples(-5, 90), alternatives=[way])
    names = {"median": shared.median, "np": np, "VIEW": "{}.numpy()"}
    names |= {"reports": {"k": report}, "times": {("k", 4, "ours"): samples(20)}}
    exec(source("04", "def share(name, size, who)"), names)
    assert np.isnan(names["share"]("k", 4, "ours")) and np.isnan(names["share"]("k", 4, "views"))
    names["SIZES"] = [4, 16]
    exec(source("04", "def size_text("), names)
    assert names["size_text"](None, [np.nan, 0.2], 0.1) == "not measurable here"
