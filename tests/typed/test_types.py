"""In strict mode, mypy and pyright accept the programs in ``accepted``, and refuse lines of ``refused``."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from interpreter import FOR_TESTS, interpret

import fastexchange
from fastexchange.calls.options import numba_options

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
STUB = Path(fastexchange.__file__).with_suffix(".pyi")
NOT_OURS = (
    r"\bcuda\.grid\(|import (mykernels|vectors)|scale_cuda\.as_torch_op"
    r"|Series\.__dlpack_c_\w+ =|y\[:\] = factor"
)
"""Numba has no types; modules and a kernel that a page leaves to its reader; an attribute
that is given to a class; an output whose default is None."""
UNTYPED = {
    "fast_args is inconsistent",  # a test here has its options
    "FastKernel is inconsistent, metaclass differs", "TorchOp.__copy__", "TorchOp.__deepcopy__",
    "FastKernel.__class_getitem__", "BoundLaunch.__class_getitem__",  # type checkers have ``Generic`` for it
    "BoundLaunch.__call__ is inconsistent",  # it takes any arguments, to refuse them
}  # fmt: skip
"""What the types leave out."""


def errors_of(checker: str, folder: Path, *options: str, mode: str = "strict") -> set[tuple[str, int]]:
    """(file, line) of what a type checker says about the programs in a folder. `options`: of mypy; `mode`: pyright's."""
    pytest.importorskip(checker, reason=f"{checker} is not installed: pip install '.[dev]'")
    if checker == "mypy":
        files = sorted(map(str, folder.glob("*.py")))
        command = ["mypy", "--strict", *options, "--config-file=", f"--cache-dir={folder / 'mypy'}", "--output=json", *files]
    else:
        (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": mode}))
        command = ["pyright", "--outputjson", f"--pythonpath={sys.executable}", f"--project={folder}"]
    done = interpret("-m", *command, folder=folder, seconds=FOR_TESTS)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    if checker == "mypy":
        said = [json.loads(line) for line in done.stdout.splitlines()]
        return {(Path(each["file"]).name, each["line"]) for each in said if each["severity"] == "error"}
    said = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in said if each["severity"] == "error"}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_programs(checker, tmp_path):
    pytest.importorskip("torch")
    folder = tmp_path / "programs"
    folder.mkdir()
    wrong = set()
    for path in [*HERE.glob("accepted/*.py"), *HERE.glob("refused/*.py")]:
        text = path.read_text()
        (folder / path.name).write_text(text)
        wrong |= {(path.name, i) for i, line in enumerate(text.splitlines(), 1) if line.endswith("# refused")}
    assert len(wrong) >= 15
    assert errors_of(checker, folder) == wrong


@pytest.mark.nightly
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_the_programs_of_the_documents(checker, tmp_path):
    """Their functions have no annotations: strict modes want them of whoever writes such a function."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    root, lines = STUB.parents[1], {}
    pages = {root / "README.md", *root.glob("docs/*.md"), *root.glob("docs/[hu]*/*.md")}
    for page in pages - {root / "docs" / "how-to" / "typing.md"}:  # which shows errors
        blocks = re.findall(r"^(<!-- not run: a module of its own -->\n)?```python\n((?s:.*?))^```", page.read_text(), re.M)
        program = "\n".join(block for is_other, block in blocks if not is_other)
        if program:
            file = f"{page.parent.name}_{page.stem}.py".replace("-", "_")
            (tmp_path / file).write_text(program)
            lines[file] = program.splitlines()
    own = "--allow-untyped-defs", "--allow-untyped-calls", "--allow-redefinition"
    said = [f"{file}: {lines[file][line - 1].strip()}" for file, line in errors_of(checker, tmp_path, *own, mode="standard")]
    assert len(lines) > 15
    assert "\n".join(each for each in said if not re.search(NOT_OURS, each)) == ""


@pytest.mark.nightly
def test_the_types_are_those_of_the_package():
    """mypy compares them: names, parameters, defaults, values of enumerations."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install '.[dev]'")
    command = ["mypy.stubtest", "fastexchange", "--mypy-config-file", str(STUB.parents[1] / "pyproject.toml"), "--concise"]
    done = interpret("-m", *command, seconds=FOR_TESTS)
    said = [line.removeprefix("fastexchange.") for line in done.stdout.splitlines() if line.startswith("fastexchange.")]
    public = [line for line in said if re.split("[ .]", line)[0] in fastexchange.__all__ and ".__init__ " not in line]
    assert {line for line in public if not line.startswith(tuple(UNTYPED))} == set()
    assert {each for each in UNTYPED if not any(line.startswith(each) for line in public)} == set()


def test_options_are_those_of_fast_args_and_njit():
    classes = {each.name: each for each in ast.parse(STUB.read_text()).body if isinstance(each, ast.ClassDef)}
    fields = [*classes["_CudaOptions"].body, *classes["_Options"].body]
    typed = {each.target.id for each in fields if isinstance(each, ast.AnnAssign)}
    known = numba_options()
    assert known is not None
    own = fastexchange.fast_args.__kwdefaults__.keys() - {"out"}
    assert typed == own | {name for name in known if not name.startswith("_")}
