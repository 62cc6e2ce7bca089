"""The programs of ``examples/``, with the engines' own schedulers. An engine that is not installed is skipped."""

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

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
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
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def test_each_example_is_tested_and_described():
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == set(PROGRAMS)
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text("utf-8"))) == programs


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("name", at_night(PROGRAMS, "futures", "start_methods"))
def test_an_example(name, tmp_path):
    modules, said = PROGRAMS[name]
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if name == "mpi_ranks" and MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    changes = {"RAY_AUTH_MODE": "disabled", "DASK_TEMPORARY_DIRECTORY": str(tmp_path)}
    environment = environment_of(**changes, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    command = [MPIEXEC, "-n", "2"] if name == "mpi_ranks" else []
    command += [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = re.findall(r"(-?\d+) compiled by", done.stdout)
    assert set(compiled) == ({"0"} if name != "jax_training" else set()) and said in done.stdout, done.stdout
