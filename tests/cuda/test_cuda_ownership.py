"""Ownership on every exit of a launch: each export is given back once, each reference is back, no frame is lost."""

import contextlib
import gc
import sys
import weakref

import numpy as np
import pytest
from cuda_producers import ArrayInterface
from cuda_tensors import DeviceTensor
from launches import ExportedTensor, Interface, address, all_given_back, device_array, kernel_of, launch_cached

from fastexchange import CudaError


def company(package, size: int) -> list:
    """Arguments of every kind that native code reads."""
    at = address(package)
    makers = [
        lambda i: DeviceTensor((3,), data=at + 64 * i), lambda i: ExportedTensor((3,), data=at + 64 * i), lambda i: 10.5 + i,
        lambda i: (DeviceTensor((2, 2), data=at + 64 * i), 1000 + i), lambda i: 2**40 + i,
        lambda i: Interface(DeviceTensor((3,), data=at + 64 * i)),
        lambda i: device_array(package, DeviceTensor((3,), data=at + 64 * i)), lambda i: np.int16(300 + i),
    ]  # fmt: skip
    return [makers[i % len(makers)](i) for i in range(size)]


def lenders(package, size: int) -> list:
    """Arguments that cache entries read."""
    return [(DeviceTensor((3,), data=address(package) + 64 * i), 300 + i)[i % 4 == 3] for i in range(size)]


both_kinds = pytest.mark.parametrize("kind", [company, lenders])


@pytest.mark.parametrize("size", [1, 8])
@both_kinds
def test_launches(record, package, kind, size):
    arguments = kind(package, size)
    kernel = kernel_of(package, size)
    launcher = kernel[1, 32]
    named = {f"a{i}": value for i, value in enumerate(arguments)}
    with all_given_back(*arguments):
        launcher(*arguments)
    if kind is lenders:
        launch_cached(launcher, *arguments)

    def launch(times: int) -> None:
        for _ in range(times):
            launcher(*arguments)
            launcher(**named)
            launcher.explain(*arguments)

    launch(4)  # all that is compiled for them, and cache entries
    gc.collect()  # what compilation has left holds some
    nones = sys.getrefcount(None)
    with all_given_back(kernel, launcher, *arguments):
        launch(100)
    assert abs(sys.getrefcount(None) - nones) < 100, "of 200 that were returned; others use it, too"
    given = kernel[1, 32, 0]
    with all_given_back(*arguments, given, kernel):
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
    "in a tuple": lambda at: (1, (DeviceTensor((3,), data=at, device_type=1), 2)),
    "nothing of CUDA's": lambda at: Interface(DeviceTensor((3,), data=12345)),
}


@pytest.mark.parametrize("warm", [False, True])
@both_kinds
def test_refusals(record, package, kind, warm):
    """Whichever argument is to blame, the first, the middle or the last one."""
    arguments, launcher = kind(package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    for _ in range(4 * warm):
        launcher(*arguments)
    record.clear()
    for name, position in [(name, position) for name in CULPRITS for position in (0, 4, 7)]:
        culprit = CULPRITS[name](address(package))
        bad = [*arguments]
        bad[position] = culprit
        with all_given_back(launcher, culprit, *arguments, *bad):
            for attempt in (launcher, given) * 2:
                with pytest.raises(REFUSALS) as caught:
                    attempt(*bad)
            assert type(caught.value).__name__ in str(launcher.explain(*bad)) or name in ("another device", "no type")
            del caught
    assert record.launches == []
    launcher(*arguments)
    assert len(record.launches) == 1


@pytest.mark.parametrize("culprit", [None, 2**70, "text", *CULPRITS])
def test_a_hundred_interfaces_before_what_is_refused(record, package, kernels, culprit):
    """There are more of them than a call's frame has room for at first."""
    if isinstance(culprit, str) and culprit in CULPRITS:
        culprit = CULPRITS[culprit](address(package))
    interfaces = [ArrayInterface(record, stream=1) for _ in range(100)]
    kernels[2][1, 32](tuple(interfaces), 1)

    def attempt():
        for what in (kernels[2][1, 32], kernels[2].explain):
            with contextlib.suppress(Exception):
                what(tuple(interfaces), culprit)

    attempt()
    with all_given_back(*interfaces, *[each.said for each in interfaces]):
        attempt()
        kernels[2][1, 32](tuple(interfaces), 1)


@both_kinds
def test_errors_of_the_driver(stub, package, kind):
    arguments = kind(package, 8)
    launcher = kernel_of(package, 8)[1, 32]
    with all_given_back(*arguments):
        stub.fail("cuLaunchKernel", 1)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            launcher(*arguments)
    for _ in range(4):
        launcher(*arguments)
    launch = launcher.kernel[1, 32, 0].bind(*arguments)
    out = [value.exported - value.deleted for value in arguments if hasattr(value, "exported")]
    with_launch = [sys.getrefcount(value) for value in arguments]
    for call in (lambda: launcher(*arguments), launch, lambda: launcher(**{f"a{i}": v for i, v in enumerate(arguments)})):
        for failing in ("cuLaunchKernel", "cuCtxGetCurrent"):
            stub.fail(failing, 700)
            with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
                call()
        call()
    gc.collect()
    assert [value.exported - value.deleted for value in arguments if hasattr(value, "exported")] == out
    assert [sys.getrefcount(value) for value in arguments] == with_launch


def test_wrong_numbers_of_arguments(package):
    arguments = lenders(package, 3)
    launcher = kernel_of(package, 3)[1, 32]
    launch_cached(launcher, *arguments)
    wrong = [(arguments[:2], {}), ([*arguments, 1], {}), ([], {}), (arguments, {"a0": 1}), (arguments[:2], {"b": 1})]
    with all_given_back(launcher, *arguments):
        for bad, named in wrong * 20:
            with pytest.raises(TypeError):
                launcher(*bad, **named)


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

    kernel = kernel_of(package, 2)
    launcher = kernel[1, 32]
    x, array = Mine((3,), data=address(package)), device_array(package, DeviceTensor((3,), data=address(package)))
    launch_cached(launcher, x, 1)
    launcher(array, 1)
    launcher((x, array), 1)
    launch = launcher.bind(x, array)
    forall = kernel.forall(10)
    forall(x, 1)
    references = [weakref.ref(each) for each in (kernel, launcher, x, array, launch, forall)]
    del kernel, launcher, x, array, launch, forall, Mine
    gc.collect()
    assert [reference() for reference in references] == [None] * 6
