"""Bound launches, and CPU and GPU under one name."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from cuda_producers import new_stream
from cuda_tensors import DeviceTensor, OtherTensor
from frameworks import torch
from launches import (
    ExportedTensor,
    Interface,
    address,
    device_array,
    dispatcher_of,
    in_threads,
    is_refused,
    kernel_of,
)

from fastexchange import BoundCudaLaunch, CudaError, fast_args


def tensor(package, shape=(3,), dtype="float32", strides=None, cls=DeviceTensor, **options):
    return cls(shape, dtype, strides, data=address(package), **options)


def held(*tensors) -> list[int]:
    """How many exports of each have not been given back."""
    return [each.exported - each.deleted for each in tensors]


# ---- bound launches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [DeviceTensor, ExportedTensor])
def test_a_bound_launch_is_the_launch(record, package, cls):
    x, y = tensor(package, (3, 4), strides=(8, 2), cls=cls), tensor(package, (5,), "complex128", cls=cls)
    arguments = (2.5, x, True, (y, np.int8(3)), 1j)
    launcher = kernel_of(package, 5)[(4, 2), 64, None, 100]
    launcher(*arguments)
    launch = launcher.bind(*arguments)
    assert type(launch) is BoundCudaLaunch and launch.launcher is launcher and launch.arguments == arguments
    before = launcher.kernel.counts()
    for _ in range(5):
        assert launch() is None
    assert launcher.kernel.counts() == (before.fast + 5, before.slow, 1)
    first, *others = record.launches
    for each in others:
        assert each._replace(api="", thread=0) == first._replace(api="", thread=0)
    assert len(others) == 5 and held(x, y) == [1, 1]
    del launch
    gc.collect()
    assert held(x, y) == [0, 0]


def test_binding_makes_no_launch_and_compiles_what_is_new(record, package):
    x = tensor(package)
    kernel = kernel_of(package, 2)
    launch = kernel[1, 32].bind(a1=x, a0=1)
    assert record.launches == [] and kernel.counts().compiled == 1
    launch()
    assert len(record.launches) == 1 and "bound to int, cuda_tensors.DeviceTensor" in repr(launch)
    is_refused(lambda: launch(1), TypeError, "takes no arguments, 1 given")
    is_refused(lambda: launch(a0=1), TypeError, "takes no arguments, 1 given")
    for copied in (copy.copy, pickle.dumps):
        is_refused(lambda copied=copied: copied(launch), TypeError, "cannot be pickled or copied")
    assert len(record.launches) == 1


@pytest.mark.parametrize("make", [lambda package, x: x, lambda package, x: Interface(x), device_array],
                         ids=["tensor", "interface", "device array"])  # fmt: skip
def test_what_holds_the_arguments(record, package, make):
    each = make(package, type("Mine", (DeviceTensor,), {})((3,), data=address(package)))
    launcher = kernel_of(package, 2)[1, 32]
    launcher(each, 1)
    launch = launcher.bind(each, 1)
    launch()
    launch()
    assert len({launched.packed for launched in record.launches}) == 1
    reference = weakref.ref(each)
    del each
    gc.collect()
    assert reference() is not None
    launch()
    del launch
    gc.collect()
    assert reference() is None


def test_rebind(record, package):
    x, y, z = tensor(package), DeviceTensor((7,), data=address(package) + 512), tensor(package, dtype="float64")
    launcher = kernel_of(package, 2)[1, 32]
    launch = launcher.bind(1, x)
    launch()
    assert launch.rebind(a1=y) is launch and held(x, y) == [0, 1]
    launch()
    launcher(1, y)
    assert record.launches[1].packed == record.launches[2].packed != record.launches[0].packed
    launch.rebind(a0=5)
    launch()
    assert record.launches[3].parameters[0] == (5).to_bytes(8, "little") and launch.arguments == (5, y)
    launch.rebind()
    for bad in ({"a1": z}, {"a0": 1.5}, {"a1": tensor(package, (3, 3))}, {"a1": tensor(package, strides=(2,))}, {"a0": x}):
        is_refused(lambda bad=bad: launch.rebind(**bad), TypeError, "would be another signature, ", "; bind anew")
    is_refused(lambda: launch.rebind(b=1), TypeError, "'b', which is no parameter")
    is_refused(lambda: launch.rebind(a1=np.zeros(3)), TypeError, "cannot be bound")
    is_refused(lambda: launch.rebind(a1=tensor(package, device_type=1)), BufferError, "kDLCPU:0")
    assert held(x, y, z) == [0, 1, 0]
    launch()
    assert record.launches[-1].packed == record.launches[3].packed
    launch = bad = None
    gc.collect()
    assert held(x, y, z) == [0, 0, 0] and y.exported == y.deleted > 0


def test_what_cannot_be_bound(record, package):
    kernel = kernel_of(package, 1)
    for value in (np.zeros(3), b"1", package.In(np.zeros(3))):
        with pytest.raises((TypeError, BufferError)):
            kernel[1, 32].bind(value)
    is_refused(lambda: kernel[1, 32].bind(), TypeError, "missing")
    is_refused(lambda: kernel[1, 32].bind(1, 2), TypeError, "takes 1")


@pytest.mark.parametrize("streams", ["different ones", "the same one"])
def test_streams_that_may_part_are_not_bound(record, package, streams):
    """Also when they are the same: an ordinary launch would order them when they are not."""
    x, y = tensor(package), tensor(package, cls=OtherTensor)
    if streams == "different ones":
        DeviceTensor.streams[0], OtherTensor.streams[0] = new_stream(), new_stream()
    for arguments in ((x, y), (x, Interface(DeviceTensor((4,), data=address(package, 16))))):
        launcher = kernel_of(package, 2)[1, 32]
        launcher(*arguments)
        is_refused(lambda: launcher.bind(*arguments), TypeError, "different streams", "kernel[grid, block, stream]")  # noqa: B023
        kernel_of(package, 2)[1, 32, 0].bind(*arguments)()
        assert record.launches[-1].stream == 0
    assert held(x, y) == [0, 0]


def test_declared_signatures_are_converted_when_bound(record, package):
    x = tensor(package)
    launcher = kernel_of(package, 3, signature="void(float32, int32, float32[:])")[1, 32]
    launch = launcher.bind(1, True, x)
    for _ in range(3):
        launch()
    launcher(1, True, x)
    assert len({each.packed for each in record.launches}) == 1
    launch.rebind(a0=2)
    launch()
    assert record.launches[-1].parameters[0] == np.float32(2).tobytes()
    exported = x.exported
    is_refused(lambda: launcher.bind(1, 2**31, x), OverflowError)
    is_refused(lambda: launcher.bind(1, 1.5, x), TypeError)
    is_refused(lambda: launch.rebind(a1=2**31), OverflowError)
    gc.collect()
    assert x.exported > exported and held(x) == [1]
    launch()
    assert record.launches[-1].parameters[:2] == (np.float32(2).tobytes(), np.int32(1).tobytes())


def test_threads(record, package):
    x = tensor(package)
    launcher = kernel_of(package, 2)[1, 32]
    launch = launcher.bind(1, x)

    def work():
        for _ in range(200):
            launch()
            launcher(1, x)

    in_threads(*[work] * 4, meanwhile=lambda: [launch.rebind(a0=1) for _ in range(20)])
    assert len(record.launches) == 1600
    launch.rebind(a0=1)  # which lets go of what was bound while it was launched
    assert len({each.packed for each in record.launches}) == 1 and held(x) == [1]


def test_rebinding_while_it_is_launched(stub, package):
    """The driver's call runs without the GIL: parameters that it reads stay where they are, until the next ``rebind``."""
    x, said = tensor(package), []
    launch = kernel_of(package, 1)[1, 32].bind(x)
    launch()

    def hook(record):
        launch.rebind(a0=x)
        launch.rebind(a0=x)
        said.append(held(x))

    stub.set_hook(hook)
    launch()
    stub.set_hook(None)
    assert said == [[2]]  # what is launched, and what is bound
    launch.rebind(a0=x)
    launch()
    assert held(x) == [1] and len({each.packed for each in stub.launches}) == 1


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
    for _ in range(30):
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
    assert held(x) == [0]


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
    assert record.launches == [] and array.tolist() == [0.0] * 3 and held(x) == [0]


