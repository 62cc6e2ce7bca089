"""``python -m fastexchange``: parsing, exit codes, tables; ``bench`` and its files, and what it does where a peer is missing."""

import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from frameworks import has_versioned_capsules, torch, tvm_ffi
from interpreter import environment_of, lines_said
from shell import run, run_here, without

import fastexchange
from fastexchange.measuring import files, tables

FIGURE = r"\s+(?:[\d.]+|-|not measurable here \(spread [^)]*\))"  # a busy machine may measure nothing
KINDS = {"numpy": "NumPy arrays", "dunder": "objects with only __dlpack__", "torch": "PyTorch tensors (CPU)"}


def table(output: str) -> dict[str, list[tuple[str, list[float]]]]:
    """The rows printed under each heading: their labels and numbers."""
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    for line in output.splitlines():
        if heading := re.fullmatch(r"3 (\S.*)", line):
            rows = groups[heading[1]] = []
        elif row := re.fullmatch(rf"  (\S.*?)({FIGURE})({FIGURE})({FIGURE})({FIGURE})", line):
            rows.append((row[1], [float("nan" if re.match(r"\s*(-|not)", cell) else cell) for cell in row.groups()[1:]]))
    return groups


@pytest.mark.slow
def test_bench_prints_a_table_versions_and_noise_and_writes_what_it_prints(tmp_path):
    file = tmp_path / "folder" / "new.json"
    done = run("bench", "--quick", "--json", file)  # the next ones do not name it
    assert done.returncode == 0, done.stderr
    document, groups = files.read(file), table(done.stdout)
    rows = {row["key"]: row for row in document["results"]}
    assert set(groups) == {name for short, name in KINDS.items() if short != "torch" or torch}
    for name, printed in groups.items():
        labels, short = [label for label, _ in printed], next(short for short in KINDS if KINDS[short] == name)
        assert labels[0].startswith("fastexchange") and any("__dlpack__" in label for label in labels)
        assert any("np.from_dlpack" in label for label in labels) or (short == "torch" and not has_versioned_capsules())
        assert printed[0][1][-1] == 1
        assert all(math.isnan(call + argument) or abs(call / 3 - argument) <= 0.1 for _, (call, _, argument, _) in printed)
        assert rows[f"bench/{short}/fast"]["reference"] == f"bench/{short}/export"
        control = rows[f"control/bench-{short}/b"]
        assert control["reference"] == f"control/bench-{short}/a"
        said = rf"({control['ratio']:.3f} x|not measurable here \(spread [^)]*\)) with {re.escape(name)}"
        assert re.search(rf"^Noise: .*{said}", done.stdout, re.MULTILINE)
    labels = [label for label, _ in groups["NumPy arrays"]]
    assert any(label.startswith("plain @njit") for label in labels)
    assert any("tvm-ffi" in label for label in labels) == (tvm_ffi is not None)
    assert not torch or any("x.numpy()" in label for label, _ in groups[KINDS["torch"]])
    assert ("PyTorch is not installed" in done.stdout) == (torch is None)
    lines = [line for line in done.stdout.splitlines() if re.search(r"(?:\s+[\d.]+){4}$", line)]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert f"fastexchange {fastexchange.__version__}" in done.stdout and f"numpy {np.__version__}" in done.stdout
    assert lines_said(done.stderr) == [f"fastexchange: {stage} …" for stage in ("importing", "compiling", "measuring")]

    printed = [row for rows in groups.values() for row in rows]
    written = [row for key, row in rows.items() if key.startswith("bench/")]
    for (label, (call, spread, _, ratio)), row in zip(printed, written, strict=True):
        assert label == row["label"]
        assert math.isnan(call) or abs(call - row["median_ns"]) <= 0.051
        assert math.isnan(spread) or abs(spread - row["iqr_ns"]) <= 0.051
        ratios = np.divide(row["samples_ns"], rows[f"{row['key'].rpartition('/')[0]}/fast"]["samples_ns"])
        assert math.isnan(ratio) or abs(ratio - np.median(ratios)) <= 0.051
    assert all(len(row["samples_ns"]) == document["rounds"] == 5 for row in rows.values())
    assert document["machine"]["packages"]["numpy"] == np.__version__


