"""mpi4py: the first rank compiles and broadcasts the kernel, with its machine code; each rank steps its part of a rod.

``mpiexec -n 2 python examples/mpi_ranks.py``
"""

import numpy as np
from mpi4py import MPI

from fastexchange import fast_args

POINTS, STEPS = 1000, 200


@fast_args
def step(u, new):
    """One step of the heat equation; the ends are the neighbours'."""
    for i in range(1, len(u) - 1):
        new[i] = u[i] + 0.25 * (u[i - 1] - 2 * u[i] + u[i + 1])


def compiled_here(kernel):
    """How many signatures this process has compiled."""
    return sum(kernel.stats.cache_misses.values())


def main():
    ranks = MPI.COMM_WORLD
    left = ranks.rank - 1 if ranks.rank > 0 else MPI.PROC_NULL
    right = ranks.rank + 1 if ranks.rank + 1 < ranks.size else MPI.PROC_NULL
    whole = kernel = None
    if ranks.rank == 0:
        whole = np.random.default_rng(0).normal(size=ranks.size * POINTS)
        step.precompile((whole, whole))
        kernel = step
    kernel = ranks.bcast(kernel)
    u, new = np.zeros(POINTS + 2), np.zeros(POINTS + 2)
    ranks.Scatter(whole, u[1:-1])
    for _ in range(STEPS):
        ranks.Sendrecv(u[1:2], left, recvbuf=u[-1:], source=right)
        ranks.Sendrecv(u[-2:-1], right, recvbuf=u[:1], source=left)
        kernel(u, new)
        u, new = new, u
    result = np.empty(ranks.size * POINTS) if ranks.rank == 0 else None
    ranks.Gather(u[1:-1], result)
    compiled = ranks.gather(compiled_here(kernel))
    if ranks.rank == 0:
        u, new = np.zeros(len(whole) + 2), np.zeros(len(whole) + 2)
        u[1:-1] = whole
        for _ in range(STEPS):
            step(u, new)
            u, new = new, u
        assert np.array_equal(result, u[1:-1])
        print(f"{ranks.size} ranks, {STEPS} steps, {max(compiled[1:], default=0)} compiled by a rank that received the kernel")


if __name__ == "__main__":
    main()
