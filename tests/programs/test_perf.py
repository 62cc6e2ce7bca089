"""``perf/``: the README's table and plot are those of the run that they name; what is made of samples; the rows."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import cuda_stub
import numpy as np
import pytest
from perf_programs import PERF, needs_stub

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, Statement, time_statements

ROOT = Path(__file__).resolve().parents[2]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="perf/floor.c needs a C compiler")


def crafted(**medians: float) -> dict[str, Samples]:
    return {key: Samples(np.array([value - 1, value, value + 1], float)) for key, value in medians.items()}


# ---- what the repository shows ---------------------------------------------------------------------------------------


def test_the_table_in_the_readme_is_that_of_the_run_it_names(perf):
    table = perf("table")
    text = table.README.read_text(encoding="utf-8")
    file = table.file_in(text)
    assert file.parent == PERF / "results"
    shown = text.split(table.BEGIN)[1].split(table.END)[0]
    assert table.table(file) == shown, f"python perf/table.py {file.relative_to(ROOT)} --write"


def test_the_plot_is_that_of_the_same_run(perf, tmp_path):
    table, shown = perf("table"), PERF / "results" / "overhead.svg"
    file = table.file_in(table.README.read_text(encoding="utf-8"))
    text = shown.read_text(encoding="utf-8")
    assert f"<dc:title>Overhead by number of arguments: {file.name}</dc:title>" in text
    try:
        installed = version("matplotlib")
    except PackageNotFoundError:
        pytest.skip("the title was looked at; to draw it again, matplotlib is needed")
    if f"Matplotlib v{installed}," not in text:
        pytest.skip(f"the title was looked at; it was drawn by another matplotlib than {installed}")
    perf("plot").draw(file, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text, f"python perf/plot.py {file} -o {shown}"


def test_the_tables_of_launches_are_those_of_the_run_they_name(perf):
    table = perf("cuda_table")
    text = table.README.read_text(encoding="utf-8")
    file = table.file_in(text)
    assert file.parent == PERF / "results"
    shown = text.split(table.BEGIN)[1].split(table.END)[0]
    assert table.table(file) == shown, f"python perf/cuda_table.py {file.relative_to(ROOT)} --write"


# ---- what is made of samples -----------------------------------------------------------------------------------------


def test_a_run_is_written_and_read_back(perf, tmp_path):
    report = perf("report")
    times = crafted(**{"numpy/3/fast": 20, "memory/kernels/fast": 800_000})
    file = tmp_path / "new" / "run.json"
    report.write_json(file, {"cpu": "none"}, 3, [], {"memory/kernels/fast": "a kernel"}, times, [], {"calls": 1.5})
    call, memory = json.loads(file.read_text())["results"]
    assert call == {"key": "numpy/3/fast", "median_ns": 20, "iqr_ns": 1, "samples_ns": [19, 20, 21]}
    assert memory["median_bytes"] == 800_000 and memory["label"] == "a kernel" and "median_ns" not in memory
    machine, again = report.read_json(file)
    assert machine == {"cpu": "none"}
    assert {key: samples.values.tolist() for key, samples in again.items()} == {
        key: samples.values.tolist() for key, samples in times.items()
    }


def test_a_queue_is_emptied_before_it_is_full():
    """Launches are timed so: what is called, and what prepares it, in their order."""
    runs = [0]

    def call():
        runs[-1] += 1

    statements = {}
    for code, calls in (("f()", 1), ("f(); f(); f()", 3), ("[f() for _ in range(90)]", 90)):
        statements[code] = Statement(code, {"f": call}, calls, prepare=lambda: runs.append(0), most_calls=70)
    time_statements(statements, rounds=3, batch_ns=40_000_000)  # for which that many calls are few on any machine
    often = {count for count in runs if runs.count(count) >= 9}  # of each three runs in three rounds
    assert {69, 70, 90} <= often and max(runs) == 90


def test_the_results_of_a_gpu_are_named_after_it_and_the_day(perf):
    launches = perf("cuda_launches")
    file = launches.file_for(SimpleNamespace(described=lambda: {"name": "NVIDIA H100 80GB HBM3"}))
    assert file.parent == PERF / "results" and re.fullmatch(r"\d{4}-\d\d-\d\d-cuda-nvidia-h100-80gb-hbm3.json", file.name)


def test_the_table_has_ratios_of_its_run_and_leaves_out_what_was_not_measured(perf, monkeypatch, tmp_path):
    table = perf("table")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    times = {"numpy/3/fast": 20, "numpy/3/c": 15, "numpy/3/njit": 180, "numpy/3/empty": 8, "bound/1": 10}
    file = tmp_path / "run.json"
    results = [files.result(key, samples) for key, samples in crafted(**times).items()]
    files.write(file, files.machine() | {"date": "2030-01-02"}, 3, results)
    made = table.table(file)
    lines = [line for line in made.splitlines() if line.startswith("|")]
    assert lines[0] == "| call | fastexchange | hand-written C | Numba's dispatcher | other |"
    assert lines[2:] == ["| 3 NumPy arrays | 20.0 ns | 15.0 ns (0.75 x) | 180 ns (9.0 x) | empty C builtin 8.0 ns (0.40 x) |"]
    assert made.startswith("All rows of one run, [run.json](run.json)") and "2030-01-02" in made
    assert table.file_in(f"{table.BEGIN}{made}{table.END}") == file


@pytest.mark.parametrize(
    ("value", "shown"), [(0.03, "0.0 ns"), (20.06, "20.1 ns"), (99.6, "100 ns"), (9999, "9999 ns"), (12_340, "12.3 µs")]
)
def test_durations(perf, value, shown):
    assert perf("table").duration(value) == shown


def test_slopes_are_those_of_a_line(perf):
    targets, counts = perf("targets"), perf("rows_arguments")
    numbers = sorted({*counts.COUNTS, *counts.FRAME})
    line = {f"x/{count}/fast": Samples(np.array([7 + 3.0 * count, 5 + 2.0 * count])) for count in numbers}
    assert targets.slope(line, "x/{}/fast").values == pytest.approx([3, 2])
    assert targets.slope_beyond(line, "x/{}/fast").values == pytest.approx([3, 2])


@pytest.mark.parametrize(("ours", "met"), [(20, True), (40, False)])
def test_a_target_is_met_or_missed_or_not_measured(perf, ours, met):
    targets = perf("targets")
    times = crafted(**{"numpy/3/fast": ours, "numpy/3/empty": 11, "numpy/3/njit": 300})
    found = {(target.call, target.must_be): target for target in targets.targets(times)}
    assert found["3 NumPy arrays", "≤ 2 x empty C builtin"].met is met
    faster = found["3 NumPy arrays", "≥ 5 x faster than Numba's"]
    assert faster.met is True and faster.measured.startswith(f"{300 / ours:.2f} x faster")
    missing = found["3 torch CPU tensors", "≤ 0.30 x C, exchange table"]
    assert missing.met is None and missing.measured == "not measured"


def test_labels_do_not_overlap(perf):
    spread = perf("plot").spread
    assert spread([0.5, 0.1, 0.52], 0.1) == pytest.approx([0.5, 0.1, 0.6])
    assert spread([0.2, 0.2, 0.2], 0.1) == pytest.approx([0.2, 0.3, 0.4])


LOST = "not measurable here (spread "


def scattered(median: float, spread: float) -> Samples:
    """With this median and this interquartile range."""
    return Samples(np.array([median - spread, median - spread / 2, median, median + spread / 2, median + spread]))


def test_tables_show_no_figure_that_means_nothing(perf):
    report = perf("report")
    row = SimpleNamespace(key="a/fast", label="ours", reference="a/c")
    group = SimpleNamespace(title="t", rows=[SimpleNamespace(key="a/c", label="C", reference=None), row])
    shown = report.group_table(group, {"a/fast": scattered(30, 1), "a/c": scattered(-1, 40)}).splitlines()
    assert LOST in shown[2] and "30.0" in shown[3] and LOST in shown[3]
    assert LOST in report.rows_table("t", {"a": "label"}, {"a": scattered(-1e6, 2e6)}, "ms", 1e6)


def test_targets_are_not_judged_by_figures_that_mean_nothing(perf):
    times = {"x": scattered(2, 5), "small": scattered(-0.1, 0.5), "ratio": scattered(3, 9), "fine": scattered(4, 1)}
    book = perf("book").Book(times)
    for key, bound, unit in (("x", 4, "ns"), ("small", 10, "ns"), ("ratio", 2, "x faster"), ("fine", 10, "ns")):
        book.add(key, "", lambda t, key=key: t[key], bound, unit)
    assert [target.met for target in book.targets] == [None, True, None, True]
    assert [LOST in target.measured for target in book.targets] == [True, True, True, False]


def test_a_kernels_ratio_is_judged_by_what_it_must_be(perf):
    row = perf("kernel_row").Row
    spec = importlib.util.spec_from_file_location("perf_kernels", PERF / "kernels.py")  # `kernels` is the folder's name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.table
    ours, theirs = (crafted(us=value)["us"] for value in (1000, 1500))
    promised = [row("mul", "", "", None, None, bound) for bound in (1.4, 1.6, None)]
    lines = table(promised, [(ours, theirs)] * 3).splitlines()[1:]
    assert [line.split()[-3:] for line in lines[:2]] == [["≥", "1.4", "met"], ["≥", "1.6", "MISSED"]]
    assert not lines[2].split()[-1].isalpha()
    assert "must be" not in table(promised[2:], [(ours, theirs)])


def test_the_plot_has_no_points_that_mean_nothing(perf):
    pytest.importorskip("matplotlib")
    times = {f"numpy/{count}/fast": scattered(10.0 * count, 1) for count in (1, 3, 16, 32)} | {"numpy/58/fast": scattered(9, 90)}
    counts, _ = perf("plot").lines_of(times, "numpy")["fast"]
    assert counts == [1, 3, 16, 32]


# ---- what is compiled ------------------------------------------------------------------------------------------------


@needs_compiler
def test_hand_written_c_refuses_what_it_was_not_written_for(perf):
    import array

    limit, only_dunder = perf("floor").load(), perf("groups").OnlyDunder
    x = np.ones(1, np.float32)
    assert limit.buffer(array.array("f", [1]), x) is None and limit.dunder(only_dunder(x), x) is None
    references = sys.getrefcount(x)
    readonly = np.ones(1, np.float32)
    readonly.flags.writeable = False
    for bad in (array.array("d", [1]), b"abcd", np.ones((2, 2), np.float32), 3, np.ones(4, np.float32)[::2]):
        with pytest.raises((TypeError, BufferError)):
            limit.buffer(x, bad)
    for bad in (np.ones(1), 3, readonly, np.ones((2, 2), np.float32), np.ones(4, np.float32)[::2]):
        with pytest.raises((TypeError, BufferError, AttributeError)):
            limit.dunder(x, bad)
    assert sys.getrefcount(x) == references


@needs_compiler
def test_every_row_runs(perf):
    """Each statement, once."""
    groups = perf("rows").groups()
    rows = [row for group in groups for row in group.rows]
    assert len({row.key for row in rows}) == len(rows)
    for group in groups:
        keys = {row.key for row in group.rows}
        for row in group.rows:
            assert row.reference in keys or row.reference is None, row.key
            exec(row.statement.code, dict(row.statement.names))
    keys = {row.key for row in rows}
    numbers = perf("rows_arguments")
    for path in ("numpy", "buffer", "dunder"):
        assert {f"{path}/{count}/{who}" for count in numbers.COUNTS for who in ("c", "fast")} <= keys
    turn = next(row.statement.names for row in rows if row.key == "sites/64/turn")
    assert turn["f"].counts().compiled == 64 and len(turn["p"].signatures) == 64


@pytest.mark.slow
def test_every_row_of_16_bits_runs_and_its_sides_agree(perf, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT))
    for row in perf("kernels_half").rows():
        results = row.ours(), row.theirs()
        if all(isinstance(each, torch.Tensor) for each in results):
            torch.testing.assert_close(*results, rtol=0.02, atol=0.05)


@needs_compiler
def test_processes_say_what_they_measured(tmp_path):
    """A section that takes some seconds, in a new process, as the command runs it."""
    file = tmp_path / "run.json"
    command = [sys.executable, str(PERF / "run.py"), "--quick", "--only", "import", "--only", "threads", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    keys = {row["key"]: row for row in document["results"]}
    assert {"import/numba", "import/fastexchange", "threads/long/numpy/nogil/2"} <= set(keys)
    assert all(row["label"] and row["median_ns"] > 0 for row in keys.values())
    assert set(document["seconds"]) == {"import", "threads"}
    assert document["machine"]["packages"]["fastexchange"] and "not measured" in done.stdout


@needs_stub
def test_every_row_of_launches_runs_on_the_driver_stub(perf, monkeypatch, tmp_path):
    """The command itself, in a new process: the stub has to be there before the packages are imported."""
    file = tmp_path / "run.json"
    command = [sys.executable, str(PERF / "cuda_launches.py"), "--stub", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CuPy, Triton, PyTorch: their rows need a GPU." in done.stdout
    document = json.loads(file.read_text())
    rows = {row["key"]: row for row in document["results"]}
    assert document["machine"]["device"]["driver"] == "driver stub"
    assert all(row["label"] and (row["median_ns"] > 0 or key.endswith("/loop")) for key, row in rows.items())
    for package in ("numba-cuda", "numba-cuda-mlir"):
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            assert f"{package} is not installed" in done.stdout
            continue
        for case in ("1", "3", "26", "axpy", "none", "array/16", "scalar/256"):
            assert {f"{package}/{case}/{who}" for who in ("fast", "bound", "c", "raw", "released", "device")} <= set(rows)
        named = [target for target in document["targets"] if target["call"].startswith(package + ":")]
        assert len(named) >= 19 and all(target["met"] is not None for target in named)
    table = perf("cuda_table")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    assert "| 26 tensors |" in table.table(file)


SAME_LAUNCH = """
import sys
sys.path.insert(0, sys.argv[1])
import cuda_places
place = cuda_places.place(True)
import cuda_rows

