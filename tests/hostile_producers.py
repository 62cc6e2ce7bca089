"""Producers that break their promises: exchange tables whose functions do as a test says, classes with ``__dlpack__``.

The functions of a table are native, because only native code can return with an exception set; each asks a cffi callback what to
do, and that asks the tensor. They also note when they are entered with an exception set: a debug build of CPython aborts there.
"""

import collections
import ctypes
import functools
import sys
import threading

import numba
import numpy as np

from made_producers import (  # isort: skip
    Dunder, Ignorant, Ledger, Legacy, address_of, capsule, delete_legacy, delete_versioned, exchange_table, export_legacy,
    export_versioned, fill, incref, object_at, tabled_type,
)
from numba import types

from fastexchange._abi import ffi
from fastexchange.ground.dlpack import DLDeviceType, is_readable_by_cpu

ATTRIBUTE = "__dlpack_c_exchange_api__"
VIEW, EXPORT = "dltensor_from_py_object_no_sync", "managed_tensor_from_py_object_no_sync"

violations: list[str] = []
"""Functions of a producer that were entered with an exception set."""


# ---- native functions that do what Python says -----------------------------------------------------------------------
PyErr_Occurred = types.ExternalFunction("PyErr_Occurred", types.intp())
PyErr_Clear = types.ExternalFunction("PyErr_Clear", types.void())
PyErr_SetObject = types.ExternalFunction("PyErr_SetObject", types.void(types.intp, types.intp))
Py_DecRef = types.ExternalFunction("Py_DecRef", types.void(types.intp))

_pending = threading.local()  # the exception that a native function is about to set: (type, value)
_kept: list[object] = []  # what native code was given the address of


class Sets(Exception):
    """Raised by what a tensor does, with a code, a type and a value: return the code with such an exception set."""


def _do(what, *arguments) -> int:
    """What the native function returns; what it sets becomes pending."""
    try:
        return what(*arguments) or 0
    except Sets as sets:
        code, *_pending.error = sets.args
    except BaseException as error:
        error.__traceback__ = None  # its frames hold the tensor
        code, _pending.error = -1, (type(error), error)
    return code


def _callback(signature: str, function):
    """A cffi callback that prints nothing where it fails without a reason: then it returns -1, or 0 for an address."""
    return ffi.callback(signature, function, error=-1 if signature.startswith("int(") else 0, onerror=lambda *error: None)


def _take(part: int) -> int:
    """A new reference to the type (0) of the pending error, or to its value (1), which no longer is; 0 if there is none."""
    error = getattr(_pending, "error", None)
    if error is None:
        return 0
    if part == 1:
        _pending.error = None
    incref(error[part])
    return id(error[part])


_WHICH = ("a view", "an export", "a deleter", "a legacy deleter", "a capsule's destructor")
_taking, _noting = _callback("intptr_t(int)", _take), ffi.callback("void(int)", lambda which: violations.append(_WHICH[which]))
take = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int)(address_of(_taking))
note = ctypes.CFUNCTYPE(None, ctypes.c_int)(address_of(_noting))


def _native(callback, which: int):
    """A C function of two words (the second may be missing) that calls `callback` and sets what that leaves pending."""
    behave = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ssize_t, ctypes.c_ssize_t)(address_of(callback))

    @numba.cfunc("int32(intp, intp)")
    def function(first, second):
        if PyErr_Occurred() != 0:
            PyErr_Clear()
            note(which)
        code = behave(first, second)
        kind = take(0)
        if kind != 0:
            value = take(1)
            PyErr_SetObject(kind, value)
            Py_DecRef(kind)
            Py_DecRef(value)
        return code

    _kept.append((function, callback, behave))
    return function.address


def _giving(which: str):
    return lambda py_object, out: _do(Hostile.give, object_at(py_object), which, out)


def _delete(delete, managed, _):
    """What a deleter does: give the tensor back, and then what it was told."""
    what = _at_deletion.pop(address_of(managed), int)
    delete(managed)
    what()


def _destroy(py_capsule, _):
    destroyed_names.append(_capsule_name(address_of(py_capsule)))
    if at_destruction:
        at_destruction[-1]()


_at_deletion: dict[int, collections.abc.Callable[[], object]] = {}  # by address of a managed tensor
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
_set_destructor = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi))  # fmt: skip
destroyed_names: list[bytes] = []
"""The names that capsules with a destructor had when they died."""
at_destruction: list[collections.abc.Callable[[], object]] = []
"""What the destructors do."""

