"""Digests in numba-cuda's simulator: whatever changes in an argument, something else is written. Run by a test.

The simulator takes the place of the compiler when ``numba.cuda`` is imported, so it needs a process of its own.
"""

import collections
import warnings

import numpy as np
from digests import MAGIC, digest_of
from numba import cuda

Pair = collections.namedtuple("Pair", "first second")


def digest(arguments, grid=(2, 1), block=(4, 1)) -> tuple[bytes, bytes]:
    function, *counts = digest_of((arguments,), cuda=cuda, np=np)
    ints, floats = np.full(counts[0], -1), np.full(counts[1], -1.0)
    cuda.jit(function)[grid, block](arguments, ints, floats)  # in a tuple the simulator leaves arrays as they are
    assert ints[0] == MAGIC
    return ints.tobytes(), floats.tobytes()


def others(value):
    """Values of the same type, each with one thing changed."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            for other in others(item):
                items = [*value[:i], other, *value[i + 1 :]]
                yield value._make(items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, np.ndarray):
        memory = np.arange(1, 1000).astype(value.dtype)
        if value.size:  # else nobody sees where it is
            yield np.lib.stride_tricks.as_strided(memory[1:], value.shape, value.strides)
        for i, extent in enumerate(value.shape):
            if extent > 1 and value.size:
                strides = [stride + value.itemsize * (j == i) for j, stride in enumerate(value.strides)]
                yield np.lib.stride_tricks.as_strided(memory, value.shape, strides)
            shape = [extent + (j == i) for j, extent in enumerate(value.shape)]
            yield np.lib.stride_tricks.as_strided(memory, shape, value.strides)
    elif isinstance(value, bool | np.bool_):
        yield type(value)(not value)
    else:
        yield type(value)(value + 1)
        if np.iscomplexobj(value):
            yield type(value)(value + 1j)


def array(dtype, *shape):
    return np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)


warnings.simplefilter("ignore")
arguments = (
    1, 2.5, True, 3j, np.int8(4), np.uint64(5), np.float32(6), np.complex64(7),
    *(array(dtype, 2, 3) for dtype in ("i1", "u8", "f2", "f4", "f8", "c8", "c16")), array("f4"), array("i8", 0, 3),
    array("f4", 2, 2, 2), (1, (2.5, array("i4", 3))), Pair(1j, Pair(array("f8", 2), 3)),
)  # fmt: skip
usual = digest(arguments)
assert digest(arguments) == usual
assert digest(arguments, (3, 1)) != usual and digest(arguments, (2, 1), (4, 2)) != usual
compared = 0
for position, value in enumerate(arguments):
    for other in others(value):
        assert digest((*arguments[:position], other, *arguments[position + 1 :])) != usual, (position, value, other)
        compared += 1
print(compared)
