"""Processes of their own that have loaded the driver stub: forks of one that has imported what they share."""

import atexit
import functools
import importlib.util
import tempfile
import textwrap

import cuda_stub
from forked import Stage

_LOAD = """
import importlib, warnings
import cuda_stub
stub = cuda_stub.load({directory!r}, force=True)
warnings.simplefilter("ignore")
for module in {modules!r}:
    importlib.import_module(module)
"""


@functools.cache
def _stage() -> Stage:
    """None of the modules has asked for the driver by then: it could not be used in a fork."""
    modules = *filter(is_installed, PACKAGES), "fastexchange", "cuda_producers", "pytest"
    with tempfile.TemporaryDirectory() as directory:
        cuda_stub.build(directory)
        stage = Stage(_LOAD.format(directory=directory, modules=modules))
    atexit.register(stage.close)
    return stage


PACKAGES = {"numba.cuda": "numba_cuda", "numba_cuda_mlir.cuda": "numba_cuda_mlir"}
"""What users import, and the package that has it."""


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(PACKAGES[module]) is not None


def run_package(code: str, package, exits: bool = False, **environment: str) -> str:
    """Run `code` where ``stub`` is the loaded stub, ``cuda`` is `package`, and what tests use is imported; return what it prints.

    A process that fails raises `AssertionError` with its output. Only where it `exits` is anything torn down at its end.
    """
    begin = f"import {package.__name__} as cuda\nimport numpy as np\nfrom cuda_tensors import DeviceTensor, OtherTensor\n"
    begin += "from fastexchange import CudaError, fast_args\n"
    ended = _stage().run(begin + textwrap.dedent(code), exits=exits, **environment)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
