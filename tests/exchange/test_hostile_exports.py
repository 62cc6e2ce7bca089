"""Capsules and exports that are hostile where they are given back: consumed already, destructors, copies, failures at the end."""

import ctypes
import functools
import gc
import sys
import weakref

import hostile_producers as hostile
import numpy as np
import pytest
from counting import check_dies, end_of, is_exception, kept, memory_of, no_violations
from hostile_ways import WARM, check_end, ignore, total
from made_producers import ONLY_NUMBA, Ledger, address_of, capsule, capsule_name, export_legacy, export_versioned, ffi

from hostile_producers import (  # isort: skip
    FUNCTIONS, REFUSED, Gives, GivesLegacy, Sets, capsule_with_destructor, hostile_type, legacy, versioned,
)
from fastexchange import fast_args

assert no_violations  # a fixture
each_form = pytest.mark.parametrize(("cls", "give", "export", "name"), [
    (Gives, versioned, export_versioned, b"dltensor_versioned"), (GivesLegacy, legacy, export_legacy, b"dltensor"),
], ids=["versioned", "legacy"])  # fmt: skip


@each_form
def test_the_same_capsule_again(cls, give, export, name):
    again = functools.cache(give)
    tensor = cls(again)
    assert total(1.0, cls(give)) == total(1.0, tensor) == 6.0  # a call that compiles may ask for a second one
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
    tensor.ledger.check(1)
    again.cache_clear()
    check_end(end_of(ignore, tensor, tensor), REFUSED, "__dlpack__", name="arguments[1]")
    tensor.ledger.check(2)


def fail(error):
    raise Sets(0, type(error), error)


DESTRUCTORS = {
    "does nothing": (lambda: None, 6.0),
    "collects": (gc.collect, 6.0),
    "calls a kernel": (lambda: total(1.0, np.ones(3)), 6.0),
    **{f"sets {error.__name__}": (functools.partial(fail, error("no")), (6.0, error))
       for error in (BufferError, OSError, KeyboardInterrupt)},
}  # fmt: skip


@each_form
@pytest.mark.parametrize("what", DESTRUCTORS)
def test_a_capsules_destructor(cls, give, export, name, what, monkeypatch):
    """A capsule is renamed before it dies, so that its destructor leaves the tensor alone; it is given back however that ends."""
    act, ends = DESTRUCTORS[what]
    if ends != 6.0 and hasattr(sys, "gettotalrefcount"):
        pytest.skip("a debug build of CPython aborts by itself")
    tensor = cls(lambda tensor: capsule_with_destructor(export(tensor.ledger, tensor.array), name))
    monkeypatch.setattr(hostile, "at_destruction", [act])
    hostile.destroyed_names.clear()
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), ends)
        tensor.ledger.check(tensor.ledger.made)
    assert set(hostile.destroyed_names) == {b"used_" + name} and len(hostile.destroyed_names) >= 3


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


def test_the_deleter_of_these_tests_is_native():
    """It returns with an exception set, which only native code can do."""
    ledger = Ledger()
    managed = hostile.managed_and(ledger, np.ones(3), functools.partial(fail, BufferError("from the deleter")))
    with pytest.raises(BufferError, match="from the deleter"):
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address_of(managed.deleter))(address_of(managed))
    ledger.check(1)


# ---- a kept array, whose export is made when the call has ended ------------------------------------------------------
@functools.cache
def kernel_called(calls: int):
    """A kernel that returns a view: an argument would be returned as that very object. And the type that it was called with."""
    column = fast_args(lambda first, x: x.reshape(4, 1), returns=np.ndarray)
    cls = hostile_type("Columns")
    for _ in range(calls):
        column(1.0, cls(behaves=True))
    return column, cls


each_kernel = pytest.mark.parametrize("calls", [0, WARM], ids=["called first", "called often"])


@each_kernel
def test_a_kept_array_whose_export_is_elsewhere(calls):
    """The borrowed memory must live as long as the array, whatever the export, made when it was kept, holds."""
    column, cls = kernel_called(calls)
    copies = []

    def copy(tensor, out):
        copies.append(tensor.array.copy())
        out[0] = export_versioned(tensor.ledger, copies[-1], flags=2)

    tensor = cls(memory_of(0, 1, 2, 3), export=copy)
    memory, ledger = weakref.ref(tensor.array), tensor.ledger
    array = column(1.0, tensor)
    del tensor
    gc.collect()
    is_copy = any(array.ctypes.data == made.ctypes.data for made in copies)
    assert is_copy or memory() is not None, "the array's memory has gone"
    assert array.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    del array
    check_dies(memory)
    ledger.check(ledger.made)


def acting(act):
    return lambda tensor, out: (act(), hostile.honest(tensor, out))[1]


FAILURES = {
    **{name: FUNCTIONS[name][0] for name in (
        "-1 and no exception, -1", "raises BufferError", "raises FileNotFoundError", "raises KeyboardInterrupt",
        "0 and BufferError set", "filled, 0 and BufferError set", "1 and ValueError set", "no exception type at all",
    )},
    "NULL": lambda tensor, out: 0,
    "major version 2": lambda tensor, out: hostile.honest(tensor, out, version=(2, 0)),
    "no deleter": lambda tensor, out: hostile.honest(tensor, out, deleter=ffi.NULL),
    "calls a kernel": acting(lambda: kernel_called(0)[0](1.0, np.ones(4))),
    "collects": acting(gc.collect),
}  # fmt: skip


@each_kernel
@pytest.mark.parametrize("name", FAILURES)
def test_a_kept_array_whose_export_fails(name, calls):
    """The call has been made: its result is right, and the tensor itself is kept, or what was exported."""
    column, cls = kernel_called(calls)
    tensor = cls(behaves=True)
    column(1.0, tensor)
    ledger, reference = tensor.ledger, weakref.ref(tensor)
    tensor.export, tensor.behaves = FAILURES[name], False
    ends = [end_of(column, 1.0, tensor) for _ in range(3)]
    memory = tensor.array
    del tensor
    for end in ends:
        if is_exception(end):
            check_end(end, (BufferError, ValueError, OSError, KeyboardInterrupt, SystemError, TypeError))
        else:
            assert end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    del end, ends, memory
    check_dies(reference)
    if name != "no deleter":
        ledger.check(ledger.made)