@pytest.mark.parametrize(("where", "why"), [("", "is a directory"), ("file/x", "is not a directory"), ("x", "cannot be written")])
def test_a_file_that_cannot_be_written_is_found_out_at_once(tmp_path, monkeypatch, where, why):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    done = run_here("--quick", "--json", tmp_path / where)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"python -m fastexchange bench: --json: \S+ {why}\n", done.stderr)
    assert "Traceback" in run_here("--quick", "--traceback", "--json", tmp_path / where).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), [
    ("", "PyTorch is not installed"), ("raise OSError('it is gone')", "PyTorch cannot be imported (OSError: it is gone)"),
], ids=["not installed", "broken"])  # fmt: skip
def test_without_torch_and_tvm_ffi(tmp_path, code, words):
    (tmp_path / "torch.py").write_text(code)
    done = run("--quick", path=without(tmp_path, "tvm_ffi", *["torch"] * (not code)))
    assert done.returncode == 0, done.stderr
    assert set(table(done.stdout)) == {"NumPy arrays", "objects with only __dlpack__"}
    assert words in done.stdout and "apache-tvm-ffi is not installed" in done.stdout


@pytest.mark.parametrize(("arguments", "words"), [
    ("--nonsense", "--nonsense"), ("nonsense", "nonsense"), ("bench --nonsense", "--nonsense"), ("compare a", "required: NEW"),
    *((f"{each} x", "unrecognized arguments: x") for each in ("bench", "doctor")),
    *((each, "required: PROGRAM") for each in ("run", "run --", "run -m")),
])  # fmt: skip
def test_unknown_or_missing_arguments(arguments, words):
    done = run_here(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr
    assert done.stderr.startswith(("usage: python -m fastexchange", "python -m fastexchange run: "))


@pytest.mark.parametrize("command", ["", "bench", "doctor", "explain", "run", "record", "precompile", "compare", "conformance"])
def test_help(command):
    done = run_here(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m fastexchange {command}" in done.stdout.partition("examples:")[2]
    assert max(map(len, done.stdout.splitlines())) <= 100
    codes = re.findall(r"^  (\d+) ", done.stdout.partition("exit codes:")[2], re.MULTILINE)
    assert command or (codes == ["0", "1", "2", "130"] and run_here("-h").stdout == done.stdout)


def test_version():
    done = run_here("--version")
    assert (done.returncode, done.stdout) == (0, f"fastexchange {fastexchange.__version__}\n")


LINES = ["first", tables.Row(("a", "1")), tables.Row(("long", "2\n22"), "red"), "second", tables.Row(("b", "333"))]


def test_tables(capsys, monkeypatch):
    plain = "         ns\n\nfirst\n  a       1\n  long    2\n         22\n\nsecond\n  b     333\n"
    tables.show(("", "ns"), LINES)
    assert capsys.readouterr().out == plain
    tables.show(("", ""), [tables.Row(("a", "1"))], left=(0, 1))
    assert capsys.readouterr().out == "a  1\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, "rich", None)  # it does not matter
        tables.show(("", "ns"), LINES)
        assert capsys.readouterr().out == plain
    pytest.importorskip("rich")
    tables.show(("", "ns"), LINES)
    printed = capsys.readouterr().out
    assert "\033[31mlong" in printed and "\033[1mfirst" in printed and "─" in printed


def test_ctrl_c(tmp_path):
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    done = run("explain", "interrupted:kernel", path=without(tmp_path, code=code))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.7, 1.5])
def test_ctrl_c_is_no_abort(tmp_path, seconds):
    """While others are imported or kernels are compiled: libraries may have threads then that an orderly end would trip over."""
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('fastexchange', run_name='__main__')"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": (tmp_path / "stderr").open("w")}
    with pipes["stderr"], subprocess.Popen([sys.executable, "-c", code, "bench"], env=environment_of(), **pipes) as process:
        time.sleep(seconds)
        assert process.poll() is None, (process.returncode, (tmp_path / "stderr").read_text())
        process.send_signal(signal.SIGINT)
        code = process.wait(120)
    said = (tmp_path / "stderr").read_text()
    # Before main() it is a traceback. In a destructor or a callback of a weak reference CPython reports it and goes on.
    is_lost = "Exception ignored" in said and "KeyboardInterrupt" in said
    assert code in (130, 1, -signal.SIGINT) or (code == 0 and is_lost), (code, said)
