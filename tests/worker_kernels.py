"""Kernels, and what worker processes do with them. (Not in a test file: a spawned worker imports no more than it needs.)"""

import os

import numpy as np

from fastexchange import convert, fast_args


@fast_args(cache=True)
def total(x):
    return x.sum()


@fast_args(nogil=True, cache=True)
def unlocked_total(x):
    return x.sum()


@fast_args(cache=True)
def scaled(factor, x, shift=1.0):
    return factor * x + shift


@fast_args(cache=True)
def part(x):
    return x[1:]


@fast_args(cache=True)
def refuses(x):
    if x[0] < 0:
        raise ValueError("negative", x[0])
    return x[0]


class Unexchangeable:
    """Neither a tensor nor anything that Numba knows."""


def call(kernel, *arguments):
    """A kernel that came with the task is called twice. The result, whether the second call was native, and by whom."""
    kernel(*arguments)
    before = kernel.counts()
    result = kernel(*arguments)
    after = kernel.counts()
    return result, (after.fast, after.slow) == (before.fast + 1, before.slow), os.getpid()


def report(queue, kernel, array):
    """A process's work: compile a kernel, and send what the given one makes of the array."""
    assert fast_args(lambda x: x.size)(array) == array.size
    queue.put(kernel(array))


class Samples:
    """A data set whose items are made by a kernel."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        import torch

        return scaled(2.0, torch.full((5,), float(index)))


def collate(samples):
    """A batch put together by kernels: from arrays that a kernel made, from tensors, and through a conversion."""
    import torch

    batch = torch.stack([convert(sample, torch.Tensor) for sample in samples])
    return batch, torch.tensor([total(sample) for sample in samples]), torch.from_numpy(np.asarray(scaled(1.0, batch, 0.5)))
