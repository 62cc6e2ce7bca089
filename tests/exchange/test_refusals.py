"""What the ways of an exchange refuse: a table of what is wrong, the ways, the exception, and the words of its message."""

import ctypes
import functools
import mmap
import re
import sys

import numba
import numpy as np
import pytest
from counting import Exported, no_violations, scene
from frameworks import has_table, torch
from interoperability import elements, jax, optional, place
from odd_tensors import ODD

from exchanges import (  # isort: skip
    ATTRIBUTE, BORROW, CALLS, CONVERSIONS, COUNTED, EXPORT, FORMS, IMPORT, OLDER, SWAPPED, TARGETS, WRAPPERS, Wrapper, BySlot,
    Given, Sub, delete, eventually, failing, ml_dtypes, needs_the_attribute_free, result_or_exception, to_versioned,
)
from hostile_producers import CONTENTS, EXPORTED, RETURNS, Gives, raising

from made_producers import (  # isort: skip
    Dunder, Ledger, Legacy, SaysType, Tabled, address_of, capsule, exchange_table, export_versioned, is_held, object_at,
    tabled_type, tabled_type_with_methods,
)
from oracle import references_kept, type_and_message

from fastexchange import DLDevice, convert, exchange_api, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill
from fastexchange.ground.dlpack import ffi

_testbuffer = optional("_testbuffer")  # CPython's own tests come with it: buffers of any format and layout
assert no_violations  # a fixture
size, size_unlocked = fast_args(lambda x: x.size), fast_args(lambda x: x.size, nogil=True)
first = fast_args(lambda x: x[0])

TO_NUMPY = {"from_dlpack": from_dlpack, "convert": lambda x: convert(x, np.ndarray)}
BY_TABLE = {"export": functools.partial(failing, EXPORT), "borrow": functools.partial(failing, BORROW)}
KERNELS = {"kernel": size, "kernel, nogil": size_unlocked}
READERS = {**TO_NUMPY, **KERNELS}
WRITERS = {**READERS, "to_dlpack": to_dlpack}
EVERYTHING = {**CALLS, **CONVERSIONS}
NO_CONVERT = {name: way for name, way in CALLS.items() if not name.startswith("convert")}
"""``convert`` returns an array as it is, or NumPy's copy."""
BY_DLPACK = {name: way for name, way in EVERYTHING.items() if "copy" in name or (name[:3] == "to " and "numpy" not in name)}
TO_TYPE = {
    f"a {type(x).__name__}, {options}": lambda to, x=x, options=options: convert(x, to, **options)
    for x in (np.arange(3.0), Tabled(np.ones(3)), Legacy(np.ones(3))) for options in (*FORMS, {"copy": True})
}  # fmt: skip
TABLE_OF = {"exchange_api": exchange_api}


def with_option(option: str, values, *calls) -> dict:
    return {f"{number}, {value!r}": lambda x, take=take, value=value: take(x, **{option: value})
            for number, take in enumerate(calls) for value in values}  # fmt: skip


def named(*things) -> dict:
    return {f"{number}, {type(thing).__name__} {thing!r:.30}": thing for number, thing in enumerate(things)}


OFF_GRID = np.zeros(4, np.dtype([("a", "u1"), ("b", "f8")]))["b"]
NAMELESS = named(
    np.array([None, 1]), np.empty(0, object), np.array(["a"]), np.array([b"abc"]), np.zeros(2, "M8[s]"), np.zeros(2, "m8[s]"),
    np.zeros(2, "V5"), np.zeros(2, [("a", "i4"), ("b", "f4")]), np.zeros(2, [("a", "i4")]).view(np.recarray),
    np.zeros(2, np.longdouble), np.zeros(2, np.clongdouble), np.zeros(2, "(2,)i4, i4"),
)  # fmt: skip
ODD_ARRAYS = {**NAMELESS,
              **{f"swapped {name}": np.zeros(3, SWAPPED + name) for name in ("i2", "u8", "f4", "c16", "f2")},
              "strides off the grid": OFF_GRID, "strides off the grid, backwards": OFF_GRID[::-1],
              "odd strides": np.ndarray((2,), "f4", bytearray(20), strides=(5,))}  # fmt: skip
