"""What the tests of kernels for CUDA run on: the driver stub, loaded into this process before any package asks for a driver.

Where there is a real driver with a device they run on that: what needs the stub's log, its errors or its three devices is
skipped there, and what is marked ``gpu`` runs only there. The stub takes the place of a driver without a device.
"""

import contextlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import cuda_stub
import cupy_stub
import pytest
from stub_processes import PACKAGES, is_installed

_COUNT_DEVICES = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
raise SystemExit(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0)
"""


def _load() -> tuple[cuda_stub.Stub | None, str]:
    """The stub, None where there is a device; and why nothing can be tested, if nothing can."""
    if cuda_stub.real_driver() and not subprocess.run([sys.executable, "-S", "-c", _COUNT_DEVICES]).returncode:
        return None, ""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return None, "there is no CUDA device, and the driver stub needs Linux and a C compiler"
    with tempfile.TemporaryDirectory() as directory:  # what is loaded needs no file any more
        try:
            stub = cuda_stub.load(directory, force=True)
        except cuda_stub.StubRefused as error:
            return None, f"there is no CUDA device, and the driver stub is not loaded: {error}"
    stub.set_devices(cupy_stub.DEVICES)
    cupy_stub.load(stub, cupy_stub.DEVICES)
    return stub, ""


STUB, WHY_NOT = _load()
# PaddlePaddle lets all loggers write to stderr, and these say what they unload as the process ends, when that is closed.
for name in ("numba.cuda", "numba_cuda_mlir"):
    logging.getLogger(name).setLevel(logging.WARNING)


def pytest_configure(config):
    config.addinivalue_line("markers", "both_packages: of the package's own path; others run with the first that is installed")


def pytest_generate_tests(metafunc):
    if "package" in metafunc.fixturenames:
        is_of_both = metafunc.definition.get_closest_marker("both_packages")
        names = list(PACKAGES) if is_of_both else [*filter(is_installed, PACKAGES), *PACKAGES][:1]
        metafunc.parametrize("package", names, ids=PACKAGES.get, indirect=True, scope="module")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):  # this is called once, with the whole suite's
            is_lost = STUB is not None and item.get_closest_marker("gpu")
            if why_not := WHY_NOT or (is_lost and "there is no CUDA device"):
                item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.fixture
def stub_or_none():
    """The driver stub, with an empty record and no errors to inject; None on a real driver."""
    if STUB is not None:
        STUB.clear()
    yield STUB
    if STUB is not None:
        STUB.set_trace(False)
        STUB.set_fast(False)
        STUB.set_occupancy(264, 256)
        STUB.reset()


@pytest.fixture
def stub(stub_or_none):
    """The same; tests that use it are skipped on a real driver."""
    if stub_or_none is None:
        pytest.skip("it needs the driver stub (its log, its errors or its three devices), and there is a real driver")
    return stub_or_none


@pytest.fixture
def record(stub_or_none):
    """What records our launches: the driver stub, which records the packages' own too, or a ``Recorder`` of a real driver."""
    from recorder import Recorder  # which asks for the driver

    with contextlib.nullcontext(stub_or_none) if stub_or_none is not None else Recorder() as recorder:
        yield recorder


@pytest.fixture(scope="module")
def package(request):
    """A package that compiles kernels for CUDA: ``numba.cuda`` or ``numba_cuda_mlir.cuda``."""
    if not is_installed(request.param):
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    found = importlib.import_module(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.current_context()
    return found


@pytest.fixture(scope="module")
def kernels(package):
    """Kernels without code, by the number of their arguments: none to three."""
    from launches import kernel_of

    return [kernel_of(package, parameters) for parameters in ("", "x", "x, y", "x, y, z")]


@pytest.fixture
def torch():
    """PyTorch, where it has a GPU."""
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip(f"PyTorch {found.__version__} sees no GPU, though there is a driver with a device")
    found.manual_seed(0)
    yield found
    found.cuda.synchronize()


@pytest.fixture(autouse=True)
def _default_streams_and_quiet_packages():
    """All frameworks work on the default streams. The packages warn of small grids, and of arrays of the host."""
    from cuda_producers import reset_streams

    reset_streams()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*under-utilization.*")
        warnings.filterwarnings("ignore", ".*Host array used in CUDA kernel.*")
        yield
    reset_streams()
