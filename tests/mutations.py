"""How many faults the tests catch: ``python tests/mutations.py`` changes random lines of the package, one at a time.

For each change it runs tests, in a copy of the checkout, until one fails: at most `MOST_TESTS` of those that run the line, as a
first run of all tests has written down (``--covered FILE``: kept there, or read from there); then those that CONTRIBUTING names
for the file, since nothing is written down of lines that Numba compiles, and of forked processes. A test that fails without the
change, too, is left out. Prints two lines a change, and the sums at the end. ``--seed`` says which lines, so that two versions of
the tests are compared over the same changes. Needs pytest-cov, and an environment in which the package is not installed. It takes
hours.
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fastexchange"
MOST_TESTS = 300
SWAPPED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def changed(node: ast.AST) -> ast.AST | None:
    """A node with one fault; None where none is made."""
    new: ast.AST = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            new.ops = [SWAPPED[type(op)]()]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            new.op = SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Return(value=ast.AST()):
            new.value = None
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Raise() | ast.Delete():
            return ast.Pass()
        case _:
            return None
    return new


def changes(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, what stands there, what is put there) of each change of one line inside of the functions of a file."""
    source = path.read_text()
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes = [each for statement in function.body for each in ast.walk(statement)]
            hints = [getattr(each, name, None) for each in nodes for name in ("annotation", "returns")]
            never_run = {id(each) for hint in hints if hint is not None for each in ast.walk(hint)}
            for node in (each for each in nodes if id(each) not in never_run):
                if (line := getattr(node, "lineno", 0)) and line == node.end_lineno and (new := changed(node)) is not None:
                    start, end = node.col_offset, node.end_col_offset
                    text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
                    given = lines[line - 1].encode()
                    yield line, lines[line - 1], (given[:start] + text.encode() + given[end:]).decode()


def chosen(count: int, seed: int) -> list[tuple[str, int, str, str]]:
    """Random lines of the package, each with one random change that compiles."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_abi.py"]
    at: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for path in files:
        for line, old, new in changes(path):
            at.setdefault((str(path.relative_to(ROOT)), line), set()).add((old, new))
    pick = random.Random(seed)
    return [(*place, *pick.choice(sorted(at[place]))) for place in pick.sample(sorted(at), count)]


def run_tests(checkout: Path, *options: str, seconds: float | None = None) -> tuple[int, list[str]]:
    """Run pytest in a copy of the checkout. Returns its exit code, and the tests that failed, or files that could not be read."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": ""}
    shutil.rmtree(checkout / ".pytest_cache", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=seconds)
    noted = checkout / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return done.returncode, list(json.loads(noted.read_text())) if noted.exists() else []


def cover(checkout: Path, file: Path) -> None:
    """Write down which tests run which line. It runs all of them, slower than usual."""
    run_tests(checkout, "--cov=fastexchange", "--cov-context=test", "--cov-report=", "-n", "auto")
    shutil.copy(checkout / ".coverage", file)


def tests_of(covered: Path, name: str, line: int) -> list[str]:
    """The tests that run a line, in random order, but always the same; none if that is not known, or they are all tests."""
    import coverage

    data = coverage.CoverageData(str(covered))
    data.read()
    file = next((each for each in data.measured_files() if each.endswith(f"/{name}")), None)
    contexts = data.contexts_by_lineno(file).get(line, []) if file is not None else []
    if "" in contexts:  # while modules are imported, too
        return []
    found = sorted({context.rpartition("|")[0] for context in contexts})
    random.Random(line).shuffle(found)
    return found[:MOST_TESTS]


def folders_to_test(name: str) -> list[str]:
    """The tests that CONTRIBUTING names for changes of a file of the package, by its name there; none if no row has it."""
    rows = re.findall(r"^\| (`.*?`) \| `(tests/.*?)` \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    named = {place: tests.split() for places, tests in rows for place in re.findall("`(.*?)`", places)}
    fits = [place for place in named if name == place or (place.endswith("/") and name.startswith(place))]
    return named[max(fits, key=len)] if fits else []


CAUGHT, MISSED, UNDECIDED = "caught", "NOT CAUGHT", "undecided"


def is_caught(checkout: Path, covered: Path, name: str, line: int, new: str, seconds: int) -> tuple[str, str]:
    """Whether a test fails with a change: CAUGHT and which, MISSED, or UNDECIDED: not ended, or they fail without it."""
    path = checkout / name
    source = path.read_text()
    lines = source.splitlines()
    lines[line - 1] = new
    name_there = str(Path(name).relative_to(PACKAGE.name))
    left_out: list[str] = []
    try:
        for tests in filter(None, (tests_of(covered, name, line), folders_to_test(name_there))):
            while True:
                path.write_text("\n".join(lines) + "\n")
                code, failed = run_tests(checkout, "-x", "-n0", *left_out, *tests, seconds=seconds)
                if code in (0, 5):
                    break
                path.write_text(source)
                unchanged, _ = run_tests(checkout, "-x", "-n0", *(failed or [*left_out, *tests]), seconds=seconds)
                if unchanged in (0, 5):
                    return CAUGHT, ", ".join(failed) or f"exit code {code}"
                if not failed or failed[0] in left_out:
                    return UNDECIDED, f"without the change, too, pytest ends with {unchanged}: {failed}"
                left_out += ["--deselect", failed[0]]
    except subprocess.TimeoutExpired:
        return UNDECIDED, f"not ended after {seconds} s"
    finally:
        path.write_text(source)
    return MISSED, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out N changes, which have been tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--covered", type=Path, metavar="FILE", help="which tests run which lines")
    parser.add_argument("--seconds", type=int, default=1800, help="for each run of tests")
    given = parser.parse_args()
    free: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for i in range(given.jobs):
            shutil.copytree(ROOT, Path(folder, str(i)), ignore=shutil.ignore_patterns(".git", ".venv*"))
            free.put(Path(folder, str(i)))

        covered = given.covered or Path(folder, "covered")
        if not covered.exists():
            cover(Path(folder, "0"), covered)

        def try_one(place: tuple[str, int, str, str]) -> str:
            name, line, old, new = place
            checkout, began = free.get(), time.monotonic()
            end, why = is_caught(checkout, covered, name, line, new, given.seconds)
            free.put(checkout)
            took = f"({time.monotonic() - began:.0f} s)"
            print(f"{name}:{line}: {old.strip()}  ->  {new.strip()}\n   ", end, why, took, flush=True)
            return end

        ends = collections.Counter(pool.map(try_one, chosen(given.count, given.seed)[given.first :]))
    print(", ".join(f"{ends[end]} {end}" for end in (CAUGHT, MISSED, UNDECIDED)))


if __name__ == "__main__":
    main()
