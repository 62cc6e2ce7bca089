"""The options of ``fast_args`` and of ``numba.njit``: a name that is neither is refused where the kernel is decorated.

Which ones Numba has is read from its own registry of target options, and from the parameters of ``numba.jit``. Where that
does not look as expected, nothing is refused here: Numba says it at the first compilation.
"""

import difflib
import functools
import inspect
from collections.abc import Iterable

import numba

from ..ground.numba_internals import names_of_target_options

__all__ = ["check_names", "numba_options"]

_KNOWN_FOR_SURE = {"nopython", "nogil", "parallel", "fastmath", "cache"}
"""By these it is verified that the registry is what it is taken for."""


@functools.cache
def numba_options() -> frozenset[str] | None:
    """The names of the options of ``numba.njit``; None where they cannot be had."""
    try:
        found = names_of_target_options()
        parameters = list(inspect.signature(numba.jit).parameters.values())
    except Exception:  # another Numba
        return None
    found |= {p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(found) if found >= _KNOWN_FOR_SURE else None


def check_names(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise TypeError for names that are no options of Numba's, with the nearest ones. `own`: those of ``fast_args`` itself.

    Names with an underscore in front are Numba's private matter.
    """
    known = numba_options()
    unknown = [name for name in given if known is not None and name not in known and not name.startswith("_")]
    if not unknown:
        return
    assert known is not None
    names = sorted(known | set(own))
    nearest = {name: difflib.get_close_matches(name.lower(), names, 1) for name in unknown}
    hints = [f"{found[0]!r}" + (f" for {name!r}" if len(unknown) > 1 else "") for name, found in nearest.items() if found]
    hint = f"; did you mean {', '.join(hints)}?" if hints else "."
    what = f"{'an unknown option' if len(unknown) == 1 else 'unknown options'}, {', '.join(map(repr, unknown))}"
    listed = ", ".join(name for name in names if not name.startswith("_"))
    raise TypeError(f"fast_args() got {what}{hint} Its options and those of numba.njit: {listed}")
