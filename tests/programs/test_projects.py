"""The scripts of ``docs/projects/`` print what their pages say of other projects. Where one no longer does, change its page."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import environment_of

PROJECTS = Path(__file__).resolve().parents[2] / "docs" / "projects"
# by script, the modules that it needs, and its finding as it prints it
FINDINGS = {
    "exchange_api": (["torch"], r"torch +Tensor has a table(?s:.*)that PyTorch does not have: RuntimeError; deleter called: 0"),
    "jax_and_cupy": (["jax", "torch", "tvm_ffi"], r"JAX: tvm-ffi, three arrays \(no table\)"),
    "torch_negated": (["torch"], r"by the exchange table +\[2\.0, -4\.0\] WRONG"),
    "numba_leaks": ([], r"passed_to_the_callee +\+100 +\+100"),
    "cuda_ptx": ([], r"C order: \d+ instructions, 0 multiplications"),
}


def test_each_script_is_tested_and_has_a_page():
    pages = "".join(page.read_text("utf-8") for page in PROJECTS.glob("*.md"))
    scripts = {path.stem for path in PROJECTS.glob("*.py")}
    assert scripts == set(FINDINGS) == set(re.findall(r"\((\w+)\.py\)", pages))


@pytest.mark.nightly
@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding(name, tmp_path):
    modules, finding = FINDINGS[name]
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    script = PROJECTS / f"{name}.py"
    assert "fastexchange" not in script.read_text("utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(), timeout=280, cwd=tmp_path)
    assert done.returncode == 0 and re.search(finding, done.stdout), done.stdout + done.stderr
