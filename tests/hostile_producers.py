"""Producers that break their promises: exchange tables whose functions do as a test says, classes with ``__dlpack__``.

The functions of a table are native (Numba ``@cfunc``), because only native code can return with an exception set; each
asks a cffi callback what to do, and that asks the tensor. Managed tensors are entered in a ``Ledger``, so every test
can say that each was given back once. Native functions also note when they are entered with an exception set: a debug
build of CPython aborts there.
"""

import collections
import ctypes
import sys
import threading

import made_producers
import numba
import numpy as np
from made_producers import (
    Dunder,
    Ignorant,
    Ledger,
    Legacy,
    address_of,
    capsule,
    exchange_table,
    export_legacy,
    export_versioned,
    fill,
    tabled_type,
)
from numba import types

from fastexchange._abi import ffi
from fastexchange.ground.dlpack import DLDeviceType, is_readable_by_cpu

ATTRIBUTE = "__dlpack_c_exchange_api__"
VIEW, EXPORT = "dltensor_from_py_object_no_sync", "managed_tensor_from_py_object_no_sync"
REQUIRED = ("managed_tensor_allocator", EXPORT, "managed_tensor_to_py_object_no_sync", "current_work_stream")

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
    """Raised by what a tensor does: return `code` with an exception of type `kind` and value `value` set."""

    def __init__(self, code: int, kind, value=None):
        super().__init__(code, kind, value)
        self.code, self.kind, self.value = code, kind, value


def _do(what, *arguments) -> int:
    """What the native function returns; what it sets becomes pending."""
    try:
        return what(*arguments) or 0
    except Sets as sets:
        code, _pending.error = sets.code, (sets.kind, sets.value)
    except BaseException as error:
        error.__traceback__ = None  # its frames hold the tensor
        code, _pending.error = -1, (type(error), error)
    return code


def _quiet(kind, value, traceback):
    """The onerror of the callbacks: nothing is printed, the callback fails without a reason."""


@ffi.callback("intptr_t()", onerror=_quiet)
def _error_type():
    return _new_reference(_pending.error[0]) if getattr(_pending, "error", None) is not None else 0


@ffi.callback("intptr_t()", onerror=_quiet)
def _error_value():
    value, _pending.error = _pending.error[1], None
    return _new_reference(value)


def _new_reference(thing) -> int:
    _incref(thing)
    return id(thing)


_incref = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


@ffi.callback("void(int)", onerror=_quiet)
def _note(which):
    violations.append(("a view", "an export", "a deleter", "a legacy deleter", "a capsule's destructor")[which])


def _native(callback, which: int):
    """A C function of two words (the second may be missing) that calls `callback` and sets what that leaves pending."""
    behave = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ssize_t, ctypes.c_ssize_t)(address_of(callback))
    error_type = ctypes.CFUNCTYPE(ctypes.c_ssize_t)(address_of(_error_type))
    error_value = ctypes.CFUNCTYPE(ctypes.c_ssize_t)(address_of(_error_value))
    note = ctypes.CFUNCTYPE(None, ctypes.c_int)(address_of(_note))

    @numba.cfunc("int32(intp, intp)")
    def function(first, second):
        if PyErr_Occurred() != 0:
            PyErr_Clear()
            note(which)
        code = behave(first, second)
        kind = error_type()
        if kind != 0:
            value = error_value()
            PyErr_SetObject(kind, value)
            Py_DecRef(kind)
            Py_DecRef(value)
        return code

    _kept.append((function, behave, error_type, error_value, note))
    return function.address


@ffi.callback("int(void *, DLTensor *)", error=-1, onerror=_quiet)
def _view(py_object, out):
    thing = ctypes.cast(address_of(py_object), ctypes.py_object).value
    return _do(Hostile.give_view, thing, out)


@ffi.callback("int(void *, DLManagedTensorVersioned **)", error=-1, onerror=_quiet)
def _export(py_object, out):
    thing = ctypes.cast(address_of(py_object), ctypes.py_object).value
    return _do(Hostile.give_export, thing, out)


@ffi.callback("int(DLManagedTensorVersioned *, intptr_t)", error=-1, onerror=_quiet)
def _delete(managed, _):
    return _do(_delete_and, managed, made_producers.delete_versioned)


@ffi.callback("int(DLManagedTensor *, intptr_t)", error=-1, onerror=_quiet)
def _delete_legacy(managed, _):
    return _do(_delete_and, managed, made_producers.delete_legacy)


