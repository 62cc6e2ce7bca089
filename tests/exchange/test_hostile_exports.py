"""Capsules and exports that are hostile where they are given back: consumed already, destructors, copies, failures at the end."""

import ctypes
import gc
import sys
import weakref

import hostile_producers as hostile
import numpy as np
import pytest
from counting import check_dies, end_of, is_exception, kept, memory_of, no_violations
from hostile_ways import WARM, Turning, check_end, ignore, total
from made_producers import ONLY_NUMBA, Ledger, address_of, capsule, capsule_name, export_legacy, export_versioned, ffi

from hostile_producers import (  # isort: skip
    FUNCTIONS, REFUSED, Gives, GivesLegacy, Sets, capsule_with_destructor, hostile_type, legacy, versioned,
)
from fastexchange import fast_args

assert no_violations  # a fixture
FORMS = {
    "versioned": (Gives, versioned, export_versioned, b"dltensor_versioned"),
    "legacy": (GivesLegacy, legacy, export_legacy, b"dltensor"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_capsule_again(form):
    """The second time it has been consumed."""
    cls, make, *_ = FORMS[form]
    again = []

    def give(tensor):
        if not again:
            again.append(make(tensor))
        return again[0]

    tensor = cls(give)
    assert total(1.0, cls(make)) == total(1.0, tensor) == 6.0  # a call that compiles may ask for a second one
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), REFUSED, "__dlpack__")
    tensor.ledger.check(1)
    again.clear()
    check_end(end_of(ignore, tensor, tensor), REFUSED, "__dlpack__", name="arguments[1]")
    tensor.ledger.check(2)


def destroying(form: str):
    """A tensor whose capsules have a destructor."""
    cls, _, export, name = FORMS[form]
    return cls(lambda tensor: capsule_with_destructor(export(tensor.ledger, tensor.array), name))


@pytest.fixture
def at_destruction():
    yield hostile.at_destruction
    hostile.at_destruction.clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", [lambda: None, gc.collect, lambda: total(1.0, np.ones(3))], ids=["no", "collects", "calls"])
def test_a_capsules_destructor(form, what, at_destruction):
    """A capsule is renamed before it dies, so that its destructor leaves the tensor alone."""
    at_destruction[:] = [what]
    hostile.destroyed_names.clear()
    tensor = destroying(form)
    for first in (1.0, 1.0, ONLY_NUMBA):
        assert total(first, tensor) == 6.0
    assert set(hostile.destroyed_names) == {b"used_" + FORMS[form][3]} and len(hostile.destroyed_names) >= 3
    tensor.ledger.check(tensor.ledger.made)


@pytest.mark.skipif(hasattr(sys, "gettotalrefcount"), reason="a debug build of CPython aborts by itself")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("error", [BufferError("no"), OSError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_capsules_destructor_that_sets_an_exception(form, error, at_destruction):
    """The call ends in it, or goes on without it; the tensor is given back all the same."""

    def fail():
        raise Sets(0, type(error), error)

    at_destruction[:] = [fail]
    tensor = destroying(form)
    for first in (1.0, 1.0, ONLY_NUMBA):
        check_end(end_of(total, first, tensor), (6.0, type(error)))
        tensor.ledger.check(tensor.ledger.made)
    at_destruction.clear()
    assert total(1.0, np.arange(4.0)) == 6.0


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

    def sets_an_exception():
        raise Sets(0, BufferError, BufferError("from the deleter"))

    ledger = Ledger()
    managed = hostile.managed_and(ledger, np.ones(3), sets_an_exception)
    assert address_of(managed.deleter) == hostile.delete_function
    with pytest.raises(BufferError, match="from the deleter"):
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(hostile.delete_function)(address_of(managed))
    ledger.check(1)


# ---- a kept array, whose export is made when the call has ended ------------------------------------------------------


def column_of(first, x):
    """A view: an argument would be returned as that very object."""
    return x.reshape(4, 1)


column, warm_column = fast_args(column_of, returns=np.ndarray), fast_args(column_of, returns=np.ndarray)
KERNELS = {"called first": (column, 0), "called often": (warm_column, WARM)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kept_array_whose_export_is_elsewhere(kernel):
    """The borrowed memory must live as long as the array, whatever the export, made when it was kept, holds."""
    column, calls = KERNELS[kernel]
    copies, cls = [], hostile_type("Copying")

    def copy(tensor, out):
        copies.append(tensor.array.copy())
        out[0] = export_versioned(tensor.ledger, copies[-1], flags=2)

    for _ in range(calls):
        column(1.0, cls(behaves=True))
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
    def export(tensor, out):
        act()
        return hostile.honest(tensor, out)

    return export


FAILURES = {
    **{name: FUNCTIONS[name][0] for name in (
        "-1 and no exception, -1", "raises BufferError", "raises FileNotFoundError", "raises KeyboardInterrupt",
        "0 and BufferError set", "filled, 0 and BufferError set", "1 and ValueError set", "no exception type at all",
    )},
    "NULL": lambda tensor, out: 0,
    "major version 2": lambda tensor, out: hostile.honest(tensor, out, version=(2, 0)),
    "no deleter": lambda tensor, out: hostile.honest(tensor, out, deleter=ffi.NULL),
    "calls the kernel": acting(lambda: column(1.0, np.ones(4))),
    "collects": acting(gc.collect),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAILURES)
def test_a_kept_array_whose_export_fails(name, kernel):
    """The call has been made: its result is right, and the tensor itself is kept, or what was exported."""
    column, calls = KERNELS[kernel]
    tensor = Turning(behaves=True)
    for _ in range(calls):
        column(1.0, tensor)
    ledger, reference = tensor.ledger, weakref.ref(tensor)
    tensor.export, tensor.behaves = FAILURES[name], False
    for _ in range(3):
        end = end_of(column, 1.0, tensor)
        if is_exception(end):
            check_end(end, (BufferError, ValueError, OSError, KeyboardInterrupt, SystemError, TypeError))
        else:
            assert end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    memory = tensor.array
    del tensor
    assert is_exception(end) or end.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    del end, memory
    check_dies(reference)
    if name != "no deleter":
        ledger.check(ledger.made)
