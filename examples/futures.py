"""``concurrent.futures``: a pool of spawned processes runs a kernel of this script, and compiles nothing."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from fastexchange import fast_args


@fast_args
def root_mean_square(x):
    total = 0.0
    for value in x:
        total += value * value
    return (total / len(x)) ** 0.5


def run(kernel, x):
    """In a worker: the result, and how many signatures this process has compiled."""
    return kernel(x), sum(kernel.stats.cache_misses.values())


def main():
    root_mean_square.precompile((np.ones(2),))
    rows = np.random.default_rng(0).normal(size=(16, 1000))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results, compiled = zip(*pool.map(run, [root_mean_square] * len(rows), rows), strict=True)
    assert np.allclose(results, np.sqrt((rows**2).mean(axis=1)))
    print(f"{len(rows)} tasks, {max(compiled)} compiled by a worker")


if __name__ == "__main__":
    main()
