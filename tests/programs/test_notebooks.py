"""The notebooks: each runs from top to bottom in a fresh kernel, and is stored as it ran, with its outputs."""

import importlib
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

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
    """Of each code cell: what kinds of outputs it has."""
    return [
        [(output.output_type, output.get("name"), sorted(output.get("data", ()))) for output in cell.outputs]
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
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@notebooks
def test_runs(path: Path):
    stored = nbformat.read(path, as_version=4)
    executed = run.executed(path, QUICK)  # raises if a cell does
    assert [cell.source for cell in executed.cells] == [cell.source for cell in stored.cells]
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
