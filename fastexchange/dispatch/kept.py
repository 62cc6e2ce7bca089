"""What a kernel can keep of its arguments: whether references that are left after a call are leaked ones.

Numba's code leaks references where a function that it calls raises (numba#10783), also if the exception is caught. After such a
call the frame takes them back (``frame.take_back``) if nothing can hold them: no argument is a container that lives on, no Python
code has run, no exception has an array, and the result is none, or numbers, or there is none.
"""

from typing import Any

from numba.core import types

from ..ground.numba_code import RUNS_PYTHON, boxes_arrays, runs_python
from ..ground.numba_internals import leaves_of

__all__ = ["KEEPS_NOTHING", "KEEPS_RESULT", "what_is_kept"]

KEEPS_RESULT, KEEPS_NOTHING = 1, 2
"""After an exception nothing is kept; nothing ever is."""

_VALUES = (
    types.Boolean, types.Buffer, types.Dispatcher, types.NoneType, types.NPDatetime, types.NPTimedelta, types.Number,
    types.Omitted, types.UnicodeType,
)  # fmt: skip
_NUMBERS = types.Boolean, types.NoneType, types.Number


def what_is_kept(taken: tuple, compiled) -> int:
    """KEEPS_NOTHING, KEEPS_RESULT, or 0 for unknown, of a compile result with these argument types."""
    library = compiled.library
    if not all(map(_keeps_nothing, leaves_of(*taken))) or runs_python(library) >= RUNS_PYTHON or boxes_arrays(library):
        return 0
    return KEEPS_NOTHING if isinstance(compiled.signature.return_type, _NUMBERS) else KEEPS_RESULT


def _keeps_nothing(numba_type: Any) -> bool:
    """Whether no array can be stored in an argument of this type. A list of arrays counts if the kernel has not changed it."""
    if isinstance(numba_type, types.List):
        return numba_type.reflected and isinstance(numba_type.dtype, types.Array)
    return isinstance(numba_type, _VALUES)
