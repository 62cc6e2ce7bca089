"""The call to measure, and its first two runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from numba.core import event

from ..arguments.discovery import fields_of
from ..calls.kernel import FastKernel
from ..dispatch import structs
from ..ground.omitted import OMITTED
from ..ground.once import cached_property
from ..ground.safe_repr import type_name
from .restoring import Snapshot
from .timing import Statement

__all__ = ["Call", "Trial", "timed", "try_out"]

_SLOW_NS = 20_000_000
"""A kernel with longer calls is timed call by call."""
_SURELY_SLOW_NS = 1_000_000_000
"""A longer first call is slow in any case. After a shorter one the second call decides: the first also learns and loads."""
_COPIES = 4
"""How often an argument is added to a call to measure its cost."""
_MOST_EXTENDED = 6
"""In calls with more arguments each is timed alone: a longer call may take other steps than this one."""

def _is_slower(value) -> bool:
    """Whether a value is read neither in place nor by a borrowed view, so that a call with it takes further steps."""
    kind = fields_of(type(value))["kind"]
    return kind.exports == structs.EXPORTS_ALWAYS or kind.form == structs.FORM_LIST


def _has_list(value) -> bool:
    """Whether an argument has a list. Passing one list several times is not reliable in Numba."""
    return isinstance(value, list) or (isinstance(value, tuple) and any(map(_has_list, value)))


class Step(NamedTuple):
    """Two calls of empty kernels, by the indices of their arguments in ``Call.read``."""

    longer: tuple[int, ...]
    shorter: tuple[int, ...]


class Call:
    """A call of a kernel, as an expression over names."""

    def __init__(self, kernel: FastKernel, args: tuple, kwargs: dict):
        self.kernel = kernel
        self.bound = kernel._parameters.bind(*args, **kwargs)
        self.explanation = kernel.explain(*args, **kwargs)
        given = [(i, value) for i, value in enumerate(self.bound) if value is not OMITTED]
        self.by_parameter = {kernel._parameters.name_of(i): value for i, value in given}
        self.names = {f"a{i}": value for i, value in enumerate(args)} | {f"k_{name}": value for name, value in kwargs.items()}
        self.has_keywords = bool(kwargs)
        self.arguments = ", ".join([f"a{i}" for i in range(len(args))] + [f"{name}=k_{name}" for name in kwargs])
        outputs = kernel._outputs.pattern.outputs if kernel._outputs is not None else ()
        made = {o.position for o in outputs if self.bound[o.position] is OMITTED or self.bound[o.position] is None}
        self.allocates = bool(made)
        """Whether outputs are allocated for the call."""
        self.read = [(i, value) for i, value in given if i not in made]
        """The arguments, without outputs to be allocated: (position, value), in the order of the parameters."""
        numba_types = {name: numba_type for name, _, numba_type in self.explanation.arguments}
        self.types = tuple(
            f"{type_name(type(value))} as {numba_types[kernel._parameters.name_of(i)]}" for i, value in self.read
        )
        """The type and the Numba type of each of them."""
        self.is_for_numba = self.explanation.kind == "numba"
        """Whether an argument makes it a call for Numba's own dispatcher."""

    @cached_property
    def steps(self) -> list[Step]:
        """The two calls of empty kernels for each argument in :attr:`read`. Their difference is a multiple of its cost."""
        everything = range(len(self.read))
        slow = [at for at in everything if _is_slower(self.read[at][1])]
        steps = []
        for at in everything:
            is_short = len(self.read) <= _MOST_EXTENDED or self.is_for_numba
            rest = tuple(other for other in (everything if is_short else slow[:1]) if other != at)
            if _has_list(self.read[at][1]):
                steps.append(Step((*rest, at), rest))
                continue
            fewer = tuple(sorted((*rest, *(at,) * (1 if is_short else _COPIES))))
            steps.append(Step((*fewer, *(at,) * _COPIES), fewer))
        return steps

    def of(self, function: Callable, prepare: Callable[[], object] | None = None) -> Statement:
        """Return a statement with the same call of `function`."""
        return Statement(f"f({self.arguments})", {"f": function, **self.names}, prepare=prepare)

    def by_position(self, function: Callable) -> Statement:
        """Return a statement that calls `function` with the arguments in :attr:`read`, by position."""
        names = {f"a{i}": value for i, (_, value) in enumerate(self.read)}
        return Statement(f"f({', '.join(names)})", {"f": function, **names})

    def make(self, function: Callable):
        """Make the same call of `function`, once."""
        return eval(f"f({self.arguments})", {"f": function, "__package__": __package__, **self.names})


@dataclass
class Trial:
    """The results of the first calls."""

    result: object
    ns: int
    """Nanoseconds of one call, without compiling."""
    is_slow: bool
    changes: list[str]
    """The arguments that a call changes."""
    drifts: list[str]
    """The arguments that the second call changes again."""
    is_numba: bool | None
    """Whether Numba's own dispatcher makes the call; None after one call only."""


def timed(call: Call) -> tuple[object, int]:
    """Make a call. Returns its result, and its nanoseconds without compiling."""
    compiling: list[float] = []
    with event.install_timer("numba:compile", compiling.append):
        start = time.perf_counter_ns()
        result = call.make(call.kernel)
        took = time.perf_counter_ns() - start
    return result, max(1, took - int(1e9 * sum(compiling)))


def try_out(call: Call, before: Snapshot) -> Trial:
    """Make the call once, and a second time if it is not slow."""
    result, ns = timed(call)
    changes = before.changed()
    if ns > _SURELY_SLOW_NS:
        return Trial(result, ns, True, changes, [], None)
    after = before.digests()
    slow_calls = call.kernel.counts().slow
    result, ns = timed(call)
    is_numba = call.kernel.counts().slow > slow_calls
    drifts = [name for name, digest in before.digests().items() if digest != after[name]]
    return Trial(result, ns, ns > _SLOW_NS, changes, drifts, is_numba)
