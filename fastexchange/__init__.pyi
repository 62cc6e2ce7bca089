from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Generic, Literal, NoReturn, ParamSpec, Protocol, TypedDict, TypeVar, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, Unpack

from .calls.explanation import CallExplanation, Explanation
from .calls.kernel import KernelCounts as KernelCounts
from .cuda.driver import CudaError as CudaError
from .cuda.launcher import Configuration
from .ground.dlpack_types import DLDataType as DLDataType
from .ground.dlpack_types import DLDevice as DLDevice
from .ground.dlpack_types import DLPackVersion as DLPackVersion
from .measuring.report import OverheadReport as OverheadReport

__version__: str

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_T = TypeVar("_T")

# ---- options -----------------------------------------------------------------------------------------------------------------

_Step = Callable[..., Any]  # a kernel is one
_Size = int | Sequence[int]
_Launch = str | tuple[Any, ...] | Callable[..., tuple[Any, ...] | int]

class _CudaOptions(TypedDict, total=False):
    grad: Literal["refuse", "allow"]
    storage: bool

class _LaunchOptions(_CudaOptions, total=False):
    out: str | None
    mutates: str | Sequence[str] | None
    backward: _Step | Sequence[_Step] | None

class _Options(_CudaOptions, total=False):
    returns: type[Any] | str | None
    mutates: str | Sequence[str] | None
    backward: _Step | Sequence[_Step] | None
    cuda: Any
    launch: _Launch | None
    # those of numba.njit
    boundscheck: bool | None
    cache: bool
    debug: bool
    error_model: Literal["python", "numpy"]
    fastmath: bool | set[str] | Mapping[str, bool]
    forceinline: bool
    forceobj: bool
    inline: Literal["never", "always"] | Callable[..., bool]
    locals: Mapping[str, Any]
    looplift: bool
    no_cfunc_wrapper: bool
    no_cpython_wrapper: bool
    no_rewrites: bool
    nogil: bool
    nopython: bool
    parallel: bool | Mapping[str, bool]
    pipeline_class: type[Any] | None

class _Signature(Protocol):
    """A signature of Numba's."""

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def return_type(self) -> Any: ...

class _CudaDispatcher(Protocol):
    """What ``@cuda.jit`` makes."""

    def forall(self, ntasks: Any, tpb: Any = ..., stream: Any = ..., sharedmem: Any = ...) -> Any: ...
    @property
    def py_func(self) -> Callable[..., Any]: ...

class _Decorator(Protocol):
    def __call__(self, func: Callable[_P, _R], /) -> FastKernel[_P, _R]: ...

class _DecoratorWithOutputs(Protocol):
    """The outputs may be omitted in calls, which return them. No type of Python says that."""

    def __call__(self, func: Callable[..., None], /) -> FastKernel[..., Any]: ...

# ---- decorators --------------------------------------------------------------------------------------------------------------

@overload
def fast_args(func: FastKernel[_P, _R], /, *, out: None = None, **options: Unpack[_Options]) -> FastKernel[_P, _R]: ...
@overload
def fast_args(func: _CudaDispatcher, /, *, launch: _Launch, **options: Unpack[_LaunchOptions]) -> LaunchedKernel: ...
@overload
def fast_args(func: _CudaDispatcher, /, **options: Unpack[_CudaOptions]) -> CudaKernel: ...
@overload
def fast_args(func: None = None, /, *, out: None = None, **options: Unpack[_Options]) -> _Decorator: ...
@overload
def fast_args(func: None = None, /, *, out: str, **options: Unpack[_Options]) -> _DecoratorWithOutputs: ...
@overload
def fast_args(
    func: str | _Signature | tuple[Any, ...] | list[Any], /, *, out: None = None, **options: Unpack[_Options]
) -> _Decorator: ...
@overload
def fast_args(
    func: str | _Signature | tuple[Any, ...] | list[Any], /, *, out: str, **options: Unpack[_Options]
) -> _DecoratorWithOutputs: ...
@overload
def fast_args(func: Callable[_P, _R], /, *, out: None = None, **options: Unpack[_Options]) -> FastKernel[_P, _R]: ...
@overload
def fast_args(func: Callable[..., None], /, *, out: str, **options: Unpack[_Options]) -> FastKernel[..., Any]: ...
def accelerate(*packages: str) -> None: ...
def decelerate() -> None: ...

