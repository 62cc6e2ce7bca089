"""Resets of a device's context: by ``cuda.close()``, by the device, by its context, by the other package, by the driver.

The driver stub, as the driver, keeps the context's handle, and refuses those of what has been in it. Each in its own process.
"""

import functools
import importlib

import numpy as np
import pytest
from children import at_once
from cuda_checks import check_order, is_refused, launched, new_stream
from cuda_tensors import DeviceTensor, OtherTensor
from stub_processes import PACKAGES, is_installed, run_package

from fastexchange import CudaError, fast_args

pytestmark = pytest.mark.both_packages
cuda = stub = None  # where a scene runs
RESETS = lambda: cuda.close(), lambda: cuda.get_current_device().reset(), lambda: cuda.current_context().reset()


def begin(loaded, package) -> None:
    """Make a context of the first of two devices."""
    global cuda, stub
    cuda, stub = package, loaded
    stub.set_devices(2)
    cuda.device_array(1, "f4")


def tensor(cls=DeviceTensor, device=0):
    return cls((4,), "float32", data=stub.allocate(64, device), device=device)


def kernel(count: int, *signature):
    return fast_args(cuda.jit(*signature)((lambda: None, lambda x: None, lambda x, y: None)[count]))


def made(launch, *arguments, times: int = 1) -> int:
    """The function of a launch that the driver has taken, with handles that it has: it looks at them."""
    return [launched(stub, launch, *arguments).function for _ in range(times)][-1]


def refused(launch, kind, text) -> None:
    before = len(stub.launches)
    is_refused(launch, kind, text)
    assert len(stub.launches) == before


# ---- scenes ----------------------------------------------------------------------------------------------------------
def launches_afterwards():
    """General ones, cache entries, launches for tasks, with shared memory, without tensors, declared ones, and of old arrays."""
    one, none, big = kernel(1), kernel(0), kernel(1)
    fast = one[1, 32]
    launches = [fast, big.forall(100), big[1, 32, None, 60000], kernel(1, "void(float32[::1])")[1, 32]]

    def launch():
        array = cuda.to_device(np.ones(4, "f4"))
        for value in (array, tensor()):
            for each in launches:
                made(each, value, times=6)
        made(none[1, 1])
        return array

    old = launch()
    slow = one.counts().slow
    for reset in RESETS:
        reset()
        refused(functools.partial(fast, old), BufferError, "is not in CUDA's memory")
        old = launch()
    assert one.counts().compiled == 1 and len(one.signatures) == 1
    assert one.counts().slow <= slow + 15  # each reset costs a look, not each launch


def launchers_with_streams_end():
    one, two = kernel(1), kernel(2)
    default = one[1, 32, 2]
    for reset in RESETS:
        x = cuda.to_device(np.ones(4, "f4"))
        two[1, 32](tensor(), tensor(OtherTensor))
        bound, own, tasks = one[1, 32].bind(x), one[1, 32, new_stream()], one.forall(9, 0, new_stream())
        made(bound, times=3)
        for launch in (own, tasks, default):
            made(launch, x, times=6)
        reset()
        y = tensor()
        for _ in range(2):  # also when the kernel has been loaded anew
            refused(bound, BufferError, "is not in CUDA's memory")
            for launch in (own, tasks):
                for way in (launch, launch.bind, launch.explain):
                    refused(functools.partial(way, y), CudaError, "has been reset since")
            made(one[1, 32], y)
        made(default, y)
        handle = new_stream()
        again = one[1, 32, handle]
        made(again, y, times=6)
        assert again is one[1, 32, handle] and again is not own
        made(bound.rebind(x=y), times=3)
        DeviceTensor.streams[0], OtherTensor.streams[0] = new_stream(), new_stream()
        stub.clear()
        two[1, 32](tensor(), tensor(OtherTensor))
        check_order(stub, DeviceTensor.streams[0], [OtherTensor.streams[0]])
        DeviceTensor.streams[0] = OtherTensor.streams[0] = 0


def by_the_driver():
    """Nobody says so but the driver, of a launch: the one after it is made."""
    from cuda.bindings import driver as bindings

    none, fast = kernel(0), kernel(1)[1, 32]
    for is_reset in (False, True):
        if is_reset:
            assert not int(bindings.cuDevicePrimaryCtxReset(0)[0])
            refused(none[1, 1], CudaError, "CONTEXT_IS_DESTROYED")
        made(none[1, 1])
        for _ in range(4):
            made(fast, cuda.to_device(np.ones(4, "f4")))


def by_the_other_package():
    (other,) = (importlib.import_module(name) for name in PACKAGES if name != cuda.__name__)
    other.current_context()
    fast = kernel(1)[1, 32]
    for _ in range(2):
        made(fast, tensor(), times=6)
        array = other.to_device(np.ones(4, "f4"))  # made after the kernel was loaded
        made(fast, array)
        other.get_current_device().reset()
        refused(lambda: fast(array), BufferError, "is not in CUDA's memory")  # noqa: B023
    made(fast, tensor())


def of_another_device_or_by_another_thread():
    """Tensors of a device that is not reset are as good as before; ``close()`` in another thread resets nothing."""
    one, x, y = kernel(1), tensor(), tensor(device=1)
    fast = one[1, 32]
    here, there = made(fast, x, times=4), made(fast, y, times=4)
    slow = one.counts().slow
    at_once(cuda.close)
    assert (made(fast, x), made(fast, y), one.counts().slow) == (here, there, slow)
    cuda.gpus[1].reset()
    for _ in range(4):
        made(fast, x)
        made(fast, tensor(device=1))
    assert one.counts().slow <= slow + 4


def two_threads_that_begin_at_once_are_no_reset():
    """Each finds no witness in the context's list of modules: one of the two is put there, and the other's end means nothing."""
    from fastexchange.cuda import resets

    device = cuda.get_current_device().primary_context
    # As the list looks to a thread that another one overtakes.
    Late = type("Late", (type(device.modules),), {"__contains__": lambda self, name: False})
    nothing = kernel(1)[1, 1]
    made(nothing, tensor())
    before, handle = resets.count(), made(nothing, tensor())
    device.modules = Late(device.modules)
    witness = dict(device.modules)["fastexchange"]
    resets.watch(0)
    assert resets.count() == before and dict(device.modules)["fastexchange"] is witness
    assert made(nothing, tensor()) == handle


def at_the_end_of_the_process():
    """Nothing is said of a context that ends with its process, or of a reset in an exit function."""
    import atexit

    atexit.register(cuda.close)
    made(kernel(1)[1, 32], tensor())
    print("end")


@pytest.mark.parametrize("scene", [
    launches_afterwards, launchers_with_streams_end, by_the_driver, by_the_other_package,
    of_another_device_or_by_another_thread, two_threads_that_begin_at_once_are_no_reset, at_the_end_of_the_process,
], ids=lambda scene: scene.__name__)  # fmt: skip
@pytest.mark.slow
def test_resets(package, scene):
    if scene is by_the_other_package and not all(map(is_installed, PACKAGES)):
        pytest.skip("one package is not installed")
    is_end = scene is at_the_end_of_the_process
    code = f"import test_cuda_resets as tests\ntests.begin(stub, cuda)\ntests.{scene.__name__}()"
    assert run_package(code, package, exits=is_end) == "end\n" * is_end
