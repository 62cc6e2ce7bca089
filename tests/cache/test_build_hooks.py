"""The build hooks: what is in a wheel, its tag, that its kernels are loaded and not compiled, and bad options.

Small packages are built by each backend as pip does it, and run in a fresh process. The package of ``examples/``: at night.
"""

import email
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from interpreter import interpret, run_python
from packaging.tags import parse_tag, sys_tags

import fastexchange
from fastexchange.command import CommandError, build_hooks, hatch_hook
from fastexchange.command.setuptools_hook import add_machine_code
from fastexchange.command.ship import DEFAULT_LEVELS
from fastexchange.ground.package_code import fitting_levels

LEVEL = fitting_levels()[0]
PACKAGE = Path(fastexchange.__file__).parent
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shipped_kernels"
PROJECT = """\
[build-system]
requires = ["{}", "numba-fastexchange"]
build-backend = "{}"

[project]
name = "tiny-kernels"
version = "1.2"
requires-python = ">=3.10"
"""
IN_SRC = '[tool.hatch.build]\ndev-mode-dirs = ["src"]\n[tool.hatch.build.targets.wheel]\npackages = ["src/tiny"]\n'
BACKENDS = {  # by backend: its module, what pyproject.toml has besides, and the section for the hook's options
    "hatchling": ("hatchling.build", IN_SRC, "tool.hatch.build.targets.wheel.hooks.fastexchange"),
    "setuptools": ("setuptools.build_meta", "", "tool.fastexchange"),
}
SOURCES = {
    "src/tiny/__init__.py": """
        from importlib.metadata import version
        from fastexchange import accelerate
        accelerate(__name__)
        __version__ = version("tiny-kernels")
        """,
    "src/tiny/kernels.py": """
        import numba
        from fastexchange import fast_args

        @fast_args
        def square(x):
            return x * x

        @fast_args(out="x[n] -> out[n]")
        def squares(x, out):
            for i in range(x.size):
                out[i] = square(x[i])

        @numba.njit
        def largest(x):
            best = x[0]
            for value in x:
                best = max(best, value)
            return best, x.size

        __precompile__ = [
            (square, "(float64,)"), (squares, "(float64[::1], float64[::1])"), (largest, "(float64[::1],)", "(int64[::1],)")
        ]
        """,
    "recorded.json": '{"kernels": {"tiny.kernels:square": ["(float32,)"]}}',
}
RUN = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from numba.core import event
    with event.install_recorder("numba:compile") as compiled:
        from tiny.kernels import largest, square, squares
        x = np.array([1.0, 3.0, 2.0])
        assert squares(x).tolist() == [1.0, 9.0, 4.0] and square(2.5) == 6.25
        assert largest(x) == (3.0, 3) and largest(x.astype(int)) == (3, 3)
    import tiny
    from fastexchange.ground.cfunction import code_cache
    assert tiny.__file__.startswith(sys.argv[1]), tiny.__file__
    print(len(compiled.buffer), code_cache.misses)
