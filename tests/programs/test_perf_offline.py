"""``perf/`` on a GPU machine without a network: what is left for the next call, what comes along, and no PyTorch."""

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from interpreter import run_python
from perf_programs import PERF, needs_stub


def _check(perf, monkeypatch, tmp_path, files):
    check = perf("cuda_check")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "FILES", [tmp_path / name for name in files])
    monkeypatch.setattr(check.cuda_places, "place", lambda: SimpleNamespace(is_gpu=False, described=lambda: {"name": "none"}))

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["cuda_check.py", "--stub", *map(str, options)])
        return check.main()

    return check, call


def test_the_check_ends_in_time_and_goes_on(perf, monkeypatch, tmp_path, capsys):
    """The file that the time did not suffice for is the first of the next call, which runs no file again."""
    once = "import pathlib\ndef test():\n    with open({name!r}, 'a') as file: file.write('x')\n"
    slow = "import time\n" + once + "    time.sleep({seconds})\n"
    marks = [str(tmp_path / f"{letter}.mark") for letter in "abc"]
    files = {
        "test_a.py": once.format(name=marks[0]), "test_b.py": slow.format(name=marks[1], seconds=600),
        "test_c.py": once.format(name=marks[2]),
    }  # fmt: skip
    file = tmp_path / "found.json"
    check, call = _check(perf, monkeypatch, tmp_path, files)
    real, limits = check.run_file, []

    def run_file(path, expression, limit):
        limits.append((path.name, limit))
        return real(path, expression, limit if path.name != "test_b.py" else 5)  # the time is over while it runs

    monkeypatch.setattr(check, "run_file", run_file)
    monkeypatch.setattr(check, "_STARTED", -20)  # importing has taken some of the time
    monkeypatch.setattr(check.time, "monotonic", iter([0, 10, 100, 100, 100]).__next__)
    assert call("--json", file, "--minutes", 1) == 3
    assert [name for name, _ in limits] == ["test_a.py", "test_b.py"] and limits[1][1] == 30
    found = [(row["file"], row["outcome"]) for row in json.loads(file.read_text())["files"]]
    assert found == [("test_a.py", "passed"), ("test_b.py", "unfinished")]
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []
    assert "2 files are left" in capsys.readouterr().out
    (tmp_path / "test_b.py").write_text(once.format(name=marks[1]))
    monkeypatch.setattr(check, "run_file", real)
    monkeypatch.setattr(check.time, "monotonic", lambda: -20)
    assert call("--json", file, "--minutes", 5) == 0
    assert [row["outcome"] for row in json.loads(file.read_text())["files"]] == ["passed"] * 3
    assert [len(Path(mark).read_text()) for mark in (marks[0], marks[2])] == [1, 1]
    with pytest.raises(SystemExit, match="of other tests"):
        call("-k", "other", "--json", file, "--minutes", 5)


def test_a_file_that_takes_long_is_tried_again_with_more_time(perf, monkeypatch, tmp_path):
    """First of all; if it does not end then, it is hung: else no call would come past it."""
    check, slow, other, rows, limits = perf("cuda_check"), tmp_path / "test_slow.py", tmp_path / "test_other.py", [], []

    def run_file(path, expression, limit):
        limits.append((path.name, limit))
        return {"file": path.name, "outcome": "hung" if path is slow else "passed", "seconds": limit}

    def call(minutes):
        now = check.time.monotonic()
        monkeypatch.setattr(check, "_STARTED", now)
        monkeypatch.setattr(check.time, "monotonic", lambda: now)
        is_complete = check.run_files([other, slow], rows, "", minutes, lambda row: None)
        return is_complete, {row["file"]: row["outcome"] for row in rows}

    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "run_file", run_file)
    assert call(0) == (False, {})
    assert call(1) == (False, {"test_other.py": "passed", "test_slow.py": "unfinished"})
    assert call(0.5)[1]["test_slow.py"] == call(1)[1]["test_slow.py"] == "unfinished"  # no more time than it has had
    assert call(2) == (True, {"test_other.py": "passed", "test_slow.py": "hung"})
    assert limits == [("test_other.py", 60), *(("test_slow.py", 60 * minutes) for minutes in (1, 0.5, 1, 2))]
    rows.clear()
    assert call(60)[1]["test_slow.py"] == "hung"  # the most that a file gets


