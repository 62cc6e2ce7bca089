"""CPython for native code: reference counts, errors, object layouts, and types with a vectorcall slot.

Every offset is either read from the interpreter (``__basicsize__``, ``__flags__``) or checked at import by :func:`verify`. A
failed check is listed in ``Runtime.unverified``, and the code that needs the offset takes a safer path.
"""

import ctypes
import datetime
import sys
import types as python_types
from typing import Any

from numba import types

from .._abi import ffi
from ..interpreter import DISABLED, NONE_IS_IMMORTAL, TUPLE_ITEMS, is_free_threaded
from .native import address_of, external, global_address, load, native, store
from .numba_internals import CPUDispatcher, DispatcherBase, note_failure
from .passing import reraise_passing
from .pythonapi import PyType_GetSlot, prototype
from .readable import is_readable

CDEF = """
typedef struct { int64_t ob_refcnt; void *ob_type; } fx_object;
typedef struct { fx_object ob_base; double ob_fval; } fx_float;
typedef struct { fx_object ob_base; double real; double imag; } fx_complex;
typedef struct { fx_object ob_base; int64_t ob_size; } fx_sized;                          /* PyVarObject */
typedef struct { fx_object ob_base; uintptr_t vectorcall; uintptr_t context; } fx_callable;
typedef struct { char *name; void *function; int flags; char *doc; } fx_method;          /* PyMethodDef */
typedef struct { char *name; void *get; void *set; char *doc; void *closure; } fx_getset; /* PyGetSetDef */
typedef struct { fx_object ob_base; void *type; void *name; void *qualname; void *definition; } fx_descriptor;
"""

POINTER = types.intp  # an address, or a count of Py_ssize_t
INT = types.int32

OB_TYPE = ffi.offsetof("fx_object", "ob_type")
OB_FVAL = ffi.offsetof("fx_float", "ob_fval")
OB_SIZE = ffi.offsetof("fx_sized", "ob_size")
OB_ITEM = TUPLE_ITEMS
CALLABLE_VECTORCALL = ffi.offsetof("fx_callable", "vectorcall")
CALLABLE_CONTEXT = ffi.offsetof("fx_callable", "context")
NUMPY_SCALAR_VALUE = ffi.sizeof("fx_object")  # NumPy's scalars of up to 16 bytes: the value follows the object's head

