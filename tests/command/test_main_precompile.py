"""``python -m fastexchange precompile`` and ``record``: what is compiled, kept, written down, refused."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import numba
import numpy as np
import pytest
from interpreter import copy_native_code, lines_said
from numba import types
from numba.core import sigutils
from shell import run, run_here

from fastexchange import fast_args
from fastexchange.calls.kernel_cache import FunctionCache
from fastexchange.calls.signature_text import text_of, types_in

MODULE = """
import numpy as np
from fastexchange import fast_args

@fast_args(cache=True)
def scaled(x, factor=2.0): return x.sum() * factor
@fast_args(cache=True)
def pair(t, names=None): return t[0].sum() + t[1]
@fast_args
def loose(x): return x
@fast_args(cache=True)
def bad(x): return x.no_such_attribute
def made():
    @fast_args
    def inner(x): return x
    return inner
class Holder:
    @staticmethod
    @fast_args(cache=True)
    def kernel(x): return x - 1
inner, number = made(), 3

def __precompile__():
    return [(scaled, "(float64[::1], float64)", (np.ones(2, "f4"), 3)), (Holder.kernel, {"x": np.ones(2)})]
"""
PROGRAM = """
import sys
import numpy as np
import worked as w
from fastexchange import fast_args

@fast_args
def own(x): return x

