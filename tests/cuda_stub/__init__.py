"""A driver stub: a ``libcuda.so.1`` with which CUDA packages compile, bind and "launch" on a machine without a GPU.

Load it before any CUDA package is imported; what they launch is recorded, none of it runs::

    stub = cuda_stub.load(directory)
    from numba import cuda
    ...
    assert stub.launches[-1].grid == (4, 1, 1)

The packages keep the driver for the life of the process, so tests run their code by ``stub_processes.run_package``, in others.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import cffi

HERE = Path(__file__).parent
SONAME = "libcuda.so.1"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wstrict-prototypes", "-Werror"]


class StubRefused(RuntimeError):
    """The stub is not loaded: a real driver is there, or a package has looked for one already."""


@functools.cache
def _ffi() -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef((HERE / "record.h").read_text())
    return ffi


_SAID = ("api", "function", "name", "context", "device", "grid", "block", "cluster", "shared", "stream", "cooperative",
         "graph", "thread")  # fmt: skip
Launch = collections.namedtuple("Launch", [*_SAID, "offsets", "parameters", "packed"])
"""A launch as the driver got it: ``stub_launch``; `packed`: all parameters at their offsets, the holes zero."""
Entry = collections.namedtuple("Entry", [name for name, _ in _ffi().typeof("stub_entry").fields])
"""One line of the log, work given to a stream or a wait: ``stub_entry``."""


def _plain(value):
    """A field of C: a text, a tuple or a number."""
    if not isinstance(value, cffi.FFI.CData):
        return value
    kind = _ffi().typeof(value)
    if kind.kind == "array":
        return tuple(value)
    return _ffi().string(value).decode() if kind.item.cname == "char" else int(_ffi().cast("uintptr_t", value))


def _fields(record, names) -> list:
    return [_plain(getattr(record, name)) for name in names]


def _launch(record) -> Launch:
    packed = _ffi().buffer(record.bytes, record.size)[:]
    spans = [(record.parameters[i].offset, record.parameters[i].size) for i in range(record.parameter_count)]
    parameters = tuple(packed[offset : offset + size] for offset, size in spans)
    return Launch(*_fields(record, _SAID), tuple(offset for offset, _ in spans), parameters, packed)


class Stub:
    """The loaded stub: what it recorded, and how it behaves."""

    def __init__(self, path: Path) -> None:
        self._global = ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        self._lib = _ffi().dlopen(str(path))
        self._launches: list[Launch] = []
        # No error is injected any more; the names of functions are kept; what cuOccupancyMaxPotentialBlockSize answers.
        self.reset, self.set_trace, self.set_occupancy = (
            getattr(self._lib, f"stub_{name}") for name in ("reset", "set_trace", "set_occupancy")
        )

    @property
    def launches(self) -> list[Launch]:
        """The launches since the start or `clear`."""
        for i in range(len(self._launches), self._lib.stub_launch_count()):
            self._launches.append(_launch(self._lib.stub_launch_at(i)))
        return self._launches[:]

    @property
    def log(self) -> list[Entry]:
        """Launches, copies, fills, records, waits and synchronisations, in the order of the calls that succeeded."""
        return [Entry(*_fields(self._lib.stub_entry_at(i), Entry._fields)) for i in range(self._lib.stub_entry_count())]

    def _names(self, what: str) -> list[str]:
        """The names of functions, without their versions."""
        count, name_at = (getattr(self._lib, f"stub_{what}_{each}") for each in ("count", "at"))
        return [re.sub(r"_v\d+$", "", _plain(name_at(i))) for i in range(count())]

    trace = property(lambda self: self._names("trace"), doc="All functions called while `set_trace` was on.")
    failed = property(lambda self: self._names("failed"), doc="Those that failed, but for injected errors.")

    @property
    def fast_count(self) -> int:
        return self._lib.stub_fast_count()

    def clear(self) -> None:
        """Empty `launches`, `log`, `trace`, `failed` and `fast_count`."""
        self._lib.stub_clear()
        self._launches = []

    def fail(self, name: str, code: int, after: int = 0, sticky: bool = False) -> None:
        """Let the (after + 1)-th call of function `name` from now return `code`; sticky: and every call after it."""
        self._lib.stub_fail(name.encode(), code, after, sticky)

    def set_fast(self, on: bool, threads: bool = False) -> None:
        """Launches are only counted: nothing is checked or recorded. `threads`: those of several at once are, too."""
        self._lib.stub_set_fast(2 if on and threads else on)

    def set_devices(self, count: int) -> None:
        """Set the number of devices: before the first use of the driver."""
        assert self._lib.stub_set_devices(count), f"{count} devices: at most 8, and before cuInit"

    def set_version(self, version: int) -> None:
        """Set the driver's version, 13000 if it is not set: before its first use. Newer functions are absent."""
        assert self._lib.stub_set_version(version), "before cuInit"

    def set_capability(self, device: int, major: int, minor: int) -> None:
        """Set the compute capability of a device: before the first use of the driver."""
        assert self._lib.stub_set_capability(device, major, minor), f"device {device}: at most 7, and before cuInit"

    def allocate(self, size: int, device: int = 0) -> int:
        """The address of new memory of `device`, in its primary context; the driver must be initialised."""
        pointer = self._lib.stub_allocate(device, size)
        if not pointer:
            raise MemoryError(f"{size} bytes on device {device}")
        return pointer

    def allocations(self, device: int = 0) -> int:
        return self._lib.stub_allocation_count(device)

    def current_context(self) -> int:
        """The context current to the calling thread; 0: none."""
        return _plain(self._lib.stub_current_context())

    def primary_context(self, device: int = 0) -> int:
        """The primary context of `device`, retained or not."""
        return _plain(self._lib.stub_primary_context(device))


