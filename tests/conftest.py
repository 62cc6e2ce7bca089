"""Fixtures that the whole suite shares."""

import collections
import gc
import os
import signal
import subprocess
import sys

import numba
import pytest
from children import switch_interval
from frameworks import FRAMEWORKS, Framework
from hypothesis import HealthCheck, settings
from interpreter import FOR_TESTS, interpret
from numba.core.runtime import _nrt_python

# `--hypothesis-profile=nightly` takes the other. A fuzzer takes its share of `max_examples`, see test_fuzz.py; a first call is a
# compilation, so no example has a deadline.
_common = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("ci", _common, max_examples=30, derandomize=True)
settings.register_profile("nightly", _common, max_examples=3500, derandomize=False, print_blob=True)
settings.load_profile("ci")

EXPECTED = "this takes 5 minutes on two idle cores, 9 in one process; three times that on a slow machine"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with Ctrl-C ignored


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Folders of tests run on all cores; named files and tests in this process, unless ``-n`` says how many."""
    option = config.option
    if hasattr(config, "workerinput"):
        return
    if getattr(option, "numprocesses", 0) is None and all(map(os.path.isdir, config.args)) and not option.collectonly:
        option.numprocesses, option.dist = "auto", "worksteal"


_seconds: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report):
    _seconds[os.path.dirname(report.nodeid.partition("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter):
    """What each folder of tests took, which CONTRIBUTING says."""
    if len(_seconds) > 1:
        took = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in sorted(_seconds.items()))
        terminalreporter.write_line(f"seconds, of all processes together: {took}")


def pytest_sessionstart(session):
    """Say how long it takes; compile the package's native code, unless it is cached: programs under test would say they do."""
    program = """
import sys
from fastexchange._native_build import native_code

for each in list(native_code())[:: int(sys.argv[1])]:
    getattr(each, "address", 0)
"""
    config = session.config
    if not config.option.collectonly and not hasattr(config, "workerinput"):
        if config.args == config.getini("testpaths") and config.option.markexpr in config.getini("addopts"):
            config.pluginmanager.get_plugin("terminalreporter").write_line(EXPECTED)
        first = subprocess.Popen([sys.executable, "-c", program, "1"])  # it says that it compiles
        second = interpret("-c", program, "-1", seconds=FOR_TESTS)  # they meet in the middle
        assert [first.wait(FOR_TESTS), second.returncode] == [0, 0], second.stderr


@pytest.fixture(params=FRAMEWORKS, ids=str)
def framework(request) -> Framework:
    """Each framework installed, and each kind of producer made for the tests."""
    return request.param


_frozen = [0]  # objects that were frozen when all had been looked at


@pytest.fixture(autouse=True, scope="module")
def _collections_from_time_to_time():
    """After a module, if what is frozen has grown by a quarter, run a full collection: half a second, or more."""
    yield
    if gc.get_freeze_count() > 1.25 * _frozen[0]:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _frozen[0] = gc.get_freeze_count()


@pytest.fixture(autouse=True, scope="session")
def _collections_end_with_the_session():
    yield
    gc.unfreeze()
    gc.collect()


@pytest.fixture(autouse=True)
def _quick_collections(_collections_from_time_to_time):
    """Garbage collection looks at what a test makes, not at all that compiler, frameworks and other tests made before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def switching():
    """Threads take turns after a microsecond."""
    with switch_interval(1e-6):
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that kernels are kept in meanwhile; it is empty."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def numba_counts_blocks():
    """Numba counts its memory blocks meanwhile (``oracle.blocks_in_use``)."""
    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    yield
    if not was_on:
        _nrt_python.memsys_disable_stats()
