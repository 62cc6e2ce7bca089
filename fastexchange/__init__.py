"""fastexchange: tensors of any framework straight into Numba kernels.

Start at :func:`fast_args` in ``api``. The way of one argument: ``calls.kernel`` (what is called), ``dispatch.vectorcall`` (the
native call), ``dispatch.rows`` (a cached call, from the arguments into the kernel and out again) or
``dispatch.read_arguments`` (reading the arguments of any other call) and ``dispatch.trampoline`` (into the kernel);
``calls.resolve`` and ``arguments.discovery`` for what is seen for the first time, ``calls.fallback`` for what is left to Numba;
``ground.dlpack``, ``ground.cpython`` and ``ground.native`` are what all stands on. ``docs/explanation/design.md`` shows all.
Type checkers read ``__init__.pyi``.
"""

from importlib import import_module as _import_module

from .version import __version__  # noqa: F401  (before the next, which asks for it)

# isort: split

from . import interpreter as _interpreter  # noqa: F401  (before the others: it refuses interpreters that they cannot trust)
from .ground.dlpack import DLDataTypeCode, DLDeviceType

__all__ = [
    "BoundCudaLaunch", "BoundLaunch", "CudaError", "CudaKernel", "CudaLauncher", "DLDataType", "DLDataTypeCode", "DLDevice",
    "DLDeviceType", "DLPackVersion", "FastKernel", "KernelCounts", "LaunchedKernel", "OverheadReport", "TorchOp", "accelerate",
    "bfloat16", "convert", "decelerate", "exchange_api", "explain", "fast_args", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float16", "from_dlpack", "measure", "polyfill", "register_dlpack_dtype",
    "register_xla_target", "to_dlpack", "unpolyfill",
]  # fmt: skip

_MODULES = {
    "api": ("accelerate", "decelerate", "fast_args"),
    "calls.bound_launch": ("BoundCudaLaunch", "BoundLaunch"),
    "calls.explanation": ("explain",),
    "calls.kernel": ("FastKernel", "KernelCounts"),
    "torch.operator": ("TorchOp",),
    "cuda.driver": ("CudaError",),
    "cuda.cuda_kernel": ("CudaKernel",),
    "cuda.launched_kernel": ("LaunchedKernel",),
    "cuda.launcher": ("CudaLauncher",),
    "exchange.convert": ("convert", "from_dlpack", "to_dlpack"),
    "exchange.polyfill": ("exchange_api", "polyfill", "unpolyfill"),
    "ground.dlpack_types": ("DLDataType", "DLDevice", "DLPackVersion"),
    "ground.dtype_registry": ("register_dlpack_dtype",),
    "half": ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float16"),
    "jax.xla_target": ("register_xla_target",),
    "measuring.overhead": ("measure",),
    "measuring.report": ("OverheadReport",),
}
"""Where the names are that are imported when they are first used: native modules take a while, and Numba is not asked for sooner.

A program that ``python -m fastexchange run`` runs may set what Numba and NumPy read when they are imported.
"""


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            try:
                found = getattr(_import_module(f".{module}", __name__), name)
            except AttributeError as error:  # Python would say that there is no such name
                raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is for users: not the folders of this package that happen to be imported."""
    return sorted({*filter(lambda name: name.startswith("__"), globals()), *__all__, "half", "load_ipython_extension"})


def load_ipython_extension(shell) -> None:
    """Called by ``%load_ext fastexchange``: the magics ``%fastargs`` and ``%%fastargs``, see ``%fastargs?``."""
    from .measuring.magic import FastArgsMagics

    shell.register_magics(FastArgsMagics)
