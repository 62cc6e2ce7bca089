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
{more}
for module in {modules!r}:
    importlib.import_module(module)
"""


@functools.cache
def _stage() -> Stage:
    """None of the modules has asked for the driver by then: it could not be used in a fork."""
    modules = *filter(is_installed, PACKAGES), "fastexchange", "cuda_producers", "pytest"
    with tempfile.TemporaryDirectory() as directory:
        cuda_stub.build(directory)
        stage = Stage(_LOAD.format(directory=directory, modules=modules, more=""))
    atexit.register(stage.close)
    return stage


_LOAD_TORCH = """
stub.set_devices(3)
try:
    torch_stub, why_not = cuda_stub.load_torch({directory!r}), ""
    torch_stub.set_devices(3)
except cuda_stub.StubRefused as error:
    why_not = str(error)
"""


@functools.cache
def _torch_stage() -> Stage:
    """The same, where PyTorch has tensors on the stub's devices: see ``cuda_stub.load_torch``."""
    with tempfile.TemporaryDirectory() as directory:
        cuda_stub.build(directory)
        more = _LOAD_TORCH.format(directory=directory)
        stage = Stage(_LOAD.format(directory=directory, modules=(*filter(is_installed, PACKAGES), "fastexchange"), more=more))
    atexit.register(stage.close)
    return stage


def why_no_torch() -> str:
    """Why PyTorch has no tensors on the stub's devices; "" if it has."""
    return _torch_stage().run("print(why_not, end='')", exits=False).stdout


def run_operator_check(name: str, package) -> None:
    """Call a function of ``operator_checks`` in a process of its own."""
    code = f"import operator_checks, {package.__name__} as cuda\ncuda.current_context()\n"
    code += f"operator_checks.{name}(stub, torch_stub, cuda)"
    ended = _torch_stage().run(code, exits=False)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"


@functools.cache
def _cupy_stage() -> Stage:
    """The same, where CuPy has arrays on the stub. It is still to be imported: without numba-cuda-mlir, which imports it."""
    with tempfile.TemporaryDirectory() as directory:
        cuda_stub.build(directory)
        more = "import cupy_stub\ncupy_stub.load(stub, 1)"
        stage = Stage(_LOAD.format(directory=directory, modules=("numba.cuda", "fastexchange", "pytest"), more=more))
    atexit.register(stage.close)
    return stage


def run_with_cupy(code: str, **environment: str) -> str:
    """Run `code` as :func:`run_package` does, with numba-cuda, and with CuPy; return what it prints."""
    begin = "from numba import cuda\nfrom fastexchange import fast_args\ncuda.current_context()\nimport cupy\n"
    ended = _cupy_stage().run(begin + code, exits=False, **environment)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


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
