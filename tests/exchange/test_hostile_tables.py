"""What may stand in place of a type's exchange table: unusable, usable though not where expected, raising, changing."""

import contextlib
import gc
import itertools
import re
import weakref

import hostile_producers as hostile
import numpy as np
import pytest
from counting import Viewed, end_of, kept, no_violations
from frameworks import has_table, torch
from hostile_producers import ATTRIBUTE, EXPORT, VIEW, Hostile, RaisingDescriptor, with_destructor
from hostile_ways import WARM, check_end, kernels_of, size_of, total, unlocked_total
from made_producers import ONLY_NUMBA, TABLE_CAPSULE, WithMethods, address_of, capsule, exchange_table, ffi

from fastexchange import explain

assert no_violations  # a fixture
OURS = {VIEW: hostile.view_function, EXPORT: hostile.export_function}
REQUIRED = ("managed_tensor_allocator", EXPORT, "managed_tensor_to_py_object_no_sync", "current_work_stream")
NONE = dict.fromkeys((VIEW, *REQUIRED))


def type_with(value, name: str, bases=(), by_meta=False):
    """A tensor of a new type that has `value` for a table, or whose metaclass has a property that reads (or calls) it."""
    if not by_meta:
        return type(name, bases, {ATTRIBUTE: value})()
    read = property(value if callable(value) else lambda cls: value)
    return type("Meta", (type,), {ATTRIBUTE: read})(name, bases, {})()


def check_ends(tensor, ends, word="") -> list:
    seen = [*(end_of(total, first, tensor) for first in (1.0, 1.0, ONLY_NUMBA, 1.0)), end_of(unlocked_total, 1.0, tensor)]
    for end in seen:
        check_end(end, ends, word)
    if hasattr(tensor, "ledger"):
        tensor.ledger.check(tensor.ledger.made)
    return seen


def chain(*versions, last=None):
    table = last
    for version in reversed(versions):
        table = exchange_table(version=version, prev=table, **OURS)
    return table


def circle(*versions):
    first = end = chain(*versions)
    while end.header.prev_api != ffi.NULL:
        end = ffi.cast("DLPackExchangeAPI *", end.header.prev_api)
    end.header.prev_api = ffi.cast("DLPackExchangeAPIHeader *", first)
    return first


def held(table):
    return capsule(table, TABLE_CAPSULE)


GOOD = chain((1, 3))
NAMES = (b"dltensor", b"dltensor_versioned", b"dlpack_exchange_api ", b"DLPACK_EXCHANGE_API", b"", None, b"\xff")
VALUES = (0, 1, -1, address_of(GOOD), "capsule", b"dlpack_exchange_api", (), [], {}, int, 1.5, object(), False, ...)
VERSIONS = [(0, 0), (0, 99), (2, 0), (255, 255), (2**32 - 1, 2**32 - 1), (256, 1), (257, 3), (2**16 + 1, 3)]
UNUSABLE = {
    **{f"a capsule named {name!r}": capsule(GOOD, name) for name in NAMES},
    **{re.sub("[0-9]{4,}", "N", f"{type(value).__name__} {value!r:.20}"): value for value in VALUES},
    "what calls itself PyCapsule": hostile.FalsePyCapsule(), "what cannot be printed": hostile.Unprintable(),
    "a list of a capsule": [held(GOOD)], "a function": lambda: held(GOOD), "a cffi pointer": GOOD,
    "a table of zeros": held(exchange_table(version=(0, 0), **NONE)),
    **{f"version {version}": held(chain(version)) for version in VERSIONS},
    **{f"no {name}": held(exchange_table(**OURS | {name: None})) for name in REQUIRED},
    "nothing but a version": held(exchange_table(**NONE)),
    "nothing but a view": held(exchange_table(**NONE | {VIEW: hostile.view_function})),
    "a table that is its own predecessor": held(circle((2, 0))), "two tables behind each other": held(circle((3, 0), (2, 0))),
    "a long circle of tables": held(circle(*[(2, i) for i in range(100)])),
    "a long chain of tables": held(chain(*[(2, i) for i in range(300)])),
    "behind 64 tables": held(chain(*[(2, i) for i in range(64)], (1, 3))),
    "a descriptor that raises AttributeError": RaisingDescriptor(AttributeError("no")),
}  # fmt: skip
USABLE = {
    "behind version 2": chain((2, 0), (1, 3)),
    "behind versions 255, 3 and 0": chain((255, 0), (3, 0), (0, 9), (1, 0)),
    "behind 63 tables": chain(*[(2, i) for i in range(63)], (1, 3)),
    "before a circle": chain((1, 3), last=circle((1, 2), (1, 1))), "before itself": circle((1, 3)),
    "before a table that is unusable": chain((1, 3), last=exchange_table(version=(0, 0), **NONE)),
    "a newer minor version": chain((1, 2**32 - 1)), "an older minor version": chain((1, 0)),
    "without views": exchange_table(**OURS | {VIEW: None}),
}  # fmt: skip
ERRORS = (
    ValueError("no"), RuntimeError("no"), TypeError("no"), KeyError("no"), OSError("no"), StopIteration(), hostile.Mute("no"),
    KeyboardInterrupt(), SystemExit(3), hostile.Outside("no"), GeneratorExit(),
)  # fmt: skip


