"""What the kernels share: checks of shapes, how rows are split among threads, and reductions over them.

Kernels are written once, for both packages: what they use, ``cuda`` above all, is a global of theirs that :func:`given`
sets. Numbers among these globals are constants when a kernel is compiled: loops over them are unrolled, and a local array
that is indexed by nothing else lies in registers. So a thread first loads several values, which are on their way together,
and then computes.
"""

from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

cuda: Any = None  # given, as are the others
number: Any = None
warps: Any = None
join: Any = None
of_lane: Any = None
in_warp: Any = None

WARP = 32
ALL = 0xFFFFFFFF
"""The lanes of a warp that take part."""
THREADS = 256
"""In a block, where the shape does not decide it."""


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def number_of(*tensors):
    """In what kernels compute: ``float64`` if one of the tensors has elements of 64 bits, else ``float32``."""
    return np.float64 if any("64" in str(tensor.dtype) for tensor in tensors) else np.float32


def given(function, **names):
    """The function with other globals of these names."""
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)


class Team(NamedTuple):
    """The threads for a row, next to each other in x; several rows, in y, share a block if a warp is enough for each."""

    threads: int
    """A power of two, at least a warp."""
    values: int
    """Elements of each thread at a time."""
    is_whole: bool
    """Whether that is all of the row, so that it is read once."""

    @property
    def block(self) -> tuple[int, int]:
        return self.threads, THREADS // WARP if self.threads == WARP else 1

    def grid(self, rows: int) -> int:
        return -(-rows // self.block[1])


MAX_VALUES = 16
MAX_THREADS = 512
"""Each of them may then have 128 registers."""


def team_for(columns: int) -> Team:
    """The team for rows of so many columns, at least one."""
    values = min(_power_of_two(-(-columns // WARP)), MAX_VALUES)
    threads = min(max(_power_of_two(-(-columns // values)), WARP), MAX_THREADS)
    return Team(threads, values, columns <= threads * values)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def lanes(cuda, number):
    """A device function ``of_lane(value, lane)``: the `number` that another lane of the warp gives. All lanes call it."""
    return cuda.jit(device=True)(given(_of_lane, cuda=cuda, number=number))


def reductions(cuda, number, threads):
    """``{"total": …, "largest": …}``: device functions that combine a `number` of each thread of a team.

    All threads of the block call them together, and all get the result.
    """

    def device(function, **names):
        return cuda.jit(device=True)(given(function, cuda=cuda, number=number, warps=threads // WARP, **names))

    made = {}
    for name, join in ("total", device(_sum)), ("largest", device(_larger)):
        in_warp = device(_in_warp, join=join, of_lane=lanes(cuda, number))
        made[name] = device(_reduced, in_warp=in_warp)
    return made


def _sum(a, b):
    return a + b


def _larger(a, b):
    return a if a > b else b


def _of_lane(value, lane):
    own, other = cuda.local.array(1, number), cuda.local.array(1, number)
    own[0] = value
    own_words, other_words = own.view(np.int32), other.view(np.int32)
    for word in range(own_words.shape[0]):  # numba-cuda-mlir shuffles 32 bits; of float64 it would take the nearest float32
        other_words[word] = cuda.shfl_sync(ALL, own_words[word], lane)
    return other[0]


def _in_warp(value, distance):
    """Each lane's value joined with those of the lanes whose numbers differ by bits up to `distance`."""
    lane = cuda.threadIdx.x % WARP
    while distance > 0:
        value = join(value, of_lane(value, lane ^ distance))
        distance >>= 1
    return value


def _reduced(value):
    value = in_warp(value, WARP // 2)
    if warps > 1:
        parts = cuda.shared.array(warps, number)
        thread = cuda.threadIdx.x
        cuda.syncthreads()  # the last reduction's parts have been read
        if thread % WARP == 0:
            parts[thread // WARP] = value
        cuda.syncthreads()
        value = in_warp(parts[thread % warps], warps // 2)
    return value
