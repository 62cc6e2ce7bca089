"""One new process of the first-call rows: ``first_call.py njit|fast numpy|torch|cuda [call|out|bind|convert|list] [OBJECTS]``.

Prints JSON, times in nanoseconds. So many objects are made beforehand: they decide when the garbage collector's next full
collection comes, which takes a tenth of a warm first call. The kernel is cached on disk where Numba puts it: in this folder's
``__pycache__``, or where NUMBA_CACHE_DIR says. With ``cuda`` it is a launch by numba-cuda against the tests' driver stub, where
nothing runs.
"""

import json
import sys
from time import perf_counter_ns

import numba
import numpy as np

who, framework, *what = sys.argv[1:]
kind = what[0] if what else "call"
objects = [[] for _ in range(int(what[1]) if len(what) > 1 else 0)]
arguments = [np.ones(8, np.float32) for _ in range(3)]
if framework == "torch":
    import torch

    arguments = [torch.from_numpy(array) for array in arguments]
elif framework == "cuda":
    import warnings

    import cuda_places

    warnings.simplefilter("ignore")  # one block is few
    stub = cuda_places.Stub()
    from numba import cuda  # after the stub: this loads the driver

    cuda.current_context()
    arguments = [stub.tensor() if who == "fast" else stub.interface() for _ in range(3)]


def axpy(a, x, y, out):
    """A kernel with something to compile."""
    for i in range(x.shape[0]):
        out[i] = a * x[i] + y[i]


def first(xs):
    """A kernel that takes a list."""
    return xs[0][0]


if who == "fast":
    import fastexchange
start = perf_counter_ns()
if framework == "cuda":
    kernel = cuda.jit(axpy)
    kernel = (fastexchange.fast_args(kernel) if who == "fast" else kernel)[1, 32]
elif who == "fast":
    options = {"out": "x[n], y[n] -> out[n]"} if kind == "out" else {}
    kernel = fastexchange.fast_args(cache=True, **options)(first if kind == "list" else axpy)
else:
    kernel = numba.njit(cache=True)(axpy)
decorated = perf_counter_ns()
if kind == "call":
    kernel(2.0, *(arguments if who == "fast" or framework != "torch" else [tensor.numpy() for tensor in arguments]))
elif kind == "out":
    kernel(2.0, *arguments[:2])
elif kind == "bind":
    kernel.bind(2.0, *arguments)()
elif kind == "convert":
    fastexchange.convert(arguments[0], np.ndarray)
else:
    kernel(arguments)
end = perf_counter_ns()

compiled = 1 if framework == "cuda" else sum(kernel.stats.cache_misses.values())
if who == "fast":
    from fastexchange.ground.cfunction import code_cache

    compiled += code_cache.misses
print(json.dumps({"decorate": decorated - start, "first": end - decorated, "compiled": compiled}))
