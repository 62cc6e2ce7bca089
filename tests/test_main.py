"""``python -m fastexchange``: its table, its exit codes, and what it does where a peer is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks import torch, tvm_ffi

import fastexchange

ROOT = Path(fastexchange.__file__).resolve().parents[1]
NUMBER = r"\s+[\d.]+"
NEEDS_TORCH = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    """The command line in a new process, `path` first among the places that modules are imported from."""
    found = [str(path)] if path else []
    search = os.pathsep.join([*found, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "fastexchange", *arguments]
    environment = {**os.environ, "PYTHONPATH": search, "COLUMNS": "100"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def table(output: str) -> dict[str, list[tuple[str, list[float]]]]:
    """The rows printed under each heading: their labels and numbers."""
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    rows = None
    for line in output.splitlines():
        if heading := re.fullmatch(r"3 (\S.*)", line):
            rows = groups.setdefault(heading[1], [])
        elif row := re.fullmatch(rf"  (\S.*?)((?:{NUMBER}){{4}})", line):
            rows.append((row[1], [float(number) for number in row[2].split()]))
    return groups


@pytest.fixture(scope="module")
def quick() -> subprocess.CompletedProcess:
    return run("--quick")


def without(tmp_path: Path, *modules: str) -> Path:
    """A folder that makes modules of these names look as if they were not installed."""
    lines = [f"sys.modules[{module!r}] = None" for module in modules]
    (tmp_path / "sitecustomize.py").write_text("\n".join(["import sys", *lines, ""]))
    return tmp_path


def test_prints_a_table(quick):
    assert quick.returncode == 0, quick.stderr
    groups = table(quick.stdout)
    expected = {"NumPy arrays", "objects with only __dlpack__"}
    assert set(groups) == expected | ({"PyTorch tensors (CPU)"} if torch else set())
    for rows in groups.values():
        labels = [label for label, _ in rows]
        assert labels[0].startswith("fastexchange")
        assert any("np.from_dlpack" in label for label in labels)
        assert any("__dlpack__" in label for label in labels)
        assert rows[0][1][-1] == 1
    assert any(label.startswith("plain @njit") for label, _ in groups["NumPy arrays"])
    assert any("tvm-ffi" in label for label, _ in groups["NumPy arrays"]) == (tvm_ffi is not None)
    if torch:
        assert any("x.numpy()" in label for label, _ in groups["PyTorch tensors (CPU)"])


def test_the_numbers_of_a_row_belong_together(quick):
    for rows in table(quick.stdout).values():
        for _, (call, _, argument, ratio) in rows:
            assert abs(call / 3 - argument) <= 0.1
            assert 0.2 < call / rows[0][1][0] / ratio < 5  # a ratio of medians, a median of ratios


def test_names_the_versions(quick):
    assert f"fastexchange {fastexchange.__version__}" in quick.stdout
    assert f"numpy {np.__version__}" in quick.stdout


def test_says_nothing_on_stderr_without_a_terminal(quick):
    assert quick.stderr == ""


def test_columns_are_aligned(quick):
    lines = [line for line in quick.stdout.splitlines() if re.search(rf"(?:{NUMBER}){{4}}$", line)]
    assert len({len(line) for line in lines}) == 1


def test_bench_is_the_default():
    assert set(table(run("bench", "--quick").stdout)) >= {"NumPy arrays"}


def test_without_torch_and_tvm_ffi(tmp_path):
    done = run("--quick", path=without(tmp_path, "torch", "tvm_ffi"))
    assert done.returncode == 0, done.stderr
    assert set(table(done.stdout)) == {"NumPy arrays", "objects with only __dlpack__"}
    assert "PyTorch is not installed" in done.stdout
    assert "apache-tvm-ffi is not installed" in done.stdout


def test_a_broken_torch_is_left_out(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch is gone')\n")
    done = run("--quick", path=without(tmp_path, "tvm_ffi"))
    assert done.returncode == 0, done.stderr
    assert "PyTorch cannot be imported (OSError: libtorch is gone)" in done.stdout
    assert "PyTorch tensors (CPU)" not in table(done.stdout)


@NEEDS_TORCH
def test_torch_is_not_said_to_be_missing(quick):
    assert "PyTorch is not installed" not in quick.stdout


@pytest.mark.parametrize("arguments", [("--nonsense",), ("nonsense",), ("bench", "--nonsense"), ("bench", "more")])
def test_unknown_arguments(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: python -m fastexchange")
    assert arguments[-1] in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("bench", "--help")])
def test_help(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples:" in done.stdout


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"fastexchange {fastexchange.__version__}\n")
