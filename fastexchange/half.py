"""bfloat16, float16 and float8 in compiled code, also in plain ``numba.njit``.

A kernel of ``fast_args`` computes with these elements by itself. After ``import fastexchange.half``, so does a function of
``numba.njit`` with arrays of ml_dtypes' types, for which Numba has no type of its own (for ``numpy.float16`` it has one, which it
refuses on a CPU):

>>> import ml_dtypes, numba, numpy as np
>>> import fastexchange.half
>>> @numba.njit
... def double(x):
...     for i in range(x.size):
...         x[i] = 2 * x[i]
...     return x
>>> double(np.ones(2, ml_dtypes.bfloat16))
array([2, 2], dtype=bfloat16)

Each name here is a Numba type, a dtype for ``np.empty(n, dtype=bfloat16)`` in compiled code, and a function that rounds a number
to the nearest of its type: in compiled code to an element, in Python to a float.

>>> fastexchange.half.bfloat16(3.14159)
3.140625
"""

from .ground.half.known import TYPES as _TYPES
from .ground.half.known import type_dtypes as _type_dtypes

__all__ = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float16"]

_type_dtypes()
bfloat16, float16 = _TYPES["bfloat16"], _TYPES["float16"]
float8_e4m3fn, float8_e5m2 = _TYPES["float8_e4m3fn"], _TYPES["float8_e5m2"]
float8_e4m3fnuz, float8_e5m2fnuz = _TYPES["float8_e4m3fnuz"], _TYPES["float8_e5m2fnuz"]
