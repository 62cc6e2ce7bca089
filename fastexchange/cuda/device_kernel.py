"""CPU and GPU under one name: ``fast_args(cuda=..., launch=...)``. The CPU kernel passes calls with tensors on a GPU on."""

from collections.abc import Callable

from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.omitted import OMITTED
from ..ground.safe_repr import shown
from . import native_launch
from .classify import has_interface
from .computed import is_block, is_grid, is_notation
from .launcher import CudaLauncher

__all__ = ["DeviceKernel", "launcher_of"]


def launcher_of(kernel, launch, what: str, out: str | None = None) -> Callable:
    """Return what launches a CUDA kernel by a configuration: ``(grid, block)``, one in the notation of shapes, or a function.

    `out`: the notation whose names may stand in that, or None.
    """
    if callable(launch):
        return _Chosen(kernel, launch)
    if is_notation(launch):
        return kernel._computed(launch, out, what)
    if not isinstance(launch, tuple):
        raise TypeError(
            f"{what}: launch is (grid, block), a number of tasks in the notation of shapes, such as 'n', or a function, not "
            f"{shown(launch)}"
        )
    launcher = kernel[launch]
    if not (is_grid.py_func(launcher._native) and is_block.py_func(launcher._native)):
        grid, block, *_ = launcher.configuration
        raise ValueError(f"{what}: launch={shown(launch)}: no device takes a grid of {grid} blocks of {block} threads")
    return launcher


class DeviceKernel:
    """The CUDA kernel beside a CPU kernel, with its launch configuration.

    Attributes
    ----------
    launcher : the callable that launches it; native code calls it, too.
    """

    def __init__(self, kernel, launch):
        self._kernel, self._cuda = kernel, kernel.cuda
        ours, theirs = kernel._parameters.names, self._cuda._parameters.names
        if ours != theirs:
            raise TypeError(
                f"fast_args(): {kernel.__qualname__}({', '.join(ours)}) and its kernel for CUDA "
                f"{self._cuda.__qualname__}({', '.join(theirs)}) have to have the same parameters"
            )
        self.launcher = launcher_of(self._cuda, launch, "fast_args()")

    def takes(self, bound: tuple) -> bool:
        """Whether an argument is an array that only CUDA kernels can read: one with ``__cuda_array_interface__``."""
        return any(map(has_interface, bound))

    def call(self, bound: tuple) -> None:
        """Make a call with arguments in parameter order, some of which may be omitted."""
        args, kwargs = self._given(bound)
        self.launcher(*args, **kwargs)

    def explain(self, bound: tuple):
        """Explain a call with these arguments."""
        args, kwargs = self._given(bound)
        return self._cuda.explain(*args, **kwargs)

    def _given(self, bound: tuple) -> tuple[tuple, dict]:
        """The given arguments: positional up to the first omitted one, then by name."""
        names = self._kernel._parameters.names
        count = next((i for i, value in enumerate(bound) if value is OMITTED), len(bound))
        named = {name: value for name, value in zip(names[count:], bound[count:], strict=True) if value is not OMITTED}
        return bound[:count], named


class _Chosen(NativeCallable):
    """A launcher that asks a function for the configuration of each call."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, kernel, launch: Callable):
        self._kernel, self._launch = kernel, launch
        any_launcher: CudaLauncher = kernel[1, 1]  # names the method that native code calls
        self._any, self._context = any_launcher, any_launcher._context
        self._vectorcall = native_launch.own_call()

    def __call__(self, /, *args, **kwargs):
        """Make the launch where native code does not."""
        return self._call_numba(*args, **kwargs)

    def _call_numba(self, /, *args, **kwargs):
        chosen = self._launch(*args, **kwargs)
        try:
            launcher = self._kernel[chosen] if isinstance(chosen, tuple) else self._kernel.forall(chosen)
        except (TypeError, ValueError) as error:
            said = f"the function in launch= returned {shown(chosen)}, which is no configuration"
            raise type(error)(f"{self._kernel.__qualname__}(): {said}") from error
        return launcher(*args, **kwargs)


enable_vectorcall(_Chosen, _Chosen.__call__)