Py_IncRef = external("Py_IncRef", types.void, POINTER)
Py_DecRef = external("Py_DecRef", types.void, POINTER)
PyErr_Occurred = external("PyErr_Occurred", POINTER)
PyErr_Clear = external("PyErr_Clear", types.void)
PyErr_ExceptionMatches = external("PyErr_ExceptionMatches", INT, POINTER)
PyErr_SetInterrupt = external("PyErr_SetInterrupt", types.void)
PyErr_SetNone = external("PyErr_SetNone", types.void, POINTER)
PyNumber_Remainder = external("PyNumber_Remainder", POINTER, POINTER, POINTER)
PyErr_SetObject = external("PyErr_SetObject", types.void, POINTER, POINTER)
PyErr_SetString = external("PyErr_SetString", types.void, POINTER, POINTER)
PyErr_Fetch = external("PyErr_Fetch", types.void, POINTER, POINTER, POINTER)
PyErr_NormalizeException = external("PyErr_NormalizeException", types.void, POINTER, POINTER, POINTER)
PyErr_Restore = external("PyErr_Restore", types.void, POINTER, POINTER, POINTER)
PyException_SetTraceback = external("PyException_SetTraceback", INT, POINTER, POINTER)
PyEval_SaveThread = external("PyEval_SaveThread", POINTER)
PyEval_RestoreThread = external("PyEval_RestoreThread", types.void, POINTER)
PyGILState_Ensure = external("PyGILState_Ensure", INT)
PyGILState_Release = external("PyGILState_Release", types.void, INT)
Py_IsInitialized = external("Py_IsInitialized", INT)
PyMem_RawMalloc = external("PyMem_RawMalloc", POINTER, POINTER)
PyMem_RawFree = external("PyMem_RawFree", types.void, POINTER)
PyLong_AsLongLongAndOverflow = external("PyLong_AsLongLongAndOverflow", types.int64, POINTER, POINTER)
PyLong_AsUnsignedLongLong = external("PyLong_AsUnsignedLongLong", types.uint64, POINTER)
PyLong_FromSsize_t = external("PyLong_FromSsize_t", POINTER, POINTER)
PyFloat_FromDouble = external("PyFloat_FromDouble", POINTER, types.float64)
PyObject_Call = external("PyObject_Call", POINTER, POINTER, POINTER, POINTER)
PyObject_VectorcallDict = external("PyObject_VectorcallDict", POINTER, POINTER, POINTER, POINTER, POINTER)
PyObject_VectorcallMethod = external("PyObject_VectorcallMethod", POINTER, POINTER, POINTER, POINTER, POINTER)
PyObject_GetAttr = external("PyObject_GetAttr", POINTER, POINTER, POINTER)
PyObject_GetAttrString = external("PyObject_GetAttrString", POINTER, POINTER, POINTER)
PyObject_CallNoArgs = external("PyObject_CallNoArgs", POINTER, POINTER)
PyDict_GetItemWithError = external("PyDict_GetItemWithError", POINTER, POINTER, POINTER)
PyDict_New = external("PyDict_New", POINTER)
PyDict_SetItem = external("PyDict_SetItem", INT, POINTER, POINTER, POINTER)
PyImport_ImportModule = external("PyImport_ImportModule", POINTER, POINTER)
PyTuple_New = external("PyTuple_New", POINTER, POINTER)
PyList_New = external("PyList_New", POINTER, POINTER)
PyList_Size = external("PyList_Size", POINTER, POINTER)
PyList_GetItem = external("PyList_GetItem", POINTER, POINTER, POINTER)
PyList_SetItem = external("PyList_SetItem", INT, POINTER, POINTER, POINTER)
PyInterpreterState_Get = external("PyInterpreterState_Get", POINTER)
PyInterpreterState_ThreadHead = external("PyInterpreterState_ThreadHead", POINTER, POINTER)
PyThreadState_Next = external("PyThreadState_Next", POINTER, POINTER)
PyGC_Disable = external("PyGC_Disable", INT)
PyGC_Enable = external("PyGC_Enable", INT)
PyWeakref_NewRef = external("PyWeakref_NewRef", POINTER, POINTER, POINTER)
PyList_AsTuple = external("PyList_AsTuple", POINTER, POINTER)
PyUnicode_AsUTF8AndSize = external("PyUnicode_AsUTF8AndSize", POINTER, POINTER, POINTER)
PyUnicode_Compare = external("PyUnicode_Compare", INT, POINTER, POINTER)
PyUnicode_FromString = external("PyUnicode_FromString", POINTER, POINTER)
PyCapsule_IsValid = external("PyCapsule_IsValid", INT, POINTER, POINTER)
PyCapsule_GetPointer = external("PyCapsule_GetPointer", POINTER, POINTER, POINTER)
PyCapsule_SetName = external("PyCapsule_SetName", INT, POINTER, POINTER)
PyCapsule_New = external("PyCapsule_New", POINTER, POINTER, POINTER, POINTER)
PyCapsule_SetDestructor = external("PyCapsule_SetDestructor", INT, POINTER, POINTER)
is_finalizing = external("Py_IsFinalizing" if hasattr(ctypes.pythonapi, "Py_IsFinalizing") else "_Py_IsFinalizing", INT)
PyLong_AsSsize_t = external("PyLong_AsSsize_t", POINTER, POINTER)
PyType_IsSubtype = external("PyType_IsSubtype", INT, POINTER, POINTER)

