"""How the package is built: which of its rooms may import which."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fastexchange

ROOT = Path(fastexchange.__file__).parent
FLOORS = ("ground", "producers", "dispatch", "exchange", "calls", "cuda", "api", "measuring", "__init__", "command", "__main__")
"""From the bottom to the top: what a room imports lies in it, or below."""
PLACES = {
    "_abi": "ground", "_abi_build": "ground", "_native_build": "__main__", "half": "ground", "interpreter": "ground",
    "version": "ground",
}  # fmt: skip
"""Files that are not in a room."""


def modules() -> dict[str, Path]:
    """The package's modules, named from its root: ``dispatch.frame``, ``dispatch`` for its ``__init__.py``, and ``__init__``."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """By module, the modules of the package that it imports anywhere in its file, but for type checkers."""
    known = modules()
    return {name: {found for node in _imports(path) for found in _found(node, name, path, known)} for name, path in known.items()}


def _imports(path: Path):
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node
        pending += ast.iter_child_nodes(node)


def _found(node: ast.ImportFrom, name: str, path: Path, known: dict):
    package = [] if name == "__init__" else name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
    for each in node.names:
        found = ".".join([*base, each.name])
        yield found if found in known else ".".join(base) or "__init__"


def floor_of(name: str) -> int:
    room = name.partition(".")[0]
    return FLOORS.index(PLACES.get(room, room))


def test_nothing_is_imported_from_above():
    upward = [(name, found) for name, all_found in imports().items() for found in all_found if floor_of(found) > floor_of(name)]
    assert not upward


def test_no_module_imports_itself_in_a_circle():
    graph = {name: found - {name} for name, found in imports().items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them
    assert sum(map(len, graph.values())) > 500, "imports are no longer found"


def test_the_imports_that_are_looked_for_are_found():
    found = imports()
    assert "dispatch.frame" in found["dispatch.vectorcall"]
    assert "calls.bound_launch" in found["calls.kernel"]  # in a function
    assert "interpreter" in found["__init__"] and "measuring.overhead" not in found["__init__"]


def names_in(path: Path) -> set[str]:
    """All that a file defines or imports: functions, classes and their members, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(each.asname or each.name for each in node.names)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_names_in_docstrings_exist():
    known = modules()
    defined = {name: names_in(path) for name, path in known.items()}
    missing, count = [], 0
    for name, path in known.items():
        for role in re.findall(r":(?:func|data|class|meth|attr):`~?(?:fastexchange\.)?([\w.]+)`", path.read_text("utf-8")):
            count += 1
            of, _, last = role.rpartition(".")  # of a module, a class, or of this file
            places = [each for each in known if f".{each}".endswith(f".{of}") or of in defined[each]] if of else [name]
            if role not in fastexchange.__all__ and not any(last in defined[each] for each in places):
                missing.append((name, role))
    assert not missing
    assert count > 200, "names are no longer found"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_documents_name_exist(document):
    folders = "tests|perf|fastexchange|notebooks|kernels|examples"
    text = (ROOT.parent / document).read_text("utf-8")
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/]+\.\w+)", text)
    assert [path for path in named if not (ROOT.parent / path).exists()] == []
    assert named, "files that are named are no longer found"


def test_no_version_number_decides():
    """What a version has is asked of it, or verified: a version that is not known yet is treated by what it has."""
    pattern = re.compile(r"version_info|hexversion|__version__\s*[<>=]=?|version\([^)]*\)\s*[<>]|packaging.version")
    users = {name for name, path in modules().items() if pattern.search(path.read_text("utf-8"))}
    assert users == {"version"}, users  # where this package's own is defined


def test_the_versions_that_are_tried_are_those_that_are_supported():
    root = ROOT.parent
    lines = re.findall(r"^(\w+)=\(?([\d. ]+\d)", (root / ".ci" / "versions").read_text("utf-8"), re.MULTILINE)
    tried = {name: values.split() for name, values in lines}
    declared = (root / "pyproject.toml").read_text("utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)\"", declared)
    assert tried["pythons"] + tried["debians"] == pythons and set(tried["with_torch"]) < set(pythons)
    newest = int(pythons[-1].partition(".")[2])
    assert f'requires-python = ">={pythons[0]},<3.{newest + 1}"' in declared
    assert f'"numba>={tried["numbas"][0].removesuffix(".0")},' in declared and f'"numpy>={tried["numpys"][0]}"' in declared
    text = "\n".join(path.read_text("utf-8") for path in (root / ".ci").iterdir() if path.name != "versions")
    assert not re.search(r"3\.\d+ 3\.\d+|2\.\d+ 2\.\d+", text), "a list of versions beside that of .ci/versions"


VARIADIC = re.compile(r"_?Py\w*(ObjArgs|_CallFunction\w*|_CallMethod|Format|_BuildValue|Arg_\w+|Tuple_Pack|Sys_\w+|printf)$")


def test_no_variadic_function_is_called():
    """Native code calls C functions as fixed ones. Variadic ones get their arguments elsewhere with some ABIs: Apple's on ARM."""
    pattern = re.compile(r"\b(?:external|prototype)\(\s*\"(\w+)\"")
    called = {name: set(pattern.findall(path.read_text("utf-8"))) for name, path in modules().items()}
    assert sum(map(len, called.values())) > 60, "calls are no longer found"
    assert not {name: found for name, names in called.items() if (found := set(filter(VARIADIC.match, names)))}
    assert all(map(VARIADIC.match, ("PyObject_CallFunctionObjArgs", "PyErr_Format", "Py_BuildValue", "PyArg_ParseTuple")))
