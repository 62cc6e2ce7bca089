"""Copies of the package with machine code for its native functions, as wheels have it; and processes that import one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fastexchange

PACKAGE = Path(fastexchange.__file__).parent


def started(root: Path, *arguments: str, under: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """A fresh process that imports the package from `root`. `under`: the command that runs it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    env |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [*under, sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=900 if under else 240, cwd=root)


def build(root: Path) -> list[Path]:
    """Make native code for a copy of the package at `root`. Returns its files."""
    shutil.copytree(PACKAGE, root / "fastexchange", ignore=shutil.ignore_patterns("__pycache__", "_native"))
    started(root, "-m", "fastexchange._native_build").check_returncode()
    return sorted((root / "fastexchange" / "_native").iterdir())
