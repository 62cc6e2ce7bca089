"""``python perf/cuda_check.py``: run the tests of launches on a GPU, and write what they found into ``perf/results/``.

All of ``tests/cuda`` and ``tests/programs/test_kernels_gpu.py``: what is compared with the driver stub elsewhere, against the
real driver, and what needs a device. Each file in a process of its own, one for each CPU at a time, so that a kernel which breaks
the context, or a crash, costs that file alone. ``--stub`` runs them where there is no GPU, against the tests' driver stub.
"""

import argparse
import collections
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_STARTED = time.monotonic()  # --minutes counts from here: what is imported below takes some of them
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))  # the checkout that this file stands in

import cuda_launches  # noqa: E402
import cuda_places  # noqa: E402

FILES = [*sorted((ROOT / "tests" / "cuda").glob("test_*.py")), ROOT / "tests" / "programs" / "test_kernels_gpu.py"]
SIDE_BY_SIDE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_LIMIT = 1800  # seconds for a file
_NO_TESTS = 5  # pytest's exit code when none was selected


def _found(report: Path) -> dict[str, Any]:
    """What pytest's report in JUnit's format says."""
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    failures, noted = [], {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        bad = [each for each in case if each.tag in ("failure", "error")]
        skipped = case.find("skipped")
        counts["failed" if bad else "passed" if skipped is None else "skipped"] += 1
        if skipped is not None:
            reasons[skipped.get("message", "")] += 1
        failures += [{"test": name, "why": each.get("message", ""), "details": (each.text or "")[-4000:]} for each in bad]
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        if properties:
            noted[name] = properties
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "why_skipped": dict(reasons), "noted": noted, "failures": failures,
    }  # fmt: skip


def run_file(path: Path, expression: str, limit: float = _LIMIT) -> dict[str, Any]:
    """Run the tests of a file, those that ``-k`` selects, for at most `limit` seconds.

    "outcome" is "passed", "FAILED", "crashed", "hung", "skipped" (all of them) or "none selected".
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", f"--junitxml={report}", "-k", expression, str(path)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired as error:  # a kernel that never ends
            seconds, output = round(time.perf_counter() - start, 1), (error.stdout or b"").decode(errors="replace")[-4000:]
            return {"file": path.relative_to(ROOT).as_posix(), "outcome": "hung", "seconds": seconds, "output": output}
        outcome = {0: "passed", 1: "FAILED", _NO_TESTS: "none selected"}.get(done.returncode, "crashed")
        found = _found(report) if report.exists() else {}
    if outcome == "passed" and not found.get("passed"):
        outcome = "skipped"
    if outcome == "crashed" or not found:
        found |= {"exit_code": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}
        outcome = "crashed"
    seconds = round(time.perf_counter() - start, 1)
    return {"file": path.relative_to(ROOT).as_posix(), "outcome": outcome, "seconds": seconds, **found}


def _lines(row: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{row[each]} {each}" for each in ("passed", "failed", "skipped") if row.get(each))
    lines = [f"{row['file']:<40} {row['outcome']:<14} {row['seconds']:7.1f} s  {counts}"]
    lines += [f"    {count} skipped: {reason}" for reason, count in row.get("why_skipped", {}).items()]
    lines += [f"    {name}: {', '.join(f'{k} {v}' for k, v in noted.items())}" for name, noted in row.get("noted", {}).items()]
    lines += [f"    FAILED {each['test']}: {each['why']}" for each in row.get("failures", [])]
    return lines + ([row["output"]] if "output" in row else [])


def results_of(path: Path | None, machine: dict[str, Any], expression: str) -> list[dict[str, Any]]:
    """The files' results that an earlier call, with ``--minutes``, has left. Raises SystemExit for those of another run."""
    if path is None or not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if (document["machine"]["device"], document["expression"]) != (machine["device"], expression):
        raise SystemExit(f"{path} is of another device, or of other tests: name another with --json.")
    return document["files"]


def run_files(files: list[Path], rows: list[dict[str, Any]], expression: str, minutes: float, done) -> bool:
    """Add to `rows` the results of the files that are not among them, and call `done` after each. Whether none is left.

    The files run side by side, one for each CPU. A file that the time, `minutes` since the process began, did not suffice for is
    "unfinished": the next call begins with it. If it does not end then, with more time, it is hung; else no call would come past
    it.
    """
    before = {row["file"]: row for row in rows}
    names = {file.relative_to(ROOT).as_posix(): file for file in files}
    left = [name for name in names if name not in before or before[name]["outcome"] == "unfinished"]
    left.sort(key=lambda name: name not in before)  # what is unfinished comes first

    def run(name: str) -> dict[str, Any] | None:
        limit = min(_LIMIT, 60 * minutes - (time.monotonic() - _STARTED))
        if limit <= 0:
            return None
        row, known = run_file(names[name], expression, limit), before.get(name)
        if row["outcome"] == "hung" and limit < _LIMIT and (known is None or limit <= known["limit"]):
            row |= {"outcome": "unfinished", "limit": max(limit, known["limit"] if known else 0)}
        return row

    is_complete = True
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            for future in as_completed([pool.submit(run, name) for name in left]):
                row = future.result()
                is_complete = is_complete and row is not None and row["outcome"] != "unfinished"
                if row is not None:
                    rows[:] = [*(each for each in rows if each["file"] != row["file"]), row]
                    done(row)
        except BaseException:  # Ctrl-C: the files that have not begun are not run
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return is_complete


def _unfinished(rows: list[dict[str, Any]]) -> int:
    return sum(row["outcome"] == "unfinished" for row in rows)


def main() -> int:
    """Run the tests. The exit code is 1 when one has failed, 3 when the time was over before all had been run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stub", action="store_true", help="run where there is no GPU, too: against the driver stub")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these tests, as pytest's -k has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write; on a GPU perf/results/DATE-cuda-check.json")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="end in time; the next call goes on from what this one wrote"
    )
    options = parser.parse_args()
    place = cuda_places.place()
    if not place.is_gpu and not options.stub:
        raise SystemExit("There is no GPU here: nothing would be proved. --stub runs what needs none.")
    if importlib.util.find_spec("pytest") is None:
        raise SystemExit("The tests need pytest and more: pip install '.[test]'")
    machine = cuda_launches.described(place)
    path = options.json
    if path is None and options.minutes < math.inf and not place.is_gpu:
        parser.error("--minutes needs --json FILE, from which the next call goes on")
    if path is None and place.is_gpu:
        path = ROOT / "perf" / "results" / f"{datetime.now(timezone.utc):%Y-%m-%d}-cuda-check.json"
    rows = results_of(path, machine, options.k) if options.minutes < math.inf else []
    if rows:
        print(f"{len(rows) - _unfinished(rows)} of {len(FILES)} files have been run, says {path}")

    def write(row):
        print("\n".join(_lines(row)), flush=True)
        if path is not None:  # after each file, should the machine not last until the end
            document = {"machine": machine, "expression": options.k, "files": rows}
            part = path.with_name(path.name + ".part")  # a call that is killed leaves what the one before has written
            part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)

    is_complete = run_files(FILES, rows, options.k, options.minutes, write)
    if not is_complete:
        print(f"{len(FILES) - len(rows) + _unfinished(rows)} files are left: the same command goes on, with {path} where it is.")
        return 3
    if path is not None:
        print(f"written to {path}")
    if not any(row.get("passed") for row in rows):
        print("Nothing was run, so nothing is proved.")
        return 1
    return int(any(row["outcome"] not in ("passed", "skipped", "none selected") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
