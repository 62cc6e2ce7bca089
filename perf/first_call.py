"""One new process of the first-call rows: ``first_call.py njit|fast numpy|torch``. Prints JSON, times in nanoseconds.

The kernel is cached on disk where Numba puts it: in this folder's ``__pycache__``, or where NUMBA_CACHE_DIR says.
"""

import json
import sys
from time import perf_counter_ns

import numba
import numpy as np

who, framework = sys.argv[1:]
if who == "fast":
    from fastexchange import fast_args

arguments = [np.ones(8, np.float32) for _ in range(3)]
if framework == "torch":
    import torch

    arguments = [torch.from_numpy(array) for array in arguments]


def axpy(a, x, y, out):
    """A kernel with something to compile."""
    for i in range(x.shape[0]):
        out[i] = a * x[i] + y[i]


start = perf_counter_ns()
kernel = fast_args(cache=True)(axpy) if who == "fast" else numba.njit(cache=True)(axpy)
decorated = perf_counter_ns()
kernel(2.0, *arguments)
end = perf_counter_ns()

compiled = sum(kernel.stats.cache_misses.values())
if who == "fast":
    from fastexchange.ground.cfunction import code_cache

    compiled += code_cache.misses
print(json.dumps({"decorate": decorated - start, "first": end - decorated, "compiled": compiled}))
