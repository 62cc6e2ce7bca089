"""Numba's own tests with ``njit`` and ``jit`` accelerated: what fails then, and does not without.

Tests run in processes of their own (``worker``), one or several modules in each. After a crash, or a test that takes too long,
the process's other tests go on in a new one. What fails is run again, in a fresh process without this package, to see whether it
fails there, too, as Numba's own or the machine's; and once more with it, to see whether it fails by itself.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numba

HERE = Path(__file__).resolve().parent
FAILED = ("error", "failure", "unexpected success", "crash", "hang")
LEFT_OUT = {
    "test_pycc": "compiles extension modules with a C compiler, no dispatcher",
    "test_gdb_bindings": "needs gdb",
    "test_gdb_dwarf": "needs gdb",
    "test_runtests": "tests the runner that is not used here",
}
"""Modules that do not run, and why."""


@dataclass
class Outcome:
    """What became of a test: one of ``passed``, ``skipped``, ``expected failure`` and :data:`FAILED`."""

    outcome: str
    why: str = ""
    wall: float = 0.0
    processor: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome in FAILED


@dataclass
class Comparison:
    """Of a run: all tests' outcomes, and those that failed by what that comes from."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    own: dict[str, Outcome] = field(default_factory=dict)
    """Failures that are Numba's own, or the machine's: without this package they fail, too."""
    unsteady: dict[str, Outcome] = field(default_factory=dict)
    """Failures that are gone when the tests are run by themselves."""
    different: dict[str, Outcome] = field(default_factory=dict)
    """Failures that only come with this package."""

    def add(self, other: "Comparison") -> None:
        """Take in what became of other tests."""
        for part, found in vars(other).items():
            getattr(self, part).update(found)

    def counts(self) -> str:
        """A line of counts."""
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
    uses = re.compile(r"\bn?jit\b")
    return [
        ".".join(("numba", *path.relative_to(folder.parent).with_suffix("").parts))
        for path in found
        if path.stem not in LEFT_OUT and uses.search(path.read_text(encoding="utf-8"))
    ]


def run(names: list[str], *, accelerated: bool, share: int = 1, tests: list[str] | None = None, limit: float = 300):
    """Run tests of these modules. Returns their outcomes by name. `limit`: the seconds that one may take."""
    outcomes: dict[str, Outcome] = {}
    lost: set[str] = set()  # modules that crash on import
    while True:
        asked = {
            "modules": [name for name in names if name not in lost], "share": share, "tests": tests, "accelerated": accelerated,
            "without": list(outcomes),
        }  # fmt: skip
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
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(HERE / "worker.py"), str(request), str(results)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])},
            )  # fmt: skip
        at: tuple[str, str] = ("", "its beginning")
        read, seen_at = 0, time.monotonic()
        try:
            while True:
                is_over = process.poll() is not None
                text = results.read_text()
                complete = text[read : text.rfind("\n") + 1]
                read += len(complete)
                for line in map(json.loads, complete.splitlines()):
                    seen_at = time.monotonic()
                    if "ends" in line:
                        name = line.pop("ends")
                        outcomes[name] = Outcome(**line)
                        at = "between", name
                    elif "done" in line:
                        return None
                    else:
                        at = next((kind, line[kind]) for kind in ("loads", "begins", "module") if kind in line)
                if is_over:
                    ended = f"exit code {process.returncode}\n" + output.read_text(errors="replace")[-4000:]
                    return (*_place(at), Outcome("crash", ended))
                if time.monotonic() - seen_at > limit:
                    return (*_place(at), Outcome("hang", f"not done after {limit:.0f} s"))
                time.sleep(0.05)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _place(at: tuple[str, str]) -> tuple[str, str]:
    kind, name = at
    return (kind, name) if kind in ("", "loads", "begins") else ("begins", f"{name} (afterwards)")


def compare(names: list[str], *, share: int = 1, limit: float = 300, tests: list[str] | None = None) -> Comparison:
    """Run tests of these modules with this package, and what fails again, without and with it."""
    made = Comparison(run(names, accelerated=True, share=share, limit=limit, tests=tests))
    failed = {name: outcome for name, outcome in made.outcomes.items() if outcome.failed}
    if not failed:
        return made
    concerned = [module for module in names if any(module in name for name in failed)] or names
    without = run(concerned, accelerated=False, tests=list(failed), limit=limit)
    for name in failed:
        if name in without and without[name].failed:
            made.own[name] = failed[name]
    rest = [name for name in failed if name not in made.own]
    again = run(concerned, accelerated=True, tests=rest, limit=limit) if rest else {}
    for name in rest:
        if name in again and not again[name].failed:
            made.unsteady[name] = failed[name]
        else:
            made.different[name] = failed[name]
    return made


def listed(path: Path = HERE / "differences.txt") -> dict[str, str]:
    """The tests that are known to be different, and why: a reason's lines, and behind it the tests, indented."""
    reasons: dict[str, str] = {}
    reason: list[str] = []
    has_tests = False
    for line in path.read_text().splitlines():
        if line.startswith(" "):
            reasons[line.strip()] = " ".join(reason)
            has_tests = True
        elif line.strip() and not line.startswith("#"):
            reason, has_tests = [*([] if has_tests else reason), line.strip()], False
    return reasons
