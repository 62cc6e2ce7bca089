"""``perf/``: the README's tables and plot are those of the runs that they name; what is made of samples; rows; launches."""

import array
import base64
import hashlib
import importlib.util
import itertools
import json
import math
import runpy
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import cuda_stub
import numpy as np
import pytest
from interpreter import run_python

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples

PERF = Path(__file__).resolve().parents[2] / "perf"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="perf/floor.c needs a C compiler")


def scattered(median: float, spread: float = 1.0) -> Samples:
    return Samples(median + spread * np.linspace(-1, 1, 5))


# ---- what the repository shows ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", ["table", "cuda_table", "gpu_kernels_table"])
def test_the_tables_in_a_readme_are_those_of_the_run_it_names(perf, program):
    table = perf(program)
    text = table.README.read_text(encoding="utf-8")
    file = table.file_in(text)
    assert file.parent == PERF / "results"
    shown = text.split(table.BEGIN)[1].split(table.END)[0]
    assert table.table(file) == shown, f"python perf/{program}.py {file.relative_to(PERF.parent)} --write"


def test_the_plot_is_that_of_the_same_run(perf, tmp_path):
    table, shown = perf("table"), PERF / "results" / "overhead.svg"
    file = table.file_in(table.README.read_text(encoding="utf-8"))
    text = shown.read_text(encoding="utf-8")
    assert f"<dc:title>Overhead by number of arguments: {file.name}</dc:title>" in text
    installed = pytest.importorskip("matplotlib", reason="the title was looked at; it is not installed").__version__
    if f"Matplotlib v{installed}," not in text:
        pytest.skip(f"the title was looked at; it was drawn by another matplotlib than {installed}")
    perf("plot").draw(file, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text, f"python perf/plot.py {file} -o {shown}"


def test_the_chart_is_that_of_the_same_run(perf):
    table, bars = perf("table"), perf("bars")
    file = table.file_in(table.README.read_text(encoding="utf-8"))
    assert bars.chart(file) == bars.CHART.read_text(encoding="utf-8"), f"python perf/bars.py {file}"


# ---- what is made of samples -----------------------------------------------------------------------------------------
def test_a_run_is_written_and_read_back(perf, tmp_path):
    report, file = perf("report"), tmp_path / "new" / "run.json"
    times = {"numpy/3/fast": Samples(np.array([19.0, 20, 21])), "memory/kernels/fast": scattered(800_000)}
    report.write_json(file, {"cpu": "none"}, 3, [], {"memory/kernels/fast": "a kernel"}, times, [], {"calls": 1.5})
    call, memory = json.loads(file.read_text())["results"]
    assert call == {"key": "numpy/3/fast", "median_ns": 20, "iqr_ns": 1, "samples_ns": [19, 20, 21]}
    assert memory["median_bytes"] == 800_000 and memory["label"] == "a kernel" and "median_ns" not in memory
    machine, again = report.read_json(file)
    assert machine == {"cpu": "none"} and list(again) == list(times)
    assert all((again[key].values == times[key].values).all() for key in times)


def test_the_table_of_kernels_for_a_gpu(perf, tmp_path):
    table, file, results = perf("gpu_kernels_table"), tmp_path / "run.json", []
    for who, median in {"theirs": 2e6, "numba-cuda": 1e6, "numba-cuda-mlir": 4e6}.items():
        result = files.result(f"axpy/9/{who}", scattered(median), "torch.add" if who == "theirs" else who)
        results.append(result | {"kernel": "axpy", "data": "9", "who": who, "bytes": 3_000_000_000})
    files.write(file, files.machine() | {"date": "2030-01-02", "device": {"name": "a GPU", "driver": 13000}}, 3, results)
    head, *_, row = table.table(file).splitlines()
    assert "a GPU" in head and "2030-01-02" in head and "[run.json](results/run.json)" in head
    assert row == "| axpy | 9 | torch.add | 1.50 | 3.00 (2.0 x) | 0.75 (0.50 x) |"


def test_the_table_has_ratios_of_its_run_and_leaves_out_what_was_not_measured(perf, monkeypatch, tmp_path):
    table = perf("table")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "README", tmp_path / "docs" / "how-to" / "measuring.md")
    times = {"numpy/3/fast": 20, "numpy/3/c": 15, "numpy/3/njit": 180, "numpy/3/empty": 8, "bound/1": 10}
    file = tmp_path / "run.json"
    results = [files.result(key, scattered(median)) for key, median in times.items()]
    files.write(file, files.machine() | {"date": "2030-01-02"}, 3, results)
    made = table.table(file)
    head, _, *lines = [line for line in made.splitlines() if line.startswith("|")]
    assert head == "| call | fastexchange | hand-written C | Numba's dispatcher | other |"
    assert lines == ["| 3 NumPy arrays | 20.0 ns | 15.0 ns (0.75 x) | 180 ns (9.0 x) | empty C builtin 8.0 ns (0.40 x) |"]
    assert made.startswith("All rows of one run, [run.json](../../run.json)") and "2030-01-02" in made
    assert table.file_in(f"{table.BEGIN}{made}{table.END}") == file


