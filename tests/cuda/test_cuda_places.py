"""Where a launch goes: to which device and stream, in whose context; what orders it among several producers; what it calls."""

import ctypes
import functools
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from children import at_once
from cuda_checks import both_ways, check_order, launched, new_stream, ordered, traced
from cuda_producers import FAILURES, HOST, MANAGED, ArrayInterface, Exports, FailingTensor
from cuda_tensors import DeviceTensor, OtherTensor
from launches import Interface, launch_cached
from made_producers import Ledger, Wrapper
from stub_processes import PACKAGES, run_package

from fastexchange.cuda.driver import driver


class World:
    def __init__(self, stub, package):
        self.stub, self.ledger = stub, Ledger()
        self.pinned, self.managed = package.pinned_array(4, np.float32), package.managed_array(4, np.float32)
        self.streams = {
            (name, device): new_stream(device)
            for name, device in [("mine", 0), ("mine", 1), ("mine", 2), ("other's", 0), ("array's", 0), ("given", 0)]
        } | {("default", device): 0 for device in range(3)}  # fmt: skip
        for device in range(3):
            DeviceTensor.streams[device] = self.streams["mine", device]
        OtherTensor.streams[0] = self.streams["other's", 0]

    def mine(self, device=0, cls=DeviceTensor, **options):
        return cls((4,), device=device, **options)

    def other(self):
        return self.mine(cls=OtherTensor)

    def array(self, stream="array's", device=0, **said):
        return ArrayInterface(self.stub, device=device, stream=stream and self.streams[stream, device], **said)

    def exports(self, **options):
        return Exports(self.ledger, **options)


@pytest.fixture
def world(stub, package):
    return World(stub, package)


CURRENT = "the thread's"
# the arguments; the stream that is given; the device and the stream of the launch, and those that events order it with
WHERE = {
    "a tensor": (lambda w: [w.mine()], None, 0, "mine", []),
    "a tensor of another device": (lambda w: [w.mine(2)], None, 2, "mine", []),
    "a tensor in tuples": (lambda w: [(3, (w.mine(1), 1))], None, 1, "mine", []),
    "a wrapper": (lambda w: [Wrapper(w.mine(1))], None, 1, "mine", []),
    "wrappers of wrappers": (lambda w: [(3, Wrapper(Wrapper(w.mine()))), w.other()], None, 0, "mine", ["other's"]),
    "nothing": (lambda w: [], None, CURRENT, "default", []),
    "numbers": (lambda w: [2.5, np.int16(3)], None, CURRENT, "default", []),
    "pinned memory, whose number means nothing": (lambda w: [w.mine(63, device_type=HOST)], None, CURRENT, "mine", []),
    "managed memory": (lambda w: [w.mine(2, device_type=MANAGED)], None, 2, "mine", []),
    "pinned and managed memory beside a tensor": (
        lambda w: [w.mine(-1, device_type=HOST), w.mine(2), w.mine(1, device_type=MANAGED)], None, 2, "mine", []),
    "and before it": (lambda w: [w.mine(1, device_type=MANAGED), w.mine(2)], None, 2, "mine", []),
    "managed memory of another device beside another producer": (
        lambda w: [w.mine(1, device_type=MANAGED), w.other()], None, 0, "mine", ["other's"]),
    "and after it": (lambda w: [w.other(), w.mine(1, device_type=MANAGED)], None, 0, "other's", ["mine"]),
    "two producers": (lambda w: [w.mine(), w.other()], None, 0, "mine", ["other's"]),
    "two producers, swapped": (lambda w: [w.other(), w.mine()], None, 0, "other's", ["mine"]),
    "three": (lambda w: [w.mine(), w.other(), w.array()], None, 0, "mine", ["other's", "array's"]),
    "three, the array first": (lambda w: [w.array(), w.mine(), w.other()], None, 0, "array's", ["mine", "other's"]),
    "three in a tuple": (lambda w: [(w.other(), w.array(), w.mine())], None, 0, "other's", ["array's", "mine"]),
    "a stream that is given wins": (lambda w: [w.mine(), w.other()], "given", 0, "given", []),
    "but waits for arrays": (lambda w: [w.mine(), w.array(), w.array()], "given", 0, "given", ["array's"]),
    "unless it is theirs": (lambda w: [w.mine(), w.array()], "array's", 0, "array's", []),
    "an array": (lambda w: [w.array()], None, 0, "array's", []),
    "arrays of one stream": (lambda w: [w.array(), w.array()], None, 0, "array's", []),
    "arrays of two streams": (lambda w: [w.array(), w.array("given")], None, 0, "array's", ["given"]),
    "an array that names no stream": (lambda w: [w.array(None)], None, 0, "default", []),
    "an array that names none before one that does": (lambda w: [w.array(None), w.array()], None, 0, "array's", []),
    "an array of another device": (lambda w: [w.array(None, 2), (1, w.array(None, 2))], None, 2, "default", []),
    "an array without elements": (lambda w: [w.array(None, shape=(0,), data=0), w.mine(2)], None, 2, "mine", []),
    "an array without elements, alone": (lambda w: [w.array(None, shape=(0,), data=0)], None, CURRENT, "default", []),
    "an array of pinned memory beside a tensor": (
        lambda w: [w.array(None, data=w.pinned.ctypes.data), w.mine(2)], None, 2, "mine", []),
    "an array of managed memory beside a tensor": (
        lambda w: [w.array(None, data=w.managed.ctypes.data), w.mine(2)], None, 2, "mine", []),
    "an array of pinned memory, which somebody fills": (
        lambda w: [w.mine(), w.array(data=w.pinned.ctypes.data)], None, 0, "mine", ["array's"]),
    "pinned memory, on a stream": (
        lambda w: [w.mine(), w.array(data=w.pinned.ctypes.data)], "given", 0, "given", ["array's"]),
    "an export": (lambda w: [w.exports()], None, 0, "default", []),
    "an export on a stream": (lambda w: [w.exports()], "given", 0, "given", []),
    "an export of pinned memory, which has no stream": (
        lambda w: [w.exports(device_type=HOST)], None, CURRENT, "default", []),
    "an export beside a tensor": (lambda w: [w.exports(), w.mine()], None, 0, "mine", []),
    "an export beside an array": (lambda w: [w.exports(), w.array()], None, 0, "array's", []),
    "an export after an array": (lambda w: [w.array(), w.exports()], None, 0, "array's", []),
}  # fmt: skip


