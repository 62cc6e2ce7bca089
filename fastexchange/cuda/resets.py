"""Resets of devices' contexts, by ``cuda.close()`` or ``device.reset()``. Nothing of a reset context is used again.

A reset destroys kernels, streams and memory, but the context's handle stays the same, so no cheap call of the driver tells. The
packages clear their context's list of modules at a reset. An object of ours in that list dies then, and reports the reset. Other
resets (``cuDevicePrimaryCtxReset``) are noticed when the driver refuses a launch.
"""

import contextlib
import sys
import weakref
from typing import Any

from .._abi import ffi
from ..dispatch import structs
from ..dispatch.runtime import runtime
from .kinds import VIEW
from .targets import modules_of_packages

__all__ = ["count", "forget", "forget_all", "is_stale", "retire_at_reset", "unload_at_reset", "watch"]

_DEVICES = modules_of_packages("devices")
_KEY = "fastexchange"
_contexts: weakref.WeakSet = weakref.WeakSet()
_launchers: weakref.WeakSet = weakref.WeakSet()
_renewed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _Witness:
    """An object in a package's list of a context's modules. It dies when they are unloaded."""

    __slots__ = ("_device", "_is_finalizing")

    def __init__(self, device: int):
        self._device, self._is_finalizing = device, sys.is_finalizing

    def dismiss(self) -> None:
        """Do not report a reset when the object dies."""
        self._device = -1

    def __del__(self):
        if self._device >= 0 and not self._is_finalizing():
            forget(self._device)


def watch(device: int) -> None:
    """Watch for resets of a device's context by the packages that use it."""
    for name in _DEVICES:
        devices: Any = sys.modules.get(name)
        context = None
        with contextlib.suppress(Exception):  # a package that is imported but does not work here, such as numba.cuda
            context = devices.gpus[device].primary_context if devices is not None else None
        if context is not None and _KEY not in context.modules:  # None: the package has no context yet
            witness = _Witness(device)
            if context.modules.setdefault(_KEY, witness) is not witness:  # another thread was faster
                witness.dismiss()


def unload_at_reset(context) -> None:
    """Let resets unload the kernels of a ``CudaContext``."""
    _contexts.add(context)


def retire_at_reset(launcher) -> None:
    """Let resets retire a launcher that has a stream of its own."""
    _launchers.add(launcher)


def count() -> int:
    """The number of resets noticed in this process."""
    return _cuda().resets if runtime().native.cuda else 0


def is_stale(library) -> bool:
    """Whether a package's library may have loaded its kernel before a reset. True once per reset. `library`: any object."""
    if _renewed.get(library, 0) == count():
        return False
    _renewed[library] = count()
    return True


def forget(device: int) -> None:
    """Forget everything in a device's context.

    Kernels are loaded anew on all devices, because numba-cuda has one library for all devices.
    """
    cuda = _cuda()
    cuda.contexts[device] = 0
    cuda.resets += 1
    for context in list(_contexts):
        context.unload()
    runtime().entries.remove_kind(VIEW)  # device arrays: their memory has to be read again
    for launcher in list(_launchers):
        launcher._retire()


def forget_all() -> None:
    """Forget everything in all contexts: the driver's error does not say which context has been reset."""
    for device in range(structs.MAX_DEVICES if runtime().native.cuda else 0):
        if _cuda().contexts[device]:
            forget(device)


def _cuda():
    """The ``fx_cuda *`` of the process, which exists after the first launch."""
    return ffi.cast("fx_cuda *", runtime().native.cuda)
