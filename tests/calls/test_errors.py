"""Bad input and exceptions: the right exception, a message that names the argument, nothing leaked, the next call works."""

import functools
import itertools
import re
import sys
import traceback

import numpy as np
import pytest
from failing_kernels import fails, fails_unlocked
from oracle import numbas, references_kept, type_and_message
from raising import check_raises
from ways import Acting

from fastexchange import explain, fast_args

from made_producers import (  # isort: skip
    ONLY_NUMBA, TABLE_CAPSULE, Dunder, Legacy, Tabled, WithMethods, capsule, exchange_table, tabled_type,
    tabled_type_with_methods,
)

TABLE, BORROW, EXPORT = "__dlpack_c_exchange_api__", "dltensor_from_py_object_no_sync", "managed_tensor_from_py_object_no_sync"
ExportOnly = tabled_type("ExportOnly", **{BORROW: None})
X = "<lambda>(): argument 'x' (position 1)"
total = fast_args(lambda first, x: x.sum())


def check_refused(argument, *words: str, kind=BufferError):
    """Refused as the second of two: on the slow path and after, by Numba's dispatcher, in a tuple; all is let go."""
    good = np.arange(4.0)
    assert total(good, good) == total(good, good) == 6.0
    calls = [(good, argument)] * 3 + [(ONLY_NUMBA, argument), (good, (np.ones(2), (argument, 1)))]
    with references_kept(argument, good):
        said = [type_and_message(total, *call) for call in calls]
    assert said[0] == said[1] == said[2]
    for raised, message in said:
        assert raised is kind and all(word in message for word in ("'x'", "position 1", *words)), (message, words)
    assert total(good, good) == 6.0


Unknown = type("Unknown", (), {})


def test_an_object_that_no_path_can_handle():
    dlpack, device = (type("Half", (), {name: lambda self, **_: 1 / 0}) for name in ("__dlpack__", "__dlpack_device__"))
    for thing in (Unknown(), dlpack(), device(), lambda: 1):
        words = (type(thing).__name__, TABLE, "__dlpack__", "numba.typeof", "<lambda>()")
        check_refused(thing, *words, *["__dlpack_device__"] * isinstance(thing, dlpack), kind=TypeError)


gathers = fast_args(lambda x, y=None, *arrays: len(arrays))
WHERE = [
    ("'x' (position 0)", lambda: gathers(Unknown(), 1)), ("'x' (position 0)", lambda: gathers(x=Unknown())),
    ("'arrays[1]' (position 3)", lambda: gathers(1, 2, 3, Unknown())),
    ("'y' (position 1)", lambda: gathers(1, y=Unknown())), ("'y' (position 1)", lambda: gathers(1, (2, (Unknown(),)))),
]  # fmt: skip


def test_the_argument_is_named_wherever_it_is():
    for where, call in WHERE:
        check_raises(TypeError, f"{re.escape(where)}.*Unknown", call)


def test_null_strides_mean_row_major_also_of_the_most_dimensions():
    corner = fast_args(lambda x: (x.ndim, x.flat[3]))
    for ndim, make in itertools.product((2, 64), (Tabled, ExportOnly, Dunder, Legacy)):
        tensor = make(np.arange(6.0), ndim=ndim, shape=(1,) * (ndim - 2) + (2, 3), strides=None)
        assert corner(tensor) == corner(tensor) == (ndim, 3.0)
    assert {array.layout for (array,) in corner.signatures} == {"C"}


def test_byte_swapped_arrays():
    for dtype in (">f8", ">f2", ">i4", ">M8[s]", ">U3", [("a", "i4"), ("b", ">f8")]):
        check_refused(np.zeros(3, dtype), "byte order", *([] if isinstance(dtype, list) else [repr(np.dtype(dtype))]))
    for dtype in (">i1", ">u1"):  # of single bytes
        assert total(1, np.arange(4, dtype=dtype)) == 6.0


Plain = type("Plain", (ValueError,), {})
with_state, without_notes = Plain("no"), KeyError("key")
with_state.code, without_notes.__notes__ = 7, 5
BUT_WORDS = Plain("no"), BufferError("no"), NotImplementedError("no"), AttributeError("no")
MORE = with_state, without_notes, Plain("no", 2), Plain(3), KeyError("key"), KeyboardInterrupt()


