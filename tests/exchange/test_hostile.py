"""Hostile and broken producers: each ends in a right result or an exception that names the argument; nothing is lost."""

import functools
import gc
import itertools
import operator
import sys
import weakref

import hostile_producers as hostile
import numba
import numpy as np
import pytest
from counting import Exported, Viewed, check_dies, end_of, is_exception, kept, memory_of, no_violations
from exchanges import CALLS, Given, eventually
from exchanges import CONVERSIONS as TO_FRAMEWORKS
from interoperability import elements
from made_producers import ONLY_NUMBA, Dunder, Ledger, capsule, capsule_name, export_versioned, ffi
from oracle import new_kernel, numbas

from hostile_producers import (  # isort: skip
    CONTENTS, EXPORTED, FUNCTIONS, GOOD_IN_THE_END, REFUSED, RETURNS, REWORDED, UNCHANGED, Gives, GivesLegacy, RaisingDescriptor,
    before, hostile_type, legacy, raising, setting, versioned, with_destructor,
)
from hostile_ways import (  # isort: skip
    CONVERSIONS, EVERYTHING, TOTALS, WARM, Turning, check_end, check_ways, ignore, kind_of, size_of, total, warm, warm_total,
    ways,
)
from fastexchange import explain, fast_args

assert no_violations  # a fixture
EXPORTED_INSTEAD = {"raises BufferError", "raises Mute", "an exception of another type than its value"}
"""Of a tensor whose view is refused so, the export is taken: test_hostile_actions.py."""
PLAINLY = {name: way for name, way in EVERYTHING.items() if name in CONVERSIONS or name in (
    "a view", "an export", "a capsule beside a number")}  # fmt: skip
"""Ways for which a kernel is compiled once: they are enough of what others say, too, but that kernels read it as another type."""
READ_ALIKE = {"no elements (1, 0, 1)", "NULL strides of 64 dimensions", "strides that mean nothing", "code 4 of 16 bits",
              *(f"code {code} of 8 bits" for code in (11, 12, 13))}  # fmt: skip
CASES = {
    # name: (the ways by which the tensor comes; what it says, or what its function does; how a call ends; a word of the message)
    **{name: (PLAINLY if name in READ_ALIKE else EVERYTHING, *said) for name, said in CONTENTS.items()},
    **{name: (ways("export", "give", but="legacy"), *said) for name, said in EXPORTED.items()},
    **{f"a function: {name}": (ways("export", *["view"] * (name not in EXPORTED_INSTEAD), *["give"] * name.startswith("raises ")),
                               act, ends, "") for name, (act, ends) in FUNCTIONS.items()},
    **{f"__dlpack__ returns {name}": (ways("give"), give, REFUSED, "__dlpack__") for name, give in RETURNS.items()},
    "an export writes NULL": (ways("export"), lambda tensor, out: operator.setitem(out, 0, ffi.NULL), REFUSED, "did not say why"),
    "an export writes nothing": (ways("export"), hostile.returning(0), REFUSED, "did not say why"),
    "a view writes nothing": (ways("view"), hostile.returning(0), REFUSED, ""),
    "a view writes some of the fields": (
        ways("view"), lambda tensor, out: hostile.honest(tensor, out, shape=None, strides=None), REFUSED, "shape"),
    "as many elements as there may be": (
        {name: way for name, way in PLAINLY.items() if "copy" not in name},
        {"code": 5, "ndim": 2, "shape": (2**27, 2**28), "strides": None}, 2**55, ""),
}  # fmt: skip


@pytest.mark.parametrize(("ways", "what", "ends", "word"), CASES.values(), ids=CASES)
def test_what_a_tensor_says_or_does(ways, what, ends, word):
    check_ways(ways, what, ends, word)