if ml_dtypes is not None and np.dtype(ml_dtypes.bfloat16).newbyteorder(SWAPPED).byteorder == SWAPPED:
    ODD_ARRAYS["swapped bfloat16"] = np.zeros(3, np.dtype(ml_dtypes.bfloat16).newbyteorder(SWAPPED))
TEXT = {"variable text": np.array(["a"], np.dtypes.StringDType())} if hasattr(np.dtypes, "StringDType") else {}
readonly = np.arange(3.0)
readonly.flags.writeable = False
READONLY = named(readonly, b"abc", memoryview(b"abc"), memoryview(bytearray(9)).toreadonly(), Legacy(np.ones(3)))
DTYPES = ("O", "S3", "U2", "V3", "g", "G", SWAPPED + "f8", "i4,f8", "(2,)i4, i4")
FORMATS = [
    (">i", 1), ("!h", 1), (">q", 1), (">d", 1), ("c", b"a"), ("2i", (1, 2)), ("ii", (1, 2)), ("ib", (1, 2)), ("3s", b"abc"),
    ("3p", b"ab"), ("x", ()), ("i3x", 1), ("P", 1), ("BB", (1, 2)), ("4B", (1, 2, 3, 4)), ("<ih", (1, 2)),
] if _testbuffer is not None else []  # fmt: skip
POINTERS = named(memoryview(_testbuffer.ndarray([1] * 6, shape=[2, 3], format="i", flags=_testbuffer.ND_PIL))) if FORMATS else {}
INT_AND_DOUBLE = {"_fields_": (("a", ctypes.c_int), ("b", ctypes.c_double))}
Pair, Either = type("Pair", (ctypes.Structure,), {**INT_AND_DOUBLE}), type("Either", (ctypes.Union,), {**INT_AND_DOUBLE})
Packed = type("Packed", (ctypes.Structure,), {"_pack_": 1, "_layout_": "ms", **INT_AND_DOUBLE})
Swapped = type("Swapped", (ctypes.BigEndianStructure if sys.byteorder == "little" else ctypes.LittleEndianStructure,), {
    "_fields_": (("a", ctypes.c_int),)})  # fmt: skip
ODD_ELEMENTS = [
    Pair, Packed, Either, Swapped, ctypes.c_int.__ctype_be__ if sys.byteorder == "little" else ctypes.c_int.__ctype_le__,
    ctypes.c_char, ctypes.c_wchar, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.c_void_p, ctypes.py_object, ctypes.c_longdouble,
    ctypes.POINTER(ctypes.c_int), ctypes.CFUNCTYPE(None),
]  # fmt: skip


def released():
    thing = memoryview(bytearray(b"abc"))
    first(thing)
    thing.release()
    return thing


def buffer(give) -> dict:
    """A buffer made in Python (from version 3.12 on), of what `give` gives."""
    return named(type("Buffer", (), {"__buffer__": give})()) if sys.version_info >= (3, 12) else {}


def consumed():
    capsule = to_versioned(np.arange(4.0))
    from_dlpack(Given(capsule))
    return capsule


Bare, CLOSED, OTHER_CAPSULE = type("Bare", (), {}), mmap.mmap(-1, 16), capsule(exchange_table(), b"other")
CLOSED.close()
NO_TABLE = (
    Bare, list, np.float64, bytearray, tabled_type("Lacking", managed_tensor_to_py_object_no_sync=None),
    tabled_type("Future", version=(2, 0)), type("Other", (), {ATTRIBUTE: OTHER_CAPSULE}),
    type("Integer", (), {ATTRIBUTE: address_of(exchange_table())}), type("NoMethod", (), {"__dlpack__": None}), *WRAPPERS,
)  # fmt: skip
NO_TYPE = (
    int, float, bool, str, list, tuple, dict, type, type(None), bytes, bytearray, memoryview, np.generic, np.float64, np.dtype,
    Exception, Ledger, type(np), DLDevice, 3, "numpy.ndarray", None, (np.ndarray,), np.dtype("f4"), np, len, np.zeros(2),
    list[int], np.ndarray | None, SaysType(),
)  # fmt: skip
NO_TENSOR = (3, 1.5, None, "abc", [1.0], (1,), {}, object(), int, np.dtype("f4"), len, np.ndarray,
             np.ma.array([1.0, 2.0], mask=[False, True]))  # fmt: skip
