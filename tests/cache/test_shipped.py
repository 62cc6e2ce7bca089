"""Native code that comes with the package: what it saves, when it is not used, and that the same sources give the same bytes.

And what native code is kept by: source files, or bytecode where there are none; helpers are kept as functions are.
"""

import ast
import compileall
import os
import shutil
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from interpreter import copy_native_code, run_python
from native_copies import build, started

import fastexchange
from fastexchange.ground import cfunction, shipped
from fastexchange.ground.disk_cache import NotBelieved
from fastexchange.ground.numba_code import native_code_depends_on
from fastexchange.ground.sources import code_digest, digest_of

PACKAGE = Path(fastexchange.__file__).parent

PACK = "fastexchange.dispatch.pack"
CODE = shipped.ShippedCode(native_code_depends_on(), {PACK: (digest_of(PACK)[0], "code")}, {("m", "f"): 1}, True)


def with_bytes(change):
    return lambda file: file.write_bytes(change(file.read_bytes()))


UNFIT = {  # what is done to the file, or what the code in it has; and why it is not used
    "truncated": (with_bytes(lambda data: data[:-10]), "cannot be read"),
    "a flipped bit": (with_bytes(lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]), "cannot be read"),
    "a wrong checksum": (with_bytes(lambda data: zlib.compress(zlib.decompress(data)[:-1] + b"!")), "checksum"),
    "missing": (Path.unlink, "none is installed"),
    "another format": (with_bytes(lambda data: zlib.compress(shipped.framed("()", ((), {})))), "the format of another version"),
    "other contents": ({"sources": 7}, "the format of another version"),
    "other functions": ({"functions": []}, "the format of another version"),
    "another platform": ({"depends_on": ("cp3", *CODE.depends_on[1:])}, "the ABI of Python is"),
    "another Numba": ({"depends_on": (CODE.depends_on[0], "0.1", *CODE.depends_on[2:])}, "the version of Numba is"),
    "other sources": ({"sources": {PACK: ("another", "code")}}, "dispatch.pack has changed"),
    "a source's digest as one of code": ({"sources": {PACK: ("", digest_of(PACK)[0])}}, "dispatch.pack has changed"),
    "an unknown module": ({"sources": {"fastexchange.gone": ("", "")}}, "fastexchange.gone has changed"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNFIT)
def test_a_file_that_does_not_fit_is_not_used(what, tmp_path, monkeypatch):
    spoil, why = UNFIT[what]
    file = tmp_path / "own.code"
    monkeypatch.setattr(shipped, "own_path", lambda: file)
    shipped.write(file, CODE)
    assert shipped.read(file) == CODE == shipped.shipped_code.__wrapped__()
    spoil(file) if callable(spoil) else shipped.write(file, CODE._replace(**spoil))
    with pytest.raises(NotBelieved, match=why):
        shipped.read(file)
    found = shipped.shipped_code.__wrapped__()
    assert why in found.why_not and not found.functions and not found.is_proved


ON_LINUX = sys.platform == "linux" and os.uname().machine == "x86_64"


def slow(function):
    return pytest.mark.slow(pytest.mark.skipif(not ON_LINUX, reason="made on Linux with x86-64")(function))


def run(root: Path, code: str, **environment: str) -> str:
    """What `code` prints in such a process, and nothing but that."""
    done = started(root, "-c", textwrap.dedent(code), **environment)
    assert done.returncode == 0 and not done.stderr, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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

    both, first = fast_args(lambda x, y: x + y), fast_args(lambda xs: xs[0][1])

    @fast_args(out="x[n], y[n] -> z[n]")
    def into(x, y, z):
        for i in range(z.shape[0]):
            z[i] = x[i] * y[i]

    x = np.arange(4.0)
    for _ in range(4):
        add(x, 1.0)
    assert x.tolist() == [4, 5, 6, 7], x
    assert both(x, x).tolist() == [8, 10, 12, 14] and into(x, x).tolist() == [16, 25, 36, 49]
    add.bind(x, 1.0)()
    assert x[0] == 5 and first([x, x]) == 6
    assert fastexchange.from_dlpack(x) is not None and fastexchange.convert(x, np.ndarray)[0] == 5
"""
TORCH_TOO = """
    try:
        import torch
    except ImportError:
        pass
    else:
        t = torch.arange(3.0)
        for _ in range(4):
            into(t, t, t)
        assert t.tolist() == [0, 1, 2**16] and isinstance(both(t, t), torch.Tensor)
        assert fastexchange.convert(t, np.ndarray)[1] == fastexchange.from_dlpack(t)[1] == 1
    print(cfunction.code_cache.shipped > 10, cfunction.shipped_code().why_not or "used", cfunction.shipped_code().is_proved)
