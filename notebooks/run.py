"""Runs the notebooks and stores them with their outputs: ``python notebooks/run.py [NAME …]``, all of them without a name.

Each runs in a fresh kernel of this interpreter, in this folder, with the package of this checkout. What is stored is clean: no
times of execution, no names of the machine or its Python.
"""

import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
TIMEOUT = 600
"""Seconds that one cell may take."""


def paths(names=()) -> list[Path]:
    """The notebooks, in their order; of those whose file names begin with one of `names`, if any are given."""
    found = sorted(HERE.glob("*.ipynb"))
    return [path for path in found if path.name.startswith(tuple(names))] if names else found


def _environment() -> dict[str, str]:
    parts = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(parts),
        "TQDM_DISABLE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def executed(path: Path, replaced: dict[str, str] | None = None):
    """The notebook at `path`, run from its first cell to its last. Raises nbclient's CellExecutionError for a cell that fails.

    `replaced`: of lines of code that match a pattern, what runs instead. Sources are those of the file.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        cell.metadata.clear()
        for pattern, line in (replaced or {}).items() if cell.cell_type == "code" else ():
            cell.source = re.sub(f"^{pattern}$", line, cell.source, flags=re.MULTILINE)
    notebook.metadata = nbformat.from_dict({"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}})
    client = NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(HERE)}},
        startup_timeout=TIMEOUT, extra_arguments=["--log-level=ERROR"],
        shutdown_kernel="immediate",  # all outputs are there; a kernel that ends by itself takes seconds to take PyTorch down
    )  # fmt: skip
    client.execute(env=_environment())
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    notebook.metadata["language_info"] = nbformat.from_dict({"name": "python", "file_extension": ".py"})
    return notebook


def text_of(notebook) -> str:
    """What is stored."""
    return nbformat.writes(notebook) + "\n"


def main(names: list[str]) -> None:
    """Run those and write them back."""
    for path in paths(names):
        start = time.perf_counter()
        notebook = executed(path)
        path.write_text(text_of(notebook), encoding="utf-8")
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
