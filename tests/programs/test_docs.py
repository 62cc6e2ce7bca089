"""The programs of the README and of the pages in docs/ print what is said there.

A page's blocks of Python are one program, which runs in a process of its own. What a ``print`` prints stands in the comment at
its end, and goes on in lines below it whose comment begins in the same column. ``...`` stands for anything, as in doctest, and
so does no comment. A block below a line ``<!-- not run: why -->`` is left out.
"""

import ast
import doctest
import io
import re
import tokenize
from pathlib import Path

import pytest
from forked import fork_python
from interpreter import run_python

import fastexchange
from fastexchange.__main__ import main
from fastexchange.command.build_hooks import Options

ROOT = Path(__file__).parents[2]


def programs(page: str, language: str = "python") -> list[str]:
    blocks = re.findall(rf"(<!-- not run: .*-->\n)?^```{language}\n((?s:.*?))^```", (ROOT / page).read_text("utf-8"), re.M)
    return [program for not_run, program in blocks if not not_run]


PAGES = [page for page in sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")) if programs(page)]


def prints(node: ast.AST):
    """The statements ``print(...)``, but for those in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and ast.unparse(child).startswith("print("):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from prints(child)


def wanted(program: str) -> str:
    """What the program prints, by its comments."""
    tokens = tokenize.generate_tokens(io.StringIO(program).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {line: (token.start[1], token.string[2:]) for line, token in comments.items() if token.line.lstrip().startswith("#")}
    lines = []
    for statement in prints(ast.parse(program)):
        line = statement.end_lineno
        if line not in comments:
            lines.append("...")
            continue
        column = comments[line].start[1]
        lines.append(comments[line].string[2:])
        while alone.get(line := line + 1, (None,))[0] == column:
            lines.append(alone[line][1])
    return "".join(line + "\n" for line in lines)


def check(page: str, folder: Path) -> str:
    """Run a page's program, compare what it prints, and return that."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    program = folder / "program.py"
    program.write_text("\n".join(programs(page)), encoding="utf-8")
    run = f"import os, runpy\nos.chdir({str(folder)!r})\nrunpy.run_path({str(program)!r}, run_name='__main__')"
    ended = fork_python(run, check=False)
    assert ended.returncode == 0, ended.stderr
    said, want = re.sub(r" +$", "", ended.stdout, flags=re.M), wanted(program.read_text("utf-8"))
    assert doctest.OutputChecker().check_output(want, said, doctest.ELLIPSIS), f"says\n{want}\nand prints\n{said}"
    return said


@pytest.mark.slow
def test_the_readmes_examples_print_what_it_says(tmp_path):
    assert "overhead" in check("README.md", tmp_path)
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_a_pages_program_prints_what_it_says(page, tmp_path):
    check(page, tmp_path)


PUBLIC = {name: getattr(fastexchange, name) for name in fastexchange.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_in_docstrings(name):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    of, said, runner = PUBLIC[name], [], doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(of, name, module=False, globs=dict(PUBLIC)):
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
    assert runner.tries or isinstance(of, type) or name == "unpolyfill", "it has no example"


def test_every_public_name_stands_in_the_reference():
    named = re.findall(r"^\.\. auto\w+:: fastexchange\.(\w+)$", (ROOT / "docs/reference/api.md").read_text("utf-8"), re.M)
    assert sorted(named) == sorted(PUBLIC)


def nodes_of_the_package() -> list[ast.AST]:
    files = [file for file in (ROOT / "fastexchange").rglob("*.py") if file.name != "_abi.py"]
    return [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]


def test_the_page_of_errors_quotes_messages_that_there_are():
    """``…`` stands for what differs from one message to another."""
    nodes = nodes_of_the_package()
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    quoted = re.findall(r"\*\*`(.*?)`\*\*(?=, \*\*`|\\$)", (ROOT / "docs/reference/errors.md").read_text("utf-8"), re.M)
    assert len(quoted) > 40 and [each for each in quoted if not any(each in text for text in texts)] == []


def test_the_page_of_the_environment_names_each_variable_that_is_read():
    page = (ROOT / "docs/reference/environment.md").read_text("utf-8")
    read = {
        node.args[0].value for node in nodes_of_the_package()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get" and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    assert "FASTEXCHANGE_DISABLE" in read and {name for name in read if name not in page} == {"PYTHONPATH"}


def test_the_page_of_the_command_line_has_each_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)", capsys.readouterr().out.partition("command\n")[2].partition("options:")[0], re.M)
    shown = re.findall(r"^```{command-help} (\w+)$", (ROOT / "docs/reference/command-line.md").read_text("utf-8"), re.M)
    assert shown == commands and "doctor" in shown


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_library_for_which_the_package_is_optional(is_installed):
    decorated, accelerated = programs("docs/users/libraries.md")
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
    page = "docs/how-to/shipping.md"
    (module,) = programs(page)
    code = f"{module}\nfor kernel, *calls in __precompile__():\n    print(kernel.precompile(*calls))"
    f64, f32 = "Array(float64, 1, 'C', False, aligned=True)", "Array(float32, 1, 'C', False, aligned=True)"
    assert run_python(code).stdout == f"[(float64, {f64}, {f64}), (float64, {f32}, {f32})]\n"
    tables = list(map(pytest.importorskip("tomllib").loads, programs(page, "toml")))
    hatchs, setuptools, others = (each["tool"] for each in tables)
    hatchs = hatchs["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert Options.read(hatchs["fastexchange"], "").targets == ["mypackage.kernels", "kernels.json"]
    assert Options.read(setuptools["fastexchange"], "").strict and others["cibuildwheel"]["repair-wheel-command"] == ""
