"""``python -m fastexchange doctor``: what it says of an installation that is well, slow, wrong or hostile."""

import hashlib
import json
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numba
import pytest
from frameworks import torch
from interpreter import run_python
from shell import run, run_here, without

import fastexchange
from fastexchange.calls.kernel_cache import made_by
from fastexchange.command import doctor, probe
from fastexchange.ground import cfunction, shipped
from fastexchange.ground.numba_code import code_depends_on


def lines(done) -> dict[tuple[str, str], dict]:
    """The lines of ``doctor --json`` by section and name."""
    return {(line["section"], line["name"]): line for line in json.loads(done.stdout)["lines"]}


@pytest.mark.slow
def test_all_is_well():
    done = run("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = lines(done)
    assert json.loads(done.stdout)["verdict"] == "ok", [line for line in found.values() if line["advice"]]
    assert {section for section, _ in found} == set(doctor._SECTIONS)
    # every kind of argument
    assert "path ndarray, 4 calls are right" in found["types", "numpy.ndarray"]["text"]
    assert "path dunder, 4 calls are right" in found["types", "only __dlpack__"]["text"]
    for example in ("torch.Tensor", "paddle.Tensor", "jax.Array", "tvm_ffi.Tensor", "pyarrow.Array"):
        is_there = found["frameworks", example.partition(".")[0]]["status"] == "ok"
        assert is_there == ("4 calls are right" in found.get(("frameworks", example), {"text": ""})["text"])
    if found["frameworks", "jax"]["status"] == "ok":
        assert found["frameworks", "jax: jax.jit"]["text"] == "XLA calls kernels natively"
    if torch is not None:
        assert ("packages", "torch") not in found or found["packages", "torch"]["text"].startswith(torch.__version__)
        for what in ("", ": keys", ": storage", ": autograd", ": requires grad", ": lazily conjugated"):
            assert found["frameworks", f"torch{what}"]["status"] == "ok"
        assert found["CUDA", "torch.cuda"]["status"] == "-"
    assert re.match(r"\d+ functions, \d+\.\d MiB", found["disk cache", "entries"]["text"])
    # where the code in pickles runs
    line = found["native code", "pickles"]
    digest = hashlib.sha256(repr((made_by(), code_depends_on())).encode()).hexdigest()
    assert line["status"] == "ok" and re.fullmatch(r"of .* code, \d+ bytes .* says (\w{12}), too", line["text"])[1] in digest


HOSTILE = {
    "torch": "raise OSError('libtorch is gone\\nand more')",
    "jax": "import os; os.abort()",
    "pyarrow": "raise SystemExit(0)",
    "ml_dtypes": "__version__ = '9'\nprint('[\"native code\", \"x\", \"wrong\", \"y\"]')\nbfloat16 = 'V2'",
    "tvm_ffi": """
        import numpy
        __version__ = "9"
        class Tensor:
            def __init__(self, array):
                self.array = array + 1
            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)
            def __dlpack_device__(self):
                return self.array.__dlpack_device__()
        from_dlpack = Tensor
        """,
}


@pytest.mark.slow
def test_hostile_frameworks_are_lines(tmp_path):
    for name, code in HOSTILE.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    done = run("doctor", path=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    wrong = dict(re.findall(r"^  wrong +(\S+(?: \S+)*)  +(.*)$", done.stdout, re.MULTILINE))
    assert wrong["torch"] == "PyTorch cannot be imported: OSError: libtorch is gone and more"
    assert wrong["jax"].startswith("the process that tested it was ended by SIGABRT")
    assert wrong["pyarrow"] == "pyarrow cannot be imported: SystemExit: 0"
    assert wrong["tvm_ffi.Tensor"] == "call 1 wrote [2.0, 4.0, 6.0, 8.0], not [0.0, 2.0, 4.0, 6.0]"
    others = {"numba_cuda", "numba_cuda_mlir"}  # which import some of these
    assert set(wrong) - others == {"torch", "jax", "pyarrow", "tvm_ffi.Tensor", "array of bfloat16"}
    assert "ok     numpy.ndarray " in done.stdout and done.stdout.count("→") >= 4
    assert re.search(rf"^{len(wrong)} wrong, \d slow: see the lines with an arrow\.$", done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_is_slow(tmp_path):
    (tmp_path / "file").write_text("")
    code = "from fastexchange.ground import cpython\nfrom fastexchange.torch import offsets\n"
    code += "checks = {**cpython.verify(), 'float': False}\ncpython.verify = lambda: checks\n"
    code += "offsets.Guard._find_storage = lambda self: 1 / 0"
    path = without(tmp_path, *(set(probe.FRAMEWORKS) - {"torch"}), code=code)
    settings = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache"), "NUMBA_DISABLE_JIT": "1", "FASTEXCHANGE_DISABLE": "1"}
    done = run("doctor", "--json", path=path, **settings)
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "slow", done.stdout
    found = {key: line for key, line in lines(done).items() if line["status"] == "slow"}
    expected = {
        ("native code", "float"): "Numba's own dispatcher makes the calls that have one",
        ("types", "float"): "path numba, 4 calls are right",
        ("disk cache", "directory"): "cannot be written",
        ("environment", "NUMBA_DISABLE_JIT"): "nothing is compiled",
        ("environment", "FASTEXCHANGE_DISABLE"): "Python makes all calls",
    }
    if torch is not None:
        expected |= {("frameworks", "torch: storage"): "PyTorch is asked about each tensor", ("frameworks", "torch.Tensor"): ""}
        assert "ZeroDivisionError: division by zero" in found["frameworks", "torch: storage"]["text"]
    assert set(found) == set(expected) and all(words in found[key]["text"] for key, words in expected.items())
    assert all(found[key]["advice"] for key in expected if key[0] != "types" and key[1] != "torch.Tensor")


KILLED = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.{})"
OURS = {  # a module in place of JAX: its code, the status of the lines, and words of the last
    "what is late, after what was found before": (
        "import time\n__version__ = '9'\ndef __getattr__(name):\n    time.sleep(600)", "ok unknown",
        "not done after {} seconds, after jax; this machine may be busy, or its disk slow",
    ),
    **{f"a process killed from outside, by {name},": (KILLED.format(name), "unknown", f"it was ended by {name}, ")
       for name in ("SIGTERM", "SIGXCPU")},
    "a process that crashes": (KILLED.format("SIGSEGV"), "wrong", "it was ended by SIGSEGV"),
    "a process that ends without a word": ("import os; os._exit(0)", "wrong", "process that tested it ended without a result"),
    "a process without memory": ("bytearray(1 << 60)", "unknown", "MemoryError"),
    "a disk without space": ("import errno; raise OSError(errno.ENOSPC, 'no space')", "unknown", "no space"),
    "a file that may not be read": ("import errno; raise OSError(errno.EACCES, 'not yours')", "wrong", "not yours"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "late" in name else ()) for name in OURS])
def test_what_a_process_that_fails_says(name, tmp_path, monkeypatch):
    code, statuses, words = OURS[name]
    (tmp_path / "jax.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{doctor.Path(doctor.package_file).parents[1]}")
    for seconds in (4, 20, 100) if "late" in name else (100,):
        if len(found := doctor._probed("jax", seconds)) > 1:  # it came to what is late: a busy machine may take more
            break
    assert " ".join(line.status for line in found) == statuses
    line = found[-1]
    assert line.section == "frameworks" and words.format(seconds) in line.text
    if line.status == "unknown":
        assert "install" not in line.advice and "trusted" not in line.advice
    if "late" in name:
        assert f"python -m fastexchange doctor --timeout {3 * seconds}" in line.advice and found[0].text == "JAX 9"
    if "crashes" in name:
        assert line.advice == "install JAX again, or remove it"


def test_what_is_unknown_is_a_warning(monkeypatch):
    """A late probe does not condemn native code, nor one that cannot be started."""
    monkeypatch.setattr(doctor, "FRAMEWORKS", {})
    done, shown = (run_here("doctor", "--timeout", "0.01", *more) for more in (["--json"], []))
    assert done.returncode == shown.returncode == 0 and json.loads(done.stdout)["verdict"] == "unknown"
    assert re.search(r"^warning: not everything could be checked\. 1 unknown, \d slow: ", shown.stdout, re.MULTILINE)
    line = lines(done)["native code", "native"]
    assert line["status"] == "unknown" and "not done after 0.01 seconds" in line["text"]
    assert "trusted" not in line["advice"] + line["text"]
    assert doctor._verdict([probe.Finding("types", "a", each, "") for each in ("unknown", "wrong", "slow")]) == "wrong"

    monkeypatch.setattr(doctor.subprocess, "run", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable")))
    (line,) = doctor._probed("native", 100)
    assert line.status == "unknown" and "no process could be started to test it: BlockingIOError" in line.text


def test_what_looking_raises_is_a_line():
    def looks():
        yield probe.Finding("CUDA", "first", "ok", "found")
        raise OSError("no permission")

    first, second = doctor._looked("CUDA", looks())
    assert (first.name, second.status, second.text) == ("first", "wrong", "the check failed: OSError: no permission")
    assert [run_here("doctor", "--timeout", seconds).returncode for seconds in ("0", "-1", "nan", "soon")] == [2] * 4


@pytest.mark.parametrize(("version", "specifiers", "expected"), [
    ("0.68.1", ">=0.68", ""), ("0.67", ">=0.68", "older"), ("2.13.0+cpu", ">=2.13.0", ""), ("2.1rc1", ">=2.1", ""),
    ("3.14.0", ">=3.10,<3.14", "newer"), ("3.9", "<3.14,>=3.10", "older"), ("3.13.9", ">=3.10, <3.14", ""), ("1", "", ""),
    ("10.0", ">=9.5", ""), ("7.4", ">=8", "older"),
])  # fmt: skip
def test_versions(version, specifiers, expected):
    assert doctor.misfit(version, specifiers) == expected


def install(tmp_path, monkeypatch, name: str, version: str, *fields: str) -> None:
    """Make it look as if such a project were installed."""
    (folder := tmp_path / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *fields, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_versions_that_do_not_fit(tmp_path, monkeypatch):
    needs = "numba>=99", "numpy>=2.1", "no-package-of-this-name", "jax>=99; extra == 'test'", "pytest>=99; extra == 'test'"
    fields = "Requires-Python: >=99", *(f"Requires-Dist: {each}" for each in needs)
    install(tmp_path, monkeypatch, "numba-fastexchange", "9", *fields)
    requires, requirements, source = doctor._metadata()
    assert next(doctor._interpreter(requires)).status == "wrong"
    found = {line.name: (line.status, line.text) for line in doctor._packages(requirements, source)}
    assert found["numba"][0] == "wrong" and "too old (needs >=99)" in found["numba"][1] and found["numpy"][0] == "ok"
    assert found["no-package-of-this-name"] == ("wrong", "not installed")
    assert found["fastexchange"][0] == "-" and "are of 9" in found["fastexchange"][1]
    assert "pytest" not in found and ("jax" not in found or found["jax"][0] == "slow")


def test_another_project_of_the_same_name(tmp_path, monkeypatch):
    """Its package may lie in the same folder, over this one's ``__init__.py``."""
    install(tmp_path, monkeypatch, "fastexchange", "0.0.1")
    (found,) = (line for line in doctor._packages(["numpy"], "") if line.name == "namesake")
    assert found.status == "wrong" and "0.0.1" in found.text and "numba-fastexchange" in found.advice
    package = Path(fastexchange.__file__).parent
    shutil.copytree(package, tmp_path / "fastexchange", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fastexchange" / "__init__.py").write_text(f"Gateway = 1\n__version__ = '{fastexchange.__version__}'\n")
    if doctor._metadata()[2] == "installed":
        assert doctor._installed_at(package) == package
        monkeypatch.setattr(doctor, "package_file", str(tmp_path / "fastexchange" / "__init__.py"))
        line = next(each for each in doctor._packages(["numpy"], "installed") if each.name == "fastexchange")
        assert line.status == "-" and "not of the installed numba-fastexchange, which is in" in line.text and line.advice
    for code in ("import fastexchange.api", "import runpy; runpy.run_module('fastexchange', run_name='__main__')"):
        last = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}", check=False).stderr.splitlines()[-1]
        assert re.match("ImportError: .+ is not of numba-fastexchange .+: pip uninstall fastexchange .+", last.replace(";", ":"))


def test_a_version_that_is_not_known_yet_and_a_platform_that_is_not_tested(monkeypatch):
    """They may well work: what is verified decides, not a number. So they are not wrong."""
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    for machine, status in (("x86_64", None), ("aarch64", None), ("riscv64", "-")):
        monkeypatch.setattr(doctor.platform, "machine", lambda machine=machine: machine)
        found = [each for each in doctor._interpreter(">=3.10") if each.name == "platform"]
        assert [each.status for each in found] == [status] * (status is not None)
    assert "linux on riscv64 is not tested here" in found[0].text and found[0].advice
    found = [next(doctor._interpreter(">=3.0,<3.1")), *doctor._packages(["numba>=0.1,<0.2", "numpy<1; extra == 'cuda'"], "")]
    assert fastexchange.__version__ in next(each for each in found if each.name == "fastexchange").text
    found = [each for each in found if each.name in ("version", "numba", "numpy")]
    assert [each.status for each in found] == ["-"] * 3
    assert all("newer than what is tested" in each.text and "safer path" in each.text and each.advice for each in found)


def test_what_is_in_the_disk_cache(cache, monkeypatch):
    def found() -> dict:
        return {finding.name: (finding.status, finding.text) for finding in probe._disk_cache()}

    monkeypatch.setattr(cfunction, "code_cache", cfunction.CodeCache())
    folder = cfunction.code_cache.folders[-1]
    assert folder.save("one", "key", 1) and folder.save("other", "key", 2)
    assert found()["directory"] == ("ok", f"{folder.path} (NUMBA_CACHE_DIR)")
    assert found()["entries"][0] == "ok" and found()["entries"][1].startswith("2 functions, 0.0 MiB")
    one = min(folder.path.iterdir())
    one.write_bytes(one.read_bytes()[:-9])
    assert found()["damaged"][0] == "slow" and one.name in found()["damaged"][1]
    assert found()["entries"][1].startswith("1 functions")
    folder.path.chmod(0o777)
    assert "is not used: other users can write to it (mode 777)" in str(found())
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null")
    monkeypatch.setattr(cfunction, "ROOT", Path("/dev/null"))
    monkeypatch.setattr(cfunction, "user_cache", lambda: Path("/dev/null"))
    monkeypatch.setattr(cfunction, "code_cache", cfunction.CodeCache())
    cases = ("none is installed", "slow", "none can be written: ", "NUMBA_CACHE_DIR"), ("", "ok", "none is needed", "")
    for why_not, status, text, advice in cases:
        monkeypatch.setattr(shipped, "shipped_code", lambda why_not=why_not: SimpleNamespace(why_not=why_not))
        (line,) = probe._disk_cache()
        assert line.status == status and text in line.text and advice in line.advice
