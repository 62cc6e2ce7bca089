"""Dask: ``map_blocks`` with threads, which copies no chunk, and on a cluster of processes, which compile nothing."""

import dask.array as da
import numpy as np
from dask.distributed import Client, LocalCluster

from fastexchange import fast_args


@fast_args
def cumulated(x):
    y = np.empty_like(x)
    for i in range(x.shape[0]):
        total = 0.0
        for j in range(x.shape[1]):
            total += x[i, j]
            y[i, j] = total
    return y


@fast_args
def address(x):
    return x.ctypes.data


def compiled_here(kernel):
    """In a worker: how many signatures this process has compiled."""
    return sum(kernel.stats.cache_misses.values())


def main():
    data = np.random.default_rng(0).normal(size=(400, 300))
    x = da.from_array(data, chunks=(100, 300))
    cumulated.precompile((data,))
    result = da.map_blocks(cumulated, x, dtype=x.dtype)
    assert np.array_equal(result.compute(scheduler="threads"), cumulated(data))

    chunks = x.to_delayed().ravel()
    found = [block.compute(scheduler="threads").ctypes.data for block in chunks]
    seen = da.map_blocks(lambda chunk: np.array([[address(chunk)]]), x, dtype=np.int64, chunks=(1, 1))
    assert seen.compute(scheduler="threads").ravel().tolist() == found
    print(f"threads: {len(found)} chunks, all read where Dask has them")

    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, Client(cluster) as client:
        assert np.array_equal(result.compute(), cumulated(data))
        compiled = client.run(compiled_here, cumulated)
        print(f"processes: {len(found)} chunks, {max(compiled.values())} compiled by a worker")


if __name__ == "__main__":
    main()