def test_a_chosen_configuration(stub, package):
    asked = []

    def launch(a0, a1):
        asked.append((a0, a1))
        return (a1.shape[0], 32)

    kernel = both_of_two(package, launch)
    for length in (3, 5, 3, 3):
        x = tensor(package, (length,))
        kernel(1.0, x)
        assert asked.pop() == (1.0, x) and stub.launches[-1].grid == (length, 1, 1)
    kernel(1.0, np.zeros(3))
    assert asked == []
    tasks = both_of_two(package, lambda a0, a1: a1.shape[0])
    stub.set_occupancy(10, 128)
    tasks(1.0, tensor(package, (1000,)))
    stub.set_occupancy(264, 256)
    assert (stub.launches[-1].grid, stub.launches[-1].block) == ((8, 1, 1), (128, 1, 1))
    for chosen, kind in ((None, TypeError), ("4", TypeError), ((1,), ValueError), (-1, ValueError)):
        bad = both_of_two(package, lambda a0, a1, chosen=chosen: chosen)
        is_refused(lambda bad=bad: bad(1.0, x), kind)

    def failing(a0, a1):
        raise LookupError("no configuration")

    is_refused(lambda: both_of_two(package, failing)(1.0, x), LookupError, "no configuration")
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


def on_cpu_with_a_default(a0, a1=1.5):
    a0[0] += a1


def test_defaults_and_threads_under_one_name(record, package):
    kernel = fast_args(cuda=package.jit(lambda a0, a1=1.5: None), launch=(1, 32))(on_cpu_with_a_default)
    x, array = tensor(package), np.zeros(3)

    def work():
        for _ in range(50):
            kernel(x)
            kernel(array)

    in_threads(work, work)
    assert array[0] == 150.0 and len(record.launches) == 100
    assert len({each.packed for each in record.launches}) == 1
    assert record.launches[0].parameters[-1] == np.float64(1.5).tobytes()
