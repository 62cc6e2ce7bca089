"""``python perf/libraries.py``: libraries that use Numba, as they are and accelerated: their own tests, a call, their import.

``library_list.py`` says which. Each is installed by pip into an environment that this command makes; what is compared is the
same in both ways but for ``fastexchange.accelerate()``. The README in this folder says what is run and how it is timed.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

from library_list import LIBRARIES, Library

from fastexchange.measuring import files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WAYS = ("plain", "accelerated")
_BASICS = ("numba", "numpy", "cffi", "scipy", "pytest", "pytest-timeout")


# ---- the environment -----------------------------------------------------------------------------------------------------


class Place:
    """A folder with a virtual environment, the libraries' sources, their caches and reports."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "environment" / "bin" / "python"
        self.sources = folder / "sources"
        folder.mkdir(parents=True, exist_ok=True)
        self.sources.mkdir(exist_ok=True)

    def run(self, arguments: list[str], seconds: float, way: str = "plain", cwd: Path | None = None) -> tuple[int, str]:
        """The exit code and the output of its Python, 124 if it took longer. Each way has a disk cache of its own.

        Bytecode is written, as it is for whoever does not forbid it: else every process would compile all sources.
        """
        variables = {**os.environ, "NUMBA_CACHE_DIR": str(self.folder / f"cache-{way}")}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables.pop("PYTHONPATH", None)
        command = [str(self.python), *arguments]
        try:
            done = subprocess.run(
                command, cwd=cwd or self.sources, env=variables, timeout=seconds, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"took more than {seconds:.0f} s"
        return done.returncode, done.stdout

    def make(self) -> None:
        """Make the environment, with this checkout's package."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.python.parents[1])], check=True)
        self.pip(*_BASICS)
        self.pip("-e", str(ROOT))

    def pip(self, *names: str) -> None:
        """Install these, in the versions that ``constraints.txt`` has of them. Raises RuntimeError if it cannot be done."""
        code, text = self.run(["-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *names], 900)
        if code:
            raise RuntimeError(f"pip install {' '.join(names)}: {text.strip().splitlines()[-1]}")

    def install(self, library: Library) -> Path:
        """Install a library and what its tests want. Where these are run from."""
        self.pip(library.name, *library.needs)
        if not library.has_source:
            return HERE if library.tests[0].endswith(".py") else self.sources
        version = self.version(library)
        folder = self.sources / library.name
        if not folder.exists():
            with tempfile.TemporaryDirectory() as directory:
                fetch = ["-m", "pip", "download", "-q", "--no-binary", library.name, "--no-deps", "-d", directory]
                code, text = self.run([*fetch, f"{library.name}=={version}"], 600)
                if code:
                    raise RuntimeError(f"{library.name}: no source distribution: {text.strip().splitlines()[-1]}")
                (archive,) = Path(directory).glob("*.tar.gz")
                with tarfile.open(archive) as packed:
                    packed.extractall(directory, filter="data")
                (made,) = (path for path in Path(directory).iterdir() if path.is_dir())
                for own in (library.package, f"src/{library.package}"):  # it is the installed one that is tested
                    if (made / own / "__init__.py").exists() and not (made / own / "tests").exists():
                        (made / own).rename(made / f"{library.package}-not-imported")
                os.replace(made, folder)
        return folder

    def machine(self) -> dict:
        """The machine, and the versions that the environment has of the packages."""
        code = "import json; from fastexchange.measuring import files; print(json.dumps(files.machine()))"
        return json.loads(self.run(["-c", code], 60)[1].strip().splitlines()[-1])

    def version(self, library: Library) -> str:
        """The version that is installed."""
        code = f"import importlib.metadata; print(importlib.metadata.version({library.name!r}))"
        return self.run(["-c", code], 60)[1].strip()


# ---- tests ---------------------------------------------------------------------------------------------------------------


def outcomes(report: Path) -> dict[str, str]:
    """Of each test in a report of pytest's: ``passed``, ``failed`` or ``skipped``. What is expected to fail counts as passed."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag: child.get("type", "") for child in case}
        outcome = "passed"
        if "failure" in kinds or "error" in kinds:
            outcome = "failed"
        elif "skipped" in kinds and kinds["skipped"] != "pytest.xfail":
            outcome = "skipped"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def run_tests(place: Place, library: Library, cwd: Path, way: str, seconds: float) -> dict:
    """Run the library's tests in one way."""
    report = place.folder / f"{library.name}-{way}.xml"
    report.unlink(missing_ok=True)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}", "--timeout=300"]
    if way == "accelerated":
        pytest = ["-m", "fastexchange", "run", *pytest]
    start = time.perf_counter()
    code, text = place.run([*pytest, *library.options, *library.tests], seconds, way, cwd)
    (place.folder / f"{library.name}-{way}.log").write_text(text, encoding="utf-8")
    found = {"exit_code": code, "seconds": round(time.perf_counter() - start, 1), "outcomes": {}}
    if report.exists():
        found["outcomes"] = outcomes(report)
    else:
        found["why"] = text.strip().splitlines()[-1]
    return found


