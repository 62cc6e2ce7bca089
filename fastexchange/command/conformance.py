"""``conformance``: whether a type's exchange table does what DLPack says of its five functions.

The checks (``conformance_checks``) run in a process of their own, because a wrong table may end it, or never return: the check
that it was at is the finding then.
"""

import argparse
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from . import CommandError
from .probe import NOTHING, OK, WRONG

__all__ = ["BEGINS", "ENDS", "HAS", "MARK", "run"]

MARK = "fastexchange conformance: "
"""Begins the lines of the process that checks; behind it is JSON, [name, status, text]. What the function prints has none."""
BEGINS, HAS, ENDS = "begins", "has", "ends"
"""Statuses that are no findings: a check begins; `text` is the number of checks; all are done."""


def run(options: argparse.Namespace) -> int:
    """Check, and print a line for each check. Returns 1 if a line says wrong."""
    command = [sys.executable, "-m", f"{__package__}.conformance_checks", options.what]
    counts, at, has, is_whole, how = {OK: 0, WRONG: 0, NOTHING: 0}, "", 0, False, ""

    def found(name: str, status: str, text: str) -> None:
        counts[status] += 1
        print(f"{status:<6} {name}{f': {text}' if text else ''}", flush=True)

    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        try:
            for name, status, text in _marked(process, options.timeout):
                at = name if status == BEGINS else ""
                if status == HAS:
                    has = int(text)
                elif status == ENDS:
                    is_whole = True
                elif status != BEGINS:
                    found(name, status, text)
            process.wait(options.timeout)
        except (TimeoutError, subprocess.TimeoutExpired):
            how = "" if process.poll() is not None else f"did not end within {options.timeout:g} s"
        finally:
            process.kill()
            code = process.wait()
        errors.seek(0)
        said = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    if code == 2 and not has:
        raise CommandError(said or "it failed")
    is_odd = bool(how) or code != 0 or not is_whole
    if is_odd:
        found(at or options.what, WRONG, how or f"the process that checked it ended by {_how(code)}{f': {said}' if said else ''}")
    checked = counts[OK] + counts[WRONG]
    left = has - checked + (is_odd and not at)  # that line was of no check
    text = f"{counts[WRONG]} of {checked} wrong" if counts[WRONG] else f"all {checked} right"
    not_made = f"; not made: {left} of {has} checks" if left else "" if has else "; no check was made"
    print(f"{options.what}: {text}{not_made}")
    return int(counts[WRONG] > 0)


def _marked(process: subprocess.Popen, seconds: float) -> Iterator[list[str]]:
    """Yield what the process says as it comes. Raises TimeoutError if nothing comes for so long."""
    lines: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))
            until = time.monotonic() + seconds


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"
