"""``CudaLauncher``: a CUDA kernel with a launch configuration. Native code makes its launches."""

from typing import Any, NamedTuple

from .._abi import ffi
from ..ground.cpython import NativeCallable, enable_vectorcall
from ..ground.native import address_of
from . import launch_structs, native_launch, resets
from .computed import LaunchNotation
from .streams import DEFAULT_STREAMS, default_stream

__all__ = ["Configuration", "CudaLauncher"]


class Configuration(NamedTuple):
    """How a kernel is launched."""

    grid: tuple[int, int, int]
    """Blocks in the grid; not used for tasks."""
    block: tuple[int, int, int]
    """Threads in a block; for tasks 0 means the best number."""
    stream: int | None
    """The ``CUstream``; None: the current stream of the tensors' producer."""
    shared: int
    """Bytes of dynamic shared memory for each block."""
    cluster: tuple[int, int, int] | None
    """Blocks in a cluster."""
    tasks: int
    """The number of tasks, a thread each; -1: no tasks, `grid` and `block` apply."""
    notation: LaunchNotation | None = None
    """What computes grid and block, or the number of tasks, of each launch; then those here are none."""

    def __str__(self):
        size = f"for {self.tasks} tasks" if self.tasks >= 0 else f"grid {self.grid}"
        if self.tasks < 0 or self.block[0]:
            size += f", block {self.block}"
        if self.notation is not None:
            size = f"launch={self.notation}"
        stream = "that of the tensors' framework" if self.stream is None else f"{self.stream:#x}"
        cluster = f", cluster {self.cluster}" if self.cluster else ""
        return f"{size}, stream {stream}, {self.shared} bytes of dynamic shared memory{cluster}"