"""


@slow
def test_all_kinds_of_calls_compile_nothing_of_the_package(with_native_code):
    """It fits its tensors of PyTorch, too, and settings of Numba's."""
    nowhere = {"NUMBA_CACHE_DIR": "/dev/null/nowhere", "HOME": "/dev/null"}
    assert run(with_native_code, KERNELS + TORCH_TOO, **nowhere) == "True used True\n"
    run(with_native_code, KERNELS, NUMBA_OPT="0", NUMBA_BOUNDSCHECK="1")
    run(with_native_code, KERNELS, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    code = "import fastexchange, numpy; print(fastexchange.fast_args(lambda x: x.sum())(numpy.ones(3)))"
    assert run(with_native_code, code, NUMBA_DISABLE_JIT="1") == "3.0\n"


@slow
def test_every_native_function_of_the_package_is_in_it(with_native_code):
    printed = run(with_native_code, """
        from fastexchange.ground.shipped import shipped_code
        from fastexchange.command.native_code import native_code
        functions = [function for first in native_code() for function in first._together]
        assert {("raise",), *(first.library_key for first in native_code())} == {*shipped_code().functions}
        print(sorted({function.key[:2] for function in functions}))
    """)
    expected, begins = set(), ("cfunction(", "reader", "row_reader", "frequent")
    for file in (file for file in PACKAGE.rglob("*.py") if file.name != "_abi.py"):
        module = ".".join(("fastexchange", *file.relative_to(PACKAGE).with_suffix("").parts))
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        expected |= {(module, f.name) for f in functions for each in f.decorator_list if ast.unparse(each).startswith(begins)}
    assert expected and {(module, name.rpartition(".")[2]) for module, name in ast.literal_eval(printed)} == expected


@slow
def test_what_makes_it_needs_no_optional_package():
    assert int(run(PACKAGE.parent, """
        import sys
        for name in ("torch", "IPython", "rich", "pandas", "matplotlib", "tqdm", "jax", "ml_dtypes"):
            sys.modules[name] = None
        from fastexchange._native_build import native_code
        print(len(list(native_code())))
    """)) > 40


@slow
def test_without_it_native_code_is_compiled_and_the_user_is_told(with_native_code, tmp_path):
    copied = Path(install("files", tmp_path, of=with_native_code / "fastexchange"))
    source = copied / "fastexchange" / "dispatch" / "pack.py"
    source.write_text(source.read_text() + "\n")
    printed = run(copied, "from fastexchange.ground.shipped import shipped_code as s; print(s().why_not, len(s().functions))")
    assert "dispatch.pack has changed" in printed and printed.endswith(" 0\n")
    source.write_text(source.read_text()[:-1])
    shutil.rmtree(copied / "fastexchange" / "_native")
    if cfunction.code_cache.directory is not None:  # what these tests' own package has compiled fits the copy, too
        run(copied, KERNELS, NUMBA_CACHE_DIR=str(Path(cfunction.code_cache.directory).parent))
    program = "import fastexchange.ground.cfunction as c; c._announced._AFTER = 0.01; "
    program += "from fastexchange.dispatch.read_arguments import walk; walk.address"
    done = started(copied, "-c", program, NUMBA_CACHE_DIR=str(copied / "empty"))
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "compiling native code" in done.stderr and "none is installed" in done.stderr
    assert "later processes load it" in done.stderr and "once" not in done.stderr


@slow
def test_a_package_without_source_files(with_native_code, tmp_path):
    """Bytecode, in an archive, says as well as source files which native code is of it."""
    archive = install("pyc in a zip", tmp_path, of=with_native_code / "fastexchange")
    asked = "\nprint(cfunction.shipped_code().why_not or 'used')"
    program = f"import sys; sys.path[0] = {archive!r}" + textwrap.dedent(KERNELS) + asked
    assert run(tmp_path, program, NUMBA_CACHE_DIR=str(tmp_path / "cache")) == "used\n"


@slow
@pytest.mark.nightly
def test_the_same_sources_give_the_same_bytes(with_native_code, tmp_path):
    for file in build(tmp_path):
        assert file.read_bytes() == (with_native_code / "fastexchange" / "_native" / file.name).read_bytes(), file.name


def digest(source: str, name: str = "file") -> str:
    return code_digest(compile(source, name, "exec", dont_inherit=True))


ONE = "def f(x, y=1):\n    try:\n        return x in {'a', 'b', 'c'}\n    finally:\n        print(x + 0.0, (1, 2), f'{y}')\n"


@pytest.mark.parametrize(("before", "after"), [
    ("x +", "x -"), ("0.0", "-0.0"), ("'c'", "'d'"), ("y=1", "y=True"), ("y=1", "y=2"), ("(1, 2)", "(2, 1)"),
    ("def f", "def g"), ("x, y", "x, *, y"), ("finally", "except TypeError"), ("print", "repr"),
])  # fmt: skip
def test_the_digest_of_code(before, after):
    assert digest(ONE.replace(before, after)) != digest(ONE) == digest("\n\n# elsewhere\n" + ONE, "another")


def install(kind: str, root: Path, change: str = "", of: Path = PACKAGE) -> str:
    """Install a copy, changed in one module; of this package without native code. Returns the place to import it from."""
    left_out = ["__pycache__"] + ["_native"] * (of is PACKAGE)
    shutil.copytree(of, root / "fastexchange", ignore=shutil.ignore_patterns(*left_out))
    with (root / "fastexchange" / "dispatch" / "trampoline.py").open("a") as file:
        file.write(change)
    if "pyc" in kind:
        assert compileall.compile_dir(root / "fastexchange", quiet=2, legacy=True, workers=1)
        for file in root.rglob("*.py"):
            file.unlink()
    if "zip" not in kind:
        return str(root)
    archive = shutil.make_archive(str(root / "package"), "zip", root, "fastexchange")
    shutil.rmtree(root / "fastexchange")
    return archive


STAMPS = """
    import sys
    sys.path[:] = [sys.argv[1], *sys.path[2:]]  # in place of this package's folder, and these tests'
    import fastexchange
    from fastexchange.ground import cfunction, shipped, sources
    assert fastexchange.__file__.startswith(sys.argv[1]), fastexchange.__file__
    assert cfunction.code_cache.is_kept, cfunction.code_cache.why_not_kept
    assert "none is installed" in shipped.shipped_code().why_not, shipped.shipped_code().why_not
    print(sources.source_stamp("fastexchange.dispatch.trampoline"), sources.code_digest(compile(sys.argv[2], "x", "exec")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "pyc", "zip", "pyc in a zip"])
def test_code_is_kept_however_the_package_is_installed(kind, tmp_path):
    """By a stamp that is the same in another folder, and another after a change. Python's sets have another order in each."""
    stamps = []
    for name, change in (("1", ""), ("2", ""), ("3", "\nCHANGED = 1\n")):
        (tmp_path / name).mkdir()
        place = install(kind, tmp_path / name, change)
        done = run_python(STAMPS, place, ONE, NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONHASHSEED=name)
        stamp, its_digest = done.stdout.split()
        stamps.append(stamp)
        assert its_digest == digest(ONE)
    assert stamps[0] and stamps[0] == stamps[1] != stamps[2]


@pytest.mark.slow
def test_nothing_is_kept_of_a_source_that_is_edited_while_the_process_runs(tmp_path):
    """Else the code of before would be kept for the file as it is now."""
    code = """
        from pathlib import Path
        from fastexchange.ground import sources
        file = Path(sources.__file__).parents[1] / "dispatch" / "trampoline.py"
        file.write_text(file.read_text() + "# edited")
        print([bool(sources.source_stamp(f"fastexchange.dispatch.{name}")) for name in ("trampoline", "structs")])
    """
    assert run(Path(install("files", tmp_path)), code) == "[False, True]\n"


ANOTHER_USER = """
    import os, sys
    import numpy as np
    from fastexchange import fast_args
    from fastexchange.command import probe
    from fastexchange.ground import cfunction
    cfunction.ROOT, cfunction.user_cache = cfunction.Path("/dev/null"), lambda: None
    if sys.argv[1] == "can read":
        for _ in range(2):
            fast_args(lambda x: x[0])(np.ones(3))
    list(probe._disk_cache()), cfunction.code_cache.why_not_kept  # have read what another user may not be able to
    cfunction.code_cache.__dict__.pop("folders", None)
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    for finding in probe._disk_cache():
        print(finding.status, finding.text, finding.advice)
    print(cfunction.code_cache.why_not_kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs rights that can be dropped")
def test_a_folder_that_root_has_filled(tmp_path):
    """Another user loads from it, unless a group may write to it: then doctor and the line on stderr say what to run."""
    copy_native_code(tmp_path)
    kernel = "[fast_args(lambda x: x[0])(np.ones(3)) for _ in range(2)]"
    run_python(f"import numpy as np; from fastexchange import fast_args; {kernel}", NUMBA_CACHE_DIR=str(tmp_path))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o55 != 0o55:  # pytest's own
            folder.chmod(0o755)
    said = run_python(ANOTHER_USER, "can read", NUMBA_CACHE_DIR=str(tmp_path)).stdout
    assert "can be read, not written: this run loaded" in said and said.startswith("ok"), said
    (tmp_path / "fastexchange").chmod(0o775)
    said = run_python(ANOTHER_USER, "cannot believe it", NUMBA_CACHE_DIR=str(tmp_path)).stdout
    assert "other users can write to it (mode 775)" in said.splitlines()[-1], said
    assert "set NUMBA_CACHE_DIR" in said and "precompile" in said, said