OTHERS = [Sub, Tabled, Dunder, list, object, np.float64, 3, None, np.arange(3), *([torch.Tensor] if torch is not None else [])]
NO_OLDER = [0, -8, True, 3.5, "table", capsule(exchange_table(), b"dltensor")]
NO_DEVICE = (
    "gpu", "cuda", "cuda:0", "", "CPU ", "cpu:1", 1, 0, 1.5, (1,), (1, 0, 0), (), ("cpu", 0), ("1", "0"), (1, "0"), (1.5, 0),
    (None, 0), object(), {}, b"cpu", b"\1\0", True,
)  # fmt: skip
NO_VERSION = (3, 1.0, "1.0", "10", (1,), (1, 0, 0), (), ("1", "0"), ("a", "b"), (None, 1), (1.5, 0), object(), True, b"\1\0")


def older_type(value, bases=Tabled.__bases__) -> type:
    return type("Older", bases, {OLDER: value})


def raising_wrapper(error):
    return type("Raises", (), {ATTRIBUTE: property(raising(error))})()


def ring(length: int):
    wrappers = [Wrapper(None) for _ in range(length)]
    for i in range(length):
        wrappers[i - 1].inner = wrappers[i]
    return wrappers[0]


def nested(wrapper):
    """So many that there is perhaps no end."""
    return functools.reduce(lambda inner, _: wrapper(inner), range(100), Tabled(np.arange(4.0)))


EMPTY = BySlot(None)
delattr(EMPTY, ATTRIBUTE)
NO_INNER = (None, 3, 2.5, "text", [1.0], Bare(), np.float64(1.0), Tabled, vars(Tabled)[ATTRIBUTE], OTHER_CAPSULE)
WRAPPED = {
    f"{name}, {number}": wrap(ODD[name]) for name in ODD if name in ("conjugated", "negated", "requires grad", "sparse", "meta")
    for number, wrap in enumerate((Wrapper, BySlot, lambda x: Wrapper(BySlot(x))))
}  # fmt: skip
COUNTED_KINDS = {kind.__name__: kind(np.arange(4.0)) for kind in (*COUNTED, bytearray)}
make = functools.partial