@pytest.mark.parametrize("error", BUT_WORDS + MORE, ids=repr)
def test_exceptions_of_a_producer(error):
    """Those that are but words name the argument, others arrive as they are, and have a note. A cached call asks once."""
    tensor, beside = Acting(np.ones(1)), Dunder(np.ones(1))

    def fail():
        asked.append(1)
        raise error

    for first in (1, ONLY_NUMBA, beside):
        for is_known in (False, True):
            tensor.act, asked = fail, []
            caught = check_raises(type(error), None, total, first, tensor)
            assert caught is error if error in MORE else caught.__cause__ is error
            assert error in MORE or str(caught) == f"{X} cannot be passed to the kernel: no"
            assert not is_known or len(asked) == 1
            tensor.act = None
            assert [total(first, tensor) for _ in range(4)] == [1.0] * 4
    beside.ledger.check(beside.ledger.made)
    takes_notes = error in MORE and isinstance(error, Exception) and sys.version_info >= (3, 11)
    assert getattr(error, "__notes__", []) == (5 if error is without_notes else [f"raised for {X}"] * takes_notes)
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


UNUSABLE = {
    "2.0": {"version": (2, 0)}, "3.1": {"version": (3, 1), "prev": exchange_table(version=(2, 5))},
    "managed_tensor_allocator": {"managed_tensor_allocator": None}, EXPORT: {EXPORT: None},
}  # fmt: skip


def test_why_a_table_cannot_be_used_is_said():
    """``tests/exchange/test_hostile_tables.py`` has what else comes of it."""
    tables = [(word, capsule(exchange_table(**changes), TABLE_CAPSULE)) for word, changes in UNUSABLE.items()]
    for word, value in [*tables, *(("dlpack_exchange_api", value) for value in (3, capsule(exchange_table(), b"dltensor")))]:
        methods = {TABLE: value, "__dlpack__": WithMethods.__dlpack__}
        tensor = type("Broken", (tabled_type_with_methods(),), methods)(np.ones(3))
        assert total(1, tensor) == 3.0 and word in str(explain(tensor)) and word in str(total.explain(1, tensor))
        check_refused(type("Broken", (), {TABLE: value})(), "Broken", word, kind=TypeError)
    assert BORROW in str(explain(ExportOnly(np.ones(3))))


def caught(function, *arguments):
    """What is known of the exception that a call raises: type, arguments, and the frames below the call."""
    try:
        function(*arguments)
    except BaseException as error:
        frames = [(frame.filename, frame.name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        return type(error), error.args, str(error), (error.__cause__, error.__context__), frames[1:]
    raise AssertionError("nothing was raised")


def assert_same_exception(got, want):
    """The same, down to the frames of the kernel; those of the slow path may be above them."""
    assert got[:4] == want[:4] and got[4][len(got[4]) - len(want[4]) :] == want[4]


plain_end = functools.cache(lambda how: caught(numbas(fails), how, np.ones(3)))


def test_exceptions_in_kernels_arrive_as_from_njit_and_leak_nothing(framework):
    for how in range(11):
        tensor, want = framework.tensor(np.ones(3)), plain_end(how)
        fails(-1, tensor)
        with references_kept(tensor):
            for _ in range(20):
                assert_same_exception(caught(fails, how, tensor), want)
        before = fails.counts().fast
        assert fails(-1, tensor) == 0 and fails.counts().fast == before + 1
        if hasattr(tensor, "ledger"):
            tensor.ledger.check(tensor.ledger.made)


@pytest.mark.parametrize("how", [2, 3, 8])
def test_an_exception_in_the_very_first_call_and_without_the_gil(how):
    """The slow path makes a first call: the frames of the kernel are there, below those of the slow path."""
    assert_same_exception(caught(fast_args(fails.py_func), how, np.ones(3)), plain_end(how))
    assert [caught(fails_unlocked, how, np.ones(3))[:3] for _ in range(3)] == [plain_end(how)[:3]] * 3


def test_messages_run_no_code_of_what_they_name():
    lies, nested = type("Lies", (), {"__repr__": lambda self: 1 / 0}), []
    nested.append(nested)
    for thing in (lies(), nested, 10**5000, (10**5000, lies())):
        check_raises(ValueError, "'refuse' or 'allow', not", fast_args, grad=thing)
    check_raises(TypeError, "Lies", fast_args, lies())
