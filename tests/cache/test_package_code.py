"""Machine code that packages ship for their kernels: what is in the files, who finds it, and that nobody else does."""

import shutil
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from interpreter import environment_of, run_python
from native_copies import started
from shell import run

from fastexchange.command import probe, pyinstaller_hook
from fastexchange.command.make_code import LEVELS_HERE
from fastexchange.ground import numba_code, package_code
from fastexchange.ground.disk_cache import NotBelieved, framed
from fastexchange.ground.package_code import CodeFile, fitting_levels, name_of_file

pytestmark = pytest.mark.skipif("x86-64" not in LEVELS_HERE, reason="made on x86-64")
KERNELS = """
import ctypes
import numba
import numpy as np
from fastexchange import fast_args

FACTOR = 2.0
from . import constants
IDENTITY = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(lambda value: value)

@fast_args
def scaled(x, k):
    if k < 0:
        raise ValueError("k is negative")
    return FACTOR * k * x, x.sum()
@fast_args(out="x[n] -> y[n]")
def rooted(x, y):
    for i in range(x.shape[0]):
        y[i] = np.sqrt(x[i])
@fast_args(parallel=True, cache=True)
def norm(x):
    return np.sqrt((x * x).sum())
@numba.njit
def doubled(x):
    return twice(x)
@numba.njit
def twice(x):
    return constants.ONE * (x + x)
@fast_args
def addressed(x):
    return IDENTITY(x)
@fast_args
def generated(x):
    yield x
@fast_args("int64(int64)")
def declared(x):
    return x + 1
@numba.njit
def written(x):
    x.flat[0] = 9.0

__precompile__ = [
    (scaled, "(float64[::1], float64)"), (rooted, (np.ones(2),), (np.ones(2, "f4"),)), (norm, "(float64[::1],)"),
    (doubled, "(int64,)"), (addressed, "(float64,)"), (generated, "(int64,)"),
    (written, (numba.types.Array(numba.float64, 1, "C", readonly=True),)),
]
"""
CALLS = """
import sys
import numpy as np
from numba.core import event

compiled = event.RecordingListener()
event.register("numba:compile", compiled)
import carrier.kernels as k
if "change" in sys.argv:
    k.FACTOR = 3.0
print(k.scaled(np.arange(3.0), 2.0), k.rooted(np.full(2, 9.0)), k.norm(np.full(4, 2.0)), k.doubled(4))
try:
    k.scaled(np.ones(1), -1.0)
except ValueError as error:
    print(error)
print([each.data["dispatcher"].py_func.__name__ for _, each in compiled.buffer if each.is_start])
"""
RESULTS = "(array([0., 4., 8.]), 3.0) [3. 3.] 4.0 8\nk is negative\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the package, with code for all processors of this platform and of another."""
    root = tmp_path_factory.mktemp("built")
    (root / "carrier").mkdir()
    (root / "carrier" / "__init__.py").write_text("import fastexchange\nfastexchange.accelerate('carrier')\n")
    (root / "carrier" / "kernels.py").write_text(KERNELS)
    (root / "carrier" / "constants.py").write_text("ONE = 1\n")
    done = make(root)
    assert done.returncode == 0, done.stderr
    (root / "said").write_text(done.stdout)
    return root


def make(root: Path, *options: str):
    levels = () if "--cpu" in options else ("--cpu", "x86-64,aarch64")
    return run("precompile", "carrier.kernels", "--into", "carrier", *levels, *options, path=root)


