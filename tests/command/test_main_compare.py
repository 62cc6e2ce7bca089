"""``python -m fastexchange compare``: result files row by row, and what counts as noise."""

import json
from pathlib import Path

import numpy as np
import pytest
from shell import ROOT, run, run_here

from fastexchange.__main__ import main
from fastexchange.command.compare import YARDSTICKS, compare

MACHINE = {"cpu": "one", "cores": 2, "system": "Linux", "python": "3.11.7", "packages": {"numba": "0.68.1", "torch": None}}
PEERS = ("njit", "views", "from_dlpack", "export", "tvm")


def document(peers: float = 1.0, machine=MACHINE, a_to_b: float = 1.0, **ours: float) -> dict:
    """A document: yardsticks of 100 ns, times `peers`; rows of ours by name, in nanoseconds, with a reference to one of them."""
    results = [{"key": f"bench/numpy/{name}", "median_ns": 100.0 * peers, "iqr_ns": 2.0} for name in PEERS]
    for name, ns in ours.items():
        against = {"reference": "bench/numpy/export", "ratio": ns / (100.0 * peers), "ratio_iqr": 0.01}
        results.append({"key": f"bench/{name}", "median_ns": ns, "iqr_ns": 0.02 * ns, **against})
    results.append({"key": "control/x/a", "median_ns": 20.0 * peers, "iqr_ns": 0.1})
    results.append({"key": "control/x/b", "median_ns": 20.0 * peers * a_to_b, "iqr_ns": 0.1})
    return {"machine": machine, "rounds": 5, "results": results}


@pytest.fixture
def written(tmp_path):
    """A function that writes documents, and returns their paths."""

    def write(*contents) -> list[Path]:
        paths = [tmp_path / f"{number}.json" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return paths

    return write


def directions(old: dict, new: dict, **options) -> dict[str, int]:
    return {move.key: move.direction for move in compare(old, new, **options).moves}


def test_nothing_has_moved():
    assert set(directions(document(fast=20, slow=30), document(fast=20.5, slow=29.5)).values()) == {0}


@pytest.mark.parametrize("peers", [0.5, 1.0, 1.3])
def test_one_row_is_slower_whatever_the_machine_does(peers):
    moved = directions(document(fast=20, slow=30), document(peers, fast=20 * peers, slow=36 * peers))
    assert {key for key, direction in moved.items() if direction} == {"bench/slow"}
    assert moved["bench/slow"] == 1


def test_one_row_is_faster():
    assert directions(document(fast=20), document(fast=10))["bench/fast"] == -1


def test_all_of_ours_are_slower():
    names = [f"row{number}" for number in range(40)]
    moved = directions(document(**dict.fromkeys(names, 20)), document(**dict.fromkeys(names, 24)))
    assert {moved[f"bench/{name}"] for name in names} == {1}
    assert moved["bench/numpy/njit"] == 0


def test_a_reference_that_moved_says_nothing_alone():
    new = document(fast=20)
    for row in new["results"]:
        if row["key"] == "bench/numpy/export":
            row["median_ns"] = 150.0
        elif row["key"] == "bench/fast":
            row["ratio"] = 20 / 150
    found = {move.key: move for move in compare(document(fast=20), new).moves}
    assert found["bench/fast"].to_reference == pytest.approx(2 / 3)
    assert found["bench/fast"].direction == 0 and found["bench/numpy/export"].direction == 1


def test_a_row_that_moved_as_its_reference_did():
    """What they have in common, the machine may have done to both."""
    new = document(fast=22, slow=22)
    for row in new["results"]:
        if row["key"] == "bench/numpy/export":
            row["median_ns"] = 110.0
        elif row["key"] == "bench/fast":
            row["ratio"] = 22 / 110
    moved = directions(document(fast=20, slow=20), new)
    assert (moved["bench/fast"], moved["bench/slow"]) == (0, 1)


def test_a_reference_of_our_own_excuses_nothing():
    old, new = document(fast=20, keywords=40), document(fast=30, keywords=60)
    for content in (old, new):
        row = next(row for row in content["results"] if row["key"] == "bench/keywords")
        row.update(reference="bench/fast", ratio=2.0)
    assert directions(old, new)["bench/keywords"] == 1


def test_a_drift_that_is_not_the_same_for_all():
    """Nine of ten yardsticks say how far rows wander from run to run."""
    old, new = document(fast=20), document(fast=21.4)
    for row in new["results"]:
        if row["key"] in ("bench/numpy/njit", "bench/numpy/export"):
            row["median_ns"] = 107.0
        elif row["key"] == "bench/fast":
            row["ratio"] = 21.4 / 100
    assert compare(old, new).floor == pytest.approx(0.07)
    assert directions(old, new)["bench/fast"] == 0


def test_the_spread_of_its_samples_is_noise():
    old, new = document(fast=20), document(fast=23)
    assert directions(old, new)["bench/fast"] == 1
    for content in (old, new):
        next(row for row in content["results"] if row["key"] == "bench/fast")["iqr_ns"] = 4.0
    assert directions(old, new)["bench/fast"] == 0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("a_to_b", [0.8, 1.25])
def test_the_control_is_noise(side, a_to_b):
    contents = [document(fast=20), document(fast=23)]
    for row in contents[side]["results"]:
        if row["key"] == "control/x/b":
            row["median_ns"] *= a_to_b
    assert compare(*contents).floor == pytest.approx(0.25)
    assert directions(*contents)["bench/fast"] == 0


def test_the_threshold_is_noise():
    old, new = document(fast=20), document(fast=23)
    assert directions(old, new, threshold=0.2)["bench/fast"] == 0
    assert directions(old, new, threshold=0.1)["bench/fast"] == 1


def test_without_yardsticks_nothing_is_taken_out():
    old, new = document(), document(peers=2.0)
    for content in (old, new):
        content["results"] = content["results"][:2]
    found = compare(old, new)
    assert (found.drift, found.yardsticks) == (1.0, 2)
    assert [move.direction for move in found.moves] == [1, 1]


def test_times_of_nothing_have_no_ratio():
    old, new = document(fast=20, gone=0.0), document(fast=20, gone=-0.1)
    assert compare(old, new).incomparable == ["bench/gone"]


def test_prints_rows_and_summary(written):
    done = run("compare", *written(document(fast=20, gone=3), document(fast=30, made=4)))
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("  bench/fast "))
    assert row.split() == ["bench/fast", "20.0", "30.0", "1.500", "1.500", "1.500", "5.0", "%"]
    assert done.stdout.index("within noise\n") < done.stdout.index("slower beyond noise\n") < done.stdout.index(row)
    assert "only in OLD: bench/gone\nonly in NEW: bench/made\n" in done.stdout
    assert done.stdout.endswith("8 rows: 1 slower, 0 faster, 7 within noise.\n")
    assert "warning" not in done.stdout