@pytest.mark.parametrize("error", [*UNCHANGED, *(kind("no") for kind in REWORDED)], ids=lambda error: type(error).__name__)
def test_an_exception_that_is_more_than_a_message_arrives_as_it_is(error):
    for name, (function, make, call) in (CONVERSIONS if type(error) in REWORDED else EVERYTHING).items():
        if function == "view" and isinstance(error, BufferError):
            continue  # the export is taken
        with pytest.raises(type(error)) as caught:
            call(TOTALS, make(TOTALS, **{function: raising(error)}))
        assert caught.value is error, name
        error.__traceback__ = None


@pytest.mark.parametrize("cls", GOOD_IN_THE_END, ids=lambda cls: type.__getattribute__(cls, "__qualname__"))
def test_strange_producers_are_read_or_refused_by_their_names(cls):
    """The argument is named also where its type, its class or its text cannot be asked."""
    for lies, ends, word in (({}, 6.0, ""), ({"device_type": 2}, REFUSED, "kDLCUDA")):
        tensor = cls(np.arange(4.0), **lies)
        with kept(tensor):
            for beside in (1.0, 1.0, Dunder(np.ones(3)), ONLY_NUMBA):
                check_end(end_of(total, beside, tensor), ends, word)
            if not lies:
                assert end_of(ignore, (tensor, (tensor,)), ONLY_NUMBA) == 2
                assert isinstance(str(explain(tensor)), str)
        for name, take in [*{**CALLS, **TO_FRAMEWORKS}.items()] * (2 if not lies else 0):
            made = take(tensor)
            array = np.from_dlpack(Given(made)) if "to_dlpack" in name else elements(made)
            assert array.tolist() == [0, 1, 2, 3], name
            del made, array
        assert eventually(lambda: not tensor.ledger.out)  # noqa: B023
        tensor.ledger.check(tensor.ledger.made)


def good(self, *, max_version=None):
    return np.arange(4.0).__dlpack__(max_version=max_version)


ERROR = RaisingDescriptor(ValueError("no"))
BROKEN_METHODS = {
    "None": (None, TypeError), "an int": (3, TypeError), "a C function without self": (len, TypeError),
    "a C function of another type": (list.append, TypeError), "a slot of another type": (int.__add__, TypeError),
    "ndarray's own": (np.ndarray.__dlpack__, TypeError), "a class": (dict, REFUSED),
    "a property that raises": (property(hostile.fails), ZeroDivisionError),
    "a property that gives None": (property(lambda self: None), TypeError),
    "a static method with a parameter": (staticmethod(good), TypeError),
    "a method without self": (lambda: 1, TypeError),
    "a generator": (lambda self, max_version=None: (yield), REFUSED),
    "a descriptor that raises": (ERROR, ValueError),
}  # fmt: skip
"""What stands for ``__dlpack__``, and how a call ends."""
HALF_A_PROTOCOL = {
    "no __dlpack_device__": ({"__dlpack__": good}, TypeError),
    "no __dlpack__": ({"__dlpack_device__": lambda self: (1, 0)}, TypeError),
    "a device descriptor that raises": ({"__dlpack__": good, "__dlpack_device__": ERROR}, ValueError),
    **{name: ({"__dlpack__": method, "__dlpack_device__": lambda self: (1, 0)}, ends)
       for name, (method, ends) in BROKEN_METHODS.items()},
}  # fmt: skip


@pytest.mark.parametrize(("attributes", "ends"), HALF_A_PROTOCOL.values(), ids=HALF_A_PROTOCOL)
def test_methods_that_are_none(attributes, ends):
    tensor = type("Methods", (), attributes)()
    with kept(tensor):
        for first in (1.0, Dunder(np.ones(2)), ONLY_NUMBA, 1.0):
            check_end(end_of(total, first, tensor), ends)
    assert total(1.0, np.arange(4.0)) == 6.0


@pytest.mark.parametrize("error", [ValueError("no"), AttributeError("no"), KeyboardInterrupt(), SystemExit(2)], ids=repr)
def test_getattr_that_raises(error):
    """It is no tensor. The call ends as under plain ``@njit``, or in a TypeError that names the argument."""
    evil = type("Evil", (), {"__getattr__": lambda self, name: raising(error)(self)})
    for first in (1.0, 1.0, ONLY_NUMBA, ONLY_NUMBA):
        want, got = end_of(numbas(total), first, evil()), end_of(total, first, evil())
        if kind_of(got) is not kind_of(want):
            check_end(got, TypeError)
        error.__traceback__ = None
    assert total(1.0, np.arange(4.0)) == 6.0


