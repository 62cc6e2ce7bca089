"""CUDA's driver: the functions that native code calls, the devices' primary contexts, and the driver's errors.

It is reached by ``cuda.bindings``, NVIDIA's Python bindings, on which both kernel packages depend.

Source: CUDA Driver API 13.
"""

import contextlib
import os
from typing import Any, NamedTuple

from .._abi import ffi
from ..dispatch.runtime import runtime
from ..dispatch.structs import MAX_DEVICES
from ..ground.native import address_of
from ..ground.once import cached_property, once
from . import resets

__all__ = ["CudaError", "Driver", "driver"]

_FUNCTIONS = {
    "launch": "cuLaunchKernel",
    "launch_extended": "cuLaunchKernelEx",
    "get_current": "cuCtxGetCurrent",
    "push_current": "cuCtxPushCurrent",
    "pop_current": "cuCtxPopCurrent",
    "get_device": "cuCtxGetDevice",
    "get_attribute": "cuPointerGetAttribute",
}
_SIGNATURES_OF = 12000
"""The version of CUDA that defines the functions' signatures: newer versions change some (``cuCtxGetDevice``, 13.0)."""
_STICKY = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
"""Errors after which, by the driver's documentation, the process cannot use CUDA any more."""
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_ABSENT = (500, 801)  # CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_SUPPORTED
_NO_CONTEXT, _IS_DESTROYED = 201, 709  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_CONTEXT_IS_DESTROYED
_ADVICE = {
    1: "the grid, the block or the shared memory is beyond the device's limits, or empty",
    2: "the device has no memory left",
    209: "the kernel was compiled for another architecture than this device's",
    701: "a block needs more registers than the device has: use fewer threads, or cuda.jit(max_registers=...)",
    709: "it has been reset, perhaps by cuda.close(); its memory and streams are gone; the next launch loads the kernel again",
    720: "a cooperative launch has more blocks than can run at the same time",
}


class CudaError(RuntimeError):
    """CUDA's driver has refused a launch, or a call that a launch needs.

    Attributes
    ----------
    code : the ``CUresult``, a number.
    name : its name, for example ``"CUDA_ERROR_INVALID_VALUE"``.
    is_sticky : whether all further calls fail, so that the process has to be restarted.
    """

    _names_launch = False

    def __init__(self, message: str, code: int = 999, name: str = "CUDA_ERROR_UNKNOWN", is_sticky: bool = False):
        super().__init__(message)
        self.code, self.name, self.is_sticky = code, name, is_sticky

    def __reduce__(self):
        return type(self), (str(self), self.code, self.name, self.is_sticky)

    def _add_launch(self, what: str) -> None:
        """Put `what`, which names the launch, in front of the message, unless it names one already."""
        if not self._names_launch:
            self.args = (f"{what}: {self}",)
            self._names_launch = True


class Memory(NamedTuple):
    """The kind of memory at an address."""

    device: int
    is_managed: bool
    is_on_device: bool
    """Whether it is a device's memory, not the host's."""