_at_deletion: dict[int, collections.abc.Callable[[], object]] = {}  # by address of a managed tensor


def _delete_and(managed, delete):
    what = _at_deletion.pop(address_of(managed), None)
    delete(managed)
    if what is not None:
        what()


@ffi.callback("int(void *, intptr_t)", error=-1, onerror=_quiet)
def _destroy(py_capsule, _):
    return _do(_destroyed, address_of(py_capsule))


def _destroyed(address: int):
    destroyed_names.append(_capsule_name(address))
    if at_destruction:
        at_destruction[-1]()


_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", ctypes.pythonapi))
_set_destructor = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)
destroyed_names: list[bytes] = []
"""The names that capsules with a destructor had when they died."""
at_destruction: list[collections.abc.Callable[[], object]] = []
"""What the destructors do."""

view_function, export_function = _native(_view, 0), _native(_export, 1)
delete_function, delete_legacy_function = _native(_delete, 2), _native(_delete_legacy, 3)
destroy_function = _native(_destroy, 4)


def managed_and(ledger: Ledger, array: np.ndarray, what, export=export_versioned, **lies):
    """A new managed tensor whose deleter crosses it out and then does `what`."""
    function = delete_function if export is export_versioned else delete_legacy_function
    kind = "DLManagedTensorVersioned" if export is export_versioned else "DLManagedTensor"
    field = dict(ffi.typeof(kind).fields)["deleter"]
    managed = export(ledger, array, deleter=ffi.cast(field.type, function), **lies)
    _at_deletion[address_of(managed)] = what
    return managed


def capsule_with_destructor(cdata, name: bytes):
    """A PyCapsule whose destructor notes the name that it has then, and does what `at_destruction` says."""
    made = capsule(cdata, name)
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

    def give_view(self, out):
        if not isinstance(self, Hostile):
            raise TypeError(f"not one of mine, but a {type(self).__name__}")
        self.looks += 1
        if self.view is not None and not self.behaves:
            return self.view(self, out)
        return honest_view(self, out, **({} if self.behaves else self.lies))

    def give_export(self, out):
        if not isinstance(self, Hostile):
            raise TypeError(f"not one of mine, but a {type(self).__name__}")
        self.looks += 1
        if self.export is not None and not self.behaves:
            return self.export(self, out)
        return honest_export(self, out, **({} if self.behaves else self.lies))


def honest_view(tensor, out, **lies) -> int:
    tensor.words.append(fill(out, tensor.array, **lies))
    return 0


def honest_export(tensor, out, **lies) -> int:
    if tensor.delete is None or tensor.behaves:
        out[0] = export_versioned(tensor.ledger, tensor.array, **lies)
    else:
        out[0] = managed_and(tensor.ledger, tensor.array, tensor.delete, **lies)
    return 0


def hostile_type(name="HostileTensor", bases=(Hostile,), attributes=None, **changes) -> type:
    """A new type with a table of its own, of native functions that do as its instances say."""
    return tabled_type(name, bases, attributes, **{VIEW: view_function, EXPORT: export_function, **changes})


# ---- what a view or an export says of the tensor ---------------------------------------------------------------------

REFUSED = BufferError


def _devices():
    known = [device for device in DLDeviceType if not is_readable_by_cpu(device)]
    for device in known:
        yield f"device {device.name}", {"device_type": int(device), "device_id": 1}, REFUSED, device.name
    for number in (0, 5, 6, 19, 33, 62, 63, 64, 65, 67, 127, 257, 2**31 - 1):
        yield f"device {number}", {"device_type": number}, REFUSED, str(number)
    for number in (-1, -(2**31), -(2**31) + 1):
        yield f"device {number}", {"device_type": number}, REFUSED, "device"
    for number in (3, 11, 13):
        yield f"readable device {number}", {"device_type": number, "device_id": -1}, 6.0, ""


def _ranks():
    for number in (-1, -(2**31), -(2**31) + 1, 65, 256, 257, 2**16 + 1, 2**31 - 1):
        yield f"ndim {number}", {"ndim": number}, REFUSED, str(number)
    yield "NULL shape", {"shape": None}, REFUSED, "shape"
    yield "NULL shape and strides", {"shape": None, "strides": None}, REFUSED, "shape"
    yield "NULL shape of 64 dimensions", {"shape": None, "ndim": 64}, REFUSED, "shape"
    yield "NULL strides", {"strides": None}, 6.0, ""
    yield "no dimensions", {"ndim": 0, "shape": None, "strides": None}, 0.0, ""
    yield "no dimensions and NULL data", {"ndim": 0, "shape": None, "strides": None, "data": 0}, REFUSED, "NULL"