@needs_stub
def test_launches_are_measured_in_parts(tmp_path):
    """Without PyTorch, too: tensors of the driver's memory. A package that has been measured is not measured again."""
    file = tmp_path / "run.json"
    script = tmp_path / "bare.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(PERF)!r})\n"
        "import cuda_places\n"
        "stub = cuda_places.Stub().stub\n"  # the driver of this process
        "cuda_places.cuda_stub.real_driver = lambda: True\n"
        "stub.set_fast(False)\n"
        "import cuda_launches\n"
        "sys.exit(cuda_launches.main())\n"
    )
    command = [sys.executable, "-W", "ignore", str(script), "--no-torch", "--rounds", "1", "--json", str(file), "--minutes"]

    def call(minutes):
        done = subprocess.run([*command, str(minutes)], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 3), done.stderr
        return done

    done = call(0.0001)
    assert done.returncode == 3 and not file.exists() and "too few" in done.stdout
    done = call(20)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    device = document["machine"]["device"]
    assert device["torch_cuda"] is None and device["capability"] and device["memory"] > 0
    assert "their rows need PyTorch" in done.stdout
    packages = [name for name in ("numba-cuda", "numba-cuda-mlir") if importlib.util.find_spec(name.replace("-", "_"))]
    rows = document["results"]
    assert {f"{package}/loop" for package in packages} <= {row["key"] for row in rows}
    document["results"] = [row for row in rows if row["key"].startswith(packages[0] + "/")]  # as a call that ended after it
    file.write_text(json.dumps(document))
    done = call(20)
    assert done.returncode == 0 and f"{packages[0]} has been measured" in done.stdout
    again = json.loads(file.read_text())
    assert [row for row in again["results"] if row["key"].startswith(packages[0] + "/")] == document["results"]
    assert {row["key"] for row in again["results"]} == {row["key"] for row in rows}
    assert all(target["met"] is not None for target in again["targets"] if target["call"].startswith(packages[0] + ":"))
    assert "Nothing is left" in call(20).stdout
    document["machine"]["device"]["name"] = "another"
    file.write_text(json.dumps(document))
    done = subprocess.run([*command, "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "of another device" in done.stderr


@pytest.mark.parametrize(
    ("name", "python", "found"),
    [("numpy", "3.12", "numpy==2.5.5"), ("numpy", "3.11", "numpy==2.4.6"), ("numpy", "3.10", "numpy==2.2.6"),
     ("numba-cuda", "3.12", "numba-cuda==0.30.4"), ("numpy<2.5", "3.12", "numpy<2.5"), ("cffi", "3.12", "cffi==2.1.1"),
     ("unknown", "3.12", "unknown")],
)  # fmt: skip
def test_what_is_fetched_has_the_pinned_version(perf, name, python, found):
    constraints = """
cffi==2.1.1
numpy==2.2.6; python_version < "3.11"
numpy==2.4.6; python_version == "3.11"
numpy==2.5.5; python_version > "3.11"
numba-cuda==0.30.4; python_version < "3.12"
numba-cuda-mlir==0.6.0; python_version >= "3.11"
"""
    assert perf("offline").pinned(name, python, constraints) == found


def _interrupted(*arguments, **options):
    raise KeyboardInterrupt


def test_a_wheel_packed_anew_is_installed_without_a_network(perf, monkeypatch, tmp_path):
    offline = perf("offline")
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    wheel = old / "made_here-1.0-py3-none-any.whl"
    content = b"VALUE = 7\n" + b"#" * 100_000
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_here.py", content)
        archive.writestr("made_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-here\nVersion: 1.0\n")
        archive.writestr("made_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("made_here-1.0.dist-info/RECORD", f"made_here.py,sha256={digest},{len(content)}\n")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(offline.zipfile.ZipFile, "writestr", _interrupted)
        offline.pack(wheel, new)
    assert not list(new.glob("*.whl"))
    packed = offline.pack(wheel, new)
    assert packed.name == wheel.name and packed.stat().st_size < wheel.stat().st_size / 10
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    command = [python, str(PERF / "offline.py"), "install", "--folder", str(new)]
    subprocess.run(command, check=True, env={**os.environ, "PIP_INDEX_URL": "http://localhost:9/", "PIP_NO_CACHE_DIR": "1"})
    assert subprocess.check_output([python, "-c", "import made_here; print(made_here.VALUE)"], text=True) == "7\n"
    done = subprocess.run([*command[:-1], str(old / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "offline.py fetch" in done.stderr


@pytest.mark.parametrize("program", ["cuda_launches", "cuda_check"])
def test_without_cuda_bindings_there_is_one_line(program):
    script = f"""
    import sys
    sys.path.insert(0, {str(PERF)!r})
    sys.modules["cuda"] = sys.modules["cuda.bindings"] = None
    sys.argv = ["{program}.py", "--stub"]
    import {program}
    sys.exit({program}.main())
    """
    done = run_python(script, check=False)
    assert done.returncode == 1 and done.stderr.startswith("Launches need cuda-bindings, which is not installed: pip install ")
    assert done.stderr.count("\n") == 1


def test_fetching_says_what_it_does(perf, monkeypatch, tmp_path, capsys):
    offline = perf("offline")

    def download(command, **options):
        if "download" in command:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "made-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr("made.py", b"#" * 2**20)
        return SimpleNamespace(stdout="", returncode=0)

    monkeypatch.setattr(offline.subprocess, "run", download)
    (tmp_path / "old.whl").write_text("")
    assert offline.fetch(["made"], "3.12", tmp_path, 64) == 0
    said = capsys.readouterr().out
    assert said.startswith("downloading 1 wheels for Python 3.12: made\n") and "0.0 MiB instead of     1.0  made-1.0" in said
    assert [each.name for each in tmp_path.iterdir()] == ["made-1.0-py3-none-any.whl"]
