"""Counting of deleters and references, and the producers whose tensors can be counted."""

import array as stdlib_array
import contextlib
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable

import hostile_producers as hostile
import made_producers
import numpy as np
import pytest
from children import at_once
from frameworks import torch, tvm_ffi
from hostile_producers import VIEW, Gives, GivesLegacy, Hostile, hostile_type, managed_and, setting
from made_producers import Dunder, Ignorant, Ledger, Legacy, Tabled, capsule, export_legacy, export_versioned, is_held
from oracle import seen_type, unchanged

from fastexchange import fast_args


class Memory(np.ndarray):
    """An array whose death can be seen."""


def memory_of(*values: float) -> Memory:
    """It owns its memory, so a view has it for its base."""
    memory = Memory(len(values))
    memory[:] = values
    return memory


Viewed = hostile_type("Viewed")
Exported = hostile_type("Exported", **{VIEW: None})


class WrapsExport:
    __dlpack_c_exchange_api__ = property(lambda self: self.inner)

    def __init__(self, memory, ledger):
        self.inner, self.ledger, self.array = Exported(memory, ledger), ledger, memory


TENSORS: dict[str, Callable] = {
    "numpy": lambda memory, ledger: memory.view(np.ndarray), "exchange table": Viewed, "__dlpack__": Dunder, "legacy": Legacy,
    "unversioned": Ignorant, "exchange table in Python": Tabled, "exports only": Exported, "wrapper": WrapsExport,
    "subclass of numpy": lambda memory, ledger: memory,
}  # fmt: skip
if torch is not None:
    TENSORS["torch"] = lambda memory, ledger: torch.from_numpy(memory)
if tvm_ffi is not None:
    TENSORS["tvm_ffi"] = lambda memory, ledger: tvm_ffi.from_dlpack(memory)
BUFFERS: dict[str, Callable] = {"array.array": lambda memory, ledger: stdlib_array.array("d", memory.tolist()),
                                "memoryview": lambda memory, ledger: memoryview(bytearray(memory.tobytes())).cast("d"),
                                "bytearray": lambda memory, ledger: bytearray(memory.astype("u1").tobytes())}  # fmt: skip
PRODUCERS = {**TENSORS, **BUFFERS}
"""By name: ``make(memory, ledger)`` gives a tensor of that memory, whose exports the ledger counts."""


# ---- deleters that do more than delete -------------------------------------------------------------------------------
@fast_args
def inner(x, y):
    if x[0] < 0:
        raise ValueError("from the kernel")
    return x[0] + y[0]


def _call_a_kernel() -> None:
    assert inner(np.ones(2), Viewed(np.ones(2))) == 2.0


def _fail_in_a_kernel() -> None:
    assert end_of(inner, -np.ones(2), Dunder(np.ones(2))) == (ValueError, "from the kernel")


DELETERS = {
    "does no more": int,
    "sets BufferError": functools.partial(setting(0, BufferError, BufferError), None, None),
    "sets KeyboardInterrupt": functools.partial(setting(0, KeyboardInterrupt), None, None),
    "sets what is no exception": functools.partial(setting(0, int, 5), None, None),
    "calls a kernel": _call_a_kernel,
    "fails in a kernel": _fail_in_a_kernel,
    "collects": functools.partial(gc.collect, 1),
    "runs a thread": functools.partial(at_once, _call_a_kernel),
}


def gives_deleting(memory=None, ledger=None, *, delete, cls=Gives, export=export_versioned, name=b"dltensor_versioned"):
    return cls(lambda tensor: capsule(managed_and(tensor.ledger, tensor.array, delete, export), name), memory, ledger)


LEGACY = {"export": export_legacy, "name": b"dltensor"}
FORMS = {"a capsule": gives_deleting, "a legacy capsule": functools.partial(gives_deleting, cls=GivesLegacy, **LEGACY),
         "an export": Exported, "a view": Viewed}  # fmt: skip
