"""The README and the pages in docs/: their programs run."""

import re
from pathlib import Path

import pytest
from interpreter import run_python

from fastexchange.command.build_hooks import Options

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_library_for_which_the_package_is_optional(is_installed):
    decorated, accelerated = programs("users/libraries.md")
    code = f"""
import sys
if not {is_installed}:
    sys.modules["fastexchange"] = None  # then its import fails
__name__ = "mylibrary"
{accelerated}
import numba, numpy as np
own = numba.njit(lambda x: x[0])
__name__ = "other"
theirs = numba.njit(lambda x: x[0])
{decorated.replace("cache=True, ", "")}
print([type(each).__name__ for each in (own, theirs, total)], total(np.ones(3)), own(np.ones(3)))
print([hasattr(each, "counts") for each in (own, theirs, total)])
"""
    kernel = "FastKernel" if is_installed else "CPUDispatcher"
    said = f"['CPUDispatcher', 'CPUDispatcher', '{kernel}'] 3.0 1.0\n{[is_installed, False, is_installed]}\n"
    assert run_python(code).stdout == said


def test_a_package_that_ships_its_kernels():
    """What its example lists is compiled, and the hooks read the options in its pyproject.toml."""
    (module,) = programs("how-to/shipping.md")
    code = f"{module}\nfor kernel, *calls in __precompile__():\n    print(kernel.precompile(*calls))"
    f64, f32 = "Array(float64, 1, 'C', False, aligned=True)", "Array(float32, 1, 'C', False, aligned=True)"
    assert run_python(code).stdout == f"[(float64, {f64}, {f64}), (float64, {f32}, {f32})]\n"
    tables = list(map(pytest.importorskip("tomllib").loads, programs("how-to/shipping.md", "toml")))
    hatchs, setuptools, others = (each["tool"] for each in tables)
    hatchs = hatchs["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert Options.read(hatchs["fastexchange"], "").targets == ["mypackage.kernels", "kernels.json"]
    assert Options.read(setuptools["fastexchange"], "").strict and others["cibuildwheel"]["repair-wheel-command"] == ""


@pytest.mark.slow
def test_the_readmes_examples_print_what_it_says():
    """What stands in a comment beside a ``print``."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    (README,) = DOCS.parent.glob("README.md")
    text = README.read_text("utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    said = run_python(program).stdout
    results = re.findall(r"^print\(.*# (tensor\(.*\))$", program, re.M)
    assert len(results) == 4 and re.findall(r"tensor\(.*\)", said) == results, said
    assert "[[2. 2. 2.]\n [2. 2. 2.]]" in said and "overhead" in said
    assert len(text.splitlines()) <= 150
