"""Where the programs of ``perf/`` are, and what some of them need."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).resolve().parents[2] / "perf"

needs_stub = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or importlib.util.find_spec("numba_cuda") is None,
    reason="launches against the driver stub need Linux, a C compiler and numba-cuda",
)