def _sizes():
    def sized(shape, strides=None, **more):
        return {"ndim": len(shape), "shape": shape, "strides": strides or (0,) * len(shape), **more}

    for shape in [(-1,), (-(2**63),), (-4,), (4, -1), (-1, -4), (0, -1), (-1, 0), (-(2**32), 2**32), (-(2**63), 2)]:
        yield f"negative size {shape}", sized(shape), REFUSED, "shape"
    for shape in [(0,), (0, 0), (3, 0), (0, 2**20), (1, 0, 1)]:
        yield f"no elements {shape}", sized(shape), 0.0, ""
        yield f"no elements {shape} and NULL data", sized(shape, data=0), 0.0, ""
    for shape in [(0, 2**62), (2**40, 0, 2**40), (0, 2**63 - 1), (2**62, 2**62, 0)]:
        yield f"no elements {shape}", sized(shape), (REFUSED, 0.0), ""
    for shape in [
        (2**62,), (2**63 - 1,), (2**56,), (2**32, 2**32), (2**62 + 1, 4), (2**31, 2**31), (2**31 - 1, 2**31 - 1),
        (2**21, 2**21, 2**21), (2**16, 2**16, 2**16, 2**16), (2**8,) * 8, (2,) * 64, (3,) * 40, (2**63 - 1, 2**63 - 1),
        (2**33, 2**31, 2), (1, 2**62, 1), (2**30, 2**30, 2),
    ]:  # fmt: skip
        yield f"too many elements {_short(shape)}", sized(shape), REFUSED, "64 bits"
    wide = {"code": 5, "bits": 128}
    for shape in [(2**59, 2), (2**30, 2**29), (2**31 - 1, 2**29), (2**31 - 1, 2**28)]:
        yield f"too many bytes {shape}", sized(shape, **wide), REFUSED, "64 bits"
    for stride in [2**62, -(2**63), 2**63 - 1, -(2**62), 2**60, 2**61, -(2**60)]:
        yield f"a stride of {stride}", sized((2,), (stride,)), REFUSED, "64 bits"
        yield f"a stride of {stride}, one element", sized((1,), (stride,)), (REFUSED, 0.0), ""
    yield (
        "strides NULL and too many elements",
        {"ndim": 2, "shape": (2**40, 2**40), "strides": None},
        REFUSED,
        "64 bits",
    )


def _short(shape) -> str:
    return str(shape) if len(shape) < 8 else f"{shape[0]} ** {len(shape)}"


def _addresses():
    array = np.arange(4.0)
    at = array.ctypes.data
    _kept.append(array)
    for offset in (0, 8, 4088, 4096, 8192, 2**20, 2**40):
        yield f"NULL data and a byte offset of {offset}", {"data": 0, "byte_offset": offset}, REFUSED, "NULL"
    for data in (1, 8, 4095):
        yield f"data {data}", {"data": data}, REFUSED, ""
    yield "data in the first page because of its byte offset", {"data": 4096, "byte_offset": 2**64 - 4000}, REFUSED, ""
    yield "a byte offset", {"data": at - 64, "byte_offset": 64}, 6.0, ""
    yield "a byte offset that wraps", {"data": at + 8, "byte_offset": 2**64 - 8}, (REFUSED, 6.0), ""
    yield "the largest byte offset", {"data": at + 1, "byte_offset": 2**64 - 1}, (REFUSED, 6.0), ""
    for distance in (1, 4, 7):
        buffer = np.zeros(64, np.uint8)
        odd = buffer[distance : distance + 32].view(np.float64)
        odd[:] = array
        _kept.append(buffer)
        yield f"misaligned by {distance}", {"data": odd.ctypes.data}, 6.0, ""
        yield (
            f"misaligned by a byte offset of {distance}",
            {"data": buffer.ctypes.data, "byte_offset": distance},
            6.0,
            "",
        )


_WIDTHS = {0: (8, 16, 32, 64), 1: (8, 16, 32, 64), 2: (16, 32, 64), 5: (64, 128), 6: (8,)}


