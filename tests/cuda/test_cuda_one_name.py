"""Kernels for the CPU and for CUDA under one name: ``fast_args(cuda=…, launch=…)``."""

import functools

import numpy as np
import pytest
from children import at_once
from cuda_checks import is_for_tasks, is_refused, launched
from frameworks import torch
from launches import Interface, device_array, dispatcher_of, tensor

from fastexchange import CudaError, fast_args


def both_of_two(package, launch):
    def on_cpu(a0, a1):
        for i in range(a1.shape[0]):
            a1[i] += a0

    return fast_args(cuda=dispatcher_of(package, 2), launch=launch)(on_cpu)


CPU_ARRAYS = {"numpy": np.zeros} if torch is None else {"numpy": np.zeros, "torch": torch.zeros}


@pytest.mark.parametrize("launch", [(4, 32, None, 64), "a1[n] -> n"], ids=str)
def test_tensors_decide(record, package, launch):
    kernel, x = both_of_two(package, launch), tensor(package, (600,))
    for _ in range(4):
        for make in CPU_ARRAYS.values():
            array = make(3)
            kernel(2.0, array)
            assert array.tolist() == [2.0] * 3
        for there in (x, Interface(x), device_array(package, x)):
            kernel(2.0, there)
            kernel(a1=there, a0=2.0)
    made = record.launches[-1]
    assert len(record.launches) == 24 and len({each.packed for each in record.launches}) == 1
    assert is_for_tasks(made, 600) if launch == "a1[n] -> n" else (made.grid, made.shared) == ((4, 1, 1), 64)


@pytest.mark.parametrize("make", CPU_ARRAYS)
def test_tensors_of_both_kinds_and_of_neither_are_refused(record, package, make):
    kernel, x, array = both_of_two(package, (1, 32)), tensor(package), CPU_ARRAYS[make](3)
    # Arrays of NumPy the package copies to the device, in its own launch, if it can tell what stands beside them.
    refusals = BufferError if make == "torch" else (BufferError, TypeError, ValueError)
    for _ in range(3):
        for arguments in ((x, array), (array, x), (1.0, tensor(package, device_type=4))):
            with pytest.raises(refusals):
                kernel(*arguments)
    assert record.launches == [] and array.tolist() == [0.0] * 3 and x.exported == x.deleted


def test_a_chosen_configuration(stub, package):
    asked = []
    kernel = both_of_two(package, lambda a0, a1: asked.append((a0, a1)) or (a1.shape[0], 32))
    for length in (3, 5, 3, 3):
        x = tensor(package, (length,))
        assert launched(stub, kernel, 1.0, x).grid == (length, 1, 1) and asked.pop() == (1.0, x)
    kernel(1.0, np.zeros(3))
    assert asked == []
    stub.set_occupancy(10, 128)
    made = launched(stub, both_of_two(package, lambda a0, a1: a1.shape[0]), 1.0, tensor(package, (1000,)))
    assert (made.grid, made.block) == ((8, 1, 1), (128, 1, 1))
    for chosen, kind in ((None, TypeError), ("4", TypeError), ((1,), ValueError), (-1, ValueError)):
        bad = both_of_two(package, lambda a0, a1, chosen=chosen: chosen)
        is_refused(lambda bad=bad: bad(1.0, x), kind)
    is_refused(lambda: both_of_two(package, lambda a0, a1: {}["chosen"])(1.0, x), KeyError, "chosen")
    stub.fail("cuLaunchKernel", 700)
    is_refused(lambda: kernel(1.0, x), CudaError, "ILLEGAL_ADDRESS")
    assert len(stub.launches) == 5


def test_the_kernel_for_cuda_by_itself(record, package):
    kernel = both_of_two(package, (1, 32))
    assert kernel[7, 64] is kernel.cuda[7, 64] and type(kernel.cuda).__name__ == "CudaKernel"
    assert launched(record, kernel[7, 64], 1.0, tensor(package)).grid == (7, 1, 1)
    is_refused(lambda: fast_args(lambda x: None)[1, 32], TypeError, "without a launch configuration")
    assert fast_args(kernel) is kernel


def test_bad_options(package):
    one, two = (dispatcher_of(package, count) for count in (1, 2))
    for kind, text, options in (  # what is given beside a function for the CPU
        (TypeError, "needs launch=", {"cuda": one}),
        (TypeError, "give it as cuda=", {"launch": (1, 1)}),
        (TypeError, "@cuda.jit dispatcher", {"cuda": lambda a0: None, "launch": (1, 1)}),
        (TypeError, "for the CPU", {"cuda": fast_args(lambda a0: None), "launch": (1, 1)}),
        (TypeError, "the same parameters", {"cuda": two, "launch": (1, 1)}),
        (TypeError, "launch is (grid, block)", {"cuda": one, "launch": 5}),
        (ValueError, "", {"cuda": one, "launch": (1,)}),
        (TypeError, "cannot be given with out=", {"cuda": one, "launch": (1, 1), "out": "a0[n]"}),
    ):
        is_refused(functools.partial(fast_args, lambda a0: None, **options), kind, text)
    is_refused(lambda: fast_args(one, cuda=one, launch=(1, 1)), TypeError)


def test_defaults_and_threads_under_one_name(record, package):
    @fast_args(cuda=package.jit(lambda a0, a1=1.5: None), launch=(1, 32))
    def kernel(a0, a1=1.5):
        a0[0] += a1

    x, arrays = tensor(package), np.zeros((2, 3))
    at_once(*[lambda array=array: [(kernel(x), kernel(array)) for _ in range(50)] for array in arrays])
    assert arrays[:, 0].tolist() == [75.0] * 2 and len(record.launches) == 100
    assert len({each.packed for each in record.launches}) == 1
    assert record.launches[0].parameters[-1] == np.float64(1.5).tobytes()
