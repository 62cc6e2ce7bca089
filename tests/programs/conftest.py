"""Where the programs of ``perf/`` are, and how a test imports one."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PERF = HERE.parents[1] / "perf"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the dtypes of a kernel's test, the first runs before each commit, and all at night: each is a compilation."""
    seen = set()
    for item in items:
        if item.path.parent == HERE and "dtype" in getattr(item, "fixturenames", ()):
            of = item.function, item.callspec.params.get("name")
            if of in seen:
                item.add_marker(pytest.mark.nightly)
            seen.add(of)


@pytest.fixture
def perf(monkeypatch):
    """A function that imports a program of ``perf/``. They are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PERF)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PERF)):
            del sys.modules[name]
