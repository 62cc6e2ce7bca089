"""A kind of argument is added by one file: here ``datetime.timedelta``, of which kernels get the microseconds as an int64."""

import datetime

import numpy as np
import pytest
from numba import types
from oracle import type_and_message

from fastexchange import explain, fast_args
from fastexchange.arguments import discovery
from fastexchange.arguments.kind import Discovery, Kind, reader
from fastexchange.arguments.numbers import INT64
from fastexchange.dispatch import structs
from fastexchange.dispatch.rows import go_on, is_of_type, leave, row_reader
from fastexchange.dispatch.runtime import runtime
from fastexchange.ground.native import load, native, store

DAYS = object.__basicsize__ + 8  # behind the hash: days, seconds, microseconds, each an int
MOST_DAYS = 2**63 // (86400 * 10**6) - 1
LONG = datetime.timedelta(MOST_DAYS + 1)


@native
def days_of(ob):
    return types.intp(types.int32(load(ob + DAYS)))


@native
def microseconds_of(ob):
    seconds, rest = types.intp(types.int32(load(ob + DAYS + 4))), types.intp(types.int32(load(ob + DAYS + 8)))
    return (days_of(ob) * 86400 + seconds) * 1000000 + rest


@reader
def read_delta(ob, entry, frame, word, array):
    if days_of(ob) > MOST_DAYS:
        return -structs.STATUS_NUMBA
    store(word, microseconds_of(ob))
    return INT64


@row_reader
def delta_row(items, row, word, array, frame):
    ob = load(items)
    if not is_of_type(ob, row) or days_of(ob) > MOST_DAYS:
        return leave(row, frame, 0)
    store(word, microseconds_of(ob))
    return go_on(items + 8, row, word + 8, array, frame)


def as_int(value) -> int:
    if value.days > MOST_DAYS:
        raise OverflowError(f"its microseconds do not fit into 64 bits: {value!r}")
    return value // datetime.timedelta(microseconds=1)


SAID = "its microseconds are read in place"
DELTA = Kind("delta", SAID, structs.FORM_OTHER, read_delta, lambda fields: (delta_row,), for_numba=as_int)


@pytest.fixture(autouse=True)
def _described(monkeypatch):
    def find(cls, notes, instance=None):
        return Discovery(DELTA) if cls is datetime.timedelta else None

    monkeypatch.setattr(discovery, "_FIND", (find, *discovery._FIND))
    runtime().entries.remove(id(datetime.timedelta))
    yield
    runtime().entries.remove(id(datetime.timedelta))


def test_calls():
    kernel = fast_args(lambda x, a: a + x[0])
    for value in (datetime.timedelta(0, 1), datetime.timedelta(-3, 5, 7), datetime.timedelta(1), -datetime.timedelta(9)):
        assert kernel(np.ones(1, np.int64), value) == as_int(value) + 1
    assert kernel.counts() == (3, 1, 1)
    assert kernel((1,), datetime.timedelta(0, 0, 5)) == 6  # a tuple, by Numba's type of it
    assert f"path delta ({SAID})" in str(explain(datetime.timedelta()))
    assert "as int64" in str(kernel.explain(np.ones(1), datetime.timedelta()))


def test_where_numba_makes_the_call():
    kernel = fast_args(lambda s, a: a + len(s))
    assert [kernel({1, 2}, datetime.timedelta(0, 1)) for _ in range(3)] == [1000002] * 3
    for _ in range(2):
        kind, said = type_and_message(lambda: fast_args(lambda a: a)(LONG))
        assert kind is OverflowError and said.startswith("test_where") and "do not fit" in said and "'a' (position 0)" in said


def test_an_error_in_the_kernel_is_its_own():
    _, said = type_and_message(fast_args(lambda a: a.nothing), datetime.timedelta(1))
    assert "nothing" in said and "int64" in said and "pyobject" not in said
