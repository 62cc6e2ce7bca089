"""The programs of ``examples/``, with the engines' own schedulers, and the scripts of ``docs/projects/``.

The latter print what their pages say of other projects: where one no longer does, change its page. What needs something that is
not installed is skipped.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import needs_fork
from interpreter import environment_of
from nights import at_night

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PROJECTS = ROOT / "examples", ROOT / "docs" / "projects"
# by program, the modules that it needs, and what it finds beside that no worker, if it has some, has compiled
PROGRAMS = {
    "futures": ([], ""), "start_methods": ([], "fork: 8 tasks"),
    "joblib_loky": (["joblib"], "8 read the mapped array"),
    "dask_arrays": (["dask", "distributed"], "4 chunks, all read where Dask has them"),
    "xarray_ufunc": (["dask", "distributed", "xarray"], ""),
    "larger_than_memory": (["dask", "zarr", "pyarrow"], "the array does not fit"),
    "mpi_ranks": (["mpi4py"], "2 ranks"), "ray_tasks": (["ray", "pandas", "pyarrow"], "4 without a copy"),
    "data_loader": (["torch"], ""), "shared_tensors": (["torch"], ""), "gradient_hook": (["torch"], ""),
    "jax_training": (["jax"], "as with jax.numpy alone"),
}  # fmt: skip
# by script, the modules that it needs, and its finding as it prints it
FINDINGS = {
    "exchange_api": (["torch"], r"torch +Tensor has a table(?s:.*)that PyTorch does not have: RuntimeError; deleter called: 0"),
    "jax_and_cupy": (["jax", "torch", "tvm_ffi"], r"JAX: tvm-ffi, three arrays \(no table\)"),
    "torch_negated": (["torch"], r"by the exchange table +\[2\.0, -4\.0\] WRONG"),
    "numba_leaks": ([], r"passed_to_the_callee +\+100 +\+100"),
    "cuda_ptx": ([], r"C order: \d+ instructions, 0 multiplications"),
}
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.mark.parametrize(("folder", "programs"), [(EXAMPLES, PROGRAMS), (PROJECTS, FINDINGS)], ids=["examples", "projects"])
def test_each_program_is_tested_and_described(folder, programs):
    pages = "".join(page.read_text("utf-8") for page in folder.glob("*.md"))
    assert {path.stem for path in folder.glob("*.py")} == set(programs) == set(re.findall(r"\((\w+)\.py\)", pages))


def said_by(program: Path, modules: list[str], folder: Path, *command: str, **environment: str) -> str:
    """What a program prints that needs these modules, run in a folder. `command`: what runs Python."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command, environment = [*command, sys.executable, str(program)], environment_of(**environment)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("name", at_night(PROGRAMS, "futures", "start_methods"))
def test_an_example(name, tmp_path):
    if name == "mpi_ranks" and MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    modules, finding = PROGRAMS[name]
    settings = {"RAY_AUTH_MODE": "disabled", "DASK_TEMPORARY_DIRECTORY": str(tmp_path)}
    settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIEXEC, "-n", "2"] if name == "mpi_ranks" else []
    said = said_by(EXAMPLES / f"{name}.py", modules, tmp_path, *command, **settings)
    compiled = re.findall(r"(-?\d+) compiled by", said)
    assert set(compiled) == ({"0"} if name != "jax_training" else set()) and finding in said, said


@pytest.mark.nightly
@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding(name, tmp_path):
    script, (modules, finding) = PROJECTS / f"{name}.py", FINDINGS[name]
    assert "fastexchange" not in script.read_text("utf-8")
    said = said_by(script, modules, tmp_path)
    assert re.search(finding, said), said