CapsuleType = type(datetime.datetime_CAPI)  # types.CapsuleType came with 3.13
VECTORCALL_ARGUMENTS_OFFSET = -(2**63)  # PY_VECTORCALL_ARGUMENTS_OFFSET as a signed word
TRIED_SITE = 2**62  # our own bits of nargsf, which no number of arguments reaches: see vectorcall.call_any
HAS_LEARNT = 2**61
MADE_OUTPUTS = 2**60  # see allocation.vectorcall_with_outputs
NARGS_MASK = MADE_OUTPUTS - 1  # nargsf & NARGS_MASK is PyVectorcall_NARGS(nargsf)


# ---- references ----------------------------------------------------------------------------------------------------

def _word(address: int) -> int:
    return ctypes.c_ssize_t.from_address(address).value


def _counts_references() -> bool:
    """Whether the first word of an object is its reference count, and as 32 bits negative for objects that are not counted."""
    thing = object()
    counts, nones = [_word(id(thing))], [_word(id(None))]
    holders = [thing, thing, thing, None, None, None, None, None]
    counts.append(_word(id(thing)))
    nones.append(_word(id(None)))
    del holders[:1]
    counts.append(_word(id(thing)))
    return counts == [1, 4, 3] and (nones[0] == nones[1] or not NONE_IS_IMMORTAL)


CALLS_TO_COUNT = hasattr(sys, "gettotalrefcount") or not _counts_references()
"""Whether CPython is called for each reference: a debug build also counts all in total, a free-threaded one has two counts."""


@native
def Py_TYPE(ob):
    """The type of `ob`, borrowed."""
    return load(ob + OB_TYPE)


@native
def incref(ob):
    """``Py_INCREF``. Calls CPython for immortal objects, whose count as 32 bits is negative (from 3.12 on)."""
    count = load(ob)
    if CALLS_TO_COUNT or types.int32(count) < 0:
        Py_IncRef(ob)
    else:
        store(ob, count + 1)


@native
def decref(ob):
    """``Py_DECREF``. Calls CPython to drop the last reference."""
    count = load(ob)
    if CALLS_TO_COUNT or types.int32(count) <= 1:
        Py_DecRef(ob)
    else:
        store(ob, count - 1)


@native
def new_none():
    """A new reference to None."""
    none = global_address("_Py_NoneStruct")
    if not NONE_IS_IMMORTAL:
        if CALLS_TO_COUNT:
            Py_IncRef(none)
        else:
            store(none, load(none) + 1)
    return none


# ---- exceptions ----------------------------------------------------------------------------------------------------


@native
def save_error(error):
    """Move the pending exception, or none, to the three words at `error`: type, value and traceback, owned."""
    PyErr_Fetch(error, error + 8, error + 16)


@native
def restore_error(error):
    """Make the exception that :func:`save_error` has stored at `error`, or none, the pending one."""
    PyErr_Restore(load(error), load(error + 8), load(error + 16))


# ---- calls ---------------------------------------------------------------------------------------------------------

if hasattr(ctypes.pythonapi, "PyObject_CallOneArg"):
    PyObject_CallOneArg = external("PyObject_CallOneArg", POINTER, POINTER, POINTER)
else:  # in CPython 3.10, where it is a part of C headers; PyObject_CallFunctionObjArgs is variadic: some ABIs call that otherwise
    PyObject_CallObject = external("PyObject_CallObject", POINTER, POINTER, POINTER)

    @native
    def PyObject_CallOneArg(callable_, argument):
        """Call an object with one argument. Returns a new reference, or 0 with an exception set."""
        given = PyTuple_New(1)
        if given == 0:
            return 0
        incref(argument)
        store(given + OB_ITEM, argument)
        result = PyObject_CallObject(callable_, given)
        Py_DecRef(given)
        return result


# ---- methods written in C ------------------------------------------------------------------------------------------

METH_NOARGS = 4