# ---- the table -------------------------------------------------------------------------------------------------------
REFUSALS = {
    "arrays that DLPack has no words for": ({**ODD_ARRAYS, **TEXT}, BY_TABLE, BufferError, "export|dtype|stride|order|DLPack"),
    "such arrays by calls": (ODD_ARRAYS, NO_CONVERT, BufferError, ""),
    "nameless arrays to frameworks": (NAMELESS, BY_DLPACK, BufferError, "DLPack has no name for an array's dtype"),
    "readonly arrays are not lent": (
        named(readonly, np.broadcast_to(1.0, (3, 4))), {"borrow": BY_TABLE["borrow"]}, BufferError, "readonly"),
    "readonly memory in a legacy capsule": (READONLY, {"to_dlpack": to_dlpack}, BufferError, "readonly"),
    "formats of memoryviews": ({dtype: memoryview(np.zeros(3, dtype)) for dtype in DTYPES}, READERS, BufferError, "format"),
    "memoryviews with strides off the grid": ({"": memoryview(OFF_GRID)}, TO_NUMPY, BufferError, "strides"),
    "formats": (
        {text: memoryview(_testbuffer.ndarray([value] * 3, shape=[3], format=text)) for text, value in FORMATS}, READERS,
        BufferError, "format"),
    "buffers of pointers": (POINTERS, READERS, BufferError, ""),
    "vectors of ctypes": (named(*[(element * 2)() for element in ODD_ELEMENTS]), WRITERS, BufferError, "format"),
    "planes of ctypes": (named(*[((element * 2) * 3)() for element in ODD_ELEMENTS]), WRITERS, BufferError, "format"),
    "ctypes that are no arrays": (
        named(Pair(), Packed(), Either(), ctypes.pointer(ctypes.c_int(3))), READERS,
        (BufferError, TypeError, numba.core.errors.TypingError), ""),
    "a released memoryview": ({"": make(released)}, TO_NUMPY, ValueError, "released"),
    "a released memoryview, by a kernel": ({"": make(released)}, {"kernel": first}, ValueError, "'x'"),
    "a closed mmap": ({"": CLOSED}, READERS, ValueError, ""),
    **{f"__buffer__ with {error.__name__}": (buffer(raising(error)), READERS, error, "")
       for error in (RuntimeError, BufferError, KeyboardInterrupt)},
    "__buffer__ without a memoryview": (buffer(lambda self, flags: b"abc"), READERS, TypeError, ""),
    "what is no tensor": (named(*NO_TENSOR), {**EVERYTHING, "to its type": lambda x: convert(x, type(x))}, TypeError, ""),
    "what is no type": (named(*NO_TYPE), TO_TYPE, TypeError, ""),
    "a type that nothing is converted to": (
        {"Dunder": Dunder}, {name: way for name, way in TO_TYPE.items() if "Legacy" not in name}, TypeError, ""),
    "devices": (COUNTED_KINDS, with_option("device", NO_DEVICE, from_dlpack, to_dlpack, to_versioned), ValueError, "device"),
    "maximal versions": (COUNTED_KINDS, with_option("max_version", NO_VERSION, to_dlpack), ValueError, "max_version"),
    "what copy may not be": (COUNTED_KINDS, with_option(
        "copy", (1, 0, "never", 2.0, [], object()), from_dlpack, to_dlpack, lambda x, copy: convert(x, np.ndarray, copy=copy)),
        ValueError, "copy"),
    "dtypes": (COUNTED_KINDS, with_option("dtype", ("f4", "nonsense", object()), from_dlpack), TypeError, ""),
    "what no function takes": (COUNTED_KINDS, {
        "unknown": lambda x: from_dlpack(x, unknown=x), "two": lambda x: from_dlpack(x, x)}, TypeError, ""),
    "a consumed capsule": ({"": make(lambda: Given(consumed()))}, CALLS, BufferError, "used_dltensor_versioned"),
    "a capsule, which is no tensor": ({"": make(consumed)}, CALLS, TypeError, ""),
    "what is no capsule": (
        {name: Gives(give) for name, give in RETURNS.items()}, CONVERSIONS, (BufferError, ValueError), "__dlpack__"),
    **{f"{cls.__name__}, which has no table": ({"": cls}, TABLE_OF, TypeError, cls.__name__) for cls in NO_TABLE},
    "what is no type to have a table": (
        named(3, None, "ndarray", np.arange(3), Tabled(np.ones(2)), list[int], SaysType(), np.dtype("f8")), TABLE_OF, TypeError,
        "takes a type of tensors, not an object of type"),
    "what cannot be polyfilled": (named(*OTHERS), {"polyfill": polyfill}, (TypeError, ValueError), ""),
    "what is not polyfilled": (named(*OTHERS), {"unpolyfill": unpolyfill}, ValueError, "not polyfilled"),
    "types with an older attribute": (named(*map(older_type, NO_OLDER)), TABLE_OF, TypeError, ""),
    "tensors with an older attribute": (named(*[older_type(value)(np.ones(3)) for value in NO_OLDER]), KERNELS, TypeError, ""),
    **{f"{wrapper.__name__} of what is no tensor": (named(*map(wrapper, NO_INNER)), WRITERS, TypeError, wrapper.__name__)
       for wrapper in WRAPPERS},
    "wrappers in a ring": ({str(length): make(ring, length) for length in (1, 2, 3)}, WRITERS, TypeError, ""),
    "wrappers without an end": (named(*map(nested, WRAPPERS)), WRITERS, TypeError, ""),
    "a wrapper with an empty slot": ({"": EMPTY}, WRITERS, TypeError, ""),
    **{f"wrappers that raise {error.__name__}": (
        named(*[wrap(raising_wrapper(error)) for wrap in (lambda x: x, BySlot, lambda x: Wrapper(BySlot(x)))]), WRITERS,
        (TypeError, error), "")
       for error in (RuntimeError, AttributeError, TypeError, BufferError, ZeroDivisionError)},
    "a wrapper that is interrupted": ({"": raising_wrapper(KeyboardInterrupt)}, WRITERS, KeyboardInterrupt, ""),
    "PyTorch's odd ones, wrapped": (WRAPPED, READERS, (BufferError, RuntimeError, NotImplementedError, ValueError), ""),
    "PyTorch's odd ones": (
        ODD, {name: way for name, way in EVERYTHING.items() if name != "to torch.Tensor"}, (BufferError, RuntimeError), ""),
    "PyTorch's odd ones, copied": (ODD, {"": lambda x: convert(x, torch.Tensor, copy=True)}, (BufferError, RuntimeError), ""),
    "readonly memory to PyTorch": (
        READONLY if torch is not None else {}, {"": lambda x: convert(x, torch.Tensor, copy=False)}, BufferError, "readonly"),
}  # fmt: skip
"""Each of these things (a partial makes it anew) raises by each of these ways one of these errors, with these words."""