# ---- kernels -----------------------------------------------------------------------------------------------------------------

class _Kernel:
    __name__: str
    __qualname__: str
    @property
    def allows_grad(self) -> bool: ...
    @property
    def storage(self) -> bool: ...
    @property
    def returns(self) -> type[Any] | str | None: ...
    @property
    def out(self) -> str | None: ...
    @property
    def mutates(self) -> tuple[str, ...] | None: ...
    @property
    def backward(self) -> tuple[Any, ...] | None: ...
    @property
    def cuda(self) -> CudaKernel | None: ...
    def counts(self) -> KernelCounts: ...
    def precompile(self, /, *calls: str | tuple[Any, ...] | Mapping[str, Any] | _Signature) -> list[tuple[Any, ...]]: ...
    def recompile(self) -> None: ...
    def forall(self, ntasks: int, tpb: int = 0, stream: Any = None, sharedmem: int = 0) -> CudaLauncher: ...
    def configure(
        self, griddim: _Size, blockdim: _Size, stream: Any = None, sharedmem: int = 0, cluster: _Size | None = None
    ) -> CudaLauncher: ...
    def __getitem__(self, configuration: tuple[Any, ...]) -> CudaLauncher: ...

class FastKernel(_Kernel, Generic[_P, _R]):
    py_func: Callable[_P, _R]
    __wrapped__: Callable[_P, _R]
    @property
    def dispatcher(self) -> Self: ...
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def bind(self, /, *args: _P.args, **kwargs: _P.kwargs) -> BoundLaunch[_R]: ...
    def explain(self, /, *args: _P.args, **kwargs: _P.kwargs) -> CallExplanation: ...
    def as_torch_op(
        self,
        name: str,
        *,
        backward: _Step | Sequence[_Step] | None = None,
        setup_context: Callable[..., None] | None = None,
        mutates: str | Sequence[str] | None = None,
        vmap: Literal["loop"] | Callable[..., Any] | None = "loop",
        replace: bool = False,
    ) -> TorchOp: ...
    # those of Numba's dispatchers
    locals: Mapping[str, Any]
    overloads: Mapping[tuple[Any, ...], Any]
    @property
    def stats(self) -> Any: ...
    targetoptions: dict[str, Any]
    @property
    def signatures(self) -> list[tuple[Any, ...]]: ...
    @property
    def nopython_signatures(self) -> list[Any]: ...
    def add_overload(self, cres: Any) -> None: ...
    def compile(self, sig: Any) -> Any: ...
    def disable_compile(self, val: bool = True) -> None: ...
    def enable_caching(self) -> None: ...
    def get_metadata(self, signature: Any = None) -> Any: ...
    def get_overload(self, sig: Any) -> Any: ...
    def inspect_asm(self, signature: Any = None) -> Any: ...
    def inspect_cfg(self, signature: Any = None, show_wrapper: Any = None, **kwargs: Any) -> Any: ...
    def inspect_disasm_cfg(self, signature: Any = None) -> Any: ...
    def inspect_llvm(self, signature: Any = None) -> Any: ...
    def inspect_types(
        self, file: Any = None, signature: Any = None, pretty: bool = False, style: str = "default", **kwargs: Any
    ) -> Any: ...
    def parallel_diagnostics(self, signature: Any = None, level: int = 1) -> None: ...

class BoundLaunch(Generic[_R_co]):
    kernel: Any
    @property
    def arguments(self) -> tuple[Any, ...]: ...
    def __call__(self) -> _R_co: ...
    def rebind(self, /, **arguments: Any) -> Self: ...

class BoundCudaLaunch(BoundLaunch[None]):
    kernel: CudaKernel
    @property
    def launcher(self) -> CudaLauncher: ...