"""


def project(folder: Path, backend: str, options: str, kernels: str = SOURCES["src/tiny/kernels.py"]) -> Path:
    module, more, section = BACKENDS[backend]
    text = f"{PROJECT.format(backend, module)}{more}[{section}]\n{options}"
    (folder / "src" / "tiny").mkdir(parents=True)
    files = {"pyproject.toml": text, **SOURCES, "src/tiny/kernels.py": kernels}
    for place, content in files.items():
        (folder / place).write_text(textwrap.dedent(content), "utf-8")
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Those of a project, without what setuptools writes into its folder."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in files.items() if not re.match(r"build/|src/[\w-]+\.egg-info/", name)}


def pip_wheel(source: Path, into: Path, **environment: str) -> subprocess.CompletedProcess:
    command = "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v", "-w", str(into), str(source)
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", "PYTHONDONTWRITEBYTECODE": "", **environment}
    return interpret(*command, seconds=1500, **environment)


def tag_of(wheel: Path) -> str:
    return wheel.stem.split("-", 2)[2]


def written(wheel: Path) -> list[str]:
    """The code files in a wheel."""
    with zipfile.ZipFile(wheel) as content:
        return [name for name in content.namelist() if name.endswith(".code")]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wheel_has_code_and_nothing_is_compiled_where_it_is_installed(backend, tmp_path):
    options = f'package = "tiny"\ntargets = ["tiny.kernels", "recorded.json"]\ncpu = ["{LEVEL}"]\nstrict = true\n'
    source = project(tmp_path / "source", backend, options)
    before = files_in(source)
    done = pip_wheel(source, tmp_path / "wheels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_in(source) == before
    said = re.findall(r"fastexchange: (tiny\.kernels:\w+)\(.*\): ([\w-]+) \d+ bytes", done.stdout + done.stderr)
    names = ["square", "squares", "largest", "largest", "square"]
    assert said == [(f"tiny.kernels:{name}", LEVEL) for name in names], done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    (file,) = written(wheel)
    assert re.fullmatch(rf"tiny/_kernels/cpython-[\w-]+\.{LEVEL}\.code", file)

    tags = parse_tag(tag_of(wheel))
    assert not tags.isdisjoint(sys_tags()) and all(tag.interpreter == tag.abi.rstrip("dt") != "py3" for tag in tags)
    if sys.platform == "linux":
        machine = "aarch64" if LEVEL == "aarch64" else "x86_64"
        assert {tag.platform for tag in tags} <= {f"manylinux_2_17_{machine}", f"musllinux_1_1_{machine}"}
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = [name for name in content.namelist() if name.endswith(".dist-info/WHEEL")]
        fields = email.message_from_bytes(content.read(metadata))
        content.extractall(tmp_path / "site")
    assert fields["Root-Is-Purelib"] == "false" and set(fields.get_all("Tag")) == set(map(str, tags))

    assert run_python(RUN, str(tmp_path / "site")).stdout == "0 0\n"


BAD = {
    "cpus = []": "has no option 'cpus'; it has package, targets, cpu, strict",
    "cpu = 'x86-64-v3'": "cpu = 'x86-64-v3': it has to be a list of levels",
    "targets = [3]": "targets = [3]: it has to be a list of modules and of files of `record`",
    "strict = 'yes'": "strict = 'yes': it has to be true or false",
    "cpu = ['x86-64-v9']": "cpu: x86-64-v9: code can be made here for ",
    "package = 'tinny'": "package = 'tinny': the wheel has no tinny/__init__.py",
    "package = 'tiny.kernels'": "package = 'tiny.kernels': the wheel has no tiny/kernels/__init__.py",
    "": "has no package: name the package whose kernels are compiled",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_option_is_refused_before_anything_is_compiled(line, tmp_path):
    name, _, value = line.partition(" = ")
    table = {"package": "tiny", name: json.loads(value.replace("'", '"'))} if line else {}
    source = project(tmp_path, "setuptools", "") / "src"
    with pytest.raises(CommandError) as caught:
        build_hooks.code_for_wheel(table, "tool.fastexchange", tmp_path, source, tmp_path, print)
    assert BAD[line] in str(caught.value) and str(caught.value).startswith("[tool.fastexchange] ")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kernels", "sentence"), [
    ("hatchling", "import nothing_like_it", "tiny.kernels cannot be imported: ModuleNotFoundError: "),
    ("setuptools", "x = 3", "tiny.kernels: no kernel of tiny was compiled"),
    ("hatchling", "import os\nos._exit(7)", f"the process that made code for {LEVEL} has ended: exit code 7"),
    ("setuptools", """
        from fastexchange import fast_args
        @fast_args
        def upper(x): return x.no_such_attribute
        __precompile__ = [(upper, "(float64,)")]
        """, "strict = true: 1 left out, the first is tiny.kernels:upper((float64,)): not shipped: not compiled: "),
])  # fmt: skip
def test_a_build_that_fails_says_why_in_a_sentence_and_leaves_nothing(backend, kernels, sentence, tmp_path):
    options = f'package = "tiny"\ntargets = ["tiny.kernels"]\ncpu = ["{LEVEL}"]\nstrict = true\n'
    source = project(tmp_path / "source", backend, options, kernels=kernels)
    before = files_in(source)
    done = pip_wheel(source, tmp_path / "wheels", TMPDIR=str(tmp_path))
    said = done.stdout + done.stderr
    assert done.returncode == 1 and sentence in said and "Traceback" not in said, said
    assert files_in(source) == before and not list(tmp_path.rglob("*.whl")) and not list(tmp_path.rglob("*.code"))
    assert not list(tmp_path.glob("fastexchange-*"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_wheels_have_code_and_those_of_a_disabled_build_have_none(backend, tmp_path):
    """The module cannot be imported, so whatever would compile its kernels fails."""
    options = 'package = "tiny"\ntargets = ["tiny.kernels"]\n'
    source = project(tmp_path / "source", backend, options, kernels="import nothing_like_it")
    stale = source / "build/lib/tiny/_kernels/old.x86-64.code"  # of an earlier build in the same folder
    stale.parent.mkdir(parents=True)
    stale.touch()
    program = f"import os, sys, {BACKENDS[backend][0]} as backend; os.chdir(sys.argv[1]); "
    program += "print(backend.build_sdist(sys.argv[2]), backend.build_editable(sys.argv[2]))"
    done = run_python(program, str(source), str(tmp_path / "made"))
    sdist, editable = done.stdout.split()[-2:]
    assert sdist == "tiny_kernels-1.2.tar.gz" and editable.endswith("none-any.whl")
    done = pip_wheel(source, tmp_path / "wheels", FASTEXCHANGE_DISABLE="1")
    assert done.returncode == 0 and "this wheel gets no machine code" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert tag_of(wheel) == "py3-none-any" and written(wheel) == []


@pytest.mark.parametrize(("made", "files", "platforms"), [
    ("cpython-311-x86_64-linux-gnu", ["x86-64-v2", "x86-64-v3"], ["x86_64"]),
    ("cpython-311-x86_64-linux-gnu", ["aarch64", "x86-64-v3"], ["aarch64", "x86_64"]),
    ("cpython-311-x86_64-linux-musl", ["x86-64"], ["x86_64"]),
    ("cpython-311-darwin", ["aarch64"], []),
    ("cp311-win_amd64", ["x86-64-v2"], []),
])  # fmt: skip
def test_a_tag_names_the_platforms_that_the_code_is_for(made, files, platforms, monkeypatch):
    libc = "musllinux_1_1" if made.endswith("musl") else "manylinux_2_17"
    monkeypatch.setattr(build_hooks.sysconfig, "get_config_var", lambda name: made)
    monkeypatch.setattr(os, "confstr", lambda name: None if made.endswith("musl") else "glibc 2.36", raising=False)
    names = [f"tiny/_kernels/{made.replace('x86_64', 'aarch64') if each == 'aarch64' else made}.{each}.code" for each in files]
    expected = f"cp311-cp311-{'.'.join(f'{libc}_{each}' for each in platforms)}" if platforms else ""
    assert build_hooks.tag_of(names) == expected


def test_a_wheel_that_another_hook_has_tagged_keeps_its_tag(tmp_path, monkeypatch):
    """It has extension modules: its code is for their platform."""
    from hatchling.builders.wheel import WheelBuilder

    name = "tiny/_kernels/cpython-311-x86_64-linux-gnu.x86-64.code"
    code = tmp_path / "made.code"
    code.touch()
    monkeypatch.setattr(hatch_hook, "code_for_wheel", lambda *rest: {name: code})
    own = "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\nclass Hook(BuildHookInterface):\n"
    own += " def initialize(self, version, build_data): build_data.update({})\n"
    module, more, section = BACKENDS["hatchling"]
    monkeypatch.setitem(BACKENDS, "hatchling", (module, f"{more}[tool.hatch.build.targets.wheel.hooks.custom]\n", section))
    tags = []
    for given in ("pure_python=False", "pure_python=False, tag='cp311-cp311-linux_riscv64'"):
        source = project(tmp_path / str(len(tags)), "hatchling", 'package = "tiny"\n')
        (source / "hatch_build.py").write_text(own.format(given))
        (wheel,) = WheelBuilder(str(source)).build(directory=str(tmp_path / "wheels"), versions=["standard"])
        assert written(Path(wheel)) == [name]
        tags.append(tag_of(Path(wheel)))
    assert tags == ["py3-none-any", "cp311-cp311-linux_riscv64"]


def equal(one, other) -> bool:
    """Of what calls have returned or raised: the same types, and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return one == other


