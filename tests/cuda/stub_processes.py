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
def _directory() -> str:
    """A folder with the stub, for the life of this process."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    cuda_stub.build(directory.name)
    return directory.name


@functools.cache
def _stage(modules: tuple[str, ...]) -> Stage:
    """None of the modules has asked for the driver by then: it could not be used in a fork."""
    stage = Stage(_LOAD.format(directory=_directory(), modules=modules))
    atexit.register(stage.close)
    return stage


def run_with_stub(code: str, *modules: str, exits: bool = False, **environment: str) -> str:
    """Run `code` where the name ``stub`` is the loaded stub and `modules` are imported, and return what it prints.

    A process that fails raises `AssertionError` with its output. Only where it `exits` is anything torn down at its end.
    """
    ended = _stage(modules).run(textwrap.dedent(code), seconds=240, exits=exits, **environment)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


PACKAGES = {"numba.cuda": "numba_cuda", "numba_cuda_mlir.cuda": "numba_cuda_mlir"}
"""What users import, and the package that has it."""


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(PACKAGES[module]) is not None


def run_package(code: str, package, exits: bool = False, **environment: str) -> str:
    """The same, where ``cuda`` is `package`, and this package and tensors of the tests are imported."""
    begin = f"import {package.__name__} as cuda\nimport numpy as np\nfrom cuda_tensors import DeviceTensor, OtherTensor\n"
    begin += "from fastexchange import CudaError, fast_args\n"
    modules = *filter(is_installed, PACKAGES), "fastexchange", "cuda_producers", "pytest"  # so that one process has imported all
    return run_with_stub(begin + textwrap.dedent(code), *modules, exits=exits, **environment)