@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused(name):
    (things, ways, errors, words), wrong = REFUSALS[name], []
    for each, thing in things.items():
        thing = thing() if isinstance(thing, functools.partial) else thing
        with scene(each), references_kept(*[thing] * (thing is not None)):
            for way, take in ways.items():
                end = result_or_exception(take, thing)
                kind = TypeError if type(end).__name__ == "UnknownType" else type(end)
                if not issubclass(kind, errors) or not re.search(words, str(end)):
                    wrong.append((each, way, end))
                del end
        if hasattr(thing, "ledger"):
            thing.ledger.check(thing.ledger.made)
        if isinstance(thing, bytearray):
            assert not is_held(thing)
    assert not wrong


@needs_the_attribute_free
def test_refusals_leave_classes_alone():
    own = [repr(getattr(cls, ATTRIBUTE, None)) for cls in OTHERS]
    assert all(isinstance(result_or_exception(polyfill, cls), (TypeError, ValueError)) for cls in OTHERS)
    assert own == [repr(getattr(cls, ATTRIBUTE, None)) for cls in OTHERS]


@pytest.mark.parametrize("value", NO_OLDER, ids=lambda value: type(value).__name__)
def test_an_older_attribute_that_means_nothing_does_not_hide_the_methods(value):
    tensor = older_type(value, tabled_type_with_methods().__bases__)(np.arange(3.0))
    assert size(tensor) == size(tensor) == 3
    assert tensor.dunder_calls >= 2 and tensor.borrows == 0


@pytest.mark.parametrize("name", ODD)
def test_an_odd_tensor_of_pytorchs_is_returned_as_it_is(name):
    assert convert(ODD[name], torch.Tensor) is ODD[name] is convert(ODD[name], torch.Tensor, copy=False)


@pytest.mark.parametrize("name", [name for name in ODD if "grad" in name or name == "non-leaf"])
def test_gradients_are_taken_while_grad_mode_is_off(name):
    tensor = ODD[name]
    ways = {**TO_NUMPY, "to_dlpack": lambda x: np.from_dlpack(Given(to_versioned(x))), **CONVERSIONS}
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for way, take in ways.items():
                if tensor.ndim == 1 or way != "to pyarrow.Array":
                    assert place(take(tensor)) == tensor.data_ptr() or way == "to jax.Array"
            assert convert(tensor, torch.Tensor) is tensor
    kind, message = type_and_message(from_dlpack, tensor)
    assert kind is BufferError and "detach" in message


# ---- subclasses: what was asked for, or nothing ----------------------------------------------------------------------
INSTANCES = [np.arange(4.0), np.arange(4.0).view(Sub), np.rec.array(np.arange(3.0))]
if torch is not None:
    own_tensor = torch.ones(3).as_subclass(type("OwnTensor", (torch.Tensor,), {}))
    INSTANCES += [torch.ones(3), own_tensor, torch.nn.Parameter(torch.ones(3), False)]