@pytest.mark.parametrize(("ours", "met"), [(20, True), (40, False)])
def test_a_target_is_met_or_missed_or_not_measured(perf, ours, met):
    times = {"numpy/3/fast": scattered(ours), "numpy/3/empty": scattered(11), "numpy/3/njit": scattered(300)}
    found = {(target.call, target.must_be): target for target in perf("targets").targets(times)}
    assert found["3 NumPy arrays", "≤ 2 x empty C builtin"].met is met
    faster = found["3 NumPy arrays", "≥ 5 x faster than Numba's"]
    assert faster.met is True and faster.measured.startswith(f"{300 / ours:.2f} x faster")
    missing = found["3 torch CPU tensors", "≤ 0.30 x C, exchange table"]
    assert missing.met is None and missing.measured == "not measured"


LOST = "not measurable here (spread "


def test_figures_that_mean_nothing_are_not_shown(perf):
    """In no table, by no target and at no point of a plot."""
    report, row = perf("report"), SimpleNamespace(key="a/fast", label="ours", reference="a/c")
    group = SimpleNamespace(title="t", rows=[SimpleNamespace(key="a/c", label="C", reference=None), row])
    shown = report.group_table(group, {"a/fast": scattered(30, 1), "a/c": scattered(-1, 40)}).splitlines()
    assert LOST in shown[2] and "30.0" in shown[3] and LOST in shown[3]
    assert LOST in report.rows_table("t", {"a": "label"}, {"a": scattered(-1e6, 2e6)}, "ms", 1e6)
    book = perf("book").Book({})
    for samples, bound, unit, met, is_lost in (
        (scattered(2, 5), 4, "ns", None, True), (scattered(-0.1, 0.5), 10, "ns", True, True),
        (scattered(3, 9), 2, "x faster", None, True), (scattered(4, 1), 10, "ns", True, False),
    ):  # fmt: skip
        book.add("", "", lambda times, samples=samples: samples, bound, unit)
        assert (book.targets[-1].met, LOST in book.targets[-1].measured) == (met, is_lost)
    times = {f"numpy/{count}/fast": scattered(10.0 * count) for count in (1, 3, 16, 32)} | {"numpy/58/fast": scattered(9, 90)}
    counts, _ = perf("plot").lines_of(times, "numpy")["fast"]
    assert counts == [1, 3, 16, 32]


def test_a_kernels_ratio_is_judged_by_what_it_must_be(perf):
    table = runpy.run_path(str(PERF / "kernels.py"))["table"]  # `kernels` is the folder's name
    promised = [perf("kernel_row").Row("mul", "", "", None, None, bound) for bound in (1.4, 1.6, None)]
    measured = [(scattered(1000), scattered(1500))] * 3
    _, *lines, without = table(promised, measured).splitlines()
    assert [line.split()[-3:] for line in lines] == [["≥", "1.4", "met"], ["≥", "1.6", "MISSED"]]
    assert not without.split()[-1].isalpha() and "must be" not in table(promised[2:], measured[2:])