# ---- one argument beside another -------------------------------------------------------------------------------------
@fast_args
def four(a, b, c, d):
    return a[0] * 1000 + b[0] * 100 + c[0] * 10 + d[0]


def four_known_tensors() -> list:
    tensors = [Turning(np.full(3, float(i)), behaves=True) for i in range(1, 5)]
    for _ in range(WARM):
        assert four(*tensors) == 1234.0
    return tensors


OUTCOMES = {name: FUNCTIONS[name] for name in (
    "filled, 0 and BufferError set", "filled, 0 and OSError set", "filled, 0 and KeyboardInterrupt set", "raises EOFError",
    "filled, -1 and no exception")} | {"writes nothing": (hostile.returning(0), REFUSED)}  # fmt: skip


@pytest.mark.parametrize(("act", "ends"), OUTCOMES.values(), ids=OUTCOMES)
@pytest.mark.parametrize("position", range(4))
def test_beside_others(act, ends, position):
    """No producer is entered with another one's exception set, none swallows it, also where others are not those planned.

    A view that writes nothing is not taken for the argument before it.
    """
    tensors, where = four_known_tensors(), {"name": "abcd"[position], "position": position}
    culprit = tensors[position]
    culprit.view = act
    for _ in range(3):
        culprit.behaves = False
        check_end(end_of(four, *tensors), ends, **where)
        culprit.behaves = True
        assert four(*tensors) == 1234.0
    for other in (np.full(3, 5), Turning(np.full(3, 5, np.int32)), Dunder(np.full(3, 5.0)), Exported(np.full(3, 5.0))):
        for place in set(range(4)) - {position}:
            arguments = list(tensors)
            arguments[place], arguments[position] = other, Turning(np.full(3, 9.0), view=act)
            check_end(end_of(four, *arguments), ends, **where)
        if hasattr(other, "ledger"):
            other.ledger.check(other.ledger.made)
    assert four(*tensors) == 1234.0


def test_of_two_hostile_tensors_the_first_decides():
    for (first, ends), (second, _) in itertools.permutations(OUTCOMES.values(), 2):
        tensors = four_known_tensors()
        for tensor, act in zip(tensors[1:], (first, second), strict=False):
            tensor.view, tensor.behaves = act, False
        for _ in range(3):
            check_end(end_of(four, *tensors), ends, name="b", position=1)


# ---- different at each look ------------------------------------------------------------------------------------------
def changing(*states):
    """A view or an export that describes another of `states` (lies) at each look."""
    looks = iter(range(10**9))
    return lambda tensor, out: hostile.honest(tensor, out, **states[next(looks) % len(states)])


GRID = {"ndim": 2, "shape": (2, 2), "strides": (2, 1)}
CHANGES = {
    "shape": ([{}, {"shape": (2,)}, {"shape": (3,)}], (6.0, 1.0, 3.0)),
    "ndim": ([{}, GRID, {"ndim": 0}], (6.0, 0.0)),
    "strides": ([{}, {"shape": (2,), "strides": (2,)}, {"shape": (4,), "strides": (0,)}], (6.0, 2.0, 0.0)),
    "dtype": ([{}, {"code": 0}, {"code": 1}], None), "layout": ([GRID, {**GRID, "strides": (1, 2)}], (6.0,)),
    "bits": ([{}, {"bits": 32, "shape": (8,)}], None), "device": ([{}, {"device_type": 2}], (6.0,)),
    "data": ([{}, {"data": 0}], (6.0,)),
    "sanity": ([{}, {"ndim": -1}, {"shape": None}, {"lanes": 0}], (6.0,)),
}  # fmt: skip
"""The states, and the results that calls may have, if they are not refused; None: any."""