_loaded: Stub | None = None


@functools.cache
def real_driver() -> bool:
    """Return whether the dynamic loader finds a driver on this machine; asked in a process of its own."""
    code = f"import ctypes; ctypes.CDLL({SONAME!r})"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True).returncode == 0


@functools.cache
def _compiled() -> bytes:
    """The file of the stub: a process compiles it once."""
    options = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", *WARNINGS, f"-Wl,-soname,{SONAME}", "-pthread"]
    with tempfile.TemporaryDirectory() as directory:
        command = [os.environ.get("CC", "cc"), *options, "-o", f"{directory}/{SONAME}", str(HERE / "libcuda.c")]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return Path(directory, SONAME).read_bytes()


def build(directory: str | os.PathLike[str]) -> Path:
    """Put the stub into `directory`, unless it is there already, and return its path."""
    path = Path(directory) / SONAME
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:  # nobody sees half of it
            Path(scratch, SONAME).write_bytes(_compiled())
            Path(scratch, SONAME).replace(path)
    return path


def load(directory: str | os.PathLike[str], force: bool = False) -> Stub:
    """Build and load the stub for this process; with `force` even where there is a real driver.

    Raises `StubRefused` where a real driver is installed, or where one could have been looked for already.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    # Importing cuda.bindings, as PyTorch does, asks for no driver: its first call does, and what that loads is seen below.
    early = [name for name in ("numba.cuda.cudadrv.driver", "numba_cuda_mlir") if name in sys.modules]
    if early:
        raise StubRefused(f"{', '.join(early)}: imported already; load the stub first")
    try:
        ctypes.CDLL(SONAME, mode=getattr(os, "RTLD_NOLOAD", 4))
    except OSError:
        pass
    else:
        raise StubRefused(f"a {SONAME} is loaded already")
    if not force and real_driver():
        raise StubRefused(f"this machine has a {SONAME} of its own")
    _loaded = Stub(build(directory))
    return _loaded


# ---- PyTorch's tensors on the stub's devices ---------------------------------------------------------------------------

def build_torch(directory: str | os.PathLike[str]) -> Path:
    """Put what lets PyTorch have tensors on the stub's devices into `directory`, unless it is there, and return its path.

    Compiling it takes some seconds. Raises `StubRefused` without PyTorch, or where it is one for GPUs, or cannot be compiled for.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise StubRefused("PyTorch is not installed")
    folder, release = Path(found.origin).parent, importlib.metadata.version("torch")
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise StubRefused(f"PyTorch {release} has devices of its own")
    libraries = folder / "lib"
    place = zlib.crc32(os.fsencode(libraries))  # it finds PyTorch's libraries there: another environment needs another
    path = Path(directory) / f"torch_cuda-{release}-{place:08x}.so"
    if not path.exists():
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{folder / 'include'}"]
        linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch, path.name)
            command = [os.environ.get("CXX", "c++"), *options, "-o", str(made), str(HERE / "torch_cuda.cpp"), *linked]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise StubRefused(f"it cannot be compiled for PyTorch {release}: {error}") from error
            made.replace(path)
    return path


class TorchOnStub:
    """What PyTorch's tensors on the stub's devices are made by. Streams are the calling thread's."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self.fail = self._lib.stub_torch_fail  # lets so many next allocations of memory raise torch.OutOfMemoryError

    def set_devices(self, count: int) -> None:
        import torch

        self._lib.stub_torch_set_devices(count)
        self.devices = [torch.device("cuda", i) for i in range(count)]

    def set_stream(self, device: int, stream: int) -> None:
        """Set the current stream of a device, a ``CUstream``."""
        self._lib.stub_torch_set_stream(device, ctypes.c_ssize_t(stream))

    def device(self) -> int:
        """The current device."""
        return self._lib.stub_torch_device()

    def exchange_device(self, device: int) -> int:
        """Make `device` the current one, unless it is negative. Returns the one before."""
        return self._lib.stub_torch_exchange_device(device)


def load_torch(directory: str | os.PathLike[str]) -> TorchOnStub:
    """Import PyTorch for CPUs so that it has tensors on the devices of the stub, which is loaded. Raises `StubRefused`."""
    if "torch" in sys.modules:
        raise StubRefused("PyTorch is imported already")
    made = TorchOnStub(build_torch(directory))
    import torch

    torch.cuda._initialized = True  # it asks for nothing of a driver's
    torch._C._cuda_getDevice = made.device
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = made.exchange_device
    torch.cuda.default_stream = torch.cuda.current_stream = lambda: 0  # so ``__dlpack__`` has no stream to wait for
    return made