view_function = _native(_callback("int(void *, DLTensor *)", _giving("view")), 0)
export_function = _native(_callback("int(void *, DLManagedTensorVersioned **)", _giving("export")), 1)
_deletes, _deletes_legacy = (functools.partial(_do, _delete, each) for each in (delete_versioned, delete_legacy))
delete_function = _native(_callback("int(DLManagedTensorVersioned *, intptr_t)", _deletes), 2)
delete_legacy_function = _native(_callback("int(DLManagedTensor *, intptr_t)", _deletes_legacy), 3)
destroy_function = _native(_callback("int(void *, intptr_t)", functools.partial(_do, _destroy)), 4)


def managed_and(ledger: Ledger, array: np.ndarray, what, export=export_versioned, **lies):
    kind, function = (delete_legacy, delete_legacy_function) if export is export_legacy else (delete_versioned, delete_function)
    managed = export(ledger, array, deleter=ffi.cast(ffi.typeof(kind), function), **lies)
    _at_deletion[address_of(managed)] = what
    return managed


def with_destructor(made):
    """A PyCapsule, from now on with a destructor that notes the name that it has then, and does what `at_destruction` says."""
    assert _set_destructor(made, destroy_function) == 0
    return made


# ---- tensors with an exchange table ----------------------------------------------------------------------------------
class Hostile:
    """What the types of :func:`hostile_type` have in common: honest while `behaves`, else as told.

    `view(tensor, out)` and `export(tensor, out)` stand for the table's two functions: they return its code, or raise
    what it sets. `delete()` is called by the deleters of what an honest export makes. Others: lies for ``fill``.
    """

    def __init__(self, array=None, ledger=None, *, view=None, export=None, delete=None, behaves=False, **lies):
        self.array = np.arange(4.0) if array is None else array
        self.ledger = Ledger() if ledger is None else ledger
        self.view, self.export, self.delete, self.behaves, self.lies = view, export, delete, behaves, lies
        self.looks = 0
        self.words = collections.deque(maxlen=200)  # what the last views point to

    def give(self, which: str, out):
        if not isinstance(self, Hostile):
            raise TypeError(f"not one of mine, but a {type(self).__name__}")
        self.looks += 1
        act = None if self.behaves else getattr(self, which)
        return act(self, out) if act is not None else honest(self, out, **({} if self.behaves else self.lies))


def honest(tensor, out, **lies) -> int:
    """What an honest function of the table writes to `out`, a tensor or a pointer to one."""
    if ffi.typeof(out) is ffi.typeof("DLTensor *"):
        tensor.words.append(fill(out, tensor.array, **lies))
    elif tensor.delete is None or tensor.behaves:
        out[0] = export_versioned(tensor.ledger, tensor.array, **lies)
    else:
        out[0] = managed_and(tensor.ledger, tensor.array, tensor.delete, **lies)
    return 0


def hostile_type(name="HostileTensor", bases=(Hostile,), attributes=None, **changes) -> type:
    """A new type with a table of its own, of native functions that do as its instances say."""
    return tabled_type(name, bases, attributes, **{VIEW: view_function, EXPORT: export_function, **changes})


# ---- what a view or an export says of the tensor ---------------------------------------------------------------------
REFUSED = BufferError


def of_shape(shape, strides=None, **more):
    return {"ndim": len(shape), "shape": shape, "strides": strides or (0,) * len(shape), **more}


def short(shape) -> str:
    return str(shape) if len(shape) < 8 else f"{shape[0]} ** {len(shape)}"


def element(code: int, bits: int):
    """Refused; but types of DLPack that NumPy lacks may have been registered, by ml_dtypes for one: then it is known."""
    may_be_known = (code, bits) in ((4, 16), (5, 32), (15, 6), (16, 6), (17, 4)) or (7 <= code <= 14 and bits == 8)
    return {"code": code, "bits": bits}, (REFUSED, 4) if may_be_known else REFUSED, f"of {bits} bits"


ARRAY, ODD_BYTES = np.arange(4.0), {distance: np.zeros(64, np.uint8) for distance in (1, 4, 7)}
for _distance, _bytes in ODD_BYTES.items():
    _bytes[_distance : _distance + 32].view(np.float64)[:] = ARRAY