class Driver:
    """CUDA's driver in this process, and the ``fx_cuda`` by which native code calls it."""

    def __init__(self):
        try:
            from cuda.bindings import driver as bindings
        except ImportError as error:
            raise ImportError(f"kernels for CUDA need the package cuda-bindings, which cannot be imported: {error}") from error
        self.bindings: Any = bindings
        self._process = os.getpid()
        self.native = ffi.new("fx_cuda *")
        try:
            self.call("cuInit", 0)
            self.device_count = self.call("cuDeviceGetCount")
        except CudaError:
            raise
        except Exception as error:  # cuda-bindings finds no libcuda.so.1
            raise CudaError(f"CUDA's driver cannot be used: {error}", 35, "CUDA_ERROR_INSUFFICIENT_DRIVER") from error
        if self.device_count == 0:
            raise CudaError("there is no CUDA device: CUDA_ERROR_NO_DEVICE", 100, "CUDA_ERROR_NO_DEVICE")
        version = min(self.call("cuDriverGetVersion"), _SIGNATURES_OF)
        for field, name in _FUNCTIONS.items():
            setattr(self.native, field, int(self.call("cuGetProcAddress", name.encode(), version, 0)[0]))
        self._get_attribute = ffi.cast("int (*)(void *, int, uint64_t)", self.native.get_attribute)
        which = bindings.CUpointer_attribute
        self._pointer_attributes = [
            int(each) for each in (
                which.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, which.CU_POINTER_ATTRIBUTE_IS_MANAGED,
                which.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            )
        ]  # fmt: skip
        self._kind_of_device = int(bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        runtime().native.cuda = address_of(self.native)

    def call(self, name: str, *args):
        """Call a function of the driver and return its result. Raises CudaError for any code but success."""
        code, *results = getattr(self.bindings, name)(*args)
        if int(code):
            raise self.error(int(code), name)
        return results[0] if len(results) == 1 else tuple(results)

    def name_of(self, code: int) -> str:
        """The name of a ``CUresult``."""
        result = self._result(code)
        found, name = self.bindings.cuGetErrorName(result)
        if not int(found) and name and int(result) == code:
            return name.decode()
        return result.name if int(result) == code else f"CUresult {code}"  # the bindings may be newer than the driver

    def _result(self, code: int):
        try:
            return self.bindings.CUresult(code)
        except ValueError:  # a code that these bindings do not know
            return self.bindings.CUresult.CUDA_ERROR_UNKNOWN

    def launch_error(self, code: int, what: str) -> CudaError:
        """Make the exception for a ``CUresult`` of a launch. `what` names the launch."""
        made = self.error(code, what)
        made._names_launch = True
        return made

    def error(self, code: int, what: str) -> CudaError:
        """Make the exception for a ``CUresult``. `what`: what has failed."""
        name = self.name_of(code)
        _, text = self.bindings.cuGetErrorString(self._result(code))
        message = f"{what}: {name}"
        if text:
            message += f", {text.decode()}"
        if code == _IS_DESTROYED:
            resets.forget_all()
        if os.getpid() != self._process:
            message += " (CUDA was used before this process was forked, and cannot be used here: start processes by spawn)"
        elif code in _ADVICE:
            message += f" ({_ADVICE[code]})"
        is_sticky = code in _STICKY
        if is_sticky:
            message += (
                "; this error is sticky: an earlier kernel, not necessarily this one, has broken the context, and all further "
                "calls will fail: restart the process, and find the kernel with compute-sanitizer"
            )
        return CudaError(message, code, name, is_sticky)

    def reset_since(self, what: str, advice: str) -> CudaError:
        """Make the exception for an object of a context that has been reset. `what`: what has failed."""
        name = self.name_of(_IS_DESTROYED)
        why = "a context has been reset since, perhaps by cuda.close()"
        return CudaError(f"{what}: {name}: {why}; {advice}", _IS_DESTROYED, name)

    def has(self, device: int) -> bool:
        """Whether there is a device with this number."""
        return 0 <= device < min(self.device_count, MAX_DEVICES)

    def context(self, device: int) -> int:
        """Retain a device's primary context. Returns its address, by which launches make it current."""
        if not self.has(device):
            raise BufferError(f"there is no CUDA device {device}: this process sees {self.device_count}")
        if not self.native.contexts[device]:
            found = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
            self.native.contexts[device] = int(found)
        return self.native.contexts[device]

    def current_device(self) -> int:
        """The device of the thread's current context; the default device if there is none, or it has been reset."""
        code, device = self.bindings.cuCtxGetDevice()
        return self.native.default_device if int(code) else int(device)

    @contextlib.contextmanager
    def on(self, device: int):
        """Context manager: make a device's primary context current."""
        self.call("cuCtxPushCurrent", self.bindings.CUcontext(self.context(device)))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    @contextlib.contextmanager
    def as_before(self):
        """Context manager: restore the thread's current context at the end.

        A package that uses a device for the first time replaces the current context by the device's.
        """
        before = self.call("cuCtxGetCurrent")
        try:
            yield
        finally:
            if int(self.call("cuCtxGetCurrent")) != int(before):
                self.call("cuCtxSetCurrent", before)

    def memory_at(self, pointer: int) -> Memory:
        """Return the memory at an address. Calls the driver directly, not by the bindings, because each launch needs it."""
        words = ffi.new("int[3]")  # not shared: the calls release the GIL
        code = self._attributes_of(pointer, words)
        if code in (_NO_CONTEXT, _IS_DESTROYED):  # any context will do, but the thread has none, or a reset one
            with self.on(self.native.default_device):
                code = self._attributes_of(pointer, words)
        if code:
            raise self.error(code, "cuPointerGetAttribute")
        number, is_managed, kind = words
        return Memory(number, bool(is_managed), kind == self._kind_of_device)

    def _attributes_of(self, pointer: int, words) -> int:
        for index, attribute in enumerate(self._pointer_attributes):
            code = self._get_attribute(words + index, attribute, pointer)
            if code:
                return code
        return 0

    def parameter_count(self, function: int) -> int | None:
        """The number of parameters of a ``CUfunction``; None if this driver, before 13.2, or its bindings cannot tell."""
        answer = self._answer("cuFuncGetParamCount", function)
        return None if answer is None else int(answer[0])

    def parameter(self, function: int, index: int) -> tuple[int, int] | None:
        """(offset, size) in bytes of a parameter of a ``CUfunction``; None if this driver, before 12.4, cannot tell.

        Also None if there is no such parameter: that is an error of the driver's, which compute-sanitizer reports.
        """
        answer = self._answer("cuFuncGetParamInfo", function, index)
        return None if answer is None else (int(answer[0]), int(answer[1]))

    def _answer(self, name: str, function: int, *args) -> list | None:
        """What the driver says of a ``CUfunction``; None if it cannot tell. Raises CudaError for any other failure."""
        ask = getattr(self.bindings, name, None)
        if ask is None:
            return None
        try:
            code, *answer = ask(self.bindings.CUfunction(function), *args)
        except RuntimeError:  # the bindings are newer than the driver, which lacks the function
            return None
        if int(code) in (_INVALID_VALUE, *_ABSENT):
            return None
        if int(code):
            raise self.error(int(code), name)
        return answer

    @cached_property
    def attributes(self):
        """``CUfunction_attribute``."""
        return self.bindings.CUfunction_attribute

    def attribute(self, function: int, name: str) -> int:
        """An attribute of a ``CUfunction``, for example ``"SHARED_SIZE_BYTES"``."""
        which = getattr(self.attributes, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self.call("cuFuncGetAttribute", which, self.bindings.CUfunction(function)))

    def set_attribute(self, function: int, name: str, value: int) -> None:
        """Set an attribute of a ``CUfunction``."""
        which = getattr(self.attributes, f"CU_FUNC_ATTRIBUTE_{name}")
        if value >= 2**31:  # the driver takes an int
            raise self.error(1, "cuFuncSetAttribute")
        self.call("cuFuncSetAttribute", self.bindings.CUfunction(function), which, value)

    def best_block(self, function: int, shared: int) -> int:
        """The block size with the highest occupancy of a ``CUfunction``, in threads."""
        block_size_limit = 1024
        _, block = self.call(
            "cuOccupancyMaxPotentialBlockSize", self.bindings.CUfunction(function), None, shared, block_size_limit
        )
        if not block:
            what = f"no block with {shared} bytes of dynamic shared memory can run (cuOccupancyMaxPotentialBlockSize)"
            raise self.error(701, what)
        return int(block)


@once
def driver() -> Driver:
    """The process's driver. Raises CudaError if there is no driver or no device."""
    return Driver()