def test_strict(written):
    old, new = map(str, written(document(fast=20), document(fast=30)))
    assert run("compare", "--strict", old, new).returncode == 1
    assert main(["compare", "--strict", new, old]) == 0
    assert main(["compare", "--strict", "--threshold", "60", old, new]) == 0


def test_strict_is_about_our_own_rows(written):
    slower = document(fast=20)
    slower["results"][0]["median_ns"] = 200.0
    done = run("compare", "--strict", *written(document(fast=20), slower))
    assert done.returncode == 0
    assert "1 slower (1 of them yardsticks or controls)" in done.stdout


def test_warns_of_another_machine(written):
    other = {**MACHINE, "cpu": "another", "python": "3.12.1", "packages": {"numba": "0.69", "numpy": "2.4"}}
    done = run("compare", *written(document(), document(machine=other)))
    warned = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert warned == [
        "warning: cpu differs: one, then another",
        "warning: python differs: 3.11.7, then 3.12.1",
        "warning: numba differs: 0.68.1, then 0.69",
        "warning: numpy differs: none, then 2.4",
    ]


def changed(**changes) -> dict:
    """A document whose first row is changed."""
    content = document()
    content["results"][0].update(changes)
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "it holds a list, not an object"),
        ("3", "it holds a number or a boolean"),
        ({}, "its 'machine' is missing"),
        ({"machine": {}, "results": {}}, "its 'results' is an object"),
        ({"machine": {}, "results": [{}]}, "row 0 of its results has no 'key'"),
        ({"machine": {}, "results": [3]}, "row 0 of its results has no 'key'"),
        (changed(key="bench/numpy/tvm"), "two rows have the key 'bench/numpy/tvm'"),
        (changed(median_ns="1"), "the 'median_ns' of row 'bench/numpy/njit' is no number"),
        (changed(median_ns=True), "the 'median_ns' of row 'bench/numpy/njit' is no number"),
        (changed(median_ns=10**400), "the 'median_ns' of row 'bench/numpy/njit' is no number"),
        (changed(iqr_ns=float("nan")), "the 'iqr_ns' of row 'bench/numpy/njit' is no number"),
        (changed(reference="bench/numpy/tvm"), "has a 'reference', but not a 'ratio'"),
        ({"machine": {}, "results": []}, "have no row in common"),
    ],
)
def test_what_is_no_result_file(tmp_path, capsys, content, words):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(document()))
    text = content if isinstance(content, str) else json.dumps(content)
    bad.write_bytes(text.encode(errors="surrogateescape"))
    for files in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, files)]) == 2
        printed, error = capsys.readouterr()
        assert printed == "" and error.startswith("python -m fastexchange compare: ") and error.count("\n") == 1
        assert str(bad) in error and words in error


def test_no_file(tmp_path):
    done = run("compare", tmp_path / "none.json", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'none.json'} cannot be read: No such file" in done.stderr
    assert "Traceback" in run_here("compare", "--traceback", tmp_path / "none.json", tmp_path).stderr


@pytest.mark.parametrize("percent", ["-1", "nan", "much"])
def test_a_threshold_that_is_none(percent):
    assert run_here("compare", "--threshold", percent, "a", "b").returncode == 2


def test_the_results_in_this_repository():
    found = sorted((ROOT / "perf" / "results").glob("*-cpu.json"))
    assert len(found) >= 2
    done = run("compare", found[-2], found[-1])
    assert done.returncode == 0, done.stderr
    keys = {row["key"] for row in json.loads(found[-1].read_text())["results"]}
    assert {"empty", "c", "njit", "tvm", "export", "own"} <= {key.rpartition("/")[2] for key in keys} & YARDSTICKS


def test_rows_in_bytes_have_no_drift():
    def with_memory(number: float, peers: float) -> dict:
        made = document(peers, fast=20.0)
        made["results"].append({"key": "memory/kernels/fast", "median_bytes": number, "iqr_bytes": 0.0})
        return made

    assert directions(with_memory(1000.0, 1.0), with_memory(1000.0, 2.0))["memory/kernels/fast"] == 0
    assert directions(with_memory(1000.0, 1.0), with_memory(1300.0, 2.0))["memory/kernels/fast"] == 1


def test_the_files_of_perf_can_be_compared(written, capsys):
    from fastexchange.measuring import files
    from fastexchange.measuring.timing import Samples

    row = files.result("memory/kernels/fast", Samples(np.array([5.0, 6.0])), unit="bytes")
    paths = written(*[{**document(), "results": [*document()["results"], row]}] * 2)
    assert main(["compare", *map(str, paths)]) == 0
    assert "memory/kernels/fast" in capsys.readouterr().out