def tests(place: Place, library: Library, cwd: Path, seconds: float) -> dict:
    """Run the library's tests in both ways."""
    both = {}
    for way in WAYS:
        both[way] = run_tests(place, library, cwd, way, seconds)
        if both[way]["exit_code"] == 124:
            raise RuntimeError(f"tests, {way}, took more than {seconds:.0f} s")
    plain, accelerated = (both[way].pop("outcomes") for way in WAYS)
    for way, each in zip(WAYS, (plain, accelerated), strict=True):
        both[way] |= {kind: sum(outcome == kind for outcome in each.values()) for kind in ("passed", "failed", "skipped")}
    both["differ"] = {
        name: [plain.get(name), accelerated.get(name)]
        for name in sorted({*plain, *accelerated})
        if plain.get(name) != accelerated.get(name)
    }
    both["fail in both"] = sorted(name for name in plain if plain[name] == accelerated.get(name) == "failed")
    return both


# ---- times ---------------------------------------------------------------------------------------------------------------

_BEGIN = {  # the first dispatcher of a process loads much of Numba
    "plain": "import numba; numba.njit(lambda: None)",
    "accelerated": "import numba; numba.njit(lambda: None); import fastexchange; fastexchange.accelerate()",
}
_FROM_THE_START = """\
from time import perf_counter_ns as clock
start = clock()
{begin}
import {module}
print(clock() - start)
"""
_IMPORT = """\
{begin}
from time import perf_counter_ns as clock
start = clock()
import {module}
print(clock() - start)
"""
_CALL = """\
import os
os.environ["NUMBA_NUM_THREADS"] = "1"  # two would wait for one another where the machine has other work
{begin}
import timeit, warnings
import numpy
import {module}
warnings.simplefilter("ignore")
{prepare}
for _ in range(4):  # compiles it, and makes its cache entry
    result = {call}
timer = timeit.Timer({call!r}, globals=globals())
number, _ = timer.autorange()
number = max(1, number // 4)
print(min(timer.repeat(25, number)) / number * 1e9)
"""


def timed(place: Place, code: str, names: dict[str, str], turns: int, seconds: float) -> dict[str, list[float]]:
    """What the code prints in each way, in processes that take turns; the first of each way fills caches."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, turns):
        for way in WAYS if turn % 2 else reversed(WAYS):
            exit_code, text = place.run(["-c", code.format(begin=_BEGIN[way], **names)], seconds, way)
            if exit_code:
                raise RuntimeError(f"{way}: {(text.strip() or 'no output').splitlines()[-1]}")
            if turn >= 0:
                times[way].append(float(text.split()[-1]))
    return times


def ratio(times: dict[str, list[float]], upper: str = "plain") -> float:
    """The ratio of the two ways' minima, `upper` above."""
    plain, accelerated = (min(times[way]) for way in WAYS)
    return plain / accelerated if upper == "plain" else accelerated / plain


