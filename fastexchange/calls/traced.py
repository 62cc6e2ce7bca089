"""Whether PyTorch's Dynamo traces a function (``torch.compile``), found out without importing PyTorch."""

import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["decorated", "is_traced", "mark_constant"]

decorated: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""By ``id``, the kernels whose options say what they return or write to: these can be operators of PyTorch."""


def mark_constant(function: Callable) -> None:
    """Let Dynamo call a function while it traces, and take the result as a constant.

    This does what ``torch.compiler.assume_constant_result`` does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(caller: CodeType) -> bool:
    """Whether Dynamo traces the function that calls this, instead of Python running it. `caller`: the code of that function.

    Dynamo itself calls this then, because it is marked.
    """
    return sys._getframe(1).f_code is not caller


mark_constant(is_traced)
