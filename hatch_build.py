"""Native code for the wheel, made while it is built, where Numba is there for it: without it, the first calls compile.

``.ci/wheel`` makes a release's, for every Python. An isolated build has no Numba, unless its requirements say so.
"""

import importlib.util
import os
import subprocess
import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IS_THERE = "import sys; from fastexchange.ground.shipped import shipped_code; sys.exit(bool(shipped_code().why_not))"


class NativeCode(BuildHookInterface):
    """Makes the code for this Python, if the checkout has none that fits."""

    def initialize(self, version, build_data):
        if version == "editable" or any(importlib.util.find_spec(name) is None for name in ("numba", "numpy", "cffi")):
            return
        environment = {**os.environ, "PYTHONPATH": self.root}
        if subprocess.run([sys.executable, "-c", _IS_THERE], cwd=self.root, env=environment, capture_output=True).returncode:
            self.app.display_info("compiling native code for this Python: half a minute")
            done = subprocess.run([sys.executable, "-m", "fastexchange._native_build"], cwd=self.root, env=environment)
            if done.returncode:
                self.app.display_warning("it could not be made: the package compiles it when it is first used")