AT = ARRAY.ctypes.data
NO_SHAPE = {"shape": None, "strides": None}
TOO_MANY = [
    (2**62,), (2**63 - 1,), (2**56,), (2**32, 2**32), (2**62 + 1, 4), (2**31, 2**31), (2**31 - 1, 2**31 - 1), (2**21,) * 3,
    (2**16,) * 4, (2**8,) * 8, (2,) * 64, (3,) * 40, (2**63 - 1, 2**63 - 1), (2**33, 2**31, 2), (1, 2**62, 1), (2**30, 2**30, 2),
]  # fmt: skip
NEGATIVE = [(-1,), (-(2**63),), (-4,), (4, -1), (-1, -4), (0, -1), (-1, 0), (-(2**32), 2**32), (-(2**63), 2)]
EMPTY = [(0,), (0, 0), (3, 0), (0, 2**20), (1, 0, 1)]
WIDTHS = {0: (8, 16, 32, 64), 1: (8, 16, 32, 64), 2: (16, 32, 64), 5: (64, 128), 6: (8,)}
"""By DLPack's code: the bits of NumPy's types."""
ELEMENTS = [
    *((code, bits) for code, widths in WIDTHS.items() for bits in (0, 1, 4, 7, 8, 12, 16, 24, 32, 63, 65, 80, 96, 128, 255)
      if bits not in widths),
    *((code, 8) for code in (*range(7, 15), 18, 19, 100, 127, 128, 200, 255)),
    (15, 6), (16, 6), (17, 4), (4, 16), (4, 32), (3, 64), (3, 8), (18, 64), (255, 255),
]  # fmt: skip

