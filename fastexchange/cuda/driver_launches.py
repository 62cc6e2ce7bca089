"""The driver's launch alone, time after time: what a launch is measured beside."""

import ctypes

from numba import types

from .._abi import ffi
from ..ground.cfunction import cfunction
from ..ground.native import address_of
from .driver import driver
from .launch_structs import cuda_at, launcher_at
from .native_launch import call_driver

__all__ = ["DriverLaunches"]

_PARAMETER_BYTES = 16  # of the largest one, a complex128


@cfunction(types.intp, *[types.intp] * 6)
def launch_repeatedly(cuda_address, launcher_address, function, threads, pointers, count):
    """Launch `function` by the driver so many times. GIL: not needed. Returns: the first ``CUresult`` that is not 0, or 0."""
    cuda, launcher = cuda_at(cuda_address), launcher_at(launcher_address)
    for _ in range(count):
        code = call_driver(cuda, launcher, function, launcher.grid[0], threads, launcher.stream, pointers, 0)
        if code != 0:
            return types.intp(code)
    return types.intp(0)


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * 6)


class DriverLaunches:
    """Launches of a kernel that does nothing, by the driver alone. ``launches(count)`` makes so many."""

    def __init__(self, launcher, device: int, stream: int):
        """`launcher`: native code has launched its kernel, on `device`. The parameters are as many and as large, but zeros."""
        ((launchable, function),) = launcher.kernel._native.loaded_on(device)
        self._launcher, self._device = launcher, device
        self._zeros = ffi.new("char[]", _PARAMETER_BYTES)
        self._pointers = ffi.new("char *[]", [self._zeros] * max(1, len(launchable.parameters)))
        self._native = launcher._on_stream(stream)
        threads = self._native.block[0] or driver().best_block(function, self._native.shared)
        native, pointers = address_of(self._native), address_of(self._pointers)
        self._words = address_of(driver().native), native, function, threads, pointers

    def __call__(self, count: int) -> None:
        with driver().on(self._device):
            code = _LAUNCH(launch_repeatedly.address)(*self._words, count)
        if code:
            raise driver().launch_error(code, self._launcher._not_launched)
