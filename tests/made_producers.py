"""Producers of tensors made for the tests, which enter what they export in a `Ledger`, and the means to make dishonest ones."""

import ctypes
import weakref

import numpy as np

from fastexchange.ground.dlpack import ffi

TABLE_CAPSULE = b"dlpack_exchange_api"

_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi))  # fmt: skip
capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
incref = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
"""By NumPy's kind of a dtype."""
_names: dict[bytes, ctypes.c_char_p] = {}  # a capsule keeps a pointer to its name


class Text(str):
    """A subclass of str. Numba takes it for a str; native code leaves it, and so the whole call, to Numba's own dispatcher."""


ONLY_NUMBA = Text("text")


def address_of(cdata) -> int:
    return int(ffi.cast("intptr_t", cdata))


def capsule(cdata, name: bytes):
    """A PyCapsule without a destructor around the pointer `cdata`."""
    return _capsule_new(address_of(cdata), _names.setdefault(name, ctypes.c_char_p(name)), None)


def is_held(thing) -> bool:
    """Whether somebody has a buffer of a bytearray, or an array of the standard library's: then it cannot be resized."""
    try:
        thing.append(0)
    except BufferError:
        return True
    thing.pop()
    return False


class SaysType:
    """It says that it is a type. CPython 3.10's ``list[int]`` says so, too."""

    __class__ = property(lambda self: type)


class Ledger:
    """Which managed tensors are out, and how many came back."""

    def __init__(self):
        self.made = self.deleted = 0
        self._out: dict[int, tuple] = {}

    @property
    def out(self) -> int:
        return len(self._out)

    def enter(self, managed, keep) -> None:
        self.made += 1
        self._out[address_of(managed)] = (managed, keep)
        _ledgers[address_of(managed)] = self

    def check(self, made: int) -> None:
        assert (self.made, self.deleted, self.out) == (made, made, 0)
        assert not _strays, "a deleter was called for what is no tensor, or no longer one"


_ledgers: dict[int, Ledger] = {}
_strays: list[int] = []


def _cross_out(managed) -> None:
    address = address_of(managed)
    ledger = _ledgers.pop(address, None)
    if ledger is None:
        _strays.append(address)
    else:
        ledger.deleted += 1
        del ledger._out[address]


delete_versioned = ffi.callback("void(DLManagedTensorVersioned *)", _cross_out)
delete_legacy = ffi.callback("void(DLManagedTensor *)", _cross_out)


