"""``@cuda.jit`` kernels as operators of PyTorch: ``cuda_kernel.as_torch_op``."""

import functools
from typing import Any

from ..calls.kernel import FastKernel, Kernel
from ..calls.options import OptionsOf, checked_mutates
from ..cuda.device_kernel import launcher_of
from ..ground.omitted import OMITTED
from ..ground.safe_repr import shown
from .schema import fake_of, schema_of

__all__ = ["LaunchedKernel"]


class LaunchedKernel(Kernel):
    """A kernel for CUDA as an operator calls it: launched by a configuration, with outputs that PyTorch has allocated.

    Attributes
    ----------
    cuda_kernel : the :class:`~fastexchange.CudaKernel`.
    on_cpu : the kernel that gets the calls with tensors on the CPU, or None.
    """

    _vectorcall = 0  # PyTorch's dispatcher makes the calls

    def __init__(self, kernel, launch, out: str | None, mutates, on_cpu, what: str):
        if on_cpu is not None:
            if not isinstance(on_cpu, FastKernel):
                raise TypeError(f"{what}: cpu is a kernel for the CPU, made by fast_args, not {shown(on_cpu)}")
            if on_cpu._parameters.names != kernel._parameters.names or (out is not None and out != on_cpu.out):
                raise ValueError(f"{what}: cpu is {on_cpu!r}, which has to have the same parameters and out=")
            out, mutates = on_cpu.out, on_cpu.mutates if mutates is None else mutates
        self.cuda_kernel, self.on_cpu, self.py_func, self.__qualname__ = kernel, on_cpu, kernel.py_func, kernel.__qualname__
        self._launch, self._launcher = launch, launcher_of(kernel, launch, what, out)
        self._kernel_options = kernel._kernel_options._replace(
            out=out, mutates=None if mutates is None else checked_mutates(mutates, what)
        )
        declared = OptionsOf(self._kernel_options, kernel.py_func)
        self._pattern, self._parameters = declared.pattern, declared.parameters
        self._key = kernel, launch, on_cpu, self._kernel_options

    @functools.cached_property
    def _empty(self):
        """Makes the outputs of a call with these arguments."""
        return fake_of(self, schema_of(self.py_func, self._pattern, self.mutates or (), self.__qualname__))

    def __call__(self, /, *args, **kwargs):
        """Allocate the outputs, and launch the kernel. Returns the outputs; the stream may not have executed it yet."""
        made = self._empty(*args, **kwargs)
        bound = self._parameters.bind(*args, **kwargs)
        outputs: tuple[Any, ...] = () if made is None else made if isinstance(made, tuple) else (made,)
        given = [
            self._parameters.defaults.get(i, value) if value is OMITTED else value
            for i, value in enumerate(bound[: len(bound) - len(outputs)])
        ]
        self._launcher(*given, *outputs)
        return made

    def __eq__(self, other):
        return isinstance(other, LaunchedKernel) and other._key == self._key

    def __hash__(self):
        return hash(self.cuda_kernel)
