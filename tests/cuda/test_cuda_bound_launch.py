"""Bound launches, and CPU and GPU under one name."""

import copy
import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
from cuda_checks import all_given_back, in_threads, is_refused
from cuda_tensors import DeviceTensor
from frameworks import torch
from launches import ExportedTensor, Interface, address, device_array, dispatcher_of, kernel_of

from fastexchange import BoundCudaLaunch, CudaError, fast_args


def tensor(package, shape=(3,), dtype="float32", strides=None, cls=DeviceTensor, **options):
    return cls(shape, dtype, strides, data=address(package), **options)


# ---- bound launches --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [
    lambda package: tensor(package, (3, 4), strides=(8, 2)), lambda package: tensor(package, cls=ExportedTensor),
    lambda package: Interface(tensor(package)), lambda package: device_array(package, tensor(package)),
], ids=["tensor", "tensor that is exported", "interface", "device array"])  # fmt: skip
def test_a_bound_launch_is_the_launch_with_the_arguments_that_it_keeps(record, package, make):
    arguments = (2.5, make(package), True, (np.int8(3),), 1j)
    launcher = kernel_of(package, 5)[(4, 2), 64, None, 100]
    launch = launcher.bind(*arguments[:4], a4=1j)
    assert record.launches == []
    launcher(*arguments)
    assert type(launch) is BoundCudaLaunch and launch.launcher is launcher and launch.arguments == arguments
    for _ in range(4):
        assert launch() is None
    first, *others = record.launches
    assert len(others) == 4 and {each._replace(api="", thread=0) for each in others} == {first._replace(api="", thread=0)}
    reference = weakref.ref(arguments[1])
    del arguments, first, others
    gc.collect()
    assert reference() is not None and "bound to float, " in repr(launch)
    del launch
    gc.collect()
    assert reference() is None


def test_rebinding(record, package):
    x, y = tensor(package), DeviceTensor((7,), data=address(package) + 512)
    launcher = kernel_of(package, 2)[1, 32]
    with all_given_back(x, y):
        launch = launcher.bind(1, x)
        launch()
        launch.rebind(a1=y)()
        launcher(1, y)
        launch.rebind(a0=5, a1=tensor(package, dtype="float64"))()  # another signature
    assert record.launches[1].packed == record.launches[2].packed != record.launches[0].packed
    assert record.launches[3].parameters[0] == (5).to_bytes(8, "little")


def test_a_bound_launch_raises_what_the_launch_raises(record, package):
    launcher = kernel_of(package, 2)[1, 32]
    launch = launcher.bind(1, x := tensor(package))
    is_refused(lambda: launcher.bind(), TypeError, "missing")
    is_refused(lambda: launcher.bind(1, 2, 3), TypeError, "takes 2")
    is_refused(lambda: launch(1), TypeError, "takes no arguments, 1 given")
    is_refused(lambda: launch.rebind(b=1), TypeError, "'b', which is no parameter")
    is_refused(lambda: launch.rebind(a1=tensor(package, device_type=1))(), BufferError, "kDLCPU:0")
    for copied in (copy.copy, pickle.dumps):
        is_refused(lambda copied=copied: copied(launch), TypeError, "not pickled or copied")
    launch.rebind(a1=x)()
    assert len(record.launches) == 1


def test_threads_that_launch_while_it_is_rebound(record, package):
    x, y = tensor(package), tensor(package, (5,))
    launch = kernel_of(package, 1)[1, 32].bind(x)

    def work():
        for _ in range(200):
            launch()

    with all_given_back(x, y):
        in_threads(*[work] * 4, meanwhile=lambda: [launch.rebind(a0=each) for _ in range(20) for each in (y, x)])
    assert len(record.launches) == 800 and len({each.packed for each in record.launches}) <= 2


# ---- CPU and GPU under one name --------------------------------------------------------------------------------------
def both_of_two(package, launch):
    def on_cpu(a0, a1):
        for i in range(a1.shape[0]):
            a1[i] += a0

    return fast_args(cuda=dispatcher_of(package, 2), launch=launch)(on_cpu)


CPU_ARRAYS = {"numpy": np.zeros} if torch is None else {"numpy": np.zeros, "torch": torch.zeros}


def test_tensors_decide(record, package):
    kernel = both_of_two(package, (4, 32, None, 64))
    x = tensor(package)
    for _ in range(4):
        for make in CPU_ARRAYS.values():
            array = make(3)
            kernel(2.0, array)
            assert array.tolist() == [2.0] * 3
        assert record.launches == []
        for there in (x, Interface(x), device_array(package, x)):
            kernel(2.0, there)
            kernel(a1=there, a0=2.0)
        assert len(record.launches) == 6 and len({each.packed for each in record.launches}) == 1
        assert record.launches[-1].grid == (4, 1, 1) and record.launches[-1].shared == 64
        record.clear()