def two_hundred(place: Place, cached: bool, turns: int) -> dict[str, list[float]]:
    """Nanoseconds to import a package with 200 jitted functions."""
    name = "two_hundred_cached" if cached else "two_hundred"
    package = place.sources / name
    package.mkdir(exist_ok=True)
    decorator = "@njit(cache=True)" if cached else "@njit"
    functions = [f"{decorator}\ndef f{i}(x, y):\n    return x + {i} * y\n" for i in range(200)]
    (package / "__init__.py").write_text("\n\n".join(["from numba import njit\n", *functions]), encoding="utf-8")
    return timed(place, _IMPORT, {"module": name}, turns, 120)


_THREE_ARRAYS = """\
import sys
sys.path.insert(0, {root!r})
import numpy, numba, fastexchange
from fastexchange.measuring.timing import Statement, time_statements
def function(x, y, z):
    pass
plain = numba.njit(function)
fastexchange.accelerate()
accelerated = numba.njit(function)
names = dict(zip("xyz", numpy.ones((3, 128))))
both = {{"plain": plain, "accelerated": accelerated}}
for kernel in both.values():
    for _ in range(4):
        kernel(**names)
        kernel(*names.values())
times, _ = time_statements({{way: Statement("f(x, y, z)", dict(names, f=f)) for way, f in both.items()}}, rounds=21)
print(*(times[way].median for way in both))
"""


def accelerating(place: Place, turns: int) -> list[float]:
    """Nanoseconds to import this package, and to call ``accelerate()``, after Numba."""
    clock = "from time import perf_counter_ns as clock; start = clock()"
    code = f"{_BEGIN['plain']}; {clock}; import fastexchange; fastexchange.accelerate(); print(clock() - start)"
    return [float(place.run(["-c", code], 60)[1].split()[-1]) for _ in range(turns)]


def three_arrays(place: Place) -> dict[str, list[float]]:
    """Nanoseconds of a call with three NumPy arrays, the loop around it subtracted."""
    code, text = place.run(["-c", _THREE_ARRAYS.format(root=str(ROOT))], 300)
    if code:
        raise RuntimeError(text.strip().splitlines()[-1])
    return dict(zip(WAYS, ([float(value)] for value in text.split()[-2:]), strict=True))


# ---- the command ---------------------------------------------------------------------------------------------------------


def _shown(nanoseconds: float) -> str:
    """Three digits, in the unit that fits."""
    unit, of = next(((unit, of) for unit, of in (("ns", 1), ("µs", 1e3), ("ms", 1e6)) if nanoseconds < 999.5 * of), ("s", 1e9))
    return f"{nanoseconds / of:.3g} {unit}"


def _tests_cell(found: dict) -> str:
    if "why" in found:
        return f"not run: {found['why']}"
    return f"{found['passed']} / {found['failed']}"