launches = 0
for package in cuda_places.PACKAGES:
    try:
        rows = cuda_rows.Rows(package, place)
    except ImportError:
        continue
    tensors = rows.tensors(3)
    cases = {
        "tensors": tensors, "checked": tensors, "axpy": {"a": 2.5, **rows.tensors(2)},
        "scalars": {"a": cuda_rows.np.float32(1.5)},
    }  # fmt: skip
    for signature, values in cases.items():
        plain, kernel = rows.kernel(values)
        ours = rows.launched(kernel[3, 32], values)
        by_hand = rows.by_hand(plain, signature, values, 3, 32)
        place._tensor.streams[0] = 0x1
        place.stub.clear()
        ours(*values.values())
        by_hand(*values.values())
        place._tensor.streams[0] = 0
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
    tensor = place._tensor
    for bad in (tensor((4,), "float64"), tensor((2, 2)), tensor((4,), strides=(2,)), tensor((4,), device_type=1), 3, None):
        try:
            by_hand(bad)
        except (TypeError, AttributeError):
            continue
        raise AssertionError(bad)
    try:
        by_hand(x, place.tensor(1))
    except TypeError as error:
        assert "another device" in str(error)
    else:
        raise AssertionError("two devices")
print(launches)
"""


@needs_stub
def test_hand_written_c_launches_what_ours_does(tmp_path):
    """Byte for byte, as the stub recorded it; and it refuses what it was not written for."""
    script = tmp_path / "same.py"
    script.write_text(SAME_LAUNCH)
    done = subprocess.run([sys.executable, "-W", "ignore", str(script), str(PERF)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) in (16, 32)


@needs_stub
def test_what_the_tests_for_a_gpu_find_is_written_down(perf, monkeypatch, tmp_path):
    """Against the driver stub as far as they can go: what needs none is run, the rest is skipped, and why is said."""
    if cuda_stub.real_driver():
        pytest.skip("there is a driver on this machine")
    check, file = perf("cuda_check"), tmp_path / "found.json"
    monkeypatch.setattr(check, "FILES", [path for path in check.FILES if path.name == "test_cuda_gpu.py"])
    monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--stub", "-k", "graphs or soak", "--json", str(file)])
    monkeypatch.setattr(check.cuda_places, "place", lambda: SimpleNamespace(is_gpu=False, described=lambda: {"name": "none"}))
    assert check.main() == 0
    document = json.loads(file.read_text())
    (found,) = document["files"]
    assert document["machine"]["device"] == {"name": "none"}
    packages = found["passed"]
    assert found["outcome"] == "passed" and packages in (1, 2) and found["failed"] == 0
    assert found["why_skipped"]["there is no CUDA device"] == 2
    assert [noted["launches"] for noted in found["noted"].values()] == ["8000"] * packages


BROKEN = {
    "passed": "def test(): pass",
    "FAILED": "def test():\n    assert 1 == 2, 'no'",
    "crashed": "import os\ndef test(): os._exit(7)",
}


@pytest.mark.parametrize("outcome", BROKEN)
def test_a_file_that_fails_or_ends_its_process_is_written_down_too(perf, monkeypatch, tmp_path, outcome):
    check, path = perf("cuda_check"), tmp_path / "test_it.py"
    monkeypatch.setattr(check, "ROOT", tmp_path)
    path.write_text(BROKEN[outcome])
    row = check.run_file(path, "")
    assert row["outcome"] == outcome and row["file"] == "test_it.py"
    assert row.get("exit_code") == (7 if outcome == "crashed" else None)
    assert [each["why"] for each in row.get("failures", [])] == ["AssertionError: no\nassert 1 == 2"] * (outcome == "FAILED")
    assert check._lines(row)[0].split()[:2] == ["test_it.py", outcome]
    assert outcome == "crashed" or check.run_file(path, "another")["outcome"] == "none selected"


@pytest.mark.slow
def test_first_calls_in_new_processes_are_measured(tmp_path):
    """The part of ``perf/scale.py`` that needs no engine and no long compilation."""
    file = tmp_path / "run.json"
    command = [sys.executable, str(PERF / "scale.py"), "--quick", "--only", "first", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    keys = {row["key"]: row for row in document["results"]}
    assert set(keys) == {f"first/{name}" for name in ("nothing", "kernel", "kernel/elapsed", "imports", "imports/elapsed")}
    assert all(row["label"] and row["median_ns"] > 0 for row in keys.values())
    first, imports = document["targets"]
    assert first["must_be"].startswith("≤ 30 ms") and imports["met"] is None
