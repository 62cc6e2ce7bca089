"""References that compiled code leaks when a function that it calls raises: ``python numba_leaks.py``. Needs Numba and NumPy.

Each kernel is called a hundred times with one array. Printed is by how much the array's reference count has grown, and how many
blocks of Numba's memory were allocated and not freed.
"""

import gc
import os
import platform
import sys

os.environ["NUMBA_NRT_STATS"] = "1"
import llvmlite
import numba
import numpy as np
from numba.core.runtime import rtsys

CALLS = 100


@numba.njit
def refuse(x):
    if x[0] >= 0:
        raise ValueError("refused")


@numba.njit
def refuse_number(number):
    if number >= 0:
        raise ValueError("refused")


@numba.njit(inline="always")
def refuse_inlined(x):
    if x[0] >= 0:
        raise ValueError("refused")


@numba.njit
def passed_to_the_callee(x):
    refuse(x)


@numba.njit
def used_after_the_call(x):
    refuse_number(1.0)
    x[0] = 1.0


@numba.njit
def used_before_the_call(x):
    x[0] = 1.0
    refuse_number(1.0)


@numba.njit
def raises_itself(x):
    if x[0] >= 0:
        raise ValueError("refused")
    x[0] = 1.0


@numba.njit
def callee_is_inlined(x):
    refuse_inlined(x)
    x[0] = 1.0


@numba.njit
def callee_in_a_try(x):
    try:
        refuse(x)
    except Exception:
        x[0] = 1.0


@numba.njit
def own_array(x):
    y = np.zeros(4)
    refuse(x)
    return y


@numba.njit
def in_a_list(x):
    found = [x]
    refuse(found[0])
    return len(found)


@numba.njit(parallel=True)
def parallel(x):
    for i in numba.prange(x.shape[0]):
        x[i] = i
    refuse(x)
    x[0] = 1.0


@numba.njit
def numpys_own_error(x):
    y = np.zeros((3, 0))
    return np.argmin(y, 1)


@numba.njit
def exception_with_arguments(x):
    raise ValueError("refused", x[0])


KERNELS = (
    passed_to_the_callee, used_after_the_call, used_before_the_call, raises_itself, callee_is_inlined, callee_in_a_try, own_array,
    in_a_list, parallel, numpys_own_error, exception_with_arguments,
)  # fmt: skip


def call(kernel, x) -> None:
    try:
        kernel(x)
    except (ValueError, ZeroDivisionError):
        pass


def main() -> None:
    versions = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}, numpy {np.__version__}"
    print(f"Python {platform.python_version()}, {versions}; {CALLS} calls of each")
    print(f"{'kernel':28} {'references to its array':>24} {'blocks not freed':>18}")
    for kernel in KERNELS:
        x = np.arange(4.0)
        call(kernel, x)  # compiles
        gc.collect()
        count, stats = sys.getrefcount(x), rtsys.get_allocation_stats()
        for _ in range(CALLS):
            call(kernel, x)
        gc.collect()
        later = rtsys.get_allocation_stats()
        blocks = (later.mi_alloc - stats.mi_alloc) - (later.mi_free - stats.mi_free)
        print(f"{kernel.__name__:28} {sys.getrefcount(x) - count:+24} {blocks:+18}")


if __name__ == "__main__":
    main()