@pytest.mark.parametrize("name", WHERE)
def test_where_a_launch_goes(stub, kernels, world, name):
    """By position, also by the cache entry, by keyword, for tasks, and bound; the thread's context, if any, is as before."""
    make, given, device, stream, others = WHERE[name]
    arguments = make(world)
    kernel, given = kernels[len(arguments)], given and world.streams[given, 0]
    exports = [each for each in arguments if isinstance(each, Exports)]
    is_native = not (exports or others or "wrapper" in name or "without elements" in name)
    ways = [
        functools.partial(kernel[1, 32, given], *arguments),
        functools.partial(kernel[1, 32, given], **dict(zip("xyz", arguments, strict=False))),
        functools.partial(kernel.forall(9, 0, given), *arguments),
    ]
    both_ways(ways[0])
    bound = kernel[1, 32, given].bind(*arguments)

    def check(current: int) -> None:
        where = current if device is CURRENT else device
        own = world.streams[stream, where]
        before = stub.current_context()
        for launch in (*ways, bound):
            launch()
            stub.clear()
            counted = kernel.counts()
            launch()
            (made,) = stub.launches
            assert (made.device, made.context, made.stream) == (where, stub.primary_context(where), own)
            check_order(stub, own, [world.streams[other, where] for other in others])
            assert stub.current_context() == before
            assert all(each.told[-1] == (None if each.device[0] == HOST else own or 1) for each in exports)
            assert launch is bound or (kernel.counts().fast == counted.fast + 1) is is_native

    at_once(lambda: check(0))  # which begins without a context
    for current in (0, 1):
        with driver().on(current):
            check(current)
    world.ledger.check(world.ledger.made)


def test_the_tensors_are_asked_in_each_launch(stub, kernels, world):
    bound = kernels[1][1, 32].bind(DeviceTensor((4,)))
    for i in range(24):
        device = 0 if i < 12 else i % 3
        DeviceTensor.streams[device] = stream = world.streams[("mine", "given")[i % 2 if i < 12 else 0], device]
        made = launched(stub, kernels[1][1, 32], DeviceTensor((4,), device=device))
        assert (made.device, made.stream) == (device, stream)
        assert device != 0 or launched(stub, bound).stream == stream


ONE, OTHER = ("mine", 0), ("other's", 0)
PAIRS = [  # an interface's stream, one that is given or a tensor's, and whether they are the same
    (ONE, ONE, True), (1, 0, True), (1, 1, True), (None, ONE, True), (2, 2, True),
    (ONE, OTHER, False), (1, ONE, False), (ONE, 0, False), (2, 1, False),
]  # fmt: skip