if jax is not None:
    INSTANCES += [jax.numpy.ones(3)]


@pytest.mark.parametrize("x", INSTANCES, ids=lambda x: type(x).__name__)
def test_instances_of_subclasses(x):
    """They are of their base's type already, however the call is written; so is what a framework makes of its own type."""
    assert type(from_dlpack(x)) is np.ndarray and place(from_dlpack(x)) == place(x)
    for to in (type(x), *[to for to in TARGETS.values() if isinstance(x, to)]):
        ends = [result_or_exception(convert, x, to, **options) for options in FORMS]
        assert all(isinstance(end, to) and place(end) == place(x) for end in ends)
        assert len({(type(end), end is x) for end in ends}) == 1 and (to is not type(x) or ends[0] is x), list(map(type, ends))
        copied = result_or_exception(convert, x, to, copy=True)
        assert isinstance(copied, TypeError) or (place(copied) != place(x) and copied.tolist() == x.tolist())
    for other in INSTANCES:
        end = result_or_exception(convert, other, type(x))
        assert isinstance(end, (type(x), TypeError, BufferError, ValueError)), (type(end), type(other))


@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_where_dlpack_has_no_words_for_the_place(target):
    packed = np.zeros(3, [("a", "u1"), ("b", "f4")])["b"]
    packed[:] = [1, 2, 3]
    for array in (packed, packed.astype(SWAPPED + "f4")):
        for copy in (None, True):
            assert elements(convert(array, TARGETS[target], copy=copy)).tolist() == [1, 2, 3]
        if target != "numpy.ndarray":
            assert type_and_message(convert, array, TARGETS[target], copy=False)[0] is BufferError


# ---- lies to a table and to other frameworks -------------------------------------------------------------------------
SAID = {"device": "on a device", "ndim": "dimensions", "code": "element type", "negative": "extent", "too": "64 bits",
        "major": "major version", "NULL": "missing|NULL", "lanes": "lanes"}  # fmt: skip
"""By a word of the lie's name: words of NumPy's table."""


def test_numpys_table_imports_no_lie():
    """What is refused stays the caller's."""
    for name, (lies, ends, _) in {**CONTENTS, **EXPORTED}.items():
        words = next((words for word, words in SAID.items() if re.match(rf"\d* ?{word}", name)), "")
        ledger, out, values = Ledger(), ffi.new("intptr_t *", 7), ends if isinstance(ends, tuple) else (ends,)
        managed = export_versioned(ledger, np.arange(4.0), **lies)
        end = result_or_exception(IMPORT, address_of(managed), address_of(out))
        with scene(name):
            if isinstance(end, BufferError):
                assert BufferError in values and out[0] == 7 and ledger.out == 1 and re.search(words, str(end)), end
                delete(managed) if managed.deleter != ffi.NULL else None
            else:
                assert values != (BufferError,), "imported"
                view = object_at(out[0])
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(view))
                assert 4 in values or view.sum() in values
                del view
            assert "no deleter" in name or ledger.out == 0


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "numpy.ndarray"])
def test_other_frameworks_follow_no_lie(target):
    """Refused by the lies' names, where others may take what is on another device, or of a type that NumPy does not have."""
    for name, (lies, ends, word) in {**CONTENTS, **EXPORTED}.items():
        for options in ({}, {"copy": False}):
            if name == "device kDLExtDev" and not has_table():
                continue  # PyTorch before 2.10 calls the deleter, here Python code, with an exception set
            tensor = Exported(np.arange(4.0), **lies)
            end = result_or_exception(convert, tensor, TARGETS[target], **options)
            with scene(name, options):
                if isinstance(end, BaseException):
                    assert isinstance(end, (BufferError, TypeError, ValueError)), end
                    assert "torch" not in target or word in str(end), end
                elif not {"code", "bits", "lanes", "device_type"} & set(lies):
                    assert ends is not BufferError, "converted"
                    assert elements(end).sum() in (*(ends if isinstance(ends, tuple) else (ends,)), 6.0)
                del end
                assert "no deleter" in name or eventually(lambda tensor=tensor: not tensor.ledger.out), "not given back"
