"""Producers of tensors on CUDA devices without an exchange table, and one whose table fails.

What they export is entered in a ``Ledger`` and crossed out by its deleter.
"""

import numpy as np
from cuda_tensors import DeviceTensor, OtherTensor, _Tensor
from made_producers import Ledger, capsule, export_legacy, export_versioned
from numba import types

from fastexchange.ground import cpython
from fastexchange.ground.cfunction import cfunction
from fastexchange.ground.dlpack import DLDeviceType
from fastexchange.ground.native import global_address, load, static_array, store

CUDA, HOST, MANAGED = DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAHost, DLDeviceType.kDLCUDAManaged
_SETS_IN_VAIN, _SETS, _IS_MUTE = 3, 2, 1
FAILURES = {"mute": _IS_MUTE, "raises": _SETS, "raises and returns 0": _SETS_IN_VAIN}


@cfunction(types.int32, types.int32, types.int32, types.intp)
def failing_stream(device_type, device, out):
    """A ``current_work_stream`` that fails as the word at its address for device -1 says."""
    how = static_array("failing_stream", 1)
    store(out, how if device < 0 else 0)
    if device < 0 or load(how) == 0:
        return types.int32(0)
    if load(how) != _IS_MUTE:
        cpython.PyErr_SetNone(global_address("PyExc_MemoryError"))
    return types.int32(0) if load(how) == _SETS_IN_VAIN else types.int32(-1)


class FailingTensor(_Tensor, stream=failing_stream):
    """Whose ``current_work_stream`` fails as ``FailingTensor.streams[0]`` says: 0, or one of ``FAILURES``."""

    __slots__ = ()


class ArrayInterface:
    """An array with ``__cuda_array_interface__``; keywords replace what it says, None among them, ``...`` leaves it out."""

    def __init__(self, stub, shape=(4,), typestr="<f4", device=0, data=None, readonly=False, **lies):
        pointer = stub.allocate(4096, device) if data is None else data
        self.said = {"shape": shape, "typestr": typestr, "data": (pointer, readonly), "version": 3, "strides": None}
        self.say(**lies)

    def say(self, **lies) -> None:
        """Say these instead; functions get the address."""
        said = {name: value(self.said["data"][0]) if callable(value) else value for name, value in lies.items()}
        self.said = {name: value for name, value in (self.said | said).items() if value is not ...}

    __cuda_array_interface__ = property(lambda self: self.said)


class Exports:
    """Has ``__dlpack__``, and counts its exports in `ledger`; lies are those of ``made_producers.fill``.

    `told`: the stream of each export. `capsule`: that of the last one.
    """

    def __init__(self, ledger: Ledger, device=0, device_type=CUDA, array=None, **lies):
        self.ledger, self.device = ledger, (device_type, device)
        self.array = np.zeros(4, np.float32) if array is None else array
        self.lies = {"device_type": int(device_type), "device_id": device, **lies}
        self.told: list = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None):
        self.told.append(stream)
        export, name = export_versioned, b"dltensor_versioned"
        if max_version is None:
            export, name = export_legacy, b"dltensor"
        self.capsule = capsule(export(self.ledger, self.array, **self.lies), name)
        return self.capsule


class ExportsLegacy(Exports):
    """The same, without ``max_version``, in capsules of DLPack before 1.0."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


def reset_streams() -> None:
    """Let all frameworks work on the default streams."""
    for cls in (DeviceTensor, OtherTensor):
        for device in range(8):
            cls.streams[device] = 0
    FailingTensor.streams[0] = 0
