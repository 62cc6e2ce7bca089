"""Where launches are measured: on a GPU, or against the tests' driver stub, which counts launches and runs none.

A place is chosen before any CUDA package is imported, for the stub has to be in the process first.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT), str(_ROOT / "tests")]

import cuda_stub  # noqa: E402
import floor  # noqa: E402

PACKAGES = {"numba-cuda": "numba.cuda", "numba-cuda-mlir": "numba_cuda_mlir.cuda"}
"""What compiles kernels for CUDA, and the module that users import."""
SIZE = 128  # elements of a tensor


class OnlyDunder:
    """A tensor of which only ``__dlpack__`` and ``__dlpack_device__`` can be seen."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._tensor.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


class Interface:
    """An array of numbers on a device, with ``__cuda_array_interface__`` and nothing else."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, data: int):
        interface = {"shape": (SIZE,), "typestr": "<f4", "data": (data, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface


def _torch_like():
    """A type of tensors that has an exchange table, as PyTorch's has, and ``__dlpack__``."""
    from cuda_tensors import DeviceTensor, first_stream

    capsule = floor.load_cuda().capsule

    class Tensor(DeviceTensor, stream=first_stream):
        """With an exchange table of its own. PyTorch's ``__dlpack__`` is a method in Python, too, which does more."""

        __slots__ = ()

        def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
            return capsule(self._context, max_version is not None)

    return Tensor


class Stub:
    """The driver stub, with tensors whose type has an exchange table, as PyTorch's has, and ``__dlpack__``.

    Attributes
    ----------
    stub : the ``cuda_stub.Stub``.
    torch : PyTorch, with tensors on the devices; None: it has none, as `why_no_torch` says.
    prepare : what has to be done before a statement is timed: nothing.
    most_launches : how many launches may follow each other without it.
    """

    name = "driver stub"
    is_gpu = False
    tensor_name = "torch-like tensor"
    prepare = None
    most_launches = None
    device_count = 2

    def __init__(self, wants_torch: bool = False):
        sources = b"".join(path.read_bytes() for path in sorted(cuda_stub.HERE.glob("*.[ch]")))
        directory = floor.cache_directory() / f"stub-{hashlib.sha256(sources).hexdigest()[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        self.stub = cuda_stub.load(directory, force=True)
        self.stub.set_devices(self.device_count)
        self.torch, self.why_no_torch = None, "it is not asked for"
        if wants_torch:
            try:
                cuda_stub.load_torch(directory).set_devices(self.device_count)
                self.torch, self.why_no_torch = sys.modules["torch"], ""
            except cuda_stub.StubRefused as error:
                self.why_no_torch = str(error)
        self._tensor = _torch_like()

    def tensor(self, device: int = 0):
        """A tensor of float32."""
        return self._tensor((SIZE,), strides=(1,), device=device, data=self.stub.allocate(4 * SIZE, device))

    def interface(self):
        """An array with only ``__cuda_array_interface__``."""
        return Interface(self.stub.allocate(4 * SIZE))

    def described(self) -> dict[str, Any]:
        """For the results' file: what the device is."""
        return {"driver": self.name, "devices": self.device_count, "note": "no kernel runs: host time of launches alone"}

    def begin(self) -> None:
        """From now on launches are only counted."""
        self.stub.set_fast(True)


class Gpu:
    """A GPU, with PyTorch's tensors. As :class:`Stub`."""

    name = "GPU"
    is_gpu = True
    tensor_name = "torch tensor"
    stub = None
    most_launches = 500  # a device's queue holds about a thousand; a launch that finds it full waits for the device

    why_no_torch = ""

    def __init__(self, torch):
        self._torch = self.torch = torch
        torch.cuda.init()
        self.device_count = torch.cuda.device_count()
        self._kept: list = []

    def tensor(self, device: int = 0):
        return self._torch.ones(SIZE, device=f"cuda:{device}")

    def interface(self):
        tensor = self.tensor()
        self._kept.append(tensor)
        return Interface(tensor.data_ptr())

    def described(self) -> dict[str, Any]:
        torch, properties = self._torch, self._torch.cuda.get_device_properties(0)
        from fastexchange.cuda.driver import driver

        return {
            "driver": driver().call("cuDriverGetVersion"),
            "devices": self.device_count,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "torch_cuda": torch.version.cuda,
        }

    def prepare(self) -> None:
        """Empty the queues of launches of all devices."""
        for device in range(self.device_count):
            self._torch.cuda.synchronize(device)

    begin = prepare


class BareGpu:
    """A GPU without PyTorch: memory of the driver's, in tensors of a type with an exchange table of ours. As :class:`Stub`."""

    name = "GPU, without PyTorch"
    is_gpu = True
    tensor_name = "torch-like tensor"
    stub = None
    most_launches = Gpu.most_launches
    torch, why_no_torch = None, "it is not installed, or not asked for"

    def __init__(self):
        from fastexchange.cuda.driver import driver

        self._driver = driver()
        self.device_count = self._driver.device_count
        self._tensor = _torch_like()

    def _allocated(self, device: int) -> int:
        with self._driver.on(device):
            return int(self._driver.call("cuMemAlloc", 4 * SIZE))

    def tensor(self, device: int = 0):
        return self._tensor((SIZE,), strides=(1,), device=device, data=self._allocated(device))

    def interface(self):
        return Interface(self._allocated(0))

    def described(self) -> dict[str, Any]:
        call, which = self._driver.call, self._driver.bindings.CUdevice_attribute
        device = call("cuDeviceGet", 0)
        major, minor, processors = (
            call("cuDeviceGetAttribute", getattr(which, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
            for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        )
        return {
            "driver": call("cuDriverGetVersion"),
            "devices": self.device_count,
            "name": call("cuDeviceGetName", 64, device).rstrip(b"\0").decode(),
            "capability": f"{major}.{minor}",
            "memory": call("cuDeviceTotalMem", device),
            "multiprocessors": processors,
            "torch_cuda": None,
        }

    def prepare(self) -> None:
        """Empty the queues of launches of all devices."""
        for device in range(self.device_count):
            with self._driver.on(device):
                self._driver.call("cuCtxSynchronize")

    begin = prepare


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except (ImportError, ValueError):  # nothing of that namespace is there
        return False


def place(wants_stub: bool = False, wants_torch: bool = True) -> Stub | Gpu | BareGpu:
    """The GPU if there is one, else the stub. Raises SystemExit, with the reason, where neither can be had.

    `wants_stub`: the stub, even where there is a GPU. `wants_torch`: PyTorch's tensors, where PyTorch is installed; on the stub
    those of a PyTorch for CPUs, for operators alone.
    """
    if not _has_bindings():
        raise SystemExit("Launches need cuda-bindings, which is not installed: pip install '.[cuda]' or '.[cuda-mlir]'")
    if not wants_stub and cuda_stub.real_driver():
        if not wants_torch or importlib.util.find_spec("torch") is None:
            return BareGpu()
        import torch

        if not torch.cuda.is_available():
            raise SystemExit(f"PyTorch {torch.__version__} sees no GPU, though there is a driver; --stub measures without.")
        return Gpu(torch)
    if sys.platform != "linux":
        raise SystemExit("The driver stub needs Linux.")
    try:
        return Stub(wants_torch)
    except FileNotFoundError:
        raise SystemExit("The driver stub is written in C, and there is no C compiler; set CC.") from None
    except cuda_stub.StubRefused as error:
        raise SystemExit(f"The driver stub cannot be used: {error}.") from None
