"""Builds and loads ``floor.c``: hand-written C that every other row of the benchmark is read against.

The DLPack declarations are put in front of the C file from :data:`fastexchange.dlpack.CDEF`, so that the limit and the
package read the same structs.
"""

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from fastexchange.dlpack import CDEF

_NAME = "_fastexchange_floor"
_FLAGS = ["-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-function"]


def cache_directory() -> Path:
    """Where the compiled extension is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fastexchange-perf"


def _build(source: str, target: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = [f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        c_file, built = Path(scratch) / "floor.c", Path(scratch) / "floor.so"
        c_file.write_text(source)
        command = [*compiler, *_FLAGS, *include, str(c_file), "-o", str(built)]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise SystemExit(
                f"The limit is written in C, and there is no C compiler {compiler[0]!r}; set CC."
            ) from None
        built.replace(target)  # in one step: two benchmarks may build at once


def load():
    """The extension module. Compiled on first use.

    Functions to call like a kernel: ``empty``, ``numpy``, ``torch``, ``torch_managed``, ``scalars``. And
    ``export_and_delete(capsule, tensor, times)``, for any exchange table, with ``numpy_table``, the capsule of one by hand.
    """
    declarations = f'#include <stddef.h>\n#include <stdint.h>\n{CDEF}\n#line 1 "floor.c"\n'
    source = declarations + Path(__file__).with_name("floor.c").read_text()
    key = repr((source, sys.version, np.__version__, _FLAGS, os.environ.get("CC")))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    target = cache_directory() / f"{_NAME}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        _build(source, target)
    specification = importlib.util.spec_from_file_location(_NAME, target)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
