"""``python -m fastexchange doctor``: what it says of an installation that is well, slow, wrong or hostile."""

import hashlib
import json
import re
import subprocess
import textwrap

import pytest
from frameworks import torch
from interpreter import run_python
from shell import run, without

import fastexchange
from fastexchange.__main__ import main
from fastexchange.command import doctor, probe

EVERYTHING = tuple(probe.FRAMEWORKS)


def lines(done: subprocess.CompletedProcess) -> dict[tuple[str, str], dict]:
    """The lines of ``doctor --json`` by section and name."""
    return {(line["section"], line["name"]): line for line in json.loads(done.stdout)["lines"]}


@pytest.fixture(scope="module")
def healthy() -> subprocess.CompletedProcess:
    return run("doctor", "--json")


@pytest.mark.slow
def test_all_is_well(healthy):
    assert (healthy.returncode, healthy.stderr) == (0, "")
    assert json.loads(healthy.stdout)["verdict"] == "ok", [line for line in lines(healthy).values() if line["advice"]]
    assert {section for section, _ in lines(healthy)} == set(doctor._SECTIONS)


@pytest.mark.slow
def test_looks_at_every_kind_of_argument(healthy):
    found = lines(healthy)
    assert "path ndarray, 20 calls are right" in found["types", "numpy.ndarray"]["text"]
    assert "path dunder, 20 calls are right" in found["types", "only __dlpack__"]["text"]
    examples = {"torch": "torch.Tensor", "paddle": "paddle.Tensor", "jax": "jax.Array", "tvm_ffi": "tvm_ffi.Tensor"}
    examples["pyarrow"] = "pyarrow.Array"
    for module, example in examples.items():
        is_there = found["frameworks", module]["status"] == "ok"
        assert is_there == (("frameworks", example) in found)
        assert not is_there or "20 calls are right" in found["frameworks", example]["text"]
    assert (found["frameworks", "torch"]["status"] == "ok") == (torch is not None)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.slow
def test_looks_at_torch(healthy):
    found = lines(healthy)
    assert found["packages", "torch"]["text"].startswith(torch.__version__) or ("packages", "torch") not in found
    for what in ("keys", "storage", "autograd", "requires grad", "lazily conjugated"):
        assert found["frameworks", f"torch: {what}"]["status"] == "ok"
    assert found["CUDA", "torch.cuda"]["status"] == "-"


@pytest.mark.slow
def test_looks_at_the_disk_cache(healthy):
    found = lines(healthy)
    assert re.match(r"\d+ functions, \d+\.\d MiB", found["disk cache", "entries"]["text"])


@pytest.mark.slow
def test_says_where_the_code_in_pickles_runs(healthy):
    from fastexchange.calls.kernel_cache import made_by
    from fastexchange.ground.numba_code import code_depends_on

    line = lines(healthy)["native code", "pickles"]
    digest = hashlib.sha256(repr((made_by(), code_depends_on())).encode()).hexdigest()
    assert line["status"] == "ok" and re.fullmatch(r"of .* code, \d+ bytes .* says (\w{12}), too", line["text"])[1] in digest


@pytest.mark.parametrize("machine, is_tested", [("x86_64", True), ("aarch64", True), ("riscv64", False)])
def test_a_platform_that_is_not_tested(machine, is_tested, monkeypatch):
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    found = {each.name: each for each in doctor._interpreter(">=3.10")}
    assert ("platform" in found) == (not is_tested)
    assert is_tested or ("linux on riscv64 is not tested here" in found["platform"].text and found["platform"].advice)


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
    assert "ok     numpy.ndarray " in done.stdout
    assert re.search(rf"^{len(wrong)} wrong, \d slow: see the lines with an arrow\.$", done.stdout.splitlines()[-1])
    assert done.stdout.count("→") >= 4


@pytest.fixture
def jax_is(tmp_path, monkeypatch):
    """A function that puts a module of this code in the place of JAX, for the processes of doctor."""

    def put(code: str) -> None:
        (tmp_path / "jax.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{doctor.Path(doctor.package_file).parents[1]}")

    return put


@pytest.mark.slow
def test_what_is_late_is_unknown(jax_is):
    jax_is("import time; time.sleep(600)\n")
    (line,) = doctor._probed("jax", 3)
    assert (line.status, line.section, line.name) == ("unknown", "frameworks", "jax")
    assert line.text == "not done after 3 seconds; this machine may be busy, or its disk slow"
    assert "python -m fastexchange doctor --timeout 9" in line.advice
    assert "install" not in line.advice and "trusted" not in line.advice


