"""Resets of a device's context: by ``cuda.close()``, by the device, by its context, by the other package, by the driver.

Afterwards no launch may use what was in the context: the driver stub, as the driver, keeps the handle of the context and
refuses those of what has been in it. Each in a process of its own, for a reset takes everything away.
"""

import pytest
from stub_processes import run_package

pytestmark = pytest.mark.both_packages

RESETS = {
    "close": "cuda.close()",
    "the device's": "cuda.get_current_device().reset()",
    "the context's": "cuda.current_context().reset()",
}
DRIVER = "from cuda.bindings import driver as bindings; assert not int(bindings.cuDevicePrimaryCtxReset(0)[0])"

_BEGIN = """
import importlib
from cuda_producers import new_stream as stream
stub.set_devices(2)

def tensor(cls=DeviceTensor, device=0):
    return cls((4,), "float32", data=stub.allocate(64, device), device=device)

def refused(launch, kind, text):
    before = len(stub.launches)
    try:
        launch()
    except kind as error:
        assert type(error) is kind and text in str(error), repr(error)
    else:
        raise AssertionError("it was launched")
    assert len(stub.launches) == before

def made(launch, *arguments):
    "A launch that the driver has taken, with these parameters and a handle that it has: it looks at both."
    before = len(stub.launches)
    launch(*arguments)
    assert len(stub.launches) == before + 1
    return stub.launches[-1].function

def kernel(function, *signature, **options):
    return fast_args(cuda.jit(*signature, **options)(function))

def reset():
    RESET

cuda.device_array(1, "f4")  # makes a context
"""


def run(package, reset: str, code: str) -> str:
    return run_package(_BEGIN.replace("RESET", reset) + code, package)


@pytest.mark.parametrize("name", RESETS)
def test_launches_afterwards(package, name):
    """General ones, fast entries, launches for tasks, with shared memory, without tensors, declared ones, and of old arrays."""
    run(package, RESETS[name], """
old = cuda.to_device(np.ones(4, "f4"))
one, none, big = kernel(lambda x: None), kernel(lambda: None), kernel(lambda x: None)
declared = kernel(lambda x: None, "void(float32[::1])")
fast, tasks, shared = one[1, 32], big.forall(100), big[1, 32, None, 60000]
for value in (old, tensor()):
    for launch in (fast, tasks, shared, declared[1, 32]):
        for _ in range(24):
            before = made(launch, value)
made(none[1, 1])
slow = one.counts().slow
for _ in range(2):
    reset()
    refused(lambda: fast(old), BufferError, "is not in CUDA's memory")
    new = cuda.to_device(np.ones(4, "f4"))
    for value in (new, tensor()):
        for launch in (fast, tasks, shared, declared[1, 32]):
            for _ in range(24):
                made(launch, value)
    made(none[1, 1])
    old = new
assert one.counts().compiled == 1 and len(one.signatures) == 1
assert one.counts().slow <= slow + 10  # each reset costs a look, not each launch
""")


@pytest.mark.parametrize("name", RESETS)
def test_bound_launches_and_launchers_with_streams_end(package, name):
    run(package, RESETS[name], """
one, two, x = kernel(lambda x: None), kernel(lambda x, y: None), cuda.to_device(np.ones(4, "f4"))
two[1, 32](tensor(), tensor(OtherTensor))
bound, own = one[1, 32].bind(x), one[1, 32, stream()]
own_bound, tasks = own.bind(x), one.forall(9, 0, stream())
default = one[1, 32, 2]
for launch in (bound, own_bound):
    for _ in range(3):
        made(launch)
for launch in (own, tasks, default):
    for _ in range(24):
        made(launch, x)
reset()
y = tensor()
for _ in range(2):  # also when the kernel has been loaded anew
    for launch in (bound, own_bound):
        refused(launch, CudaError, "has been reset since")
    for launch in (own, tasks):
        refused(lambda: launch(y), CudaError, "has been reset since")
        refused(lambda: launch.bind(y), CudaError, "has been reset since")
        refused(lambda: launch.explain(y), CudaError, "has been reset since")
    made(one[1, 32], y)
made(default, y)
handle = stream()
again = one[1, 32, handle]
for _ in range(24):
    made(again, y)
assert again is one[1, 32, handle] and again is not own
renewed = one[1, 32].bind(y)
for _ in range(3):
    made(renewed)
made(bound.rebind(x=y))
made(bound)
for _ in range(2):  # producers on different streams are ordered afterwards, too
    DeviceTensor.streams[0], OtherTensor.streams[0] = stream(), stream()
    stub.clear()
    two[1, 32](tensor(), tensor(OtherTensor))
    names = [entry.api for entry in stub.log if "Event" in entry.api or "Launch" in entry.api]
    assert len(names) == 5 and names[2].startswith("cuLaunch"), names
    DeviceTensor.streams[0] = OtherTensor.streams[0] = 0
    reset()
""")


