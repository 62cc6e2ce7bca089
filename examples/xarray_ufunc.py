"""xarray: ``apply_ufunc(dask="parallelized")`` calls a kernel with each chunk, on a cluster of processes."""

import numpy as np
import xarray
from dask.distributed import Client, LocalCluster

from fastexchange import fast_args


@fast_args
def longest_warm_spell(x, limit):
    """The longest run above `limit` along the last axis."""
    y = np.empty(x.shape[:-1], np.int64)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            run = longest = 0
            for k in range(x.shape[2]):
                run = run + 1 if x[i, j, k] > limit else 0
                longest = max(longest, run)
            y[i, j] = longest
    return y


def compiled_here(kernel):
    """In a worker: how many signatures this process has compiled."""
    return sum(kernel.stats.cache_misses.values())


def main():
    values = np.random.default_rng(0).normal(20, 5, size=(365, 20, 30))
    temperature = xarray.DataArray(values, dims=("time", "latitude", "longitude")).chunk(latitude=10, longitude=10)
    by_place = values.transpose(1, 2, 0)  # as apply_ufunc() passes it: the core dimension is last
    longest_warm_spell.precompile((by_place, 22.0), (np.ascontiguousarray(by_place), 22.0))
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, Client(cluster) as client:
        spells = xarray.apply_ufunc(
            longest_warm_spell, temperature, kwargs={"limit": 22.0}, input_core_dims=[["time"]], dask="parallelized",
            output_dtypes=[np.int64],
        )  # fmt: skip
        assert np.array_equal(spells.compute(), longest_warm_spell(by_place, 22.0))
        compiled = client.run(compiled_here, longest_warm_spell)
        print(f"{spells.data.npartitions} chunks, {max(compiled.values())} compiled by a worker")


if __name__ == "__main__":
    main()