@pytest.mark.parametrize(("states", "values"), CHANGES.values(), ids=CHANGES)
def test_a_call_uses_one_look_from_beginning_to_end(states, values):
    def check(tensor, kernel, *firsts):
        for first in firsts:
            end = end_of(kernel, first, tensor)
            if values is None:
                assert isinstance(end, float) or kind_of(end) is REFUSED
            else:
                check_end(end, (*values, REFUSED))
        tensor.ledger.check(tensor.ledger.made)

    for cls in (Viewed, Exported):
        check(cls(view=changing(*states), export=changing(*states)), total, *[1.0] * 10, *[ONLY_NUMBA] * 10)
    warm(warm_total)
    for tensor in (Turning(view=changing(*states)), Exported(export=changing(*states))):  # in cache entries
        for i in range(10 + WARM):
            tensor.behaves = i < WARM or i % 2 == 0
            check(tensor, warm_total, 1.0)
            assert not tensor.behaves or warm_total(1.0, tensor) == 6.0


@pytest.mark.parametrize("calls", [0, WARM])
@pytest.mark.parametrize(("cls", "nogil"), [(Viewed, False), (Exported, False), (Viewed, True)], ids=str)
def test_the_same_tensor_twice_in_a_call_different_at_each_look(cls, nogil, calls):
    """An export that was made before the one that differs is given back, also by a cache entry."""
    sizes, change = fast_args(lambda a, b: a.size * 10 + b.size, nogil=nogil), changing({}, {"shape": (2,)}, {"code": 0})
    tensor = cls(view=change, export=change, behaves=True)
    assert [sizes(tensor, tensor) for _ in range(calls)] == [44] * calls
    tensor.behaves = False
    assert {end_of(sizes, tensor, tensor) for _ in range(4)} <= {44, 42, 24}
    tensor.ledger.check(tensor.ledger.made)


counted_size = numba.njit(size_of)


@pytest.mark.parametrize("bad", [BufferError, KeyboardInterrupt, None], ids=str)
@pytest.mark.parametrize("cls", [Viewed, Exported], ids=lambda cls: cls.__name__)
def test_a_failure_at_any_one_look(cls, bad):
    """One look fails: the call in which it fell ends so, or is right; every other call is right."""
    act = raising(bad) if bad else hostile.returning(-1)
    for failing in (1, 2, 3, 4):  # the first makes the cache entry
        def once(tensor, out, failing=failing):
            return (act if tensor.looks == failing else hostile.honest)(tensor, out)

        kernel, tensor = new_kernel(counted_size), cls(view=once, export=once)
        wrong = [end for end in [end_of(kernel, 1.0, tensor) for _ in range(8)] if end != 4]
        assert len(wrong) <= 1, (failing, wrong)
        for end in wrong:
            check_end(end, bad or BufferError)
        tensor.ledger.check(tensor.ledger.made)


# ---- where exports are given back: consumed already, destructors, copies, failures at the end ------------------------
each_form = pytest.mark.parametrize(("cls", "give"), [(Gives, versioned), (GivesLegacy, legacy)], ids=["versioned", "legacy"])


@each_form
def test_the_same_capsule_again(cls, give):
    again = functools.cache(give)
    tensor = cls(again)
    assert total(1.0, cls(give)) == total(1.0, tensor) == 6.0  # a call that compiles may ask for a second one
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
    tensor.ledger.check(1)
    again.cache_clear()
    check_end(end_of(ignore, tensor, tensor), REFUSED, "__dlpack__", name="arguments[1]")
    tensor.ledger.check(2)


DESTRUCTORS = {
    "does nothing": (int, 6.0), "collects": (gc.collect, 6.0), "calls a kernel": (lambda: total(1.0, np.ones(3)), 6.0),
    **{f"sets {error.__name__}": (functools.partial(setting(0, error, error), None, None), (6.0, error))
       for error in (BufferError, OSError, KeyboardInterrupt)},
}  # fmt: skip


