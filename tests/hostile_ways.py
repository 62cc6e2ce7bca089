"""The ways by which a tensor that misbehaves comes into a kernel, and the one body of their tables: ``check_ways``."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from counting import Viewed, end_of, is_exception, kept, scene
from hostile_producers import REWORDED, VIEW, Gives, GivesLegacy, hostile_type, legacy, versioned
from made_producers import ONLY_NUMBA, Dunder

from fastexchange import fast_args

WARM = 40
"""Calls after which a kernel's fast entry is in use."""
Turning = hostile_type("Turning")
"""The type of the tensors that behave until their kernel's fast entry is in use."""


def sum_of(first, x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


def size_of(first, x):
    return x.size


class Kernels(NamedTuple):
    plain: Callable
    warm: Callable
    """For what is to reach a fast entry: there are eight for each combination of types."""
    unlocked: Callable


TOTALS = Kernels(fast_args(sum_of), fast_args(sum_of), fast_args(sum_of, nogil=True))
SIZES = Kernels(fast_args(size_of), fast_args(size_of), fast_args(size_of, nogil=True))
total = TOTALS.plain


@fast_args
def ignore(*arguments):
    return len(arguments)


def kernels_for(ends) -> Kernels:
    """Kernels that look at the elements only where they are to be there."""
    return TOTALS if isinstance(ends, float) or (isinstance(ends, tuple) and isinstance(ends[-1], float)) else SIZES


@functools.cache
def warm(kernel) -> None:
    """Bring `kernel` to its fast entry for a float and a well-behaved tensor of the type ``Turning``."""
    tensor = Turning(behaves=True)
    for _ in range(WARM):
        kernel(1.0, tensor)
    fast = kernel.counts().fast
    kernel(1.0, tensor)
    assert kernel.counts().fast == fast + 1


def turning(kernels, **acts):
    """A tensor that begins to misbehave when it has been taken by the fast entry."""
    warm(kernels.warm)
    tensor = Turning(behaves=True, **acts)
    for _ in range(3):
        kernels.warm(1.0, tensor)
    tensor.behaves = False
    return tensor


class Way(NamedTuple):
    make: Callable
    """``make(kernels, **acts)``: the tensor; `acts`: lies, and what the function called `function` does."""
    call: Callable
    function: str


BESIDE = {"a number": lambda: 1.0, "a tensor": lambda: Dunder(np.ones(3)), "what only Numba reads": lambda: ONLY_NUMBA}
VIEWS = {
    "a view": Way(lambda _, **acts: hostile_type()(**acts), lambda kernels, x: kernels.plain(1.0, x), "view"),
    "a view, in a fast entry": Way(turning, lambda kernels, x: kernels.warm(1.0, x), "view"),
    "a view, by keyword": Way(lambda _, **acts: Viewed(**acts), lambda kernels, x: kernels.plain(x=x, first=1.0), "view"),
}
EXPORTS = {
    "an export": Way(lambda _, **acts: hostile_type(**{VIEW: None})(**acts), lambda kernels, x: kernels.plain(1.0, x), "export"),
    "an export without the GIL": Way(lambda _, **acts: Viewed(**acts), lambda kernels, x: kernels.unlocked(1.0, x), "export"),
    "an export beside what only Numba reads": Way(
        lambda _, **acts: Viewed(**acts), lambda kernels, x: kernels.plain(ONLY_NUMBA, x), "export"
    ),
}
CAPSULES = {
    f"a capsule beside {what}": Way(
        lambda _, give=versioned, **lies: Gives(give, **lies),
        lambda kernels, x, beside=beside: kernels.plain(beside(), x),
        "give",
    )
    for what, beside in BESIDE.items()
}
LEGACY = {
    f"a legacy {name}": way._replace(make=lambda _, give=legacy, **lies: GivesLegacy(give, **lies))
    for name, way in CAPSULES.items()
}
TABLES, METHODS = {**VIEWS, **EXPORTS}, {**CAPSULES, **LEGACY}
WAYS = {**TABLES, **METHODS}


def reform(tensor) -> None:
    """From now on it is honest."""
    tensor.behaves = True
    tensor.lies.clear()
    if isinstance(tensor, Gives):
        tensor.give = legacy if isinstance(tensor, GivesLegacy) else versioned


def kind_of(end):
    """The type of the exception, or the result."""
    return end[0] if is_exception(end) else end


def check_end(end, ends, word="", name="x", position=1) -> None:
    """The call ended in one of `ends`, values or exceptions' types. An exception that can name the argument does."""
    wanted = ends if isinstance(ends, tuple) else (ends,)
    if not is_exception(end):
        assert end in [value for value in wanted if not isinstance(value, type)], f"returned {end!r}, not {ends}"
        return
    kind, message = end
    assert kind in wanted, f"raised {kind.__name__}: {message}; not {ends}"
    if kind in REWORDED:
        for needed in (f"'{name}'", f"position {position}", word):
            assert needed in message, message


def check_way(way: Way, kernels: Kernels, ends, word="", **acts):
    """Three calls end as told, and alike; all is given back; calls with the tensor when it is honest, and another, are right."""
    tensor = way.make(kernels, **acts)
    counted = [tensor] * ("deleter" not in acts)
    with kept(*counted):
        seen = [end_of(way.call, kernels, tensor) for _ in range(3)]
    for end in seen:
        check_end(end, ends, word)
    assert len({re.sub("0x[0-9a-f]+", "", repr(end)) for end in seen}) == 1, f"the calls end differently: {seen}"
    reform(tensor)
    right = 6.0 if kernels is TOTALS else 4
    assert way.call(kernels, tensor) == kernels.plain(1.0, np.arange(4.0)) == right
    for each in counted:
        each.ledger.check(each.ledger.made)
    return seen[0]


def check_ways(ways: dict[str, Way], ends, word="", act=None, **lies) -> dict:
    """The same by each of the ways, of a tensor that lies, or whose function does as `act` says. Returns how each ends."""
    seen = {}
    for name, way in ways.items():
        with scene(name):
            acts = lies if act is None else {way.function: act}
            seen[name] = kind_of(check_way(way, kernels_for(ends) if lies else TOTALS, ends, word, **acts))
    return seen
