"""Processes of their own that have loaded the driver stub: forks of one that has imported what they share."""

import atexit
import functools
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
def _stage(modules: tuple[str, ...], environment: tuple) -> Stage:
    """None of the modules has asked for the driver by then: it could not be used in a fork."""
    stage = Stage(_LOAD.format(directory=_directory(), modules=modules), **dict(environment))
    atexit.register(stage.close)
    return stage


def run_with_stub(code: str, *modules: str, **environment: str) -> str:
    """Run `code` where the name ``stub`` is the loaded stub and `modules` are imported, and return what it prints.

    A process that fails raises `AssertionError` with its output.
    """
    ended = _stage(modules, tuple(environment.items())).run(textwrap.dedent(code), seconds=240)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def run_package(code: str, package, **environment: str) -> str:
    """The same, where ``cuda`` is `package`, and this package and tensors of the tests are imported."""
    begin = f"import {package.__name__} as cuda\nfrom fastexchange import CudaError, fast_args\nimport numpy as np\n"
    begin += "from cuda_tensors import DeviceTensor, OtherTensor\n"
    return run_with_stub(begin + textwrap.dedent(code), package.__name__, "fastexchange", "cuda_tensors", **environment)