CONTENTS = {
    **{f"device {each.name}": ({"device_type": int(each), "device_id": 1}, REFUSED, each.name)
       for each in DLDeviceType if not is_readable_by_cpu(each)},
    **{f"device {number}": ({"device_type": number}, REFUSED, str(number))
       for number in (0, 5, 6, 19, 33, 62, 63, 64, 65, 67, 127, 257, 2**31 - 1)},
    **{f"device {number}": ({"device_type": number}, REFUSED, "device") for number in (-1, -(2**31), -(2**31) + 1)},
    **{f"readable device {number}": ({"device_type": number, "device_id": -1}, 6.0, "") for number in (3, 11, 13)},
    **{f"ndim {number}": ({"ndim": number}, REFUSED, str(number))
       for number in (-1, -(2**31), -(2**31) + 1, 65, 256, 257, 2**16 + 1, 2**31 - 1)},
    "NULL shape": ({"shape": None}, REFUSED, "shape"),
    "NULL shape and strides": (NO_SHAPE, REFUSED, "shape"),
    "NULL shape of 64 dimensions": ({"shape": None, "ndim": 64}, REFUSED, "shape"),
    "NULL strides": ({"strides": None}, 6.0, ""),
    "NULL strides of 64 dimensions": ({"ndim": 64, "shape": (1,) * 62 + (2, 2), "strides": None}, 6.0, ""),
    "strides that mean nothing": (of_shape((1, 4, 1), (2**40, 1, -7)), 6.0, ""),
    "no dimensions": ({"ndim": 0, **NO_SHAPE}, 0.0, ""),
    "no dimensions and NULL data": ({"ndim": 0, **NO_SHAPE, "data": 0}, REFUSED, "NULL"),
    **{f"negative size {shape}": (of_shape(shape), REFUSED, "shape") for shape in NEGATIVE},
    **{f"no elements {shape}": (of_shape(shape), 0.0, "") for shape in EMPTY},
    **{f"no elements {shape} and NULL data": (of_shape(shape, data=0), 0.0, "") for shape in EMPTY},
    **{f"no elements {shape}": (of_shape(shape), (REFUSED, 0.0), "")
       for shape in [(0, 2**62), (2**40, 0, 2**40), (0, 2**63 - 1), (2**62, 2**62, 0)]},
    **{f"too many elements {short(shape)}": (of_shape(shape), REFUSED, "64 bits") for shape in TOO_MANY},
    **{f"too many bytes {shape}": (of_shape(shape, code=5, bits=128), REFUSED, "64 bits")
       for shape in [(2**59, 2), (2**30, 2**29), (2**31 - 1, 2**29), (2**31 - 1, 2**28)]},
    **{f"a stride of {step}{other}": (of_shape((count,), (step,)), ends, word)
       for step in [2**62, -(2**63), 2**63 - 1, -(2**62), 2**60, 2**61, -(2**60), 2**61 + 1]  # the last is 8 bytes in 64 bits
       for other, count, ends, word in (("", 2, REFUSED, "64 bits"), (", one element", 1, (REFUSED, 0.0), ""))},
    "strides that reach too far together": (of_shape((2, 2), (2**55, 2**55)), REFUSED, "64 bits"),
    "strides NULL and too many elements": ({"ndim": 2, "shape": (2**40, 2**40), "strides": None}, REFUSED, "64 bits"),
    **{f"NULL data and a byte offset of {offset}": ({"data": 0, "byte_offset": offset}, REFUSED, "NULL")
       for offset in (0, 8, 4088, 4096, 8192, 2**20, 2**40)},
    **{f"data {data}": ({"data": data}, REFUSED, "") for data in (1, 8, 4095)},
    "an address that is NULL once the byte offset is added": ({"data": 2**64 - 8, "byte_offset": 8}, REFUSED, ""),
    "data in the first page because of its byte offset": ({"data": 4096, "byte_offset": 2**64 - 4000}, REFUSED, ""),
    "a byte offset": ({"data": AT - 64, "byte_offset": 64}, 6.0, ""),
    "a byte offset and strides": (of_shape((2,), (2,), data=AT - 64, byte_offset=72), 4.0, ""),
    "a byte offset and NULL strides": ({"data": AT - 64, "byte_offset": 72, "shape": (3,), "strides": None}, 6.0, ""),
    "a byte offset that wraps": ({"data": AT + 8, "byte_offset": 2**64 - 8}, (REFUSED, 6.0), ""),
    "the largest byte offset": ({"data": AT + 1, "byte_offset": 2**64 - 1}, (REFUSED, 6.0), ""),
    **{f"misaligned by {distance}": ({"data": each.ctypes.data + distance}, 6.0, "") for distance, each in ODD_BYTES.items()},
    **{f"misaligned by a byte offset of {distance}": ({"data": each.ctypes.data, "byte_offset": distance}, 6.0, "")
       for distance, each in ODD_BYTES.items()},
    **{f"{lanes} lanes": ({"lanes": lanes}, REFUSED, f"{lanes} lanes") for lanes in (0, 2, 4, 256, 2**16 - 1)},
    **{f"code {code} of {bits} bits": element(code, bits) for code, bits in ELEMENTS},
    "everything wrong": ({"device_type": 77, "ndim": -5, **NO_SHAPE, "lanes": 9, "code": 99, "data": 0}, REFUSED, ""),
    "everything zero": ({"device_type": 0, "ndim": 0, **NO_SHAPE, "lanes": 0, "code": 0, "bits": 0, "data": 0}, REFUSED, ""),
    "everything one": (
        {"device_type": -1, "device_id": -1, "ndim": -1, **NO_SHAPE, "lanes": 2**16 - 1, "code": 255, "bits": 255,
         "data": 2**64 - 1, "byte_offset": 2**64 - 1}, REFUSED, ""),
}  # fmt: skip
"""By name: what a tensor says, how a call ends (a result, an exception type, or one of several), a word of the message."""

EXPORTED = {
    "major version 2": ({"version": (2, 0)}, REFUSED, "DLPack ABI"),
    "major version 0": ({"version": (0, 9)}, REFUSED, "DLPack ABI"),
    "major version 255": ({"version": (255, 1)}, REFUSED, "DLPack ABI"),
    "the largest major version": ({"version": (2**32 - 1, 2**32 - 1)}, REFUSED, "DLPack ABI"),
    "a newer minor version": ({"version": (1, 2**32 - 1)}, 6.0, ""),
    "unknown flags": ({"flags": 2**64 - 8}, 6.0, ""),
    "readonly": ({"flags": 1}, 6.0, ""),
    "a copy": ({"flags": 2}, 6.0, ""),
    "no deleter": ({"deleter": ffi.NULL}, 6.0, ""),
    "no deleter and another version": ({"deleter": ffi.NULL, "version": (3, 0)}, REFUSED, "DLPack ABI"),
}
"""The same, for what only managed tensors have."""


# ---- what a view or an export does -----------------------------------------------------------------------------------
def raising(error):
    """A function of a table, or ``__dlpack__``, that raises `error`, or, of a type, a new one each time."""

    def function(tensor, out=None):
        raise error("no") if isinstance(error, type) else error

    return function