class CudaLauncher(NativeCallable):
    """A CUDA kernel with a launch configuration, ``kernel[grid, block, stream, shared]``. Calling it launches the kernel.

    A call returns None as soon as the driver has accepted the launch. Raises TypeError for arguments that do not fit, BufferError
    for tensors that the kernel must not get (on the CPU, on different devices, tracked by autograd …), OverflowError for a number
    that a declared parameter cannot hold, and :class:`~fastexchange.CudaError` if the driver refuses. Then nothing is launched.

    Attributes
    ----------
    kernel : the :class:`~fastexchange.CudaKernel`.
    configuration : how the kernel is launched, a named tuple: ``grid``, ``block``, ``stream``, ``shared``, ``cluster``.
    """

    __slots__ = ("__dict__", "__weakref__")

    def __init__(self, kernel, configuration: Configuration, stream: Any = None):
        self.kernel = kernel
        self.configuration = configuration
        self._stream = stream  # keeps the stream alive while its handle is used
        self._native = ffi.new("fx_launcher *")
        self._fill(self._native)
        self._context = address_of(self._native)
        self._vectorcall = native_launch.own_call() if kernel.why_not else native_launch.vectorcall.address
        self._callbacks: list | None = None
        self._is_retired = False
        self._seen: Any = None
        """Makes a launch that a framework has to see, with these arguments; NotImplemented for any other. None: none is seen."""
        if configuration.stream is not None and configuration.stream not in DEFAULT_STREAMS:
            resets.retire_at_reset(self)

    def _fill(self, native) -> None:
        grid, block, stream, shared, cluster, tasks, notation = self.configuration
        native.context = self.kernel._native.address
        native.grid, native.block = grid, block
        native.stream = launch_structs.LAUNCHER_STREAM_OF_PRODUCERS if stream is None else stream
        native.default_stream = default_stream()
        native.shared, native.tasks = shared, tasks
        native.cluster = cluster or (0, 0, 0)
        if notation is not None:
            self._program = ffi.new("int64_t[]", notation.words)
            native.program = address_of(self._program)

    def _on_stream(self, stream: int):
        """A copy of the native configuration for one launch on this stream. The caller orders the stream among others."""
        native = ffi.new("fx_launcher *", self._native[0])
        native.stream, native.is_mixed = stream, 1
        return native

    def __call__(self, /, *args, **kwargs):
        """Make the launch where native code does not."""
        return self._call_numba(*args, **kwargs)

    def __repr__(self):
        return f"<{self.kernel!r}[{self.configuration}]>"

    def __reduce__(self):
        if self.configuration.stream is not None:
            raise TypeError("a launcher with a stream cannot be pickled or copied: the stream is one of this process")
        return _new_launcher, (self.kernel, self.configuration)

    @property
    def pre_launch_callbacks(self) -> list:
        """Functions ``(kernel, configuration)`` that the kernel's package calls before each launch (numba-cuda).

        After the first access the package makes all launches of this launcher, because only it knows the functions' arguments.
        """
        if self._callbacks is None:
            from .own_launch import own_launch

            if not hasattr(own_launch(self.kernel, self.configuration, self.configuration.stream), "pre_launch_callbacks"):
                raise AttributeError(f"{self.kernel.target.name} has no callbacks before a launch")
            self._callbacks = []
            self._vectorcall = native_launch.own_call()
        return self._callbacks

    def _retire(self) -> None:
        """Refuse further launches: a context has been reset, which may have destroyed the stream."""
        self._is_retired = True
        self._vectorcall = native_launch.own_call()
        for cache in (self.kernel._launchers, self.kernel._for_tasks):
            for key, launcher in list(cache.items()):
                if launcher is self:  # another stream may have the same handle
                    cache.pop(key, None)

    def _check(self) -> None:
        if self._is_retired:
            from .driver import driver

            raise driver().reset_since(self._not_launched, "make a new stream and a new launcher")

    def _configured(self, arguments: tuple) -> Configuration:
        """The configuration of a launch with these arguments. Raises TypeError or ValueError if there is none."""
        notation = self.configuration.notation
        return self.configuration if notation is None else notation.configured(
            self.configuration, arguments, self.kernel.__qualname__
        )

    @property
    def _not_launched(self) -> str:
        """The beginning of an error's message: the kernel and the configuration that were not launched."""
        return f"{self.kernel.__qualname__}() was not launched ({self.configuration})"

    @property
    def why_not(self) -> str:
        """Why the package makes all launches of this launcher; "" if it does not."""
        return self.kernel.why_not or ("" if self._callbacks is None else "the launcher has pre_launch_callbacks")

    def bind(self, /, *args, **kwargs):
        """Bind the arguments: returns a :class:`~fastexchange.BoundCudaLaunch`, which launches the kernel with them."""
        from ..calls.bound_launch import BoundCudaLaunch

        self._check()
        return BoundCudaLaunch(self.kernel, args, kwargs, self)

    def explain(self, /, *args, **kwargs):
        """Explain a launch with these arguments without making it. Returns a ``CallExplanation``; print it."""
        from .explaining import explain_launch

        self._check()
        return explain_launch(self, self.kernel._bound_arguments(args, kwargs))

    # ---- called by native code

    def _call_slowly(self, /, *args, **kwargs):
        """Learn an unknown launch, and make it."""
        from .resolve_launch import call

        return self._call_by(call, args, kwargs)

    def _call_by(self, call, args: tuple, kwargs: dict):
        self._check()
        bound = self.kernel._bound_arguments(args, kwargs)
        if self._seen is not None and (result := self._seen(bound)) is not NotImplemented:
            return result
        self.kernel._slow_calls += 1
        return call(self, bound)

    def _call_numba(self, /, *args, **kwargs):
        """Make a launch that native code leaves to Python: an argument that it cannot read, or a launch for the package."""
        from .resolve_launch import call_otherwise

        return self._call_by(call_otherwise, args, kwargs)

    def _refused(self, position: int, errors: list[BaseException]):
        self.kernel._refused(position, errors)

    def _driver_error(self, code: int):
        """Raise the driver's error for a launch that it has refused."""
        from .driver import driver

        raise driver().launch_error(code, self._not_launched)


def _new_launcher(kernel, configuration: Configuration) -> CudaLauncher:
    return CudaLauncher(kernel, configuration)


enable_vectorcall(CudaLauncher, CudaLauncher.__call__)