# ---- the rows ----------------------------------------------------------------------------------------------------------
@needs_compiler
def test_hand_written_c_refuses_what_it_was_not_written_for(perf):
    limit, only_dunder, x = perf("floor").load(), perf("groups").OnlyDunder, np.ones(1, np.float32)
    assert limit.buffer(array.array("f", [1]), x) is None and limit.dunder(only_dunder(x), x) is None
    references, readonly = sys.getrefcount(x), np.ones(1, np.float32)
    readonly.flags.writeable = False
    bad = 3, np.ones((2, 2), np.float32), np.ones(4, np.float32)[::2]
    for call, others in ((limit.buffer, (array.array("d", [1]), b"abcd")), (limit.dunder, (np.ones(1), readonly))):
        for each in (*bad, *others):
            with pytest.raises((TypeError, BufferError, AttributeError)):
                call(x, each)
    assert sys.getrefcount(x) == references


@pytest.mark.nightly  # the table of the README's first command has most of the rows
@needs_compiler
def test_every_row_runs(perf):
    groups = perf("rows").groups()
    rows = {row.key: row for group in groups for row in group.rows}
    assert len(rows) == sum(len(group.rows) for group in groups)
    for group, row in [(each, row) for each in groups for row in each.rows]:
        assert row.reference in {None, *(each.key for each in group.rows)}, row.key
        exec(row.statement.code, dict(row.statement.names))
    for path in ("numpy", "buffer", "dunder"):
        assert {f"{path}/{count}/{who}" for count in perf("rows_arguments").COUNTS for who in ("c", "fast")} <= set(rows)
    turn = rows["sites/64/turn"].statement.names
    assert turn["f"].counts().compiled == 64 and len(turn["p"].signatures) == 64


@pytest.mark.nightly
def test_every_row_of_16_bits_runs_and_its_sides_agree(perf, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(PERF.parent))
    for row in perf("kernels_half").rows():
        results = row.ours(), row.theirs()
        if all(isinstance(each, torch.Tensor) for each in results):
            torch.testing.assert_close(*results, rtol=0.02, atol=0.05)


FIRST = {f"first/{name}" for name in ("nothing", "kernel", "kernel/elapsed", "imports", "imports/elapsed")}
IMPORTS = {"import/numba", "import/fastexchange", "threads/long/numpy/nogil/2"}


@pytest.mark.nightly
@pytest.mark.parametrize("program, sections, keys", [
    pytest.param("run.py", ["import", "threads"], IMPORTS, marks=needs_compiler),
    ("scale.py", ["first"], FIRST),
])
def test_processes_say_what_they_measured(tmp_path, program, sections, keys):
    """Sections that take some seconds, in a new process, as the command runs them."""
    file, only = tmp_path / "run.json", [word for section in sections for word in ("--only", section)]
    command = [sys.executable, str(PERF / program), "--quick", *only, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert keys <= {row["key"] for row in document["results"]}
    assert all(row["label"] and row["median_ns"] > 0 for row in document["results"])
    if program == "run.py":
        assert set(document["seconds"]) == set(sections) and "not measured" in done.stdout
        assert document["machine"]["packages"]["fastexchange"]
    else:
        first, imports = document["targets"]
        assert first["must_be"].startswith("≤ 30 ms") and imports["met"] is None


# ---- on a GPU machine, against the driver stub: launches, the tests that run there, a machine without a network ----
needs_stub = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or importlib.util.find_spec("numba_cuda") is None,
    reason="launches against the driver stub need Linux, a C compiler and numba-cuda",
)
INSTALLED = [name for name in ("numba-cuda", "numba-cuda-mlir") if importlib.util.find_spec(name.replace("-", "_"))]


def in_a_process(function: str, *arguments, check: bool = True) -> subprocess.CompletedProcess:
    """A function of this file, in a process where nothing of CUDA has been imported: the stub has to be there first."""
    code = f"import sys, test_perf; sys.path.insert(0, {str(PERF)!r}); sys.exit(test_perf.{function}())"
    return run_python(code, *map(str, arguments), check=check, PYTHONWARNINGS="ignore")


