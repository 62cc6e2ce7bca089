"""The ways by which a tensor that misbehaves comes into a kernel or a conversion, and their one body: ``check_ways``."""

import functools
import re

import numpy as np
from counting import Viewed, end_of, is_exception, kept, scene
from exchanges import CALLS, Given
from hostile_producers import REWORDED, VIEW, Gives, GivesLegacy, hostile_type, legacy, versioned
from made_producers import ONLY_NUMBA, Dunder

from fastexchange import fast_args, from_dlpack

WARM = 4
"""Calls after which a kernel's cache entry is in use."""
Turning = hostile_type("Turning")
"""The type of the tensors that behave until their kernel's cache entry is in use."""


def sum_of(first, x):
    s = 0.0
    for value in x.flat:
        s += value
    return s


def size_of(first, x):
    return x.size


def kernels_of(function) -> dict:
    """`warm` is for what is to reach a cache entry: there are eight for each combination of types."""
    return {"plain": fast_args(function), "warm": fast_args(function), "unlocked": fast_args(function, nogil=True)}


TOTALS, SIZES = kernels_of(sum_of), kernels_of(size_of)
total, warm_total, unlocked_total = TOTALS.values()
ignore = fast_args(lambda *arguments: len(arguments))


@functools.cache
def warm(kernel) -> None:
    """Bring `kernel` to its cache entry for a float and a well-behaved tensor of the type ``Turning``."""
    tensor = Turning(behaves=True)
    for _ in range(WARM):
        kernel(1.0, tensor)
    fast = kernel.counts().fast
    kernel(1.0, tensor)
    assert kernel.counts().fast == fast + 1


def turning(kernels, **acts):
    """A tensor that begins to misbehave when it has been taken by the cache entry."""
    warm(kernels["warm"])
    tensor = Turning(behaves=True, **acts)
    for _ in range(3):
        kernels["warm"](1.0, tensor)
    tensor.behaves = False
    return tensor


def by(name: str, beside=lambda: 1.0):
    return lambda kernels, x: kernels[name](beside(), x)


def converted(name, kernels, x):
    made = from_dlpack(Given(lambda **_: CALLS[name](x))) if name.startswith("to_dlpack") else CALLS[name](x)
    return kernels["plain"](1.0, made)


MAKERS = {"view": lambda kernels, **acts: Viewed(**acts),
          "capsule": lambda kernels, give=versioned, **lies: Gives(give, **lies),
          "legacy capsule": lambda kernels, give=legacy, **lies: GivesLegacy(give, **lies)}  # fmt: skip
BESIDE = {"a number": lambda: 1.0, "a tensor": lambda: Dunder(np.ones(3)), "what only Numba reads": lambda: ONLY_NUMBA}
WAYS = {
    "a view": ("view", lambda kernels, **acts: hostile_type()(**acts), by("plain")),
    "a view, in a cache entry": ("view", turning, by("warm")),
    "a view, by keyword": ("view", MAKERS["view"], lambda kernels, x: kernels["plain"](x=x, first=1.0)),
    "an export": ("export", lambda kernels, **acts: hostile_type(**{VIEW: None})(**acts), by("plain")),
    "an export without the GIL": ("export", MAKERS["view"], by("unlocked")),
    "an export beside what only Numba reads": ("export", MAKERS["view"], by("plain", BESIDE["what only Numba reads"])),
    **{f"a {form} beside {what}": ("give", MAKERS[form], by("plain", beside))
       for form in ("capsule", "legacy capsule") for what, beside in BESIDE.items()},
}  # fmt: skip
"""By name: which of a tensor's functions acts; ``make(kernels, **acts)`` makes one that does so; ``call(kernels, x)``."""
CONVERSIONS = {
    **{f"{name} of an export": ("export", MAKERS["view"], functools.partial(converted, name)) for name in CALLS},
    **{f"{name} of a {form}": ("give", MAKERS[form], functools.partial(converted, name))
       for form, other in (("capsule", "convert, a copy"), ("legacy capsule", "to_dlpack")) for name in ("from_dlpack", other)},
}  # fmt: skip
EVERYTHING = {**WAYS, **CONVERSIONS}


def ways(*functions: str, but: str = "nothing") -> dict:
    """Those where one of these functions of the tensor acts."""
    return {name: way for name, way in EVERYTHING.items() if way[0] in functions and but not in name}


def kind_of(end):
    """The type of the exception, or the result."""
    return end[0] if is_exception(end) else end


def check_end(end, ends, word="", name: str | None = "x", position=1) -> None:
    """The call ended in one of `ends`, values or exceptions' types. An exception that can name the argument does.

    Without `name` it has none, as that of a conversion.
    """
    wanted = ends if isinstance(ends, tuple) else (ends,)
    if not is_exception(end):
        assert end in [value for value in wanted if not isinstance(value, type)], f"returned {end!r}, not {ends}"
        return
    kind, message = end
    assert kind in wanted, f"raised {kind.__name__}: {message}; not {ends}"
    if kind in REWORDED and name is None:
        assert any(each in message for each in (word, "not on the CPU", "unknown to DLPack")), message
    elif kind in REWORDED:
        for needed in (f"'{name}'", f"position {position}", word):
            assert needed in message, message


def check_ways(ways: dict, what, ends, word: str) -> None:
    """By each of the ways, all alike, a tensor ends three calls as told: `what` it says (a dict of lies), or its function does.

    All is given back; calls with the tensor when it is honest, and with another, are right.
    """
    lies = what if isinstance(what, dict) else {}
    is_read = not lies or isinstance(ends, float) or (isinstance(ends, tuple) and isinstance(ends[-1], float))
    kernels, seen = TOTALS if is_read else SIZES, {}
    for name, (function, make, call) in ways.items():
        with scene(name):
            tensor = make(kernels, **(lies or {function: what}))
            with kept(*[tensor] * ("deleter" not in lies)):
                got = [end_of(call, kernels, tensor) for _ in range(3)]
            for end in got:
                check_end(end, ends, word, name=None if name in CONVERSIONS else "x")
            assert len({re.sub("0x[0-9a-f]+|:-?[0-9]+", "", repr(end)) for end in got}) == 1, f"the calls end differently: {got}"
            seen[name] = kind_of(got[0])
            tensor.behaves = True
            tensor.lies.clear()
            if isinstance(tensor, Gives):
                tensor.give = legacy if isinstance(tensor, GivesLegacy) else versioned
            assert call(kernels, tensor) == kernels["plain"](1.0, np.arange(4.0)) == (6.0 if is_read else 4)
            if "deleter" not in lies:
                tensor.ledger.check(tensor.ledger.made)
    assert not lies or len(set(seen.values())) == 1, f"the ways end differently: {seen}"