@pytest.mark.parametrize("is_given", [True, False], ids=["a stream that is given", "a tensor's stream"])
def test_names_of_streams(stub, kernels, world, is_given):
    """A launch of an array whose stream has other names, or is another: only of the same is it native, and without events."""
    for own, stream, are_one in PAIRS:
        own, stream = world.streams.get(own, own), world.streams.get(stream, stream)
        arguments, given, kernel = [ArrayInterface(stub, stream=own)], stream, kernels[1]
        if not is_given:
            DeviceTensor.streams[0] = stream
            arguments, given, kernel = [DeviceTensor((4,)), *arguments], None, kernels[2]
        kernel[1, 32, given](*arguments)
        before = kernel.counts().fast
        stub.clear()
        kernel[1, 32, given](*arguments)
        assert (kernel.counts().fast > before) is are_one, (own, stream)
        check_order(stub, stream, [] if are_one else [own])


def new_context(device: int):
    """One that is not primary, which is then the current one."""
    bindings = driver().bindings
    try:
        error, context = bindings.cuCtxCreate(bindings.CUctxCreateParams(), 0, device)
    except TypeError:  # before CUDA 13
        error, context = bindings.cuCtxCreate(0, device)
    assert not int(error)
    return context


def test_a_context_that_is_not_primary(stub, kernels):
    for device in (0, 1):
        context = new_context(device)
        try:
            for launch, there in [
                (kernels[0][1, 32], device), (lambda: kernels[1][1, 32](2), device),
                *[(functools.partial(kernels[1][1, 32], DeviceTensor((4,), device=there)), there) for there in (device, 2)],
            ]:  # fmt: skip
                made = launched(stub, launch)
                assert (made.device, made.context) == (there, stub.primary_context(there))
            assert stub.current_context() == int(context)
        finally:
            driver().bindings.cuCtxDestroy(context)


def test_tensors_on_different_devices_are_refused(stub, kernels):
    first, second = DeviceTensor((4,)), DeviceTensor((4,), device=1)
    for each in (first, second):
        both_ways(functools.partial(kernels[2][1, 32], each, each))
    DeviceTensor.streams[0], OtherTensor.streams[1] = new_stream(0), new_stream(1)
    other, array = OtherTensor((4,), device=1), ArrayInterface(stub, device=1, stream=OtherTensor.streams[1])
    exports = Exports(Ledger(), device=1)
    for value in (second, other, array, exports, (3, second), (array, second)):
        with traced(stub) as calls:
            with pytest.raises(BufferError, match=r"'y' \(position 1\).*kDLCUDA:1.*kDLCUDA:0"):
                kernels[2][1, 32](first, value)
            with pytest.raises(BufferError, match=r"kDLCUDA:0.*kDLCUDA:1"):
                kernels[2][1, 32](value, first)
        assert not {"cuEventRecord", "cuLaunchKernel", "cuEventCreate"} & set(calls)
    exports.ledger.check(0)


@pytest.mark.both_packages
def test_a_launch_of_the_packages_own_is_ordered_too(stub, kernels, world, package):
    """Of tensors that the packages themselves understand."""
    dates = package.to_device(np.zeros(4, "M8[s]"))
    x, y = (type("Both", (cls,), {})((4,), data=stub.allocate(16)) for cls in (DeviceTensor, OtherTensor))
    for each in (x, y):
        type(each).__cuda_array_interface__ = Interface(each).__cuda_array_interface__
    mine, other, third, given = (world.streams[name, 0] for name in ("mine", "other's", "array's", "given"))
    kernels[2][1, 32](dates, x)
    kernels[2][1, 32, given](dates, x)
    assert [each.stream for each in stub.launches] == [mine, given]
    for arguments, own, waits in (((x, y), mine, other), ((y, world.array()), other, third)):
        stub.clear()
        kernels[3][1, 32](dates, *arguments)
        assert [each.stream for each in stub.launches] == [own]
        done = iter([("launch" if each.launch >= 0 else each.api, each.stream) for each in stub.log])
        for api, stream in ordered(own, [waits]):  # the package adds events of its own
            assert ("launch" if "Launch" in api else api, stream) in done


