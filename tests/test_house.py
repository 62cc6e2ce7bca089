"""How the package is built: which of its folders may import which; and what documents and lists say of it."""

import ast
import importlib.metadata
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from forked import fork_python
from mutations import folders_to_test

import fastexchange

ROOT = Path(fastexchange.__file__).parent
FLOORS = (
    "ground", "producers", "dispatch", "arguments", "exchange", "calls", "cuda", "api", "measuring", "__init__", "command",
    "__main__",
)  # fmt: skip
"""From the bottom to the top: what a folder imports lies in it, or below."""
PLACES = dict.fromkeys(("_abi", "_abi_build", "half", "interpreter", "version"), "ground") | {"_native_build": "__main__"}
"""Files that are not in a folder."""
FRAMEWORKS = {
    "torch": {
        "producers": "samples storages",
        "dispatch": "boxed_kernel checks dispatch_table guard modes odd_tensors offsets operator_call queries storage_exports",
        "arguments": "capsule tensor_kind",
    },
    "cupy": {"producers": "array_fields", "cuda": "device_arrays"},
    "jax": {
        "producers": "ending layout put", "dispatch": "xla", "arguments": "array_kind",
        "cuda": "launch_arrays xla_cuda xla_launches",
    },
}
"""What is known of a framework lies in one folder, its files on several floors: those that are not here on that of ``calls``."""


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
"""By their names from the package's root: ``dispatch.frame``, ``dispatch`` for its ``__init__.py``, and ``__init__``."""
TEXTS = {name: path.read_text("utf-8") for name, path in MODULES.items()}


def imported_by(name: str) -> set[str]:
    """The modules of the package that one imports anywhere in its file, but for type checkers."""
    package = [] if name == "__init__" else name.split(".")[: None if MODULES[name].name == "__init__.py" else -1]
    pending: list[ast.AST] = [ast.parse(TEXTS[name])]
    found = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            names = [".".join([*base, each.name]) for each in node.names]
            found.update(each if each in MODULES else ".".join(base) or "__init__" for each in names)
        pending += ast.iter_child_nodes(node)
    return found


def floor_of(name: str) -> int:
    folder, _, file = name.partition(".")
    if folder in FRAMEWORKS:
        floors = [floor for floor, files in FRAMEWORKS[folder].items() if file in files.split()]
        return FLOORS.index(floors[0] if floors else "calls" if file else "ground")
    return FLOORS.index(PLACES.get(folder, folder))