@each_form
@pytest.mark.parametrize(("act", "ends"), DESTRUCTORS.values(), ids=DESTRUCTORS)
def test_a_capsules_destructor(cls, give, act, ends, monkeypatch):
    """A capsule is renamed before it dies, so that its destructor leaves the tensor alone; it is given back however that ends."""
    if ends != 6.0 and hasattr(sys, "gettotalrefcount"):
        pytest.skip("a debug build of CPython aborts by itself")
    tensor = cls(lambda tensor: with_destructor(give(tensor)))
    monkeypatch.setattr(hostile, "at_destruction", [act])
    hostile.destroyed_names.clear()
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), ends)
        tensor.ledger.check(tensor.ledger.made)
    assert set(hostile.destroyed_names) == {b"used_" + capsule_name(give(tensor))} and len(hostile.destroyed_names) >= 3


@pytest.mark.parametrize("name", [b"dltensor_v2", b"used_dltensor_versioned", None])
def test_a_refused_capsules_tensor_stays_its_own(name):
    """What is no unconsumed capsule is not renamed, and its tensor not deleted."""
    ledger = Ledger()
    made = capsule(export_versioned(ledger, np.ones(3)), name)
    tensor = Gives(lambda tensor: made)
    with kept(made):
        for first in (1.0, 1.0, ONLY_NUMBA):
            check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
    assert ledger.deleted == 0 and capsule_name(made) == name


# ---- a kept array, whose export is made when the call has ended ------------------------------------------------------
@functools.cache
def kernel_called(calls: int):
    """A kernel that returns a view: an argument would be returned as that very object. And the type that it was called with."""
    column = fast_args(lambda first, x: x.reshape(4, 1), returns=np.ndarray)
    cls = hostile_type("Columns")
    for _ in range(calls):
        column(1.0, cls(behaves=True))
    return column, cls


FAILURES = {
    **{name: FUNCTIONS[name][0] for name in (
        "-1 and no exception, -1", "raises BufferError", "raises FileNotFoundError", "raises KeyboardInterrupt",
        "0 and BufferError set", "filled, 0 and BufferError set", "1 and ValueError set", "no exception type at all",
    )},
    "NULL": lambda tensor, out: 0,
    "major version 2": lambda tensor, out: hostile.honest(tensor, out, version=(2, 0)),
    "no deleter": lambda tensor, out: hostile.honest(tensor, out, deleter=ffi.NULL),
    "of a copy": lambda tensor, out: operator.setitem(out, 0, export_versioned(tensor.ledger, tensor.array.copy(), flags=2)),
    "calls a kernel": before(lambda tensor: kernel_called(0)[0](1.0, np.ones(4))),
    "collects": before(lambda tensor: gc.collect()),
}  # fmt: skip


@pytest.mark.parametrize("is_known", [False, True], ids=["called first", "called often"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_kept_array_whose_export_fails_or_is_of_other_memory(name, is_known):
    """The call has been made: its result is right, and what it shows lives as long as it, whatever the export holds."""
    column, cls = kernel_called(WARM if is_known else 0)
    tensor = cls(memory_of(0, 1, 2, 3), export=FAILURES[name], behaves=is_known)
    at, ledger, died = tensor.array.ctypes.data, tensor.ledger, [weakref.ref(tensor), weakref.ref(tensor.array)]
    for _ in range(is_known):
        column(1.0, tensor)
    tensor.behaves = False
    ends = [end_of(column, 1.0, tensor) for _ in range(3)]
    assert name != "of a copy" or not any(map(is_exception, ends))
    del tensor
    gc.collect()
    for end in ends:
        if is_exception(end):
            check_end(end, (BufferError, ValueError, OSError, KeyboardInterrupt, SystemError, TypeError))
        else:
            assert end.ctypes.data != at or died[1]() is not None, "the array's memory has gone"
            assert end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    del end, ends
    check_dies(died[0])
    if name != "no deleter":
        check_dies(died[1])
        ledger.check(ledger.made)