def _dtypes():
    for lanes in (0, 2, 4, 256, 2**16 - 1):
        yield f"{lanes} lanes", {"lanes": lanes}, REFUSED, f"{lanes} lanes"
    for code, widths in _WIDTHS.items():
        for bits in (0, 1, 3, 4, 7, 8, 12, 16, 24, 32, 63, 65, 80, 96, 128, 192, 255):
            if bits not in widths:
                yield _element(code, bits)
    for code in (*range(7, 15), 18, 19, 100, 127, 128, 200, 255):
        yield _element(code, 8)
    for code, bits in ((15, 6), (16, 6), (17, 4), (4, 16), (4, 32), (3, 64), (3, 8), (18, 64), (255, 255)):
        yield _element(code, bits)


def _element(code: int, bits: int):
    """Refused; but types of DLPack that NumPy lacks may have been registered, by ml_dtypes for one: then it is known."""
    may_be_known = (code, bits) in ((4, 16), (5, 32), (15, 6), (16, 6), (17, 4)) or (7 <= code <= 14 and bits == 8)
    want = (REFUSED, 4) if may_be_known else REFUSED
    return f"code {code} of {bits} bits", {"code": code, "bits": bits}, want, f"of {bits} bits"


def _several():
    yield "everything wrong", {
        "device_type": 77, "ndim": -5, "shape": None, "strides": None, "lanes": 9, "code": 99, "data": 0,
    }, REFUSED, ""  # fmt: skip
    yield "everything zero", {
        "device_type": 0, "ndim": 0, "shape": None, "strides": None, "lanes": 0, "code": 0, "bits": 0, "data": 0,
    }, REFUSED, ""  # fmt: skip
    yield "everything one", {
        "device_type": -1, "device_id": -1, "ndim": -1, "shape": None, "strides": None, "lanes": 65535, "code": 255,
        "bits": 255, "data": 2**64 - 1, "byte_offset": 2**64 - 1,
    }, REFUSED, ""  # fmt: skip


CONTENTS = {
    name: (lies, want, word)
    for group in (_devices, _ranks, _sizes, _addresses, _dtypes, _several)
    for name, lies, want, word in group()
}
"""By name: the lies, how a call ends (a result, an exception type, or one of several), a word of the message."""

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


class Odd(Exception):
    """An exception that cannot be made from a message."""

    def __init__(self, first, second, *, third):
        super().__init__(first)


class Unmakeable(Exception):
    """An exception that cannot be made at all."""

    def __init__(self, *arguments):
        raise RuntimeError("cannot be made")


class Mute(BufferError):
    """An exception without words."""

    def __str__(self):
        raise RuntimeError("no words")


class Elsewhere(Exception):
    """An exception whose constructor makes something else."""

    def __new__(cls, *arguments):
        return 5


class Outside(BaseException):
    """What no ``except Exception`` catches."""


class Shy(TypeError):
    """A kind of TypeError with arguments of its own."""

    def __init__(self, first, second):
        super().__init__(first, second)


REWORDED = (BufferError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError)
UNCHANGED = (
    OSError(2, "no"), KeyError("key"), MemoryError(), StopIteration(3), StopAsyncIteration(), RecursionError("deep"),
    GeneratorExit(), KeyboardInterrupt(), SystemExit(3), SystemError("no"), Outside("no"), Odd(1, 2, third=3),
    Mute("no"), Shy(1, 2), UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), ImportError("no", name="nothing"), EOFError(),
    Warning("no"),
)  # fmt: skip
if sys.version_info >= (3, 11):
    UNCHANGED += (BaseExceptionGroup("two", [ValueError(1), KeyboardInterrupt()]),)  # noqa: F821


def _raise(error):
    """`error`: an exception, or the type of a new one each time."""

    def function(tensor, out):
        raise error("no") if isinstance(error, type) else error

    return function


def _sets(code: int, kind, value=None, honest: bool = False):
    """`value`: a function makes a new one each time."""

    def function(tensor, out):
        if honest:
            fill_either(tensor, out)
        raise Sets(code, kind, value() if callable(value) else value)

    return function


def _returns(code: int):
    return lambda tensor, out: code


def fill_either(tensor, out) -> None:
    """What an honest function of the table writes to `out`, a tensor or a pointer to one."""
    if ffi.typeof(out) is ffi.typeof("DLTensor *"):
        honest_view(tensor, out)
    else:
        honest_export(tensor, out)