class CudaKernel(_Kernel):
    dispatcher: Any
    py_func: Callable[..., Any]
    why_not: str
    def __call__(self, /, *args: Any, **kwargs: Any) -> NoReturn: ...
    def bind(self, /, *args: Any, **kwargs: Any) -> NoReturn: ...
    def explain(self, /, *args: Any, **kwargs: Any) -> CallExplanation: ...
    def as_torch_op(
        self,
        name: str,
        *,
        launch: _Launch,
        out: str | None = None,
        mutates: str | Sequence[str] | None = None,
        cpu: FastKernel[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        vmap: Literal["loop"] | Callable[..., Any] | None = "loop",
        replace: bool = False,
    ) -> TorchOp: ...
    def __getattr__(self, name: str) -> Any: ...

class LaunchedKernel(_Kernel):
    cuda_kernel: CudaKernel
    launch: _Launch
    on_cpu: FastKernel[..., Any] | None
    py_func: Callable[..., Any]
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...
    def explain(self, /, *args: Any, **kwargs: Any) -> CallExplanation: ...
    def as_torch_op(
        self,
        name: str,
        *,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        vmap: Literal["loop"] | Callable[..., Any] | None = "loop",
        replace: bool = False,
    ) -> TorchOp: ...

class CudaLauncher:
    kernel: CudaKernel
    configuration: Configuration
    @property
    def why_not(self) -> str: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> None: ...
    def bind(self, /, *args: Any, **kwargs: Any) -> BoundCudaLaunch: ...
    def explain(self, /, *args: Any, **kwargs: Any) -> CallExplanation: ...
    @property
    def pre_launch_callbacks(self) -> list[Callable[..., Any]]: ...

class TorchOp:
    kernel: Any
    name: str
    overload: Any
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

# ---- tensors -----------------------------------------------------------------------------------------------------------------

_Device = str | tuple[int, int] | DLDevice

def convert(x: object, to: type[_T], /, *, copy: bool | None = None) -> _T: ...
def from_dlpack(
    x: object, /, *, dtype: npt.DTypeLike | None = None, device: _Device | None = None, copy: bool | None = None
) -> npt.NDArray[Any]: ...
def to_dlpack(
    x: object,
    /,
    *,
    max_version: tuple[int, int] | None = None,
    device: _Device | None = None,
    copy: bool | None = None,
) -> Any: ...
def exchange_api(cls: type[Any], /) -> Any: ...
def polyfill(cls: type[Any], /) -> None: ...
def unpolyfill(cls: type[Any], /) -> None: ...
def register_dlpack_dtype(key: tuple[int, int], dtype: np.dtype[Any], /) -> None: ...
def register_xla_target() -> str: ...

bfloat16: Any
float16: Any
float8_e4m3fn: Any
float8_e4m3fnuz: Any
float8_e5m2: Any
float8_e5m2fnuz: Any

# ---- values of DLPack --------------------------------------------------------------------------------------------------------

class DLDeviceType(IntEnum):
    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3
    kDLOpenCL = 4
    kDLVulkan = 7
    kDLMetal = 8
    kDLVPI = 9
    kDLROCM = 10
    kDLROCMHost = 11
    kDLExtDev = 12
    kDLCUDAManaged = 13
    kDLOneAPI = 14
    kDLWebGPU = 15
    kDLHexagon = 16
    kDLMAIA = 17
    kDLTrn = 18

class DLDataTypeCode(IntEnum):
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLOpaqueHandle = 3
    kDLBfloat = 4
    kDLComplex = 5
    kDLBool = 6
    kDLFloat8_e3m4 = 7
    kDLFloat8_e4m3 = 8
    kDLFloat8_e4m3b11fnuz = 9
    kDLFloat8_e4m3fn = 10
    kDLFloat8_e4m3fnuz = 11
    kDLFloat8_e5m2 = 12
    kDLFloat8_e5m2fnuz = 13
    kDLFloat8_e8m0fnu = 14
    kDLFloat6_e2m3fn = 15
    kDLFloat6_e3m2fn = 16
    kDLFloat4_e2m1fn = 17

# ---- what a call does, and what it costs ---------------------------------------------------------------------------------------

def explain(obj: object, /) -> Explanation: ...
def measure(
    kernel: FastKernel[..., Any] | CudaLauncher, /, *args: Any, alternatives: bool = True, rounds: int = ..., **kwargs: Any
) -> OverheadReport: ...
def load_ipython_extension(shell: Any) -> None: ...
