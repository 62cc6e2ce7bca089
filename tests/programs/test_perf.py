"""``perf/``: the README's tables and plot are those of the runs that they name; what is made of samples; the rows."""

import array
import importlib.util
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples, Statement, time_statements

PERF = Path(__file__).resolve().parents[2] / "perf"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="perf/floor.c needs a C compiler")


def scattered(median: float, spread: float = 1.0) -> Samples:
    return Samples(np.array([median - spread, median - spread / 2, median, median + spread / 2, median + spread], float))


# ---- what the repository shows ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", ["table", "cuda_table"])
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
    try:
        installed = version("matplotlib")
    except PackageNotFoundError:
        pytest.skip("the title was looked at; to draw it again, matplotlib is needed")
    if f"Matplotlib v{installed}," not in text:
        pytest.skip(f"the title was looked at; it was drawn by another matplotlib than {installed}")
    perf("plot").draw(file, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == text, f"python perf/plot.py {file} -o {shown}"


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


def test_the_table_has_ratios_of_its_run_and_leaves_out_what_was_not_measured(perf, monkeypatch, tmp_path):
    table = perf("table")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    times = {"numpy/3/fast": 20, "numpy/3/c": 15, "numpy/3/njit": 180, "numpy/3/empty": 8, "bound/1": 10}
    file = tmp_path / "run.json"
    results = [files.result(key, scattered(median)) for key, median in times.items()]
    files.write(file, files.machine() | {"date": "2030-01-02"}, 3, results)
    made = table.table(file)
    lines = [line for line in made.splitlines() if line.startswith("|")]
    assert lines[0] == "| call | fastexchange | hand-written C | Numba's dispatcher | other |"
    assert lines[2:] == ["| 3 NumPy arrays | 20.0 ns | 15.0 ns (0.75 x) | 180 ns (9.0 x) | empty C builtin 8.0 ns (0.40 x) |"]
    assert made.startswith("All rows of one run, [run.json](run.json)") and "2030-01-02" in made
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
    report = perf("report")
    row = SimpleNamespace(key="a/fast", label="ours", reference="a/c")
    group = SimpleNamespace(title="t", rows=[SimpleNamespace(key="a/c", label="C", reference=None), row])
    shown = report.group_table(group, {"a/fast": scattered(30, 1), "a/c": scattered(-1, 40)}).splitlines()
    assert LOST in shown[2] and "30.0" in shown[3] and LOST in shown[3]
    assert LOST in report.rows_table("t", {"a": "label"}, {"a": scattered(-1e6, 2e6)}, "ms", 1e6)
    book = perf("book").Book(
        {"x": scattered(2, 5), "small": scattered(-0.1, 0.5), "ratio": scattered(3, 9), "fine": scattered(4, 1)}
    )
    for key, bound, unit in (("x", 4, "ns"), ("small", 10, "ns"), ("ratio", 2, "x faster"), ("fine", 10, "ns")):
        book.add(key, "", lambda t, key=key: t[key], bound, unit)
    assert [target.met for target in book.targets] == [None, True, None, True]
    assert [LOST in target.measured for target in book.targets] == [True, True, True, False]
    times = {f"numpy/{count}/fast": scattered(10.0 * count) for count in (1, 3, 16, 32)} | {"numpy/58/fast": scattered(9, 90)}
    counts, _ = perf("plot").lines_of(times, "numpy")["fast"]
    assert counts == [1, 3, 16, 32]


def test_a_kernels_ratio_is_judged_by_what_it_must_be(perf):
    row = perf("kernel_row").Row
    spec = importlib.util.spec_from_file_location("perf_kernels", PERF / "kernels.py")  # `kernels` is the folder's name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measured = scattered(1000), scattered(1500)
    promised = [row("mul", "", "", None, None, bound) for bound in (1.4, 1.6, None)]
    lines = module.table(promised, [measured] * 3).splitlines()[1:]
    assert [line.split()[-3:] for line in lines[:2]] == [["≥", "1.4", "met"], ["≥", "1.6", "MISSED"]]
    assert not lines[2].split()[-1].isalpha()
    assert "must be" not in module.table(promised[2:], [measured])


# ---- the rows ----------------------------------------------------------------------------------------------------------
@needs_compiler
def test_hand_written_c_refuses_what_it_was_not_written_for(perf):
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


@pytest.mark.slow
@needs_compiler
def test_every_row_runs(perf):
    groups = perf("rows").groups()
    rows = {row.key: row for group in groups for row in group.rows}
    assert len(rows) == sum(len(group.rows) for group in groups)
    for group in groups:
        for row in group.rows:
            assert row.reference in {None, *(each.key for each in group.rows)}, row.key
            exec(row.statement.code, dict(row.statement.names))
    for path in ("numpy", "buffer", "dunder"):
        assert {f"{path}/{count}/{who}" for count in perf("rows_arguments").COUNTS for who in ("c", "fast")} <= set(rows)
    turn = rows["sites/64/turn"].statement.names
    assert turn["f"].counts().compiled == 64 and len(turn["p"].signatures) == 64


@pytest.mark.slow
def test_every_row_of_16_bits_runs_and_its_sides_agree(perf, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(PERF.parent))
    for row in perf("kernels_half").rows():
        results = row.ours(), row.theirs()
        if all(isinstance(each, torch.Tensor) for each in results):
            torch.testing.assert_close(*results, rtol=0.02, atol=0.05)


FIRST = {f"first/{name}" for name in ("nothing", "kernel", "kernel/elapsed", "imports", "imports/elapsed")}
IMPORTS = {"import/numba", "import/fastexchange", "threads/long/numpy/nogil/2"}


@pytest.mark.slow
@pytest.mark.parametrize("program, sections, keys", [
    pytest.param("run.py", ["import", "threads"], IMPORTS, marks=needs_compiler), ("scale.py", ["first"], FIRST),
])  # fmt: skip
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
