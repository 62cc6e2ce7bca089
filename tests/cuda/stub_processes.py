"""Processes of their own that have loaded the driver stub: forks of one that has imported what they share."""

import functools
import importlib.util
import tempfile
import textwrap

import cuda_stub
from forked import Stage

PACKAGES = {"numba.cuda": "numba_cuda", "numba_cuda_mlir.cuda": "numba_cuda_mlir"}
"""What users import, and the package that has it."""


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(PACKAGES[module]) is not None


_LOAD = """
import importlib, warnings
import cuda_stub
stub = cuda_stub.load({directory!r}, force=True)
warnings.simplefilter("ignore")
{more}
for module in {modules!r}:
    importlib.import_module(module)
"""
_LOAD_TORCH = """
stub.set_devices(3)
try:
    torch_stub, why_not = cuda_stub.load_torch({directory!r}), ""
    torch_stub.set_devices(3)
except cuda_stub.StubRefused as error:
    why_not = str(error)
"""
_LOAD_CUPY = "import cupy_stub\ncupy_stub.load(stub, 1)"


@functools.cache
def _stage(more: str = "", without: str = "") -> Stage:
    """None of what is imported has asked for the driver by then: it could not be used in a fork. `more` is done before."""
    packages = [module for module in filter(is_installed, PACKAGES) if PACKAGES[module] != without]
    modules = *packages, "fastexchange", *([] if more is _LOAD_TORCH else ["cuda_producers", "pytest"])
    with tempfile.TemporaryDirectory() as directory:
        cuda_stub.build(directory)
        return Stage(_LOAD.format(directory=directory, modules=modules, more=more.format(directory=directory)))


def _run(stage: Stage, begin: str, code: str, exits: bool = False, **environment: str) -> str:
    return stage.run(f"{begin}\n{textwrap.dedent(code)}", exits=exits, **environment).check()


def run_package(code: str, package, exits: bool = False, **environment: str) -> str:
    """Run `code` where ``stub`` is the loaded stub, ``cuda`` is `package`, and what tests use is imported; return what it prints.

    A process that fails raises `AssertionError` with its output. Only where it `exits` is anything torn down at its end.
    """
    begin = f"import {package.__name__} as cuda\nimport numpy as np\nfrom cuda_tensors import DeviceTensor, OtherTensor\n"
    return _run(_stage(), f"{begin}from fastexchange import CudaError, fast_args", code, exits, **environment)


def run_with_cupy(code: str, **environment: str) -> str:
    """The same, with numba-cuda, where CuPy has arrays on the stub: imported then, so numba-cuda-mlir, which does it, is not."""
    begin = "from numba import cuda\nfrom fastexchange import fast_args\ncuda.current_context()\nimport cupy"
    return _run(_stage(_LOAD_CUPY, without="numba_cuda_mlir"), begin, code, **environment)


def why_no_torch() -> str:
    """Why PyTorch has no tensors on the stub's devices, see ``cuda_stub.load_torch``; "" if it has."""
    return _stage(_LOAD_TORCH).run("print(why_not, end='')", exits=False).stdout


def run_operator_check(name: str, package) -> None:
    """Call a function of ``operator_checks`` in a process of its own, where PyTorch has tensors on the stub's devices."""
    begin = f"import operator_checks, {package.__name__} as cuda\ncuda.current_context()"
    _run(_stage(_LOAD_TORCH), begin, f"operator_checks.{name}(stub, torch_stub, cuda)")