# ---- launches ----------------------------------------------------------------------------------------------------------
def launch_the_same():
    """Hand-written C launches what ours does, byte for byte, as the stub recorded it, and refuses what it was not written for."""
    import cuda_places

    place = cuda_places.place(True)
    import cuda_rows

    launches, tensor = 0, place._tensor
    for package in INSTALLED:
        rows = cuda_rows.Rows(package, place)
        tensors = rows.tensors(3)
        cases = {
            "tensors": tensors, "checked": tensors, "axpy": {"a": 2.5, **rows.tensors(2)},
            "scalars": {"a": cuda_rows.np.float32(1.5)},
        }  # fmt: skip
        for signature, values in cases.items():
            plain, kernel = rows.kernel(values)
            ours = rows.launched(kernel[3, 32], values)
            by_hand = rows.by_hand(plain, signature, values, 3, 32)
            tensor.streams[0] = 0x1
            place.stub.clear()
            ours(*values.values())
            by_hand(*values.values())
            tensor.streams[0] = 0
            rows.limit.raw(by_hand, 1, False)
            rows.limit.raw(by_hand, 1, True)
            found = [launch._replace(thread=0) for launch in place.stub.launches]
            assert len(found) == 4 and found[0] == found[1], found
            assert [launch._replace(stream=0) for launch in found[1:]] == [found[0]._replace(stream=0)] * 3, found
            assert found[0].stream == (0 if signature == "scalars" else 1)
            launches += len(found)
        x = rows.tensors(1)["x0"]
        plain, kernel = rows.kernel(["x"])
        rows.launched(kernel[1, 1], {"x": x})
        by_hand = rows.by_hand(plain, "tensors", {"x": x}, 1, 1)
        others = tensor((4,), "float64"), tensor((2, 2)), tensor((4,), strides=(2,)), tensor((4,), device_type=1)
        for bad in (*others, 3, None):
            with pytest.raises((TypeError, AttributeError)):
                by_hand(bad)
        with pytest.raises(TypeError, match="another device"):
            by_hand(x, place.tensor(1))
    assert launches == 16 * len(INSTALLED)


def leave_out():
    """A row that a package cannot launch twice is left out."""
    import cuda_places

    place = cuda_places.place(True)
    import cuda_rows

    def once():
        """What a package can launch, and cannot launch again."""
        answers = Mock(side_effect=[place_interface().__cuda_array_interface__, RuntimeError("dtype is not to be read\nat all")])
        return type("Once", (), {"__cuda_array_interface__": property(lambda self: answers())})()

    rows, place_interface = cuda_rows.Rows(INSTALLED[0], place), place.interface
    usual = rows.arguments("1", "1 tensor", rows.tensors(1))
    assert not rows.left_out
    place.interface = once
    group = rows.arguments("1", "1 tensor", rows.tensors(1))
    assert [row.key for row in usual.rows if row.key not in {each.key for each in group.rows}] == [f"{INSTALLED[0]}/1/interface"]
    (said,) = rows.left_out
    assert "objects with __cuda_array_interface__: the row is left out (RuntimeError: dtype is not to be read)." in said


def launch_operators():
    """What is launched by hand, or the rows are left out."""
    import cuda_places

    place = cuda_places.place(True)
    import cuda_rows

    assert place.torch is not None or place.why_no_torch
    rows = cuda_rows.Rows(INSTALLED[0], place)
    groups = list(rows.operators())
    assert len(groups) == (0 if rows.left_out else 2), rows.left_out
    for row in itertools.chain(*(group.rows for group in groups)):
        for _ in range(4):  # the last launches have found all that the first had to make
            place.stub.clear()
            exec(row.statement.code, dict(row.statement.names))
        threads = [launch.grid[0] * launch.block[0] for launch in place.stub.launches]
        assert len(threads) == (2 if "gradient" in row.key else 1) and min(threads) >= cuda_rows.SIZE, (row.key, threads)


