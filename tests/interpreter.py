"""Fresh interpreters, for tests of what happens at start, at exit, or at a crash."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fastexchange

HERE = Path(__file__).parent


def run_python(code: str, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that finds this package and these tests."""
    paths = [Path(fastexchange.__file__).parents[1], HERE, *(folder for folder in HERE.iterdir() if folder.is_dir())]
    paths = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, env=env, timeout=240
    )
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def lines_said(stderr: str) -> list[str]:
    """What a program wrote to stderr, but for the line by which whoever first needs native code says that it is compiled."""
    return [line for line in stderr.splitlines() if "compiling native code" not in line]