def test_a_late_native_probe_does_not_condemn_native_code():
    *_, line = doctor._probed("native", 0.01)
    assert (line.status, line.section, line.name) == ("unknown", "native code", "native")
    assert "not done after 0.01 seconds" in line.text and "trusted" not in line.advice + line.text


@pytest.mark.slow
def test_what_was_found_before_it_was_late_is_kept(jax_is):
    jax_is("""
        import os, sys, time
        __version__ = "9"
        def __getattr__(name):
            time.sleep(600)
        """)
    first, line = doctor._probed("jax", 20)
    assert (first.status, first.text) == ("ok", "JAX 9")
    assert line.status == "unknown" and "not done after 20 seconds, after jax;" in line.text


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGXCPU"])
def test_a_process_that_is_killed_from_outside_says_nothing(jax_is, name):
    jax_is(f"import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.{name})\n")
    (line,) = doctor._probed("jax", 100)
    assert line.status == "unknown" and line.text.startswith(f"the process that tested it was ended by {name}, ")
    assert "install" not in line.advice


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_process_that_crashes_is_wrong(jax_is, name):
    jax_is(f"import os, signal; os.kill(os.getpid(), signal.{name})\n")
    (line,) = doctor._probed("jax", 100)
    assert (line.status, line.advice) == ("wrong", "install JAX again, or remove it")


def test_a_process_without_memory_says_nothing(jax_is):
    jax_is("bytearray(1 << 60)\n")
    (line,) = doctor._probed("jax", 100)
    assert line.status == "unknown" and "MemoryError" in line.text and "install" not in line.advice
    jax_is("import errno, os; raise OSError(errno.ENOSPC, 'no space')\n")
    assert doctor._probed("jax", 100)[0].status == "unknown"
    jax_is("import errno, os; raise OSError(errno.EACCES, 'not yours')\n")
    assert doctor._probed("jax", 100)[0].status == "wrong"