def fill(tensor, array: np.ndarray, **lies):
    """Describe `array` in the ``DLTensor`` `tensor`, some fields set to other values. Returns what has to stay alive.

    Lies: ``data``, ``ndim``, ``byte_offset``, ``code``, ``bits``, ``lanes``, ``device_type``, ``device_id`` (ints),
    ``shape`` and ``strides`` (sequences, or None for NULL).
    """
    shape = lies.get("shape", array.shape)
    strides = lies.get("strides", tuple(stride // array.itemsize for stride in array.strides))
    shape_words = ffi.new("int64_t[]", list(shape) or [0]) if shape is not None else ffi.NULL
    stride_words = ffi.new("int64_t[]", list(strides) or [0]) if strides is not None else ffi.NULL
    tensor.data = ffi.cast("void *", lies.get("data", array.ctypes.data))
    tensor.device.device_type = lies.get("device_type", 1) & 0xFFFFFFFF
    tensor.device.device_id = lies.get("device_id", 0)
    tensor.ndim = lies.get("ndim", array.ndim)
    tensor.dtype.code = lies.get("code", DLPACK_CODES.get(array.dtype.kind, 3))
    tensor.dtype.bits = lies.get("bits", 8 * array.itemsize)
    tensor.dtype.lanes = lies.get("lanes", 1)
    tensor.shape, tensor.strides = shape_words, stride_words
    tensor.byte_offset = lies.get("byte_offset", 0)
    return array, shape_words, stride_words


def export_versioned(ledger: Ledger, array: np.ndarray, **lies):
    """A new ``DLManagedTensorVersioned *`` that its deleter crosses out. More lies: ``version``, ``flags``, ``deleter``."""
    managed = ffi.new("DLManagedTensorVersioned *")
    managed.version.major, managed.version.minor = lies.get("version", (1, 3))
    managed.flags = lies.get("flags", 0 if array.flags.writeable else 1)
    managed.deleter = lies.get("deleter", delete_versioned)
    ledger.enter(managed, fill(managed.dl_tensor, array, **lies))
    return managed


def export_legacy(ledger: Ledger, array: np.ndarray, **lies):
    managed = ffi.new("DLManagedTensor *")
    managed.deleter = lies.get("deleter", delete_legacy)
    ledger.enter(managed, fill(managed.dl_tensor, array, **lies))
    return managed


class Dunder:
    """A tensor with ``__dlpack__`` and ``__dlpack_device__`` in Python, of DLPack 1."""

    def __init__(self, array: np.ndarray, ledger: Ledger | None = None, **lies):
        self.array, self.ledger, self.lies = array, ledger or Ledger(), lies
        self.asked: list[object] = []
        self.capsules: list[object] = []

    def __dlpack_device__(self):
        return self.lies.get("device", (1, 0))

    def __dlpack__(self, *, max_version=None):
        self.asked.append(max_version)
        return self._capsule(export_versioned, b"dltensor_versioned")

    def _capsule(self, export, name: bytes):
        made = capsule(export(self.ledger, self.array, **self.lies), name)
        self.capsules.append(made)
        return made


class Ignorant(Dunder):
    """A tensor whose ``__dlpack__`` accepts ``max_version`` and ignores it."""

    def __dlpack__(self, *, max_version=None):
        self.asked.append(max_version)
        return self._capsule(export_legacy, b"dltensor")


class Legacy(Ignorant):
    """A tensor of the years before DLPack 1: ``__dlpack__`` knows no ``max_version``, its capsules no version."""

    def __dlpack__(self):
        return super().__dlpack__(max_version="nothing")


class Wraps:
    """What stands for ``inner``, a tensor of a type with an exchange table."""

    __slots__ = ()


class Wrapper(Wraps):

    __dlpack_c_exchange_api__ = property(lambda self: self.inner)

    def __init__(self, inner):
        self.inner = inner


def object_at(pointer):
    return ctypes.cast(address_of(pointer), ctypes.py_object).value


def give(out, thing) -> int:
    """What a function of C returns that writes a new reference to `out`."""
    incref(thing)
    out[0] = ffi.cast("void *", id(thing))
    return 0


_borrowed: dict[int, object] = {}  # by object: the shape and strides that its last borrowed view points to


@ffi.callback("int(void *, DLTensor *)")
def borrow(py_object, out):
    thing = object_at(py_object)
    thing.borrows += 1
    _borrowed[id(thing)] = fill(out, thing.array, **thing.lies)
    return 0


@ffi.callback("int(void *, DLManagedTensorVersioned **)")
def export(py_object, out):
    thing = object_at(py_object)
    out[0] = export_versioned(thing.ledger, thing.array, **thing.lies)
    return 0


ALLOCATED = Ledger()
"""What the allocator has made."""


def _dtype_of(tensor) -> np.dtype:
    kinds = {code: kind for kind, code in DLPACK_CODES.items()}
    return np.dtype(f"{kinds[tensor.dtype.code]}{tensor.dtype.bits // 8}")


@ffi.callback("int(DLTensor *, DLManagedTensorVersioned **, void *, void(*)(void *, char *, char *))")
def allocate(prototype, out, error_ctx, set_error):
    out[0] = export_versioned(ALLOCATED, np.empty([prototype.shape[i] for i in range(prototype.ndim)], _dtype_of(prototype)))
    return 0


@ffi.callback("int(DLManagedTensorVersioned *, void **)")
def to_py_object(tensor, out):
    made = Tabled(array_over(tensor.dl_tensor))
    weakref.finalize(made, _let_go, tensor, id(made)).atexit = False
    return give(out, made)


def _let_go(managed, of: int) -> None:
    if managed.deleter != ffi.NULL:
        managed.deleter(managed)
    _borrowed.pop(of, None)


def array_at(dtype: np.dtype, shape, strides, address: int, readonly: bool = False) -> np.ndarray:
    """NumPy's array of any memory, of which nothing is read. Strides in bytes."""
    address = address or 64  # NULL, of an array without elements, not every NumPy takes
    typestr = dtype.str if dtype.isbuiltin == 1 else f"|V{dtype.itemsize}"
    described = {"version": 3, "typestr": typestr, "shape": tuple(shape), "strides": tuple(strides), "data": (address, readonly)}
    array = np.asarray(type("Described", (), {"__array_interface__": described})()).view(dtype)
    array.flags.writeable = array.flags.writeable and not readonly
    return array


def array_over(tensor) -> np.ndarray:
    dtype = _dtype_of(tensor)
    strides = [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)]
    return array_at(dtype, [tensor.shape[i] for i in range(tensor.ndim)], strides, address_of(tensor.data) + tensor.byte_offset)


@ffi.callback("int(DLDeviceType, int32_t, void **)")
def current_work_stream(device_type, device_id, out):
    out[0] = ffi.NULL
    return 0


FUNCTIONS = {"managed_tensor_allocator": allocate, "managed_tensor_from_py_object_no_sync": export,
             "managed_tensor_to_py_object_no_sync": to_py_object, "dltensor_from_py_object_no_sync": borrow,
             "current_work_stream": current_work_stream}  # fmt: skip

_tables: list[object] = []  # exchange tables live for ever, as those of real frameworks do


def exchange_table(version=(1, 3), prev=None, **functions):
    """A new ``DLPackExchangeAPI *``; `functions` (cffi callbacks, addresses, or None for NULL) replace the honest ones."""
    table = ffi.new("DLPackExchangeAPI *")
    table.header.version.major, table.header.version.minor = version
    if prev is not None:
        table.header.prev_api = ffi.cast("DLPackExchangeAPIHeader *", prev)
    fields = dict(ffi.typeof("DLPackExchangeAPI").fields)
    for name, function in {**FUNCTIONS, **functions}.items():
        setattr(table, name, ffi.cast(fields[name].type, ffi.NULL if function is None else function))
    _tables.append((table, functions))
    return table


class _Tabled:
    def __init__(self, array: np.ndarray, ledger: Ledger | None = None, **lies):
        self.array, self.ledger, self.lies = array, ledger or Ledger(), lies
        self.borrows = 0


def tabled_type(name="Tabled", bases=(_Tabled,), attributes=None, **changes) -> type:
    """A new tensor type with an exchange table of its own, changed as :func:`exchange_table` says."""
    own = capsule(exchange_table(**changes), TABLE_CAPSULE)
    return type(name, bases, {"__dlpack_c_exchange_api__": own, **(attributes or {})})


Tabled = tabled_type()


class WithMethods:
    dunder_calls = 0

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, max_version=None):
        self.dunder_calls += 1
        return capsule(export_versioned(self.ledger, self.array), b"dltensor_versioned")


def tabled_type_with_methods() -> type:
    return tabled_type("TabledWithMethods", (WithMethods, _Tabled))
