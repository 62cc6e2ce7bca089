"""One new process of the first-call rows: ``first_call.py njit|fast numpy|torch``. Prints nanoseconds, as JSON.

The kernels are cached on disk, where NUMBA_CACHE_DIR says.
"""

import json
import sys
from time import perf_counter_ns

who, framework = sys.argv[1:]
start = perf_counter_ns()
import numba  # noqa: E402

if who == "fast":
    from fastexchange import fast_args
imported = perf_counter_ns()

import numpy as np  # noqa: E402


def axpy(a, x, y, out):
    """A kernel with something to compile."""
    for i in range(x.shape[0]):
        out[i] = a * x[i] + y[i]


arguments = [np.ones(8, np.float32) for _ in range(3)]
if framework == "torch":
    import torch

    arguments = [torch.from_numpy(array) for array in arguments]

before = perf_counter_ns()
kernel = fast_args(cache=True)(axpy) if who == "fast" else numba.njit(cache=True)(axpy)
decorated = perf_counter_ns()
kernel(2.0, *arguments)
first = perf_counter_ns()
kernel(2.0, *arguments)
second = perf_counter_ns()
print(
    json.dumps(
        {
            "import": imported - start,
            "decorate": decorated - before,
            "first": first - decorated,
            "second": second - first,
            "compiled": sum(kernel.dispatcher.stats.cache_misses.values())
            if who == "fast"
            else sum(kernel.stats.cache_misses.values()),
        }
    )
)
