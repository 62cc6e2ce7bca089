"""``python -m fastexchange explain``: kernels, calls, launches, types and arguments; and errors of one line."""

import sys

import pytest
from frameworks import torch
from shell import ROOT, run, run_here

from fastexchange.__main__ import main

MODULE = """
import numba
import numpy as np
from fastexchange import fast_args

@fast_args(nogil=True, cache=True, fastmath=False, grad="allow", returns=np.ndarray)
def add(x, y=2.0):
    return x + y

@fast_args(out="x[n] -> out[n]")
def twice(x, out):
    for i in range(x.shape[0]):
        out[i] = 2 * x[i]

@numba.njit
def plain(x):
    return x

def function(x):
    return x

class Holder:
    kernel = twice

class Liar:
    __class__ = type(twice)

liar = Liar()
vector = np.ones(3)
launch = twice.bind(vector)
for _ in range(3):
    add(vector)
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "kernels_of_mine.py").write_text(MODULE)
    return tmp_path


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The module can be imported by this process, for as long as these tests last."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "kernels_of_mine.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop("kernels_of_mine", None)


def facts(output: str) -> dict[str, str]:
    """What is printed of a kernel, by name."""
    return {line[2:14].strip(): line[14:] for line in output.splitlines()[1:]}


@pytest.mark.slow
def test_a_kernel(module):
    done = run("explain", "kernels_of_mine:add", path=module)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("<fast_args kernels_of_mine.add(x, y=2.0)>\n")
    found = facts(done.stdout)
    assert found["defined in"] == f"{module / 'kernels_of_mine.py'}, line 6"
    assert found["parameters"] == "x, y=2.0"
    assert found["fast_args"] == "grad='allow', returns=numpy.ndarray"
    assert found["njit"] == "cache=True, fastmath=False, nogil=True"
    assert found["way"].startswith("native; it gives up the GIL")
    assert found["compiled"] == "array(float64, 1d, C), omitted(default=2.0)"
    assert found["calls"] == "2 fast, 1 slow in this process"
    assert found["disk cache"].endswith("__pycache__: 0 loaded, 1 compiled in this process")
    again = facts(run("explain", "kernels_of_mine:add", path=module).stdout)
    assert again["disk cache"].endswith("__pycache__: 1 loaded, 0 compiled in this process")


@pytest.mark.slow
def test_a_file(module):
    done = run("explain", f"{module / 'kernels_of_mine.py'}:Holder.kernel")
    assert (done.returncode, done.stderr) == (0, "")
    found = facts(done.stdout)
    assert found["fast_args"] == "grad='refuse', out='x[n] -> out[n]'"
    assert found["njit"] == "no options"
    assert found["way"] == "native; it borrows its tensors"
    assert found["disk cache"].startswith("off")


def test_a_file_with_the_name_of_a_module(tmp_path):
    (tmp_path / "numpy.py").write_text("from fastexchange import fast_args\nmine = fast_args(lambda x: x)\n")
    done = run("explain", f"{tmp_path / 'numpy.py'}:mine", "--args", "np.ones(3)")
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy.ndarray: path ndarray" in done.stdout


def test_a_launch(imported, capsys):
    assert main(["explain", "kernels_of_mine:launch"]) == 0
    printed = capsys.readouterr().out
    assert "bound to numpy.ndarray" in printed and "  x    numpy.ndarray: path ndarray" in printed
    assert "<fast_args kernels_of_mine.twice(x, out)>" in printed


def test_arguments(imported, capsys):
    assert main(["explain", "kernels_of_mine:vector"]) == 0
    assert capsys.readouterr().out == "numpy.ndarray: path ndarray (its C struct is read in place)\n"


@pytest.mark.parametrize(
    ("what", "path"),
    [("numpy:ndarray", "ndarray"), ("builtins:float", "scalar"), ("builtins:dict", "numba"), ("array:array", "buffer")],
)
def test_types(capsys, what, path):
    assert main(["explain", what]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("an instance of ") and f": path {path} (" in printed


def test_a_call(imported):
    done = run_here("explain", "kernels_of_mine:add", "--args", "np.ones(3, 'f4'), y=[1, 2][1]")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("add: new: the next such call compiles it\n")
    assert "as array(float32, 1d, C)" in done.stdout and "as int64" in done.stdout


def test_a_call_with_what_the_module_has(imported, capsys):
    assert main(["explain", "kernels_of_mine:add", "--args", "vector"]) == 0
    assert capsys.readouterr().out.startswith("add: known: native")


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_call_with_torch(imported, capsys):
    assert main(["explain", "kernels_of_mine:twice", "--args", "torch.ones(3, requires_grad=True)"]) == 0
    printed = capsys.readouterr().out
    assert "refused with BufferError" in printed and "requires grad" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing_of_this_name:x"], "nothing_of_this_name cannot be imported: ModuleNotFoundError: No module named"),
        (["kernels_of_mine"], "is not MODULE:OBJECT"),
        (["kernels_of_mine:"], "is not MODULE:OBJECT"),
        ([":add"], "is not MODULE:OBJECT"),
        (["none.py:add"], "there is no file none.py"),
        (["kernels_of_mine:ad"], "kernels_of_mine has no 'ad'; its kernels: add, twice"),
        (["kernels_of_mine:Holder.ad"], "kernels_of_mine has no 'ad' in Holder"),
        (["math:ad"], "it has no kernels of fast_args"),
        (["kernels_of_mine:plain"], "put @fast_args in the place of @njit"),
        (["kernels_of_mine:function"], "decorate it with @fast_args"),
        (["kernels_of_mine:plain", "--args", "1"], "put @fast_args in the place of @njit"),
        (["kernels_of_mine:vector", "--args", "1"], "--args is for kernels"),
        (["kernels_of_mine:liar", "--args", "1"], "--args is for kernels"),
        (["kernels_of_mine:add", "--args", "1, 2, 3"], "--args: TypeError: add() takes from 1 to 2 positional arguments"),
        (["kernels_of_mine:add", "--args", "x"], "--args: NameError"),
        (["kernels_of_mine:add", "--args", "1 +"], "--args: SyntaxError"),
        (["kernels_of_mine:add", "--args", "exit()"], "--args: "),
        (["kernels_of_mine:twice", "--args", "np.ones(3), np.ones(4)"], "--args: ValueError"),
    ],
)
def test_errors_are_one_line(imported, capsys, arguments, words):
    assert main(["explain", *arguments]) == 2
    printed, error = capsys.readouterr()
    assert printed == "" and error.startswith("python -m fastexchange explain: ") and error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "1 / 0", "def"])
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, ending):
    (tmp_path / "broken_module.py").write_text(f"{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_here("explain", "broken_module:x")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "broken_module cannot be imported: " in done.stderr
    shown = run_here("explain", "--traceback", "broken_module:x")
    assert shown.returncode == 2 and "Traceback" in shown.stderr and "broken_module.py" in shown.stderr


def test_without_the_compiler(module):
    code = MODULE.partition("class Holder")[0].replace("cache=True, ", "")
    (module / "kernels_of_mine.py").write_text(code)
    done = run("explain", "kernels_of_mine:add", path=module, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 2
    assert "NUMBA_DISABLE_JIT is set" in done.stderr


def test_a_kernel_of_this_repository():
    done = run_here("explain", "kernels.axpy:axpy")
    assert done.returncode == 0, done.stderr
    assert facts(done.stdout)["fast_args"].startswith("grad='refuse'")


def test_a_part_of_a_package_as_a_file():
    done = run("explain", f"{ROOT / 'kernels' / 'axpy.py'}:axpy")
    assert done.returncode == 2 and "attempted relative import" in done.stderr
