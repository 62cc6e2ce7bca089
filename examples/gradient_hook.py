"""``torch.distributed`` with gloo: a kernel compresses gradients in ``DistributedDataParallel``'s communication hook."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

from fastexchange import fast_args

STEP = 1 / 64


@fast_args
def rounded(gradient, step):
    """Round to multiples of `step`, in place: what a compression would send."""
    for i in range(len(gradient)):
        gradient[i] = round(gradient[i] / step) * step


def hook(kernel, bucket):
    kernel(bucket.buffer(), STEP)
    world = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0] / world)


def work(rank, kernel, file, results):
    """One of two ranks: one backward pass; the gradients, and how many signatures this process has compiled."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
    model.register_comm_hook(kernel, hook)
    model(torch.full((4, 8), float(rank + 1))).sum().backward()
    gradient = next(model.parameters()).grad.clone()
    dist.destroy_process_group()
    results.put((gradient.tolist(), sum(kernel.stats.cache_misses.values())))


def main():
    rounded.precompile((torch.ones(2), STEP))
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rendezvous")
        ranks = [context.Process(target=work, args=(rank, rounded, file, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        found = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    assert all(gradient == [[6.0] * 8] for gradient, _ in found), found
    print(f"{len(found)} ranks, {max(compiled for _, compiled in found)} compiled by one of them")


if __name__ == "__main__":
    main()
