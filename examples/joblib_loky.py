"""joblib: processes of loky read one large array, which joblib maps into their memory, readonly."""

import numpy as np
from joblib import Parallel, delayed

from fastexchange import fast_args


@fast_args
def column_range(x, column):
    low = high = x[0, column]
    for i in range(x.shape[0]):
        low, high = min(low, x[i, column]), max(high, x[i, column])
    return low, high


def run(kernel, x, column):
    """In a worker: the result, how many signatures this process has compiled, and whether `x` is mapped, not copied."""
    return kernel(x, column), sum(kernel.stats.cache_misses.values()), isinstance(x, np.memmap) and not x.flags.writeable


def main():
    x = np.random.default_rng(0).normal(size=(200_000, 8))
    readonly = x[:1].copy()
    readonly.flags.writeable = False
    column_range.precompile((readonly, 0))
    tasks = [delayed(run)(column_range, x, column) for column in range(x.shape[1])]
    results, compiled, mapped = zip(*Parallel(n_jobs=2)(tasks), strict=True)
    assert np.array_equal(results, np.stack([x.min(axis=0), x.max(axis=0)], axis=1))
    print(f"{len(tasks)} tasks, {max(compiled)} compiled by a worker, {sum(mapped)} read the mapped array")


if __name__ == "__main__":
    main()
