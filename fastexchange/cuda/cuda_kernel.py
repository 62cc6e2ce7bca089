"""``CudaKernel``: the kernel that ``fast_args`` makes of a ``@cuda.jit`` dispatcher."""

import functools
import operator
from typing import Any

from ..calls.kernel import Kernel, KernelCounts, kernel_of
from ..calls.options import KernelOptions, checked_mutates
from ..dispatch.runtime import runtime
from ..ground.cpython import NativeCallable
from ..ground.once import forkable_lock
from ..ground.parameters import Parameters
from ..ground.safe_repr import shown
from ..interpreter import DISABLED
from .computed import LaunchNotation
from .context import CudaContext
from .device_kernel import DeviceKernel
from .driver import driver
from .launcher import Configuration, CudaLauncher
from .streams import handle_of
from .targets import Target, target_of

__all__ = ["CudaKernel", "cuda_kernel_of"]

_MAX_LAUNCHERS = 4096
_MAX_DIMENSION = 2**32 - 1
_MAX_TASKS = 2**41  # the most threads in a block times the most blocks in a grid


class CudaKernel(Kernel, NativeCallable):
    """A ``@cuda.jit`` kernel that takes tensors of any framework. Made by :func:`~fastexchange.fast_args`.

    ``kernel[grid, block, stream, shared]`` is a :class:`CudaLauncher`; calling that launches the kernel.

    - `grid`, `block`: an int, or a tuple of up to three: blocks in the grid, threads in a block.
    - `stream`: None for the current stream of the tensors' framework (its ``current_work_stream``); else a stream of any
      package (numba, PyTorch, CuPy, cuda.core: anything with ``__cuda_stream__``) or the ``CUstream`` as an int.
    - `shared`: bytes of dynamic shared memory for each block.
    - `cluster`: blocks in a cluster, as `grid`, for numba-cuda-mlir.

    A launch returns before the kernel has run. As with every CUDA launch, keep the tensors and their memory until the stream
    has executed the kernel. Frameworks that allocate in the order of their streams, such as PyTorch, do that for tensors of the
    stream of the launch: those may be dropped at once.

    Attributes
    ----------
    dispatcher : the ``@cuda.jit`` dispatcher.
    py_func : the Python function.
    """

    __slots__ = ("_native",)

    def __init__(self, dispatcher: Any, kernel_options: KernelOptions, target: Target):
        functools.update_wrapper(self, dispatcher.py_func)
        self.dispatcher = dispatcher
        self.py_func = dispatcher.py_func
        self.target = target
        self._slow_calls = 0
        self._kernel_options = kernel_options
        if kernel_options != KernelOptions(kernel_options.allows_grad, kernel_options.storage):
            raise TypeError("fast_args(): a kernel for CUDA has no returns= or cuda=; out=, mutates= and backward= need launch=")
        self._parameters, self._outputs = Parameters(self.py_func), None
        if self._parameters.variadic is not None:
            parameter = f"*{self._parameters.variadic}"
            raise TypeError(f"fast_args(): {self.__qualname__}() has {parameter}: a kernel for CUDA has no such parameter")
        self._native = CudaContext(self._parameters, self.__qualname__, kernel_options.allows)
        self._context = self._native.address
        self._vectorcall = 0  # calls are made by launchers
        self._launchers: dict[tuple, CudaLauncher] = {}
        self._for_tasks: dict[tuple, CudaLauncher] = {}
        self._lock = forkable_lock()
        self.why_not = "FASTEXCHANGE_DISABLE is set" if DISABLED else target.why_not(dispatcher)
        """Why the package makes all launches of this kernel; "" if it does not."""

    def _element_of(self, field: int):
        return self.target.element_of(field, self.storage)

    def __call__(self, /, *args, **kwargs):
        name = self.__qualname__
        raise ValueError(f"{name}() is a kernel for CUDA: say how to launch it, {name}[grid, block](...)")

    def __getitem__(self, configuration) -> CudaLauncher:
        """Return the launcher for ``[grid, block, stream, shared, cluster]``; only `grid` and `block` are required."""
        try:
            return self._launchers[configuration]
        except (KeyError, TypeError):
            pass
        if type(configuration) is not tuple or not 2 <= len(configuration) <= 5:
            raise ValueError(
                f"{self.__qualname__}[...] takes [grid, block], [grid, block, stream], [grid, block, stream, shared] or "
                f"[grid, block, stream, shared, cluster], not {shown(configuration)}"
            )
        return self._remember(self._launchers, configuration, self._make(*configuration))

    def configure(self, griddim, blockdim, stream=None, sharedmem: int = 0, cluster=None) -> CudaLauncher:
        """``self[griddim, blockdim, stream, sharedmem, cluster]``."""
        return self[griddim, blockdim, stream, sharedmem, cluster]

    def forall(self, ntasks: int, tpb: int = 0, stream=None, sharedmem: int = 0) -> CudaLauncher:
        """Return a launcher with a thread for each of `ntasks` tasks, in blocks of `tpb` threads.

        `tpb` 0: the block size for which the driver computes the highest occupancy. The kernel has to compare its
        ``cuda.grid(1)`` with `ntasks`. With 0 tasks nothing is launched.
        """
        key = (ntasks, tpb, stream, sharedmem)
        if type(ntasks) is type(tpb) is int:
            try:
                return self._for_tasks[key]
            except (KeyError, TypeError):
                pass
        name = f"{self.__qualname__}.forall()"
        tasks, threads = _index(name, "ntasks", ntasks), _index(name, "tpb", tpb)
        if tasks < 0 or threads < 0:
            raise ValueError(f"{name}: ntasks and tpb are numbers of tasks and threads, not {tasks} and {threads}")
        if tasks > _MAX_TASKS or threads > _MAX_DIMENSION:
            raise ValueError(f"{name}: no grid has a thread for each of {tasks} tasks, {threads} in a block")
        made = self._make((1, 1, 1), (threads, 1, 1), stream, sharedmem, tasks=tasks)
        return self._remember(self._for_tasks, (tasks, threads, *key[2:]), made)

    def _make(self, grid, block, stream=None, shared=0, cluster=None, tasks: int = -1, notation=None) -> CudaLauncher:
        name = f"{self.__qualname__}[...]"
        bytes_shared = _index(name, "shared", 0 if shared is None else shared)
        if not 0 <= bytes_shared <= _MAX_DIMENSION:
            raise ValueError(f"{name}: shared is a number of bytes, not {bytes_shared}")
        return CudaLauncher(self, Configuration(
            _dimensions(name, "grid", grid), _dimensions(name, "block", block),
            None if stream is None else handle_of(name, stream), bytes_shared,
            None if cluster is None else _dimensions(name, "cluster", cluster), tasks, notation,
        ), stream)  # fmt: skip

    def _computed(self, launch: "str | tuple", out: str | None, what: str) -> CudaLauncher:
        """Return the launcher for a configuration in the notation of shapes. See ``computed.LaunchNotation``."""
        if isinstance(launch, tuple) and not 2 <= len(launch) <= 5:
            raise ValueError(f"{what}: launch is (grid, block), optionally with stream, shared and cluster, not {shown(launch)}")
        notation = LaunchNotation(launch if isinstance(launch, str) else launch[:2], out, self._parameters.names, what)
        if isinstance(launch, str):
            return self._make(1, 0, tasks=0, notation=notation)
        further: dict[str, Any] = dict(zip(("stream", "shared", "cluster"), launch[2:], strict=False))
        return self._make(1, 1, **further, notation=notation)

    def _remember(self, launchers: dict[tuple, CudaLauncher], key: tuple, launcher: CudaLauncher) -> CudaLauncher:
        try:
            hash(key)
        except TypeError:  # a list of dimensions, a stream without a hash
            return launcher
        with self._lock:
            if len(launchers) >= _MAX_LAUNCHERS:
                del launchers[next(iter(launchers))]
            return launchers.setdefault(key, launcher)

    def _beside(self, kernel, launch) -> DeviceKernel:
        """Return the ``DeviceKernel`` by which `kernel`, for the CPU, passes calls to this one. `launch`: its configuration."""
        return DeviceKernel(kernel, launch)

    def __reduce__(self):
        return cuda_kernel_of, (self.dispatcher, self._kernel_options)

    def __getattr__(self, name: str):
        if name.startswith("_") or "dispatcher" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self.dispatcher, name)

    def recompile(self) -> None:
        """Call ``dispatcher.recompile()``, after a global of the function has changed. Later launches use the new code."""
        try:
            self.dispatcher.recompile()
        finally:
            self._native.forget()

    def counts(self) -> KernelCounts:
        """Count the launches on the fast path, the launches on the slow path, and the compiled signatures."""
        return KernelCounts(self._native.native.calls, self._slow_calls, len(self.dispatcher.overloads))

    def bind(self, /, *args, **kwargs):
        """A bound launch has a launch configuration: ``kernel[grid, block].bind(...)``."""
        raise TypeError(f"{self.__qualname__}.bind(): say how to launch it first, {self.__qualname__}[grid, block].bind(...)")

    def precompile(self, /, *calls) -> list[tuple]:
        """Compile for signatures or example arguments, without a launch. See :meth:`FastKernel.precompile`.

        The kernel is compiled for the device of the example's tensors, or for the current one, and loaded there. Its package
        keeps it on disk where the dispatcher has ``cache=True``. Raises TypeError for an example that only the package launches.
        """
        from .launch_ahead import precompile

        return precompile(self, calls)

    def as_torch_op(
        self, name: str, *, launch, out: str | None = None, mutates=None, cpu=None, backward=None, setup_context=None,
        vmap="loop", replace: bool = False,
    ):  # fmt: skip
        """Register the kernel as an operator of PyTorch, for tensors on CUDA devices. See :meth:`FastKernel.as_torch_op`.

        Parameters
        ----------
        launch : the configuration: ``(grid, block)``, optionally with stream and shared memory, or a number of tasks for
            :meth:`forall` as a text. Grid and block may be texts, too, in the notation of `out`, whose names they have:
            ``"n"``, ``("(m + 15) // 16, n", (16, 16))``; each launch computes them natively. Without `out` a text has an arrow,
            ``"x[n] -> n"``. Or a function of Python's that is called with the arguments and outputs, and returns a configuration
            of numbers. Without a stream the kernel runs on PyTorch's current stream.
        out : the outputs and their shapes, as in ``fast_args(out=…)``. PyTorch allocates them, on the inputs' device.
        cpu : a kernel of ``fast_args`` with the same parameters, for tensors on the CPU; its ``out=`` is the operator's.

        The others are those of a kernel for the CPU. A backward pass is a function, or operators of such kernels.
        """
        launched = self._launched(launch, out, mutates, cpu, f"{self.__qualname__}.as_torch_op()")
        return launched.as_torch_op(name, backward=backward, setup_context=setup_context, vmap=vmap, replace=replace)

    def _launched(self, launch, out: str | None, mutates, cpu, what: str):
        """The kernel as an operator of PyTorch calls it. See :meth:`as_torch_op`."""
        from .launched_kernel import LaunchedKernel

        mutates = None if mutates is None else checked_mutates(mutates, what)
        return LaunchedKernel(self, self._kernel_options._replace(launch=launch, out=out, mutates=mutates), cpu, what)

    def explain(self, /, *args, **kwargs):
        """Explain a launch with these arguments and any configuration. See :meth:`CudaLauncher.explain`."""
        return self[1, 1].explain(*args, **kwargs)

    def _bound_arguments(self, args: tuple, kwargs: dict) -> tuple:
        """The arguments of a call in parameter order, with defaults."""
        bound = self._parameters.bind(*args, **kwargs)
        defaults = self._parameters.defaults
        if not defaults:
            return bound
        from ..ground.omitted import OMITTED

        return tuple(defaults[i] if value is OMITTED else value for i, value in enumerate(bound))

    def _default_device(self) -> int:
        """The device of a launch without tensors."""
        return driver().current_device()


def cuda_kernel_of(dispatcher: Any, kernel_options: KernelOptions) -> CudaKernel:
    """Return the only kernel of a ``@cuda.jit`` dispatcher with these options."""
    if not runtime().is_native and not DISABLED:
        raise TypeError(f"fast_args(): native code makes no launches here, so use the dispatcher: {runtime().why_not_native}")
    return kernel_of(dispatcher, kernel_options, _new_kernel)


def _new_kernel(dispatcher: Any, kernel_options: KernelOptions) -> CudaKernel:
    target = target_of(dispatcher)
    assert target is not None
    return CudaKernel(dispatcher, kernel_options, target)


def _index(name: str, what: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {what} is an int, not {shown(value)}") from None


def _dimensions(name: str, what: str, value) -> tuple[int, int, int]:
    """Return up to three numbers as three."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{name}: {what} has one to three dimensions, not {len(given)}")
    numbers = [_index(name, what, each) for each in given] + [1, 1]
    if any(not 0 <= number <= _MAX_DIMENSION for number in numbers):
        raise ValueError(f"{name}: {what} is made of numbers from 0 to {_MAX_DIMENSION}, not {shown(value)}")
    return numbers[0], numbers[1], numbers[2]
