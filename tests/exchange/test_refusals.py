"""What the ways of an exchange refuse: a table of the things, the ways, the exception, and the words of its message."""

import ctypes
import functools
import re

import numpy as np
import odd_things as odd
import pytest
from counting import Exported, no_violations, scene
from frameworks import has_table, torch
from interoperability import elements, jax, place
from odd_tensors import ODD

from exchanges import (  # isort: skip
    ATTRIBUTE, BORROW, CALLS, CONVERSIONS, COUNTED, EXPORT, FORMS, FROM_AND_TO, IMPORT, OLDER, SWAPPED, TARGETS, WRAPPERS, Given,
    Sub, delete, eventually, failing, needs_the_attribute_free, result_or_exception, to_versioned,
)
from hostile_producers import CONTENTS, EXPORTED, RETURNS, Gives, raising

from made_producers import (  # isort: skip
    Dunder, Ledger, Legacy, SaysType, Tabled, address_of, capsule, exchange_table, export_versioned, is_held, object_at,
    tabled_type_with_methods,
)
from oracle import references_kept, type_and_message

from fastexchange import DLDevice, convert, exchange_api, fast_args, from_dlpack, polyfill, to_dlpack, unpolyfill
from fastexchange.ground.dlpack import ffi

assert no_violations  # a fixture
size, first = fast_args(lambda x: x.size), fast_args(lambda x: x[0])
make = functools.partial


def without(name: str, ways: dict) -> dict:
    return {other: way for other, way in ways.items() if other != name}


def with_option(option: str, values, *calls) -> dict:
    return {f"{number}, {value!r}": lambda x, take=take, value=value: take(x, **{option: value})
            for number, take in enumerate(calls) for value in values}  # fmt: skip


def converting(*tensors) -> dict:
    """Ways that take the type to which a tensor is converted."""
    return {f"{type(x).__name__}, {number}": lambda to, x=x, options=options: convert(x, to, **options)
            for x in tensors for number, options in enumerate((*FORMS, {"copy": True}))}  # fmt: skip


TO_NUMPY = {"from_dlpack": from_dlpack, "convert": lambda x, **options: convert(x, np.ndarray, **options)}
BY_TABLE = {"export": make(failing, EXPORT), "borrow": make(failing, BORROW)}
KERNELS = {"kernel": size, "kernel, nogil": fast_args(lambda x: x.size, nogil=True)}
READERS = {**TO_NUMPY, **KERNELS}
WRITERS = {**READERS, "to_dlpack": to_dlpack}
EVERYTHING = {**CALLS, **CONVERSIONS}
TABLE_OF = {"exchange_api": exchange_api}
COUNTED_KINDS = [kind(np.arange(4.0)) for kind in (*COUNTED, bytearray)]
OTHERS = [Sub, Tabled, Dunder, list, object, np.float64, 3, None, np.arange(3), *([torch.Tensor] if torch is not None else [])]
NO_OLDER = [0, -8, True, 3.5, "table", capsule(exchange_table(), b"dltensor")]
NO_NAME, NO_GRID = "DLPack has no name for an array's dtype", "strides are no multiple of its item size"
FORMAT, RELEASED = "its buffer's format is '.*', items of", "forbidden on released memoryview"
NO_TABLE, NO_PYTORCH = "leads to no object whose type has a PyCapsule named", "PyTorch is not installed"
NO_MEMORY = "lazily conjugated|lazily negated|layout torch.sparse|on device meta|NULL|grad|quantised|has been freed|FakeTensor"