@pytest.mark.nightly
@needs_stub
@pytest.mark.parametrize("function", [launch_the_same, leave_out, launch_operators])
def test_rows_that_launch_by_hand(function):
    in_a_process(function.__name__)


def measure_without_torch():
    """``cuda_launches.py`` on a machine whose driver is the stub."""
    import cuda_places

    cuda_places.Stub().stub.set_fast(False)
    cuda_places.cuda_stub.real_driver = lambda: True
    import cuda_launches

    return cuda_launches.main()


@pytest.mark.nightly
@needs_stub
def test_launches_are_measured_in_parts(perf, monkeypatch, tmp_path):
    """All rows, without PyTorch: tensors of the driver's memory. A package that has been measured is not measured again."""
    file = tmp_path / "run.json"

    def call(minutes, code=0):
        options = ("--no-torch", "--rounds", 1, "--json", file, "--minutes", minutes)
        done = in_a_process("measure_without_torch", *options, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    assert "too few" in call(0.0001, code=3).stdout and not file.exists()
    said = call(20).stdout
    assert "their rows need PyTorch" in said and (len(INSTALLED) == 2 or "is not installed" in said)
    document = json.loads(file.read_text())
    rows, device = document["results"], document["machine"]["device"]
    assert device["torch_cuda"] is None and device["capability"] and device["memory"] > 0
    assert all(row["label"] and (row["median_ns"] > 0 or row["key"].endswith("/loop")) for row in rows)
    cases = "1", "3", "26", "axpy", "none", "array/16", "scalar/256"
    who = "fast", "c", "raw", "released", "device"
    for package in INSTALLED:
        assert {f"{package}/{'/'.join(key)}" for key in itertools.product(cases, who)} <= {row["key"] for row in rows}
        named = [target for target in document["targets"] if target["call"].startswith(package + ":")]
        assert len(named) >= 3 and all(target["met"] is not None for target in named)
    table = perf("cuda_table")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    assert "| 26 tensors |" in table.table(file)
    document["results"] = [row for row in rows if row["key"].startswith(INSTALLED[0] + "/")]  # as a call that ended after it
    file.write_text(json.dumps(document))
    assert f"{INSTALLED[0]} has been measured" in call(20).stdout
    results = json.loads(file.read_text())["results"]
    assert all(row in results for row in document["results"]) and {row["key"] for row in results} == {row["key"] for row in rows}
    assert "Nothing is left" in call(20).stdout
    document["machine"]["device"]["name"] = "another"
    file.write_text(json.dumps(document))
    assert "of another device" in call(20, code=1).stderr


def measure_numba_cuda_alone():
    """``numba_cuda_launches.py`` against the stub, so without PyTorch's tensors."""
    import cuda_places

    cuda_places.Stub().stub.set_fast(False)
    import numba_cuda_launches

    return numba_cuda_launches.main()


@pytest.mark.nightly
@needs_stub
def test_numba_cuda_is_measured_alone():
    said, table, _ = in_a_process("measure_numba_cuda_alone", "--rounds", 2).stdout.rsplit("\n\n", 2)
    assert "numba-cuda " in said and "each further device array costs" in said and "the most is spent in `" in said
    heads, _, *lines = table.splitlines()
    assert {line.count("|") for line in (heads, *lines)} == {6} and "PyTorch" not in table
    assert [line.split("|")[1].strip() for line in lines] == [
        "cuLaunchKernel, through ctypes", "device arrays, signature declared", "device arrays",
        "objects with `__cuda_array_interface__`",
    ]  # fmt: skip


@pytest.mark.parametrize("program", ["cuda_launches", "cuda_check"])
def test_without_cuda_bindings_there_is_one_line(perf, monkeypatch, program):
    module = perf(program)
    monkeypatch.setattr(perf("cuda_places"), "_has_bindings", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--stub"])
    with pytest.raises(SystemExit, match=r"^Launches need cuda-bindings, which is not installed: pip install [^\n]+$"):
        module.main()


# ---- the tests that run there ------------------------------------------------------------------------------------------
@pytest.fixture
def check(perf, monkeypatch, tmp_path):
    """``cuda_check``, with the files of `tmp_path` for tests, on a machine without a device."""
    check = perf("cuda_check")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check.cuda_places, "place", lambda: SimpleNamespace(is_gpu=False, described=lambda: {"name": "none"}))

    def call(*options):
        monkeypatch.setattr(check, "FILES", sorted(tmp_path.glob("test_*.py")))
        monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--stub", *map(str, options)])
        return check.main()

    check.call = call
    return check


@pytest.mark.nightly
@needs_stub
def test_what_the_tests_for_a_gpu_find_is_written_down(perf, check, monkeypatch, tmp_path):
    """As far as they can go: what needs no device is run, the rest is skipped, and why is said."""
    if cuda_stub.real_driver():
        pytest.skip("there is a driver on this machine")
    monkeypatch.setattr(check, "ROOT", PERF.parent)
    row = check.run_file(PERF.parent / "tests" / "cuda" / "test_cuda_gpu.py", "graphs or soak")
    assert row["outcome"] == "passed" and row["passed"] == len(INSTALLED) and row["failed"] == 0
    assert row["why_skipped"]["there is no CUDA device"] == 2
    assert [noted["launches"] for noted in row["noted"].values()] == ["8000"] * len(INSTALLED)


@pytest.mark.parametrize("outcome, test, expression, code, why", [
    ("passed", "def test(): pass", "", None, []), ("none selected", "def test(): pass", "another", None, []),
    ("FAILED", "def test():\n    assert 1 == 2, 'no'", "", None, ["AssertionError: no\nassert 1 == 2"]),
    ("crashed", "import os\ndef test(): os._exit(7)", "", 7, []),
])  # fmt: skip
def test_how_a_file_ends_is_written_down(check, tmp_path, outcome, test, expression, code, why):
    (tmp_path / "test_it.py").write_text(test)
    row = check.run_file(tmp_path / "test_it.py", expression)
    assert (row["outcome"], row["file"], row.get("exit_code")) == (outcome, "test_it.py", code)
    assert [each["why"] for each in row.get("failures", [])] == why
    assert " ".join(check._lines(row)[0].split()).startswith(f"test_it.py {outcome}")


@pytest.fixture
def runs(check, monkeypatch, tmp_path):
    """Three files are not run, of which the second never ends: their names, and how long each might have taken."""
    calls = []

    def run_file(path, expression, limit):
        calls.append((path.name, limit))
        return {"file": path.name, "outcome": "hung" if path.name == "test_b.py" else "passed", "passed": 1, "seconds": limit}

    for letter in "abc":
        (tmp_path / f"test_{letter}.py").write_text("")
    monkeypatch.setattr(check, "run_file", run_file)
    monkeypatch.setattr(check, "SIDE_BY_SIDE", 1)
    monkeypatch.setattr(check, "_STARTED", -20)  # importing has taken some of the time
    return calls


def test_the_check_ends_in_time_and_goes_on(check, runs, monkeypatch, tmp_path, capsys):
    """The file that the time did not suffice for is the first of the next call, which runs no file again."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(check.time, "monotonic", iter([0, 10, 100, 100, 100]).__next__)
    assert check.call("--json", file, "--minutes", 1) == 3 and runs == [("test_a.py", 40), ("test_b.py", 30)]
    document = json.loads(file.read_text())
    assert [(row["file"], row["outcome"]) for row in document["files"]] == [("test_a.py", "passed"), ("test_b.py", "unfinished")]
    assert document["machine"]["device"] == {"name": "none"} and not list(tmp_path.glob("*.part"))
    assert "2 files are left" in capsys.readouterr().out
    monkeypatch.setattr(check.time, "monotonic", lambda: -20)
    assert check.call("--json", file, "--minutes", 5) == 1 and [name for name, _ in runs[2:]] == ["test_b.py", "test_c.py"]
    assert [row["outcome"] for row in json.loads(file.read_text())["files"]] == ["passed", "hung", "passed"]
    with pytest.raises(SystemExit, match="of other tests"):
        check.call("-k", "other", "--json", file, "--minutes", 5)


def test_a_file_that_takes_long_is_tried_again_with_more_time(check, runs, monkeypatch, tmp_path):
    """First of all; if it does not end then, it is hung: else no call would come past it."""
    files, rows = [tmp_path / "test_a.py", tmp_path / "test_b.py"], []
    monkeypatch.setattr(check.time, "monotonic", lambda: -20)
    for minutes, outcome in ((0, None), (1, "unfinished"), (0.5, "unfinished"), (1, "unfinished"), (2, "hung")):
        assert check.run_files(files, rows, "", minutes, lambda row: None) is (outcome == "hung")
        assert {row["file"]: row["outcome"] for row in rows}.get("test_b.py") == outcome
    assert runs == [("test_a.py", 60), *(("test_b.py", 60 * minutes) for minutes in (1, 0.5, 1, 2))]
    rows.clear()
    check.run_files(files, rows, "", 60, lambda row: None)
    assert rows[1]["outcome"] == "hung"  # at once, with the most that a file gets


def test_files_are_run_side_by_side(check, monkeypatch, tmp_path):
    """Each begins before the others end. What fails in one is said, and costs no other."""
    together, rows, written, outcomes = threading.Barrier(3, timeout=60), [], [], {"a": "passed", "b": "FAILED", "c": "passed"}

    def run_file(path, expression, limit):
        together.wait()
        return {"file": path.name, "outcome": outcomes[path.name], "seconds": 0}

    monkeypatch.setattr(check, "run_file", run_file)
    monkeypatch.setattr(check, "SIDE_BY_SIDE", 3)
    assert check.run_files([tmp_path / name for name in outcomes], rows, "", math.inf, written.append)
    assert {row["file"]: row["outcome"] for row in rows} == outcomes and written == rows


# ---- without a network -------------------------------------------------------------------------------------------------
def test_what_is_fetched_has_the_pinned_version(perf):
    versions = {"<": "2.2.6", "==": "2.4.6", ">": "2.5.5"}
    constraints = "\n".join(f'numpy=={numpy}; python_version {sign} "3.11"' for sign, numpy in versions.items())
    constraints += '\ncffi==2.1.1\nnumba-cuda==0.30.4; python_version < "3.12"\nnumba-cuda-mlir==0.6.0\n'
    wanted = "numpy 3.12, numpy 3.11, numpy 3.10, numba-cuda 3.12, numpy<2.5 3.12, cffi 3.12, unknown 3.12"
    found = [perf("offline").pinned(*each.split(), constraints) for each in wanted.split(", ")]
    assert " ".join(found) == "numpy==2.5.5 numpy==2.4.6 numpy==2.2.6 numba-cuda==0.30.4 numpy<2.5 cffi==2.1.1 unknown"


def test_a_wheel_packed_anew_is_installed_without_a_network(perf, monkeypatch, tmp_path):
    pytest.importorskip("pip")
    offline, new, wheel = perf("offline"), tmp_path / "new", tmp_path / "made_here-1.0-py3-none-any.whl"
    new.mkdir()
    content = b"VALUE = 7\n" + b"#" * 100_000
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_here.py", content)
        archive.writestr("made_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-here\nVersion: 1.0\n")
        archive.writestr("made_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("made_here-1.0.dist-info/RECORD", f"made_here.py,sha256={digest},{len(content)}\n")
    with monkeypatch.context() as killed, pytest.raises(ZeroDivisionError):
        killed.setattr(offline.zipfile.ZipFile, "writestr", Mock(side_effect=ZeroDivisionError))
        offline.pack(wheel, new)
    assert not list(new.glob("*.whl"))
    packed = offline.pack(wheel, new)
    assert packed.name == wheel.name and packed.stat().st_size < wheel.stat().st_size / 10
    for name, value in {"INDEX_URL": "http://localhost:9/", "NO_CACHE_DIR": "1", "TARGET": str(tmp_path / "installed")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert offline.install(new) == 0 and (tmp_path / "installed" / "made_here.py").read_bytes() == content
    with pytest.raises(SystemExit, match=r"offline\.py fetch"):
        offline.install(tmp_path / "none")
