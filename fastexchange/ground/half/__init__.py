"""Numbers of 8 and 16 bits in compiled code: bfloat16, float16 and four formats of float8.

Numba cannot compute with them on a CPU. Here an element is a code in memory, float32 where it is used, and is rounded where it is
stored; LLVM makes vectors of the conversions. Importing ``known`` teaches Numba all of it; nothing is compiled, and nothing of
Numba is replaced: types, templates and casts of these types are registered.
"""

import threading

__all__ = ["NotForHalf", "boxing"]

boxing = threading.local()
"""`is_of_bytes`: whether this thread makes code for results that native code replaces. It may make arrays of bytes of them."""


class NotForHalf(TypeError):
    """An operation that is not compiled for half precision. It is no error of Numba's: those let Numba try its own code."""

    def __init__(self, operation: str):
        super().__init__(
            f"{operation} is not compiled for half precision; convert first: x.astype(np.float32), or np.float32(x) of a number"
        )