# ---- in processes of their own ---------------------------------------------------------------------------------------
_ARCHITECTURES = """
stub.set_devices(3)
stub.set_capability(1, 8, 0)
kernel = fast_args(cuda.jit(lambda x: None))
for device in (0, 1, 2, 1, 0):
    for _ in range(4):
        kernel[1, 32](DeviceTensor((4,), device=device))
print([each.device for each in stub.launches][::4], len({each.function for each in stub.launches}))
"""
# The packages do not: they make the new one's current instead of one that is not primary.
_CONTEXT = """
from test_cuda_places import new_context
stub.set_devices(3)
cuda.current_context()
context = new_context(0)
for device in (2, 1, 0):
    fast_args(cuda.jit(lambda x: None))[1, 32](DeviceTensor((4,), device=device))
    print(stub.current_context() == int(context), stub.launches[-1].device)
"""
@pytest.mark.slow
@pytest.mark.both_packages
@pytest.mark.parametrize("code, said", [(_ARCHITECTURES, "[0, 1, 2, 1, 0] 3\n"), (_CONTEXT, "True 2\nTrue 1\nTrue 0\n")],
                         ids=["a kernel for each architecture", "the first use leaves the current context"])  # fmt: skip
def test_of_several_devices(package, code, said):
    assert run_package(code, package) == said


# ---- streams that are given, and producers that cannot tell theirs ----
def _says(said):
    return SimpleNamespace(__cuda_stream__=lambda: said)


def _torch(handle):
    return SimpleNamespace(cuda_stream=handle)


