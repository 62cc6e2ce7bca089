"""Whether PyTorch's Dynamo traces a function (``torch.compile``), found out without importing PyTorch."""

import sys
from collections.abc import Callable

__all__ = ["asks_is_traced", "is_traced", "mark_constant"]

def mark_constant(function: Callable) -> None:
    """Let Dynamo call a function while it traces, and take the result as a constant.

    This does what ``torch.compiler.assume_constant_result`` does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def asks_is_traced(function: Callable) -> Callable:
    """Decorator of a function that calls :func:`is_traced`."""
    _codes.add(id(function.__code__))
    return function


_codes: set[int] = set()
"""The ids of these functions' code, which lives as long as the process."""


def is_traced() -> bool:
    """Whether Dynamo traces the function that calls this, one with :func:`asks_is_traced`, instead of Python running it.

    Dynamo itself calls this then, because it is marked. It takes no argument: before PyTorch 2.12 Dynamo passes few objects on.
    """
    return id(sys._getframe(1).f_code) not in _codes


mark_constant(is_traced)