def function_of(descriptor) -> int:
    """The address of a descriptor's C function ``PyObject *(PyObject *self, void *)``: a method without arguments, or a getter.

    Call it with a `self` of the right type, which it does not check, and with NULL. 0 if there is no such function, or the layout
    of the descriptor is not as declared.
    """
    if not isinstance(descriptor, (python_types.MethodDescriptorType, python_types.GetSetDescriptorType)):
        return 0
    at = ffi.cast("fx_descriptor *", id(descriptor))
    if (address_of(at.type), address_of(at.name)) != (id(descriptor.__objclass__), id(descriptor.__name__)):
        return 0
    size = max(ffi.sizeof("fx_method"), ffi.sizeof("fx_getset"))
    if not is_readable(address_of(at.definition), size):
        return 0
    if isinstance(descriptor, python_types.MethodDescriptorType):
        method = ffi.cast("fx_method *", at.definition)
        is_plain, name, function = method.flags == METH_NOARGS, method.name, method.function
    else:
        attribute = ffi.cast("fx_getset *", at.definition)
        is_plain, name, function = attribute.closure == ffi.NULL, attribute.name, attribute.get
    own = descriptor.__name__.encode() + b"\0"
    is_plain = is_plain and is_readable(address_of(name), len(own), 1) and bytes(ffi.buffer(name, len(own))) == own
    return address_of(function) if is_plain else 0


# ---- verification --------------------------------------------------------------------------------------------------


def _double(address: int) -> float:
    return ctypes.c_double.from_address(address).value


def verify() -> dict[str, bool]:
    """Compare each layout that native code uses with objects of this interpreter. Returns the results by name."""
    pair = (object(), object())
    z = complex(1.5, -2.5)
    float_value = 1234.5678
    return {
        "object": not is_free_threaded()
        and object.__basicsize__ == ffi.sizeof("fx_object")
        and _word(id(pair) + OB_TYPE) == id(tuple)
        and _counts_references(),
        "float": float.__basicsize__ == ffi.sizeof("fx_float") and _double(id(float_value) + OB_FVAL) == float_value,
        "complex": (_double(id(z) + OB_FVAL), _double(id(z) + OB_FVAL + 8)) == (z.real, z.imag),
        "dispatcher": _is_dispatcher_laid_out(),
        "tuple": _word(id(pair) + OB_SIZE) == 2
        and (_word(id(pair) + OB_ITEM), _word(id(pair) + OB_ITEM + 8)) == (id(pair[0]), id(pair[1])),
    }


# ---- the callable type ---------------------------------------------------------------------------------------------

_TPFLAGS_HAVE_VECTORCALL = 1 << 11
_TPFLAGS_DEFAULT = int.__flags__ & 1 << 18  # HAVE_VERSION_TAG, until 3.12
_TPFLAGS_BASETYPE = 1 << 10
_TPFLAGS_IMMUTABLETYPE = 1 << 8
_TP_CALL, _TP_DESCR_GET, _TP_MEMBERS = 50, 54, 72  # typeslots.h; these numbers are part of the stable ABI
_T_PYSSIZET, _READONLY = 19, 1  # structmember.h
_WORD = CALLABLE_CONTEXT - CALLABLE_VECTORCALL


class _Slot(ctypes.Structure):
    _fields_ = [("slot", ctypes.c_int), ("pfunc", ctypes.c_void_p)]


class _Spec(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("basicsize", ctypes.c_int), ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_uint), ("slots", ctypes.POINTER(_Slot)),
    ]  # fmt: skip


class _Member(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("type", ctypes.c_int), ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    ]  # fmt: skip


_native_types: list[type] = []