@pytest.mark.parametrize("value", UNUSABLE.values(), ids=UNUSABLE)
def test_tables_that_cannot_be_used(value):
    """A type with ``__dlpack__`` is asked by that; one without is refused, and the refusal says why."""
    is_mute = isinstance(value, hostile.Unprintable)  # why it cannot be used, cannot be said
    tensor, bare = type_with(value, "Broken", (WithMethods, Hostile)), type_with(value, "Bare")
    with kept(tensor, bare):
        check_ends(tensor, (6.0, ValueError) if is_mute else 6.0)
        check_ends(bare, (TypeError, ValueError) if is_mute else TypeError, "" if is_mute else "Bare")
    assert tensor.looks == 0
    assert is_mute or (tensor.dunder_calls >= 3 and "Broken" in str(explain(tensor)))
    assert total(1.0, np.arange(4.0)) == 6.0


@pytest.mark.parametrize("by_meta", [False, True], ids=["attribute", "metaclass"])
@pytest.mark.parametrize("table", USABLE.values(), ids=USABLE)
def test_tables_that_can_be_used(table, by_meta):
    tensor = type_with(held(table), "Usable", (Hostile,), by_meta)
    with kept(tensor):
        check_ends(tensor, 6.0)
    assert tensor.looks >= 3


@pytest.mark.parametrize("by_meta", [False, True], ids=["descriptor", "metaclass"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_tables_that_cannot_even_be_asked_for(error, by_meta):
    """What asking raises arrives, the argument named, or the type counts as one without a table."""
    value = RaisingDescriptor(error)
    value = value.__get__ if by_meta else value
    tensor, bare = type_with(value, "Raising", (WithMethods, Hostile), by_meta), type_with(value, "Bare", (), by_meta)
    check_ends(tensor, (6.0, type(error)))
    check_ends(bare, (TypeError, type(error)))
    with contextlib.suppress(type(error)):
        explain(tensor)
    if not by_meta:
        delattr(type(tensor), ATTRIBUTE)
        assert total(1.0, tensor) == 6.0
    assert total(1.0, np.arange(4.0)) == 6.0


def test_a_metaclass_that_answers_differently_each_time():
    answers = [lambda cls, answer=answer: answer for answer in (None, 3, vars(Viewed)[ATTRIBUTE])]
    answers = itertools.cycle(answers + [hostile.raising(error) for error in (ValueError, AttributeError, KeyboardInterrupt)])
    tensors = [type_with(lambda cls: next(answers)(cls), "Fickle", (WithMethods, Hostile), by_meta=True) for _ in range(12)]
    assert 6.0 in [end for tensor in tensors for end in check_ends(tensor, (6.0, ValueError, KeyboardInterrupt))]


def test_the_capsule_of_another_type():
    check_ends(type_with(vars(Viewed)[ATTRIBUTE], "Borrowed"), TypeError, "not one of mine")
    if has_table():
        check_ends(type_with(torch.Tensor.__dlpack_c_exchange_api__, "Borrowed"), (TypeError, BufferError, RuntimeError))
        assert total(1.0, torch.arange(4.0)) == 6.0


def test_a_table_replaced_after_calls():
    """The table found first stays in use, and its capsule alive, as long as its type lives."""
    hostile.destroyed_names.clear()
    first, second = (exchange_table(**OURS) for _ in range(2))
    kernels = kernels_of(size_of)
    for replacement, (calls, kernel) in itertools.product((held(second), None, 3, "deleted"), ((1, "plain"), (WARM, "warm"))):
        tensor = type_with(with_destructor(held(first)), "Replaced", (Hostile,))
        reference = weakref.ref(type(tensor))
        assert [kernels[kernel](1.0, tensor) for _ in range(calls)] == [4] * calls
        if replacement == "deleted":
            delattr(type(tensor), ATTRIBUTE)
        else:
            setattr(type(tensor), ATTRIBUTE, replacement)
        gc.collect()
        assert not hostile.destroyed_names, "the capsule has gone while its table is in use"
        assert [kernels[kernel](1.0, tensor) for _ in range(WARM)] == [4] * WARM
        check_ends(tensor, 6.0)
        del tensor
        gc.collect()
        assert reference() is None and hostile.destroyed_names == [TABLE_CAPSULE]
        hostile.destroyed_names.clear()


def test_a_function_replaced_in_the_table():
    """A table is read once: what others write into it later is not called, for the type's life."""
    table = exchange_table(**OURS)
    tensor = type_with(held(table), "Rewritten", (Hostile,))
    assert total(1.0, tensor) == 6.0
    for name in (VIEW, EXPORT):
        setattr(table, name, ffi.NULL)
    table.header.version.major = 99
    check_ends(tensor, 6.0)
