"""CPU and GPU under one name: ``fast_args(cuda=..., launch=...)``. The CPU's shim hands calls with tensors on a GPU over."""

from collections.abc import Callable

from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.omitted import OMITTED
from ..ground.safe_repr import shown
from . import native_launch
from .classify import has_interface
from .launcher import CudaLauncher

__all__ = ["Elsewhere"]


class Elsewhere:
    """The kernel for CUDA that stands beside one for the CPU, and how it is launched.

    Attributes
    ----------
    launcher : what makes its calls, also from native code.
    """

    def __init__(self, kernel, launch):
        self._kernel, self._cuda = kernel, kernel.cuda
        ours, theirs = kernel._parameters.names, self._cuda._parameters.names
        if ours != theirs:
            raise TypeError(
                f"fast_args(): {kernel.__qualname__}({', '.join(ours)}) and its kernel for CUDA "
                f"{self._cuda.__qualname__}({', '.join(theirs)}) have to have the same parameters"
            )
        if not callable(launch) and not isinstance(launch, tuple):
            raise TypeError(f"fast_args(): launch is (grid, block), or a function that returns it, not {shown(launch)}")
        self.launcher: Callable = _Chosen(self._cuda, launch) if callable(launch) else self._cuda[launch]

    def takes(self, bound: tuple) -> bool:
        """Whether there is an array among the arguments that only kernels for CUDA know: one with the CUDA array interface."""
        return any(map(has_interface, bound))

    def call(self, bound: tuple) -> None:
        """Make a call with arguments in the order of the parameters, omitted ones among them."""
        args, kwargs = self._given(bound)
        self.launcher(*args, **kwargs)

    def explain(self, bound: tuple):
        """What a call with these arguments would do."""
        args, kwargs = self._given(bound)
        return self._cuda.explain(*args, **kwargs)

    def _given(self, bound: tuple) -> tuple[tuple, dict]:
        """The arguments that are not omitted, by position up to the first that is."""
        names = self._kernel._parameters.names
        count = next((i for i, value in enumerate(bound) if value is OMITTED), len(bound))
        named = {name: value for name, value in zip(names[count:], bound[count:], strict=True) if value is not OMITTED}
        return bound[:count], named


class _Chosen(NativeCallable):
    """A launcher whose configuration a function chooses for each call."""

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, kernel, launch: Callable):
        self._kernel, self._launch = kernel, launch
        any_launcher: CudaLauncher = kernel[1, 1]  # which has the name of the method that is called
        self._any, self._context = any_launcher, any_launcher._context
        self._vectorcall = native_launch.vectorcall_own.address

    def _call_numba(self, /, *args, **kwargs):
        chosen = self._launch(*args, **kwargs)
        launcher = self._kernel[chosen] if isinstance(chosen, tuple) else self._kernel.forall(chosen)
        return launcher(*args, **kwargs)


enable_vectorcall(_Chosen)
