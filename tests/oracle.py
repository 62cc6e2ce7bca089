"""The oracle of the suite: plain ``@njit`` on NumPy views of the same memory; and what a call must leave as it was."""

import contextlib
import functools
import gc
import sys
import weakref

import numpy as np
from numba.core.runtime import rtsys

from fastexchange import FastKernel, from_dlpack
from fastexchange.api import _adopted
from fastexchange.calls.numba_type import UnknownType
from fastexchange.calls.options import KernelOptions
from fastexchange.ground.numba_internals import numbas_call


def _count_of_a_local() -> int:
    thing = object()
    return sys.getrefcount(thing)


ONE_REFERENCE = _count_of_a_local()
"""What ``sys.getrefcount`` says of an object that only a local variable refers to: 2, and 1 from CPython 3.14 on."""


def numbas(kernel):
    """What a call of the kernel is to Numba itself, which knows nothing of tensors."""
    return functools.partial(numbas_call, kernel)


_made_of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""By dispatcher: the last kernel made of it, and those that have compiled something for the next ones."""


def new_kernel(dispatcher, manner=None) -> FastKernel:
    """A kernel that has what the dispatcher has compiled, and knows nothing else; not the one that ``fast_args`` keeps of it.

    What it compiles the next one has, too, so that a test may begin anew a thousand times.
    """
    made_of = _made_of.setdefault(dispatcher, [])
    if made_of:
        further = [compiled for types, compiled in made_of[-1].overloads.items() if types not in dispatcher.overloads]
        for compiled in further:
            dispatcher.add_overload(compiled)
        if not further:
            made_of.pop()
    made_of.append(_adopted(dispatcher, manner or KernelOptions()))
    return made_of[-1]


def is_same(got, want) -> bool:
    """Whether two results are equal in type and value. An array may have become a tensor of the arguments' framework."""
    if isinstance(want, np.ndarray):
        if not isinstance(got, np.ndarray):
            got = from_dlpack(got)
        return (
            type(got) is type(want) and got.dtype == want.dtype and got.shape == want.shape
            and np.array_equal(got, want, equal_nan=want.dtype.kind in "fcmM")
        )  # fmt: skip
    if isinstance(want, (tuple, list)):
        return type(got) is type(want) and len(got) == len(want) and all(map(is_same, got, want))
    if isinstance(want, (float, complex, np.generic)) and want != want:
        return type(got) is type(want) and got != got
    return type(got) is type(want) and got == want


def check_same_as_njit(kernel, arguments: tuple, views: tuple | None = None, native: bool = True):
    """The kernel gives for `arguments` what its plain ``@njit`` dispatcher gives for `views`, for the same Numba types.

    `views`: the same arguments as plain Numba takes them; the arguments themselves if not given. `native`: the second call
    of its kind is made without Python.
    """
    got, known = kernel(*arguments), list(kernel.signatures)
    want = numbas(kernel)(*(arguments if views is None else views))
    assert kernel.signatures == known, f"@njit infers {kernel.signatures[-1]}, @fast_args {known[-1]}"
    assert is_same(got, want), f"@njit gives {want!r}, @fast_args {got!r}"
    before, again, after = kernel.counts(), kernel(*arguments), kernel.counts()
    assert is_same(again, want), f"@njit gives {want!r}, the second call of @fast_args {again!r}"
    if native:
        assert (after.fast, after.slow) == (before.fast + 1, before.slow), "the second call left the native path"
    return got


def seen_type(error: BaseException) -> type:
    """The type of an exception as Python's users see it: what is a TypingError of Numba's, too, is a TypeError to them."""
    return TypeError if isinstance(error, UnknownType) else type(error)


def type_and_message(function, /, *arguments, **keywords) -> tuple[type, str]:
    """The type and the text of the exception that a call raises. The exception itself is gone on return."""
    try:
        result = function(*arguments, **keywords)
    except BaseException as error:
        return seen_type(error), str(error)
    raise AssertionError(f"nothing was raised, {result!r} returned")


@contextlib.contextmanager
def unchanged(look):
    """`look` gives the same list after the block as before it."""
    before = look()
    yield
    after = look()
    if after != before:  # tracebacks and their frames may hold each other
        gc.collect()
        after = look()
    assert after == before


def references_kept(*things):
    """After the block each of `things` has as many references as before it."""
    gc.collect()  # what an earlier dispatcher's exception still held
    return unchanged(lambda: [sys.getrefcount(thing) for thing in things])


def blocks_in_use() -> int:
    """How many of Numba's memory blocks have not been freed. Numba has to count them: see ``numba_counts_blocks``."""
    gc.collect()
    stats = rtsys.get_allocation_stats()
    return stats.mi_alloc - stats.mi_free
