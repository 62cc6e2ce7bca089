"""What is launched: kernels without code, memory, arrays of the packages' own; and proofs of cached launches."""

import ctypes
import functools

import numpy as np
from cuda_tensors import DeviceTensor, _Tensor, first_stream

from fastexchange import fast_args
from fastexchange._abi import ffi

WARM = 4  # launches: the first makes the cache entry for its types of arguments


class ExportedTensor(_Tensor, stream=first_stream, dltensor_from_py_object_no_sync=None):
    """Of a framework whose table lends no tensors, and only exports them; its exports tell whether they are readonly."""

    __slots__ = ()


@functools.cache
def function_of(parameters: int | str, body: str = "pass"):
    """A function with these parameters, or so many: ``a0, a1 …``."""
    named = parameters if isinstance(parameters, str) else ", ".join(f"a{i}" for i in range(parameters))
    namespace: dict = {}
    exec(f"def kernel({named}): {body}", namespace)
    return namespace["kernel"]


def dispatcher_of(package, parameters, body: str = "pass", signature=None, **options):
    """A new dispatcher for an empty kernel with these parameters."""
    jit = package.jit(**options) if signature is None else package.jit(signature, **options)
    return jit(function_of(parameters, body))


def kernel_of(package, parameters, *more, **options):
    """The same, a kernel."""
    return fast_args(dispatcher_of(package, parameters, *more, **options))


def elementwise(cuda, head: str, statement: str, *signature, **options):
    """A dispatcher for the kernel ``head``, whose thread `i` makes the statement, if what that writes to has an element `i`."""
    name, written, namespace = head.partition("(")[0], statement.partition("[")[0], {"cuda": cuda, "__name__": __name__}
    exec(f"def {head}:\n    i = cuda.grid(1)\n    if i < {written}.shape[0]:\n        {statement}", namespace)
    return cuda.jit(*signature, **options)(namespace[name])


@functools.cache
def _memory(package):
    """Zeros and ones: bytes of which every element type makes another value, and booleans a boolean."""
    return package.to_device(np.random.default_rng(0).integers(0, 2, 1 << 20, dtype=np.uint8))


def address(package, offset: int = 1 << 19) -> int:
    """An address in the middle of memory on device 0."""
    return data_of(_memory(package)) + offset


def data_of(array) -> int:
    """The address of an array on a device."""
    return array.data if isinstance(array, _Tensor) else array.__cuda_array_interface__["data"][0]


class Interface:
    """An array with ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, tensor):
        self.dtype = tensor.dtype  # for what has no letter in `typestr`: bfloat16
        self.shape = tensor.shape
        self.__cuda_array_interface__ = {
            "typestr": tensor.dtype.str, "shape": tensor.shape, "strides": tensor.strides if tensor.has_strides else None,
            "data": (tensor.data, bool(tensor._managed.flags)), "version": 3,
        }  # fmt: skip


def tensor(package, shape=(3,), dtype="float32", strides=None, cls=DeviceTensor, **options):
    """A tensor on device 0."""
    return cls(shape, dtype, strides, data=address(package), **options)


def device_array(package, tensor):
    """A device array of the package's own with the memory of `tensor`."""
    said = {"typestr": "|u1", "shape": (1,), "strides": None, "data": (tensor.data, False), "version": 3}
    array = package.from_cuda_array_interface(said)
    return type(array)(tensor.shape, tensor.strides, tensor.dtype, gpu_data=array.gpu_data)


# ---- which way a launch goes -----------------------------------------------------------------------------------------
_VECTORCALL = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * 4)


def launch_cached(launcher, *arguments) -> None:
    """Make a launch by the rows of a cache entry, after one that makes the entry. Fails if they leave it."""
    kernel, left = launcher.kernel, []
    for _ in range(WARM):
        launcher(*arguments)
    native, before = kernel._native.native, kernel.counts()
    original = native.vectorcall_any
    assert ffi.cast("fx_overload *", native.last).enter != original, "no cache entry was made"

    def leave(*words):
        left.append(1)
        return _VECTORCALL(original)(*words)

    function = _VECTORCALL(leave)
    native.vectorcall_any = ctypes.cast(function, ctypes.c_void_p).value  # no kernel gets a cache entry meanwhile
    try:
        launcher(*arguments)
    finally:
        native.vectorcall_any = original
    assert not left, "the rows left the launch"
    after = kernel.counts()
    assert (after.fast, after.slow) == (before.fast + 1, before.slow)