KINDS = {
    "__cuda_stream__": lambda handle: _says((0, handle)),
    "__cuda_stream__, a property": lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)), "torch": _torch,
    "cupy": lambda handle: SimpleNamespace(ptr=handle), "int": int, "numpy int": np.int64,
    "CUstream": lambda handle: driver().bindings.CUstream(handle), "c_void_p": ctypes.c_void_p,
    "handle, a c_void_p": lambda handle: SimpleNamespace(handle=ctypes.c_void_p(handle)),
    "cuda.core": lambda handle: pytest.importorskip("cuda.core").Stream.from_handle(handle),
    **{package: lambda handle, package=package, module=module: (
        pytest.importorskip(package) and importlib.import_module(module).external_stream(handle))
       for module, package in PACKAGES.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_given_wins(record, stub_or_none, kernels, kind):
    handle = new_stream()
    DeviceTensor.streams[0] = new_stream()
    stream = KINDS[kind](handle)
    for launcher in (kernels[1][1, 32, stream], kernels[1].forall(5, 0, stream)):
        launch_cached(launcher, DeviceTensor((4,)))
    seen = record.launches if stub_or_none is None else stub_or_none.log
    assert {(each.api, each.stream) for each in seen} == {("cuLaunchKernel", handle)}


@pytest.mark.both_packages
@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_can_be_given(record, kernels, package, handle):
    DeviceTensor.streams[0] = new_stream()
    made = [package.default_stream, package.legacy_default_stream, package.per_thread_default_stream][handle]()
    for stream in (handle, made, _torch(handle), _says((0, handle)), ctypes.c_void_p(handle)):
        assert launched(record, kernels[1][1, 32, stream], DeviceTensor((4,))).stream == handle


_PER_THREAD = """
class Framework:
    cuda_stream = 0

def empty(x):
    pass

x, mine, framework = cuda.device_array(3), DeviceTensor((4,)), Framework()
own, kernel, debug = cuda.jit(empty), fast_args(cuda.jit(empty)), fast_args(cuda.jit(debug=True, opt=False)(empty))
made = cuda.default_stream(), cuda.legacy_default_stream(), cuda.per_thread_default_stream()

def streams(launcher, argument):
    stub.clear()
    for _ in range(4):
        launcher(argument)
    return sorted({each.stream for each in stub.launches})

print(streams(kernel[1, 32], x), streams(kernel[1, 32], 7), streams(kernel[1, 32, 0], mine))
print(*[streams(kernel[1, 32, stream], mine) for stream in (None, framework, 1)])
print(*[streams(kernel[1, 32, stream], mine) for stream in made])
print(streams(debug[1, 32], x), streams(debug[1, 32, framework], x))
if cuda.__name__ == "numba.cuda":  # the other's own launcher does not ask
    print(streams(own[1, 32], x))
stub.clear()
OtherTensor.streams[0] = 2
fast_args(cuda.jit(lambda x, y: None))[1, 32](mine, OtherTensor((4,)))
for each in stub.log:
    if each.api in ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"):
        print(each.api, each.stream)
"""


@pytest.mark.slow
@pytest.mark.both_packages
def test_where_each_thread_has_a_default_stream_of_its_own(package):
    """Then it is that of launches without a producer's, and of the number 0; a framework's 0 still is the legacy one."""
    said = run_package(_PER_THREAD, package, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")
    lines = said.splitlines()
    assert lines[:4] == ["[2] [2] [2]", "[0] [0] [1]", "[2] [1] [2]", "[2] [1]"]
    assert package.__name__ != "numba.cuda" or lines.pop(4) == "[2]"
    assert lines[4:] == ["cuEventRecord 2", "cuStreamWaitEvent 1", "cuLaunchKernel 0", "cuEventRecord 1", "cuStreamWaitEvent 2"]


BAD = {
    "(stream|handle)": [True, np.True_, 1.0, np.float32(3), 1j, "1", b"1", object(), [1], -1, 2**63, 2**64, _says((0, -1)),
                        _torch("x"), _torch(1.0)],
    "version 1, only version 0": [_says((1, 0))], r"is .*, not \(0, handle\)": [_says(3), _says((0, 1, 2))],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_stream_is_refused(kernels, message):
    for stream in BAD[message]:
        with pytest.raises((TypeError, ValueError), match=rf"kernel\[\.\.\.\]: .*{message}"):
            kernels[1][2, 32, stream]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_producer_that_cannot_tell_its_stream(record, kernels, failure):
    x, kind = FailingTensor((4,)), BufferError if failure == FAILURES["mute"] else MemoryError
    both_ways(lambda: kernels[1][1, 32](x))
    bound = kernels[1][1, 32].bind(x)
    record.clear()
    FailingTensor.streams[0] = failure
    for launch in (lambda: kernels[1][1, 32](x), bound, lambda: kernels[2][1, 32](1, x), lambda: kernels[1].forall(3)(x)):
        with pytest.raises(kind) as caught:
            launch()
        said = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        if launch is not bound:  # a MemoryError is more than a message: it has a note, which Python 3.10 knows nothing of
            is_said = kind is BufferError or sys.version_info >= (3, 11)
            assert ("the stream on which the tensors' producer works" in said) == is_said
    kernels[1][1, 32, 2](x)
    assert [each.stream for each in record.launches] == [2]
    FailingTensor.streams[0] = 0
    kernels[1][1, 32](x)
    bound()
    assert len(record.launches) == 3


# ---- capture, and the calls of a launch ------------------------------------------------------------------------------
def test_a_launch_on_a_capturing_stream_is_captured(stub, kernels):
    bindings, stream, x = driver().bindings, new_stream(), DeviceTensor((4,))
    DeviceTensor.streams[0] = stream
    both_ways(lambda: kernels[1][1, 32](x))
    bound = kernels[1][1, 32].bind(x)
    with driver().on(0):
        driver().call("cuStreamBeginCapture", bindings.CUstream(stream), bindings.CUstreamCaptureMode(0))
        with traced(stub) as calls:
            kernels[1][1, 32](x)
            kernels[1].forall(100)(x)
            bound()
        launches = stub.launches
        driver().call("cuStreamEndCapture", bindings.CUstream(stream))
    assert len(launches) == 3 and launches[0].graph and len({each.graph for each in launches}) == 1
    assert set(calls) <= {"cuCtxGetCurrent", "cuLaunchKernel", "cuOccupancyMaxPotentialBlockSize", "cuFuncGetAttribute",
                          "cuCtxPushCurrent", "cuCtxPopCurrent"}  # fmt: skip
    kernels[1][1, 32](x)
    assert not stub.launches[-1].graph


STEADY = {
    "general": lambda kernel, x: kernel[1, 32](x=x), "fast": lambda kernel, x: kernel[1, 32](x),
    "given": lambda kernel, x: kernel[1, 32, 2](x), "forall": lambda kernel, x: kernel.forall(1000)(x),
    "large shared": lambda kernel, x: kernel[1, 32, None, 100_000](x),
    "a number": lambda kernel, x: kernel[1, 32](2.0), "bound": None,
}  # fmt: skip


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("device", [0, 1])
def test_a_launch_makes_no_call_but_those_that_it_needs(stub, kernels, name, device):
    x = DeviceTensor((4,), device=device)
    launch = kernels[1][1, 32].bind(x) if name == "bound" else lambda: STEADY[name](kernels[1], x)
    both_ways(launch)
    both_ways(kernels[0][1, 32])
    with driver().on(0), traced(stub) as calls:
        launch()
        kernels[0][1, 32]()
    needed = ["cuCtxGetCurrent", "cuLaunchKernel"]
    pushed = ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]
    assert calls == (needed if device == 0 or name == "a number" else pushed) + needed
