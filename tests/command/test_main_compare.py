"""``python -m fastexchange compare``: result files row by row, and what counts as noise."""

import json
from pathlib import Path

import numpy as np
import pytest
from shell import ROOT, run, run_here

from fastexchange.command.compare import YARDSTICKS, compare
from fastexchange.measuring import files
from fastexchange.measuring.timing import Samples

MACHINE = {"cpu": "one", "cores": 2, "system": "Linux", "python": "3.11.7", "packages": {"numba": "0.68.1", "torch": None}}
PEERS = ("njit", "views", "from_dlpack", "export", "tvm")


def document(peers: float = 1.0, machine=MACHINE, changes=None, **ours: float) -> dict:
    """A document: yardsticks of 100 ns, times `peers`; rows of ours by name, in nanoseconds, with a reference to one of them.

    `changes`: by row, what is otherwise there.
    """
    results = [{"key": f"bench/numpy/{name}", "median_ns": 100.0 * peers, "iqr_ns": 2.0} for name in PEERS]
    for name, ns in ours.items():
        against = {"reference": "bench/numpy/export", "ratio": ns / (100.0 * peers), "ratio_iqr": 0.01}
        results.append({"key": f"bench/{name}", "median_ns": ns, "iqr_ns": 0.02 * ns, **against})
    results += [{"key": f"control/x/{name}", "median_ns": 20.0 * peers, "iqr_ns": 0.1} for name in "ab"]
    for key, change in (changes or {}).items():
        next(row for row in results if row["key"].endswith(f"/{key}")).update(change)
    return {"machine": machine, "rounds": 5, "results": results}


@pytest.fixture
def written(tmp_path):
    def write(*documents: dict) -> list[Path]:
        paths = [tmp_path / f"{number}.json" for number in range(len(documents))]
        for path, each in zip(paths, documents, strict=True):
            path.write_text(json.dumps(each))
        return paths

    return write


def directions(old: dict, new: dict, **options) -> dict[str, int]:
    return {move.key: move.direction for move in compare(old, new, **options).moves}


FORTY, FAST, SPREAD = [f"row{number}" for number in range(40)], document(fast=20), {"fast": {"iqr_ns": 4.0}}
OF_OURS = {"keywords": {"reference": "bench/fast", "ratio": 2.0}}
ASTRAY = {"export": {"median_ns": 150.0}, "fast": {"ratio": 20 / 150}}
ASTRAY_TOO = {"export": {"median_ns": 110.0}, "fast": {"ratio": 0.2}}
DRIFTED = {"export": {"median_ns": 107.0}, "njit": {"median_ns": 107.0}, "fast": {"ratio": 0.214}}
MOVES = {
    "nothing moves": (document(fast=20, slow=30), document(fast=20.5, slow=29.5), {}),
    **{f"one row is slower, on a machine that takes {peers} times as long": (
        document(fast=20, slow=30), document(peers, fast=20 * peers, slow=36 * peers), {"slow": 1},
    ) for peers in (0.5, 1.0, 1.3)},
    "one row is faster": (FAST, document(fast=10), {"fast": -1}),
    "all of ours are slower":
        (document(**dict.fromkeys(FORTY, 20)), document(**dict.fromkeys(FORTY, 24)), dict.fromkeys(FORTY, 1)),
    "a reference that moved says nothing alone": (FAST, document(fast=20, changes=ASTRAY), {"numpy/export": 1}),
    "what a row has in common with its reference, the machine may have done to both":
        (document(fast=20, slow=20), document(fast=22, slow=22, changes=ASTRAY_TOO), {"numpy/export": 1, "slow": 1}),
    "a reference of our own excuses nothing":
        (*(document(fast=ns, keywords=2 * ns, changes=OF_OURS) for ns in (20, 30)), {"fast": 1, "keywords": 1}),
    "yardsticks say how far rows wander": (FAST, document(fast=21.4, changes=DRIFTED), {}),
    "beyond its samples' spread": (FAST, document(fast=23), {"fast": 1}),
    "the spread of its samples is noise": (document(fast=20, changes=SPREAD), document(fast=23, changes=SPREAD), {}),
    **{f"the control of the {side} file is noise, {ns} ns": (
        document(fast=20, changes={"b": {"median_ns": ns}} if side == "old" else {}),
        document(fast=23, changes={"b": {"median_ns": ns}} if side == "new" else {}), None,
    ) for side in ("old", "new") for ns in (16.0, 25.0)},
}  # fmt: skip
"""Of two files, the directions of rows; None: of no row of ours."""


@pytest.mark.parametrize("name", MOVES)
def test_directions(name):
    old, new, expected = MOVES[name]
    found = directions(old, new)
    if expected is None:
        assert compare(old, new).floor == pytest.approx(0.25) and found["bench/fast"] == 0
    else:
        assert {key: each for key, each in found.items() if each} == {f"bench/{row}": each for row, each in expected.items()}