def test_nothing_is_imported_from_above_or_in_a_circle():
    found = {name: imported_by(name) for name in MODULES}
    assert not [(name, each) for name, those in found.items() for each in those if floor_of(each) > floor_of(name)]
    graph = {name: those - {name} for name, those in found.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them
    assert sum(map(len, graph.values())) > 500, "imports are no longer found"
    assert "dispatch.frame" in found["dispatch.vectorcall"] and "calls.bound_launch" in found["calls.kernel"]  # in a function
    assert "interpreter" in found["__init__"] and "measuring.overhead" not in found["__init__"]


def test_no_file_name_stands_twice():
    """But ``__init__.py``, and a subcommand's, which has the command's name."""
    names = [path.name for name, path in MODULES.items() if not name.startswith("command.") and path.name != "__init__.py"]
    assert len(names) == len(set(names)) > 150, sorted({name for name in names if names.count(name) > 1})


def test_what_knows_a_framework():
    """The kinds' list, who makes operators or offers them, and the doctor: all else asks ``producers.framework``."""
    found = {name for name in MODULES if any(each.partition(".")[0] in FRAMEWORKS for each in imported_by(name))}
    outside = {name for name in found if name.partition(".")[0] not in FRAMEWORKS}
    assert outside == {
        "arguments.discovery", "calls.kernel", "command.probe", "cuda.classify", "cuda.explaining", "cuda.launched_kernel",
    }  # fmt: skip


def names_in(text: str) -> set[str]:
    """All that a file defines or imports: functions, classes and their members, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(each.asname or each.name for each in node.names)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def test_names_in_docstrings_exist():
    defined, missing, count = {name: names_in(text) for name, text in TEXTS.items()}, [], 0
    for name, text in TEXTS.items():
        for role in re.findall(r":(?:func|data|class|meth|attr):`~?(?:fastexchange\.)?([\w.]+)`", text):
            count += 1
            of, _, last = role.rpartition(".")  # of a module, a class, or of this file
            places = [each for each in MODULES if f".{each}".endswith(f".{of}") or of in defined[each]] if of else [name]
            if role not in fastexchange.__all__ and not any(last in defined[each] for each in places):
                missing.append((name, role))
    assert not missing and count > 200, (missing, count)


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "perf/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT.parent)) for path in (ROOT.parent / "docs").rglob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_in_documents_lead_somewhere(document):
    """To files, and to headings in them."""
    path = ROOT.parent / document
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" not in link:
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), link
            headings = re.findall(r"^#+ (.*)", file.read_text("utf-8"), re.M) if anchor else []
            assert anchor in ["", *(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)], link


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_documents_name_exist(document):
    pattern = r"(?<![\w/.])((?:tests|perf|fastexchange|notebooks|kernels|examples)/[\w/]+\.\w+)"
    named = re.findall(pattern, (ROOT.parent / document).read_text("utf-8"))
    assert named and [path for path in named if not (ROOT.parent / path).exists()] == []


def test_every_file_of_the_package_has_a_command_before_a_commit():
    """CONTRIBUTING names it, and folders that exist."""
    given = {name: folders_to_test(str(path.relative_to(ROOT))) for name, path in MODULES.items() if name != "_abi"}
    assert [name for name, tests in given.items() if not tests or not all((ROOT.parent / each).is_dir() for each in tests)] == []


def runs_by_default(file: Path) -> bool:
    """Whether some of a file's tests are neither slow nor nightly."""
    body = ast.parse(file.read_text("utf-8")).body
    if any(re.match(r"pytestmark = .*\.(slow|nightly)", ast.unparse(each)) for each in body):
        return False
    tests = [each for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    return any(not {"pytest.mark.slow", "pytest.mark.nightly"} & {*map(ast.unparse, each.decorator_list)} for each in tests)


def test_each_promise_has_tests_that_run_by_default():
    """Of each file or folder of tests that SECURITY names beside a promise some tests are neither slow nor nightly."""
    rows = re.findall(r"^\| .*\*\*.* \| (.*) \|$", (ROOT.parent / "SECURITY.md").read_text("utf-8"), re.MULTILINE)
    named = [re.findall(r"`(tests/(?:\w+/)?test_\w+\.py|tests/\w+)`", row) for row in rows]
    assert len(rows) > 20 and all(named)
    for place in {each for places in named for each in places}:
        path = ROOT.parent / place
        assert any(map(runs_by_default, [path] if path.suffix else path.rglob("test_*.py"))), place


INSTALLED = {
    "apache-tvm-ffi": "tvm_ffi", "cuda-core": "cuda.core.utils", "jax": "jax.numpy", "ml-dtypes": "ml_dtypes",
    "numba-cuda": "numba.cuda", "numba-cuda-mlir": "numba_cuda_mlir.cuda", "paddlepaddle": "paddle", "pandas": "pandas",
    "pyarrow": "pyarrow", "torch": "torch",
}  # fmt: skip


@pytest.mark.slow
def test_frameworks_that_are_installed_can_be_imported():
    """Else their tests would be skipped, and nobody would see it."""
    found = {each.metadata["Name"].replace("_", "-") for each in importlib.metadata.distributions()} & {*INSTALLED}
    fork_python("\n".join(f"import {INSTALLED[name]}" for name in found))
    assert found


def test_no_version_number_decides():
    """What a version has is asked of it, or verified: a version that is not known yet is treated by what it has."""
    pattern = re.compile(r"version_info|hexversion|__version__\s*[<>=]=?|version\([^)]*\)\s*[<>]|packaging.version")
    assert [name for name, text in TEXTS.items() if pattern.search(text)] == ["version"]  # where this package's own is defined


def test_the_versions_that_are_tried_are_those_that_are_supported():
    root = ROOT.parent
    lines = re.findall(r"^(\w+)=\(?([\d. ]+\d)", (root / ".ci" / "versions").read_text("utf-8"), re.MULTILINE)
    tried = {name: values.split() for name, values in lines}
    declared = (root / "pyproject.toml").read_text("utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)\"", declared)
    assert tried["pythons"] + tried["debians"] == pythons and set(tried["with_torch"]) < set(pythons)
    assert f'requires-python = ">={pythons[0]},<3.{int(pythons[-1].partition(".")[2]) + 1}"' in declared
    assert f'"numba>={tried["numbas"][0]}"' in declared and f'"numpy>={tried["numpys"][0]}"' in declared
    for page in ("README.md", "docs/reference/compatibility.md"):
        said = (root / page).read_text("utf-8")
        for versions in (pythons, tried["numbas"], tried["torches"], tried["jaxes"]):
            assert f"{versions[0]} to {versions[-1]}" in said, page
    text = "\n".join(path.read_text("utf-8") for path in (root / ".ci").iterdir() if path.name != "versions")
    assert not re.search(r"3\.\d+ 3\.\d+|2\.\d+ 2\.\d+", text), "a list of versions beside that of .ci/versions"


VARIADIC = re.compile(r"_?Py\w*(ObjArgs|_CallFunction\w*|_CallMethod|Format|_BuildValue|Arg_\w+|Tuple_Pack|Sys_\w+|printf)$")


def test_no_variadic_function_is_called():
    """Native code calls C functions as fixed ones. Variadic ones get their arguments elsewhere with some ABIs: Apple's on ARM."""
    called = [name for text in TEXTS.values() for name in re.findall(r"\b(?:external|prototype)\(\s*\"(\w+)\"", text)]
    assert len(called) > 60 and not [name for name in called if VARIADIC.match(name)]
    assert all(map(VARIADIC.match, ("PyObject_CallFunctionObjArgs", "PyErr_Format", "Py_BuildValue", "PyArg_ParseTuple")))


def test_a_kind_of_argument_is_named_where_it_is_described_and_hardly_elsewhere():
    """What a kind is to native code, to Numba or to an operator, its fields say; an ``if`` with its name says it again."""
    folders = ["torch.tensor_kind", "jax.array_kind", *(name for name in TEXTS if name.startswith("arguments."))]
    made = re.compile(r"^([A-Z_0-9, ]+) = (?:Kind|exported|borrowed|_kind)\(", re.MULTILINE)
    kinds = {kind for name in folders for names in made.findall(TEXTS[name]) for kind in names.split(", ")}
    named = {kind: [name for name in TEXTS if name not in folders and re.search(rf"\b{kind}\b", TEXTS[name])] for kind in kinds}
    allowed = {"OTHER": 6, "DUNDER": 3}  # what nothing else takes; what only Python asks
    assert len(kinds) >= 8 and not [(kind, names) for kind, names in named.items() if len(names) > allowed.get(kind, 2)]
