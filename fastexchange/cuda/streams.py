"""Streams: the stream of a launch, and its order among the work on other streams.

A launch without a stream of its own is on the current stream of the tensors' producer. If producers have different streams, the
launch is on the first one's. Events order it: it waits for the work on the other streams, and these wait for it.

Source: DLPack 1.3, ``DLPackCurrentWorkStream``; CUDA Array Interface, version 3, "Synchronization"; the
``__cuda_stream__`` protocol.
"""

import contextlib
import ctypes
import functools
import os
from typing import Any

import numpy as np

from .._abi import ffi
from ..ground.dlpack import CUDA
from ..ground.native import address_of
from ..ground.safe_repr import shown
from . import launch_structs
from .driver import CudaError, Driver, driver
from .targets import modules_of_packages

__all__ = [
    "DEFAULT_STREAMS", "default_stream", "explicit_handle", "handle_of", "in_order", "is_same_stream", "stream_of_producer",
]  # fmt: skip

_CURRENT_WORK_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.c_void_p)
_PER_THREAD = 2  # CU_STREAM_PER_THREAD
DEFAULT_STREAMS = (0, launch_structs.LEGACY_STREAM, _PER_THREAD)
"""The ``CUstream`` handles that every context has."""
_NUMBAS = modules_of_packages("driver")


@functools.cache
def default_stream() -> int:
    """The ``CUstream`` of work without a stream, or with stream 0.

    It is the legacy default stream, or, if the process was started with ``CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1``, the
    thread's default stream, as in CUDA Python and the packages.
    """
    return _PER_THREAD if int(os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM") or 0) else 0


def is_same_stream(stream: int, other: int) -> bool:
    """Whether two ``CUstream`` handles mean the same stream."""
    return launch_structs.is_same_stream.py_func(stream, other)


def explicit_handle(stream: int) -> int:
    """Translate a ``CUstream`` for packages that take 0 for :func:`default_stream`. The driver takes 0 for the legacy stream."""
    return launch_structs.LEGACY_STREAM if stream == 0 and default_stream() else stream


def handle_of(name: str, stream: Any) -> int:
    """The ``CUstream`` of a stream of any package, for the function `name`.

    The int 0 means :func:`default_stream`, and so does the handle 0 of the packages' streams. The handle 0 of any other object,
    such as PyTorch's streams, means the legacy default stream.
    """
    if isinstance(stream, bool):
        raise TypeError(f"{name}: stream is a stream, its handle or None, not {shown(stream)}")
    says_which = False
    is_numbas = type(stream).__module__ in _NUMBAS  # the handle of their default stream is 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        found = protocol() if callable(protocol) else protocol
        try:
            version, handle = found
        except (TypeError, ValueError):
            raise TypeError(f"{name}: __cuda_stream__ of {shown(stream)} is {shown(found)}, not (0, handle)") from None
        says_which = True
        if version != 0:
            raise TypeError(f"{name}: {shown(stream)} has __cuda_stream__ of version {version}, only version 0 is known")
    else:
        handle = stream
        for attribute in ("cuda_stream", "handle", "ptr"):  # PyTorch's, numba's, CuPy's
            if hasattr(stream, attribute):
                handle, says_which = getattr(stream, attribute), True
                break
        handle = getattr(handle, "value", handle)
        handle = 0 if handle is None else handle
    is_number = hasattr(type(handle), "__index__") or type(handle).__name__ == "CUstream"
    if not is_number or isinstance(handle, (bool, np.bool_)):
        raise TypeError(f"{name}: stream is a stream, its handle or None, not {shown(stream)}")
    number = int(handle)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name}: {number} is no handle of a stream")
    return number if number or (says_which and not is_numbas) else default_stream()


def stream_of_producer(function: int, device: int) -> int:
    """Call a producer's ``current_work_stream``, at the address `function`, for a CUDA device."""
    out = ffi.new("void **")
    if _CURRENT_WORK_STREAM(function)(CUDA, device, address_of(out)):
        raise BufferError(f"a producer's current_work_stream failed for CUDA device {device} and did not say why")
    return int(ffi.cast("intptr_t", out[0]))


def order(device: int, later: int, earlier: int) -> None:
    """Let future work on the stream `later` wait for the present work on the stream `earlier`."""
    if is_same_stream(later, earlier):
        return
    cuda: Driver = driver()
    with cuda.on(device):
        flags = cuda.bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING
        event = cuda.call("cuEventCreate", int(flags))
        try:
            cuda.call("cuEventRecord", event, cuda.bindings.CUstream(explicit_handle(earlier)))
            cuda.call("cuStreamWaitEvent", cuda.bindings.CUstream(explicit_handle(later)), event, 0)
        finally:
            cuda.call("cuEventDestroy", event)  # the driver destroys it when nothing waits for it any more


@contextlib.contextmanager
def in_order(launcher, device: int, streams: list[int]):
    """Context manager: the first stream of a launch waits for the others, and at the end these wait for the first.

    Raises CudaError; an error at the end says that the launch has been made.
    """
    if len(streams) < 2:
        yield
        return
    try:
        for other in streams[1:]:
            order(device, streams[0], other)
    except CudaError as error:
        error._add_launch(f"{launcher._not_launched}, because it cannot wait for its tensors' other streams")
        raise
    yield
    try:
        for other in streams[1:]:
            order(device, other, streams[0])
    except CudaError as error:
        name = f"{launcher.kernel.__qualname__}()"
        error._add_launch(f"{name} was launched ({launcher.configuration}), but its tensors' other streams cannot wait for it")
        raise
