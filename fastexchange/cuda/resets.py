"""Resets of devices' contexts, by ``cuda.close()`` or ``device.reset()``: what was in a context is not used again.

A reset takes kernels, streams and memory away and leaves the context's handle as it was, so the driver cannot be asked at
no cost. The packages empty their context's list of modules: an object of ours is in it, and dies with the others.
A reset behind their back (``cuDevicePrimaryCtxReset``) is only noticed where the driver refuses a launch for it.
"""

import contextlib
import sys
import weakref
from typing import Any

from .._abi import ffi
from ..dispatch import structs as dispatch
from ..dispatch.runtime import runtime
from ..ground.native import address_of, offset_of

__all__ = ["address_of_count", "count", "forget", "forget_all", "is_stale", "keep_up", "retire", "watch"]

_DEVICES = ("numba.cuda.cudadrv.devices", "numba_cuda_mlir.numba_cuda.cudadrv.devices")
_KEY = "fastexchange"
_contexts: weakref.WeakSet = weakref.WeakSet()
_launchers: weakref.WeakSet = weakref.WeakSet()
_renewed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _Witness:
    """In a package's list of the modules in a context: it dies when they are unloaded."""

    __slots__ = ("_device", "_is_finalizing")

    def __init__(self, device: int):
        self._device, self._is_finalizing = device, sys.is_finalizing

    def dismiss(self) -> None:
        """Let its end mean nothing."""
        self._device = -1

    def __del__(self):
        if self._device >= 0 and not self._is_finalizing():
            forget(self._device)


def watch(device: int) -> None:
    """Notice resets of a device's context by the packages that use it by now."""
    for name in _DEVICES:
        devices: Any = sys.modules.get(name)
        context = None
        with contextlib.suppress(Exception):  # a package that is imported, and cannot be used here: the one in Numba itself, say
            context = devices.gpus[device].primary_context if devices is not None else None
        if context is not None and _KEY not in context.modules:  # None: the package has made none yet
            witness = _Witness(device)
            if context.modules.setdefault(_KEY, witness) is not witness:  # another thread was faster
                witness.dismiss()


def keep_up(context) -> None:
    """From now on a reset unloads the kernels of a ``CudaContext``."""
    _contexts.add(context)


def retire(launcher) -> None:
    """From now on a reset makes a launcher, which has a stream of its own, launch no more."""
    _launchers.add(launcher)


def count() -> int:
    """How many resets have been noticed in this process."""
    return _cuda().resets if runtime().native.cuda else 0


def address_of_count() -> int:
    """Where native code finds it."""
    return address_of(_cuda()) + offset_of("fx_cuda", "resets")


def is_stale(library) -> bool:
    """Whether a package's library may have loaded its kernel before a reset; the next time it has not. `library`: any object."""
    if _renewed.get(library, 0) == count():
        return False
    _renewed[library] = count()
    return True


def forget(device: int) -> None:
    """Use nothing any more of what was in a device's context.

    Kernels are loaded anew on all devices: numba-cuda has one library for them, which goes with the first context.
    """
    cuda = _cuda()
    cuda.contexts[device] = 0
    cuda.resets += 1
    for context in list(_contexts):
        context.unload()
    runtime().entries.remove_kind(dispatch.KIND_VIEW)  # device arrays: their memory has to be looked at
    for launcher in list(_launchers):
        launcher.retire()


def forget_all() -> None:
    """The driver says that a context has been reset, and not which."""
    for device in range(dispatch.MAX_DEVICES if runtime().native.cuda else 0):
        if _cuda().contexts[device]:
            forget(device)


def _cuda():
    """The ``fx_cuda *`` of the process; there is one as soon as a kernel has been launched."""
    return ffi.cast("fx_cuda *", runtime().native.cuda)
