"""What this package launches through a real driver, in the stub's words: ``cuda_stub.Launch``.

All of our launches go through two addresses that native code finds in the driver's struct. Functions of ours stand there
meanwhile, which call the driver and note what it took. What the packages launch themselves is not seen.
"""

import ctypes
import itertools
import threading

import cuda_stub

from fastexchange._abi import ffi
from fastexchange.cuda import launch_structs
from fastexchange.cuda.driver import driver

_WORD, _UINT = ctypes.c_void_p, ctypes.c_uint
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _WORD, *[_UINT] * 7, _WORD, _WORD, _WORD)
_LAUNCH_EXTENDED = ctypes.CFUNCTYPE(ctypes.c_int, _WORD, _WORD, _WORD, _WORD)


class TorchOnDevice:
    """Has as much of ``cuda_stub.TorchOnStub`` as PyTorch has for a GPU."""

    def __init__(self):
        import torch

        self._cuda = torch.cuda
        self.devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]

    def set_stream(self, device: int, stream: int) -> None:
        """Set the current stream of a device, a ``CUstream``; the current device stays the same."""
        with self._cuda.device(device):
            self._cuda.set_stream(self._cuda.ExternalStream(stream) if stream else self._cuda.default_stream())

    def device(self) -> int:
        """The current device."""
        return self._cuda.current_device()


class Recorder:
    """Has as much of ``cuda_stub.Stub`` as a real driver lets see.

    `launches`: those since the start or `clear`; `name` is empty, and `graph` 1 for those that were captured.
    """

    def __init__(self):
        self.launches: list[cuda_stub.Launch] = []
        self._driver = driver()
        self._parameters: dict[int, tuple] = {}
        self._allocated: list = []
        native = self._driver.native
        self._original = native.launch, native.launch_extended
        self._launch, self._launch_extended = _LAUNCH(native.launch), _LAUNCH_EXTENDED(native.launch_extended)
        self._functions = _LAUNCH(self._on_launch), _LAUNCH_EXTENDED(self._on_launch_extended)

    def __enter__(self):
        native = self._driver.native
        native.launch, native.launch_extended = (ctypes.cast(each, ctypes.c_void_p).value for each in self._functions)
        return self

    def __exit__(self, *exc_info):
        self._driver.native.launch, self._driver.native.launch_extended = self._original
        with self._driver.on(0):
            self._driver.call("cuCtxSynchronize")
        for device, pointer in self._allocated:
            with self._driver.on(device):
                self._driver.call("cuMemFree", pointer)
        self._allocated = []

    def clear(self) -> None:
        """Empty `launches`."""
        self.launches.clear()

    def allocate(self, size: int, device: int = 0) -> int:
        """The address of new memory of `device`, which is freed at the end."""
        with self._driver.on(device):
            pointer = self._driver.call("cuMemAlloc", size)
        self._allocated.append((device, pointer))
        return int(pointer)

    # ---- in the driver's place: an exception would be lost here, so nothing that can fail is done before the launch

    def _on_launch(self, function, *words) -> int:
        code = self._launch(function, *words)
        if code == 0:
            *numbers, shared, stream, pointers, _ = words
            self._note("cuLaunchKernel", function, numbers[:3], numbers[3:], shared, stream, pointers, (0, 0, 0), False)
        return code

    def _on_launch_extended(self, config, function, pointers, extra) -> int:
        code = self._launch_extended(config, function, pointers, extra)
        if code == 0:
            said = ffi.cast("fx_launch_config *", config)
            attributes = ffi.cast("fx_launch_attribute *", said.attributes)
            found = {attributes[i].id: tuple(attributes[i].value[0:3]) for i in range(said.attribute_count)}
            special = found.get(launch_structs.CLUSTER_DIMENSION, (0, 0, 0)), launch_structs.COOPERATIVE in found
            self._note("cuLaunchKernelEx", function, said.grid, said.block, said.shared, said.stream, pointers, *special)
        return code

    def _note(self, api, function, grid, block, shared, stream, pointers, cluster, is_cooperative) -> None:
        if function not in self._parameters:
            parameters = (self._driver.parameter(function, i) for i in itertools.count())
            self._parameters[function] = tuple(itertools.takewhile(bool, parameters))
        spans = self._parameters[function]
        at = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        parameters = tuple(ctypes.string_at(at[i], size) for i, (_, size) in enumerate(spans))
        packed = b""
        for (offset, _), parameter in zip(spans, parameters, strict=True):
            packed += bytes(offset - len(packed)) + parameter
        bindings = self._driver.bindings
        code, *capturing = bindings.cuStreamIsCapturing(bindings.CUstream(stream or 0))
        self.launches.append(cuda_stub.Launch(
            api=api, function=function, name="", context=int(self._driver.call("cuCtxGetCurrent")),
            device=int(self._driver.call("cuCtxGetDevice")), grid=tuple(grid), block=tuple(block), cluster=cluster,
            shared=shared, stream=stream or 0, cooperative=is_cooperative,
            graph=int(not int(code) and int(capturing[0]) == 1), offsets=tuple(offset for offset, _ in spans),
            parameters=parameters, packed=packed, thread=threading.get_native_id(),
        ))  # fmt: skip
