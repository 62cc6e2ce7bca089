"""Fixtures that the whole suite shares."""

import gc
import signal
import subprocess
import sys

import pytest
from frameworks import FRAMEWORKS, Framework
from hypothesis import HealthCheck, settings
from numba.core.runtime import _nrt_python

# `--hypothesis-profile=nightly` takes the other. A fuzzer takes its share of `max_examples`, see test_fuzz.py; a first call is a
# compilation, so no example has a deadline.
_common = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("ci", _common, max_examples=30, derandomize=True)
settings.register_profile("nightly", _common, max_examples=3500, derandomize=False, print_blob=True)
settings.load_profile("ci")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with Ctrl-C ignored


def pytest_sessionstart(session):
    """Compile the package's native code, unless it is cached: programs under test would say on stderr that they do."""
    program = """
from fastexchange._native_build import native_code

for each in native_code():
    getattr(each, "address", 0)
"""
    if not session.config.option.collectonly:
        subprocess.run([sys.executable, "-c", program], check=True)


def pytest_report_collectionfinish(items):
    """At the start of all tests, say how many they are and how long they take."""
    if len(items) > 3000:
        return (
            f"{len(items)} tests: {len(items) / 1600:.0f} minutes on a slow machine, a third of that on a fast one; "
            "the first time a minute more, for compiling the package's native code"
        )
    return None


@pytest.fixture(params=FRAMEWORKS, ids=str)
def framework(request) -> Framework:
    """Each framework installed, and each kind of producer made for the tests."""
    return request.param


_frozen = [0]  # objects that were frozen when all had been looked at


@pytest.fixture(autouse=True, scope="module")
def _collections_from_time_to_time():
    """After a module, once what is frozen has grown by a quarter, all of it is looked at: half a second, or more."""
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
def numba_counts_blocks():
    """Numba counts its memory blocks meanwhile (``oracle.blocks_in_use``)."""
    was_on = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    yield
    if not was_on:
        _nrt_python.memsys_disable_stats()
