"""``kernel.explain(…)`` says where the code for a call's types comes from: compiled, on disk, in a pickle. It makes none."""

import numba
import numpy as np
import pytest
from interpreter import run_python

from fastexchange import fast_args

ARGUMENTS = np.ones(3), 2


def scaled(x, y):
    return x * y


def how(kernel) -> str:
    outcome = kernel.explain(*ARGUMENTS).outcome
    return outcome.removeprefix("new: the next such call ").removesuffix(" it")


@pytest.mark.parametrize("is_kept", [False, True])
def test_code_on_disk(tmp_path, monkeypatch, is_kept):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    first = fast_args(scaled, cache=is_kept)
    assert how(first) == "compiles"
    first(*ARGUMENTS)
    assert first.explain(*ARGUMENTS).kind == "native"
    second = fast_args(scaled, cache=is_kept)
    assert how(second) == ("loads" if is_kept else "compiles") and second.explain(*ARGUMENTS).kind == "new"
    assert not second.overloads and not second.stats.cache_hits and not second.stats.cache_misses
    second(*ARGUMENTS)
    assert sum(second.stats.cache_hits.values()) == is_kept
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        file.write_bytes(file.read_bytes()[:-1])  # is not believed
    assert how(fast_args(scaled, cache=is_kept)) == "compiles"


def test_code_that_is_compiled():
    kernel = fast_args(scaled)
    kernel.precompile("(float64[::1], int64)")
    assert how(kernel) == "finds compiled code, and takes"


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_code_in_a_pickle(tmp_path, is_compiled):
    code = "import pathlib, pickle, sys; from test_explain_code import *; kernel = fast_args(scaled); "
    code += "kernel(*ARGUMENTS); " * is_compiled + "pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(kernel))"
    run_python(code, str(tmp_path / "kernel"))  # in this process, tests may have registered extensions, which a pickle is for
    code = "import pathlib, pickle, sys; from test_explain_code import how; "
    code += "kernel = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); print(how(kernel), len(kernel.overloads))"
    printed = run_python(code, str(tmp_path / "kernel")).stdout.strip()
    assert printed == ("loads 0" if is_compiled else "compiles 0")