w.scaled(np.ones(3)); w.scaled(np.ones((2, 2), "f4"), 2); w.pair((np.ones(3)[::2], 1.5)); w.loose(1); w.inner(2); own(3)
w.Holder.kernel(np.ones(1)); w.loose(np.zeros(1, "i4,f8"))
print(sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""
AGAIN = """
import worked as w, numpy as np
w.scaled(np.ones(2), 3.0), w.scaled(np.ones(2, "f4"), 3), w.Holder.kernel(np.ones(2))
print([sum(kernel.stats.cache_misses.values()) for kernel in (w.scaled, w.Holder.kernel)])
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in {"worked": MODULE, "program": PROGRAM, "again": AGAIN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def imported(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "worked", raising=False)
    yield folder
    sys.modules.pop("worked", None)


# ---- in other processes ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_precompiled_modules(folder):
    copy_native_code(folder / "cache")
    environment = {"path": folder, "NUMBA_CACHE_DIR": str(folder / "cache")}
    done = run("precompile", "worked", "worked:Holder.kernel", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition("(")[0] for line in lines] == ["worked:scaled"] * 2 + ["worked:Holder.kernel"] * 2
    assert all(f": kept in {folder / 'cache'}" in line for line in lines)
    assert run("record", "-o", folder / "again.json", folder / "again.py", **environment).stdout == "[0, 0]\n"
    file = run("precompile", folder / "worked.py", **environment)
    assert file.returncode == 0 and file.stdout.count(": kept in ") == 3


@pytest.mark.slow
def test_a_recorded_program(folder):
    copy_native_code(folder / "cache"), copy_native_code(folder / "other")
    environment = {"path": folder, "NUMBA_CACHE_DIR": str(folder / "cache")}
    output = folder / "recorded.json"
    done = run("record", "-o", output, "--", folder / "program.py", "3", "-o", "x", **environment)
    assert done.returncode == 3 and done.stdout == "['3', '-o', 'x']\n", done.stderr
    recorded = json.loads(output.read_text())
    assert recorded["kernels"] == {
        "worked:Holder.kernel": ["(float64[::1],)"], "worked:loose": ["(int64,)"],
        "worked:pair": ["(Tuple((float64[:], float64)), Omitted(None))"],
        "worked:scaled": ["(float32[:, ::1], int64)", "(float64[::1], Omitted(2.0))"],
    }  # fmt: skip
    left_out = recorded["left_out"]
    assert {name.partition("(")[0] for name in left_out} == {"__main__:own", "worked:loose", "worked:made.<locals>.inner"}
    assert all(name in done.stderr for name in left_out) and "5 signatures of 4 kernels" in done.stderr
    environment["NUMBA_CACHE_DIR"] = str(folder / "other")
    made = run("precompile", output, **environment)
    assert made.returncode == 1 and made.stdout.count(": kept in ") == 4, made.stdout + made.stderr
    assert "worked:loose(int64): not kept: it has no cache=True" in made.stdout and lines_said(made.stderr) == []
    (folder / "again.py").write_text(PROGRAM.replace("sys.exit", "print(w.scaled.stats.cache_misses)\nsys.exit"))
    again = run("record", "-o", folder / "again.json", folder / "again.py", "0", **environment)
    assert again.stdout.splitlines()[-1] == "Counter()", "a signature that was recorded was compiled again"


def test_a_child_process_is_not_recorded(folder):
    child = "worked.scaled(np.ones(2)), os._exit(0)"
    (folder / "parent.py").write_text(f"import os, worked, numpy as np\nif not os.fork(): {child}\nos.wait()")
    done = run("record", "-o", folder / "recorded.json", folder / "parent.py", path=folder)
    assert done.returncode == 0 and "0 signatures of 0 kernels" in done.stderr and "child processes" in done.stderr


@pytest.mark.parametrize(("program", "is_kept"), [("os.kill(os.getpid(), signal.SIGTERM)", True), ("[", False)])
def test_an_earlier_file_is_kept_if_the_program_is_killed(imported, program, is_kept):
    """Where there is no program: ``test_main_run.py``."""
    (imported / "recorded.json").write_text("kept")
    (imported / "dies.py").write_text(f"import os, signal\n{program}\n")
    done = run("record", "-o", "recorded.json", "dies.py")
    assert done.returncode != 0 and ("0 signatures" in done.stderr) is not is_kept
    assert ((imported / "recorded.json").read_text() == "kept") is is_kept and not list(imported.glob(".*"))


@pytest.mark.slow
def test_the_packages_own_code():
    said = [run("precompile") for _ in range(2)]
    assert [(done.returncode, "kept in" in done.stdout) for done in said] == [(0, True)] * 2
    assert "compiled 0: " in said[1].stdout, said[1].stdout


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_a_kernel_that_is_not_compiled_or_not_kept(imported):
    listed = "[(bad, (1,), '(int8,)'), (loose, (1,)), (scaled, (1, object()))]"
    (imported / "worked.py").write_text(f"{MODULE}\n__precompile__ = {listed}\n")
    done = run_here("precompile", "worked")
    assert done.returncode == 1 and done.stderr == ""
    said = [": not compiled: TypingError: "] * 2 + ["no cache=True", "not compiled: UnknownType: scaled(): argument 'factor'"]
    assert all(words in line for words, line in zip(said, done.stdout.splitlines(), strict=True)), done.stdout
    (line,) = (line for line in run_here("explain", "worked:inner").stdout.splitlines() if line.startswith("  pickle"))
    assert "carries no machine code: nothing is compiled in this process" in line


TARGETS = [  # a target, what the module lists, and what is said
    *(("worked", listed, "list of tuples") for listed in ("number", "[scaled]", "[(scaled,)]")),
    ("worked", "None", "has no __precompile__"), ("worked", "[]", "is empty"), ("worked", "[(number, 3)]", "is not a kernel"),
    ("worked", "lambda: 1 / 0", "failed: ZeroDivisionError"), ("worked", "lambda: exit(5)", "failed: SystemExit: 5"),
    ("worked:number", "[(scaled, (1,))]", "is not a kernel"),
    ("worked:loose", "[(scaled, (1,))]", "has no entry for loose"),
    ("worked:none", "[(scaled, (1,))]", "its kernels: bad, inner, loose, pair, scaled"),
    ("no_such_module", "[]", "cannot be imported"), ("no_such.json", "[]", "cannot be read"),
    ("worked.json", "[]", "is not a file of"), ("empty.json", "[]", "has no signatures"),
    ("none.json", "[]", "has no signatures"), ("evil.json", "[]", "is no signature"), ("file.json", "[]", "names a file"),
]  # fmt: skip
KEPT = {
    "worked": {"worked:scaled": [3]}, "empty": {}, "none": {"worked:scaled": []}, "file": {"worked.py:scaled": []},
    "evil": {"worked:scaled": ["__import__('os').mkdir('made')"]},
}  # fmt: skip


@pytest.mark.parametrize(("target", "listed", "said"), TARGETS)
def test_targets_that_name_nothing(imported, target, listed, said):
    (imported / "worked.py").write_text(f"{MODULE}\n__precompile__ = {listed}\n")
    for name, kernels in KEPT.items():
        (imported / f"{name}.json").write_text(json.dumps({"kernels": kernels}))
    done = run_here("precompile", target)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("python -m fastexchange precompile: ") and said in done.stderr
    assert not (imported / "made").exists()


@pytest.mark.parametrize("arguments", ["precompile worked", "explain worked:loose"])
def test_without_a_compiler(folder, arguments):
    done = run(*arguments.split(), path=folder, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 2 and "NUMBA_DISABLE_JIT is set" in done.stderr and "0x" not in done.stderr


def test_a_kernel_whose_code_has_no_folder(imported, monkeypatch):
    """It has ``cache=True``, and is said to have it."""
    monkeypatch.setattr(FunctionCache, "__init__", Mock(side_effect=RuntimeError("no locator")))
    (imported / "homeless.py").write_text(f"{MODULE}\n__precompile__ = [(scaled, '(float64[::1], float64)')]\n")
    with pytest.warns(RuntimeWarning, match="scaled: no folder can be written") as told:
        done = run_here("precompile", "homeless")
    assert (Path(told[0].filename).name, told[0].lineno) == ("homeless.py", 5)
    said = "cache=True, but no folder can be written: set NUMBA_CACHE_DIR"
    assert done.returncode == 1 and f"not kept: {said}" in done.stdout
    assert said in run_here("explain", "homeless:scaled").stdout


@pytest.mark.parametrize(("arguments", "said"), [
    ("doctor --bogus", "usage: python -m fastexchange doctor "),
    ("record program.py", "required: -o"), ("record -o x.json", "required: PROGRAM"),
    ("record -o x.txt program.py", "end in .json"),
    ("record -o none/x.json program.py", "cannot be written"), ("record -o folder.json program.py", "cannot be written"),
    ("record -o x.json none.py", "there is no file 'none.py'\n"), ("record -o x.json none", "to run a module, give -m none"),
])  # fmt: skip
def test_wrong_arguments(imported, arguments, said):
    (imported / "folder.json").mkdir()
    done = run_here(*arguments.split())
    assert done.returncode == 2 and said in done.stderr


# ---- signatures as text ----------------------------------------------------------------------------------------------
WITH_A_TEXT = [
    types.float64, types.bool_, types.none, types.unicode_type, types.complex64, types.float64[:, :, ::1], types.int8[::1, :],
    types.uint16[:], types.Array(types.float32, 2, "C", readonly=True), types.Array(types.float32, 1, "A", aligned=False),
    types.Array(types.int64, 0, "C"), types.UniTuple(types.int64, 2), types.UniTuple(types.int64, 1), types.Tuple(()),
    types.Tuple((types.int64, types.float64[:])), types.Optional(types.int32), types.Omitted(2.5), types.Omitted("a'b"),
    types.List(types.float64[::1], reflected=True), types.NPDatetime("ns")[:], types.bool_[:],
    types.Omitted(-1.5), types.Omitted(1 + 2j), types.Omitted(None),
]  # fmt: skip
NO_SIGNATURES = [
    "float64", "(float64)", "(print,)", "(open('made', 'w'),)", "(float64.__class__,)", "(float64(float64),)", "(Array,)",
    "(Array(float64, 1),)", "(Array(float64, 1, 'X'),)", "(Omitted(print),)", "(Omitted(value=1),)", "(Tuple(float64),)",
    "(float64[0],)", "(float64[::2],)", "(float64[1:],)", "(Function(print),)", "(List(float64, **{}),)", "(*(float64,),)",
    "(lambda: 1,)", "()()", "(" * 1000, "-" * 100_000, "(int64,)\0", "", "(no_such,)", "(__builtins__,)", "(np,)",
]  # fmt: skip


@pytest.mark.parametrize("numba_type", WITH_A_TEXT)
def test_types_as_text(numba_type):
    for given in ((numba_type, types.int8), (numba_type,), ()):
        assert types_in(text_of(given)) == sigutils.normalize_signature(text_of(given))[0] == given


@pytest.mark.parametrize("text", NO_SIGNATURES)
def test_text_that_is_no_signature(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no signature"):
        types_in(text)
    assert list(tmp_path.iterdir()) == []


def test_types_without_a_text():
    record = numba.from_dtype(np.dtype([("a", "i4")]))
    for numba_type in (record, types.Omitted(float("nan")), types.Omitted(np.ones(1)), types.Dispatcher(fast_args(lambda: 1))):
        assert text_of((numba_type,)) is None