DELETING = {f"{form} whose deleter {name}": functools.partial(make, delete=delete)
            for name, delete in DELETERS.items() for form, make in FORMS.items()}  # fmt: skip


def tensor_of(kind: str, memory, ledger):
    return (PRODUCERS.get(kind) or DELETING[kind])(memory, ledger)


def forget_notes(thing) -> None:
    """Drop what producers made for the tests have noted of their exports; it holds references."""
    for name in ("words", "capsules", "asked"):
        getattr(thing, "__dict__", {}).get(name, []).clear()
    made_producers._borrowed.pop(id(thing), None)
    if issubclass(type(thing), WrapsExport):
        forget_notes(thing.inner)


def counts_of(thing) -> list:
    """What has to be the same again after a call."""
    counted = [sys.getrefcount(thing)]
    if issubclass(type(thing), (Dunder, Hostile, Tabled, WrapsExport)):  # some say that they are of another class
        forget_notes(thing)
        counted += [sys.getrefcount(thing.array), thing.ledger.out]
    elif torch is not None and isinstance(thing, torch.Tensor):
        counted.append(thing._use_count() if hasattr(thing, "_use_count") else 0)
    elif type(thing) in (bytearray, stdlib_array.array):
        counted.append(is_held(thing))
    return counted


def kept(*things):
    """After the block each of `things` has the references that it had, and all exports are given back."""
    for thing in things:
        counts_of(thing)
    return unchanged(lambda: [counts_of(thing) for thing in things])


def end_of(call, *arguments, **keywords):
    """What a call returns, or the type and the text of the exception that it raises."""
    try:
        return call(*arguments, **keywords)
    except BaseException as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            return seen_type(error), str(error)
        except ZeroDivisionError:
            return seen_type(error), "without words"


def is_exception(end) -> bool:
    return type(end) is tuple and len(end) == 2 and isinstance(end[0], type)


def raised(end):
    assert is_exception(end), f"nothing was raised, {end!r} returned"
    return end[0]


def account(call, *things, ledgers=(), ends=None, times: int = 2) -> None:
    """However a call ends, each export is given back once, and each reference is back.

    `ends`: what it returns, or the exceptions of which it raises one; None: as it likes.
    """
    with kept(*things):
        for _ in range(times):
            end = end_of(call)
            if isinstance(ends, tuple):
                assert issubclass(raised(end), ends), f"raised {end}, not {ends}"
            else:
                assert ends is None or end == ends, f"{end!r}, not {ends!r}"
            del end
            if any(ledger.out for ledger in ledgers):
                gc.collect()
            for ledger in ledgers:
                ledger.check(ledger.made)


def check_dies(memory: weakref.ref) -> None:
    if memory() is not None:
        gc.collect()
    assert memory() is None, "held for ever"


@contextlib.contextmanager
def company(kinds, count: int):
    """`count` tensors of ones, made in turn by those producers, and their ledger; at the end all is given back, and dies."""
    ledger, memories = Ledger(), [memory_of(1, 1, 1) for _ in range(count)]
    tensors = [tensor_of(kind, memory, ledger) for kind, memory in zip(itertools.cycle(kinds), memories, strict=False)]
    watched = [weakref.ref(memory) for memory in memories]
    memories.clear()
    yield tensors, ledger
    ledger.check(ledger.made)
    for tensor in tensors:
        forget_notes(tensor)
        assert type(tensor) not in (bytearray, stdlib_array.array) or not is_held(tensor)
        if isinstance(tensor, memoryview):
            tensor.release()
    tensor = None
    tensors.clear()
    for memory in watched:
        check_dies(memory)


@contextlib.contextmanager
def scene(*names):
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


@pytest.fixture(autouse=True)
def no_violations(monkeypatch):
    """No deleter ran twice, no function of a producer was entered with an exception set."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # of deleters; pytest's would keep the frames
    hostile.violations.clear()
    yield
    strays, made_producers._strays[:] = made_producers._strays[:], []
    assert not strays and not hostile.violations
