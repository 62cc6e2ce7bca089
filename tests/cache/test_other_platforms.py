"""Kernels' machine code that was made on another platform: ``.ci/pythons --arm`` makes it on x86-64, for emulated aarch64."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from interpreter import FOR_TESTS, environment_of

from fastexchange.ground.package_code import fitting_levels, name_of_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shipped_kernels"
MADE = [EXAMPLE / "src" / "shipped_kernels" / "_kernels" / name_of_file(level) for level in fitting_levels()]


@pytest.mark.skipif(not any(path.exists() for path in MADE), reason="examples/shipped_kernels has no code for this platform")
def test_nothing_is_compiled_and_all_kernels_compute_what_numba_does(tmp_path):
    environment = environment_of()
    environment["PYTHONPATH"] = f"{EXAMPLE / 'src'}:{environment['PYTHONPATH']}"

    def run(who: str) -> dict:
        command = [sys.executable, str(EXAMPLE / "first_calls.py"), who, str(tmp_path / who)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=FOR_TESTS)
        return json.loads(done.stdout)

    run("shipped")  # code from elsewhere is proved by a call, whose kernel is compiled: once on a machine
    said = run("shipped")
    assert said["kernels"] == 100 and said["compiled"] == said["native compiled"] == 0, said
    run("njit")
    shipped, plain = (pickle.loads((tmp_path / who).read_bytes()) for who in ("shipped", "njit"))
    assert len(shipped) == said["calls"]
    np.testing.assert_equal(shipped, plain)
