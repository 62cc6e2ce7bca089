"""What the kernels share: checks of shapes, and sums and maxima over the threads of a block.

Kernels are written once, for both packages: what they use, ``cuda`` above all, is a global of theirs that :func:`given`
sets.
"""

from types import FunctionType
from typing import Any

cuda: Any = None  # given

THREADS = 256
"""In a block; a power of two."""


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def is_double(*tensors) -> bool:
    """Whether one of the tensors has elements of 64 bits: then sums are in float64, else in float32."""
    return any("64" in str(tensor.dtype) for tensor in tensors)


def given(function, **names):
    """The function with other globals of these names."""
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)


def reductions(cuda):
    """``{"total": …, "largest": …}``: device functions that combine a value of each thread of a block.

    Both wait for all threads of the block, before and after, and give every thread the result. `shared` is an array of
    ``THREADS`` in shared memory. A NaN is the largest of all.
    """
    return {name: cuda.jit(device=True)(given(function, cuda=cuda)) for name, function in _REDUCTIONS.items()}


def _total(shared, value):
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if thread < half:
            shared[thread] += shared[thread + half]
        cuda.syncthreads()
        half //= 2
    result = shared[0]
    cuda.syncthreads()
    return result


def _largest(shared, value):
    thread = cuda.threadIdx.x
    shared[thread] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if thread < half:
            other = shared[thread + half]
            if other > shared[thread] or other != other:
                shared[thread] = other
        cuda.syncthreads()
        half //= 2
    result = shared[0]
    cuda.syncthreads()
    return result


_REDUCTIONS = {"total": _total, "largest": _largest}
