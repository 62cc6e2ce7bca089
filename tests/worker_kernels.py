"""Kernels, and what worker processes do with them. (Not in a test file: a spawned worker imports no more than it needs.)"""

import os

from fastexchange import fast_args


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


def call(kernel, *arguments):
    """A kernel that came with the task is called twice. The result, whether the second call was native, and by whom."""
    kernel(*arguments)
    before = kernel.counts()
    result = kernel(*arguments)
    after = kernel.counts()
    return result, (after.fast, after.slow) == (before.fast + 1, before.slow), os.getpid()
