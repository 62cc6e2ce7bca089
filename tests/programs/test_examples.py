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

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS = {
    "futures": [],
    "start_methods": [],
    "joblib_loky": ["joblib"],
    "dask_arrays": ["dask", "distributed"],
    "xarray_ufunc": ["dask", "distributed", "xarray"],
    "larger_than_memory": ["dask", "zarr", "pyarrow"],
    "mpi_ranks": ["mpi4py"],
    "ray_tasks": ["ray", "pandas", "pyarrow"],
    "data_loader": ["torch"],
    "shared_tensors": ["torch"],
    "gradient_hook": ["torch"],
}
SAID = {
    "start_methods": "fork: 8 tasks",
    "joblib_loky": "8 read the mapped array",
    "dask_arrays": "4 chunks, all read where Dask has them",
    "larger_than_memory": "the array does not fit",
    "mpi_ranks": "2 ranks",
    "ray_tasks": "4 without a copy",
}
"""What a program has found beside that no worker has compiled."""

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

pytestmark = [pytest.mark.slow, needs_fork]


def test_each_example_is_tested_and_described():
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == set(NEEDS)
    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text("utf-8"))) == programs


@pytest.mark.parametrize("name", NEEDS)
def test_an_example(name, tmp_path):
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if name == "mpi_ranks" and MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    root = str(EXAMPLES.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment |= {"RAY_AUTH_MODE": "disabled", "DASK_TEMPORARY_DIRECTORY": str(tmp_path)}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIEXEC, "-n", "2"] if name == "mpi_ranks" else []
    command += [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = re.findall(r"(-?\d+) compiled by", done.stdout)
    assert compiled and set(compiled) == {"0"} and SAID.get(name, "") in done.stdout, done.stdout