def _told_and_fails(tensor, out):
    if ffi.typeof(out) is ffi.typeof("DLTensor *"):
        honest_view(tensor, out)
    return -1


FUNCTIONS = {
    **{f"-1 and no exception, {code}": (_returns(code), REFUSED) for code in (-1, 1, 2, 256, 2**31 - 1, -(2**31))},
    "filled, -1 and no exception": (_told_and_fails, REFUSED),
    **{f"raises {kind.__name__}": (_raise(kind), kind) for kind in REWORDED},
    **{f"raises {type(error).__name__}": (_raise(error), type(error)) for error in UNCHANGED},
    **{
        f"{code} and {error.__name__} set": (_sets(code, error, lambda error=error: error("no")), error)
        for code in (0, 1, -5, 2**31 - 1)
        for error in (BufferError, ValueError, KeyboardInterrupt)
    },
    **{
        f"filled, 0 and {error.__name__} set": (_sets(0, error, lambda error=error: error("no"), honest=True), error)
        for error in (BufferError, OSError, KeyboardInterrupt)
    },
    "an exception type without a value": (_sets(-1, ValueError), ValueError),
    "an exception type and a message": (_sets(-1, ValueError, "no"), ValueError),
    "an exception type and arguments": (_sets(-1, OSError, (2, "no")), FileNotFoundError),
    "an exception type and too few arguments": (_sets(-1, Odd, (1,)), TypeError),
    "an exception type that cannot be made": (_sets(-1, Unmakeable, "no"), RuntimeError),
    "an exception type that makes something else": (_sets(-1, Elsewhere, "no"), (TypeError, SystemError)),
    "an exception of another type than its value": (
        _sets(-1, BufferError, lambda: ValueError("no")),
        (BufferError, ValueError),
    ),
    "no exception type at all": (_sets(-1, int, 5), (SystemError, TypeError)),
}
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
    """The same, of the years before ``max_version``."""

    def __dlpack__(self):
        self.asked.append("nothing")
        return self.give(self)


def versioned(tensor, name=b"dltensor_versioned"):
    """An honest capsule, or one of another name."""
    return capsule(export_versioned(tensor.ledger, tensor.array, **tensor.lies), name)


def legacy(tensor, name=b"dltensor"):
    """An honest legacy capsule, or one of another name."""
    return capsule(export_legacy(tensor.ledger, tensor.array, **tensor.lies), name)


class FalsePyCapsule:
    """A class that calls itself ``PyCapsule`` and cannot be printed."""

    def __repr__(self):
        raise ValueError("cannot be printed")


FalsePyCapsule.__name__ = FalsePyCapsule.__qualname__ = "PyCapsule"


class Unprintable:
    """An object that says nothing of itself."""

    def __repr__(self):
        raise ValueError("cannot be printed")

    __str__ = __repr__


_table_capsule = capsule(exchange_table(), b"dlpack_exchange_api")
_table = exchange_table()

RETURNS = {
    "None": lambda tensor: None,
    "an int": lambda tensor: 3,
    "0": lambda tensor: 0,
    "a bool": lambda tensor: True,
    "a string": lambda tensor: "dltensor_versioned",
    "bytes": lambda tensor: b"dltensor",
    "a type": lambda tensor: int,
    "itself": lambda tensor: tensor,
    "its array": lambda tensor: tensor.array,
    "NotImplemented": lambda tensor: NotImplemented,
    "an exception": lambda tensor: BufferError("returned, not raised"),
    "a tuple of a capsule": lambda tensor: (_table_capsule,),
    "a generator": lambda tensor: (i for i in ()),
    "what calls itself PyCapsule": lambda tensor: FalsePyCapsule(),
    "what cannot be printed": lambda tensor: Unprintable(),
    "another protocol's capsule": lambda tensor: _table_capsule,
    "a capsule without a name": lambda tensor: capsule(_table, None),
    "a capsule with an empty name": lambda tensor: capsule(_table, b""),
    "a capsule of a longer name": lambda tensor: capsule(_table, b"dltensor_versioned2"),
    "a capsule of a shorter name": lambda tensor: capsule(_table, b"dltenso"),
    "a capsule in capitals": lambda tensor: capsule(_table, b"DLTENSOR"),
    "a capsule with a name that is no text": lambda tensor: capsule(_table, b"\xff\xfe"),
    "a consumed legacy capsule": lambda tensor: capsule(_table, b"used_dltensor"),
    "a consumed capsule": lambda tensor: capsule(_table, b"used_dltensor_versioned"),
}
"""What ``__dlpack__`` returns that is no unconsumed capsule: refused, whatever it is."""


