"""Ownership on every exit of a launch: each export is given back once, each reference is back, no frame is lost."""

import gc
import sys
import weakref

import numpy as np
import pytest
from cuda_checks import all_given_back, is_refused
from cuda_producers import ArrayInterface
from cuda_tensors import DeviceTensor
from launches import ExportedTensor, Interface, address, device_array, kernel_of, launch_cached

from fastexchange import CudaError


def company(record, package, size: int) -> list:
    """Arguments of every kind that native code reads."""
    at = address(package)
    makers = [
        lambda i: DeviceTensor((3,), data=at + 64 * i), lambda i: ExportedTensor((3,), data=at + 64 * i), lambda i: 10.5 + i,
        lambda i: (DeviceTensor((2, 2), data=at + 64 * i), 1000 + i), lambda i: 2**40 + i,
        lambda i: Interface(DeviceTensor((3,), data=at + 64 * i)),
        lambda i: device_array(package, DeviceTensor((3,), data=at + 64 * i)), lambda i: np.int16(300 + i),
    ]  # fmt: skip
    return [makers[i % len(makers)](i) for i in range(size)]


def lenders(record, package, size: int) -> list:
    return [(DeviceTensor((3,), data=address(package) + 64 * i), 300 + i)[i % 4 == 3] for i in range(size)]


def crowd(record, package, size: int) -> list:
    """More interfaces than a call's frame has room for at first, before the others."""
    return [tuple(ArrayInterface(record, stream=1) for _ in range(100)), *lenders(record, package, size)[1:]]


def parts(arguments) -> list:
    """The arguments, and what those of a crowd consist of."""
    items = [item for value in arguments if type(value) is tuple for item in value if type(item) is ArrayInterface]
    return [*arguments, *items, *[item.said for item in items]]


def named(arguments) -> dict:
    return {f"a{i}": value for i, value in enumerate(arguments)}


each_kind = pytest.mark.parametrize("kind", [company, lenders, crowd])


@pytest.mark.parametrize("size", [1, 8])
@each_kind
def test_launches(record, package, kind, size):
    arguments = kind(record, package, size)
    kernel = kernel_of(package, size)
    launcher = kernel[1, 32]
    with all_given_back(*parts(arguments)):
        launcher(*arguments)
    if kind is lenders:
        launch_cached(launcher, *arguments)

    def launch(times: int) -> None:
        for _ in range(times):
            launcher(*arguments)
            launcher(**named(arguments))
            launcher.explain(*arguments)

    launch(4)  # all that is compiled for them, and cache entries
    gc.collect()  # what compilation has left holds some
    nones = sys.getrefcount(None)
    with all_given_back(kernel, launcher, *parts(arguments)):
        launch(100)
    assert abs(sys.getrefcount(None) - nones) < 100, "of 200 that were returned; others use it, too"
    given = kernel[1, 32, 0]
    with all_given_back(*parts(arguments), given, kernel):
        launch = given.bind(*arguments)
        for _ in range(10):
            launch()
        launch.rebind(a0=arguments[0])
        del launch


REFUSALS = (BufferError, TypeError, ValueError, OverflowError, NotImplementedError)
CULPRITS = {  # test_cuda_refusals.py has more of them, each alone and beside one other
    "CPU": lambda at: DeviceTensor((3,), data=at, device_type=1),
    "exported from the CPU": lambda at: ExportedTensor((3,), data=at, device_type=1),
    "another device": lambda at: DeviceTensor((3,), data=at, device=2),
    "no type": lambda at: object(),
    "beyond 64 bits": lambda at: 2**70,
    "in a tuple": lambda at: (1, (DeviceTensor((3,), data=at, device_type=1), 2)),
    "nothing of CUDA's": lambda at: Interface(DeviceTensor((3,), data=12345)),
}


@pytest.mark.parametrize("warm", [False, True])
@each_kind
def test_refusals(record, package, kind, warm):
    arguments, launcher = kind(record, package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    for _ in range(4 * warm):
        launcher(*arguments)
    record.clear()
    for name, position in [(name, position) for name in CULPRITS for position in (kind is crowd, 4, 7)]:
        culprit = CULPRITS[name](address(package))
        bad = [*arguments]
        bad[position] = culprit
        with all_given_back(launcher, culprit, *parts(arguments), *bad):
            for attempt in (launcher, given) * 2:
                with pytest.raises(REFUSALS) as caught:
                    attempt(*bad)
            assert type(caught.value).__name__ in str(launcher.explain(*bad)) or name in ("another device", "no type")
            del caught
    assert record.launches == []
    launcher(*arguments)
    assert len(record.launches) == 1


@each_kind
def test_errors_of_the_driver(stub, package, kind):
    """Of a first launch, and of those by the cache entry, by keyword, and bound."""
    arguments, launcher = kind(stub, package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    ways = lambda: launcher(*arguments), lambda: launcher(**named(arguments)), lambda: given.bind(*arguments)()
    for calls, failing in ((ways[:1], "cuLaunchKernel"), (ways, "cuLaunchKernel"), (ways, "cuCtxGetCurrent")):
        with all_given_back(*parts(arguments), given, launcher):
            for call in calls:
                stub.fail(failing, 700)
                is_refused(call, CudaError, "ILLEGAL_ADDRESS")
        for call in ways * 2:
            call()


@pytest.mark.filterwarnings("ignore:Could not find source")
@pytest.mark.parametrize("options, others", [({"debug": True, "opt": False}, []), ({}, [np.zeros(3)])])
def test_the_packages_own_launches(package, options, others):
    arguments = [device_array(package, DeviceTensor((3,), data=address(package))), 2.5, *others]
    launcher = kernel_of(package, len(arguments), **options)[1, 32]
    for _ in range(3):
        launcher(*arguments)
    with all_given_back(launcher, *arguments):
        for _ in range(10):
            launcher(*arguments)


def test_what_is_freed(package):
    """Kernels, launchers, tensors and device arrays, after launches of every way; nothing knows them any more."""

    class Mine(DeviceTensor):
        __slots__ = ()

    class Stream:
        def __cuda_stream__(self):
            return 0, 2

    kernel, stream = kernel_of(package, 2), Stream()
    launcher, given = kernel[1, 32], kernel[1, 32, stream]
    x, array = Mine((3,), data=address(package)), device_array(package, DeviceTensor((3,), data=address(package)))
    launch_cached(launcher, x, 1)
    launcher(array, 1)
    launcher((x, array), 1)
    launch = launcher.bind(x, array)
    forall = kernel.forall(10)
    forall(x, 1)
    alive, *references = [weakref.ref(each) for each in (stream, kernel, launcher, x, array, launch, forall)]
    del stream
    gc.collect()
    assert alive() is not None, "it lives as long as its launcher"
    del kernel, launcher, x, array, launch, forall, given, Mine
    gc.collect()
    assert [reference() for reference in (alive, *references)] == [None] * 7
