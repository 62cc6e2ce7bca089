"""Interpreters that are forked from one that has imported what they share: milliseconds where an import of all takes seconds.

Each runs its code in ``__main__``. For tests of a start there is ``interpreter.run_python``.
"""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from typing import NamedTuple

import pytest
from interpreter import SECONDS, environment_of, lines_said, run_python

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")


class Ended(NamedTuple):
    """How an interpreter ended."""

    code: int
    """Its exit code; minus a signal's number if that ended it."""
    stdout: str
    stderr: str

    def check(self) -> str:
        """It ended well. Returns what it printed."""
        how = "stuck" if self.code == -signal.SIGALRM else f"exit code {self.code}"
        assert self.code == 0, f"{how}\n{self.stdout}\n{self.stderr}"
        return self.stdout

    def check_silent(self) -> str:
        """And it wrote nothing to stderr, but that native code is compiled: the first to need it says so."""
        printed = self.check()
        assert not lines_said(self.stderr), f"{self.stdout}\n{self.stderr}"
        return printed


_SERVER = """
import json as _json, os as _os, signal as _signal, sys as _sys, tempfile as _tempfile

print("ready", flush=True)
for _line in iter(_sys.stdin.readline, ""):
    _code, _arguments, _changes, _seconds, _exits = _json.loads(_line)
    _files = _tempfile.TemporaryFile(), _tempfile.TemporaryFile()
    _child = _os.fork()
    if not _child:
        for _number, _file in enumerate((open(_os.devnull), *_files)):
            _os.dup2(_file.fileno(), _number)
            _file.close()
        _signal.alarm(_seconds)
        _sys.argv[1:] = _arguments
        _os.environ.update(_changes)
        if _changes and "numba" in _sys.modules:
            _sys.modules["numba"].config.reload_config()
        break
    _status = _os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1])
    _said = (_os.pread(_file.fileno(), _os.fstat(_file.fileno()).st_size, 0).decode(errors="replace") for _file in _files)
    print(_json.dumps((_status, *_said)), flush=True)
    for _file in _files:
        _file.close()
else:
    _os._exit(0)  # nobody asks any more

try:
    exec(compile(_code, "<string>", "exec"), globals())
except BaseException as _error:
    if _exits:
        raise
    _status = _error.code or 0 if isinstance(_error, SystemExit) else 1
    if not isinstance(_error, SystemExit):
        _sys.excepthook(type(_error), _error, _error.__traceback__)
    elif not isinstance(_status, int):
        print(_status, file=_sys.stderr)
        _status = 1
else:
    _status = 0
if not _exits:
    _sys.stdout.flush(), _sys.stderr.flush()
    _os._exit(_status)
"""


class Stage:
    """A fresh interpreter that has run `prelude`, forked for what is to be run. It ends with its block, or this process."""

    def __init__(self, prelude: str, **environment: str):
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (close() closes it)
        once = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:This process:DeprecationWarning", **environment}
        self._server = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(prelude) + _SERVER], env=environment_of(**once), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        self._answer(SECONDS)

    def _answer(self, seconds: int) -> str:
        if not select.select([self._server.stdout], [], [], seconds)[0]:
            self._server.kill()
        answer = self._server.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise AssertionError(f"the interpreter that is forked has ended: {self._server.wait()}\n{self._said.read()}")
        return answer

    def run(self, code: str, *arguments: str, seconds: int = SECONDS, exits: bool = True, **environment: str) -> Ended:
        """Run `code` in a fork. `environment`: variables that are set there; Numba reads them anew.

        It ends as a program does, with an interpreter's exit. Without `exits` nothing is torn down at its end, nor called that is
        registered for it: of PyTorch that takes a second.
        """
        self._server.stdin.write(json.dumps((textwrap.dedent(code), arguments, environment, seconds, exits)) + "\n")
        self._server.stdin.flush()
        return Ended(*json.loads(self._answer(seconds + SECONDS)))

    def close(self) -> None:
        self._server.communicate()
        self._said.close()

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def stage_for_module(prelude: str, **environment: str):
    """A fixture of a module of tests: the stage that all of them fork."""

    @pytest.fixture(scope="module")
    def stage():
        with Stage(prelude, **environment) as made:
            yield made

    return stage


_IMPORTED = """
import numpy, numba, fastexchange
from fastexchange.dispatch.runtime import runtime as _runtime
_runtime()
numba.njit(lambda x: x.sum())(numpy.ones(3))  # Numba's definitions are loaded when it compiles first
try:
    import torch
    del torch
except ImportError:
    pass
del numpy, numba, fastexchange
"""


@functools.cache
def _stage() -> Stage:
    return Stage(_IMPORTED)


def fork_python(
    code: str, *arguments: str, check: bool = True, seconds: int = SECONDS, **environment: str
) -> subprocess.CompletedProcess:
    """As ``run_python``, in a fork of an interpreter that has imported NumPy, Numba, PyTorch if installed, and this package.

    No kernel has been made there, but Numba has compiled. `environment`: what is read at import is as it is in this process.
    """
    if not hasattr(os, "fork"):
        return run_python(code, *arguments, check=check, seconds=seconds, **environment)
    ended = _stage().run(code, *arguments, seconds=seconds, exits=False, **environment)
    if check:
        ended.check()
    return subprocess.CompletedProcess(code, ended.code, ended.stdout, ended.stderr)
