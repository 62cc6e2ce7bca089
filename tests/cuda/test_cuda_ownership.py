"""Ownership on every exit of a launch: each export is given back once, each reference is back, no frame is lost."""

import contextlib
import gc
import sys
import weakref

import numpy as np
import pytest
from cuda_tensors import DeviceTensor
from launches import ExportedTensor, Interface, address, device_array, kernel_of, launch_fast

from fastexchange import CudaError
from fastexchange._abi import ffi
from fastexchange.dispatch.runtime import runtime

SIZES = (1, 3, 8)


def free_frames() -> int:
    """How many frames wait for a call."""
    count, at = 0, runtime().native.frames
    while at:
        count, at = count + 1, ffi.cast("fx_frame *", at).next
    return count


@contextlib.contextmanager
def all_given_back(*things):
    """After the block each of `things` has as many references as before, and no export of one is out."""
    tensors = [each for each in things if hasattr(each, "exported")]
    gc.collect()
    before, frames = [sys.getrefcount(each) for each in things], free_frames()
    yield
    gc.collect()
    assert [sys.getrefcount(each) for each in things] == before
    assert free_frames() >= frames, "fewer than before: one is lost"
    assert [each.exported - each.deleted for each in tensors] == [0] * len(tensors)


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
    """Arguments that fast entries read."""
    return [(DeviceTensor((3,), data=address(package) + 64 * i), 300 + i)[i % 4 == 3] for i in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [company, lenders])
def test_launches(record, package, kind, size):
    arguments = kind(package, size)
    kernel = kernel_of(package, size)
    launcher = kernel[1, 32]
    named = {f"a{i}": value for i, value in enumerate(arguments)}
    launcher(*arguments)
    if kind is lenders:
        launch_fast(launcher, *arguments)
    for _ in range(40):  # all that is compiled for them, a fast entry among it
        launcher(*arguments)
        launcher(**named)
        launcher.explain(*arguments)
    gc.collect()  # what compilation has left holds some
    nones = sys.getrefcount(None)
    with all_given_back(kernel, launcher, *arguments):
        for _ in range(100):
            launcher(*arguments)
            launcher(**named)
            launcher.explain(*arguments)
    assert abs(sys.getrefcount(None) - nones) < 100, "of 200 that were returned; others use it, too"
    fresh = kernel_of(package, size)[1, 32]
    with all_given_back(*arguments):
        fresh(*arguments)
    given = kernel[1, 32, 0]  # some of these producers may work on other streams, which a bound launch would not order
    with all_given_back(*arguments, given, kernel):
        launch = given.bind(*arguments)
        for _ in range(10):
            launch()
        launch.rebind(a0=arguments[0])
        del launch


REFUSALS = (BufferError, TypeError, ValueError, OverflowError, NotImplementedError)


CULPRITS = {
    "CPU": lambda at: DeviceTensor((3,), data=at, device_type=1),
    "exported from the CPU": lambda at: ExportedTensor((3,), data=at, device_type=1),
    "another device": lambda at: DeviceTensor((3,), data=at, device=2),
    "no device": lambda at: DeviceTensor((3,), data=at, device=7),
    "misaligned": lambda at: DeviceTensor((3,), data=at + 1),
    "NULL": lambda at: DeviceTensor((3,), data=0),
    "of no memory": lambda at: ExportedTensor((3,), data=0),
    "too many dimensions": lambda at: ExportedTensor((1,) * 65, data=at),
    "no type": lambda at: object(),
    "a big int": lambda at: 2**70,
    "in a tuple": lambda at: (1, (DeviceTensor((3,), data=at, device_type=1), 2)),
    "nothing of CUDA's": lambda at: Interface(DeviceTensor((3,), data=12345)),
}


@pytest.mark.parametrize("name", CULPRITS)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", [company, lenders])
def test_refusals(record, package, kind, name, warm):
    """Whichever argument is to blame, the first, the middle or the last one."""
    arguments, launcher = kind(package, 8), kernel_of(package, 8)[1, 32]
    given = launcher.kernel[1, 32, 0]
    for _ in range(24 * warm):
        launcher(*arguments)
    record.clear()
    for position in (0, 4, 7):
        culprit = CULPRITS[name](address(package))
        bad = [*arguments]
        bad[position] = culprit
        with all_given_back(launcher, culprit, *arguments, *bad):
            bound = given.bind(*arguments) if warm else None
            for attempt in (launcher, launcher.bind, given, given.bind) * 2:
                with pytest.raises(REFUSALS) as caught:
                    attempt(*bad)
            assert type(caught.value).__name__ in str(launcher.explain(*bad)) or name in ("another device", "no type")
            if bound is not None:
                with pytest.raises(REFUSALS):
                    bound.rebind(**{f"a{position}": culprit})
            del bound, caught
    assert record.launches == []
    launcher(*arguments)
    assert len(record.launches) == 1


@pytest.mark.parametrize("kind", [company, lenders])
def test_errors_of_the_driver(stub, package, kind):
    arguments = kind(package, 8)
    launcher = kernel_of(package, 8)[1, 32]
    with all_given_back(*arguments):
        stub.fail("cuLaunchKernel", 1)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            launcher(*arguments)
    for _ in range(24):
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
    launch_fast(launcher, *arguments)
    with all_given_back(launcher, *arguments):
        for _ in range(20):
            for bad in (arguments[:2], [*arguments, 1], []):
                with pytest.raises(TypeError):
                    launcher(*bad)
            with pytest.raises(TypeError):
                launcher(*arguments, a0=1)
            with pytest.raises(TypeError):
                launcher(*arguments[:2], b=1)


@pytest.mark.filterwarnings("ignore:Could not find source")
@pytest.mark.parametrize("own", ["host array", "debug"])
def test_the_packages_own_launches(package, own):
    arguments = [device_array(package, DeviceTensor((3,), data=address(package))), 2.5]
    options = {"debug": True, "opt": False} if own == "debug" else {}
    if own == "host array":
        arguments.append(np.zeros(3))
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
    launch_fast(launcher, x, 1)
    launcher(array, 1)
    launcher((x, array), 1)
    launch = launcher.bind(x, array)
    forall = kernel.forall(10)
    forall(x, 1)
    references = [weakref.ref(each) for each in (kernel, launcher, x, array, launch, forall, kernel.dispatcher, Mine)]
    del kernel, launcher, x, array, launch, forall, Mine
    gc.collect()
    assert [reference() for reference in references[:6]] == [None] * 6