@pytest.mark.nightly
def test_the_example_in_an_environment_where_nothing_was_ever_compiled(tmp_path):
    """All its kernels are called: none is compiled, and they compute what ``numba.njit`` does."""
    shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    done = pip_wheel(tmp_path / "source", tmp_path / "wheels")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    levels = {name.rpartition("/")[2].split(".", 1)[1].removesuffix(".code") for name in written(wheel)}
    assert levels == set(DEFAULT_LEVELS) and wheel.stat().st_size < 10_000_000

    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(each for each in sys.path if each.endswith("-packages")))
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "_native"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    before = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHON", "FASTEXCHANGE_"))}
    environment = {**before, "HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()

    def run(*arguments: str) -> str:
        command = [str(python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=1500)
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
        return done.stdout

    native = [str(python), "-m", "fastexchange._native_build"]  # what a wheel of fastexchange carries
    subprocess.run(native, env=environment, cwd=tmp_path, check=True)
    where = run("-c", "import fastexchange, shipped_kernels as s; print(fastexchange.__file__, s.__file__)").split()
    assert all(each.startswith(str(site)) for each in where)
    said = json.loads(run(str(EXAMPLE / "first_calls.py"), "shipped", "shipped.pickle"))
    assert not list((tmp_path / "cache").rglob("*.entry")) and not (tmp_path / "home").exists()
    assert said["kernels"] == 100 and said["compiled"] == said["native compiled"] == said["native from disk"] == 0, said
    run(str(EXAMPLE / "first_calls.py"), "njit", "njit.pickle")
    shipped, plain = (pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in ("shipped", "njit"))
    assert len(shipped) == said["calls"] and [pair for pair in zip(shipped, plain, strict=True) if not equal(*pair)] == []


def test_projects_without_the_table_need_nothing_of_setuptools(tmp_path, monkeypatch):
    """An older setuptools, which calls the hook for each project, builds them."""
    for name in "setuptools.config.pyprojecttoml", "setuptools.errors":
        monkeypatch.setitem(sys.modules, name, None)
    project = SimpleNamespace(src_root=str(tmp_path), cmdclass={})
    add_machine_code(project)
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    add_machine_code(project)
    assert project.cmdclass == {}
    (tmp_path / "pyproject.toml").write_text("[tool.fastexchange]\n")
    with pytest.raises(RuntimeError, match=r"it needs setuptools 70\.1 or newer"):
        add_machine_code(project)


def test_code_in_the_sources_is_refused(tmp_path):
    """It may be stale, and be read before the code that the build makes."""
    source = project(tmp_path, "setuptools", "") / "src"
    (source / "tiny" / "_kernels").mkdir()
    (source / "tiny" / "_kernels" / "cpython-311-x86_64-linux-gnu.x86-64-v4.code").touch()
    with pytest.raises(CommandError, match=r"x86-64-v4\.code, of an earlier .*: remove it"):
        build_hooks.code_for_wheel({"package": "tiny"}, "tool.fastexchange", tmp_path, source, tmp_path, print)