class OnlyWithout(Dunder):
    """``__dlpack__`` refuses ``max_version`` by a TypeError of its own and gives a versioned capsule without it."""

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        if keywords:
            raise self.error()
        return versioned(self)

    def error(self):
        return TypeError("no max_version")


class Positional(Dunder):
    """``__dlpack__`` takes a stream, and nothing by name."""

    def __dlpack__(self, stream=None, /):
        self.asked.append(stream)
        return versioned(self)


class Property(Dunder):
    """``__dlpack__`` is a property that gives a function."""

    @property
    def __dlpack__(self):
        return lambda *, max_version=None: versioned(self)


class Static(Dunder):
    """``__dlpack__`` is a static method."""

    last = None

    def __init__(self, *arguments, **lies):
        super().__init__(*arguments, **lies)
        Static.last = self

    @staticmethod
    def __dlpack__(*, max_version=None):
        return versioned(Static.last)


class CallableObject:
    """A callable that is no function."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __call__(self, *, max_version=None):
        return versioned(self.tensor)


class InstanceToo(Dunder):
    """An instance attribute stands before the method of the type."""

    def __init__(self, *arguments, **lies):
        super().__init__(*arguments, **lies)
        self.__dlpack__ = CallableObject(self)


class WrongMaximum(Ignorant):
    """``__dlpack__`` changes what it was given."""

    def __dlpack__(self, **keywords):
        keywords.clear()
        return versioned(self)


class LyingDevice(Dunder):
    """``__dlpack_device__`` names a device that the memory is not on."""

    def __dlpack_device__(self):
        return (2, 7)


class RaisingDevice(Dunder):
    """``__dlpack_device__`` raises."""

    def __dlpack_device__(self):
        raise RuntimeError("no device")


class NonsenseDevice(Dunder):
    """``__dlpack_device__`` is no method."""

    __dlpack_device__ = "kDLCPU"


class EvilGetattr(Dunder):
    """``__getattr__`` raises for all that is not there."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


class EvilClass(Dunder):
    """``__class__`` raises."""

    @property
    def __class__(self):
        raise ZeroDivisionError("__class__")


class ClaimsArray(Dunder):
    """``__class__`` says ndarray."""

    __class__ = property(lambda self: np.ndarray)


class ClaimsTuple(Dunder):
    """``__class__`` says tuple."""

    __class__ = property(lambda self: tuple)


class ClaimsFloat(Dunder):
    """``__class__`` says float."""

    __class__ = property(lambda self: float)


class EvilEquality(Dunder):
    """It can be neither compared nor hashed nor printed nor tested."""

    def _raise(self, *_):
        raise ZeroDivisionError("not to be asked")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = __format__ = __getitem__ = _raise


class EvilNames(type):
    """A metaclass whose types do not tell their names."""

    def __getattribute__(cls, name):
        if name in ("__qualname__", "__module__", "__name__"):
            raise ZeroDivisionError(name)
        return super().__getattribute__(name)


class Nameless(Dunder, metaclass=EvilNames):
    """A tensor of a type that does not tell its name."""


GOOD_IN_THE_END = (
    OnlyWithout, Positional, Property, Static, InstanceToo, WrongMaximum, LyingDevice, RaisingDevice,
    NonsenseDevice, EvilGetattr, EvilClass, ClaimsArray, ClaimsTuple, ClaimsFloat, EvilEquality, Nameless, Legacy,
    Ignorant,
)  # fmt: skip
"""Classes that are strange, and whose ``__dlpack__`` gives a good tensor all the same."""


# ---- values of __dlpack_c_exchange_api__ -----------------------------------------------------------------------------


class RaisingDescriptor:
    """A descriptor that raises an exception like `error`, a new one each time."""

    def __init__(self, error):
        self.error = error

    def __get__(self, instance, owner=None):
        raise type(self.error)(*self.error.args)


def metaclass_with(value) -> type:
    """A metaclass with a property that gives `value`, or raises an exception like it."""

    def read(cls):
        if isinstance(value, BaseException):
            raise type(value)(*value.args)
        return value

    return type("Meta", (type,), {ATTRIBUTE: property(read)})


