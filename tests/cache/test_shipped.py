"""Native code that comes with the package: what it saves, when it is not used, and that the same sources give the same bytes."""

import ast
import compileall
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fastexchange
from fastexchange.ground.cfunction import code_cache

PACKAGE = Path(fastexchange.__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (sys.platform == "linux" and os.uname().machine == "x86_64"), reason="made on Linux with x86-64"),
]


def run(root: Path, code: str, **environment: str) -> str:
    """Run `code` in a fresh process that imports the package from `root`. Returns what it prints, and nothing but that."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    env |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    program = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=240, cwd=root)
    assert done.returncode == 0 and not done.stderr, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(root: Path) -> list[Path]:
    """Make native code for a copy of the package at `root`. Returns its files."""
    shutil.copytree(PACKAGE, root / "fastexchange", ignore=shutil.ignore_patterns("__pycache__", "_native"))
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-m", "fastexchange._native_build"], check=True, env=env, cwd=root, stdout=subprocess.DEVNULL)
    return sorted((root / "fastexchange" / "_native").iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("built")
    build(root)
    return root


@pytest.fixture
def copied(built, tmp_path) -> Path:
    """A copy, to spoil."""
    shutil.copytree(built / "fastexchange", tmp_path / "fastexchange", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


KERNELS = """
    import numpy as np
    import fastexchange
    from fastexchange import fast_args
    from fastexchange.ground import cfunction

    def forbidden(self):
        raise AssertionError(f"{self.key} is compiled")
    cfunction.CFunction.compile = forbidden

    @fast_args
    def add(x, y):
        for i in range(x.shape[0]):
            x[i] += y

    @fast_args
    def both(x, y):
        return x + y

    @fast_args(out="x[n], y[n] -> z[n]")
    def into(x, y, z):
        for i in range(z.shape[0]):
            z[i] = x[i] * y[i]

    @fast_args
    def first(xs):
        return xs[0][1]

    x = np.arange(4.0)
    for _ in range(20):
        add(x, 1.0)
    assert x.tolist() == [20, 21, 22, 23], x
    assert both(x, x).tolist() == [40, 42, 44, 46]
    assert into(x, x).tolist() == [400, 441, 484, 529]
    add.bind(x, 1.0)()
    assert x[0] == 21
    assert first([x, x]) == 22
    assert fastexchange.from_dlpack(x) is not None and fastexchange.convert(x, np.ndarray)[0] == 21
"""


def test_all_kinds_of_calls_compile_nothing_of_the_package(built):
    printed = run(
        built,
        KERNELS
        + """
    print(cfunction.code_cache.shipped > 10, cfunction.shipped_code().why_not or "used", cfunction.shipped_code().is_proved)
        """,
        NUMBA_CACHE_DIR="/dev/null/nowhere",
        HOME="/dev/null",
    )
    assert printed == "True used True\n"


def test_it_fits_its_tensors_of_pytorch(built):
    pytest.importorskip("torch")
    run(
        built,
        KERNELS
        + """
    import torch
    t = torch.arange(4.0)
    for _ in range(20):
        add(t, 1.0)
    assert t.tolist() == [20, 21, 22, 23]
    assert isinstance(both(t, t), torch.Tensor) or both(t, t)[0] == 40
    assert fastexchange.convert(t, np.ndarray)[0] == fastexchange.from_dlpack(t)[0] == 20
        """,
    )


def test_every_native_function_of_the_package_is_in_it(built):
    printed = run(built, "from fastexchange.ground.shipped import shipped_code as s; print(sorted({*s().functions, *s().parts}))")
    expected = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name == "_abi.py":
            continue
        module = ".".join(("fastexchange", *file.relative_to(PACKAGE).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text())):
            decorators = getattr(node, "decorator_list", [])
            if any(isinstance(each, ast.Call) and ast.unparse(each.func) in ("cfunction", "part") for each in decorators):
                expected.add((module, node.name))
    assert expected and {*ast.literal_eval(printed)} == expected


def test_what_makes_it_needs_no_optional_package():
    """It is made where nothing but the package's own requirements is installed."""
    assert int(run(PACKAGE.parent, """
        import sys
        for name in ("torch", "IPython", "rich", "pandas", "matplotlib", "tqdm", "jax", "ml_dtypes"):
            sys.modules[name] = None
        from fastexchange._native_build import native_code
        print(len(list(native_code())))
    """)) > 90