@pytest.mark.parametrize("make", CPU_ARRAYS)
def test_tensors_of_both_kinds_are_refused(record, package, make):
    kernel = both_of_two(package, (1, 32))
    x, array = tensor(package), CPU_ARRAYS[make](3)
    # Arrays of NumPy the package copies to the device, in its own launch, if it can tell what stands beside them.
    refusals = BufferError if make == "torch" else (BufferError, TypeError, ValueError)
    for _ in range(3):
        for arguments in ((x, array), (array, x)):
            with pytest.raises(refusals):
                kernel(*arguments)
    assert record.launches == [] and array.tolist() == [0.0] * 3 and x.exported == x.deleted


def test_a_chosen_configuration(stub, package):
    asked = []
    kernel = both_of_two(package, lambda a0, a1: asked.append((a0, a1)) or (a1.shape[0], 32))
    for length in (3, 5, 3, 3):
        x = tensor(package, (length,))
        kernel(1.0, x)
        assert asked.pop() == (1.0, x) and stub.launches[-1].grid == (length, 1, 1)
    kernel(1.0, np.zeros(3))
    assert asked == []
    stub.set_occupancy(10, 128)
    both_of_two(package, lambda a0, a1: a1.shape[0])(1.0, tensor(package, (1000,)))
    assert (stub.launches[-1].grid, stub.launches[-1].block) == ((8, 1, 1), (128, 1, 1))
    for chosen, kind in ((None, TypeError), ("4", TypeError), ((1,), ValueError), (-1, ValueError)):
        bad = both_of_two(package, lambda a0, a1, chosen=chosen: chosen)
        is_refused(lambda bad=bad: bad(1.0, x), kind)
    is_refused(lambda: both_of_two(package, lambda a0, a1: {}["chosen"])(1.0, x), KeyError, "chosen")
    assert len(stub.launches) == 5


def test_the_kernel_for_cuda_by_itself(record, package):
    kernel = both_of_two(package, (1, 32))
    assert kernel[7, 64] is kernel.cuda[7, 64] and type(kernel.cuda).__name__ == "CudaKernel"
    kernel[7, 64](1.0, tensor(package))
    assert record.launches[-1].grid == (7, 1, 1)
    is_refused(lambda: fast_args(lambda x: None)[1, 32], TypeError, "without a launch configuration")
    assert fast_args(kernel) is kernel


BAD_OPTIONS = [  # without launch, without cuda, and so on: what is given beside a function for the CPU
    (TypeError, "needs launch=", {"cuda": 1}),
    (TypeError, "needs cuda=", {"launch": (1, 1)}),
    (TypeError, "@cuda.jit dispatcher", {"cuda": lambda a0: None, "launch": (1, 1)}),
    (TypeError, "for the CPU", {"cuda": fast_args(lambda a0: None), "launch": (1, 1)}),
    (TypeError, "the same parameters", {"cuda": 2, "launch": (1, 1)}),
    (TypeError, "launch is (grid, block)", {"cuda": 1, "launch": 5}),
    (ValueError, "", {"cuda": 1, "launch": (1,)}),
    (TypeError, "cannot be given with out=", {"cuda": 1, "launch": (1, 1), "out": "a0[n]"}),
]


def test_bad_options(package):
    def function(a0):
        pass

    dispatchers = {count: dispatcher_of(package, count) for count in (1, 2)}
    for kind, text, options in BAD_OPTIONS:
        given = {name: dispatchers.get(value, value) if name == "cuda" else value for name, value in options.items()}
        is_refused(lambda: fast_args(function, **given), kind, text)  # noqa: B023
    is_refused(lambda: fast_args(dispatchers[1], cuda=dispatchers[1], launch=(1, 1)), TypeError)


def test_wrong_arguments_under_one_name(stub, package):
    kernel = both_of_two(package, (1, 32))
    x = tensor(package)
    is_refused(lambda: kernel(1.0), TypeError, "missing")
    is_refused(lambda: kernel(1.0, x, x), TypeError, "takes 2")
    is_refused(lambda: kernel(1.0, b=x), TypeError, "unexpected keyword")
    is_refused(lambda: kernel(1.0, tensor(package, device_type=4)), BufferError)
    stub.fail("cuLaunchKernel", 700)
    is_refused(lambda: kernel(1.0, x), CudaError, "ILLEGAL_ADDRESS")
    kernel(1.0, x)
    assert len(stub.launches) == 1


def test_defaults_and_threads_under_one_name(record, package):
    @fast_args(cuda=package.jit(lambda a0, a1=1.5: None), launch=(1, 32))
    def kernel(a0, a1=1.5):
        a0[0] += a1

    x, arrays = tensor(package), np.zeros((2, 3))

    def work(array):
        for _ in range(50):
            kernel(x)
            kernel(array)

    in_threads(*[functools.partial(work, array) for array in arrays])
    assert arrays[:, 0].tolist() == [75.0] * 2 and len(record.launches) == 100
    assert len({each.packed for each in record.launches}) == 1
    assert record.launches[0].parameters[-1] == np.float64(1.5).tobytes()
