"""What the tests of launches share: kernels without code, memory, arrays of the packages' own, and proofs of cached launches."""

import contextlib
import ctypes
import functools
import gc
import math
import sys
import threading

import cuda_stub
import numpy as np
from cuda_tensors import DeviceTensor, _Tensor, first_stream
from digests import MAGIC, digest_of

from fastexchange import fast_args
from fastexchange._abi import ffi
from fastexchange.dispatch.runtime import runtime

WARM = 4  # launches: the first makes the cache entry for its types of arguments


class ExportedTensor(_Tensor, stream=first_stream, dltensor_from_py_object_no_sync=None):
    """Of a framework whose table lends no tensors, and only exports them; its exports tell whether they are readonly."""

    __slots__ = ()


@functools.cache
def function_of(count: int, body: str = "pass"):
    """A function with parameters ``a0, a1 …``."""
    namespace: dict = {}
    exec(f"def kernel({', '.join(f'a{i}' for i in range(count))}): {body}", namespace)
    return namespace["kernel"]


def dispatcher_of(package, count: int, body: str = "pass", signature=None, **options):
    """A new dispatcher for an empty kernel with so many parameters."""
    jit = package.jit(**options) if signature is None else package.jit(signature, **options)
    return jit(function_of(count, body))


def kernel_of(package, count: int, body: str = "pass", signature=None, **options):
    """The same, a kernel."""
    return fast_args(dispatcher_of(package, count, body, signature, **options))


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


def device_array(package, tensor):
    """A device array of the package's own with the memory of `tensor`."""
    said = {"typestr": "|u1", "shape": (1,), "strides": None, "data": (tensor.data, False), "version": 3}
    array = package.from_cuda_array_interface(said)
    return type(array)(tensor.shape, tensor.strides, tensor.dtype, gpu_data=array.gpu_data)


def on_their_side(package, value, array):
    """An argument, or a tuple, as the package's own launch takes it: `array` makes its arrays."""
    if isinstance(value, _Tensor):
        return array(value)
    if isinstance(value, tuple):
        items = [on_their_side(package, item, array) for item in value]
        return value._make(items) if hasattr(value, "_fields") else tuple(items)
    return value


def words_of(package, array) -> list[int]:
    """The parameters that an array or a tensor becomes."""
    shape, strides, size, at = array.shape, array.strides, array.dtype.itemsize, data_of(array)
    if package.__name__ == "numba.cuda":
        return [0, 0, math.prod(shape), size, at, *shape, *strides]
    return [at, at, 0, *shape, *[stride // size for stride in strides]]


# ---- whether two launches are the same --------------------------------------------------------------------------------
COMPARED = ("grid", "block", "cluster", "shared", "stream", "cooperative", "context", "device", "offsets", "parameters",
            "packed")  # fmt: skip


def what_is_launched(launch) -> dict:
    return {name: getattr(launch, name) for name in COMPARED}


def numbers_of(launch) -> list[int]:
    """The parameters of a launch, as integers."""
    return [int.from_bytes(parameter, "little", signed=True) for parameter in launch.parameters]


class Recorded:
    """Launches of a kernel without code, as the driver stub has recorded them: compared byte for byte.

    `arguments`: those of the launches.
    """

    def __init__(self, record, package, arguments, **options):
        self.arguments = tuple(arguments)
        self._record, self._package, self._options = record, package, options

    def dispatcher(self):
        """A new one, of the package's own."""
        return dispatcher_of(self._package, len(self.arguments), **self._options)

    def seen(self):
        """What the last launch was."""
        return what_is_launched(self._record.launches[-1])


class Digested:
    """Launches of a kernel that reads all arguments, and writes what it has read: that is compared. As :class:`Recorded`.

    Two more arguments are where it writes.
    """

    def __init__(self, record, package, arguments, body="", **options):
        self._function, *counts = digest_of(arguments, body, cuda=package, np=np, cg=getattr(package, "cg", None))
        self._package, self._options = package, options
        self._empty = [np.full(count, -1, dtype) for count, dtype in zip(counts, (np.int64, np.float64), strict=True)]
        self._written = [package.to_device(each) for each in self._empty]
        outs = [DeviceTensor(each.shape, each.dtype, data=data_of(each)) for each in self._written]
        self.arguments = (*arguments, *outs)

    def dispatcher(self):
        return self._package.jit(**self._options)(self._function)

    def seen(self):
        """The bytes that have been written since the last time."""
        self._package.synchronize()
        found = [each.copy_to_host() for each in self._written]
        for each, empty in zip(self._written, self._empty, strict=True):
            each.copy_to_device(empty)
        self._package.synchronize()
        assert found[0][0] == MAGIC, "the kernel did not run"
        return [each.tobytes() for each in found]


def launches_of(record, package, arguments, **options) -> Recorded | Digested:
    """What compares launches with these arguments: their bytes where the packages' own are recorded, else their effect."""
    return (Recorded if isinstance(record, cuda_stub.Stub) else Digested)(record, package, arguments, **options)


# ---- which way a launch goes -----------------------------------------------------------------------------------------
_VECTORCALL = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, *[ctypes.c_ssize_t] * 4)


@contextlib.contextmanager
def launches_left(kernel):
    """The list of the launches, 1 each, that the rows of cache entries leave; no kernel gets a cache entry meanwhile."""
    native, left = kernel._native.native, []
    original = native.vectorcall_any

    def counted(*words):
        left.append(1)
        return _VECTORCALL(original)(*words)

    function = _VECTORCALL(counted)
    native.vectorcall_any = ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield left
    finally:
        native.vectorcall_any = original


def has_cache_entry(kernel) -> bool:
    """Whether the next launch goes to a cache entry."""
    native = kernel._native.native
    return ffi.cast("fx_overload *", native.last).enter != native.vectorcall_any


def launch_cached(launcher, *arguments) -> None:
    """Make a launch by the rows of a cache entry, after one that makes the entry. Fails if they leave it."""
    kernel = launcher.kernel
    for _ in range(WARM):
        launcher(*arguments)
    assert has_cache_entry(kernel), "no cache entry was made"
    before = kernel.counts()
    with launches_left(kernel) as left:
        launcher(*arguments)
    assert not left, "the rows left the launch"
    after = kernel.counts()
    assert (after.fast, after.slow) == (before.fast + 1, before.slow)


def in_threads(*functions, meanwhile=lambda: None) -> None:
    """Call each in a new thread, all at once. What fails there first fails here."""
    failed = []

    def run(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def is_refused(function, kind, *texts: str) -> str:
    """What an exception says, with its notes, that has to be of this very type; `texts` are in it."""
    try:
        function()
    except BaseException as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        for text in texts:
            assert text in said, said
        return said
    raise AssertionError("nothing was raised")


def free_frames() -> int:
    """How many frames wait for a call."""
    count, at = 0, runtime().native.frames
    while at:
        count, at = count + 1, ffi.cast("fx_frame *", at).next
    return count


@contextlib.contextmanager
def all_given_back(*things):
    """After the block each of `things` has as many references as before, and no export of one is out."""
    things = [each for each in things if each is not None]
    tensors = [each for each in things if hasattr(each, "exported")]
    gc.collect()
    before, frames = [sys.getrefcount(each) for each in things], free_frames()
    yield
    gc.collect()
    assert [sys.getrefcount(each) for each in things] == before
    assert free_frames() >= frames, "fewer than before: one is lost"
    assert [each.exported - each.deleted for each in tensors] == [0] * len(tensors)