@pytest.mark.parametrize(
    "environment",
    [
        {"NUMBA_OPT": "0"}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        {"NUMBA_BOUNDSCHECK": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_with_settings_of_numba(built, environment):
    run(built, KERNELS, **environment)


def test_jit_disabled(built):
    code = "import fastexchange, numpy; print(fastexchange.fast_args(lambda x: x.sum())(numpy.ones(3)))"
    assert run(built, code, NUMBA_DISABLE_JIT="1") == "3.0\n"


def _truncated(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


def _flipped(file: Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _replaced(file: Path):
    file.write_bytes(b"something else")


def _of_another_platform(file: Path):
    (other,) = set(file.parent.iterdir()) - {file}
    shutil.copy(other, file)


def _of_another_numba(file: Path):
    from fastexchange.ground import shipped

    code = shipped.ShippedCode(*shipped.unframed(shipped.zlib.decompress(file.read_bytes()), wanted=None))
    shipped.write(file, code._replace(depends_on=(code.depends_on[0], "0.1", *code.depends_on[2:])))


def _of_other_sources(file: Path):
    source = file.parents[1] / "dispatch" / "pack.py"
    source.write_text(source.read_text() + "\n")


def _of_another_format(file: Path):
    from fastexchange.ground import shipped

    file.write_bytes(shipped.zlib.compress(shipped.framed("()", ((), {}))))


def _of_other_contents(file: Path):
    from fastexchange.ground import shipped

    code = shipped.ShippedCode(*shipped.unframed(shipped.zlib.decompress(file.read_bytes()), wanted=None))
    shipped.write(file, code._replace(sources=7))


def _missing(file: Path):
    file.unlink()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_truncated, "cannot be read"), (_flipped, "cannot be read"), (_replaced, "cannot be read"),
        (_missing, "none is installed"), (_of_another_format, "the format of another version"),
        (_of_other_contents, "the format of another version"),
        (_of_another_platform, "the ABI of Python is"), (_of_another_numba, "the version of Numba is"),
        (_of_other_sources, "dispatch.pack has changed"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_not_used(copied, spoil, why):
    (file,) = (copied / "fastexchange" / "_native").glob("*-x86_64-*.code")
    spoil(file)
    printed = run(copied, "from fastexchange.ground.shipped import shipped_code as s; print(s().why_not, len(s().functions))")
    assert why in printed and printed.endswith(" 0\n")


def test_without_it_native_code_is_compiled_and_the_user_is_told(copied):
    shutil.rmtree(copied / "fastexchange" / "_native")
    if code_cache.directory is not None:  # what these tests' own package has compiled fits the copy, too
        run(copied, KERNELS, NUMBA_CACHE_DIR=str(Path(code_cache.directory).parent))
    program = "from fastexchange.dispatch.runtime import runtime; runtime()"
    env = {**os.environ, "PYTHONPATH": str(copied), "NUMBA_CACHE_DIR": str(copied / "empty")}
    told = program.join(("import fastexchange.ground.cfunction as c; c._announced._AFTER = 0.01; ", ""))
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, env=env, cwd=copied, check=True)
    assert done.stderr.count("\n") == 1 and "compiling native code" in done.stderr and "none is installed" in done.stderr
    assert "later processes load it" in done.stderr and "once" not in done.stderr


@pytest.mark.parametrize("is_zip", [False, True], ids=["folder", "zip"])
def test_a_package_without_source_files(copied, is_zip):
    """Bytecode says as well as source files which native code is of it."""
    package = copied / "fastexchange"
    assert compileall.compile_dir(package, quiet=2, legacy=True, workers=1)
    for file in package.rglob("*.py"):
        file.unlink()
    root = shutil.make_archive(str(copied / "package"), "zip", copied, "fastexchange") if is_zip else copied
    if is_zip:
        shutil.rmtree(package)
    asked = "\nprint(cfunction.shipped_code().why_not or 'used')"
    program = f"import sys; sys.path[0] = {str(root)!r}" + textwrap.dedent(KERNELS) + asked
    assert run(copied, program, NUMBA_CACHE_DIR=str(copied / "cache")) == "used\n"


@pytest.mark.nightly
def test_the_same_sources_give_the_same_bytes(built, tmp_path):
    for file in build(tmp_path):
        assert file.read_bytes() == (built / "fastexchange" / "_native" / file.name).read_bytes(), file.name
