"""What each argument of a call costs: the difference of two calls of functions that do nothing."""

from collections.abc import Callable
from typing import Any

from ..arguments.kind import OTHER
from ..calls.explanation import Explanation
from ..ground.safe_repr import type_name
from .report import ArgumentCost
from .timing import Samples, Statement
from .trial import Call

__all__ = ["argument_costs", "argument_statements"]


def argument_statements(call: Call, empty_of: Callable[[tuple[str, ...]], Callable]) -> dict[Any, Statement]:
    """Return the calls for ``call.steps``. `empty_of`: gives what does nothing with positional arguments of these types."""
    statements: dict[Any, Statement] = {}
    for step in call.steps:
        for places in (step.longer, step.shorter):
            ordered = sorted(places, key=lambda at: call.types[at])  # in one order: then more calls share a kernel
            function = empty_of(tuple(call.types[at] for at in ordered))
            values = tuple(call.read[at][1] for at in ordered)
            statements["some", places] = Statement("f(*a)", {"f": function, "a": values})
    return statements


def argument_costs(call: Call, times: dict[Any, Samples], explanations: dict[int, Explanation]) -> list[ArgumentCost]:
    """Return the costs. `times`: by the names of :func:`argument_statements`; the exports of the producers alone may be there."""
    types = {name: numba_type for name, _, numba_type in call.explanation.arguments}
    costs = []
    for step, (i, value) in zip(call.steps, call.read, strict=True):
        name, explanation = call.kernel._parameters.name_of(i), explanations[i]
        total = (times["some", step.longer] - times["some", step.shorter]) * (1 / (len(step.longer) - len(step.shorter)))
        exports = [samples for key, samples in times.items() if key[:2] == ("export", i)]
        export = sum(exports[1:], exports[0]) if exports and not call.is_for_numba else None
        path = OTHER.path if call.is_for_numba else explanation.path
        costs.append(ArgumentCost(name, i, type_name(type(value)), types[name], path, explanation.reasons, total, export))
    return costs
