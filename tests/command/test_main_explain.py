"""``python -m fastexchange explain``: kernels, calls, launches, types and arguments; and errors of one line."""

import sys

import pytest
from frameworks import needs_torch
from shell import ROOT, run, run_here

MODULE = """
import numba
import numpy as np
from fastexchange import fast_args

@fast_args(nogil=True, cache=True, fastmath=False, grad="allow", returns=np.ndarray)
def add(x, y=2.0): return x + y

@fast_args(out="x[n] -> out[n]")
def twice(x, out): out[:] = 2 * x

def function(x): return x

class Holder:
    kernel = twice
class Liar:
    __class__ = type(twice)

plain, liar, vector = numba.njit(function), Liar(), np.ones(3)
launch = twice.bind(vector)
for _ in range(3):
    add(vector)
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """One from which the module can be imported by this process, for as long as these tests last."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "kernels_of_mine.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("kernels_of_mine", None)


def facts(output: str) -> dict[str, str]:
    return {line[2:14].strip(): line[14:] for line in output.splitlines()[1:]}


@pytest.mark.slow
def test_a_kernel(folder):
    done = run("explain", "kernels_of_mine:add", path=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("<fast_args kernels_of_mine.add(x, y=2.0)>\n")
    found = facts(done.stdout)
    assert found["way"].startswith("native; it gives up the GIL")
    assert found["disk cache"].endswith("__pycache__: 0 loaded, 1 compiled in this process")
    expected = {
        "defined in": f"{folder / 'kernels_of_mine.py'}, line 6", "parameters": "x, y=2.0",
        "fast_args": "grad='allow', returns=numpy.ndarray", "njit": "cache=True, fastmath=False, nogil=True",
        "compiled": "array(float64, 1d, C), omitted(default=2.0)", "calls": "2 fast, 1 slow in this process",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    again = facts(run("explain", "kernels_of_mine:add", path=folder).stdout)
    assert again["disk cache"].endswith("__pycache__: 1 loaded, 0 compiled in this process")


def test_a_file(folder, tmp_path):
    done = run_here("explain", f"{folder / 'kernels_of_mine.py'}:Holder.kernel")
    assert (done.returncode, done.stderr) == (0, "")
    found = facts(done.stdout)
    assert found["fast_args"] == "grad='refuse', out='x[n] -> out[n]'" and found["njit"] == "no options"
    assert found["way"] == "native; it borrows its tensors" and found["disk cache"].startswith("off")
    (tmp_path / "numpy.py").write_text("from fastexchange import fast_args\nmine = fast_args(lambda x: x)\n")
    done = run_here("explain", f"{tmp_path / 'numpy.py'}:mine", "--args", "np.ones(3)")
    assert (done.returncode, done.stderr) == (0, "") and "numpy.ndarray: path ndarray" in done.stdout


@pytest.mark.parametrize(("what", "words"), [
    ("kernels_of_mine:launch", "|bound to numpy.ndarray|  x    numpy.ndarray: path ndarray|kernels_of_mine.twice(x, out)>"),
    ("kernels_of_mine:vector", "numpy.ndarray: path ndarray (its C struct is read in place)\n"),
    ("kernels_of_mine:add --args vector", "add: known: native"),
    ("kernels_of_mine:add --args np.ones(3,'f4'),y=[1,2][1]",
     "add: new: the next such call compiles it\n|as array(float32, 1d, C)|as int64"),
    pytest.param("kernels_of_mine:twice --args torch.ones(3,requires_grad=True)", "|refused with BufferError|requires grad",
                 marks=needs_torch),
    ("kernels_of_mine:twice --args np.ones(3),np.ones(4)", "twice: refused with ValueError: |'out' (position 1): its shape is"),
    ("kernels_of_mine:twice --args np.ones((3,3))", "twice: refused with ValueError: |out: omitted"),
    *((name, f"an instance of |: path {path} (") for name, path in (
        ("numpy:ndarray", "ndarray"), ("builtins:float", "scalar"), ("builtins:dict", "numba"), ("array:array", "buffer"))),
    ("kernels.axpy:axpy", "<fast_args kernels.axpy.axpy(|grad='refuse'"),
])  # fmt: skip
def test_what_is_explained(what, words):
    """It begins with the first words, and has the others."""
    done = run_here("explain", *what.split(" "))
    assert (done.returncode, done.stderr) == (0, "")
    begin, *others = words.split("|")
    assert done.stdout.startswith(begin) and all(each in done.stdout for each in others), done.stdout


ERRORS = [
    ("nothing_of_this_name:x", "nothing_of_this_name cannot be imported: ModuleNotFoundError: No module named"),
    *((each, "is not MODULE:OBJECT") for each in ("kernels_of_mine", "kernels_of_mine:", ":add")),
    ("none.py:add", "there is no file none.py"),
    ("kernels_of_mine:ad", "kernels_of_mine has no 'ad'; its kernels: add, twice"), ("math:ad", "it has no kernels of fast_args"),
    ("kernels_of_mine:Holder.ad", "kernels_of_mine has no 'ad' in Holder"),
    ("kernels_of_mine:function", "decorate it with @fast_args"),
    *((f"kernels_of_mine:plain{more}", "put @fast_args in place of @njit") for more in ("", " --args 1")),
    *((f"kernels_of_mine:{each} --args 1", "--args is for kernels") for each in ("vector", "liar")),
    ("kernels_of_mine:add --args 1,2,3", "--args: TypeError: add() takes from 1 to 2 positional arguments"),
    *((f"kernels_of_mine:add --args {given}", f"--args: {error}")
      for given, error in (("x", "NameError"), ("1+", "SyntaxError"), ("exit()", ""))),
    (f"{ROOT / 'kernels' / 'axpy.py'}:axpy", "attempted relative import"),  # a part of a package as a file
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), ERRORS)
def test_errors_are_one_line(arguments, words):
    done = run_here("explain", *arguments.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("python -m fastexchange explain: ") and words in done.stderr


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "1 / 0", "def"])
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, ending):
    (tmp_path / "broken_module.py").write_text(f"{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    done, shown = (run_here("explain", *option, "broken_module:x") for option in ([], ["--traceback"]))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "broken_module cannot be imported: " in done.stderr
    assert shown.returncode == 2 and "Traceback" in shown.stderr and "broken_module.py" in shown.stderr