def _make_callable_type(name: str, base: type):
    """Make a subclass of the C type `base` with two further words, ``_vectorcall`` and ``_context``, and a vectorcall slot.

    It has no dict and no weakrefs: a Python subclass adds these, and CPython's own code frees them. Python sets the two words by
    attribute assignment; native code reads them behind the fields of `base`. Objects whose ``_vectorcall`` is 0 are called by
    ``type(self).__call__``, if a subclass has it.
    """
    at = base.__basicsize__
    members = (_Member * 4)(
        _Member(b"_vectorcall", _T_PYSSIZET, at, 0, b"address of the vectorcall function"),
        _Member(b"_context", _T_PYSSIZET, at + _WORD, 0, b"address of what that function reads"),
        _Member(b"__vectorcalloffset__", _T_PYSSIZET, at, _READONLY, None),
    )
    slots = (_Slot * 4)(
        _Slot(_TP_CALL, ctypes.cast(ctypes.pythonapi.PyVectorcall_Call, ctypes.c_void_p)),
        _Slot(_TP_DESCR_GET, PyType_GetSlot(python_types.FunctionType, _TP_DESCR_GET)),
        _Slot(_TP_MEMBERS, ctypes.addressof(members)),
    )
    flags = _TPFLAGS_DEFAULT | _TPFLAGS_BASETYPE | _TPFLAGS_IMMUTABLETYPE | _TPFLAGS_HAVE_VECTORCALL
    spec = _Spec(name.encode(), at + 2 * _WORD, 0, flags, slots)
    made = prototype("PyType_FromSpecWithBases", ctypes.py_object, ctypes.POINTER(_Spec), ctypes.py_object)(spec, (base,))
    _native_types.append(made)
    return made, (members, slots, spec)  # CPython keeps pointers to them


def address_of_call(cls: type) -> int:
    """The address of a C type's ``tp_call``: ``PyObject *(PyObject *self, PyObject *args, PyObject *kwargs)``."""
    return PyType_GetSlot(cls, _TP_CALL)


NativeCallable, _kept = _make_callable_type("fastexchange.NativeCallable", object)
KERNEL_CONTEXT = DispatcherBase.__basicsize__ + _WORD
"""The offset of a kernel's ``_context``."""
NativeDispatcher: Any
try:
    NativeDispatcher, _kept_too = _make_callable_type("fastexchange.NativeDispatcher", DispatcherBase)
    type("Tried", (NativeDispatcher, CPUDispatcher), {})
except Exception as error:  # this Numba's dispatchers cannot be extended: they make all calls
    reraise_passing(error)
    NativeDispatcher = type("NativeDispatcher", (), {"_vectorcall": 0, "_context": 0})
    note_failure("a subclass of Numba's dispatcher", error)


def _is_dispatcher_laid_out() -> bool:
    """Whether the two words of a :data:`NativeDispatcher` are at the expected offsets."""
    tried = type("Tried", (NativeDispatcher, CPUDispatcher), {})(lambda: None)
    tried._vectorcall, tried._context = 4711, 4712
    return (_word(id(tried) + KERNEL_CONTEXT - _WORD), _word(id(tried) + KERNEL_CONTEXT)) == (4711, 4712)


def _find_flags_offset() -> int | None:
    """The offset of ``tp_flags`` in a type object: the only word that equals ``__flags__`` in every type tried."""
    tried = [int, list, dict, type, BaseException, NativeCallable, type("Tried", (), {})]
    offsets = range(0, type.__basicsize__ - 8, 8)  # type: ignore[operator]  # an int, whatever typeshed has
    hits = [at for at in offsets if all(_word(id(t) + at) == t.__flags__ for t in tried)]
    return hits[0] if len(hits) == 1 else None


_FLAGS_OFFSET = None if is_free_threaded() or DISABLED else _find_flags_offset()


def enable_vectorcall(cls: type, call: Any = NativeCallable.__call__) -> bool:
    """Set the vectorcall flag of a subclass of a native type. Returns whether CPython calls its native function directly.

    From CPython 3.12 on classes inherit the flag, and lose it with another ``__call__``. Before, this function sets its bit in a
    type that has not been called yet. It clears the bit if the type's ``__call__`` is not `call`, the one for objects without a
    native function. Without the bit calls go by ``tp_call``, which is slower and equally right.
    """
    is_native = cls.__call__ is call and any(base in _native_types for base in cls.__mro__)
    if bool(cls.__flags__ & _TPFLAGS_HAVE_VECTORCALL) != is_native and _FLAGS_OFFSET is not None:
        byte = ctypes.c_uint8.from_address(id(cls) + _FLAGS_OFFSET + 1)
        byte.value ^= _TPFLAGS_HAVE_VECTORCALL >> 8
    return bool(cls.__flags__ & _TPFLAGS_HAVE_VECTORCALL)
