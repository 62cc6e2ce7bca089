"""What consumers meet in the DLPack exchange tables of released packages: ``python exchange_api.py``.

Needs NumPy, Numba and PyTorch 2.10 or newer; looks at PaddlePaddle, cuda.core, JAX and apache-tvm-ffi where they are installed.
Numba compiles a loop that calls a table's function by its address: that is what a consumer in C pays. A time is the least of
15 rounds, in nanoseconds; read the ratios.
"""

import ctypes
import importlib
import importlib.metadata
import platform
import time
import warnings

import numba
import numpy as np
import torch

warnings.simplefilter("ignore")
PLACES = {
    "torch": "Tensor", "paddle": "Tensor", "cuda.core.utils": "StridedMemoryView", "numpy": "ndarray", "jax": "Array",
    "tvm_ffi": "Tensor",
}  # fmt: skip
FUNCTIONS = (
    "managed_tensor_allocator", "managed_tensor_from_py_object_no_sync", "managed_tensor_to_py_object_no_sync",
    "dltensor_from_py_object_no_sync", "current_work_stream",
)  # fmt: skip


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


class Table(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_void_p) for name in FUNCTIONS]


def table_of(cls) -> Table | None:
    capsule = getattr(cls, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return Table.from_address(pointer(capsule, b"dlpack_exchange_api"))


TORCH = table_of(torch.Tensor)
BORROW = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))(TORCH.dltensor_from_py_object_no_sync)
OWN = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.POINTER(Managed)))(
    TORCH.managed_tensor_from_py_object_no_sync
)
MAKE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(Managed), ctypes.POINTER(ctypes.c_void_p))(
    TORCH.managed_tensor_to_py_object_no_sync
)
DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def tables() -> None:
    for module, name in PLACES.items():
        try:
            cls = getattr(importlib.import_module(module), name)
        except ImportError:
            print(f"{module:16} is not installed")
            continue
        table = table_of(cls)
        if table is None:
            print(f"{module:16} {name} has no table")
        else:
            null = ", ".join(each for each in FUNCTIONS if not getattr(table, each)) or "nothing"
            print(f"{module:16} {name} has a table, DLPack {table.major}.{table.minor}; NULL in it: {null}")


# ---- what a consumer in C pays ---------------------------------------------------------------------------------------


def in_native_code(function: str, release: bool):
    """A loop in machine code: ``loop(tensor, n)`` returns the nanoseconds of a call."""
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(getattr(TORCH, function))
    address = ctypes.cast(ctypes.pythonapi.PyErr_Occurred, ctypes.c_void_p).value  # any function: only its type is used
    delete = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)
    out = np.zeros(16, np.int64)
    if release:
        managed = ctypes.POINTER(Managed)()
        OWN(torch.ones(1), managed)
        delete = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(managed.contents.deleter)
        delete(ctypes.cast(managed, ctypes.c_void_p))

    @numba.njit
    def loop(tensor, out, n):
        failed = 0
        for _ in range(n):
            failed += call(tensor, out.ctypes)
            if release:
                delete(out[0])
        return failed

    def measured(tensor, n=20000):
        begin = time.perf_counter()
        assert loop(id(tensor), out, n) == 0
        return (time.perf_counter() - begin) / n * 1e9

    measured(torch.ones(1), 1)  # compiles
    return measured


def in_python(function):
    def measured(tensor, n=2000):
        begin = time.perf_counter()
        for _ in range(n):
            function(tensor)
        return (time.perf_counter() - begin) / n * 1e9

    return measured


def times() -> None:
    x = torch.ones(1)
    rows = {
        "dltensor_from_py_object_no_sync": in_native_code("dltensor_from_py_object_no_sync", False),
        "managed_tensor_from_py_object_no_sync, and its deleter": in_native_code("managed_tensor_from_py_object_no_sync", True),
        "x.__dlpack__(max_version=(1, 3))": in_python(lambda x: x.__dlpack__(max_version=(1, 3))),
        "x.__dlpack_device__()": in_python(lambda x: x.__dlpack_device__()),
        "np.from_dlpack(x)": in_python(np.from_dlpack),
    }
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(15):
        for name, measured in rows.items():
            samples[name].append(measured(x))
    least_of = {name: min(each) for name, each in samples.items()}
    borrow = least_of["dltensor_from_py_object_no_sync"]
    for name, least in least_of.items():
        print(f"{name:56} {least:7.0f} ns, {least / borrow:6.1f} x the borrowed view")


