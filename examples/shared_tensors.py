"""``torch.multiprocessing``: processes write to parts of one shared tensor."""

import torch
import torch.multiprocessing as multiprocessing

from fastexchange import fast_args


@fast_args
def fill(y, first):
    for i in range(len(y)):
        y[i] = (first + i) ** 2


def work(kernel, y, part, compiled):
    """In a process: write to a part of the shared tensor, and say how many signatures this process has compiled."""
    begin = part * len(y) // 4
    kernel(y[begin : begin + len(y) // 4], begin)
    compiled.put(sum(kernel.stats.cache_misses.values()))


def main():
    fill.precompile((torch.ones(2, dtype=torch.int64), 0))
    y = torch.zeros(1000, dtype=torch.int64).share_memory_()
    context = multiprocessing.get_context("spawn")
    compiled = context.SimpleQueue()
    processes = [context.Process(target=work, args=(fill, y, part, compiled)) for part in range(4)]
    for process in processes:
        process.start()
    counts = [compiled.get() for _ in processes]
    for process in processes:
        process.join()
    assert torch.equal(y, torch.arange(1000) ** 2)
    print(f"{len(processes)} processes, {max(counts)} compiled by one of them")


if __name__ == "__main__":
    main()
