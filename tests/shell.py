"""``python -m fastexchange`` in new processes, and modules that look missing or broken to them."""

import os
import subprocess
import sys
from pathlib import Path

import fastexchange

ROOT = Path(fastexchange.__file__).resolve().parents[1]


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """The command line in a new process, `path` first among the places that modules are imported from."""
    found = [str(path)] if path else []
    search = os.pathsep.join([*found, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fastexchange", *map(str, arguments)]
    given = {**os.environ, "PYTHONPATH": search, "COLUMNS": "100", "FORCE_COLOR": "", **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)


def without(folder: Path, *modules: str, code: str = "") -> Path:
    """`folder`, which from now on makes modules of these names look as if they were not installed, and runs `code` at start."""
    lines = ["import sys", *(f"sys.modules[{module!r}] = None" for module in modules), code]
    (folder / "sitecustomize.py").write_text("\n".join([*lines, ""]))
    return folder