@pytest.fixture
def copied(built, tmp_path) -> Path:
    """The same in a folder of its own."""
    return Path(shutil.copytree(built, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__")))


def printed(root: Path | str, code: str, *arguments: str, **environment: str) -> str:
    """What a new process prints that finds the package at `root`, as on the oldest processor."""
    environment = {"NUMBA_CPU_NAME": "generic", "PYTHONPATH": f"{root}:{environment_of()['PYTHONPATH']}", **environment}
    return run_python(code, *arguments, **environment).stdout


def called(root: Path | str, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    """What a new process prints, and the names of the functions that it compiles."""
    *lines, names = printed(root, CALLS, *arguments, **environment).splitlines()
    return "\n".join(lines) + "\n", [name for name in eval(names) if name in ("scaled", "rooted", "norm", "doubled", "twice")]


@pytest.mark.slow
def test_what_is_made(built):
    said = (built / "said").read_text()
    floats = "array(float32, 1d, C)"
    for name in ("scaled(array(float64, 1d, C), float64)", f"rooted({floats}, {floats})", "doubled(int64)"):
        assert f"carrier.kernels:{name}: x86-64 " in said, said
    assert "addressed(float64): not shipped: it has addresses of this process" in said
    assert "generated(int64): not shipped: it has addresses or paths of this process" in said
    assert "the code of 8 signatures; 2 left out" in said  # doubled calls twice, whose code is shipped, too
    assert {path.name for path in (built / "carrier" / "_kernels").iterdir()} == {
        name_of_file("x86-64"), name_of_file("aarch64", numba_code.native_code_depends_on()[0].replace("x86_64", "aarch64")),
    }  # fmt: skip


@pytest.mark.slow
def test_another_process_elsewhere_compiles_nothing(copied):
    assert called(copied) == (RESULTS, [])
    for path in (copied / "carrier").rglob("*"):
        path.chmod(0o555)
    assert called(copied, PYTHONDONTWRITEBYTECODE="1") == (RESULTS, [])
    code = "from carrier.kernels import doubled; from fastexchange.ground.cfunction import code_cache; "
    told = printed(copied, f"{code}doubled(4); doubled.inspect_types(); print(code_cache.shipped > 0)")
    assert "came with its package, without this text" in told and told.endswith("True\n")
    assert called(copied, "change") == (RESULTS.replace("0., 4., 8.", " 0.,  6., 12."), ["scaled"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zip", "bytecode"])
def test_a_zip_file_and_bytecode_alone(copied, how):
    if how == "bytecode":
        run_python(f"import compileall; compileall.compile_dir({str(copied)!r}, legacy=True, quiet=1)")
        for path in copied.rglob("*.py"):
            path.unlink()
    place = shutil.make_archive(str(copied / "all"), "zip", copied, "carrier") if how == "zip" else copied
    assert called(place) == (RESULTS, [])


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(copied, built, tmp_path, monkeypatch):
    """Wherever they lie, and wherever NumPy lies."""
    before = {path.name: path.read_bytes() for path in (built / "carrier" / "_kernels").iterdir()}
    for name in ("numpy", "numpy.libs"):
        (tmp_path / name).symlink_to(Path(np.__file__).parents[1] / name)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{environment_of()['PYTHONPATH']}")
    shutil.rmtree(copied / "carrier" / "_kernels")
    assert make(copied).returncode == 0
    assert {path.name: path.read_bytes() for path in (copied / "carrier" / "_kernels").iterdir()} == before


@pytest.mark.slow
def test_code_that_does_not_fit_costs_a_compilation(copied):
    file = copied / "carrier" / "_kernels" / name_of_file("x86-64")
    data = file.read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for unfit in (damaged, data[:-1], data[:50], b""):
        with pytest.raises(NotBelieved, match=r"checksum is wrong|does not begin"):
            CodeFile.unpacked(file, "carrier", "x86-64", unfit)
    file.write_bytes(damaged)
    output, compiled = called(copied)
    assert output == RESULTS and set(compiled) >= {"scaled", "rooted", "doubled"}
    said = printed(copied, "from fastexchange.command import probe; print(*probe._code_of_packages())")  # doctor's words
    assert "carrier" in said and "checksum is wrong" in said, said
    file.write_bytes(data)
    assert called(copied, NUMBA_BOUNDSCHECK="1")[1] != []  # made with another setting


def said_by(done) -> tuple[str, list[str], list[str]]:
    """What a process prints, the names of the functions that it compiles, and the levels of the code that it has opened."""
    assert done.returncode == 0, done
    *lines, compiled, levels = done.stdout.splitlines()
    return "\n".join(lines) + "\n", [name for name in eval(compiled) if name in ("scaled", "rooted", "doubled")], eval(levels)


OPTIONAL = "torch", "jax", "cupy", "paddle", "pandas", "matplotlib", "scipy", "IPython", "tvm_ffi", "numba_cuda_mlir", "rich"
"""What this package imports where it is installed."""
LEVELS_OPENED = """
from fastexchange.ground import package_code
print([file.level for file in package_code.opened])
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("qemu-x86_64-static") is None, reason="emulates older processors")
def test_older_processors_load_what_they_have_the_features_for(copied, with_native_code):
    assert make(copied, "--cpu", "x86-64-v2,x86-64-v3").returncode == 0

    def emulated(cpu: str):
        paths = f"{copied}:{with_native_code}"
        return said_by(started(copied, "-c", CALLS + LEVELS_OPENED, under=("qemu-x86_64-static", "-cpu", cpu), PYTHONPATH=paths))

    assert emulated("Haswell") == (RESULTS, [], ["x86-64-v3"])
    assert emulated("SandyBridge") == (RESULTS, [], ["x86-64-v2"])
    (copied / "carrier" / "_kernels" / name_of_file("x86-64-v2")).unlink()
    results, compiled, levels = emulated("SandyBridge")
    assert results == RESULTS and set(compiled) == {"scaled", "rooted", "doubled"} and levels == []


@pytest.mark.nightly
def test_a_program_that_pyinstaller_freezes(copied, with_native_code):
    pytest.importorskip("PyInstaller")
    (copied / "program.py").write_text(CALLS + LEVELS_OPENED)
    options = ["--additional-hooks-dir", *pyinstaller_hook.folders(), "--collect-data", "carrier"]
    for optional in OPTIONAL:
        options += "--exclude-module", optional
    paths = f"{copied}:{with_native_code}"
    started(copied, "-m", "PyInstaller", "--noconfirm", *options, "program.py", PYTHONPATH=paths).check_returncode()
    frozen = copied / "dist" / "program" / "program"
    environment = {"HOME": "/dev/null", "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([str(frozen)], env=environment, cwd="/", capture_output=True, text=True, timeout=240)
    assert said_by(done) == (RESULTS, [], ["x86-64"]) and "compiling native" not in done.stderr, done
    (ours,) = (point for point in entry_points(group="pyinstaller40") if point.module.startswith("fastexchange."))
    assert ours.load() is pyinstaller_hook.folders


def test_files_of_other_installations_are_refused(monkeypatch):
    own = package_code.made_for("x86-64-v3")

    def read(made_for, half="", package="mine", entries=None) -> CodeFile:
        data = framed(repr((*made_for, half, package)), {"a": b"b"} if entries is None else entries)
        return CodeFile.unpacked(Path("x.code"), "mine", "x86-64-v3", data)

    def refused(words: str, *given, **named) -> str:
        """Why, and what one is advised to do."""
        with pytest.raises(NotBelieved, match=words) as caught:
            read(*given, **named)
        return getattr(caught.value, "advice", "")

    def but(what: str, value) -> tuple:
        return tuple(value if name == what else each for name, each in zip(package_code._WHAT, own, strict=True))

    assert read(own).entries == {"a": b"b"}
    for what in package_code._WHAT:
        refused(f"{what} is ", but(what, "another"))
    of_numpy, settings = "the version of NumPy", "Numba's settings"
    expected = f"install NumPy 9.9, or build mine with {own[package_code._WHAT.index(of_numpy)]}"
    assert refused("the version of NumPy is 9.9", but(of_numpy, "9.9")) == expected
    changed = [(name, "_OptLevel(9)" if name == "OPT" else each) for name, each in own[package_code._WHAT.index(settings)]]
    assert refused(r"numba.config.OPT is 9 there, \d here$", but(settings, changed)) == ""
    monkeypatch.setenv("NUMBA_OPT", "3")
    assert refused(r"NUMBA_OPT is 9 there, \d here$", but(settings, changed)) == "unset NUMBA_OPT"
    for unfit in ("", "()", repr((*own[1:], "", "mine"))):
        with pytest.raises(NotBelieved, match="format of another version"):
            CodeFile.unpacked(Path("x.code"), "mine", "x86-64-v3", framed(unfit, {}))
    refused("half precision", own, half="another digest")
    refused("of the package another", own, package="another")
    refused("no entries", own, entries=[])


@pytest.mark.skipif(len(fitting_levels()) < 2, reason="this processor has one level")
def test_what_doctor_says_of_a_damaged_file(tmp_path, monkeypatch):
    """It names the level of the file that is damaged, and that whose file is used."""
    best, second, *_ = fitting_levels()
    (tmp_path / package_code.name_of_file(best)).write_bytes(b"damaged")
    (tmp_path / package_code.name_of_file(second)).write_bytes(CodeFile.packed({"a": ("b", b"")}, "mine", second, ""))
    monkeypatch.setattr(package_code, "installed", lambda: {"mine": [tmp_path]})
    (line,) = probe._code_of_packages()
    assert line.status == "slow" and f"; not that for {best}: it" in line.text, line
    assert f"for {second} is used: " in line.text and line.advice.startswith("install mine again")
    monkeypatch.setattr(package_code, "installed", lambda: {"mine": [tmp_path / "none"]})
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    (line,) = probe._code_of_packages()
    assert line.advice == "unset NUMBA_CPU_NAME"


def test_an_entry_under_the_name_of_another_is_not_found():
    entries = package_code.FileEntries()
    entries.save("", "one", 1), entries.save("", "other", 2)
    names = list(entries.entries)
    entries.entries = dict(zip(names, [entries.entries[name] for name in reversed(names)], strict=True))
    assert entries.load("", "one") is None and not entries.has("", "other")


ALL = ",".join(f"+{name}" for name in package_code.LEVELS["x86-64-v4"])


@pytest.mark.parametrize(("triple", "features", "expected"), [
    ("x86_64-unknown-linux-gnu", ALL, ["x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64"]),
    ("x86_64-unknown-linux-gnu", ALL.replace("+avx512vl", "-avx512vl"), ["x86-64-v3", "x86-64-v2", "x86-64"]),
    ("x86_64-unknown-linux-gnu", ALL.replace("+movbe", "-movbe"), ["x86-64-v2", "x86-64"]),
    ("x86_64-unknown-linux-gnu", "", ["x86-64"]), ("aarch64-unknown-linux-gnu", "+neon", ["aarch64"]),
    ("arm64-apple-darwin", "+neon", ["aarch64"]), ("powerpc64le-unknown-linux-gnu", "", []),
])  # fmt: skip
def test_levels_are_told_by_features(monkeypatch, triple, features, expected):
    monkeypatch.setattr(package_code, "processor", lambda: (triple, "whatever", features))
    assert fitting_levels() == expected


V3 = ",".join(f"+{name}" for name in package_code.LEVELS["x86-64-v3"])


@pytest.mark.parametrize(("name", "features", "is_this_processors"), [
    ("the host", V3, True), ("generic", "", True), ("x86-64-v2", "", True), ("generic", "+avx,-avx2", True),
    ("the host", "", False),  # the features of its name, of which a virtual machine may lack some
    ("x86-64-v4", "", False), ("generic", "+avx512f", False), ("znver4", "", False),
])  # fmt: skip
def test_native_code_is_of_this_processor_unless_it_might_not_run_there(monkeypatch, name, features, is_this_processors):
    monkeypatch.setattr(package_code, "this_processor", lambda: ("the host", V3))
    monkeypatch.setattr(package_code, "processor", lambda: ("", name, features))
    assert package_code.native_processor() == (("", "the host", V3) if is_this_processors else ("", name, features))


WRONG = {  # the arguments, and what is said
    "no level": ("carrier.kernels --into carrier --cpu x86-64-v9", "--cpu x86-64-v9: code can be made here for x86-64, "),
    "no package": ("carrier.kernels --into no_such_package", "--into no_such_package: there is no package of this name"),
    "a module": ("carrier.kernels --into carrier.kernels", "it is a module, not a package"),
    "no kernels": ("carrier --into carrier --cpu x86-64 --strict", "carrier: no kernel of carrier was compiled"),
    "without --into": ("carrier.kernels --strict", "--cpu and --strict are for --into PACKAGE"),
    "--self with a target": ("carrier.kernels --self", "--self takes no TARGET"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_wrong_options(built, what):
    arguments, said = WRONG[what]
    before = sorted((built / "carrier" / "_kernels").iterdir())
    done = run("precompile", *arguments.split(), path=built)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert sorted((built / "carrier" / "_kernels").iterdir()) == before


@pytest.mark.slow
def test_processes_that_fail_leave_what_was_there(copied):
    assert make(copied, "--strict", "--cpu", "x86-64").returncode == 1, "two signatures are left out"
    before = {path.name: path.read_bytes() for path in (copied / "carrier" / "_kernels").iterdir()}
    (copied / "carrier" / "kernels.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    done = make(copied)
    assert done.returncode == 2 and "ended: signal 4; does importing it, or an example call, run such code?" in done.stderr
    assert before == {path.name: path.read_bytes() for path in (copied / "carrier" / "_kernels").iterdir()} != {}
    assert all(name.endswith(".code") for name in before)


@pytest.mark.slow
def test_what_a_process_has_otherwise_than_the_build_is_not_used(copied):
    """Settings changed meanwhile, in a kernel that checks more, and code of Numba's function in a kernel of ours."""
    code = """
        import numba, numpy as np
        import carrier.kernels as k
        from fastexchange import fast_args
        print(k.twice(1), sum(k.twice.stats.cache_hits.values()), k.declared(1), sum(k.declared.stats.cache_hits.values()))
        numba.config.BOUNDSCHECK = 1
        print(k.doubled(1), sum(k.doubled.stats.cache_hits.values()))
        numba.config.BOUNDSCHECK = 0
        x = np.ones(3)
        x.flags.writeable = False
        try:
            fast_args(k.written.py_func)(x)
        except numba.TypingError:
            print(x)
    """
    assert printed(copied, code) == "2 1 2 1\n2 0\n[1. 1. 1.]\n"


@pytest.mark.slow
def test_a_pickle_of_a_shipped_kernel_carries_its_code(copied):
    """It comes before the package is imported, which is found to have code afterwards, too."""
    send = """
        import sys, pickle, numpy as np, carrier.kernels as k
        k.scaled(np.ones(2), 1.0), k.doubled(1)
        print(k.scaled._pickled())
        print(k.scaled.explain(np.ones(2), 1.0))
        open(sys.argv[1], "wb").write(pickle.dumps((k.scaled, k.doubled)))
    """
    receive = """
        import pickle, sys, fastexchange, numpy as np
        fastexchange.accelerate("carrier")
        scaled, doubled = pickle.loads(open(sys.argv[1], "rb").read())
        print(scaled(np.ones(2), 1.0)[1], doubled(2), *(sum(each.stats.cache_hits.values()) for each in (scaled, doubled)))
        import carrier.kernels as k
        k.rooted(np.ones(2))
        print(sum(k.rooted.stats.cache_hits.values()))
    """
    said = printed(copied, send, str(copied / "pickled"))
    assert "the machine code of 1 signature, " in said
    assert "note: machine code that comes with carrier: for x86-64, in " in said
    assert printed(copied, receive, str(copied / "pickled")) == "2.0 4 1 1\n1\n"