def markdown(document: dict) -> str:
    """The tables of a run."""
    lines = [
        "| library | its tests | plain: passed / failed | accelerated: passed / failed | a call | plain | accelerated "
        "| faster | import: accelerated / plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["libraries"]:
        cells = [f"{row['name']} {row['version']}", row["which"]]
        cells += [_tests_cell(row["tests"][way]) for way in WAYS] if "tests" in row else ["-", "-"]
        cells.append(f"`{row['code']}`")
        if "call_ns" in row:
            cells += [_shown(min(row["call_ns"][way])) for way in WAYS] + [f"{ratio(row['call_ns']):.2f} x"]
        else:
            cells += ["-", "-", "-"]
        cells.append(_import_cell(row["import_ns"]) if "import_ns" in row else "-")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| target | plain | accelerated | must be | measured | met? |", "|---|---|---|---|---|---|"]
    for target in document["targets"]:
        lines.append(
            f"| {target['what']} | {_shown(min(target['ns']['plain']))} | {_shown(min(target['ns']['accelerated']))} | "
            f"{target['must_be']} | {target['ratio']:.2f} x | {'yes' if target['met'] else 'MISSED'} |"
        )
    if "accelerating_ns" in document:
        least = _shown(min(document["accelerating_ns"]))
        lines += ["", f"`import fastexchange` and `accelerate()` themselves, once in a process that has imported Numba: {least}."]
    return "\n".join(lines)


def _import_cell(times: dict[str, list[float]]) -> str:
    return f"{_shown(min(times['accelerated']))} / {_shown(min(times['plain']))} = {ratio(times, 'accelerated'):.2f} x"


def _targets(place: Place, turns: int) -> list[dict]:
    found = []
    for cached in (False, True):
        times = two_hundred(place, cached, turns)
        what = f"import of a package with 200 functions, `@njit{'(cache=True)' if cached else ''}`"
        measured = ratio(times, "accelerated")
        found.append({"what": what, "must_be": "≤ 1.1 x plain", "ns": times, "ratio": measured, "met": measured <= 1.1})
    times = three_arrays(place)
    measured = ratio(times)
    what = "a call with 3 NumPy arrays"
    return [*found, {"what": what, "must_be": "≥ 7 x faster", "ns": times, "ratio": measured, "met": measured >= 7}]


def _measure(place: Place, library: Library, options: argparse.Namespace) -> dict:
    row: dict = {"name": library.name, "which": library.which, "code": library.call, "prepare": library.prepare}
    cwd = place.install(library)
    row["version"] = place.version(library)
    if "tests" in options.only:
        row["tests"] = tests(place, library, cwd, 60 * options.minutes)
    if "import" in options.only:
        row["import_ns"] = timed(place, _FROM_THE_START, {"module": library.imported or library.package}, options.turns, 300)
    if "call" in options.only:
        names = {"module": library.package, "prepare": library.prepare, "call": library.call}
        row["call_ns"] = timed(place, _CALL, names, options.turns, 300)
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LIBRARY", help="these alone; without any, all")
    parser.add_argument("--only", action="append", choices=("tests", "call", "import", "targets"), help="may be repeated")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="of a library's tests, in each way (10)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="processes for each time and way (5)")
    parser.add_argument("--folder", type=Path, help="where the environment and the sources are kept, for a next run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write it; perf/results/DATE-libraries.json. What is "
                        "measured now takes the place of what is there of the same library")  # fmt: skip
    options = parser.parse_args()
    if unknown := {*options.names} - {library.name for library in LIBRARIES}:
        parser.error(f"{', '.join(sorted(unknown))}: not in library_list.py")
    options.only = options.only or ["tests", "call", "import", "targets"]
    options.json = options.json or HERE / "results" / f"{datetime.now(timezone.utc):%Y-%m-%d}-libraries.json"
    options.folder = options.folder or Path(tempfile.gettempdir()) / f"fastexchange-libraries-{os.getuid()}"
    return options


def main() -> int:
    """Run it. The exit code is 1 if a test that passes fails when it is accelerated."""
    options = _options()
    place = Place(options.folder)
    place.make()
    document: dict = {"libraries": [], "targets": []}
    if options.json.exists():
        document = json.loads(options.json.read_text(encoding="utf-8"))
    document["machine"] = place.machine()
    for library in LIBRARIES:
        if {*options.only} == {"targets"} or (options.names and library.name not in options.names):
            continue
        print(f"{library.name} …", file=sys.stderr, flush=True)
        old = next((row for row in document["libraries"] if row["name"] == library.name), {})
        try:
            row = {**old, **_measure(place, library, options)}
        except RuntimeError as error:
            print(f"{library.name}: {error}", file=sys.stderr, flush=True)
            continue
        rest = {each["name"]: each for each in document["libraries"] if each["name"] != library.name} | {library.name: row}
        document["libraries"] = [rest[each.name] for each in LIBRARIES if each.name in rest]
        _write(options.json, document)
    if "targets" in options.only and not options.names:
        document["targets"] = _targets(place, 2 * options.turns)
        document["accelerating_ns"] = accelerating(place, 2 * options.turns)
        _write(options.json, document)
    print(files.headline(document["machine"]))
    print(markdown(document))
    worse = [
        f"{row['name']}: {name}"
        for row in document["libraries"]
        for name, (plain, accelerated) in row.get("tests", {}).get("differ", {}).items()
        if plain == "passed" and accelerated == "failed"
    ]
    for line in worse:
        print(f"passes, but fails when accelerated: {line}")
    return int(bool(worse))


def _write(path: Path, document: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
