"""``multiprocessing``: the same pool by fork, forkserver and spawn."""

import multiprocessing

import numpy as np

from fastexchange import fast_args


@fast_args
def clipped(x, limit):
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = min(max(x[i], -limit), limit)
    return y


def run(kernel, x):
    """In a worker: the result, and how many signatures this kernel has compiled here."""
    return kernel(x, 1.0), sum(kernel.stats.cache_misses.values())


def main():
    clipped.precompile((np.ones(2), 1.0))
    rows = np.random.default_rng(0).normal(size=(8, 1000))
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            results, compiled = zip(*pool.starmap(run, [(clipped, row) for row in rows]), strict=True)
        assert np.array_equal(results, rows.clip(-1, 1))
        print(f"{method}: {len(rows)} tasks, {max(compiled)} compiled by a worker")


if __name__ == "__main__":
    main()