def test_numbers():
    moved = {move.key: move for move in compare(*MOVES["a reference that moved says nothing alone"][:2]).moves}
    assert moved["bench/fast"].to_reference == pytest.approx(2 / 3)
    assert compare(*MOVES["yardsticks say how far rows wander"][:2]).floor == pytest.approx(0.07)
    assert compare(document(fast=20, gone=0.0), document(fast=20, gone=-0.1)).incomparable == ["bench/gone"]
    for threshold, direction in ((0.2, 0), (0.1, 1)):
        assert directions(document(fast=20), document(fast=23), threshold=threshold)["bench/fast"] == direction
    old, new = ({**document(peers), "results": document(peers)["results"][:2]} for peers in (1.0, 2.0))
    found = compare(old, new)  # without enough yardsticks nothing is taken out
    assert (found.drift, found.yardsticks) == (1.0, 2) and [move.direction for move in found.moves] == [1, 1]


def test_rows_in_bytes_have_no_drift(written):
    for after, direction in ((1000.0, 0), (1300.0, 1)):
        documents = document(fast=20.0), document(2.0, fast=20.0)
        for made, number in zip(documents, (1000.0, after), strict=True):
            made["results"].append(files.result("memory/kernels/fast", Samples(np.array([number] * 2)), unit="bytes"))
        assert directions(*documents)["memory/kernels/fast"] == direction
    assert "memory/kernels/fast" in run_here("compare", *written(*documents)).stdout


def test_prints_rows_and_summary(written):
    done = run_here("compare", *written(document(fast=20, gone=3), document(fast=30, made=4)))
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("  bench/fast "))
    assert row.split() == ["bench/fast", "20.0", "30.0", "1.500", "1.500", "1.500", "5.0", "%"]
    assert done.stdout.index("within noise\n") < done.stdout.index("slower beyond noise\n") < done.stdout.index(row)
    assert "only in OLD: bench/gone\nonly in NEW: bench/made\n" in done.stdout
    assert done.stdout.endswith("8 rows: 1 slower, 0 faster, 7 within noise.\n")
    assert "warning" not in done.stdout
    other = {**MACHINE, "cpu": "another", "python": "3.12.1", "packages": {"numba": "0.69", "numpy": "2.4"}}
    done = run_here("compare", *written(document(), document(machine=other)))
    differing = ["cpu differs: one, then another", "python differs: 3.11.7, then 3.12.1", "numba differs: 0.68.1, then 0.69"]
    warned = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert warned == [f"warning: {each}" for each in (*differing, "numpy differs: none, then 2.4")]


def test_strict_is_about_our_own_rows(written):
    old, new, yardstick = written(FAST, document(fast=30), document(fast=20, changes={"njit": {"median_ns": 200.0}}))
    assert run("compare", "--strict", old, new).returncode == 1 and run_here("compare", "--strict", new, old).returncode == 0
    assert run_here("compare", "--strict", "--threshold", "60", old, new).returncode == 0
    done = run_here("compare", "--strict", old, yardstick)
    assert done.returncode == 0 and "1 slower (1 of them yardsticks or controls)" in done.stdout


NO_RESULTS = [  # a file's text, or the changes of a document's first row
    *((text, "is not JSON") for text in ("", "{", "[" * 100_000, "\udcff")), ("[]", "it holds a list, not an object"),
    ("3", "it holds a number or a boolean"), ("{}", "its 'machine' is missing"),
    ('{"machine": {}, "results": {}}', "its 'results' is an object"), ('{"machine": {}, "results": []}', "have no row in common"),
    *((f'{{"machine": {{}}, "results": [{each}]}}', "row 0 of its results has no 'key'") for each in ("{}", "3")),
    ({"key": "bench/numpy/tvm"}, "two rows have the key 'bench/numpy/tvm'"),
    *(({"median_ns": each}, "the 'median_ns' of row 'bench/numpy/njit' is no number") for each in ("1", True, 10**400)),
    ({"iqr_ns": float("nan")}, "the 'iqr_ns' of row 'bench/numpy/njit' is no number"),
    ({"reference": "bench/numpy/tvm"}, "has a 'reference', but not a 'ratio'"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "words"), NO_RESULTS)
def test_what_is_no_result_file(tmp_path, content, words):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(document()))
    text = content if isinstance(content, str) else json.dumps(document(changes={"njit": content}))
    bad.write_bytes(text.encode(errors="surrogateescape"))
    for pair in ((good, bad), (bad, good)):
        done = run_here("compare", *pair)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("python -m fastexchange compare: ") and str(bad) in done.stderr and words in done.stderr


def test_no_file_and_no_threshold(tmp_path):
    done = run_here("compare", tmp_path / "none.json", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'none.json'} cannot be read: No such file" in done.stderr
    assert "Traceback" in run_here("compare", "--traceback", tmp_path / "none.json", tmp_path).stderr
    for percent in ("-1", "nan", "much"):
        assert "is not a percentage" in run_here("compare", "--threshold", percent, "a", "b").stderr


def test_the_results_in_this_repository():
    found = sorted((ROOT / "perf" / "results").glob("*-cpu.json"))
    assert len(found) >= 2
    done = run_here("compare", *found[-2:])
    assert done.returncode == 0, done.stderr
    keys = {row["key"] for row in json.loads(found[-1].read_text())["results"]}
    assert {"empty", "c", "njit", "tvm", "export", "own"} <= {key.rpartition("/")[2] for key in keys} & YARDSTICKS