def fails(*_):
    raise ZeroDivisionError("not to be asked")


class Odd(Exception):
    def __init__(self, first, second, *, third):
        super().__init__(first)


Unmakeable = type("Unmakeable", (Exception,), {"__init__": raising(RuntimeError)})
Unprintable = type("Unprintable", (), {"__repr__": raising(ValueError)})
Mute = type("Mute", (BufferError,), {"__str__": fails})
Elsewhere = type("Elsewhere", (Exception,), {"__new__": lambda cls, *arguments: 5})
Outside = type("Outside", (BaseException,), {})  # what no ``except Exception`` catches

REWORDED = (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError)
UNCHANGED = (
    OSError(2, "no"), KeyError("key"), MemoryError(), StopIteration(3), StopAsyncIteration(), RecursionError("deep"),
    GeneratorExit(), KeyboardInterrupt(), SystemExit(3), SystemError("no"), Outside("no"), Odd(1, 2, third=3),
    Mute("no"), UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), ImportError("no", name="nothing"), EOFError(), Warning("no"),
    type("Shy", (TypeError,), {"__init__": lambda self, first, second: None})(1, 2),  # a TypeError with arguments of its own
)  # fmt: skip
if sys.version_info >= (3, 11):
    UNCHANGED += (BaseExceptionGroup("two", [ValueError(1), KeyboardInterrupt()]),)  # noqa: F821


def setting(code: int, kind, value=None):
    """It returns `code` with an exception set; `value`: of a type, a new one each time."""

    def function(tensor, out):
        raise Sets(code, kind, value("no") if isinstance(value, type) else value)

    return function


def returning(code: int):
    return lambda tensor, out: code


def before(act):
    """It does something, and then what an honest function does."""
    return lambda tensor, out: (act(tensor), honest(tensor, out))[1]


def after(act):
    return lambda tensor, out: (honest(tensor, out), act(tensor, out))[1]


def filled_and_fails(tensor, out):
    if ffi.typeof(out) is ffi.typeof("DLTensor *"):
        honest(tensor, out)
    return -1


FUNCTIONS = {
    **{f"-1 and no exception, {code}": (returning(code), REFUSED) for code in (-1, 1, 2, 256, 2**31 - 1, -(2**31))},
    "filled, -1 and no exception": (filled_and_fails, REFUSED),
    **{f"raises {kind.__name__}": (raising(kind), kind) for kind in REWORDED},
    **{f"raises {type(error).__name__}": (raising(error), type(error)) for error in UNCHANGED},
    "raises a new KeyboardInterrupt": (raising(KeyboardInterrupt), KeyboardInterrupt),
    **{f"{code} and {error.__name__} set": (setting(code, error, error), error)
       for code in (0, 1, -5, 2**31 - 1) for error in (BufferError, ValueError, KeyboardInterrupt)},
    **{f"filled, 0 and {error.__name__} set": (after(setting(0, error, error)), error)
       for error in (BufferError, OSError, KeyboardInterrupt)},
    "an exception type without a value": (setting(-1, ValueError), ValueError),
    "an exception type and a message": (setting(-1, ValueError, "no"), ValueError),
    "an exception type and arguments": (setting(-1, OSError, (2, "no")), FileNotFoundError),
    "an exception type and too few arguments": (setting(-1, Odd, (1,)), TypeError),
    "an exception type that cannot be made": (setting(-1, Unmakeable, "no"), RuntimeError),
    "an exception type that makes something else": (setting(-1, Elsewhere, "no"), (TypeError, SystemError)),
    "an exception of another type than its value": (setting(-1, BufferError, ValueError), (BufferError, ValueError)),
    "no exception type at all": (setting(-1, int, 5), (SystemError, TypeError)),
}  # fmt: skip
"""By name: what a view or an export does, and how a call ends."""


# ---- __dlpack__ ------------------------------------------------------------------------------------------------------
class Gives(Dunder):
    """``__dlpack__`` returns what `give(tensor)` returns."""

    def __init__(self, give, array=None, ledger=None, **lies):
        super().__init__(np.arange(4.0) if array is None else array, ledger, **lies)
        self.give = give

    def __dlpack__(self, *, max_version=None):
        self.asked.append(max_version)
        return self.give(self)


class GivesLegacy(Gives):
    def __dlpack__(self):
        self.asked.append("nothing")
        return self.give(self)