def test_by_the_driver(package):
    """Nobody says so but the driver, of a launch: the one after it is made."""
    run(package, DRIVER, """
one, none = kernel(lambda x: None), kernel(lambda: None)
fast, bound = one[1, 32], one[1, 32].bind(cuda.to_device(np.ones(4, "f4")))
for _ in range(24):
    made(fast, cuda.to_device(np.ones(4, "f4")))
made(bound), made(none[1, 1])
reset()
refused(bound, CudaError, "CONTEXT_IS_DESTROYED")
refused(bound, CudaError, "has been reset since")
made(none[1, 1])
for _ in range(24):
    made(fast, cuda.to_device(np.ones(4, "f4")))
""")


def test_by_the_other_package(package):
    """The context is the device's, whoever uses it."""
    pytest.importorskip("numba_cuda")
    pytest.importorskip("numba_cuda_mlir")
    other = {"numba.cuda": "numba_cuda_mlir.cuda", "numba_cuda_mlir.cuda": "numba.cuda"}[package.__name__]
    reset = f"other = importlib.import_module({other!r}); other.get_current_device().reset()"
    run(package, reset, f"other = importlib.import_module({other!r})" + """
one = kernel(lambda x: None)
other.current_context()
fast = one[1, 32]
for _ in range(24):
    made(fast, tensor())
bound = fast.bind(tensor())
reset()
refused(bound, CudaError, "has been reset since")
for _ in range(24):
    made(fast, tensor())
# and an array of the other's, made after the kernel was loaded
array = other.to_device(np.ones(4, "f4"))
made(fast, array)
reset()
refused(lambda: fast(array), BufferError, "is not in CUDA's memory")
made(fast, tensor())
""")


def test_of_another_device_or_by_another_thread(package):
    """Tensors of a device that is not reset are as good as before; ``close()`` in another thread resets nothing."""
    run(package, "cuda.gpus[1].reset()", """
import threading
one, x, y = kernel(lambda x: None), tensor(), tensor(device=1)
fast = one[1, 32]
for _ in range(24):
    here = made(fast, x)
    there = made(fast, y)
slow = one.counts().slow
thread = threading.Thread(target=cuda.close)
thread.start(), thread.join()
assert made(fast, x) == here and made(fast, y) == there and one.counts().slow == slow
reset()
for _ in range(24):
    made(fast, x), made(fast, tensor(device=1))
assert one.counts().slow <= slow + 4
""")


def test_two_threads_that_begin_at_once_are_no_reset(package):
    """Each finds no witness in the context's list of modules: one of the two is put there, and the other's end means nothing."""
    run(package, "pass", """
import threading
from fastexchange.cuda import resets

class Late(type(cuda.current_context().modules)):
    "As the list looks to a thread that another one overtakes."
    def __contains__(self, name):
        return False

context = cuda.current_context()
@kernel
def nothing(x):
    pass
made(nothing[1, 1], tensor())
before, handle = resets.count(), made(nothing[1, 1], tensor())
device = cuda.get_current_device().primary_context
device.modules = Late(device.modules)
witness = dict(device.modules)["fastexchange"]
resets.watch(0)
assert resets.count() == before and dict(device.modules)["fastexchange"] is witness
assert made(nothing[1, 1], tensor()) == handle
""")


def test_at_the_end_of_the_process(package):
    """Nothing is said of a context that ends with its process, or of a reset in an exit function."""
    assert run(package, "cuda.close()", """
import atexit
atexit.register(reset)
one = kernel(lambda x: None)
made(one[1, 32], tensor())
print("end")
""") == "end\n"
