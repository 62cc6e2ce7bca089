"""Fresh interpreters, for tests of what happens at start. ``forked.fork_python`` has those for all else."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import fastexchange
from fastexchange.ground.cfunction import code_cache

HERE = Path(__file__).parent


def environment_of(**changes: str) -> dict[str, str]:
    """The environment of an interpreter that finds this package and these tests."""
    paths = [Path(fastexchange.__file__).parents[1], HERE, *(folder for folder in HERE.iterdir() if folder.is_dir())]
    paths = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": paths, **changes}


SECONDS, FOR_TESTS = 240, 3600
"""After so many seconds an interpreter counts as stuck and is ended; the second number is for tests or type checkers in one."""


def interpret(
    *arguments: str, seconds: int = SECONDS, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """A fresh interpreter with these arguments, which finds this package and these tests."""
    given = {"capture_output": True, "text": True, "timeout": seconds, "cwd": folder}
    return subprocess.run([sys.executable, *arguments], env=environment_of(**environment), **given)


def run_python(
    code: str, *arguments: str, check: bool = True, seconds: int = SECONDS, **environment: str
) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that finds this package and these tests."""
    done = interpret("-c", textwrap.dedent(code), *arguments, seconds=seconds, **environment)
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def copy_native_code(folder: Path, *without: str) -> None:
    """Make `folder` a ``NUMBA_CACHE_DIR`` that has this machine's native code, but for files of the patterns `without`.

    Others may write to the original meanwhile: claims and temporary files, which come and go, stay there.
    """
    kept = Path(str(code_cache.directory))
    shutil.copytree(kept, folder / kept.name, ignore=shutil.ignore_patterns("*.tmp", *without))


def lines_said(stderr: str) -> list[str]:
    """What a program wrote to stderr, but for the line by which whoever first needs native code says that it is compiled."""
    return [line for line in stderr.splitlines() if "compiling native code" not in line]