# ---- where the table and __dlpack__ differ ---------------------------------------------------------------------------


def outcome(function, x) -> str:
    try:
        return function(x)
    except Exception as error:
        return type(error).__name__


def borrowed(x) -> str:
    tensor = Tensor()
    BORROW(x, tensor)  # raises what the function has set
    size = 1
    for i in range(tensor.ndim):
        size *= tensor.shape[i]
    if size and not tensor.data:
        return f"succeeds, data NULL, {size} elements"
    if (tensor.code, tensor.bits) == (2, 32):
        first = ctypes.c_float.from_address(tensor.data + tensor.byte_offset).value
        return f"succeeds, first element {first:g}"
    if (tensor.code, tensor.bits) == (5, 64):
        parts = (ctypes.c_float * 2).from_address(tensor.data + tensor.byte_offset)
        return f"succeeds, first element {complex(*parts):g}"
    return "succeeds"


def exported(x) -> str:
    array = np.from_dlpack(x)
    return f"succeeds, first element {array.flat[0]:g}" if array.size else "succeeds"


class Refusing(torch.Tensor):
    """A subclass whose exports are forbidden: it inherits the table, by attribute look-up on its type."""

    def __dlpack__(self, **_):
        raise BufferError("this tensor is not exported")


def freed():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def differences() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    z = torch.tensor([1 + 3j])
    rows = {
        "requires grad": torch.ones(2, requires_grad=True),
        "z.conj(), of 1+3j": z.conj(),
        "z.conj().imag, which is -3": z.conj().imag,
        "FakeTensor": fake,
        "storage resized to 0": freed(),
        "sparse": torch.ones(2).to_sparse(),
        "subclass whose __dlpack__ refuses": torch.ones(2).as_subclass(Refusing),
    }
    print(f"{'PyTorch tensor':36} {'by __dlpack__, np.from_dlpack':34} by dltensor_from_py_object_no_sync")
    for name, x in rows.items():
        by_method = "not called: memory is read" if name in ("FakeTensor", "storage resized to 0") else outcome(exported, x)
        print(f"{name:36} {by_method:34} {outcome(borrowed, x)}")


def copy_on_write() -> None:
    x = torch.ones(4)
    y = torch._lazy_clone(x)
    tensor = Tensor()
    BORROW(x, tensor)
    shared = torch._C._data_address(x) == torch._C._data_address(y)
    print(f"a copy-on-write clone shares its memory after its original was borrowed: {shared}")


def failed_import() -> None:
    """Who releases an export that ``managed_tensor_to_py_object_no_sync`` has refused?"""
    released = []
    deleter = DELETER(released.append)
    shape, strides, memory = (ctypes.c_int64 * 1)(2), (ctypes.c_int64 * 1)(1), (ctypes.c_float * 2)(1, 2)
    tensor = Tensor(
        ctypes.addressof(memory), 1, 0, 1, 3, 64, 1, shape, strides, 0  # kDLOpaqueHandle: PyTorch has no such dtype
    )  # fmt: skip
    managed = Managed(1, 3, None, ctypes.cast(deleter, ctypes.c_void_p), 0, tensor)
    try:
        MAKE(managed, ctypes.c_void_p())
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    print(f"managed_tensor_to_py_object_no_sync of a dtype that PyTorch does not have: {raised}; deleter called: {len(released)}")


def main() -> None:
    packages = ("torch", "numpy", "numba", "jax", "paddlepaddle", "cuda-core", "apache-tvm-ffi")
    found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {found[name]}" for name in packages if name in found))
    for part in (tables, times, differences, copy_on_write, failed_import):
        print()
        part()


if __name__ == "__main__":
    main()
