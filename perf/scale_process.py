"""The new processes of ``perf/scale.py``: ``scale_process.py send|receive|start|load|chunks …``.

They print JSON. Times are nanoseconds: ``…/elapsed`` by the clock, others of this process's processor time, which other programs
that use the cores prolong less.
"""

import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from time import perf_counter_ns, process_time_ns

import numpy as np
from numba import njit

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout that this file stands in

from fastexchange import fast_args

CHUNK = 1 << 14
"""Elements of a chunk: 128 KiB."""


@fast_args
def kernel(x, n):
    """A kernel that takes some nanoseconds, and `n` times a nanosecond or two."""
    value = x[0]
    for _ in range(n):
        value = value * 0.5 + 1.0
    return value


@fast_args
def address(x):
    """The address that a kernel has of its array."""
    return x.ctypes.data


@fast_args
def total(x):
    """A sum, in order."""
    value = 0.0
    for i in range(len(x)):
        value += x[i]
    return value


@njit
def by_numba(x, n):
    """As small as `nothing`, compiled by Numba alone, for its pickle."""
    return 1.0


def nothing(x, n):
    """What an engine's task does at least."""
    return 1.0


def compiled_here(*kernels) -> int:
    """How many signatures this process has compiled."""
    return sum(sum(each.stats.cache_misses.values()) for each in kernels)


def send(file: str) -> None:
    """Write the pickles of the kernel, with its machine code, and of a function that does nothing."""
    from numba import cloudpickle

    x = np.ones(4)
    kernel.precompile((x, 0))
    kernel.__module__ = nothing.__module__ = "__main__"
    with open(file, "wb") as to:
        for each in (nothing, kernel):
            pickle.dump(cloudpickle.dumps(each), to)


def receive(file: str, modules: str) -> dict:
    """Unpickle and call both, as a worker does. `modules`: a file with the names of those to be imported before, or ``-``."""
    if modules != "-":
        for name in json.loads(Path(modules).read_text()):
            importlib.import_module(name)
    before, x, times = set(sys.modules), np.ones(4), {}
    with open(file, "rb") as pickles:
        data = {name: pickle.load(pickles) for name in ("nothing", "kernel")}
    for name, each in data.items():
        start = perf_counter_ns(), process_time_ns()
        received = pickle.loads(each)
        received(x, 0)
        times |= {f"{name}/elapsed": perf_counter_ns() - start[0], name: process_time_ns() - start[1]}
    return times | {"compiled": compiled_here(received), "modules": [name for name in sys.modules if name not in before]}


def start(module: str) -> dict:
    """Wait for the others, and call each kernel of a module. Returns how often each was compiled here."""
    kernels = importlib.import_module(module).KERNELS
    from fastexchange.ground.cfunction import code_cache

    print("ready", flush=True)
    sys.stdin.readline()
    x = np.ones(8)
    for each in kernels:
        each(x, 2)
    return {each.__name__: compiled_here(each) for each in kernels} | {"native": code_cache.misses}


def load(module: str) -> dict:
    """The first calls of all kernels of a module, and the time that Numba takes in them to load machine code."""
    from numba.core import codegen

    unserialize, times = codegen.CPUCodegen.unserialize_library, {"loading": 0}

    def timed(self, serialized):
        begin = process_time_ns()
        try:
            return unserialize(self, serialized)
        finally:
            times["loading"] += process_time_ns() - begin

    codegen.CPUCodegen.unserialize_library = timed
    kernels, x = importlib.import_module(module).KERNELS, np.ones(8)
    begin = perf_counter_ns(), process_time_ns()
    for each in kernels:
        each(x, 2)
    times |= {"elapsed": perf_counter_ns() - begin[0], "calls": process_time_ns() - begin[1]}
    return times | {"count": len(kernels), "compiled": compiled_here(*kernels)}


def rss() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def by_kernel(block):
    """A chunk's task: its sum, whether the kernel got the chunk's own memory, the process's memory, the time."""
    return np.array([[total(block), address(block) == block.ctypes.data, rss(), perf_counter_ns()]])


def by_numpy(block):
    """The same without kernels."""
    return np.array([[block.sum(), True, rss(), perf_counter_ns()]])


def chunks(scheduler: str, function: str, count: str) -> dict:
    """Pass so many chunks through a function by Dask's ``map_blocks``. Tasks make them, so they are never there at once."""
    import dask
    import dask.array as da
    from dask.distributed import Client, LocalCluster

    for each in (total, address):
        each.precompile((np.ones(2),))
    x = da.ones(int(count) * CHUNK, chunks=CHUNK) * 2.0
    made = da.map_blocks(globals()[function], x, dtype=float, new_axis=1, chunks=((1,) * int(count), (4,)))
    if scheduler == "threads":
        with dask.config.set(scheduler="threads", num_workers=2):
            result = made.compute()
    else:
        with LocalCluster(1, threads_per_worker=2, dashboard_address=None) as cluster, Client(cluster):
            result = made.compute()
    result = result[np.argsort(result[:, 3])]
    tenth = len(result) // 10
    early, late = np.median(result[tenth : 2 * tenth, 2]), np.median(result[-tenth:, 2])
    right = int(np.sum(result[:, 0] == 2.0 * CHUNK))
    return {"grown": late - early, "early": early, "right": right, "own memory": int(result[:, 1].sum())}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
