"""The packages that compile CUDA kernels, in one file each.

To add one, implement :class:`Target` and :class:`Compiled`, and list it in :data:`PACKAGES`.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from ...ground.dlpack import DLDataTypeCode, field_of_type
from ...ground.dtypes import element_of, field_to_numba

__all__ = [
    "BFLOAT16",
    "DEPENDS_ON_LAUNCH",
    "Compiled",
    "OnlyItsLaunch",
    "Parameter",
    "Target",
    "TargetBase",
    "compiled_ahead",
    "is_device_array",
    "is_of_package",
    "modules_of_packages",
    "target_of",
]  # fmt: skip


BFLOAT16 = field_of_type(DLDataTypeCode.kDLBfloat, 16)
"""The dtype field of bfloat16, for which CUDA kernels have a type."""


class Parameter(NamedTuple):
    """One parameter of a compiled kernel."""

    code: int
    """Where its value is: see ``cuda.launch_structs.parameter``."""
    size: int
    """Bytes."""


class OnlyItsLaunch(TypeError):
    """A kernel that a package compiles only in a launch of its own. The text says why."""


DEPENDS_ON_LAUNCH = "its code depends on the launch configuration"


def compiled_ahead(dispatcher, taken: tuple, missing: str):
    """What a package's dispatcher compiles for these types without a launch.

    Raises OnlyItsLaunch if the package says, in these words, that a launch's configuration is missing: its RuntimeError
    has no type of its own. With other words it is raised as it is.
    """
    try:
        return dispatcher.compile(taken)
    except RuntimeError as error:
        if missing not in str(error):
            raise
        raise OnlyItsLaunch(DEPENDS_ON_LAUNCH) from None


class Target(Protocol):
    """A package that compiles kernels for CUDA."""

    name: str
    """Its name in messages."""

    def on_device(self, device: int):
        """A context manager: the package's current device."""

    def element_of(self, field: int, storage: bool):
        """The package's type for elements of this dtype field; if it has none, the type by ``ground.dtypes.element_of``."""

    def type_of(self, numba_type):
        """The package's type for a Numba type."""

    def type_of_value(self, dispatcher, value):
        """The type that the package's own launch infers for an argument. Raises TypeError or ValueError if there is none."""

    def readable(self, value):
        """What the package's own launch takes for a tensor: the tensor, or what stands for it where that launch would fail."""

    def why_not(self, dispatcher) -> str:
        """Why only the package can launch the kernel; "" if native code can."""

    def signature_for(self, dispatcher, given: tuple) -> tuple | None:
        """The parameters' types for arguments of these types of the package: the same, or those of a declared signature.

        None: no declared signature fits.
        """

    def compile(self, dispatcher, taken: tuple) -> "Compiled":
        """Compile a kernel with parameters of these types for the current device. Raises OnlyItsLaunch."""

    def own_launch(self, dispatcher, configuration) -> Callable:
        """The package's own launcher for (grid, block, stream, shared, cluster)."""

    def own_forall(self, dispatcher, tasks: int, threads: int, stream: int | None, shared: int) -> Callable:
        """The package's own launcher for `tasks`. 0 threads in a block: the package chooses."""

    def signatures(self, dispatcher) -> list[tuple]:
        """The parameters' types of each compiled signature."""


class Compiled(Protocol):
    """A kernel compiled for one signature."""

    taken: tuple
    """The parameters' types: those of a declared signature, or the arguments'."""
    is_cooperative: bool

    def why_not(self) -> str:
        """Why only the package can launch it; "" if native code can."""

    def function(self) -> int:
        """Load it on the package's current device. Returns the ``CUfunction``."""

    def parameters(self) -> list[Parameter]:
        """Its parameters, in the driver's order."""


class TargetBase:
    """The methods of a :class:`Target` that are equal for packages derived from ``numba.cuda``."""

    cuda: Any
    """The package's module ``cuda``."""

    def on_device(self, device: int):
        return self.cuda.gpus[device]

    def element_of(self, field: int, storage: bool):
        return self.cuda.types.bfloat16 if field == BFLOAT16 else element_of(field, storage, field_to_numba)

    def readable(self, value):
        return value

    def signatures(self, dispatcher) -> list[tuple]:
        return list(dispatcher.overloads)

    def use_own_halves(self, typeof_impl: Any, own: dict[str, Any]) -> None:
        """Let the names of ``half`` mean the package's own types in its kernels, so that a source is one for both.

        `typeof_impl`: where the package's types of values are registered. `own`: types by the names of ``half``.
        """
        from ...ground.half.elements import Half

        @typeof_impl.register(Half)
        def _(half, context):
            if half.name not in own:
                name = cast(Any, self).name
                raise TypeError(f"{name} has no type for {half.name} that fastexchange knows; use bfloat16 or float16")
            return typeof_impl(own[half.name], context)


class Package(NamedTuple):
    """Where a package has what is used of it before, or without, its import. All its names stand here."""

    module: str
    """The file here that has its ``target()``."""
    dispatchers: str
    dispatcher: str
    """The module and the name of the class of its dispatchers."""
    cudadrv: str
    """The package with its modules ``driver``, ``devices`` and ``devicearray``."""


PACKAGES = (
    Package("numba_cuda", "numba.cuda.dispatcher", "CUDADispatcher", "numba.cuda.cudadrv"),
    Package("numba_cuda_mlir", "numba_cuda_mlir.descriptor", "MLIRDispatcher", "numba_cuda_mlir.numba_cuda.cudadrv"),
)


def modules_of_packages(name: str) -> tuple[str, ...]:
    """The full names of the packages' modules `name` in ``cudadrv``."""
    return tuple(f"{package.cudadrv}.{name}" for package in PACKAGES)


def is_device_array(value: Any) -> bool:
    """Whether `value` is exactly a package's device array. Subclasses may have their memory elsewhere."""
    cls = type(value)
    return cls.__name__ == "DeviceNDArray" and cls.__module__ in modules_of_packages("devicearray")


def is_of_package(cls: type) -> bool:
    """Whether a type is, or derives from, a package's own array type: device, managed or mapped."""
    return getattr(cls, "__cuda_ndarray__", False) is True


def target_of(function: Any) -> Target | None:
    """The package whose dispatcher `function` is, or None. Imports no package."""
    for package in PACKAGES:
        cls = getattr(sys.modules.get(package.dispatchers), package.dispatcher, None)
        if cls is not None and isinstance(function, cls):
            return import_module(f".{package.module}", __name__).target()
    return None
