"""``python -m fastexchange`` in new processes or in this one; modules that look missing or broken to new ones; the C compiler."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fastexchange
from fastexchange.__main__ import main

ROOT = Path(fastexchange.__file__).resolve().parents[1]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """The command line in a new process, `path` first among the places that modules are imported from."""
    search = os.pathsep.join(str(place) for place in (path, ROOT, os.environ.get("PYTHONPATH")) if place)
    command = [sys.executable, "-m", "fastexchange", *map(str, arguments)]
    given = {**os.environ, "PYTHONPATH": search, "COLUMNS": "100", "FORCE_COLOR": "", **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)


def run_here(*arguments: str) -> subprocess.CompletedProcess:
    """The command line in this process: for what is not about the process, which takes a second or more.

    Its ``sys.path`` stays as it was: the command puts the folder of a file there, which may have a ``numpy.py``.
    """
    with (
        mock.patch.dict(os.environ, COLUMNS="100", FORCE_COLOR=""),
        mock.patch.object(sys, "path", sys.path[:]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as error,
    ):
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:  # as argparse ends it
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def without(folder: Path, *modules: str, code: str = "") -> Path:
    """`folder`, which from now on makes modules of these names look as if they were not installed, and runs `code` at start."""
    lines = ["import sys", *(f"sys.modules[{module!r}] = None" for module in modules), code]
    (folder / "sitecustomize.py").write_text("\n".join([*lines, ""]))
    return folder
