"""Ray: tasks, an actor and ``ray.data``. Arrays of the object store are readonly, and kernels read them where they lie."""

import numpy as np
import ray

from fastexchange import fast_args


@fast_args
def weighted_sum(x, weights):
    total = 0.0
    for i in range(len(x)):
        total += x[i] * weights[i]
    return total


@fast_args
def address(x):
    return x.ctypes.data


@fast_args
def scaled(x, factor):
    y = np.empty(len(x))
    for i in range(len(x)):
        y[i] = x[i] * factor
    return y


def compiled_here(kernel):
    """How many signatures this process has compiled."""
    return sum(kernel.stats.cache_misses.values())


@ray.remote
def task(x, weights):
    """The result, how many signatures this worker has compiled, and whether the kernel saw the store's own memory."""
    return weighted_sum(x, weights), compiled_here(weighted_sum), address(x) == x.ctypes.data and not x.flags.writeable


@ray.remote
class Accumulator:
    def __init__(self, weights):
        self.weights, self.total = weights, 0.0

    def add(self, x):
        self.total += weighted_sum(x, self.weights)
        return self.total


def batch(columns):
    return {"y": scaled(columns["x"], 3.0)}


def main():
    readonly = np.ones(2)
    readonly.flags.writeable = False
    for kernel, arguments in ((weighted_sum, (readonly, readonly)), (address, (readonly,)), (scaled, (readonly, 3.0))):
        kernel.precompile(arguments)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        x, weights = np.random.default_rng(0).normal(size=(2, 100_000))
        stored = ray.put(weights)
        results, compiled, zero_copy = zip(*ray.get([task.remote(ray.put(x + i), stored) for i in range(4)]), strict=True)
        assert np.allclose(results, [(x + i) @ weights for i in range(4)])
        print(f"{len(results)} tasks, {max(compiled)} compiled by a worker, {sum(zero_copy)} without a copy")

        actor = Accumulator.remote(stored)
        assert np.isclose(ray.get([actor.add.remote(x) for _ in range(3)])[-1], 3 * (x @ weights))
        print("an actor: 3 calls")

        rows = ray.data.from_numpy(np.arange(1000.0)).rename_columns({"data": "x"}).map_batches(batch, batch_size=250)
        assert np.array_equal(np.sort([row["y"] for row in rows.take_all()]), 3 * np.arange(1000.0))
        print("ray.data: 4 batches")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
