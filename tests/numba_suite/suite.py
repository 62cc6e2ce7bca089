"""Numba's own tests with ``njit`` and ``jit`` accelerated: what fails then, and does not without.

Tests run in processes of their own (``worker``), one or several modules in each. After a crash, or a test that takes too long,
the process's other tests go on in a new one. What fails is run again, in a fresh process without this package, to see whether it
fails there, too, as Numba's own or the machine's; and once more with it, to see whether it fails by itself.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numba

HERE = Path(__file__).resolve().parent
FAILED = ("error", "failure", "unexpected success", "crash", "hang")
LEFT_OUT = {  # modules that do not run, and why
    "test_pycc": "compiles extension modules with a C compiler, no dispatcher", "test_gdb_bindings": "needs gdb",
    "test_gdb_dwarf": "needs gdb", "test_runtests": "tests the runner that is not used here",
}  # fmt: skip


class Outcome(NamedTuple):
    """What became of a test: one of ``passed``, ``skipped``, ``expected failure`` and :data:`FAILED`."""

    outcome: str
    why: str = ""


class Comparison(NamedTuple):
    """Of a run: all tests' outcomes, and those that failed by what that comes from."""

    outcomes: dict[str, Outcome]
    own: dict[str, Outcome]  # Numba's, or the machine's: without this package they fail, too
    unsteady: dict[str, Outcome]  # gone when the tests are run by themselves
    different: dict[str, Outcome]  # only with this package

    def counts(self) -> str:
        found = [each.outcome for each in self.outcomes.values()]
        passed = found.count("passed") + found.count("expected failure")
        return (
            f"{len(found)} tests: {passed} pass, {found.count('skipped')} skipped, {len(self.own)} fail without fastexchange, "
            f"too, {len(self.unsteady)} failed only in company, {len(self.different)} fail only with fastexchange"
        )


def modules() -> list[str]:
    """The modules of ``numba.tests`` that use ``njit`` or ``jit``."""
    folder = Path(numba.__file__).parent / "tests"
    found = sorted([*folder.glob("test_*.py"), *(folder / "doc_examples").glob("test_*.py")])
    found = [path for path in found if path.stem not in LEFT_OUT and re.search(r"\bn?jit\b", path.read_text(encoding="utf-8"))]
    return [".".join(("numba", *path.relative_to(folder.parent).with_suffix("").parts)) for path in found]


def run(names: list[str], *, accelerated: bool, share: int = 1, tests: list[str] | None = None, limit: float = 300):
    """Run tests of these modules. Returns their outcomes by name. `limit`: the seconds that one may take."""
    outcomes: dict[str, Outcome] = {}
    lost: set[str] = set()  # modules that crash on import
    while True:
        asked = {"share": share, "tests": tests, "accelerated": accelerated, "without": list(outcomes)}
        asked["modules"] = [name for name in names if name not in lost]
        stopped_at = _run_once(asked, outcomes, limit)
        if stopped_at is None:
            return outcomes
        kind, name, outcome = stopped_at
        if name in outcomes or not kind:
            raise RuntimeError(f"the process that runs the tests fails at {name}: {outcome.outcome}\n{outcome.why}")
        outcomes[name] = outcome
        if kind == "loads":
            lost.add(name)


def _run_once(asked: dict, outcomes: dict[str, Outcome], limit: float) -> tuple[str, str, Outcome] | None:
    """One process. Returns None if it has come to its end; else at what it did not (``loads`` or ``begins``), a name, and how."""
    with tempfile.TemporaryDirectory() as folder:
        request, results, output = (Path(folder, name) for name in ("request", "results", "output"))
        request.write_text(json.dumps(asked))
        results.touch()
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-X", "faulthandler", HERE / "worker.py", request, results]
        with output.open("wb") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            environment = {**os.environ, "PYTHONPATH": path}
            process = subprocess.Popen(command, **pipes, start_new_session=True, cwd=folder, env=environment)
        at, read, seen_at = ("", "its beginning"), 0, time.monotonic()
        try:
            while True:
                is_over = process.poll() is not None
                lines = results.read_text().split("\n")[read:-1]
                for kind, name, *how in map(json.loads, lines):
                    if kind == "done":
                        return None
                    if kind == "ends":
                        outcomes[name] = Outcome(*how)
                    at = (kind, name) if kind in ("loads", "begins") else ("begins", f"{name} (afterwards)")
                read, seen_at = read + len(lines), time.monotonic() if lines else seen_at
                if is_over:
                    said = f"exit code {process.returncode}\n" + output.read_text(errors="replace")[-4000:]
                    return *at, Outcome("crash", said)
                if time.monotonic() - seen_at > limit:
                    return *at, Outcome("hang", f"not done after {limit:.0f} s")
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compare(names: list[str], *, share: int = 1, limit: float = 300) -> Comparison:
    """Run tests of these modules with this package, and what fails again, without and with it."""
    made = Comparison(run(names, accelerated=True, share=share, limit=limit), {}, {}, {})
    failed = {name: outcome for name, outcome in made.outcomes.items() if outcome.outcome in FAILED}
    if not failed:
        return made
    concerned = [module for module in names if any(module in name for name in failed)] or names

    without = run(concerned, accelerated=False, tests=list(failed), limit=limit)
    rest = [name for name in failed if name not in without or without[name].outcome not in FAILED]
    again = run(concerned, accelerated=True, tests=rest, limit=limit) if rest else {}
    for name, outcome in failed.items():
        is_steady = name not in again or again[name].outcome in FAILED
        part = made.own if name not in rest else made.different if is_steady else made.unsteady
        part[name] = outcome
    return made


def listed(path: Path = HERE / "differences.txt") -> dict[str, str]:
    """The tests that are known to be different, and why: a reason's lines, and behind it the tests, indented."""
    reasons: dict[str, str] = {}
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        reason = " ".join(line for line in lines if not line.startswith(" "))
        reasons.update((line.strip(), reason) for line in lines if line.startswith(" "))
    return reasons
