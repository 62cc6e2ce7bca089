"""Where the programs of ``perf/`` are, and how a test imports one."""

import importlib
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).resolve().parents[2] / "perf"


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