REFUSALS = {
    # what is refused: (the things, or why there are none; the ways, each of which refuses each of them; the exception;
    #                   a pattern that its message has). A partial makes its thing anew.
    "arrays that DLPack cannot describe, by the table": (
        odd.ARRAYS, BY_TABLE, BufferError, f"an array (of this dtype|in swapped byte order) cannot be exported|{NO_GRID}"),
    "arrays that DLPack cannot describe, by calls": (odd.ARRAYS, FROM_AND_TO, BufferError, f"{NO_NAME}|{NO_GRID}"),
    "arrays of dtypes without a name, by copies and to frameworks": (
        odd.NAMELESS, {**{way: CALLS[way] for way in ("to_dlpack, a copy", "convert, a copy")},
                       **without("to numpy.ndarray", CONVERSIONS)}, BufferError, NO_NAME),
    "views of readonly arrays": (
        [odd.readonly, np.broadcast_to(1.0, (3, 4))], without("export", BY_TABLE), BufferError, "readonly array cannot"),
    "readonly memory in a legacy capsule": (odd.READONLY, {"to_dlpack": to_dlpack}, BufferError, "cannot say .* is readonly"),
    "memoryviews of dtypes without a name": ({dtype: memoryview(np.zeros(3, dtype)) for dtype in (
        "O", "S3", "U2", "V3", "g", "G", SWAPPED + "f8", "i4,f8", "(2,)i4, i4")}, READERS, BufferError, FORMAT),
    "a memoryview with strides off the grid": ([memoryview(odd.OFF_GRID)], TO_NUMPY, BufferError, f"its buffer's {NO_GRID}"),
    "buffers whose items are no native numbers": (odd.FORMATS, READERS, BufferError, FORMAT),
    "a buffer of pointers to its rows": (odd.POINTERS, READERS, BufferError, "underlying buffer requires suboffsets"),
    "arrays of what is no native number to ctypes": (
        [cls() for x in odd.ELEMENTS for cls in (x * 2, x * 2 * 3)], WRITERS, BufferError, FORMAT),
    "objects of ctypes that are no arrays": (
        [*[cls() for cls in odd.STRUCTURES], ctypes.pointer(ctypes.c_int(3))], READERS, BufferError, FORMAT),
    "a released memoryview": ([make(odd.released, first)], {**TO_NUMPY, "kernel": first}, ValueError, RELEASED),
    "a closed mmap": ([odd.CLOSED], READERS, ValueError, "mmap closed"),
    **{f"a __buffer__ that raises {error.__name__}": (odd.buffer(raising(error)), READERS, error, "no$")
       for error in (RuntimeError, BufferError, KeyboardInterrupt)},
    "a __buffer__ that returns bytes": (odd.buffer(lambda self, flags: b"abc"), READERS, TypeError, "return.* (a |non-)m"),
    "objects that are no tensors": (
        [3, 1.5, None, "a text", [1.0], (1,), {}, object(), int, np.dtype("f4"), len, np.ndarray, np.ma.array([1.0], mask=True)],
        {**EVERYTHING, "to its type": lambda x: convert(x, type(x))}, TypeError,
        "is no tensor|is a type of tensors, not object|a masked array cannot be exchanged"),
    "conversions to what is no type of tensors": ([
        int, float, bool, str, list, tuple, dict, type, type(None), bytes, bytearray, memoryview, np.generic, np.float64,
        np.dtype, Exception, Ledger, type(np), DLDevice, 3, "numpy.ndarray", None, (np.ndarray,), np.dtype("f4"), np, len,
        np.zeros(2), list[int], np.ndarray | None, SaysType()],
        converting(np.arange(3.0), Tabled(np.ones(3)), Legacy(np.ones(3))), TypeError,
        r"convert\(\): (.* is no tensor type|no .* can be made|the second argument is the type of the result, not)"),
    "conversions to a type that nothing makes": (
        [Dunder], converting(np.arange(3.0), Tabled(np.ones(3))), TypeError, "Dunder is no tensor type"),
    "devices that are none": (COUNTED_KINDS, with_option("device", (
        "gpu", "cuda", "cuda:0", "", "CPU ", "cpu:1", 1, 0, 1.5, (1,), (1, 0, 0), (), ("cpu", 0), ("1", "0"), (1, "0"), (1.5, 0),
        (None, 0), object(), {}, b"cpu", b"\1\0", True), from_dlpack, to_dlpack, to_versioned),
        ValueError, r"_dlpack\(\): device ('.*' is not known|must be .*, not)"),
    "maximal versions that are no pairs of numbers": (COUNTED_KINDS, with_option("max_version", (
        3, 1.0, "1.0", "10", (1,), (1, 0, 0), (), ("1", "0"), ("a", "b"), (None, 1), (1.5, 0), object(), True, b"\1\0"),
        to_dlpack), ValueError, r"to_dlpack\(\): max_version must be .*, not"),
    "values of copy that say neither yes nor no": (COUNTED_KINDS, with_option(
        "copy", (1, 0, "never", 2.0, [], object()), to_dlpack, *TO_NUMPY.values()),
        ValueError, r"\(\): copy must be True, False or None, not"),
    "dtypes that would cast, or are none": (
        COUNTED_KINDS, with_option("dtype", ("f4", "nonsense", object()), from_dlpack), TypeError,
        r"from_dlpack\(\): (the elements are .*, not float32; dtype= does not cast|dtype is what numpy.dtype takes, not)"),
    "arguments that it does not have": (COUNTED_KINDS, {  # once it is called natively
        "unknown": lambda x: (from_dlpack(x), from_dlpack(x, unknown=x)), "two": lambda x: (from_dlpack(x), from_dlpack(x, x)),
        "three": lambda x: (TO_NUMPY["convert"](x), convert(x, np.ndarray, x))}, TypeError,
        r"\(\) (got an unexpected keyword argument 'unknown'|takes \d positional arguments? but \d were given)"),
    "a __dlpack__ that returns a capsule again": (
        [make(lambda: Given(odd.consumed()))], CALLS, BufferError, 'returned .*"used_dltensor_versioned".*, not an unconsumed'),
    "a capsule, which is no tensor": ([make(odd.consumed)], CALLS, TypeError, "type PyCapsule is no tensor"),
    "a __dlpack__ that returns no unconsumed capsule": (
        {name: Gives(give) for name, give in RETURNS.items()}, CONVERSIONS, BufferError, "returned .*, not an unconsumed"),
    **{f"the table of {cls.__name__}, which has none": ([cls], TABLE_OF, TypeError, f"{cls.__name__} has no exchange table")
       for cls in (*odd.WITHOUT_TABLE, *WRAPPERS)},
    "the table of what is no type": (
        [3, None, "ndarray", np.arange(3), Tabled(np.ones(2)), list[int], SaysType(), np.dtype("f8")], TABLE_OF, TypeError,
        r"exchange_api\(\) takes a type of tensors, not an object of type"),
    "polyfills of other types than ndarray": (
        OTHERS, {"polyfill": polyfill}, TypeError, "only numpy.ndarray can be given an exchange table, not"),
    "the removal of a polyfill that is not there": (OTHERS, {"unpolyfill": unpolyfill}, ValueError, "is not polyfilled"),
    "types whose older attribute is no table": ([*map(odd.older_type, NO_OLDER)], TABLE_OF, TypeError, f"its {OLDER} is .*, not"),
    "tensors whose older attribute is no table": (
        [odd.older_type(value)(np.ones(3)) for value in NO_OLDER], KERNELS, TypeError, f"its {OLDER} is .*, not"),
    **{f"a {wrapper.__name__} of what is no tensor": (
        [*map(wrapper, odd.NO_INNER)], WRITERS, TypeError, f"{wrapper.__name__} {NO_TABLE}") for wrapper in WRAPPERS},
    "wrappers in a ring": ([make(odd.ring, length) for length in (1, 2, 3)], WRITERS, TypeError, NO_TABLE),
    "wrappers without an end": ([*map(odd.nested, WRAPPERS)], WRITERS, TypeError, NO_TABLE),
    "a wrapper with an empty slot": ([odd.EMPTY], WRITERS, TypeError, "leads to an exception, AttributeError: "),
    **{f"wrappers that raise {error.__name__}": (
        odd.raising_wrappers(error), WRITERS, TypeError, f"leads to an exception, {error.__name__}: .*, and it has no __dlpack__")
       for error in (RuntimeError, AttributeError, TypeError, BufferError, ZeroDivisionError)},
    "wrappers that are interrupted": (odd.raising_wrappers(KeyboardInterrupt), WRITERS, KeyboardInterrupt, "no"),
    "PyTorch's odd tensors, wrapped": ({
        f"{name}, {number}": wrap(ODD[name]) for name in ("conjugated", "negated", "requires grad", "sparse", "meta") if ODD
        for number, wrap in enumerate(odd.WRAPS)} or NO_PYTORCH, READERS, BufferError, NO_MEMORY),
    "PyTorch's odd tensors": (ODD or NO_PYTORCH, without("to torch.Tensor", EVERYTHING), BufferError, NO_MEMORY),
    "PyTorch's odd tensors, to be copied": (
        ODD or NO_PYTORCH, {"convert": lambda x: convert(x, torch.Tensor, copy=True)}, BufferError, NO_MEMORY),
    "readonly memory to PyTorch without a copy": (
        odd.READONLY if ODD else NO_PYTORCH, {"convert": lambda x: convert(x, torch.Tensor, copy=False)}, BufferError,
        "torch.Tensor has no readonly tensors, so a copy is needed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused(name):
    """A kernel's message names the argument, too."""
    (things, ways, error, words), wrong = REFUSALS[name], []
    if isinstance(things, str):
        pytest.skip(things)
    assert things and ways
    for each, thing in (things if isinstance(things, dict) else {f"{i}, {x!r:.60}": x for i, x in enumerate(things)}).items():
        thing = thing() if isinstance(thing, functools.partial) else thing
        with scene(each), references_kept(*[thing] * (thing is not None)):
            for way, take in ways.items():
                end = result_or_exception(take, thing)
                named = "'x' (position 0)" if way in KERNELS and issubclass(error, Exception) else ""
                if not (isinstance(end, error) and re.search(words, str(end)) and named in str(end)):
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
    assert all(isinstance(result_or_exception(polyfill, cls), TypeError) for cls in OTHERS)
    assert own == [repr(getattr(cls, ATTRIBUTE, None)) for cls in OTHERS]


@pytest.mark.parametrize("value", NO_OLDER, ids=lambda value: type(value).__name__)
def test_an_older_attribute_that_means_nothing_does_not_hide_the_methods(value):
    tensor = odd.older_type(value, tabled_type_with_methods().__bases__)(np.arange(3.0))
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
                assert 4 in [value for value in values if type(value) is int] or view.sum() in values
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
                    assert elements(end).sum() in (ends if isinstance(ends, tuple) else (ends,))
                del end
                assert "no deleter" in name or eventually(lambda tensor=tensor: not tensor.ledger.out), "not given back"