def versioned(tensor, name=b"dltensor_versioned"):
    return capsule(export_versioned(tensor.ledger, tensor.array, **tensor.lies), name)


def legacy(tensor, name=b"dltensor"):
    return capsule(export_legacy(tensor.ledger, tensor.array, **tensor.lies), name)


FalsePyCapsule = type("PyCapsule", (Unprintable,), {})
_table = exchange_table()
_table_capsule = capsule(_table, b"dlpack_exchange_api")

RETURNS = {
    "None": lambda tensor: None, "an int": lambda tensor: 3, "a string": lambda tensor: "dltensor_versioned",
    "itself": lambda tensor: tensor, "its array": lambda tensor: tensor.array,
    "an exception": lambda tensor: BufferError("returned, not raised"),
    "a tuple of a capsule": lambda tensor: (_table_capsule,),
    "what calls itself PyCapsule": lambda tensor: FalsePyCapsule(),
    "what cannot be printed": lambda tensor: Unprintable(), "another protocol's capsule": lambda tensor: _table_capsule,
    "a capsule without a name": lambda tensor: capsule(_table, None),
    "a capsule of a longer name": lambda tensor: capsule(_table, b"dltensor_versioned2"),
    "a capsule of a shorter name": lambda tensor: capsule(_table, b"dltenso"),
    "a capsule in capitals": lambda tensor: capsule(_table, b"DLTENSOR"),
    "a capsule with a name that is no text": lambda tensor: capsule(_table, b"\xff\xfe"),
    "a consumed legacy capsule": lambda tensor: capsule(_table, b"used_dltensor"),
    "a consumed capsule": lambda tensor: capsule(_table, b"used_dltensor_versioned"),
}  # fmt: skip
"""What ``__dlpack__`` returns that is no unconsumed capsule: refused, whatever it is."""


def without_keywords_only(self, **keywords):
    """A TypeError of its own for any keyword, and a versioned capsule without."""
    if keywords:
        raise TypeError("no max_version")
    return versioned(self)


class IsOfTheInstanceToo(Dunder):
    """An instance attribute stands before the method of the type, which is static here."""

    def __init__(self, *arguments, **lies):
        super().__init__(*arguments, **lies)
        self.__dlpack__ = IsOfTheInstanceToo.last = lambda *, max_version=None: versioned(self)

    __dlpack__ = staticmethod(lambda *, max_version=None: IsOfTheInstanceToo.last())


class EvilNames(type):
    def __getattribute__(cls, name):
        return fails() if name in ("__qualname__", "__module__", "__name__") else super().__getattribute__(name)


STRANGE = {
    "takes no keyword": {"__dlpack__": without_keywords_only},
    "takes a stream by position": {"__dlpack__": lambda self, stream=None, /: versioned(self)},
    "has a property that gives a function": {"__dlpack__": property(lambda self: lambda *, max_version=None: versioned(self))},
    "changes what it is given": {"__dlpack__": lambda self, **keywords: versioned(self) if not keywords.clear() else None},
    "names a device that it is not on": {"__dlpack_device__": lambda self: (2, 7)},
    "raises when asked for its device": {"__dlpack_device__": fails},
    "has a device that is no method": {"__dlpack_device__": "kDLCPU"},
    "raises for each attribute that it lacks": {"__getattr__": fails},
    "raises for its class": {"__class__": property(fails)},
    "says that it is an array": {"__class__": property(lambda self: np.ndarray)},
    "says that it is a tuple": {"__class__": property(lambda self: tuple)},
    "says that it is a float": {"__class__": property(lambda self: float)},
    "cannot be compared, hashed, printed, tested": dict.fromkeys(
        ("__eq__", "__hash__", "__bool__", "__len__", "__iter__", "__repr__", "__str__", "__format__", "__getitem__"), fails),
}  # fmt: skip
GOOD_IN_THE_END = (*(type(name, (Dunder,), attributes) for name, attributes in STRANGE.items()),
                   IsOfTheInstanceToo, EvilNames("Nameless", (Dunder,), {}), Legacy, Ignorant)  # fmt: skip
"""Classes that are strange, and whose ``__dlpack__`` gives a good tensor all the same."""


class RaisingDescriptor:
    def __init__(self, error):
        self.error = error

    def __get__(self, instance, owner=None):
        raise type(self.error)(*self.error.args)
