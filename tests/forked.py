"""Scenes that each have an interpreter of their own, forked from one that has imported and compiled what they share.

A fork costs milliseconds where an import of everything costs seconds. A scene runs in ``__main__`` and leaves it as a program
does, at the end of its code: so its exit is an interpreter's exit, too.
"""

import json
import os
import signal
from typing import NamedTuple

import pytest
from interpreter import lines_said, run_python

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
SECONDS = 60
"""After which a scene counts as stuck and is ended. Only a failure takes that long."""


class Ended(NamedTuple):
    """How a scene ended."""

    code: int
    """Its exit code; minus a signal's number if that ended it."""
    stdout: str
    stderr: str

    def check(self) -> None:
        """It ended well, and wrote nothing but to stdout, and that native code is compiled: the first to need it says so."""
        how = f"stuck for {SECONDS} s" if self.code == -signal.SIGALRM else f"exit code {self.code}"
        assert self.code == 0 and not lines_said(self.stderr), f"{how}\n{self.stdout}\n{self.stderr}"


_STAGE = """
import json as _json, os as _os, signal as _signal, sys as _sys, tempfile as _tempfile

with open(_sys.argv[1]) as _file:
    _scenes, _seconds, _ends = _json.load(_file), int(_sys.argv[2]), {}
for _name, _code in _scenes.items():
    _files = _tempfile.TemporaryFile(), _tempfile.TemporaryFile()
    _sys.stdout.flush(), _sys.stderr.flush()
    _child = _os.fork()
    if not _child:
        for _number, _file in enumerate(_files, 1):
            _os.dup2(_file.fileno(), _number)
        [_file.close() for _file in _files]
        _signal.alarm(_seconds)
        exec(compile(_code, _name, "exec"), globals())
        break
    _status = _os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1])
    _ends[_name] = _status, *(_os.pread(_file.fileno(), 20_000, 0).decode(errors="replace") for _file in _files)
    [_file.close() for _file in _files]
else:
    print(_json.dumps(_ends))
"""


def run_forked(tmp_path, prelude: str, scenes: dict[str, str], seconds: int = SECONDS, **environment) -> dict[str, Ended]:
    """Run `prelude` in a fresh interpreter and each of `scenes` in a fork of that. `tmp_path`: a folder to write to."""
    path = tmp_path / "scenes.json"
    path.write_text(json.dumps(scenes))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:This process:DeprecationWarning", **environment}
    done = run_python(prelude + _STAGE, str(path), str(seconds), **environment)
    return {name: Ended(*end) for name, end in json.loads(done.stdout.splitlines()[-1]).items()}
