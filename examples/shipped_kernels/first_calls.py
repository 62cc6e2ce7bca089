"""Call every kernel of the package for the first time in this process: ``first_calls.py shipped|cached|njit [FILE]``.

``shipped``: as installed. ``njit``: the same functions with ``numba.njit``, without fastexchange; ``cached``: with
``numba.njit(cache=True)``. Prints JSON; FILE gets a pickle of what the calls have computed.
"""

import copy
import functools
import json
import pickle
import sys
import time
import types

who, *file = sys.argv[1:]
began = time.perf_counter()
import numba  # noqa: E402
import numpy as np  # noqa: E402, F401
from numba.core import event  # noqa: E402

has_numba = time.perf_counter()
declared: dict[str, str] = {}
if who != "shipped":  # what docs/users/libraries.md does where fastexchange is not installed, for all modules at once
    numba.njit = functools.partial(numba.njit, cache=who == "cached")

    def fast_args(function=None, /, out="", **options):
        if function is None:
            return functools.partial(fast_args, out=out, **options)
        declared[function.__qualname__] = out
        return numba.njit(**options)(function)

    sys.modules["fastexchange"] = stand_in = types.ModuleType("fastexchange")
    stand_in.fast_args, stand_in.accelerate = fast_args, lambda name: None
import shipped_kernels  # noqa: E402

imported = time.perf_counter()
work = [(kernel, copy.deepcopy(call)) for kernel, *calls in shipped_kernels.__precompile__() for call in calls]


def outcome(kernel, arguments):
    """What a call returns or raises, and what is in its arguments then; of declared outputs only what is in them."""
    name = kernel.py_func.__qualname__
    outputs = (declared.get(name, getattr(kernel, "out", "")) or "").rpartition("->")[2].count("[")
    inputs = arguments[: len(arguments) - outputs]
    try:
        returned = kernel(*(inputs if who == "shipped" else arguments))
    except Exception as error:
        return name, type(error), error.args
    if outputs and who != "shipped":
        returned = arguments[-outputs:] if outputs > 1 else arguments[-1]
    return name, returned, inputs


with event.install_recorder("numba:compile") as compiled:
    begins = time.perf_counter()
    outcomes = [outcome(kernel, arguments) for kernel, arguments in work]
    ended = time.perf_counter()
kernels = {id(kernel): kernel for kernel, _ in work}.values()
said = {
    "kernels": len(kernels), "calls": len(work), "import numba": has_numba - began, "import": imported - has_numba,
    "first calls": ended - begins, "compiled": len(compiled.buffer),
}  # fmt: skip
if who == "shipped":
    from fastexchange.ground.cfunction import code_cache

    said |= {"native compiled": code_cache.misses, "native from disk": code_cache.hits, "native shipped": code_cache.shipped}
print(json.dumps(said))
if file:
    with open(file[0], "wb") as to:
        pickle.dump(outcomes, to)
