"""Two threads that call at once: ``nogil=True`` kernels against one thread, beside plain ``@njit`` and kernels that keep the GIL.

Each thread has a tensor of its own, and one kernel serves both. A sample is nanoseconds per call, from the moment when all
threads are ready until the last has made its calls, divided by the calls of all of them: with two threads on two idle cores
that is half of one thread's at best. Where the interpreter's part is large beside the kernel's, it cannot be less than that.
"""

import threading
import time
from itertools import repeat

import numba
import numpy as np
from groups import DISPATCHER, OURS, torch

from fastexchange import fast_args
from fastexchange.measuring.timing import Samples

SIZES = {"short": 1_000, "long": 30_000}
"""Elements of the vector that a kernel sums up, one after the other."""

_SAMPLE_NS = 40_000_000  # several of the interpreter's switch intervals, 5 ms


def _total(x):
    total = x[0]
    for i in range(1, x.shape[0]):
        total += x[i]
    return total


KINDS = {
    "numpy/nogil": f"NumPy, {OURS}, nogil",
    "numpy/gil": f"NumPy, {OURS}, with the GIL",
    "numpy/njit": f"NumPy, {DISPATCHER}, nogil",
} | ({"torch/nogil": f"PyTorch, {OURS}, nogil"} if torch is not None else {})


LABELS = {
    f"threads/{size}/{kind}/{threads}": f"{size}: {label}, {threads} thread{'s' * (threads > 1)}"
    for size in SIZES
    for kind, label in KINDS.items()
    for threads in (1, 2)
}
"""The rows: their keys, and what they are called."""


def _decorated(kind: str):
    """The kernel of that kind."""
    nogil = not kind.endswith("/gil")
    return numba.njit(nogil=nogil)(_total) if kind.endswith("/njit") else fast_args(nogil=nogil)(_total)


def _tensor(kind: str, size: int):
    return np.ones(size) if kind.startswith("numpy/") else torch.ones(size, dtype=torch.float64)


def _run(kernel, tensors: list, calls: int) -> float:
    """Nanoseconds per call of as many threads as there are tensors, each of which makes `calls` calls."""
    barrier = threading.Barrier(len(tensors) + 1)

    def call(x):
        barrier.wait()
        for _ in repeat(None, calls):
            kernel(x)

    threads = [threading.Thread(target=call, args=(x,)) for x in tensors]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter_ns()
    for thread in threads:
        thread.join()
    return (time.perf_counter_ns() - start) / (calls * len(tensors))


def measure(rounds: int) -> dict[str, Samples]:
    """Nanoseconds per call by ``threads/SIZE/KIND/THREADS``, of :data:`SIZES` and :data:`KINDS`. Rounds are interleaved."""
    runs: dict[str, tuple] = {}
    for kind in KINDS:
        kernel = _decorated(kind)
        for size, elements in SIZES.items():
            tensors = [_tensor(kind, elements) for _ in range(2)]
            for _ in range(4):  # the first makes its cache entry
                kernel(tensors[0])
            calls = max(2, int(_SAMPLE_NS / _run(kernel, tensors[:1], 100)))
            for threads in (1, 2):
                runs[f"threads/{size}/{kind}/{threads}"] = kernel, tensors[:threads], calls // threads
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(_run(*run))
    return {key: Samples(np.array(values)) for key, values in times.items()}