def chain(*versions, last=None):
    """Tables of these versions, each with the next behind it; the newest."""
    table = last
    for version in reversed(versions):
        table = exchange_table(version=version, prev=table, **{VIEW: view_function, EXPORT: export_function})
    return table


def _cycle(*versions):
    first = chain(*versions)
    end = first
    while end.header.prev_api != ffi.NULL:
        end = ffi.cast("DLPackExchangeAPI *", end.header.prev_api)
    end.header.prev_api = ffi.cast("DLPackExchangeAPIHeader *", first)
    return first


def _zeros():
    return exchange_table(version=(0, 0), **dict.fromkeys((VIEW, *REQUIRED)))


def in_capsule(table):
    return capsule(table, b"dlpack_exchange_api")


def unusable_tables():
    """Values that are no table of ours. A type that has ``__dlpack__`` is asked by that; one without is refused."""
    good = chain((1, 3))
    for name in (
        b"dltensor",
        b"dltensor_versioned",
        b"dlpack_exchange_api ",
        b"DLPACK_EXCHANGE_API",
        b"",
        None,
        b"\xff",
    ):
        yield f"a capsule named {name!r}", capsule(good, name)
    for value in (
        0,
        1,
        -1,
        address_of(good),
        "capsule",
        b"dlpack_exchange_api",
        (),
        [],
        {},
        int,
        1.5,
        object(),
        False,
        ...,
    ):
        yield f"{type(value).__name__} {value!r:.20}", value
    yield "what calls itself PyCapsule", FalsePyCapsule()
    yield "what cannot be printed", Unprintable()
    yield "a list of a capsule", [in_capsule(good)]
    yield "a function", lambda: in_capsule(good)
    yield "a cffi pointer", good
    yield "a table of zeros", in_capsule(_zeros())
    for version in [(0, 0), (0, 99), (2, 0), (255, 255), (2**32 - 1, 2**32 - 1), (256, 1), (257, 3), (2**16 + 1, 3)]:
        yield f"version {version}", in_capsule(chain(version))
    for name in REQUIRED:
        yield f"no {name}", in_capsule(exchange_table(**{VIEW: view_function, EXPORT: export_function, name: None}))
    yield "nothing but a version", in_capsule(exchange_table(**dict.fromkeys((VIEW, *REQUIRED))))
    yield "nothing but a view", in_capsule(exchange_table(**{**dict.fromkeys(REQUIRED), VIEW: view_function}))
    yield "a table that is its own predecessor", in_capsule(_cycle((2, 0)))
    yield "two tables behind each other", in_capsule(_cycle((3, 0), (2, 0)))
    yield "a long circle of tables", in_capsule(_cycle(*[(2, i) for i in range(100)]))
    yield "a long chain of tables", in_capsule(chain(*[(2, i) for i in range(300)]))
    yield "a descriptor that raises AttributeError", RaisingDescriptor(AttributeError("no"))
    _kept.append(good)


def usable_tables():
    """Values that hold a table of ours, though not where or as expected."""
    yield "behind version 2", in_capsule(chain((2, 0), (1, 3)))
    yield "behind versions 255, 3 and 0", in_capsule(chain((255, 0), (3, 0), (0, 9), (1, 0)))
    yield "behind 60 tables", in_capsule(chain(*[(2, i) for i in range(60)], (1, 3)))
    yield "before a circle", in_capsule(chain((1, 3), last=_cycle((1, 2), (1, 1))))
    yield "before itself", in_capsule(_cycle((1, 3)))
    yield "before a table that is unusable", in_capsule(chain((1, 3), last=_zeros()))
    yield "a newer minor version", in_capsule(chain((1, 2**32 - 1)))
    yield "an older minor version", in_capsule(chain((1, 0)))
    yield "without views", in_capsule(exchange_table(**{VIEW: None, EXPORT: export_function}))


def raising_tables():
    """Errors that reading the attribute raises, by its value or by a metaclass: ``(name, value, meta, error)``."""
    for error in (
        ValueError("no"), RuntimeError("no"), TypeError("no"), KeyError("no"), OSError("no"), StopIteration(),
        Mute("no"), KeyboardInterrupt(), SystemExit(3), Outside("no"), GeneratorExit(),
    ):  # fmt: skip
        yield f"a descriptor that raises {type(error).__name__}", RaisingDescriptor(error), type, error
        yield f"a metaclass that raises {type(error).__name__}", None, metaclass_with(error), error
