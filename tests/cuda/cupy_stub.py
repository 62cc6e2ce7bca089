"""CuPy on the driver stub: CUDA's runtime, which CuPy has in itself, does not work on that, so a few of its functions are ours.

CuPy's modules get each other's C functions when they are imported, from capsules by name and signature. Ours stand there before.
So arrays, their memory, pools and current streams are CuPy's own; what copies or computes does not work.
"""

import ctypes
import functools
import importlib
import importlib.util
import sys

DEVICES = 3
"""Of the stub."""
_OBJECT, _ADDRESS = ctypes.py_object, ctypes.c_void_p
_INT, _WORD, _SIZE = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_size_t
_new = ctypes.PYFUNCTYPE(_OBJECT, _ADDRESS, _ADDRESS, _ADDRESS)(("PyCapsule_New", ctypes.pythonapi))
_name = ctypes.PYFUNCTYPE(_ADDRESS, _OBJECT)(("PyCapsule_GetName", ctypes.pythonapi))


class Runtime:
    """The runtime's functions on a stub. `device`: the current one."""

    def __init__(self, stub, devices: int):
        self.device, self._stub = 0, stub
        functions = {
            "getDevice": (lambda skip: self.device, _INT, _INT), "getDeviceCount": (lambda skip: devices, _INT, _INT),
            "malloc": (self._allocate, _WORD, _SIZE, _INT), "free": (lambda pointer, skip: None, _OBJECT, _WORD, _INT),
        }  # fmt: skip
        capsules = importlib.import_module("cupy_backends.cuda.api.runtime").__pyx_capi__
        self._kept = []  # CuPy calls them until the end
        for name, (function, *signature) in functions.items():
            made = ctypes.PYFUNCTYPE(*signature)(function)
            self._kept += made, capsules[name]
            capsules[name] = _new(ctypes.cast(made, ctypes.c_void_p), _name(capsules[name]), None)

    def _allocate(self, size, skip) -> int:
        return self._stub.allocate(size, self.device)


@functools.cache
def load(stub, devices: int) -> Runtime | None:
    """Let CuPy, if it is installed, have arrays on the stub's devices: before it is imported, as numba-cuda-mlir does."""
    assert "cupy" not in sys.modules, "CuPy has been imported already"
    return Runtime(stub, devices) if importlib.util.find_spec("cupy_backends") is not None else None
