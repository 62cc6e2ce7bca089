"""The packages that compile kernels for CUDA: what this package has to know of them, in a file for each."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ...ground.dlpack import DLDataTypeCode

__all__ = ["BFLOAT16", "Compiled", "Parameter", "Target", "is_device_array", "is_of_package", "target_of"]


BFLOAT16 = int(DLDataTypeCode.kDLBfloat) | 16 << 8
"""The dtype field of bfloat16, which kernels for CUDA have a type for."""


class Parameter(NamedTuple):
    """One parameter of a compiled kernel."""

    code: int
    """Where it is: ``cuda.structs.parameter``."""
    size: int
    """Bytes."""


class Target(Protocol):
    """A package that compiles kernels for CUDA."""

    name: str
    """Its name in messages."""

    def on_device(self, device: int):
        """A context manager: the package's current device."""

    def element_of(self, field: int, storage: bool):
        """The package's type, or else what ``ground.dtypes.element_of`` says, for an array's elements of this dtype field."""

    def type_of(self, numba_type):
        """The package's type for one of Numba's."""

    def type_of_value(self, dispatcher, value):
        """The type that the package's own launch infers for an argument. Raises TypeError or ValueError for what has none."""

    def why_not(self, dispatcher) -> str:
        """Why all launches of a kernel have to be the package's own; nothing if they need not."""

    def signature_for(self, dispatcher, given: tuple) -> tuple | None:
        """The types of the parameters for arguments of these types, the package's: the same, or those of a declared signature.

        None: no declared one has a place for them.
        """

    def compile(self, dispatcher, taken: tuple) -> "Compiled":
        """Compile a kernel with parameters of these types for the current device."""

    def own_launch(self, dispatcher, configuration) -> Callable:
        """The package's own launcher for (grid, block, stream, shared, cluster)."""

    def own_forall(self, dispatcher, tasks: int, threads: int, stream: int | None, shared: int) -> Callable:
        """The package's own launcher for so many tasks; 0 threads in a block: as many as it likes."""

    def signatures(self, dispatcher) -> list[tuple]:
        """The types of the parameters in each compiled signature."""


class Compiled(Protocol):
    """A kernel compiled for one signature."""

    taken: tuple
    """The types of its parameters: what a declared signature has, or the arguments' own."""
    is_cooperative: bool

    def why_not(self) -> str:
        """Why its launches have to be the package's own; nothing if they need not."""

    def function(self) -> int:
        """The ``CUfunction`` on the package's current device, loaded."""

    def parameters(self) -> list[Parameter]:
        """Its parameters, in the driver's order."""


_CLASSES = {
    ("numba.cuda.dispatcher", "CUDADispatcher"): "numba_cuda",
    ("numba_cuda_mlir.descriptor", "MLIRDispatcher"): "numba_cuda_mlir",
}


def is_device_array(value: Any) -> bool:
    """Whether `value` is a device array of one of the packages, exactly: subclasses may keep their memory elsewhere."""
    cls = type(value)
    return cls.__name__ == "DeviceNDArray" and cls.__module__ in (
        "numba.cuda.cudadrv.devicearray", "numba_cuda_mlir.numba_cuda.cudadrv.devicearray",
    )  # fmt: skip


def is_of_package(cls: type) -> bool:
    """Whether arrays of this type are one of the packages' own: on a device, managed, mapped, or of a class under those."""
    return getattr(cls, "__cuda_ndarray__", False) is True


def target_of(function: Any) -> Target | None:
    """The package of which `function` is a dispatcher; None for anything else.

    Imports nothing that has not been imported.
    """
    for (module, name), room in _CLASSES.items():
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None and isinstance(function, cls):
            return import_module(f".{room}", __name__).target()
    return None
