"""What native code is kept by: source files, or bytecode where there are none; helpers are kept as functions are."""

import compileall
import os
import shutil
from pathlib import Path

import numba
import pytest
from interpreter import copy_native_code, run_python

import fastexchange
from fastexchange.dispatch import fast_parts
from fastexchange.ground import cfunction, numba_code
from fastexchange.ground.shipped import ShippedCode
from fastexchange.ground.sources import code_digest

PACKAGE = Path(fastexchange.__file__).parent
NOTHING_SHIPPED = ShippedCode((), {}, {}, {}, False, "none")


def digest(source: str, name: str = "file") -> str:
    return code_digest(compile(source, name, "exec", dont_inherit=True))


ONE = "def f(x, y=1):\n    try:\n        return x in {'a', 'b', 'c'}\n    finally:\n        print(x + 0.0, (1, 2), f'{y}')\n"


@pytest.mark.parametrize(("before", "after"), [
    ("x +", "x -"), ("0.0", "-0.0"), ("'c'", "'d'"), ("y=1", "y=True"), ("y=1", "y=2"), ("(1, 2)", "(2, 1)"),
    ("def f", "def g"), ("x, y", "x, *, y"), ("finally", "except TypeError"), ("print", "repr"),
])  # fmt: skip
def test_the_digest_of_code(before, after):
    assert digest(ONE.replace(before, after)) != digest(ONE) == digest("\n\n# elsewhere\n" + ONE, "another")


def install(kind: str, root: Path, change: str) -> str:
    """Install a copy of the package, changed in one module. Returns the place to import it from."""
    shutil.copytree(PACKAGE, root / "fastexchange", ignore=shutil.ignore_patterns("__pycache__", "_native"))
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
    stamps, digests = [], []
    for name, change in (("1", ""), ("2", ""), ("3", "\nCHANGED = 1\n")):
        (tmp_path / name).mkdir()
        place = install(kind, tmp_path / name, change)
        done = run_python(STAMPS, place, ONE, NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONHASHSEED=name)
        stamp, its_digest = done.stdout.split()
        stamps.append(stamp), digests.append(its_digest)
    assert stamps[0] and stamps[0] == stamps[1] != stamps[2] and set(digests) == {digest(ONE)}


def test_a_helper_is_compiled_once_for_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cfunction, "shipped_code", lambda: NOTHING_SHIPPED)
    met = []
    for _process in range(2):
        monkeypatch.setattr(cfunction, "code_cache", cache := cfunction.CodeCache())
        helper = cfunction.Part(fast_parts.arrays_of._python_function, fast_parts.arrays_of._signature)
        symbol, library = helper.compiled
        assert isinstance(library, numba_code.LinkableCode) and library._get_module_for_linking().get_function(symbol)
        met.append((symbol, cache.misses, cache.hits))
    (first, *compiled), (second, *loaded) = met
    assert first == second and (compiled, loaded) == ([1, 0], [0, 1])


ANOTHER_USER = """
    import os, sys
    import numpy as np
    from fastexchange import fast_args
    from fastexchange.command import probe
    from fastexchange.ground import cfunction
    cfunction.ROOT, cfunction.user_cache = cfunction.Path("/dev/null"), lambda: None
    if sys.argv[1] == "can read":
        [fast_args(lambda x: x[0])(np.ones(3)) for _ in range(2)]
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