def test_no_process_can_be_started(monkeypatch):
    def run(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    (line,) = doctor._probed("native", 100)
    assert line.status == "unknown" and "no process could be started to test it: BlockingIOError" in line.text


def test_what_is_unknown_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "FRAMEWORKS", {})
    assert main(["doctor", "--timeout", "0.01"]) == 0
    assert re.search(r"^warning: not everything could be checked\. 1 unknown, \d slow: ", capsys.readouterr().out, re.MULTILINE)
    assert main(["doctor", "--timeout", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "unknown"
    found = [probe.Finding("types", "a", status, "") for status in ("unknown", "wrong", "slow")]
    assert doctor._verdict(found) == "wrong"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_timeouts_that_make_no_sense(seconds):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--timeout", seconds])
    assert ended.value.code == 2


def test_a_process_that_ends_without_a_word(jax_is):
    jax_is("import os; os._exit(0)\n")
    (line,) = doctor._probed("jax", 100)
    assert (line.status, line.text) == ("wrong", "the process that tested it ended without a result")


@pytest.mark.slow
def test_what_is_slow(tmp_path):
    """Layouts that could not be verified, a cache directory that cannot be written, and settings."""
    (tmp_path / "file").write_text("")
    code = """
        from fastexchange.ground import cpython
        checks = {**cpython.verify(), "float": False}
        cpython.verify = lambda: checks
        from fastexchange.producers import torch_offsets
        torch_offsets.Guard._find_storage = lambda self: 1 / 0
        """
    path = without(tmp_path, *(set(EVERYTHING) - {"torch"}), code=textwrap.dedent(code))
    settings = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache"), "NUMBA_DISABLE_JIT": "1"}
    done = run("doctor", "--json", path=path, **settings)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["verdict"] == "slow"
    found = {key: line for key, line in lines(done).items() if line["status"] == "slow"}
    assert "Numba's own dispatcher makes the calls that have one" in found["native code", "float"]["text"]
    assert "path numba, 20 calls are right" in found["types", "float"]["text"]
    assert "cannot be written" in found["disk cache", "directory"]["text"]
    assert "nothing is compiled" in found["environment", "NUMBA_DISABLE_JIT"]["text"]
    expected = {("native code", "float"), ("types", "float"), ("disk cache", "directory"), ("environment", "NUMBA_DISABLE_JIT")}
    if torch is not None:
        storage = found["frameworks", "torch: storage"]["text"]
        assert "PyTorch is asked about each tensor" in storage and "ZeroDivisionError: division by zero" in storage
        expected |= {("frameworks", "torch: storage"), ("frameworks", "torch.Tensor")}
    assert set(found) == expected
    assert all(found[key]["advice"] for key in expected if key[0] != "types" and key[1] != "torch.Tensor")


def test_versions_that_do_not_fit(tmp_path, monkeypatch, capsys):
    (tmp_path / "fastexchange-9.dist-info").mkdir()
    (tmp_path / "fastexchange-9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fastexchange\nVersion: 9\nRequires-Python: >=99\nRequires-Dist: numba>=99\n"
        "Requires-Dist: numpy>=2.1\nRequires-Dist: no-package-of-this-name\n"
        "Requires-Dist: jax>=99; extra == 'test'\nRequires-Dist: pytest>=99; extra == 'test'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    requires, requirements, source = doctor._metadata()
    assert next(doctor._interpreter(requires)).status == "wrong"
    found = {line.name: line for line in doctor._packages(requirements, source)}
    assert found["numba"].status == "wrong" and "too old (needs >=99)" in found["numba"].text
    assert found["numpy"].status == "ok"
    assert found["no-package-of-this-name"].text == "not installed"
    assert found["no-package-of-this-name"].status == "wrong"
    assert found["fastexchange"].status == "-" and "are of 9" in found["fastexchange"].text
    assert "pytest" not in found
    assert "jax" not in found or found["jax"].status == "slow"


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("0.68.1", ">=0.68", ""), ("0.67", ">=0.68", "older"), ("2.13.0+cpu", ">=2.13.0", ""), ("2.1rc1", ">=2.1", ""),
        ("3.14.0", ">=3.10,<3.14", "newer"), ("3.9", "<3.14,>=3.10", "older"), ("3.13.9", ">=3.10, <3.14", ""), ("1", "", ""),
        ("10.0", ">=9.5", ""), ("7.4", ">=8", "older"),
    ],
)  # fmt: skip
def test_versions(version, specifiers, expected):
    assert doctor.misfit(version, specifiers) == expected


def test_a_version_that_is_not_known_yet():
    """It may well work: what is verified decides, not its number. So it is not wrong."""
    found = [next(doctor._interpreter(">=3.0,<3.1")), *doctor._packages(["numba>=0.1,<0.2", "numpy<1; extra == 'cuda'"], "")]
    found = [each for each in found if each.name in ("version", "numba", "numpy")]
    assert [each.status for each in found] == ["-"] * 3
    assert all("newer than what is tested" in each.text and "safer path" in each.text and each.advice for each in found)


def test_no_directory_can_be_written():
    done = run_python(
        """
        from pathlib import Path
        from fastexchange.ground import cfunction
        from fastexchange.command import probe
        cfunction.ROOT, cfunction.user_cache = Path("/dev/null"), lambda: Path("/dev/null")
        for finding in probe._disk_cache():
            print(finding.status, finding.text, finding.advice)
        """
    )
    assert re.fullmatch("slow none can be written: .* NUMBA_CACHE_DIR .*\n", done.stdout)


def test_what_is_in_the_disk_cache(tmp_path):
    done = run_python(
        """
        import os
        from fastexchange.ground.cfunction import code_cache as cache
        from fastexchange.command import probe
        from fastexchange.dispatch import runtime
        folder = cache.folders[-1].path
        runtime.new_meminfo.address, runtime.release_meminfo.address
        def found():
            return {finding.name: (finding.status, finding.text) for finding in probe._disk_cache()}
        first = found()
        assert first["directory"] == ("ok", f"{folder} (NUMBA_CACHE_DIR)"), first
        assert first["entries"][0] == "ok" and first["entries"][1].startswith("2 functions, 0.0 MiB"), first
        one = min(folder.iterdir())
        one.write_bytes(one.read_bytes()[:-9])
        second = found()
        assert second["damaged"][0] == "slow" and one.name in second["damaged"][1], second
        assert second["entries"][1].startswith("1 functions"), second
        folder.chmod(0o777)
        print(found())
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert "is not used: other users can write to it (mode 777)" in done.stdout


def test_what_looking_raises_is_a_line():
    def looks():
        yield probe.Finding("CUDA", "first", "ok", "found")
        raise OSError("no permission")

    first, second = doctor._looked("CUDA", looks())
    assert first.name == "first"
    assert (second.status, second.text) == ("wrong", "the check failed: OSError: no permission")


def test_finds_this_package():
    found = {line.name: line for line in doctor._packages(["numba>=0.1"], "")}
    assert fastexchange.__version__ in found["fastexchange"].text
